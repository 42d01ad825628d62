"""The probe after a hand-over: silent where engine and trainer agree, and loud where the engine keeps a part of an older policy."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fakes.tiny_llama import PAD, STOP, named_weights, save_tiny_llama, tiny_llama
from transformers import PreTrainedModel

import pivotrl
from pivotrl.config.engines import TransformersEngineConfig, WeightSyncConfig
from pivotrl.objective.microbatch import MicroBatch
from pivotrl.rollouts.engine import EngineError, GenerationRequest
from pivotrl.rollouts.scripted import ScriptedEngine
from pivotrl.rollouts.transformers_engine import TransformersEngine
from pivotrl.training.probe import WeightProbe, WeightsDiffer
from pivotrl.weights.push import push

PACKAGE = Path(pivotrl.__file__).parent
PROMPT = tuple(range(5, 20))


class Scorer:
    """The part of a trainer that the probe asks: a plain forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def token_logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float, reference: bool) -> list[torch.Tensor]:
        results = []
        for batch in micro_batches:
            with torch.no_grad():
                scores = torch.log_softmax(self.model(batch.token_ids_B_T).logits.float() / temperature, dim=-1)
            picked = scores[:, :-1].gather(2, batch.token_ids_B_T[:, 1:, None])[..., 0]
            results.append(torch.nn.functional.pad(picked, (1, 0)) * batch.action_mask_B_T)
        return results


def probe(**settings: object) -> WeightProbe:
    return WeightProbe(PROMPT, WeightSyncConfig(**settings), temperature=0.7, seed=3)  # type: ignore[arg-type]


def engine_of(tmp_path: Path, dtype: str = "float32") -> TransformersEngine:
    config = TransformersEngineConfig(type="transformers", batch_size=4, dtype=dtype)  # type: ignore[arg-type]
    return TransformersEngine.load(save_tiny_llama(tmp_path), config, stop_token_ids=(STOP,), pad_token_id=PAD)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-4), ("bfloat16", 0.2)])
def test_the_policy_that_was_sent_agrees(tmp_path: Path, dtype: str, most: float) -> None:
    engine, model = engine_of(tmp_path, dtype), tiny_llama(seed=1)
    push(named_weights(model), engine, 1)
    difference = probe().check(engine, Scorer(model))  # type: ignore[arg-type]
    assert difference is not None
    assert difference < most


def test_one_stale_matrix_is_found(tmp_path: Path) -> None:
    """What a digest cannot see: the tensors arrived, and a copy of an older one is used."""
    engine, model = engine_of(tmp_path), tiny_llama(seed=1)
    push(named_weights(model), engine, 1)
    engine._model.lm_head.weight = torch.nn.Parameter(tiny_llama(seed=0).lm_head.weight.clone())
    with pytest.raises(WeightsDiffer, match=r"policy version 1, .*max_logprob_difference allows 0.01"):
        probe().check(engine, Scorer(model))  # type: ignore[arg-type]
    assert probe(max_logprob_difference=1000.0).check(engine, Scorer(model))  # type: ignore[arg-type]


def test_no_hand_over_goes_without_a_probe(tmp_path: Path) -> None:
    """A trainer's weights reach an engine that samples by one way only, which looks at what the engine makes of them."""
    pushing = [path for path in sorted(PACKAGE.rglob("*.py")) if any("push" in names for names in imported_from(path, "pivotrl.weights.push"))]
    assert [path.name for path in pushing] == ["probe.py"]

    class Trainer(Scorer):
        def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
            return named_weights(tiny_llama(seed=2))

    engine = engine_of(tmp_path)
    assert probe().hand_over(Trainer(tiny_llama(seed=2)), engine, 4).version == 4  # type: ignore[arg-type]
    with pytest.raises(WeightsDiffer, match="policy version 5"):
        probe().hand_over(Trainer(tiny_llama(seed=1)), engine, 5)  # type: ignore[arg-type]


def imported_from(path: Path, module: str) -> list[set[str]]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [{alias.name for alias in node.names} for node in nodes if isinstance(node, ast.ImportFrom) and node.module == module]


def test_a_wrong_temperature_is_found(tmp_path: Path) -> None:
    engine, model = engine_of(tmp_path), tiny_llama()
    scorer = Scorer(model)
    hot = lambda micro_batches, *, temperature, reference: Scorer.token_logprobs(scorer, micro_batches, temperature=1.0, reference=reference)  # noqa: E731
    scorer.token_logprobs = hot  # type: ignore[method-assign]
    with pytest.raises(WeightsDiffer):
        probe().check(engine, scorer)  # type: ignore[arg-type]


def test_nothing_to_compare_is_no_difference(tmp_path: Path) -> None:
    model = Scorer(tiny_llama())

    class Failing(TransformersEngine):
        def generate(self, requests: Sequence[GenerationRequest]):
            raise EngineError("out of memory")

    engine = engine_of(tmp_path)
    engine.__class__ = Failing
    assert probe().check(engine, model) is None  # type: ignore[arg-type]
    assert probe(probe_tokens=0).check(engine_of(tmp_path), model) is None  # type: ignore[arg-type]
    assert probe().check(ScriptedEngine(lambda *_: (1,)), model) is None  # type: ignore[arg-type]
