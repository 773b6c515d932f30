"""Linear layers through oneDNN give the numbers of torch's own, and nothing else changes."""

import contextlib

import pytest
import torch
from torch.nn import functional
from torch.overrides import BaseTorchFunctionMode, _pop_mode

from openmed_nb.devices.linear import (
    FEWEST_ROWS,
    WORTH,
    attention_without_plans,
    fast_linear,
    linear_mode,
    mask_class,
    onednn_gain,
    suits,
    telling_mask,
)
from openmed_nb.devices.profilers import modes_like

needs_onednn = pytest.mark.skipif(onednn_gain() == 0, reason="this torch has no oneDNN")

SHAPES = [(64, 48), (2, 40, 48), (1, 64, 48), (2, 2, 32, 48), (3, 48), (1, 1, 48), (48,), (0, 48), (FEWEST_ROWS, 48)]


def numbers(*shape, **settings):
    """Return a tensor of fixed numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), **settings)


@needs_onednn
class TestNumbers:
    """Both ways compute the same."""

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_same_numbers(self, shape, bias):
        """For inputs of any number of dimensions, with and without a bias, few rows and many, the numbers are the same."""
        inputs, weight = numbers(*shape), numbers(16, 48)
        offset = numbers(16) if bias else None
        with torch.no_grad(), linear_mode()():
            computed = functional.linear(inputs, weight, offset)
        torch.testing.assert_close(
            computed, inputs @ weight.T + (0 if offset is None else offset), rtol=1e-4, atol=1e-4
        )

    @pytest.mark.parametrize(
        ("inputs", "weight"),
        [
            (numbers(48, 64).T, numbers(16, 48)),
            (numbers(64, 48), numbers(48, 16).T),
            (numbers(2, 64, 96)[:, :, ::2], numbers(16, 96)[:, ::2]),
            (numbers(48).expand(64, 48), numbers(16, 48)),
        ],
        ids=["inputs", "weight", "steps", "expanded"],
    )
    def test_tensors_that_are_views(self, inputs, weight):
        """Tensors that lie across the memory give the same numbers too."""
        with torch.no_grad(), linear_mode()():
            computed = functional.linear(inputs, weight)
        torch.testing.assert_close(computed, inputs @ weight.T, rtol=1e-4, atol=1e-4)

    def test_changed_weights(self):
        """Weights that change between two calls take effect: in place, replaced, or loaded."""
        layer, inputs = torch.nn.Linear(48, 16), numbers(64, 48)
        with torch.no_grad(), linear_mode()():
            layer(inputs)
            layer.weight.zero_()
            assert torch.equal(layer(inputs), layer.bias.expand(64, 16))
            layer.bias.data = torch.ones(16)
            assert torch.equal(layer(inputs), torch.ones(64, 16))
            layer.load_state_dict({"weight": torch.zeros(16, 48), "bias": torch.zeros(16)})
            assert torch.equal(layer(inputs), torch.zeros(64, 16))

    def test_whole_model(self, tiny):
        """A model with many layers gives the same logits."""
        model, ids = tiny.random_bert(), torch.arange(5, 21).repeat(16, 2)
        with torch.no_grad():
            expected = model(ids).logits
            with linear_mode()():
                computed = model(ids).logits
        torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-3)


@needs_onednn
class TestLeftAlone:
    """What oneDNN does not take, or what needs more than the product, goes where it always went."""

    def test_gradients(self):
        """Where gradients are recorded they are those of torch, for the inputs, the weight and the bias."""
        layer, inputs = torch.nn.Linear(48, 16), numbers(64, 48).requires_grad_()
        expected = torch.autograd.grad(layer(inputs).square().sum(), (inputs, *layer.parameters()))
        with linear_mode()():
            computed = torch.autograd.grad(layer(inputs).square().sum(), (inputs, *layer.parameters()))
        torch.testing.assert_close(computed, expected)

    def test_autocast(self):
        """In a block of autocast a product has the type that was asked for there."""
        layer = torch.nn.Linear(48, 16)
        with torch.no_grad(), linear_mode()(), torch.autocast("cpu", torch.bfloat16):
            assert layer(numbers(64, 48)).dtype == torch.bfloat16

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_other_types(self, dtype):
        """A product in another type stays in that type."""
        inputs, weight = numbers(64, 48).to(dtype), numbers(16, 48).to(dtype)
        with torch.no_grad(), linear_mode()():
            computed = functional.linear(inputs, weight)
        assert computed.dtype == dtype
        assert torch.equal(computed, functional.linear(inputs, weight))

    def test_other_functions(self):
        """Every other function gives exactly what it gave."""
        inputs, weight = numbers(64, 48), numbers(48, 48)
        for function in (torch.matmul, functional.bilinear, functional.mse_loss):
            arguments = (inputs, inputs, weight[None]) if function is functional.bilinear else (inputs[:48], weight)
            expected = function(*arguments)
            with torch.no_grad(), linear_mode()():
                assert torch.equal(function(*arguments), expected)

    @pytest.mark.parametrize(
        ("inputs", "weight"),
        [((64, 47), (16, 48)), ((64, 0), (16, 0)), ((64, 48), (0, 48)), ((64, 48), (48,))],
        ids=str,
    )
    def test_odd_shapes(self, inputs, weight):
        """Shapes that do not fit, or hold nothing, give torch's own result or torch's own error."""

        def outcome():
            try:
                return functional.linear(numbers(*inputs), numbers(*weight)).shape
            except RuntimeError as error:
                return str(error)

        expected = outcome()
        with torch.no_grad(), linear_mode()():
            assert outcome() == expected

    @pytest.mark.parametrize("device", ["mps", "cuda", "cuda:1", "meta", "lazy"])
    def test_other_devices(self, device):
        """For any device but the CPU the context does nothing."""
        assert isinstance(fast_linear(torch.device(device), 1000), contextlib.nullcontext)

    def test_after_the_block(self):
        """After the block, also one that failed, no function mode is left."""
        with contextlib.suppress(ZeroDivisionError), linear_mode()():
            raise ZeroDivisionError
        assert torch._C._len_torch_function_stack() == 0

    @pytest.mark.skipif(onednn_gain() < WORTH, reason="the context does nothing here")
    def test_interrupt_while_torch_has_taken_it_off(self):
        """An interrupt while torch computes without the mode takes no other mode along, such as one of the person's."""
        with BaseTorchFunctionMode() as own:
            with contextlib.suppress(KeyboardInterrupt), fast_linear(torch.device("cpu"), 1000):
                _pop_mode()
                raise KeyboardInterrupt
            assert modes_like(own) == [own]


@pytest.mark.parametrize(
    ("inputs", "expected"), [((FEWEST_ROWS, 48), True), ((FEWEST_ROWS - 1, 48), False), ((2, FEWEST_ROWS, 48), True)]
)
def test_fewest_rows(inputs, expected):
    """A product of few rows is left to torch."""
    with torch.no_grad():
        assert suits(numbers(*inputs), numbers(16, 48)) is expected


def test_gain():
    """The gain is one number, measured once, that decides whether the CPU's context does anything."""
    gain = onednn_gain()
    assert gain > 0
    assert onednn_gain() is gain
    assert isinstance(fast_linear(torch.device("cpu"), 1000), contextlib.nullcontext) is (gain < 1.2)


def test_nothing_for_few_rows():
    """For products with few rows the context does nothing, because looking at every function would cost more."""
    assert isinstance(fast_linear(torch.device("cpu"), FEWEST_ROWS - 1), contextlib.nullcontext)


class TestMasks:
    """A mask tells from what the host knows whether it is full, and is otherwise a tensor like any."""

    @pytest.fixture
    def mask(self):
        """A mask that says it is full although it is not, so that one can see who answers."""
        mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).as_subclass(mask_class())
        mask.full = True
        return mask

    @pytest.mark.parametrize(
        "ask",
        [
            lambda mask: mask.all(),
            torch.all,
            lambda mask: mask.bool().all(),
            lambda mask: mask.to(device="meta", dtype=torch.bool).all(),
            lambda mask: mask.to(torch.bool).to(torch.float32).all(),
        ],
    )
    @pytest.mark.parametrize("full", [True, False])
    def test_answers_for_the_device(self, ask, full):
        """It answers itself, also once it has another type; a device that has no numbers at all could not."""
        answer = ask(telling_mask(torch.ones(2, 3, dtype=torch.int64, device="meta"), full))
        assert answer.device.type == "cpu"
        assert bool(answer) is full

    @pytest.mark.parametrize(
        "work",
        [
            lambda mask: mask[:, None, None, :],
            lambda mask: mask.all(dim=1),
            lambda mask: torch.all(input=mask),
            lambda mask: mask == 1,
            lambda mask: 1.0 - mask.float(),
            lambda mask: torch.cat([mask, mask]),
            lambda mask: torch.zeros(2, 3).masked_fill(mask.bool(), -1),
            lambda mask: mask.sum().item(),
            lambda mask: mask.shape,
            lambda mask: torch.arange(6).view(2, 3)[mask == 1],
        ],
    )
    def test_all_else_is_of_its_numbers(self, mask, work):
        """Whatever else is done with it gives what a plain tensor gives, and that is a plain tensor."""
        got, expected = work(mask), work(mask.as_subclass(torch.Tensor))
        assert type(got) is type(expected)
        assert torch.equal(got, expected) if isinstance(got, torch.Tensor) else got == expected

    def test_none_on_the_cpu(self):
        """On the CPU a mask stays as it is."""
        mask = torch.ones(2, 3)
        assert telling_mask(mask, full=True) is mask


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
def test_attention_without_plans(kind, dtype, changed):
    """Only CUDA's attention of 16 bits makes plans, so only there cuDNN's is left out."""
    from torch.backends.cuda import cudnn_sdp_enabled

    before = cudnn_sdp_enabled()
    with attention_without_plans(torch.device(kind), dtype):
        assert cudnn_sdp_enabled() == (before and not changed)
    assert cudnn_sdp_enabled() == before
