"""What texts a person may pass: a series of them, or references to texts that are read where they are annotated."""

from __future__ import annotations

import abc
import errno
import glob
import hashlib
import os
import socket
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, ClassVar, TypeVar

from ..errors import ConfigurationError, OpenMedError, UnreadableText, warn

Answered = TypeVar("Answered")


class Reference(abc.ABC):
    """A text that is read when it is needed."""

    kind: ClassVar[str]  # such as "file"
    characters: int  # about how many it has

    @property
    @abc.abstractmethod
    def identity(self) -> str:
        """What tells it from other texts."""

    @abc.abstractmethod
    def text(self) -> str:
        """Read the text; raise whatever its reader fails with."""

    def now(self) -> Reference:
        """Return the reference as it would be made now."""
        return self


@dataclass(frozen=True, repr=False)  # Names of files can be names of people.
class FileText(Reference):
    """A file that is one text, in UTF-8."""

    kind = "file"
    path: str
    characters: int  # its size in bytes
    changed: int  # in nanoseconds

    @classmethod
    def at(cls, path: str) -> FileText:
        """Return the file of a path; reading it reports whether it can be read."""
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
        """Return what is in the file; ends of lines stay as they are, so that offsets count characters as they stand."""
        if not stat.S_ISREG(os.stat(self.path).st_mode):  # A pipe would be waited for without end.
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        with open(self.path, "rb") as file:
            return file.read().decode()

    def now(self) -> FileText:
        """Return the file with its size and time of change of now."""
        return self.at(self.path)


def fingerprint_of(text: Any) -> int:
    """Return a number that tells one text from another; of anything else, only its kind counts."""
    digest = hashlib.blake2b(readable(text).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def readable(text: Any) -> str:
    """Return a text, the words of one that is split, the identity of one that is elsewhere, or the kind of anything else."""
    if isinstance(text, str):
        return text
    if isinstance(text, Reference):
        return f"\0{text.identity}"
    words = map(readable, text) if isinstance(text, list) else ()
    return "\0".join((f"\0{type(text).__name__}", *words))


def read(text: Any, number: int) -> Any:
    """Return the text of a reference, or why it cannot be read; anything else as it is."""
    if not isinstance(text, Reference):
        return text
    try:
        return text.text()
    except UnicodeDecodeError as error:
        what = f"Text {number}: its {text.kind} on {socket.gethostname()} is not UTF-8 at byte {error.start}."
        return UnreadableText(what, "Save it as UTF-8, or read it yourself and pass its text.")
    except Exception as error:  # noqa: BLE001 - whatever its reader fails with
        what = f"Text {number}: its {text.kind} cannot be read on {socket.gethostname()}: {reason(error)}."
        return UnreadableText(what, f"Make the {text.kind} readable there.")


def reason(error: Exception) -> str:
    """Return why something cannot be read, without the error's message: it can repeat a text, or the name of a file."""
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else type(error).__name__


def unless_failed(answer: Answered | OpenMedError) -> Answered:
    """Return the answer of a worker, or raise the error in its place.

    Such errors come back as values, because Dask writes what a task raises to the log of its worker.
    """
    if isinstance(answer, OpenMedError):
        raise answer
    return answer


def located(texts: Any, find: Callable[[Sequence[str]], Any]) -> Any:
    """Return the files that a path, or a list of them, stands for; anything else as it is.

    ``find`` calls :func:`files_matching` on the computer that has the files.
    """
    paths = [texts] if isinstance(texts, PurePath) else texts
    listed = isinstance(paths, (list, tuple)) and len(paths) > 0
    if listed and all(isinstance(path, PurePath) for path in paths):
        return unless_failed(find([absolute(str(path)) for path in paths]))
    if listed and isinstance(texts[0], str) and os.path.isfile(texts[0]):  # As glob.glob gives them.
        what = "Text 0 is the name of a file, and is read as a text."
        warn(f"{what} Pass pathlib.Path(name) for what is in the file.")
    return texts


def absolute(path: str) -> str:
    """Return a path from the root; one of somebody's home stays, because every computer has another."""
    return path if path.startswith("~") else os.path.abspath(path)


def files_matching(patterns: Sequence[str]) -> tuple[FileText, ...] | ConfigurationError:
    """Return the files of this computer that match patterns, those of each in the order of their names."""
    found: list[FileText] = []
    for pattern in patterns:
        path = os.path.expanduser(pattern)
        paths = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True))
        files = [FileText.at(one) for one in paths if not os.path.isdir(one)]
        if not files:
            what = f"{pattern!r} is a folder" if os.path.isdir(path) else f"There is no file {pattern!r}"
            remedy = "Name files that are there, such as Path('notes') / '*.txt'."
            return ConfigurationError(f"{what} on {socket.gethostname()}.", remedy)
        found += files
    return tuple(found)


def stream_of(texts: Any) -> Iterator[Any]:
    check_series(texts)
    try:
        return iter(texts)
    except TypeError:
        raise no_series(texts) from None


def weight(text: Any) -> int:
    """Return about how many characters a text has; every text counts, also an empty one."""
    if isinstance(text, str):
        return len(text) + 1
    if isinstance(text, Reference):
        return text.characters + 1
    return 1 + sum(map(weight, text)) if isinstance(text, list) else 1


def check_series(texts: Any) -> None:
    """Refuse a table, a single text, a mapping, and what cannot be gone through, without reading it."""
    dimensions = getattr(texts, "ndim", 2)  # What is only computed later can have anything, but no number of them.
    named = hasattr(texts, "columns") or hasattr(texts, "column_names")
    if named and isinstance(dimensions, int) and dimensions > 1:
        what = f"{type(texts).__name__} is a table."
        raise ConfigurationError(what, "Pass its column of texts, such as table['text'].")
    # Some series have no __iter__, transformers' KeyDataset among them.
    series = hasattr(type(texts), "__iter__") or hasattr(type(texts), "__getitem__")
    if not series or isinstance(texts, (str, bytes, Mapping)) or type(texts).__module__ == "dask.delayed":
        raise no_series(texts)


def no_series(texts: Any) -> ConfigurationError:
    what = f"{type(texts).__name__} is not a series of texts."
    return ConfigurationError(what, "Pass a list, a generator or a column, such as [text].")
