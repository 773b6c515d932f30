"""Inputs of an annotation run: iterables of texts, and references to texts that are read when they are annotated."""

from __future__ import annotations

import abc
import errno
import fnmatch
import glob
import hashlib
import operator
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

ResultT = TypeVar("ResultT")

_SAVE_AS_UTF8 = "Save it as UTF-8, or read it in your code and pass its text."

# The pandas call that reads a table, by file suffix.
_TABLE_READERS = {
    "csv": "read_csv(path)",
    "tsv": r"read_csv(path, sep='\t')",
    "parquet": "read_parquet(path)",
    "feather": "read_feather(path)",
    "xlsx": "read_excel(path)",
    "xls": "read_excel(path)",
    "ods": "read_excel(path)",
    "jsonl": "read_json(path, lines=True)",
    "ndjson": "read_json(path, lines=True)",
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")  # pandas decompresses these.

# A character class with one letter or digit is useless in a pattern, but common in a name: ``note[1].txt`` never matches
# ``note1.txt``.
_ONE_IN_BRACKETS_PATTERN = re.compile(r"\[(\w)\]")

# Maximum length of a text that is checked for being a file name.
_MAX_NAME_LENGTH = 1000

# A one-line text that ends like a file name or a glob pattern.
_FILE_NAME_PATTERN = re.compile(
    r"[^\n]*(\.(txt|text|md|rst|rtf|pdf|docx?|html?|xml|json|ann|csv|tsv|jsonl|ndjson|parquet|xlsx?|gz|zip)|[/\\]\*+)",
    re.IGNORECASE,
)


def table_reader(path: str) -> str | None:
    """Return the code that reads the texts of a table, or ``None`` if the file name is not that of a table.

    Example:
        >>> table_reader("notes.CSV"), table_reader("notes.txt")
        ("pandas.read_csv(path)['text']", None)
    """
    name = path.lower()
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    stem, _, ending = name.rpartition(".")
    reader = _TABLE_READERS.get(ending)
    return f"pandas.{reader}['text']" if reader and stem else None


class TextReference(abc.ABC):
    """A text that is read on demand.

    Attributes:
        kind: Kind of the reference for messages, such as ``"file"``.
        approximate_length: Approximate number of characters.
    """

    kind: ClassVar[str]
    approximate_length: int

    @property
    @abc.abstractmethod
    def identity(self) -> str:
        """A string that identifies the text."""

    @abc.abstractmethod
    def read(self) -> str:
        """Read the text. Exceptions of the reader propagate unchanged."""

    def fingerprint(self) -> int:
        """Return a fingerprint of the identity, without reading the text."""
        return _digest(f"\0{self.identity}")

    def refresh(self) -> TextReference:
        """Return an up-to-date reference to the same text."""
        return self


@dataclass(frozen=True, repr=False)  # No repr, because file names can contain names of people.
class FileReference(TextReference):
    """A UTF-8 file that contains one text.

    Attributes:
        path: Path of the file.
        approximate_length: Size in bytes.
        modified_ns: Modification time in nanoseconds.
    """

    kind = "file"
    path: str
    approximate_length: int
    modified_ns: int

    @classmethod
    def from_path(cls, path: str) -> FileReference:
        """Return a reference to a file. Errors are reported when the file is read."""
        try:
            status = os.stat(path)
        except OSError:
            return cls(path, 0, 0)
        return cls(path, status.st_size, status.st_mtime_ns)

    @property
    def identity(self) -> str:
        """The path, size and modification time."""
        return f"{self.path}\0{self.approximate_length}\0{self.modified_ns}"

    def read(self) -> str:
        """Return the contents of the file. Line endings are not converted, so that offsets match the file."""
        mode = os.stat(self.path).st_mode
        if not stat.S_ISREG(mode):  # Reading from a pipe could block forever.
            code = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENOTSUP
            raise OSError(code, os.strerror(code))
        with open(self.path, "rb") as file:
            data = file.read()
        text = data.decode()
        if (position := data.find(b"\0")) >= 0:  # UTF-16 without a byte order mark is valid UTF-8 that contains zeros.
            raise _InvalidContentError(f"is not text: byte {position} is zero, as in UTF-16", _SAVE_AS_UTF8)
        return text

    def refresh(self) -> FileReference:
        """Return a reference with the current size and modification time."""
        return self.from_path(self.path)


class _InvalidContentError(Exception):
    """The contents of a file are not one text. The arguments are the problem and the remedy, without any contents."""


# Types whose only value is a missing value.
MISSING_VALUE_TYPES = {("pandas", "NAType"), ("pandas", "NaTType"), ("numpy", "MaskedConstant")}


def is_missing(value: Any) -> bool:
    """Return whether a value of any library represents a missing text. An empty text is not missing.

    Example:
        >>> is_missing(None), is_missing(float("nan")), is_missing(""), is_missing(5)
        (True, True, False, False)
    """
    if isinstance(value, (str, list)):
        return False
    if isinstance(value, Decimal):  # A signaling NaN cannot be compared.
        return value.is_nan()
    library = type(value).__module__.partition(".")[0]
    type_name = type(value).__name__
    if isinstance(value, Number) or (library == "numpy" and type_name in {"datetime64", "timedelta64"}):
        return bool(value != value)  # noqa: PLR0124 - only NaN and NaT differ from themselves
    if library == "pyarrow" and type_name.endswith("Scalar"):
        return not value.is_valid
    return value is None or (library, type_name) in MISSING_VALUE_TYPES


def text_fingerprint(text: Any) -> int:
    """Return a fingerprint of a text, or of the type of any other value.

    All missing values have the same fingerprint.
    """
    if isinstance(text, str):  # Checked first, because nearly all texts are strings.
        return _digest(text)
    if isinstance(text, TextReference):
        return text.fingerprint()
    return MISSING_FINGERPRINT if is_missing(text) else _digest(fingerprint_key(text))


def _digest(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def fingerprint_key(text: Any) -> str:
    """Return a string for the fingerprint: the text, its words, the identity of a reference, or the type of another value."""
    if isinstance(text, str):
        return text
    if isinstance(text, TextReference):
        return f"\0{text.identity}"
    words = map(fingerprint_key, text) if isinstance(text, list) else ()
    return "\0".join((f"\0{short_type_name(text)}", *words))


MISSING_FINGERPRINT = _digest(fingerprint_key(None))

# Fingerprints of missing and empty texts. When a run is resumed, the result of such a text is replaced if there is a text now.
BLANK_FINGERPRINTS = frozenset({MISSING_FINGERPRINT, _digest(fingerprint_key("")), _digest(fingerprint_key([]))})


def read_text(text: Any, index: int) -> Any:
    """Return the text of a reference, or the error if it cannot be read. Other values are returned unchanged."""
    if not isinstance(text, TextReference):
        return text
    try:
        return text.read()
    except UnicodeDecodeError as error:
        message = f"Text {index}: the {text.kind} on {socket.gethostname()} is not valid UTF-8 at byte {error.start}."
        return InvalidTextError(message, _SAVE_AS_UTF8)
    except _InvalidContentError as error:
        problem, remedy = error.args
        return InvalidTextError(f"Text {index}: the {text.kind} on {socket.gethostname()} {problem}.", remedy)
    except Exception as error:  # noqa: BLE001 - the reader may raise anything
        reason = describe_read_error(error)
        message = f"Text {index}: the {text.kind} cannot be read on {socket.gethostname()}: {reason}."
        return InvalidTextError(message, f"Make the {text.kind} readable there.")


def describe_read_error(error: Exception) -> str:
    """Return a description without the message of the error, which can contain a text or a file name."""
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else type(error).__name__


def raise_if_error(result: ResultT | OpenMedError) -> ResultT:
    """Return the result of a worker, or raise it if it is an error.

    Workers return errors as values, because Dask writes exceptions of tasks to the log of the worker.
    """
    if isinstance(result, OpenMedError):
        raise result
    return result


def resolve_paths(texts: Any, find: Callable[[Sequence[str]], Any]) -> Any:
    """Return the files of a path or a list of paths. Other values are returned unchanged.

    ``find`` calls :func:`expand_globs` on the host that has the files.
    """
    paths = [texts] if isinstance(texts, PurePath) else texts
    is_list = isinstance(paths, (list, tuple)) and len(paths) > 0
    if is_list and all(isinstance(path, PurePath) for path in paths):
        return raise_if_error(find([absolute_path(str(path)) for path in paths]))
    return texts


def warn_if_file_name(text: str, index: int) -> bool:
    """Warn if a text is or looks like a file name, and return whether a warning was issued."""
    looks_like_name = len(text) <= _MAX_NAME_LENGTH and _FILE_NAME_PATTERN.fullmatch(text) is not None
    if not looks_like_name and not any(map(str.isalnum, text)):  # "." and "/" are directories.
        return False
    path = os.path.expanduser(text)
    if os.path.isfile(path):
        problem = "is the name of a file"
        remedy = "Pass pathlib.Path(name) to annotate the contents of the file."
    elif os.path.isdir(path):
        problem = "is the name of a folder"
        remedy = "Pass pathlib.Path(name) / '*.txt' to annotate the contents of its files."
    elif looks_like_name:
        problem = "looks like a file name"
        remedy = "Pass paths to annotate the contents of files, such as Path('notes') / '*.txt'."
    else:
        return False
    if reader := table_reader(path):
        problem = "is the name of a table"
        remedy = f"Pass its column of texts, as in {reader}."
    warn(f"Text {index} {problem} but is processed as text. {remedy}")
    return True


def absolute_path(path: str) -> str:
    """Return an absolute path. A path that starts with ``~`` is unchanged, because home directories differ between hosts."""
    return path if path.startswith("~") else os.path.abspath(path)


def expand_globs(patterns: Sequence[str]) -> tuple[FileReference, ...] | ConfigurationError:
    """Return the files on this host that match paths and patterns.

    A path that exists is not treated as a pattern. The files of a pattern have the order of ``sorted(paths)``, which compares
    directory by directory. Files that match an earlier entry are not repeated.
    """
    host = socket.gethostname()
    files: list[FileReference] = []
    seen_real_paths: set[str] = set()
    for pattern in patterns:
        path = os.path.abspath(os.path.expanduser(pattern))
        name = os.path.basename(path)
        quoted_name = repr(name) if re.fullmatch(r"\S{1,40}", name) else ""
        subject = quoted_name or "The given path"
        display_name = quoted_name or "the given path"
        is_folder = os.path.isdir(path)
        exists = os.path.lexists(path)
        try:
            matches = {os.path.realpath(path): path} if exists else _find_matches(path)
            # A shell can create a file named ``*.txt`` by mistake, and the notes in the other files would be missing.
            folder = os.path.dirname(path)
            if len(patterns) == 1 and exists and not is_folder and len(_match_entries({folder: folder}, name)) > 1:
                message = f"{subject} is the name of a file on {host}, and also a pattern that matches other files."
                return ConfigurationError(message, "Rename that file.")
        except OSError as error:
            message = (
                f"A folder in the search for {display_name} cannot be listed on {host}: {describe_read_error(error)}."
            )
            return ConfigurationError(message, "Make it readable, or pass the paths of the files.")
        for match in matches.values():
            if reader := table_reader(match):
                message = f"{subject} is a table on {host}."
                if match != path:
                    message = f"One of the files that match {display_name} is a table on {host}."
                return ConfigurationError(message, f"Pass its column of texts, as in {reader}.")
        if is_folder or not matches:
            message = f"{subject} is a folder on {host}."
            if not is_folder:
                message = f"File {quoted_name or 'of that name'} not found on {host}."
            return ConfigurationError(message, "Pass paths of existing files, such as Path('notes') / '*.txt'.")
        paths = [path]
        if not exists:
            paths = sorted((match for real, match in matches.items() if real not in seen_real_paths), key=PurePath)
        files += map(FileReference.from_path, paths)
        seen_real_paths |= matches.keys()
    return tuple(files)


@dataclass(frozen=True)
class _Entry:
    """An entry of a directory.

    Attributes:
        path: Path as found.
        resolved_path: Real path of the directory, joined with the name of the entry. If the entry is a link, it is not resolved.
        is_folder: Whether the entry is a directory or a link to a directory.
        is_link: Whether the entry is a symbolic link.
    """

    path: str
    resolved_path: str
    is_folder: bool
    is_link: bool


def _find_matches(pattern: str) -> dict[str, str]:
    """Return the paths of files that match a pattern, by their real paths.

    Each directory is visited once, even if links lead to it. A link is ignored if its target matches too. Two links to a target
    that does not match are both returned, because a content-addressed store holds equal notes of two patients only once.
    """
    anchor = PurePath(pattern).anchor
    names = PurePath(pattern).parts[1:]
    folders = {os.path.realpath(anchor): anchor}  # paths as specified, by real path
    is_literal = True  # no wildcard so far
    for name in names[:-1]:
        exact = _find_exact(folders, name) if is_literal else []
        if name == "**" and not exact:
            folders = _find_subfolders(folders)
        else:
            folders = _select_folders(exact or _match_entries(folders, name))
        is_literal = bool(exact)
    last = names[-1]
    if last == "**":
        folders = _find_subfolders(folders)
    entries = _match_entries(folders, last)
    files = {entry.resolved_path: entry.path for entry in entries if not entry.is_folder}
    links = {entry.resolved_path: os.path.realpath(entry.path) for entry in entries if entry.is_link}
    return {real: path for real, path in files.items() if links.get(real, real) == real or links[real] not in files}


def _find_exact(folders: Mapping[str, str], name: str) -> list[_Entry]:
    """Return the entries of directories with a given name."""
    matches = []
    for real, folder in folders.items():
        path = os.path.join(folder, name)
        if os.path.lexists(path):
            matches.append(_Entry(path, os.path.join(real, name), os.path.isdir(path), os.path.islink(path)))
    return matches


def _match_entries(folders: Mapping[str, str], pattern: str) -> list[_Entry]:
    """Return the entries of directories that match one component of a pattern.

    If an entry has the exact name, such as ``note[A].txt``, only this entry is returned, unless the pattern matches itself
    like ``*``.
    """
    exact = _find_exact(folders, pattern)
    if not glob.has_magic(pattern) or (exact and not fnmatch.fnmatchcase(pattern, pattern)):
        return exact
    return _list_entries(folders, _ONE_IN_BRACKETS_PATTERN.sub(r"[[]\1]", pattern))


def _list_entries(folders: Mapping[str, str], pattern: str) -> list[_Entry]:
    """Return the entries of directories that match a pattern, in sorted order.

    Hidden entries are returned only if the pattern starts with a dot. A link to a directory that contains the link is ignored,
    because it would lead from the directory of one patient to all others.
    """
    is_match = re.compile(fnmatch.translate(os.path.normcase(pattern))).match
    matches: list[_Entry] = []
    for real, folder in folders.items():
        with os.scandir(folder) as entries:
            for entry in entries:
                is_hidden = entry.name.startswith(".") and not pattern.startswith(".")
                if is_hidden or not is_match(os.path.normcase(entry.name)):
                    continue
                resolved_path = os.path.join(real, entry.name)
                if not entry.is_symlink():
                    matches.append(_Entry(entry.path, resolved_path, entry.is_dir(), is_link=False))
                elif not resolved_path.startswith(os.path.join(os.path.realpath(entry.path), "")):
                    matches.append(_Entry(entry.path, resolved_path, os.path.isdir(entry.path), is_link=True))
    return sorted(matches, key=operator.attrgetter("path"))


def _select_folders(entries: Sequence[_Entry]) -> dict[str, str]:
    """Return the directories among entries by real path. Paths that are not links take precedence."""
    folders: dict[str, str] = {}
    for entry in entries:
        if entry.is_folder and not entry.is_link:
            folders[entry.resolved_path] = entry.path
    for entry in entries:
        if entry.is_folder and entry.is_link:
            folders.setdefault(os.path.realpath(entry.path), entry.path)
    return folders


def _find_subfolders(folders: Mapping[str, str]) -> dict[str, str]:
    """Return directories and all their subdirectories. Links are followed last, so that paths that are not links are preferred."""
    subfolders = dict(folders)
    pending = deque(folders.items())
    links: deque[_Entry] = deque()
    while pending or links:
        if not pending:
            link = links.popleft()
            real = os.path.realpath(link.path)
            if real in subfolders:
                continue
            subfolders[real] = link.path
            pending.append((real, link.path))
        folder, path = pending.popleft()
        for entry in _list_entries({folder: path}, "*"):
            if not entry.is_folder:
                continue
            if entry.is_link:
                links.append(entry)
            elif entry.resolved_path not in subfolders:
                subfolders[entry.resolved_path] = entry.path
                pending.append((entry.resolved_path, entry.path))
    return subfolders


def iter_texts(texts: Any) -> Iterator[Any]:
    """Return an iterator over texts, or raise an error if they are not iterable."""
    check_iterable(texts)
    try:
        return iter(texts)
    except TypeError:
        raise _not_iterable_error(texts) from None


def get_row_index(texts: Any) -> Any:
    """Return the index of a pandas Series or of the rows of a column, or ``None``."""
    pandas = sys.modules.get("pandas")  # If pandas is not imported, the texts cannot be a Series.
    if pandas is not None and isinstance(texts, pandas.Series):
        return texts.index
    return getattr(texts, "row_index", None)


def effective_length(text: Any) -> int:
    """Return the approximate number of characters of a text plus 1, so that an empty text has a positive length."""
    if isinstance(text, str):
        return len(text) + 1
    if isinstance(text, TextReference):
        return text.approximate_length + 1
    return 1 + sum(map(effective_length, text)) if isinstance(text, list) else 1


def check_iterable(texts: Any) -> None:
    """Raise an error for a table, a single text, a mapping or a value that is not iterable, without reading it."""
    dimensions = getattr(texts, "ndim", 2)  # A lazily computed object may have an ``ndim`` that is not a number.
    has_columns = hasattr(texts, "columns") or hasattr(texts, "column_names")
    if has_columns and isinstance(dimensions, int) and dimensions > 1:
        message = f"{short_type_name(texts)} is a table, not a sequence of texts."
        raise ConfigurationError(message, "Pass the name of its column of texts, such as text_column='text'.")
    if type(texts).__module__.partition(".")[0] == "pyarrow":  # Iteration yields Arrow scalars, not strings.
        message = f"{short_type_name(texts)} is an Arrow column."
        raise ConfigurationError(message, "Pass its strings, as in column.to_pylist().")
    # Some sequences have no __iter__, such as KeyDataset of transformers.
    is_iterable = hasattr(type(texts), "__iter__") or hasattr(type(texts), "__getitem__")
    if not is_iterable or isinstance(texts, (str, bytes, Mapping)) or type(texts).__module__ == "dask.delayed":
        raise _not_iterable_error(texts)


def _not_iterable_error(texts: Any) -> ConfigurationError:
    """Return the error for a value that is not an iterable of texts."""
    message = f"{short_type_name(texts)} is not an iterable of strings."
    return ConfigurationError(message, "Pass a list, a generator or a column, such as [text].")
