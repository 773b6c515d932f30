"""Comparison of models in different dtypes on the CPU and on the simulated device."""

import functools
import gc
import json
import threading

import pytest
import torch

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError, DeviceUnavailableError, InvalidModelError, InvalidTextError
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.runbook import parity
from openmed_nb.runbook.checks.precision.report import GoldScore
from openmed_nb.session import SESSION

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.real_computer]

NOTE = "the patient has diabetes mellitus and hypertension . no asthma ."
LONG = "the patient was seen . " * 40 + NOTE
D = "DISEASE"


@pytest.fixture
def pipe(load, keyword_model):
    """A pipeline of the keyword model on the CPU."""
    return load(keyword_model)


def compare(model, texts, **arguments):
    """Compare a model on the CPU in any dtype with the same model in float32."""
    return parity(str(model), texts, device="cpu", **arguments)


def save_changed_model(tiny, folder, change):
    """Save a modified copy of the keyword model and return its folder."""
    model = tiny.keyword_bert()
    with torch.no_grad():
        change(model)
    return tiny.save(folder / "changed", model)


class TestSameModel:
    """Comparison of a model with itself."""

    def test_identical_models_have_no_difference(self, keyword_model):
        report = compare(keyword_model, [NOTE, "", LONG], gradients=True)

        assert report.logit_difference == 0.0
        assert (report.label_mismatches, report.non_finite_tokens) == (0, 0)
        assert (report.spans.exact, report.spans.all) == (6, 6)
        assert report.gradients.largest == 0.0
        assert report.status == "ok"

    def test_long_texts_compare_each_token_once(self, keyword_model, pipe):
        texts = [NOTE, LONG]
        report = compare(keyword_model, iter(texts))

        assert report.tokens == sum(len(pipe.tokenizer.tokenize(text)) for text in texts)
        assert report.windows > len(texts)
        assert (report.texts, report.spans.exact) == (2, 6)

    def test_fingerprint_identifies_texts_without_their_content(self, pipe):
        reports = [parity(pipe, texts) for texts in ([NOTE, LONG], [LONG, NOTE], [NOTE, LONG])]

        assert reports[0].texts_fingerprint == reports[2].texts_fingerprint != reports[1].texts_fingerprint
        contents = json.dumps(reports[0].to_dict()) + str(reports[0]) + reports[0]._repr_html_()
        assert not [word for word in ("asthma", "mellitus", "patient") if word in contents]

    def test_training_mode_is_restored_also_after_an_error(self, pipe):
        pipe.model.train()
        pipe.model.bert.embeddings.eval()
        before = [part.training for part in pipe.model.modules()]

        assert parity(pipe, [NOTE] * 3, gradients=True).logit_difference < 1e-6
        with pytest.raises(InvalidTextError):
            parity(pipe, [NOTE, None])
        assert [part.training for part in pipe.model.modules()] == before
        assert all(parameter.grad is None for parameter in pipe.model.parameters())


class TestDifferences:
    """Candidates that differ from the reference. Hooks change the model of the pipeline, but not its copy."""

    def test_changed_entities_are_found(self, close_model, close_models):
        report = compare(close_model, ["the patient was seen .", close_models.NOTE], dtype="bfloat16")

        assert report.logit_difference <= report.tolerance.logits
        assert (report.spans.missing, report.spans.changes[0].reference) == (1, (16, 22, D))
        assert report.spans.changes[0].text == 1
        assert report.label_mismatches == 1
        assert report.status == "failed"

    def test_nan_in_candidate_is_counted(self, pipe):
        words, asthma = pipe.model.bert.embeddings.word_embeddings, pipe.tokenizer.vocab["asthma"]

        def lose(module, given, vectors):
            lost = given[0] == asthma
            return vectors.masked_fill(lost.unsqueeze(-1), float("nan")) if module is words else None

        words.register_forward_hook(lose)
        report = parity(pipe, [NOTE, "history of diabetes ."])

        assert report.non_finite_tokens == report.label_mismatches == 12
        assert (report.spans.exact, report.spans.missing) == (1, 3)
        assert report.logit_difference < 1e-6
        assert report.findings[0].status == "failed"

    def test_parity_ignores_autocast_of_the_caller(self, close_model, close_models):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            report = compare(close_model, [close_models.NOTE], dtype="bfloat16")
            assert torch.is_autocast_enabled("cpu")
        assert (report.spans.reference, report.spans.missing) == (1, 1)

    def test_nan_in_reference_raises(self, tiny, tmp_path):
        folder = save_changed_model(tiny, tmp_path, lambda model: model.classifier.bias.fill_(float("nan")))
        with pytest.raises(InvalidModelError, match="has non-finite logits"):
            compare(folder, [NOTE])

    def test_reduced_pipeline_has_a_note_about_the_reference(self, pipe):
        pipe.model.bfloat16()
        report = parity(pipe, [NOTE])

        assert "rounded to bfloat16" in str(report)
        assert (report.dtype, pipe.model.dtype) == ("bfloat16", torch.bfloat16)


@pytest.mark.filterwarnings("ignore::openmed_nb.errors.OpenMedWarning")
@pytest.mark.parametrize(
    ("dtype", "change", "message"),
    [
        ("float32", torch.nn.Module.double, r"in float64 cannot be compared.* Call \.float\(\) on the model"),
        ("int8", lambda model: model, r"in int8 has no float32 weights\. Pass the model's name and dtype='int8'"),
        (
            "float32",
            lambda model: model.register_forward_hook(functools.partial(lambda *_: None, threading.Lock())),
            r"BertForTokenClassification cannot be copied: cannot pickle '_thread\.lock'",
        ),
    ],
    ids=["float64", "int8", "lock"],
)
def test_pipeline_without_reference_is_rejected(load, keyword_model, dtype, change, message):
    pipe = load(keyword_model, dtype=dtype)
    change(pipe.model)
    with pytest.raises(ConfigurationError, match=message):
        parity(pipe, [NOTE])


class TestGradients:
    """Gradients of one training step."""

    def test_gradients_are_within_tolerance(self):
        report = compare("bundled_small", [NOTE, LONG], dtype="bfloat16", gradients=True)

        assert report.gradients.largest <= report.tolerance.gradients
        assert report.gradients.parameters > 20

    def test_incorrect_gradient_is_named(self, load, random_model):
        pipe = load(random_model)
        pipe.model.classifier.weight.register_hook(lambda gradient: gradient * 1000)
        report = parity(pipe, [NOTE], gradients=True)

        assert report.gradients.parameter == "classifier.weight"
        assert report.gradients.largest == pytest.approx(999, rel=1e-3)
        assert report.findings[-1].status == "failed"

    def test_missing_gradients_are_not_compared(self, pipe, keyword_model):
        pipe.model.requires_grad_(False)
        assert parity(pipe, [NOTE], gradients=True).gradients is None
        with pytest.raises(ConfigurationError, match="do not support gradients"):
            compare(keyword_model, [NOTE], dtype="int8", gradients=True)


class TestGold:
    """Scores against gold entities."""

    GOLD = ([(16, 33, D), (38, 50, D), (56, 62, D)], [{"start": 4, "end": 11, "label": D}])
    TEXTS = (NOTE, "the patient has asthma .")

    def test_reference_and_candidate_are_scored(self, pipe):
        assert parity(pipe, self.TEXTS, gold=self.GOLD).gold == GoldScore(4, 3, 3)

    def test_mismatched_gold_is_rejected(self, pipe):
        cases = [
            (self.TEXTS, self.GOLD[:1], "The gold has 1 text without ids, but there are 2"),
            (self.TEXTS, ([], [(0, 25, D)]), r"gold of text 1 ends after the end of the text \(character 24\)"),
            (self.TEXTS, ([], [(16, 22, "O")]), "labels of the model only: DISEASE"),
            (
                self.TEXTS,
                ([(16, 33, D)], [(16, 22, "asthma")]),
                "1 of 2 gold entities have a label that the model does not have. Use the labels of the model.*: DISEASE",
            ),
        ]
        for texts, gold, message in cases:
            with pytest.raises(ConfigurationError, match=message) as caught:
                parity(pipe, texts, gold=gold)
            assert "asthma" not in str(caught.value), message


class TestTexts:
    """Validation of the texts."""

    @pytest.mark.parametrize("texts", [None, [], iter(()), "asthma"])
    def test_texts_are_required(self, pipe, texts):
        with pytest.raises(ConfigurationError, match="There are no texts to compare"):
            parity(pipe, texts)

    def test_invalid_text_is_named_by_index(self, pipe):
        for text in (None, 5, "\ud800 asthma"):
            with pytest.raises(InvalidTextError, match=r"Text 1 (must|contains an unpaired surrogate)") as caught:
                parity(pipe, [NOTE, text])
            assert "asthma" not in str(caught.value)


def test_batch_is_split_if_out_of_memory(pipe):
    texts, seen, most = [NOTE] * 8, [], 3

    def refuse(model, _args, kwargs):
        if model is pipe.model:  # The copy that is the reference has the hook too.
            seen.append(len(kwargs["input_ids"]))
            if seen[-1] > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    pipe.model.register_forward_pre_hook(refuse, with_kwargs=True)
    report = parity(pipe, texts)

    assert max(seen) == 8
    assert (report.tokens, report.spans.exact) == (12 * 8, 3 * 8)
    most = 0
    with pytest.raises(DeviceUnavailableError, match="A window of 14 tokens does not fit"):
        parity(pipe, texts)


@pytest.mark.parametrize(
    ("gradients", "message"),
    [(False, "The model could not run on cpu: no kernel"), (True, "A training step failed on cpu: no kernel")],
)
def test_failure_of_the_candidate_is_raised(load, random_model, gradients, message):
    pipe = load(random_model)

    def refuse(model, _args):
        if model is pipe.model and torch.is_grad_enabled() == gradients:
            raise RuntimeError("no kernel")

    pipe.model.register_forward_pre_hook(refuse)
    with pytest.raises(DeviceUnavailableError, match=message):
        parity(pipe, [NOTE], gradients=True)


class TestArguments:
    """Arguments and side effects."""

    def test_parity_releases_its_models(self, keyword_model):
        kept = SESSION.load_model(str(keyword_model), OpenMedConfig())
        before = sum(type(value) is type(kept.model) for value in gc.get_objects())
        report = parity(str(keyword_model), [NOTE], dtype="bfloat16")
        gc.collect()

        assert (report.model, report.device, report.dtype) == (str(keyword_model), "cpu", "bfloat16")
        assert SESSION.inventory().names == (str(keyword_model),)
        assert SESSION.load_model(str(keyword_model), OpenMedConfig()).model is kept.model
        assert sum(type(value) is type(kept.model) for value in gc.get_objects()) <= before
        assert SESSION.device().device == "cpu"
        SESSION.unload()

    def test_dtype_is_a_name_a_torch_dtype_or_auto(self, keyword_model):
        report = compare(keyword_model, [NOTE], dtype=torch.float16)

        assert (report.dtype, report.spans.exact) == ("float16", 3)
        assert compare(keyword_model, [NOTE], dtype="auto").dtype == "float32"

    def test_parity_rejects_invalid_arguments(self, keyword_model, pipe):
        cases = [
            (str(keyword_model), {"dtype": "float64"}, "'float64' is not a valid dtype"),
            (str(keyword_model), {"dtype": "int8", "device": "mps"}, "mps"),
            (str(keyword_model), {"stride": 8}, "Unknown option: stride"),
            (pipe, {"dtype": "bfloat16"}, "does not accept dtype"),
        ]
        for model, arguments, message in cases:
            with pytest.raises((ConfigurationError, DeviceUnavailableError), match=message):
                parity(model, [NOTE], **arguments)


def test_simulated_device_is_labeled(keyword_model):
    with nb.simulated_mps():
        report = parity(str(keyword_model), [NOTE], gradients=True)

    assert report.device == "mps (SIMULATED)"
    assert report.status == "ok"
    assert "SIMULATED MPS" in str(report)
