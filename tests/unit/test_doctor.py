"""The doctor: a good recipe has no finding, and each of the seeded faults is found and named (tests/fakes/doctor_faults.py)."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.doctor_faults import GOOD, NO_CHECKPOINT, QWEN, ROOT, RUNS, SETTINGS, TINY, Fault, RunFault
from fakes.gym_agents import desk_rows, fake_gym
from fakes.trainer_batches import save_model

from pivotrl import pipeline
from pivotrl.doctor import machine
from pivotrl.doctor.checkpoint import check_checkpoint, model_config
from pivotrl.doctor.examine import Request, examine
from pivotrl.doctor.findings import Finding, Findings
from pivotrl.doctor.turns import is_same
from pivotrl.types import Action, ParseOutcome, ToolCall

CLUSTER = ROOT / "configs" / "clusters" / "h100_80gb.yaml"
SUPER = ROOT / "configs" / "models" / "nemotron3_super_120b.yaml"
JUDGE = "verifier={{type: judge, endpoint: '{url}', model: {model}, prompt: equivalence.v1, on_disagreement: zero}}"
# Faults below that need a machine rather than a file.
ON_MACHINES = {"mounts", "environment", "convert-memory", "judge", "judge-model", "disk", "port", "versions", "engine", "memory", "idle-processes"}
OF_ENVIRONMENTS = {f"environment-{part}" for part in ("rows", "command", "head", "agents", "port")}


@pytest.fixture(scope="module")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose data, tokenizer and start checkpoint are there."""
    run = tmp_path_factory.mktemp("doctor") / "run"
    loaded = pipeline.load(TINY, GOOD)
    for stage in ("world", "model"):
        pipeline.STAGE_FUNCTIONS[stage](loaded, run)
    return run


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what this machine has installed nor what listens on it is the recipe's fault."""
    monkeypatch.setattr(machine, "package_versions", dict)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _static(overrides: tuple[str, ...], *, model: Path | None = None, cluster: Path | None = None) -> Findings:
    return examine(Request(TINY, [*GOOD, *overrides], None, cluster, model, is_static=True))


def _whole(run: Path, overrides: tuple[str, ...] = ()) -> Findings:
    return examine(Request(TINY, [*GOOD, *overrides], run, None, None, is_static=False, sample_size=12, port=_free_port()))


def _named(findings: Findings, check: str, says: str) -> Finding:
    found = [one for one in findings.found if one.check == check and says in one.what]
    assert found, f"no finding {check!r} says {says!r}: {findings.found}"
    assert all(getattr(found[0], part) for part in ("what", "where", "rule", "fix"))
    return found[0]


def test_a_good_recipe_has_no_finding(good_run: Path) -> None:
    findings = _whole(good_run)
    assert findings.found == []
    assert findings.may_submit
    assert findings.figures["rows"] == 24
    assert findings.figures["profile_turns"] == 48 * 4
    assert findings.figures["train_turns"] == 6 * 4 * 4


@pytest.mark.parametrize("fault", SETTINGS, ids=lambda fault: f"{fault.check}: {fault.says}")
def test_each_contradiction_is_named(fault: Fault) -> None:
    findings = _static(fault.overrides, model=fault.model)
    finding = _named(findings, fault.check, fault.says)
    assert finding.severity == fault.severity
    assert findings.may_submit == (fault.severity == "warning")


@pytest.mark.parametrize("fault", RUNS, ids=lambda fault: f"{fault.check}: {fault.says}")
def test_each_broken_file_or_row_is_named(fault: RunFault, good_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(good_run, run)
    fault.change(run)
    finding = _named(_whole(run, fault.overrides), fault.check, fault.says)
    assert finding.severity == fault.severity


def test_a_folder_that_is_no_recipe_is_a_finding(tmp_path: Path) -> None:
    findings = examine(Request(tmp_path, [], None, None, None, is_static=True))
    _named(findings, "recipe", "holds no recipe.yaml")


def test_a_layout_that_does_not_fit_the_cluster_is_named() -> None:
    layout = "parallel={tensor_model_parallel_size: 8, sequence_parallel: true, expert_model_parallel_size: 8, expert_tensor_parallel_size: 1}"
    _named(_static((NO_CHECKPOINT, layout, "launch.train_nodes=4"), model=SUPER, cluster=CLUSTER), "memory", "GiB")
    layout = "parallel={tensor_model_parallel_size: 4, sequence_parallel: true, context_parallel_size: 4}"
    _named(_static((NO_CHECKPOINT, layout, "launch.train_nodes=3"), model=QWEN, cluster=CLUSTER), "layout", "24 processes")
    _named(_static((NO_CHECKPOINT, "launch.train_nodes=64"), model=QWEN, cluster=CLUSTER), "idle-processes", "512 data parallel processes")


def test_a_full_disk_and_a_file_in_the_way_are_named(good_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = pipeline.load(TINY, GOOD)
    shape = model_config(loaded, good_run / "absent", None, Findings())
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    findings = Findings()
    machine.check_disk(loaded, tmp_path / "not" / "yet", shape, findings)
    _named(findings, "disk", "free")
    (tmp_path / "taken").write_text("a file")
    machine.check_disk(loaded, tmp_path / "taken" / "run", shape, findings)
    _named(findings, "disk", "is a file")


def test_a_taken_port_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        findings = Findings()
        machine.check_port(listener.getsockname()[1], findings)
    _named(findings, "port", "cannot be bound")


def test_packages_are_compared_with_the_nearest_platforms_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "package_versions", lambda: {"torch": "2.13.0+cpu", "megatron-core": "0.1.0"})
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    findings = Findings()
    machine.check_packages(pipeline.load(TINY, ["engine={type: vllm, kv_cache_bytes: 1}"]), findings)
    assert "torch" not in _named(findings, "versions", "megatron-core 0.1.0 (pinned 0.19.2)").what
    _named(findings, "engine", "vllm is not installed")


@pytest.fixture
def judge() -> Iterator[str]:
    """An endpoint that serves one model, `wise`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            payload = json.dumps({"data": [{"id": "wise"}]}).encode()
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: object) -> None:
            """Nothing to standard error."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_a_judge_is_asked_for_its_models(judge: str, tmp_path: Path) -> None:
    def asked(url: str, model: str) -> Findings:
        findings = Findings()
        machine.check_judges(pipeline.load(TINY, [JUDGE.format(url=url, model=model)]), tmp_path, findings)
        return findings

    assert asked(judge, "wise").found == []
    _named(asked(judge, "foolish"), "judge-model", "wise")
    _named(asked(f"http://127.0.0.1:{_free_port()}/v1", "wise"), "judge", "no answer")


def test_the_verb_prints_a_table_writes_json_and_says_whether_to_submit(tmp_path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    out = tmp_path / "findings.json"
    code, printed, _ = cli("doctor", TINY, "--static", "--json", out, *GOOD)
    assert (code, json.loads(out.read_text())["findings"]) == (0, [])
    assert printed.splitlines()[-1] == "submit: 0 errors, 0 warnings"
    code, printed, _ = cli("doctor", TINY, "--static", "--json", out, *GOOD, "ingest.held_out_frac=0")
    assert code == 1
    assert json.loads(out.read_text())["findings"][0]["check"] == "held-out"
    assert "held-out" in printed
    for name, data in (("bytes.yaml", b"\x95\xff"), ("broken.yaml", b"a: ["), ("list.yaml", b"- a"), ("empty.yaml", b"")):
        (tmp_path / name).write_bytes(data)
        code, _, errors = cli("doctor", TINY, "--static", "--cluster", tmp_path / name)
        assert (code, errors.count("\n")) == (2, 1)
        assert name in errors
    code, _, errors = cli("doctor", TINY, "--static", "--cluster", tmp_path / "nowhere.yaml")
    assert (code, "nowhere.yaml" in errors) == (2, True)


def test_every_check_has_a_seeded_fault_and_a_line_in_the_documentation() -> None:
    sources = "".join(path.read_text() for path in sorted((ROOT / "pivotrl" / "doctor").glob("*.py")))
    names = set(re.findall(r"(?:error|warn|report|refused_by|_report)\(\s*(?:findings, )?\"([a-z-]+)\"", sources))
    seeded = {fault.check for fault in SETTINGS} | {fault.check for fault in RUNS} | ON_MACHINES | OF_ENVIRONMENTS
    # No tiny row makes these fail: they need a template, a format or a judge that fails on some rows only.
    assert names - seeded == {"template-rows", "round-trip", "verifier-infra", "verifier"}
    assert seeded <= names
    documented = set(re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs" / "doctor.md").read_text(), flags=re.MULTILINE))
    assert documented == names


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "nemotron_h", "nemotron_3"])
def test_checkpoints_of_every_family_match_their_configuration(family: str, tmp_path: Path) -> None:
    """Parameters counted from config.json are those in the files, which transformers wrote; with another width they are not."""
    loaded = pipeline.load(TINY, [*GOOD, f"model={{type: huggingface, path: {tmp_path / 'hf'}}}"])
    save_model(tmp_path / "hf", family)
    findings = Findings()
    check_checkpoint(loaded, tmp_path / "hf", model_config(loaded, tmp_path / "hf", None, findings), findings)
    assert findings.found == []
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_key_value_heads": 1}))
    check_checkpoint(loaded, tmp_path / "hf", model_config(loaded, tmp_path / "hf", None, findings), findings)
    _named(findings, "checkpoint-tensors", "describes")


def test_what_is_written_is_read_back_whatever_its_spelling() -> None:
    def action(content: str, *calls: ToolCall) -> Action:
        return Action(content, calls, None, ParseOutcome.PARSED)

    call = ToolCall("f", '{"a": 1, "b": [true]}')
    assert is_same(action("Hi.", call), action("Hi.\n", ToolCall("f", '{"b":[true],"a":1}', "call_0")))
    for other in (action("Hi."), action("Ho.", call), action("Hi.", ToolCall("g", call.arguments)), action("Hi.", ToolCall("f", "{}"))):
        assert not is_same(action("Hi.", call), other)


def test_each_fault_of_an_environment_is_named(tmp_path: Path) -> None:
    """Rows without an agent, too few of them, a program that is none, a head server without the agent or that is silent, a port that is taken."""
    recipe = ROOT / "tests" / "golden" / "environment_recipe"
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    tasks, rows = desk_rows(3)
    for file in (train, test):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"environment.train_rows=[{train}]", f"environment.test_rows=[{test}]", f"model.path={tmp_path}/model"]

    def found(*words: str) -> Findings:
        return examine(Request(recipe, [*given, *words], tmp_path / "run", None, QWEN, is_static=False, port=_free_port()))

    with fake_gym(tasks) as gym:
        head, listen = f"environment.head={gym.head}", f"environment.listen=127.0.0.1:{_free_port()}"
        good = found(head, listen)
        assert [one for one in good.found if one.check.startswith("environment")] == []
        assert (good.figures["train_rows"], good.figures["test_rows"], good.figures["train_episodes"]) == (3, 3, 4 * 2 * 4)
        assert good.not_checked["data"] == "the recipe reads no trajectories"
        _named(found(head, listen, "train.episodes.tasks_per_step=9"), "environment-rows", "environment.train_rows has 3 different rows")
        _named(found(head, listen, "environment.command=[/nowhere/gym]"), "environment-command", "/nowhere/gym is no program here")
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = _named(found(head, f"environment.listen=127.0.0.1:{taken.getsockname()[1]}"), "environment-port", "cannot be listened at")
        assert port.severity == "warning"
        test.write_text(json.dumps({**rows[0], "agent_ref": {"name": "tau2_agent"}}))
        _named(found(head, listen), "environment-agents", "rows name the agent 'tau2_agent'")
        test.write_text(json.dumps({"responses_create_params": {}}))
        _named(found(head, listen), "environment-rows", "`agent_ref` has no name")
    assert _named(found("environment.head=http://127.0.0.1:9", listen), "environment-head", "does not answer from here").severity == "warning"
