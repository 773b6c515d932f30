"""``%openmed_log`` in a real kernel: the logbook, its file, the comparison, and the mistakes."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def loaded(kernel, tmp_path):
    """A kernel with the extension, in an empty folder."""
    kernel.run("%reset -f")
    kernel.run(f"%load_ext openmed_nb\nimport os\nhere = os.getcwd()\nos.chdir({str(tmp_path)!r})")
    yield kernel
    kernel.run("os.chdir(here)")


def test_the_logbook_is_a_value_that_shows_itself(loaded):
    """The magic returns the logbook, with a text without figures and an HTML that has them."""
    reply = loaded.run("book = %openmed_log\nbook")

    assert reply.status == "ok", reply.error
    assert reply.text.startswith("Logbook on cpu")
    assert "transformers" in reply.html
    assert "transformers" not in reply.text
    assert loaded.value("type(book).__name__") == "Logbook"


def test_a_file_is_written_and_compared(loaded, tmp_path):
    """With a file it is written; --diff says first whether it may be compared with now."""
    loaded.run("%openmed_log run.json")
    loaded.run("%openmed_log run.md")
    reply = loaded.run("diff = %openmed_log --diff run.json\ndiff")

    assert sorted(one.name for one in tmp_path.iterdir()) == ["run.json", "run.md"]
    assert reply.text.startswith("May be compared"), reply
    assert json.loads((tmp_path / "run.json").read_text("utf-8"))["schema"] == "openmed_nb/logbook/1"


def test_a_logbook_is_not_written_over(loaded, tmp_path):
    """A file that is there already is refused, and stays as it is; a new one is named."""
    told = loaded.run("%openmed_log run.json").streams["stdout"]
    before = (tmp_path / "run.json").read_bytes()
    reply = loaded.run("%openmed_log run.json")

    assert told.startswith("Written to ")
    assert reply.error[0] == "MagicError"
    assert (tmp_path / "run.json").read_bytes() == before


def test_json(loaded):
    """With --json the answer is one JSON object, of the logbook and of the comparison."""
    loaded.run("%openmed_log run.json")

    assert json.loads(loaded.run("%openmed_log --json").text)["hardware"]["device"] == "cpu"
    assert json.loads(loaded.run("%openmed_log --diff run.json --json").text)["comparable"] is True


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("%openmed_log --nonsense", "MagicError"),
        ("%openmed_log one two", "MagicError"),
        ("%openmed_log run.txt", "ConfigurationError"),
        ("%openmed_log --diff missing.json", "ConfigurationError"),
    ],
)
def test_mistakes_are_one_clean_error(loaded, tmp_path, line, error):
    """A mistake is one of our errors, and nothing is written."""
    reply = loaded.run(line)

    assert (reply.status, reply.error[0], len(reply.error[2])) == ("error", error, 1)
    assert list(tmp_path.iterdir()) == []


def test_help_and_completion(loaded):
    """--help prints what the magic takes, and Tab offers its flags and the JSON files of the folder."""
    loaded.run("%openmed_log run.json")

    assert "--diff FILE" in loaded.run("%openmed_log --help").streams["stdout"]
    assert loaded.complete("%openmed_log --d") == ["--diff"]
    assert loaded.complete("%openmed_log --diff r") == ["run.json"]
