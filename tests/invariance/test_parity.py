"""The parity gate on a real engine and trainer: it passes where they agree, and every injected fault is caught and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.objective_steps import train_config
from fakes.tiny_tokenizer import CHATML, save_checkpoint, tiny_tokenizer
from fakes.trainer_batches import hf_model, joined, micro_batches, policy_loss
from safetensors.torch import load_file, save_file

from pivotrl.config.engines import TransformersEngineConfig
from pivotrl.config.schema import MoeConfig, ParallelConfig, RenderConfig, SamplingConfig, TrainConfig
from pivotrl.errors import UserError
from pivotrl.megatron.trainer import Trainer
from pivotrl.metrics import check_name
from pivotrl.observability.sinks import PARITY_FINDINGS
from pivotrl.rollouts.engine import GenerationRequest
from pivotrl.rollouts.local import LocalSampler, LocalTask
from pivotrl.rollouts.render import Renderer
from pivotrl.rollouts.transformers_engine import TransformersEngine
from pivotrl.rundir import read_jsonl
from pivotrl.training.parity import Gated, ParityGate
from pivotrl.training.protocols import StepData
from pivotrl.types import Action, Completion, Message, ParseOutcome, Role, State, ToolOrigin, Verdict
from pivotrl.weights.digest import tensor_digest
from pivotrl.weights.manifest import TensorSpec, WeightCensus

SAMPLING = SamplingConfig(temperature=0.8, max_new_tokens=8, truncated="mask")


class NobodyAsks:
    """A gate verifies nothing."""

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:
        raise AssertionError


class Faulty:
    """An engine with something wrong between it and the caller; `held_dir` is what it says it holds."""

    def __init__(
        self,
        engine: TransformersEngine,
        *,
        request: Callable[[GenerationRequest], GenerationRequest] = lambda request: request,
        completion: Callable[[Completion], Completion] = lambda completion: completion,
        held_dir: Path | None = None,
    ) -> None:
        self._engine, self._request, self._completion, self._held_dir = engine, request, completion, held_dir

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[tuple[Completion, ...]]:
        return [tuple(map(self._completion, group)) for group in self._engine.generate([self._request(one) for one in requests])]

    def load_weights(self, named_tensors: Any, version: int) -> None:
        self._engine.load_weights(named_tensors, version)

    def weight_census(self) -> WeightCensus:
        if self._held_dir is None:
            return self._engine.weight_census()
        return WeightCensus({name: TensorSpec(tuple(one.shape), one.dtype) for name, one in self._held().items()}, {})

    def weight_digests(self) -> Mapping[str, str]:
        if self._held_dir is None:
            return self._engine.weight_digests()
        return {name: tensor_digest(one) for name, one in self._held().items()}

    def close(self) -> None:
        self._engine.close()

    def _held(self) -> dict[str, torch.Tensor]:
        assert self._held_dir is not None
        return load_file(self._held_dir / "model.safetensors")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _checkpoint(tmp_path_factory.mktemp("dense"), "qwen3")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _checkpoint(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


def _checkpoint(directory: Path, family: str) -> Path:
    hf_model(family, vocab_size=len(tiny_tokenizer())).save_pretrained(directory)
    return save_checkpoint(directory, chat_template=CHATML)


def config(**parity: object) -> TrainConfig:
    return train_config(parity={"max_logprob_difference": 1e-3, "every_steps": 2, "num_pivots": 3, "num_samples": 2, **parity})


def trainer_of(checkpoint: Path) -> Trainer:
    settings = config()
    return Trainer.from_hf(
        checkpoint, optimizer=settings.optimizer, parallel=ParallelConfig(), moe=MoeConfig(), num_steps=9, seed=0, with_reference=False
    )


def engine_of(checkpoint: Path) -> TransformersEngine:
    return TransformersEngine.load(checkpoint, TransformersEngineConfig(type="transformers", batch_size=16), stop_token_ids=(1,), pad_token_id=0)


def gate(
    checkpoint: Path, tmp_path: Path, *, engine: Faulty | TransformersEngine | None = None, trainer: Trainer | None = None, **parity: object
) -> ParityGate:
    renderer = Renderer.load(checkpoint, RenderConfig(action_format="hermes", history_reasoning="drop", max_prompt_tokens=64), None)
    sampler = LocalSampler(engine or engine_of(checkpoint), renderer, NobodyAsks(), SAMPLING, run_seed=3)
    return ParityGate(
        sampler,
        [_task(renderer, name) for name in ("one", "two", "three", "four")],
        trainer or trainer_of(checkpoint),
        config=config(**parity),
        sampling=SAMPLING,
        run_seed=3,
        scratch_dir=tmp_path,
        parallel=ParallelConfig(),
    )


def _task(renderer: Renderer, name: str) -> LocalTask:
    state = State((Message(Role.USER, f"Say {name}."),), (), ToolOrigin.NONE)
    return LocalTask(name, renderer.render_prompt(state), state, Action(name, (), None, ParseOutcome.ABSENT))


def changed(checkpoint: Path, folder: Path, *, tensors: Callable[[dict[str, torch.Tensor]], None] | None = None, **settings: object) -> Path:
    """A copy of a checkpoint with other tensors or settings."""
    shutil.copytree(checkpoint, folder)
    if tensors is not None:
        held = load_file(folder / "model.safetensors")
        tensors(held)
        save_file({name: one.contiguous() for name, one in held.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, **settings}))
    return folder


def test_engine_and_trainer_that_agree_pass(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = gate(dense, tmp_path).check(0)
    assert all(check_name(name) for name in metrics)
    assert 0 < metrics["sync/parity_difference/mean"] <= metrics["sync/parity_difference/p99/max"] <= metrics["sync/parity_difference/max"] < 1e-4
    assert metrics["sync/parity_ratio/max"] == pytest.approx(1, abs=1e-4)
    shown = capsys.readouterr().err
    assert "parity at step 0 (" in shown
    assert "pi_trainer / pi_engine" in shown


def test_stale_weights(dense: Path, tmp_path: Path) -> None:
    trainer = trainer_of(dense)
    trainer.step([joined(micro_batches(rows=2, tokens=20, action_tokens=5))], policy_loss, temperature=1.0)
    with pytest.raises(UserError, match=r"disagree at step 1: weights: stale weights: .*first '.*'; the engine states policy version 0, .* at 1"):
        gate(dense, tmp_path, trainer=trainer).check(1)


def test_swapped_experts(mixture: Path, tmp_path: Path) -> None:
    def swap(held: dict[str, torch.Tensor]) -> None:
        for part in ("gate_proj", "up_proj", "down_proj"):
            one, two = (f"model.layers.1.mlp.experts.{expert}.{part}.weight" for expert in (0, 2))
            held[one], held[two] = held[two], held[one]

    wrong = changed(mixture, tmp_path / "swapped", tensors=swap)
    engine = Faulty(engine_of(wrong), held_dir=wrong)
    with pytest.raises(
        UserError, match=r"weights: swapped experts: model.layers.1.mlp.experts holds expert 2's 'down_proj.weight' in place of expert 0"
    ):
        gate(mixture, tmp_path, engine=engine).check(0)


def test_wrong_expert_scale_in_a_tensor(mixture: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    wrong = changed(mixture, tmp_path / "scaled", tensors=lambda held: held.update({name: 2 * held[name]}))
    engine = Faulty(engine_of(wrong), held_dir=wrong)
    with pytest.raises(UserError, match=rf"weights: wrong expert scale: the engine holds 2 times tensor '{name}'"):
        gate(mixture, tmp_path, engine=engine).check(0)


def test_wrong_expert_scale_in_a_setting(mixture: Path, tmp_path: Path) -> None:
    """No weight differs: the trainer equals transformers layer by layer, and the engine equals transformers with the setting forgotten."""
    wrong = changed(mixture, tmp_path / "setting", norm_topk_prob=not json.loads((mixture / "config.json").read_text())["norm_topk_prob"])
    with pytest.raises(UserError, match=r"engine: wrong expert scale: its log-probs are those of the model with norm_topk_prob"):
        gate(mixture, tmp_path, engine=engine_of(wrong)).check(0)


def test_off_by_one(dense: Path, tmp_path: Path) -> None:
    shifted = Faulty(engine_of(dense), completion=lambda one: replace(one, logprobs=(*one.logprobs[1:], -1.0)))
    with pytest.raises(UserError, match="shift: off by one: the log-prob that the engine reports for a token is the one of the next token"):
        gate(dense, tmp_path, engine=shifted).check(0)
    late = Faulty(engine_of(dense), completion=lambda one: replace(one, logprobs=(-1.0, *one.logprobs[:-1])))
    with pytest.raises(UserError, match="one of the previous token"):
        gate(dense, tmp_path, engine=late).check(0)


def test_wrong_temperature(dense: Path, tmp_path: Path) -> None:
    hot = Faulty(engine_of(dense), request=lambda request: replace(request, temperature=1.3))
    with pytest.raises(UserError, match=r"temperature: wrong temperature: .* temperature 1.3, the recipe samples at 0.8"):
        gate(dense, tmp_path, engine=hot).check(0)


def test_the_mean_has_a_limit_of_its_own(dense: Path, tmp_path: Path) -> None:
    hot = Faulty(engine_of(dense), request=lambda request: replace(request, temperature=1.3))
    gate(dense, tmp_path, engine=hot, max_logprob_difference=20.0).check(0)
    with pytest.raises(UserError, match=r"wrong temperature: .* temperature 1.3, the recipe") as refused:
        gate(dense, tmp_path, engine=hot, max_logprob_difference=20.0, max_mean_logprob_difference=1e-3).check(0)
    assert refused.value.rule == "train.parity.max_logprob_difference is 20 and max_mean_logprob_difference 0.001"


def test_template_mismatch(dense: Path, tmp_path: Path) -> None:
    """An engine that puts a special token before the ids it is sent; a prompt that was stored under another template."""
    token = tiny_tokenizer().all_special_tokens[0]
    extra = tiny_tokenizer().convert_tokens_to_ids(token)
    tokenizing = Faulty(engine_of(dense), request=lambda request: replace(request, prompt_token_ids=(extra, *request.prompt_token_ids)))
    with pytest.raises(UserError, match=r"template: the engine's log-probs are those of the prompt with .* before it"):
        gate(dense, tmp_path, engine=tokenizing).check(0)
    stored = gate(dense, tmp_path)
    stored._tasks = [replace(stored._tasks[0], prompt_token_ids=stored._tasks[0].prompt_token_ids[:-1])]
    with pytest.raises(UserError, match=r"template: the stored prompt of pivot .* differ from token \d+ on"):
        stored.check(0)


@pytest.mark.parametrize(
    ("module", "place"),
    [("embedding", "embedding"), ("decoder.layers.1.mlp", "layer 1"), ("decoder.final_layernorm", "final norm"), ("output_layer", "head")],
)
def test_a_wrong_layer_of_the_trainer(dense: Path, tmp_path: Path, module: str, place: str) -> None:
    trainer = trainer_of(dense)
    owner = trainer._policy[0].get_submodule(module)
    # Not a factor: after a norm it is none, and before the softmax it is a temperature.
    owner.register_forward_hook(lambda _module, _inputs, out: (out[0].roll(1, -1), *out[1:]) if isinstance(out, tuple) else out.roll(1, -1))
    with pytest.raises(UserError, match=rf"disagree at step 0: {place}: "):
        gate(dense, tmp_path, trainer=trainer).check(0)
    assert [path.name for path in tmp_path.iterdir()] == [PARITY_FINDINGS]
    (row,) = read_jsonl(tmp_path / PARITY_FINDINGS)
    assert (row["step"], row["place"], row["limit"]) == (0, place, 1e-3)
    assert row["largest"] > 1e-3


def test_the_gate_stands_before_the_source_and_leaves_no_trace_of_a_resume(dense: Path, tmp_path: Path) -> None:
    class Rounds:
        def __init__(self) -> None:
            self.asked: list[int] = []

        def batch(self, step: int) -> StepData:
            self.asked.append(step)
            return StepData([], {"rollout/reward/mean": 0.5}, [], [])

        def publish(self, trainer: object, version: int) -> None: ...
        def position(self) -> dict[str, Any]:
            return {}

        def resume(self, trainer: object, position: object) -> None: ...

    healthy = gate(dense, tmp_path)
    rounds = Rounds()
    resumed = Gated(rounds, healthy)
    assert [len(resumed.batch(step).metrics) for step in (1, 2, 3, 4)] == [1, 7, 1, 7]
    assert rounds.asked == [1, 2, 3, 4]
    untouched = Rounds()
    broken = gate(dense, tmp_path, engine=Faulty(engine_of(dense), completion=lambda one: replace(one, logprobs=(*one.logprobs[1:], -1.0))))
    with pytest.raises(UserError):
        Gated(untouched, broken).batch(3)
    assert untouched.asked == []
