"""A policy small enough to train in milliseconds: a bigram table of logits, with the trainer's, the engine's and the sampler's faces.

The next token depends on the last one alone, so one row per prompt makes it a bandit with a little sequence structure. Trainer
and engine hold separate copies of the table, as the real ones do: an unpublished step shows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pivotrl.identity import derive_seed
from pivotrl.megatron.layer_outputs import LayerOutputs
from pivotrl.objective.microbatch import LossFunction, MicroBatch
from pivotrl.rollouts.local import LocalTask
from pivotrl.rundir import SUCCESS, read_json, write_json
from pivotrl.types import Action, Completion, FinishReason, LocalRollout, Message, ParseOutcome, Role, State, ToolOrigin, Verdict

VOCAB, EOS, MAX_NEW_TOKENS = 12, 1, 3


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the product catches it."""


def bandit_tasks(num_tasks: int) -> list[LocalTask]:
    """Task i has the prompt (2, 4 + i) and wants token 4 + i as its first action token."""
    state = State((Message(Role.USER, "go"),), (), ToolOrigin.NONE)
    return [LocalTask(f"pivot-{i}", (2, 4 + i), state, Action(str(4 + i), (), None, ParseOutcome.ABSENT)) for i in range(num_tasks)]


def initial_table() -> torch.Tensor:
    return 0.3 * torch.randn((VOCAB, VOCAB), generator=torch.Generator().manual_seed(7))


@dataclass(frozen=True, slots=True)
class BanditStep:
    loss: float
    grad_norm: float
    lr: float
    sums: Mapping[str, float]
    measures: Mapping[str, float]


class BanditTrainer:
    """The trainer protocol on the table, with Adam; `on_call` is told the name of each call before it has an effect."""

    def __init__(self, *, lr: float = 0.5, on_call: Callable[[str], None] = lambda name: None) -> None:
        self.table = initial_table().requires_grad_()
        self._reference = initial_table()
        self._optimizer = torch.optim.Adam([self.table], lr=lr)
        self._on_call = on_call
        self.steps_done = 0
        self.num_micro_batches: list[int] = []

    def token_logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float, reference: bool = False) -> list[torch.Tensor]:
        self._on_call("token_logprobs")
        with torch.no_grad():
            return [_forward(self._reference if reference else self.table, batch, temperature)[0] for batch in micro_batches]

    def step(self, micro_batches: Sequence[MicroBatch], loss: LossFunction, *, temperature: float) -> BanditStep:
        self._on_call("step")
        self.num_micro_batches.append(len(micro_batches))
        self._optimizer.zero_grad()
        total, sums = 0.0, {}
        for batch in micro_batches:
            terms = loss(*_forward(self.table, batch, temperature), batch)
            terms.loss.backward()
            total += terms.loss.item()
            for name, value in terms.sums.items():
                sums[name] = max(sums.get(name, 0.0), value.item()) if name.endswith("/max") else sums.get(name, 0.0) + value.item()
        assert self.table.grad is not None
        norm = self.table.grad.norm().item()
        self._optimizer.step()
        self.steps_done += 1
        return BanditStep(total, norm, self._optimizer.param_groups[0]["lr"], sums, {"work_tokens": 3.0, "work_flops": 60.0, "peak_flops": 1e6})

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        self._on_call("named_tensors")
        yield "table", self.table.detach()

    def replica_logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float) -> list[list[torch.Tensor]]:
        return [self.token_logprobs(micro_batches, temperature=temperature)]

    def unequal_copy(self) -> None: ...

    def layer_outputs(self, token_ids: Sequence[int]) -> LayerOutputs:
        return LayerOutputs({"embedding": self.table.detach()[list(token_ids)]}, ())

    def outputs_in_layout(self, checkpoint_dir: Path, parallel: object, token_ids: Sequence[int]) -> str:
        return "a table has no layout"

    def parameter_drift(self) -> float:
        initial = initial_table()
        return ((self.table.detach() - initial).norm() / initial.norm()).item()

    def save_hf(self, out_dir: Path) -> None:
        self._on_call("save_hf")
        self._whole(out_dir, "table.pt", self.table.detach())

    def save_checkpoint(self, path: Path, extra: Mapping[str, Any]) -> None:
        self._on_call("save_checkpoint")
        state = {"table": self.table.detach(), "optimizer": self._optimizer.state_dict(), "steps_done": self.steps_done}
        # Apart from the state, as the product does: it holds a position in the timing file, which depends on the clock.
        self._whole(path / f"step_{self.steps_done:08d}", "state.pt", state, extra)
        for old in sorted(path.glob("step_*"))[:-2]:
            shutil.rmtree(old)
        self._on_call("saved_checkpoint")

    def finish_saving(self) -> None:
        self._on_call("finish_saving")

    def load_checkpoint(self, path: Path) -> Mapping[str, Any]:
        newest = sorted(path.glob("step_*"))[-1]
        state = torch.load(newest / "state.pt")
        with torch.no_grad():
            self.table.copy_(state["table"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.steps_done = state["steps_done"]
        return read_json(newest / "record.json")

    def _whole(self, path: Path, name: str, value: object, record: Mapping[str, Any] | None = None) -> None:
        partial = path.with_name(f".{path.name}.tmp")
        for leftover in (partial, path):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        torch.save(value, partial / name)
        if record is not None:
            write_json(partial / "record.json", record)
        self._on_call("half_written")
        (partial / SUCCESS).touch()
        partial.rename(path)


class BanditEngine:
    """The engine's copy of the table."""

    def __init__(self) -> None:
        self.table, self.policy_version = initial_table(), 0

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.table, self.policy_version = dict(named_tensors)["table"].clone(), version


class BanditSampler:
    """The sampler's face: reward 1 where the first token is the wanted one and the answer ends in time.

    `infra` and `judge` replace verdicts: by (step-independent) sample index, and by completion.
    """

    def __init__(
        self,
        engine: BanditEngine,
        *,
        run_seed: int = 11,
        infra: frozenset[int] = frozenset(),
        judge: Callable[[LocalTask, Completion], Verdict] | None = None,
        on_call: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.engine, self._run_seed, self._infra, self._on_call = engine, run_seed, infra, on_call
        self._judge = judge or first_token_verdict
        self.places: list[tuple[str | int, ...]] = []

    def sample(self, tasks: Sequence[LocalTask], *, num_samples: int, place: tuple[str | int, ...]) -> list[tuple[LocalRollout, ...]]:
        self._on_call("sample")
        self.places.append(place)
        return [tuple(self._one(task, i, place) for i in range(num_samples)) for task in tasks]

    def take_cost(self) -> dict[str, float]:
        return {}

    def _one(self, task: LocalTask, index: int, place: tuple[str | int, ...]) -> LocalRollout:
        seed = derive_seed(self._run_seed, *place, task.candidate_id, index)
        generator = torch.Generator().manual_seed(seed)
        logprobs_V_V = torch.log_softmax(self.engine.table, dim=-1)
        tokens, logprobs = [task.prompt_token_ids[-1]], []
        while len(logprobs) < MAX_NEW_TOKENS and (not logprobs or tokens[-1] != EOS):
            row = logprobs_V_V[tokens[-1]]
            tokens.append(int(torch.multinomial(row.exp(), 1, generator=generator)))
            logprobs.append(row[tokens[-1]].item())
        finish = FinishReason.STOP if tokens[-1] == EOS else FinishReason.LENGTH
        completion = Completion(tuple(tokens[1:]), tuple(logprobs), finish, self.engine.policy_version)
        verdict = Verdict.infra("judge down") if index in self._infra else self._judge(task, completion)
        action = Action(bandit_text(completion.token_ids), (), None, ParseOutcome.ABSENT)
        return LocalRollout(task.candidate_id, index, seed, completion, action, verdict)


def first_token_verdict(task: LocalTask, completion: Completion) -> Verdict:
    if str(completion.token_ids[0]) == task.expert_action.content:
        return Verdict.ok(1.0, "same token")
    return Verdict.invalid("wrong token")


def bandit_text(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


def _forward(table: torch.Tensor, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    ids = batch.token_ids_B_T
    logprobs_B_T_V = torch.log_softmax(table[ids[:, :-1]] / temperature, dim=-1)
    picked = logprobs_B_T_V.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    entropy = -(logprobs_B_T_V.exp() * logprobs_B_T_V).sum(-1).detach()
    pad = torch.zeros((ids.shape[0], 1))
    return torch.cat([pad, picked], dim=1), torch.cat([pad, entropy], dim=1)
