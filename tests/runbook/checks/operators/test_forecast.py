"""Forecast of the operators of a model that fall back from MPS to the CPU."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import openmed_nb as nb
from openmed_nb.devices.backend import parse_release
from openmed_nb.errors import ConfigurationError, UnknownModelError
from openmed_nb.runbook import forecast
from openmed_nb.runbook.checks.forecast import (
    ALWAYS_ON_CPU,
    COMPOSITE,
    EXAMPLE_SENTENCES,
    FALLS_BACK,
    NATIVE,
    TABLE_FILE,
    UNKNOWN,
    Forecast,
    OperatorTable,
    _read_table,
    build_rows,
    operator_table,
)
from openmed_nb.simulation.operators import ALWAYS_ON_CPU as FORCED_IN_SIMULATION
from openmed_nb.simulation.operators import UNSUPPORTED

RELEASE = parse_release(torch.__version__)[:2]
RECORDED = Path(__file__).parents[3] / "recorded"
NUMBERS = torch.arange(12.0).reshape(3, 4) / 7


@pytest.fixture(scope="module")
def forecast_models(helper):
    """The module with small models of several architectures."""
    return helper(Path(__file__).with_name("forecast_models.py"))


KINDS = ("bert", "cnn", "bi-lstm")
OTHERS = ("distilbert", "electra", "roberta", "xlm-roberta", "deberta-v2", "modernbert", "longformer", "vit")


@pytest.mark.parametrize("name", [*KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_common_models_run_on_mps(forecast_models, name):
    model, inputs = forecast_models.MODELS[name]()
    report = forecast(model, inputs)

    assert report.verdict == f"All {len(report.operators)} operators run on MPS."
    assert (report.problems, report.exit_code) == ((), 0)


class Values(nn.Module):
    """Module with normal quantiles."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, rows):
        """Return the sum of the scores of numbers."""
        return torch.special.ndtri(torch.sigmoid(self.inner(rows))).sum()


class Odd(nn.Module):
    """Model with operators that fall back."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 3, max_norm=1.0)
        self.values = nn.ModuleList([Values(), Values()])

    def forward(self, ids):
        """Return a loss."""
        words = self.words(ids)
        put = torch.zeros(3).put_(torch.tensor([1]), words[0, :1])
        return words.mode(0).values.sum() + put.sum() + sum(values(words) for values in self.values)


@pytest.fixture(scope="module")
def odd():
    """The forecast of a model with fallbacks."""
    return forecast(Odd(), torch.tensor([0, 1, 2]))


def count_modules(report, operator):
    """Return the number of calls of an operator by module."""
    return {row.module: row.count for row in report.rows if row.operator == operator}


def test_cpu_operators_are_named_as_in_messages_of_mps(odd):
    names = "aten::embedding_renorm_, aten::mode, aten::put_, aten::special_ndtri.out"

    assert odd.cpu_operators == tuple(names.split(", "))
    assert odd.verdict == f"4 of {len(odd.operators)} operators fall back to the CPU: {names}."
    assert odd.exit_code == 1


@pytest.mark.parametrize(
    ("operator", "verdict", "modules", "remedy"),
    [
        ("aten::special_ndtri.out", "falls back to the CPU", {"values.0 (Values)", "values.1 (Values)"}, "Use a diff"),
        ("aten::mode", "falls back to the CPU", {"(Odd)"}, "Use a different operator"),
        ("aten::embedding_renorm_", "always on the CPU", {"words (Embedding)"}, "Remove max_norm"),
        ("aten::linear", "native", {"values.0.inner (Linear)", "values.1.inner (Linear)"}, ""),
    ],
)
def test_row_of_an_operator(odd, operator, verdict, modules, remedy):
    rows = [row for row in odd.rows if row.operator == operator]

    assert {(row.verdict, row.count) for row in rows} == {(verdict, 1)}
    assert {row.module for row in rows} == modules
    assert all(row.remedy.startswith(remedy) and bool(row.remedy) == bool(remedy) for row in rows)


def test_report_lists_only_operators_with_problems(odd):
    rows = odd.to_report().tables[0].rows

    assert ("aten::mode", "falls back to the CPU", "(Odd)", "1") in {row[:4] for row in rows}
    assert {row[0] for row in rows} == set(odd.cpu_operators)


class Calling(nn.Module):
    """Model that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        """Return the result of the function."""
        return self.function(*tensors)


def test_name_and_pipeline_need_no_example_inputs(keyword_model):
    pipe = nb.load_pipeline(str(keyword_model), device="cpu")
    report = forecast(pipe)

    assert forecast("bundled") == forecast()
    assert report == forecast(keyword_model)
    assert report.model == "BertForTokenClassification"
    assert report.verdict == f"All {len(report.operators)} operators run on MPS."
    words = ("Patient", "diabetes", "asthma")
    assert [word for word in words if word not in " ".join(EXAMPLE_SENTENCES)] == []
    assert [word for word in words if word in f"{report}{report.to_dict()}"] == []


@pytest.mark.parametrize(
    ("model", "inputs", "error", "words"),
    [
        (5, None, ConfigurationError, "int is not a model"),
        (nn.ReLU(), None, ConfigurationError, "ReLU requires example inputs"),
        ("no_such_model", None, UnknownModelError, "no_such_model"),
        (
            nn.Linear(4, 2),
            torch.ones(3, 5),
            ConfigurationError,
            "forward pass of Linear failed on the CPU: RuntimeError",
        ),
    ],
)
def test_forecast_rejects_invalid_models_and_inputs(model, inputs, error, words):
    with pytest.raises(error, match=words) as caught:
        forecast(model, inputs)
    assert caught.value.remedy


TABLE = OperatorTable("2.13.0", "a list", frozenset({"aten::mm"}), frozenset())


@pytest.mark.parametrize(
    ("operators", "verdict"),
    [
        ([], "No operator falls back to the CPU."),
        (["aten::mm", "aten::t"], "All 2 operators run on MPS."),
        (["aten::mode"], "1 of 1 operator falls back to the CPU: aten::mode."),
        (["aten::take", "aten::mode"], "2 of 2 operators fall back to the CPU: aten::mode, aten::take."),
        (["aten::mm", "my::op"], "No operator falls back to the CPU. Unknown support on MPS: my::op."),
    ],
)
def test_verdict_in_a_sentence(operators, verdict):
    calls = {(operator, ""): 1 for operator in operators}

    assert Forecast("Model", TABLE.torch, TABLE.source, build_rows(calls, TABLE)).verdict == verdict


@pytest.mark.real_computer
def test_model_on_simulated_device_is_traced_on_cpu():
    with nb.simulated_mps(fallback=False) as device:
        model = Values().to("mps")
        allocated = device.allocator.allocated
        report = forecast(model, torch.ones(3, 3, device="mps"))

        assert model.inner.weight.device.type == "mps"
        assert device.allocator.allocated <= allocated + 512
        assert dict(device.fallbacks) == {}
    assert report.simulated
    assert str(report).splitlines()[1].strip() == "MPS is simulated; the forecast is not affected."
    assert report.rows == forecast(Values(), torch.ones(3, 3)).rows


class Model(nn.Module):
    """Two blocks with dropout, and a batch normalization, which has buffers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.GELU()) for _ in range(2)])
        self.norm = nn.BatchNorm1d(4)

    def forward(self, numbers):
        """Return the normalized activations of the last block."""
        for block in self.blocks:
            numbers = functional.relu(block(numbers))
        return self.norm(numbers)


def get_state(model):
    """Return the state of a model and of torch that a trace could change."""
    tensors = [tensor.clone() for tensor in (*model.parameters(), *model.buffers(), model.norm.weight.grad)]
    modes = [module.training for module in model.modules()]
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    every = [len(getattr(nn.modules.module, f"_global_forward_{kind}")) for kind in ("hooks", "pre_hooks")]
    return [torch.get_rng_state(), *tensors, *modes, *hooks, *every]


def draw(*_args):
    """Draw a random number."""
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
        forecast(model, inputs)

    assert torch.equal(inputs, kept)
    for now, then in zip(get_state(model), before, strict=True):
        assert torch.equal(now, then) if torch.is_tensor(now) else now == then


def interrupt(_numbers):
    raise KeyboardInterrupt


def test_interrupt_removes_modes():
    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        forecast(Calling(interrupt), NUMBERS)

    assert torch.equal(torch.get_rng_state(), before)
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
    assert torch.backends.mha.get_fastpath_enabled()


def test_model_that_computes_gradients_is_traced():
    """Inference mode does not support gradients, so the trace must run without it."""

    def slope(numbers):
        with torch.enable_grad():
            numbers = numbers.detach().requires_grad_()
            return torch.autograd.grad(numbers.exp().sum(), numbers)[0]

    with torch.inference_mode():
        assert count_modules(forecast(Calling(slope), NUMBERS), "aten::exp") == {"(Calling)": 1}


def test_composite_operators_are_decomposed():
    report = forecast(Calling(lambda numbers: torch.copysign(numbers, -2.0)), NUMBERS)

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
    assert forecast(layer, torch.ones(1, 2, 6, 6)).operators == called


def test_transformer_fast_path_is_disabled_in_trace():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    assert "aten::_transformer_encoder_layer_fwd" not in forecast(layer, torch.ones(1, 3, 8)).operators
    assert torch.backends.mha.get_fastpath_enabled()


def test_lazy_model_is_traced_and_stays_lazy():
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())

    assert count_modules(forecast(model, NUMBERS), "aten::linear") == {"0 (Linear)": 1}
    assert isinstance(model[0].weight, nn.UninitializedParameter)


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated. Please switch to `torch.compile` or `torch.export`.:DeprecationWarning"
)
def test_compiled_model_is_traced_as_inner_module():
    report = forecast(torch.compile(Model(), backend="eager"), NUMBERS)

    assert count_modules(report, "aten::gelu") == {"blocks.0.2 (GELU)": 1, "blocks.1.2 (GELU)": 1}


@pytest.mark.parametrize(
    ("inputs", "shapes"),
    [
        ((torch.ones(2), torch.ones(3)), {0: (2,), 1: (3,)}),
        (
            {"numbers": torch.ones(2, 2), "return_dict": True, "mask": None},
            {"numbers": (2, 2), "return_dict": True, "mask": None},
        ),
    ],
)
def test_example_inputs_become_arguments(inputs, shapes):
    """Positional arguments have their index. Values that are no tensors are passed unchanged."""
    given: dict[str, Any] = {}
    model = nn.Identity()
    model.forward = lambda *args, **kwargs: given.update(enumerate(args), **kwargs)
    forecast(model, inputs)

    assert {name: tuple(value.shape) if torch.is_tensor(value) else value for name, value in given.items()} == shapes


@pytest.mark.parametrize("inputs", ["a note", 5, {}, {"text": "a note"}, (), [[1], [2, 3]], {"input_ids": ["a note"]}])
def test_inputs_without_tensors_are_rejected_without_quoting(inputs):
    with pytest.raises(ConfigurationError) as error:
        forecast(nn.ReLU(), inputs)
    assert "a note" not in str(error.value)


@pytest.mark.parametrize("release", ["2.13", "2.14"])
def test_table_equals_registrations_in_the_binary(release):
    """The other manual registration in the macOS binary raises an error."""
    text = (RECORDED / f"mps_operators_torch_{release.replace('.', '_')}.txt").read_text("utf-8")
    lines = [line for line in text.splitlines() if line.startswith("aten::")]
    stored = json.loads(TABLE_FILE.read_text("utf-8"))[release]

    assert stored["native"] == sorted(line for line in lines if "by hand" not in line)
    assert len(stored["native"]) in (890, 912)
    assert {*stored["always_cpu"], "aten::_slow_conv2d_forward"} == {
        line.partition(" ")[0] for line in lines if "by hand" in line
    }


@pytest.mark.skipif(RELEASE != (2, 13), reason="other releases register other operators")
@pytest.mark.parametrize(
    ("operator", "verdict"),
    [
        ("aten::addmm", NATIVE),
        ("aten::linear", NATIVE),
        ("aten::convolution", NATIVE),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", NATIVE),
        ("aten::linalg_lu_solve.out", NATIVE),  # Registered in Python.
        ("aten::t", COMPOSITE),
        ("aten::matmul", COMPOSITE),
        ("aten::special_ndtri", COMPOSITE),  # It calls the following operator.
        ("aten::special_ndtri.out", FALLS_BACK),
        ("aten::mode", FALLS_BACK),
        ("aten::embedding_renorm_", ALWAYS_ON_CPU),
        ("somebody::operator", UNKNOWN),
    ],
)
def test_classify_operator(operator, verdict):
    assert operator_table().classify(operator) == verdict


@pytest.mark.skipif(RELEASE != (2, 13), reason="the simulated device has the operators of torch 2.13")
def test_missing_operators_of_simulated_device_fall_back():
    operators = operator_table()

    assert {operators.classify(name) for name in UNSUPPORTED.values()} == {FALLS_BACK}
    assert {operators.classify(operator) for operator in UNSUPPORTED} <= {COMPOSITE, FALLS_BACK}
    assert operators.always_cpu == FORCED_IN_SIMULATION


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.6.0", "2.13"), ("2.13.0+cpu", "2.13"), ("2.14.1", "2.14"), ("2.15.0.dev20261101", "2.14"), ("3.0", "2.14")],
)
def test_nearest_release_is_used(version, release):
    operators = _read_table(version, built=False)

    assert f"torch {release} for macOS" in operators.source
    assert len(operators.native) == {"2.13": 890, "2.14": 912}[release]
    assert operators is _read_table(version, built=False)
