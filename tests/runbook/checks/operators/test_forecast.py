import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import openmed_nb as nb
from openmed_nb._events.activity import IMPORTING
from openmed_nb.devices.backend import parse_release
from openmed_nb.errors import ConfigurationError, UnknownModelError
from openmed_nb.runbook import forecast
from openmed_nb.runbook.checks.operators import table
from openmed_nb.runbook.checks.operators.forecast import EXAMPLE_SENTENCES, MAX_ROWS, Forecast, build_rows
from openmed_nb.runbook.checks.operators.table import (
    DEVICE_SWITCHES,
    FLOAT64,
    NATIVE,
    CallSite,
    ModuleLocation,
    OperatorTable,
    operator_table,
)
from openmed_nb.session import SESSION

RELEASE = parse_release(torch.__version__)[:2]
RECORDED = Path(__file__).parents[3] / "recorded" / f"mps_operators_torch_{'_'.join(map(str, RELEASE))}.txt"
REGISTERED = frozenset(RECORDED.read_text("utf-8").splitlines() if RECORDED.exists() else ())


@pytest.fixture(scope="module")
def forecast_models(helper):
    """The module with small models of several architectures."""
    return helper(Path(__file__).with_name("forecast_models.py"))


KINDS = ("bert", "cnn", "bi-lstm")
OTHERS = ("distilbert", "electra", "roberta", "xlm-roberta", "deberta-v2", "modernbert", "longformer", "vit")


@pytest.mark.parametrize("name", [*KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_common_models_run_on_mps(forecast_models, name):
    """Compared with the registrations in the macOS binary."""
    report = forecast(*forecast_models.MODELS[name](), training=True)

    assert report.verdict == f"All {len(report.operators)} operators run on MPS."
    assert report.problems == ()
    assert {row.phase for row in report.rows} == {"inference", "forward", "backward", "optimizer"}
    if REGISTERED:
        assert report.operators_with(NATIVE) == tuple(filter(is_registered, report.operators))


def is_registered(operator):
    """Return whether the macOS binary of this torch has an operator or its replacement."""
    on_mps = DEVICE_SWITCHES.get(operator, operator)
    return on_mps in REGISTERED or operator_table().delegates.get(on_mps) in REGISTERED or not on_mps


class Values(nn.Module):
    """Module with normal quantiles."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, rows):
        """Return the sum of the scores of numbers."""
        return torch.special.ndtri(torch.sigmoid(self.inner(rows))).sum()


class Odd(nn.Module):
    """Model with operators that fall back, also in the backward pass."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 3, max_norm=1.0)
        self.values = nn.ModuleList([Values(), Values()])

    def forward(self, ids):
        """Return a loss."""
        words = self.words(ids)
        put = torch.zeros(3).put_(torch.tensor([1]), words[0, :1])
        return words.mode(0).values.sum() + put.sum() + sum(values(words) for values in self.values)


IDS = torch.tensor([0, 1, 2])


@pytest.fixture(scope="module")
def odd():
    """The forecast of a model with fallbacks."""
    return forecast(Odd(), IDS, training=True)


def test_cpu_operators_are_named(odd):
    leaving = ("aten::embedding_renorm_", "aten::mode", "aten::put_", "aten::special_ndtri")

    assert set(leaving) <= set(odd.cpu_operators)
    assert (
        f"{len(odd.cpu_operators)} of {len(odd.operators)} operators fall back to the CPU: aten::embedding_renorm_, "
        in odd.verdict
    )
    assert (odd.unsupported, odd.exit_code) == ((), 1)


FELL = "falls back to the CPU"


@pytest.mark.parametrize(
    ("operator", "verdict", "modules", "words"),
    [
        (
            "aten::special_ndtri",
            FELL,
            {"values.0 (Values)", "values.1 (Values)"},
            "MPS names it aten::special_ndtri.out.",
        ),
        ("aten::mode", FELL, {"(Odd)"}, "Use a different operator"),
        ("aten::embedding_renorm_", "always on the CPU", {"words (Embedding)"}, "Remove max_norm"),
        ("aten::linear", "native", {"values.0.inner (Linear)", "values.1.inner (Linear)"}, ""),
    ],
)
def test_row_of_an_operator(odd, operator, verdict, modules, words):
    rows = [row for row in odd.rows if (row.operator, row.phase) == (operator, "inference")]

    assert {(row.verdict, row.count) for row in rows} == {(verdict, 1)}
    assert {str(row.module_location) for row in rows} == modules
    assert all(words in f"{row.reason} {row.remedy}" and bool(row.remedy) == bool(words) for row in rows)


def test_report_combines_phases_of_an_operator(odd):
    (problems, _) = odd.to_report().tables
    (row,) = (row for row in problems.rows if row[0] == "aten::mode")

    assert row[:5] == ("aten::mode", "falls back to the CPU", "(Odd)", "inference, forward", "1, 1")
    assert "aten::linear" not in {row[0] for row in problems.rows}


def test_text_is_the_same_for_every_build():
    for version, shown in (("2.13.0+cpu", "2.13.0"), ("2.13.0", "2.13.0"), ("2.14.0.dev20260710+cu130", "2.14.0")):
        report = Forecast("Model", version, "a list", ())
        assert f"torch {shown}." in str(report)
        assert report.to_dict()["torch"] == version


def test_forecast_to_dict_is_json(odd):
    report = json.loads(json.dumps(odd.to_dict()))

    assert (report["cpu_operators"], report["torch"]) == (list(odd.cpu_operators), torch.__version__)
    assert len(report["rows"]) == len(odd.rows)
    assert list(report["rows"][0]) == [
        "operator",
        "verdict",
        "phase",
        "count",
        "limitation",
        "reason",
        "remedy",
        "module",
        "class",
    ]


class Decomposing(nn.Module):
    """Model with a matrix decomposition."""

    def __init__(self, function):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.function = function

    def forward(self, rows):
        """Return a sum of what the matrix is made of."""
        return self.function(self.inner(rows) + torch.diag(torch.arange(3.0))).sum()


VECTORS = ("aten::linalg_svd", "always on the CPU")
ALONE = ("aten::_linalg_svd", "falls back to the CPU")
SINGULAR = [
    (lambda matrix: torch.linalg.svd(matrix).S, *VECTORS),
    (lambda matrix: torch.linalg.svd(matrix, full_matrices=False).S, *VECTORS),
    (lambda matrix: torch.svd(matrix).S, *VECTORS),
    (lambda matrix: torch.svd_lowrank(matrix, 2)[1], *VECTORS),
    (torch.linalg.pinv, *VECTORS),
    (torch.linalg.svdvals, *ALONE),
    (torch.linalg.cond, *ALONE),
    (lambda matrix: torch.linalg.matrix_norm(matrix, 2), *ALONE),
    (lambda matrix: torch.linalg.matrix_norm(matrix, "nuc"), *ALONE),
    (lambda matrix: torch.svd(matrix, compute_uv=False).S, *ALONE),
]
"""Functions, their operators on the CPU up to torch 2.13, and the classification."""

until_2_13 = pytest.mark.skipif(RELEASE >= (2, 14), reason="from torch 2.14 on, MPS computes singular values itself")


@until_2_13
@pytest.mark.parametrize(("function", "operator", "verdict"), SINGULAR)
def test_singular_value_operators_are_classified(function, operator, verdict):
    report = forecast(Decomposing(function), torch.ones(3, 3), training=True)

    assert {(row.operator, row.verdict, row.phase) for row in report.problems} == {
        (operator, verdict, phase) for phase in ("inference", "forward")
    }


@until_2_13
@pytest.mark.real_computer
@pytest.mark.filterwarnings("ignore:The operator")
def test_simulated_device_agrees_with_forecast():
    for number, (function, operator, _verdict) in enumerate(SINGULAR):
        if function is not torch.linalg.pinv:
            with nb.simulated_mps(fallback=True) as device:
                function((torch.ones(3, 3) + torch.diag(torch.arange(3.0))).to("mps").requires_grad_())
            assert list(device.fallbacks) == [operator_table().named_by_mps(operator)], number


class Attention(nn.Module):
    """Attention with dropout and a frozen projection."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))

    def forward(self, numbers):
        """Return scores."""
        rows = numbers[None, None]
        made = nn.functional.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.5 if self.training else 0.0)
        return self.head(made * self.scale.float())


def test_limitations_are_in_the_verdict():
    report = forecast(Attention(), torch.ones(3, 4), training=True)

    assert report.unsupported == ("attention with dropout but without gradients", "float64")
    assert report.verdict == (
        f"None of {len(report.operators)} operators falls back to the CPU. "
        "Not supported by MPS: attention with dropout but without gradients, float64."
    )
    assert {(row.operator, row.phase) for row in report.problems} == {
        ("scaled_dot_product_attention", "forward"),
        ("buffer scale", "inference"),
    }
    assert all(row.reason and row.remedy for row in report.problems)


def test_training_is_traced_only_on_request():
    report = forecast(Values(), torch.ones(3, 3))

    assert {row.phase for row in report.rows} == {"inference"}
    assert report.cpu_operators == ("aten::special_ndtri",)
    assert report.verdict == f"1 of {len(report.operators)} operators falls back to the CPU: aten::special_ndtri."
    assert "Training was not analyzed" in str(report)


def test_labels_select_the_loss_of_the_model(forecast_models):
    model, inputs = forecast_models.MODELS["bert"]()
    unlabeled = {name: tensor for name, tensor in inputs.items() if name != "labels"}

    assert "aten::nll_loss_backward" in forecast(model, inputs, training=True).operators
    assert "aten::nll_loss_backward" not in forecast(model, unlabeled, training=True).operators


def test_name_and_pipeline_need_no_example_inputs(keyword_model):
    pipe = nb.load_pipeline(str(keyword_model), device="cpu")
    by_name, of_pipe = forecast(keyword_model, training=True), forecast(pipe, training=True)

    assert by_name == of_pipe
    assert of_pipe.model == "BertForTokenClassification"
    assert of_pipe.verdict == f"All {len(of_pipe.operators)} operators run on MPS."
    assert "aten::nll_loss_backward" in of_pipe.operators
    assert pipe.model.training is False
    words = ("Patient", "diabetes", "asthma")
    assert [word for word in words if word not in " ".join(EXAMPLE_SENTENCES)] == []
    assert [word for word in words if word in f"{of_pipe}{of_pipe.to_dict()}"] == []


def test_bundled_model_runs_on_mps():
    report = forecast("bundled")

    assert report == forecast()
    assert report.verdict == f"All {len(report.operators)} operators run on MPS."


def test_progress_is_reported_before_reading_operators():
    """Reading YAML holds the GIL, so the progress must be shown before."""
    operations = []
    table._read_table.cache_clear()
    stop = SESSION.subscribe(lambda event: operations.append(event and event.operation))
    forecast(nn.Linear(2, 2), torch.rand(1, 2))
    forecast(nn.Linear(2, 2), torch.rand(1, 2))
    stop()

    assert operations == [IMPORTING, "Forecasting", None, "Forecasting", None]


@pytest.mark.parametrize(
    ("model", "inputs", "error", "words"),
    [
        (5, None, ConfigurationError, "int is not a model"),
        ({"model": 5}, IDS, ConfigurationError, "dict is not a model"),
        (nn.ReLU(), None, ConfigurationError, "ReLU requires example inputs"),
        ("no_such_model", None, UnknownModelError, "no_such_model"),
    ],
)
def test_forecast_rejects_invalid_model(model, inputs, error, words):
    with pytest.raises(error, match=words):
        forecast(model, inputs, training=True)


def test_traces_are_reproducible(forecast_models):
    model, inputs = forecast_models.MODELS["bert"]()

    assert forecast(model, inputs, training=True) == forecast(model, inputs, training=True)


TABLE = OperatorTable("2.13.0", "a list", frozenset({"aten::mm"}), {}, frozenset())


def forecast_operators(operators, limitations=None):
    """Return the forecast for operators with their number of calls."""
    calls = {CallSite(operator, "forward", ModuleLocation()): count for operator, count in Counter(operators).items()}
    return Forecast("Model", TABLE.torch, TABLE.source, build_rows(calls, limitations or {}, TABLE))


@pytest.mark.parametrize(
    ("operators", "verdict"),
    [
        ([], "No operator falls back to the CPU."),
        (["aten::mm"], "No operator falls back to the CPU."),
        (["aten::mm", "aten::t"], "All 2 operators run on MPS."),
        (["aten::mode"], "1 of 1 operator falls back to the CPU: aten::mode."),
        (["aten::mm", "aten::mode"], "1 of 2 operators falls back to the CPU: aten::mode."),
        (["aten::take", "aten::mode"], "2 of 2 operators fall back to the CPU: aten::mode, aten::take."),
        (["aten::mm", "my::op"], "None of 2 operators falls back to the CPU. Unknown support on MPS: my::op."),
    ],
)
def test_verdict_in_a_sentence(operators, verdict):
    assert forecast_operators(operators).verdict == verdict


def test_report_limits_rows():
    (row,) = forecast_operators(["aten::mode"]).rows
    rows = tuple(replace(row, module_location=ModuleLocation(f"layer.{number}", "Layer")) for number in range(50))
    report = replace(forecast_operators([]), rows=rows)

    assert len(report.to_report().tables[0].rows) == MAX_ROWS
    assert f"{50 - MAX_ROWS} more rows are in to_dict()." in str(report)
    assert len(report.to_dict()["rows"]) == 50


@pytest.mark.real_computer
def test_model_on_simulated_device_is_traced_on_cpu():
    with nb.simulated_mps(fallback=False) as device:
        model = Values().to("mps")
        made = device.allocator.allocated
        report = forecast(model, torch.ones(3, 3, device="mps"), training=True)

        assert model.inner.weight.device.type == "mps"
        assert device.allocator.allocated <= made + 512
        assert dict(device.fallbacks) == {}
    assert report.simulated
    assert str(report).splitlines()[1].strip() == "MPS is simulated; the forecast is not affected."
    assert report.cpu_operators == ("aten::special_ndtri",)
    assert report.rows == forecast(Values(), torch.ones(3, 3), training=True).rows


def test_phase_counts_calls_and_operators():
    limitation = (FLOAT64, CallSite("buffer scale", "forward", ModuleLocation()))
    report = forecast_operators({"aten::mode": 3, "aten::mm": 2, "aten::t": 1}, {limitation: 4})

    assert report.unsupported == ("float64",)
    assert report.to_report().tables[1].rows == (("forward", "6", "3", "1"),)
