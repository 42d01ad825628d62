"""The loop on a bandit: it learns, skips without changing a gradient, applies Eq. 7's options, validates, stops and exports."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from fakes.bandit import BanditTrainer, initial_table
from fakes.bandit_run import NUM_PIVOTS, SEED, bandit_train_config, data_bytes, run_bandit, sampling_config

from pivotrl.config.schema import SftConfig
from pivotrl.errors import InfraLimitError, UserError
from pivotrl.metrics import check_name
from pivotrl.rundir import Stage, read_json, read_jsonl
from pivotrl.training import sources
from pivotrl.training.sources import DemonstrationSource
from pivotrl.training.stages import run_sft
from pivotrl.types import Demonstration

VALIDATION = {"every_steps": 2, "num_pivots": 3, "num_samples": 4}


def metrics_of(run: Path, stage: str = "train") -> list[dict[str, float]]:
    return list(read_jsonl(run / stage / "metrics.jsonl"))


def test_reward_rises_and_the_stage_is_complete(tmp_path: Path) -> None:
    summary, trainer, _ = run_bandit(tmp_path, bandit_train_config(num_steps=40, group_size=16))
    rewards = [row["rollout/reward/mean"] for row in metrics_of(tmp_path)]
    assert sum(rewards[:5]) / 5 < 0.25
    assert sum(rewards[-5:]) / 5 > 0.75
    assert summary == {"num_steps": 40, "exported_step": 40, "held_out_reward": None, "is_stopped_early": False}
    manifest = read_json(tmp_path / "train" / "manifest.json")
    assert {"hf/_SUCCESS", "hf/table.pt", "ledger.jsonl", "metrics.jsonl", "rollouts.jsonl", "validation.jsonl", "curve.jsonl"} == set(
        manifest["outputs"]
    )
    assert torch.equal(torch.load(tmp_path / "train" / "hf" / "table.pt"), trainer.table)
    assert Stage.is_done(tmp_path, "train")


def test_rows_of_a_step(tmp_path: Path) -> None:
    run_bandit(tmp_path, bandit_train_config(num_steps=3, validation=VALIDATION))
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [("eval/held_out_reward/mean" in row, "rollout/reward/mean" in row) for row in rows] == [
        (True, True),
        (False, True),
        (True, True),
        (True, False),
    ]
    assert all(check_name(name) for row in rows for name in row if name != "step")
    assert [row["perf/env_turns/sum"] for row in rows[:3]] == [12, 24, 36]
    assert all(row["objective/logprob_mismatch/max"] < 1e-5 for row in rows[:3])
    assert all(row["sync/policy_age_steps/max"] == 0 for row in rows[:3])
    rollouts = list(read_jsonl(tmp_path / "train" / "rollouts.jsonl"))
    assert len(rollouts) == 36
    names = ["step", "pivot_id", "sample_index", "text", "reward", "verdict", "reason", "finish_reason", "num_tokens"]
    assert list(rollouts[0]) == names
    ledger = list(read_jsonl(tmp_path / "train" / "ledger.jsonl"))
    assert [(row["step"], row["epoch"], row["policy_version"]) for row in ledger] == [(0, 0, 0)] * 2 + [(1, 0, 1)] * 2 + [(2, 1, 2)] * 2


def test_validation_uses_the_same_random_numbers_and_training_new_ones(tmp_path: Path) -> None:
    _, _, sampler = run_bandit(tmp_path, bandit_train_config(num_steps=2, validation=VALIDATION))
    assert sampler.places == [("validation",), ("train", 0), ("train", 1), ("validation",)]


def test_skipping_zero_variance_groups_changes_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The denominator keeps counting them: forwarding every group instead gives the same table, and so the same rollouts."""
    config = bandit_train_config(num_steps=8, pivots_per_step=4, micro_batch_tokens=10, aggregation="token")
    _, skipping, _ = run_bandit(tmp_path / "skip", config)
    whole = sources.train_micro_batches
    monkeypatch.setattr(
        sources,
        "train_micro_batches",
        lambda batch, **named: whole(batch, **{**named, "skip_zero_variance": False}),
    )
    _, forwarding, _ = run_bandit(tmp_path / "forward", config)
    assert sum(skipping.num_micro_batches) < sum(forwarding.num_micro_batches)
    assert torch.allclose(skipping.table, forwarding.table, atol=1e-6)
    assert any(row["rollout/group_zero_variance/frac"] > 0 for row in metrics_of(tmp_path / "skip"))


def test_beta_forwards_every_group_and_holds_the_policy_near_the_reference(tmp_path: Path) -> None:
    config = bandit_train_config(num_steps=25, micro_batch_tokens=1, pivots_per_step=4)
    _, free, _ = run_bandit(tmp_path / "free", config)
    _, held, _ = run_bandit(tmp_path / "held", config.model_copy(update={"kl": config.kl.model_copy(update={"beta": 3.0})}))
    assert held.num_micro_batches == [24] * 25
    distance = lambda trainer: (torch.softmax(trainer.table, -1) - torch.softmax(initial_table(), -1)).abs().max()  # noqa: E731
    assert distance(held) < 0.5 * distance(free)
    first, *rest = metrics_of(tmp_path / "held")
    assert first["objective/kl_reference/mean"] == pytest.approx(0, abs=1e-7)
    assert all(row["objective/kl_reference/mean"] > 0 for row in rest)
    assert "objective/kl_reference/mean" not in metrics_of(tmp_path / "free")[0]


def test_several_updates_on_one_batch_of_rollouts(tmp_path: Path) -> None:
    """Rollouts every third step, old log-probs computed once per batch, and the ratio clipped once the policy has moved."""
    calls: list[str] = []
    config = bandit_train_config(num_steps=6, updates_per_rollout=3, group_size=12, checkpoint_every=2)
    _, trainer, sampler = run_bandit(tmp_path, config, on_call=calls.append)
    assert trainer.steps_done == 6
    assert sampler.places == [("train", 0), ("train", 3)]
    assert [name for name in calls if name in ("sample", "token_logprobs", "step")] == ["sample", "token_logprobs", *["step"] * 3] * 2
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == [0, 3]
    assert max(row["objective/ratio_clipped/frac"] for row in rows) > 0
    assert all(row["objective/logprob_mismatch/max"] < 1e-5 for row in rows)
    assert [row["perf/env_turns/sum"] for row in rows] == [24, 48]


def test_best_checkpoint_is_exported_and_patience_stops(tmp_path: Path) -> None:
    """A learning rate this high destroys the policy: the exported weights are those of the best validation, of equals the earliest."""
    config = bandit_train_config(num_steps=30, group_size=8, validation={**VALIDATION, "every_steps": 1, "patience": 3, "num_samples": 16})
    summary, trainer, _ = run_bandit(tmp_path, config)
    rows = list(read_jsonl(tmp_path / "train" / "validation.jsonl"))
    means = [row["value"] for row in rows]
    best = means.index(max(means))
    assert summary["exported_step"] == best
    assert summary["held_out_reward"] == max(means)
    assert summary["is_stopped_early"]
    assert summary["num_steps"] == trainer.steps_done == best + 3 == len(means) - 1
    assert all(row["low"] <= row["value"] <= row["high"] and row["n"] == 48 for row in rows)
    assert not torch.equal(torch.load(tmp_path / "train" / "hf" / "table.pt"), trainer.table)
    assert not (tmp_path / "train" / "best").exists()


def test_infra_within_the_limit_leaves_the_group_and_beyond_it_stops_the_run(tmp_path: Path) -> None:
    run_bandit(tmp_path / "some", bandit_train_config(num_steps=1, max_infra_frac=0.2), infra=frozenset({0}))
    row = metrics_of(tmp_path / "some")[0]
    assert row["rollout/verifier_error/frac"] == pytest.approx(1 / 6)
    ledger = list(read_jsonl(tmp_path / "some" / "train" / "ledger.jsonl"))
    assert [row["num_counted"] for row in ledger] == [5, 5]
    with pytest.raises(InfraLimitError, match="step 0"):
        run_bandit(tmp_path / "many", bandit_train_config(num_steps=1, max_infra_frac=0.1), infra=frozenset({0}))
    assert not Stage.is_done(tmp_path / "many", "train")


def test_user_errors_name_key_rule_and_fix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pivots_per_step is 9 but only 5 .* lower train.pivots_per_step"):
        run_bandit(tmp_path / "a", bandit_train_config(pivots_per_step=9))
    with pytest.raises(UserError, match=r"num_steps is 5 and train.updates_per_rollout is 2.* set train.num_steps to 4"):
        run_bandit(tmp_path / "b", bandit_train_config(updates_per_rollout=2))
    with pytest.raises(UserError, match=r"max_new_tokens"):
        run_bandit(tmp_path / "c", bandit_train_config(max_infra_frac=1.0), infra=frozenset(range(1, 6)))


@pytest.mark.parametrize("truncated", ["zero", "mask", "exclude"])
def test_truncated_modes_run(tmp_path: Path, truncated: str) -> None:
    run_bandit(tmp_path, bandit_train_config(num_steps=3, pivots_per_step=NUM_PIVOTS, group_size=16), truncated=truncated)
    assert all(row["rollout/truncated/frac"] > 0 for row in metrics_of(tmp_path))


def test_supervised_training_shares_loop_and_trainer(tmp_path: Path) -> None:
    config = SftConfig.model_validate(
        {
            "use_ingested": True,
            "num_steps": 30,
            "batch_sequences": 4,
            "max_sequence_tokens": 8,
            "optimizer": {"lr": 0.1},
            "micro_batch_tokens": 8,
            "checkpoint_every": 10,
        }
    )
    shown = [Demonstration((2, 4 + i, 4 + i, 1), (0, 0, 1, 1)) for i in range(5)]
    trainer = BanditTrainer()
    stage = Stage.open(tmp_path, "sft", config=config.model_dump(mode="json"), inputs={}, seed=SEED)
    summary = run_sft(stage, trainer, DemonstrationSource(shown, config=config, seed=SEED), config=config)
    losses = [row["objective/loss/mean"] for row in metrics_of(tmp_path, "sft")]
    # Token 4 + i is followed by itself and by the end equally often, which a bigram table cannot tell apart; the end is followed by nothing.
    assert losses[0] > 2.0
    assert losses[-1] == pytest.approx(math.log(2), abs=0.03)
    assert summary["exported_step"] == 30
    assert (tmp_path / "sft" / "hf" / "table.pt").exists()
    assert next(read_jsonl(tmp_path / "sft" / "ledger.jsonl"))["epoch"] == 0


def test_two_runs_are_bit_identical(tmp_path: Path) -> None:
    config = bandit_train_config(validation=VALIDATION)
    for name in ("one", "two"):
        run_bandit(tmp_path / name, config)
    assert data_bytes(tmp_path / "one") == data_bytes(tmp_path / "two")
    assert sampling_config().temperature == 1.0


def test_the_curve_measures_the_published_policy_at_the_first_the_last_and_every_nth_step(tmp_path: Path) -> None:
    run_bandit(tmp_path, bandit_train_config(num_steps=5, curve={"every_steps": 2, "num_samples": 1}))
    rows = list(read_jsonl(tmp_path / "train" / "curve.jsonl"))
    assert [(row["step"], row["value"]) for row in rows] == [(0, 0.0), (2, 2.0), (4, 4.0), (5, 5.0)]
    metrics = {row["step"]: row.get("eval/world_success/mean") for row in read_jsonl(tmp_path / "train" / "metrics.jsonl")}
    assert metrics == {0: 0.0, 1: None, 2: 2.0, 3: None, 4: 4.0, 5: 5.0}
