"""Requests to an OpenAI-compatible chat endpoint: retried with growing waits, `Retry-After` honoured, nothing trusted in what comes back.

Every failure is a `JudgeFailure` with a countable reason; what an answer means is the prompt's business. The API key goes into one header
and nowhere else.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any

import httpx
import orjson
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, stop_any
from tenacity.stop import stop_base

from pivotrl.identity import derive_seed
from pivotrl.verifiers.judge.cache import Answer

UNREACHABLE, RATE_LIMITED, REFUSED, UNREADABLE = "judge unreachable", "judge rate limited", "judge refused", "judge answer unreadable"
_FIRST_WAIT_S, _MAX_WAIT_S = 0.5, 30.0
_MAX_BODY_BYTES = 4_000_000
_TOO_MANY_REQUESTS = 429
_RETRIED = (408, 409, 425, _TOO_MANY_REQUESTS)
_SERVER_ERRORS = range(500, 600)


class JudgeFailure(Exception):
    """No opinion, for a reason that is not the action's.

    Args:
        reason: short and countable.
        detail: what happened; never a header.
    """

    def __init__(self, reason: str, detail: str, *, is_temporary: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail
        self.is_temporary, self.retry_after_s = is_temporary, retry_after_s


@dataclass(slots=True)
class JudgeCost:
    """What judging cost since it was last taken."""

    requests: int = 0
    failures: int = 0
    """Requests that gave no answer, retried or not."""
    cache_hits: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    request_s: float = 0.0
    """Sum of the requests' durations, which overlap."""

    def as_metrics(self) -> dict[str, float]:
        """Under registered names; empty where nothing was asked."""
        if not (self.requests or self.cache_hits):
            return {}
        return {
            "rollout/judge_requests/sum": self.requests,
            "rollout/judge_failures/sum": self.failures,
            "rollout/judge_cache_hits/sum": self.cache_hits,
            "rollout/judge_prompt_tokens/sum": self.prompt_tokens,
            "rollout/judge_completion_tokens/sum": self.completion_tokens,
            "time/judge_s/sum": round(self.request_s, 3),
        }


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a judge answers."""

    url: str
    """Base URL up to `/v1`."""
    api_key: str | None = field(repr=False)
    timeout_s: float
    max_attempts: int

    def open(self) -> httpx.AsyncClient:
        """A client for one batch, to be closed by the caller. Asks for no compression: an answer cannot unpack to more than was sent."""
        headers = {"Accept-Encoding": "identity", **({} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"})}
        return httpx.AsyncClient(headers=headers, timeout=self.timeout_s, verify=_ssl_context(), limits=httpx.Limits(max_connections=None))

    async def ask(self, client: httpx.AsyncClient, body: Mapping[str, Any], cost: JudgeCost, *, key: str, deadline_s: float) -> Answer:
        """One answer, after as many attempts as it takes and may take.

        Args:
            key: of the question; makes the waits of simultaneous failures differ.
            deadline_s: `time.monotonic` beyond which no further wait is begun.

        Raises:
            JudgeFailure: of the last attempt.
        """
        attempts = AsyncRetrying(
            stop=stop_any(stop_after_attempt(self.max_attempts), _NoTimeLeft(key, deadline_s)),
            wait=lambda state: _wait_s(state, key),
            retry=retry_if_exception(lambda error: isinstance(error, JudgeFailure) and error.is_temporary),
            sleep=asyncio.sleep,
            reraise=True,
        )
        return await attempts(self._ask_once, client, body, cost)

    async def _ask_once(self, client: httpx.AsyncClient, body: Mapping[str, Any], cost: JudgeCost) -> Answer:
        started_s = time.monotonic()
        cost.requests += 1
        try:
            answer = await _post(client, f"{self.url.rstrip('/')}/chat/completions", body)
        except BaseException as error:
            cost.failures += 1
            if isinstance(error, httpx.HTTPError):
                raise JudgeFailure(UNREACHABLE, type(error).__name__, is_temporary=True) from error
            raise
        finally:
            cost.request_s += time.monotonic() - started_s
        cost.prompt_tokens += answer.prompt_tokens
        cost.completion_tokens += answer.completion_tokens
        return answer


@cache
def _ssl_context() -> ssl.SSLContext:
    """One per process: loading the certificates takes longer than most batches."""
    return httpx.create_ssl_context()


async def _post(client: httpx.AsyncClient, url: str, body: Mapping[str, Any]) -> Answer:
    content = orjson.dumps(body)
    async with client.stream("POST", url, content=content, headers={"Content-Type": "application/json"}) as response:
        if response.status_code != httpx.codes.OK:
            raise _refusal(response)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise JudgeFailure(UNREADABLE, "compressed although not asked to")
        received = bytearray()
        async for block in response.aiter_raw():
            received += block
            if len(received) > _MAX_BODY_BYTES:
                raise JudgeFailure(UNREADABLE, f"more than {_MAX_BODY_BYTES} bytes")
    return _answer(bytes(received))


def _refusal(response: httpx.Response) -> JudgeFailure:
    status = response.status_code
    is_temporary = status in _RETRIED or status in _SERVER_ERRORS
    reason = RATE_LIMITED if status == _TOO_MANY_REQUESTS else UNREACHABLE if is_temporary else REFUSED
    return JudgeFailure(reason, f"HTTP {status}", is_temporary=is_temporary, retry_after_s=_retry_after_s(response.headers.get("retry-after")))


def _retry_after_s(header: str | None) -> float | None:
    """Seconds or an HTTP date (RFC 9110, section 10.2.3); None for anything else."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        moment = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - datetime.now(UTC).timestamp())


def _answer(body: bytes) -> Answer:
    """The text and usage of a chat completion that was finished.

    Raises:
        JudgeFailure: for a body of another shape, or an answer cut at its cap.
    """
    try:
        value = orjson.loads(body)
        choice, usage = value["choices"][0], value.get("usage") or {}
        text, finish_reason = choice["message"]["content"], choice.get("finish_reason")
        answer = Answer(text, int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise JudgeFailure(UNREADABLE, f"not a chat completion ({type(error).__name__})") from error
    if not isinstance(text, str):
        raise JudgeFailure(UNREADABLE, "no text")
    if finish_reason == "length":
        raise JudgeFailure(UNREADABLE, "cut at max_answer_tokens")
    return answer


class _NoTimeLeft(stop_base):
    """Stops where the next wait would end after the deadline."""

    def __init__(self, key: str, deadline_s: float) -> None:
        self._key, self._deadline_s = key, deadline_s

    def __call__(self, retry_state: RetryCallState) -> bool:
        return time.monotonic() + _wait_s(retry_state, self._key) >= self._deadline_s


def _wait_s(state: RetryCallState, key: str) -> float:
    """What the server asks for, else half a second doubled per attempt, shortened by up to half so that failures spread out."""
    error = state.outcome.exception() if state.outcome is not None else None
    if isinstance(error, JudgeFailure) and error.retry_after_s is not None:
        return error.retry_after_s
    longest = min(_MAX_WAIT_S, _FIRST_WAIT_S * 2 ** (state.attempt_number - 1))
    return longest * (0.5 + derive_seed(0, "judge", "wait", key, state.attempt_number) / 2**63)
