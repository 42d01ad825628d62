"""Sampling one round ahead, on a bandit: which policy samples what, resuming with a round under way, and age 0 as if it did not exist."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fakes.bandit import BanditEngine, BanditSampler, Killed, bandit_tasks, bandit_text, initial_table
from fakes.bandit_run import NUM_PIVOTS, SEED, bandit_train_config, data_bytes, run_bandit, sampling_config
from pydantic import ValidationError

from pivotrl.errors import InfraLimitError
from pivotrl.rundir import read_jsonl
from pivotrl.training.ahead import sampling_ahead
from pivotrl.training.sources import PivotSource

CORRECTION = {"type": "truncated", "level": "token", "cap": 4.0}
AHEAD = bandit_train_config(num_steps=5, max_policy_age=1, correction=CORRECTION, checkpoint_every=2)


def tables_by_step(run: Path, num_steps: int) -> list[torch.Tensor]:
    """The policy at the start of every step: that of the longest run, cut after so many steps, since nothing in a step looks ahead."""
    tables = [initial_table()]
    for steps in range(1, num_steps):
        # A last step never samples ahead, so shorter runs train on the same rounds.
        _, trainer, _ = run_bandit(run / str(steps), AHEAD.model_copy(update={"num_steps": steps}))
        tables.append(trainer.table.detach().clone())
    return tables


def test_each_round_is_sampled_by_the_policy_before_the_last_update(tmp_path: Path) -> None:
    run_bandit(tmp_path / "whole", AHEAD)
    texts: dict[int, list[str]] = {}
    for row in read_jsonl(tmp_path / "whole" / "train" / "rollouts.jsonl"):
        texts.setdefault(row["step"], []).append(row["text"])
    tables = tables_by_step(tmp_path, AHEAD.num_steps)
    for step in range(AHEAD.num_steps):
        engine = BanditEngine()
        engine.table = tables[max(step - 1, 0)]
        source = PivotSource(
            BanditSampler(engine, run_seed=SEED),  # type: ignore[arg-type]
            bandit_tasks(NUM_PIVOTS),
            config=AHEAD,
            sampling=sampling_config(),
            decode=bandit_text,
            seed=SEED,
        )
        assert texts[step] == [bandit_text(one.completion.token_ids) for group in source.sample(step).groups for one in group]
    rows = list(read_jsonl(tmp_path / "whole" / "train" / "metrics.jsonl"))
    assert [row["sync/policy_age_steps/max"] for row in rows] == [0, 1, 1, 1, 1]
    ledger = list(read_jsonl(tmp_path / "whole" / "train" / "ledger.jsonl"))
    assert [row["policy_version"] for row in ledger] == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3]
    # One step of training lies between the two policies, and the weights see it.
    assert rows[0]["objective/logprob_mismatch/max"] < 1e-5
    assert all(row["objective/logprob_mismatch/max"] > 0.1 and row["objective/kl_engine/mean"] > 1e-3 for row in rows[1:])


def test_age_0_is_the_synchronous_run_byte_for_byte(tmp_path: Path) -> None:
    config = bandit_train_config(correction=CORRECTION)
    run_bandit(tmp_path / "default", config)
    run_bandit(tmp_path / "named", bandit_train_config(correction=CORRECTION, max_policy_age=0))
    run_bandit(tmp_path / "ahead", bandit_train_config(correction=CORRECTION, max_policy_age=1))
    assert data_bytes(tmp_path / "default") == data_bytes(tmp_path / "named")
    assert data_bytes(tmp_path / "default") != data_bytes(tmp_path / "ahead")
    source = PivotSource(
        BanditSampler(BanditEngine()),  # type: ignore[arg-type]
        bandit_tasks(NUM_PIVOTS),
        config=config,
        sampling=sampling_config(),
        decode=bandit_text,
        seed=SEED,
    )
    with sampling_ahead(source, config) as same:
        assert same is source


@pytest.mark.parametrize("updates", [1, 2])
def test_killed_and_resumed_equals_undisturbed(tmp_path: Path, updates: int) -> None:
    """The round under way is learnt from after the resume although the policy that sampled it is gone."""
    validation = {"every_steps": 2, "num_pivots": 3, "num_samples": 4}
    config = bandit_train_config(
        num_steps=6, max_policy_age=1, correction=CORRECTION, updates_per_rollout=updates, checkpoint_every=2, validation=validation
    )
    calls: list[str] = []
    expected_summary, _, _ = run_bandit(tmp_path / "undisturbed", config, on_call=calls.append)
    expected = data_bytes(tmp_path / "undisturbed")
    for number in range(1, len(calls), 3):
        left = [number]

        def kill(name: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Killed(name)

        run = tmp_path / str(number)
        with pytest.raises(Killed):
            run_bandit(run, config, on_call=kill)
        summary, _, _ = run_bandit(run, config)
        assert summary == expected_summary
        assert data_bytes(run) == expected


def test_two_runs_are_bit_identical(tmp_path: Path) -> None:
    for name in ("one", "two"):
        run_bandit(tmp_path / name, AHEAD)
    assert data_bytes(tmp_path / "one") == data_bytes(tmp_path / "two")


def test_a_failure_of_the_round_under_way_is_raised_where_it_is_needed(tmp_path: Path) -> None:
    config = bandit_train_config(max_policy_age=1, correction=CORRECTION, max_infra_frac=0.1)
    with pytest.raises(InfraLimitError, match="step 0"):
        run_bandit(tmp_path, config, infra=frozenset({0}))


def test_an_older_policy_without_correction_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"rollouts of an older policy need importance weights; add train.correction"):
        bandit_train_config(max_policy_age=1)
    with pytest.raises(ValidationError, match="max_policy_age"):
        bandit_train_config(max_policy_age=2, correction=CORRECTION)
