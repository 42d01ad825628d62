"""The recipe's `verifier` section: one form per verifier, every threshold a field with its meaning. Part of the schema; imports pydantic only."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pivotrl.config.gym_verifiers import GymVerifierConfig
from pivotrl.config.judge import JudgeVerifierConfig
from pivotrl.config.section import Fraction01, Section
from pivotrl.config.shell_effect import ShellEffectVerifierConfig


class ExactVerifierConfig(Section):
    """Eq. 2, strict reward: the action's text equals the expert's (ablation)."""

    type: Literal["exact"]


type ArgumentKind = (
    Literal["plain", "exact", "code", "text", "query", "path", "url", "page", "email", "date", "uuid"]
    | Literal["json", "sql", "regex", "shell", "expression"]
)
type MessageContent = Literal["similarity", "exact", "facts", "any", "abstain"]


class CallComparison(Section):
    """When two sets of calls mean the same (`verifiers/canonical.py`), as far as the recipe decides it."""

    text_similarity: Fraction01 = 0.8
    """Threshold for prose arguments of ten content words or more (rapidfuzz, normalised indel similarity of the sorted words); shorter ones must
    have the same content words."""
    kinds: dict[str, ArgumentKind] = Field(default_factory=dict)
    """What a string argument holds, where neither schema nor name tells: `tool.argument: kind`; `*` stands for every tool."""
    unordered: tuple[str, ...] = ()
    """Lists whose order means nothing, as `tool.argument`, beside those with uniqueItems."""
    ignored_arguments: tuple[str, ...] = ()
    """Arguments that are not compared (added by a harness, or commentary), as `tool.argument`."""
    destructive_words: tuple[str, ...] = ()
    """Words beside the built-in ones (delete, cancel, drop ...) that a similar text must hold exactly if the expert's does; a surplus call of a tool
    with one in its name never passes."""
    ordered_calls: bool = False
    """Whether parallel calls must come in the expert's order."""
    surplus_call_cost: Fraction01 = 1.0
    """Reward lost by each call beyond the expert's, where all of the expert's are matched; 1 fails the action."""


class MessageComparison(Section):
    """When a message says what the expert's message says."""

    message_similarity: Fraction01 = 0.8
    """Threshold for messages of ten content words or more, used with `similarity`."""


class ToolCallVerifierConfig(CallComparison, MessageComparison):
    """Eq. 6 for conversational tool use: call or message, tool name, arguments by value."""

    type: Literal["tool_call"]
    message: MessageContent
    """A message where the expert spoke: text similarity; equality; `facts`, the same numbers, codes and names; `any` message passes (an exploit; say
    so in the recipe); `abstain`, the next stage of a cascade judges."""


class MessageVerifierConfig(MessageComparison):
    """Eq. 6 for turns on which the expert speaks: speak or call, and the content. Abstains where the expert calls, so it stands in a cascade."""

    type: Literal["message"]
    content: MessageContent
    """As `message` of the form tool_call."""


class SearchVerifierConfig(CallComparison):
    """Eq. 6 for search: equivalent queries, the same page opened, evidence gathered before the answer, and the final answer."""

    type: Literal["search"]
    evidence: Literal["action", "page"] = "action"
    """Which calls gather the expert's evidence: only those that do the same, or also those that open the same page by another tool or section."""
    answer: Literal["normalised", "similarity", "abstain"] = "similarity"
    """The final answer: equal after normalising (case, articles, punctuation, numbers by value); or also a similar text; or left to the next stage of
    a cascade where it is not equal."""
    answer_similarity: Fraction01 = 0.8
    """Threshold for answers of ten content words or more, used with `similarity`."""


class ShellRules(Section):
    """How shell commands are compared: as syntax trees, never executed."""

    chains: Literal["steps", "strict"] = "steps"
    """`steps`: `cd x && make` is `cd x` and then `make`, where the first is only a step (it answers no question, as grep or test do) and the second
    destroys nothing; `strict`: `&&` never equals a line break."""
    read_order: Literal["strict", "any"] = "strict"
    """`any`: neighbouring commands that only look (ls, cat, grep; not cd) may come in another order."""
    working_directory: str | None = None
    """Absolute directory in which every command starts in a shell of its own (mini-swe-agent: /testbed): `cd /testbed && make` is then `make`.
    None where the shell goes on from turn to turn."""
    tools: tuple[str, ...] = ("bash", "execute_bash", "shell", "local_shell", "run_command", "run_shell_command", "execute_command", "terminal")
    """Tools whose `command` (or `cmd`, `script`) is shell text."""
    ignored_arguments: tuple[str, ...] = ("*.security_risk", "*.timeout")
    """Arguments that the harness adds or that only say how long to wait, as `tool.argument`; `*` stands for every tool."""


class SweVerifierConfig(Section):
    """Eq. 6 for software engineering turns."""

    type: Literal["swe"]
    granularity: Literal["name", "target", "arguments"]
    """What must agree with the expert: the tool's name (the paper's rule), its target (file, command, symbol), or all arguments by what they do."""
    shell: ShellRules = ShellRules()
    """How shell commands are compared."""


class TerminalVerifierConfig(Section):
    """Eq. 6 for terminal turns (Terminus-1 and Terminus-2): the same commands as shell syntax trees, the same claim of completion."""

    type: Literal["terminal"]
    shell: ShellRules = ShellRules()
    """How shell commands are compared."""


# What a cascade may hold: every form but the cascade itself.
type MemberVerifierConfig = Annotated[
    ExactVerifierConfig
    | ToolCallVerifierConfig
    | SweVerifierConfig
    | TerminalVerifierConfig
    | MessageVerifierConfig
    | SearchVerifierConfig
    | JudgeVerifierConfig
    | GymVerifierConfig
    | ShellEffectVerifierConfig,
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


type TrueVerifierConfig = Annotated[MemberVerifierConfig | ComposeVerifierConfig, Field(discriminator="type")]


class FlippedVerifierConfig(Section):
    """Verifier noise, to measure what it costs: another verifier's judgements turned into their opposite, always the same ones for the same action in
    the same state. `eval` is told the true verifier by `eval.verifier`."""

    type: Literal["flipped"]
    probability: Fraction01
    """Share of (state, action) pairs whose judgement is flipped: reward 1 - r in place of r. `invalid` and `infra` stay as they are."""
    verifier: TrueVerifierConfig
    """Any other form of the `verifier` section."""
    seed: int
    """Decides which pairs; `${seed}` for other ones in every run."""


type VerifierConfig = Annotated[MemberVerifierConfig | ComposeVerifierConfig | FlippedVerifierConfig, Field(discriminator="type")]
