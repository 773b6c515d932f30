"""Patterns of files: existing parents are literal, the order is that of the path parts, and each file is read once."""

import glob
import os
import socket
import sys
from pathlib import Path

import pytest

from openmed_nb.annotation.references import expand_globs
from openmed_nb.errors import ConfigurationError

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
@pytest.mark.parametrize(
    "parent",
    [
        "ward[A]",
        "**",
        "[",
    ],
)
def test_pattern_reads_existing_parent_literally(tmp_path, write, parent):
    """Regression: ``ward[A]/*.txt`` read the notes of ``wardA``."""
    note = write(f"{parent}/n.txt")
    for other in ("wardA/n.txt", "ward0/n.txt", "wardB/n.txt", "x/y/n.txt"):
        write(other, "epilepsy")

    assert names_matching(tmp_path / parent / "*.txt") == [str(note)]


@posix_only
@pytest.mark.parametrize("pattern", ["*.txt", "~/*.txt"])
def test_pattern_in_a_working_or_home_directory_with_brackets(pattern, write, found_in, monkeypatch):
    """Both are parents that exist."""
    note = write("ward[A]/n.txt")
    write("wardA/n.txt", "epilepsy")
    monkeypatch.chdir(note.parent)
    monkeypatch.setenv("HOME", str(note.parent))

    assert found_in(Path(pattern)).sources == (str(note),)


@posix_only
def test_escaped_pattern_reads_the_escaped_folder(tmp_path, write):
    """What ``glob.escape`` returns still works."""
    note = write("ward[A]/n.txt")
    write("wardA/n.txt")

    assert names_matching(Path(glob.escape(str(tmp_path / "ward[A]"))) / "*.txt") == [str(note)]


@posix_only
@pytest.mark.parametrize("name", ["note[1].txt", "ward[A]/n.txt"])
def test_missing_name_with_one_character_in_brackets_is_not_another_file(tmp_path, write, name):
    """A file that is gone is an error, and not the note of somebody else."""
    write("note1.txt")
    write("wardA/n.txt")

    assert isinstance(expand_globs([str(tmp_path / name)]), ConfigurationError)


def test_class_of_characters_is_a_pattern(tmp_path, write):
    """Ranges and question marks are wildcards."""
    notes = [write(f"p{number}.txt") for number in range(3)]

    assert names_matching(tmp_path / "p[0-1].txt") == list(map(str, notes[:2]))
    assert names_matching(tmp_path / "p?.txt") == list(map(str, notes))


@pytest.mark.parametrize("pattern", ["*/*.txt", "**/*.txt"])
def test_pattern_orders_files_by_path_parts(tmp_path, write, pattern):
    """Regression: as strings, ``p1-old`` is before ``p1``."""
    for name in ("p1-old/a.txt", "p1/a.txt", "p1/b.txt", "p1.2/a.txt", "p10/a.txt", "p2/a.txt"):
        write(name)

    assert names_matching(tmp_path / pattern) == list(map(str, sorted(tmp_path.glob("*/*.txt"))))


def test_pattern_omits_hidden_files_and_folders(tmp_path, write):
    """Hidden entries are found only by their names or a pattern with a dot."""
    note = write("p1.txt")
    for name in ("._p1.txt", ".p2.txt", ".trash/p3.txt", "visible/.hidden/p4.txt"):
        write(name)

    assert names_matching(tmp_path / "*.txt") == [str(note)]
    assert names_matching(tmp_path / "**" / "*.txt") == [str(note)]
    assert names_matching(tmp_path / ".*.txt") == [str(tmp_path / "._p1.txt"), str(tmp_path / ".p2.txt")]
    assert names_matching(tmp_path / ".p2.txt") == [str(tmp_path / ".p2.txt")]


def test_double_star_at_the_end_finds_all_files_below(tmp_path, write):
    """It finds files and not folders."""
    notes = [write("a/b/n.txt"), write("a/n.txt"), write("m.txt")]
    (tmp_path / "x.txt").mkdir()

    assert names_matching(tmp_path / "**") == list(map(str, notes))


@posix_only
def test_link_loop_finds_each_file_once(tmp_path, write):
    """Regression: 82 texts of two files (cpython#88041)."""
    notes = [write("root/a/n.txt"), write("root/m.txt")]
    write("outside.txt")
    (tmp_path / "root/a/all").symlink_to(tmp_path / "root")
    (tmp_path / "root/a/up").symlink_to(tmp_path)
    (tmp_path / "root/itself").symlink_to("itself")

    assert names_matching(tmp_path / "root" / "**" / "*.txt") == list(map(str, notes))


@posix_only
def test_linked_folder_is_read_once_and_under_its_own_name(tmp_path, write):
    """Links are followed where no folder of that content matches."""
    own, archived = write("root/b/n.txt"), write("archive/m.txt")
    (tmp_path / "root/a").symlink_to("b")
    (tmp_path / "root/c").symlink_to(archived.parent)

    linked = str(tmp_path / "root/c/m.txt")
    assert names_matching(tmp_path / "root" / "**" / "*.txt") == [str(own), linked]
    assert names_matching(tmp_path / "root" / "*" / "*.txt") == [str(own), linked]


@posix_only
def test_linked_file_is_omitted_only_where_its_target_matches(tmp_path, write):
    """Two links to one file outside, as in a store by content, are the notes of two patients."""
    note, stored = write("notes/p3.txt"), write("store/xyz")
    (tmp_path / "notes/latest.txt").symlink_to("p3.txt")
    for name in ("p1.txt", "p2.txt"):
        (tmp_path / "notes" / name).symlink_to(stored)

    assert names_matching(tmp_path / "notes" / "*.txt") == [str(note.with_name(f"p{n}.txt")) for n in (1, 2, 3)]


def test_list_keeps_named_files_and_patterns_add_none_twice(tmp_path, write):
    """The numbers of named files are their places in the list."""
    first, second = str(write("p1.txt")), str(write("p2.txt"))

    assert names_matching(second, second, tmp_path / "*.txt") == [second, second, first]
    assert names_matching(tmp_path / "*.txt", tmp_path / "p*.txt", first) == [first, second, first]


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


def test_missing_file_error_quotes_no_path_that_may_be_a_note(tmp_path):
    """A note may be passed as a path."""
    error = expand_globs([str(tmp_path / "Mr Smith of Leeds has HIV")])

    assert isinstance(error, ConfigurationError)
    assert "Smith" not in str(error)
    assert socket.gethostname() in str(error)


class TestSources:
    """The file of each text."""

    def test_sources_names_the_file_of_each_text(self, write, tmp_path, found_in):
        """The results hold it as attribute, in JSON and as a column."""
        notes = [write("p1/a.txt"), write("p1-old/a.txt", "no history ."), write("p2/a.txt")]

        found = found_in(tmp_path / "*" / "*.txt")

        assert found.sources == tuple(map(str, notes))
        assert [source["source"] for source in found.to_dict()["texts"]] == list(found.sources)
        assert found.to_frame()["source"].tolist() == [str(notes[0]), str(notes[2])]
        assert found.filter("disease").sources == found.sources

    def test_sources_are_none_for_texts(self, found_in):
        """Other texts have no source, and tables of them no such column."""
        found = found_in(["the patient has asthma .", "no history ."])

        assert found.sources == (None, None)
        assert "source" not in found.to_frame()
        assert "source" not in found.to_dict()["texts"][0]
        assert found_in(iter(["the patient has asthma ."])).sources == (None,)

    def test_sources_after_resume_fit_show_and_mask(self, write, tmp_path, found_in):
        """The file of results does not hold the paths."""
        notes = [write("p1.txt"), write("p2.txt", "type 2 diabetes mellitus")]
        found_in(tmp_path / "*.txt", resume=tmp_path / "run.jsonl")

        found = found_in(tmp_path / "*.txt", resume=tmp_path / "run.jsonl")

        assert found.sources == tuple(map(str, notes))
        assert [found.show(number).text for number in range(2)] == [note.read_text("utf-8") for note in notes]
        assert [masked.text for masked in found.mask()] == ["the patient has [DISEASE] .", "type 2 [DISEASE]"]
        assert "p1" not in (tmp_path / "run.jsonl").read_text("utf-8")

    def test_sources_are_in_no_report_summary_or_error(self, write, tmp_path, found_in):
        """A name of a file can be that of a patient."""
        write("anna_smith.txt")
        (tmp_path / "carl_jones.txt").write_bytes(b"caf\xe9")

        found = found_in(tmp_path / "*.txt", on_error="record")

        shown = [str(found), found._repr_html_(), str(found.summary().to_dict()), str(found.errors)]
        assert len(found.errors) == 1
        assert not any("anna_smith" in text or "carl_jones" in text for text in shown)

    def test_sources_of_an_interrupted_run_are_those_of_its_texts(self, write, tmp_path, found_in):
        """There is one for each text that has an answer."""
        note = write("p1.txt")
        (tmp_path / "p2.txt").write_bytes(b"caf\xe9")
        write("p3.txt")

        with pytest.raises(ValueError, match="not valid UTF-8") as caught:
            found_in(tmp_path / "*.txt")

        assert caught.value.annotations.sources == (str(note),)
