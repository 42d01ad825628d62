"""A language model as verifier: two opinions per pair, each asked once in its lifetime, many verdicts in flight.

What can be decided without a judge is. Asked about one pair in both orders, it must say the same; a judge that cannot be reached or read
gives an infra verdict with its reason. Pure as far as the cache goes: an answered question is never asked again. Time bound of a verdict:
`deadline_s`, counted from its first request; a batch of N takes at most N / `max_concurrency` of these.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from pivotrl.config.judge import FROM_ENVIRONMENT, JudgeVerifierConfig
from pivotrl.errors import UserError
from pivotrl.identity import content_id
from pivotrl.types import Action, ParseOutcome, State, Verdict, VerdictKind
from pivotrl.verifiers.judge.cache import Answer, AnswerCache
from pivotrl.verifiers.judge.client import UNREADABLE, Endpoint, JudgeCost, JudgeFailure
from pivotrl.verifiers.judge.prompts import JudgePrompt, Opinion, Question, action_line
from pivotrl.verifiers.protocol import Case

DEADLINE = "judge deadline"
# Of an unreadable answer, for the verdict's detail: enough to see what the judge did instead.
_SHOWN_CHARS = 200

type Pair = tuple[Question, Question]


class JudgeVerifier:
    """Binary reward by a judge's two opinions.

    Reasons: ``malformed``, ``no action``, ``action too long to judge`` (invalid); ``identical``, ``judged the same``, ``meets the criteria``
    (reward 1); ``called instead of speaking``, ``spoke instead of calling``, ``judged different``, ``misses a criterion`` (reward 0);
    ``judge opinions disagree`` (reward 0 or abstention, as the recipe says); ``not a message``, ``no criterion applies`` (abstention, rubric
    alone); ``judge unreachable``, ``judge rate limited``, ``judge refused``, ``judge answer unreadable``, ``judge deadline`` (infra).

    Args:
        endpoint: base URL; the caller has resolved `config.endpoint`.
        api_key: sent as a bearer token; None sends none.
        cache_dir: directory of answers, made where it is missing.
    """

    def __init__(self, config: JudgeVerifierConfig, *, endpoint: str, api_key: str | None, cache_dir: Path) -> None:
        self._config = config
        self._prompt = JudgePrompt(config.prompt, config.criteria, max_context_chars=config.max_context_chars)
        self.endpoint = Endpoint(endpoint, api_key, config.deadline_s, config.max_attempts)
        self._cache = AnswerCache(cache_dir)
        self._cost = JudgeCost()

    @staticmethod
    def from_config(config: JudgeVerifierConfig, cache_dir: Path) -> JudgeVerifier:
        """With address and key read from the environment where the recipe says so.

        Raises:
            UserError: for a variable that is not set, or a directory that names a run where there is none.
        """
        if "{" in str(cache_dir):
            raise UserError(f"verifier.cache is {cache_dir}", rule="outside a run its answers need a directory", fix="give verifier.cache a path")
        name = config.endpoint.removeprefix(FROM_ENVIRONMENT)
        endpoint = _variable("verifier.endpoint", name) if name != config.endpoint else config.endpoint
        api_key = _variable("verifier.api_key_env", config.api_key_env) if config.api_key_env else None
        return JudgeVerifier(config, endpoint=endpoint, api_key=api_key, cache_dir=cache_dir)

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:
        return self.verify_many([Case(state, expert, action)])[0]

    def verify_many(self, cases: Sequence[Case]) -> list[Verdict]:
        """One verdict per case, equal questions asked once. Must not be called from a running event loop."""
        verdicts: dict[int, Verdict] = {}
        asked: dict[tuple[str, ...], tuple[Pair, list[int]]] = {}
        for index, case in enumerate(cases):
            verdict = self._without_judge(case)
            if verdict is not None:
                verdicts[index] = verdict
                continue
            pair = self._prompt.questions(case.state, action_line(case.expert), action_line(case.action))
            # A rubric's verdict depends on which of the two is the expert's, an equivalence's does not.
            side = str(pair[0].expert_is_first) if self._config.criteria else ""
            asked.setdefault((*map(self._key, pair), side), (pair, []))[1].append(index)
        if asked:
            judged = asyncio.run(self._judge_all([pair for pair, _ in asked.values()]))
            for (_, places), verdict in zip(asked.values(), judged, strict=True):
                verdicts.update(dict.fromkeys(places, verdict))
        return [verdicts[index] for index in range(len(cases))]

    def take_cost(self) -> Mapping[str, float]:
        """`rollout/judge_*` and `time/judge_s/sum` since the last call."""
        cost, self._cost = self._cost, JudgeCost()
        return cost.as_metrics()

    def _without_judge(self, case: Case) -> Verdict | None:
        """The verdict that needs no opinion. A rubric is asked about the expert's own message too: one it says nothing about is quarantined."""
        action, expert = case.action, case.expert
        if action.parse is ParseOutcome.MALFORMED:
            return Verdict.invalid("malformed")
        if not action.tool_calls and not action.content.strip():
            return Verdict.invalid("no action")
        lines = action_line(expert), action_line(action)
        if max(map(len, lines)) > self._config.max_action_chars:
            return Verdict.invalid("action too long to judge", chars=max(map(len, lines)))
        if bool(action.tool_calls) != bool(expert.tool_calls):
            return Verdict.ok(0.0, "called instead of speaking" if action.tool_calls else "spoke instead of calling")
        if self._config.criteria:
            return Verdict.abstain("not a message") if action.tool_calls else None
        return Verdict.ok(1.0, "identical") if lines[0] == lines[1] and expert.parse is not ParseOutcome.MALFORMED else None

    async def _judge_all(self, pairs: Sequence[Pair]) -> list[Verdict]:
        slots, breaker = asyncio.Semaphore(self._config.max_concurrency), _Breaker(self._config.give_up_after)
        async with self.endpoint.open() as client:

            async def judge(pair: Pair) -> Verdict:
                async with slots:
                    return breaker.verdict or breaker.watch(await self._judge_in_time(client, pair))

            return list(await asyncio.gather(*map(judge, pairs)))

    async def _judge_in_time(self, client: httpx.AsyncClient, pair: Pair) -> Verdict:
        try:
            async with asyncio.timeout(self._config.deadline_s):
                return await self._judge(client, pair)
        except JudgeFailure as error:
            return Verdict.infra(error.reason, problem=error.detail)
        except TimeoutError:
            return Verdict.infra(DEADLINE, deadline_s=self._config.deadline_s)

    async def _judge(self, client: httpx.AsyncClient, pair: Pair) -> Verdict:
        deadline_s = time.monotonic() + self._config.deadline_s
        first = await self._opinion(client, pair[0], deadline_s)
        # Whatever the second says, the reward is 0.
        if first is Opinion.REJECT and self._config.on_disagreement == "zero":
            return self._agreed(first)
        second = await self._opinion(client, pair[1], deadline_s)
        if first is second:
            return self._agreed(first)
        reason, opinions = "judge opinions disagree", [first.value, second.value]
        return Verdict.abstain(reason, opinions=opinions) if self._config.on_disagreement == "abstain" else Verdict.ok(0.0, reason, opinions=opinions)

    def _agreed(self, opinion: Opinion) -> Verdict:
        is_rubric = bool(self._config.criteria)
        match opinion:
            case Opinion.ACCEPT:
                return Verdict.ok(1.0, "meets the criteria" if is_rubric else "judged the same")
            case Opinion.REJECT:
                return Verdict.ok(0.0, "misses a criterion" if is_rubric else "judged different")
            case Opinion.NOT_APPLICABLE:
                return Verdict.abstain("no criterion applies")

    async def _opinion(self, client: httpx.AsyncClient, question: Question, deadline_s: float) -> Opinion:
        key = self._key(question)
        answer = self._cache.get(key)
        if answer is not None and (opinion := self._prompt.parse(answer.text, question)) is not None:
            self._cost.cache_hits += 1
            return opinion
        answer = await self.endpoint.ask(client, self._body(question), self._cost, key=key, deadline_s=deadline_s)
        return self._readable(key, answer, question)

    def _readable(self, key: str, answer: Answer, question: Question) -> Opinion:
        """The answer's opinion, kept in the cache; an answer outside the grammar is not kept.

        Raises:
            JudgeFailure: for such an answer.
        """
        opinion = self._prompt.parse(answer.text, question)
        if opinion is None:
            raise JudgeFailure(UNREADABLE, f"ends with {answer.text[-_SHOWN_CHARS:]!r}")
        self._cache.put(key, answer)
        return opinion

    def _key(self, question: Question) -> str:
        """Of everything an answer depends on: prompt version, model, sampling settings and the text itself. The endpoint's address is no part."""
        return content_id(self._prompt.name, self._prompt.hash, self._body(question))

    def _body(self, question: Question) -> dict[str, Any]:
        return {
            "model": self._config.model,
            "messages": [{"role": "system", "content": question.system}, {"role": "user", "content": question.user}],
            "temperature": self._config.temperature,
            "seed": self._config.seed,
            "max_tokens": self._config.max_answer_tokens,
        }


def _variable(key: str, name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise UserError(f"{key} names the environment variable {name}, which is not set", rule="the judge needs it", fix=f"export {name}")
    return value


class _Breaker:
    """Stops asking within one batch once the judge failed on many pairs in a row; an endpoint that answers, however strangely, is alive."""

    def __init__(self, give_up_after: int) -> None:
        self._give_up_after, self._failed_in_a_row = give_up_after, 0
        self.verdict: Verdict | None = None
        """On every pair that is not asked about: the last failure's reason. None while the judge is worth asking."""

    def watch(self, verdict: Verdict) -> Verdict:
        is_dead = verdict.kind is VerdictKind.INFRA and verdict.reason != UNREADABLE
        self._failed_in_a_row = self._failed_in_a_row + 1 if is_dead else 0
        if self._failed_in_a_row >= self._give_up_after:
            self.verdict = Verdict.infra(verdict.reason, problem=f"not asked after {self._failed_in_a_row} failures in a row")
        return verdict
