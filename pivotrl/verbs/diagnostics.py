"""The diagnostics of the `eval` stage, wired: which actions and prompts are scored, under which checkpoints.

The numbers are evaluation/diagnostics.py's. Called by pipeline.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pivotrl import build
from pivotrl.config.diagnostics import DiagnosticsConfig
from pivotrl.config.load import LoadedRecipe
from pivotrl.errors import InfraLimitError
from pivotrl.identity import content_id, derive_seed
from pivotrl.types import FinishReason, Message, Role, State, ToolOrigin


def diagnosis(loaded: LoadedRecipe, run: Path, *, reference: Path, trained: Path) -> Callable[[], dict[str, Any]] | None:
    """What the stage calls once its suites are done; None where the recipe asks for no diagnostics."""
    config = loaded.recipe.eval.diagnostics
    return None if config is None else lambda: _diagnose(loaded, run, config, reference, trained)


def _diagnose(loaded: LoadedRecipe, run: Path, config: DiagnosticsConfig, reference: Path, trained: Path) -> dict[str, Any]:
    from pivotrl.evaluation.diagnostics import expected_signal, kl_to_reference, order_preservation, score_actions
    from pivotrl.pivots.dataset import PivotStore, ProfileStore

    recipe = loaded.recipe
    seed = derive_seed(recipe.seed, "eval", "diagnostics")
    pivots = PivotStore.open(run / "select")
    profiled = [one for one in ProfileStore.open(run / "profile").iterate() if one.profile.quarantine_reason is None]
    found: dict[str, Any] = {
        "signal_pivots": expected_signal(((one.mean_reward, one.trajectory_id) for one in pivots.pivots), seed=seed).as_dict(),
        "signal_turns": expected_signal(
            ((sum(one.profile.rewards_K) / len(one.profile.rewards_K), one.candidate.trajectory_id) for one in profiled), seed=seed
        ).as_dict(),
    }
    probes, answers = _probes(run, config, pivots), _answers(loaded, run, config, trained)
    scores = []
    for checkpoint in (reference, trained):
        trainer = build.scorer(loaded, checkpoint)
        limits = {"temperature": recipe.sampling.temperature, "micro_batch_tokens": recipe.train.micro_batch_tokens}
        scores.append([score_actions(trainer, actions, **limits) if actions else [] for actions in (probes, answers)])
        del trainer
    (probes_before, answers_before), (probes_after, answers_after) = scores
    found["order"] = order_preservation(probes, probes_before, probes_after, seed=seed)
    found["kl"] = kl_to_reference(answers, answers_after, answers_before, seed=seed)
    return found


def _probes(run: Path, config: DiagnosticsConfig, pivots: Any) -> list[Any]:
    """The counted, complete actions that profiling sampled from pi_0 at held-out candidates."""
    from pivotrl.evaluation.diagnostics import ScoredAction
    from pivotrl.pivots.dataset import ROLLOUTS
    from pivotrl.pivots.parquet import read_rows

    chosen = sorted(pivots.held_out, key=lambda pivot: content_id("diagnostics", pivot.candidate_id))[: config.num_probes]
    by_id = {pivot.candidate_id: pivot for pivot in chosen}
    columns = ("candidate_id", "counted_reward", "finish_reason", "token_ids")
    rows = read_rows(run / "profile" / ROLLOUTS, columns, keep=("candidate_id", list(by_id))) if by_id else ()
    return [
        ScoredAction(name, by_id[name].trajectory_id, by_id[name].prompt_token_ids, tuple(row["token_ids"]), row["counted_reward"] == 1)
        for row in rows
        for name in [row["candidate_id"]]
        if row["counted_reward"] is not None and row["finish_reason"] != FinishReason.LENGTH and row["token_ids"]
    ]


def _answers(loaded: LoadedRecipe, run: Path, config: DiagnosticsConfig, trained: Path) -> list[Any]:
    """What the trained policy answers to questions of the world's skills."""
    from pivotrl.evaluation.diagnostics import ScoredAction
    from pivotrl.rollouts.engine import EngineError, GenerationRequest
    from pivotrl.worlds.skills import SUITES, draw_questions

    recipe = loaded.recipe
    if recipe.world is None:
        return []
    drawn = draw_questions(config.num_prompts, random.Random(derive_seed(recipe.seed, "eval", "diagnostics", "prompts")), SUITES[recipe.world.skills])
    with build.open_sampler(loaded, run, trained) as sampler:
        prompts = [sampler.renderer.render_prompt(State((Message(Role.USER, one.question),), (), ToolOrigin.NONE)) for one in drawn]
        seeds = [
            tuple(derive_seed(recipe.seed, "eval", "diagnostics", index, sample) for sample in range(config.num_answers))
            for index in range(len(drawn))
        ]
        requests = [
            GenerationRequest(prompt, own, recipe.sampling.temperature, recipe.sampling.max_new_tokens)
            for prompt, own in zip(prompts, seeds, strict=True)
        ]
        try:
            completions = sampler.engine.generate(requests)
        except EngineError as error:
            raise InfraLimitError(f"the engine failed in the diagnostics ({error}); the same command resumes once that is repaired") from error
    return [
        ScoredAction(str(index), index, prompt, completion.token_ids, False)
        for index, (prompt, group) in enumerate(zip(prompts, completions, strict=True))
        for completion in group
    ]
