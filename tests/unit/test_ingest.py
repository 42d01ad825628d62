"""The whole stage on invented files: everything present is kept, dropped or quarantined, with a reason, and nothing stops the run."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

import orjson
import pytest
from fakes.ingest_run import run
from rich.console import Console

from pivotrl.config.schema import IngestConfig
from pivotrl.errors import UserError
from pivotrl.pivots.candidates import split_of, state_of
from pivotrl.rundir import Stage
from pivotrl.trajectories import registry
from pivotrl.trajectories.audit import audit_table, reason_class
from pivotrl.trajectories.ingest import ingest_inputs, run_ingest
from pivotrl.trajectories.source import Converted, Probe, RawRow, RowDropped, RowQuarantined
from pivotrl.trajectories.store import CandidateStore, TrajectoryStore
from pivotrl.types import Domain, Outcome, Split, ToolOrigin


def chat(number: int, **extra: Any) -> dict[str, Any]:
    """An invented conversation with one call and one text turn; numbers make every one different in every sentence."""
    words = " ".join(f"part{number * 17 + i}" for i in range(12))
    call = {"id": f"c{number}", "type": "function", "function": {"name": "look_up", "arguments": orjson.dumps({"part": number}).decode()}}
    messages = [
        {"role": "system", "content": "You keep the parts of the shop."},
        {"role": "user", "content": f"Where is {words}?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": f"shelf {number} of {words}"},
        {"role": "assistant", "content": f"Part {number} lies on shelf {number}."},
    ]
    return {"messages": messages, **extra}


def lines(*rows: Any) -> bytes:
    return b"".join(row if isinstance(row, bytes) else orjson.dumps(row) + b"\n" for row in rows)


def counts(audit: dict[str, Any], name: str = "openai_chat") -> dict[str, int]:
    return audit["formats"][name]["trajectories"]


def test_kept_rows_come_back_with_candidates_states_and_splits(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_bytes(lines(*(chat(number, task_id=f"t{number % 3}", reward=1.0) for number in range(9))))
    audit = run(tmp_path / "data", tmp_path, held_out_frac=0.4)
    assert counts(audit) == {"present": 9, "kept": 9, "dropped": 0, "quarantined": 0}
    entry = audit["formats"]["openai_chat"]
    assert (entry["assistant_turns"], entry["kept_assistant_turns"], entry["harness_turns"]) == (18, 18, 0)
    assert entry["outcomes"] == {"success": 9}
    assert entry["tool_origins"] == {"inferred": 9}
    trajectories, candidates = TrajectoryStore.open(tmp_path / "ingest"), list(CandidateStore.open(tmp_path / "ingest").iterate())
    assert len(trajectories) == 9
    assert len({candidate.id for candidate in candidates}) == len(candidates) == 18
    for candidate in candidates:
        source = trajectories.get(candidate.trajectory_id)
        assert source.source_file == "rows.jsonl"
        assert candidate.split is split_of(source.task_id, held_out_frac=0.4, run_seed=5)
        assert candidate.expert_action.tool_calls == source.messages[candidate.message_index].tool_calls
        assert state_of(source, candidate).tool_origin is ToolOrigin.INFERRED
    by_task = {candidate.task_id: {c.split for c in candidates if c.task_id == candidate.task_id} for candidate in candidates}
    assert all(len(splits) == 1 for splits in by_task.values())
    assert entry["candidates"].get("held_out", 0) == sum(candidate.split is Split.HELD_OUT for candidate in candidates)
    assert Stage.is_done(tmp_path, "ingest")


def test_broken_rows_and_files_never_stop_the_run(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    good = [chat(number) for number in range(4)]
    (data / "a.jsonl").write_bytes(
        b"\xef\xbb\xbf"
        + lines(good[0], b'{"messages": [\r\n', b'{"messages": "\xff"}\n', b'{"messages": "\x00"}\n', b'{"messages": ' + b"[" * 100_000 + b"\n")
        + lines({"messages": 3}, [1], good[1])
    )
    (data / "b.json").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    (data / "c.jsonl").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    (data / "d.jsonl.gz").write_bytes(gzip.compress(lines(good[2], *(chat(100 + n) for n in range(200))))[:-200])
    (data / "e.json").write_bytes(b"")
    (data / "f.json").write_bytes(b'{"some": "other schema"}')
    (data / "g.json").mkdir()
    (data / "g.json" / "h.json").write_bytes(orjson.dumps([good[3]]))
    (data / "loop").symlink_to(data)
    audit = run(data, tmp_path)
    entry = audit["formats"]["openai_chat"]
    # Two rows of a.jsonl, h.json, and what was whole of the truncated gzip; its break is one more row.
    num_before_break = counts(audit)["kept"] - 3
    assert 100 < num_before_break < 201
    assert entry["quarantined"] == {
        "invalid JSON": 1,
        "not UTF-8": 1,
        "NUL byte": 1,
        "nested deeper than 1,024 levels": 1,
        "wrong schema: a row is not an object with messages": 1,
        "truncated compressed file": 1,
    }
    assert entry["dropped"] == {"no messages": 1}
    reasons = {(row["file"], row["line"]): row["reason"] for row in audit["quarantine"]}
    assert reasons["a.jsonl", 3] == "not UTF-8: byte 14"
    assert reasons["b.json", None] == "binary file"
    assert reasons["c.jsonl", None].startswith("git-LFS pointer")
    assert reasons["e.json", None] == "empty file"
    assert reasons["f.json", None].startswith("unknown format: none of 15 formats claims it, first keys 'some'")
    assert counts(audit, "unknown") == {"present": 4, "kept": 0, "dropped": 0, "quarantined": 4}
    assert audit["skipped"] == {"directory reached twice through a link": 1}
    assert not any(str(tmp_path) in reason for reason in reasons.values())


def test_a_long_line_and_line_separators_are_read(tmp_path: Path) -> None:
    long, separated = chat(1), chat(2)
    long["messages"][3]["content"] = "x" * 50_000_000
    separated["messages"][4]["content"] = "one\u2028two"
    (tmp_path / "rows.jsonl").write_bytes(lines(long, separated))
    audit = run(tmp_path / "rows.jsonl", tmp_path)
    assert counts(audit)["kept"] == 2
    stored = list(TrajectoryStore.open(tmp_path / "ingest").iterate())
    assert len(stored[0].messages[3].content) == 50_000_000
    assert stored[1].messages[4].content == "one\u2028two"


def test_lone_surrogates_are_repaired_and_counted(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines(chat(1)).replace(b"Part 1 lies", b"Part \\ud83d lies"))
    audit = run(tmp_path / "rows.jsonl", tmp_path)
    assert audit["formats"]["openai_chat"]["repairs"] == {"lone surrogate replaced by U+FFFD": 1}


def test_duplicates_by_content_and_nearly(tmp_path: Path) -> None:
    near, other_outcome = chat(1), chat(1, success=False)
    near["messages"][1]["content"] += " Thanks."
    rows = [chat(1), chat(1), near, other_outcome, chat(2)]
    (tmp_path / "rows.jsonl").write_bytes(lines(*rows))
    audit = run(tmp_path / "rows.jsonl", tmp_path / "near", near_duplicate_threshold=0.6)
    assert audit["formats"]["openai_chat"]["dropped"] == {"exact duplicate": 2, "near duplicate": 1}
    audit = run(tmp_path / "rows.jsonl", tmp_path / "exact", near_duplicate_threshold=1.0)
    assert audit["formats"]["openai_chat"]["dropped"] == {"exact duplicate": 2}


def test_a_failed_near_copy_does_not_push_out_a_success(tmp_path: Path) -> None:
    failed, solved = chat(1, success=False), chat(1, success=True)
    solved["messages"][4]["content"] += " Done."
    (tmp_path / "rows.jsonl").write_bytes(lines(failed, solved))
    assert counts(run(tmp_path / "rows.jsonl", tmp_path, near_duplicate_threshold=0.5))["kept"] == 2


def test_shared_prefixes_give_one_candidate_each(tmp_path: Path) -> None:
    longer = chat(1)
    longer["messages"] = [*longer["messages"], {"role": "user", "content": "and its weight? " * 30}, {"role": "assistant", "content": "Two pounds."}]
    (tmp_path / "rows.jsonl").write_bytes(lines(chat(1), longer))
    audit = run(tmp_path / "rows.jsonl", tmp_path)
    entry = audit["formats"]["openai_chat"]
    assert entry["turns_excluded"] == {"duplicate candidate": 2}
    assert sum(entry["candidates"].values()) == 3


def test_outcomes_are_counted_and_chosen(tmp_path: Path) -> None:
    rows = [chat(1, success=True), chat(2, success=False), chat(3)]
    (tmp_path / "rows.jsonl").write_bytes(lines(*rows))
    audit = run(tmp_path / "rows.jsonl", tmp_path / "default")
    entry = audit["formats"]["openai_chat"]
    assert entry["outcomes"] == {"failure": 1, "success": 1, "unknown": 1}
    assert entry["turns_excluded"] == {"outcome failure": 2}
    assert sum(entry["candidates"].values()) == 4
    audit = run(tmp_path / "rows.jsonl", tmp_path / "failures", outcomes=("failure",))
    stored = TrajectoryStore.open(tmp_path / "failures" / "ingest")
    kept = list(CandidateStore.open(tmp_path / "failures" / "ingest").iterate())
    assert {stored.get(candidate.trajectory_id).outcome for candidate in kept} == {Outcome.FAILURE}


def test_domain_override_changes_the_rule(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines(chat(1)))
    audit = run(tmp_path / "rows.jsonl", tmp_path, domain=Domain.SWE)
    entry = audit["formats"]["openai_chat"]
    assert entry["domains"] == {"swe": 1}
    assert entry["turns_excluded"] == {"no tool call": 1}


def test_secrets_are_redacted_before_anything_is_hashed_or_written(tmp_path: Path) -> None:
    token = "gh" + "p_" + "a1B2" * 9
    row = chat(1)
    row["messages"][1]["content"] += f" use {token}"
    row["messages"][2]["tool_calls"][0]["function"]["arguments"] = orjson.dumps({"part": token}).decode()
    (tmp_path / "rows.jsonl").write_bytes(lines(row))
    audit = run(tmp_path / "rows.jsonl", tmp_path)
    assert audit["formats"]["openai_chat"]["secrets"] == {"github_token": 2}
    (stored,) = TrajectoryStore.open(tmp_path / "ingest").iterate()
    assert stored.messages[2].tool_calls[0].arguments_object() == {"part": "[REDACTED:github_token]"}
    assert stored.task_id == stored.id
    for path in (tmp_path / "ingest").iterdir():
        assert token.encode() not in path.read_bytes()


def test_tools_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines(chat(1)))
    (tmp_path / "tools.json").write_bytes(orjson.dumps([{"name": "look_up", "description": "d", "parameters": {"type": "object", "properties": {}}}]))
    audit = run(tmp_path / "rows.jsonl", tmp_path, tools=str(tmp_path / "tools.json"))
    assert audit["formats"]["openai_chat"]["tool_origins"] == {"file": 1}


def test_decontamination_drops_and_counts(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines(chat(1, task_id="a"), chat(2, task_id="b"), chat(3, task_id="c")))
    (tmp_path / "list.json").write_bytes(orjson.dumps({"task_ids": ["a"], "ngrams": ["shelf 2"]}))
    audit = run(tmp_path / "rows.jsonl", tmp_path, decontamination=str(tmp_path / "list.json"))
    assert audit["formats"]["openai_chat"]["dropped"] == {"decontamination: task id": 1, "decontamination: n-gram": 1}


def test_stops_after_as_many_as_asked_for(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("a", "b", "c"):
        (data / f"{name}.jsonl").write_bytes(lines(*(chat(ord(name) * 10 + number) for number in range(3))))
    audit = run(data, tmp_path, max_trajectories=4)
    assert counts(audit) == {"present": 4, "kept": 4, "dropped": 0, "quarantined": 0}


def test_the_quarantine_list_is_bounded_and_says_how_many_more(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines(chat(1), *([b"{broken\n"] * 70)))
    audit = run(tmp_path / "rows.jsonl", tmp_path)
    assert (len(audit["quarantine"]), audit["num_quarantined_not_listed"]) == (50, 20)
    assert [row["line"] for row in audit["quarantine"]][:2] == [2, 3]


def test_the_table_shows_counts_and_reasons(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines(chat(1), b"{broken\n", chat(1)))
    console = Console(width=200, file=io.StringIO())
    console.print(audit_table(run(tmp_path / "rows.jsonl", tmp_path)))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for shown in ("openai_chat", "exact duplicate", "invalid JSON", "quarantined"):
        assert shown in text


class TestUserErrors:
    def check(self, match: str, *paths: Path, **changes: Any) -> None:
        config = IngestConfig(**{"paths": (), "held_out_frac": 0.0, **changes})
        out = paths[0].parent / "out"
        with pytest.raises(UserError, match=match):
            run_ingest(Stage.open(out, "ingest", config={}, inputs=ingest_inputs(config, paths), seed=0), config, paths=paths, run_seed=0)
        assert not Stage.is_done(out, "ingest")

    def test_missing_path(self, tmp_path: Path) -> None:
        self.check(r"nowhere does not exist; .*; correct the path", tmp_path / "nowhere")

    def test_empty_directory(self, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        self.check("nothing was kept of 0 files below .*: there is no file", tmp_path / "data")

    def test_nothing_kept_says_why_and_leaves_the_directory_free(self, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_bytes(b'{"a": 1}\n')
        self.check(r"nothing was kept of 1 files below .*: unknown format \(1\)", tmp_path / "rows.jsonl")
        (tmp_path / "rows.jsonl").write_bytes(lines(chat(1)))
        config = IngestConfig(paths=(), held_out_frac=0.0)
        stage = Stage.open(tmp_path / "out", "ingest", config={"other": 1}, inputs={}, seed=0)
        assert counts(run_ingest(stage, config, paths=[tmp_path / "rows.jsonl"], run_seed=0))["kept"] == 1

    def test_unknown_format_suggests_one(self, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_bytes(lines(chat(1)))
        self.check("did you mean 'openai_chat'", tmp_path / "rows.jsonl", format="openai_chats")
        assert not (tmp_path / "out").exists()

    def test_missing_tools_and_lists(self, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_bytes(lines(chat(1)))
        self.check("tools file .* does not exist", tmp_path / "rows.jsonl", tools=str(tmp_path / "tools.json"))
        self.check("decontamination list .* does not exist", tmp_path / "rows.jsonl", decontamination=str(tmp_path / "list.json"))


class FakeAdapter:
    """Claims what starts with its key."""

    def __init__(self, name: str, key: bytes) -> None:
        self.name, self._key = name, key

    def sniff(self, probe: Probe) -> bool:
        if self._key == b"raise":
            raise TypeError("hostile")
        return probe.head.startswith(b'{"' + self._key)

    group = rows = convert = lambda self, *args: iter(())


class TestDetection:
    def probe(self, data: bytes = b'{"ab": 1}') -> Probe:
        return Probe(name="x.json", suffix=".json", head=data, first_row=orjson.loads(data))

    def test_exactly_one(self) -> None:
        one, two, failing = FakeAdapter("one", b"ab"), FakeAdapter("two", b"c"), FakeAdapter("failing", b"raise")
        assert registry.detect(self.probe(), [failing, two, one]) is one
        with pytest.raises(RowQuarantined, match=r"x\.json: ambiguous format: one and three both claim it"):
            registry.detect(self.probe(), [one, two, FakeAdapter("three", b"a")])
        with pytest.raises(
            RowQuarantined, match=r"unknown format: none of 2 formats claims it, first keys 'ab'; failed to look: failing \(TypeError\)"
        ):
            registry.detect(self.probe(), [two, failing])

    def test_every_registered_format_loads_under_its_own_name(self) -> None:
        assert tuple(adapter.name for adapter in registry.all_adapters()) == registry.FORMATS


def test_an_adapter_that_fails_loses_its_row_or_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = registry.adapter("openai_chat")
    convert, rows = adapter.convert, adapter.rows

    def failing_convert(row: RawRow, tools: Any) -> Converted:
        if row.index == 1:
            raise KeyError("a bug")
        if row.index == 2:
            raise RowDropped("nothing to learn")
        return convert(row, tools)

    def failing_rows(unit: Any) -> Any:
        yield from rows(unit)
        if unit.name == "a.jsonl":
            raise RecursionError("too deep")

    monkeypatch.setattr(adapter, "convert", failing_convert)
    monkeypatch.setattr(adapter, "rows", failing_rows)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_bytes(lines(*(chat(number) for number in range(3))))
    (tmp_path / "data" / "b.jsonl").write_bytes(lines(chat(7)))
    audit = run(tmp_path / "data", tmp_path)
    assert counts(audit) == {"present": 5, "kept": 2, "dropped": 1, "quarantined": 2}
    assert [row["reason"] for row in audit["quarantine"]] == ["adapter failed: KeyError: 'a bug'", "adapter failed: RecursionError: too deep"]


def test_reasons_are_counted_by_class() -> None:
    assert reason_class("adapter failed: KeyError: 'x'") == "adapter failed"
    assert reason_class("truncated compressed file") == "truncated compressed file"
