"""Contradictions between the keys of a recipe, and keys that nothing reads as the others are set. Reads the recipe alone.

What one key may hold is the schema's business, and refused when the recipe is loaded. Pure.
"""

from __future__ import annotations

from collections.abc import Callable

from pivotrl.config.gym_verifiers import GymSwePivotVerifierConfig, GymTerminusVerifierConfig
from pivotrl.config.load import DEFAULT, LoadedRecipe
from pivotrl.config.schema import HeldOutSuite, RandomTurnsRule, Recipe, SelectConfig, ToolCallVerifierConfig
from pivotrl.config.verifiers import (
    ComposeVerifierConfig,
    FlippedVerifierConfig,
    MemberVerifierConfig,
    MessageVerifierConfig,
    SearchVerifierConfig,
)
from pivotrl.doctor.findings import Findings
from pivotrl.evaluation.named import check_suites
from pivotrl.launching.jobs import recipe_jobs
from pivotrl.pivots.select import decision_of
from pivotrl.training.rounds import check_rounds

type _Unread = tuple[str, Callable[[Recipe], bool], str]

# A key, when nothing reads it, and why.
_UNREAD: tuple[_Unread, ...] = (
    ("engine.enable_return_routed_experts", lambda recipe: recipe.moe.router_replay != "rollout", "moe.router_replay is not rollout"),
    ("train.kl.estimator", lambda recipe: recipe.train.kl.beta == 0, "train.kl.beta is 0"),
    ("verifier.message_similarity", lambda recipe: _ignores_similarity(recipe.verifier), "messages are not compared by similarity"),
    ("verifier.answer_similarity", lambda recipe: _ignores_answers(recipe.verifier), "verifier.answer is not similarity"),
    (
        "verifier.similarity_threshold",
        lambda recipe: isinstance(recipe.verifier, GymSwePivotVerifierConfig) and recipe.verifier.reward_mode == "binary",
        "verifier.reward_mode is binary",
    ),
    (
        "verifier.string_similarity_threshold",
        lambda recipe: isinstance(recipe.verifier, GymTerminusVerifierConfig) and not recipe.verifier.enable_string_similarity,
        "verifier.enable_string_similarity is false",
    ),
)


def members(recipe: Recipe) -> tuple[MemberVerifierConfig, ...]:
    """The verifiers of a recipe: its only one, or those of its cascade; under noise the one whose verdicts are flipped."""
    verifier = recipe.verifier.verifier if isinstance(recipe.verifier, FlippedVerifierConfig) else recipe.verifier
    return tuple(stage.verifier for stage in verifier.stages) if isinstance(verifier, ComposeVerifierConfig) else (verifier,)


def place(loaded: LoadedRecipe, key: str) -> str:
    """A key and the file or default that its value comes from."""
    return f"{key} ({loaded.origins.get(key, DEFAULT)})"


def check_settings(loaded: LoadedRecipe, findings: Findings) -> None:
    """All contradictions that the recipe alone shows."""
    _check_split(loaded, findings)
    _check_selection(loaded, findings)
    _check_steps(loaded, findings)
    _check_tokens(loaded, findings)
    _check_verifier(loaded, findings)
    _check_evaluation(loaded, findings)
    _check_placement(loaded, findings)
    for key, is_unread, reason in _UNREAD:
        if loaded.origins.get(key, DEFAULT) != DEFAULT and is_unread(loaded.recipe):
            findings.warn(
                "unread-key",
                f"{key} is set",
                where=place(loaded, key),
                rule=f"nothing reads it, because {reason}",
                fix="leave it out, or change the other key",
            )


def _check_split(loaded: LoadedRecipe, findings: Findings) -> None:
    recipe = loaded.recipe
    readers = ["train.validation"] if recipe.train.validation is not None else []
    readers += ["the held_out suite of eval.suites"] if any(isinstance(suite, HeldOutSuite) for suite in recipe.eval.suites) else []
    where = place(loaded, "ingest.held_out_frac")
    if recipe.ingest.held_out_frac == 0 and readers:
        rule = f"{' and '.join(readers)} score held-out candidates"
        findings.error("held-out", "ingest.held_out_frac is 0", where=where, rule=rule, fix="raise it, for example to 0.05, or drop what reads it")
    if recipe.ingest.held_out_frac == 1:
        findings.error("held-out", "ingest.held_out_frac is 1", where=where, rule="training needs tasks that are not held out", fix="lower it")


def _check_selection(loaded: LoadedRecipe, findings: Findings) -> None:
    recipe, num_samples = loaded.recipe, loaded.recipe.profile.num_samples
    if "select" not in recipe.stages:
        return
    if not selects_anything(recipe.select, num_samples):
        findings.error(
            "selection-empty",
            f"select.rule is {recipe.select.rule} and profile.num_samples is {num_samples}",
            where=place(loaded, "select.rule"),
            rule="no number of successes among K samples passes the rule, whatever the policy does",
            fix="raise the upper limit above 1/K, or raise profile.num_samples",
        )
    limit = recipe.select.num_turns if isinstance(recipe.select, RandomTurnsRule) else recipe.profile.max_candidates
    if limit is not None and limit < recipe.train.pivots_per_step:
        key = "select.num_turns" if isinstance(recipe.select, RandomTurnsRule) else "profile.max_candidates"
        findings.error(
            "too-few-pivots",
            f"{key} is {limit} and train.pivots_per_step is {recipe.train.pivots_per_step}",
            where=place(loaded, key),
            rule="a step takes that many different pivots",
            fix=f"raise {key} or lower train.pivots_per_step",
        )


def selects_anything(rule: SelectConfig, num_samples: int) -> bool:
    """Whether some number of successes among K passes the rule.

    >>> from decimal import Decimal
    >>> from pivotrl.config.schema import Eq5Rule
    >>> selects_anything(Eq5Rule(rule="eq5", lambda_diff=Decimal("0.1")), 8)
    False
    """
    keeps = decision_of(rule)
    return isinstance(rule, RandomTurnsRule) or any(keeps(num_samples, successes) for successes in range(num_samples + 1))


def _check_steps(loaded: LoadedRecipe, findings: Findings) -> None:
    recipe = loaded.recipe
    with findings.refused_by("rounds", place(loaded, "train.num_steps")):
        check_rounds(recipe.train)
    for name, stage in (("sft", recipe.sft), ("train", recipe.train)):
        if stage is None:
            continue
        if stage.optimizer.warmup_steps >= stage.num_steps:
            findings.error(
                "warmup",
                f"{name}.optimizer.warmup_steps is {stage.optimizer.warmup_steps} and {name}.num_steps is {stage.num_steps}",
                where=place(loaded, f"{name}.optimizer.warmup_steps"),
                rule="the peak learning rate would never be reached",
                fix="lower warmup_steps",
            )
        if stage.checkpoint_every > stage.num_steps:
            findings.warn(
                "no-checkpoint",
                f"{name}.checkpoint_every is {stage.checkpoint_every} and {name}.num_steps is {stage.num_steps}",
                where=place(loaded, f"{name}.checkpoint_every"),
                rule="a job that is killed resumes from its last checkpoint, and there would be none",
                fix="lower checkpoint_every",
            )
        if stage.trace is not None and stage.trace.first_step >= stage.num_steps:
            findings.warn(
                "unread-key",
                f"{name}.trace.first_step is {stage.trace.first_step} and {name}.num_steps is {stage.num_steps}",
                where=place(loaded, f"{name}.trace.first_step"),
                rule="steps are counted from 0, so nothing would be traced",
                fix="lower first_step",
            )
    if recipe.sft is not None and not recipe.sft.use_ingested and not recipe.sft.paths:
        findings.error(
            "sft-data",
            "sft.use_ingested is false and sft.paths is empty",
            where=place(loaded, "sft.use_ingested"),
            rule="the sft stage needs demonstrations",
            fix="set use_ingested to true, or name files",
        )


def _check_tokens(loaded: LoadedRecipe, findings: Findings) -> None:
    recipe = loaded.recipe
    longest = recipe.render.max_prompt_tokens + recipe.sampling.max_new_tokens
    if recipe.train.micro_batch_tokens < longest:
        findings.warn(
            "micro-batch",
            f"train.micro_batch_tokens is {recipe.train.micro_batch_tokens} and the longest sequence has {longest} tokens",
            where=place(loaded, "train.micro_batch_tokens"),
            rule="a sequence is never cut, so memory must hold the longest one whatever the limit",
            fix="raise it to render.max_prompt_tokens + sampling.max_new_tokens",
        )


def _check_verifier(loaded: LoadedRecipe, findings: Findings) -> None:
    recipe = loaded.recipe
    for verifier in members(recipe):
        accepts_any = (isinstance(verifier, ToolCallVerifierConfig) and verifier.message == "any") or (
            isinstance(verifier, MessageVerifierConfig) and verifier.content == "any"
        )
        if accepts_any:
            findings.warn(
                "message-any",
                f"verifier {verifier.type} accepts any message where the expert spoke",
                where=place(loaded, "verifier.type"),
                rule="a policy learns to say anything there",
                fix="compare by similarity or facts, judge messages, or profile calls alone (profile.expert_actions)",
            )
    if recipe.render.action_format == "plain" and recipe.profile.expert_actions == "calls":
        findings.error(
            "format-calls",
            "render.action_format is plain and profile.expert_actions is calls",
            where=place(loaded, "render.action_format"),
            rule="plain text cannot express a call, so every profiled expert would be quarantined",
            fix="choose the format that the checkpoint was trained to call tools in",
        )


def _check_evaluation(loaded: LoadedRecipe, findings: Findings) -> None:
    suites = [suite.type for suite in loaded.recipe.eval.suites]
    where = place(loaded, "eval.suites")
    if not suites:
        findings.warn("suites", "eval.suites is empty", where=where, rule="nothing would be measured", fix="add a held_out suite")
    with findings.refused_by("suites", where):
        check_suites(loaded.recipe.eval)


def _check_placement(loaded: LoadedRecipe, findings: Findings) -> None:
    with findings.refused_by("placement", place(loaded, "placement.type")):
        recipe_jobs(loaded.recipe, gpus_per_node=0)


def _ignores_similarity(verifier: object) -> bool:
    if isinstance(verifier, ToolCallVerifierConfig):
        return verifier.message != "similarity"
    return isinstance(verifier, MessageVerifierConfig) and verifier.content != "similarity"


def _ignores_answers(verifier: object) -> bool:
    return isinstance(verifier, SearchVerifierConfig) and verifier.answer != "similarity"
