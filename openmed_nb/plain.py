"""Frozen dataclasses of plain fields, to JSON and back, and the JSON Schema that says what they may hold: one source for all three."""

from __future__ import annotations

import inspect
import math
import os
import re
import stat
import tempfile
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Pattern:
    """What the texts of a field look like: ``Annotated[str, Pattern("^[0-9a-f]+$")]``."""

    expression: str

    def fits(self, text: str) -> bool:
        """Tell whether a text looks like that, to its last character."""
        return re.fullmatch(self.expression, text) is not None

    def schema(self) -> dict[str, Any]:
        """Return it as JSON Schema says it."""
        return {"pattern": self.expression}


@dataclass(frozen=True)
class Least:
    """The least number of a field: ``Annotated[int, Least(1)]``."""

    number: int

    def fits(self, number: float) -> bool:
        """Tell whether a number is as large as that."""
        return number >= self.number

    def schema(self) -> dict[str, Any]:
        """Return it as JSON Schema says it."""
        return {"minimum": self.number}


LARGEST = 1 << 64
"""Whole numbers must be smaller than this; seeds of torch are."""


def to_plain(value: Any) -> Any:
    """Return a value as mappings, lists, strings and numbers, ready for JSON.

    Example:
        >>> to_plain((Pattern("^a$"), None))
        [{'expression': '^a$'}, None]
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): to_plain(one) for name, one in value.items()}
    return [to_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def from_plain(kind: Any, stored: Any, place: str = "it") -> Any:
    """Return a value of a type, made of what JSON holds.

    Args:
        kind: A dataclass, or a type of its fields: ``str``, ``int``, ``float``, ``bool``, ``None``, ``Literal``, ``X | None``,
            ``tuple[X, ...]``, ``dict[str, X]``, ``Annotated[str, Pattern(...)]``
            or ``Annotated[int, Least(...)]``.
        stored: What is read.
        place: What it is called in an error; values of fields are never part of it.

    Raises:
        ValueError: Where it has other fields or holds other values.

    Example:
        >>> from_plain(Pattern, {"expression": 1})
        Traceback (most recent call last):
        ...
        ValueError: its expression cannot be int
    """
    if is_dataclass(kind):
        return _dataclass_from(kind, stored, place)
    reader = READERS.get(get_origin(kind))
    return _plain_from(kind, stored, place) if reader is None else reader(get_args(kind), stored, place)


def schema_of(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a type, the descriptions of fields taken from the docstrings.

    Example:
        >>> schema_of(tuple[int, ...])
        {'type': 'array', 'items': {'type': 'integer'}}
    """
    if is_dataclass(kind):
        hints, told = _hints(kind), attributes_of(kind)
        properties = {name: {**schema_of(hint), **_described(told.get(name))} for name, hint in hints.items()}
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    maker = SCHEMAS.get(get_origin(kind))
    return {"type": TYPES[kind]} if maker is None else maker(get_args(kind))


def attributes_of(kind: Any) -> dict[str, str]:
    """Return what the docstring of a class says of its attributes, marks of code left out.

    Example:
        >>> class Point:
        ...     '''A point.
        ...
        ...     Attributes:
        ...         rows: How many ``rows``
        ...             there are.
        ...     '''
        >>> attributes_of(Point)
        {'rows': 'How many rows there are.'}
    """
    told = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found = re.split(r"^    (\w+): ", told, flags=re.MULTILINE)[1:]
    return {name: " ".join(text.replace("``", "").split()) for name, text in zip(found[::2], found[1::2], strict=True)}


def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


def _described(text: str | None) -> dict[str, str]:
    return {"description": text} if text else {}


def _dataclass_from(kind: Any, stored: Any, place: str) -> Any:
    hints = _hints(kind)
    if not isinstance(stored, Mapping):
        raise ValueError(f"{place} cannot be {type(stored).__name__}")  # noqa: TRY004 - what is read is wrong, no argument
    if lacking := hints.keys() - stored.keys():
        raise ValueError(f"{place} has no {min(lacking)}")
    if len(stored) > len(hints):
        raise ValueError(f"{place} has fields of another kind")
    own = "its " if place == "it" else f"{place}."
    return kind(**{name: from_plain(hint, stored[name], f"{own}{name}") for name, hint in hints.items()})


def _plain_from(kind: Any, stored: Any, place: str) -> Any:
    accepted = (int, float) if kind is float else (kind,)
    if type(stored) not in accepted:
        raise ValueError(f"{place} cannot be {type(stored).__name__}")
    if isinstance(stored, float) and not math.isfinite(stored):
        raise ValueError(f"{place} is no finite number")
    if isinstance(stored, int) and abs(stored) >= LARGEST:
        raise ValueError(f"{place} is too large")
    if isinstance(stored, str) and not stored.isascii() and any("\ud800" <= one <= "\udfff" for one in stored):
        raise ValueError(f"{place} has half a character")
    return stored


def _optional_from(kinds: tuple[Any, ...], stored: Any, place: str) -> Any:
    return None if stored is None else from_plain(kinds[0], stored, place)


def _tuple_from(kinds: tuple[Any, ...], stored: Any, place: str) -> tuple[Any, ...]:
    items = _plain_from(list, stored, place)
    return tuple(from_plain(kinds[0], one, f"{place}[{number}]") for number, one in enumerate(items))


def _dict_from(kinds: tuple[Any, ...], stored: Any, place: str) -> dict[str, Any]:
    items = _plain_from(dict, stored, place)
    names = (_plain_from(str, name, f"a name of {place}") for name in items)
    return {name: from_plain(kinds[1], items[name], f"a value of {place}") for name in names}


def _literal_from(kinds: tuple[Any, ...], stored: Any, place: str) -> Any:
    if not isinstance(stored, str) or stored not in kinds:
        raise ValueError(f"{place} is none of {', '.join(kinds)}")
    return stored


def _rule_from(kinds: tuple[Any, ...], stored: Any, place: str) -> Any:
    kind, rule = kinds
    if not rule.fits(_plain_from(kind, stored, place)):
        raise ValueError(f"{place} does not look as it must")
    return stored


READERS: dict[Any, Callable[[tuple[Any, ...], Any, str], Any]] = {
    types.UnionType: _optional_from,
    Union: _optional_from,
    tuple: _tuple_from,
    dict: _dict_from,
    Literal: _literal_from,
    Annotated: _rule_from,
}
"""What makes a value of a field, by the origin of its type."""

TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
"""The names of plain types in JSON Schema."""

SCHEMAS: dict[Any, Callable[[tuple[Any, ...]], dict[str, Any]]] = {
    types.UnionType: lambda kinds: {"anyOf": [schema_of(kinds[0]), {"type": "null"}]},
    Union: lambda kinds: {"anyOf": [schema_of(kinds[0]), {"type": "null"}]},
    tuple: lambda kinds: {"type": "array", "items": schema_of(kinds[0])},
    dict: lambda kinds: {"type": "object", "additionalProperties": schema_of(kinds[1])},
    Literal: lambda kinds: {"enum": list(kinds)},
    Annotated: lambda kinds: {**schema_of(kinds[0]), **kinds[1].schema()},
}
"""The schema of a field, by the origin of its type; an optional one names its type first."""


def write_whole(file: Path, text: str) -> None:
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
