"""Settings of the theory's diagnostics in the `eval` stage (docs/theory.md)."""

from __future__ import annotations

from pivotrl.config.section import PositiveInt, Section


class DiagnosticsConfig(Section):
    """Expected signal of the pivots, order preservation on probe prompts, KL to pi_0 out of domain: two more forward passes over a few prompts.
    `eval` on one process needs a model that fits one device; under torchrun it scores in the layout of training."""

    num_probes: PositiveInt = 32
    """Held-out candidates, chosen by hash of their id, whose profiled actions are scored under pi_0 and under the trained policy."""
    num_prompts: PositiveInt = 32
    """Out-of-domain prompts (questions of the world's skills) that the trained policy answers; none without a world."""
    num_answers: PositiveInt = 4
    """Answers sampled per prompt."""
