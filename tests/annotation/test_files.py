"""Files of text: a path, a list of paths or a pattern in the place of texts."""

import errno
import os
import pickle
import socket
import sys
from pathlib import Path

import pytest

from openmed_nb.annotation.references import (
    FileReference,
    effective_length,
    expand_globs,
    resolve_paths,
    text_fingerprint,
)
from openmed_nb.errors import ConfigurationError, OpenMedWarning

TEXTS = ["the patient has asthma .", "no history .", "", "type 2 diabetes mellitus\r\nand hypertension"]
WORDS = [["asthma"], [], [], ["diabetes mellitus", "hypertension"]]


@pytest.fixture
def folder(tmp_path):
    """A folder with a file for each text."""
    for number, text in enumerate(TEXTS):
        (tmp_path / f"note {number}.txt").write_bytes(text.encode())
    return tmp_path


def words(found):
    """Return the words of each text."""
    return [[entity["word"] for entity in entities] for entities in found]


class TestFiles:
    """A file is a text."""

    def test_pattern(self, folder, found_in):
        """The files that a pattern stands for are read in the order of their names, each when it is needed."""
        found = found_in(folder / "*.txt")
        assert words(found) == WORDS
        assert found.preview_texts == ()
        assert str(found).startswith("3 mentions of diseases found in 4 notes\n")
        assert "\n  2 notes have text but no entities.\n" in str(found)

    def test_offsets(self, folder, found_in):
        """Offsets count the characters of the file, including line endings."""
        (entity,) = found_in(folder / "note 3.txt")[0][1:]
        assert TEXTS[3][entity["start"] : entity["end"]] == "hypertension"

    def test_list_of_paths(self, folder, found_in):
        """A list of paths is read in its order."""
        paths = [folder / "note 3.txt", folder / "note 0.txt"]
        assert words(found_in(paths)) == [WORDS[3], WORDS[0]]

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
        (folder / "note 1.txt").write_bytes(b"caf\xe9")
        found = found_in(files, on_error="record")
        host = socket.gethostname()
        assert found.errors == {
            0: f"Text 0: the file cannot be read on {host}: No such file or directory. Make the file readable there.",
            1: f"Text 1: the file on {host} is not valid UTF-8 at byte 3. "
            "Save it as UTF-8, or read it in your code and pass its text.",
        }
        assert words(found) == [[], *WORDS[1:2], *WORDS[2:]]

    def test_folder(self, folder, found_in):
        """A folder is refused with a pattern for its files."""
        with pytest.raises(
            ConfigurationError,
            match=r"^'.*' is a folder on .*\. Pass paths of existing files, .*Path\('notes'\) / '\*\.txt'",
        ):
            found_in(folder)

    def test_names_of_files(self, folder, found_in):
        """Names as glob.glob gives them are texts like any other, with a warning that has no word of them."""
        with pytest.warns(OpenMedWarning, match=r"^Text 0 looks like a file name.* Pass paths") as warned:
            found = found_in([str(path) for path in sorted(folder.glob("*.txt"))])

        assert found.errors == {}
        assert "note 0" not in str(warned[0].message)

    def test_no_file(self, folder, found_in):
        """A pattern that stands for no file is refused."""
        with pytest.raises(ConfigurationError, match=r"'.*\.md' was not found on "):
            found_in(folder / "*.md")

    @pytest.mark.parametrize("name", ["[x].txt", "*.txt.txt"])
    @pytest.mark.skipif(sys.platform == "win32", reason="no name can have a star there")
    def test_name_like_a_pattern(self, folder, found_in, name):
        """A file whose name would be a pattern is that file, alone and in a list."""
        (folder / name).write_text("diabetes", "utf-8")
        assert words(found_in(folder / name)) == [["diabetes"]]
        assert words(found_in([folder / name, folder / "note 0.txt"])) == [["diabetes"], ["asthma"]]

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes in folders there")
    def test_pipes_and_dangling_links_are_recorded(self, folder, found_in):
        """Reading from a pipe must not block; a matching directory is ignored."""
        os.mkfifo(folder / "a.txt")
        (folder / "b.txt").symlink_to("nowhere")
        (folder / "c.txt").mkdir()
        found = found_in(folder / "*.txt", on_error="record")
        host = socket.gethostname()
        assert found.errors == {
            0: f"Text 0: the file cannot be read on {host}: {os.strerror(errno.ENOTSUP)}. Make the file readable there.",
            1: f"Text 1: the file cannot be read on {host}: No such file or directory. Make the file readable there.",
        }
        assert words(found) == [[], [], *WORDS]

    def test_file_reference_pickle_has_no_text(self, folder):
        (file,) = expand_globs([str(folder / "note 3.txt")])
        assert b"diabetes" not in pickle.dumps(file)
        assert effective_length(file) == len(TEXTS[3]) + 1
        assert text_fingerprint(file) == text_fingerprint(
            FileReference(file.path, file.approximate_length, file.modified_ns)
        )
        assert text_fingerprint(file) != text_fingerprint(
            FileReference(file.path, file.approximate_length, file.modified_ns + 1)
        )
        assert "note" not in repr(file)

    @pytest.mark.parametrize("texts", ["*.txt", ["*.txt"], [], [Path("a"), "b"]], ids=repr)
    def test_strings_are_not_paths(self, texts):
        assert resolve_paths(texts, pytest.fail) is texts
