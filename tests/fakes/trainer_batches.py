"""Tiny Hugging Face models of every family the trainer builds, and micro-batches of random tokens: the trainer's tests share them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, NemotronHConfig, PreTrainedModel, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from pivotrl.objective.microbatch import LossTerms, MicroBatch

VOCAB = 96
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_HYBRID = {
    "intermediate_size": 48,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
}
# A tiny model of the same shape as each family: its class of configuration and what it has beside `_SIZES`.
_FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3_moe": (Qwen3MoeConfig, {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    # Mamba, attention and plain layers, as Nemotron-H; Nemotron-3 has experts behind a latent projection in place of the plain ones.
    "nemotron_h": (NemotronHConfig, {"head_dim": 16, **_HYBRID, "hybrid_override_pattern": "M*M-"}),
    "nemotron_3": (NemotronHConfig, {"head_dim": 16, **_HYBRID, "hybrid_override_pattern": "ME*E", "moe_latent_size": 16}),
}


def hf_model(family: str, *, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A random model in float32, every tensor random: norms and biases too, so that a forgotten one shows."""
    kind, extra = _FAMILIES[family]
    config = kind(**{**_SIZES, "tie_word_embeddings": False, **extra, **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for name, parameter in [*model.named_parameters(), *biases]:
            noise = torch.randn(parameter.shape, generator=generator)
            center = 0.0 if name.endswith(("e_score_correction_bias", "dt_bias")) else 1.0
            parameter.copy_(center + 0.1 * noise if parameter.dim() == 1 else 0.15 * noise)
    return model


def save_model(directory: Path, family: str = "llama", **settings: Any) -> Path:
    """Writes `hf_model` as a checkpoint directory."""
    hf_model(family, **settings).save_pretrained(directory)
    return directory


def micro_batches(*, rows: int, tokens: int, action_tokens: int, seed: int = 0) -> list[MicroBatch]:
    """One micro-batch per row, of differing lengths: random tokens, the last `action_tokens` of each are the action."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for row in range(rows):
        length = tokens - 2 * row
        token_ids = torch.randint(0, VOCAB, (1, length), generator=generator)
        mask = torch.zeros(1, length)
        mask[:, length - action_tokens :] = 1
        advantage = torch.randn(1, generator=generator)
        batches.append(MicroBatch(token_ids, torch.tensor([length]), mask, advantage, torch.ones(1), None, None, None, rows, rows * action_tokens))
    return batches


def joined(batches: Sequence[MicroBatch], *, extra_padding: int = 0) -> MicroBatch:
    """The same sequences as one padded micro-batch."""
    width = max(batch.token_ids_B_T.shape[1] for batch in batches) + extra_padding

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]))

    return replace(
        batches[0],
        token_ids_B_T=torch.cat([pad(batch.token_ids_B_T) for batch in batches]),
        action_mask_B_T=torch.cat([pad(batch.action_mask_B_T) for batch in batches]),
        lengths_B=torch.cat([batch.lengths_B for batch in batches]),
        advantages_B=torch.cat([batch.advantages_B for batch in batches]),
        loss_weights_B=torch.cat([batch.loss_weights_B for batch in batches]),
    )


def policy_loss(logprobs_B_T: torch.Tensor, entropies_B_T: torch.Tensor, batch: MicroBatch) -> LossTerms:
    """Advantage-weighted log-probs over the global number of action tokens, and two reductions to check."""
    weighted = logprobs_B_T * batch.action_mask_B_T * batch.advantages_B[:, None]
    sums = {"entropy": entropies_B_T.sum(), "surprise/max": -logprobs_B_T.detach().min()}
    return LossTerms(-weighted.sum() / batch.num_action_tokens, sums)


def reference_logprobs(model: PreTrainedModel, batches: Sequence[MicroBatch], *, temperature: float) -> Iterator[torch.Tensor]:
    """Log-probs [B, T] by transformers and log_softmax over all positions, zero outside the mask."""
    for batch in batches:
        logits = model(batch.token_ids_B_T).logits.float() / temperature
        logprobs = logits.log_softmax(-1)[:, :-1].gather(2, batch.token_ids_B_T[:, 1:, None])[..., 0]
        yield torch.nn.functional.pad(logprobs, (1, 0)) * batch.action_mask_B_T


def logprobs_by_row(batches: Sequence[MicroBatch], logprobs: Sequence[torch.Tensor]) -> dict[str, list[float]]:
    """Log-probs of every action, by the tokens of its row: the same key in whatever micro-batch and layout.

    Args:
        logprobs: as `Trainer.token_logprobs` gives them for these micro-batches.
    """
    return {
        " ".join(map(str, batch.token_ids_B_T[row, :length].tolist())): values_B_T[row, batch.action_mask_B_T[row] != 0].tolist()
        for batch, values_B_T in zip(batches, logprobs, strict=True)
        for row, length in enumerate(batch.lengths_B.tolist())
    }
