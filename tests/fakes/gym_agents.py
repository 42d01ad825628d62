"""NeMo-Gym as seen from outside, on loopback: a head server that says where agents are, and an agent server that plays the order desk.

The agent asks the policy over HTTP as upstream's do (OpenAI chat, the conversation written anew every turn) and hands on what it got for token ids.
Only the order desk itself is shared with the product.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from fakes.loopback import serving

from pivotrl.types import Action, ParseOutcome, Role, ToolCall
from pivotrl.worlds.order_desk import OrderDesk
from pivotrl.worlds.protocol import TaskSplit

AGENT = "desk_agent"
SEED = 3


@dataclass
class FakeGym:
    """One process of NeMo-Gym: `head` is its address. Whatever a test sets here changes the next episodes."""

    policy_base_url: str = ""
    tasks: dict[str, Any] = field(default_factory=dict[str, Any])
    changes: Callable[[dict[str, Any]], tuple[int, dict[str, Any]]] = lambda result: (200, result)
    """From a result to the status and body that are answered."""
    asks: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: body
    """From a request to the policy to the one that is sent."""
    swallows: bool = False
    """Whether a failed request to the policy ends the episode with what there is, as some agents do."""
    max_turns: int | None = None
    """Turns after which the agent gives up."""
    runs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Bodies of POST /run."""
    replies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    refusals: list[str] = field(default_factory=list[str])
    head: str = ""

    def play(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.runs.append(body)
        params = body["responses_create_params"]
        episode, output = OrderDesk().reset(self.tasks[body["task"]]), []
        while not episode.is_done and len(output) != self.max_turns:
            messages = [_message(message) for message in episode.state().messages]
            tools = [
                {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}}
                for tool in episode.state().tools
            ]
            asked = {"model": "policy", "messages": messages, "tools": tools, "max_tokens": params["max_output_tokens"]}
            try:
                reply = self._ask(self.asks(asked))
            except urllib.error.HTTPError as error:
                self.refusals.append(error.read().decode())
                if error.code >= 500 and not self.swallows:
                    return 500, {"detail": "the model server failed"}
                break
            message = reply["choices"][0]["message"]
            output.append({"type": "message", "content": message.get("content"), **_token_fields(message)})
            if reply["choices"][0]["finish_reason"] == "length":
                break
            episode.act(_action(message))
        return self.changes({"reward": float(episode.success), "response": {"output": output}, "desk": "open" if not episode.is_done else "closed"})

    def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.policy_base_url}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": "Bearer none"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            reply = json.load(response)
        self.replies.append(reply)
        return reply


def desk_rows(num_tasks: int, split: TaskSplit = TaskSplit.TRAIN) -> tuple[list[Any], list[dict[str, Any]]]:
    """Tasks of the order desk, and the rows that name them."""
    tasks = list(OrderDesk().tasks(split, num_tasks=num_tasks, seed=SEED))
    return tasks, [
        {"responses_create_params": {"input": []}, "agent_ref": {"type": "responses_api_agents", "name": AGENT}, "task": one.id} for one in tasks
    ]


@contextmanager
def fake_gym(tasks: list[Any]) -> Iterator[FakeGym]:
    """Running servers, closed at the end."""
    gym = FakeGym(tasks={task.id: task for task in tasks})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/global_config_dict_yaml":
                entry = f"{{host: 127.0.0.1, port: {gym.head.rpartition(':')[2]}, entrypoint: app.py}}"
                model = "policy_model:\n  responses_api_models:\n    vllm_model: {host: h, port: 1}\n"
                self._send(200, f"{model}{AGENT}:\n  responses_api_agents:\n    simple_agent: {entry}\n")
            else:
                self._send(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            assert self.path == "/run"
            self._send(*gym.play(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def _send(self, status: int, value: Any) -> None:
            payload = json.dumps(value).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)
            except OSError:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Keeps the test's output clean."""

    with serving(Handler) as gym.head:
        yield gym


def _message(message: Any) -> dict[str, Any]:
    if message.role is Role.TOOL:
        return {"role": "tool", "tool_call_id": message.tool_call_id, "content": message.content}
    calls = [
        {"id": call.id or f"own_{number}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for number, call in enumerate(message.tool_calls)
    ]
    return {"role": message.role.value, "content": message.content or None, **({"tool_calls": calls} if calls else {})}


def _action(message: dict[str, Any]) -> Action:
    calls = tuple(ToolCall(one["function"]["name"], one["function"]["arguments"], one["id"]) for one in message.get("tool_calls", ()))
    return Action(message.get("content") or "", calls, None, ParseOutcome.PARSED if calls else ParseOutcome.ABSENT)


def _token_fields(message: dict[str, Any]) -> dict[str, Any]:
    return {key: message[key] for key in ("prompt_token_ids", "generation_token_ids", "generation_log_probs")}
