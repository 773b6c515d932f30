"""Linear layers with oneDNN compute the results of torch, and nothing else changes."""

import contextlib
from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional
from torch.overrides import BaseTorchFunctionMode, _get_current_function_mode_stack, _pop_mode

from openmed_nb.devices import linear
from openmed_nb.devices.linear import (
    MIN_ONEDNN_SPEEDUP,
    MIN_ONEDNN_TOKENS,
    MIN_ROWS,
    LinearTuning,
    cudnn_attention_disabled,
    define_known_mask,
    fast_linear,
    get_linear_mode_class,
    is_onednn_candidate,
    measure_onednn_speedup,
    wrap_mask,
)

needs_onednn = pytest.mark.skipif(measure_onednn_speedup() == 0, reason="this torch has no oneDNN")

SHAPES = [(64, 48), (2, 2, 32, 48), (3, 48), (48,), (0, 48), (MIN_ROWS, 48)]


def numbers(*shape, **settings):
    """Return a tensor of fixed numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), **settings)


CASES = {
    **{str(shape): (numbers(*shape), numbers(16, 48), numbers(16)) for shape in SHAPES},
    "no bias": (numbers(64, 48), numbers(16, 48), None),
    "transposed inputs": (numbers(48, 64).T, numbers(16, 48), None),
    "transposed weight": (numbers(64, 48), numbers(48, 16).T, None),
    "steps": (numbers(2, 64, 96)[:, :, ::2], numbers(16, 96)[:, ::2], None),
    "expanded": (numbers(48).expand(64, 48), numbers(16, 48), None),
}


@needs_onednn
@pytest.mark.parametrize("case", CASES)
def test_fast_linear_matches_torch(case):
    with torch.no_grad(), get_linear_mode_class()():
        computed = functional.linear(*CASES[case])
    torch.testing.assert_close(computed, functional.linear(*CASES[case]), rtol=1e-4, atol=1e-4)


@needs_onednn
def test_fast_linear_uses_changed_weights():
    layer, inputs = torch.nn.Linear(48, 16), numbers(64, 48)
    with torch.no_grad(), get_linear_mode_class()():
        layer(inputs)
        layer.weight.zero_()
        assert torch.equal(layer(inputs), layer.bias.expand(64, 16))
        layer.bias.data = torch.ones(16)
        assert torch.equal(layer(inputs), torch.ones(64, 16))


@needs_onednn
def test_fast_linear_leaves_gradients():
    layer, inputs = torch.nn.Linear(48, 16), numbers(64, 48).requires_grad_()

    def compute_gradients():
        return torch.autograd.grad(layer(inputs).square().sum(), (inputs, *layer.parameters()))

    expected = compute_gradients()
    with get_linear_mode_class()():
        computed = compute_gradients()
    torch.testing.assert_close(computed, expected)


@needs_onednn
def test_fast_linear_leaves_compiled_layers():
    """``torch.compile`` cannot compile the function of oneDNN."""
    layer, graphs = torch.nn.Linear(48, 16), []

    def keep_graph(graph, _inputs):
        graphs.append(graph.code)
        return graph.forward

    layer.compile(backend=keep_graph)
    with torch.no_grad(), get_linear_mode_class()():
        layer(numbers(64, 48))
    assert ["mkldnn" in code for code in graphs] == [False]


@needs_onednn
def test_fast_linear_leaves_autocast():
    with torch.no_grad(), get_linear_mode_class()(), torch.autocast("cpu", torch.bfloat16):
        assert torch.nn.Linear(48, 16)(numbers(64, 48)).dtype == torch.bfloat16


SQUARE = numbers(48, 48)
LEFT_ALONE = {
    **{
        str(dtype): (functional.linear, numbers(64, 48).to(dtype), numbers(16, 48).to(dtype))
        for dtype in (torch.float64, torch.bfloat16, torch.float16)
    },
    "matmul": (torch.matmul, numbers(64, 48), SQUARE),
    "mse_loss": (functional.mse_loss, SQUARE, SQUARE + 1),
    "bilinear": (functional.bilinear, numbers(64, 48), numbers(64, 48), SQUARE[None]),
    **{
        f"{inputs} {weight}": (functional.linear, numbers(*inputs), numbers(*weight))
        for inputs, weight in [((64, 47), (16, 48)), ((64, 0), (16, 0)), ((64, 48), (0, 48)), ((64, 48), (48,))]
    },
}


@needs_onednn
@pytest.mark.parametrize("case", LEFT_ALONE)
def test_fast_linear_leaves_unsupported_products(case):
    function, *arguments = LEFT_ALONE[case]

    def outcome():
        try:
            return function(*arguments)
        except RuntimeError as error:
            return torch.tensor([*str(error).encode()])

    expected = outcome()
    with torch.no_grad(), get_linear_mode_class()():
        computed = outcome()
    assert computed.dtype == expected.dtype
    assert torch.equal(computed, expected)


@pytest.mark.parametrize(
    ("device", "rows"),
    [("cpu", MIN_ROWS - 1), *((name, 1000) for name in ("mps", "cuda", "cuda:1", "meta", "lazy"))],
)
def test_fast_linear_has_no_effect_on_gpu_or_few_rows(device, rows):
    assert isinstance(fast_linear(torch.device(device), rows), contextlib.nullcontext)


@needs_onednn
def test_interrupt_preserves_other_modes(monkeypatch):
    monkeypatch.setattr(linear, "LINEAR_TUNING", LinearTuning(onednn_speedup=2.0))
    with BaseTorchFunctionMode() as own:
        with contextlib.suppress(KeyboardInterrupt), fast_linear(torch.device("cpu"), 1000):
            _pop_mode()
            raise KeyboardInterrupt
        assert _get_current_function_mode_stack() == [own]


@pytest.mark.parametrize(
    ("inputs", "expected"), [((MIN_ROWS, 48), True), ((MIN_ROWS - 1, 48), False), ((2, MIN_ROWS, 48), True)]
)
def test_candidate_requires_min_rows(inputs, expected):
    with torch.no_grad():
        assert is_onednn_candidate(numbers(*inputs), numbers(16, 48)) is expected


@pytest.mark.parametrize("speedup", [MIN_ONEDNN_SPEEDUP - 0.1, MIN_ONEDNN_SPEEDUP])
def test_onednn_is_measured_once_after_many_tokens(speedup, monkeypatch):
    measured = Mock(return_value=speedup)
    monkeypatch.setattr(linear, "LINEAR_TUNING", LinearTuning())
    monkeypatch.setattr(linear, "measure_onednn_speedup", measured)
    assert isinstance(fast_linear(torch.device("cpu"), MIN_ONEDNN_TOKENS - 1), contextlib.nullcontext)
    measured.assert_not_called()
    for _ in range(2):
        assert isinstance(fast_linear(torch.device("cpu"), MIN_ROWS), contextlib.nullcontext) is (speedup < 1.2)
    measured.assert_called_once_with()


@pytest.mark.parametrize(
    "query",
    [
        torch.Tensor.all,
        torch.all,
        lambda mask: mask.bool().all(),
        lambda mask: mask.to(torch.bool).to(torch.float32).all(),
    ],
)
@pytest.mark.parametrize("full", [True, False])
def test_wrapped_mask_knows_whether_it_is_full(query, full):
    """The stored value is used, also after a cast; a meta device could not compute it."""
    answer = query(wrap_mask(torch.ones(2, 3, dtype=torch.int64, device="meta"), full))
    assert answer.device.type == "cpu"
    assert bool(answer) is full


@pytest.mark.parametrize(
    "compute",
    [
        lambda mask: mask[:, None, None, :],
        lambda mask: mask.all(dim=1),
        lambda mask: 1.0 - mask.float(),
        lambda mask: torch.cat([mask, mask]),
        lambda mask: torch.arange(6).view(2, 3)[mask == 1],
    ],
)
def test_wrapped_mask_computes_like_plain_tensor(compute):
    plain = torch.tensor([[1, 1, 1], [1, 0, 0]])
    computed = compute(define_known_mask()(plain, True))  # The stored value is incorrect, so that its use would show.
    expected = compute(plain)
    assert type(computed) is type(expected)
    assert torch.equal(computed, expected) if isinstance(computed, torch.Tensor) else computed == expected


def test_wrap_mask_returns_cpu_mask_unchanged():
    mask = torch.ones(2, 3)
    assert wrap_mask(mask, full=True) is mask


@pytest.mark.parametrize(
    ("kind", "dtype", "changed"),
    [
        ("cpu", torch.bfloat16, False),
        ("mps", torch.float16, False),
        ("cuda", torch.float32, False),
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float16, True),
    ],
)
def test_cudnn_attention_disabled_only_in_16_bits(kind, dtype, changed):
    from torch.backends.cuda import cudnn_sdp_enabled

    before = cudnn_sdp_enabled()
    with cudnn_attention_disabled(torch.device(kind), dtype):
        assert cudnn_sdp_enabled() == (before and not changed)
    assert cudnn_sdp_enabled() == before
