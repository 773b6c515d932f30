"""Ids of notes: where they come from, what they select, and where they must not appear."""

import dataclasses
import os
import pickle
import re
import sys
import traceback
from pathlib import Path

import dask.dataframe as dd
import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from helpers.annotations import annotate
from openmed_nb.annotation.inputs import read_inputs
from openmed_nb.errors import ConfigurationError, OpenMedError, OpenMedWarning, RunInterrupted

NOTES = ["She has asthma.", None, "No diabetes.\r\nHe is well 🤧 and has asthma.", "She has asthma."]
IDS = ["a7", "b2", "c9", "d4"]
MARKER = "Zyxwvut-1234"


def table(**columns):
    return pd.DataFrame({"note_id": IDS, "note": NOTES, "ward": [1, 2, 1, 2], **columns})


COLUMNS = {"text_column": "note", "id_column": "note_id"}


class TestSources:
    @pytest.mark.parametrize(
        ("convert", "options"),
        [
            pytest.param(table, COLUMNS, id="DataFrame"),
            pytest.param(lambda: table(note=[NOTES[0], " \n", *NOTES[2:]]), COLUMNS, id="blank cell"),
            pytest.param(lambda: pa.Table.from_pandas(table()), COLUMNS, id="Arrow"),
            pytest.param(lambda: datasets.Dataset.from_pandas(table()), COLUMNS, id="Dataset"),
            pytest.param(lambda: NOTES, {"ids": np.array(IDS)}, id="array"),
            pytest.param(lambda: NOTES, {"ids": pd.Series(IDS, index=[9, 8, 7, 6])}, id="Series of ids"),
            pytest.param(lambda: dict(zip(IDS, NOTES, strict=True)), {}, id="mapping"),
            pytest.param(lambda: table().set_index("note_id")["note"], {}, id="index of a Series"),
        ],
    )
    def test_ids_stay_with_their_notes(self, convert, options):
        found = annotate(convert(), **options)
        assert list(found.ids) == IDS
        assert found.missing == (1,)
        frame = found.to_frame().reset_index()
        expected = [("a7", "asthma"), ("c9", "diabetes"), ("c9", "asthma"), ("d4", "asthma")]
        assert list(zip(frame["note_id"], frame["word"], strict=True)) == expected
        assert [text["id"] for text in found.to_dict()["texts"]] == IDS

    @pytest.mark.parametrize(("options", "ids"), [(COLUMNS, IDS * 2), ({"text_column": "note"}, None)])
    def test_tables_are_read_one_by_one(self, options, ids):
        inputs = read_inputs(iter([pa.Table.from_pandas(table())] * 2), **options)
        assert list(inputs.texts) == NOTES * 2
        assert (inputs.ids, inputs.text_name) == (ids, "note")

    @pytest.mark.parametrize(
        ("texts", "options", "expected"),
        [
            pytest.param({"a7": "asthma"}, {}, (["asthma"], ["a7"], "note_id", None), id="mapping"),
            pytest.param(
                {"note": ["asthma"]}, {}, ({"note": ["asthma"]}, None, "note_id", None), id="mapping of columns"
            ),
            pytest.param(pd.Series(["gout"], name="note"), {}, (["gout"], None, "note_id", "note"), id="named column"),
            pytest.param(["gout"], {"ids": pd.Series([7], name="mrn")}, (["gout"], [7], "mrn", None), id="named ids"),
            pytest.param(table(), COLUMNS, (NOTES, IDS, "note_id", "note"), id="table"),
        ],
    )
    def test_inputs_have_the_names_of_their_columns(self, texts, options, expected):
        inputs = read_inputs(texts, **options)
        read = inputs.texts
        if isinstance(read, pd.Series):
            read = read.astype(object).where(read.notna(), None).tolist()
        assert (read, inputs.ids, inputs.id_name, inputs.text_name) == expected

    @pytest.mark.parametrize("ids", ["name", "path"])
    def test_ids_of_files_are_names_or_paths(self, tmp_path, ids):
        paths = [tmp_path / f"note{number}.txt" for number in range(3)]
        for path in paths:
            path.write_text(NOTES[0])
        found = annotate(tmp_path / "*.txt", ids=ids)
        assert found.ids == [path.name if ids == "name" else str(path) for path in paths]


class TestSelection:
    def test_strings_select_by_id_and_integers_by_index(self):
        found = annotate(NOTES, ids=IDS)
        assert found["c9"] == found[2]
        assert found.show("c9").text == NOTES[2]
        assert found.position("d4") == 3
        assert [*annotate(pd.Series(NOTES)).show(2)] == found[2]
        assert annotate(NOTES, ids=[(1, "a"), (1, "b"), (2, "a"), (2, "b")])[(2, "a")] == found[2]

    @pytest.mark.parametrize("ids", [[1, 2, 3, 4], [10, 20, 30.5, "x"], [3, 0, 1, 2]])
    def test_integer_that_can_be_an_id_or_a_position_is_rejected(self, ids):
        found = annotate(NOTES, ids=ids)
        for select in (found.__getitem__, found.show):
            with pytest.raises(ConfigurationError, match=r"found\.at\(1\)"):
                select(1)
        assert found.position(ids[2]) == 2
        assert [*found.at(2)] == [*found][2] == found[2:][0] == [*reversed(found)][1]

    def test_repeated_ids_are_stated_when_they_are_passed_and_selected(self):
        with pytest.warns(OpenMedWarning, match=r"^1 id occurs more than once, and 1 note has no id\. .*\| notes\['c"):
            found = annotate(NOTES, ids=pd.Series(["a7", MARKER, None, MARKER], name="case"))
        with pytest.raises(ConfigurationError, match="No text has this id"):
            found.show(MARKER.lower())
        with pytest.raises(ConfigurationError, match="2 texts have this id, at positions 1, 3") as caught:
            found.show(MARKER)
        assert MARKER not in str(caught.value)
        assert found["a7"] == found.results[0]


class TestRejectedInputs:
    @pytest.mark.parametrize(
        ("texts", "options", "problem"),
        [
            pytest.param(NOTES, {"ids": IDS[:2]}, "2 ids for 4 texts", id="too few ids"),
            pytest.param(NOTES, {"ids": [[1], 2, 3, 4]}, "id at index 0 is list", id="unhashable"),
            pytest.param(NOTES, {"ids": MARKER}, "ids must not be a single string", id="string"),
            pytest.param(NOTES, {"ids": {*IDS}}, "for ids: set", id="set"),
            pytest.param(NOTES, {"ids": "path"}, "requires files.*Path", id="paths of texts"),
            pytest.param(NOTES, {"ids": dd.from_pandas(pd.Series(IDS))}, "not in memory", id="Dask"),
            pytest.param(NOTES, {"ids": np.array(5)}, "for ids: ndarray", id="array without dimensions"),
            pytest.param("She has asthma.", {"ids": ["a7"]}, "A single text has no ids", id="single text"),
            pytest.param(
                table().set_axis([MARKER] * 3, axis=1), {"text_column": MARKER}, "several columns", id="repeated column"
            ),
            pytest.param(iter([table()]), {"text_column": "nope"}, "column 'nope' of text_column", id="unknown name"),
            pytest.param(
                *(pd.Series(NOTES), {"ids": pd.Series(IDS, index=[9, 8, 7, 6])}, "rows of the texts"), id="other rows"
            ),
            pytest.param(table(), {"id_column": "note_id"}, "id_column requires text_column", id="no text column"),
            pytest.param(table(), {**COLUMNS, "ids": IDS}, "both specified", id="ids twice"),
            pytest.param(table(), {}, "DataFrame is a table", id="no column"),
        ],
    )
    def test_arguments_that_do_not_fit_are_rejected(self, texts, options, problem):
        with pytest.raises(ConfigurationError, match=problem) as caught:
            annotate(texts, **options)
        assert MARKER not in str(caught.value)
        assert "a7" not in str(caught.value)

    @pytest.mark.parametrize("ids", [IDS[:3], [*IDS, "e5"]], ids=["too few", "too many"])
    def test_iterator_with_another_number_of_ids_keeps_its_results(self, ids):
        with pytest.raises(ConfigurationError, match="ids for") as caught:
            annotate(iter(NOTES), ids=ids)
        assert len(vars(caught.value)["annotations"]) == min(len(ids), len(NOTES))


class TestFrame:
    @pytest.mark.filterwarnings("ignore:1 note has no id")
    @pytest.mark.parametrize("missing", [None, float("nan")])
    def test_ids_keep_their_values_next_to_a_missing_id(self, missing):
        ids = [2**53 + 1, missing, 7, 8]
        found = annotate(["She has asthma."] * 4, ids=ids)
        assert found.to_frame()["note_id"].tolist() == ids

    @pytest.mark.skipif(sys.platform != "linux", reason="File names are Unicode.")
    def test_names_of_files_that_are_not_utf_8_are_in_the_frame(self, tmp_path):
        path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/M\xfcller.txt"))
        path.write_text("She has asthma.")
        found = annotate([path], ids="name")
        assert found.to_frame()[["note_id", "source"]].to_numpy().tolist() == [[path.name, str(path)]]
        for name in ("a.jsonl", "a.parquet"):
            with pytest.raises(ConfigurationError, match=r"not valid Unicode\. Pass other ids") as caught:
                found.save(tmp_path / name)
            assert "ller" not in "".join(traceback.format_exception(caught.value))

    def test_span_text_has_the_characters_of_the_note(self):
        notes = ["HAS  Type 2\r\nDIABETES today", "🤧 asthma"]
        for row in annotate(notes).to_frame().itertuples():
            assert row.span_text == notes[row.note_index][row.start : row.end]

    def test_span_text_is_missing_where_the_note_is_not_stored(self):
        frame = annotate(iter(["She has asthma."] * 7)).to_frame()
        assert frame["span_text"].isna().tolist() == [False] * 5 + [True] * 2


class TestPrivacy:
    def test_ids_are_in_no_report_error_or_resume_file(self, tmp_path):
        ids = [f"{MARKER}-{number}" for number in range(3)]
        path = tmp_path / "run.jsonl"
        found = annotate(["She has asthma.", "No complaints.", "Flu."], ids=ids, resume=path)
        hidden = dataclasses.replace(found, show_text=False)
        shown = (str(hidden), hidden._repr_html_(), str(found.summary()), path.read_text())
        assert all(MARKER not in text for text in shown)
        displayed = (str(found), found._repr_html_(), str(found.mask()), str(found.show()))
        assert all(f"{MARKER}-1: No complaints." in re.sub("<[^>]*>", "", text) for text in displayed)
        with pytest.raises(OpenMedError) as caught:
            annotate(["She has asthma.", "\ud800", 5], ids=ids)
        assert MARKER not in str(caught.value)
        assert MARKER.encode() not in pickle.dumps(vars(caught.value)["annotations"])

    def test_resumed_run_takes_ids_from_its_input(self, tmp_path):
        path = tmp_path / "run.jsonl"

        def interrupted():
            yield from NOTES[:3]
            raise KeyboardInterrupt

        with pytest.raises(RunInterrupted) as caught:
            annotate(interrupted(), ids=IDS, resume=path, batch_tokens=8)
        completed = caught.value.annotations
        assert list(completed.ids) == IDS[: len(completed)]
        frame = annotate(NOTES, ids=IDS, resume=path).to_frame()
        assert frame["note_id"].tolist() == [IDS[note] for note in frame["note_index"]]
        assert "c9" not in path.read_text()


INDICES = {
    "numbers": pd.Index([9, 2, 7, 1], name="row"),
    "repeated": pd.Index([1, 1, 2, 2], name="patient"),
    "dates": pd.date_range("2020-01-01", periods=4, name="day"),
    "levels": pd.MultiIndex.from_arrays([[1, 1, 2, 2], list("abcd")], names=["patient", "visit"]),
}


@pytest.mark.filterwarnings("ignore:. ids? occurs? more than once")
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_frame_has_the_index_of_a_series(index, tmp_path):
    notes = pd.DataFrame({"name": list("vwxy"), "note": NOTES}, index=index)
    annotate(notes["note"][:2], resume=tmp_path / "run.jsonl")
    found = annotate(notes["note"], resume=tmp_path / "run.jsonl")
    rows = index.take([0, 2, 2, 3])
    for frame in (found.to_frame(), found.filter("disease").to_frame(), found.to_frame(notes)):
        pd.testing.assert_index_equal(frame.index, rows)
    assert found.to_frame(notes)["name"].tolist() == ["v", "x", "x", "y"]


@pytest.mark.parametrize("kind", [list, iter, pd.Index], ids=lambda kind: kind.__name__)
def test_frame_without_an_index_numbers_its_rows(kind):
    frame = annotate(kind(NOTES)).to_frame()
    pd.testing.assert_index_equal(frame.index, pd.RangeIndex(4))
    assert frame.columns[0] == "note_index"


def test_results_of_an_error_have_the_index_of_their_notes():
    with pytest.raises(ValueError, match="Text 3 ") as caught:
        annotate(pd.Series([*NOTES[:3], 5], index=INDICES["numbers"]))
    assert caught.value.annotations.to_frame().index.tolist() == [9, 7, 7]


@pytest.mark.parametrize(
    ("index", "names"),
    [
        (pd.Index(range(4), name="score"), ["score_index"]),
        (INDICES["levels"].set_names(["word", "visit"]), ["word_index", "visit"]),
    ],
)
def test_index_with_the_name_of_a_column_is_renamed(index, names):
    frame = annotate(pd.Series(NOTES, index=index)).to_frame()
    assert frame.index.names == names
    assert len(frame.reset_index()) == len(frame)
