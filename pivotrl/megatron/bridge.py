"""Mixture-of-experts and hybrid models through Megatron-Bridge: configuration, and weights by Hugging Face name in any parallel layout.

The only file that knows Megatron-Bridge (the extra `bridge`). It is imported when such a model is built, never before: the import takes
nearly as long as megatron-core's. Dense families do without it.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from pivotrl.config.schema import MoeConfig
from pivotrl.errors import UserError
from pivotrl.megatron.dense_weights import HEAD
from pivotrl.megatron.hf_checkpoint import CheckpointTensors
from pivotrl.megatron.model import LanguageModel, stage_ends, virtual_stages
from pivotrl.megatron.upstream import PLATFORM, AttnBackend, GPTModel, HybridModel, get_gpt_layer_with_transformer_engine_spec

_TRANSFORMER_ENGINE = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.ops")


def build_chunks(hf: Any, arguments: Mapping[str, Any], moe: MoeConfig) -> list[LanguageModel]:
    """This process's chunks of a model, configured by Megatron-Bridge's provider for the family.

    The provider serves as upstream's configuration. Its own `provide` is not called: it has no virtual pipeline stages for hybrids.

    Args:
        hf: the transformers configuration, as `families.read_family` returns it.
        arguments: fields of TransformerConfig that platform and layout determine.
        moe: what happens to experts in training.

    Raises:
        UserError: where Megatron-Bridge is not installed.
    """
    if hf.model_type == "nemotron_h":
        # Heads that predict further tokens are left out: reinforcement learning trains none. Their tensors are carried from source to export.
        hf.num_nextn_predict_layers = 0
    config = _auto_bridge(hf).to_megatron_provider(load_weights=False)
    # The provider turns these on for GPUs; the trainer adds no auxiliary loss, since nothing would scale it by the step's denominator.
    experts = {
        "moe_grouped_gemm": PLATFORM.is_gpu,
        "moe_permute_fusion": PLATFORM.is_gpu,
        "moe_shared_expert_overlap": False,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_bias_update_rate": moe.expert_bias_update_rate,
        "moe_enable_routing_replay": moe.router_replay != "none",
        # Upstream's fused router returns before replay is asked.
        "moe_router_fusion": False,
        "moe_token_dispatcher_type": "alltoall",
        "attention_backend": AttnBackend.auto,
        "cross_entropy_loss_fusion": False,
        # Upstream fuses gated activations alone and refuses squared ReLU.
        "bias_activation_fusion": PLATFORM.is_gpu and config.gated_linear_unit,
    }
    for name, value in {**arguments, **experts}.items():
        if not hasattr(config, name):
            raise ValueError(f"Megatron-Bridge's {type(config).__name__} has no field {name}")
        setattr(config, name, value)
    stages = virtual_stages(config.virtual_pipeline_model_parallel_size)
    if hf.model_type == "nemotron_h":
        # Without a mark per stage upstream cannot tell virtual stages apart.
        config.hybrid_layer_pattern = _mark_stages(hf.hybrid_override_pattern, config.pipeline_model_parallel_size * len(stages))
    config.finalize()
    build = _hybrid_chunk if hf.model_type == "nemotron_h" else _gpt_chunk
    chunks = [build(config, stage) for stage in stages]
    for chunk in chunks:
        chunk.hf_config = hf
        if moe.router == "frozen":
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad_(".router." not in name)
    return chunks


def load(chunks: Sequence[LanguageModel], tensors: CheckpointTensors) -> None:
    """Fills every parameter and persistent buffer of this process; the caller has checked `expected_names`.

    Raises:
        UserError: where a tensor has another shape than config.json says.
    """
    source = _Source(_hf_config(chunks), tensors)
    try:
        _model_bridge(chunks).load_weights_hf_to_megatron(source, list(chunks))
    except (ValueError, RuntimeError, AssertionError, IndexError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{' and '.join(source.state.last_read)} do not fit: {' '.join(str(error).split())}",
            rule="config.json says which shape each tensor has",
            fix="check that config.json belongs to these weights",
        ) from error


def export(chunks: Sequence[LanguageModel]) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights of the whole model by Hugging Face name, in the model's number format, on every process; collective."""
    hf = _hf_config(chunks)
    exported = _model_bridge(chunks).stream_weights_megatron_to_hf(list(chunks), hf, cpu=False, show_progress=False, merge_adapter_weights=False)
    for name, tensor in exported:
        if not (name == HEAD and hf.tie_word_embeddings):
            yield name, tensor


def expected_names(chunks: Sequence[LanguageModel]) -> set[str]:
    """Names of all tensors the whole model is made of; collective over the run.

    Raises:
        ValueError: where Megatron-Bridge has no mapping for a parameter of this process.
    """
    tasks = [task for task in _model_bridge(chunks).build_conversion_tasks(_hf_config(chunks), list(chunks)) if task and task.megatron_module]
    mapped = {(task.vp_stage, task.param_name) for task in tasks}
    # A tied head on the last pipeline stage is filled from the embedding.
    own = {(stage, name) for stage, chunk in enumerate(chunks) for name in chunk.state_dict() if not name.endswith("_extra_state")}
    unmapped = own - mapped - {(len(chunks) - 1, "output_layer.weight")}
    if unmapped:
        raise ValueError(f"Megatron-Bridge maps no tensor to {sorted(name for _, name in unmapped)}")
    names = {name for task in tasks for name in _hf_names(task.mapping.hf_param)}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, names)
    return set().union(*everyone)


@functools.cache
def import_bridge() -> Any:
    """Megatron-Bridge's AutoBridge, imported at the first call.

    Raises:
        UserError: where it is not installed.
    """
    if importlib.util.find_spec("megatron.bridge") is None:
        raise UserError(
            "Megatron-Bridge is not installed",
            rule="weights of mixture-of-experts and hybrid models are mapped by it",
            fix="install pivotrl with the extra `bridge`",
        )
    # The second reports every optional package that is absent, whatever its level.
    logging.getLogger("megatron.bridge").setLevel(logging.ERROR)
    logging.getLogger("megatron.bridge.utils.import_utils").disabled = True
    with _stand_in_for_transformer_engine():
        from megatron.bridge import AutoBridge
    return AutoBridge


def _gpt_chunk(config: Any, stage: int | None) -> GPTModel:
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=config.qk_layernorm
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=config.vocab_size,
        max_sequence_length=config.seq_length,
        share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=config.rotary_base,
        vp_stage=stage,
        **stage_ends(stage),
    )


def _hybrid_chunk(config: Any, stage: int | None) -> HybridModel:
    from megatron.bridge.models.hybrid.hybrid_provider import transformer_engine_hybrid_stack_spec

    return HybridModel(
        config=config,
        hybrid_stack_spec=transformer_engine_hybrid_stack_spec(),
        vocab_size=config.vocab_size,
        max_sequence_length=config.seq_length,
        hybrid_layer_pattern=config.hybrid_layer_pattern,
        share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
        position_embedding_type="none",
        vp_stage=stage,
        **stage_ends(stage),
    )


def _mark_stages(pattern: str, count: int) -> str:
    """The layer pattern with a bar between pipeline stages of equal depth.

    >>> _mark_stages("MEM*", 2)
    'ME|M*'
    """
    depth = len(pattern) // count
    return "|".join(pattern[start : start + depth] for start in range(0, len(pattern), depth))


def _mamba_rows(hf: Any) -> dict[str, int]:
    """Rows of the tensors that Megatron-Bridge takes apart by row number, so that it would not notice rows too many."""
    inner: int = hf.mamba_num_heads * hf.mamba_head_dim
    mixed: int = 2 * hf.n_groups * hf.ssm_state_size
    convolution = dict.fromkeys(("mixer.conv1d.weight", "mixer.conv1d.bias"), inner + mixed)
    return {"mixer.in_proj.weight": 2 * inner + mixed + hf.mamba_num_heads, **convolution}


def _hf_names(hf_param: str | Mapping[str, str]) -> list[str]:
    return [hf_param] if isinstance(hf_param, str) else list(hf_param.values())


def _hf_config(chunks: Sequence[LanguageModel]) -> Any:
    """The configuration that `build_chunks` left with every chunk."""
    return chunks[0].hf_config


def _model_bridge(chunks: Sequence[LanguageModel]) -> Any:
    bridge = _auto_bridge(_hf_config(chunks))._model_bridge
    # Its progress bar is not the trainer's.
    bridge._with_progress_tracking = lambda tasks, *_arguments: tasks
    return bridge


def _auto_bridge(hf: Any) -> Any:
    return import_bridge().from_hf_config(hf)


class _AnyName:
    """Says of every name that the checkpoint has it: missing ones were found before, and Megatron-Bridge would skip them with a warning."""

    def get_all_keys(self) -> _AnyName:
        return self

    def __contains__(self, name: object) -> bool:
        return True


class _State(Mapping[str, torch.Tensor]):
    """The checkpoint's tensors as Megatron-Bridge reads them."""

    source = _AnyName()

    def __init__(self, tensors: CheckpointTensors, rows: Mapping[str, int]) -> None:
        self._tensors = tensors
        self._rows = rows
        self.last_read: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> torch.Tensor:
        # The parts of one parameter are read one after the other; enough to name what did not fit.
        self.last_read = (*self.last_read[-2:], name)
        tensor = self._tensors.read(name)
        for suffix, rows in self._rows.items():
            if name.endswith(suffix) and len(tensor) != rows:
                raise ValueError(f"{name} has {len(tensor)} rows, not {rows}")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors.files)

    def __len__(self) -> int:
        return len(self._tensors.files)


class _Source:
    """A checkpoint in the place of Megatron-Bridge's own wrapper, which reads files without naming what is wrong with them."""

    def __init__(self, config: Any, tensors: CheckpointTensors) -> None:
        self.config = config
        self.state = _State(tensors, _mamba_rows(config) if config.model_type == "nemotron_h" else {})
        self.model_name_or_path = "checkpoint"


@contextmanager
def _stand_in_for_transformer_engine() -> Iterator[None]:
    """Megatron-Bridge's adapters name transformer-engine's classes as bases at import. Where it is absent, empty classes serve.

    Visible only inside the block: whoever looks for transformer-engine later must find that it is absent.
    """
    if importlib.util.find_spec("transformer_engine") is not None:
        yield
        return
    for name in _TRANSFORMER_ENGINE:
        sys.modules[name] = _EmptyClasses(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    try:
        yield
    finally:
        for name in _TRANSFORMER_ENGINE:
            del sys.modules[name]


class _EmptyClasses(ModuleType):
    """A module with an empty class of every name."""

    __path__: list[str] = []  # noqa: RUF012 (a module's own attribute)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
