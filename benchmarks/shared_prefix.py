"""What a pivot group costs packed and with its prefix shared: time and memory of forward and backward over G actions of one prefix.

    python benchmarks/shared_prefix.py [--model dense|hybrid] [--prefix 2048] [--action 64] [--group 16] [--repeats 3]

`packed` is all G actions in one micro-batch, each with its own copy of the prefix. Each mode runs in a process of its own, in turns, with
two threads and the same random weights and tokens; the fastest repeat counts for time. Memory is the peak of the resident set, less what
the process held with its model loaded (its imports alone are some 0.6 GB, whatever the batch). Prints the ratios packed / shared_prefix
and how far losses and gradient norms are apart.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

THREADS, VOCAB = 2, 4096
MODES = ("packed", "shared_prefix")
# About hidden 256 and 4 layers; the hybrid has two Mamba-2 layers, one of attention and one of squared-ReLU MLP.
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
HYBRID: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    "n_groups": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
CONFIGS = {"dense": DENSE, "hybrid": HYBRID}


def main() -> None:
    """Measures both modes of one model, or of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=tuple(CONFIGS))
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--action", type=int, default=64)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", choices=MODES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments)))
        return
    for model in [arguments.model] if arguments.model else CONFIGS:
        packed, shared = (in_own_process(arguments, model, mode) for mode in MODES)
        print(
            f"{model}, prefix {arguments.prefix}, action {arguments.action}, G {arguments.group}: "
            f"packed {packed['seconds']:.2f} s, {packed['growth_mb']:,.0f} MB ({packed['peak_mb']:,.0f} MB in all); "
            f"shared prefix {shared['seconds']:.2f} s, {shared['growth_mb']:,.0f} MB ({shared['peak_mb']:,.0f} MB in all)"
        )
        print(
            f"  time ratio {packed['seconds'] / shared['seconds']:.1f}, memory ratio {packed['growth_mb'] / shared['growth_mb']:.1f} "
            f"(whole process {packed['peak_mb'] / shared['peak_mb']:.1f}), relative difference of loss "
            f"{abs(packed['loss'] / shared['loss'] - 1):.1e}, of gradient norm {abs(packed['grad_norm'] / shared['grad_norm'] - 1):.1e}"
        )


def in_own_process(arguments: argparse.Namespace, model: str, mode: str) -> dict[str, float]:
    """One mode's measurement."""
    sizes = ("prefix", "action", "group", "repeats")
    command = [sys.executable, __file__, "--model", model, "--measure", mode]
    for name in sizes:
        command += [f"--{name}", str(getattr(arguments, name))]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds, memory, loss and gradient norm of a group's forward and backward, without the optimizer's part of a step."""
    import torch

    from pivotrl.config.schema import ParallelConfig
    from pivotrl.megatron.logprobs import token_scores
    from pivotrl.megatron.model import build_model
    from pivotrl.megatron.parallel import initialize_parallel
    from pivotrl.training.batching import train_batch, train_micro_batches

    torch.set_num_threads(THREADS)
    initialize_parallel(ParallelConfig(), seed=0)
    (model,) = build_model(CONFIGS[arguments.model], ParallelConfig())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill_parameter(name, parameter, generator)
    rows = group_samples(arguments, generator)
    tokens = arguments.group * (arguments.prefix + arguments.action)
    (batch,) = train_micro_batches(train_batch(rows), batching=arguments.measure, micro_batch_tokens=tokens, skip_zero_variance=True)
    loaded_mb, seconds, loss = peak_mb(), [], 0.0
    for _ in range(arguments.repeats):
        model.zero_grad()
        start = time.perf_counter()
        scores_2_B_T = token_scores(model, batch, temperature=1.0)
        total = -(scores_2_B_T[0] * batch.advantages_B[:, None]).sum() / batch.num_action_tokens
        total.backward()
        seconds.append(time.perf_counter() - start)
        loss = total.item()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
    return {"seconds": min(seconds), "growth_mb": peak_mb() - loaded_mb, "peak_mb": peak_mb(), "loss": loss, "grad_norm": norm}


def fill_parameter(name: str, parameter: Any, generator: Any) -> None:
    """Random matrices, norms of one, and a Mamba layer's decays and steps in their usual ranges.

    Matrices are wide enough that every layer matters beside the residual stream: narrower ones hide a wrong layer in the last digits.
    """
    if name.endswith("A_log"):
        parameter.uniform_(0.0, 2.7, generator=generator)
    elif name.endswith("dt_bias"):
        parameter.uniform_(-6.9, -2.3, generator=generator)
    elif name.endswith(("norm_weight", "norm.weight", ".D")):
        parameter.fill_(1.0)
    else:
        parameter.normal_(0.0, 0.1, generator=generator)


def group_samples(arguments: argparse.Namespace, generator: Any) -> list[Any]:
    """G samples of one random prompt."""
    import torch

    from pivotrl.types import TrainSample

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, VOCAB, (count,), generator=generator).tolist())

    prompt = draw(arguments.prefix)
    advantages = torch.randn(arguments.group, generator=generator).tolist()
    return [TrainSample("pivot", prompt, draw(arguments.action), advantage, (-1.0,) * arguments.action, 1.0) for advantage in advantages]


def peak_mb() -> float:
    """Largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
