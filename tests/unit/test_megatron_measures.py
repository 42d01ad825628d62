"""What a step reports about itself, against counts made by hand or by another library, on the real trainer in one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pivotrl.config.schema import MoeConfig, OptimizerConfig, ParallelConfig
from pivotrl.config.training import TraceConfig
from pivotrl.megatron.flops import Work
from pivotrl.megatron.measures import work_of
from pivotrl.megatron.trainer import Trainer
from pivotrl.training.metrics import Stopwatch, objective_metrics
from pivotrl.training.protocols import StepData
from pivotrl.training.trace import TRACE, StepTrace
from tests.fakes.bandit import BanditStep
from tests.fakes.trainer_batches import joined, micro_batches, policy_loss, save_model


def test_work_by_hand() -> None:
    """Two rows of 7 and 5 tokens; behind a shared prefix of 3 tokens they add 4 and 2, which see the prefix and themselves."""
    batch = joined(micro_batches(rows=2, tokens=7, action_tokens=2))
    mask = torch.zeros_like(batch.action_mask_B_T)
    mask[0, 5:7], mask[1, 4] = 1, 1
    batch = replace(batch, lengths_B=torch.tensor([7, 5]), action_mask_B_T=mask)
    assert work_of(batch) == Work(num_tokens=12, num_pairs=28 + 15, num_scored=3)
    shared = replace(batch, batching="shared_prefix", group_ids_B=torch.tensor([4, 4]), prefix_lengths_B=torch.tensor([3, 3]))
    assert work_of(shared) == Work(num_tokens=3 + 4 + 2, num_pairs=6 + (4 + 5 + 6 + 7) + (4 + 5), num_scored=3)


def test_a_step_reports_work_and_memory_and_its_distance_from_the_start(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model")
    trainer = Trainer.from_hf(
        directory,
        optimizer=OptimizerConfig(lr=1e-2),
        parallel=ParallelConfig(peak_tflops=0.5),
        moe=MoeConfig(),
        num_steps=2,
        seed=0,
        with_reference=False,
    )
    assert trainer.parameter_drift() == 0
    batches = micro_batches(rows=3, tokens=10, action_tokens=4)
    result = trainer.step(batches, policy_loss, temperature=1.0)
    assert result.measures["work_tokens"] == sum(int(batch.lengths_B.sum()) for batch in batches)
    assert result.measures["peak_flops"] == 0.5e12
    assert result.measures["memory_peak_bytes/max"] > 50e6
    assert "expert_load/max" not in result.measures
    initial = {name: tensor.double() for name, tensor in load_file(directory / "model.safetensors").items()}
    moved = sum((tensor.double() - initial[name]).square().sum() for name, tensor in trainer.named_tensors())
    norm = sum(initial[name].square().sum() for name, _ in trainer.named_tensors())
    assert trainer.parameter_drift() == pytest.approx((moved / norm).sqrt().item(), rel=1e-12)
    assert trainer.parameter_drift() > 1e-3


def test_rates_and_utilisation_of_several_updates() -> None:
    """Two updates of 3 tokens and 60 operations each; the rate divides by the one span that timed both."""
    step = BanditStep(0.0, 0.0, 0.1, {"tokens": 0.0}, {"work_tokens": 3.0, "work_flops": 60.0, "peak_flops": 1_000.0, "expert_load/max": 2.0})
    watch = Stopwatch()
    with watch.span("train"):
        pass
    watch._spans_s["train"] = 0.5
    metrics = watch.metrics(StepData([], {}, [], []), [step, step])
    assert metrics["perf/train_tokens_per_s/mean"] == 12
    assert metrics["perf/train_flops_per_s/mean"] == 240
    assert metrics["perf/model_flops_utilisation/frac"] == pytest.approx(0.24)
    assert objective_metrics([step, step])["optim/expert_load/max"] == 2.0


def test_a_trace_holds_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    with StepTrace(tmp_path, TraceConfig(first_step=1, num_steps=2)) as trace:
        for step in range(5):
            trace.reach(step)
            with torch.profiler.record_function(f"step {step}"):
                torch.ones(8).sum()
        trace.reach(5)
    (file,) = (tmp_path / TRACE).iterdir()
    assert file.name == "steps_1-2.json"
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert {name for name in names if name and name.startswith("step ")} == {"step 1", "step 2"}


def test_no_trace_where_none_is_asked_for(tmp_path: Path) -> None:
    with StepTrace(tmp_path, None) as trace:
        trace.reach(0)
    assert not (tmp_path / TRACE).exists()
