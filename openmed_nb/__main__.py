"""``openmed-nb`` or ``python -m openmed_nb``: annotate diseases in a note, offline, with the bundled model.

``openmed-nb doctor`` diagnoses the machine; its exit status is 1 if a check failed.
``openmed-nb report`` benchmarks the machine and writes a report to a folder.
``openmed-nb bring-up`` brings up a model in five stages and stops at the first stage that does not pass.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from pathlib import Path
from typing import NoReturn

from . import __version__
from ._annotate import annotate_in_session
from ._events.activity import ProgressEvent
from ._render.values import Json
from ._utils.text import describe_error, describe_file, parser_problem, short_type_name
from ._utils.validation import suggest, suggest_one
from .annotation.references import expand_globs, raise_if_error, read_text
from .errors import ConfigurationError, OpenMedError
from .models.registry import BUNDLED_FOLDER
from .session import SESSION

FUNCTIONS = ("nb.sweep()", "nb.compare()", "nb.verdict()", "nb.runbook.profile()")

EXAMPLE_NOTE = BUNDLED_FOLDER / "synthetic_note.txt"


class _Parser(argparse.ArgumentParser):
    """Argument parser whose errors do not quote the command line, which may contain a note."""

    def error(self, message: str) -> NoReturn:
        """Exit with an error message without the values of the arguments."""
        words = message.partition("unrecognized arguments: ")[2].split()
        options = (word for word in words if word.startswith("-"))
        suggestions = filter(None, (suggest_one(option, self._option_string_actions) for option in options))
        super().error(f"{parser_problem(message)}. {' '.join(suggestions) or f'See {self.prog} --help.'}")


def main(arguments: list[str] | None = None) -> int:
    """Run a command, print its result, and return the exit status, which is 2 for an ``OpenMedError``."""
    words = sys.argv[1:] if arguments is None else arguments
    # A note in a file with the name of a command is passed as ``./doctor``.
    commands = {
        "annotate": annotate,
        "doctor": run_doctor,
        "report": run_report,
        "bring-up": run_bring_up,
    }
    first_word, *rest = words or ["annotate"]
    run = commands.get(first_word)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # The encoding of a console may lack a character of the note.
    SESSION.start()
    with contextlib.ExitStack() as stack:
        if run in {run_report, run_bring_up}:  # These commands take minutes.
            stack.callback(SESSION.subscribe(print_progress))
        try:
            # Path.exists raises an error for a long name, which may be a note.
            if not (run or first_word.startswith("-") or os.path.exists(first_word)):  # noqa: PTH110
                raise ConfigurationError(
                    f"{describe_file(Path(first_word))} is neither a file nor a command.",
                    suggest(first_word, [*commands, *FUNCTIONS], "Commands, and calls in Python"),
                )
            output, status = run(rest) if run else annotate(words)
            write_output(output)
        except OpenMedError as error:
            print(f"{short_type_name(error)}: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt as interrupt:
            print(f"\n{str(interrupt) or 'Stopped.'}", file=sys.stderr)
            return 130  # As in a shell for a program that SIGINT terminated.
    return status


def print_progress(event: ProgressEvent | None) -> None:
    """Print an event to standard error, unless it is a terminal, which has a progress line."""
    if event is not None and not sys.stderr.isatty():
        print(event, file=sys.stderr, flush=True)


def write_output(output: str) -> None:
    """Print a result, or exit with status 1 if the reader, such as ``head``, has closed the pipe.

    Raises:
        ConfigurationError: If the result cannot be written.
    """
    try:
        print(output, flush=True)
    except OSError as error:
        # Python's ``signal``, "Note on SIGPIPE": otherwise Python reports a second error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        raise ConfigurationError(
            f"The result cannot be written: {describe_error(error)}.", "Free disk space or use another output."
        ) from error


def annotate(arguments: list[str]) -> tuple[str, int]:
    """Annotate a note, and return the device and the entities as text, and the exit status."""
    command = _Parser(
        "openmed-nb",
        usage="%(prog)s [annotate] [note] [options], or %(prog)s COMMAND [options]",
        description="Annotate diseases in a note, offline.",
        epilog="Other commands: 'doctor' diagnoses this computer, 'report' benchmarks it, 'bring-up' brings up a model. "
        f"See 'openmed-nb report --help'. Only in Python: many notes with nb.annotate(), {', '.join(FUNCTIONS)}.",
    )
    command.add_argument("--version", action="version", version=f"openmed_nb {__version__}")
    command.add_argument("note", nargs="?", default=EXAMPLE_NOTE, help="one text file (default: a synthetic note)")
    command.add_argument("--device", help="auto, cpu, cuda, cuda:N, mps or gpu")
    command.add_argument("--model", help="alias, Hub id or folder (default: the bundled disease model)")
    command.add_argument("--json", action="store_true", help="print JSON")
    options = command.parse_args(arguments)
    # The text is read as nb.annotate() reads it, with its line ends and byte order mark.
    note, *others = raise_if_error(expand_globs([options.note]))
    if others:
        raise ConfigurationError("The command annotates one note.", "For many, use nb.annotate() in Python.")
    text = raise_if_error(read_text(note, 0))
    annotation = annotate_in_session(SESSION, text, {"model": options.model}, {"device": options.device})
    choice = SESSION.device(options.device)
    if options.json:
        return str(Json.of({"choice": choice.to_dict(), **annotation.to_dict()})), 0
    # A byte order mark is a character of the file, but a terminal must not print it.
    return f"{choice}\n\n{annotation}".replace("\ufeff", ""), 0


def run_doctor(arguments: list[str]) -> tuple[str, int]:
    """Return the findings of the doctor, and the exit status, 1 for a failed check."""
    command = _Parser("openmed-nb doctor", description="Diagnose problems and suggest fixes.")
    command.add_argument("model", nargs="?", help="alias, Hub id or folder of a model to check")
    command.add_argument("--json", action="store_true", help="print JSON")
    options = command.parse_args(arguments)
    from .runbook.checks.doctor import doctor

    result = doctor(options.model)
    return str(Json.of(result.to_dict()) if options.json else result), result.exit_code


def run_report(arguments: list[str]) -> tuple[str, int]:
    """Benchmark this machine, and return the report, and the exit status, 1 if a step has no result."""
    from .runbook.records.report import DEFAULT_FOLDER, REVIEW_NOTICE, report

    command = _Parser(
        "openmed-nb report",
        description="Benchmark this computer; each step runs in a separate process.",
        epilog="Writes to FOLDER, stores the best batch size for annotate, and sends nothing. Exits with status 1 if a step produces no result.",
    )
    command.add_argument("--model", help="alias, Hub id or folder (default: the bundled model)")
    command.add_argument("folder", nargs="?", default=DEFAULT_FOLDER, help=f"output folder (default: {DEFAULT_FOLDER})")
    command.add_argument(
        "--quick", action="store_true", help="fewer and shorter measurements: one to two minutes instead of five"
    )
    command.add_argument("--training", action="store_true", help="measure training steps instead of annotation")
    options = command.parse_args(arguments)
    device_report = report(**vars(options))
    return f"{device_report}\n\n{REVIEW_NOTICE.format(folder=options.folder)}", device_report.exit_code


def run_bring_up(arguments: list[str]) -> tuple[str, int]:
    """Bring up a model, and return the stage results, and the exit status, 1 until all stages pass."""
    from .runbook.records.report import BRING_UP_FOLDER, bring_up

    command = _Parser(
        "openmed-nb bring-up",
        description=f"Bring up a model in five stages, each with an exit criterion. Writes to {BRING_UP_FOLDER}.",
        epilog="Rerun the command to continue at the first stage that has not passed. Exits with status 1 until all pass.",
    )
    command.add_argument("model", nargs="?", help="alias, Hub id or folder (default: the bundled model)")
    command.add_argument("--training", action="store_true", help="bring up training instead of annotation")
    result = bring_up(**vars(command.parse_args(arguments)))
    return str(result), result.exit_code


if __name__ == "__main__":
    sys.exit(main())
