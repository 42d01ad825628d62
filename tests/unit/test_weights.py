"""Handing weights over: what is refused, what is rounded, what the report says."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from fakes.tiny_llama import PAD, STOP, named_weights, save_tiny_llama, tiny_llama

from pivotrl.config.engines import TransformersEngineConfig
from pivotrl.rollouts.scripted import ScriptedEngine
from pivotrl.rollouts.transformers_engine import TransformersEngine
from pivotrl.weights.manifest import Manifest, SentStream, TensorSpec, WeightCensus, check_stream, loses_precision, tensor_record
from pivotrl.weights.push import push

CENSUS = WeightCensus({"a": TensorSpec((2,), torch.float32), "b": TensorSpec((3, 1), torch.bfloat16)}, {"head": "a"})
GOOD = [("a", torch.tensor([1.0, 2.0])), ("b", torch.zeros(3, 1, dtype=torch.bfloat16))]


def engine_of(tmp_path: Path, *, dtype: str = "float32", tied: bool = True) -> TransformersEngine:
    config = TransformersEngineConfig(type="transformers", batch_size=4, dtype=dtype)  # type: ignore[arg-type]
    return TransformersEngine.load(save_tiny_llama(tmp_path, tied=tied), config, stop_token_ids=(STOP,), pad_token_id=PAD)


def test_a_record_digests_the_row_major_bytes_of_a_tensor() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3).t()
    record = tensor_record("w", tensor)
    expected = blake3(b"".join(torch.tensor(v).numpy().tobytes() for v in (0.0, 3.0, 1.0, 4.0, 2.0, 5.0))).hexdigest(length=16)
    assert (record.shape, record.dtype, record.num_bytes, record.digest) == ((3, 2), "float32", 24, expected)


def test_a_manifest_has_one_digest_whatever_the_order_and_another_for_other_weights() -> None:
    records = [tensor_record(name, tensor) for name, tensor in GOOD]
    assert Manifest(tuple(records)).digest == Manifest(tuple(reversed(records))).digest
    other = [tensor_record("a", torch.tensor([1.0, 2.5])), records[1]]
    renamed = [tensor_record("c", GOOD[0][1]), records[1]]
    assert len({Manifest(tuple(r)).digest for r in (records, other, renamed, records[:1])}) == 4
    assert Manifest(tuple(records)).num_bytes == 8 + 6


@pytest.mark.parametrize(
    ("source", "target", "loses"),
    [
        (torch.float32, torch.float32, False),
        (torch.bfloat16, torch.float32, False),
        (torch.float32, torch.bfloat16, True),
        (torch.float16, torch.bfloat16, True),
        (torch.float64, torch.float32, True),
    ],
)
def test_precision_is_lost_exactly_where_some_value_has_no_equal(source: torch.dtype, target: torch.dtype, *, loses: bool) -> None:
    assert loses_precision(source, target) is loses
    largest_step = 1 + torch.finfo(source).eps
    fits = torch.tensor(largest_step, dtype=source).to(target).to(source).item() == torch.tensor(largest_step, dtype=source).item()
    assert fits or loses


def test_a_complete_stream_passes_without_its_tied_name() -> None:
    for extra in ([], [("head", GOOD[0][1].clone())]):
        assert [name for name, _ in check_stream([*GOOD, *extra], CENSUS)] == ["a", "b"]
        assert [name for name, _ in check_stream([*extra, *GOOD], CENSUS)] == ["a", "b"]


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([*GOOD, GOOD[0]], "'a' was sent twice"),
        ([*GOOD, ("c", torch.ones(1))], "unknown tensor 'c'"),
        (GOOD[:1], r"missing from the new weights \(1 of 2\): b"),
        ([GOOD[0], ("b", torch.zeros(3, dtype=torch.bfloat16))], r"'b' has shape \(3,\); the engine's model has \(3, 1\)"),
        ([GOOD[0], ("b", torch.zeros(3, 1))], "'b' is torch.float32; the engine stores torch.bfloat16"),
        ([("head", torch.zeros(2)), *GOOD], "'a' and 'head' differ"),
        ([*GOOD, ("head", torch.zeros(2))], "'head' and 'a' differ"),
        ([("head", torch.zeros(2)), GOOD[1]], r"missing .*: a"),
        ([*GOOD, ("head", torch.zeros(5))], r"'head' has shape \(5,\)"),
    ],
)
def test_a_stream_that_does_not_fit_the_census_is_refused_by_name(sent: list[tuple[str, torch.Tensor]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(check_stream(sent, CENSUS))


def test_a_sent_stream_records_what_has_passed_and_nothing_else() -> None:
    stream = SentStream(iter(GOOD))
    assert next(stream) == GOOD[0]
    assert stream.records == {"a": tensor_record(*GOOD[0])}
    assert [name for name, _ in stream] == ["b"]
    assert list(stream.records) == ["a", "b"]


def test_push_reports_what_arrived(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    weights = named_weights(tiny_llama(seed=1))
    report = push(weights, engine, 3)
    assert engine.policy_version == report.version == 3
    assert (report.num_tensors, report.num_rounded) == (len(weights), 0)
    assert report.num_bytes == sum(tensor.numel() * 4 for _, tensor in weights)
    assert report.digest == push(reversed(weights), engine, 4).digest
    assert report.digest != push(named_weights(tiny_llama(seed=2)), engine, 5).digest
    held = engine._model.state_dict()
    assert all(torch.equal(held[name], tensor) for name, tensor in named_weights(tiny_llama(seed=2)))
    assert torch.equal(held["lm_head.weight"], held["model.embed_tokens.weight"])


def test_push_rounds_to_the_engines_type_and_says_so(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, dtype="bfloat16", tied=False)
    weights = named_weights(tiny_llama(tied=False, seed=1))
    report = push(weights, engine, 1)
    assert report.num_rounded == len(weights)
    assert report.num_bytes == sum(tensor.numel() * 2 for _, tensor in weights)
    held = engine._model.state_dict()
    assert all(torch.equal(held[name], tensor.to(torch.bfloat16)) for name, tensor in weights)


def test_a_head_sent_beside_its_tied_embedding_is_rounded_with_it(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, dtype="bfloat16")
    model = tiny_llama(seed=1)
    push([*named_weights(model), ("lm_head.weight", model.lm_head.weight)], engine, 1)
    assert engine.policy_version == 1


def test_an_engine_that_stops_reading_or_forgets_the_version_is_found_out() -> None:
    class Half(ScriptedEngine):
        def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
            next(iter(named_tensors))
            self._policy_version = version

    class Stale(ScriptedEngine):
        def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
            list(named_tensors)

    script = lambda *_: (1,)  # noqa: E731
    with pytest.raises(RuntimeError, match="stopped reading before tensor 'b'"):
        push(GOOD, Half(script), 1)
    with pytest.raises(RuntimeError, match="states policy version 0 after a push of version 1"):
        push(GOOD, Stale(script), 1)
    assert push(GOOD, ScriptedEngine(script), 2).num_tensors == 2
