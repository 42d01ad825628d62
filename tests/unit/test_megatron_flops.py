"""Operation counts against torch's own counter, run over transformers' models: an implementation this project has no part in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, NemotronHConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from pivotrl.megatron.flops import Work, forward_cost

TOKENS = 24
DENSE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
HYBRID = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    "chunk_size": 8,
    "use_mamba_kernels": False,
}


def counted_flops(config: Any) -> int:
    """torch counts full attention and matrix products only."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randint(0, config.vocab_size, (1, TOKENS)), use_cache=False)
    return counter.get_total_flops()


def expected_flops(config: Any) -> int:
    return forward_cost(config).forward_flops(Work(num_tokens=TOKENS, num_pairs=TOKENS * TOKENS, num_scored=TOKENS))


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**DENSE), Qwen2Config(**DENSE), Qwen3Config(**DENSE, head_dim=16)],
    ids=["llama", "qwen2", "qwen3"],
)
def test_dense_models_cost_what_torch_counts(config: Any) -> None:
    assert expected_flops(config) == counted_flops(config)


def test_experts_cost_what_torch_counts() -> None:
    config = Qwen3MoeConfig(
        **DENSE, head_dim=16, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=2, mlp_only_layers=[]
    )
    assert forward_cost(config).per_token < forward_cost(Qwen3MoeConfig(**{**config.to_dict(), "num_experts_per_tok": 4})).per_token
    assert expected_flops(config) == counted_flops(config)


def test_hybrid_layers_cost_what_torch_counts() -> None:
    """Attention and feed-forward layers exactly; of a Mamba layer torch sees the projections, to which the scan and convolution are added by hand."""
    plain = NemotronHConfig(**HYBRID, layers_block_type=["full_attention", "mlp", "mlp"], num_hidden_layers=3)
    assert expected_flops(plain) == counted_flops(plain)
    one = NemotronHConfig(**HYBRID, layers_block_type=["linear_attention", "full_attention", "mlp", "mlp"], num_hidden_layers=4)
    inner, state, channels = 4 * 8, 8, 4 * 8 + 2 * 2 * 8
    projections = 2 * 32 * (inner + channels + 4) + 2 * inner * 32
    assert forward_cost(one).per_token - forward_cost(plain).per_token == projections + 2 * 4 * channels + 6 * inner * state


def test_nemotron_3_super_needs_two_operations_per_active_parameter() -> None:
    """Published: 12.7 billion active parameters, the embedding among them, which is looked up; the scan and the convolution add a little."""
    pattern = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    kinds = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
    config = NemotronHConfig(
        vocab_size=131_072,
        hidden_size=4_096,
        layers_block_type=[kinds[letter] for letter in pattern],
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=128,
        mamba_num_heads=128,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
        conv_kernel=4,
        moe_latent_size=1_024,
        n_routed_experts=512,
        num_experts_per_tok=22,
        moe_intermediate_size=2_688,
        n_shared_experts=1,
        moe_shared_expert_intermediate_size=5_376,
    )
    cost = forward_cost(config)
    multiplied = (cost.per_token + cost.per_scored) / 2
    assert multiplied + 131_072 * 4_096 == pytest.approx(12.7e9, rel=0.02)
