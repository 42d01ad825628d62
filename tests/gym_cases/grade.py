"""Verdicts of the public graders on the invented rows: writes graded.jsonl. Not run by the tests, which read that file.

Needs one environment per version, apart from the project's (0.7.0 states Python 3.13.14 or newer):

    python3.12 -m venv A && A/bin/pip install nemo-gym==0.4.0 openapi-schema-validator==0.6.3
    python3.13 -m venv B && B/bin/pip install nemo-gym==0.7.0 openapi-schema-validator==0.6.3
    A/bin/python tests/gym_cases/grade.py A.jsonl && B/bin/python tests/gym_cases/grade.py B.jsonl
    python tests/gym_cases/grade.py tests/gym_cases/graded.jsonl A.jsonl B.jsonl

A judge is never asked: where the terminus grader would ask one, the verdict is ``judge``. Where a grader rejects the request or fails without a
verdict, there is none.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from invented import Case, all_cases

_WHY = ("category", "failure_reason")
_HOST: dict[str, Any] = {"host": "127.0.0.1", "port": 1, "entrypoint": "", "name": "grader"}


class _JudgeAsked(Exception):
    pass


class _UnknownKnob(Exception):
    """A knob of a later version, which an earlier one would silently ignore."""


def _grader(case: Case) -> tuple[Any, Any]:
    """A server object of the case's grader and its request class."""
    from nemo_gym.server_utils import ServerClient

    knobs = case["knobs"]
    if case["grader"] == "single_step":
        module, prefix = "single_step_tool_use_with_argument_comparison", "SingleStepToolUseArgumentComparison"
        settings = {"tool_call_comparator_config": knobs}
    elif case["grader"] == "swe_pivot":
        module, prefix, settings = "swe_pivot", "SwePivot", knobs
    else:
        module, prefix = "terminus_judge", "TerminusJudge"
        judge = {"judge_model_server": {"type": "responses_api_models", "name": "judge"}, "judge_responses_create_params": {"input": []}}
        settings = {**judge, **knobs}
    app = importlib.import_module(f"resources_servers.{module}.app")
    # The grader reads its prompt template relative to its own folder.
    os.chdir(Path(app.__file__).parent)
    config = getattr(app, f"{prefix}ResourcesServerConfig")
    knob_class = config.model_fields["tool_call_comparator_config"].annotation if case["grader"] == "single_step" else config
    if not knobs.keys() <= knob_class.model_fields.keys():
        raise _UnknownKnob
    server = getattr(app, f"{prefix}ResourcesServer")(config=config(**_HOST, **settings), server_client=MagicMock(spec=ServerClient))
    return server, getattr(app, f"{prefix}VerifyRequest")


def _verdict(case: Case) -> dict[str, Any] | None:
    try:
        server, request = _grader(case)
    except _UnknownKnob:
        return None
    asked: list[bool] = []

    async def judge(**_texts: str) -> None:
        asked.append(True)
        raise _JudgeAsked

    object.__setattr__(server, "_generate_judge_evaluation", judge)
    envelope = {"id": "r", "created_at": 0.0, "model": "m", "object": "response", "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    try:
        body = request.model_validate({"responses_create_params": {"input": []}, **case["row"], "response": {**envelope, "output": case["output"]}})
        graded = asyncio.run(server.verify(body)).model_dump(mode="json")
    except Exception:  # noqa: BLE001 - whatever the grader raises is the absence of a verdict
        return None
    if asked:
        return {"judge": True}
    return {"reward": graded["reward"], "why": next(graded[key] for key in _WHY if graded.get(key))}


def _merge(out: Path, parts: list[Path]) -> None:
    graded = [[json.loads(line) for line in part.read_text(encoding="utf-8").split("\n") if line] for part in parts]
    with out.open("w", encoding="utf-8") as stream:
        for rows in zip(*graded, strict=True):
            verdicts = {row["version"]: row["verdict"] for row in rows if row["verdict"] is not None}
            if verdicts:
                stream.write(json.dumps({**rows[0]["case"], "verdicts": verdicts}) + "\n")


def main() -> None:
    out, *parts = [Path(word).resolve() for word in sys.argv[1:]]
    if parts:
        _merge(out, parts)
        return
    version = importlib.metadata.version("nemo-gym")
    with out.open("w", encoding="utf-8") as stream:
        for case in all_cases():
            stream.write(json.dumps({"case": case, "version": version, "verdict": _verdict(case)}) + "\n")


if __name__ == "__main__":
    main()
