"""``python -m openmed_nb``: the device, the reason, and the diseases in a note; offline, with the bundled model."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from .errors import ConfigurationError, OpenMedError
from .interface.display import Json
from .models.registry import BUNDLED_FOLDER
from .session import SESSION

NOTE = BUNDLED_FOLDER / "synthetic_note.txt"


def main(arguments: list[str] | None = None) -> int:
    """Annotate a note and print what was found; return the exit status, 2 for one of our errors."""
    asked = parser().parse_args(arguments)
    try:
        SESSION.start()
        text = read_note(asked.note)
        found = SESSION.annotate_text(text, asked.model, asked.device)
        choice = SESSION.device(asked.device)
    except OpenMedError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    report = Json.of({"choice": choice.to_dict(), **found.to_dict()}) if asked.json else f"{choice}\n\n{found}"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # A console may not know every character of a note.
    print(report)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    command = argparse.ArgumentParser("python -m openmed_nb", description="Find diseases in a note, offline.")
    command.add_argument("note", nargs="?", type=Path, default=NOTE, help="a text file; a synthetic note if left out")
    command.add_argument("--device", help="auto, cpu, cuda, cuda:N, mps or gpu")
    command.add_argument("--model", help="an alias, a hub id or a folder; the bundled disease model if left out")
    command.add_argument("--json", action="store_true", help="print JSON")
    return command


def read_note(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ConfigurationError: Where it cannot be read as UTF-8 text.
    """
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigurationError(f"The note {str(path)!r} cannot be read: {reason}.", "Name a text file.") from error


if __name__ == "__main__":
    sys.exit(main())
