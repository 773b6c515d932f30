"""What texts a person may pass: a series of them, or references to texts that are read where they are annotated."""

from __future__ import annotations

import abc
import errno
import fnmatch
import glob
import hashlib
import os
import re
import socket
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Number
from pathlib import PurePath
from typing import Any, ClassVar, TypeVar

from .._utils.text import short_type_name
from .._utils.warning import warn
from ..errors import ConfigurationError, InvalidTextError, OpenMedError
from .tables import reader_by_content, reader_by_name

ResultT = TypeVar("ResultT")

_SAVE_AS_UTF8 = "Save it as UTF-8, or read it yourself and pass its text."

# A class of one letter or digit is no use in a pattern, and usual in a name: ``note[1].txt`` is never ``note1.txt``.
_ONE_IN_BRACKETS = re.compile(r"\[(\w)\]")

_LONGEST_NAME = 1000  # of a path that is looked at as one

# Endings of file names, and of patterns of them, by which a text in one line looks like the name of a file.
_FILE_NAME = re.compile(
    r"[^\n]*(\.(txt|text|md|rst|rtf|pdf|docx?|html?|xml|json|ann|csv|tsv|jsonl|ndjson|parquet|xlsx?|gz|zip)|[/\\]\*+)",
    re.IGNORECASE,
)


class TextReference(abc.ABC):
    """A text that is read when it is needed."""

    kind: ClassVar[str]  # such as "file"
    characters: int  # about how many it has

    @property
    @abc.abstractmethod
    def identity(self) -> str:
        """What tells it from other texts."""

    @abc.abstractmethod
    def read(self) -> str:
        """Read the text; raise whatever its reader fails with."""

    def fingerprint(self) -> int:
        """Return a number that tells the text from others without reading it."""
        return _digest(f"\0{self.identity}")

    def refresh(self) -> TextReference:
        """Return the reference as it would be made now."""
        return self


@dataclass(frozen=True, repr=False)  # Names of files can be names of people.
class FileReference(TextReference):
    """A file that is one text, in UTF-8."""

    kind = "file"
    path: str
    characters: int  # its size in bytes
    modified_ns: int  # in nanoseconds

    @classmethod
    def from_path(cls, path: str) -> FileReference:
        """Return the file of a path; reading it reports whether it can be read."""
        try:
            status = os.stat(path)
        except OSError:
            return cls(path, 0, 0)
        return cls(path, status.st_size, status.st_mtime_ns)

    @property
    def identity(self) -> str:
        """Its path, size and time of change."""
        return f"{self.path}\0{self.characters}\0{self.modified_ns}"

    def read(self) -> str:
        """Return what is in the file; ends of lines stay as they are, so that offsets count characters as they stand."""
        mode = os.stat(self.path).st_mode
        if not stat.S_ISREG(mode):  # A pipe would be waited for without end.
            code = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENOTSUP
            raise OSError(code, os.strerror(code))
        with open(self.path, "rb") as file:
            data = file.read()
        if reader := reader_by_content(data):
            raise _NotANote("is a table", f"Pass its column of texts: {reader}.")
        text = data.decode()
        if (place := data.find(b"\0")) >= 0:  # UTF-16 without a byte order mark is valid UTF-8 with zeros.
            raise _NotANote(f"is not text: byte {place} is zero, as in UTF-16", _SAVE_AS_UTF8)
        return text

    def refresh(self) -> FileReference:
        """Return the file with its size and time of change of now."""
        return self.from_path(self.path)


class _NotANote(Exception):
    """The contents of a file that is not one text: the problem and the remedy, without a word of it."""


# The types of which the only value is a missing one.
SINGLE_MISSING = {("pandas", "NAType"), ("pandas", "NaTType"), ("numpy", "MaskedConstant")}


def is_missing(value: Any) -> bool:
    """Tell whether a value stands for a text that is missing, whatever library made it; an empty text is not missing.

    Example:
        >>> is_missing(None), is_missing(float("nan")), is_missing(""), is_missing(5)
        (True, True, False, False)
    """
    if isinstance(value, (str, list)):
        return False
    if isinstance(value, Decimal):  # A signaling NaN cannot be compared.
        return value.is_nan()
    library, kind = type(value).__module__.partition(".")[0], type(value).__name__
    if isinstance(value, Number) or (library == "numpy" and kind in {"datetime64", "timedelta64"}):
        return bool(value != value)  # noqa: PLR0124 - only what is no value is unlike itself
    if library == "pyarrow" and kind.endswith("Scalar"):
        return not value.is_valid
    return value is None or (library, kind) in SINGLE_MISSING


def text_fingerprint(text: Any) -> int:
    """Return a number that tells one text from another; of anything else, only its kind counts.

    All missing values have the same one.
    """
    if isinstance(text, str):  # First, because nearly all are.
        return _digest(text)
    if isinstance(text, TextReference):
        return text.fingerprint()
    return MISSING if is_missing(text) else _digest(canonical_text(text))


def _digest(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def canonical_text(text: Any) -> str:
    """Return a text, the words of one that is split, the identity of one that is elsewhere, or the kind of anything else."""
    if isinstance(text, str):
        return text
    if isinstance(text, TextReference):
        return f"\0{text.identity}"
    words = map(canonical_text, text) if isinstance(text, list) else ()
    return "\0".join((f"\0{short_type_name(text)}", *words))


MISSING = _digest(canonical_text(None))

# Nothing was read there, so that no result is lost where a text has come.
BLANK = frozenset({MISSING, _digest(canonical_text("")), _digest(canonical_text([]))})


def read_text(text: Any, number: int) -> Any:
    """Return the text of a reference, or why it cannot be read; anything else as it is."""
    if not isinstance(text, TextReference):
        return text
    try:
        return text.read()
    except UnicodeDecodeError as error:
        what = f"Text {number}: its {text.kind} on {socket.gethostname()} is not UTF-8 at byte {error.start}."
        return InvalidTextError(what, _SAVE_AS_UTF8)
    except _NotANote as error:
        problem, remedy = error.args
        return InvalidTextError(f"Text {number}: its {text.kind} on {socket.gethostname()} {problem}.", remedy)
    except Exception as error:  # noqa: BLE001 - whatever its reader fails with
        what = f"Text {number}: its {text.kind} cannot be read on {socket.gethostname()}: {describe_read_error(error)}."
        return InvalidTextError(what, f"Make the {text.kind} readable there.")


def describe_read_error(error: Exception) -> str:
    """Return why something cannot be read, without the error's message: it can repeat a text, or the name of a file."""
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else type(error).__name__


def raise_if_error(answer: ResultT | OpenMedError) -> ResultT:
    """Return the answer of a worker, or raise the error in its place.

    Such errors come back as values, because Dask writes what a task raises to the log of its worker.
    """
    if isinstance(answer, OpenMedError):
        raise answer
    return answer


def resolve_paths(texts: Any, find: Callable[[Sequence[str]], Any]) -> Any:
    """Return the files that a path, or a list of them, stands for; anything else as it is.

    ``find`` calls :func:`expand_globs` on the computer that has the files.
    """
    paths = [texts] if isinstance(texts, PurePath) else texts
    listed = isinstance(paths, (list, tuple)) and len(paths) > 0
    if listed and all(isinstance(path, PurePath) for path in paths):
        return raise_if_error(find([absolute_path(str(path)) for path in paths]))
    return texts


def warn_if_file_name(text: str, number: int) -> bool:
    """Warn of a text that is the name of a file, or looks like one; return whether it does."""
    looks_like_one = len(text) <= _LONGEST_NAME and _FILE_NAME.fullmatch(text) is not None
    if not looks_like_one and not any(map(str.isalnum, text)):  # "." and "/" are folders.
        return False
    path = os.path.expanduser(text)
    if os.path.isfile(path):
        what = "is the name of a file"
        remedy = "Pass pathlib.Path(name) for what is in the file."
    elif os.path.isdir(path):
        what = "is the name of a folder"
        remedy = "Pass pathlib.Path(name) / '*.txt' for what is in its files."
    elif looks_like_one:
        what = "looks like the name of a file"
        remedy = "Pass paths for what is in files, such as Path('notes') / '*.txt'."
    else:
        return False
    if reader := reader_by_name(path):
        what = "is the name of a table"
        remedy = f"Pass its column of texts: {reader}."
    warn(f"Text {number} {what}, and is read as a text. {remedy}")
    return True


def absolute_path(path: str) -> str:
    """Return a path from the root; one of somebody's home stays, because every computer has another."""
    return path if path.startswith("~") else os.path.abspath(path)


def expand_globs(patterns: Sequence[str]) -> tuple[FileReference, ...] | ConfigurationError:
    """Return the files of this computer that paths and patterns stand for.

    A path that exists is that file. The files of a pattern come in the order of ``sorted(paths)``, which compares folder by
    folder, and without those that an earlier entry stands for.
    """
    host = socket.gethostname()
    found: list[FileReference] = []
    known: set[str] = set()  # real paths
    for pattern in patterns:
        path = os.path.abspath(os.path.expanduser(pattern))
        name = os.path.basename(path)
        shown = repr(name) if re.fullmatch(r"\S{1,40}", name) else "of that name"
        is_folder = os.path.isdir(path)
        is_named = os.path.lexists(path)
        try:
            matches = {os.path.realpath(path): path} if is_named else _paths_matching(path)
            # A shell makes a file named ``*.txt`` by mistake; without the others, their notes would be missing.
            folder = os.path.dirname(path)
            if len(patterns) == 1 and is_named and not is_folder and len(_matching({folder: folder}, name)) > 1:
                what = f"{shown} is the name of a file on {host}, and a pattern that other files match."
                return ConfigurationError(what, "Rename that file.")
        except OSError as error:
            what = f"A folder in the search for {shown} cannot be listed on {host}: {describe_read_error(error)}."
            return ConfigurationError(what, "Make it readable, or name the files.")
        for match in matches.values():
            if reader := reader_by_name(match):
                which = f"{shown} is" if match == path else f"Among the files that match {shown} is"
                return ConfigurationError(f"{which} a table on {host}.", f"Pass its column of texts: {reader}.")
        if is_folder or not matches:
            what = f"{shown} is a folder" if is_folder else f"There is no file {shown}"
            remedy = "Name files that are there, such as Path('notes') / '*.txt'."
            return ConfigurationError(f"{what} on {host}.", remedy)
        paths = [path]
        if not is_named:
            paths = sorted((match for real, match in matches.items() if real not in known), key=PurePath)
        found += map(FileReference.from_path, paths)
        known |= matches.keys()
    return tuple(found)


@dataclass(frozen=True)
class _Entry:
    path: str
    real: str  # its own name in the real path of its folder, also of a link
    is_folder: bool
    is_link: bool


def _paths_matching(pattern: str) -> dict[str, str]:
    """Return the files that match a pattern, by their real paths.

    Each folder is entered once, whatever links lead to it. A linked file is left out where the file itself matches; of two links
    to one other file both stay, because a store by content holds equal notes of two patients once.
    """
    anchor, names = PurePath(pattern).anchor, PurePath(pattern).parts[1:]
    folders = {os.path.realpath(anchor): anchor}  # real path and path as it was named
    is_literal = True  # no wildcard so far
    for name in names[:-1]:
        exact = _exact(folders, name) if is_literal else []
        folders = _all_below(folders) if name == "**" and not exact else _folders_of(exact or _matching(folders, name))
        is_literal = bool(exact)
    last = names[-1]
    if last == "**":
        folders = _all_below(folders)
    entries = _matching(folders, last)
    files = {entry.real: entry.path for entry in entries if not entry.is_folder}
    links = {entry.real: os.path.realpath(entry.path) for entry in entries if entry.is_link}
    return {real: path for real, path in files.items() if links.get(real, real) == real or links[real] not in files}


def _exact(folders: Mapping[str, str], name: str) -> list[_Entry]:
    """Return the entries of folders that have exactly this name."""
    found = []
    for real, folder in folders.items():
        path = os.path.join(folder, name)
        if os.path.lexists(path):
            found.append(_Entry(path, os.path.join(real, name), os.path.isdir(path), os.path.islink(path)))
    return found


def _matching(folders: Mapping[str, str], pattern: str) -> list[_Entry]:
    """Return the entries of folders that one part of a pattern stands for.

    Where ``[A]`` is part of a name, only that name counts. ``*`` also matches itself, so it stands for all.
    """
    exact = _exact(folders, pattern)
    if not glob.has_magic(pattern) or (exact and not fnmatch.fnmatchcase(pattern, pattern)):
        return exact
    return _listed(folders, _ONE_IN_BRACKETS.sub(r"[[]\1]", pattern))


def _listed(folders: Mapping[str, str], pattern: str) -> list[_Entry]:
    """Return the entries of folders that match a pattern, in a fixed order; hidden ones only if it starts with a dot.

    A link to a folder that contains it is left out: it would lead from one patient's folder to all others.
    """
    matches = re.compile(fnmatch.translate(os.path.normcase(pattern))).match
    found: list[_Entry] = []
    for real, folder in folders.items():
        with os.scandir(folder) as entries:
            for entry in entries:
                is_hidden = entry.name.startswith(".") and not pattern.startswith(".")
                if is_hidden or not matches(os.path.normcase(entry.name)):
                    continue
                own = os.path.join(real, entry.name)
                if not entry.is_symlink():
                    found.append(_Entry(entry.path, own, entry.is_dir(), is_link=False))
                elif not own.startswith(os.path.join(os.path.realpath(entry.path), "")):
                    found.append(_Entry(entry.path, own, os.path.isdir(entry.path), is_link=True))
    return sorted(found, key=_path)


def _path(entry: _Entry) -> str:
    return entry.path


def _folders_of(entries: Sequence[_Entry]) -> dict[str, str]:
    """Return the folders among entries by their real paths, under a name that is not a link where there is one."""
    folders: dict[str, str] = {}
    for entry in entries:
        if entry.is_folder and not entry.is_link:
            folders[entry.real] = entry.path
    for entry in entries:
        if entry.is_folder and entry.is_link:
            folders.setdefault(os.path.realpath(entry.path), entry.path)
    return folders


def _all_below(folders: Mapping[str, str]) -> dict[str, str]:
    """Return folders and all folders below them; links are followed last, so that folders keep their own names."""
    found = dict(folders)
    waiting = deque(folders.items())
    links: deque[_Entry] = deque()
    while waiting or links:
        if not waiting:
            link = links.popleft()
            real = os.path.realpath(link.path)
            if real in found:
                continue
            found[real] = link.path
            waiting.append((real, link.path))
        folder, path = waiting.popleft()
        for entry in _listed({folder: path}, "*"):
            if not entry.is_folder:
                continue
            if entry.is_link:
                links.append(entry)
            elif entry.real not in found:
                found[entry.real] = entry.path
                waiting.append((entry.real, entry.path))
    return found


def iter_texts(texts: Any) -> Iterator[Any]:
    check_iterable(texts)
    try:
        return iter(texts)
    except TypeError:
        raise not_iterable_error(texts) from None


def index_of(texts: Any) -> Any:
    """Return the index of a pandas Series or of the rows of a column, ``None`` for texts that have none."""
    pandas = sys.modules.get("pandas")  # Without it, no series can be there.
    if pandas is not None and isinstance(texts, pandas.Series):
        return texts.index
    return getattr(texts, "row_index", None)


def effective_length(text: Any) -> int:
    """Return about how many characters a text has; every text counts, also an empty one."""
    if isinstance(text, str):
        return len(text) + 1
    if isinstance(text, TextReference):
        return text.characters + 1
    return 1 + sum(map(effective_length, text)) if isinstance(text, list) else 1


def check_iterable(texts: Any) -> None:
    """Refuse a table, a single text, a mapping, and what cannot be gone through, without reading it."""
    dimensions = getattr(texts, "ndim", 2)  # What is only computed later can have anything, but no number of them.
    named = hasattr(texts, "columns") or hasattr(texts, "column_names")
    if named and isinstance(dimensions, int) and dimensions > 1:
        what = f"{short_type_name(texts)} is a table."
        raise ConfigurationError(what, "Pass its column of texts, such as table['text'].")
    if type(texts).__module__.partition(".")[0] == "pyarrow":  # It gives scalars of its own, not strings.
        what = f"{short_type_name(texts)} is a column of Arrow."
        raise ConfigurationError(what, "Pass its strings, as in column.to_pylist().")
    # Some series have no __iter__, transformers' KeyDataset among them.
    series = hasattr(type(texts), "__iter__") or hasattr(type(texts), "__getitem__")
    if not series or isinstance(texts, (str, bytes, Mapping)) or type(texts).__module__ == "dask.delayed":
        raise not_iterable_error(texts)


def not_iterable_error(texts: Any) -> ConfigurationError:
    what = f"{short_type_name(texts)} is not a series of texts."
    return ConfigurationError(what, "Pass a list, a generator or a column, such as [text].")
