"""Many texts of any kind of series: all answered, in order, read as they are needed; errors lose nothing."""

import contextlib
import copy
import pickle
import signal
import weakref
from operator import length_hint

import datasets
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as some
from transformers import pipeline
from transformers.pipelines.pt_utils import KeyDataset

import openmed_nb as nb
from openmed_nb._annotate import _Inputs
from openmed_nb.annotation.masking import MAX_DISPLAYED_TEXTS
from openmed_nb.annotation.results import AnnotatedText
from openmed_nb.annotation.stream import chunk_characters
from openmed_nb.devices.machine import format_device
from openmed_nb.devices.registry import get_device
from openmed_nb.errors import ConfigurationError, InvalidTextError, RunInterrupted
from openmed_nb.session import SESSION

TEXTS = ["the patient has asthma .", "no history .", "", "type 2 diabetes mellitus and hypertension", "asthma"]
WORDS = [["asthma"], [], [], ["diabetes mellitus", "hypertension"], ["asthma"]]
TABLE = {"note": TEXTS, "other": list(range(len(TEXTS)))}
LONG = "asthma" + " " * 3000
"""Few tokens and many characters, so that a chunk contains few of these texts."""


@pytest.fixture(scope="module")
def pipe(pipe_of, keyword_model):
    """A pipeline over the keyword model."""
    return pipe_of(keyword_model)


@pytest.fixture(scope="module")
def few_at_once(pipe_of, keyword_model):
    """A pipeline with as many tokens at once as on the CPU, so that a few texts are many chunks on every device."""
    return pipe_of(keyword_model, batch_tokens=get_device("cpu").batch_tokens)


def words(found):
    """Return the words of each text."""
    return [[entity["word"] for entity in entities] for entities in found]


class TextFile:
    """A series of an older kind, without ``__iter__``."""

    def __getitem__(self, number):
        return TEXTS[number]


SERIES = {
    "list": lambda: TEXTS,
    "tuple": lambda: tuple(TEXTS),
    "generator": lambda: (text for text in TEXTS),
    "iterator": lambda: iter(TEXTS),
    "mapping's values": lambda: dict(enumerate(TEXTS)).values(),
    "Series": lambda: pd.Series(TEXTS, index=range(10, 15)),
    "string Series": lambda: pd.Series(TEXTS, dtype="string"),
    "column of a DataFrame": lambda: pd.DataFrame(TABLE)["note"],
    "column of a Dataset": lambda: datasets.Dataset.from_dict(TABLE)["note"],
    "column of a stream": lambda: datasets.Dataset.from_dict(TABLE).to_iterable_dataset()["note"],
    "array": lambda: np.array(TEXTS),
    "object array": lambda: np.array(TEXTS, dtype=object),
    "KeyDataset": lambda: KeyDataset(datasets.Dataset.from_dict(TABLE), "note"),
    "old series": TextFile,
}


class TestSeries:
    """What texts can be in."""

    @pytest.mark.parametrize("series", SERIES.values(), ids=SERIES)
    def test_every_series_gives_the_same_answers(self, annotated, pipe, series):
        """Whatever the texts are in, each has its answer, in their order."""
        found = annotated(pipe, series())
        assert words(found) == WORDS
        assert found.preview_texts == tuple(TEXTS)

    def test_one_text(self, annotated, pipe):
        """One string gives the entities of that text, as a list with it alone has them."""
        alone = annotated(pipe, "the patient has asthma .")
        assert isinstance(alone, AnnotatedText)
        assert list(alone) == annotated(pipe, ["the patient has asthma ."])[0]
        assert alone.text == "the patient has asthma ."

    @pytest.mark.parametrize("on_error", ["raise", "record"])
    def test_one_text_that_cannot_be_read(self, annotated, pipe, on_error):
        """With a single text, there is no other result to return."""
        with pytest.raises(InvalidTextError, match="unpaired surrogate"):
            annotated(pipe, "asthma \ud800", on_error=on_error)

    @pytest.mark.parametrize("series", SERIES.values(), ids=SERIES)
    def test_a_text_beyond_the_first_is_read_again(self, annotated, pipe, monkeypatch, series):
        """Of whatever can be read again each text can be shown; of a stream only the first, and what has passed is an error."""
        monkeypatch.setattr("openmed_nb._annotate.MAX_DISPLAYED_TEXTS", 1)
        found = annotated(pipe, series())
        again = annotated(pipe, found.texts) if found.texts is not None else None
        assert (again is None) == (series in {SERIES["generator"], SERIES["iterator"]})
        for number in range(1, len(TEXTS)) if again else ():
            assert found.at(number).text == TEXTS[number]
            assert [entity["word"] for entity in found.at(number)] == WORDS[number]

    @pytest.mark.parametrize("series", [[], (), iter(()), pd.Series([], dtype=str), np.array([], dtype=str)], ids=type)
    def test_no_text(self, annotated, pipe, series):
        """A series without a text has no answers."""
        found = annotated(pipe, series)
        assert (len(found), found.errors, list(found)) == (0, {}, [])

    @pytest.mark.parametrize(
        "series", [b"asthma", {"note": ["asthma"]}, None, 5, len, list, range], ids=lambda one: str(type(one))
    )
    def test_annotate_rejects_non_iterable(self, annotated, pipe, series):
        """Regression for privacy: the error does not quote the value."""
        with pytest.raises(ConfigurationError, match=r"is not an iterable of strings\. Pass a list") as caught:
            annotated(pipe, series)
        assert "asthma" not in str(caught.value)

    @pytest.mark.parametrize(
        "table",
        [
            pd.DataFrame(TABLE),
            datasets.Dataset.from_dict(TABLE),
            datasets.Dataset.from_dict(TABLE).to_iterable_dataset(),
            datasets.Dataset.from_dict(TABLE).data,
        ],
        ids=lambda table: type(table).__name__,
    )
    def test_whole_table(self, annotated, pipe, table):
        """A whole table is refused, with the way to its column."""
        with pytest.raises(
            ConfigurationError,
            match=r"is a table, not a sequence of texts\. Pass the name of its column of texts, such as text_column='text'",
        ):
            annotated(pipe, table)

    def test_answers_are_those_of_the_pipeline(self, annotated, new_pipe, sentences, rounded):
        """The answers are those of the pipeline for the same list, for dense predictions too."""
        texts, pipe = sentences(60), new_pipe()
        assert list(annotated(pipe, texts)) == rounded(pipe(texts))

    def test_single_tokens(self, annotated, new_pipe, sentences, rounded):
        """Without joining, every token is an answer with its index, and the table has it."""
        texts, pipe = sentences(10), new_pipe("none")
        found = annotated(pipe, texts)
        assert list(found) == rounded(pipe(texts))
        assert found.to_frame()["index"].min() >= 1


class TestReading:
    """Texts are read on demand and released."""

    def test_a_stream_is_read_a_bounded_way_ahead(self, annotated, few_at_once, tmp_path):
        """A text is read at most three chunks before it is answered, however many there are; the first answers come soon."""
        file, ahead = tmp_path / "run.jsonl", []

        def stream():
            for number in range(150):
                ahead.append(number - max(0, file.read_bytes().count(b"\n") - 1))
                yield f"{LONG}{number}"

        assert words(annotated(few_at_once, stream(), resume=file)) == [["asthma"]] * 150
        chunk = chunk_characters(few_at_once.default_annotator().budget) // len(LONG) + 1
        assert max(ahead) <= 3 * chunk < 100
        assert next(number for number, size in enumerate(ahead) if size < number) <= chunk

    def test_few_texts_are_held(self, annotated, few_at_once):
        """During a run the texts of a few chunks are alive, and after it those that are shown, although the answers are held."""

        class Note(str):
            __slots__ = ("__weakref__",)

        notes, alive = [], []

        def stream():
            for _ in range(150):
                note = Note(LONG)
                notes.append(weakref.ref(note))
                alive.append(sum(reference() is not None for reference in notes))
                yield note
                del note

        found = annotated(few_at_once, stream())

        assert max(alive) <= 4 * (chunk_characters(few_at_once.default_annotator().budget) // len(LONG) + 1) < 100
        assert {number for number, reference in enumerate(notes) if reference() is not None} <= set(
            range(MAX_DISPLAYED_TEXTS)
        )
        assert (len(found), len(found.preview_texts)) == (150, MAX_DISPLAYED_TEXTS)


BAD = {
    "number": (5, "Text 1 must be a string, not int."),
    "other number": (0.5, "Text 1 must be a string, not float."),
    "bytes": (b"secret", "Text 1 must be a string, not bytes."),
    "list": (["secret"], "Text 1 must be a string, not list."),
    "mapping": ({"note": "secret"}, "Text 1 must be a string, not dict."),
    "array": (np.array(["secret"]), "Text 1 must be a string, not ndarray."),
    "lone surrogate": ("secret \udc00", "Text 1 contains an unpaired surrogate at character 7."),
}


@pytest.mark.parametrize(("text", "what"), BAD.values(), ids=BAD)
class TestTextThatCannotBeRead:
    """A text that cannot be read, in the middle of others."""

    def test_raise(self, annotated, pipe, text, what):
        """It stops the run by default; the error names it, repeats none of it, and has the answers before it."""
        with pytest.raises(InvalidTextError) as caught:
            annotated(pipe, ["asthma", text, "asthma"])
        assert caught.value.message == what
        join = "Pass the words of a text as one string, such as ' '.join(words)."
        remedy = join if isinstance(text, list) else "Pass a string; use '' for a missing text."
        assert caught.value.remedy == remedy or "surrogate" in what
        assert "secret" not in str(caught.value)
        assert words(caught.value.annotations) == [["asthma"]]
        assert caught.value.annotations.preview_texts == ("asthma",)

    def test_record(self, annotated, pipe, text, what):
        """With ``record`` the others are answered, and its reason stands under its number."""
        found = annotated(pipe, ["asthma", text, "asthma"], on_error="record")
        assert words(found) == [["asthma"], [], ["asthma"]]
        assert [number for number in found.errors if found.errors[number].startswith(what)] == [1]
        assert "secret" not in str(found) + found._repr_html_() + found.to_json()
        assert "\n1: (error)\n" in str(found)

    def test_number_after_resuming(self, annotated, pipe, text, what, tmp_path):
        """After resuming from a file, errors still count texts from the first text."""
        file = tmp_path / "run.jsonl"
        annotated(pipe, ["asthma"], resume=file)
        with pytest.raises(InvalidTextError) as caught:
            annotated(pipe, ["asthma", text, "asthma"], resume=file)
        assert caught.value.message == what
        found = annotated(pipe, ["asthma", text, "asthma"], resume=file, on_error="record")
        assert list(found.errors) == [1]


@given(some.lists(some.sampled_from(["asthma", "", None, 5, "\ud800"]), max_size=12))
def test_every_text_has_an_answer_or_a_reason(annotated, pipe, texts):
    """Whatever the series holds, each text is answered, missing or recorded, and stopping at the first keeps those before it."""
    bad = [number for number, text in enumerate(texts) if text in (5, "\ud800")]
    found = annotated(pipe, texts, on_error="record")
    assert found.missing == tuple(number for number, text in enumerate(texts) if text is None)
    assert list(found.errors) == bad
    assert words(found) == [["asthma"] if text == "asthma" else [] for text in texts]
    if bad:
        with pytest.raises(InvalidTextError, match=f"Text {bad[0]} ") as caught:
            annotated(pipe, texts)
        assert words(caught.value.annotations) == words(found)[: bad[0]]


def test_texts_that_are_left():
    """``__length_hint__`` of the inputs is the number of remaining texts, if known."""
    inputs = _Inputs(["a", "b", "c"])
    next(inputs)
    assert length_hint(inputs, -1) == 2
    assert length_hint(_Inputs(iter(["a"])), -1) == -1


class BrokenStreamError(Exception):
    """What a stream of a test fails with."""


class TestStreamThatFails:
    """A stream that raises an error."""

    @pytest.mark.parametrize("count", [0, 1, 40])
    @pytest.mark.parametrize("on_error", ["raise", "record"])
    def test_error_is_kept_and_has_the_answers(self, annotated, pipe, count, on_error):
        """The error is not translated. It is raised after the texts before it, and has their results."""

        def stream():
            yield from [LONG] * count
            raise BrokenStreamError("no such page")

        with pytest.raises(BrokenStreamError, match="no such page") as caught:
            annotated(pipe, stream(), on_error=on_error)
        assert words(caught.value.annotations) == [["asthma"]] * count

    def test_run_goes_on_after_it(self, annotated, pipe, tmp_path):
        """Earlier results are in the file, and the run resumes from them."""
        file = tmp_path / "run.jsonl"

        def stream(end):
            yield from TEXTS[:3]
            if end:
                raise BrokenStreamError
            yield from TEXTS[3:]

        with pytest.raises(BrokenStreamError):
            annotated(pipe, stream(end=True), resume=file)
        assert words(annotated(pipe, stream(end=False), resume=file)) == WORDS


def interrupting(texts, at):
    """Yield texts, and send this process a real SIGINT before one of them."""
    for number, text in enumerate(texts):
        if number == at:
            signal.raise_signal(signal.SIGINT)
        yield text


@pytest.mark.usefixtures("interruptible")
class TestInterrupt:
    """A run that the user interrupts."""

    @pytest.mark.parametrize("at", [0, 1, 30, 60])
    def test_goes_on_from_what_the_error_carries(self, annotated, pipe, at):
        """What was done is in the error, and a run that resumes has all answers, each text counted once."""
        texts = [f"{LONG}{number}" for number in range(61)]
        with pytest.raises(RunInterrupted) as caught:
            annotated(pipe, interrupting(texts, at))
        done = caught.value.annotations
        assert caught.value.done == len(done) <= at
        found = annotated(pipe, texts, resume=True) if done else annotated(pipe, texts)
        assert words(found) == [["asthma"]] * 61
        assert len(done) == caught.value.done

    def test_message(self, annotated, pipe, tmp_path):
        """The message has one line with the number of texts, the action to resume, and the file, if any."""
        with pytest.raises(RunInterrupted) as caught:
            annotated(pipe, interrupting(TEXTS, 1))
        assert str(caught.value) == "Stopped after 0 notes. Repeat the call to start again."
        file = tmp_path / "run.jsonl"
        with pytest.raises(RunInterrupted) as caught:
            annotated(pipe, interrupting(TEXTS, 1), resume=file)
        assert str(caught.value).endswith(f"Repeat the call to continue from {str(file)!r}.")

    @pytest.mark.parametrize(("done", "counted"), [(0, "0 notes"), (1, "1 note."), (1200, "1,200 notes")])
    def test_counts_like_a_person(self, done, counted):
        """One text is singular, and thousands have a comma."""
        assert f"Stopped after {counted}" in str(RunInterrupted(done, None, ""))

    def test_no_except_exception_goes_on_after_it(self, annotated, pipe):
        """Code that catches every ``Exception`` lets it pass."""

        def careless():
            with contextlib.suppress(Exception):
                annotated(pipe, interrupting(TEXTS, 0))

        with pytest.raises(RunInterrupted):
            careless()

    def test_survives_pickle_and_copy(self):
        """It can be sent to another process with what it carries."""
        error = RunInterrupted(3, ["answers"], "run.jsonl")
        for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301 - our own bytes
            assert (str(other), other.done, other.annotations) == (str(error), 3, ["answers"])


class TestOptions:
    """What the other arguments take."""

    @pytest.mark.parametrize("resume", [5, False, ["run.jsonl"], {}, b"run.jsonl"], ids=repr)
    def test_resume_from_something_else(self, annotated, pipe, resume):
        """What is not the name of a file is refused by its type."""
        with pytest.raises(ConfigurationError, match=f"Invalid type for resume: {type(resume).__name__}"):
            annotated(pipe, TEXTS, resume=resume)

    @pytest.mark.parametrize("on_error", ["ignore", "", None, True])
    def test_on_error(self, annotated, pipe, on_error):
        """Anything but the two ways to deal with errors is refused, and they are named."""
        with pytest.raises(
            ConfigurationError, match=rf"^Invalid value for on_error: {on_error!r}\. Valid values: raise, record\."
        ):
            annotated(pipe, TEXTS, on_error=on_error)

    @pytest.mark.parametrize("tokens", [0, -1, 1.5, "many", True])
    def test_batch_tokens(self, annotated, pipe, tokens):
        """A budget must be a positive integer."""
        with pytest.raises(ConfigurationError, match=rf"^Invalid value for batch_tokens: {tokens!r}\."):
            annotated(pipe, TEXTS, batch_tokens=tokens)
        loaded = SESSION.inventory()
        with pytest.raises(ConfigurationError, match=rf"^Invalid value for batch_tokens: {tokens!r}\."):
            nb.annotate(TEXTS, "bundled_small", dtype="float64", batch_tokens=tokens)
        assert SESSION.inventory() == loaded  # It is refused before a model is loaded.

    @pytest.mark.parametrize("tokens", [1, 7, 10_000])
    def test_any_budget_gives_the_same_answers(self, annotated, pipe, tokens):
        """The budget changes the batches, but not the results or the budget of the pipeline."""
        before = pipe.batch_tokens
        assert words(annotated(pipe, TEXTS, batch_tokens=tokens)) == WORDS
        assert pipe.batch_tokens == before

    def test_batches_stay_in_the_budget(self, annotated, new_pipe, on_forward, sentences):
        """No batch has more tokens than the budget, where a text alone has not."""
        pipe, sizes = new_pipe(), []
        on_forward(pipe.model, lambda ids: sizes.append(ids.numel()))
        annotated(pipe, sentences(40), batch_tokens=200)
        assert max(sizes) <= 200

    def test_pipeline_of_transformers(self, keyword_model):
        """The error of a transformers pipeline names load_pipeline()."""
        with pytest.raises(ConfigurationError, match=r"Pass the name of a model, or a pipeline of load_pipeline\(\)"):
            nb.annotate(TEXTS, pipeline("token-classification", str(keyword_model)))

    def test_pipeline_with_arguments_for_another(self, pipe):
        """An existing pipeline does not accept options of load_pipeline()."""
        with pytest.raises(ConfigurationError, match="does not accept aggregation_strategy, device"):
            nb.annotate(TEXTS, pipe, device="cpu", aggregation_strategy="max")


class TestProgress:
    """Progress of a run. ``tests/test_progress.py`` tests its display."""

    @pytest.fixture
    def progress_messages(self, pipe):
        """A function that annotates texts and returns the progress messages of the session."""

        def collect_messages(texts, **options):
            events = []
            stop = SESSION.subscribe(events.append)
            try:
                nb.annotate(texts, pipe, **options)
            finally:
                stop()
            return [str(event) for event in events if event and event.operation == "Annotating"]

        return collect_messages

    def test_each_chunk(self, progress_messages, pipe, home):
        """Progress has the number of completed texts, the total and the device."""
        texts = [LONG] * 50
        said = progress_messages(texts)

        name = f"Annotating: {type(pipe.model).__name__} on {format_device(home)}"
        assert said[0] == f"{name} (note 1 of 50)"
        assert said[-1] == f"{name} (50 notes)"
        assert len(said) > 3

    def test_progress_of_generator_counts_texts(self, progress_messages):
        assert [message.rpartition(" (")[2] for message in progress_messages(iter(TEXTS))] == ["0 notes)", "5 notes)"]

    def test_resumed(self, annotated, pipe, progress_messages, tmp_path):
        """Texts with a result of an earlier run count as completed at the start."""
        annotated(pipe, TEXTS[:3], resume=tmp_path / "run.jsonl")
        said = progress_messages(TEXTS, resume=tmp_path / "run.jsonl")
        assert [message.rpartition(" (")[2] for message in said] == ["note 4 of 5)", "5 notes)"]

    def test_prints_nothing(self, progress_messages, capsys):
        """Progress is displayed only in an interactive session."""
        progress_messages(TEXTS, progress=False)
        progress_messages(TEXTS)
        assert capsys.readouterr() == ("", "")
