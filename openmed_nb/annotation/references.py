"""Texts that are elsewhere: they are read where they are annotated, on this computer or on a worker of a cluster."""

from __future__ import annotations

import abc
import glob
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ..errors import ConfigurationError, UnreadableText

ENCODING_REMEDY = "Save it as UTF-8, or read it yourself and pass its text."


class Reference(abc.ABC):
    """A text that is read when it is needed.

    Attributes:
        identity: What tells it from other texts.
        characters: About how many characters it has.
    """

    identity: str
    characters: int

    @abc.abstractmethod
    def text(self) -> str:
        """Read the text.

        Raises:
            OSError, UnicodeDecodeError: Where it cannot be read.
        """


@dataclass(frozen=True, repr=False)
class FileText(Reference):
    """A file that is one text, in UTF-8; it is not shown, because names of files can be names of people.

    Attributes:
        path: Where it is.
        characters: Its size in bytes.
        changed: When it was changed, in nanoseconds.
    """

    path: str
    characters: int
    changed: int

    @property
    def identity(self) -> str:  # type: ignore[override]
        """Its path, size and time of change."""
        return f"{self.path}\0{self.characters}\0{self.changed}"

    def text(self) -> str:
        """Return what is in the file; ends of lines stay as they are, so that characters are counted as they stand."""
        with open(self.path, "rb") as file:
            return file.read().decode()


def read(text: Any, number: int) -> Any:
    """Return the text of a reference, or why it cannot be read; anything else as it is.

    Example:
        >>> read("asthma", 0)
        'asthma'
        >>> print(read(FileText("nowhere.txt", 0, 0), 3).what.replace(socket.gethostname(), "mac1"))
        Text 3: its file cannot be read on mac1: No such file or directory.
    """
    if not isinstance(text, Reference):
        return text
    try:
        return text.text()
    except OSError as error:
        what = f"Text {number}: its file cannot be read on {socket.gethostname()}: {error.strerror}."
        return UnreadableText(what, "Make the file readable there.")
    except UnicodeDecodeError as error:
        what = f"Text {number}: its file on {socket.gethostname()} is not UTF-8 at byte {error.start}."
        return UnreadableText(what, ENCODING_REMEDY)


def located(texts: Any, ask: Callable[..., Any]) -> Any:
    """Return the files that a path, or a list of them, stands for; anything else as it is.

    Args:
        texts: What was passed as texts.
        ask: Calls a function where the files are.
    """
    paths = [texts] if isinstance(texts, PurePath) else texts
    if not (isinstance(paths, (list, tuple)) and paths and all(isinstance(path, PurePath) for path in paths)):
        return texts
    return ask(files_matching, tuple(absolute(str(path)) for path in paths))


def absolute(path: str) -> str:
    """Return a path from the root; one of somebody's home stays, because every computer has another."""
    return path if path.startswith("~") else os.path.abspath(path)


def files_matching(patterns: Sequence[str]) -> tuple[FileText, ...]:
    """Return the files of this computer that match patterns, those of each in the order of their names.

    Args:
        patterns: Paths, in which ``*``, ``?``, ``[...]`` and ``**`` stand for more than one.

    Raises:
        ConfigurationError: Where a pattern stands for no file.
    """
    found = [path for pattern in patterns for path in matching(pattern)]
    stats = ((path, os.stat(path)) for path in found)
    return tuple(FileText(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats)


def matching(pattern: str) -> list[str]:
    """Return the files that one pattern stands for."""
    files = sorted(path for path in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(path))
    if not files:
        what = f"There is no file {pattern!r} on {socket.gethostname()}."
        raise ConfigurationError(what, "Name files that are there, such as Path('notes') / '*.txt'.")
    return files
