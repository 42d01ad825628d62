"""The audit of a verifier: what it does with experts, with mutated experts and with labelled pairs, as one JSON-ready result.

Feed turns and pairs to an `Audit`, then take `result()`. Holds counts, a few examples per mutation and one float per verdict (its time), never
the data. Infra verdicts leave every share, as everywhere. `agreement` says on what a second verifier would judge otherwise. Intervals of
whole mutations resample tasks; those of single tools and of labelled pairs are Wilson's.
"""

from __future__ import annotations

import random
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pivotrl.identity import derive_seed
from pivotrl.pivots.statistics import ClusteredMean, wilson_interval
from pivotrl.types import Action, Verdict, VerdictKind
from pivotrl.verifiers.audit.corruptions import CORRUPTIONS
from pivotrl.verifiers.audit.equivalents import EQUIVALENTS
from pivotrl.verifiers.audit.mutations import Label, Mutation
from pivotrl.verifiers.audit.turns import ExpertTurn
from pivotrl.verifiers.labelled import LabelledPair
from pivotrl.verifiers.protocol import Verifier, take_cost

MUTATIONS: tuple[Mutation, ...] = (*EQUIVALENTS, *CORRUPTIONS)
EXPERT = "expert"
"""Name of the unchanged expert action beside the mutations' names."""
_ORDER = {name: place for place, name in enumerate((EXPERT, *(mutation.name for mutation in MUTATIONS)))}
_MAX_EXAMPLES = 5
_MAX_EXAMPLE_CHARS = 2_000
_MAX_LISTED = 200


@dataclass(slots=True)
class _Tally:
    """Verdicts of one kind of action."""

    accepted: int = 0
    judged: int = 0
    infra: int = 0
    reasons: Counter[str] = field(default_factory=Counter[str])

    def add(self, verdict: Verdict) -> None:
        if verdict.kind is VerdictKind.INFRA:
            self.infra += 1
            return
        self.judged += 1
        self.accepted += is_accepted(verdict)
        self.reasons[verdict.reason] += 1

    def as_dict(self) -> dict[str, Any]:
        share = wilson_interval(self.accepted, self.judged).as_dict()
        return {"accepted": share, "infra": self.infra, "reasons": dict(self.reasons.most_common(8))}


@dataclass(slots=True)
class _Confusion:
    """Verdicts on labelled pairs."""

    true_accepts: int = 0
    false_accepts: int = 0
    true_rejects: int = 0
    false_rejects: int = 0

    def add(self, *, is_equivalent: bool, accepted: bool) -> None:
        if is_equivalent:
            self.true_accepts += accepted
            self.false_rejects += not accepted
        else:
            self.false_accepts += accepted
            self.true_rejects += not accepted

    def as_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("true_accepts", "false_accepts", "true_rejects", "false_rejects")}
        precision = wilson_interval(self.true_accepts, self.true_accepts + self.false_accepts)
        recall = wilson_interval(self.true_accepts, self.true_accepts + self.false_rejects)
        return {**counts, "precision": precision.as_dict(), "recall": recall.as_dict()}


def is_accepted(verdict: Verdict) -> bool:
    """Whether a verdict gives the full reward, which is what counts as a success everywhere."""
    return verdict.kind is VerdictKind.OK and verdict.reward >= 1


def tool_of(action: Action) -> str:
    """What an action is counted under: the tool of its first call, or ``(message)``."""
    return action.tool_calls[0].name if action.tool_calls else "(message)"


class Audit:
    """Counts verdicts of one verifier, and where given of a second one on the same actions."""

    def __init__(self, verifier: Verifier, against: Verifier | None) -> None:
        self._verifier, self._against = verifier, against
        self._expert: dict[str, _Tally] = defaultdict(_Tally)
        self._quarantined: Counter[str] = Counter()
        self._rejected_experts: list[dict[str, Any]] = []
        self._num_rejected_experts = 0
        self._mutated: dict[str, dict[str, _Tally]] = defaultdict(lambda: defaultdict(_Tally))
        self._examples: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._labelled: dict[tuple[str, str], _Confusion] = defaultdict(_Confusion)
        self._judged_by_judge = _Confusion()
        self._wrong_pairs: list[dict[str, Any]] = []
        self._agreement: dict[str, Counter[str]] = defaultdict(Counter)
        self._flips: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        self._wall_s, self._processor_s = array("d"), array("d")
        self._by_task: dict[str, ClusteredMean] = defaultdict(ClusteredMean)
        self._slowest = (0.0, "nothing")
        self._turns: Counter[tuple[str, str]] = Counter()

    def add_turn(self, turn: ExpertTurn) -> None:
        """Judges a turn's expert action and, where that is accepted, every mutation that applies to it."""
        self._turns[turn.source, turn.domain] += 1
        verdict = self._verify(turn, EXPERT, turn.expert)
        if not is_accepted(verdict):
            self._add_rejected(turn, verdict)
            return
        self._count(turn, EXPERT, self._expert, verdict)
        for mutation in MUTATIONS:
            rng = random.Random(derive_seed(0, "audit", turn.id, mutation.name))
            mutated = mutation.apply(turn.state, turn.expert, rng)
            if mutated is None:
                continue
            verdict = self._verify(turn, mutation.name, mutated)
            self._count(turn, mutation.name, self._mutated[mutation.name], verdict)
            is_wrong = verdict.kind is not VerdictKind.INFRA and is_accepted(verdict) != (mutation.label is Label.EQUIVALENT)
            if is_wrong and len(self._examples[mutation.name]) < _MAX_EXAMPLES:
                self._examples[mutation.name].append(_example(turn.id, turn.expert, mutated, verdict))

    def add_pair(self, pair: LabelledPair) -> None:
        """Judges a labelled pair. An infra verdict is no judgement and leaves the counts."""
        turn = ExpertTurn(pair.id, pair.id, "labelled", pair.domain, pair.state, pair.expert, None)
        verdict = self._verify(turn, f"labelled {'equivalent' if pair.is_equivalent else 'different'}", pair.action)
        if verdict.kind is VerdictKind.INFRA:
            return
        accepted = is_accepted(verdict)
        if pair.needs_judge:
            self._judged_by_judge.add(is_equivalent=pair.is_equivalent, accepted=accepted)
            return
        for key in (("all", ""), ("domain", pair.domain), ("tool", tool_of(pair.expert))):
            self._labelled[key].add(is_equivalent=pair.is_equivalent, accepted=accepted)
        if accepted != pair.is_equivalent:
            label = "equivalent" if pair.is_equivalent else "different"
            self._wrong_pairs.append({**_example(pair.id, pair.expert, pair.action, verdict), "label": label, "label_reason": pair.reason})

    def _count(self, turn: ExpertTurn, kind: str, tallies: dict[str, _Tally], verdict: Verdict) -> None:
        tallies[tool_of(turn.expert)].add(verdict)
        if verdict.kind is not VerdictKind.INFRA:
            self._by_task[kind].add(turn.task_id, float(is_accepted(verdict)))

    @property
    def num_judged(self) -> int:
        """Verdicts so far."""
        return len(self._wall_s)

    @property
    def num_unexplained(self) -> int:
        """Expert actions that were not accepted, not quarantined, and are well-formed."""
        return self._num_rejected_experts

    def result(self) -> dict[str, Any]:
        """Everything counted, JSON-ready. Latency is the only part that a second audit of the same data does not repeat."""
        return {
            "turns": [{"source": source, "domain": domain, "n": count} for (source, domain), count in sorted(self._turns.items())],
            "expert": self._expert_result(),
            "mutations": [self._mutation_result(mutation) for mutation in MUTATIONS if mutation.name in self._mutated],
            "tools": self._tool_results(),
            "labelled": self._labelled_result(),
            "agreement": self._agreement_result(),
            "latency": self._latency_result(),
            "judge_cost": dict(take_cost(self._verifier)),
        }

    def _verify(self, turn: ExpertTurn, kind: str, action: Action) -> Verdict:
        started_s, processor_started_s = time.perf_counter(), time.thread_time()
        verdict = self._verifier.verify(turn.state, turn.expert, action)
        processor_s = time.thread_time() - processor_started_s
        self._wall_s.append(time.perf_counter() - started_s)
        self._processor_s.append(processor_s)
        self._slowest = max(self._slowest, (processor_s, f"{turn.id} ({kind})"))
        if self._against is not None:
            other = self._against.verify(turn.state, turn.expert, action)
            if VerdictKind.INFRA not in (verdict.kind, other.kind):
                self._compare(turn, kind, action, (verdict, other))
        return verdict

    def _compare(self, turn: ExpertTurn, kind: str, action: Action, verdicts: tuple[Verdict, Verdict]) -> None:
        ours, theirs = map(is_accepted, verdicts)
        cell = {(True, True): "both", (True, False): "only_this", (False, True): "only_against", (False, False): "neither"}[ours, theirs]
        self._agreement[kind][cell] += 1
        if ours != theirs and len(self._flips[kind, cell]) < _MAX_EXAMPLES:
            example = _example(turn.id, turn.expert, action, verdicts[0])
            self._flips[kind, cell].append({**example, "against_reason": verdicts[1].reason})

    def _add_rejected(self, turn: ExpertTurn, verdict: Verdict) -> None:
        """A turn is quarantined where a profile said so or where no verifier could accept it: its expert action is malformed or none at all."""
        if verdict.kind is VerdictKind.INFRA:
            self._count(turn, EXPERT, self._expert, verdict)
        elif turn.quarantine_reason is not None:
            self._quarantined[turn.quarantine_reason] += 1
        elif verdict.kind is VerdictKind.INVALID:
            self._quarantined[f"expert action is invalid: {verdict.reason}"] += 1
        else:
            self._count(turn, EXPERT, self._expert, verdict)
            self._num_rejected_experts += 1
            if len(self._rejected_experts) < _MAX_LISTED:
                self._rejected_experts.append({**_example(turn.id, turn.expert, turn.expert, verdict), "source": turn.source})

    def _expert_result(self) -> dict[str, Any]:
        return {
            **_total(self._expert.values()).as_dict(),
            "accepted": self._share(EXPERT),
            "quarantined": dict(self._quarantined.most_common()),
            "rejected": self._rejected_experts,
            "num_rejected": self._num_rejected_experts,
        }

    def _mutation_result(self, mutation: Mutation) -> dict[str, Any]:
        tallies = self._mutated[mutation.name]
        by_tool = {tool: tally.as_dict() for tool, tally in sorted(tallies.items(), key=lambda item: -item[1].judged)}
        return {
            "name": mutation.name,
            "label": mutation.label.value,
            "meaning": mutation.meaning,
            **_total(tallies.values()).as_dict(),
            "accepted": self._share(mutation.name),
            "by_tool": by_tool,
            "wrong": self._examples[mutation.name],
        }

    def _share(self, kind: str) -> dict[str, Any]:
        return self._by_task[kind].share_interval(seed=derive_seed(0, "audit interval", kind)).as_dict()

    def _tool_results(self) -> list[dict[str, Any]]:
        labels = {mutation.name: mutation.label for mutation in MUTATIONS}
        by_label: dict[Label, dict[str, list[_Tally]]] = {label: defaultdict(list) for label in Label}
        for name, tallies in self._mutated.items():
            for tool, tally in tallies.items():
                by_label[labels[name]][tool].append(tally)
        return [
            {
                "tool": tool,
                "expert": tally.as_dict()["accepted"],
                **{f"{label.value}s": _total(by_label[label][tool]).as_dict()["accepted"] for label in Label},
            }
            for tool, tally in sorted(self._expert.items(), key=lambda item: (-item[1].judged, item[0]))
        ]

    def _labelled_result(self) -> dict[str, Any] | None:
        if not self._labelled:
            return None
        grouped = {kind: {name: one.as_dict() for (group, name), one in self._labelled.items() if group == kind} for kind in ("domain", "tool")}
        all_pairs = self._labelled["all", ""].as_dict()
        return {"all": all_pairs, "by_domain": grouped["domain"], "by_tool": grouped["tool"], **self._labelled_rest()}

    def _labelled_rest(self) -> Mapping[str, Any]:
        return {"needs_judge": self._judged_by_judge.as_dict(), "wrong": self._wrong_pairs[:_MAX_LISTED], "num_wrong": len(self._wrong_pairs)}

    def _agreement_result(self) -> list[dict[str, Any]] | None:
        if self._against is None:
            return None
        cells = ("both", "only_this", "only_against", "neither")
        return [
            {
                "kind": kind,
                **{cell: counts[cell] for cell in cells},
                "same": wilson_interval(counts["both"] + counts["neither"], counts.total()).as_dict(),
                "flips": [*self._flips[kind, "only_this"], *self._flips[kind, "only_against"]],
            }
            for kind, counts in sorted(self._agreement.items(), key=lambda item: _ORDER.get(item[0], len(_ORDER)))
        ]

    def _latency_result(self) -> dict[str, Any]:
        """Processor time says what a pure verifier costs, however busy the machine; wall time what a judge or a sandbox makes one wait."""
        if not self._wall_s:
            return {"n": 0}
        seconds = {"processor": self._processor_s, "wall": self._wall_s}
        numbers = {
            name: dict(zip(("p50_s", "p99_s", "max_s"), map(float, np.quantile(values, [0.5, 0.99, 1])), strict=True))
            for name, values in seconds.items()
        }
        rate = len(self._processor_s) / max(sum(self._processor_s), 1e-9)
        return {"n": len(self._wall_s), **numbers, "slowest": self._slowest[1], "verdicts_per_s": rate}


def _total(tallies: Any) -> _Tally:
    total = _Tally()
    for tally in tallies:
        total.accepted += tally.accepted
        total.judged += tally.judged
        total.infra += tally.infra
        total.reasons.update(tally.reasons)
    return total


def _example(id_: str, expert: Action, action: Action, verdict: Verdict) -> dict[str, Any]:
    return {"id": id_, "expert": shown(expert), "action": shown(action), "verdict": verdict.kind.value, "reason": verdict.reason}


def shown(action: Action) -> str:
    """An action as one text for a reader, cut where it is long."""
    calls = [f"{call.name} {call.arguments}" for call in action.tool_calls]
    text = "\n".join([*([action.content] if action.content.strip() else []), *calls]) or "(nothing)"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MAX_EXAMPLE_CHARS else f"{text[:_MAX_EXAMPLE_CHARS]} ... ({len(text):,} characters)"
