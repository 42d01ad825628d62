"""Time, traffic and GPU-hours of one optimizer step under stated efficiencies.

A model of the machine, not a measurement: every factor is a field of `EfficiencyConfig`, and a plan prints them with its result.
Communication is added to computation as if none of it were hidden; a group of processes that spans nodes runs at the network's pace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pivotrl.config.parallel import ParallelConfig
from pivotrl.config.planning import ClusterConfig, PlanConfig, WorkloadConfig
from pivotrl.megatron.architecture import LayerKind, expert_width, head_dim, layers, num_experts
from pivotrl.megatron.flops import Work, causal_pairs, forward_cost
from pivotrl.megatron.layout import expert_tensor_size
from pivotrl.planning.memory import key_value_bytes, ssm_bytes
from pivotrl.planning.weights import BFLOAT16_BYTES, FLOAT32_BYTES, count_parameters, count_tensors, stage_buffers

_GIGA, _TERA = 1e9, 1e12
_SECONDS_PER_HOUR = 3600
# Forward, backward's two products; a recomputed or a reference forward is one more.
_PASSES = 3


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes one GPU sends in one step, by kind of parallelism."""

    data: int
    """Gradients scattered, parameters gathered."""
    tensor: int
    context: int
    expert: int


@dataclass(frozen=True, slots=True)
class Cost:
    """One optimizer step."""

    training_flops: int
    """Of the whole step, recomputation left out."""
    traffic: Traffic
    num_micro_batches: int
    """Of one data parallel process."""
    rollout_s: float
    train_s: float
    sync_s: float
    step_s: float
    mfu: float
    """Of the trainer's GPUs while they train."""
    gpu_hours: float
    """Of the whole run."""


def step_cost(config: Any, parallel: ParallelConfig, plan: PlanConfig, cluster: ClusterConfig) -> Cost:
    """Cost of a step in a layout.

    Trainer and engine on the same GPUs compute in turn; on separate nodes they overlap (policy age of at most one step), so the slower one
    sets the pace.
    """
    num_gpus = (plan.num_nodes - plan.generation_nodes) * cluster.gpus_per_node
    work, efficiency = step_work(plan.workload), plan.efficiency
    flops = forward_cost(config).training_flops(work)
    extra = (parallel.recompute == "full") + plan.has_reference
    peak = num_gpus * cluster.peak_tflops * _TERA
    compute_s = flops * (1 + extra / _PASSES) / (peak * efficiency.kernels)
    data_size = num_gpus // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size)
    num_micro_batches = math.ceil(work.num_tokens / (plan.workload.micro_batch_tokens * data_size))
    chunks = num_micro_batches * (parallel.virtual_pipeline_model_parallel_size or 1)
    bubble = (parallel.pipeline_model_parallel_size - 1) / chunks
    traffic = _traffic(config, parallel, plan, work, num_gpus)
    network = cluster.network_gb_per_s * _GIGA * efficiency.network
    train_s = (compute_s + _exchange_s(traffic, parallel, plan, cluster)) * (1 + bubble) + traffic.data / network
    rollout_s = _rollout_s(config, plan, cluster)
    sync_s = _sync_s(config, plan, cluster, num_gpus)
    step_s = sync_s + (max(train_s, rollout_s) if plan.generation_nodes else train_s + rollout_s)
    hours = step_s * plan.workload.num_steps * plan.num_nodes * cluster.gpus_per_node / _SECONDS_PER_HOUR
    return Cost(flops, traffic, num_micro_batches, rollout_s, train_s, sync_s, step_s, flops / (peak * train_s), hours)


def step_work(workload: WorkloadConfig) -> Work:
    """Tokens, attention pairs and scored positions of a step."""
    groups, size, prompt, action = workload.pivots_per_step, workload.group_size, workload.prompt_tokens, workload.action_tokens
    prompts = groups if workload.is_prefix_shared else groups * size
    return Work(
        num_tokens=prompts * prompt + groups * size * action,
        num_pairs=prompts * causal_pairs(prompt) + groups * size * (action * prompt + causal_pairs(action)),
        num_scored=groups * size * action,
    )


def _traffic(config: Any, parallel: ParallelConfig, plan: PlanConfig, work: Work, num_gpus: int) -> Traffic:
    stages = range(parallel.pipeline_model_parallel_size)
    held = [stage_buffers(config, parallel, stage, world_size=num_gpus, is_bf16=True) for stage in stages]
    gradient_bytes = FLOAT32_BYTES if plan.gradient_dtype == "float32" else BFLOAT16_BYTES
    data = max(
        sum(part.num_elements * (gradient_bytes + BFLOAT16_BYTES) * (part.num_sharers - 1) // part.num_sharers for part in parts) for parts in held
    )
    model_size = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    # Tokens that pass through one process: its data parallel share, and of that its part of each sequence.
    tokens = work.num_tokens * model_size // num_gpus
    kinds = [kind for layer in layers(config) for kind in layer]
    per_stage = 1 / parallel.pipeline_model_parallel_size
    tensor, context, experts = parallel.tensor_model_parallel_size, parallel.context_parallel_size, parallel.expert_model_parallel_size
    # Per block two exchanges of the residual stream forward (gather, scatter) and two backward.
    stream = 4 * config.hidden_size * BFLOAT16_BYTES * (tensor - 1) / tensor * len(kinds)
    # Keys and values of the other processes, gathered forward, again backward, and their gradients scattered.
    keys = 2 * config.num_key_value_heads * head_dim(config) * BFLOAT16_BYTES / tensor
    ring = 3 * keys * (context - 1) * kinds.count(LayerKind.ATTENTION)
    exchange = 0.0
    if num_experts(config):
        copies = config.num_experts_per_tok * expert_width(config) * BFLOAT16_BYTES
        share = 1 / tensor if parallel.sequence_parallel else 1.0
        exchange = 4 * copies * share * (experts - 1) / experts * kinds.count(LayerKind.MOE)
    return Traffic(data, *(round(volume * tokens * per_stage) for volume in (stream, ring, exchange)))


def _exchange_s(traffic: Traffic, parallel: ParallelConfig, plan: PlanConfig, cluster: ClusterConfig) -> float:
    """Tensor parallel processes are neighbours, context parallel ones come next, and experts are dealt out over neighbours too."""
    tensor = parallel.tensor_model_parallel_size
    spans = (
        (traffic.tensor, tensor),
        (traffic.context, tensor * parallel.context_parallel_size),
        (traffic.expert, expert_tensor_size(parallel) * parallel.expert_model_parallel_size),
    )
    link, network = (rate * _GIGA * plan.efficiency.network for rate in (cluster.link_gb_per_s, cluster.network_gb_per_s))
    return sum(volume / (link if span <= cluster.gpus_per_node else network) for volume, span in spans)


def _sync_s(config: Any, plan: PlanConfig, cluster: ClusterConfig, num_gpus: int) -> float:
    """One hand-over of all weights, `placement.transfer: nccl` where engines have nodes of their own, else through /dev/shm.

    All passes through the trainer's process 0: gathered there over its one adapter, digested on its GPU, then sent on. By `nccl` every worker of
    every engine receives all tensors over that adapter's other direction, digests them on its GPU and loads its part, while the sender gathers the
    next bucket: the slower end counts. Through /dev/shm the sender copies them there, a replica digests them on the host and, where it has several
    GPUs, writes them once more for its workers to read in the end.
    """
    num_bytes, efficiency = count_parameters(config).total * BFLOAT16_BYTES / _GIGA, plan.efficiency
    network, copy_s = num_bytes / (cluster.network_gb_per_s * efficiency.network), num_bytes / efficiency.host_copy_gb_per_s
    gather_s = network if num_gpus > cluster.gpus_per_node else num_bytes / (cluster.link_gb_per_s * efficiency.network)
    tensors_s = count_tensors(config) * efficiency.tensor_s
    device_s = num_bytes / efficiency.device_digest_gb_per_s + tensors_s
    if plan.generation_nodes:
        return max(gather_s, network) + device_s
    has_workers = plan.generation_tensor_parallel_size > 1
    replica_s = num_bytes / efficiency.digest_gb_per_s + copy_s * has_workers + tensors_s
    return copy_s + max(gather_s + device_s, replica_s) + copy_s * has_workers


def _rollout_s(config: Any, plan: PlanConfig, cluster: ClusterConfig) -> float:
    """Reading prompts is bound by arithmetic, generating by memory: each decoding step reads the weights that its sequences touch."""
    workload, efficiency, ranks = plan.workload, plan.efficiency, plan.generation_tensor_parallel_size
    num_gpus = (plan.generation_nodes or plan.num_nodes) * cluster.gpus_per_node
    replicas = max(num_gpus // ranks, 1)
    prompts = Work(workload.pivots_per_step * workload.prompt_tokens, workload.pivots_per_step * causal_pairs(workload.prompt_tokens), num_scored=0)
    prefill_s = forward_cost(config).forward_flops(prompts) / (num_gpus * cluster.peak_tflops * _TERA * efficiency.prefill_mfu)
    sequences = math.ceil(workload.pivots_per_step * workload.group_size / replicas)
    together = min(sequences, plan.max_num_seqs)
    context = workload.prompt_tokens + workload.action_tokens / 2
    read = touched_weight_bytes(config, together) / ranks + together * (context * key_value_bytes(config, ranks) + 2 * ssm_bytes(config, ranks))
    rounds = math.ceil(sequences / together)
    return prefill_s + rounds * workload.action_tokens * read / (cluster.memory_tb_per_s * _TERA * efficiency.decode_bandwidth)


def touched_weight_bytes(config: Any, num_sequences: int) -> int:
    """Weights that one decoding step of several sequences reads: of each layer's experts the expected number that at least one sequence chose."""
    counts = count_parameters(config)
    rest = counts.total - counts.embedding - counts.routed
    share = 1 - (1 - config.num_experts_per_tok / num_experts(config)) ** num_sequences if counts.routed else 0.0
    return round((rest + share * counts.routed) * BFLOAT16_BYTES)
