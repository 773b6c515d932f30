"""Inputs of an annotation run: iterables of texts, and references to texts that are read when they are annotated."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Number
from pathlib import PurePath
from typing import Any, ClassVar, TypeVar

from .._utils.text import describe_file, short_type_name
from .._utils.validation import suggest_folder
from ..errors import ConfigurationError, InvalidTextError, OpenMedError

ResultT = TypeVar("ResultT")


# Suffixes of tables, which have many notes.
_TABLE_SUFFIXES = frozenset({".csv", ".tsv", ".parquet", ".xlsx", ".jsonl", ".ndjson"})

TABLE_REMEDY = (
    "Read it with pandas, as in notes = pd.read_csv('notes.csv'), with sep=';', encoding='cp1252' if Excel saved it. "
    "Then pass annotate(notes, text_column='text')."
)

_FILES_REMEDY = "Pass paths of existing files, such as Path('notes') / '*.txt'."

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


def is_table(path: str) -> bool:
    """Return whether a file name is that of a table.

    Example:
        >>> is_table("notes.CSV"), is_table("notes.txt")
        (True, False)
    """
    return PurePath(path).suffix.lower() in _TABLE_SUFFIXES


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
        position = data.find(b"\0")
        if position >= 0:  # UTF-16 without a byte order mark is valid UTF-8 that contains zeros.
            raise UnicodeDecodeError("utf-8", data, position, position + 1, "zero byte")
        return text

    def refresh(self) -> FileReference:
        """Return a reference with the current size and modification time."""
        return self.from_path(self.path)


def package_of(value: object) -> str:
    """Return the name of the package that defines the type of a value."""
    return type(value).__module__.partition(".")[0]


# Types whose only value is a missing value.
MISSING_VALUE_TYPES = {("pandas", "NAType"), ("pandas", "NaTType"), ("numpy", "MaskedConstant")}


def is_missing(value: Any) -> bool:
    """Return whether a value of any library represents a missing text, such as a text of white space only.

    Example:
        >>> is_missing(None), is_missing(float("nan")), is_missing(" "), is_missing(5)
        (True, True, True, False)
    """
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, TextReference):
        return value.fingerprint() == MISSING_FINGERPRINT
    if isinstance(value, Decimal):  # A signaling NaN cannot be compared.
        return value.is_nan()
    library = package_of(value)
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


def read_text(text: Any, index: int) -> Any:
    """Return the text of a reference, or the error if it cannot be read. Other values are returned unchanged."""
    if not isinstance(text, TextReference):
        return text
    try:
        return text.read()
    except UnicodeDecodeError as error:
        message = f"Text {index}: the {text.kind} on {socket.gethostname()} is not valid UTF-8 at byte {error.start}."
        return InvalidTextError(message, "Save it as UTF-8, or read it in your code and pass its text.")
    except Exception as error:  # noqa: BLE001 - the reader may raise anything
        reason = describe_read_error(error)
        message = f"Text {index}: the {text.kind} cannot be read on {socket.gethostname()}: {reason}."
        return InvalidTextError(message, f"Make the {text.kind} readable there.")


def describe_read_error(error: Exception) -> str:
    """Return a description without the message of the error, which can contain a text or a file name."""
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else type(error).__name__


def raise_if_error(result: ResultT | OpenMedError) -> ResultT:
    """Return the result of a text or a worker, or raise it if it is an error.

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


def file_name_remedy(text: str) -> str:
    """Return the remedy for a text that looks like a file name, or an empty string. Files are not looked up."""
    if len(text) > _MAX_NAME_LENGTH or not _FILE_NAME_PATTERN.fullmatch(text):
        return ""
    return TABLE_REMEDY if is_table(text) else _FILES_REMEDY


def absolute_path(path: str) -> str:
    """Return an absolute path. A path that starts with ``~`` is unchanged, because home directories differ between hosts."""
    return path if path.startswith("~") else os.path.abspath(path)


def expand_globs(patterns: Sequence[str]) -> tuple[FileReference, ...] | ConfigurationError:
    """Return the files on this host that match paths and patterns.

    A path that exists is not treated as a pattern. The files of a pattern have the order of ``sorted(paths)``, which compares
    directory by directory.
    """
    host = socket.gethostname()
    paths: list[str] = []
    matched: set[str] = set()  # Files of patterns; a file that is named itself is read as often as it is named.
    for pattern in patterns:
        path = os.path.abspath(os.path.expanduser(pattern))
        subject = describe_file(PurePath(path))
        exists = os.path.lexists(path)
        root, name = os.path.split(path)  # The innermost folder that exists, and the parts after it.
        names = [name]
        while not os.path.isdir(root):
            root, name = os.path.split(root)
            names.insert(0, name)
        try:
            matches = [path] if exists else sorted({*_iter_matches(root, names)}, key=PurePath)
        except OSError as error:
            message = f"{subject} on {host}: a folder in the search cannot be listed: {describe_read_error(error)}."
            return ConfigurationError(message, "Make it readable, or pass the paths of the files.")
        if any(map(is_table, matches)):
            return ConfigurationError(
                f"{subject} on {host} {'is' if exists else 'also matches'} a table.", TABLE_REMEDY
            )
        if not matches:
            return _not_found_error(root, names, host)
        if os.path.isdir(path):
            return ConfigurationError(f"{subject} is a folder on {host}.", _FILES_REMEDY)
        paths += [match for match in matches if exists or match not in matched]
        matched.update(matches)
    return tuple(map(FileReference.from_path, paths))


def _not_found_error(root: str, names: Sequence[str], host: str) -> ConfigurationError:
    """Return the error for a path or pattern without files: its first part that does not exist, and a similar folder."""
    name = names[0]
    remedy = _FILES_REMEDY
    if glob.has_magic(name) or os.path.exists(os.path.join(root, name)):
        name = os.path.join(*names)  # The part is a file, or a pattern that may have matches.
    elif len(names) > 1:
        remedy = suggest_folder(os.path.join(root, name)) or remedy
    message = f"{describe_file(PurePath(name))} was not found in the folder {describe_file(PurePath(root)) if PurePath(root).name else root} on {host}."
    return ConfigurationError(message, remedy)


def _iter_matches(folder: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the paths of files in a directory that match the parts of a pattern.

    Unlike :meth:`pathlib.Path.glob`, an error is raised if a directory cannot be listed, and hidden entries match only a part that
    starts with a dot. ``**`` does not follow links.
    """
    name, *rest = names
    pattern = _ONE_IN_BRACKETS_PATTERN.sub(r"[[]\1]", name)
    if name == "**" and rest:
        yield from _iter_matches(folder, rest)
    with os.scandir(folder) as entries:
        for entry in entries:
            if not fnmatch.fnmatch(entry.name, pattern) or (entry.name.startswith(".") and not name.startswith(".")):
                continue
            if not os.path.isdir(entry.path):  # Unlike entry.is_dir(), it raises no error for a link to itself.
                if not rest:
                    yield entry.path
            elif name != "**":
                if rest:
                    yield from _iter_matches(entry.path, rest)
            elif not entry.is_symlink():
                yield from _iter_matches(entry.path, names)


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
        raise ConfigurationError(
            f"{short_type_name(texts)} is a table, not a sequence of texts.",
            "Pass its column of texts, such as notes['text'], or text_column='text' to annotate().",
        )
    # Some sequences have no __iter__, such as KeyDataset of transformers.
    is_iterable = hasattr(type(texts), "__iter__") or hasattr(type(texts), "__getitem__")
    if not is_iterable or isinstance(texts, (str, bytes, Mapping)) or type(texts).__module__ == "dask.delayed":
        raise _not_iterable_error(texts)


def _not_iterable_error(texts: Any) -> ConfigurationError:
    """Return the error for a value that is not an iterable of texts."""
    message = f"{short_type_name(texts)} is not an iterable of strings."
    remedy = "Pass a list, a generator or a column of strings."
    if isinstance(texts, str):
        remedy = "Pass a list: [text]."
    elif isinstance(texts, Mapping):
        remedy = "Pass the texts of one key, such as notes['text']."
    return ConfigurationError(message, remedy)
