"""The digest that a GPU computes of its own tensors is the one that the CPU test holds to whole numbers. No GPU has run this yet."""

from __future__ import annotations

import pytest
import torch

from pivotrl.weights.digest import LANES, digest_like, finish, start, tensor_digest
from pivotrl.weights.manifest import SentStream

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)


@pytest.mark.gpu
def test_a_gpus_digest_is_the_cpus() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3001, 1999, generator=generator).bfloat16()
    tensors = [weights, weights.t(), weights[1:, 3:], weights.view(-1)[1:-2], weights[0, :1], weights[:0], weights[0, 0]]
    expected = [digest_like(tensor, LANES) for tensor in tensors]
    on_device = weights.cuda()
    views = [on_device, on_device.t(), on_device[1:, 3:], on_device.view(-1)[1:-2], on_device[0, :1], on_device[:0], on_device[0, 0]]
    assert [tensor_digest(tensor) for tensor in views] == expected
    assert finish([start(tensor) for tensor in views]) == expected
    stream = SentStream([("w", on_device)])
    assert next(stream)[1] is on_device
    assert stream.digests == {"w": expected[0]}
    assert digest_like(on_device, "0" * 32) == tensor_digest(weights)


@pytest.mark.gpu
def test_a_tensor_that_changes_after_its_digest_was_started_keeps_it() -> None:
    """Work on one stream is done in order, so the sender may use its memory again."""
    tensor = torch.ones(5_000_000, device="cuda")
    started = start(tensor)
    tensor.zero_()
    assert finish([started]) == [digest_like(torch.ones(5_000_000), LANES)]
