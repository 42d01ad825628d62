"""The trainer follows the routes that an engine returned: in every batching and layout it computes what transformers computes with them.

The oracle is transformers' model with its routers made to follow (fakes/routes.py), row by row, and autograd through it. Routes are drawn at
random, so that none is the router's own choice; some tokens have none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.ranks import measure_on_ranks
from fakes.routes import following
from fakes.train_samples import draw_episode
from fakes.trainer_batches import hf_model, policy_loss, save_model
from replay_worker import CHOSEN, EXPERTS, TEMPERATURE, micro_batches, replaying_trainer, step_samples

from pivotrl.config.schema import ParallelConfig
from pivotrl.config.training import Batching
from pivotrl.errors import UserError
from pivotrl.megatron.trainer import Trainer
from pivotrl.rollouts.routes import expert_indices, routed_experts
from pivotrl.training.batching import train_batch, train_micro_batches
from pivotrl.types import RoutedExperts, TrainSample

_WORKER = Path(__file__).with_name("replay_worker.py")
_TP, _PP, _CP, _EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"
_VPP, _SEQUENCE = "virtual_pipeline_model_parallel_size", {_TP: 2, "sequence_parallel": True}
_MODES: tuple[Batching, ...] = ("padded", "packed", "shared_prefix")
# Name in the fakes, settings, layers with experts. Each pipeline stage of a hybrid has one.
_FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "qwen": ("qwen3_moe", {"num_hidden_layers": 4, "norm_topk_prob": True}, 4),
    "nemotron": ("nemotron_3", {"hybrid_override_pattern": "E*EM", "n_group": 2, "topk_group": 1}, 2),
}
_LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one process": {}, "recomputed": {"recompute": "full"}},
    2: {
        "dp2": {},
        "tp2 sp": _SEQUENCE,
        "pp2": {_PP: 2},
        "pp2 vpp2": {_PP: 2, _VPP: 2},
        "cp2": {_CP: 2},
        "ep2": {_EP: 2},
    },
    4: {
        "tp2 sp cp2": {**_SEQUENCE, _CP: 2},
        "pp2 cp2": {_PP: 2, _CP: 2},
        "tp2 sp pp2 ep2": {**_SEQUENCE, _PP: 2, _EP: 2, "expert_tensor_parallel_size": 1},
    },
}

type Case = tuple[int, str, str, Batching]
"""Processes, family, layout, batching."""

_CASES: list[Case] = [
    (world, family, layout, mode) for world, layouts in _LAYOUTS.items() for layout in layouts for family in _FAMILIES for mode in _MODES
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A checkpoint of every family."""
    directory = tmp_path_factory.mktemp("models")
    return {name: str(save_model(directory / name, family, **settings)) for name, (family, settings, _) in _FAMILIES.items()}


@pytest.fixture(scope="module")
def measured(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[Case, dict[str, Any]]:
    """What every case measured."""
    cases = {world: [case for case in _CASES if case[0] == world] for world in _LAYOUTS}
    jobs = {
        world: [
            {"model": models[family], "parallel": _LAYOUTS[world][layout], "batching": mode, "layers": _FAMILIES[family][2]}
            for _, family, layout, mode in here
        ]
        for world, here in cases.items()
    }
    answers = measure_on_ranks(_WORKER, jobs, tmp_path_factory.mktemp("jobs"))
    return {case: answer for world, here in cases.items() for case, answer in zip(here, answers[world], strict=True)}


def oracle_step(family: str, samples: Sequence[TrainSample]) -> tuple[dict[str, list[float]], float, float]:
    """Log-probs by row, loss and gradient norm, of transformers' model that follows the samples' routes."""
    name, settings, _ = _FAMILIES[family]
    model = hf_model(name, **settings)
    logprobs, loss, num_action_tokens = {}, torch.zeros(()), sum(len(sample.completion_token_ids) for sample in samples)
    for sample in samples:
        token_ids = [*sample.prompt_token_ids, *sample.completion_token_ids]
        with following(model, sample):
            rows = (model(torch.tensor([token_ids])).logits[0].float() / TEMPERATURE).log_softmax(-1)
        start = len(sample.prompt_token_ids)
        scored = rows[start - 1 : -1].gather(1, torch.tensor(token_ids[start:])[:, None])[:, 0]
        logprobs[" ".join(map(str, token_ids))] = scored.tolist()
        loss = loss - scored.sum() * sample.advantage / num_action_tokens
    loss.backward()
    norm = math.sqrt(sum(float(one.grad.double().square().sum()) for one in model.parameters() if one.grad is not None))
    return logprobs, loss.item(), norm


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_layout_and_mode_computes_what_transformers_computes_with_the_routes(measured: dict[Case, dict[str, Any]]) -> None:
    for family in _FAMILIES:
        samples = step_samples(_FAMILIES[family][2])
        logprobs, loss, norm = oracle_step(family, samples)
        free, free_loss, _ = oracle_step(family, [replace(sample, routed_experts=None) for sample in samples])
        assert max(abs(a - b) for row, values in logprobs.items() for a, b in zip(values, free[row], strict=True)) > 0.1, "routes matter"
        assert abs(loss - free_loss) > 1e-3
        for case in (case for case in _CASES if case[1] == family):
            found = measured[case]
            for row, values in logprobs.items():
                assert found["logprobs"][row] == pytest.approx(values, abs=2e-5), case
            assert found["steps"][0][0] == pytest.approx(loss, abs=2e-5), case
            assert found["steps"][0][1] == pytest.approx(norm, rel=5e-4), case
            # The second loss has been through the optimizer: the gradient is the same by parameter and not in its norm alone.
            assert found["steps"][1][0] == pytest.approx(measured[1, family, "one process", "padded"]["steps"][1][0], abs=2e-5), case


@pytest.mark.slow
def test_coverage_is_of_the_tokens_that_anything_reads(measured: dict[Case, dict[str, Any]]) -> None:
    """Group a: 20 + (5, 3, 7) tokens, the prompt's first 3 without routes; group b: 9 + (4, 2). A row's last token is not read."""
    read = 3 * 20 + 4 + 2 + 6 + 2 * 9 + 3 + 1
    # The long group is split in two micro-batches, so its prompt is laid twice.
    shared = 2 * 20 + 4 + 2 + 6 + 9 + 3 + 1
    for case, found in measured.items():
        expected = 1 - 2 * 3 / shared if case[3] == "shared_prefix" else 1 - 3 * 3 / read
        assert [step[2] for step in found["steps"]] == pytest.approx([expected] * 2), case


@pytest.fixture(scope="module")
def own_routes(models: dict[str, str]) -> list[TrainSample]:
    """Samples of the Qwen with the routes that its routers choose."""
    model, rows = hf_model(*_FAMILIES["qwen"][:1], **_FAMILIES["qwen"][1]), []
    for sample in step_samples():
        token_ids = [*sample.prompt_token_ids, *sample.completion_token_ids]
        with torch.no_grad():
            logits = model(torch.tensor([token_ids]), output_router_logits=True).router_logits
        chosen = np.stack([layer.topk(CHOSEN).indices.numpy() for layer in logits], axis=1)
        start = len(sample.prompt_token_ids)
        rows.append(replace(sample, routed_experts=routed_experts(chosen[:start], chosen[start:-1], num_experts=EXPERTS)))
    return rows


def one_step(trainer: Trainer, samples: Sequence[TrainSample], batching: Batching = "packed") -> tuple[float, float]:
    result = trainer.step(micro_batches(samples, batching), policy_loss, temperature=TEMPERATURE)
    return result.loss, result.grad_norm


@pytest.mark.parametrize("batching", _MODES)
def test_routes_that_are_the_routers_own_change_nothing(models: dict[str, str], own_routes: list[TrainSample], batching: Batching) -> None:
    free = one_step(replaying_trainer(models["qwen"], ParallelConfig(), replay="none"), own_routes, batching)
    followed = one_step(replaying_trainer(models["qwen"], ParallelConfig()), own_routes, batching)
    assert followed == pytest.approx(free, rel=1e-6)


def flipped(routes: RoutedExperts, token: int, layer: int) -> RoutedExperts:
    """One token of one layer sent to an expert that it was not sent to."""
    chosen = expert_indices(routes).copy()
    chosen[token, layer, 0] = next(expert for expert in range(EXPERTS) if expert not in chosen[token, layer])
    at = len(chosen) - len(routes.completion) // (routes.num_layers * CHOSEN)
    return routed_experts(chosen[:at], chosen[at:], num_experts=EXPERTS)


@pytest.mark.parametrize("token", [-1, 12])
def test_a_flipped_route_moves_the_loss_as_the_oracle_says(models: dict[str, str], own_routes: list[TrainSample], token: int) -> None:
    """Of the token that predicts an action's last one, and of one in the middle of the prompt."""
    routes = own_routes[0].routed_experts
    assert routes is not None
    changed = [replace(own_routes[0], routed_experts=flipped(routes, token, 1)), *own_routes[1:]]
    before, after = (one_step(replaying_trainer(models["qwen"], ParallelConfig()), rows, "padded")[0] for rows in (own_routes, changed))
    expected = oracle_step("qwen", changed)[1] - oracle_step("qwen", own_routes)[1]
    assert abs(expected) > 1e-5
    assert after - before == pytest.approx(expected, abs=1e-6)


def test_the_reference_chooses_freely_and_the_pass_for_old_logprobs_does_not(models: dict[str, str]) -> None:
    trainer = replaying_trainer(models["qwen"], ParallelConfig(), with_reference=True)
    samples = step_samples()
    bare = micro_batches([replace(sample, routed_experts=None) for sample in samples], "padded")
    free = trainer.token_logprobs(bare, temperature=TEMPERATURE)
    batches = micro_batches(samples, "padded")
    assert all(map(torch.equal, trainer.token_logprobs(batches, temperature=TEMPERATURE, reference=True), free))
    old = trainer.token_logprobs(batches, temperature=TEMPERATURE)
    assert not any(map(torch.equal, old, free))
    # Two updates from one batch, a frozen policy: the log-probs of the update are those of the pass before it.
    seen: list[torch.Tensor] = []

    def loss(logprobs_B_T: torch.Tensor, entropies_B_T: torch.Tensor, batch: Any) -> Any:
        seen.append(logprobs_B_T.detach().clone())
        return policy_loss(logprobs_B_T, entropies_B_T, batch)

    trainer.step(batches, loss, temperature=TEMPERATURE)
    assert all(map(torch.equal, seen, old))
    assert trainer.step(bare, policy_loss, temperature=TEMPERATURE).measures["routes_replayed"] == 0.0


def test_a_frozen_router_gets_no_gradient_and_a_followed_one_does(models: dict[str, str]) -> None:
    """Replay fixes the choice and not the probabilities: the gate learns through those of the experts that were chosen."""
    trainer = replaying_trainer(models["qwen"], ParallelConfig())
    before = {name: tensor.clone() for name, tensor in trainer.named_tensors() if name.endswith("mlp.gate.weight")}
    one_step(trainer, step_samples())
    after = dict(trainer.named_tensors())
    assert all(not torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen3_moe", {"norm_topk_prob": True}), ("qwen3_moe", {"norm_topk_prob": False}), ("nemotron_3", {"n_group": 2, "topk_group": 1})],
    ids=["softmax over the chosen", "softmax over all", "sigmoid with bias and groups"],
)
def test_probabilities_are_what_the_router_gives_these_experts(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Read off the trainer's routers, and computed from their inputs and weights; bias and groups, which decide choices, do not enter."""
    trainer = replaying_trainer(str(save_model(tmp_path, family, **settings)), ParallelConfig())
    sample = step_samples(2)[-1]
    assert sample.routed_experts is not None
    seen: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for module in (module for chunk in trainer._policy for name, module in chunk.named_modules() if name.endswith("mlp.router")):
        module.register_forward_hook(lambda router, inputs, output: seen.append((router, inputs[0].flatten(0, 1), output[0])))
    trainer.token_logprobs(micro_batches([sample], "padded"), temperature=1.0)
    assert len(seen) == 2
    chosen_T_L_K = torch.from_numpy(expert_indices(sample.routed_experts).astype(np.int64))
    for layer, (router, inputs_T_H, found_T_E) in enumerate(seen):
        chosen_T_K = chosen_T_L_K[:, layer]
        logits = inputs_T_H[:-1] @ router.weight.T
        if family == "nemotron_3":
            scores = logits.sigmoid().gather(1, chosen_T_K)
            expected = 2.5 * scores / scores.sum(1, keepdim=True)
        elif settings["norm_topk_prob"]:
            expected = logits.gather(1, chosen_T_K).softmax(1)
        else:
            expected = logits.softmax(1).gather(1, chosen_T_K)
        torch.testing.assert_close(found_T_E[:-1], torch.zeros_like(logits).scatter(1, chosen_T_K, expected), atol=1e-6, rtol=1e-5)


def test_an_episodes_turn_is_followed_as_it_was_sampled(models: dict[str, str]) -> None:
    """Packed, a turn is read from the last turn's row, whose prompt the engine routed anew: scored tokens keep the routes they were sampled with."""
    turns = draw_episode([(6, 4), (3, 5)])
    generator = np.random.Generator(np.random.Philox(key=4))

    def draw(num_tokens: int) -> np.ndarray:
        return generator.random((num_tokens, 4, EXPERTS)).argsort(axis=-1)[..., :CHOSEN]

    samples = [
        replace(one, routed_experts=routed_experts(draw(len(one.prompt_token_ids)), draw(len(one.completion_token_ids) - 1), num_experts=EXPERTS))
        for one in turns
    ]
    first, last = (one.routed_experts for one in samples)
    assert first is not None
    assert last is not None
    # What the stream holds: the first turn as it was sampled, its last token as the last turn's prefill routed it, and so on.
    merged = np.concatenate([expert_indices(first), expert_indices(last)[9:]])
    whole = routed_experts(merged[:13], merged[13:], num_experts=EXPERTS)
    expected = [replace(samples[0]), replace(samples[1], routed_experts=whole)]
    batches = train_micro_batches(train_batch(samples), batching="packed", micro_batch_tokens=64, skip_zero_variance=True)
    assert len(batches) == 1
    result = replaying_trainer(models["qwen"], ParallelConfig()).step(batches, policy_loss, temperature=TEMPERATURE)
    assert result.loss == pytest.approx(oracle_step("qwen", expected)[1], abs=2e-5)
    assert result.measures["routes_replayed"] == 1.0


def test_routes_of_another_model_are_refused(models: dict[str, str]) -> None:
    trainer, samples = replaying_trainer(models["qwen"], ParallelConfig()), step_samples(3)
    with pytest.raises(UserError, match=r"the engine returned routes of 3 layers with 2 experts per token; the trainer's model has 4 layers"):
        one_step(trainer, samples)
    foreign = [replace(samples[0], routed_experts=routed_experts(np.full((20, 4, 2), 7), np.full((4, 4, 2), 7), num_experts=8))]
    with pytest.raises(UserError, match=r"the engine returned expert 7; the trainer's model has 4 experts per layer"):
        trainer.token_logprobs(micro_batches(foreign, "padded"), temperature=1.0)
    short = [replace(samples[0], routed_experts=routed_experts(np.zeros((20, 4, 2)), np.zeros((3, 4, 2)), num_experts=4))]
    with pytest.raises(ValueError, match=r"20 \+ 5 tokens but the experts of 20 \+ 3"):
        micro_batches(short, "padded")
