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
    """A linear layer with dropout, and a function of its own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, numbers):
        """Return the activations."""
        return functional.gelu(self.dropout(self.inner(numbers)))


class Model(nn.Module):
    """Two blocks and batch normalisation, which has buffers."""

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
    """A model that calls a function with its input, and has a weight to train."""

    def __init__(self, function, weight=True):
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(1)) if weight else None

    def forward(self, *tensors):
        """Return what the function returns, in a loss where there is a weight."""
        made = self.function(*tensors)
        return made if self.scale is None else made.float().sum() * self.scale


def places_of(told, operator, phase):
    """Return the modules in which an operator is called in a phase, with how often."""
    return {str(row.module_location): row.count for row in told.rows if (row.operator, row.phase) == (operator, phase)}


def phases_of(told):
    """Return the phases in which anything was called."""
    return {row.phase for row in told.rows}


def refused(told):
    """Return what is refused, with where that was seen."""
    return {(row.limitation, row.operator) for row in told.rows if row.limitation}


def test_training_step_by_module_and_phase():
    """Each operator counts in the module whose forward called it; backward pass and optimizer have no module."""
    told = nb.runbook.forecast(Model(), NUMBERS, training=True)

    assert places_of(told, "aten::linear", "inference") == {"blocks.0.inner (Linear)": 1, "blocks.1.inner (Linear)": 1}
    assert places_of(told, "aten::gelu", "forward") == {"blocks.0 (Block)": 1, "blocks.1 (Block)": 1}
    assert places_of(told, "aten::gelu_backward", "backward") == {"": 2}
    assert places_of(told, "aten::linalg_vector_norm", "optimizer")
    assert phases_of(told) == PHASES
    assert not [operator for operator in told.operators if "_foreach_" in operator]


def state_of(model):
    """Return everything of a model that a trace could change."""
    tensors = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    modes = [module.training for module in model.modules()]
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    every = [len(getattr(nn.modules.module, f"_global_forward_{kind}")) for kind in ("hooks", "pre_hooks")]
    numbers = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002 - as below
    return [*tensors, *gradients, *modes, *hooks, *every, *numbers]


def draw(*_args):
    """Draw random numbers of all kinds."""
    random.random()
    np.random.rand()  # noqa: NPY002 - as below
    torch.rand(1)


@pytest.mark.parametrize(("inputs", "fails"), [(NUMBERS, False), (torch.ones(3, 5), True)])
def test_model_and_random_numbers_stay_as_they_are(inputs, fails):
    model = Model()
    kept = inputs.clone()
    model.blocks[1].eval()
    model(NUMBERS).sum().backward()
    model.register_forward_pre_hook(draw)
    before = state_of(model)
    with pytest.raises(ConfigurationError) if fails else contextlib.nullcontext():
        nb.runbook.forecast(model, inputs, training=True)

    assert torch.equal(inputs, kept)
    for now, then in zip(state_of(model), before, strict=True):
        assert torch.equal(now, then) if torch.is_tensor(now) else now == then


def test_inputs_that_a_model_changes_stay_as_they_are():
    """A model that writes into its input writes into a copy, and every run begins with the same."""
    numbers = torch.ones(3)
    nb.runbook.forecast(Calling(lambda given: given.add_(1)), numbers, training=True)

    assert torch.equal(numbers, torch.ones(3))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (torch.ones(3, 5), "forward pass of Model failed on the CPU: RuntimeError: mat1 and mat2"),
        ({"numbers": NUMBERS, "labels": NUMBERS}, "forward pass of Model failed on the CPU: TypeError: "),
        (torch.ones(1, 4), "training step of Model failed on the CPU: ValueError: Expected more than 1"),
    ],
)
def test_error_of_the_model_itself_is_told(inputs, words):
    with pytest.raises(ConfigurationError, match=words) as error:
        nb.runbook.forecast(Model(), inputs, training=True)

    assert error.value.remedy.startswith("Check example_inputs")
    assert error.value.__cause__ is not None


def interrupt(_numbers):
    raise KeyboardInterrupt


def interrupt_in_a_mode(numbers):
    """Interrupt while torch has a mode half taken away."""
    watching = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    if not watching:
        return numbers
    watching[-1].__enter__()
    raise KeyboardInterrupt


@pytest.mark.parametrize("function", [interrupt, interrupt_in_a_mode])
def test_interrupt_leaves_no_hook_and_no_mode_behind(function):
    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        nb.runbook.forecast(Calling(function), NUMBERS, training=True)

    assert torch.equal(torch.get_rng_state(), before)
    assert len(nn.modules.module._global_forward_hooks) == 0
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
    assert torch.backends.mha.get_fastpath_enabled()


@dataclass
class Answer:
    """What a model returns in a class of its own."""

    name: str
    logits: torch.Tensor


@pytest.mark.parametrize(
    "function",
    [
        lambda numbers: Answer("a note", numbers * 2),
        lambda numbers: {"answers": [Answer("a note", numbers * 2)]},
        torch.fft.fft,
    ],
    ids=["dataclass", "nested", "complex"],
)
def test_output_is_trained(function):
    model = nn.Sequential(nn.Linear(4, 4), Calling(function, weight=False))
    told = nb.runbook.forecast(model, NUMBERS, training=True)

    assert (told.notes, phases_of(told)) == ((), PHASES)


def test_training_step_inside_of_inference_mode():
    """A trace that is asked for in inference mode has its training step, also of a model that was made there."""
    with torch.inference_mode():
        made_there = Model()
        told = nb.runbook.forecast(made_there, NUMBERS, training=True)

    assert told == nb.runbook.forecast(Model(), NUMBERS, training=True)


def nested(layout):
    """Return rows of two lengths as one tensor."""
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout)


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
def test_sparse_and_nested_tensors():
    """Sparse and nested tensors are computed as they are; whether MPS has an operator for them is not known."""
    cases = [
        (torch.sparse.mm, torch.eye(4).to_sparse(), "aten::_sparse_mm"),
        (torch.matmul, torch.eye(4).to_sparse_csr(), "aten::matmul"),
        (lambda nested, _square: nested * 2, nested(torch.strided), "aten::mul.Tensor"),
        (lambda nested, _square: nested * 2, nested(torch.jagged), "aten::mul.Tensor"),
    ]
    for function, made, operator in cases:
        told = nb.runbook.forecast(Calling(function, weight=False), (made, torch.ones(4, 4)), training=False)
        assert ("sparse and nested tensors", operator) in refused(told), operator
        assert operator not in told.operators


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Model().requires_grad_(False), "no parameter of the model requires gradients"),
        (nn.Sequential(nn.Linear(4, 2), Calling(torch.zeros_like, weight=False)), "depends on the parameters"),
    ],
    ids=["frozen", "constant"],
)
def test_model_that_cannot_be_trained_has_a_note(model, words):
    told = nb.runbook.forecast(model, NUMBERS, training=True)
    (note,) = told.notes

    assert words in note
    assert note in str(told)
    assert phases_of(told) <= {"inference", "forward"}


def test_model_that_needs_gradients_of_its_own():
    """A model that computes gradients in its forward pass is traced without inference mode, which forbids that."""

    def slope(numbers):
        with torch.enable_grad():
            numbers = numbers.detach().requires_grad_()
            return torch.autograd.grad(numbers.exp().sum(), numbers)[0]

    told = nb.runbook.forecast(Calling(slope), NUMBERS, training=True)

    assert places_of(told, "aten::exp", "inference") == {"(Calling)": 1}


def test_composite_operators_are_taken_apart():
    """An operator that is made of others on MPS shows its parts, and numbers inside of it do no harm."""
    told = nb.runbook.forecast(Calling(lambda numbers: torch.copysign(numbers, -2.0)), NUMBERS, training=False)

    assert places_of(told, "aten::copysign.Scalar", "inference") == {"(Calling)": 1}
    assert places_of(told, "aten::copysign.Tensor", "inference") == {"(Calling)": 1}


@pytest.mark.parametrize(
    ("layer", "called"),
    [
        (nn.Upsample(scale_factor=2, mode="bilinear"), ("aten::upsample_bilinear2d",)),
        (nn.Sequential(nn.Conv2d(2, 2, 1), nn.Dropout()), ("aten::convolution",)),
    ],
    ids=["resized", "dropout"],
)
def test_inference_calls_what_mps_calls(layer, called):
    """Where torch has a second kernel in Python, for compilers, it is not the one that is taken: MPS does not call it."""
    assert nb.runbook.forecast(layer, torch.ones(1, 2, 6, 6)).operators == called


def test_transformer_layer_takes_the_path_that_mps_takes():
    """Torch's fast path for Transformer layers, which MPS does not have, is not taken; it is on again afterwards."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    told = nb.runbook.forecast(layer, torch.ones(1, 3, 8), training=True)

    assert "aten::_transformer_encoder_layer_fwd" not in told.operators
    assert torch.backends.mha.get_fastpath_enabled()


class Recurrent(nn.Module):
    """An LSTM that returns its outputs only."""

    def __init__(self, **settings):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, **settings)

    def forward(self, numbers):
        """Return the outputs of the LSTM."""
        return self.lstm(numbers)[0]


def attention(dropout):
    """Return attention of a sequence to itself."""
    return lambda numbers: functional.scaled_dot_product_attention(*[numbers[None, None]] * 3, dropout_p=dropout)


PICTURE = torch.ones(1, 2, 6, 6)
ODD_SIZES = {("adaptive pooling to sizes that do not divide the input", "aten::_adaptive_avg_pool2d")}
DROPOUT = {("attention with dropout but without gradients", "scaled_dot_product_attention")}


def linear_of_integers(numbers):
    return functional.linear(numbers.long(), torch.ones(2, 4).long())


def convolution_of_integers(picture):
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
        (Calling(attention(0.1)), NUMBERS, DROPOUT),
        (Calling(attention(0.0)), NUMBERS, set()),
        (Calling(linear_of_integers), NUMBERS, {("integer linear layer", "linear")}),
        (Calling(convolution_of_integers), PICTURE, {("integer convolution", "aten::convolution")}),
        (Calling(many_dimensions), NUMBERS, {("more than 16 dimensions", "aten::view")}),
    ],
)
def test_refusals(model, inputs, names):
    assert refused(nb.runbook.forecast(model, inputs, training=True)) == names


def test_too_many_elements_may_be_wrong_and_are_no_refusal():
    wide = Calling(lambda numbers: numbers[:1, :1].expand(2**16, 2**15 + 1)[:1, :1])
    told = nb.runbook.forecast(wide, NUMBERS, training=False)

    assert {row.verdict for row in told.rows if row.limitation} == {"may be incorrect"}
    assert told.unsupported == ()
    assert "Possibly incorrect on MPS: more than 2**31 elements." in told.verdict


class Doubled(nn.Module):
    """A model with a float64 buffer, and one that is too."""

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
def test_float64_is_told_only_where_it_begins(model, inputs, names):
    told = nb.runbook.forecast(model, inputs, training=True)

    assert {operator for name, operator in refused(told) if name == "float64"} == names


def test_copy_is_on_the_cpu_and_shares_nothing():
    """A copy of a model has its own tensors, ties those that are tied, and has no gradients; it may have another type."""
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
        assert {one.dtype for one in copied.parameters()} == {dtype or torch.float32}
        assert copied["norm"].num_batches_tracked.dtype == torch.int64


def test_model_with_a_graph_or_itself_or_no_memory_is_refused():
    model = nn.Linear(4, 2)
    model.kept = model(NUMBERS)  # With a graph.
    endless = nn.Linear(4, 2)
    endless.add_module("itself", endless)
    meta = torch.ones(3, 4, device="meta")
    for made, inputs, words in (
        (model, NUMBERS, "Linear cannot be copied: Only Tensors created explicitly by the user"),
        (endless, NUMBERS, "Linear cannot be copied: "),
        (nn.Linear(4, 2, device="meta"), NUMBERS, "device meta"),
        (nn.Linear(4, 2), meta, "device meta"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            nb.runbook.forecast(made, inputs, training=True)


def test_lazy_model_is_traced():
    """A model whose weights get their shapes in the first pass is traced, and stays without shapes."""
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    told = nb.runbook.forecast(model, NUMBERS, training=True)

    assert places_of(told, "aten::linear", "inference") == {"0 (Linear)": 1}
    assert phases_of(told) == PHASES
    assert isinstance(model[0].weight, nn.UninitializedParameter)


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated. Please switch to `torch.compile` or `torch.export`.:DeprecationWarning"
)
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks on modules:UserWarning")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_model_is_traced_as_what_it_was_made_of(backend):
    """Of what torch.compile made, a model or a part of one, the inside is traced."""
    told = nb.runbook.forecast(torch.compile(Model(), backend=backend), NUMBERS, training=False)
    part = nb.runbook.forecast(nn.Sequential(torch.compile(Block(), backend=backend)), NUMBERS, training=False)

    assert places_of(told, "aten::gelu", "inference") == {"blocks.0 (Block)": 1, "blocks.1 (Block)": 1}
    assert places_of(part, "aten::linear", "inference") == {"0._orig_mod.inner (Linear)": 1}


@pytest.mark.filterwarnings(
    *(
        f"ignore:`torch.jit.{name}` is deprecated. Please switch to `torch.compile` or `torch.export`.:DeprecationWarning"
        for name in ("trace", "trace_method")
    )
)
def test_model_of_torchscript_is_traced():
    """A model of TorchScript is traced, and its training step too."""
    told = nb.runbook.forecast(
        torch.jit.trace(nn.Sequential(nn.Linear(4, 2), nn.GELU()), NUMBERS), NUMBERS, training=True
    )

    assert phases_of(told) == PHASES


def test_model_on_another_device_is_traced_on_the_cpu(second_device):
    """A model on any device is traced from a copy on the CPU, and stays where it is."""
    model = Model().to(second_device)

    assert nb.runbook.forecast(model, NUMBERS, training=True) == nb.runbook.forecast(Model(), NUMBERS, training=True)
    assert {str(parameter.device) for parameter in model.parameters()} == {second_device}


def given_to_a_model(inputs):
    """Return what a model is called with for example inputs, those without a name by their number."""
    given: dict[str, Any] = {}
    model = nn.Identity()
    model.forward = lambda *args, **kwargs: given.update(enumerate(args), **kwargs)
    nb.runbook.forecast(model, inputs, training=False)
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
    assert {name: tuple(tensor.shape) for name, tensor in given_to_a_model(inputs).items()} == shapes


def test_other_inputs_stay_as_they_are():
    given = given_to_a_model(
        {"numbers": torch.ones(2), "return_dict": True, "mask": None, "kept": (torch.ones(1), "text")}
    )

    assert (given["return_dict"], given["mask"], given["kept"][1]) == (True, None, "text")


@pytest.mark.parametrize("inputs", ["a note", 5, {}, {"text": "a note"}, (), [[1], [2, 3]], {"input_ids": ["a note"]}])
def test_inputs_without_a_tensor_are_refused_unseen(inputs):
    with pytest.raises(ConfigurationError) as error:
        nb.runbook.forecast(nn.ReLU(), inputs, training=True)
    assert "a note" not in str(error.value)
