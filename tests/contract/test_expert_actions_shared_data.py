"""Every expert action of the shared trajectories through text and verifier: what a format can express reads back equal and is accepted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pivotrl.actions.protocol import InexpressibleAction, same_action
from pivotrl.actions.registry import action_format
from pivotrl.config.schema import IngestConfig
from pivotrl.config.verifiers import MessageContent, MessageVerifierConfig, SearchVerifierConfig, ToolCallVerifierConfig
from pivotrl.pivots.candidates import state_of
from pivotrl.rundir import Stage
from pivotrl.trajectories.ingest import run_ingest
from pivotrl.trajectories.store import CandidateStore, TrajectoryStore
from pivotrl.types import Candidate, Domain, ParseOutcome, State
from pivotrl.verifiers.exact import ExactVerifier
from pivotrl.verifiers.message import MessageVerifier
from pivotrl.verifiers.search import SearchVerifier
from pivotrl.verifiers.tool_call import ToolCallVerifier


@pytest.fixture(scope="module")
def candidates(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, State, Candidate]]:
    """(source format, state, candidate) of everything the shared data gives."""
    config = IngestConfig(paths=(), held_out_frac=0.1, near_duplicate_threshold=1.0, outcomes=("success", "failure", "unknown"))
    stage = Stage.open(tmp_path_factory.mktemp("run"), "ingest", config={}, inputs={}, seed=0)
    run_ingest(stage, config, paths=[shared_data], run_seed=0)
    trajectories = {trajectory.id: trajectory for trajectory in TrajectoryStore.open(stage.path).iterate()}
    return [
        (trajectories[one.trajectory_id].source_format, state_of(trajectories[one.trajectory_id], one), one)
        for one in CandidateStore.open(stage.path).iterate()
    ]


def _read_back(candidates: list[tuple[str, State, Candidate]], name: str) -> Counter[tuple[str, str]]:
    """Number of candidates by source format and ``expressed`` or the format's reason; checks the property on the way."""
    counts: Counter[tuple[str, str]] = Counter()
    chosen = action_format(name)
    verifier = ToolCallVerifier(ToolCallVerifierConfig(type="tool_call", message="similarity"))
    for source, state, candidate in candidates:
        expert = candidate.expert_action
        try:
            text = chosen.render(expert, state.tools)
        except InexpressibleAction as refusal:
            counts[source, str(refusal)] += 1
            continue
        read = chosen.parse(text, state.tools)
        assert same_action(read, expert)
        accepted = verifier.verify(state, expert, read)
        counts[source, "expressed" if accepted.reward == 1 else f"rejected: {accepted.reason}"] += 1
        if name in ("hermes", "terminus2"):
            assert read.tool_calls == tuple(type(call)(call.name, call.arguments) for call in expert.tool_calls)
            assert ExactVerifier().verify(state, expert, read).reward == accepted.reward
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_call_formats_express_the_experts_of_every_source(candidates: list[tuple[str, State, Candidate]], name: str) -> None:
    """The only loss allowed is what is malformed or empty in the source itself."""
    counts = _read_back(candidates, name)
    sources = {source for source, _ in counts}
    assert len(sources) >= 13
    assert sum(counts.values()) == len(candidates) > 5000
    lost = {key: count for key, count in counts.items() if key[1] != "expressed"}
    assert {reason for _, reason in lost} <= {"malformed action", "rejected: no action"}, lost
    assert sum(lost.values()) < 0.01 * len(candidates)


@pytest.mark.slow
def test_experts_are_accepted_by_the_verifiers_of_their_turns(candidates: list[tuple[str, State, Candidate]]) -> None:
    """Search experts by `search`, those that speak by `message` with every content; nothing but an empty turn is refused."""
    search = SearchVerifier(SearchVerifierConfig(type="search"))
    contents: tuple[MessageContent, ...] = ("similarity", "exact", "facts", "any")
    messages = [MessageVerifier(MessageVerifierConfig(type="message", content=content)) for content in contents]
    judged: Counter[tuple[str, str, float]] = Counter()
    for source, state, candidate in candidates:
        expert = candidate.expert_action
        if expert.parse is ParseOutcome.MALFORMED or not (expert.tool_calls or expert.content.strip()):
            continue
        chosen = [search] if candidate.domain is Domain.SEARCH else [] if expert.tool_calls else messages
        for verifier in chosen:
            judged[source, type(verifier).__name__, verifier.verify(state, expert, expert).reward] += 1
    assert {reward for _, _, reward in judged} == {1.0}, judged
    assert judged["verifiers", "SearchVerifier", 1.0] > 600
    assert judged["tau_bench", "MessageVerifier", 1.0] > 4000


@pytest.mark.slow
def test_terminus_expresses_its_own_experts_and_names_why_not_others(candidates: list[tuple[str, State, Candidate]]) -> None:
    counts = _read_back(candidates, "terminus2")
    own = {reason: count for (source, reason), count in counts.items() if source == "terminus2"}
    assert own["expressed"] > 350
    assert set(own) <= {"expressed", "malformed action"}
    assert counts["tau_bench", "not a Terminus-2 action"] > 500


@pytest.mark.slow
def test_plain_text_expresses_messages_only(candidates: list[tuple[str, State, Candidate]]) -> None:
    counts = _read_back(candidates, "plain")
    assert counts["tau2", "expressed"] > 500
    assert counts["mini_swe_agent", "calls in plain text"] > 500
