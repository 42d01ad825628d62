"""The checkpoint that a run starts from: its configuration, its files, and whether they belong together.

Reads configuration and safetensors headers, never a weight, so that 120 billion parameters take a second. Whether each tensor has the shape
the trainer wants is known once the trainer loads it; here their sum must be what the configuration describes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pivotrl.config.engines import ScriptedEngineConfig
from pivotrl.config.load import LoadedRecipe
from pivotrl.config.schema import HuggingFaceModel, ScratchModel
from pivotrl.doctor.findings import Findings
from pivotrl.doctor.settings import place
from pivotrl.megatron.families import read_family
from pivotrl.megatron.hf_config import CONFIG, read_config
from pivotrl.megatron.hf_names import is_carried, is_derived
from pivotrl.megatron.layout import ModelShape, check_model, check_shared_prefix, check_world
from pivotrl.megatron.safetensors_headers import num_values, read_shapes
from pivotrl.planning.inputs import load_model
from pivotrl.planning.weights import count_parameters

_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight")
# Buffers that checkpoints store beside the parameters: the router's balancing bias.
_BUFFERS = ("e_score_correction_bias",)


def model_config(loaded: LoadedRecipe, checkpoint: Path, model_file: Path | None, findings: Findings) -> Any | None:
    """Configuration of the model that the recipe trains, or None where nothing here describes it.

    Args:
        checkpoint: directory that the recipe starts from; it need not exist.
        model_file: a YAML file that stands in for a checkpoint which is elsewhere.
    """
    model = loaded.recipe.model
    with findings.refused_by("checkpoint-config", str(checkpoint)):
        if (checkpoint / CONFIG).is_file():
            return read_family(read_config(checkpoint))
        if isinstance(model, ScratchModel):
            return read_family(_scratch_config(model))
        if model_file is not None:
            return load_model(model_file)[1]
        if isinstance(model, HuggingFaceModel) and checkpoint.is_dir():
            read_config(checkpoint)
    return None


def check_checkpoint(loaded: LoadedRecipe, checkpoint: Path, config: Any | None, findings: Findings) -> None:
    """Files whole, complete, and of the model that config.json describes."""
    if not checkpoint.is_dir():
        if isinstance(loaded.recipe.model, HuggingFaceModel):
            findings.error(
                "checkpoint-files",
                f"{checkpoint} is not a directory",
                where=place(loaded, "model.path"),
                rule="a run starts from a checkpoint in Hugging Face form",
                fix="correct model.path, or convert a Megatron checkpoint with `pivotrl convert --from megatron --to hf`",
            )
        else:
            findings.not_checked["checkpoint"] = "the run makes it"
        return
    from pivotrl.megatron.hf_checkpoint import weight_files

    shapes: dict[str, tuple[int, ...]] = {}
    promised: dict[str, Path] = {}
    with findings.refused_by("checkpoint-files", str(checkpoint)):
        promised = weight_files(checkpoint)
        for file in sorted(set(promised.values())):
            with findings.refused_by("checkpoint-files", str(file)):
                shapes |= read_shapes(file)
    if not shapes or any(one.check == "checkpoint-files" for one in findings.found):
        return
    if set(promised) != set(shapes):
        odd = sorted(set(promised) ^ set(shapes))
        findings.error(
            "checkpoint-index",
            f"{len(odd)} tensors are in the index or in the files but not in both, first {odd[0]}",
            where=str(checkpoint),
            rule="the index names every tensor and the file that holds it",
            fix="copy the checkpoint again, index and files together",
        )
    elif config is not None:
        _check_tensors(shapes, config, checkpoint, findings)


def _check_tensors(shapes: dict[str, tuple[int, ...]], config: Any, checkpoint: Path, findings: Findings) -> None:
    def is_trained(name: str) -> bool:
        is_repeated = name == _HEAD and config.tie_word_embeddings
        return not (is_repeated or is_carried(name) or is_derived(name) or name.endswith(_BUFFERS))

    found, expected = num_values({name: shape for name, shape in shapes.items() if is_trained(name)}), count_parameters(config).total
    embedding = next((shape for name, shape in shapes.items() if name.endswith(_EMBEDDINGS)), None)
    wanted = (config.vocab_size, config.hidden_size)
    if embedding is not None and embedding != wanted:
        problem = f"the embedding has shape {embedding} and {CONFIG} describes {wanted}"
    elif found != expected:
        problem = f"the files hold {found:,} parameters and {CONFIG} describes {expected:,}"
    else:
        findings.figures["parameters"] = expected
        return
    findings.error(
        "checkpoint-tensors", problem, where=str(checkpoint), rule="config.json must belong to these weights", fix="copy both from one place"
    )


def check_layout(loaded: LoadedRecipe, config: Any, world_size: int, findings: Findings, *, parallel_key: str) -> None:
    """Whether the trainer's layout is possible for the model on that many processes, by the trainer's own rules.

    Args:
        parallel_key: where the layout was stated, for the findings.
    """
    recipe, shape = loaded.recipe, ModelShape.of(config)
    with findings.refused_by("layout", parallel_key):
        check_world(recipe.parallel, world_size)
    with findings.refused_by("layout", parallel_key):
        check_model(recipe.parallel, recipe.moe, shape)
        if recipe.train.batching == "shared_prefix":
            check_shared_prefix(recipe.parallel, shape)
    if not shape.num_experts:
        if not isinstance(recipe.engine, ScriptedEngineConfig) and recipe.engine.enable_return_routed_experts:
            findings.error(
                "layout",
                "engine.enable_return_routed_experts is true and the model has no experts",
                where=place(loaded, "engine.enable_return_routed_experts"),
                rule="only routers choose experts",
                fix="leave it out",
            )
        for key in sorted(key for key in loaded.origins if key.startswith("moe.") and loaded.origins[key] != "default"):
            findings.warn(
                "unread-key", f"{key} is set", where=place(loaded, key), rule="nothing reads it: the model has no experts", fix="leave it out"
            )


def check_context(loaded: LoadedRecipe, config: Any, findings: Findings) -> None:
    """Whether the longest sequences fit the model's context, where its configuration states one."""
    context = getattr(config, "max_position_embeddings", None)
    if context is None:
        findings.not_checked["context"] = "the model's description states no max_position_embeddings"
        return
    recipe = loaded.recipe
    longest = recipe.render.max_prompt_tokens + recipe.sampling.max_new_tokens
    asked = [("render.max_prompt_tokens", "render.max_prompt_tokens + sampling.max_new_tokens", longest)]
    if recipe.sft is not None:
        asked.append(("sft.max_sequence_tokens", "sft.max_sequence_tokens", recipe.sft.max_sequence_tokens))
    for key, name, num_tokens in asked:
        if num_tokens > context:
            findings.error(
                "context",
                f"{name} is {num_tokens} and the model's max_position_embeddings is {context}",
                where=place(loaded, key),
                rule="positions beyond it mean nothing to the model",
                fix=f"lower it to {context} in all",
            )


def _scratch_config(model: ScratchModel) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "max_position_embeddings": model.max_position_embeddings,
        "tie_word_embeddings": True,
    }
