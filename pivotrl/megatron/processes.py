"""One program on many processes: process 0 runs it, the others follow its trainer.

torchrun starts N equal processes. Process 0 runs the verbs: it samples, judges, decides and writes every file but the parts of a
checkpoint. Wherever it builds a trainer or calls one, it first announces the call, and the followers make the same call on their part
of the model; between calls they wait. So everything above the trainer is written for one process. A follower prints nothing.

Consumes RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them. A process group exists only from the first `Build` on: a
recipe that is refused starts none. Messages travel pickled, as in torch's own object collectives, between the processes of one job.
Called by cli.py and build.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pivotrl.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from pivotrl.config.schema import ParallelConfig
    from pivotrl.megatron.copies import UnequalCopy
    from pivotrl.megatron.layer_outputs import LayerOutputs
    from pivotrl.megatron.trainer import StepResult, Trainer
    from pivotrl.objective.microbatch import LossFunction, MicroBatch

# Longer than any stage; that a process died is for the launcher to notice.
_PATIENCE = timedelta(days=30)
# How long process 0 waits for its last word to be heard.
_GOODBYE = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class Build:
    """Build a trainer in place of the one before."""

    arguments: Mapping[str, Any]
    """Keyword arguments of `Trainer.from_hf`."""


@dataclass(frozen=True, slots=True)
class Call:
    """Call a method of the trainer."""

    method: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class End:
    """Leave with this exit code."""

    code: int


class Leader:
    """The trainer as process 0 sees it where there are followers: every call is announced, then made here too.

    Implements `training.protocols.PolicyTrainer`. Everything that only the recipe and the model decide must have been checked before.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        _channel().announce(Build(arguments))
        from pivotrl.megatron.trainer import Trainer

        self._trainer = Trainer.from_hf(**arguments)

    @property
    def steps_done(self) -> int:
        """Optimizer steps taken."""
        return self._trainer.steps_done

    def token_logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float, reference: bool = False) -> list[torch.Tensor]:
        """`Trainer.token_logprobs` on every process."""
        if reference:
            # It replays nothing, so nothing of it need travel.
            micro_batches = [replace(micro_batch, routes_B=None) for micro_batch in micro_batches]
        return self._call("token_logprobs", micro_batches=micro_batches, temperature=temperature, reference=reference)

    def step(self, micro_batches: Sequence[MicroBatch], loss: LossFunction, *, temperature: float) -> StepResult:
        """`Trainer.step` on every process; the loss must be picklable."""
        return self._call("step", micro_batches=micro_batches, loss=loss, temperature=temperature)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`Trainer.named_tensors`; must be read to its end, because the followers read theirs to the end."""
        return self._call("named_tensors")

    def replica_logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float) -> list[list[torch.Tensor]]:
        """`Trainer.replica_logprobs` on every process."""
        return self._call("replica_logprobs", micro_batches=micro_batches, temperature=temperature)

    def unequal_copy(self) -> UnequalCopy | None:
        """`Trainer.unequal_copy` on every process."""
        return self._call("unequal_copy")

    def layer_outputs(self, token_ids: Sequence[int]) -> LayerOutputs:
        """`Trainer.layer_outputs` on every process."""
        return self._call("layer_outputs", token_ids=token_ids)

    def outputs_in_layout(self, checkpoint_dir: Path, parallel: ParallelConfig, token_ids: Sequence[int]) -> LayerOutputs | str:
        """`Trainer.outputs_in_layout` on every process."""
        return self._call("outputs_in_layout", checkpoint_dir=checkpoint_dir, parallel=parallel, token_ids=token_ids)

    def parameter_drift(self) -> float:
        """`Trainer.parameter_drift` on every process."""
        return self._call("parameter_drift")

    def save_hf(self, out_dir: Path) -> None:
        """`Trainer.save_hf` on every process; process 0 writes."""
        self._call("save_hf", out_dir=out_dir)

    def save_checkpoint(self, path: Path, extra: Mapping[str, Any]) -> None:
        """`Trainer.save_checkpoint` on every process; each writes its part."""
        self._call("save_checkpoint", path=path, extra=extra)

    def finish_saving(self) -> None:
        """`Trainer.finish_saving` on every process."""
        self._call("finish_saving")

    def load_checkpoint(self, path: Path) -> Mapping[str, Any]:
        """`Trainer.load_checkpoint` on every process."""
        return self._call("load_checkpoint", path=path)

    def _call(self, method: str, **arguments: Any) -> Any:
        _channel().announce(Call(method, arguments))
        return getattr(self._trainer, method)(**arguments)


def num_processes() -> int:
    """Processes that the launcher started; 1 where there is none."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_follower() -> bool:
    """Whether this process is one of several and not process 0."""
    return int(os.environ.get("RANK", "0")) != 0


def follow() -> int:
    """A follower's life: every announced call, until process 0 ends; returns the exit code.

    Errors that the data or the user caused are raised by all processes alike; process 0 reports them and ends this one. Any other
    exception is this process's own and leaves with its traceback, whereupon torchrun ends the others. SIGTERM is for process 0 to answer,
    which saves with the help of all where it trains: a follower that ended by itself would keep it from that.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(UserError):
        # Takes seconds, which pass while process 0 prepares its first call. What this machine lacks is met again at that call.
        import pivotrl.megatron.trainer  # noqa: F401
    channel = _channel()
    trainer: Trainer | None = None
    reported_elsewhere: Exception | None = None
    while not isinstance(message := channel.receive(), End):
        if reported_elsewhere is not None:
            raise reported_elsewhere
        try:
            if isinstance(message, Build):
                from pivotrl.megatron.trainer import Trainer

                trainer = None
                trainer = Trainer.from_hf(**message.arguments)
            else:
                _make(trainer, message)
        except (UserError, FloatingPointError) as error:
            reported_elsewhere = error
    channel.heard()
    return message.code


def dismiss(code: int) -> None:
    """Process 0 is about to end with `code`: so do the followers that are waiting for its next call. Does nothing where there are none.

    A follower inside a collective step that process 0 has left cannot hear it; the launcher ends those.
    """
    if num_processes() > 1:
        _channel().announce(End(code))
        _channel().wait_until_heard()


def _make(trainer: Trainer | None, call: Call) -> None:
    assert trainer is not None
    result = getattr(trainer, call.method)(**call.arguments)
    if isinstance(result, Iterator):
        # Exporting is a generator of collective steps.
        for _ in result:
            pass


class _Channel:
    """Messages from process 0 to all others, in order, through the rendezvous store.

    That there is a message stands in the store, since a follower may wait for days (process 0 profiles) and a process group has no such
    patience. A call, which may carry a step's data, is then broadcast, since thousands of readers would wait for one store.
    """

    def __init__(self) -> None:
        from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
        from torch.distributed.rendezvous import rendezvous

        store, self._rank, self._size = next(iter(rendezvous("env://")))
        self._store: Store = PrefixStore("pivotrl", store)
        self._num_messages = 0

    def announce(self, message: Build | Call | End) -> None:
        is_call = isinstance(message, Call)
        self._store.set(f"message/{self._num_messages}", pickle.dumps(None if is_call else message))  # pyright: ignore[reportArgumentType] (it takes bytes)
        self._num_messages += 1
        if is_call:
            self._broadcast(message)

    def receive(self) -> Build | Call | End:
        key = f"message/{self._num_messages}"
        self._store.wait([key], _PATIENCE)
        self._num_messages += 1
        message = pickle.loads(self._store.get(key)) or self._broadcast(None)
        # The last reader makes room for the next message.
        if self._store.add(f"{key}/readers", 1) == self._size - 1:
            self._store.delete_key(key)
            self._store.delete_key(f"{key}/readers")
        return message

    @staticmethod
    def _broadcast(message: Call | None) -> Call:
        from torch.distributed import broadcast_object_list

        from pivotrl.megatron.parallel import control_group

        messages = [message]
        broadcast_object_list(messages, src=0, group=control_group())
        assert messages[0] is not None
        return messages[0]

    def heard(self) -> None:
        """A follower is about to leave."""
        self._store.set(f"heard/{self._rank}", "")

    def wait_until_heard(self) -> None:
        """Keeps process 0, which may hold the store, until every follower has heard the last message or is gone."""
        from torch.distributed import DistError

        with contextlib.suppress(DistError, RuntimeError):
            self._store.wait([f"heard/{rank}" for rank in range(1, self._size)], _GOODBYE)


@functools.cache
def _channel() -> _Channel:
    return _Channel()
