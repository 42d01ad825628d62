"""Recipe sections `parallel` (how the trainer is laid out over processes) and `moe` (what happens to experts while it trains).

`parallel` changes memory and speed, never the gradient beyond float rounding, so it is no part of a stage's identity: an interrupted
stage may be resumed in another layout. `moe` changes what is computed. What a layout needs of a model and of the world size is
checked by megatron/layout.py before any process group exists; docs/parallelism.md explains each axis.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pivotrl.config.section import PositiveInt, Section


class ParallelConfig(Section):
    """Layout of the trainer; the processes that tensor, pipeline and context parallelism leave over are data parallel."""

    tensor_model_parallel_size: PositiveInt = 1
    """Processes that share each matrix (heads, inner widths, vocabulary)."""
    sequence_parallel: bool = False
    """Split norms and residual stream along the sequence over the tensor parallel processes. MoE with tensor parallelism needs it."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Stages of consecutive layers; schedule 1F1B."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    """Model chunks per stage (interleaved 1F1B); needs pipeline stages. None: one."""
    context_parallel_size: PositiveInt = 1
    """Processes that share each sequence."""
    expert_model_parallel_size: PositiveInt = 1
    """Processes over which the experts of a layer are dealt out; they are data and context parallel for everything else."""
    expert_tensor_parallel_size: PositiveInt | None = None
    """Processes that share each expert's matrices. None: tensor_model_parallel_size."""
    recompute: Literal["none", "full"] = "none"
    """Keep activations for the backward pass, or only each layer's input and compute the rest again: a third more compute, far less memory."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data parallel processes during the backward pass, not after it."""
    resume: Literal["full", "weights"] = "full"
    """What a resumed stage takes from its checkpoint: `weights` starts Adam's moments anew, for a layout the optimizer state cannot be moved to."""
    async_save: bool = False
    """Write checkpoints while training goes on, from a copy in host memory; a killed run may then resume from the checkpoint before."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """Stated peak of one process's device in TFLOP/s (989 for an H100 in bfloat16). None: no model FLOP utilisation is logged."""
    timeout_minutes: PositiveInt = 30
    """How long a process waits for the others inside one step before the run is given up; rollouts and other stages do not count."""


class MoeConfig(Section):
    """Training of mixture-of-experts models; without effect on dense ones, which refuse `router_replay`."""

    router: Literal["frozen", "trained"] = "trained"
    """Whether the router's weights learn."""
    expert_bias_update_rate: Annotated[float, Field(ge=0)] = 0.0
    """Step of the aux-loss-free balancing bias after each optimizer step (models that have such a bias); 0 keeps the checkpoint's."""
    router_replay: Literal["none", "updates", "rollout"] = "none"
    """Whose choice of experts the updates on a batch of rollouts repeat. `updates`: that of the pass which computed the old log-probs (with one
    update per rollout there is none). `rollout`: the engine's when it sampled, in the pass for old log-probs too; it must return them."""
