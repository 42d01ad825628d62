"""The seeded faults of the doctor's tests: each a small change of a good recipe, with the check that must name it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "golden" / "tiny_recipe"
# The tiny recipe warms up for longer than its few SFT steps, which the doctor rightly refuses.
GOOD = ("sft.optimizer.warmup_steps=4",)
NO_CHECKPOINT = "model={type: huggingface, path: nowhere}"
QWEN = ROOT / "configs" / "models" / "qwen3_30b_a3b.yaml"


@dataclass(frozen=True)
class Fault:
    """Overrides that make a good recipe bad; `says` stands in the finding."""

    check: str
    overrides: tuple[str, ...]
    says: str
    severity: str = "error"
    model: Path | None = None


SETTINGS = [
    Fault("recipe", ("selct.rule=all",), "unknown key selct"),
    Fault("recipe", ("profile.num_samples=1",), "profile.num_samples is 1"),
    Fault("recipe", ("train.num_steps=${nowhere}",), "nowhere"),
    Fault("recipe", ("world.nois=1",), "unknown key world.nois"),
    Fault("held-out", ("ingest.held_out_frac=0",), "is 0"),
    Fault("held-out", ("ingest.held_out_frac=1",), "is 1"),
    Fault("selection-empty", ("select={rule: eq5, lambda_diff: 0.25}",), "num_samples is 4"),
    Fault("selection-empty", ("select={rule: window, low: 0.3, high: 0.4}",), "window"),
    Fault("too-few-pivots", ("train.pivots_per_step=100",), "profile.max_candidates is 48"),
    Fault("too-few-pivots", ("select={rule: random, num_turns: 2}",), "select.num_turns is 2"),
    Fault("rounds", ("train.updates_per_rollout=4",), "train.num_steps is 6"),
    Fault("warmup", ("train.optimizer.warmup_steps=6",), "train.optimizer.warmup_steps is 6"),
    Fault("no-checkpoint", ("train.checkpoint_every=100",), "train.checkpoint_every is 100", "warning"),
    Fault("unread-key", ("train.trace={first_step: 9}",), "train.trace.first_step is 9", "warning"),
    Fault("unread-key", ("train.kl={beta: 0, estimator: k1}",), "train.kl.estimator", "warning"),
    Fault("unread-key", ("verifier.message=exact",), "verifier.message_similarity", "warning"),
    Fault("unread-key", ("moe.router=frozen",), "moe.router", "warning"),
    Fault(
        "unread-key",
        (NO_CHECKPOINT, "engine.enable_return_routed_experts=true"),
        "engine.enable_return_routed_experts is set",
        "warning",
        model=QWEN,
    ),
    Fault("sft-data", ("sft.paths=[]",), "sft.paths is empty"),
    Fault("micro-batch", ("train.micro_batch_tokens=10",), "is 10", "warning"),
    Fault("message-any", ("verifier={type: tool_call, message: any}",), "any message", "warning"),
    Fault("format-calls", ("render.action_format=plain", "profile.expert_actions=calls"), "plain"),
    Fault("suites", ("eval.suites=[]",), "is empty", "warning"),
    Fault("suites", ("eval.suites=[{type: skills, num_examples: 1}, {type: skills, num_examples: 2}]",), "skills"),
    Fault("context", ("render.max_prompt_tokens=400",), "max_position_embeddings is 256"),
    Fault("context", ("sft.max_sequence_tokens=512",), "sft.max_sequence_tokens is 512"),
    Fault("layout", ("parallel.tensor_model_parallel_size=4",), "num_attention_heads is 2"),
    Fault("layout", ("parallel.pipeline_model_parallel_size=4",), "2 layers"),
    Fault("layout", ("parallel.sequence_parallel=true",), "sequence_parallel is true"),
    Fault("layout", ("parallel.expert_model_parallel_size=2",), "has no experts"),
    Fault("layout", ("moe.router_replay=updates",), "moe.router_replay is updates and the model has no experts"),
    Fault("layout", ("engine.enable_return_routed_experts=true",), "engine.enable_return_routed_experts is true and the model has no experts"),
    Fault("layout", (NO_CHECKPOINT, "parallel.expert_model_parallel_size=256"), "number of experts is 128", model=QWEN),
    Fault("placement", ("launch.generation_nodes=2",), "launch.generation_nodes is 2"),
    Fault("placement", ("placement={type: remote, num_replicas: 3}", "launch.generation_nodes=2"), "num_replicas is 3"),
    Fault("template", ("render.chat_template=nowhere.jinja",), "nowhere.jinja"),
]


type Change = Callable[[Path], object]


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _data(run).read_text().splitlines()]


def rewrite(run: Path, rows: list[dict[str, Any]]) -> None:
    _data(run).write_text("".join(json.dumps(row) + "\n" for row in rows))


def _data(run: Path) -> Path:
    return run / "world" / "expert.jsonl"


def _hf(run: Path) -> Path:
    return run / "model" / "hf"


def _with_text(text: str) -> Change:
    return lambda run: _data(run).write_text(text)


def _appended(text: str) -> Change:
    return lambda run: _data(run).write_text(_data(run).read_text() + text)


def _configured(**changes: Any) -> Change:
    def change(run: Path) -> None:
        file = _hf(run) / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def _copied_rows(run: Path) -> None:
    rows = lines(run)
    rewrite(run, rows + rows[:3])


def _leaking_rows(run: Path) -> None:
    """Every conversation once more under another task id, with another last message: the states before it are the same."""
    rows = lines(run)
    copies = [
        {**row, "task_id": f"copy-{index}", "messages": [*row["messages"][:-1], {**row["messages"][-1], "content": "Bye."}]}
        for index, row in enumerate(rows)
    ]
    rewrite(run, rows + copies)


def _without_first_tool(run: Path) -> None:
    rewrite(run, [{**row, "tools": row["tools"][1:]} for row in lines(run)])


def _failures(run: Path) -> None:
    rewrite(run, [{**row, "success": False} for row in lines(run)])


def _wrong_schema(run: Path) -> None:
    rows = lines(run)
    rewrite(run, [*rows[:5], {**rows[5], "messages": [{"role": "user", "content": 3}, *rows[5]["messages"][1:]]}, *rows[6:]])


def _missing_shard(run: Path) -> None:
    (_hf(run) / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}))


def _wrong_index(run: Path) -> None:
    (_hf(run) / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.other.weight": "model.safetensors"}}))


def _cut_shard(run: Path) -> None:
    file = _hf(run) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _no_weights(run: Path) -> None:
    (_hf(run) / "model.safetensors").unlink()


def _no_tokenizer(run: Path) -> None:
    for file in _hf(run).glob("tokenizer*"):
        file.unlink()


def _no_template(run: Path) -> None:
    (_hf(run) / "chat_template.jinja").unlink(missing_ok=True)
    file = _hf(run) / "tokenizer_config.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "chat_template"}))


def _deaf_template(run: Path) -> None:
    (run / "deaf.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")


def _broken_config(run: Path) -> None:
    (_hf(run) / "config.json").write_text("{")


def _nothing(run: Path) -> None:
    """The overrides are the fault."""


@dataclass(frozen=True)
class RunFault:
    """A change of a run's files, or overrides that only real rows or files show to be wrong."""

    check: str
    change: Change
    says: str
    severity: str = "error"
    overrides: tuple[str, ...] = ()


RUNS = [
    RunFault("data-missing", _nothing, "nowhere", overrides=("ingest.paths=[nowhere]",)),
    RunFault("data-empty", _with_text("\n"), "no expert turn"),
    RunFault("data-empty", _failures, "outcome failure"),
    RunFault("data-rows", _with_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"), "LFS"),
    RunFault("data-rows", _appended("{broken\n"), "expert.jsonl:25", "warning"),
    RunFault("data-rows", _wrong_schema, "expert.jsonl:6", "warning"),
    RunFault("data-settings", _nothing, "'tua2' is unknown", overrides=("ingest.format=tua2",)),
    RunFault("data-settings", _nothing, "tools file", overrides=("ingest.tools=nowhere.json",)),
    RunFault("data-duplicates", _copied_rows, "3 trajectories", "warning"),
    RunFault("leak", _leaking_rows, "held-out states"),
    RunFault("tool-missing", _without_first_tool, "turns whose tools do not include it"),
    RunFault("too-few-pivots", _nothing, "the data give", overrides=("train.pivots_per_step=200", "profile.max_candidates=400")),
    RunFault("prompt-length", _nothing, "tokens", overrides=("render.max_prompt_tokens=20",)),
    RunFault("action-length", _nothing, "tokens", overrides=("sampling.max_new_tokens=2",)),
    RunFault("action-format", _nothing, "sampled turns", overrides=("render.action_format=terminus2",)),
    RunFault("expert-rejected", _nothing, "sampled turns", overrides=("verifier={type: gym_terminus, enable_llm_judge: false}",)),
    RunFault("template", _deaf_template, "cannot be used", overrides=("render.chat_template='{run}/deaf.jinja'",)),
    RunFault("template", _no_template, "no chat template", overrides=("render.chat_template=null",)),
    RunFault("template", _no_tokenizer, "no tokenizer"),
    RunFault("tokenizer", _configured(vocab_size=100), "vocab_size is 100"),
    RunFault("checkpoint-config", _broken_config, "no JSON"),
    RunFault("checkpoint-config", _configured(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
    RunFault("checkpoint-config", _configured(num_attention_heads="two"), "transformers refuses"),
    RunFault("checkpoint-files", _missing_shard, "model-00002-of-00002.safetensors"),
    RunFault("checkpoint-files", _cut_shard, "model.safetensors"),
    RunFault("checkpoint-files", _no_weights, "lacks"),
    RunFault("checkpoint-files", _nothing, "is not a directory", overrides=(NO_CHECKPOINT,)),
    RunFault("checkpoint-index", _wrong_index, "in the index or in the files"),
    RunFault("checkpoint-tensors", _configured(num_hidden_layers=3), "describes"),
    RunFault(
        "judge",
        _nothing,
        "JUDGE_OF_NOBODY",
        overrides=("verifier={type: judge, endpoint: 'env:JUDGE_OF_NOBODY', model: m, prompt: equivalence.v1, on_disagreement: zero}",),
    ),
]
