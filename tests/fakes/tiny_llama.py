"""Models of some thousand random weights, and their plain forward pass: the oracle of every engine that holds a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB, STOP, PAD, CONTEXT = 96, 1, 0, 128
# Wide enough that distributions are far from uniform and greedy choices are no near-ties.
_WEIGHT_STD = 0.25


def tiny_llama(*, tied: bool = True, seed: int = 0, context: int = CONTEXT) -> LlamaForCausalLM:
    """Two layers, grouped heads of width 32 (vLLM's CPU attention takes no narrower ones), evaluation mode."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=STOP,
        pad_token_id=PAD,
    )
    return _filled(LlamaForCausalLM, config, seed)


def tiny_mixture(*, seed: int = 0, expert_width: int = 32) -> Qwen3MoeForCausalLM:
    """Two layers of four experts, two of them chosen per token."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=expert_width,
        norm_topk_prob=True,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=STOP,
        pad_token_id=PAD,
    )
    return _filled(Qwen3MoeForCausalLM, config, seed)


def save_tiny_llama(directory: Path, *, tied: bool = True, seed: int = 0) -> Path:
    tiny_llama(tied=tied, seed=seed).save_pretrained(directory)
    return directory


def named_weights(model: LlamaForCausalLM) -> list[tuple[str, torch.Tensor]]:
    """Weights by Hugging Face name; a tied head is not listed, as in a checkpoint file."""
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def forward_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """float32 [T, V]: one sequence, no padding, no cache."""
    with torch.no_grad():
        return model(torch.tensor([list(token_ids)])).logits[0].float()


def forward_logprobs(model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int], *, temperature: float) -> torch.Tensor:
    """float32 [len(completion)]: log-probability of every completion token under softmax(logits / temperature)."""
    logits = forward_logits(model, [*prompt, *completion])[len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def _filled[ModelT: PreTrainedModel](kind: Callable[[PreTrainedConfig], ModelT], config: PreTrainedConfig, seed: int) -> ModelT:
    """The model with weights of the seed; torch's global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        model = kind(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, _WEIGHT_STD, generator=generator)
    return model
