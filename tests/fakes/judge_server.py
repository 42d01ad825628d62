"""An OpenAI-compatible chat endpoint on loopback whose answers a test writes; remembers what it was asked and how much of it at once."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from fakes.loopback import serving

from pivotrl.config.judge import JudgeVerifierConfig


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP answer; `text` becomes a finished chat completion, `body` is sent as it is."""

    text: str = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes | None = None
    finish_reason: str = "stop"

    def payload(self) -> bytes:
        if self.body is not None:
            return self.body
        choice = {"message": {"role": "assistant", "content": self.text}, "finish_reason": self.finish_reason}
        return json.dumps({"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 7}}).encode()


class JudgeServer:
    """Answers with what `reply` returns for a request's JSON body."""

    def __init__(self, reply: Callable[[dict[str, Any]], Reply]) -> None:
        self.reply = reply
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.most_at_once = 0
        self._now, self._lock = 0, threading.Lock()
        self.url = ""

    def handle(self, body: dict[str, Any], headers: Mapping[str, str]) -> Reply:
        with self._lock:
            self.requests.append(body)
            self.headers.append(headers)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            return self.reply(body)
        finally:
            with self._lock:
                self._now -= 1


@contextmanager
def judge_server(reply: Callable[[dict[str, Any]], Reply]) -> Iterator[JudgeServer]:
    """A running server, closed at the end."""
    server = JudgeServer(reply)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            found = server.handle(json.loads(self.rfile.read(int(self.headers["Content-Length"]))), dict(self.headers))
            payload = found.payload()
            # A client that ran into its deadline is gone.
            try:
                self.send_response(found.status)
                for name, value in {"Content-Length": str(len(payload)), **found.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(payload)
            except OSError:
                self.close_connection = True

        def do_GET(self) -> None:
            assert self.path == "/v1/models"
            payload = json.dumps({"data": [{"id": "judge"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: object) -> None:
            """Keeps the test's output clean."""

    with serving(Handler) as address:
        server.url = f"{address}/v1"
        yield server


def shown(body: Mapping[str, Any]) -> tuple[str, str]:
    """Actions A and B of a request, as the prompt shows them."""
    match = re.search(r"--- (?:action|message) A \S+\n(.*)\n--- (?:action|message) B \S+\n(.*)\n--- end", body["messages"][1]["content"])
    assert match
    return match[1], match[2]


def judge_config(**changes: object) -> JudgeVerifierConfig:
    base = {"type": "judge", "endpoint": "http://127.0.0.1:9/v1", "model": "m", "prompt": "equivalence.v1", "on_disagreement": "abstain"}
    return JudgeVerifierConfig.model_validate({**base, **changes})
