"""Annotation of many texts: every text has a result, in order; texts are read on demand; errors lose nothing."""

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
from helpers.annotations import annotated, rounded, words
from helpers.tiny_models import sentences
from openmed_nb._annotate import _Inputs
from openmed_nb.annotation.masking import MAX_DISPLAYED_TEXTS
from openmed_nb.annotation.results import AnnotatedText
from openmed_nb.annotation.stream import chunk_characters
from openmed_nb.devices.machine import format_device
from openmed_nb.devices.registry import get_device
from openmed_nb.errors import ConfigurationError, InvalidTextError, OpenMedWarning, RunInterrupted
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
    """A pipeline with the batches of a CPU, so that a few texts are many chunks on every device."""
    return pipe_of(keyword_model, batch_tokens=get_device("cpu").batch_tokens)


class OldSequence:
    """A sequence without ``__iter__``."""

    def __getitem__(self, number):
        return TEXTS[number]


SERIES = {
    "tuple": lambda: tuple(TEXTS),
    "generator": lambda: (text for text in TEXTS),
    "values of a mapping": lambda: dict(enumerate(TEXTS)).values(),
    "Series": lambda: pd.Series(TEXTS, index=range(10, 15)),
    "string Series": lambda: pd.Series(TEXTS, dtype="string"),
    "column of a Dataset": lambda: datasets.Dataset.from_dict(TABLE)["note"],
    "column of a stream": lambda: datasets.Dataset.from_dict(TABLE).to_iterable_dataset()["note"],
    "array": lambda: np.array(TEXTS),
    "KeyDataset": lambda: KeyDataset(datasets.Dataset.from_dict(TABLE), "note"),
    "old sequence": OldSequence,
}


@pytest.mark.parametrize("name", SERIES)
def test_series_of_any_kind_have_the_same_results(pipe, monkeypatch, name):
    """The texts of an iterator cannot be read again."""
    monkeypatch.setattr("openmed_nb._annotate.MAX_DISPLAYED_TEXTS", 1)
    found = annotated(pipe, SERIES[name]())
    assert words(found) == WORDS
    assert found.preview_texts == tuple(TEXTS[:1])
    assert (found.texts is None) == (name == "generator")
    if found.texts is not None:
        assert [found.at(number).text for number in range(len(TEXTS))] == TEXTS


def test_one_text_is_one_note(pipe):
    alone = annotated(pipe, TEXTS[0])
    assert isinstance(alone, AnnotatedText)
    assert (list(alone), alone.text) == (annotated(pipe, TEXTS[:1])[0], TEXTS[0])
    for on_error in ("raise", "record"):
        with pytest.raises(InvalidTextError, match="unpaired surrogate"):
            annotated(pipe, "asthma \ud800", on_error=on_error)


@pytest.mark.parametrize("series", [[], pd.Series([], dtype=str)], ids=type)
def test_empty_series_has_no_results(pipe, series):
    found = annotated(pipe, series)
    assert (len(found), found.errors, list(found)) == (0, {}, [])


def test_iterator_without_texts_is_a_warning(pipe):
    with pytest.warns(OpenMedWarning, match="create it again"):
        assert list(annotated(pipe, iter(()))) == []


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (b"asthma", "is not an iterable of strings"),
        ({"note": ["asthma"]}, "Pass the texts of one key"),
        (None, "is not an iterable of strings"),
        (list, "is not an iterable of strings"),
        (pd.DataFrame(TABLE), "Pass its column of texts, such as notes"),
        (datasets.Dataset.from_dict(TABLE), "text_column='text'"),
        (datasets.Dataset.from_dict(TABLE).data, "text_column='text'"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_rejected(pipe, texts, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        annotated(pipe, texts)
    assert "asthma" not in str(caught.value)


@pytest.mark.parametrize("strategy", ["simple", "none"])
def test_results_equal_pipeline(new_pipe, strategy):
    texts, pipe = sentences(30), new_pipe(strategy)
    found = annotated(pipe, texts)
    assert list(found) == rounded(pipe(texts))
    assert ("index" in found.to_frame()) == (strategy == "none")


def test_texts_without_tokens_have_the_columns_of_the_strategy(new_pipe):
    columns = {strategy: set(annotated(new_pipe(strategy), [" "]).to_frame()) for strategy in ("simple", "none")}
    assert {name for names in columns.values() for name in names if name.startswith("entity")} == {
        "entity",
        "entity_group",
    }
    assert "entity" in columns["none"]


def test_stream_is_read_a_bounded_number_of_chunks_ahead(few_at_once, tmp_path):
    """A text is read at most three chunks before it has a result."""
    file, ahead = tmp_path / "run.jsonl", []

    def stream():
        for number in range(150):
            ahead.append(number - max(0, file.read_bytes().count(b"\n") - 1))
            yield f"{LONG}{number}"

    assert words(annotated(few_at_once, stream(), resume=file)) == [["asthma"]] * 150
    chunk = chunk_characters(few_at_once.default_annotator().budget) // len(LONG) + 1
    assert max(ahead) <= 3 * chunk < 100
    assert next(number for number, size in enumerate(ahead) if size < number) <= chunk


def test_texts_of_stream_are_released(few_at_once):
    """During a run the texts of a few chunks are alive, and after it those that are displayed."""

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
    living = {number for number, reference in enumerate(notes) if reference() is not None}
    assert living <= set(range(MAX_DISPLAYED_TEXTS))
    assert (len(found), len(found.preview_texts)) == (150, MAX_DISPLAYED_TEXTS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (5, "Text 1 must be a string, not int."),
        (b"secret", "Text 1 must be a string, not bytes."),
        (["secret"], "Text 1 must be a string, not list."),
        (np.array(["secret"]), "Text 1 must be a string, not ndarray."),
        ("secret \udc00", "Text 1 contains an unpaired surrogate at character 7."),
    ],
    ids=lambda value: type(value).__name__,
)
def test_invalid_text_is_raised_or_recorded(pipe, text, message, tmp_path):
    texts = ["asthma", text, "asthma"]
    for options in ({}, {"resume": tmp_path / "run.jsonl"}, {"resume": tmp_path / "run.jsonl"}):
        with pytest.raises(InvalidTextError) as caught:
            annotated(pipe, texts, **options)
        assert caught.value.message == message
        assert "secret" not in str(caught.value)
        assert words(caught.value.annotations) == [["asthma"]]
        assert caught.value.annotations.preview_texts == ("asthma",)
    for options in ({}, {"resume": tmp_path / "run.jsonl"}):
        found = annotated(pipe, texts, on_error="record", **options)
        assert words(found) == [["asthma"], [], ["asthma"]]
        assert [number for number in found.errors if found.errors[number].startswith(message)] == [1]
        assert "secret" not in str(found) + found._repr_html_() + found.to_json()


@given(some.lists(some.sampled_from(["asthma", "", None, 5, "\ud800"]), max_size=12))
def test_every_text_has_a_result_or_an_error(pipe, texts):
    invalid = [number for number, text in enumerate(texts) if text in (5, "\ud800")]
    found = annotated(pipe, texts, on_error="record")
    assert found.missing == tuple(number for number, text in enumerate(texts) if not text)
    assert list(found.errors) == invalid
    assert words(found) == [["asthma"] if text == "asthma" else [] for text in texts]
    if invalid:
        with pytest.raises(InvalidTextError, match=f"Text {invalid[0]} ") as caught:
            annotated(pipe, texts)
        assert words(caught.value.annotations) == words(found)[: invalid[0]]


def test_inputs_hint_their_remaining_length():
    inputs = _Inputs(["a", "b", "c"])
    next(inputs)
    assert length_hint(inputs, -1) == 2
    assert length_hint(_Inputs(iter(["a"])), -1) == -1


class BrokenStreamError(Exception):
    """The error of a stream."""


@pytest.mark.parametrize("count", [0, 1, 40])
@pytest.mark.parametrize("on_error", ["raise", "record"])
def test_error_of_stream_has_results(pipe, count, on_error):
    """The error of the stream is raised unchanged, after the texts before it."""

    def stream():
        yield from [LONG] * count
        raise BrokenStreamError("no such page")

    with pytest.raises(BrokenStreamError, match="no such page") as caught:
        annotated(pipe, stream(), on_error=on_error)
    assert words(caught.value.annotations) == [["asthma"]] * count


def interrupting(texts, at):
    """Yield texts, and send this process a SIGINT before one of them."""
    for number, text in enumerate(texts):
        if number == at:
            signal.raise_signal(signal.SIGINT)
        yield text


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("at", [0, 1, 30, 60])
def test_interrupted_run_is_resumed(pipe, at):
    texts = [f"{LONG}{number}" for number in range(61)]
    with pytest.raises(RunInterrupted) as caught:
        annotated(pipe, interrupting(texts, at))
    completed = caught.value.annotations
    assert caught.value.done == len(completed) <= at
    found = annotated(pipe, texts, resume=True) if completed else annotated(pipe, texts)
    assert words(found) == [["asthma"]] * 61
    assert len(completed) == caught.value.done


@pytest.mark.usefixtures("interruptible")
def test_interrupt_states_how_to_continue(pipe, tmp_path):
    with pytest.raises(RunInterrupted) as caught:
        annotated(pipe, interrupting(TEXTS, 1))
    assert str(caught.value) == "Stopped after 0 notes. Repeat the call to start again."
    file = tmp_path / "run.jsonl"
    with pytest.raises(RunInterrupted) as caught:
        annotated(pipe, interrupting(TEXTS, 1), resume=file)
    assert str(caught.value).endswith(f"Repeat the call to continue from {str(file)!r}.")


def test_interrupt_can_be_copied():
    error = RunInterrupted(3, ["answers"], "run.jsonl")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301 - our own bytes
        assert (str(other), other.done, other.annotations) == (str(error), 3, ["answers"])


def test_options_are_checked_before_a_model_is_loaded():
    loaded = SESSION.inventory()
    for options in ({"batch_tokens": 0}, {"on_error": "ignore"}, {"resume": 5}):
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            nb.annotate(TEXTS, "bundled_small", dtype="float64", **options)
    assert SESSION.inventory() == loaded


def test_other_pipelines_are_rejected(pipe, keyword_model):
    with pytest.raises(ConfigurationError, match=r"a pipeline of load_pipeline\(\)"):
        nb.annotate(TEXTS, pipeline("token-classification", str(keyword_model)))
    with pytest.raises(ConfigurationError, match="does not accept aggregation_strategy, device"):
        nb.annotate(TEXTS, pipe, device="cpu", aggregation_strategy="max")


def test_progress_counts_texts(pipe, home, tmp_path):
    """Texts with a result of an earlier run count as completed at the start."""

    def collect_messages(texts, **options):
        events = []
        stop = SESSION.subscribe(events.append)
        try:
            nb.annotate(texts, pipe, **options)
        finally:
            stop()
        return [str(event) for event in events if event and event.operation == "Annotating"]

    name = f"Annotating: {type(pipe.model).__name__} on {format_device(home)}"
    messages = collect_messages([LONG] * 50)
    assert (messages[0], messages[-1]) == (f"{name} (0 of 50 notes)", f"{name} (50 notes)")
    assert len(messages) > 3
    assert collect_messages(iter(TEXTS)) == [f"{name} (0 notes)", f"{name} (5 notes)"]
    collect_messages(TEXTS[:3], resume=tmp_path / "run.jsonl")
    assert collect_messages(TEXTS, resume=tmp_path / "run.jsonl") == [f"{name} (3 of 5 notes)", f"{name} (5 notes)"]
