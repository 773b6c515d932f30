"""Runs in separate processes that real signals kill or interrupt, and that resume until they are complete."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.processes import run_python
from openmed_nb._utils.temporary import remove_abandoned, temporary_folder

pytestmark = [
    pytest.mark.real_computer,  # Each run is in a process of its own.
    pytest.mark.skipif(sys.platform == "win32", reason="signals and forks are those of POSIX"),
]

PROGRAM = Path(__file__).parent / "kill_runs.py"
DIGITS = ("the", "patient", "has", "and", "no", "history", "of", "a", "was", "seen")


def text(number):
    """Return a text with few unique tokens and many spaces, so that a chunk contains few texts."""
    digits = " ".join(DIGITS[int(digit)] for digit in f"{number:03}")
    return f"{digits} asthma{' ' * 2500}{'diabetes mellitus' if number % 3 else ''}"


TEXTS = [text(number) for number in range(120)]


@pytest.fixture(scope="module")
def pipe(pipe_of, keyword_model):
    """A pipeline that runs one text at a time, as the program does, so that scores are the same to the last digit."""
    return pipe_of(keyword_model, batch_size=1)


@pytest.fixture(scope="module")
def whole(annotated, pipe, tmp_path_factory):
    """The file of one uninterrupted run."""
    file = tmp_path_factory.mktemp("whole") / "run.jsonl"
    annotated(pipe, TEXTS, resume=file)
    return file.read_bytes()


@pytest.fixture(
    scope="module",
    params=[
        {0.1: "SIGKILL", 0.5: "SIGINT"},
        pytest.param(
            {0.02: "SIGKILL", 0.1: "SIGKILL", 0.2: "SIGINT", 0.35: "SIGKILL", 0.45: "SIGINT", 0.6: "SIGKILL"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["two signals", "six signals"],
)
def signals(request):
    """Signals that end a run, by the fraction of the bytes of the file at that time."""
    return request.param


@pytest.fixture(scope="module")
def runs(keyword_model, whole, signals, tmp_path_factory):
    """The folder of a file that several runs wrote one after the other, and what each run did; only the last was let."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "texts").write_text(json.dumps(TEXTS), "utf-8")
    targets = [f"{name}={int(fraction * len(whole))}" for fraction, name in signals.items()]
    command = [sys.executable, PROGRAM, keyword_model, folder / "texts", folder / "run.jsonl", *targets]
    process = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return folder, [json.loads(line) for line in process.stdout.splitlines()]


def test_file_is_that_of_one_run(runs, signals, whole):
    """After kills and interrupts the file is that of one uninterrupted run, to the byte, and no lock is left."""
    folder, children = runs
    statuses = [-signal.SIGKILL if name == "SIGKILL" else 0 for name in signals.values()]

    assert [child["status"] for child in children] == [*statuses, 0]
    assert (folder / "run.jsonl").read_bytes() == whole
    assert {path.name for path in folder.iterdir()} == {"texts", "run.jsonl"}


def test_no_text_is_done_twice_and_none_is_lost(runs, pipe):
    """A run computes no text that has its line in the file, and all texts are computed in the end."""
    _folder, children = runs
    known = {tuple(pipe.tokenizer(text)["input_ids"]): number for number, text in enumerate(TEXTS)}
    computed = [[known[tuple(ids)] for ids in child["computed"]] for child in children]

    assert len(known) == len(TEXTS)
    assert {number for indices in computed for number in indices} == set(range(len(TEXTS)))
    for child, indices in zip(children, computed, strict=True):
        assert min(indices, default=len(TEXTS)) >= child["before"] - 1
        assert len(set(indices)) == len(indices)


def test_answers_are_those_of_one_run(runs, annotated, pipe):
    """What is read from the file equals what one run finds."""
    folder, _children = runs

    assert list(annotated(pipe, TEXTS, resume=folder / "run.jsonl")) == list(annotated(pipe, TEXTS))


def test_other_batches_change_no_shown_digit(annotated, pipe_of, keyword_model, tmp_path):
    """A run that continues puts notes into other batches, whose scores may differ in the last digits."""
    pipe, file = pipe_of(keyword_model), tmp_path / "run.jsonl"
    whole = annotated(pipe, TEXTS, resume=file).to_frame()
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:38]) + lines[38][:20])
    resumed = annotated(pipe, TEXTS, resume=file).to_frame()

    assert len(resumed) > len(TEXTS)
    assert resumed.round({"score": 3}).equals(whole.round({"score": 3}))


def test_interrupt_says_how_to_go_on(runs, signals):
    """The message has one line, and ``except Exception`` does not catch the interrupt."""
    folder, children = runs
    said = [
        (*json.loads(child["said"]), then["before"] - 1)
        for child, then in itertools.pairwise(children)
        if child["said"]
    ]

    assert len(said) == list(signals.values()).count("SIGINT")
    for message, done, kept, in_the_file in said:
        assert message.startswith(f"Stopped after {done} notes. ")
        assert message.endswith(f"Repeat the call to continue from {str(folder / 'run.jsonl')!r}.")
        assert done == in_the_file >= kept > 0  # It may come between the file and what is kept in memory.


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_kills_while_notes_are_repaired(  # noqa: PLR0913, PLR0917 - fixtures
    keyword_model, annotated, pipe, helper, tmp_path, kills
):
    """Notes that come from other formats, go missing otherwise and are repaired are all read, none twice, none refused."""
    program = Path(__file__).parent / "repair_runs.py"
    command = [sys.executable, program, keyword_model, tmp_path, str(kills)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=800, check=True)
    summary = json.loads(process.stdout.splitlines()[-1])
    repairs = helper(program)
    answers, missing, errors = summary["result"]
    whole = annotated(pipe, [repairs.note(number) for number in range(repairs.NOTES)])

    assert (summary["killed"], summary["doubled"], summary["refused"]) == (kills, 0, [])
    assert (missing, errors) == ([], [])
    assert answers == [
        [[entity["word"], entity["start"], entity["score"]] for entity in entities] for entities in whole
    ]


def test_next_export_removes_files_of_killed_export(tmp_path):
    program = (
        "import os, sys; from pathlib import Path; from openmed_nb._utils.temporary import temporary_folder\n"
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
