"""What verifiers that wait cost: a judge on loopback (asked one by one, asked together, answered from the cache) and a sandboxed command.

``python benchmarks/verify_waiting.py [--answer-s 0.05]`` prints seconds per verdict and the ratios of one run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from pivotrl.config.judge import JudgeVerifierConfig
from pivotrl.config.shell_effect import SandboxLimits
from pivotrl.types import Action, ParseOutcome, State, ToolOrigin
from pivotrl.verifiers.judge.verifier import JudgeVerifier
from pivotrl.verifiers.protocol import Case
from pivotrl.verifiers.sandbox.runner import Fixture, Sandbox

NUM_VERDICTS, CONCURRENCY, NUM_RUNS = 64, 16, 20
STATE = State((), (), ToolOrigin.NONE)


def serve(answer_s: float) -> str:
    """A judge that says SAME after `answer_s` seconds, in a thread of its own for each request."""
    body = json.dumps({"choices": [{"message": {"content": "VERDICT: SAME"}, "finish_reason": "stop"}], "usage": {}}).encode()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(answer_s)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/v1"


def seconds(action: Callable[[], object], count: int) -> float:
    """Wall time per unit of `count`."""
    started_s = time.perf_counter()
    action()
    return (time.perf_counter() - started_s) / count


def judge_figures(answer_s: float) -> None:
    says = lambda text: Action(text, (), None, ParseOutcome.ABSENT)  # noqa: E731
    cases = [Case(STATE, says("expert"), says(f"action {index}")) for index in range(NUM_VERDICTS)]
    url, section = serve(answer_s), {"type": "judge", "model": "m", "prompt": "equivalence.v1", "on_disagreement": "abstain"}
    with tempfile.TemporaryDirectory() as folder:
        config = JudgeVerifierConfig.model_validate({**section, "endpoint": url, "max_concurrency": CONCURRENCY})
        make = lambda name: JudgeVerifier(config, endpoint=url, api_key=None, cache_dir=Path(folder) / name)  # noqa: E731
        make("warm").verify_many(cases[:1])
        alone, together = make("alone"), make("together")
        one_by_one = seconds(lambda: [alone.verify(case.state, case.expert, case.action) for case in cases], NUM_VERDICTS)
        at_once = seconds(lambda: together.verify_many(cases), NUM_VERDICTS)
        cached = seconds(lambda: together.verify_many(cases), NUM_VERDICTS)
    print(f"judge, {answer_s:g} s per opinion, two opinions: {one_by_one * 1e3:.1f} ms a verdict one by one")
    print(f"judge, {CONCURRENCY} at once: {at_once * 1e3:.2f} ms, {one_by_one / at_once:.1f} times as fast; from the cache: {cached * 1e3:.2f} ms")


def sandbox_figures() -> None:
    sandbox, argv = Sandbox(SandboxLimits()), ["/bin/bash", "-c", "echo hi > a"]
    inside = seconds(lambda: [sandbox.run(argv, Fixture(())) for _ in range(NUM_RUNS)], NUM_RUNS)
    with tempfile.TemporaryDirectory() as folder:
        bare = seconds(lambda: [subprocess.run(argv, cwd=folder, check=True) for _ in range(NUM_RUNS)], NUM_RUNS)
    print(f"sandbox: {inside * 1e3:.0f} ms a command, {inside / bare:.0f} times the bare process ({bare * 1e3:.1f} ms)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answer-s", type=float, default=0.05, help="seconds that the judge takes for one opinion")
    judge_figures(parser.parse_args().answer_s)
    sandbox_figures()


if __name__ == "__main__":
    main()
