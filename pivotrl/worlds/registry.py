"""Worlds by name: the values of `world.type`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pivotrl.worlds import bfcl, order_desk_expert, search_expert, swe_expert, terminal_expert
from pivotrl.worlds.order_desk import OrderDesk
from pivotrl.worlds.protocol import ScriptedWorld
from pivotrl.worlds.search import Search
from pivotrl.worlds.swe import Swe
from pivotrl.worlds.terminal import Terminal

WORLDS: Mapping[str, ScriptedWorld] = MappingProxyType(
    {
        "order_desk": ScriptedWorld(OrderDesk(), order_desk_expert.expert, order_desk_expert.noisy_agent),
        "terminal": ScriptedWorld(Terminal(), terminal_expert.expert, terminal_expert.noisy_agent, terminal_expert.FRAMES),
        "swe": ScriptedWorld(Swe(), swe_expert.expert, swe_expert.noisy_agent),
        "search": ScriptedWorld(Search(), search_expert.expert, search_expert.noisy_agent),
    }
)


PUBLIC_WORLDS: Mapping[str, ScriptedWorld] = MappingProxyType({"bfcl": ScriptedWorld(bfcl.BfclMultiTurn(), bfcl.expert, bfcl.noisy_agent)})
"""Adapters to public worlds; each needs a package that is installed apart."""


def scripted_world(name: str) -> ScriptedWorld:
    """The world that a recipe names."""
    return WORLDS[name] if name in WORLDS else PUBLIC_WORLDS[name]
