"""A recipe as a NeMo-RL GRPO configuration, so that a lab can compare with that stack or fall back to it.

Each line of the table below says which of their keys has the meaning of which of ours, and with which value. What has no equivalent there is
listed with the reason, never dropped. Key names are facts from two of their example files, kept in nemo_rl_keys.json; nothing is imported
from them, and no run of theirs has been made with the result. Called by verbs/gym.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pivotrl.config.correction import TruncatedCorrection
from pivotrl.config.engines import VllmEngineConfig
from pivotrl.config.schema import HuggingFaceModel, Recipe
from pivotrl.errors import UserError
from pivotrl.types import Domain

KEYS = Path(__file__).with_name("nemo_rl_keys.json")
ROWS = "train.jsonl"
BASE = "grpo_math_1B.yaml"
"""The file of theirs that the configuration extends: put it into the same folder, examples/configs."""
_GPUS_PER_NODE = 8
# The graders of the public pivot rows, one configuration file per domain.
_GRADERS = "resources_servers/single_step_tool_use_with_argument_comparison/configs"
_GRADER_FILES = {
    Domain.CONVERSATIONAL: f"{_GRADERS}/single_step_tool_use_with_argument_comparison.yaml",
    Domain.SWE: f"{_GRADERS}/swe_pivot_single_step_tool_use_with_argument_comparison.yaml",
    Domain.SEARCH: f"{_GRADERS}/search_pivot_single_step_tool_use_with_argument_comparison.yaml",
    Domain.TERMINAL: "resources_servers/terminus_judge/configs/terminus_judge_simple.yaml",
}
_MODEL_SERVER = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"


@dataclass(frozen=True, slots=True)
class Line:
    """One of their keys.

    >>> Line("grpo.seed", "seed", 1).theirs
    'grpo.seed'
    """

    theirs: str
    ours: str
    """Our key, or why the value is what it is where no key of ours says it."""
    value: Any


def lines_of(recipe: Recipe, *, model: str, rows: Path) -> list[Line]:
    """The configuration, key by key.

    Args:
        model: the checkpoint's directory.
        rows: the NeMo-Gym rows to train on.
    """
    return [
        Line("defaults", "what this file leaves out", BASE),
        *_method(recipe),
        *_trainer(recipe, model),
        *_generation(recipe),
        *_data(recipe, rows),
    ]


def without_equivalent(recipe: Recipe) -> dict[str, str]:
    """Keys of ours that no key of theirs expresses, with what that means. Only those that this recipe uses."""
    return {key: reason for key, applies, reason in _NO_EQUIVALENT if applies(recipe)}


def as_config(lines: list[Line]) -> dict[str, Any]:
    """The nested mapping of dotted keys."""
    config: dict[str, Any] = {}
    for line in lines:
        *above, last = line.theirs.split(".")
        section = config
        for name in above:
            section = section.setdefault(name, {})
        section[last] = line.value
    return config


def known_keys() -> Mapping[str, str]:
    """The example file that each of their keys was seen in."""
    return {key: file for file, keys in json.loads(KEYS.read_text())["files"].items() for key in keys}


def check_exportable(recipe: Recipe) -> None:
    """Refuses a recipe that no configuration there could start.

    Raises:
        UserError: where the model is no checkpoint directory, or the recipe has no pivots.
    """
    if "select" not in recipe.stages:
        raise UserError(
            f"recipe {recipe.name} has the stages {', '.join(recipe.stages)}",
            rule="what is exported is a recipe of pivots and its rows",
            fix="export the recipe that this one is the baseline of; the rows of an environment are NeMo-Gym's already",
        )
    if not isinstance(recipe.model, HuggingFaceModel):
        raise UserError(
            f"model.type is {recipe.model.type}", rule="NeMo-RL starts from a Hugging Face checkpoint", fix="train it first, then name the checkpoint"
        )


def _method(recipe: Recipe) -> Iterator[Line]:
    train, validation = recipe.train, recipe.train.validation
    leaves_one_out, normalises = train.advantage.startswith("leave_one_out"), train.advantage in ("mean_std", "leave_one_out_std")
    yield Line("grpo.num_prompts_per_step", "train.pivots_per_step", train.pivots_per_step)
    yield Line("grpo.num_generations_per_prompt", "train.group_size", train.group_size)
    yield Line("grpo.max_rollout_turns", "a pivot is one turn", 1)
    yield Line("grpo.max_num_steps", "train.num_steps / train.updates_per_rollout", train.num_steps // train.updates_per_rollout)
    yield Line("grpo.normalize_rewards", "train.advantage", normalises)
    yield Line("grpo.use_leave_one_out_baseline", "train.advantage", leaves_one_out)
    yield Line("grpo.overlong_filtering", "sampling.truncated", recipe.sampling.truncated == "mask")
    yield Line("grpo.seed", "seed", recipe.seed)
    yield Line("grpo.async_grpo.enabled", "train.max_policy_age", train.max_policy_age > 0)
    yield Line("grpo.async_grpo.max_trajectory_age_steps", "train.max_policy_age", max(train.max_policy_age, 1))
    if validation is not None:
        yield Line("grpo.val_period", "train.validation.every_steps", validation.every_steps)
        yield Line("grpo.val_at_start", "step 0 is always validated", True)
        yield Line("grpo.max_val_samples", "train.validation.num_pivots", validation.num_pivots)
        yield Line("grpo.num_val_generations_per_prompt", "train.validation.num_samples", validation.num_samples)
    yield Line("loss_fn.reference_policy_kl_penalty", "train.kl.beta", train.kl.beta)
    yield Line("loss_fn.ratio_clip_min", "train.clip.low", train.clip.low)
    yield Line("loss_fn.ratio_clip_max", "train.clip.high", train.clip.high)
    yield Line("loss_fn.ratio_clip_c", "Eq. 7 has no second clip", None)
    yield Line("loss_fn.token_level_loss", "train.aggregation", train.aggregation == "token")
    yield Line("loss_fn.sequence_level_importance_ratios", "Eq. 7 has a ratio per token", False)
    yield Line("loss_fn.use_importance_sampling_correction", "train.correction", train.correction is not None)
    if isinstance(train.correction, TruncatedCorrection) and train.correction.level == "token":
        yield Line("loss_fn.truncated_importance_sampling_ratio", "train.correction.cap", train.correction.cap)
        yield Line("loss_fn.truncated_importance_sampling_type", "train.correction.type", "tis")


def _trainer(recipe: Recipe, model: str) -> Iterator[Line]:
    train, optimizer, parallel, megatron = recipe.train, recipe.train.optimizer, recipe.parallel, "policy.megatron_cfg"
    yield Line("policy.model_name", "model.path", model)
    yield Line("policy.precision", "a GPU trains in bfloat16", "bfloat16")
    num_actions = train.pivots_per_step * train.group_size
    yield Line("policy.train_global_batch_size", "actions of one optimizer step", num_actions // train.updates_per_rollout)
    longest = recipe.render.max_prompt_tokens + recipe.sampling.max_new_tokens
    yield Line("policy.max_total_sequence_length", "render.max_prompt_tokens + sampling.max_new_tokens", longest)
    yield Line("policy.max_grad_norm", "train.optimizer.max_grad_norm", optimizer.max_grad_norm)
    yield Line("policy.sequence_packing.enabled", "train.batching", train.batching != "padded")
    yield Line("policy.sequence_packing.train_mb_tokens", "train.micro_batch_tokens", train.micro_batch_tokens)
    yield Line("policy.dtensor_cfg.enabled", "the trainer is megatron-core", False)
    yield Line(f"{megatron}.enabled", "the trainer is megatron-core", True)
    yield Line(f"{megatron}.activation_checkpointing", "parallel.recompute", parallel.recompute == "full")
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"):
        yield Line(f"{megatron}.{key}", f"parallel.{key}", getattr(parallel, key))
    expert_tensor_size = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    yield Line(f"{megatron}.expert_tensor_parallel_size", "parallel.expert_tensor_parallel_size", expert_tensor_size)
    yield Line(f"{megatron}.sequence_parallel", "parallel.sequence_parallel", parallel.sequence_parallel)
    yield Line(f"{megatron}.freeze_moe_router", "moe.router", recipe.moe.router == "frozen")
    yield Line(f"{megatron}.moe_router_bias_update_rate", "moe.expert_bias_update_rate", recipe.moe.expert_bias_update_rate)
    yield Line(f"{megatron}.optimizer.optimizer", "the optimizer is Adam", "adam")
    yield Line(f"{megatron}.optimizer.lr", "train.optimizer.lr", optimizer.lr)
    yield Line(f"{megatron}.optimizer.min_lr", "train.optimizer.decay", optimizer.lr if optimizer.decay == "constant" else optimizer.lr / 10)
    yield Line(f"{megatron}.optimizer.weight_decay", "train.optimizer.weight_decay", optimizer.weight_decay)
    yield Line(f"{megatron}.optimizer.adam_beta1", "train.optimizer.beta1", optimizer.beta1)
    yield Line(f"{megatron}.optimizer.adam_beta2", "train.optimizer.beta2", optimizer.beta2)
    yield Line(f"{megatron}.optimizer.adam_eps", "train.optimizer.eps", optimizer.eps)
    yield Line(f"{megatron}.scheduler.lr_decay_style", "train.optimizer.decay", optimizer.decay)
    yield Line(f"{megatron}.scheduler.lr_decay_iters", "train.num_steps", train.num_steps)
    yield Line(f"{megatron}.scheduler.lr_warmup_iters", "train.optimizer.warmup_steps", optimizer.warmup_steps)
    first_lr = optimizer.lr / optimizer.warmup_steps if optimizer.warmup_steps else 0.0
    yield Line(f"{megatron}.scheduler.lr_warmup_init", "train.optimizer.lr / warmup_steps", first_lr)
    is_float32 = optimizer.gradient_dtype == "float32"
    yield Line(f"{megatron}.distributed_data_parallel_config.grad_reduce_in_fp32", "train.optimizer.gradient_dtype", is_float32)
    yield Line(f"{megatron}.distributed_data_parallel_config.overlap_grad_reduce", "parallel.overlap_grad_reduce", parallel.overlap_grad_reduce)
    yield Line("checkpointing.enabled", "checkpoints are always written", True)
    yield Line("checkpointing.checkpoint_dir", "name", f"results/{recipe.name}")
    yield Line("checkpointing.save_period", "train.checkpoint_every", train.checkpoint_every)
    yield Line("checkpointing.keep_top_k", "the newest two are kept", 2)


def _generation(recipe: Recipe) -> Iterator[Line]:
    engine, launch, generation = recipe.engine, recipe.launch, "policy.generation"
    yield Line(f"{generation}.backend", "engine.type", "vllm")
    yield Line(f"{generation}.max_new_tokens", "sampling.max_new_tokens", recipe.sampling.max_new_tokens)
    yield Line(f"{generation}.temperature", "sampling.temperature", recipe.sampling.temperature)
    yield Line(f"{generation}.top_p", "nothing is cut from the distribution", 1.0)
    longest = recipe.render.max_prompt_tokens + recipe.sampling.max_new_tokens
    if isinstance(engine, VllmEngineConfig):
        yield Line(f"{generation}.vllm_cfg.tensor_parallel_size", "engine.tensor_parallel_size", engine.tensor_parallel_size)
        yield Line(f"{generation}.vllm_cfg.enforce_eager", "engine.enforce_eager", engine.enforce_eager)
        yield Line(f"{generation}.vllm_cfg.max_model_len", "engine.max_model_len", engine.max_model_len or longest)
        yield Line(f"{generation}.vllm_cfg.enable_prefix_caching", "the prefix cache is always on", True)
        if engine.gpu_memory_utilization is not None:
            yield Line(f"{generation}.vllm_cfg.gpu_memory_utilization", "engine.gpu_memory_utilization", engine.gpu_memory_utilization)
    gpus = launch.processes_per_node or _GPUS_PER_NODE
    yield Line(f"{generation}.colocated.enabled", "launch.generation_nodes", launch.generation_nodes == 0)
    if launch.generation_nodes:
        yield Line(f"{generation}.colocated.resources.num_nodes", "launch.generation_nodes", launch.generation_nodes)
        yield Line(f"{generation}.colocated.resources.gpus_per_node", "launch.processes_per_node, else 8", gpus)
    yield Line("cluster.num_nodes", "launch.train_nodes + launch.generation_nodes", launch.train_nodes + launch.generation_nodes)
    yield Line("cluster.gpus_per_node", "launch.processes_per_node, else 8", gpus)


def _data(recipe: Recipe, rows: Path) -> Iterator[Line]:
    grader = _GRADER_FILES[recipe.ingest.domain or Domain.CONVERSATIONAL]
    yield Line("data._override_", "the base file's data set does not apply", True)
    yield Line("data.max_input_seq_length", "rows are cut nowhere", None)
    yield Line("data.shuffle", "pivots are shuffled by epoch", True)
    yield Line("data.train.data_path", "the rows beside this file", str(rows))
    yield Line("data.default.dataset_name", "the rows are NeMo-Gym's", "NemoGymDataset")
    yield Line("data.default.env_name", "the rows are NeMo-Gym's", "nemo_gym")
    yield Line("data.default.processor", "the rows are NeMo-Gym's", "nemo_gym_data_processor")
    yield Line("env._override_", "the base file's environment does not apply", True)
    yield Line("env.should_use_nemo_gym", "the rows are NeMo-Gym's", True)
    yield Line("env.nemo_gym.config_paths", "ingest.domain; the public grader, not our verifier", [_MODEL_SERVER, grader])


type _Applies = Callable[[Recipe], bool]

_NO_EQUIVALENT: tuple[tuple[str, _Applies, str], ...] = (
    ("profile, select", lambda _: True, "done here: the rows are the selected pivots, their profile in each row"),
    ("verifier", lambda recipe: not recipe.verifier.type.startswith("gym_"), "graded by the domain's public grader, which accepts other actions"),
    ("render.action_format", lambda _: True, "there the server's tool parser and chat template decide"),
    ("render.history_reasoning", lambda _: True, "there the chat template's arguments decide"),
    ("sampling.truncated", lambda recipe: recipe.sampling.truncated == "exclude", "there a cut sample counts, or its loss is masked"),
    ("train.kl.estimator", lambda recipe: recipe.train.kl.beta > 0, "in neither of the files the mapping is made from"),
    ("train.correction", lambda recipe: _is_other_correction(recipe), "only a cap per token is mapped"),
    ("train.batching", lambda recipe: recipe.train.batching == "shared_prefix", "a group's prompt goes through the model once per action"),
    ("train.validation", lambda recipe: recipe.train.validation is not None, "held-out rows are not exported: give data.validation.data_path"),
    ("train.validation.patience", lambda recipe: bool(recipe.train.validation and recipe.train.validation.patience), "no early stop"),
    ("train.max_infra_frac", lambda _: True, "a failed verdict scores 0 there and is trained on"),
    ("parallel.virtual_pipeline_model_parallel_size", lambda recipe: bool(recipe.parallel.virtual_pipeline_model_parallel_size), "not mapped"),
    ("moe.router_replay", lambda recipe: recipe.moe.router_replay != "none", "not mapped"),
    ("engine.max_num_seqs", lambda recipe: isinstance(recipe.engine, VllmEngineConfig), "vLLM's own choice there"),
    ("sft", lambda recipe: recipe.sft is not None, "start from the checkpoint that this stage made"),
    ("eval", lambda _: True, "score the exported checkpoint with `pivotrl eval` or the benchmark's harness"),
)


def _is_other_correction(recipe: Recipe) -> bool:
    correction = recipe.train.correction
    return correction is not None and not (isinstance(correction, TruncatedCorrection) and correction.level == "token")
