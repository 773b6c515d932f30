"""``python -m openmed_nb``: the device, the reason, and the diseases in a note; offline, with the bundled model.

``python -m openmed_nb doctor`` looks at the computer instead, and its exit status says whether something failed.
``python -m openmed_nb report`` measures it from end to end, and writes what it found into a folder.
``python -m openmed_nb ladder`` brings a model up on it in five stages, and stops at the first that is not passed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from pathlib import Path
from typing import NoReturn

from ._annotate import annotate_text
from ._events.activity import ProgressEvent
from ._render.display import Json
from ._utils.text import describe_error, parser_problem, short_type_name
from .annotation.references import FileReference, raise_if_error, read_text
from .annotation.tables import reader_by_name
from .errors import ConfigurationError, OpenMedError, RunInterrupted
from .models.registry import BUNDLED_FOLDER
from .session import SESSION

# The first words of the commands that look at the computer; a note in a file of that name is called ``./doctor``.
DOCTOR, REPORT, LADDER = "doctor", "report", "ladder"

# The exit status after Ctrl-C, as a shell gives it for a program that SIGINT ended.
EXIT_SIGINT = 130

# The exit status if the reader of the answer is gone, as a shell gives it for a program that SIGPIPE ended.
EXIT_SIGPIPE = 141

EXAMPLE_NOTE = BUNDLED_FOLDER / "synthetic_note.txt"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors do not quote the line."""

    def error(self, message: str) -> NoReturn:
        super().error(parser_problem(message))


def main(arguments: list[str] | None = None) -> int:
    """Run a command and print its answer; return the exit status, 2 for one of our errors."""
    words = sys.argv[1:] if arguments is None else arguments
    commands = {DOCTOR: run_doctor, REPORT: run_report, LADDER: run_bring_up}
    run, rest = (commands[words[0]], words[1:]) if words and words[0] in commands else (annotate, words)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # A console may not know every character of a note.
    SESSION.start()
    with contextlib.ExitStack() as stack:
        if run in {run_report, run_bring_up}:  # They take minutes.
            stack.callback(SESSION.subscribe(print_progress))
        try:
            answer, status = run(rest)
            return status if print_text(answer) else EXIT_SIGPIPE
        except OpenMedError as error:
            print(f"{short_type_name(error)}: {error}", file=sys.stderr)
            return 2
        except RunInterrupted as stopped:
            print(f"\n{stopped}", file=sys.stderr)
            return EXIT_SIGINT


def print_text(text: str) -> bool:
    """Print a text, and tell whether it could be: a reader such as ``head`` may have closed the pipe.

    Python would then complain again when it ends, so its output goes nowhere (Python's ``signal``, "Note on SIGPIPE").

    Raises:
        ConfigurationError: Where it cannot be written, as on a full disk.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return False
        raise ConfigurationError(
            f"The answer cannot be written: {describe_error(error)}.", "Make room for it."
        ) from error
    return True


def annotate(arguments: list[str]) -> tuple[str, int]:
    """Annotate a note; return the device, the reason and what was found, and the exit status."""
    command = _Parser(
        "python -m openmed_nb",
        description="Find diseases in a note, offline.",
        epilog="'python -m openmed_nb doctor' looks at the computer instead, 'report' measures it, 'ladder' brings a model up; see 'report --help'.",
    )
    command.add_argument(
        "note", nargs="?", type=Path, default=EXAMPLE_NOTE, help="a text file; a synthetic note if left out"
    )
    command.add_argument("--device", help="auto, cpu, cuda, cuda:N, mps or gpu")
    command.add_argument("--model", help="an alias, a hub id or a folder; the bundled disease model if left out")
    command.add_argument("--json", action="store_true", help="print JSON")
    asked = command.parse_args(arguments)
    text = read_note(asked.note)
    found = annotate_text(SESSION, text, asked.model, asked.device)
    choice = SESSION.device(asked.device)
    if asked.json:
        return str(Json.of({"choice": choice.to_dict(), **found.to_dict()})), 0
    # A byte order mark counts as a character of the file, and means nothing on a terminal.
    return f"{choice}\n\n{found}".replace("\ufeff", ""), 0


def run_doctor(arguments: list[str]) -> tuple[str, int]:
    """Return what the doctor found, or the forecast for a model, and the exit status: 1 where something failed."""
    command = _Parser("python -m openmed_nb doctor", description="Say what is wrong, and what to do.")
    models = command.add_mutually_exclusive_group()
    models.add_argument("model", nargs="?", help="an alias, a hub id or a folder of a model to look at too")
    models.add_argument(
        "--ops", metavar="MODEL", help="forecast which operators of a model would leave MPS; status 1 where one does"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    asked = command.parse_args(arguments)
    from .runbook.checks.doctor.report import doctor
    from .runbook.checks.operators.forecast import forecast

    answer = doctor(asked.model) if asked.ops is None else forecast(asked.ops, training=True)
    return str(Json.of(answer.to_dict()) if asked.json else answer), answer.exit_code


def run_report(arguments: list[str]) -> tuple[str, int]:
    """Measure this computer; return what the report says, and the exit status: 1 where a step has no answer."""
    from .runbook.records.report.report import FOLDER, REVIEW_NOTICE, report

    command = _Parser(
        "python -m openmed_nb report",
        description="Measure this computer from end to end, each step in a process of its own.",
        epilog="Nothing is sent or written anywhere but to FOLDER. Status 1 where a step has no answer.",
    )
    command.add_argument("folder", nargs="?", type=Path, default=Path(FOLDER), help=f"{FOLDER} if left out")
    command.add_argument(
        "--quick", action="store_true", help="fewer and shorter measurements: about one minute of five"
    )
    command.add_argument("--training", action="store_true", help="measure training steps instead of annotation")
    asked = command.parse_args(arguments)
    found = report(asked.folder, quick=asked.quick, training=asked.training)
    return f"{found}\n\n{REVIEW_NOTICE.format(folder=asked.folder)}", found.exit_code


def run_bring_up(arguments: list[str]) -> tuple[str, int]:
    """Bring a model up; return how far it came, and the exit status: 1 where a stage is not passed."""
    from .runbook.records.bring_up import FOLDER, SECONDS, bring_up

    command = _Parser(
        "python -m openmed_nb ladder",
        description="Bring a model up on the device in five stages, each with an exit criterion.",
        epilog="The same command goes on at the first stage that is not passed. Status 1 until all are.",
    )
    command.add_argument("model", nargs="?", help="an alias, a hub id or a folder; the bundled model if left out")
    command.add_argument("--folder", type=Path, default=Path(FOLDER), help=f"{FOLDER} if left out")
    command.add_argument("--device", help="auto, cpu, cuda, cuda:N, mps or gpu")
    command.add_argument("--training", action="store_true", help="bring up training instead of annotation")
    about = f"about how long the sweep, and the comparison, may each take; {SECONDS:g} if left out"
    command.add_argument("--seconds", type=float, default=SECONDS, help=about)
    found = bring_up(**vars(command.parse_args(arguments)))
    return str(found), found.exit_code


def print_progress(activity: ProgressEvent | None) -> None:
    if activity is not None and not sys.stderr.isatty():  # A terminal has the line of ``progress``.
        print(activity, file=sys.stderr, flush=True)


def read_note(path: Path) -> str:
    """Return the text of a file, as ``annotate`` reads one: offsets count its characters, line ends and marks included.

    Raises:
        ConfigurationError: If it is a table.
        InvalidTextError: If it cannot be read as UTF-8 text.
    """
    if reader := reader_by_name(str(path)):
        raise ConfigurationError("The note is a table.", f"Pass its column of texts to annotate(): {reader}.")
    text: str = raise_if_error(read_text(FileReference.from_path(str(path)), 0))
    return text


if __name__ == "__main__":
    sys.exit(main())
