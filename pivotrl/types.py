"""The nouns of the product, frozen: what one stage hands to the next.

Pure records and enums, no behaviour beyond derived properties, no heavy import. Every layer imports this file; it imports none of them.
Suffix legend used with these records everywhere: G = rollouts of one group, K = rollouts of one profile, T = tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

import orjson

from pivotrl.records import quickly_made


class Role(StrEnum):
    """Who speaks in a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Origin(StrEnum):
    """Who produced a message: only `MODEL` assistant turns are actions of the expert and may become candidates."""

    MODEL = "model"
    HARNESS = "harness"
    ENVIRONMENT = "environment"


class Domain(StrEnum):
    """The paper's four domains (arXiv 2603.21383, section on data): each has its own rule for which turns are candidates."""

    CONVERSATIONAL = "conversational"
    TERMINAL = "terminal"
    SWE = "swe"
    SEARCH = "search"


class Outcome(StrEnum):
    """Whether the whole trajectory solved its task, as its source says."""

    SUCCESS = "success"
    FAILURE = "failure"
    UNKNOWN = "unknown"


class ToolOrigin(StrEnum):
    """Where the list of tools came from. Defaults and optional keys of an `INFERRED` schema must not be assumed."""

    ROW = "row"
    FILE = "file"
    INFERRED = "inferred"
    NONE = "none"


class ParseOutcome(StrEnum):
    """What a parser made of an assistant completion."""

    PARSED = "parsed"
    """At least one action of the format was found, and all of them are well-formed."""
    MALFORMED = "malformed"
    """An action was begun but cannot be read (broken JSON, missing name, unclosed tag, arguments that are not an object)."""
    ABSENT = "absent"
    """No action was begun: a plain message."""


class VerdictKind(StrEnum):
    """The three states of a verdict, and the abstention of one verifier of a cascade."""

    OK = "ok"
    INVALID = "invalid"
    INFRA = "infra"
    ABSTAIN = "abstain"
    """No judgement: the next verifier of a cascade is asked. Only inside a cascade (`verifiers/compose.py`), never in a statistic."""


class FinishReason(StrEnum):
    """Why an engine stopped generating."""

    STOP = "stop"
    LENGTH = "length"


class Split(StrEnum):
    """Held-out data is split by task id (or trajectory), never by row: neighbouring turns share their prefix."""

    TRAIN = "train"
    HELD_OUT = "held_out"


@quickly_made
@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of one tool, its arguments kept as the text that was written.

    >>> ToolCall("search", '{"q": "x"}').arguments_object()
    {'q': 'x'}
    >>> ToolCall("search", '{"q": ').arguments_object() is None
    True
    """

    name: str
    arguments: str
    """JSON text of the arguments. Text that is not a JSON object is kept as it is: a malformed action, never ``{}``."""
    id: str | None = None

    def arguments_object(self) -> dict[str, Any] | None:
        """The arguments as a dict, or None where the text is not a JSON object."""
        try:
            value = orjson.loads(self.arguments)
        except (orjson.JSONDecodeError, ValueError):
            return None
        return cast("dict[str, Any]", value) if isinstance(value, dict) else None


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool the agent may call.

    >>> Tool("get_order", "Look up an order", {"type": "object", "properties": {"id": {"type": "string"}}}).name
    'get_order'
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments object."""


@quickly_made
@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation as the agent saw or wrote it.

    >>> Message(Role.USER, "hi").origin
    <Origin.ENVIRONMENT: 'environment'>
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of an assistant message, in order; calls that were written inside the text are moved here by the adapter."""
    reasoning: str | None = None
    tool_call_id: str | None = None
    """For a tool message: the call it answers, where ids are usable; otherwise pairing is by adjacency."""
    name: str | None = None
    """For a tool message: the tool's name, where known."""
    origin: Origin = Origin.ENVIRONMENT
    is_error: bool = False
    """For a tool message: the tool reported an error. SWE candidates are calls without one."""
    parse: ParseOutcome = ParseOutcome.ABSENT
    """For an assistant message: what the adapter's parser made of it."""


@quickly_made
@dataclass(frozen=True, slots=True)
class Action:
    """One whole assistant completion: the expert's or a rollout's.

    >>> Action("Done.", (), None, ParseOutcome.ABSENT).is_message
    True
    """

    content: str
    tool_calls: tuple[ToolCall, ...]
    reasoning: str | None
    parse: ParseOutcome

    @property
    def is_message(self) -> bool:
        """True where the action only speaks."""
        return self.parse is ParseOutcome.ABSENT

    def as_message(self) -> Message:
        """The policy's turn in a conversation that goes on after it."""
        return Message(Role.ASSISTANT, self.content, self.tool_calls, self.reasoning, origin=Origin.MODEL, parse=self.parse)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One expert episode in the product's form, whatever format it came in."""

    id: str
    """Content id of messages and tools (`identity.content_id`)."""
    source_format: str
    source_file: str
    """Path below the ingested root; never absolute."""
    source_index: int
    """Position of the trajectory in its file, from 0."""
    task_id: str
    """The benchmark's or data set's task; the unit of the held-out split. The trajectory's id where the source has none."""
    domain: Domain
    outcome: Outcome
    reward: float | None
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    tool_origin: ToolOrigin
    parallel_tool_calls: bool = True


@dataclass(frozen=True, slots=True)
class State:
    """What a policy sees before it acts: s_t of the paper."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    tool_origin: ToolOrigin


@quickly_made
@dataclass(frozen=True, slots=True)
class Candidate:
    """One assistant turn of one trajectory, Eq. 3. Its state is `trajectory.messages[:message_index]`, not stored again."""

    id: str
    """Content id of (state, tools, expert action)."""
    trajectory_id: str
    task_id: str
    domain: Domain
    message_index: int
    turn_index: int
    """Number of assistant turns before this one in the trajectory, from 0."""
    split: Split
    expert_action: Action


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's answer on one action.

    >>> Verdict.ok(1.0, "same call").reward
    1.0
    """

    kind: VerdictKind
    reward: float
    """In [0, 1]. 0 where the kind is `INVALID`; meaningless (0) where it is `INFRA` or `ABSTAIN`."""
    reason: str
    """A short stable phrase that can be counted, for example ``wrong tool``."""
    detail: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @staticmethod
    def ok(reward: float, reason: str, **detail: Any) -> Verdict:
        """The action was judged: `reward` says how good it is."""
        return Verdict(VerdictKind.OK, reward, reason, detail)

    @staticmethod
    def invalid(reason: str, **detail: Any) -> Verdict:
        """The model's fault: malformed or no action. Reward 0, counted in every statistic."""
        return Verdict(VerdictKind.INVALID, 0.0, reason, detail)

    @staticmethod
    def infra(reason: str, **detail: Any) -> Verdict:
        """Not the model's fault. Leaves mean, std, pass rate and profile."""
        return Verdict(VerdictKind.INFRA, 0.0, reason, detail)

    @staticmethod
    def abstain(reason: str, **detail: Any) -> Verdict:
        """This verifier cannot judge the action; the cascade asks the next one."""
        return Verdict(VerdictKind.ABSTAIN, 0.0, reason, detail)


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts an engine chose for the tokens of a prompt and its completion, the last token left out: no engine computes it.

    Bytes are [tokens, layers, experts per token], row-major, unsigned, little-endian.

    >>> RoutedExperts(1, 2, 1, prompt=bytes([3, 0]), completion=bytes([5, 0])).completion[0]
    5
    """

    num_layers: int
    """Layers with experts, in the model's order; layers without any are not counted."""
    experts_per_token: int
    bytes_per_index: int
    """1 where the model has at most 256 experts, else 2."""
    prompt: bytes
    """Of the prompt's last tokens: of all where the engine knows them. Samples of one prompt share the object where their bytes are equal."""
    completion: bytes
    """Of all tokens of the completion but the last."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine generated for one sample of one prompt."""

    token_ids: tuple[int, ...]
    """Generated tokens, including the stop token where one was sampled."""
    logprobs: tuple[float, ...]
    """Log-probability of each token under the sampling distribution (after temperature), same length as `token_ids`."""
    finish_reason: FinishReason
    policy_version: int
    routed_experts: RoutedExperts | None = None
    """Where the engine returns them (engine.enable_return_routed_experts)."""


@dataclass(frozen=True, slots=True)
class LocalRollout:
    """One sampled action of one state with its verdict: the unit that profiling and training share."""

    candidate_id: str
    sample_index: int
    seed: int
    completion: Completion
    action: Action
    verdict: Verdict

    @property
    def is_truncated(self) -> bool:
        return self.completion.finish_reason is FinishReason.LENGTH


@dataclass(frozen=True, slots=True)
class Profile:
    """The K-sample statistics of one candidate under the frozen reference policy, Eq. 4."""

    candidate_id: str
    prompt_token_ids: tuple[int, ...]
    rewards_K: tuple[float, ...]
    """Rewards of the counted samples, in sample order. Infra verdicts are never in here."""
    successes: int
    """Number of rewards equal to 1."""
    num_truncated: int
    num_malformed: int
    quarantine_reason: str | None
    """Why the row can never be trained on (expert action rejected, prompt too long, infra), or None."""

    @property
    def num_samples(self) -> int:
        return len(self.rewards_K)


@dataclass(frozen=True, slots=True)
class Pivot:
    """A kept candidate, ready to train on: D_adv of Eq. 5."""

    candidate_id: str
    trajectory_id: str
    message_index: int
    turn_index: int
    domain: Domain
    prompt_token_ids: tuple[int, ...]
    expert_action: Action
    num_samples: int
    successes: int
    mean_reward: float


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One action to learn from. A group is the samples that share `group_id`."""

    group_id: str
    """The pivot's candidate id; never the prompt tokens, which two pivots may share."""
    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    advantage: float
    behavior_logprobs_T: tuple[float, ...]
    """Log-probs under the engine that sampled, one per completion token; empty for demonstrations."""
    loss_weight: float = 1.0
    """0 masks the sample's policy-gradient and KL terms while it still counts in the denominator."""
    routed_experts: RoutedExperts | None = None
    """The engine's, for router replay; None where it returned none."""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The samples of one optimizer step and the denominators computed before the first backward."""

    samples: tuple[TrainSample, ...]
    num_actions: int
    """Global number of actions in the step, skipped ones included."""
    num_action_tokens: int
    """Global number of completion tokens in the step, skipped ones included."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One token sequence to imitate, Eq. 1, with the positions that carry loss.

    >>> Demonstration(token_ids=(5, 6, 7), loss_mask=(0, 1, 1)).num_loss_tokens
    2
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    """1 where the token was written by the expert (its end-of-turn token included), 0 for prompts, tools and headers."""

    @property
    def num_loss_tokens(self) -> int:
        return sum(self.loss_mask)
