"""Texts that are elsewhere: they are read where they are annotated, on this computer or on a worker of a cluster."""

from __future__ import annotations

import abc
import errno
import glob
import os
import socket
import stat
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, ClassVar, TypeVar

from ..errors import ConfigurationError, OpenMedError, OpenMedWarning, UnreadableText

ENCODING_REMEDY = "Save it as UTF-8, or read it yourself and pass its text."

Found = TypeVar("Found")


class Reference(abc.ABC):
    """A text that is read when it is needed.

    Attributes:
        kind: What it is where it is.
        characters: About how many characters it has.
    """

    kind: ClassVar[str]
    characters: int

    @property
    @abc.abstractmethod
    def identity(self) -> str:
        """What tells it from other texts."""

    @abc.abstractmethod
    def text(self) -> str:
        """Read the text.

        Raises:
            Exception: Whatever its reader fails with.
        """


@dataclass(frozen=True, repr=False)
class FileText(Reference):
    """A file that is one text, in UTF-8; it is not shown, because names of files can be names of people.

    Attributes:
        path: Where it is.
        characters: Its size in bytes.
        changed: When it was changed, in nanoseconds.
    """

    kind = "file"
    path: str
    characters: int
    changed: int

    @classmethod
    def at(cls, path: str) -> FileText:
        """Return the file of a path, also where there is none that can be read: that is told when it is read."""
        try:
            status = os.stat(path)
        except OSError:
            return cls(path, 0, 0)
        return cls(path, status.st_size, status.st_mtime_ns)

    @property
    def identity(self) -> str:
        """Its path, size and time of change."""
        return f"{self.path}\0{self.characters}\0{self.changed}"

    def text(self) -> str:
        """Return what is in the file; ends of lines stay as they are, so that characters are counted as they stand.

        Raises:
            OSError: For what is no file that can be read; a pipe would be waited for without end, and a device be read so.
            UnicodeDecodeError: Where it is not UTF-8.
        """
        if not stat.S_ISREG(os.stat(self.path).st_mode):
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
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
    except UnicodeDecodeError as error:
        what = f"Text {number}: its {text.kind} on {socket.gethostname()} is not UTF-8 at byte {error.start}."
        return UnreadableText(what, ENCODING_REMEDY)
    except Exception as error:  # noqa: BLE001 - of whatever reads it, and all of it is told that may be
        what = f"Text {number}: its {text.kind} cannot be read on {socket.gethostname()}: {reason(error)}."
        return UnreadableText(what, f"Make the {text.kind} readable there.")


def reason(error: Exception) -> str:
    """Return what may be told of why something cannot be read: its message can repeat a text, or the name of a file.

    Example:
        >>> reason(ValueError("could not convert string to float: 'Mr Smith has asthma'"))
        'ValueError'
        >>> reason(FileNotFoundError(errno.ENOENT, "no file /notes/smith.txt"))
        'No such file or directory'
    """
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return type(error).__name__


def unless_failed(found: Found | OpenMedError) -> Found:
    """Return what was found on a worker.

    What is nobody's mistake there comes back as a value, because Dask writes what a task raises to the log of its worker.

    Raises:
        OpenMedError: Why nothing was found.
    """
    if isinstance(found, OpenMedError):
        raise found
    return found


def located(texts: Any, ask: Callable[..., Any]) -> Any:
    """Return the files that a path, or a list of them, stands for; anything else as it is.

    Args:
        texts: What was passed as texts.
        ask: Calls a function where the files are.

    Raises:
        ConfigurationError: Where a path stands for no file.
    """
    paths = [texts] if isinstance(texts, PurePath) else texts
    if not (isinstance(paths, (list, tuple)) and paths and all(isinstance(path, PurePath) for path in paths)):
        warn_of_names(texts)
        return texts
    return unless_failed(ask(files_matching, tuple(absolute(str(path)) for path in paths)))


def warn_of_names(texts: Any) -> None:
    """Warn where the first text of a list is the name of a file, as ``glob.glob`` gives them: it would be read as a text."""
    first = texts[0] if isinstance(texts, (list, tuple)) and texts else None
    if isinstance(first, str) and os.path.isfile(first):
        what = "Text 0 is the name of a file, and is read as a text."
        warnings.warn(f"{what} Pass pathlib.Path(name) for what is in the file.", OpenMedWarning, stacklevel=2)


def absolute(path: str) -> str:
    """Return a path from the root; one of somebody's home stays, because every computer has another."""
    return path if path.startswith("~") else os.path.abspath(path)


def files_matching(patterns: Sequence[str]) -> tuple[FileText, ...] | ConfigurationError:
    """Return the files of this computer that match patterns, those of each in the order of their names.

    Args:
        patterns: Paths, in which ``*``, ``?``, ``[...]`` and ``**`` stand for more than one.

    Returns:
        The files, or which pattern stands for none.
    """
    found = [(pattern, matching(pattern)) for pattern in patterns]
    for pattern, paths in found:
        if not paths:
            folder = os.path.isdir(os.path.expanduser(pattern))
            what = f"{pattern!r} is a folder" if folder else f"There is no file {pattern!r}"
            remedy = "Name files that are there, such as Path('notes') / '*.txt'."
            return ConfigurationError(f"{what} on {socket.gethostname()}.", remedy)
    return tuple(FileText.at(path) for _pattern, paths in found for path in paths)


def matching(pattern: str) -> list[str]:
    """Return the paths that one pattern stands for, itself where it is one, and all that are no folders."""
    path = os.path.expanduser(pattern)
    paths = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True))
    return [path for path in paths if not os.path.isdir(path)]
