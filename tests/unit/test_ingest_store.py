"""What is written is read back exactly, by streaming and by id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.identity import canonical_json, content_id
from pivotrl.trajectories import store
from pivotrl.trajectories.encoded import encode_trajectory
from pivotrl.types import Action, Candidate, Domain, Message, Origin, Outcome, ParseOutcome, Role, Split, Tool, ToolCall, ToolOrigin, Trajectory

# Any code point at all: lone surrogates, NUL, U+2028 included.
TEXT = st.text(alphabet=st.characters(exclude_categories=()), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
CALLS = st.builds(ToolCall, TEXT, TEXT, st.none() | TEXT)
MESSAGES = st.builds(
    Message,
    st.sampled_from(Role),
    TEXT,
    st.lists(CALLS, max_size=2).map(tuple),
    st.none() | TEXT,
    st.none() | TEXT,
    st.none() | TEXT,
    st.sampled_from(Origin),
    st.booleans(),
    st.sampled_from(ParseOutcome),
)
ACTIONS = st.builds(Action, TEXT, st.lists(CALLS, max_size=2).map(tuple), st.none() | TEXT, st.sampled_from(ParseOutcome))
TOOLS = st.builds(Tool, TEXT, TEXT, st.dictionaries(st.text(max_size=3), JSON, max_size=2))


@given(st.lists(MESSAGES, max_size=3).map(tuple))
def test_messages_survive(messages: tuple[Message, ...]) -> None:
    assert store.decode_messages(store.encode(messages)) == messages


@given(st.lists(MESSAGES, max_size=3).map(tuple), st.lists(TOOLS, max_size=2).map(tuple))
def test_what_is_encoded_once_is_what_is_stored_and_what_the_id_is_of(messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> None:
    try:
        expected = content_id(messages, tools)
    except TypeError:
        with pytest.raises(TypeError):
            encode_trajectory(messages, tools)
        return
    encoded = encode_trajectory(messages, tools)
    assert encoded.content_id() == expected
    assert encoded.all_messages == store.encode(messages)
    assert encoded.tools == canonical_json(tools)


@given(st.lists(TOOLS, max_size=2).map(tuple))
def test_tools_survive(tools: tuple[Tool, ...]) -> None:
    assert store.decode_tools(store.encode(tools)) == tools


@given(ACTIONS)
def test_actions_survive(action: Action) -> None:
    assert store.decode_action(store.encode(action)) == action


def test_lone_surrogates_are_stored_as_escapes() -> None:
    assert b'"\\ud800\\u00e9"' in store.encode(Message(Role.USER, "\ud800\u00e9"))


def trajectory(number: int, messages: tuple[Message, ...], **changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "id": f"{number:032x}",
        "source_format": "invented",
        "source_file": "a/b.jsonl",
        "source_index": number,
        "task_id": f"task {number} \u2028",
        "domain": Domain.SEARCH,
        "outcome": Outcome.FAILURE,
        "reward": number / 3,
        "messages": messages,
        "tools": (Tool("f", "d", {"type": "object", "properties": {"x": {"enum": [None, 1.5]}}}),),
        "tool_origin": ToolOrigin.FILE,
        "parallel_tool_calls": False,
    }
    return Trajectory(**{**fields, **changes})


def write(folder: Path, trajectories: list[Trajectory], candidates: list[Candidate], rows_per_group: int) -> None:
    columns = store.trajectory_columns(trajectories, [store.encode(one.messages) for one in trajectories])
    actions = [store.encode(candidate.expert_action) for candidate in candidates]
    for name, schema, data in (
        (store.TRAJECTORIES, store.TRAJECTORY_SCHEMA, columns),
        (store.CANDIDATES, store.CANDIDATE_SCHEMA, store.candidate_columns(candidates, actions)),
    ):
        with store.parquet_writer(folder / name, schema) as writer:
            writer.write_table(pa.Table.from_pydict(data, schema), row_group_size=rows_per_group)


def test_by_id_and_in_order_over_many_row_groups(tmp_path: Path) -> None:
    trajectories = [trajectory(number, (Message(Role.USER, f"text {number}"),) * 3, reward=None if number % 2 else 0.5) for number in range(50)]
    write(tmp_path, trajectories, [], rows_per_group=3)
    assert pq.ParquetFile(tmp_path / store.TRAJECTORIES).num_row_groups == 17
    opened = store.TrajectoryStore.open(tmp_path)
    assert len(opened) == 50
    assert list(opened.iterate()) == trajectories
    for one in (trajectories[49], trajectories[0], trajectories[25], trajectories[49]):
        assert opened.get(one.id) == one
    with pytest.raises(KeyError):
        opened.get("nowhere")


@settings(max_examples=20)
@given(st.lists(st.tuples(ACTIONS, st.sampled_from(Split), st.sampled_from(Domain)), max_size=6))
def test_candidates_survive(tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[Action, Split, Domain]]) -> None:
    folder = tmp_path_factory.mktemp("store")
    candidates = [Candidate(f"c{i}", "t", "task", domain, i, i // 2, split, action) for i, (action, split, domain) in enumerate(parts)]
    write(folder, [], candidates, rows_per_group=2)
    opened = store.CandidateStore.open(folder)
    assert len(opened) == len(candidates)
    assert list(opened.iterate()) == candidates
