"""Missing values in the place of texts, and a resume file after notes were repaired."""

import dataclasses
import datetime as dt
import decimal
import json
import pickle

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as some

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError, InvalidTextError

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
}
NO_TEXT = [5, 0.0, True, decimal.Decimal(5), float("inf"), b"", np.datetime64("2020-01-01"), dt.date(2020, 1, 1)]

ASTHMA, EPILEPSY = "the patient has asthma", "type 2 diabetes mellitus"


@pytest.fixture(scope="module")
def pipe(pipe_of, keyword_model):
    """A pipeline that runs one text at a time, so that scores do not depend on how texts come together."""
    return pipe_of(keyword_model, batch_size=1)


@pytest.fixture(scope="module")
def run(annotated, pipe):
    """A function that annotates texts with the pipeline."""

    def run(texts, pipe=pipe, **options):
        return annotated(pipe, texts, **options)

    return run


@pytest.fixture
def file(tmp_path):
    """The name of a file of results."""
    return tmp_path / "run.jsonl"


def words(found):
    """Return the words of each text."""
    return [[entity["word"] for entity in entities] for entities in found]


@pytest.mark.parametrize("value", MISSING.values(), ids=MISSING)
class TestMissingValue:
    """A value that stands for a text that is missing."""

    def test_has_no_entities_and_never_raises(self, run, value):
        """Missing values have a separate status, and the other texts have results."""
        found = run([ASTHMA, value, ASTHMA])
        assert words(found) == [["asthma"], [], ["asthma"]]
        assert found.missing == (1,)
        assert found.errors == {}
        assert found.to_dict()["texts"][1] == {"missing": True}
        assert json.loads(found.to_json())["texts"][1] == {"missing": True}

    def test_is_the_same_as_any_other_on_resuming(self, run, file, value):
        """A run resumes if the same notes come from a different library."""
        run([ASTHMA, None, ASTHMA], resume=file)
        written = file.read_bytes()
        found = run([ASTHMA, value, ASTHMA], resume=file)
        assert (found.missing, words(found)) == ((1,), [["asthma"], [], ["asthma"]])
        assert file.read_bytes() == written


@pytest.mark.parametrize("value", NO_TEXT, ids=repr)
def test_other_values_are_errors(run, value):
    """What is neither a text nor missing cannot be read."""
    assert list(run([ASTHMA, value], on_error="record").errors) == [1]


def test_empty_text_is_not_missing(run):
    """An empty text is a text without entities."""
    found = run(["", " "])
    assert (found.missing, found.errors, list(found)) == ((), {}, [[], []])


def test_null_of_arrow_is_missing(run):
    """A null of an Arrow column is an Arrow scalar."""
    import pyarrow as pa

    assert run([ASTHMA, pa.scalar(None, pa.string()), pa.scalar(None)]).missing == (1, 2)


class TestShownMissing:
    """What results say of missing values."""

    @pytest.fixture
    def found(self, run):
        """The result of one text, eleven missing ones and an error."""
        return run([ASTHMA, *[float("nan")] * 11, 5], on_error="record")

    def test_summary_counts_them_in_one_line(self, found):
        """They are counted once, apart from texts without entities and from errors."""
        summary = found.summary()
        assert (summary.texts, summary.missing, summary.texts_without_entities, len(summary.errors)) == (13, 11, 0, 1)
        assert summary.to_dict()["missing"] == 11
        assert "12 notes could not be read (11 empty cells)." in str(found)
        assert str(found).count("empty cell") == str(summary).count("empty cell") == 1
        assert "1 note has no text." in str(found.summary().__class__("m", "cpu", 1, 0, (), (), (), missing=1))

    def test_one_by_one(self, found):
        assert "\n1: (missing)\n" in str(found)
        assert "missing" in str(found.show(3))
        assert list(found.show(3)) == []
        masked = found.mask()
        assert (masked[3].text, masked[3].error, masked[3].missing, masked[0].missing) == ("", "", True, False)
        assert "missing" in str(masked[3])
        assert "\n1: The text is missing.\n" in str(masked)

    def test_table_has_no_row_for_them(self, found):
        """They have no entities."""
        assert found.to_frame()["note_index"].tolist() == [0]

    def test_filtered_results_keep_them(self, found):
        """They stay missing where entities are filtered."""
        assert found.filter("disease").missing == found.missing == tuple(range(1, 12))

    def test_survive_pickle(self, found):
        """They stay missing in a pickled result."""
        assert pickle.loads(pickle.dumps(found)).missing == found.missing  # noqa: S301 - of the test's own


@dataclasses.dataclass
class Gap:
    """Values that replace a text."""

    value: object


class TestResumeAfterRepair:
    """Only results count as done."""

    @pytest.mark.parametrize("bad", [5, "\ud800", None, "", float("nan")], ids=repr)
    def test_repaired_text_is_read(self, run, file, bad):
        """Texts without a result are processed again when a run resumes from a file."""
        run([ASTHMA, bad, ASTHMA], on_error="record", resume=file)
        found = run([ASTHMA, EPILEPSY, ASTHMA], resume=file)
        assert words(found) == [["asthma"], ["diabetes mellitus"], ["asthma"]]
        assert (found.errors, found.missing) == ({}, ())
        again = run([ASTHMA, EPILEPSY, ASTHMA], resume=file)
        assert list(again) == list(found) == list(run([ASTHMA, EPILEPSY, ASTHMA]))

    def test_text_that_fails_again_raises(self, run, file):
        """The next run raises the error, or records it again without modifying the file."""
        texts = [ASTHMA, 5, EPILEPSY]
        recorded = run(texts, on_error="record", resume=file)
        written = file.read_bytes()
        with pytest.raises(InvalidTextError, match="Text 1 must be a string"):
            run(texts, resume=file)
        again = run(texts, on_error="record", resume=file)
        assert (again.errors, list(again)) == (recorded.errors, list(recorded))
        assert file.read_bytes() == written

    @given(data=some.data())
    def test_any_repairs_end_as_one_run(self, run, tmp_path_factory, data):
        """However often notes come, fail, go missing and are repaired, the result is that of the last series alone."""
        file = tmp_path_factory.mktemp("repairs") / "run.jsonl"
        texts = data.draw(some.lists(some.sampled_from([ASTHMA, EPILEPSY, "no"]), min_size=1, max_size=8))
        gaps = some.none() | some.sampled_from([None, float("nan"), pd.NA, "", 5, "\ud800"]).map(Gap)
        repaired = set()
        for _ in range(data.draw(some.integers(1, 4))):
            broken = {}
            for number in range(len(texts)):
                gap = data.draw(gaps) if number not in repaired else None
                if gap is None:
                    repaired.add(number)
                else:
                    broken[number] = gap.value
            shown = [broken.get(number, text) for number, text in enumerate(texts)]
            found, expected = run(shown, on_error="record", resume=file), run(shown, on_error="record")
            assert list(found) == list(expected)
            assert (found.missing, found.errors) == (expected.missing, expected.errors)
        assert list(run(texts, resume=file)) == list(run(texts))


LABELS = ["O", *(f"LABEL_{'x' * 40}_{number}" for number in range(60_000))]


def test_header_of_any_size(run, pipe_of, keyword_model, file):
    """A header may be longer than 1 MiB."""
    pipe = pipe_of(keyword_model, batch_size=1, ignore_labels=LABELS)
    first = run([ASTHMA], pipe, resume=file)
    written = file.read_bytes()
    assert list(run([ASTHMA], pipe, resume=file)) == list(first)
    assert file.read_bytes() == written
    with pytest.raises(ConfigurationError, match=r"different settings \(ignore_labels\)"):
        run([ASTHMA], resume=file)
    assert file.read_bytes() == written


def test_missing_is_part_of_the_public_result():
    """The public function returns the numbers of missing values."""
    assert nb.annotate([None], "bundled_small", device="cpu", progress=False).missing == (0,)
