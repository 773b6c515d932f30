"""The origin of the first NaN or infinity is found by repeating a pass, which has no side effects."""

import contextlib
import copy
from typing import get_args

import pytest
import torch
from torch import nn
from transformers import BatchEncoding

from openmed_nb.training.nonfinite import (
    MAX_RECORDED_PASSES,
    ForwardRecorder,
    Kind,
    Origin,
    all_finite,
    find_backward_origin,
    get_gradients,
    get_loss,
    is_finite,
    iter_float_tensors,
    locate_from_gradients,
    replay_pass,
)

NAN = float("nan")
INFINITY = float("inf")


class RootOfZero(nn.Module):
    """Layer with an infinite gradient: the slope of a root at zero."""

    def forward(self, numbers):
        return numbers + (numbers * 0).sqrt()


class Overflow(nn.Module):
    """Layer that overflows float32."""

    def forward(self, numbers):
        return numbers * 1e38 * 1e38


class Network(nn.Module):
    """Sequence of layers with dropout, buffers and a loss."""

    def __init__(self, *layers, loss=lambda numbers: (numbers**2).mean()):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), *layers, nn.Linear(4, 2))
        self.loss = loss

    def forward(self, numbers):
        computed = self.layers(numbers)
        return {"loss": self.loss(computed), "logits": computed}


def record_pass(model, *args, **kwargs):
    """Run a model, and return the recorded pass."""
    recorder = ForwardRecorder("cpu")
    removers = recorder.watch(model)
    model(*args, **kwargs)
    for remove in removers:
        remove()
    return recorder.passes[0]


def make_inputs():
    """Return rows of random numbers."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (Network(), None),
        (Network(Overflow()), Origin("output", "layers.3")),
        (Network(nn.Identity(), Overflow()), Origin("output", "layers.4")),
        (Network(loss=lambda numbers: numbers.mean() / 0), Origin("loss", "")),
        (Network(RootOfZero()), Origin("input gradient", "layers.3")),
        (Network(nn.Sequential(nn.ReLU(), RootOfZero())), Origin("input gradient", "layers.3.1")),
        (Network(loss=lambda numbers: (numbers * 0).sqrt().sum()), Origin("output gradient", "layers.3")),
    ],
    ids=["fine", "forward", "forward, later", "loss", "backward", "backward, inside", "loss, backward"],
)
def test_replay_names_first_layer(model, found):
    assert replay_pass(model.train(), record_pass(model, make_inputs())) == found


def test_replay_checks_inputs_and_weights_first():
    model = Network().train()
    assert replay_pass(model, record_pass(model, make_inputs() * NAN)) == Origin("input", "argument 0")
    assert replay_pass(model, record_pass(model, numbers=make_inputs() * NAN)) == Origin("input", "numbers")
    model.layers[3].weight.data[0, 0] = INFINITY
    assert replay_pass(model, record_pass(model, make_inputs())) == Origin("weight", "layers.3.weight")


def test_replay_names_innermost_layer_of_bert(tagger, make_batch, poison):
    held = record_pass(tagger, **make_batch())
    assert replay_pass(tagger, held) is None
    hook = poison(tagger)
    assert replay_pass(tagger, held) == Origin("output", "bert.encoder.layer.0.output.dense")
    hook.remove()
    weight = tagger.bert.encoder.layer[0].output.dense.weight
    hook = weight.register_hook(lambda gradient: gradient * NAN)
    assert replay_pass(tagger, held) == Origin("weight gradient", "bert.encoder.layer.0.output.dense.weight")
    hook.remove()
    assert replay_pass(tagger, held) is None


@pytest.mark.parametrize("layers", [[], [Overflow()], [RootOfZero()]])
def test_replay_changes_nothing(layers):
    def read_state():
        hooks = [(len(layer._forward_hooks), len(layer._forward_pre_hooks)) for layer in model.modules()]
        gradients = [(weight.grad.clone(), bool(weight._backward_hooks)) for weight in model.parameters()]
        return copy.deepcopy(model.state_dict()), hooks, gradients, model.training, torch.get_rng_state()

    model = Network(*layers).train()
    held = record_pass(model, make_inputs())
    model(make_inputs())["loss"].backward()
    before = read_state()
    replay_pass(model, held)
    torch.testing.assert_close(read_state(), before, rtol=0, atol=0, equal_nan=True)


def test_replay_repeats_dropout():
    model = Network(loss=lambda numbers: numbers.sum() / (model.layers[2].last[0, 0] != 0))
    model.layers[2].register_forward_hook(lambda layer, _args, output: setattr(layer, "last", output.detach()))
    model.train()
    for _ in range(8):
        held = record_pass(model, make_inputs())
        went_wrong = bool(model.layers[2].last[0, 0] == 0)
        assert (replay_pass(model, held) is not None) == went_wrong


def test_replay_uses_autocast_of_pass():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).train()
    model[0].weight.data.fill_(300.0)
    numbers = torch.full((2, 4), 300.0)
    with torch.autocast("cpu", torch.float16):
        held = record_pass(model, numbers)
    assert replay_pass(model, held) == Origin("output", "0")
    assert replay_pass(model, record_pass(model, numbers)) is None


def test_replay_reports_error_of_model():
    model = Network().train()
    held = record_pass(model, make_inputs())
    model.layers[3] = nn.Linear(9, 2)
    found = replay_pass(model, held)
    assert found.kind == "unknown"
    assert "could not be repeated: RuntimeError" in str(found)


ORIGINS = {
    # gradients in order of arrival, finite (+) or not (-) -> origin
    "": None,
    "+ output a, + weight a.weight": None,
    "- output a": "output a",
    "+ output b, - weight b.weight": "weight b.weight",
    "+ output b, - output a, - input b.inner, - input b": "input b",
    "+ output ., - output b, - weight b.weight": "output b",
    "+ output c, - output b, + weight b.weight, - weight a.weight": "output b",
}


@pytest.mark.parametrize(("arrivals", "found"), ORIGINS.items())
def test_find_backward_origin(arrivals, found):
    parts = [arrival.split() for arrival in arrivals.split(", ") if arrival]
    arrived = [(Origin(f"{kind} gradient", "" if name == "." else name), sign == "+") for sign, kind, name in parts]

    assert find_backward_origin(arrived) == (found and Origin(f"{found.split()[0]} gradient", found.split()[1]))


@pytest.mark.parametrize("bad", [NAN, INFINITY, -INFINITY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_all_finite_detects_single_value(bad, dtype):
    gradients = [torch.ones(300, dtype=dtype), torch.full((30, 9), 1000.0, dtype=dtype)]
    assert all_finite(gradients, [torch.tensor(1.0)])
    assert not all_finite(gradients, [torch.tensor(bad)])
    gradients[0][17] = bad
    assert not all_finite(gradients)
    assert not is_finite(gradients)


def test_all_finite_handles_large_and_missing_gradients():
    assert all_finite([torch.full((100,), 60_000.0, dtype=torch.float16)])
    assert all_finite([])
    huge = [torch.full((10,), 3e38)]
    assert not all_finite(huge)
    assert is_finite(huge)


def test_all_finite_handles_sparse_gradients():
    layer = nn.Embedding(10, 3, sparse=True)
    (layer(torch.tensor([1, 1, 4])).sum() * NAN).backward()
    (gradient,) = get_gradients(layer.parameters())
    assert gradient.shape == (3, 3)
    assert not all_finite([gradient])


def test_locate_from_gradients():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    model[0].weight.grad[0, 0] = NAN
    assert locate_from_gradients(model) == Origin("weight gradient", "0.weight")
    for weight in model.parameters():
        weight.grad.fill_(NAN)
    assert locate_from_gradients(model).kind == "unknown"
    assert "the code after the model" in str(locate_from_gradients(model))


@pytest.mark.parametrize("number", [complex(0, NAN), complex(NAN, 0), complex(0, INFINITY)])
def test_all_finite_handles_complex_numbers(number):
    gradient = torch.tensor([1 + 1j, number])
    assert not all_finite([gradient.conj(), torch.ones(2)])
    assert all_finite([gradient[:1], torch.ones(2)])
    assert not is_finite(iter_float_tensors({"numbers": gradient}))


@pytest.mark.filterwarnings("ignore")  # torch warns that several kinds of tensors are prototypes.
def test_iter_float_tensors_handles_tensor_kinds():
    bad = torch.tensor([[1.0, NAN]])
    given = {
        "sparse": bad.to_sparse(),
        "compressed": bad.to_sparse_csr(),
        "nested": torch.nested.nested_tensor([bad[0], bad[0, :1]]),
        "meta": torch.ones(2, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    }
    assert [bool(tensor.isfinite().all()) for tensor in iter_float_tensors(given)] == [False] * 3


@pytest.fixture
def recorder():
    """Recorder that watches the model of a test."""
    return ForwardRecorder("cpu")


@pytest.fixture
def watched(recorder):
    """Network in training whose passes are recorded."""
    model = Network().train()
    recorder.watch(model, ("", "layers"))
    return model


class TestRecorder:
    """Recorded passes."""

    def test_recorder_ignores_evaluation(self, watched, recorder):
        watched.eval()(make_inputs())
        with torch.no_grad():
            watched.train()(make_inputs())
        assert (len(recorder.passes), len(recorder.losses)) == (0, 0)
        watched(make_inputs())
        assert (len(recorder.passes), len(recorder.losses)) == (1, 1)

    def test_recorder_records_failed_pass(self, watched, recorder):
        for numbers in (torch.ones(2, 3), make_inputs()):
            with contextlib.suppress(RuntimeError):
                watched(numbers)
        watched.layers(make_inputs())
        assert [held.module for held in recorder.passes] == ["", "", "layers"]
        assert len(recorder.losses) == 1

    def test_recorder_ignores_pass_stopped_by_hook(self, watched, recorder):
        stopping = watched.register_forward_pre_hook(lambda *_given: 1 / 0, prepend=True)
        with contextlib.suppress(ZeroDivisionError):
            watched(make_inputs())
        stopping.remove()
        watched(make_inputs())
        assert (len(recorder.passes), len(recorder.losses)) == (1, 1)

    def test_recorder_is_bounded(self, watched, recorder):
        for _ in range(MAX_RECORDED_PASSES + 5):
            watched(make_inputs())
        assert len(recorder.passes) == MAX_RECORDED_PASSES

    def test_loss_of_model_outputs(self):
        loss = torch.tensor(2.0)
        logits = torch.zeros(2, 3)
        for output in ({"loss": loss}, (loss, logits), loss):
            assert get_loss(output) is loss
        for output in ({"logits": logits}, (logits,), (), logits, None, {"loss": None}):
            assert get_loss(output) is None


def test_origins_have_description_and_remedy():
    for kind in get_args(Kind):
        found = Origin(kind, "layers.3")
        assert str(found).startswith(("it ", "its ", "the input ", "the weight "))
        assert found.remedy.endswith(".")


class Returns(nn.Module):
    """Layer that returns a BatchEncoding."""

    def forward(self, batch):
        return BatchEncoding({"numbers": batch["numbers"].sqrt()})


class Sum(nn.Module):
    """Layer with a weight that returns a sum."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        return (batch["numbers"] * self.weight).sum()


@pytest.mark.parametrize(("number", "origin"), [(NAN, Origin("input", "argument 0")), (-1.0, Origin("output", "0"))])
def test_replay_supports_batch_encoding(number, origin):
    """A BatchEncoding is a mapping, but not a dict."""
    model = nn.Sequential(Returns(), Sum())
    assert replay_pass(model, record_pass(model, BatchEncoding({"numbers": torch.tensor([number])}))) == origin
