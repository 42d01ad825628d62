"""Which tensors of a Hugging Face checkpoint are no part of the trained model, by name alone. Imports neither torch nor megatron-core."""

from __future__ import annotations

# Old exports store the rotary frequencies, which the config determines.
_DERIVED_SUFFIX = "rotary_emb.inv_freq"
# Heads that predict further tokens: not built, so a saved checkpoint has them as its source did.
_CARRIED_PREFIX = "mtp."


def is_carried(name: str) -> bool:
    """Whether a checkpoint's tensor is no part of the trained model and goes from the source to a saved checkpoint as it is."""
    return name.startswith(_CARRIED_PREFIX)


def is_derived(name: str) -> bool:
    """Whether a tensor repeats what the config determines."""
    return name.endswith(_DERIVED_SUFFIX)
