"""What is found about a model: torch modules, models of transformers, pipelines, and what is planted in them."""

import pytest
import torch

import openmed_nb as nb
from openmed_nb._render.display import FAILED, OK, WARNING
from openmed_nb.errors import ConfigurationError, OpenMedWarning
from openmed_nb.runbook.checks.doctor.checks import MODEL_CHECKS, model_findings
from openmed_nb.session import SESSION


@pytest.fixture
def tagger(tiny, home):
    """A tiny model for tokens, on the device of the tests."""
    return tiny.random_bert().to(home)


def names(findings):
    """Return what was found, without the name of the model."""
    return {finding.name.partition(": ")[2]: finding.status for finding in findings}


def double(model):
    """Give one layer 64 bits."""
    model.classifier.cpu().double()


def larger_labels(model):
    """Give the configuration more labels than the last layer has."""
    model.config.id2label = dict(enumerate("OABCD"))


def smaller_labels(model):
    """Give the configuration fewer labels than the last layer has."""
    model.config.id2label = {0: "O"}


def half(model):
    """Give the model 16 bits."""
    model.half()


def not_a_number(model):
    """Put one NaN into a weight."""
    with torch.no_grad():
        model.classifier.weight[0, 0] = torch.nan


def infinite(model):
    """Put infinity into a weight."""
    with torch.no_grad():
        model.classifier.bias[0] = torch.inf


def without_memory(model):
    """Leave one layer without weights."""
    model.classifier.to("meta")


def shorter_embeddings(model):
    """Take the embeddings of the last tokens away."""
    model.resize_token_embeddings(10)


PLANTED = [
    (larger_labels, {"labels": FAILED}),
    (smaller_labels, {"labels": FAILED}),
    (half, {"precision": WARNING}),
    (not_a_number, {"NaN": FAILED}),
    (infinite, {"NaN": FAILED}),
    (without_memory, {"weights": FAILED}),
    (shorter_embeddings, {"vocabulary": FAILED}),
]


def test_planted(tiny, home):
    """What was planted into a model is found, alone, with evidence and a remedy."""
    for plant, expected in PLANTED:
        model = tiny.random_bert().to(home)
        plant(model)
        findings = model_findings("tagger", model, tiny.tokenizer())
        assert names(findings) == expected, plant.__name__
        assert all(finding.evidence and finding.remedy.endswith(".") for finding in findings), plant.__name__


@pytest.mark.real_computer
def test_double_precision(tagger):
    """64 bits are an error where the device is MPS, and elsewhere a warning, and the tensors are named."""
    double(tagger)
    for device, status in (("mps", FAILED), ("cpu", WARNING), ("cuda:0", WARNING)):
        finding = model_findings("tagger", tagger, device=device)[0]
        assert (finding.name, finding.status) == ("tagger: float64", status), device
        assert "classifier.weight, classifier.bias" in finding.evidence, device


@pytest.mark.real_computer
def test_double_buffers_and_complex_numbers():
    """Buffers count, and complex numbers of 128 bits."""
    model = torch.nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(2, dtype=torch.float64))
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex128))

    assert "scale, phase" in model_findings("linear", model)[0].evidence


def test_several_devices(tagger, second_device):
    """Parts on several devices are counted by device, unless Accelerate put them there."""
    tagger.cpu()
    tagger.classifier.to(second_device)
    findings = [one for one in model_findings("tagger", tagger) if "tensor devices" in one.name]
    tagger.hf_device_map = {"": 0}

    assert [one.status for one in findings] == [FAILED]
    assert "several devices" in findings[0].evidence
    assert "2 on" in findings[0].evidence
    assert not [one for one in model_findings("tagger", tagger) if "tensor devices" in one.name]


def test_healthy_model(tagger, tiny):
    """A model in which nothing is wrong is one finding that says what it is."""
    findings = model_findings("tagger", tagger, tiny.tokenizer())

    assert [one.status for one in findings] == [OK]
    assert findings[0].evidence.startswith("float32 on ")
    assert f"{len(MODEL_CHECKS)} checks" in findings[0].evidence


def test_plain_module():
    """A plain torch module without a configuration or a tokenizer is examined too, also before its weights have shapes."""
    modules = [
        torch.nn.Linear(2, 2),
        torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.LSTM(2, 2)),
        torch.nn.ReLU(),
        torch.nn.Conv2d(1, 1, 1),
        torch.nn.LazyLinear(2),
    ]
    for module in modules:
        assert [one.status for one in model_findings("plain", module)] == [OK], module


def test_complex_weights():
    """Complex weights are named as such, and NaN is found in them too."""
    model = torch.nn.Linear(2, 2, dtype=torch.complex64)
    healthy = model_findings("complex", model)
    model.weight.detach()[0, 0] = torch.nan

    assert [one.evidence.partition(";")[0] for one in healthy] == ["complex64 on cpu"]
    assert names(model_findings("complex", model)) == {"NaN": FAILED}


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated. Please switch to `torch.compile` or `torch.export`.:DeprecationWarning"
)
@pytest.mark.real_computer
def test_compiled_model(tiny):
    """A model that was compiled is looked at as the one inside."""
    model = tiny.random_bert()
    larger_labels(model)

    assert names(model_findings("tagger", torch.compile(model, backend="eager"))) == {"labels": FAILED}


@pytest.mark.real_computer
def test_pipeline_and_loaded_model(keyword_model):
    """A pipeline and a loaded model bring their tokenizers along."""
    pipe = nb.load_pipeline(str(keyword_model), device="cpu")
    try:
        assert [one.status for one in model_findings("pipe", pipe)] == [OK]
        shorter_embeddings(pipe.model)
        assert names(model_findings("pipe", pipe)) == {"vocabulary": FAILED}
    finally:
        SESSION.unload()


@pytest.mark.real_computer
class TestPrecision:
    """What is said of a model in a reduced type."""

    @pytest.fixture(autouse=True)
    def _own_folder(self, monkeypatch, tmp_path):
        """Keep certificates in a folder of the test."""
        monkeypatch.setenv("OPENMED_NB_DATA", str(tmp_path))
        yield
        SESSION.unload()

    @staticmethod
    def said(model=None):
        """Return what the doctor finds about models."""
        return [one for one in nb.doctor(model).findings if "keyword" in one.name or "Bert" in one.name]

    def test_unvalidated(self, keyword_model):
        """A loaded model without a certificate gives a warning with the reason and the command that validates it."""
        expected = []
        for dtype, stays in (("bfloat16", ""), ("int8", ", device='cpu'")):
            with pytest.warns(OpenMedWarning):
                pipe = nb.load_pipeline(str(keyword_model), dtype=dtype)
            evidence = f"weights are {dtype}, which can shift or lose entities; there is no certificate"
            command = f"nb.runbook.validate_precision({str(keyword_model)!r}, texts, dtype={dtype!r}{stays})"
            expected.append((WARNING, evidence, f"Validate it: {command}."))
            (finding,) = self.said(pipe)
            assert (finding.status, finding.evidence, finding.remedy) == expected[-1]

        for model in (None, str(keyword_model)):
            assert [(one.status, one.evidence, one.remedy) for one in self.said(model)] == expected, model

    def test_validated(self, keyword_model):
        """A loaded model with a certificate is in order, and its type is named."""
        diseases = [first + " mellitus" * ends for first in ("asthma", "diabetes") for ends in range(6)]
        before = ("no", "has", "history of", "the patient has", "a patient was seen")
        texts = [f"{words} {disease} ." for words in before for disease in diseases]
        assert nb.runbook.validate_precision(str(keyword_model), texts, "int8").accepted
        nb.load_pipeline(str(keyword_model), dtype="int8")
        (finding,) = self.said()

        assert (finding.status, finding.evidence.partition(" on ")[0]) == (OK, "int8")

    def test_type_that_was_changed_in_memory(self, keyword_model):
        """What is known of the files does not count for a model that was rounded after it was loaded."""
        nb.load_pipeline(str(keyword_model)).model.half()
        (finding,) = self.said()

        assert finding.status == WARNING
        assert (
            finding.remedy
            == "Load the model by name, then run nb.runbook.validate_precision('name', texts, dtype='float16')."
        )


def test_no_model():
    """Something that is no model is an error that says so."""
    for thing in (3, object, {"model": 1}, torch.nn.Linear):
        with pytest.raises(ConfigurationError, match="is not a model"):
            nb.doctor(thing)


def test_nothing_is_changed(tagger, tiny):
    """Looking at a model leaves its weights, its mode and its random numbers alone."""
    torch.manual_seed(3)
    before = {name: value.clone() for name, value in tagger.state_dict().items()}
    expected = torch.get_rng_state()
    model_findings("tagger", tagger, tiny.tokenizer())

    assert torch.equal(torch.get_rng_state(), expected)
    assert all(torch.equal(value, before[name]) for name, value in tagger.state_dict().items())
    assert not tagger.training
