"""A policy that plays the order desk's expert on chosen tasks and mumbles on all others, behind the real renderer and verifier."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import torch

from pivotrl.config.schema import SamplingConfig, ToolCallVerifierConfig
from pivotrl.rollouts.engine import GenerationRequest
from pivotrl.rollouts.local import LocalSampler, LocalTask
from pivotrl.rollouts.render import Renderer
from pivotrl.types import Action, Completion, FinishReason, Message, ParseOutcome, Role, State, ToolOrigin
from pivotrl.verifiers.tool_call import ToolCallVerifier
from pivotrl.worlds.order_desk import OrderDesk, OrderTask
from pivotrl.worlds.order_desk_expert import expert
from pivotrl.worlds.skills import SkillQuestion

SAMPLING = SamplingConfig(max_new_tokens=40, truncated="zero")
MUMBLE = Action("Hm.", (), None, ParseOutcome.ABSENT)


class ScriptedDesk:
    """An engine that answers known prompts from a table and anything else with a mumble; `num_requests` counts what it was asked."""

    policy_version = 0

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._answers: dict[tuple[int, ...], Action] = {}
        self.num_requests = 0
        self.is_closed = False

    def knows_task(self, task: OrderTask) -> list[LocalTask]:
        """Learns the expert's whole episode; returns its turns."""
        episode, agent, turns = OrderDesk().reset(task), expert(random.Random(task.id)), []
        while not episode.is_done:
            state, action = episode.state(), agent(episode)
            prompt = self._renderer.render_prompt(state)
            self._answers[prompt] = action
            turns.append(LocalTask(f"{task.id}-{len(turns)}", prompt, state, action))
            episode.act(action)
        return turns

    def knows_question(self, question: SkillQuestion) -> None:
        state = State((Message(Role.USER, question.question),), (), ToolOrigin.NONE)
        self._answers[self._renderer.render_prompt(state)] = Action(question.answer, (), None, ParseOutcome.ABSENT)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[tuple[Completion, ...]]:
        self.num_requests += len(requests)
        return [tuple(self._complete(request) for _ in request.seeds) for request in requests]

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.is_closed = True

    def _complete(self, request: GenerationRequest) -> Completion:
        ids = self._renderer.render_action(self._answers.get(request.prompt_token_ids, MUMBLE))
        return Completion(ids, (0.0,) * len(ids), FinishReason.STOP, 0)


def sampler_of(engine: ScriptedDesk, renderer: Renderer) -> LocalSampler:
    """The engine as a policy under the quickstart's verifier."""
    verifier = ToolCallVerifier(ToolCallVerifierConfig(type="tool_call", message="similarity", message_similarity=0.7))
    return LocalSampler(engine, renderer, verifier, SAMPLING, 17)
