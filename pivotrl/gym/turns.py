"""The turns of one collection of episodes: requests of agents rendered, sampled and answered, and found again by the ticket that went with each.

Nothing of an agent's text is encoded again: what is learned from are the tokens that were sampled. Used by gym/player.py, on the thread that
has the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from pivotrl.identity import content_id, derive_seed
from pivotrl.rollouts.chat_messages import ReasoningPlace, chat_reply, tickets_of
from pivotrl.rollouts.chat_server import Asked
from pivotrl.rollouts.engine import Engine, EngineError, GenerationRequest
from pivotrl.rollouts.episodes import Limits, SampledTurn
from pivotrl.rollouts.render import Renderer
from pivotrl.rollouts.render_template import UnrenderableState

type Prompted = tuple[tuple[int, ...], Asked]


class Turns:
    """Answers requests and keeps the turns until results claim them.

    Args:
        place: where in the run this happens; the k-th sample of a prompt is drawn at (place, prompt, k).
        tickets: numbers that no turn before has had.
        when_engine_fails: called before anybody is told.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        *,
        limits: Limits,
        reasoning: ReasoningPlace,
        run_seed: int,
        place: tuple[str | int, ...],
        tickets: Iterator[int],
        when_engine_fails: Callable[[], None],
    ) -> None:
        self._engine, self._renderer, self._limits, self._reasoning = engine, renderer, limits, reasoning
        self._run_seed, self._place, self._tickets, self._when_engine_fails = run_seed, place, tickets, when_engine_fails
        self._unclaimed: dict[int, SampledTurn] = {}
        self._num_asked: Counter[str] = Counter()
        self.num_sampled = 0
        self.engine_failure = ""
        self.refusal = ""
        """Why a request was refused, the first time."""

    @property
    def num_unclaimed(self) -> int:
        """Turns that no result has claimed."""
        return len(self._unclaimed)

    def claim(self, result: Mapping[str, Any]) -> list[SampledTurn]:
        """The turns that a result names, each of which is nobody else's from then on; none where it names one that is not there to be claimed."""
        tickets = tickets_of(result)
        if len(set(tickets)) != len(tickets) or not self._unclaimed.keys() >= set(tickets):
            return []
        return [self._unclaimed.pop(ticket) for ticket in tickets]

    def prompts(self, asked: Sequence[Asked]) -> list[Prompted]:
        """The requests for a turn with their prompts; whoever wants a prompt's tokens alone is answered, others are refused."""
        longest, found = self._limits.max_prompt_tokens, list[Prompted]()
        for prompt, one in self._rendered(asked):
            if one.is_tokenize:
                one.answer({"tokens": list(prompt), "count": len(prompt), "max_model_len": longest + self._limits.max_new_tokens})
            elif len(prompt) > longest:
                # In the words that NeMo-Gym's model server takes for a full context, and not for an error.
                self._refuse(one, f"the maximum context length is {longest} tokens (render.max_prompt_tokens) and the messages have {len(prompt)}")
            else:
                found.append((prompt, one))
        return found

    def answer(self, prompted: Sequence[Prompted]) -> None:
        """Samples one batch, in the order of the prompts, not of arrival: an engine's log-probs depend on its batch in their last digits.

        Where the engine fails, every request is told so and `engine_failure` says why.
        """
        prompted = sorted(prompted, key=itemgetter(0))
        requests = [self._request(prompt, one.request.max_new_tokens) for prompt, one in prompted]
        try:
            completions = self._engine.generate(requests)
        except EngineError as error:
            self.engine_failure = str(error)
            self._when_engine_fails()
            for _, one in prompted:
                one.refuse(f"the engine failed: {error}", 500)
            return
        for (prompt, one), (completion,) in zip(prompted, completions, strict=True):
            tools, ticket = one.request.state.tools, next(self._tickets)
            turn = self._unclaimed[ticket] = SampledTurn(prompt, completion, self._renderer.parse(completion.token_ids, tools))
            text = self._renderer.completion_text(completion.token_ids)
            places = {"num_prompt_tokens": len(prompt), "ticket": ticket, "reasoning": self._reasoning}
            one.answer(chat_reply(completion, turn.action, text=text, tools=tools, **places))
        self.num_sampled += len(requests)

    def _rendered(self, asked: Sequence[Asked]) -> Iterator[Prompted]:
        for one in asked:
            try:
                yield self._renderer.render_prompt(one.request.state), one
            except UnrenderableState as error:
                self._refuse(one, f"the chat template refuses the conversation: {error}")

    def _request(self, prompt: tuple[int, ...], cap: int | None) -> GenerationRequest:
        key = content_id(prompt)
        seed = derive_seed(self._run_seed, *self._place, key, self._num_asked[key])
        self._num_asked[key] += 1
        limit = self._limits.max_new_tokens
        return GenerationRequest(prompt, (seed,), self._limits.temperature, limit if cap is None else min(cap, limit))

    def _refuse(self, asked: Asked, reason: str) -> None:
        self.refusal = self.refusal or reason
        asked.refuse(reason)
