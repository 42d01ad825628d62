"""Every trajectory and every model-written turn of the shared data is accounted for.

The expected numbers are counted here from the files with the standard library's json and no product code; the adapters' numbers come from reading
the same files through detection and conversion.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fakes.adapter_files import Reading, model_turns, read


class Count(NamedTuple):
    """What a folder holds."""

    trajectories: int = 0
    """Trajectories present, those that cannot be kept included."""
    kept: int = 0
    turns: int = 0
    """Assistant turns that the model wrote, in the trajectories that are kept."""
    calls: int = 0
    """Tool calls in those turns."""

    def __add__(self, other: Any) -> "Count":
        return Count(*(a + b for a, b in zip(self, other, strict=True)))


def total(counts: Iterable[Count]) -> Count:
    return sum(counts, Count())


def files(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.rglob(pattern))


def lines(folder: Path, pattern: str) -> list[Any]:
    return [json.loads(line) for path in files(folder, pattern) for line in path.read_text("utf-8").split("\n") if line.strip()]


def of_chat(messages: Iterable[dict[str, Any]]) -> Count:
    """One trajectory in OpenAI's form: all assistant messages are the model's."""
    turns = [message for message in messages if message["role"] == "assistant"]
    return Count(1, int(bool(turns)), len(turns), sum(len(turn.get("tool_calls") or []) for turn in turns))


def of_text_chat(messages: Iterable[dict[str, Any]], mark: str, role: str = "assistant") -> Count:
    """One trajectory whose calls are written in the text behind a mark."""
    turns = [message["content"] for message in messages if message["role"] == role]
    return Count(1, int(bool(turns)), len(turns), sum(turn.count(mark) for turn in turns))


def count_tau2(folder: Path) -> Count:
    counts: list[Count] = []
    for path in files(folder, "*.json"):
        for simulation in json.loads(path.read_text("utf-8"))["simulations"]:
            turns = [message for message in simulation["messages"] if message["role"] == "assistant"]
            # The greeting is the one assistant message that cost no tokens.
            generated = [message for message in turns if message["usage"] is not None]
            assert len(turns) - len(generated) == (1 if turns else 0)
            counts.append(Count(1, int(bool(generated)), len(generated), sum(len(turn["tool_calls"] or []) for turn in generated)))
    return total(counts)


def count_tau_bench(folder: Path) -> Count:
    return total(of_chat(row["traj"]) for path in files(folder, "*.json") for row in json.loads(path.read_text("utf-8")))


def count_agentdojo(folder: Path) -> Count:
    return total(of_chat(json.loads(path.read_text("utf-8"))["messages"]) for path in files(folder, "*.json"))


def count_swe_agent(folder: Path) -> Count:
    counts: list[Count] = []
    for path in files(folder, "*.traj"):
        try:
            run = json.loads(path.read_text("utf-8"))
        except json.JSONDecodeError:
            counts.append(Count(trajectories=1))
            continue
        turns = [message for message in run["history"] if message["role"] == "assistant" and not message.get("is_demo")]
        num_calls = sum(len(turn["tool_calls"]) if turn.get("tool_calls") else int(bool((turn.get("action") or "").strip())) for turn in turns)
        counts.append(Count(1, int(bool(turns)), len(turns), num_calls))
    return total(counts)


def count_swe_smith(folder: Path) -> Count:
    return total(of_text_chat(row["messages"], "<function=") for row in lines(folder, "*.jsonl")) + count_swe_agent(folder)


def count_mini_swe_agent(folder: Path) -> Count:
    counts: list[Count] = []
    for path in files(folder, "*.traj.json"):
        run = json.loads(path.read_text("utf-8"))
        counts.append(of_text_chat(run, "```mswea_bash_command") if isinstance(run, list) else of_chat(run["messages"]))
    return total(counts)


def count_openhands(folder: Path) -> Count:
    counts: list[Count] = []
    for session in sorted(path for path in folder.iterdir() if path.is_dir()):
        calls = sorted(files(session, "*.json"), key=lambda path: float(re.findall(r"-([\d.]+)\.json$", path.name)[0]))
        newest = json.loads(calls[-1].read_text("utf-8"))
        count = of_chat([*newest["messages"], {"role": "assistant", **newest["response"]["choices"][0]["message"]}])
        counts.append(count._replace(trajectories=len(calls)))
    return total(counts)


def count_terminus2(folder: Path) -> Count:
    return total(of_text_chat(row["conversations"], '"commands"') for row in lines(folder, "*.jsonl"))


def count_search(folder: Path) -> Count:
    counts = [of_chat(row["completion"]) for row in lines(folder, "wiki*.jsonl")]
    for row in lines(folder, "webdancer*.jsonl"):
        spoken = [{**message, "content": message["content"].split("</think>")[-1]} for message in row["messages"]]
        counts.append(of_text_chat(spoken, "<tool_call>"))
    return total(counts)


def count_gym_rows(folder: Path) -> Count:
    counts: list[Count] = []
    for row in lines(folder, "*.jsonl"):
        action = row.get("expected_action")
        if not action and not row.get("expected_answer"):
            counts.append(Count(trajectories=1))
        else:
            num_calls = 1 if action is None else {"message": 0, "function_call": 1}.get(action["type"], len(action.get("calls", [])))
            counts.append(Count(1, 1, 1, num_calls))
    return total(counts)


def count_sharegpt(folder: Path) -> Count:
    counts: list[Count] = []
    for path in files(folder, "*.json"):
        for row in json.loads(path.read_text("utf-8")):
            speakers = Counter(turn["from"] for turn in row["conversations"])
            counts.append(Count(1, 1, speakers["gpt"] + speakers["function_call"], speakers["function_call"]))
    return total(counts)


def count_codex(folder: Path) -> Count:
    counts: list[Count] = []
    for path in files(folder, "*.jsonl"):
        items = [json.loads(line)["payload"] for line in path.read_text("utf-8").split("\n") if line and json.loads(line)["type"] == "response_item"]
        letters = {"reasoning": "r", "function_call": "c", "message": "m", "function_call_output": "|"}
        sequence = "".join("|" if item.get("role") == "user" else letters.get(item["type"], "") for item in items)
        counts.append(Count(1, 1, len(re.findall("[rcm]+", sequence)), sequence.count("c")))
    return total(counts)


def count_atif(folder: Path) -> Count:
    counts: list[Count] = []
    for path in files(folder, "*.json"):
        replies = [step["message"] for step in json.loads(path.read_text("utf-8"))["steps"] if step["source"] == "agent"]
        counts.append(Count(1, int(bool(replies)), len(replies), sum('"commands"' in reply for reply in replies)))
    return total(counts)


COUNTERS: dict[str, Callable[[Path], Count]] = {
    "tau2": count_tau2,
    "tau_bench": count_tau_bench,
    "agentdojo": count_agentdojo,
    "swe_agent": count_swe_agent,
    "swe_smith": count_swe_smith,
    "mini_swe_agent": count_mini_swe_agent,
    "openhands": count_openhands,
    "terminus2": count_terminus2,
    "search": count_search,
    "gym_rows": count_gym_rows,
    "sharegpt": count_sharegpt,
    "codex": count_codex,
    "atif": count_atif,
}


def of_reading(reading: Reading) -> Count:
    turns = [turn for converted in reading.kept for turn in model_turns(converted.trajectory)]
    present = len(reading.kept) + len(reading.dropped) + len(reading.quarantined)
    return Count(present, len(reading.kept), len(turns), sum(len(turn.tool_calls) for turn in turns))


@pytest.mark.parametrize("folder", COUNTERS)
def test_counts_of_each_folder(shared_data: Path, folder: str) -> None:
    expected = COUNTERS[folder](shared_data / folder)
    assert expected.turns > 0
    assert of_reading(read(shared_data / folder)) == expected


def test_every_folder_is_counted(shared_data: Path) -> None:
    assert {path.name for path in shared_data.iterdir() if path.is_dir()} == set(COUNTERS)


def test_the_broken_file_is_named_and_its_turns_are_not_taken_for_something_else(shared_data: Path) -> None:
    broken = [path for path in files(shared_data / "swe_agent", "*.traj") if not is_json(path)]
    assert len(broken) == 1
    assert broken[0].read_text("utf-8").count('"role": "assistant"') > 0
    reading = read(shared_data / "swe_agent")
    assert len(reading.quarantined) == len(broken)
    assert broken[0].name not in {converted.trajectory.source_file for converted in reading.kept}


def is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError:
        return False
    return True


def rewards(folder: str, root: Path) -> Counter[bool]:
    """How many episodes of a folder were solved, by the source's own field."""
    match folder:
        case "tau2":
            values = [
                s["reward_info"]["reward"] for path in files(root / folder, "*.json") for s in json.loads(path.read_text("utf-8"))["simulations"]
            ]
        case "tau_bench":
            values = [row["reward"] for path in files(root / folder, "*.json") for row in json.loads(path.read_text("utf-8"))]
        case "agentdojo":
            values = [float(json.loads(path.read_text("utf-8"))["utility"]) for path in files(root / folder, "*.json")]
        case _:
            values = [row["reward"] for row in lines(root / folder, "wiki*.jsonl")]
    return Counter(value == 1.0 for value in values)


@pytest.mark.parametrize("folder", ["tau2", "tau_bench", "agentdojo", "search"])
def test_outcomes_are_the_sources_own(shared_data: Path, folder: str) -> None:
    expected = rewards(folder, shared_data)
    outcomes = Counter(converted.trajectory.outcome.value for converted in read(shared_data / folder).kept)
    assert (outcomes["success"], outcomes["failure"]) == (expected[True], expected[False])
    assert expected[False] > 0


def test_every_call_is_answered_or_counted(shared_data: Path) -> None:
    """Ids are unique within a trajectory, every result names an open call, and only a last turn may go unanswered without a repair."""
    for folder in COUNTERS:
        for converted in read(shared_data / folder).kept:
            messages = converted.trajectory.messages
            ids = [call.id for message in messages for call in message.tool_calls]
            answers = [message.tool_call_id for message in messages if message.role.value == "tool"]
            assert len(set(ids)) == len(ids)
            assert None not in answers
            assert set(answers) <= set(ids)
            assert len(set(answers)) == len(answers)
