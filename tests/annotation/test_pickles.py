"""What is pickled of results and of errors: no text that may not be shown, and none that an error would carry elsewhere."""

import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import pandas as pd
import pytest

import openmed_nb as nb
from openmed_nb.errors import InvalidTextError, RunInterrupted

MARKER = "secretive"
NOTES = [f"the {MARKER} patient has asthma", f"{MARKER} history", f"hypertension of {MARKER}"]
WORDS = (MARKER, "asthma", "hypertension", "patient", "history")


@pytest.fixture(scope="module")
def pipe(pipe_of, keyword_model):
    """A pipeline that finds keywords."""
    return pipe_of(keyword_model)


def stopped_by(error):
    """Yield notes, then raise."""
    yield from NOTES
    raise error


def leaks(value):
    """Return the words of the notes that are in a pickle of a value, in any protocol."""
    pickles = [pickle.dumps(value, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    return [word for word in WORDS if any(word.encode() in data for data in pickles)]


def pickled(value):
    """Return an unpickled copy of a value."""
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - of the test's own


SERIES = {
    "list": [*NOTES, 5],
    "table": pd.Series([*NOTES, 5], index=[f"{MARKER} {number}" for number in range(4)]),
    "generator": None,
}


class TestErrors:
    """An error has the completed results only within the process."""

    @pytest.mark.parametrize("kind", SERIES)
    @pytest.mark.parametrize("show_text", [True, False])
    def test_unreadable_text(self, annotated, pipe, kind, show_text):
        """A pickled error has its message and no text."""
        texts = (
            stopped_by(InvalidTextError("Text 3 is unreadable.", "Leave it out."))
            if kind == "generator"
            else SERIES[kind]
        )
        with pytest.raises(InvalidTextError) as caught:
            annotated(pipe, texts, show_text=show_text)
        assert leaks(caught.value) == []
        there = pickled(caught.value)
        assert (type(there), str(there), len(there.annotations)) == (InvalidTextError, str(caught.value), 0)
        assert list(caught.value.annotations) == list(annotated(pipe, NOTES))

    def test_interrupted(self, annotated, pipe, tmp_path):
        """The message of an unpickled interrupt still explains how to resume."""
        annotated(pipe, NOTES, resume=tmp_path / "run.jsonl")
        with pytest.raises(RunInterrupted) as caught:
            annotated(pipe, stopped_by(KeyboardInterrupt()), resume=tmp_path / "run.jsonl")
        assert leaks(caught.value) == []
        there = pickled(caught.value)
        assert (str(there), there.done, len(there.annotations)) == (str(caught.value), 3, 0)
        assert [len(entities) for entities in caught.value.annotations] == [1, 0, 1]

    def test_error_of_another_library(self, annotated, pipe):
        """So it is for an error that comes out of the series of texts."""
        with pytest.raises(ZeroDivisionError) as caught:
            annotated(pipe, stopped_by(ZeroDivisionError("end")))
        assert leaks(caught.value) == []
        assert len(vars(caught.value)["annotations"]) == 3

    def test_other_process(self, keyword_model):
        """An error from another process does not contain texts."""
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            error = pool.submit(nb.annotate, SERIES["list"], str(keyword_model), device="cpu").exception()
        assert isinstance(error, InvalidTextError)
        assert leaks(error) == []


def test_results_are_pickled_whole(annotated, pipe):
    """A result contains its texts in another process."""
    found = annotated(pipe, NOTES)
    there = pickled(found)
    assert (list(there), str(there), there.preview_texts) == (list(found), str(found), tuple(NOTES))
