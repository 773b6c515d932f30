"""Tables in the place of notes, bytes that are not text, and strings that name files."""

import os
from pathlib import Path

import pandas as pd
import pytest

from openmed_nb.annotation.references import table_reader
from openmed_nb.errors import ConfigurationError, InvalidTextError, OpenMedWarning

NOTES = ["the patient has asthma .", "no history ,\nnone"]


@pytest.fixture
def frame():
    """A table of notes."""
    return pd.DataFrame({"patient": [513, 514], "text": NOTES})


WRITERS = {
    "notes.csv": lambda frame, path: frame.to_csv(path, index=False),
    "NOTES.CSV": lambda frame, path: frame.to_csv(path, index=False),
    "notes.tsv": lambda frame, path: frame.to_csv(path, index=False, sep="\t"),
    "notes.parquet": lambda frame, path: frame.to_parquet(path),
    "notes.jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True),
    "notes.ndjson": lambda frame, path: frame.to_json(path, orient="records", lines=True),
}


@pytest.mark.parametrize("name", WRITERS)
def test_annotate_refuses_table_with_the_line_that_reads_its_column(name, frame, tmp_path, found_in):
    """Regression: a CSV of 5,000 notes was one text of 13,106 entities. The line is evaluated as it is printed."""
    WRITERS[name](frame, tmp_path / name)

    with pytest.raises(ConfigurationError, match="table") as caught:
        found_in(tmp_path / name)

    line = caught.value.remedy.removeprefix("Pass its column of texts, as in ").rstrip(".")
    texts = eval(line, {"pandas": pd, "path": tmp_path / name})  # noqa: S307 - the line of the remedy
    assert texts.tolist() == NOTES


@pytest.mark.parametrize("name", ["notes.txt", "csv", ".csv"])
def test_table_reader_takes_other_names_for_notes(name):
    assert table_reader(name) is None


def test_annotate_refuses_table_among_matches_without_its_name(frame, tmp_path, found_in):
    """A pattern that also matches a table is refused, and the name of that file is not quoted."""
    (tmp_path / "p1.txt").write_text(NOTES[0], "utf-8")
    frame.to_csv(tmp_path / "anna_smith.csv")

    with pytest.raises(ConfigurationError, match="table") as caught:
        found_in(tmp_path / "*")

    assert "anna_smith" not in str(caught.value)


def test_annotate_refuses_folder_of_a_parquet_table(frame, tmp_path, found_in):
    """Dask and Spark write a table as a folder."""
    (tmp_path / "notes.parquet").mkdir()
    frame.to_parquet(tmp_path / "notes.parquet/part-0")

    with pytest.raises(ConfigurationError, match="read_parquet"):
        found_in(tmp_path / "notes.parquet")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param("asthma\n".encode("utf-16-le"), "byte 1 is zero", id="utf-16-le"),
        pytest.param("asthma".encode("utf-16"), "not valid UTF-8 at byte 0", id="utf-16"),
        pytest.param(b"secret asthma\0", "byte 13 is zero", id="nul"),
        pytest.param(b"secret caf\xe9", "not valid UTF-8 at byte 10", id="latin-1"),
        pytest.param(b"\x1f\x8b\x08\x00secret", "not valid UTF-8 at byte 1", id="gzip"),
    ],
)
def test_bytes_that_are_not_text_are_an_error_by_number(content, said, tmp_path, found_in):
    """Regression: UTF-16 without a byte order mark was read without an entity and without an error."""
    (tmp_path / "n.txt").write_bytes(content)

    with pytest.raises(InvalidTextError, match=r"^Text 0: ") as caught:
        found_in(tmp_path / "n.txt")

    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


FORMS = {
    "pattern": "notes/*.txt",
    "pattern without a suffix": "notes/*",
    "folder": "notes",
    "missing": [r"C:\notes\p1.TXT"],
    "table": "notes.csv",
    "listdir": os.listdir,
    "generator": lambda folder: (str(path) for path in folder.glob("*.txt")),
    "series": lambda folder: pd.Series(list(map(str, folder.iterdir()))),
}


class TestStringsThatNameFiles:
    """A string is always a text. If it looks like a file name, a warning is issued."""

    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        """The working directory, with notes in a folder."""
        (tmp_path / "notes").mkdir()
        for number in range(2):
            (tmp_path / "notes" / f"p {number}.txt").write_text("asthma", "utf-8")
        (tmp_path / "notes.csv").write_text("note\nasthma\n", "utf-8")
        monkeypatch.chdir(tmp_path)
        return Path("notes")

    @pytest.mark.parametrize("form", FORMS)
    def test_annotate_warns_once(self, form, folder, found_in):
        """The warning does not quote the name, and the run continues."""
        texts = FORMS[form](folder) if callable(FORMS[form]) else FORMS[form]

        with pytest.warns(OpenMedWarning, match=r"^Text [01] looks like a file name") as caught:
            found_in(texts)

        assert len(caught) == 1
        assert "p 0" not in str(caught[0].message)
        assert Path(caught[0].filename) == Path(__file__) or "conftest" in caught[0].filename

    @pytest.mark.parametrize(
        "text", ["asthma", "", ".", "/", "BP 120/80 *", "**", "Take 1/2 tab.", "a" * 5000, "a\0b.", "~"]
    )
    @pytest.mark.usefixtures("folder")
    def test_annotate_warns_of_no_text(self, text, found_in):
        """Warnings are errors in these tests."""
        assert len(found_in([text])) == 1

    @pytest.mark.usefixtures("folder")
    def test_warning_for_a_table_reads_its_column(self, found_in):
        """Regression: the advice to pass a path made one note of the table."""
        with pytest.warns(OpenMedWarning, match=r"pandas\.read_csv\(path\)\['text'\]"):
            found_in("notes.csv")

    @pytest.mark.parametrize("paths", [lambda folder: folder.glob("*.txt"), lambda folder: list(os.scandir(folder))])
    def test_paths_in_another_series_are_refused_with_a_list(self, paths, folder, found_in):
        """Paths in a generator, and entries of a folder."""
        with pytest.raises(InvalidTextError, match="Pass paths in a list"):
            found_in(paths(folder))


class TestOtherSeries:
    """What is not a series of strings gets a remedy that fits."""

    @pytest.mark.parametrize("kind", ["array", "chunked_array"])
    def test_annotate_refuses_arrow_column(self, kind, found_in):
        """Iteration over an Arrow column yields Arrow scalars."""
        pyarrow = pytest.importorskip("pyarrow")
        column = getattr(pyarrow, kind)([["asthma"]] if kind == "chunked_array" else ["asthma"])

        with pytest.raises(ConfigurationError, match="to_pylist"):
            found_in(column)
        with pytest.raises(InvalidTextError, match="to_pylist"):
            found_in(list(column))

    def test_annotate_refuses_arrow_column_of_datasets(self, found_in):
        """A column of a dataset in Arrow's format."""
        datasets = pytest.importorskip("datasets")
        column = datasets.Dataset.from_dict({"text": ["asthma"]}).with_format("arrow")["text"]

        with pytest.raises((ConfigurationError, InvalidTextError), match="to_pylist"):
            found_in(column)

    @pytest.mark.parametrize("words", [["has", "asthma"], ("has", "asthma")])
    def test_annotate_refuses_lists_of_words(self, words, found_in):
        """The remedy joins them."""
        with pytest.raises(InvalidTextError, match="join"):
            found_in([words])
