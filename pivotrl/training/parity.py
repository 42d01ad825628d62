"""The parity gate: the same sampled tokens scored by engine and trainer, before the first step, after a resume and every so many steps.

`Gated` wraps a source; the loop does not know. A check samples a few pivots with their own random numbers, so that it changes nothing else,
prints a table and gives metrics; above the recipe's threshold it stops the run with the first place that differs: weights (by digest),
replicas against each other, template, shift, temperature (by score), embedding, layer or head (against transformers on the exported weights),
or else the engine itself. Every data parallel replica scores every token, since in training each of them scores its share.
Consumes the engine only between `publish` and `batch`, when it holds the trainer's weights. docs/parity.md.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from pivotrl.config.schema import ParallelConfig, Recipe, SamplingConfig, TrainConfig
from pivotrl.errors import InfraLimitError, UserError
from pivotrl.identity import derive_seed
from pivotrl.objective.kl import bounded_ratio
from pivotrl.objective.microbatch import MicroBatch
from pivotrl.observability.sinks import PARITY_FINDINGS
from pivotrl.rollouts.engine import EngineError, GenerationRequest
from pivotrl.rollouts.local import LocalSampler, LocalTask
from pivotrl.rundir import read_jsonl, write_jsonl
from pivotrl.training.batching import train_batch, train_micro_batches
from pivotrl.training.parity_findings import (
    ENGINE,
    ActionScores,
    Finding,
    Limits,
    copies_finding,
    replica_finding,
    shift_finding,
    temperature_finding,
    unlike_replica,
    weights_finding,
)
from pivotrl.training.parity_layers import layers_finding
from pivotrl.training.protocols import PolicyTrainer, Source, StepData
from pivotrl.training.validation import choose_tasks
from pivotrl.types import TrainSample
from pivotrl.weights.push import HasCensus

_CLOSEST_FRAC = 0.99
# Begin, end, unknown, padding come first; some tokenizers have a thousand reserved ones behind them.
_SPECIAL_TOKENS = 8


@dataclass(frozen=True, slots=True)
class ParityStatistics:
    """Of all tokens of a check, scored by every replica: |log-prob difference| and ratio pi_trainer / pi_engine, as (mean, 99th percentile, max)."""

    num_tokens: int
    difference: tuple[float, float, float]
    ratio: tuple[float, float, float]

    @staticmethod
    def of(actions: Sequence[ActionScores]) -> ParityStatistics:
        """Percentiles by nearest rank."""
        log_ratios = torch.cat([action.trainer_T - action.engine_T for action in actions])
        return ParityStatistics(len(log_ratios), _summary(log_ratios.abs()), _summary(bounded_ratio(log_ratios)))

    def metrics(self) -> dict[str, float]:
        """Under their registered names."""
        names = ("/mean", "/p99/max", "/max")
        return {
            f"sync/{noun}{name}": value
            for noun, values in (("parity_difference", self.difference), ("parity_ratio", self.ratio))
            for name, value in zip(names, values, strict=True)
        }

    def table(self, step: int) -> str:
        """Three lines for a terminal."""
        rows = (("|log-prob difference|", self.difference), ("pi_trainer / pi_engine", self.ratio))
        head = f"parity at step {step} ({self.num_tokens} tokens)"
        lines = [f"{head:<36}{'mean':>12}{'p99':>12}{'max':>12}"]
        return "\n".join(lines + [f"  {name:<34}" + "".join(f"{value:>12.3g}" for value in values) for name, values in rows]) + "\n"


class ParityGate:
    """One run's gate.

    Args:
        sampler: its engine and renderer; nothing is verified.
        scratch_dir: the stage's directory: findings are added to parity_findings.jsonl there, and weights exported to it, and removed,
            when a check has failed.
        parallel: the trainer's layout.
    """

    def __init__(
        self,
        sampler: LocalSampler,
        tasks: Sequence[LocalTask],
        trainer: PolicyTrainer,
        *,
        config: TrainConfig,
        sampling: SamplingConfig,
        run_seed: int,
        scratch_dir: Path,
        parallel: ParallelConfig,
    ) -> None:
        assert config.parity is not None
        self._engine, self._renderer, self._trainer = sampler.engine, sampler.renderer, trainer
        self._config, self._parity = config, config.parity
        self._limits = Limits(config.parity.max_logprob_difference, config.parity.max_mean_logprob_difference)
        self._tasks = choose_tasks(tasks, config.parity.num_pivots)
        self._temperature, self._max_new_tokens, self._run_seed = sampling.temperature, sampling.max_new_tokens, run_seed
        self._scratch_dir, self._parallel = scratch_dir, parallel

    def is_due(self, step: int) -> bool:
        """Whether a round that starts at `step` is checked."""
        return step % self._parity.every_steps < self._config.updates_per_rollout

    def check(self, step: int) -> Mapping[str, float]:
        """Compares; returns the metrics.

        Raises:
            UserError: above a limit of train.parity, or for a stored prompt that the renderer would write otherwise.
            InfraLimitError: where the engine fails.
        """
        self._check_prompts(step)
        samples = self._sampled(step)
        replicas = self._scored_by_replicas(samples)
        scores = [action for actions in replicas for action in actions]
        statistics = ParityStatistics.of(scores)
        sys.stderr.write(statistics.table(step))
        if not self._limits.hold(scores):
            finding = self._finding(samples, replicas)
            self._keep(finding, step, largest=statistics.difference[2])
            raise UserError(
                f"engine and trainer disagree at step {step}: {finding.place}: {finding.what} (largest |log-prob difference| "
                f"{statistics.difference[2]:.3g}, mean {statistics.difference[0]:.3g}, over {statistics.num_tokens} tokens)",
                rule=self._rule(),
                fix=finding.fix,
            )
        return statistics.metrics()

    def _rule(self) -> str:
        rule = f"train.parity.max_logprob_difference is {self._limits.largest:g}"
        return rule if self._limits.mean is None else f"{rule} and max_mean_logprob_difference {self._limits.mean:g}"

    def _keep(self, finding: Finding, step: int, *, largest: float | None) -> None:
        """For the report: a failed check stops the run before there is a row of metrics."""
        path = self._scratch_dir / PARITY_FINDINGS
        row = {"step": step, **asdict(finding), "largest": largest, "limit": self._limits.largest}
        write_jsonl(path, [*(read_jsonl(path) if path.exists() else ()), row])

    def _check_prompts(self, step: int) -> None:
        for task in self._tasks:
            rendered = self._renderer.render_prompt(task.state)
            if rendered != task.prompt_token_ids:
                at = next((i for i, (ours, theirs) in enumerate(zip(rendered, task.prompt_token_ids, strict=False)) if ours != theirs), None)
                at = min(len(rendered), len(task.prompt_token_ids)) if at is None else at
                what = (
                    f"the stored prompt of pivot {task.candidate_id} and the one that template {self._renderer.template_hash[:8]} "
                    f"and tokenizer {self._renderer.tokenizer_hash[:8]} write differ from token {at} on "
                    f"({len(task.prompt_token_ids)} tokens stored, {len(rendered)} rendered)"
                )
                finding = Finding("template", what, "profile again with this template and tokenizer, or give those of the profile")
                self._keep(finding, step, largest=None)
                raise UserError(f"template: {what}", rule="pivots are trained on the prompts they were profiled on", fix=finding.fix)

    def _sampled(self, step: int) -> list[TrainSample]:
        count = self._parity.num_samples
        requests = [
            GenerationRequest(
                task.prompt_token_ids,
                tuple(derive_seed(self._run_seed, "parity", step, task.candidate_id, i) for i in range(count)),
                self._temperature,
                self._max_new_tokens,
            )
            for task in self._tasks
        ]
        try:
            groups = self._engine.generate(requests)
        except EngineError as error:
            raise InfraLimitError(f"the engine failed in the parity check of step {step}: {error}; the same command resumes") from error
        return [
            TrainSample(task.candidate_id, task.prompt_token_ids, completion.token_ids, 1.0, completion.logprobs)
            for task, group in zip(self._tasks, groups, strict=True)
            for completion in group
        ]

    def _scored_by_replicas(self, samples: Sequence[TrainSample]) -> list[list[ActionScores]]:
        """Every action by the engine and by each of the trainer's data parallel replicas, batched as the recipe batches."""
        micro_batches = self._micro_batches(samples)
        return [_scores(micro_batches, logprobs) for logprobs in self._trainer.replica_logprobs(micro_batches, temperature=self._temperature)]

    def _scored(self, samples: Sequence[TrainSample], temperature: float) -> list[ActionScores]:
        """Every action by engine and trainer."""
        micro_batches = self._micro_batches(samples)
        return _scores(micro_batches, self._trainer.token_logprobs(micro_batches, temperature=temperature, reference=False))

    def _micro_batches(self, samples: Sequence[TrainSample]) -> list[MicroBatch]:
        return train_micro_batches(
            train_batch(samples), batching=self._config.batching, micro_batch_tokens=self._config.micro_batch_tokens, skip_zero_variance=False
        )

    def _finding(self, samples: Sequence[TrainSample], replicas: Sequence[Sequence[ActionScores]]) -> Finding:
        """The first explanation that holds, the cheapest first."""
        # A checkpoint that is being written holds the state before this check; the search may take the model apart.
        self._trainer.finish_saving()
        if finding := self._weights_finding():
            return finding
        if unequal := self._trainer.unequal_copy():
            return copies_finding(unequal)
        replica = unlike_replica(replicas, limits=self._limits)
        if replica is None:
            if finding := shift_finding(replicas[0], limits=self._limits):
                return finding
            if finding := temperature_finding(lambda other: self._scored(samples, other), temperature=self._temperature, limits=self._limits):
                return finding
            if finding := self._prompt_finding(samples):
                return finding
        finding = self._layers_finding(samples)
        return finding if replica is None or finding.place != ENGINE else replica_finding(replica)

    def _layers_finding(self, samples: Sequence[TrainSample]) -> Finding:
        with tempfile.TemporaryDirectory(dir=self._scratch_dir, prefix="parity_") as folder:
            self._trainer.save_hf(Path(folder) / "hf")
            return layers_finding(
                self._trainer,
                samples,
                Path(folder),
                temperature=self._temperature,
                limits=self._limits,
                parallel=self._parallel,
            )

    def _weights_finding(self) -> Finding | None:
        census = self._engine.weight_census() if isinstance(self._engine, HasCensus) else None
        if census is None:
            return None
        held = self._engine.weight_digests()

        def sent() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self._trainer.named_tensors():
                spec = census.spec(name)
                if name in held and spec is not None:
                    yield name, tensor.to(spec.dtype)

        return weights_finding(sent(), held, engine_version=self._engine.policy_version, trainer_version=self._trainer.steps_done)

    def _prompt_finding(self, samples: Sequence[TrainSample]) -> Finding | None:
        """Whether the engine saw a prompt with a token more or less at its start, as a tokenizer's own settings make it."""
        tokenizer = self._renderer.template.tokenizer
        variants: dict[str, list[tuple[int, ...]]] = {"its first token missing": [s.prompt_token_ids[1:] for s in samples]}
        for token in tokenizer.all_special_tokens[:_SPECIAL_TOKENS]:
            extra = cast(int, tokenizer.convert_tokens_to_ids(token))
            variants[f"{token!r} before it"] = [(extra, *s.prompt_token_ids) for s in samples]
        for words, prompts in variants.items():
            changed = [replace(sample, prompt_token_ids=prompt) for sample, prompt in zip(samples, prompts, strict=True)]
            if all(prompts) and self._limits.hold(self._scored(changed, self._temperature)):
                what = f"the engine's log-probs are those of the prompt with {words}: it does not see the token ids that it is sent"
                return Finding("template", what, "switch off special tokens in the engine's own tokenizer")
        return None


def gated(
    source: Source,
    sampler: LocalSampler,
    tasks: Sequence[LocalTask],
    trainer: PolicyTrainer,
    *,
    recipe: Recipe,
    scratch_dir: Path,
) -> Source:
    """The source itself where the recipe has no `train.parity`, else behind the gate; arguments as `ParityGate`."""
    if recipe.train.parity is None:
        return source
    gate = ParityGate(
        sampler,
        tasks,
        trainer,
        config=recipe.train,
        sampling=recipe.sampling,
        run_seed=recipe.seed,
        scratch_dir=scratch_dir,
        parallel=recipe.parallel,
    )
    return Gated(source, gate)


class Gated:
    """A source whose rounds are given only where the gate lets them pass. The first one is always checked, so a resumed run is as well."""

    def __init__(self, source: Source, gate: ParityGate) -> None:
        self._source, self._gate = source, gate
        self._is_first = True

    def batch(self, step: int) -> StepData:
        """The source's round, after the check where one is due, and with its metrics; raises what both raise."""
        is_due = self._gate.is_due(step)
        metrics = self._gate.check(step) if is_due or self._is_first else {}
        self._is_first = False
        data = self._source.batch(step)
        # A resume's own check leaves no trace in files that must be equal without it.
        return replace(data, metrics={**data.metrics, **metrics}) if is_due else data

    def publish(self, trainer: PolicyTrainer, version: int) -> None:
        """The source's."""
        self._source.publish(trainer, version)

    def position(self) -> Mapping[str, Any]:
        """The source's."""
        return self._source.position()

    def resume(self, trainer: PolicyTrainer, position: Mapping[str, Any]) -> None:
        """The source's."""
        self._source.resume(trainer, position)


def _scores(micro_batches: Sequence[MicroBatch], logprobs: Sequence[torch.Tensor]) -> list[ActionScores]:
    scores = []
    for batch, logprobs_B_T in zip(micro_batches, logprobs, strict=True):
        assert batch.behavior_logprobs_B_T is not None
        for row, is_action_T in enumerate(batch.action_mask_B_T != 0):
            engine_T, trainer_T = batch.behavior_logprobs_B_T[row][is_action_T], logprobs_B_T[row].cpu()[is_action_T]
            scores.append(ActionScores(engine_T.double(), trainer_T.double()))
    return scores


def _summary(values: torch.Tensor) -> tuple[float, float, float]:
    ordered = values.sort().values
    return float(values.mean()), float(ordered[math.ceil(_CLOSEST_FRAC * len(ordered)) - 1]), float(ordered[-1])
