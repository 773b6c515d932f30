"""Tables of entities that belong to the rows that the notes came from."""

import pandas as pd
import pytest

NOTES = ["no history", "the patient has asthma", "type 2 diabetes mellitus and hypertension", None, "asthma"]


@pytest.fixture(scope="module")
def pipe(pipe_of, keyword_model):
    """A pipeline that finds keywords."""
    return pipe_of(keyword_model)


INDICES = {
    "numbers": pd.Index(range(513, 518)),
    "unsorted": pd.Index([9, 2, 7, 1, 5], name="row"),
    "names": pd.Index(["e", "d", "c", "b", "a"], name="visit"),
    "twice the same": pd.Index([1, 1, 2, 2, 3], name="patient"),
    "dates": pd.date_range("2020-01-01", periods=5, name="day"),
    "levels": pd.MultiIndex.from_arrays([[1, 1, 2, 2, 3], list("abcde")], names=["patient", "visit"]),
}


@pytest.mark.filterwarnings("ignore:. ids? occurs? more than once")
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
class TestIndexOfASeries:
    """The index of a Series of notes."""

    def test_rows_carry_the_index_of_their_note(self, annotated, pipe, index):
        """Each entity stands under the label of its note, with the names of the index."""
        found = annotated(pipe, pd.Series(NOTES, index=index, name="note"))
        frame = found.to_frame()
        assert frame["note_index"].tolist() == [1, 2, 2, 4]
        pd.testing.assert_index_equal(frame.index, index.take([1, 2, 2, 4]))
        assert frame.index.names == index.names

    def test_join_finds_the_right_patient(self, annotated, pipe, index):
        """Each entity has the row of its note, also if several rows have the same label."""
        table = pd.DataFrame({"patient_name": list("vwxyz"), "text": NOTES}, index=index)
        joined = annotated(pipe, table["text"]).to_frame(table)
        assert joined["patient_name"].tolist() == ["w", "x", "x", "z"]
        pd.testing.assert_index_equal(joined.index, index.take([1, 2, 2, 4]))

    def test_filtered_and_resumed_results_keep_it(self, annotated, pipe, tmp_path, index):
        """The index is that of the series after a resumed run and after a filter."""
        series = pd.Series(NOTES, index=index)
        annotated(pipe, series[:2], resume=tmp_path / "run.jsonl")
        found = annotated(pipe, series, resume=tmp_path / "run.jsonl")
        pd.testing.assert_index_equal(found.to_frame().index, index.take([1, 2, 2, 4]))
        pd.testing.assert_index_equal(found.filter("disease").to_frame().index, index.take([1, 2, 2, 4]))


class TestOtherSeries:
    """Series without an index, and series that change."""

    @pytest.mark.parametrize("kind", [list, iter, pd.Index], ids=lambda kind: kind.__name__)
    def test_without_an_index_rows_count_from_zero(self, annotated, pipe, kind):
        """Rows of the table are numbered where the notes had no index."""
        frame = annotated(pipe, kind(NOTES)).to_frame()
        pd.testing.assert_index_equal(frame.index, pd.RangeIndex(4))
        assert frame.columns[0] == "note_index"

    def test_index_of_a_run_that_was_ended(self, annotated, pipe):
        """The part of a run that an error leaves has the index of its notes."""
        series = pd.Series([*NOTES[:3], 5, "asthma"], index=INDICES["unsorted"])
        with pytest.raises(ValueError, match="Text 3 ") as caught:
            annotated(pipe, series)
        assert caught.value.annotations.to_frame().index.tolist() == [2, 7, 7]

    def test_merge_with_a_table_that_has_a_column_of_texts(self, annotated, pipe):
        """No column of the table of entities clashes with the texts."""
        table = pd.DataFrame({"text": NOTES, "patient": list("abcde")})
        merged = annotated(pipe, table["text"]).to_frame().merge(table, left_index=True, right_index=True)
        assert "text" in merged
        assert not {"text_x", "text_y"} & {*merged}


@pytest.mark.parametrize(
    ("index", "names"),
    [
        (pd.Index(range(5), name="note"), ["note"]),
        (pd.Index(range(5), name="score"), ["score_index"]),
        (pd.MultiIndex.from_arrays([[1, 1, 2, 2, 3], list("abcde")], names=["word", "visit"]), ["word_index", "visit"]),
    ],
)
def test_name_of_an_index_that_is_a_column_too_is_changed(annotated, pipe, index, names):
    frame = annotated(pipe, pd.Series(NOTES, index=index)).to_frame()

    assert frame.index.names == names
    assert len(frame.reset_index().groupby("note_index")) == 3
