"""The `world` stage: writes the quickstart's trajectories, pretraining text and tokenizer, all from the run's seed.

expert.jsonl holds successful expert episodes of training tasks; pretraining.jsonl holds noisy episodes of other tasks and the
out-of-domain skills. Both are plain OpenAI chat rows, read back through the same adapter as a user's own files.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pivotrl.actions.protocol import ActionFormat
from pivotrl.config.schema import ScratchModel, WorldConfig
from pivotrl.identity import derive_seed
from pivotrl.rundir import Stage, write_jsonl
from pivotrl.types import Action, Message, ParseOutcome, Role, Tool, ToolCall
from pivotrl.worlds.order_desk import TOOLS, OrderDesk, OrderEpisode, OrderTask
from pivotrl.worlds.order_desk_expert import Agent, expert, noisy_agent
from pivotrl.worlds.protocol import TaskSplit
from pivotrl.worlds.skills import SkillQuestion, draw_questions
from pivotrl.worlds.tokenizer import CALL_TAGS, save_tokenizer, train_tokenizer

EXPERT_FILE, PRETRAINING_FILE, TOKENIZER_DIR = "expert.jsonl", "pretraining.jsonl", "tokenizer"
# Questions of one pretraining conversation: about as long as an episode, so that batches hold little padding.
_QUESTIONS_PER_CHAT = 6
_CALL_TAG = re.compile("|".join(map(re.escape, CALL_TAGS)))


def write_world(stage: Stage, *, config: WorldConfig, model: ScratchModel, run_seed: int, action_format: ActionFormat, chat_template: str) -> None:
    """Writes expert.jsonl, pretraining.jsonl and tokenizer/, then finishes the stage. Small enough to be redone whole after a kill.

    Args:
        action_format: how calls are written in the text that the tokenizer is trained on.
        chat_template: Jinja text, saved with the tokenizer.
    """
    expert_rows = expert_episodes(config, run_seed)
    pretraining_rows = pretraining_mixture(config, run_seed)
    write_jsonl(stage.path / EXPERT_FILE, expert_rows)
    write_jsonl(stage.path / PRETRAINING_FILE, pretraining_rows)
    tokenizer = train_tokenizer(tokenizer_texts(pretraining_rows, action_format), vocab_size=model.vocab_size)
    save_tokenizer(tokenizer, stage.path / TOKENIZER_DIR, chat_template=chat_template, max_tokens=model.max_position_embeddings)
    num_noisy_successes = sum(row["success"] for row in pretraining_rows if row["tools"])
    stage.finish(
        outputs=[EXPERT_FILE, PRETRAINING_FILE, f"{TOKENIZER_DIR}/tokenizer.json", f"{TOKENIZER_DIR}/tokenizer_config.json"],
        summary={
            "num_expert_episodes": len(expert_rows),
            "num_pretraining_episodes": config.num_pretraining_episodes,
            "noisy_success_frac": num_noisy_successes / config.num_pretraining_episodes,
            "vocab_size": tokenizer.get_vocab_size(),
        },
    )


def expert_episodes(config: WorldConfig, run_seed: int) -> list[dict[str, Any]]:
    """One successful demonstration of every training task."""
    world = OrderDesk()
    rows = []
    for task in world.tasks(TaskSplit.TRAIN, num_tasks=config.num_train_tasks, seed=run_seed):
        episode = play(world.reset(task), expert(_rng(run_seed, "expert", task)))
        assert episode.success, f"the expert failed {task.id}"
        rows.append(_episode_row(episode))
    return rows


def pretraining_mixture(config: WorldConfig, run_seed: int) -> list[dict[str, Any]]:
    """Noisy episodes and skill conversations in random order: what the base policy is made of."""
    world = OrderDesk()
    tasks = world.tasks(TaskSplit.PRETRAINING, num_tasks=config.num_pretraining_episodes, seed=run_seed)
    rows = [_episode_row(play(world.reset(task), noisy_agent(task, config.noise, _rng(run_seed, "noisy", task)))) for task in tasks]
    rng = random.Random(derive_seed(run_seed, "world", "skills"))
    questions = draw_questions(config.num_skill_examples, rng)
    shuffled = rng.sample(questions, len(questions))
    rows += [_skill_row(start, shuffled[start : start + _QUESTIONS_PER_CHAT]) for start in range(0, len(shuffled), _QUESTIONS_PER_CHAT)]
    rng.shuffle(rows)
    return rows


def play(episode: OrderEpisode, agent: Agent) -> OrderEpisode:
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


def _episode_row(episode: OrderEpisode) -> dict[str, Any]:
    tools = [chat_tool(tool) for tool in TOOLS]
    return {"task_id": episode.task_id, "success": episode.success, "messages": chat_messages(episode.messages), "tools": tools}


def _skill_row(index: int, questions: Sequence[SkillQuestion]) -> dict[str, Any]:
    messages = []
    for question in questions:
        messages += [{"role": "user", "content": question.question}, {"role": "assistant", "content": question.answer}]
    return {"task_id": f"skills-{index}", "success": True, "messages": messages, "tools": []}


def tokenizer_texts(rows: Sequence[Mapping[str, Any]], action_format: ActionFormat) -> list[str]:
    """What a rendered conversation is made of, piece by piece: roles, tool signatures, messages, calls without their tags."""
    signatures = "".join(f" {_signature(tool)}" for tool in TOOLS)
    texts = []
    for row in rows:
        texts += [signatures] if row["tools"] else []
        for message in row["messages"]:
            calls = tuple(ToolCall(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ()))
            written = action_format.transcribe(Action(message["content"], calls, None, ParseOutcome.PARSED if calls else ParseOutcome.ABSENT))
            texts += [f"{message['role']}\n", *_CALL_TAG.split(written)]
    return texts


def _signature(tool: Tool) -> str:
    required, names = tool.parameters["required"], tool.parameters["properties"]
    return f"{tool.name}({','.join(name if name in required else f'{name}?' for name in names)})"


def _rng(run_seed: int, purpose: str, task: OrderTask) -> random.Random:
    return random.Random(derive_seed(run_seed, "world", purpose, task.id))
