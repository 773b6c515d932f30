"""JSON data and files: dataclasses from JSON values, differences between values, atomic writes, locks and temporary folders.

The next run removes the temporary folders of a process that was killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import re
import shutil
import stat
import time
import types
import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .._render.drawing import Chart
from .._render.values import to_plain_data
from ..errors import ConfigurationError
from .text import describe_error, describe_file, short_type_name

T = TypeVar("T")


@dataclass(frozen=True)
class Pattern:
    """Pattern of the strings of a field: ``Annotated[str, Pattern("^[0-9a-f]+$")]``."""

    expression: str

    def matches(self, text: str) -> bool:
        """Return whether a string matches the whole pattern."""
        return re.fullmatch(self.expression, text) is not None


@dataclass(frozen=True)
class Minimum:
    """Minimum of a field: ``Annotated[int, Minimum(1)]``."""

    number: int

    def matches(self, number: float) -> bool:
        """Return whether a number is at least the minimum."""
        return number >= self.number


Count = Annotated[int, Minimum(0)]
Size = Annotated[int, Minimum(1)]

MAX_INTEGER = 1 << 64  # Absolute values of integers must be smaller, as the seeds of torch are.


def from_json_data(kind: Any, stored: object, place: str = "it") -> Any:
    """Return a value of a type from JSON data.

    Args:
        kind: A dataclass, or a type of its fields: ``str``, ``int``, ``float``, ``bool``, ``None``, ``Literal``, ``X | None``,
            ``tuple[X, ...]``, ``dict[str, X]`` or a mapping, ``Annotated[str, Pattern(...)]``,
            ``Annotated[int, Minimum(...)]``, or ``Any`` for an unchecked value.
        stored: The JSON data.
        place: Name of the value in an error. Errors never contain values of fields.

    Raises:
        ValueError: If the data has different fields or invalid values.

    Example:
        >>> from_json_data(Pattern, {"expression": 1})
        Traceback (most recent call last):
        ...
        ValueError: its expression cannot be int
    """
    origin = get_origin(kind)
    arguments = get_args(kind)
    if is_dataclass(kind):
        value = _read_dataclass(kind, stored, place)
    elif kind is Any:
        value = stored
    elif origin in {types.UnionType, Union}:
        value = None if stored is None else from_json_data(arguments[0], stored, place)
    elif origin is tuple:
        items = enumerate(_read_basic_value(list, stored, place))
        value = tuple(from_json_data(arguments[0], item, f"{place}[{index}]") for index, item in items)
    elif origin in {dict, Mapping}:
        value = {
            _read_basic_value(str, key, f"a key of {place}"): from_json_data(arguments[1], item, f"a value of {place}")
            for key, item in _read_basic_value(dict, stored, place).items()
        }
    elif origin is Literal:
        if not isinstance(stored, str) or stored not in arguments:
            raise ValueError(f"{place} is not one of {', '.join(arguments)}")
        value = stored
    elif origin is Annotated:
        value = _read_basic_value(arguments[0], stored, place)
        if not arguments[1].matches(value):
            raise ValueError(f"{place} is not valid")
    else:
        value = _read_basic_value(kind, stored, place)
    return value


def field_types(kind: type) -> dict[str, object]:
    """Return the types of the fields of a dataclass. Reports import ``Chart`` for type checkers only."""
    return get_type_hints(kind, localns={"Chart": Chart}, include_extras=True)


def _read_dataclass(kind: Any, stored: object, place: str) -> Any:
    """Return a dataclass from a JSON object."""
    types_by_name = field_types(kind)
    schema = getattr(kind, "SCHEMA", "")
    hints = {field.name: types_by_name[field.name] for field in fields(kind)}
    if schema and not (isinstance(stored, Mapping) and stored.get("schema") == schema):
        raise ValueError(f"{place} has a different schema")
    if not isinstance(stored, Mapping):
        raise ValueError(f"{place} cannot be {short_type_name(stored)}")  # noqa: TRY004 - the file is invalid, not an argument
    # Properties are computed from the fields.
    ignored = {*getattr(kind, "JSON_PROPERTIES", ()), "schema"} - hints.keys()
    values = {name: value for name, value in stored.items() if name not in ignored}
    if missing := hints.keys() - values.keys():
        raise ValueError(f"{place} does not have {min(missing)}")
    if len(values) > len(hints):
        raise ValueError(f"{place} has unknown fields")
    prefix = "its " if place == "it" else f"{place}."
    return kind(**{name: from_json_data(hint, values[name], f"{prefix}{name}") for name, hint in hints.items()})


def _read_basic_value(kind: type, stored: object, place: str) -> Any:
    """Return a string, number, bool, list or dict of the given type."""
    accepted = (int, float) if kind is float else (kind,)
    if type(stored) not in accepted:
        raise ValueError(f"{place} cannot be {short_type_name(stored)}")
    if isinstance(stored, float) and not math.isfinite(stored):
        raise ValueError(f"{place} is not a finite number")
    if isinstance(stored, int) and abs(stored) >= MAX_INTEGER:
        raise ValueError(f"{place} is too large")
    return stored


def to_json(value: object) -> str:
    """Return a value as indented JSON."""
    return json.dumps(to_plain_data(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_json_file(kind: type[T], file: Path, description: str, remedy: str) -> T:
    """Return a value of a type from a file that was written with :func:`to_json`.

    Args:
        kind: Type of the value.
        file: The file.
        description: Description of the expected file for errors, such as ``"a logbook"``.
        remedy: Suggested action for errors.

    Raises:
        ConfigurationError: If the file cannot be read or is not valid.
    """
    try:
        value: T = from_json_data(kind, json.loads(file.read_text("utf-8-sig")))
    except OSError as error:
        problem = f"cannot be read: {error.strerror or short_type_name(error)}"
    except (ValueError, RecursionError) as error:
        problem = f"is not {description}: {describe_error(error)}"
    else:
        return value
    # Outside the handlers, because the original error may contain the path and would become the context of this error.
    raise ConfigurationError(f"{describe_file(file)} {problem}.", remedy)


@dataclass(frozen=True)
class Change:
    """A difference between two JSON objects; the value of a missing key is ``None``."""

    path: tuple[str, ...]
    before: object
    after: object


def find_changes(before: Mapping[str, object], after: Mapping[str, object], path: tuple[str, ...] = ()) -> list[Change]:
    """Return the differences between two JSON objects, in order. Lists are compared as a whole.

    Example:
        >>> find_changes({"torch": "2.12", "run": {"rows": 4}}, {"torch": "2.13", "run": {"rows": 4}})
        [Change(path=('torch',), before='2.12', after='2.13')]
    """
    changes = []
    for name in {**before, **after}:
        old = before.get(name)
        new = after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes += find_changes(old, new, (*path, name))
        elif old != new:
            changes.append(Change((*path, name), old, new))
    return changes


def utc_timestamp() -> str:
    """Return the current UTC time in the format of reports, such as ``2026-01-31T12:00:00Z``."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def atomic_write(file: Path, text: str) -> None:
    """Write a file atomically, so that it is never incomplete. Symbolic links and file modes are preserved.

    Raises:
        OSError: If the file cannot be written.
    """
    target = Path(os.path.realpath(file))
    with temporary_folder(target.parent) as directory:
        temporary = directory / "part"
        temporary.write_text(text, "utf-8")
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        temporary.replace(target)


def save_text(file: Path, text: str) -> None:
    """Write a file with a path from the user atomically.

    Raises:
        ConfigurationError: If the file cannot be written.
    """
    try:
        atomic_write(file, text)
    except (OSError, UnicodeEncodeError) as error:  # UnicodeEncodeError for an unpaired surrogate.
        reason = getattr(error, "strerror", None) or describe_error(error)
        raise ConfigurationError(
            f"{describe_file(file)} cannot be written: {reason}.", "Use an existing directory with write permission."
        ) from None


def save_files(folder: Path, texts: Mapping[str, str], description: str) -> None:
    """Write files into a directory, each atomically. The directory is created if it does not exist.

    Args:
        folder: The directory.
        texts: Contents of the files by name.
        description: Description of the files for errors, such as ``"The results"``.

    Raises:
        ConfigurationError: If a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            atomic_write(folder / name, text)
    except OSError as error:
        message = f"{description} cannot be written to {describe_file(folder)}: {describe_error(error)}."
    else:
        return
    # Outside the handler, because the original error contains the path and would become the context of this error.
    raise ConfigurationError(message, "Use a directory with write permission and free disk space.")


# Folders of another computer are left alone for a day, because some network file systems do not share locks.
MAX_IDLE_SECONDS = 24 * 60 * 60

_LOCK_PATTERN = re.compile(r"\.openmed-([0-9a-f]{8})-[0-9a-f]{32}\.lock")


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Lock a file for a with block, without waiting. The operating system releases the lock when the process ends.

    Raises:
        TimeoutError: If the file is already locked.
        OSError: If the file cannot be created or locked.
        NotImplementedError: If the file system has no locks.
    """
    from filelock import FileLock

    path.parent.stat()  # filelock would create a missing folder.
    # The debug messages of filelock contain the path. The filter passes messages of this module only.
    hidden = logging.Filter(__name__)
    logger = logging.getLogger("filelock")
    logger.addFilter(hidden)
    try:
        with FileLock(path, timeout=0):
            yield
    finally:
        logger.removeFilter(hidden)


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Create a hidden folder in another folder for a with block, after removing those that killed processes left there."""
    remove_abandoned(parent)
    folder = parent / f".openmed-{_host()}-{uuid.uuid4().hex}"
    lock = Path(f"{folder}.lock")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, NotImplementedError):  # Nothing is removed that has no lock.
            stack.enter_context(file_lock(lock))
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            _remove(folder, lock)


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove the temporary folders in a folder whose process was killed, and return their paths."""
    abandoned = []
    for lock in parent.glob(".openmed-*.lock"):
        folder = lock.with_suffix("")
        match = _LOCK_PATTERN.fullmatch(lock.name)
        # Also if the folder belongs to another user, or if its process has just removed it.
        with contextlib.suppress(OSError, NotImplementedError):
            if match and (match[1] == _host() or _idle_seconds(folder) > MAX_IDLE_SECONDS):
                with file_lock(lock):
                    abandoned.append(folder)
                    _remove(folder, lock)
    return abandoned


def _remove(folder: Path, lock: Path) -> None:
    """Remove a folder and then its lock, whose file therefore exists if a process is killed in between."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # Windows does not remove an open file; the lock removes it there.
        lock.unlink()


def _host() -> str:
    """Return a fingerprint of the name of this computer."""
    return f"{zlib.crc32(platform.node().encode()):08x}"


def _idle_seconds(folder: Path) -> float:
    """Return the time since a folder or a file in it was last changed."""
    return time.time() - max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
