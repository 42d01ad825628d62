"""Every fault that the parity gate is for, injected into `pivotrl train`: the command refuses to start, exits 2 and names the place.

Faults are put into the real engine of the recipe: the weights that it holds, what it is asked, or what it answers. One vLLM serves all its
cases, since starting one takes longer than a case.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.parity_runs import copied_run, prepare_run
from fakes.tiny_tokenizer import CHATML, tiny_tokenizer
from safetensors.torch import load_file

from pivotrl.megatron.directories import is_complete
from pivotrl.observability.parity_table import parity_table
from pivotrl.observability.readings import read_run
from pivotrl.observability.sinks import METRICS, PARITY_FINDINGS
from pivotrl.rollouts.engine import GenerationRequest
from pivotrl.rollouts.transformers_engine import TransformersEngine
from pivotrl.rollouts.vllm import VllmEngine
from pivotrl.rundir import read_jsonl
from pivotrl.types import Completion

Weights = dict[str, torch.Tensor]
Cli = Callable[..., tuple[int, str, str]]
_ENGINES = {"transformers": TransformersEngine, "vllm": VllmEngine}
_EXPERT = "model.layers.1.mlp.experts.{}.{}.weight"


@dataclass(frozen=True)
class Fault:
    """What is wrong between the trainer and its engine."""

    place: str
    words: str
    """Of the message; a regular expression."""
    weights: Callable[[Weights], None] | None = None
    """Changes the weights that the engine holds."""
    request: Callable[[GenerationRequest], GenerationRequest] = lambda request: request
    completion: Callable[[Completion], Completion] = lambda completion: completion


def _older(held: Weights) -> None:
    for name, tensor in held.items():
        held[name] = tensor + 0.05 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))


def _swap_experts(held: Weights) -> None:
    for part in ("gate_proj", "up_proj", "down_proj"):
        one, two = _EXPERT.format(0, part), _EXPERT.format(2, part)
        held[one], held[two] = held[two], held[one]


def _scale_expert(held: Weights) -> None:
    held[_EXPERT.format(3, "down_proj")] *= 4


def _with_a_token_before(request: GenerationRequest) -> GenerationRequest:
    extra: Any = tiny_tokenizer().convert_tokens_to_ids(tiny_tokenizer().all_special_tokens[0])
    return replace(request, prompt_token_ids=(extra, *request.prompt_token_ids))


_EVERY_MODEL = {
    "stale weights": Fault("weights", "stale weights: .* tensors differ, first ", weights=_older),
    "off by one": Fault(
        "shift", "off by one: .* is the one of the next token", completion=lambda one: replace(one, logprobs=(*one.logprobs[1:], -1.0))
    ),
    "wrong temperature": Fault(
        "temperature", "wrong temperature: .* of temperature 1.3, .* samples at 0.8", request=lambda one: replace(one, temperature=1.3)
    ),
    "template": Fault("template", "the prompt with .* before it: it does not see the token ids that it is sent", request=_with_a_token_before),
}
_MIXTURE = {
    "swapped experts": Fault("weights", "swapped experts: model.layers.1.mlp.experts holds expert 2's 'down_proj", weights=_swap_experts),
    "wrong expert scale": Fault("weights", "wrong expert scale: the engine holds 4 times tensor '.*experts.3.down_proj", weights=_scale_expert),
}
_HEALTHY = Fault("", "")
_FAULTS = {**_EVERY_MODEL, **_MIXTURE}
_FAMILIES = ("qwen3", "qwen3_moe")
# Of a mixture with vLLM what a dense model cannot show. One family after the other, since one process holds one vLLM.
_PAIRS = (("qwen3", "transformers", _EVERY_MODEL), ("qwen3_moe", "transformers", {**_EVERY_MODEL, **_MIXTURE}))
_PAIRS += (("qwen3", "vllm", _EVERY_MODEL), ("qwen3_moe", "vllm", _MIXTURE))
_CASES = [(family, engine, name) for family, engine, faults in _PAIRS for name in (*faults, "nothing")]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return {family: prepare_run(tmp_path_factory.mktemp(family), family) for family in _FAMILIES}


class _OneVllm:
    """The engine that is started when a family is first asked for, and closed when another is."""

    def __init__(self) -> None:
        self._load, self._close = VllmEngine.load, VllmEngine.close
        self._family, self._engine = "", None

    def of(self, family: str, checkpoint: Path, arguments: Mapping[str, Any], config: Any) -> VllmEngine:
        if family != self._family:
            self.close()
            self._family, self._engine = family, self._load(checkpoint, config, **arguments)
        assert self._engine is not None
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._close(self._engine)
        self._family, self._engine = "", None


@pytest.fixture(scope="module")
def one_vllm() -> Iterator[_OneVllm]:
    shared = _OneVllm()
    yield shared
    shared.close()


@contextlib.contextmanager
def injected(fault: Fault, engine: str, family: str, one_vllm: _OneVllm) -> Iterator[None]:
    """The recipe's engine with the fault, for the commands of the block."""
    kind: Any = _ENGINES[engine]
    load, generate = kind.load, kind.generate

    def faulty_load(checkpoint: Path, config: Any, **arguments: Any) -> Any:
        made = one_vllm.of(family, checkpoint, arguments, config) if engine == "vllm" else load(checkpoint, config, **arguments)
        weights = load_file(checkpoint / "model.safetensors")
        if fault.weights is not None:
            fault.weights(weights)
        made.load_weights(weights.items(), 0)
        return made

    def faulty_generate(self: Any, requests: list[GenerationRequest]) -> list[tuple[Completion, ...]]:
        return [tuple(map(fault.completion, group)) for group in generate(self, [fault.request(one) for one in requests])]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "load", staticmethod(faulty_load))
        patch.setattr(kind, "generate", faulty_generate)
        if engine == "vllm":
            patch.setattr(kind, "close", lambda self: None)
        yield


def assert_refused(answer: tuple[int, str, str], run: Path, fault: Fault, step: int = 0) -> None:
    """Exit code 2, one line that names the place, a finding for the report, and nothing trained."""
    code, _, errors = answer
    assert code == 2, errors
    (line,) = (line for line in errors.splitlines() if line.startswith("pivotrl: error:"))
    assert f"engine and trainer disagree at step {step}: {fault.place}: " in line
    findings = list(read_jsonl(run / "train" / PARITY_FINDINGS))
    assert (findings[-1]["step"], findings[-1]["place"]) == (step, fault.place)
    assert re.search(fault.words, findings[-1]["what"]), findings[-1]["what"]
    assert not list((run / "train").glob("parity_*/")), "the export for the search is removed"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "engine", "name"), _CASES, ids=lambda value: value.replace(" ", "_"))
def test_train_refuses_to_start_unless_nothing_is_wrong(
    prepared: Mapping[str, Path], one_vllm: _OneVllm, cli: Cli, tmp_path: Path, family: str, engine: str, name: str
) -> None:
    fault, folder = _FAULTS.get(name, _HEALTHY), prepared[family]
    run = copied_run(folder, tmp_path / "run")
    with injected(fault, engine, family, one_vllm):
        answer = cli("train", folder / engine, "--run", run, "train.num_steps=2")
    if fault is _HEALTHY:
        code, _, errors = answer
        assert code == 0, errors
        assert "parity at step 0 (" in errors
        assert not (run / "train" / PARITY_FINDINGS).exists()
        return
    assert_refused(answer, run, fault)
    assert (run / "train" / METRICS).read_bytes() == b""
    assert not any((run / "train" / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_setting_that_the_engine_forgets(prepared: Mapping[str, Path], cli: Cli, tmp_path: Path) -> None:
    """No weight differs: transformers' engine reads a config.json that says otherwise how the experts' outputs are scaled."""
    folder = prepared["qwen3_moe"]
    run = copied_run(folder, tmp_path / "run")
    wrong = shutil.copytree(folder / "hf", tmp_path / "wrong")
    stated = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({**stated, "norm_topk_prob": not stated["norm_topk_prob"]}))
    load = TransformersEngine.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersEngine, "load", staticmethod(lambda _checkpoint, config, **arguments: load(wrong, config, **arguments)))
        answer = cli("train", folder / "transformers", "--run", run)
    assert_refused(answer, run, Fault("engine", "wrong expert scale: its log-probs are those of the model with norm_topk_prob"))


@pytest.mark.slow
def test_a_template_that_the_pivots_were_not_profiled_with(prepared: Mapping[str, Path], cli: Cli, tmp_path: Path) -> None:
    """Injected as a user would: another render.chat_template for `train` than for `profile`."""
    run = copied_run(prepared["qwen3"], tmp_path / "run")
    other = tmp_path / "other.jinja"
    other.write_text(CHATML)
    code, _, errors = cli("train", prepared["qwen3"] / "transformers", "--run", run, f"render.chat_template={other}")
    assert code == 2, errors
    assert "error: template: the stored prompt of pivot " in errors
    assert "differ from token" in errors
    (finding,) = read_jsonl(run / "train" / PARITY_FINDINGS)
    assert finding["place"] == "template"


@pytest.mark.slow
@pytest.mark.parametrize("async_save", ["false", "true"])
def test_a_fault_in_the_middle_stops_at_the_next_check_and_the_repaired_run_ends_as_the_undisturbed_one(
    prepared: Mapping[str, Path], one_vllm: _OneVllm, cli: Cli, tmp_path: Path, async_save: str
) -> None:
    folder = prepared["qwen3"]
    undisturbed, disturbed = (copied_run(folder, tmp_path / name) for name in ("undisturbed", "disturbed"))
    words = ("train", folder / "transformers", "--run")
    # The probe of every hand-over would notice this fault first; a check of the gate is what is tested.
    settings = ("weight_sync.probe_tokens=0", f"parallel.async_save={async_save}")
    assert cli(*words, undisturbed, *settings)[0] == 0
    late = Fault("shift", "off by one", completion=_shifted_from_version_4)
    for _ in range(2):
        # The second time it is the check of the resume that refuses.
        with injected(late, "transformers", "qwen3", one_vllm):
            answer = cli(*words, disturbed, *settings)
        assert_refused(answer, disturbed, late, step=4)
        assert [row["step"] for row in read_jsonl(disturbed / "train" / METRICS)] == [0, 1, 2, 3]
        assert max(path.name for path in (disturbed / "train" / "checkpoints").iterdir() if is_complete(path)) == "step_00000004"
    assert [row["step"] for row in read_jsonl(disturbed / "train" / PARITY_FINDINGS)] == [4, 4]
    assert_reported(disturbed, cli)
    code, _, errors = cli(*words, disturbed, *settings)
    assert code == 0, errors
    expected, actual = (_contents(run / "train") for run in (undisturbed, disturbed))
    del actual[PARITY_FINDINGS]
    assert sorted(actual) == sorted(expected)
    assert [name for name in expected if actual[name] != expected[name]] == []
    checks = [row["step"] for row in read_jsonl(disturbed / "train" / METRICS) if "sync/parity_difference/max" in row]
    assert checks == [0, 2, 4]


def _shifted_from_version_4(one: Completion) -> Completion:
    return replace(one, logprobs=(*one.logprobs[1:], -1.0)) if one.policy_version >= 4 else one


def assert_reported(run: Path, cli: Cli) -> None:
    """The report of the stopped run: the checks that passed, and why the next one did not."""
    code, _, errors = cli("report", run)
    assert code == 0, errors
    (page,) = run.glob("report/*.html")
    html = page.read_text()
    assert "2 checks passed; the limit of the largest difference is 0.001; 2 failed and stopped the run" in html
    assert "off by one: the log-prob that the engine reports for a token is the one of the next token" in html
    table = parity_table(read_run(run))
    assert table is not None
    assert [(finding.step, finding.place) for finding in table.findings] == [(4, "shift"), (4, "shift")]


def _contents(stage: Path) -> dict[str, bytes]:
    files = (path for path in stage.rglob("*") if path.is_file() and not path.name.startswith("timing") and "checkpoints" not in path.parts)
    return {str(path.relative_to(stage)): path.read_bytes() for path in files}
