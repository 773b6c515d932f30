import contextlib
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import openmed_nb as nb
from openmed_nb.devices.moving import copy_model
from openmed_nb.errors import ConfigurationError

PHASES = {"inference", "forward", "backward", "optimizer"}
NUMBERS = torch.arange(12.0).reshape(3, 4) / 7


class Block(nn.Module):
    """A linear layer with dropout and a custom function."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, numbers):
        """Return the activations."""
        return functional.gelu(self.dropout(self.inner(numbers)))


class Model(nn.Module):
    """Two blocks and a batch normalization, which has buffers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(4)

    def forward(self, numbers):
        """Return the normalized activations of the last block."""
        for block in self.blocks:
            numbers = block(numbers)
        return self.norm(numbers)


class Calling(nn.Module):
    """Model that calls a function with its input and has a trainable weight."""

    def __init__(self, function, weight=True):
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(1)) if weight else None

    def forward(self, *tensors):
        """Return the result of the function, or a loss of it if there is a weight."""
        result = self.function(*tensors)
        return result if self.scale is None else result.float().sum() * self.scale


def trace(model, inputs=NUMBERS, training=True):
    """Return the forecast of a model."""
    return nb.runbook.forecast(model, inputs, training=training)


def count_modules(report, operator, phase="inference"):
    """Return the number of calls of an operator in a phase by module."""
    return {
        str(row.module_location): row.count for row in report.rows if (row.operator, row.phase) == (operator, phase)
    }


def get_phases(report):
    """Return the phases with calls."""
    return {row.phase for row in report.rows}


def get_limitations(report):
    """Return the limitations with the operators that have them."""
    return {(row.limitation, row.operator) for row in report.rows if row.limitation}


def test_training_step_is_counted_by_module_and_phase():
    report = trace(Model())

    assert count_modules(report, "aten::linear") == {
        "blocks.0.inner (Linear)": 1,
        "blocks.1.inner (Linear)": 1,
    }
    assert count_modules(report, "aten::gelu", "forward") == {"blocks.0 (Block)": 1, "blocks.1 (Block)": 1}
    assert count_modules(report, "aten::gelu_backward", "backward") == {"": 2}
    assert count_modules(report, "aten::linalg_vector_norm", "optimizer")
    assert get_phases(report) == PHASES
    assert not [operator for operator in report.operators if "_foreach_" in operator]


def get_state(model):
    """Return the state of a model that a trace could change."""
    tensors = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    modes = [module.training for module in model.modules()]
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    every = [len(getattr(nn.modules.module, f"_global_forward_{kind}")) for kind in ("hooks", "pre_hooks")]
    numbers = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002 - as below
    return [*tensors, *gradients, *modes, *hooks, *every, *numbers]


def draw(*_args):
    """Draw random numbers from all generators."""
    random.random()
    np.random.rand()  # noqa: NPY002 - as below
    torch.rand(1)


@pytest.mark.parametrize(("inputs", "fails"), [(NUMBERS, False), (torch.ones(3, 5), True)])
def test_trace_does_not_change_model_and_generators(inputs, fails):
    model = Model()
    kept = inputs.clone()
    model.blocks[1].eval()
    model(NUMBERS).sum().backward()
    model.register_forward_pre_hook(draw)
    before = get_state(model)
    with pytest.raises(ConfigurationError) if fails else contextlib.nullcontext():
        trace(model, inputs)

    assert torch.equal(inputs, kept)
    for now, then in zip(get_state(model), before, strict=True):
        assert torch.equal(now, then) if torch.is_tensor(now) else now == then


def test_trace_does_not_change_inputs():
    numbers = torch.ones(3)
    trace(Calling(lambda given: given.add_(1)), numbers)

    assert torch.equal(numbers, torch.ones(3))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (torch.ones(3, 5), "forward pass of Model failed on the CPU: RuntimeError: mat1 and mat2"),
        ({"numbers": NUMBERS, "labels": NUMBERS}, "forward pass of Model failed on the CPU: TypeError: "),
        (torch.ones(1, 4), "training step of Model failed on the CPU: ValueError: Expected more than 1"),
    ],
)
def test_error_of_the_model_is_raised(inputs, words):
    with pytest.raises(ConfigurationError, match=words) as error:
        trace(Model(), inputs)

    assert error.value.remedy.startswith("Check example_inputs")
    assert error.value.__cause__ is not None


def interrupt(_numbers):
    raise KeyboardInterrupt


def interrupt_in_a_mode(numbers):
    """Raise an interrupt while torch has temporarily removed a mode."""
    watching = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    if not watching:
        return numbers
    watching[-1].__enter__()
    raise KeyboardInterrupt


@pytest.mark.parametrize("function", [interrupt, interrupt_in_a_mode])
def test_interrupt_removes_hooks_and_modes(function):
    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        trace(Calling(function))

    assert torch.equal(torch.get_rng_state(), before)
    assert len(nn.modules.module._global_forward_hooks) == 0
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
    assert torch.backends.mha.get_fastpath_enabled()


@dataclass
class Output:
    """A custom output class of a model."""

    name: str
    logits: torch.Tensor


@pytest.mark.parametrize(
    "function",
    [
        lambda numbers: Output("a note", numbers * 2),
        lambda numbers: {"answers": [Output("a note", numbers * 2)]},
        torch.fft.fft,
    ],
    ids=["dataclass", "nested", "complex"],
)
def test_custom_output_is_trained(function):
    model = nn.Sequential(nn.Linear(4, 4), Calling(function, weight=False))
    report = trace(model)

    assert (report.notes, get_phases(report)) == ((), PHASES)


def test_training_is_traced_inside_inference_mode():
    with torch.inference_mode():
        made_there = Model()
        report = trace(made_there)

    assert report == trace(Model())


def make_nested(layout):
    """Return rows of two lengths as a nested tensor."""
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout)


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
def test_sparse_and_nested_tensors_have_unknown_support():
    cases = [
        (torch.sparse.mm, torch.eye(4).to_sparse(), "aten::_sparse_mm"),
        (torch.matmul, torch.eye(4).to_sparse_csr(), "aten::matmul"),
        (lambda nested, _square: nested * 2, make_nested(torch.strided), "aten::mul.Tensor"),
        (lambda nested, _square: nested * 2, make_nested(torch.jagged), "aten::mul.Tensor"),
    ]
    for function, made, operator in cases:
        report = trace(Calling(function, weight=False), (made, torch.ones(4, 4)), training=False)
        assert ("sparse and nested tensors", operator) in get_limitations(report), operator
        assert operator not in report.operators


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Model().requires_grad_(False), "no parameter of the model requires gradients"),
        (nn.Sequential(nn.Linear(4, 2), Calling(torch.zeros_like, weight=False)), "depends on the parameters"),
    ],
    ids=["frozen", "constant"],
)
def test_model_without_training_step_has_a_note(model, words):
    report = trace(model)
    (note,) = report.notes

    assert words in note
    assert note in str(report)
    assert get_phases(report) <= {"inference", "forward"}


def test_model_that_computes_gradients_is_traced():
    """Inference mode does not support gradients, so the trace must run without it."""

    def slope(numbers):
        with torch.enable_grad():
            numbers = numbers.detach().requires_grad_()
            return torch.autograd.grad(numbers.exp().sum(), numbers)[0]

    assert count_modules(trace(Calling(slope)), "aten::exp") == {"(Calling)": 1}


def test_composite_operators_are_decomposed():
    report = trace(Calling(lambda numbers: torch.copysign(numbers, -2.0)), training=False)

    assert count_modules(report, "aten::copysign.Scalar") == {"(Calling)": 1}
    assert count_modules(report, "aten::copysign.Tensor") == {"(Calling)": 1}


@pytest.mark.parametrize(
    ("layer", "called"),
    [
        (nn.Upsample(scale_factor=2, mode="bilinear"), ("aten::upsample_bilinear2d",)),
        (nn.Sequential(nn.Conv2d(2, 2, 1), nn.Dropout()), ("aten::convolution",)),
    ],
    ids=["resized", "dropout"],
)
def test_python_decompositions_are_not_used(layer, called):
    """Torch has Python kernels for compilers, which MPS does not call."""
    assert trace(layer, torch.ones(1, 2, 6, 6), training=False).operators == called


def test_transformer_fast_path_is_disabled_in_trace():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    report = trace(layer, torch.ones(1, 3, 8))

    assert "aten::_transformer_encoder_layer_fwd" not in report.operators
    assert torch.backends.mha.get_fastpath_enabled()


class Recurrent(nn.Module):
    """An LSTM that returns only its outputs."""

    def __init__(self, **settings):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, **settings)

    def forward(self, numbers):
        """Return the outputs of the LSTM."""
        return self.lstm(numbers)[0]


def make_attention(dropout):
    """Return a self-attention function."""
    return lambda numbers: functional.scaled_dot_product_attention(*[numbers[None, None]] * 3, dropout_p=dropout)


PICTURE = torch.ones(1, 2, 6, 6)
ODD_SIZES = {("adaptive pooling to sizes that do not divide the input", "aten::_adaptive_avg_pool2d")}
DROPOUT = {("attention with dropout but without gradients", "scaled_dot_product_attention")}


def integer_linear(numbers):
    return functional.linear(numbers.long(), torch.ones(2, 4).long())


def integer_convolution(picture):
    return functional.conv2d(picture.long(), torch.ones(1, 2, 2, 2).long())


def many_dimensions(numbers):
    return numbers.reshape([1] * 16 + [12]).reshape(12)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize(
    ("model", "inputs", "names"),
    [
        (Recurrent(proj_size=2), NUMBERS, {("LSTM with a projection", "lstm")}),
        (Recurrent(), NUMBERS, set()),
        (Recurrent(num_layers=2, bidirectional=True), NUMBERS, set()),
        (nn.AdaptiveAvgPool2d(4), PICTURE, ODD_SIZES),
        (nn.AdaptiveAvgPool2d((3, 2)), PICTURE, set()),
        (nn.AdaptiveAvgPool2d(12), PICTURE, set()),
        (nn.AdaptiveAvgPool2d((3, 12)), PICTURE, ODD_SIZES),
        (nn.AdaptiveAvgPool1d(4), PICTURE[0], ODD_SIZES),
        (nn.AdaptiveMaxPool2d(4), PICTURE, set()),
        (Calling(make_attention(0.1)), NUMBERS, DROPOUT),
        (Calling(make_attention(0.0)), NUMBERS, set()),
        (Calling(integer_linear), NUMBERS, {("integer linear layer", "linear")}),
        (Calling(lambda numbers: functional.linear(weight=torch.ones(2, 4), input=numbers)), NUMBERS, set()),
        (Calling(integer_convolution), PICTURE, {("integer convolution", "aten::convolution")}),
        (Calling(many_dimensions), NUMBERS, {("more than 16 dimensions", "aten::view")}),
    ],
)
def test_limitations(model, inputs, names):
    assert get_limitations(trace(model, inputs)) == names


def test_too_many_elements_may_be_incorrect():
    wide = Calling(lambda numbers: numbers[:1, :1].expand(2**16, 2**15 + 1)[:1, :1])
    report = trace(wide, training=False)

    assert {row.verdict for row in report.rows if row.limitation} == {"may be incorrect"}
    assert report.unsupported == ()
    assert "Possibly incorrect on MPS: more than 2**31 elements." in report.verdict


class Doubled(nn.Module):
    """Model with a float64 buffer in a submodule."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.register_buffer("scale", torch.ones(4, dtype=torch.float64))

    def forward(self, numbers):
        """Return a loss."""
        return (self.inner(numbers) * self.inner.scale).sum() + numbers.sum()


@pytest.mark.parametrize(
    ("model", "inputs", "names"),
    [
        (Doubled(), NUMBERS, {"buffer scale"}),
        (
            nn.Linear(4, 2).double(),
            NUMBERS.double(),
            {"parameter weight", "parameter bias", "example input argument 0"},
        ),
        (Calling(lambda numbers: numbers.double() * 2 + 1), NUMBERS, {"aten::_to_copy"}),
        (Calling(lambda numbers: numbers * 2.5 + 1), NUMBERS, set()),
        (Calling(lambda numbers: numbers * torch.tensor(2.5, dtype=torch.float64)), NUMBERS, set()),
        (Calling(torch.linalg.pinv), NUMBERS, set()),
    ],
)
def test_float64_is_recorded_where_it_starts(model, inputs, names):
    report = trace(model, inputs)

    assert {operator for name, operator in get_limitations(report) if name == "float64"} == names


def test_copy_model_has_separate_tensors():
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2), "norm": nn.BatchNorm1d(2)})
    model["second"].weight = model["first"].weight
    model["second"].bias.requires_grad_(False)
    model["first"](torch.ones(1, 2)).sum().backward()
    for dtype in (None, torch.float64):
        copied = copy_model(model, dtype=dtype)

        assert copied["second"].weight is copied["first"].weight
        assert copied["first"].weight.data_ptr() != model["first"].weight.data_ptr()
        assert all(parameter.grad is None for parameter in copied.parameters())
        assert not copied["second"].bias.requires_grad
        assert torch.equal(copied["first"].bias.float(), model["first"].bias)
        assert {parameter.dtype for parameter in copied.parameters()} == {dtype or torch.float32}
        assert copied["norm"].num_batches_tracked.dtype == torch.int64


def test_forecast_rejects_models_that_cannot_be_copied():
    model = nn.Linear(4, 2)
    model.kept = model(NUMBERS)  # With a graph.
    endless = nn.Linear(4, 2)
    endless.add_module("itself", endless)
    for made, inputs, words in (
        (model, NUMBERS, "Linear cannot be copied: Only Tensors created explicitly by the user"),
        (endless, NUMBERS, "Linear cannot be copied: "),
        (nn.Linear(4, 2, device="meta"), NUMBERS, "device meta"),
        (nn.Linear(4, 2), torch.ones(3, 4, device="meta"), "device meta"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            trace(made, inputs)


def test_lazy_model_is_traced_and_stays_lazy():
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    report = trace(model)

    assert count_modules(report, "aten::linear") == {"0 (Linear)": 1}
    assert get_phases(report) == PHASES
    assert isinstance(model[0].weight, nn.UninitializedParameter)


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated. Please switch to `torch.compile` or `torch.export`.:DeprecationWarning"
)
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks on modules:UserWarning")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_model_is_traced_as_inner_module(backend):
    report = trace(torch.compile(Model(), backend=backend), training=False)
    part = trace(nn.Sequential(torch.compile(Block(), backend=backend)), training=False)

    assert count_modules(report, "aten::gelu") == {"blocks.0 (Block)": 1, "blocks.1 (Block)": 1}
    assert count_modules(part, "aten::linear") == {"0._orig_mod.inner (Linear)": 1}


@pytest.mark.filterwarnings(
    *(
        f"ignore:`torch.jit.{name}` is deprecated. Please switch to `torch.compile` or `torch.export`.:DeprecationWarning"
        for name in ("trace", "trace_method")
    )
)
def test_torchscript_model_is_traced():
    report = trace(torch.jit.trace(nn.Sequential(nn.Linear(4, 2), nn.GELU()), NUMBERS), NUMBERS, training=True)

    assert get_phases(report) == PHASES


def test_model_on_another_device_is_traced_on_the_cpu(second_device):
    model = Model().to(second_device)

    assert trace(model) == trace(Model())
    assert {str(parameter.device) for parameter in model.parameters()} == {second_device}


def get_model_inputs(inputs):
    """Return the arguments that a model receives for example inputs, positional ones by index."""
    given: dict[str, Any] = {}
    model = nn.Identity()
    model.forward = lambda *args, **kwargs: given.update(enumerate(args), **kwargs)
    trace(model, inputs, training=False)
    return given


@pytest.mark.parametrize(
    ("inputs", "shapes"),
    [
        (torch.ones(2), {0: (2,)}),
        ((torch.ones(2), torch.ones(3)), {0: (2,), 1: (3,)}),
        ([torch.ones(2), torch.ones(3)], {0: (2,), 1: (3,)}),
        ([[1, 2], [3, 4]], {0: (2, 2)}),
        ([1, 2], {0: (1, 2)}),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]}, {"input_ids": (1, 3), "attention_mask": (1, 3)}),
        ({"input_ids": [[1, 2], [3, 4]], "labels": [0, 1]}, {"input_ids": (2, 2), "labels": (2,)}),
        ({"numbers": np.ones((2, 2))}, {"numbers": (2, 2)}),
    ],
)
def test_example_inputs_become_tensors(inputs, shapes):
    assert {name: tuple(tensor.shape) for name, tensor in get_model_inputs(inputs).items()} == shapes


def test_other_inputs_are_passed_unchanged():
    given = get_model_inputs(
        {"numbers": torch.ones(2), "return_dict": True, "mask": None, "kept": (torch.ones(1), "text")}
    )

    assert (given["return_dict"], given["mask"], given["kept"][1]) == (True, None, "text")


@pytest.mark.parametrize("inputs", ["a note", 5, {}, {"text": "a note"}, (), [[1], [2, 3]], {"input_ids": ["a note"]}])
def test_inputs_without_tensors_are_rejected_without_quoting(inputs):
    with pytest.raises(ConfigurationError) as error:
        trace(nn.ReLU(), inputs)
    assert "a note" not in str(error.value)
