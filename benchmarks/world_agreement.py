"""Prints, for each world, how often its verifier agrees with the world on one action, and where it does not.

python benchmarks/world_agreement.py [NUM_TASKS]
"""

from __future__ import annotations

import sys

from pivotrl.config.verifiers import SearchVerifierConfig, SweVerifierConfig, TerminalVerifierConfig, ToolCallVerifierConfig
from pivotrl.verifiers.search import SearchVerifier
from pivotrl.verifiers.swe import SweVerifier
from pivotrl.verifiers.terminal import TerminalVerifier
from pivotrl.verifiers.tool_call import ToolCallVerifier
from pivotrl.worlds.agreement import measure_agreement
from pivotrl.worlds.protocol import TaskSplit
from pivotrl.worlds.registry import WORLDS

VERIFIERS = {
    "order_desk": ToolCallVerifier(ToolCallVerifierConfig(type="tool_call", message="similarity", message_similarity=0.7)),
    "terminal": TerminalVerifier(TerminalVerifierConfig(type="terminal")),
    "swe": SweVerifier(SweVerifierConfig(type="swe", granularity="arguments")),
    "search": SearchVerifier(SearchVerifierConfig(type="search")),
}
_NUM_SHOWN = 12


def main() -> None:
    num_tasks = int(sys.argv[1]) if len(sys.argv) > 1 else 36
    for name, scripted in WORLDS.items():
        tasks = scripted.world.tasks(TaskSplit.TRAIN, num_tasks=num_tasks, seed=1)
        found = measure_agreement(scripted, VERIFIERS[name], tasks, seed=1)
        print(f"{name}: {found.num_cases} actions, {found.frac:.4f} agree; {dict(found.counts)} by (accepted, same consequence)")
        for title, examples in (("rejected", found.rejected_though_same), ("accepted", found.accepted_though_different)):
            print(*(f"  {title}: {example}" for example in examples[:_NUM_SHOWN]), sep="\n")


if __name__ == "__main__":
    main()
