"""Runs in separate processes that real signals kill or interrupt, and that resume until they are complete."""

import json
import os
import sys
from pathlib import Path

import pytest

from helpers.annotations import annotated
from helpers.processes import run_python
from openmed_nb._utils.plain import remove_abandoned, temporary_folder

pytestmark = [
    pytest.mark.real_computer,  # Each run is in a process of its own.
    pytest.mark.skipif(sys.platform == "win32", reason="signals and forks are those of POSIX"),
]

PROGRAM = Path(__file__).parent / "kill_runs.py"


@pytest.mark.parametrize("signals", [10, pytest.param(150, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_signals_at_any_moment_lose_no_result(keyword_model, keyword_pipe, helper, tmp_path, signals):
    """Notes in any order, some of them missing or unreadable until they are repaired, are all read, none twice, none refused."""
    process = run_python(PROGRAM, keyword_model, tmp_path, signals, timeout=800)
    summary = json.loads(process.stdout.splitlines()[-1])
    runs = helper(PROGRAM)
    answers, missing, errors = summary["result"]
    whole = annotated(keyword_pipe, [runs.note(number) for number in range(runs.NUM_NOTES)])

    assert (summary["doubled"], summary["refused"]) == (0, [])
    assert (missing, errors) == ([], [])
    assert answers == [
        [[entity["word"], entity["start"], entity["score"]] for entity in entities] for entities in whole
    ]
    assert summary["killed"] > signals / 4
    assert summary["interrupted"]
    for message, done, num_results in summary["interrupted"]:
        assert message.startswith(f"Stopped after {done} note")
        assert done == num_results
    assert {path.name for path in tmp_path.iterdir()} == {"run.jsonl"}


def test_other_batches_change_no_shown_digit(pipe_of, keyword_model, helper, tmp_path):
    """A run that continues puts notes into other batches, whose scores may differ in the last digits."""
    runs = helper(PROGRAM)
    texts = [runs.note(number) for number in range(60)]
    pipe, file = pipe_of(keyword_model), tmp_path / "run.jsonl"
    whole = annotated(pipe, texts, resume=file).to_frame()
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:38]) + lines[38][:20])
    resumed = annotated(pipe, texts, resume=file).to_frame()

    assert len(resumed) > len(texts)
    assert resumed.round({"score": 3}).equals(whole.round({"score": 3}))


def test_next_export_removes_files_of_killed_export(tmp_path):
    program = (
        "import os, sys; from pathlib import Path; from openmed_nb._utils.plain import temporary_folder\n"
        "with temporary_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'export').write_text('a note')\n"
        "    os.kill(os.getpid(), 9)"
    )
    run_python("-c", program, tmp_path)

    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert remove_abandoned(tmp_path) == [folder]
    assert not any(tmp_path.iterdir())


def test_export_keeps_files_of_living_exports(tmp_path):
    """The folder of another computer is removed when nothing was written to it for a day."""
    with temporary_folder(tmp_path) as living:
        (living / "export").write_text("a note", "utf-8")
        foreign = tmp_path / f".openmed-{0:08x}-{0:032x}"
        foreign.mkdir()
        Path(f"{foreign}.lock").touch()
        (tmp_path / ".openmed-of-the-user").mkdir()

        assert remove_abandoned(tmp_path) == []
        assert (living / "export").exists()
        os.utime(foreign, (0, 0))
        assert remove_abandoned(tmp_path) == [foreign]
    assert [path.name for path in tmp_path.iterdir()] == [".openmed-of-the-user"]
