"""A sample of real expert turns on the whole path: render the state, write the expert's action, parse it back, judge it.

The path is `rollouts/local.py`'s, as in profiling; only the engine is missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson

from pivotrl.actions.protocol import InexpressibleAction
from pivotrl.config.schema import Recipe
from pivotrl.doctor.data import TOLERATED_FRAC
from pivotrl.doctor.findings import Findings
from pivotrl.pivots.candidates import state_of
from pivotrl.rollouts.local import LocalSampler, LocalTask
from pivotrl.rollouts.render_template import UnrenderableState
from pivotrl.types import Action, Candidate, Trajectory, VerdictKind

if TYPE_CHECKING:
    from pivotrl.rollouts.render import Renderer
    from pivotrl.verifiers.protocol import Verifier

type _Turn = tuple[str, LocalTask]


def check_turns(sample: Sequence[tuple[Trajectory, Candidate]], recipe: Recipe, renderer: Renderer, verifier: Verifier, findings: Findings) -> None:
    """Prompts that render and fit, actions that can be written and read back, experts that are accepted."""
    chosen = [
        (trajectory, candidate) for trajectory, candidate in sample if recipe.profile.expert_actions == "all" or candidate.expert_action.tool_calls
    ]
    findings.figures["sampled_turns"] = len(chosen)
    if not chosen:
        return
    turns = _rendered(chosen, recipe, renderer, findings)
    written = _written(turns, recipe, renderer, findings)
    _check_experts(written, recipe, renderer, verifier, findings)


def _rendered(chosen: Sequence[tuple[Trajectory, Candidate]], recipe: Recipe, renderer: Renderer, findings: Findings) -> list[_Turn]:
    turns: list[_Turn] = []
    refused: list[tuple[str, str]] = []
    for trajectory, candidate in chosen:
        where = f"{trajectory.source_file} row {trajectory.source_index}, turn {candidate.turn_index}"
        state = state_of(trajectory, candidate)
        try:
            prompt = renderer.render_prompt(state)
        except UnrenderableState as error:
            refused.append((where, str(error)))
            continue
        turns.append((where, LocalTask(candidate.id, prompt, state, candidate.expert_action)))
    _report(findings, "template-rows", refused, len(chosen), "the chat template must render every state", "give another render.chat_template")
    lengths = sorted(len(task.prompt_token_ids) for _, task in turns)
    limit = recipe.render.max_prompt_tokens
    too_long = [(where, f"{len(task.prompt_token_ids)} tokens") for where, task in turns if len(task.prompt_token_ids) > limit]
    _report(findings, "prompt-length", too_long, len(chosen), f"longer prompts than render.max_prompt_tokens, {limit}, are dropped", "raise it")
    if lengths:
        findings.figures["prompt_tokens"] = {"mean": round(math.fsum(lengths) / len(lengths)), "max": lengths[-1]}
    return [(where, task) for where, task in turns if len(task.prompt_token_ids) <= limit]


def _written(turns: Sequence[_Turn], recipe: Recipe, renderer: Renderer, findings: Findings) -> list[_Turn]:
    """The turns whose action can be written, in few enough tokens, and is read back as it was."""
    inexpressible: list[tuple[str, str]] = []
    changed: list[tuple[str, str]] = []
    too_long: list[tuple[str, str]] = []
    kept: list[_Turn] = []
    lengths: list[int] = []
    for where, task in turns:
        try:
            token_ids = renderer.render_action(task.expert_action, task.state.tools)
        except InexpressibleAction as error:
            inexpressible.append((where, str(error)))
            continue
        lengths.append(len(token_ids))
        parsed = renderer.parse(token_ids, task.state.tools)
        if not is_same(task.expert_action, parsed):
            changed.append((where, f"read back as {parsed.parse.value}: {_short(parsed)}"))
            continue
        if len(token_ids) > recipe.sampling.max_new_tokens:
            too_long.append((where, f"{len(token_ids)} tokens"))
        kept.append((where, task))
    name = recipe.render.action_format
    _report(findings, "action-format", inexpressible, len(turns), f"format {name} must be able to write the expert's action", "choose another format")
    _report(findings, "round-trip", changed, len(turns), f"what format {name} writes it must read back", "choose another render.action_format")
    rule = f"a sample is cut at sampling.max_new_tokens, {recipe.sampling.max_new_tokens}, so the expert's own action could not be sampled"
    _report(findings, "action-length", too_long, len(turns), rule, "raise sampling.max_new_tokens")
    if lengths:
        findings.figures["action_tokens"] = {"mean": round(math.fsum(lengths) / len(lengths)), "max": max(lengths)}
    return kept


def _check_experts(turns: Sequence[_Turn], recipe: Recipe, renderer: Renderer, verifier: Verifier, findings: Findings) -> None:
    """The verifier on the expert's own action; an infrastructure failure is no rejection."""
    # The sampler's own path from action to verdict, which asks no engine.
    no_engine: Any = None
    sampler = LocalSampler(no_engine, renderer, verifier, recipe.sampling, recipe.seed)
    verdicts = sampler.accept_experts([task for _, task in turns])
    judged = list(zip((where for where, _ in turns), verdicts, strict=True))
    failed = [(where, verdict.reason) for where, verdict in judged if verdict.kind is VerdictKind.INFRA]
    accepted = {where for where, verdict in judged if verdict.kind is VerdictKind.OK and verdict.reward == 1}
    rejected = [(where, verdict.reason) for where, verdict in judged if verdict.kind is not VerdictKind.INFRA and where not in accepted]
    _report(findings, "verifier-infra", failed, len(turns), "a verdict that fails for no fault of the action counts nowhere", "repair what it needs")
    rule = f"verifier {recipe.verifier.type} must accept the expert's own action; such turns are quarantined, never trained on"
    _report(findings, "expert-rejected", rejected, len(turns), rule, "run `pivotrl audit` on the data, and change the verifier's settings")


def is_same(expert: Action, parsed: Action) -> bool:
    """Whether two actions say and call the same; spelling of JSON and surrounding blanks do not count."""
    if expert.content.strip() != parsed.content.strip() or len(expert.tool_calls) != len(parsed.tool_calls):
        return False
    pairs = zip(expert.tool_calls, parsed.tool_calls, strict=True)
    return all(one.name == other.name and _value(one.arguments) == _value(other.arguments) for one, other in pairs)


def _value(arguments: str) -> Any:
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments


def _short(action: Action) -> str:
    calls = ", ".join(call.name for call in action.tool_calls)
    return f"calls {calls or 'none'}, text {action.content[:40]!r}"


def _report(findings: Findings, check: str, cases: Sequence[tuple[str, str]], num_turns: int, rule: str, fix: str) -> None:
    """One finding for all cases, named by the first: a warning while they are few, since the pipeline sets such turns apart."""
    if not cases:
        return
    where, reason = cases[0]
    report = findings.error if len(cases) > TOLERATED_FRAC * num_turns else findings.warn
    report(check, f"{len(cases)} of {num_turns} sampled turns: {reason}", where=where, rule=rule, fix=fix)
