"""``python -m openmed_nb``: what it prints, its exit status, and that a mistake is one line."""

import contextlib
import io
import json
import os
import sys

import pytest

import openmed_nb as nb
from openmed_nb.__main__ import EXAMPLE_NOTE, main, print_progress
from openmed_nb._events.activity import ProgressEvent


def test_main_job_prints_device_reason_and_entities(capsys):
    """Without arguments, the device, the reason and the diseases of the synthetic note are printed."""
    status = main([])

    printed = capsys.readouterr()
    assert status == 0
    assert printed.out.startswith("Device: cpu")
    assert "OPENMED_TORCH_DEVICE" in printed.out
    assert "[type 2 diabetes mellitus](DISEASE, historical)" in printed.out
    assert printed.err == ""


def test_synthetic_note_says_that_it_is_synthetic():
    """The note that is shipped names itself synthetic."""
    assert "synthetic" in EXAMPLE_NOTE.read_text("utf-8").splitlines()[0]


def test_answer_as_json(capsys):
    """With --json, the choice and the entities are one JSON object."""
    main(["--json", "--device", "cpu", "--model", "bundled_small"])

    answer = json.loads(capsys.readouterr().out)
    assert answer["choice"]["requested_by"] == "argument"
    assert answer["model"] == "bundled_small"


def test_mistakes_are_one_line(capsys):
    """A mistake on the command line prints one line to the error stream and ends with status 2."""
    mistakes = {
        ("--device", "banana"): "UnknownDeviceError: 'banana'",
        ("--model", "disease_detection_tinny"): "UnknownModelError: Model 'disease_detection_tinny' not found",
        ("no such note.txt",): "No such file or directory",
        (str(EXAMPLE_NOTE.parent),): "Is a directory",
        (str(EXAMPLE_NOTE.parent / "disease" / "model.safetensors"),): "InvalidTextError: ",
        ("doctor", "disease_detection_tinny"): "UnknownModelError: ",
    }
    for arguments, said in mistakes.items():
        assert main([*arguments]) == 2
        printed = capsys.readouterr()
        assert said in printed.err
        assert len(printed.err.splitlines()) == 1
        assert printed.out == ""


def test_control_characters_of_a_note_do_not_reach_the_terminal(tmp_path, capsys):
    """Escape codes in a note are shown as pictures, and a byte order mark is not shown."""
    note = tmp_path / "note.txt"
    note.write_bytes(b"\xef\xbb\xbfPatient \x1b[2Jwith asthma\r\n")
    main([str(note), "--model", "bundled_small"])

    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "␛[2J" in printed
    assert "\ufeff" not in printed


@pytest.mark.parametrize(
    ("content", "text"),
    [
        pytest.param(b"\xef\xbb\xbfPatient\r\nwith asthma\r\n", "\ufeffPatient\r\nwith asthma\r\n", id="mark and crlf"),
        pytest.param(b"Pat\xc3\xa9\rwith asthma", "Pat\u00e9\rwith asthma", id="cr"),
        pytest.param(b"", "", id="empty"),
    ],
)
def test_note_is_read_as_annotate_reads_it(content, text, tmp_path, capsys):
    """Regression: line ends and a byte order mark were dropped, and offsets were not those of the file."""
    note = tmp_path / "note [1].txt"
    note.write_bytes(content)

    assert main([str(note), "--model", "bundled_small", "--json"]) == 0

    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] == text
    assert all(text[entity["start"] : entity["end"]] == entity["word"] for entity in answer["entities"])
    found = nb.annotate(note, "bundled_small", progress=False)
    assert answer["entities"] == found[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param("asthma".encode("utf-16-le"), "zero", id="utf-16 without a mark"),
        pytest.param(b"Anna\0", "zero", id="nul"),
        pytest.param(b"Anna \xe9", "UTF-8", id="latin-1"),
    ],
)
def test_bytes_that_are_no_note_are_one_line(content, said, tmp_path, capsys):
    """The command and ``annotate`` raise the same error, which quotes nothing."""
    note = tmp_path / "anna.txt"
    note.write_bytes(content)

    assert main([str(note)]) == 2

    printed = capsys.readouterr().err
    with pytest.raises(nb.errors.InvalidTextError) as caught:
        nb.annotate(note, "bundled_small", progress=False)
    assert printed == f"InvalidTextError: {caught.value}\n"
    assert said in printed
    assert "anna" not in printed.casefold()


def test_main_refuses_table_with_the_line_that_reads_it(tmp_path, capsys):
    """Regression: a table was one note."""
    table = tmp_path / "notes.csv"
    table.write_text("patient,report\n1,asthma\n", "utf-8")

    assert main([str(table)]) == 2

    assert "text_column='text'" in capsys.readouterr().err


def test_doctor_prints_its_report_and_how_it_is(capsys):
    """``doctor`` prints the report, and its status says whether something failed."""
    status = main(["doctor"])

    printed = capsys.readouterr()
    assert "torch" in printed.out
    assert status == (0 if " 0 failed" in printed.out else 1)
    assert printed.err == ""


def test_pipe_that_is_closed_ends_the_command_quietly():
    """Where nobody reads the answer, as after ``| head -1``, the command ends as other tools do, and so does its output."""
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w", encoding="utf-8") as nobody, contextlib.redirect_stdout(nobody):  # noqa: PTH123 - a descriptor
        assert main(["doctor"]) == 1
        nobody.write("what Python still has to say at its end")


@pytest.mark.parametrize("terminal", [True, False])
def test_terminal_shows_progress_of_report_once(terminal, monkeypatch):
    """A file gets a line for each step of a report; a terminal, in which a line with a bar is drawn, does not get both."""
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    print_progress(ProgressEvent("Reporting", "doctor", 1, 13))
    print_progress(None)

    assert stream.getvalue() == ("" if terminal else "Reporting: doctor (2 of 13)\n")


@pytest.mark.parametrize("arguments", [[], ["annotate"]])
def test_annotate_is_the_default_command(arguments, capsys):
    assert main([*arguments, "--model", "bundled_small", "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["model"] == "bundled_small"


def test_file_named_like_a_command_is_passed_with_its_folder(tmp_path, monkeypatch, capsys):
    """The word alone is the command."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "doctor").write_text("She has asthma.", "utf-8")

    assert main(["./doctor", "--model", "bundled_small"]) == 0
    assert "[asthma](DISEASE)" in capsys.readouterr().out
    main(["doctor"])
    assert "asthma" not in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])

    assert capsys.readouterr().out == f"openmed_nb {nb.__version__}\n"


def test_doctor_as_json(capsys):
    """``doctor --json`` prints one JSON object."""
    main(["doctor", "--json"])

    assert json.loads(capsys.readouterr().out)["findings"]
