"""The command line: results, exit statuses, and errors of one line."""

import contextlib
import json
import os
from unittest import mock

import pytest

import openmed_nb as nb
from helpers import ROOT
from openmed_nb.__main__ import EXAMPLE_NOTE, main


def test_main_job_prints_device_reason_and_entities(capsys):
    status = main([])

    printed = capsys.readouterr()
    assert status == 0
    assert printed.out.startswith("Device: cpu")
    assert "OPENMED_TORCH_DEVICE" in printed.out
    assert "[type 2 diabetes mellitus](DISEASE, historical)" in printed.out
    assert printed.err == ""
    assert "synthetic" in EXAMPLE_NOTE.read_text("utf-8").splitlines()[0]


@pytest.mark.parametrize("command", [[], ["annotate"]])
def test_annotate_prints_json(command, capsys):
    main([*command, "--json", "--device", "cpu", "--model", "bundled_small"])

    result = json.loads(capsys.readouterr().out)
    assert (result["choice"]["requested_by"], result["model"]) == ("argument", "bundled_small")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "banana"], "UnknownDeviceError: 'banana'"),
        (["--model", "disease_detection_tinny"], "UnknownModelError: Model 'disease_detection_tinny' not found"),
        (["no such note.txt"], "'…' is neither a file nor a command"),
        (["repot", "x"], "'repot' is neither a file nor a command. Did you mean 'report'?"),
        (["swep"], "Did you mean 'nb.sweep()'?"),
        (["report", "bundled"], "(in a shell, as --model)"),
        (["report", str(EXAMPLE_NOTE)], "'synthetic_note.txt' is a file. Pass a folder."),
        ([str(EXAMPLE_NOTE.parent)], "'bundled' is a folder"),
        ([str(ROOT / "notebooks/data/notes.csv")], "text_column='text'"),
        (["annotate", f"{EXAMPLE_NOTE.parent}/*/*.json"], "annotates one note"),
        ([str(EXAMPLE_NOTE.parent / "disease" / "model.safetensors")], "InvalidTextError: "),
        (["report", "--model", "disease_detection_tinny"], "UnknownModelError: "),
    ],
)
def test_error_is_one_line(arguments, message, capsys):
    assert main(arguments) == 2

    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""


@pytest.mark.parametrize(
    ("option", "message"),
    [("--modul", "--modul …. Did you mean '--model'?"), ("-o", "… …. See openmed-nb report --help.")],
)
def test_invalid_option_has_a_remedy(option, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["report", "folder", option, "out.json"])

    assert capsys.readouterr().err.endswith(f"unexpected arguments: {message}\n")


def test_interrupted_command_prints_no_traceback(monkeypatch, capsys):
    monkeypatch.setattr("openmed_nb.runbook.checks.doctor.doctor", mock.Mock(side_effect=KeyboardInterrupt))

    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "\nStopped.\n"


def test_control_characters_of_a_note_do_not_reach_the_terminal(tmp_path, capsys):
    """A byte order mark is not printed."""
    note = tmp_path / "note.txt"
    note.write_bytes(b"\xef\xbb\xbfPatient \x1b[2Jwith asthma\r\n")
    main([str(note), "--model", "bundled_small"])

    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "␛[2J" in printed
    assert "\ufeff" not in printed


@pytest.mark.parametrize(
    "content", [b"\xef\xbb\xbfPatient\r\nwith asthma\r\n", b"Pat\xc3\xa9\rwith asthma", b""], ids=repr
)
def test_note_is_read_as_annotate_reads_it(content, tmp_path, capsys):
    """Regression: line ends and a byte order mark were dropped, and offsets were not those of the file."""
    note = tmp_path / "note [1].txt"
    note.write_bytes(content)

    assert main([str(note), "--model", "bundled_small", "--json"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert result["text"] == content.decode()
    # An empty note is missing.
    assert result.get("entities", []) == nb.annotate(note, "bundled_small", progress=False)[0]


@pytest.mark.parametrize("content", [b"Anna\0", b"Anna \xe9"], ids=repr)
def test_error_of_undecodable_note_equals_that_of_annotate(content, tmp_path, capsys):
    note = tmp_path / "anna.txt"
    note.write_bytes(content)

    assert main([str(note)]) == 2

    printed = capsys.readouterr().err
    with pytest.raises(nb.errors.InvalidTextError) as caught:
        nb.annotate(note, "bundled_small", progress=False)
    assert printed == f"InvalidTextError: {caught.value}\n"
    assert "anna" not in printed.casefold()


def test_doctor_prints_findings_and_status(capsys):
    status = main(["doctor"])

    printed = capsys.readouterr()
    assert "torch" in printed.out
    assert status == (0 if " 0 failed" in printed.out else 1)
    assert printed.err == ""
    main(["doctor", "--json"])
    assert json.loads(capsys.readouterr().out)["findings"]


def test_closed_pipe_ends_the_command_silently(capsys):
    """As after ``| head -1``. What Python writes at its exit is no error either."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as closed, contextlib.redirect_stdout(closed):  # noqa: PTH123 - a descriptor
        with pytest.raises(SystemExit, match="1"):
            main(["doctor"])
        closed.write("the end")

    assert capsys.readouterr().err == ""


def test_file_named_like_a_command_is_passed_with_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "doctor").write_text("She has asthma.", "utf-8")

    assert main(["./doctor", "--model", "bundled_small"]) == 0
    assert "[asthma](DISEASE)" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])

    assert capsys.readouterr().out == f"openmed_nb {nb.__version__}\n"
