"""The pipeline stands where transformers' own did."""

from __future__ import annotations

import itertools
import json
import pickle

import pytest
import torch
import transformers
from torch.utils.data import Dataset
from transformers import AutoModelForTokenClassification, AutoTokenizer, TokenClassificationPipeline
from transformers.pipelines.token_classification import AggregationStrategy

from openmed_nb.annotation.pipeline import AnnotationPipeline
from openmed_nb.errors import ConfigurationError, DeviceUnavailable, UnreadableText

TEXT = "the patient has diabetes mellitus and hypertension ."


class Texts(Dataset):
    """A data set of torch with some texts."""

    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, number):
        return self.texts[number]


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

    @pytest.mark.parametrize("text", [TEXT, "asthma", "", " "])
    def test_one_text(self, pipe, theirs, rounded, text):
        """One string returns what it returned, and not a list of it."""
        assert [pipe(text)] == rounded([theirs()(text)])

    @pytest.mark.parametrize("texts", [[TEXT], [TEXT, "asthma", "", TEXT], [""]])
    def test_list(self, pipe, theirs, rounded, texts):
        """A list returns a list with an answer for each text."""
        assert pipe(texts) == rounded(theirs()(texts))

    def test_generator(self, pipe, theirs, rounded, sentences):
        """A generator returns an iterator over the answers, in order."""
        answers = pipe(text for text in sentences(30))
        assert not isinstance(answers, list)
        assert list(answers) == rounded(theirs()(sentences(30)))

    def test_endless_generator(self, pipe, rounded):
        """A generator without an end is read as far as answers are asked for, and some texts more."""
        read = itertools.count()
        answers = pipe(f"asthma {next(read)}" for _ in itertools.repeat(None))
        assert next(read) <= 1  # transformers looks at the first text
        assert [next(answers) for _ in range(3)] == rounded(pipe([f"asthma {number}" for number in (0, 2, 3)]))
        assert next(read) < 10_000

    def test_generator_that_fails(self, pipe):
        """The texts before a failure of the generator are answered, and then its own error is raised."""

        def failing():
            yield from [TEXT, "asthma", TEXT]
            raise OSError("the disk is gone")

        answers = pipe(failing())
        assert [len(next(answers)) > 0 for _ in range(3)] == [True] * 3
        with pytest.raises(OSError, match="the disk is gone"):
            next(answers)

    def test_dataset(self, pipe, theirs, rounded, sentences):
        """A data set of torch returns as many answers as it has texts, and says how many beforehand."""
        answers = pipe(Texts(sentences(20)))
        assert len(answers) == 20
        assert list(answers) == rounded(theirs()(sentences(20)))

    def test_generator_has_no_length(self, pipe):
        """The answers to a generator have no length."""
        with pytest.raises(TypeError, match="no length"):
            len(pipe(text for text in [TEXT]))

    def test_split_into_words(self, pipe, theirs, rounded):
        """One list of words, and a list of such lists, return what they returned."""
        words = [TEXT.split(), ["asthma"]]
        options = {"is_split_into_words": True, "delimiter": "  "}
        assert pipe(words, **options) == rounded(theirs()(words, **options))
        assert pipe(words[0], is_split_into_words=True) == rounded(theirs()(words[0], is_split_into_words=True))

    @pytest.mark.parametrize("texts", [[], (), None, 5, {"text": TEXT}, (TEXT, TEXT)], ids=str)
    def test_no_text(self, pipe, theirs, texts):
        """What transformers refuses as an input is refused, as the same kind of error."""
        for one in (pipe, theirs()):
            with pytest.raises(ValueError, match=r"At least one input|must be a"):
                one(texts)

    @pytest.mark.parametrize("bad", [None, 5, b"asthma", ["asthma"], "\ud800"], ids=repr)
    def test_unreadable_text(self, pipe, rounded, bad):
        """A text that cannot be read is named by its number, and the texts around it are answered."""
        texts = [TEXT, "asthma", bad, TEXT]
        with pytest.raises(UnreadableText, match=r"^Text 2 ") as caught:
            pipe(texts)
        assert "asthma" not in str(caught.value)
        answers = pipe(text for text in texts)
        assert [len(next(answers)) > 0, len(next(answers)) > 0] == [True, True]
        with pytest.raises(UnreadableText):
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
            {"ignore_labels": []},
            {"ignore_labels": ["DATE", "O"]},
            {"stride": 8},
            {"batch_size": 1},
            {"batch_size": 4},
            {"num_workers": 0},
        ],
        ids=str,
    )
    def test_of_a_call(self, pipe, theirs, rounded, sentences, options):
        """An argument counts for one call, in which the answers are transformers', and not for the next."""
        texts = [text[:250] if "stride" not in options else text for text in sentences(12, longest=40)]
        before = pipe(texts)
        assert pipe(texts, **options) == rounded(theirs()(texts, **options))
        assert pipe(texts) == before

    @pytest.mark.parametrize("options", [{"stride": 8}, {"ignore_labels": []}, {"batch_size": 4}], ids=str)
    def test_of_the_pipeline(self, new_pipe, theirs, rounded, sentences, options):
        """An argument of the pipeline counts for every call."""
        texts = sentences(12, longest=40)
        assert new_pipe("first", **options)(texts) == rounded(theirs("first", **options)(texts))

    @pytest.mark.parametrize(
        ("options", "most"), [({"batch_tokens": 100}, 100), ({"batch_size": 2}, 128), ({"batch_size": 3}, 192)]
    )
    def test_size_of_batches(self, pipe, on_forward, sentences, options, most):
        """Batches have at most the tokens, and the rows, that are asked for; ``batch_tokens`` can also be set."""
        sizes = []
        on_forward(pipe.model, lambda ids: sizes.append(ids.numel()))
        pipe(sentences(60), **options)
        assert max(sizes) <= most
        pipe(sentences(60))
        assert max(sizes) > most
        sizes.clear()
        pipe.batch_tokens = 70
        pipe(sentences(60))
        assert (max(sizes), pipe.batch_tokens) == (pytest.approx(64, abs=6), 70)

    def test_one_row_at_a_time(self, new_pipe, on_forward, sentences):
        """A pipeline that was made with a batch size of one runs one window at a time."""
        pipe, heights = new_pipe(batch_size=1), set()
        on_forward(pipe.model, lambda ids: heights.add(len(ids)))
        pipe(sentences(20))
        assert heights == {1}

    @pytest.mark.parametrize(
        "options",
        [
            *({"batch_tokens": tokens} for tokens in (0, -1, 1.5, "many", True)),
            *({"batch_size": rows} for rows in (0, -1, 1.5, "many", True)),
            *({"stride": stride} for stride in (-1, 62, 64, 1000, 1.5, "wide", True)),
            {"aggregation_strategy": "banana"},
            {"aggregation_strategy": 5},
            {"ignore_labels": "DATE"},
            {"ignore_labels": 5},
            {"ignore_labels": [5]},
            {"banana": 1},
        ],
        ids=str,
    )
    def test_wrong(self, pipe, new_pipe, options):
        """A wrong argument is one error of ours that names it, in a call and for a new pipeline; the pipeline goes on."""
        name = next(iter(options)).removeprefix("aggregation_") + "|options"
        with pytest.raises(ConfigurationError, match=name):
            pipe(TEXT, **options)
        with pytest.raises(ConfigurationError, match=name):
            new_pipe(
                **{"strategy": "simple", **{key.removeprefix("aggregation_"): value for key, value in options.items()}}
            )(TEXT)
        assert len(pipe(TEXT)) > 0

    def test_offsets_of_the_caller(self, pipe, theirs, rounded):
        """Offsets that the caller brings along are read by transformers' own code."""
        offsets = [(0, 0), (10, 16), (16, 17), (0, 0)]
        options = {"offset_mapping": offsets}
        assert [pipe("asthma .", **options)] == rounded([theirs()("asthma .", **options)])
        assert {entity["start"] for entity in pipe("asthma .", **options)} <= {10, 16}


class TestObject:
    """The pipeline as an object."""

    def test_kind(self, pipe):
        """It is transformers' own class, with what people read of it."""
        assert isinstance(pipe, TokenClassificationPipeline)
        assert isinstance(pipe.model, transformers.PreTrainedModel)
        assert pipe.tokenizer.is_fast
        assert repr(pipe).startswith("AnnotationPipeline: {'model': 'BertForTokenClassification'")
        assert pipe.transform([TEXT]) == pipe.predict([TEXT]) == pipe([TEXT])

    def test_saved_and_loaded(self, pipe, rounded, tmp_path):
        """What it saves is loaded by transformers and by this class, with the same answers."""
        pipe.save_pretrained(tmp_path)
        options = {"aggregation_strategy": "simple", "device": -1}
        for own in (AnnotationPipeline, TokenClassificationPipeline):
            loaded = transformers.pipeline("token-classification", str(tmp_path), pipeline_class=own, **options)
            assert type(loaded) is own
            assert loaded([TEXT]) == rounded(pipe([TEXT]))
        parts = AutoModelForTokenClassification, AutoTokenizer
        model, tokenizer = (part.from_pretrained(tmp_path) for part in parts)
        assert AnnotationPipeline(model=model, tokenizer=tokenizer, **options)([TEXT]) == rounded(pipe([TEXT]))

    def test_answers_are_plain(self, pipe):
        """Answers are of Python's own types, so they can be written as JSON, pickled, and compared."""
        answers = pipe([TEXT, ""])
        assert json.loads(json.dumps(answers)) == pickle.loads(pickle.dumps(answers)) == answers  # noqa: S301 - our own
        assert {type(value) for entity in answers[0] for value in entity.values()} == {str, int, float}

    @pytest.mark.parametrize("strategy", ["none", "average"])
    def test_keys(self, new_pipe, theirs, strategy):
        """Entities have transformers' keys, in its order."""
        ours, other = new_pipe(strategy)(TEXT), theirs(strategy)(TEXT)
        assert [list(entity) for entity in ours] == [list(entity) for entity in other]

    def test_no_warning(self, pipe, recwarn, capsys):
        """Calls one after the other warn of nothing and print nothing."""
        for _ in range(12):
            pipe(TEXT)
        assert not [warning for warning in recwarn if "pipeline" in str(warning.message)]
        assert capsys.readouterr() == ("", "")


class TestDevice:
    """The device is the model's."""

    def test_moves_with_the_model(self, pipe, rounded, second_device):
        """The device can be set in any spelling, and follows a model that someone else moved."""
        expected = pipe([TEXT])
        for device in (second_device, torch.device("cpu"), torch.device(second_device), "cpu"):
            pipe.device = device
            assert pipe.device == pipe.model.device == torch.device(device)
            assert pipe([TEXT]) == rounded(expected)
        pipe.model.to(second_device)
        assert pipe.device == torch.device(second_device)
        assert pipe([TEXT]) == rounded(expected)

    @pytest.mark.parametrize("device", ["cuda:99", "xpu"])
    def test_that_is_not_here(self, pipe, device, home):
        """A device that this computer does not have is an error, and the pipeline stays where it was."""
        with pytest.raises(DeviceUnavailable, match=device):
            pipe.device = device
        assert pipe.device.type == home
        assert len(pipe(TEXT)) > 0

    @pytest.mark.parametrize("device", ["banana", "cpu:x", "", None, 1.5])
    def test_that_does_not_exist(self, pipe, device, home):
        """What names no device is an error, and the pipeline stays where it was."""
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            pipe.device = device
        assert pipe.device.type == home
