"""A model is run in two ways over the same texts, and what differs is counted: on the CPU, in reduced types, simulated."""

from __future__ import annotations

import functools
import gc
import json
import threading

import pytest
import torch

import openmed_nb as nb
from openmed_nb.annotation.building import build_pipeline
from openmed_nb.errors import ConfigurationError, DeviceUnavailable, ModelUnusable, UnreadableText
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.models.loading import LoadSpec, load
from openmed_nb.runbook.precision.measurement import parity_of
from openmed_nb.runbook.precision.pairs import evaluating, float32_copy, pair_of_files, pair_of_pipeline
from openmed_nb.session import SESSION

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.real_computer]

NOTE = "the patient has diabetes mellitus and hypertension . no asthma ."
LONG = "the patient was seen . " * 40 + NOTE
D = "DISEASE"


@pytest.fixture
def spec(keyword_model):
    """The keyword model with default settings."""
    return LoadSpec.of(str(keyword_model), OpenMedConfig())


@pytest.fixture
def pipe(spec):
    """A pipeline over the keyword model on the CPU."""
    return build_pipeline(load(spec, "cpu"), "first", {})


def with_weight(tiny, tmp_path, change):
    """Return a copy of the keyword model after a change of its weights."""
    model = tiny.keyword_bert()
    with torch.no_grad():
        change(model)
    return LoadSpec.of(str(tiny.save(tmp_path / "changed", model)), OpenMedConfig())


class TestSameModel:
    """A model compared with itself."""

    def test_identical_models_differ_in_nothing(self, spec):
        """Two loads of one model on the same device in the same type give the same numbers."""
        report = parity_of(pair_of_files(spec, "cpu"), [NOTE, "", LONG], gradients=True)

        assert report.logits.maximum == 0.0
        assert (report.other_labels, report.not_numbers) == (0, 0)
        assert (report.spans.exact, report.spans.all) == (6, 6)
        assert report.gradients.largest == 0.0
        assert report.status == "ok"

    def test_every_token_is_compared_once(self, spec, pipe):
        """Long texts are read whole in overlapping windows, and each token counts once."""
        texts = [NOTE, LONG]
        report = parity_of(pair_of_files(spec, "cpu"), texts)

        assert report.tokens == sum(len(pipe.tokenizer.tokenize(text)) for text in texts)
        assert report.windows > len(texts)
        assert report.texts == 2

    @pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
    def test_every_strategy(self, spec, strategy):
        """A pipeline of any strategy is compared in the entities that it gives itself."""
        pipe = build_pipeline(load(spec, "cpu"), strategy, {})
        report = parity_of(pair_of_pipeline(pipe), [NOTE])

        assert report.spans.exact == len(pipe(NOTE))
        assert report.spans.exact == report.spans.all > 0

    def test_texts_are_told_apart_without_their_words(self, spec):
        """The report keeps a fingerprint of the texts, which other texts or another order change, and no word."""
        reports = [parity_of(pair_of_files(spec, "cpu"), texts) for texts in ([NOTE, LONG], [LONG, NOTE], [NOTE, LONG])]

        assert reports[0].texts_fingerprint == reports[2].texts_fingerprint != reports[1].texts_fingerprint
        told = json.dumps(reports[0].to_dict()) + str(reports[0]) + reports[0]._repr_html_()
        assert not [word for word in ("asthma", "mellitus", "patient") if word in told]

    def test_stream_of_texts_is_read_once(self, spec):
        """A generator of texts is enough."""
        assert parity_of(pair_of_files(spec, "cpu"), (text for text in [NOTE] * 3)).spans.exact == 9

    def test_mode_of_the_model_comes_back(self, pipe):
        """A model that is being trained is compared without dropout, and is in training as before."""
        pipe.model.train()
        pipe.model.bert.embeddings.eval()
        before = [part.training for part in pipe.model.modules()]

        assert parity_of(pair_of_pipeline(pipe), [NOTE] * 3, gradients=True).logits.maximum < 1e-6
        assert [part.training for part in pipe.model.modules()] == before
        assert all(parameter.grad is None for parameter in pipe.model.parameters())

    def test_mode_comes_back_after_an_error(self, pipe):
        """The mode comes back also where a comparison fails."""
        pipe.model.train()
        with pytest.raises(RuntimeError), evaluating(pipe.model):
            raise RuntimeError
        assert all(part.training for part in pipe.model.modules())


class TestWhatDiffers:
    """A candidate that is not what the reference is."""

    def test_moved_answers_are_found(self, close_model, close_models):
        """A model whose answers hang on a thousandth of a logit loses them in bfloat16, though its logits hardly move."""
        spec = LoadSpec.of(str(close_model), OpenMedConfig(dtype="bfloat16"))
        report = parity_of(pair_of_files(spec, "cpu"), ["the patient was seen .", close_models.NOTE])

        assert report.logits.maximum <= report.tolerance.logits
        assert (report.spans.missing, report.spans.changes[0].reference) == (1, (16, 22, D))
        assert report.spans.changes[0].text == 1
        assert report.other_labels == 1
        assert report.status == "failed"

    def test_type_without_a_tolerance(self, pipe):
        """A model in a type for which there is no tolerance, such as float64, is refused before anything is computed."""
        pipe.model.double()
        with pytest.raises(ConfigurationError, match=r"in float64 cannot be compared.* Call \.float\(\) on its model"):
            pair_of_pipeline(pipe)

    def test_quantiles_are_of_the_largest_of_each_token(self, pipe):
        """Of each token the largest difference of a logit counts; the quantiles are over all tokens."""
        pair = pair_of_pipeline(pipe)
        with torch.no_grad():
            pipe.model.classifier.bias += torch.tensor([0.0, 0.25, -0.5])
        logits = parity_of(pair, [NOTE]).logits

        assert [logits.maximum, logits.median, logits.ninety_nine] == pytest.approx([0.5] * 3, abs=1e-5)

    def test_nan_is_told_and_not_compared_away(self, pipe):
        """A candidate that computes NaN has failed: its tokens are counted, their labels differ, its entities are missing."""
        pair = pair_of_pipeline(pipe)
        with torch.no_grad():
            pipe.model.bert.embeddings.word_embeddings.weight[pipe.tokenizer.vocab["asthma"]] = float("nan")
        report = parity_of(pair, [NOTE, "history of diabetes ."])

        assert report.not_numbers == report.other_labels == 12
        assert (report.spans.exact, report.spans.missing) == (1, 3)
        assert report.logits.maximum < 1e-6
        assert report.findings[0].status == "failed"

    def test_candidate_that_overflows(self, tiny, tmp_path):
        """A model whose weights are too large for float16 has failed there, and that is no error."""

        def enlarge(model):
            model.classifier.weight[0, 0] = 7e4

        spec = with_weight(tiny, tmp_path, enlarge).in_dtype("float16")
        report = parity_of(pair_of_files(spec, "cpu"), [NOTE])
        assert (report.not_numbers, report.status) == (12, "failed")

    def test_autocast_around_does_not_count(self, close_model, close_models):
        """In a block of autocast the reference is not rounded too, and what moves is found."""
        spec = LoadSpec.of(str(close_model), OpenMedConfig(dtype="bfloat16"))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            report = parity_of(pair_of_files(spec, "cpu"), [close_models.NOTE])
            assert torch.is_autocast_enabled("cpu")
        assert (report.spans.reference, report.spans.missing) == (1, 1)

    def test_reference_that_computes_nan(self, tiny, tmp_path):
        """Where the reference itself computes no numbers, there is nothing to compare with."""
        spec = with_weight(tiny, tmp_path, lambda model: model.classifier.bias.fill_(float("nan")))
        with pytest.raises(ModelUnusable, match="computes no numbers"):
            parity_of(pair_of_files(spec, "cpu"), [NOTE])

    def test_pipeline_is_compared_with_its_own_weights(self, pipe):
        """The reference of a pipeline is a float32 copy of its model as it is; the model itself stays as it is."""
        with torch.no_grad():
            pipe.model.classifier.bias[0] += 100
        before = {name: one.clone() for name, one in pipe.model.state_dict().items()}

        assert parity_of(pair_of_pipeline(pipe), [NOTE]).spans.all == 0
        assert all(torch.equal(one, before[name]) for name, one in pipe.model.state_dict().items())

    def test_rounded_pipeline_says_what_the_reference_is(self, keyword_model):
        """The float32 copy of a pipeline in 16 bits has rounded weights, which the report tells."""
        pipe = build_pipeline(
            load(LoadSpec.of(str(keyword_model), OpenMedConfig(dtype="bfloat16")), "cpu"), "first", {}
        )
        report = parity_of(pair_of_pipeline(pipe), [NOTE])

        assert "rounded to bfloat16 already" in str(report)
        assert (report.dtype, pipe.model.dtype) == ("bfloat16", torch.bfloat16)

    def test_pipeline_in_int8_has_no_float32_weights(self, keyword_model):
        """A pipeline in int8 cannot be compared, and the error says what can."""
        pipe = build_pipeline(load(LoadSpec.of(str(keyword_model), OpenMedConfig(dtype="int8")), "cpu"), "first", {})
        with pytest.raises(ConfigurationError, match=r"in int8 are gone\. Pass the model's name and dtype='int8'"):
            pair_of_pipeline(pipe)


def test_copy_shares_nothing(pipe):
    """A float32 copy has tensors of its own, ties included, and the same settings of gradients."""
    pipe.model.classifier.bias.requires_grad_(False)
    copied = float32_copy(pipe.model)

    theirs = {one.data_ptr() for one in (*copied.parameters(), *copied.buffers())}
    assert not theirs & {one.data_ptr() for one in (*pipe.model.parameters(), *pipe.model.buffers())}
    assert [one.requires_grad for one in copied.parameters()] == [one.requires_grad for one in pipe.model.parameters()]
    assert {one.dtype for one in copied.buffers()} == {one.dtype for one in pipe.model.buffers()}


def test_model_that_cannot_be_copied(pipe):
    """A pipeline whose model holds what nobody can copy, such as a hook with a lock, gives an error that says so."""
    lock = threading.Lock()
    pipe.model.register_forward_hook(functools.partial(lambda *_: None, lock))
    with pytest.raises(
        ConfigurationError, match=r"BertForTokenClassification cannot be copied: cannot pickle '_thread\.lock'"
    ):
        pair_of_pipeline(pipe)


class TestGradients:
    """One step of training in two ways."""

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_gradients_within_their_tolerance(self, dtype):
        """The gradients of a step of a bundled model are within the tolerance of the type."""
        spec = LoadSpec.of("bundled_small", OpenMedConfig(dtype=dtype))
        report = parity_of(pair_of_files(spec, "cpu"), [NOTE, LONG], gradients=True)

        assert report.gradients.largest <= report.tolerance.gradients
        assert report.gradients.parameters > 20

    def test_wrong_gradient_is_found_and_named(self, random_model):
        """A parameter whose gradient is wrong is named."""
        pipe = build_pipeline(load(LoadSpec.of(str(random_model), OpenMedConfig()), "cpu"), "first", {})
        pair = pair_of_pipeline(pipe)
        pipe.model.classifier.weight.register_hook(lambda gradient: gradient * 1000)
        report = parity_of(pair, [NOTE], gradients=True)

        assert report.gradients.parameter == "classifier.weight"
        assert report.gradients.largest == pytest.approx(999, rel=1e-3)
        assert report.findings[-1].status == "failed"

    def test_frozen_model_has_none(self, pipe):
        """Where no parameter has a gradient, none is compared."""
        pipe.model.requires_grad_(False)
        assert parity_of(pair_of_pipeline(pipe), [NOTE], gradients=True).gradients is None

    def test_int8_has_none(self, keyword_model):
        """Asking for gradients in int8 is an error."""
        spec = LoadSpec.of(str(keyword_model), OpenMedConfig(dtype="int8"))
        with pytest.raises(ConfigurationError, match="no gradients"):
            parity_of(pair_of_files(spec, "cpu"), [NOTE], gradients=True)


class TestGold:
    """Both ways against what is true."""

    GOLD = ([(16, 33, D), (38, 50, D), (56, 62, D)], [{"start": 4, "end": 11, "label": D}])
    TEXTS = (NOTE, "the patient has asthma .")

    def test_both_are_scored(self, spec):
        """Reference and candidate are scored against gold, text by text."""
        reference, candidate = parity_of(pair_of_files(spec, "cpu"), self.TEXTS, gold=self.GOLD).gold

        assert reference == candidate
        assert (reference.gold, reference.found, reference.right) == (4, 4, 3)

    @pytest.mark.parametrize(
        ("texts", "gold", "said"),
        [
            (TEXTS, GOLD[:1], "The gold is of 1 text, and there are 2"),
            (TEXTS[:1], GOLD, "The gold is of 2 texts, and there are 1"),
            (iter(TEXTS), GOLD[:1], "There is no gold for text 1"),
            (iter(TEXTS[:1]), GOLD, "The gold is of 2 texts, and there are 1"),
            (TEXTS, ([], [(0, 25, D)]), "gold of text 1 ends after character 24"),
            (TEXTS, ([], [(16, 22, "O")]), "Use those of the model: DISEASE\\."),
            (TEXTS, ([], [(16, 22, "asthma")]), "The labels of the gold are none of the model's. Use those .* DISEASE"),
        ],
    )
    def test_gold_of_something_else(self, spec, texts, gold, said):
        """Gold of other texts, or with labels that the model cannot give, is an error with the number of the text."""
        with pytest.raises(ConfigurationError, match=said) as caught:
            parity_of(pair_of_files(spec, "cpu"), texts, gold=gold)
        assert "asthma" not in str(caught.value)


class TestTexts:
    """What can be compared on."""

    @pytest.mark.parametrize("texts", [None, [], iter(()), ()])
    def test_no_text(self, session, keyword_model, texts):
        """Without a text there is nothing to compare on."""
        with pytest.raises(ConfigurationError, match="There is no text to compare on"):
            session.parity(str(keyword_model), texts, {})

    @pytest.mark.parametrize("texts", ["asthma", 5, {"text": NOTE}])
    def test_what_is_no_series(self, session, keyword_model, texts):
        """One text alone, and what is none, is an error."""
        with pytest.raises(ConfigurationError, match="is no series of texts"):
            session.parity(str(keyword_model), texts, {})

    def test_model_and_texts_in_the_other_order(self):
        """A name in the place of the texts is an error that says the order."""
        with pytest.raises(ConfigurationError, match="Pass the model first and then a list of texts"):
            nb.parity([NOTE], "bundled")

    @pytest.mark.parametrize("text", [None, 5, "\ud800 asthma"])
    def test_unreadable_text_is_named_by_its_number(self, session, keyword_model, text):
        """A text that cannot be read is an error with its number."""
        with pytest.raises(UnreadableText, match=r"Text 1 (must|has)") as caught:
            session.parity(str(keyword_model), [NOTE, text], {})
        assert "asthma" not in str(caught.value)

    def test_failing_stream(self, session, keyword_model):
        """What the stream of texts fails with is what is raised."""

        def texts():
            yield NOTE
            raise KeyError(5)

        with pytest.raises(KeyError):
            session.parity(str(keyword_model), texts(), {})


def test_batch_that_does_not_fit_is_halved(pipe):
    """Where memory is short, a batch is compared in halves, with the same result; a single window is an error."""
    pair, texts = pair_of_pipeline(pipe), [NOTE] * 8
    seen = []

    def refuse(_model, _args, kwargs, most=3):
        seen.append(len(kwargs["input_ids"]))
        if seen[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    hook = pipe.model.register_forward_pre_hook(refuse, with_kwargs=True)
    report = parity_of(pair, texts)
    hook.remove()

    assert seen == [8, 4, 2, 2, 4, 2, 2]
    assert (report.tokens, report.spans.exact) == (12 * 8, 3 * 8)
    pipe.model.register_forward_pre_hook(lambda *given, **named: refuse(*given, **named, most=0), with_kwargs=True)
    with pytest.raises(DeviceUnavailable, match="could not be compared on cpu: CUDA out of memory"):
        parity_of(pair, texts)


class TestVerb:
    """What the session and the public function do."""

    def test_nothing_of_the_session_changes(self, session, keyword_model):
        """The models that are loaded for a comparison are gone after it; those of the session stay."""
        kept = session.load_model(str(keyword_model), OpenMedConfig())
        before = sum(type(one) is type(kept.model) for one in gc.get_objects())
        report = session.parity(str(keyword_model), [NOTE], {"dtype": "bfloat16"})
        gc.collect()

        assert (report.model, report.device, report.dtype) == (str(keyword_model), "cpu", "bfloat16")
        assert session.models.inventory().names == (str(keyword_model),)
        assert session.load_model(str(keyword_model), OpenMedConfig()).model is kept.model
        assert sum(type(one) is type(kept.model) for one in gc.get_objects()) <= before
        assert session._state.in_force == "cpu"

    def test_auto_is_compared_in_what_it_takes(self, session, keyword_model):
        """With dtype="auto" the type is compared that a load would take."""
        assert session.parity(str(keyword_model), [NOTE], {"dtype": "auto"}).dtype == "float32"

    def test_public_function(self, keyword_model):
        """A name with a device and a type, or a pipeline as it is, is compared."""
        report = nb.parity(str(keyword_model), [NOTE], device="cpu", dtype=torch.float16, gradients=True)
        assert (report.dtype, report.spans.exact) == ("float16", 3)
        pipe = nb.load_pipeline(str(keyword_model), device="cpu")
        try:
            assert nb.parity(pipe, [NOTE]).model == "BertForTokenClassification"
        finally:
            SESSION.unload()

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ({"dtype": "float64"}, "cannot be loaded as 'float64'"),
            ({"dtype": "int8", "device": "mps"}, "mps"),
            ({"stride": 8}, "There is no option stride"),
        ],
    )
    def test_arguments_that_cannot_be_used(self, keyword_model, arguments, said):
        """An argument that a load does not take, or a device that is not here, is an error."""
        with pytest.raises((ConfigurationError, DeviceUnavailable), match=said):
            nb.parity(str(keyword_model), [NOTE], **{"device": "cpu", **arguments})

    def test_pipeline_takes_no_device(self, pipe):
        """A pipeline is compared where it is, in its own type."""
        with pytest.raises(ConfigurationError, match="takes no dtype"):
            nb.parity(pipe, [NOTE], dtype="bfloat16")

    def test_texts_in_the_place_of_the_model(self):
        """Texts without a model are an error that says the order."""
        with pytest.raises(ConfigurationError, match="Pass the model first and then the texts"):
            nb.parity([NOTE])


def test_simulated_device_says_so(keyword_model):
    """On a simulated MPS a comparison works, and says that no figure is one of MPS."""
    with nb.simulated_mps():
        report = nb.parity(str(keyword_model), [NOTE], gradients=True)

    assert report.device == "mps (SIMULATED)"
    assert report.status == "ok"
    assert "SIMULATED MPS: no figure here is one of MPS." in str(report)
