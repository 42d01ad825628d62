"""A checkpoint's index that names anything but an index's own classes is refused before it can run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from pivotrl.megatron.untrusted import check_index, weights_only


class _Payload:
    """Pickled, it is a call of os.mkdir; unpickled without care, the call is made."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._trace),)


def test_an_index_that_would_call_a_function_is_refused(tmp_path: Path) -> None:
    trace, index = tmp_path / "trace", tmp_path / ".metadata"
    index.write_bytes(pickle.dumps(Metadata({}, planner_data=_Payload(trace))))
    with pytest.raises(pickle.UnpicklingError, match="mkdir, which has no place"):
        check_index(tmp_path)
    assert not trace.exists()
    with index.open("rb") as stream:
        pickle.load(stream)
    assert trace.exists(), "the payload is not one"


def test_a_plain_index_is_accepted_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    index = tmp_path / ".metadata"
    index.write_bytes(pickle.dumps(Metadata({}, planner_data={"shape": torch.Size([2]), "format": torch.bfloat16})))
    check_index(tmp_path)
    index.write_bytes(index.read_bytes()[:-7])
    with pytest.raises(pickle.UnpicklingError):
        check_index(tmp_path)
    index.write_bytes(b"")
    with pytest.raises(pickle.UnpicklingError, match="damaged"):
        check_index(tmp_path)


def test_objects_load_as_weights_only_whatever_the_caller_says(tmp_path: Path) -> None:
    trace, file = tmp_path / "trace", tmp_path / "object.pt"
    torch.save(_Payload(trace), file)
    with weights_only(), pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=False)
    assert not trace.exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
