"""Checks of torch modules, transformers models and pipelines with planted problems."""

import pytest
import torch

import openmed_nb as nb
from openmed_nb._render.display import FAILED, OK, WARNING
from openmed_nb.runbook.checks.doctor_checks import MODEL_CHECKS, model_findings
from openmed_nb.session import SESSION


@pytest.fixture
def tagger(tiny, home):
    """A small token classification model on the test device."""
    return tiny.random_bert().to(home)


def get_names(findings):
    """Return the names of the findings without the name of the model."""
    return {finding.name.partition(": ")[2]: finding.status for finding in findings}


def is_healthy(model):
    """Return whether all checks of a model pass."""
    return [finding.status for finding in model_findings("model", model)] == [OK]


def double(model):
    """Convert one layer to float64."""
    model.classifier.cpu().double()


def larger_labels(model):
    """Add labels to the configuration that the last layer does not have."""
    model.config.id2label = dict(enumerate("OABCD"))


def not_a_number(model):
    """Set one weight to NaN."""
    with torch.no_grad():
        model.classifier.weight[0, 0] = torch.nan


def shorter_embeddings(model):
    """Remove the embeddings of the last tokens."""
    model.resize_token_embeddings(10)


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (larger_labels, {"labels": FAILED}),
        (not_a_number, {"NaN": FAILED}),
        (shorter_embeddings, {"vocabulary": FAILED}),
    ],
)
def test_model_checks_find_only_the_planted_problem(tagger, tiny, plant, expected):
    plant(tagger)
    findings = model_findings("tagger", tagger, tiny.tokenizer())

    assert get_names(findings) == expected
    assert all(finding.evidence and finding.remedy.endswith(".") for finding in findings)


@pytest.mark.real_computer
def test_float64_weights_fail_on_mps_and_warn_elsewhere(tagger):
    double(tagger)
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


def test_healthy_model_has_one_finding(tagger, tiny):
    findings = model_findings("tagger", tagger, tiny.tokenizer())

    assert [finding.status for finding in findings] == [OK]
    assert findings[0].evidence.startswith("float32 on ")
    assert f"{len(MODEL_CHECKS)} checks" in findings[0].evidence


def test_plain_and_lazy_modules_are_checked():
    modules = [
        torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.LSTM(2, 2)),
        torch.nn.ReLU(),
        torch.nn.LazyLinear(2),
    ]

    assert [module for module in modules if not is_healthy(module)] == []


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated. Please switch to `torch.compile` or `torch.export`.:DeprecationWarning"
)
@pytest.mark.real_computer
def test_compiled_model_is_checked_as_inner_module(tiny):
    model = tiny.random_bert()
    larger_labels(model)

    assert get_names(model_findings("tagger", torch.compile(model, backend="eager"))) == {"labels": FAILED}


@pytest.mark.real_computer
def test_pipeline_and_loaded_model_provide_tokenizer(keyword_model):
    pipe = nb.load_pipeline(str(keyword_model), device="cpu")
    try:
        assert is_healthy(pipe)
        shorter_embeddings(pipe.model)
        assert get_names(model_findings("pipe", pipe)) == {"vocabulary": FAILED}
    finally:
        SESSION.unload()


def test_model_checks_do_not_change_the_model(tagger, tiny):
    torch.manual_seed(3)
    before = {name: value.clone() for name, value in tagger.state_dict().items()}
    expected = torch.get_rng_state()
    model_findings("tagger", tagger, tiny.tokenizer())

    assert torch.equal(torch.get_rng_state(), expected)
    assert all(torch.equal(value, before[name]) for name, value in tagger.state_dict().items())
    assert not tagger.training
