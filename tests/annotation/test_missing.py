"""Missing values in the place of texts, and a resume file after notes were repaired."""

import datetime as dt
import decimal
import json
import pickle

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.annotations import annotated, words

MISSING = {
    "None": None,
    "NaN": float("nan"),
    "NaN of numpy": np.float64("nan"),
    "NaN in 32 bits": np.float32("nan"),
    "NaN in 16 bits": np.float16("nan"),
    "complex NaN": complex("nan"),
    "NA": pd.NA,
    "NaT": pd.NaT,
    "NaT of a date": np.datetime64("NaT"),
    "NaT of a duration": np.timedelta64("NaT"),
    "NaN of decimals": decimal.Decimal("NaN"),
    "signaling NaN of decimals": decimal.Decimal("sNaN"),
    "masked": np.ma.masked,
    "empty": "",
    "white space": " \t\r\n\u3000",
}
NO_TEXT = [5, 0.0, True, decimal.Decimal(5), float("inf"), b"", np.datetime64("2020-01-01"), dt.date(2020, 1, 1)]

ASTHMA, EPILEPSY = "the patient has asthma", "type 2 diabetes mellitus"


@pytest.fixture(scope="module")
def run(keyword_pipe):
    """A function that annotates texts with the pipeline."""

    def run(texts, pipe=keyword_pipe, **options):
        return annotated(pipe, texts, **options)

    return run


@pytest.fixture
def file(tmp_path):
    """The name of a file of results."""
    return tmp_path / "run.jsonl"


@pytest.mark.parametrize("value", MISSING.values(), ids=MISSING)
def test_missing_value_has_no_entities_and_is_equal_to_others_on_resuming(run, file, value):
    """A run resumes if the same notes come from a different library."""
    run([ASTHMA, None, ASTHMA], resume=file)
    written = file.read_bytes()
    for annotations in (run([ASTHMA, value, ASTHMA]), run([ASTHMA, value, ASTHMA], resume=file)):
        assert words(annotations) == [["asthma"], [], ["asthma"]]
        assert (annotations.missing, annotations.errors) == ((1,), {})
        assert json.loads(annotations.to_json())["texts"][1] == {"missing": True}
        assert pickle.loads(pickle.dumps(annotations)).missing == (1,)  # noqa: S301 - of the test's own
    assert file.read_bytes() == written


@pytest.mark.parametrize("value", NO_TEXT, ids=repr)
def test_other_values_are_errors(run, value):
    assert list(run([ASTHMA, value], on_error="record").errors) == [1]


def test_null_of_arrow_is_missing(run):
    assert run([ASTHMA, pa.scalar(None, pa.string()), pa.scalar(None)]).missing == (1, 2)


def test_missing_texts_are_counted_displayed_and_masked_as_missing(run):
    found = run([ASTHMA, *[float("nan")] * 11, 5], on_error="record")
    summary = found.summary()
    assert (summary.texts, summary.missing, summary.texts_without_entities, len(summary.errors)) == (13, 11, 0, 1)
    assert "11 notes have no text.\n  1 note could not be read." in str(found)
    assert "\n1: (missing)\n" in str(found)
    assert "missing" in str(found.show(3))
    assert found.show(3).to_dict()["missing"] is True
    masked = found.mask()
    assert (masked[3].text, masked[3].error, masked[3].missing, masked[0].missing) == ("", "", True, False)
    assert "missing" in str(masked[3])
    assert "\n1: The text is missing.\n" in str(masked)
    assert found.to_frame()["note_index"].tolist() == [0]
    assert found.filter("disease").missing == found.missing == tuple(range(1, 12))


GAPS = st.none() | st.sampled_from([[None], [float("nan")], [pd.NA], [""], [5], ["\ud800"]])


@given(data=st.data())
def test_any_repairs_end_as_one_run(run, tmp_path_factory, data):
    """However often notes come, fail, go missing and are repaired, the result is that of the last series alone."""
    file = tmp_path_factory.mktemp("repairs") / "run.jsonl"
    texts = data.draw(st.lists(st.sampled_from([ASTHMA, EPILEPSY, "no"]), min_size=1, max_size=6))
    for _ in range(data.draw(st.integers(1, 3))):
        gaps = [data.draw(GAPS) for _ in texts]
        repaired = [text if gap is None else gap[0] for text, gap in zip(texts, gaps, strict=True)]
        found = run(repaired, on_error="record", resume=file)
        expected = run(repaired, on_error="record")
        assert list(found) == list(expected)
        assert (found.missing, found.errors) == (expected.missing, expected.errors)
    assert list(run(texts, resume=file)) == list(run(texts))
