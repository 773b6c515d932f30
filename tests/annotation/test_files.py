"""Files of text in the place of texts: paths, patterns, tables, and strings that name files."""

import errno
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from helpers.annotations import words
from openmed_nb.annotation.references import (
    expand_globs,
    resolve_paths,
)
from openmed_nb.errors import ConfigurationError, InvalidTextError, OpenMedWarning

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="Windows allows no such names, or no links")


@pytest.fixture
def write(tmp_path):
    """A function that writes a note below the test's directory and returns its path."""

    def write(name: str, text: str = "the patient has asthma .") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        return path

    return write


def names_matching(*patterns):
    """Return the paths of the files that match patterns."""
    files = expand_globs([str(pattern) for pattern in patterns])
    assert not isinstance(files, ConfigurationError), files
    return [file.path for file in files]


@posix_only
@pytest.mark.parametrize("parent", ["ward[A]", "**", "["])
def test_pattern_reads_existing_parent_literally(tmp_path, write, parent):
    """Regression: ``ward[A]/*.txt`` read the notes of ``wardA``."""
    note = write(f"{parent}/n.txt")
    for other in ("wardA/n.txt", "wardB/n.txt", "x/y/n.txt"):
        write(other, "epilepsy")

    assert names_matching(tmp_path / parent / "*.txt") == [str(note)]


def test_files_are_in_the_order_of_a_list_and_repeated_only_if_named(tmp_path, write):
    first = str(write("p1.txt"))
    second = str(write("p2.txt"))

    assert names_matching(second, tmp_path / "*1.txt", tmp_path / "p1.*") == [second, first]
    assert names_matching(first, first) == [first, first]


@posix_only
@pytest.mark.parametrize("pattern", ["*.txt", "~/*.txt"])
def test_pattern_in_a_working_or_home_directory_with_brackets(pattern, write, found_in, monkeypatch):
    note = write("ward[A]/n.txt")
    write("wardA/n.txt", "epilepsy")
    monkeypatch.chdir(note.parent)
    monkeypatch.setenv("HOME", str(note.parent))

    assert found_in(Path(pattern)).sources == (str(note),)


@posix_only
@pytest.mark.parametrize("name", ["note[1].txt", "ward[A]/n.txt"])
def test_missing_name_with_one_character_in_brackets_is_not_another_file(tmp_path, write, name):
    write("note1.txt")
    write("wardA/n.txt")

    assert isinstance(expand_globs([str(tmp_path / name)]), ConfigurationError)


def test_wildcards_find_files_in_the_order_of_path_parts(tmp_path, write):
    """Regression: as strings, ``p1-old`` is before ``p1``."""
    for name in ("p1-old/a.txt", "p1/a.txt", "p1/b.txt", "p10/a.txt"):
        write(name)
    notes = list(map(str, sorted(tmp_path.glob("*/*.txt"))))

    assert names_matching(tmp_path / "*" / "*.txt") == names_matching(tmp_path / "**" / "*.txt") == notes
    assert names_matching(tmp_path / "p1" / "[a-b].txt") == names_matching(tmp_path / "p1" / "?.txt") == notes[:2]


def test_pattern_omits_hidden_files_and_folders(tmp_path, write):
    """Hidden entries are found only by their names or a pattern with a dot."""
    note = write("p1.txt")
    for name in ("._p1.txt", ".p2.txt", ".trash/p3.txt", "visible/.hidden/p4.txt"):
        write(name)

    assert names_matching(tmp_path / "*.txt") == [str(note)]
    assert names_matching(tmp_path / "**" / "*.txt") == [str(note)]
    assert names_matching(tmp_path / ".*.txt") == [str(tmp_path / "._p1.txt"), str(tmp_path / ".p2.txt")]
    assert names_matching(tmp_path / ".p2.txt") == [str(tmp_path / ".p2.txt")]


@posix_only
def test_double_star_follows_no_links(tmp_path, write):
    """Regression: a loop of links returned 82 texts of two files (cpython#88041)."""
    notes = [write("root/a/n.txt"), write("root/m.txt")]
    (tmp_path / "root/a/all").symlink_to(tmp_path / "root")
    (tmp_path / "root/itself").symlink_to("itself")
    (tmp_path / "x.txt").mkdir()

    assert names_matching(tmp_path / "root" / "**" / "*.txt") == list(map(str, notes))
    assert names_matching(tmp_path / "**") == [*map(str, notes[:1]), str(tmp_path / "root/itself"), str(notes[1])]


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root can list every folder")
def test_folder_that_cannot_be_listed_is_refused(tmp_path, write):
    """Its notes would be omitted silently."""
    write("p1.txt")
    locked = write("locked/p2.txt").parent
    locked.chmod(0)
    try:
        assert isinstance(expand_globs([str(tmp_path / "**" / "*.txt")]), ConfigurationError)
    finally:
        locked.chmod(0o700)


def test_sources_name_the_file_of_each_text(write, tmp_path, found_in):
    """Also after a run is resumed from a file without the paths."""
    notes = [write("p1/a.txt"), write("p1-old/a.txt", "no history .")]

    for _ in range(2):
        results = found_in(tmp_path / "*" / "*.txt", resume=tmp_path / "run.jsonl")
        assert results.sources == results.filter("disease").sources == tuple(map(str, notes))
        assert [source["source"] for source in results.to_dict()["texts"]] == list(results.sources)
        assert results.to_frame()["source"].tolist() == [str(notes[0])]
        frame = replace(results, ids=["x", "y"], id_name="source").to_frame()
        assert frame[["note_id", "source"]].to_numpy().tolist() == [["x", str(notes[0])]]
        assert results.show(1).text == "no history ."
    assert "p1" not in (tmp_path / "run.jsonl").read_text("utf-8")
    assert found_in(["no history ."]).sources == (None,)


def test_sources_are_in_no_report_summary_or_error(write, tmp_path, found_in):
    """A name of a file can be that of a patient. An interrupted run has the files of its texts."""
    note = write("anna_smith.txt")
    (tmp_path / "carl_jones.txt").write_bytes(b"caf\xe9")
    found = found_in(tmp_path / "*.txt", on_error="record")
    with pytest.raises(ValueError, match="not valid UTF-8") as caught:
        found_in(tmp_path / "*.txt")

    shown = f"{found} {found._repr_html_()} {found.summary().to_dict()} {found.errors} {caught.value}"
    assert "smith" not in shown
    assert "jones" not in shown
    assert caught.value.annotations.sources == (str(note),)


TEXTS = ["the patient has asthma .", "no history .", "", "type 2 diabetes mellitus\r\nand hypertension"]
WORDS = [["asthma"], [], [], ["diabetes mellitus", "hypertension"]]


@pytest.fixture
def folder(tmp_path):
    """A folder with a file for each text."""
    for number, text in enumerate(TEXTS):
        (tmp_path / f"note {number}.txt").write_bytes(text.encode())
    return tmp_path


class TestFiles:
    """A file is a text."""

    def test_pattern(self, folder, found_in):
        """The files that a pattern stands for are read in the order of their names, each when it is needed."""
        found = found_in(folder / "*.txt")
        assert words(found) == WORDS
        assert found.preview_texts == ()
        assert str(found).startswith("3 mentions of diseases found in 4 notes")
        assert "\n  2 notes have text but no entities.\n" in str(found)

    def test_resume(self, folder, found_in, tmp_path):
        """A run over files annotates new and modified files."""
        found_in(folder / "*.txt", resume=tmp_path / "run.jsonl")
        assert words(found_in(folder / "*.txt", resume=tmp_path / "run.jsonl")) == WORDS
        (folder / "note 1.txt").write_text("asthma and more", "utf-8")
        found = found_in(folder / "*.txt", resume=tmp_path / "run.jsonl")
        assert words(found) == [WORDS[0], ["asthma"], *WORDS[2:]]

    def test_unreadable_files_are_recorded(self, folder, found_in):
        """Errors do not contain file names, because a file name can be the name of a person."""
        files = expand_globs([str(folder / "*.txt")])
        (folder / "note 0.txt").unlink()
        found = found_in(files, on_error="record")
        message = f"Text 0: the file cannot be read on {socket.gethostname()}: No such file or directory."
        assert found.errors == {0: f"{message} Make the file readable there."}
        assert words(found) == [[], *WORDS[1:]]

    @pytest.mark.parametrize(
        ("name", "problem"),
        [
            ("", "is a folder on"),
            ("*.md", "'\\*.md' was not found in the folder"),
            ("Mr Smith has HIV", "'…' was not found"),
        ],
    )
    def test_path_without_files_is_refused(self, folder, found_in, name, problem):
        with pytest.raises(ConfigurationError, match=problem) as caught:
            found_in(folder / name)
        assert "Smith" not in str(caught.value)

    @posix_only
    def test_name_like_a_pattern(self, folder, found_in):
        """A file whose name would be a pattern is that file."""
        (folder / "*.txt.txt").write_text("diabetes", "utf-8")
        assert words(found_in([folder / "*.txt.txt", folder / "note 0.txt"])) == [["diabetes"], ["asthma"]]

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes in folders there")
    def test_pipes_and_dangling_links_are_recorded(self, folder, found_in):
        """Reading from a pipe must not block; a matching directory is ignored."""
        os.mkfifo(folder / "a.txt")
        (folder / "b.txt").symlink_to("nowhere")
        (folder / "c.txt").mkdir()
        found = found_in(folder / "*.txt", on_error="record")
        assert [*found.errors] == [0, 1]
        assert os.strerror(errno.ENOTSUP) in found.errors[0]
        assert words(found) == [[], [], *WORDS]

    @pytest.mark.parametrize("texts", ["*.txt", ["*.txt"], [], [Path("a"), "b"]], ids=repr)
    def test_strings_are_not_paths(self, texts):
        assert resolve_paths(texts, pytest.fail) is texts


NOTES = ["the patient has asthma .", "no history ,\nnone"]


@pytest.mark.parametrize("name", ["NOTES.CSV", "notes.parquet", "notes.jsonl"])
def test_annotate_refuses_table(name, tmp_path, found_in):
    """Regression: a CSV of 5,000 notes was one text of 13,106 entities."""
    (tmp_path / name).write_text(NOTES[0], "utf-8")

    with pytest.raises(ConfigurationError, match="is a table"):
        found_in(tmp_path / name)


def test_annotate_refuses_table_among_matches_without_its_name(tmp_path, found_in):
    """A pattern that also matches a table is refused, and the name of that file is not quoted."""
    (tmp_path / "p1.txt").write_text(NOTES[0], "utf-8")
    (tmp_path / "anna_smith.csv").touch()

    with pytest.raises(ConfigurationError, match="table") as caught:
        found_in(tmp_path / "*")

    assert "anna_smith" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param("asthma\n".encode("utf-16-le"), "not valid UTF-8 at byte 1", id="utf-16-le"),
        pytest.param("asthma".encode("utf-16"), "not valid UTF-8 at byte 0", id="utf-16"),
        pytest.param(b"secret caf\xe9", "not valid UTF-8 at byte 10", id="latin-1"),
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
    "missing": [r"C:\notes\p1.TXT"],
    "table": ["notes.csv"],
    "generator": lambda folder: (str(path) for path in folder.glob("*.txt")),
    "series": lambda folder: pd.Series(list(map(str, folder.iterdir()))),
}


class TestStringsThatNameFiles:
    """A string is always a text. If one of many looks like a file name, a warning is issued; a single one is an error."""

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
        assert ("text_column" in str(caught[0].message)) == (form == "table")
        assert "p 0" not in str(caught[0].message)

    @pytest.mark.parametrize(
        "text", ["asthma", "", "BP 120/80 *", "Take 1/2 tab.", "notes", f"{'a' * 5000}.txt", "a\0b."]
    )
    @pytest.mark.usefixtures("folder")
    def test_annotate_warns_of_no_text(self, text, found_in):
        """Warnings are errors in these tests."""
        assert list(found_in([text])[0]) == list(found_in(text))

    @pytest.mark.parametrize("paths", [lambda folder: folder.glob("*.txt"), lambda folder: list(os.scandir(folder))])
    def test_paths_in_another_series_are_refused_with_a_list(self, paths, folder, found_in):
        """Paths in a generator, and entries of a folder."""
        with pytest.raises(InvalidTextError, match="Pass paths in a list"):
            found_in(paths(folder))


class TestOtherSeries:
    """What is not a series of strings gets a remedy that fits."""

    def test_annotate_refuses_arrow_column(self, found_in):
        """Iteration over an Arrow column yields Arrow scalars."""
        pyarrow = pytest.importorskip("pyarrow")
        with pytest.raises(InvalidTextError, match="to_pylist"):
            found_in(pyarrow.array(["asthma"]))

    @pytest.mark.parametrize("words", [["has", "asthma"], ("has", "asthma")])
    def test_annotate_refuses_lists_of_words(self, words, found_in):
        """The remedy joins them."""
        with pytest.raises(InvalidTextError, match="join"):
            found_in([words])
