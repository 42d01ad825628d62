"""Routed experts for tests: drawn at random, and a transformers model that is made to follow them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pivotrl.rollouts.routes import expert_indices, routed_experts
from pivotrl.types import RoutedExperts, TrainSample


def routed(samples: Sequence[TrainSample], *, layers: int, experts: int, chosen: int, seed: int = 0) -> list[TrainSample]:
    """The samples with random routes, those of a group's prompt the same in all its rows, as one prefill gives them."""
    generator = np.random.Generator(np.random.Philox(key=seed))

    def draw(num_tokens: int) -> np.ndarray:
        scores = generator.random((num_tokens, layers, experts))
        return scores.argsort(axis=-1)[..., :chosen]

    prompts: dict[str, np.ndarray] = {}
    rows = []
    for sample in samples:
        prompt = prompts.setdefault(sample.group_id, draw(len(sample.prompt_token_ids)))
        routes = routed_experts(prompt, draw(len(sample.completion_token_ids) - 1), num_experts=experts)
        rows.append(replace(sample, routed_experts=routes))
    return rows


def without_first_tokens(routes: RoutedExperts, num_tokens: int) -> RoutedExperts:
    """The same, silent about the prompt's first tokens."""
    chosen = expert_indices(routes)
    prompt = len(chosen) - len(routes.completion) // (routes.num_layers * routes.experts_per_token * routes.bytes_per_index)
    return routed_experts(chosen[num_tokens:prompt], chosen[prompt:], num_experts=2 ** (8 * routes.bytes_per_index))


@contextmanager
def following(model: PreTrainedModel, sample: TrainSample) -> Iterator[None]:
    """Forward passes of a transformers model over one sample, without padding, in which every router takes the sample's experts.

    An oracle: probabilities are computed here, from the gate's logits, as the family's paper says them. Tokens without a route choose freely.
    """
    tokens = len(sample.prompt_token_ids) + len(sample.completion_token_ids)
    gates = [module for name, module in model.named_modules() if name.endswith(".gate")]
    handles = []
    for layer, gate in enumerate(gates):

        def follow(gate: Any, _inputs: object, output: tuple[torch.Tensor, ...], layer: int = layer) -> tuple[torch.Tensor, ...]:
            logits, _, own = output
            chosen = own.clone()
            if sample.routed_experts is not None:
                routes = torch.from_numpy(expert_indices(sample.routed_experts)[:, layer].astype(np.int64))
                chosen[tokens - 1 - len(routes) : tokens - 1] = routes
            if hasattr(gate, "e_score_correction_bias"):
                scores, scale = logits.sigmoid().gather(1, chosen), gate.routed_scaling_factor
            else:
                scores, scale = logits.softmax(-1).gather(1, chosen), 1.0
            return logits, scale * (scores / scores.sum(-1, keepdim=True) if gate.norm_topk_prob else scores), chosen

        handles.append(gate.register_forward_hook(follow))
    yield
    for handle in handles:
        handle.remove()
