"""Checks of torch modules, transformers models and pipelines with planted problems."""

import pytest
import torch

import openmed_nb as nb
from helpers import tiny_models as tiny
from openmed_nb._render.display import FAILED, OK, WARNING
from openmed_nb.runbook.checks.doctor_checks import model_findings
from openmed_nb.session import SESSION


@pytest.fixture
def tagger(home):
    """A small token classification model on the test device."""
    return tiny.random_bert().to(home)


def get_names(findings):
    """Return the names of the findings without the name of the model."""
    return {finding.name.partition(": ")[2]: finding.status for finding in findings}


def is_healthy(model):
    """Return whether all checks of a model pass."""
    return [finding.status for finding in model_findings("model", model)] == [OK]


def not_a_number(model):
    """Set one weight to NaN."""
    with torch.no_grad():
        model.classifier.weight[0, 0] = torch.nan


def test_weights_with_nan_fail(tagger):
    not_a_number(tagger)
    findings = model_findings("tagger", tagger)

    assert get_names(findings) == {"NaN": FAILED}
    assert all(finding.evidence and finding.remedy.endswith(".") for finding in findings)


@pytest.mark.real_computer
def test_float64_weights_fail_on_mps_and_warn_elsewhere(tagger):
    tagger.classifier.cpu().double()
    for device, status in (("mps", FAILED), ("cpu", WARNING), ("cuda:0", WARNING)):
        finding = model_findings("tagger", tagger, device=device)[0]
        assert (finding.name, finding.status) == ("tagger: float64", status), device
        assert "classifier.weight, classifier.bias" in finding.evidence, device


@pytest.mark.real_computer
def test_float64_check_covers_buffers_and_complex128():
    model = torch.nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(2, dtype=torch.float64))
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex128))

    assert "scale, phase" in model_findings("linear", model)[0].evidence


def test_plain_and_lazy_modules_are_checked(tagger):
    """A healthy model has one finding."""
    modules = [
        tagger,
        torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.LSTM(2, 2)),
        torch.nn.ReLU(),
        torch.nn.LazyLinear(2),
    ]

    assert [module for module in modules if not is_healthy(module)] == []
    assert model_findings("tagger", tagger)[0].evidence.startswith("float32 on ")


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated. Please switch to `torch.compile` or `torch.export`.:DeprecationWarning"
)
@pytest.mark.real_computer
def test_compiled_model_is_checked_as_inner_module():
    model = tiny.random_bert()
    not_a_number(model)

    assert get_names(model_findings("tagger", torch.compile(model, backend="eager"))) == {"NaN": FAILED}


@pytest.mark.real_computer
def test_model_of_a_pipeline_is_checked(keyword_model):
    pipe = nb.load_pipeline(str(keyword_model), device="cpu")
    try:
        assert is_healthy(pipe)
        not_a_number(pipe.model)
        assert get_names(model_findings("pipe", pipe)) == {"NaN": FAILED}
    finally:
        SESSION.unload()


def test_model_checks_do_not_change_the_model(tagger):
    torch.manual_seed(3)
    before = {name: value.clone() for name, value in tagger.state_dict().items()}
    expected = torch.get_rng_state()
    model_findings("tagger", tagger)

    assert torch.equal(torch.get_rng_state(), expected)
    assert all(torch.equal(value, before[name]) for name, value in tagger.state_dict().items())
    assert not tagger.training
