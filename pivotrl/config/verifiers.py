"""The recipe's `verifier` section: one form per verifier, every threshold a field with its meaning. Part of the schema; imports pydantic only."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pivotrl.config.judge import JudgeVerifierConfig
from pivotrl.config.section import Fraction01, Section


class ExactVerifierConfig(Section):
    """Eq. 2, strict reward: the action's text equals the expert's (ablation)."""

    type: Literal["exact"]


class ToolCallVerifierConfig(Section):
    """Eq. 6 for conversational tool use: call or message, tool name, arguments by value."""

    type: Literal["tool_call"]
    message: Literal["similarity", "exact", "any"]
    """A message where the expert spoke: text similarity, equality, or any message passes (an exploit; say so in the recipe)."""
    message_similarity: Fraction01 = 0.8
    """Threshold of the normalised token-set similarity (rapidfuzz) for messages, used with `message: similarity`."""
    text_similarity: Fraction01 = 0.8
    """Threshold for free-text argument strings of five words or more; shorter strings compare after case and space folding."""
    ordered_calls: bool = False
    """Whether parallel calls must come in the expert's order."""


# What a cascade may hold: every form but the cascade itself.
type MemberVerifierConfig = Annotated[
    ExactVerifierConfig | ToolCallVerifierConfig | JudgeVerifierConfig,
    Field(discriminator="type"),
]


class CascadeStage(Section):
    """One verifier of a cascade and which of its judgements are decisions."""

    verifier: MemberVerifierConfig
    """Any other form of the `verifier` section."""
    decides: Literal["accept", "reject", "both"]
    """Judgements that stand: reward 1 only, reward 0 only, or every reward. The others go on to the next stage."""
    undecided_reasons: tuple[str, ...] = ()
    """Reasons (as the verifier counts them, for example `different message`) on which this stage goes on although `decides` covers the reward."""


class ComposeVerifierConfig(Section):
    """A cascade, for example exact, then tool_call, then a judge: the first decision wins, an abstention goes on. Malformed actions and
    failures of the infrastructure always decide."""

    type: Literal["compose"]
    stages: Annotated[tuple[CascadeStage, ...], Field(min_length=1)]
    """The cascade, cheapest first."""
    undecided: Literal["zero", "infra"]
    """An action on which no stage decides: reward 0, or an infra verdict, which leaves every statistic."""


type VerifierConfig = Annotated[
    ExactVerifierConfig | ToolCallVerifierConfig | JudgeVerifierConfig | ComposeVerifierConfig,
    Field(discriminator="type"),
]
