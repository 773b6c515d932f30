"""Frozen dataclasses of plain fields from the JSON that ``display.plain`` made of them, and files that are written whole."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tempfile
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from .._render.display import to_plain_data
from .._render.drawing import Chart
from ..errors import ConfigurationError
from .text import describe_error, describe_file, short_type_name


@dataclass(frozen=True)
class Pattern:
    """What the texts of a field look like: ``Annotated[str, Pattern("^[0-9a-f]+$")]``."""

    expression: str

    def matches(self, text: str) -> bool:
        return re.fullmatch(self.expression, text) is not None


@dataclass(frozen=True)
class Minimum:
    """The least number of a field: ``Annotated[int, Minimum(1)]``."""

    number: int

    def matches(self, number: float) -> bool:
        return number >= self.number


OPTIONAL_TYPES = (types.UnionType, Union)
MAX_INTEGER = 1 << 64  # Whole numbers must be smaller than this; seeds of torch are.


def from_json_data(kind: Any, stored: Any, place: str = "it") -> Any:
    """Return a value of a type, made of what JSON holds.

    Args:
        kind: A dataclass, or a type of its fields: ``str``, ``int``, ``float``, ``bool``, ``None``, ``Literal``, ``X | None``,
            ``tuple[X, ...]``, ``dict[str, X]`` or a mapping, ``Annotated[str, Pattern(...)]``,
            ``Annotated[int, Minimum(...)]``, or ``Any`` for what is taken as it is.
        stored: What is read.
        place: What it is called in an error; values of fields are never part of it.

    Raises:
        ValueError: Where it has other fields or holds other values.

    Example:
        >>> from_json_data(Pattern, {"expression": 1})
        Traceback (most recent call last):
        ...
        ValueError: its expression cannot be int
    """
    origin, kinds = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        made = _dataclass_from(kind, stored, place)
    elif kind is Any:
        made = stored
    elif origin in OPTIONAL_TYPES:
        made = None if stored is None else from_json_data(kinds[0], stored, place)
    elif origin is tuple:
        items = enumerate(_plain_from(list, stored, place))
        made = tuple(from_json_data(kinds[0], one, f"{place}[{number}]") for number, one in items)
    elif origin in {dict, Mapping}:
        named = {
            _plain_from(str, name, f"a name of {place}"): one for name, one in _plain_from(dict, stored, place).items()
        }
        made = {name: from_json_data(kinds[1], one, f"a value of {place}") for name, one in named.items()}
    elif origin is Literal:
        if not isinstance(stored, str) or stored not in kinds:
            raise ValueError(f"{place} is none of {', '.join(kinds)}")
        made = stored
    elif origin is Annotated:
        made = _plain_from(kinds[0], stored, place)
        if not kinds[1].matches(made):
            raise ValueError(f"{place} does not look as it must")
    else:
        made = _plain_from(kind, stored, place)
    return made


def field_types(kind: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields; reports import their pictures for type checkers alone."""
    return get_type_hints(kind, localns={"Chart": Chart}, include_extras=True)


def _dataclass_from(kind: Any, stored: Any, place: str) -> Any:
    known, schema = field_types(kind), getattr(kind, "SCHEMA", "")
    hints = {field.name: known[field.name] for field in fields(kind)}
    if schema and not (isinstance(stored, Mapping) and stored.get("schema") == schema):
        raise ValueError(f"{place} is of another kind")
    if not isinstance(stored, Mapping):
        raise ValueError(f"{place} cannot be {short_type_name(stored)}")  # noqa: TRY004 - what is read is wrong, no argument
    also = {*getattr(kind, "JSON_PROPERTIES", ()), "schema"} - hints.keys()  # What follows from the fields stands in the JSON too.
    stored = {name: one for name, one in stored.items() if name not in also}
    for flat, names in getattr(kind, "JSON_FLATTEN", {}).items():
        stored[flat] = {inner: stored.pop(name) for name, inner in names.items() if name in stored}
    if lacking := hints.keys() - stored.keys():
        raise ValueError(f"{place} has no {min(lacking)}")
    if len(stored) > len(hints):
        raise ValueError(f"{place} has fields of another kind")
    own = "its " if place == "it" else f"{place}."
    return kind(**{name: from_json_data(hint, stored[name], f"{own}{name}") for name, hint in hints.items()})


def _plain_from(kind: Any, stored: Any, place: str) -> Any:
    accepted = (int, float) if kind is float else (kind,)
    if type(stored) not in accepted:
        raise ValueError(f"{place} cannot be {short_type_name(stored)}")
    if isinstance(stored, float) and not math.isfinite(stored):
        raise ValueError(f"{place} is no finite number")
    if isinstance(stored, int) and abs(stored) >= MAX_INTEGER:
        raise ValueError(f"{place} is too large")
    if isinstance(stored, str) and not stored.isascii() and any("\ud800" <= one <= "\udfff" for one in stored):
        raise ValueError(f"{place} has half a character")
    return stored


def to_json(value: Any) -> str:
    return json.dumps(to_plain_data(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_json_file(kind: Any, file: Path, what: str, remedy: str) -> Any:
    """Return the value of a type that :func:`to_json` has made the text of a file of.

    Raises:
        ConfigurationError: Where it cannot be read, or is not ``what``.
    """
    # A form that is stored with its values has its name as a field, others as a constant.
    hints = field_types(kind) if is_dataclass(kind) else {}
    schema: str = getattr(kind, "SCHEMA", "") or next(iter(get_args(hints.get("schema"))), "")
    try:
        stored = json.loads(file.read_text("utf-8-sig"), object_pairs_hook=_each_name_once)
        name = stored.get("schema") if isinstance(stored, dict) else None
        form, _, version = schema.rpartition("/")
        if isinstance(name, str) and re.fullmatch(rf"{re.escape(form)}/[1-9]\d{{0,5}}", name) and name != schema:
            problem = f"is {what} of version {name.rpartition('/')[2]}, and this openmed_nb reads version {version}"
            remedy = "Read it with the openmed_nb that wrote it, or with a newer one."
        else:
            return from_json_data(kind, stored)
    except OSError as error:
        problem = f"cannot be read: {error.strerror or short_type_name(error)}"
    except (ValueError, RecursionError) as error:
        problem = f"is not {what}: {describe_error(error)}"
    # Outside of the handlers: the other error may have the path, and would be the context of this one.
    raise ConfigurationError(f"{describe_file(file)} {problem}.", remedy)


def _each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the values of a JSON object by their names, of which another reader could take the other of two."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("it has a name twice")
    return values


@dataclass(frozen=True)
class Change:
    """A value in which two plain dictionaries differ; a key that is absent has the value ``None``."""

    path: tuple[str, ...]
    before: Any
    after: Any


def find_changes(before: Mapping[str, Any], after: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[Change]:
    """Return the values in which two plain dictionaries differ, in order; lists are compared as a whole.

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
    """Return this moment as reports keep it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def atomic_write(file: Path, text: str) -> None:
    """Write a file in one step, so that it is never there in part; a link stays a link, and modes stay.

    Raises:
        OSError: If it cannot be written.
    """
    real = Path(os.path.realpath(file))
    with tempfile.TemporaryDirectory(dir=real.parent, prefix=f".{real.name[:40]}.") as aside:
        part = Path(aside) / "part"
        part.write_text(text, "utf-8")
        if real.exists():
            part.chmod(stat.S_IMODE(real.stat().st_mode))
        part.replace(real)


def save_text(file: Path, text: str) -> None:
    """Write a file that a person names, whole.

    Raises:
        ConfigurationError: Where that is not possible.
    """
    try:
        atomic_write(file, text)
    except (OSError, UnicodeEncodeError) as error:  # The latter for half a character.
        what = f"{describe_file(file)} cannot be written: {getattr(error, 'strerror', None) or describe_error(error)}."
        raise ConfigurationError(what, "Use a folder that is there and can be written.") from None


def save_files(folder: Path, texts: Mapping[str, str], what: str) -> None:
    """Write files by their names into a folder, each whole; the folder is made where it is not there.

    Raises:
        ConfigurationError: Where that is not possible.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            atomic_write(folder / name, text)
    except OSError as error:
        problem = f"{what} cannot be written into {describe_file(folder)}: {describe_error(error)}."
    else:
        return
    # Outside of the handler: the other error has the path, and would be the context of this one.
    raise ConfigurationError(problem, "Name a folder that can be written, on a disk with room.")
