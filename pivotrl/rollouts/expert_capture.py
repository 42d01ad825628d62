"""Which experts a transformers model sends its tokens to, layer by layer, read where its layers with experts are told.

A hook sits before every layer's experts, behind the router: what it sees is what is computed with, whatever the family's router does to get
there (softmax, sigmoid with a bias, groups). Called by transformers_engine.py. Suffixes: N = tokens of a forward pass, batch rows one after
the other, L = layers with experts, K = experts per token, R = rows decoded together, P = distinct prompts, T = padded tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pivotrl.errors import UserError
from pivotrl.rollouts.decoding import PromptRows, Row
from pivotrl.rollouts.routes import routed_experts
from pivotrl.types import Completion, RoutedExperts


class ExpertCapture:
    """The experts of every token that a model computes, handed to the rows whose tokens they are.

    Raises:
        UserError: for a model without experts.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        layers: list[Any] = [module for name, module in model.named_modules() if name.endswith(".experts")]
        if not layers:
            raise UserError(
                f"engine.enable_return_routed_experts is true and {type(model).__name__} has no layer with experts",
                rule="only routers choose experts",
                fix="remove engine.enable_return_routed_experts, or choose a mixture of experts",
            )
        self._num_layers, self._num_experts = len(layers), layers[0].num_experts
        self._seen: list[np.ndarray] = []
        for layer in layers:
            layer.register_forward_pre_hook(self._see)

    def take_prompts(self, chunk: Sequence[PromptRows], num_columns: int) -> None:
        """Hands a prefill's experts to the rows: prompts of a chunk, left-padded to `num_columns`."""
        chosen_P_T_L_K = self._take().reshape(len(chunk), num_columns, self._num_layers, -1)
        for prompt, chosen_T_L_K in zip(chunk, chosen_P_T_L_K, strict=True):
            own_T_L_K = chosen_T_L_K[num_columns - len(prompt.prompt_token_ids) :]
            for row in prompt.rows:
                row.prompt_experts = own_T_L_K

    def take_step(self, rows: Sequence[Row]) -> None:
        """Hands one decoding step's experts to the rows that were decoded; those that are finished had no token in it."""
        for row, chosen_L_K in zip(rows, self._take(), strict=True):
            if row.finish_reason is None:
                row.completion_experts.append(chosen_L_K)

    def routes(self, row: Row, *, like: Completion | None) -> RoutedExperts:
        """The record of a finished row.

        Args:
            like: another sample of its prompt, to share the prompt's part with.
        """
        assert row.prompt_experts is not None
        blank_0_L_K = row.prompt_experts[:0]
        completion_T_L_K = np.stack(row.completion_experts) if row.completion_experts else blank_0_L_K
        return routed_experts(row.prompt_experts, completion_T_L_K, num_experts=self._num_experts, like=None if like is None else like.routed_experts)

    def _see(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        chosen_N_K = inputs[1]
        if not torch.is_tensor(chosen_N_K) or chosen_N_K.is_floating_point() or chosen_N_K.dim() != 2:
            raise RuntimeError(f"{type(module).__name__} is not told the experts of its tokens as its second argument, integers [tokens, experts]")
        # int16 holds every expert there is; int64, as it comes, would be four times a prompt's memory.
        self._seen.append(chosen_N_K.to(torch.int16).numpy())

    def _take(self) -> np.ndarray:
        """int16 [N, L, K] of the forward pass just made."""
        seen, self._seen = self._seen, []
        if len(seen) != self._num_layers:
            raise RuntimeError(f"{len(seen)} of {self._num_layers} layers with experts ran in one forward pass")
        return np.stack(seen, axis=1)
