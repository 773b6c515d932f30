"""Pickles of errors: they have no text, because errors are sent to logs and to other processes."""

import pickle

import pandas as pd
import pytest

from helpers.annotations import annotated
from openmed_nb.errors import InvalidTextError, RunInterrupted

MARKER = "secretive"
NOTES = [f"the {MARKER} patient has asthma", f"{MARKER} history", f"hypertension of {MARKER}"]
WORDS = (MARKER, "asthma", "hypertension", "patient", "history")


def end_with(error):
    """Yield notes, then raise."""
    yield from NOTES
    raise error


@pytest.mark.parametrize("show_text", [True, False])
@pytest.mark.parametrize(
    ("make_texts", "error"),
    [
        (lambda: [*NOTES, 5], InvalidTextError),
        (lambda: pd.Series([*NOTES, 5], index=[f"{MARKER} {number}" for number in range(4)]), InvalidTextError),
        (lambda: end_with(InvalidTextError("Text 3 is unreadable.", "Leave it out.")), InvalidTextError),
        (lambda: end_with(ZeroDivisionError("end")), ZeroDivisionError),
        (lambda: end_with(KeyboardInterrupt()), RunInterrupted),
    ],
    ids=["list", "Series", "generator", "error of another library", "interrupt"],
)
def test_error_has_results_in_its_process_and_no_text_in_a_pickle(keyword_pipe, tmp_path, make_texts, error, show_text):
    annotated(keyword_pipe, NOTES, resume=tmp_path / "run.jsonl")
    with pytest.raises(error) as caught:
        annotated(keyword_pipe, make_texts(), show_text=show_text, resume=tmp_path / "run.jsonl")

    pickles = [pickle.dumps(caught.value, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    assert [word for word in WORDS if any(word.encode() in data for data in pickles)] == []
    copied = pickle.loads(pickles[-1])  # noqa: S301 - of the test's own
    assert (type(copied), str(copied)) == (error, str(caught.value))
    assert len(vars(copied).get("annotations", ())) == 0
    assert [len(entities) for entities in vars(caught.value)["annotations"]] == [1, 0, 1]
