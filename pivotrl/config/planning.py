"""Files and options of `pivotrl plan`: a cluster, a workload, and the knobs that trade memory for time.

Not part of a recipe: a plan asks what would fit. Units are in the names; GB/s and TFLOP/s are decimal, GiB are binary.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pivotrl.config.parallel import ParallelConfig
from pivotrl.config.section import Fraction01, PositiveInt, Section

PositiveFloat = Annotated[float, Field(gt=0)]


class ClusterConfig(Section):
    """One kind of GPU node."""

    name: str
    """Shown in tables."""
    gpus_per_node: PositiveInt
    """GPUs joined by the fast link."""
    gpu_memory_gib: PositiveFloat
    """Memory of one GPU as the driver reports it."""
    peak_tflops: PositiveFloat
    """Dense bfloat16 peak of one GPU, without sparsity."""
    memory_tb_per_s: PositiveFloat
    """Bandwidth of one GPU's memory."""
    link_gb_per_s: PositiveFloat
    """Between GPUs of a node, per GPU and direction."""
    network_gb_per_s: PositiveFloat
    """Between nodes, per GPU and direction."""
    host_memory_gib: PositiveFloat
    """Memory of a node's host."""
    source: str
    """Where the figures come from."""


class WorkloadConfig(Section):
    """What one optimizer step trains on."""

    pivots_per_step: PositiveInt = 64
    """B, groups of a step."""
    group_size: PositiveInt = 16
    """G, actions of a group."""
    prompt_tokens: PositiveInt = 8_192
    """Mean tokens of a state."""
    action_tokens: PositiveInt = 512
    """Mean tokens of an action."""
    max_sequence_tokens: PositiveInt = 32_768
    """Longest prompt plus action: memory must hold it."""
    micro_batch_tokens: PositiveInt = 32_768
    """Tokens of one forward pass of a data parallel process."""
    is_prefix_shared: bool = True
    """Whether a group's prompt is forwarded once (`batching: shared_prefix`)."""
    episode_turns: PositiveInt = 18
    """Mean turns of an episode, for recipes that train on whole ones (the paper's SWE episodes have 12 to 25)."""
    num_steps: PositiveInt = 200
    """Optimizer steps of the whole run."""


class EfficiencyConfig(Section):
    """Stated shares of the hardware's peak: assumptions, which a plan's times are no better than. Measure and replace them."""

    kernels: Fraction01 = 0.45
    """Of peak_tflops while a trainer process computes; communication is added, none of it taken as hidden."""
    decode_bandwidth: Fraction01 = 0.50
    """Of memory bandwidth while generating token by token."""
    prefill_mfu: Fraction01 = 0.40
    """Of peak_tflops while reading prompts."""
    network: Fraction01 = 0.70
    """Of link and network bandwidth in collectives."""
    device_digest_gb_per_s: PositiveFloat = 40.0
    """A tensor's digest on its GPU, one process: 26 bytes of memory traffic per byte. Not measured."""
    digest_gb_per_s: PositiveFloat = 5.0
    """A tensor's digest on the host, one process, where weights reach an engine through /dev/shm."""
    tensor_s: PositiveFloat = 0.0005
    """Host's work per tensor at each end of a hand-over, seconds: names, launches, vLLM's loader."""
    host_copy_gb_per_s: PositiveFloat = 3.0
    """Tensors into /dev/shm, and out of it into an engine."""
    expert_imbalance: Annotated[float, Field(ge=1)] = 1.5
    """Tokens of the busiest expert parallel process over the mean: room in its buffers."""


class PlanConfig(Section):
    """Options of a plan; `key=value` words on the command line override them."""

    num_nodes: PositiveInt = 1
    """Nodes of the job, generation nodes included."""
    generation_nodes: Annotated[int, Field(ge=0)] = 0
    """Nodes that only generate; 0: trainer and engine share GPUs, and both stay in their memory."""
    generation_tensor_parallel_size: PositiveInt = 8
    """GPUs of one engine replica."""
    max_num_seqs: PositiveInt = 64
    """Sequences one engine replica runs together."""
    engine_memory_frac: Fraction01 | None = None
    """Share of a GPU that the engine takes, as engine.gpu_memory_utilization says. None: 0.85 of a GPU of its own; beside a trainer what it needs."""
    engine_sleeps: bool = False
    """Whether an engine on the trainer's GPUs frees its memory while the trainer computes. Not in this trainer; published layouts may need it."""
    parallel: ParallelConfig | None = None
    """The trainer's layout; None: propose the best ones."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Format of the gradient buffers: train.optimizer.gradient_dtype."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Format of Adam's two moments (precision-aware optimizer); the main weights stay in float32. Not in this trainer, whose moments are float32."""
    optimizer_offload_frac: Fraction01 = 0.0
    """Share of optimizer state kept in host memory. Not in this trainer, which keeps it all on the GPU."""
    checkpoint_gathers: bool = True
    """Whether each process gathers its model part's whole optimizer state to write a checkpoint, as this trainer does; published stacks may not."""
    has_reference: bool = False
    """Whether a frozen copy of the initial policy is kept on the GPU (KL with beta > 0)."""
    fixed_gib: PositiveFloat = 4.0
    """CUDA context, communication buffers and workspaces of one process."""
    fixed_host_gib: PositiveFloat = 8.0
    """Host memory of one process: program, libraries, pinned buffers."""
    margin_frac: Fraction01 = 0.08
    """Share of a GPU, and of a host, left free for fragmentation and the system."""
    workload: WorkloadConfig = WorkloadConfig()
    """What a step trains on."""
    efficiency: EfficiencyConfig = EfficiencyConfig()
    """Stated efficiencies."""
