"""Mamba-2 in plain torch against the recurrence written out step by step in float64: outputs, states, gradients, packing, continuation."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from pivotrl.megatron.cpu import mamba
from pivotrl.megatron.cpu.mamba import causal_convolution, state_space_scan

_ROWS, _HEADS, _CHANNELS, _GROUPS, _SIZE, _TAPS = 2, 4, 8, 2, 16, 4


def _scan_inputs(positions: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return [
        normal(_ROWS, positions, _HEADS, _CHANNELS),
        functional.softplus(normal(_ROWS, positions, _HEADS)),
        -torch.linspace(0.05, 4.0, _HEADS, dtype=torch.float64).to(dtype),
        normal(_ROWS, positions, _GROUPS, _SIZE),
        normal(_ROWS, positions, _GROUPS, _SIZE),
        normal(_ROWS, _HEADS, _CHANNELS, _SIZE),
    ]


def _recurrence(inputs: list[torch.Tensor], segments: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, one position after the other."""
    x, step, decay, write, read, state = (tensor.double() for tensor in inputs)
    write, read = (tensor.repeat_interleave(_HEADS // _GROUPS, dim=2) for tensor in (write, read))
    outputs = []
    for position in range(x.shape[1]):
        if segments is not None and position > 0:
            state = state * (segments[:, position] == segments[:, position - 1])[:, None, None, None]
        written = torch.einsum("bhp,bhn->bhpn", x[:, position] * step[:, position, :, None], write[:, position])
        state = torch.exp(step[:, position] * decay)[:, :, None, None] * state + written
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, read[:, position]))
    return torch.stack(outputs, dim=1), state


def _segments(positions: int) -> torch.Tensor:
    """Sequences that end inside a chunk, at a chunk's border and after one position; another cut in the second row."""
    first, second = ([0] * 10 + [1] * 54 + [2] * (positions - 64), [7] * 1 + [8] * 1 + [9] * (positions - 2))
    return torch.tensor([first, second])


@pytest.mark.parametrize(("positions", "packed"), [(1, False), (63, False), (64, False), (200, False), (200, True)])
def test_scan_equals_the_recurrence(positions: int, packed: bool) -> None:
    segments = _segments(positions) if packed else None
    inputs = [tensor.requires_grad_() for tensor in _scan_inputs(positions)]
    output, state = state_space_scan(*inputs[:5], initial_B_H_P_N=inputs[5], segments_B_S=segments)
    expected_output, expected_state = _recurrence(inputs, segments)
    torch.testing.assert_close(output.double(), expected_output, atol=2e-5, rtol=2e-6)
    torch.testing.assert_close(state.double(), expected_state, atol=2e-5, rtol=2e-6)

    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((output * weights).sum() + state.square().sum(), inputs)
    expected_gradients = torch.autograd.grad((expected_output * weights).sum() + expected_state.square().sum(), inputs)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        assert expected.abs().max() > 0
        assert ((gradient - expected).abs().max() / expected.abs().max()) < 2e-6


def test_scan_is_exact_in_float64() -> None:
    inputs = _scan_inputs(200, torch.float64)
    output, state = state_space_scan(*inputs[:5], initial_B_H_P_N=inputs[5], segments_B_S=_segments(200))
    expected_output, expected_state = _recurrence(inputs, _segments(200))
    torch.testing.assert_close(output, expected_output, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state, expected_state, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("cut", [1, 64, 77])
def test_a_sequence_cut_in_two_gives_the_same_scan(cut: int) -> None:
    inputs = _scan_inputs(150)
    whole, final = state_space_scan(*inputs[:5], initial_B_H_P_N=inputs[5])

    def part(start: int, stop: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, step, decay, write, read = inputs[:5]
        return state_space_scan(x[:, start:stop], step[:, start:stop], decay, write[:, start:stop], read[:, start:stop], initial_B_H_P_N=state)

    first, between = part(0, cut, inputs[5])
    second, last = part(cut, 150, between)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(last, final, atol=2e-5, rtol=1e-5)
    fresh, _ = part(cut, 150, torch.zeros_like(between))
    assert (fresh - whole[:, cut:]).abs().max() > 0.1, "the state makes no difference here, so the test shows nothing"


def test_float64_sums_of_decays_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """With float32 sums the same scan is several times farther from the recurrence."""
    inputs = _scan_inputs(512)
    inputs[1] = inputs[1] * 8
    expected, _ = _recurrence(inputs, None)
    exact = (state_space_scan(*inputs[:5], initial_B_H_P_N=inputs[5])[0].double() - expected).abs().max()
    with_chunk_sums = mamba._chunk_decays
    monkeypatch.setattr(mamba, "_chunk_decays", lambda logs, masks, compute: with_chunk_sums(logs.float(), masks, compute))
    rounded = (state_space_scan(*inputs[:5], initial_B_H_P_N=inputs[5])[0].double() - expected).abs().max()
    assert rounded > 2 * exact


def _convolution_inputs(positions: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(_ROWS, positions, 6), (6, _TAPS), (6,), (_ROWS, _TAPS - 1, 6)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def _tap_by_tap(inputs: list[torch.Tensor], segments: torch.Tensor) -> torch.Tensor:
    x, weight, bias, initial = inputs
    rows = []
    for row in range(len(x)):
        columns = []
        for position in range(x.shape[1]):
            total = bias
            for back in range(_TAPS):
                source = position - back
                if source < 0 and segments[row, 0] == segments[row, position]:
                    total = total + weight[:, _TAPS - 1 - back] * initial[row, source]
                elif source >= 0 and segments[row, source] == segments[row, position]:
                    total = total + weight[:, _TAPS - 1 - back] * x[row, source]
            columns.append(total)
        rows.append(torch.stack(columns))
    return torch.stack(rows)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("positions", [2, 9])
def test_convolution_equals_its_definition(positions: int, packed: bool) -> None:
    inputs = _convolution_inputs(positions)
    segments = torch.tensor([[0] * (positions - 1) + [1], [4] * positions]) if packed else torch.zeros(_ROWS, positions)
    output, _ = causal_convolution(*inputs[:3], initial_B_W_C=inputs[3], segments_B_S=segments if packed else None)
    expected = _tap_by_tap(inputs, segments)
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-12)
    gradients = torch.autograd.grad(output.square().sum(), inputs)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), inputs), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_a_sequence_cut_in_two_gives_the_same_convolution(cut: int) -> None:
    x, weight, bias, initial = _convolution_inputs(9)
    whole, final = causal_convolution(x, weight, bias, initial_B_W_C=initial)
    first, between = causal_convolution(x[:, :cut], weight, bias, initial_B_W_C=initial)
    second, last = causal_convolution(x[:, cut:], weight, bias, initial_B_W_C=between)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    torch.testing.assert_close(last, final)


def test_the_state_after_packed_rows_is_the_last_sequence_s_own() -> None:
    x, weight, bias, _ = _convolution_inputs(9)
    segments = torch.tensor([[0] * 7 + [1] * 2, [0] * 9])
    _, final = causal_convolution(x, weight, bias, segments_B_S=segments)
    _, alone = causal_convolution(x[:1, 7:], weight, bias)
    torch.testing.assert_close(final[:1], alone)
    torch.testing.assert_close(final[1], x[1, 6:])
