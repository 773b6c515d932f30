"""Logbooks as files: written in one step, and read with an error that says what is wrong."""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError, cause, given_path
from .logbook import SCHEMA, Logbook
from .markdown import HEADING, to_markdown
from .plain_values import from_plain
from .variables import CLEANERS

FAMILY, _, NUMBER = SCHEMA.rpartition("/")

FOR_PEOPLE = re.compile(rf"{HEADING} on [^\n]+\n\nWritten [0-9TZ:-]{{20}}, schema `{FAMILY}/[0-9]+`\.\n")
"""How a logbook for people begins."""

ANOTHER = "Pass a .json file that Logbook.save() has written."


def to_json(book: Logbook) -> str:
    """Return a logbook as JSON."""
    return json.dumps(book.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


WRITERS: dict[str, Callable[[Logbook], str]] = {".json": to_json, ".md": to_markdown}
"""What writes a file, by its ending."""


def save(book: Logbook, path: str | os.PathLike[str]) -> str:
    """Write a logbook in one step; as :meth:`.Logbook.save`."""
    file = given_path(path, "the file of a logbook")
    writer = WRITERS.get(file.suffix.lower())
    if writer is None:
        raise ConfigurationError(
            f"A logbook cannot be written as {file.suffix or 'a file without an ending'!r}.", "Use .json or .md."
        )
    if file.exists() and not is_logbook(file):
        raise ConfigurationError(f"{file.name!r} is there already, and no logbook.", "Use another name.")
    try:
        write_whole(file, writer(book))
    except (OSError, UnicodeEncodeError) as error:  # The latter for half a character in a logbook made by hand.
        what = f"{file.name!r} cannot be written: {cause(error)}."
        raise ConfigurationError(what, "Use a folder that is there and can be written.") from error
    return str(file)


def write_whole(file: Path, text: str) -> None:
    """Write a file in one step, so that it is never there in part.

    Raises:
        OSError: Where it cannot be written.
    """
    real = Path(os.path.realpath(file))  # A link stays a link.
    with tempfile.TemporaryDirectory(dir=real.parent, prefix=f".{real.name[:40]}.") as aside:
        part = Path(aside) / "part"
        part.write_text(text, "utf-8")
        if real.exists():
            part.chmod(stat.S_IMODE(real.stat().st_mode))
        part.replace(real)


def is_logbook(file: Path) -> bool:
    """Tell whether a file is a logbook of any version."""
    try:
        text = file.read_text("utf-8-sig")
        return bool(FOR_PEOPLE.match(text)) or version_of(json.loads(text)) is not None
    except (OSError, ValueError, RecursionError):
        return False


def read(path: str | os.PathLike[str]) -> Logbook:
    """Return the logbook of a file; as :meth:`.Logbook.read`."""
    file = given_path(path, "the file of a logbook")
    try:
        text = file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigurationError(f"The logbook {file.name!r} cannot be read: {reason}.", ANOTHER) from error
    try:
        stored = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{file.name!r} {what_else(text)}.", ANOTHER) from error
    check_schema(stored, file.name)
    try:
        book: Logbook = from_plain(Logbook, stored)
        check_names(book)
    except ValueError as error:
        what = f"{file.name!r} is no whole logbook: {cause(error)}."
        raise ConfigurationError(what, "Take it from where it came from again.") from error
    return book


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the names and values of a JSON object.

    Raises:
        ValueError: Where a name is there twice.
    """
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def check_names(book: Logbook) -> None:
    """Check that only allowed variables are in a logbook.

    Raises:
        ValueError: For others; they are not shown.
    """
    if book.environment.keys() - CLEANERS.keys():
        raise ValueError("its environment has variables that no logbook holds")


def what_else(text: str) -> str:
    """Return what a text that is no JSON is instead.

    Example:
        >>> what_else("# Logbook on cpu"), what_else('{"schema": "openmed_nb/logbook/1", "wri')
        ('is a logbook for people, which cannot be read again', 'is cut off or damaged')
    """
    if text.startswith(HEADING):
        return "is a logbook for people, which cannot be read again"
    return "is cut off or damaged" if FAMILY in text[:200] else "is no logbook"


def version_of(stored: Any) -> str | None:
    """Return the version of a logbook that was read, ``None`` where it is none.

    Example:
        >>> version_of({"schema": "openmed_nb/logbook/1"}), version_of({"schema": "openmed_nb/logbook/0"})
        ('1', None)
    """
    said = stored.get("schema") if isinstance(stored, dict) else None
    match = re.fullmatch(f"{FAMILY}/([1-9][0-9]{{0,8}})", said) if isinstance(said, str) else None
    return match[1] if match else None


def check_schema(stored: Any, name: str) -> None:
    """Check that what was read says that it is a logbook of this version.

    Raises:
        ConfigurationError: Where it says something else.
    """
    number = version_of(stored)
    if number is None:
        raise ConfigurationError(f"{name!r} is no logbook.", ANOTHER)
    if number != NUMBER:
        what = f"{name!r} is a logbook of version {number}, and this openmed_nb reads version {NUMBER}."
        raise ConfigurationError(what, "Read it with the openmed_nb that wrote it, or with a newer one.")
