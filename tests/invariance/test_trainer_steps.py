"""A step of the trainer: equal to plain torch on transformers' model, and blind to how its sequences are cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from fakes.trainer_batches import hf_model, joined, micro_batches, policy_loss, reference_logprobs, save_model

from pivotrl.config.schema import MoeConfig, OptimizerConfig, ParallelConfig
from pivotrl.megatron import checkpoint
from pivotrl.megatron.trainer import StepResult, Trainer
from pivotrl.objective.microbatch import LossTerms, MicroBatch

_ROWS = micro_batches(rows=6, tokens=24, action_tokens=5)
# An eps far above the gradient's rounding: Adam divides a gradient of nearly zero by its own size, which makes rounding a step of lr.
_OPTIMIZER = OptimizerConfig(lr=1e-3, warmup_steps=2, beta2=0.95, eps=1e-4, weight_decay=0.1, max_grad_norm=0.5)
_SPLITS: dict[str, Callable[[], list[MicroBatch]]] = {
    "one each": lambda: list(_ROWS),
    "three": lambda: [joined(_ROWS[:1]), joined(_ROWS[1:4]), joined(_ROWS[4:])],
    "reversed": lambda: [joined(_ROWS[:2:-1]), joined(_ROWS[2::-1])],
    "padded": lambda: [joined(_ROWS, extra_padding=9)],
}


@pytest.fixture(scope="module")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("hf"), "qwen2", tie_word_embeddings=True)


def _trainer(checkpoint_dir: Path, *, optimizer: OptimizerConfig | None = _OPTIMIZER, with_reference: bool = False) -> Trainer:
    return Trainer.from_hf(
        checkpoint_dir, optimizer=optimizer, parallel=ParallelConfig(), moe=MoeConfig(), num_steps=8, seed=0, with_reference=with_reference
    )


def _first_gradient(trainer: Trainer, batches: Sequence[MicroBatch]) -> tuple[StepResult, list[torch.Tensor]]:
    """The result of the first step and its gradient, read off Adam's first moment: m = (1 - beta1) * clipped gradient."""
    result = trainer.step(batches, policy_loss, temperature=0.8)
    scale = (1 - _OPTIMIZER.beta1) * min(1.0, _OPTIMIZER.max_grad_norm / (result.grad_norm + 1e-6))
    (adam,) = checkpoint._torch_adams(trainer._require_update().optimizer)
    return result, [adam.state[parameter]["exp_avg"] / scale for group in adam.param_groups for parameter in group["params"]]


def test_three_steps_equal_plain_torch(checkpoint_dir: Path) -> None:
    """Oracle: transformers' model, autograd, clip_grad_norm_ and torch's AdamW, with no weight decay on norms and biases."""
    trainer = _trainer(checkpoint_dir)
    model = hf_model("qwen2", tie_word_embeddings=True)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-4)
    for step, lr in enumerate((0.5e-3, 1e-3, 1e-3)):
        adam.zero_grad()
        pairs = zip(reference_logprobs(model, _ROWS, temperature=0.8), _ROWS, strict=True)
        loss = sum(policy_loss(logprobs, torch.zeros_like(logprobs), batch).loss for logprobs, batch in pairs)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        result = trainer.step(_SPLITS["three"](), policy_loss, temperature=0.8)
        assert result.lr == lr
        assert result.loss == pytest.approx(loss.item(), abs=1e-6), step
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        assert result.grad_norm > 0.5, "nothing would be clipped"
    expected = dict(model.named_parameters())
    for name, tensor in trainer.named_tensors():
        torch.testing.assert_close(tensor, expected[name].detach(), atol=2e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("split", list(_SPLITS))
def test_the_split_into_micro_batches_reaches_neither_gradient_nor_sums(checkpoint_dir: Path, split: str) -> None:
    whole, whole_gradient = _first_gradient(_trainer(checkpoint_dir), [joined(_ROWS)])
    result, gradient = _first_gradient(_trainer(checkpoint_dir), _SPLITS[split]())
    assert result.loss == pytest.approx(whole.loss, abs=1e-6)
    assert result.grad_norm == pytest.approx(whole.grad_norm, rel=1e-6)
    assert result.sums == pytest.approx(whole.sums, rel=1e-6)
    for ours, expected in zip(gradient, whole_gradient, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)


def test_logprobs_of_policy_and_reference(checkpoint_dir: Path) -> None:
    trainer = _trainer(checkpoint_dir, with_reference=True)
    batches = _SPLITS["three"]()
    with torch.no_grad():
        expected = list(reference_logprobs(hf_model("qwen2", tie_word_embeddings=True), batches, temperature=0.8))
    trainer.step(batches, policy_loss, temperature=0.8)
    reference = trainer.token_logprobs(batches, temperature=0.8, reference=True)
    policy = trainer.token_logprobs(batches, temperature=0.8)
    for ours, theirs, moved in zip(reference, expected, policy, strict=True):
        assert not ours.requires_grad
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        assert (moved - theirs).abs().max() > 1e-3
    assert trainer.token_logprobs([], temperature=1.0) == []


def test_sums_add_up_and_maxima_are_maxima(checkpoint_dir: Path) -> None:
    result = _trainer(checkpoint_dir).step(_ROWS, policy_loss, temperature=0.8)
    logprobs = _trainer(checkpoint_dir).token_logprobs(_ROWS, temperature=0.8)
    assert result.sums["surprise/max"] == pytest.approx(-min(tensor.min().item() for tensor in logprobs), abs=1e-6)


def test_a_step_without_micro_batches_counts_and_changes_nothing(checkpoint_dir: Path) -> None:
    trainer = _trainer(checkpoint_dir)
    trainer.step(_ROWS, policy_loss, temperature=1.0)
    before = {name: tensor.clone() for name, tensor in trainer.named_tensors()}
    assert trainer.step([], policy_loss, temperature=1.0) == StepResult(loss=0.0, grad_norm=0.0, lr=1e-3, sums={})
    assert trainer.steps_done == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.named_tensors())


def test_a_gradient_that_is_not_finite_stops_the_run(checkpoint_dir: Path) -> None:
    def broken(logprobs_B_T: torch.Tensor, _entropies_B_T: torch.Tensor, _batch: MicroBatch) -> LossTerms:
        return LossTerms(logprobs_B_T.sum() * float("nan"), {})

    with pytest.raises(FloatingPointError, match="step 0"):
        _trainer(checkpoint_dir).step(_ROWS, broken, temperature=1.0)


def test_a_trainer_without_optimizer_or_reference_says_so(checkpoint_dir: Path) -> None:
    trainer = _trainer(checkpoint_dir, optimizer=None)
    with pytest.raises(ValueError, match="without an optimizer"):
        trainer.step(_ROWS, policy_loss, temperature=1.0)
    with pytest.raises(ValueError, match="with_reference=False"):
        trainer.token_logprobs(_ROWS, temperature=1.0, reference=True)
