"""The pipeline replaces that of transformers: by name, subclassed, forked, cached or modified."""

import itertools
import json
import os
import pickle
import signal
import threading

import pytest
import torch
import transformers
from transformers import TokenClassificationPipeline
from transformers.pipelines.token_classification import AggregationStrategy

from helpers import tiny_models as tiny
from helpers.annotations import annotated, on_forward, rounded, words_of
from helpers.tiny_models import sentences
from openmed_nb.annotation.pipeline import AnnotationPipeline
from openmed_nb.devices.backend import TENSOR_LOCK, TOKENIZER_LOCK
from openmed_nb.devices.registry import get_device
from openmed_nb.errors import ConfigurationError, InvalidTextError
from openmed_nb.session import SESSION

TEXT = "the patient has diabetes mellitus and hypertension ."


@pytest.fixture(scope="module")
def theirs(new_pipe):
    """A function that returns transformers' own pipeline over the same model."""
    return lambda strategy="simple", **options: new_pipe(strategy, TokenClassificationPipeline, **options)


@pytest.fixture
def pipe(new_pipe):
    """A pipeline that joins tokens to entities."""
    return new_pipe()


class TestInputs:
    """Whatever kind of input transformers takes."""

    def test_endless_generator(self, pipe):
        """A generator without an end is read as far as answers are asked for, and some texts more."""
        read = itertools.count()
        answers = pipe((f"asthma {next(read)}" for _ in itertools.repeat(None)), batch_tokens=512)
        assert next(read) <= 1  # transformers looks at the first text
        assert [next(answers) for _ in range(3)] == rounded(pipe([f"asthma {number}" for number in (0, 2, 3)]))
        assert next(read) < 10_000

    @pytest.mark.parametrize("texts", [None, {"text": TEXT}], ids=str)
    def test_call_rejects_other_inputs(self, pipe, theirs, texts):
        """What transformers refuses as an input is refused, as the same kind of error."""
        for pipeline in (pipe, theirs()):
            with pytest.raises(ValueError, match=r"At least one input|must be a"):
                pipeline(texts)

    @pytest.mark.parametrize("bad", [5, "\ud800"], ids=repr)
    def test_invalid_text_is_named(self, pipe, bad):
        """A text that cannot be read is named by its number, and the texts around it are answered."""
        texts = [TEXT, "asthma", bad, TEXT]
        with pytest.raises(InvalidTextError, match=r"^Text 2 ") as caught:
            pipe(texts)
        assert "asthma" not in str(caught.value)
        answers = pipe(text for text in texts)
        assert [len(next(answers)) > 0, len(next(answers)) > 0] == [True, True]
        with pytest.raises(InvalidTextError):
            next(answers)
        assert [next(answers)] == rounded(pipe([TEXT]))


class TestArguments:
    """Arguments of a call, and of the pipeline."""

    @pytest.mark.parametrize(
        "options",
        [
            {"aggregation_strategy": "none"},
            {"aggregation_strategy": "average"},
            {"aggregation_strategy": AggregationStrategy.MAX},
            {"ignore_labels": ["DATE", "O"]},
            {"stride": 8},
            {"batch_size": 4, "num_workers": 0},
        ],
        ids=str,
    )
    def test_argument_applies_to_one_call(self, pipe, theirs, options):
        texts = [text[:250] for text in sentences(12, longest=40)]
        before = pipe(texts)
        assert pipe(texts, **options) == rounded(theirs()(texts, **options))
        # Matrix products may use another library by now, so the last digits may differ.
        assert pipe(texts) == rounded(before)

    def test_batch_tokens_limit_batches(self, pipe):
        sizes = []
        on_forward(pipe.model, lambda ids: sizes.append(ids.numel()))
        pipe(sentences(60), batch_tokens=100)
        assert max(sizes) <= 100
        pipe(sentences(60))
        assert max(sizes) > 100

    @pytest.mark.parametrize(
        "options",
        [
            {"batch_tokens": 0},
            *({"batch_size": size} for size in (0, "big")),
            *({"stride": stride} for stride in (-1, 62, 1000, "wide")),
            {"aggregation_strategy": "banana"},
            {"ignore_labels": "DATE"},
            {"ignore_labels": [5]},
            {"banana": 1},
        ],
        ids=str,
    )
    def test_invalid_options(self, pipe, new_pipe, options):
        """The error names the argument, and the pipeline can still be used."""
        name = next(iter(options)).removeprefix("aggregation_") + "|options"
        with pytest.raises(ConfigurationError, match=name):
            pipe(TEXT, **options)
        with pytest.raises(ConfigurationError, match=name):
            new_pipe(
                **{"strategy": "simple", **{key.removeprefix("aggregation_"): value for key, value in options.items()}}
            )(TEXT)
        assert len(pipe(TEXT)) > 0


class TestObject:
    """The pipeline as an object."""

    def test_pipeline_is_a_transformers_pipeline(self, pipe):
        """It is transformers' own class, with what people read of it."""
        assert isinstance(pipe, TokenClassificationPipeline)
        assert repr(pipe).startswith("AnnotationPipeline: {'model': 'BertForTokenClassification'")
        assert pipe.transform([TEXT]) == pipe.predict([TEXT]) == pipe([TEXT])

    def test_save_pretrained_round_trip(self, pipe, tmp_path):
        """What it saves is loaded by transformers and by this class, with the same answers."""
        pipe.save_pretrained(tmp_path)
        options = {"aggregation_strategy": "simple", "device": -1}
        for pipeline_class in (AnnotationPipeline, TokenClassificationPipeline):
            loaded = transformers.pipeline(
                "token-classification", str(tmp_path), pipeline_class=pipeline_class, **options
            )
            assert type(loaded) is pipeline_class
            assert loaded([TEXT]) == rounded(pipe([TEXT]))

    def test_results_are_json_serializable(self, pipe):
        """Answers are of Python's own types, so they can be written as JSON, pickled, and compared."""
        answers = pipe([TEXT, ""])
        assert json.loads(json.dumps(answers)) == pickle.loads(pickle.dumps(answers)) == answers  # noqa: S301 - our own
        assert {type(value) for entity in answers[0] for value in entity.values()} == {str, int, float}


class TestDevice:
    """The device is the model's."""

    def test_device_follows_model(self, pipe, second_device):
        """The device can be set in any spelling, and follows a model that someone else moved."""
        expected = pipe([TEXT])
        for device in (second_device, torch.device("cpu"), torch.device(second_device), "cpu"):
            pipe.device = device
            assert pipe.device == pipe.model.device == torch.device(device)
            assert pipe([TEXT]) == rounded(expected)
        pipe.model.to(second_device)
        assert pipe.device == torch.device(second_device)
        assert pipe([TEXT]) == rounded(expected)

    @pytest.mark.parametrize("device", ["banana", "cpu:x", "", None, 1.5])
    def test_device_setter_rejects_invalid_device(self, pipe, device, home):
        """The pipeline stays on its device."""
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            pipe.device = device
        assert pipe.device.type == home


WORDS = ["diabetes mellitus", "hypertension", "asthma"]


class TestBuilding:
    """The remaining arguments go to transformers' pipeline."""

    @pytest.mark.parametrize(
        "options",
        [{"grouped_entities": True}, {"stride": 1.5}, {"tokenizer": None}, {"model_kwargs": {}}],
        ids=str,
    )
    def test_build_pipeline_rejects_options(self, pipe_of, keyword_model, options):
        """An option that the pipeline does not have or cannot use is one error, at once; the model stays loaded."""
        with pytest.raises(ConfigurationError, match=r"option|stride"):
            pipe_of(keyword_model, **options)
        assert words_of(pipe_of(keyword_model)) == WORDS


TWO = ["the patient has diabetes mellitus", "no asthma ."]


def test_another_tokenizer_has_its_own_frame(new_pipe):
    """The special tokens are determined again if the tokenizer is replaced."""
    pipe = new_pipe()
    assert len(pipe.special_tokens.suffix_ids) == 1
    pipe.tokenizer = tiny.tokenizer(model_max_length=64)
    pipe.tokenizer.backend_tokenizer.post_processor = None

    assert len(pipe.special_tokens.suffix_ids) == 0


def test_measured_budget_stays_on_its_kind_of_device(new_pipe, home):
    """What was measured on one kind of device is not used on another."""
    pipe = new_pipe()
    pipe.tuned_batch_tokens = {"cuda": 4096}

    assert pipe.batch_tokens == get_device(home).batch_tokens
    pipe.tuned_batch_tokens = {home: 4096}
    assert pipe.batch_tokens == 4096


def test_model_that_passes_all_arguments_on(new_pipe):
    """A model whose forward names no argument gets all arrays of its tokenizer."""
    pipe = new_pipe()
    expected = pipe(TWO)

    class Wrapped(type(pipe.model)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    pipe.model.__class__ = Wrapped
    assert pipe(TWO) == expected


def test_more_labels_than_16_bits(new_pipe):
    """The number of a label may be larger than sixteen bits hold."""
    pipe = new_pipe()
    weight = pipe.model.classifier.weight
    count = 40_000
    with torch.no_grad():
        pipe.model.classifier = torch.nn.Linear(weight.shape[1], count, device=pipe.device)
        pipe.model.classifier.weight.zero_()
        pipe.model.classifier.bias.copy_(torch.arange(count) == count - 1)
    pipe.model.config.id2label = {number: f"L{number}" for number in range(count)}

    assert pipe("asthma", aggregation_strategy="simple")[0]["entity_group"] == f"L{count - 1}"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("lock", [TENSOR_LOCK, TOKENIZER_LOCK, SESSION.lock], ids=["tensors", "tokenizer", "session"])
def test_forked_child_does_not_wait_for_a_lost_thread(lock):
    """A child that was forked while another thread held the lock can take it."""
    held, let_go = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            let_go.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        os._exit(0 if lock.acquire(timeout=5) else 1)
    let_go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_annotate_rejects_options_of_transformers(new_pipe):
    with pytest.raises(ConfigurationError, match="stride, truncation"):
        annotated(new_pipe("first", stride=8, truncation=True), TWO)
