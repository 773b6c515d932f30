"""A model is run in two ways over the same texts, and what differs is counted: on the CPU, in reduced types, simulated."""

import functools
import gc
import json
import threading

import pytest
import torch

import openmed_nb as nb
from openmed_nb.annotation.loading import create_pipeline
from openmed_nb.errors import ConfigurationError, DeviceUnavailableError, InvalidModelError, InvalidTextError
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.session import SESSION

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.real_computer]

NOTE = "the patient has diabetes mellitus and hypertension . no asthma ."
LONG = "the patient was seen . " * 40 + NOTE
D = "DISEASE"


@pytest.fixture
def load(session):
    """A function that returns a pipeline over a model on the CPU, loaded anew."""

    def load(folder, **arguments):
        return create_pipeline(session, str(folder), OpenMedConfig(), **arguments)

    return load


@pytest.fixture
def pipe(load, keyword_model):
    """A pipeline over the keyword model on the CPU."""
    return load(keyword_model)


def compared(model, texts, **arguments):
    """Return how far a model on the CPU, in whatever type, is from the same in float32."""
    return nb.runbook.parity(str(model), texts, device="cpu", **arguments)


def changed(tiny, folder, change):
    """Save a copy of the keyword model after a change of its weights, and return where."""
    model = tiny.keyword_bert()
    with torch.no_grad():
        change(model)
    return tiny.save(folder / "changed", model)


class TestSameModel:
    """A model compared with itself."""

    def test_identical_models_differ_in_nothing(self, keyword_model):
        """Two loads of one model on the same device in the same type give the same numbers."""
        report = compared(keyword_model, [NOTE, "", LONG], gradients=True)

        assert report.logits.maximum == 0.0
        assert (report.label_mismatches, report.non_finite_tokens) == (0, 0)
        assert (report.spans.exact, report.spans.all) == (6, 6)
        assert report.gradients.largest == 0.0
        assert report.status == "ok"

    def test_every_token_is_compared_once(self, keyword_model, pipe):
        """Long texts are read whole in overlapping windows, and each token counts once."""
        texts = [NOTE, LONG]
        report = compared(keyword_model, texts)

        assert report.tokens == sum(len(pipe.tokenizer.tokenize(text)) for text in texts)
        assert report.windows > len(texts)
        assert report.texts == 2

    def test_every_strategy(self, load, keyword_model):
        """A pipeline of any strategy is compared in the entities that it gives itself."""
        for strategy in ("none", "simple", "first", "average", "max"):
            pipe = load(keyword_model, aggregation_strategy=strategy)
            spans = nb.runbook.parity(pipe, [NOTE]).spans
            assert spans.exact == spans.all == len(pipe(NOTE)) > 0, strategy

    def test_texts_are_told_apart_without_their_words(self, pipe):
        """The report keeps a fingerprint of the texts, which other texts or another order change, and no word."""
        reports = [nb.runbook.parity(pipe, texts) for texts in ([NOTE, LONG], [LONG, NOTE], [NOTE, LONG])]

        assert reports[0].texts_fingerprint == reports[2].texts_fingerprint != reports[1].texts_fingerprint
        told = json.dumps(reports[0].to_dict()) + str(reports[0]) + reports[0]._repr_html_()
        assert not [word for word in ("asthma", "mellitus", "patient") if word in told]

    def test_stream_of_texts_is_read_once(self, pipe):
        """A generator of texts is enough."""
        assert nb.runbook.parity(pipe, (text for text in [NOTE] * 3)).spans.exact == 9

    def test_mode_of_the_model_comes_back(self, pipe):
        """A model that is being trained is compared without dropout, and is in training as before."""
        pipe.model.train()
        pipe.model.bert.embeddings.eval()
        before = [part.training for part in pipe.model.modules()]

        assert nb.runbook.parity(pipe, [NOTE] * 3, gradients=True).logits.maximum < 1e-6
        assert [part.training for part in pipe.model.modules()] == before
        assert all(parameter.grad is None for parameter in pipe.model.parameters())

    def test_mode_comes_back_after_an_error(self, pipe):
        """The mode comes back also where a comparison fails."""
        pipe.model.train()
        with pytest.raises(InvalidTextError):
            nb.runbook.parity(pipe, [NOTE, None])
        assert all(part.training for part in pipe.model.modules())


class TestWhatDiffers:
    """A candidate that is not what the reference is.

    Where a fault is planted into a pipeline, a hook acts on the pipeline's own model and not on the copy that it is compared with.
    """

    def test_moved_answers_are_found(self, close_model, close_models):
        """A model whose answers hang on a thousandth of a logit loses them in bfloat16, though its logits hardly move."""
        report = compared(close_model, ["the patient was seen .", close_models.NOTE], dtype="bfloat16")

        assert report.logits.maximum <= report.tolerance.logits
        assert (report.spans.missing, report.spans.changes[0].reference) == (1, (16, 22, D))
        assert report.spans.changes[0].text == 1
        assert report.label_mismatches == 1
        assert report.status == "failed"

    def test_type_without_a_tolerance(self, pipe):
        """A model in a type for which there is no tolerance, such as float64, is refused before anything is computed."""
        pipe.model.double()
        with pytest.raises(ConfigurationError, match=r"in float64 cannot be compared.* Call \.float\(\) on the model"):
            nb.runbook.parity(pipe, [NOTE])

    def test_quantiles_are_of_the_largest_of_each_token(self, pipe):
        """Of each token the largest difference of a logit counts; the quantiles are over all tokens."""
        head, moved = pipe.model.classifier, torch.tensor([0.0, 0.25, -0.5])
        head.register_forward_hook(lambda module, _given, logits: logits + moved if module is head else None)
        logits = nb.runbook.parity(pipe, [NOTE]).logits

        assert [logits.maximum, logits.median, logits.p99] == pytest.approx([0.5] * 3, abs=1e-5)

    def test_nan_is_told_and_not_compared_away(self, pipe):
        """A candidate that computes NaN has failed: its tokens are counted, their labels differ, its entities are missing."""
        words, asthma = pipe.model.bert.embeddings.word_embeddings, pipe.tokenizer.vocab["asthma"]

        def lose(module, given, vectors):
            lost = given[0] == asthma
            return vectors.masked_fill(lost.unsqueeze(-1), float("nan")) if module is words else None

        words.register_forward_hook(lose)
        report = nb.runbook.parity(pipe, [NOTE, "history of diabetes ."])

        assert report.non_finite_tokens == report.label_mismatches == 12
        assert (report.spans.exact, report.spans.missing) == (1, 3)
        assert report.logits.maximum < 1e-6
        assert report.findings[0].status == "failed"

    def test_candidate_that_overflows(self, tiny, tmp_path):
        """A model whose weights are too large for float16 has failed there, and that is no error."""

        def enlarge(model):
            model.classifier.weight[0, 0] = 7e4

        report = compared(changed(tiny, tmp_path, enlarge), [NOTE], dtype="float16")
        assert (report.non_finite_tokens, report.status) == (12, "failed")

    def test_autocast_around_does_not_count(self, close_model, close_models):
        """In a block of autocast the reference is not rounded too, and what moves is found."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            report = compared(close_model, [close_models.NOTE], dtype="bfloat16")
            assert torch.is_autocast_enabled("cpu")
        assert (report.spans.reference, report.spans.missing) == (1, 1)

    def test_reference_that_computes_nan(self, tiny, tmp_path):
        """Where the reference itself has non-finite logits, there is nothing to compare with."""
        folder = changed(tiny, tmp_path, lambda model: model.classifier.bias.fill_(float("nan")))
        with pytest.raises(InvalidModelError, match="has non-finite logits"):
            compared(folder, [NOTE])

    def test_pipeline_is_compared_with_its_own_weights(self, pipe):
        """The reference of a pipeline is a float32 copy of its model as it is; the model itself stays as it is."""
        with torch.no_grad():
            pipe.model.classifier.bias[0] += 100
        before = {name: one.clone() for name, one in pipe.model.state_dict().items()}

        assert nb.runbook.parity(pipe, [NOTE]).spans.all == 0
        assert all(torch.equal(one, before[name]) for name, one in pipe.model.state_dict().items())

    def test_rounded_pipeline_says_what_the_reference_is(self, pipe):
        """The float32 copy of a pipeline in 16 bits has rounded weights, which the report tells."""
        pipe.model.bfloat16()
        report = nb.runbook.parity(pipe, [NOTE])

        assert "rounded to bfloat16" in str(report)
        assert (report.dtype, pipe.model.dtype) == ("bfloat16", torch.bfloat16)

    @pytest.mark.filterwarnings("ignore::openmed_nb.errors.OpenMedWarning")
    def test_pipeline_in_int8_has_no_float32_weights(self, load, keyword_model):
        """A pipeline in int8 cannot be compared, and the error says what can."""
        pipe = load(keyword_model, dtype="int8")
        with pytest.raises(
            ConfigurationError, match=r"in int8 has no float32 weights\. Pass the model's name and dtype='int8'"
        ):
            nb.runbook.parity(pipe, [NOTE])


def test_model_that_cannot_be_copied(pipe):
    """A pipeline whose model holds what nobody can copy, such as a hook with a lock, gives an error that says so."""
    lock = threading.Lock()
    pipe.model.register_forward_hook(functools.partial(lambda *_: None, lock))
    with pytest.raises(
        ConfigurationError, match=r"BertForTokenClassification cannot be copied: cannot pickle '_thread\.lock'"
    ):
        nb.runbook.parity(pipe, [NOTE])


class TestGradients:
    """One step of training in two ways."""

    @pytest.mark.parametrize(
        "dtype", ["bfloat16", *(pytest.param(one, marks=pytest.mark.slow) for one in ("float32", "float16"))]
    )
    def test_gradients_within_their_tolerance(self, dtype):
        """The gradients of a step of a bundled model are within the tolerance of the type."""
        report = compared("bundled_small", [NOTE, LONG], dtype=dtype, gradients=True)

        assert report.gradients.largest <= report.tolerance.gradients
        assert report.gradients.parameters > 20

    def test_wrong_gradient_is_found_and_named(self, load, random_model):
        """A parameter whose gradient is wrong is named."""
        pipe = load(random_model)
        pipe.model.classifier.weight.register_hook(lambda gradient: gradient * 1000)
        report = nb.runbook.parity(pipe, [NOTE], gradients=True)

        assert report.gradients.parameter == "classifier.weight"
        assert report.gradients.largest == pytest.approx(999, rel=1e-3)
        assert report.findings[-1].status == "failed"

    def test_without_gradients(self, pipe, keyword_model):
        """Where no parameter has a gradient, none is compared; asking for gradients in int8 is an error."""
        pipe.model.requires_grad_(False)
        assert nb.runbook.parity(pipe, [NOTE], gradients=True).gradients is None
        with pytest.raises(ConfigurationError, match="do not support gradients"):
            compared(keyword_model, [NOTE], dtype="int8", gradients=True)


class TestGold:
    """Both ways against what is true."""

    GOLD = ([(16, 33, D), (38, 50, D), (56, 62, D)], [{"start": 4, "end": 11, "label": D}])
    TEXTS = (NOTE, "the patient has asthma .")

    def test_both_are_scored(self, pipe):
        """Reference and candidate are scored against gold, text by text."""
        reference, candidate = nb.runbook.parity(pipe, self.TEXTS, gold=self.GOLD).gold

        assert reference == candidate
        assert (reference.gold, reference.predicted, reference.correct) == (4, 4, 3)

    def test_gold_of_something_else(self, pipe):
        """Gold of other texts, or with labels that the model cannot give, is an error with the number of the text."""
        cases = [
            (self.TEXTS, self.GOLD[:1], "The gold covers 1 text, but there are 2"),
            (self.TEXTS[:1], self.GOLD, "The gold covers 2 texts, but there are 1"),
            (iter(self.TEXTS), self.GOLD[:1], "Gold for text 1 is missing"),
            (iter(self.TEXTS[:1]), self.GOLD, "The gold covers 2 texts, but there are 1"),
            (self.TEXTS, ([], [(0, 25, D)]), r"gold of text 1 ends after the end of the text \(character 24\)"),
            (self.TEXTS, ([], [(16, 22, "O")]), "labels of the model only: DISEASE\\."),
            (
                self.TEXTS,
                ([(16, 33, D)], [(16, 22, "asthma")]),
                "1 of 2 gold entities have a label that the model does not have. Use the labels of the model.*: DISEASE",
            ),
        ]
        for texts, gold, said in cases:
            with pytest.raises(ConfigurationError, match=said) as caught:
                nb.runbook.parity(pipe, texts, gold=gold)
            assert "asthma" not in str(caught.value), said


class TestTexts:
    """What can be compared on."""

    def test_what_is_no_series(self, pipe):
        """No text, one text alone, what is none, and texts in the place of the model are errors that say the order."""
        order = "Pass the model first and then"
        cases = [(pipe, texts, "There are no texts to compare") for texts in (None, [], iter(()), ())]
        cases += [(pipe, texts, "series of texts") for texts in (5, {"text": NOTE})]
        cases += [(pipe, "asthma", "A str is not a valid value for texts")]
        cases += [([NOTE], "bundled", f"{order} a list of texts"), ([NOTE], None, f"{order} the texts")]
        for model, texts, says in cases:
            with pytest.raises(ConfigurationError, match=says):
                nb.runbook.parity(model, texts)

    def test_unreadable_text_is_named_by_its_number(self, pipe):
        """A text that cannot be read is an error with its number."""
        for text in (None, 5, "\ud800 asthma"):
            with pytest.raises(InvalidTextError, match=r"Text 1 (must|has)") as caught:
                nb.runbook.parity(pipe, [NOTE, text])
            assert "asthma" not in str(caught.value)

    def test_failing_stream(self, pipe):
        """What the stream of texts fails with is what is raised."""

        def texts():
            yield NOTE
            raise KeyError(5)

        with pytest.raises(KeyError):
            nb.runbook.parity(pipe, texts())


def test_batch_that_does_not_fit_is_halved(pipe):
    """Where memory is short, a batch is compared in halves, with the same result; a single window is an error."""
    texts, seen, most = [NOTE] * 8, [], 3

    def refuse(model, _args, kwargs):
        if model is pipe.model:  # The copy that is the reference has the hook too.
            seen.append(len(kwargs["input_ids"]))
            if seen[-1] > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    pipe.model.register_forward_pre_hook(refuse, with_kwargs=True)
    report = nb.runbook.parity(pipe, texts)

    assert seen == [8, 4, 2, 2, 4, 2, 2]
    assert (report.tokens, report.spans.exact) == (12 * 8, 3 * 8)
    most = 0
    with pytest.raises(DeviceUnavailableError, match="could not be compared on cpu: CUDA out of memory"):
        nb.runbook.parity(pipe, texts)


class TestPublicFunction:
    """What it takes, and what it leaves alone."""

    def test_nothing_of_the_session_changes(self, keyword_model):
        """The models that are loaded for a comparison are gone after it; those of the session stay."""
        kept = SESSION.load_model(str(keyword_model), OpenMedConfig())
        before = sum(type(one) is type(kept.model) for one in gc.get_objects())
        report = nb.runbook.parity(str(keyword_model), [NOTE], dtype="bfloat16")
        gc.collect()

        assert (report.model, report.device, report.dtype) == (str(keyword_model), "cpu", "bfloat16")
        assert SESSION.inventory().names == (str(keyword_model),)
        assert SESSION.load_model(str(keyword_model), OpenMedConfig()).model is kept.model
        assert sum(type(one) is type(kept.model) for one in gc.get_objects()) <= before
        assert SESSION.device().device == "cpu"
        SESSION.unload()

    def test_types(self, keyword_model):
        """A type is named by its name or as torch's own; "auto" is the type that a load would take."""
        report = compared(keyword_model, [NOTE], dtype=torch.float16)

        assert (report.dtype, report.spans.exact) == ("float16", 3)
        assert compared(keyword_model, [NOTE], dtype="auto").dtype == "float32"

    def test_arguments_that_cannot_be_used(self, keyword_model, pipe):
        """An argument that a load does not take, a device that is not here, and a type for a loaded pipeline are errors."""
        cases = [
            (str(keyword_model), {"dtype": "float64"}, "cannot be loaded as 'float64'"),
            (str(keyword_model), {"dtype": "int8", "device": "mps"}, "mps"),
            (str(keyword_model), {"stride": 8}, "There is no option stride"),
            (pipe, {"dtype": "bfloat16"}, "cannot take dtype"),
        ]
        for model, arguments, said in cases:
            with pytest.raises((ConfigurationError, DeviceUnavailableError), match=said):
                nb.runbook.parity(model, [NOTE], **arguments)


def test_simulated_device_says_so(keyword_model):
    """On a simulated MPS a comparison works, and says that no figure is one of MPS."""
    with nb.simulated_mps():
        report = nb.runbook.parity(str(keyword_model), [NOTE], gradients=True)

    assert report.device == "mps (SIMULATED)"
    assert report.status == "ok"
    assert "SIMULATED MPS: no figure here is one of MPS." in str(report)
