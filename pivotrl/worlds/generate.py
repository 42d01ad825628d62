"""The `world` stage: writes a recipe's trajectories, pretraining text and tokenizer, all from the run's seed.

expert.jsonl holds successful expert episodes of training tasks, in a form that users' files have: plain OpenAI chat rows, or Terminus-2 rows for
the terminal. pretraining.jsonl holds noisy episodes of other tasks and the out-of-domain skills as chat rows for the `sft` stage.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pivotrl.actions.protocol import ActionFormat
from pivotrl.actions.registry import action_format as format_by_name
from pivotrl.config.schema import ScratchModel, WorldConfig
from pivotrl.errors import UserError
from pivotrl.identity import derive_seed
from pivotrl.rundir import Stage, write_jsonl
from pivotrl.types import Action, Domain, Message, ParseOutcome, Role, Tool, ToolCall
from pivotrl.worlds.protocol import Agent, Episode, ScriptedWorld, TaskSplit, WorldTask
from pivotrl.worlds.registry import scripted_world
from pivotrl.worlds.skills import SUITES, SkillQuestion, draw_questions
from pivotrl.worlds.tokenizer import CALL_TAGS, save_tokenizer, train_tokenizer

EXPERT_FILE, PRETRAINING_FILE, TOKENIZER_DIR = "expert.jsonl", "pretraining.jsonl", "tokenizer"
# Questions of one pretraining conversation: about as long as an episode, so that batches hold little padding.
_QUESTIONS_PER_CHAT = 6
_SKILLS_TASK = "skills-"
_TERMINUS = "terminus2"


def write_world(stage: Stage, *, config: WorldConfig, model: ScratchModel, run_seed: int, action_format: ActionFormat, chat_template: str) -> None:
    """Writes expert.jsonl, pretraining.jsonl and tokenizer/, then finishes the stage. Small enough to be redone whole after a kill.

    Args:
        action_format: how calls are written in the text that the tokenizer is trained on.
        chat_template: Jinja text, saved with the tokenizer.

    Raises:
        UserError: where the action format cannot write the actions of a world.
    """
    expert_rows = expert_episodes(config, run_seed)
    pretraining_rows = pretraining_mixture(config, run_seed, action_format)
    write_jsonl(stage.path / EXPERT_FILE, expert_rows)
    write_jsonl(stage.path / PRETRAINING_FILE, pretraining_rows)
    frames = tuple(frame for name in pretraining_worlds(config) for frame in scripted_world(name).frames)
    tokenizer = train_tokenizer(tokenizer_texts(pretraining_rows, action_format, frames), vocab_size=model.vocab_size, frames=frames)
    save_tokenizer(tokenizer, stage.path / TOKENIZER_DIR, chat_template=chat_template, max_tokens=model.max_position_embeddings)
    num_noisy_successes = sum(row["success"] for row in pretraining_rows if not row["task_id"].startswith(_SKILLS_TASK))
    stage.finish(
        outputs=[EXPERT_FILE, PRETRAINING_FILE, f"{TOKENIZER_DIR}/tokenizer.json", f"{TOKENIZER_DIR}/tokenizer_config.json"],
        summary={
            "num_expert_episodes": len(expert_rows),
            "num_pretraining_episodes": config.num_pretraining_episodes,
            "noisy_success_frac": num_noisy_successes / config.num_pretraining_episodes,
            "vocab_size": tokenizer.get_vocab_size(),
        },
    )


def write_expert(stage: Stage, *, config: WorldConfig, run_seed: int) -> None:
    """Writes expert.jsonl alone, for a model that has its tokenizer and its pretraining behind it; finishes the stage."""
    rows = expert_episodes(config, run_seed)
    write_jsonl(stage.path / EXPERT_FILE, rows)
    stage.finish(outputs=[EXPERT_FILE], summary={"num_expert_episodes": len(rows)})


def expert_episodes(config: WorldConfig, run_seed: int) -> list[dict[str, Any]]:
    """One successful demonstration of every training task."""
    scripted = scripted_world(config.type)
    rows = []
    for task in scripted.world.tasks(TaskSplit.TRAIN, num_tasks=config.num_train_tasks, seed=run_seed):
        episode = play(scripted.world.reset(task), scripted.expert(_rng(run_seed, "expert", task)))
        assert episode.success, f"the expert failed {task.id}"
        rows.append(_expert_row(scripted, episode))
    return rows


def pretraining_worlds(config: WorldConfig) -> tuple[str, ...]:
    """The worlds that the noisy episodes are of."""
    return config.pretraining_worlds or (config.type,)


def pretraining_mixture(config: WorldConfig, run_seed: int, action_format: ActionFormat) -> list[dict[str, Any]]:
    """Noisy episodes and skill conversations in random order: what the base policy is made of.

    Args:
        action_format: the recipe's; episodes of a world with another format hold its actions as text, as that format writes them.

    Raises:
        UserError: where that cannot be (actions with JSON tools under the Terminus-2 format, which shows no tools).
    """
    names, rows = pretraining_worlds(config), list[dict[str, Any]]()
    for index, name in enumerate(names):
        scripted = scripted_world(name)
        num_tasks = (config.num_pretraining_episodes + len(names) - 1 - index) // len(names)
        for task in scripted.world.tasks(TaskSplit.PRETRAINING, num_tasks=num_tasks, seed=run_seed):
            agent = scripted.noisy_agent(task, config.noise, _rng(run_seed, "noisy", task))
            rows.append(_pretraining_row(scripted, play(scripted.world.reset(task), agent), action_format))
    rng = random.Random(derive_seed(run_seed, "world", "skills"))
    questions = draw_questions(config.num_skill_examples, rng, SUITES[config.skills])
    shuffled = rng.sample(questions, len(questions))
    rows += [_skill_row(start, shuffled[start : start + _QUESTIONS_PER_CHAT]) for start in range(0, len(shuffled), _QUESTIONS_PER_CHAT)]
    rng.shuffle(rows)
    return rows


def play[EpisodeT: Episode](episode: EpisodeT, agent: Agent) -> EpisodeT:
    """Runs a scripted agent to the end of the episode."""
    while not episode.is_done:
        episode.act(agent(episode))
    return episode


def chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A conversation in the form of the OpenAI chat API; calls are numbered and results name their call, where there is one."""
    rows: list[dict[str, Any]] = []
    open_calls: list[str] = []
    num_calls = 0
    for message in messages:
        row: dict[str, Any] = {"role": message.role.value, "content": message.content}
        if message.tool_calls:
            open_calls = [f"call_{num_calls + index}" for index in range(len(message.tool_calls))]
            num_calls += len(open_calls)
            functions = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
            row["tool_calls"] = [{"id": name, "type": "function", "function": one} for name, one in zip(open_calls, functions, strict=True)]
        elif message.role is Role.TOOL and open_calls:
            row["tool_call_id"] = open_calls.pop(0)
        rows.append(row)
    return rows


def chat_tool(tool: Tool) -> dict[str, Any]:
    """One tool in the form of the OpenAI chat API."""
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}}


def _expert_row(scripted: ScriptedWorld, episode: Episode) -> dict[str, Any]:
    """An episode as a trajectory file has it; a chat row is conversational unless it says otherwise."""
    row: dict[str, Any] = {"task_id": episode.task_id, "success": episode.success}
    if scripted.world.action_format == _TERMINUS:
        return {**row, "conversations": _text_messages(scripted, episode)}
    row |= {"messages": chat_messages(episode.state().messages), "tools": [chat_tool(tool) for tool in episode.state().tools]}
    return row if scripted.world.domain is Domain.CONVERSATIONAL else {**row, "domain": scripted.world.domain.value}


def _pretraining_row(scripted: ScriptedWorld, episode: Episode, action_format: ActionFormat) -> dict[str, Any]:
    world = scripted.world
    if world.action_format == action_format.name != _TERMINUS:
        return _expert_row(scripted, episode)
    if world.action_format != _TERMINUS:
        raise UserError(
            f"render.action_format is {action_format.name} and the world {world.name} has JSON tools",
            rule=f"its actions are written in the format {world.action_format}",
            fix=f"set render.action_format to {world.action_format}, or leave the world out of world.pretraining_worlds",
        )
    is_native = action_format.name == _TERMINUS
    messages = chat_messages(episode.state().messages) if is_native else _text_messages(scripted, episode)
    return {"task_id": episode.task_id, "success": episode.success, "messages": messages, "tools": []}


def _text_messages(scripted: ScriptedWorld, episode: Episode) -> list[dict[str, str]]:
    """The conversation with every action as the text that the world's own format writes."""
    own = format_by_name(scripted.world.action_format)
    rows = []
    for message in episode.state().messages:
        action = Action(message.content, message.tool_calls, message.reasoning, message.parse)
        rows.append({"role": message.role.value, "content": own.transcribe(action)})
    return rows


def _skill_row(index: int, questions: Sequence[SkillQuestion]) -> dict[str, Any]:
    messages = []
    for question in questions:
        messages += [{"role": "user", "content": question.question}, {"role": "assistant", "content": question.answer}]
    return {"task_id": f"{_SKILLS_TASK}{index}", "success": True, "messages": messages, "tools": []}


def tokenizer_texts(rows: Sequence[Mapping[str, Any]], action_format: ActionFormat, frames: Sequence[str] = ()) -> list[str]:
    """What a rendered conversation is made of, piece by piece: roles, tool signatures, messages, calls without their tags and frames."""
    fixed = re.compile("|".join(re.escape(piece) for piece in (*CALL_TAGS, *sorted(frames, key=len, reverse=True))))
    texts = []
    for row in rows:
        texts += ["".join(f" {_signature(tool['function'])}" for tool in row["tools"])] if row["tools"] else []
        for message in row["messages"]:
            calls = tuple(ToolCall(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ()))
            written = action_format.transcribe(Action(message["content"], calls, None, ParseOutcome.PARSED if calls else ParseOutcome.ABSENT))
            texts += [f"{message['role']}\n", *fixed.split(written)]
    return texts


def _signature(function: Mapping[str, Any]) -> str:
    required, names = function["parameters"]["required"], function["parameters"]["properties"]
    return f"{function['name']}({','.join(name if name in required else f'{name}?' for name in names)})"


def _rng(run_seed: int, purpose: str, task: WorldTask) -> random.Random:
    return random.Random(derive_seed(run_seed, "world", purpose, task.id))
