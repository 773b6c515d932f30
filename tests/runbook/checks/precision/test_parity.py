"""Comparison of models in different dtypes on the CPU and on the simulated device."""

import gc
import itertools
import json

import pytest
import torch

import openmed_nb as nb
from helpers import close_models
from helpers import tiny_models as tiny
from helpers.annotations import NOTE
from openmed_nb.errors import ConfigurationError, DeviceUnavailableError, InvalidModelError, InvalidTextError
from openmed_nb.runbook import parity
from openmed_nb.runbook.checks.parity_report import GoldScore
from openmed_nb.session import SESSION

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.real_computer]

LONG = "the patient was seen . " * 40 + NOTE
D = "DISEASE"


@pytest.fixture
def pipe(keyword_model):
    """A pipeline of the keyword model on the CPU. A changed model differs from its files, which are the reference."""
    SESSION.unload()
    yield nb.load_pipeline(str(keyword_model), device="cpu")
    SESSION.unload()


def compare(model, texts, **arguments):
    """Compare a model on the CPU in any dtype with the same model in float32."""
    return parity(str(model), texts, device="cpu", **arguments)


class TestSameModel:
    """Comparison of a model with itself."""

    def test_identical_models_have_no_difference(self, keyword_model, pipe):
        """Each token of a long text is compared once. Missing texts are left out, and further texts show nothing."""
        texts = [NOTE, "", LONG, *[""] * 5]
        report = compare(keyword_model, itertools.chain(texts, itertools.repeat(NOTE)), gradients=True)

        assert (report.logit_difference, report.gradients.largest, report.status) == (0.0, 0.0, "not applicable")
        assert (report.label_mismatches, report.non_finite_tokens) == (0, 0)
        assert (report.texts, report.spans.exact, report.spans.all) == (2, 6, 6)
        assert report.tokens == sum(len(pipe.tokenizer.tokenize(text)) for text in texts)
        assert report.windows > 3

    def test_fingerprint_identifies_texts_without_their_content(self, pipe):
        first, second, third = (parity(pipe, texts) for texts in ([NOTE, LONG], [LONG, NOTE], [NOTE, LONG]))

        assert first.texts_fingerprint == third.texts_fingerprint != second.texts_fingerprint
        contents = json.dumps(first.to_dict()) + str(first) + first._repr_html_()
        assert not [word for word in ("asthma", "mellitus", "patient") if word in contents]

    def test_training_mode_is_restored_also_after_an_error(self, pipe):
        pipe.model.train()
        pipe.model.bert.embeddings.eval()
        before = [module.training for module in pipe.model.modules()]

        assert parity(pipe, [NOTE] * 3, gradients=True).logit_difference < 1e-6
        with pytest.raises(InvalidTextError):
            parity(pipe, [NOTE, 5])
        assert [module.training for module in pipe.model.modules()] == before
        assert all(parameter.grad is None for parameter in pipe.model.parameters())

    def test_simulated_device_is_labeled(self, keyword_model):
        with nb.simulated_mps():
            report = parity(str(keyword_model), [NOTE], gradients=True)

        assert (report.device, report.status) == ("mps (SIMULATED)", "ok")

    def test_models_are_released(self, pipe, keyword_model):
        """A model that the session has loaded is kept."""
        before = sum(type(value) is type(pipe.model) for value in gc.get_objects())
        report = compare(keyword_model, [NOTE], dtype=torch.bfloat16)
        gc.collect()

        assert (report.model, report.dtype) == (str(keyword_model), "bfloat16")
        assert SESSION.inventory().names == (str(keyword_model),)
        assert sum(type(value) is type(pipe.model) for value in gc.get_objects()) == before


class TestDifferences:
    """Candidates that differ from the reference."""

    def test_changed_entities_are_found(self, close_model):
        """The autocast of the caller has no effect, and a missing text counts in the indices only."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            report = compare(close_model, ["the patient was seen .", " ", close_models.NOTE], dtype="bfloat16")
            assert torch.is_autocast_enabled("cpu")

        assert report.logit_difference <= report.tolerance.logits
        assert (report.spans.missing, report.spans.changes[0].reference) == (1, (16, 22, D))
        assert (report.spans.changes[0].text, report.texts) == (2, 2)
        assert (report.label_mismatches, report.status) == (1, "failed")

    def test_nan_in_candidate_is_counted(self, pipe):
        asthma = pipe.tokenizer.vocab["asthma"]

        def lose(_module, given, vectors):
            return vectors.masked_fill((given[0] == asthma).unsqueeze(-1), float("nan"))

        pipe.model.bert.embeddings.word_embeddings.register_forward_hook(lose)
        report = parity(pipe, [NOTE, "history of diabetes ."])

        assert report.non_finite_tokens == report.label_mismatches == 12
        assert (report.spans.exact, report.spans.missing) == (1, 3)
        assert report.logit_difference < 1e-6
        assert report.findings[0].status == "failed"

    def test_nan_in_reference_raises(self, tmp_path):
        model = tiny.keyword_bert()
        torch.nn.init.constant_(model.classifier.bias, float("nan"))
        with pytest.raises(InvalidModelError, match="has non-finite logits"):
            compare(tiny.save(tmp_path / "changed", model), [NOTE])

    def test_batch_is_split_if_out_of_memory(self, pipe):
        texts = [NOTE] * 8
        sizes = []
        max_size = 3

        def refuse(_model, _args, kwargs):
            sizes.append(len(kwargs["input_ids"]))
            if sizes[-1] > max_size:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        pipe.model.register_forward_pre_hook(refuse, with_kwargs=True)
        report = parity(pipe, texts)

        assert max(sizes) == 8
        # The entities of a text that repeats are no further evidence.
        assert (report.tokens, report.spans.exact, report.spans.upper_bound) == (12 * 8, 3, None)
        max_size = 0
        with pytest.raises(DeviceUnavailableError, match="A window of 14 tokens does not fit"):
            parity(pipe, texts)

    @pytest.mark.parametrize(
        ("gradients", "message"),
        [(False, "The model could not run on cpu: no kernel"), (True, "A training step failed on cpu: no kernel")],
    )
    def test_failure_of_the_candidate_is_raised(self, pipe, gradients, message):
        def refuse(_model, _args):
            if torch.is_grad_enabled() == gradients:
                raise RuntimeError("no kernel")

        pipe.model.register_forward_pre_hook(refuse)
        with pytest.raises(DeviceUnavailableError, match=message):
            parity(pipe, [NOTE], gradients=True)


class TestGradients:
    """Gradients of one training step."""

    def test_gradients_are_within_tolerance(self):
        report = compare("bundled_small", [NOTE], dtype="bfloat16", gradients=True)

        assert report.gradients.largest <= report.tolerance.gradients
        assert report.gradients.parameters > 20

    def test_incorrect_gradient_is_named(self, random_model):
        pipe = nb.load_pipeline(str(random_model), device="cpu")
        pipe.model.classifier.weight.register_hook(lambda gradient: gradient * 1000)
        report = parity(pipe, [NOTE], gradients=True)
        SESSION.unload()

        assert report.gradients.parameter == "classifier.weight"
        assert report.gradients.largest == pytest.approx(999, rel=1e-3)
        assert report.findings[-1].status == "failed"


class TestArguments:
    """Texts, gold entities and models."""

    GOLD = ([(16, 33, D), (38, 50, D), (56, 62, D)], [{"start": 4, "end": 11, "label": D}])
    TEXTS = (NOTE, "the patient has asthma .")

    def test_module_is_rejected_with_alternatives(self):
        with pytest.raises(ConfigurationError, match="Linear is a torch module") as error_info:
            parity(torch.nn.Linear(2, 2), self.TEXTS)
        assert "loss_parity" in error_info.value.remedy

    def test_reference_and_candidate_are_scored(self, pipe):
        """The texts may be a mapping."""
        assert parity(pipe, dict(enumerate(self.TEXTS)), gold=self.GOLD).gold == GoldScore(4, 3, 3)

    @pytest.mark.parametrize(
        ("gold", "message"),
        [
            (GOLD[:1], "The gold of 1 text cannot be matched with 2 notes"),
            (([], [(0, 25, D)]), r"gold of text 1 ends after the end of the text \(character 24\)"),
            (([], [(16, 22, "O")]), "labels of the model only: DISEASE"),
            (([(16, 33, D)], [(16, 22, "asthma")]), "labels of 1 of 2 gold entities"),
        ],
    )
    def test_mismatched_gold_is_rejected(self, pipe, gold, message):
        with pytest.raises(ConfigurationError, match=message) as caught:
            parity(pipe, self.TEXTS, gold=gold)
        assert "asthma" not in str(caught.value), message

    @pytest.mark.parametrize("texts", [None, [], ["", None]])
    def test_texts_are_required(self, pipe, texts):
        with pytest.raises(ConfigurationError, match="There are no texts to compare"):
            parity(pipe, texts)
        with pytest.raises(ConfigurationError, match=r"is not a model\. Pass the model first"):
            parity(self.TEXTS, pipe)

    @pytest.mark.parametrize("text", [5, "\ud800 asthma"])
    def test_invalid_text_is_named_by_index(self, pipe, text):
        with pytest.raises(InvalidTextError, match="Text 1 ") as caught:
            parity(pipe, [NOTE, text])
        assert "asthma" not in str(caught.value)

    def test_invalid_models_are_rejected(self, keyword_model, pipe):
        cases = [
            (str(keyword_model), {"dtype": "float64"}, "'float64' is not a valid dtype"),
            (str(keyword_model), {"dtype": "int8", "device": "mps"}, "mps"),
            (str(keyword_model), {"dtype": "int8", "device": "cpu", "gradients": True}, "do not support gradients"),
            (str(keyword_model), {"stride": 8}, "'stride' is not an option"),
            (pipe, {"dtype": "bfloat16"}, "does not accept dtype"),
            ([NOTE], {}, "Pass the name of a model, or a pipeline"),
        ]
        for model, arguments, message in cases:
            with pytest.raises((ConfigurationError, DeviceUnavailableError), match=message):
                parity(model, [NOTE], **arguments)
        SESSION.unload()
        with pytest.raises(ConfigurationError, match="Pass the name of the model"):
            parity(pipe, [NOTE])
