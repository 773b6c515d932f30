"""Checks of arguments, which refuse bad values with a :class:`~openmed_nb.errors.ConfigurationError`.

An argument may be a note that was passed in the wrong place, so an error shows a value as ``describe_value`` does.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, OpenMedError
from .text import describe_value, short_type_name


def check_not_shadowed(module: Any, needs: str, error: type[OpenMedError] = ConfigurationError) -> None:
    """Check that an imported module is the package of that name, and not a file of the person's own beside the notebook."""
    if not hasattr(module, needs):
        where = getattr(module, "__file__", None) or f"A module named {module.__name__!r} without a file"
        raise error(f"{where} hides the real {module.__name__}.", "Rename it, then restart the kernel.")


def invalid_value(name: str, value: Any, remedy: str) -> ConfigurationError:
    """Return the error for an argument that has a wrong value."""
    return ConfigurationError(f"{name} cannot be {describe_value(value)}.", remedy)


def invalid_type(name: str, value: Any, remedy: str) -> ConfigurationError:
    """Return the error for an argument of a wrong type, which does not show the value."""
    return ConfigurationError(f"{name} cannot be of type {short_type_name(value)}.", remedy)


def check_bool(name: str, value: Any) -> None:
    """Refuse what is not a bool: many values, such as tensors, are neither clearly true nor clearly false."""
    if not isinstance(value, bool):
        raise invalid_value(name, value, "Pass True or False.")


def as_integer(value: Any) -> int | None:
    """Return a whole number as Python's own, such as one of numpy; ``None`` for anything else, also for what is true or false."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def check_integer(name: str, value: Any, minimum: int = 1, maximum: int | None = None, otherwise: str = "") -> int:
    """Return a whole number that a person passes, as Python's own.

    Args:
        name: Which argument it is.
        value: What was passed.
        least: The smallest that will do.
        most: The largest that will do; ``None`` where any will.
        otherwise: What else will do, as the end of the remedy.

    Raises:
        ConfigurationError: For anything else.

    Example:
        >>> check_integer("batch_size", 0, maximum=4096)
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: batch_size cannot be 0. Pass a whole number from 1 to 4,096.
    """
    found = as_integer(value)
    if found is None or found < minimum or (maximum is not None and found > maximum):
        upwards = f"from {minimum:,}" + ("" if maximum is None else f" to {maximum:,}")
        raise invalid_value(name, value, f"Pass a whole number {upwards}{otherwise}.")
    return found


def check_optional_integer(
    name: str, value: Any, least: int = 1, most: int | None = None, otherwise: str = ""
) -> int | None:
    """Return a whole number as :func:`whole` does, or ``None`` where that was passed."""
    return None if value is None else check_integer(name, value, least, most, otherwise)


def check_number(
    name: str, value: Any, maximum: float = math.inf, *, above: float | None = None, example: str = ""
) -> float:
    """Return a finite number that a person passes, from 0, or above another.

    Args:
        name: Which argument it is.
        value: What was passed.
        most: The largest that will do.
        above: What it has to be above; ``None`` for any from 0.
        such_as: An example, for the remedy.

    Raises:
        ConfigurationError: For anything else.

    Example:
        >>> check_number("clip", 0, above=0, example="1.0, or None")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: clip cannot be 0. Pass a number above 0, such as 1.0, or None.
    """
    is_one = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_one or value > maximum or (value < 0 if above is None else value <= above):
        upwards = ("from 0" if above is None else f"above {above:g}") + (
            "" if maximum == math.inf else f" up to {maximum:g}"
        )
        example = f", such as {example}" if example else ""
        raise invalid_value(name, value, f"Pass a number {upwards}{example}.")
    return float(value)


def closest_match(word: str, words: Iterable[str], cutoff: float = 0.4) -> str:
    """Return the word that another was probably meant to be, empty where none is near.

    Example:
        >>> closest_match("cuad", ["cpu", "cuda"]), closest_match("xyz", ["cpu", "cuda"])
        ('cuda', '')
    """
    import difflib

    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff)), "")


def suggest(word: str, words: Iterable[str]) -> str:
    """Return what to do about an unknown word: pass the one that was probably meant, or else one of all that are known.

    Example:
        >>> suggest("cuad", ["cpu", "cuda"]), suggest("xyz", ["cpu", "cuda"])
        ("Did you mean 'cuda'?", 'Known are cpu, cuda.')
    """
    known = list(words)
    near = closest_match(word, known)
    return f"Did you mean {near!r}?" if near else f"Known are {', '.join(known)}."


def check_choice(name: str, value: Any, known: Iterable[str]) -> None:
    """Refuse what is not one of the words that an argument may be.

    Example:
        >>> check_choice("library", "trainr", ["trainer", "lightning"])
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: library cannot be 'trainr'. Did you mean 'trainer'?
    """
    words = list(known)
    if not isinstance(value, str) or value not in words:
        raise invalid_value(name, value, suggest(value if isinstance(value, str) else "", words))


def check_path(path: Any, what: str) -> Path:
    """Return a path that a person passes, with their home in the place of ``~``; nothing need be there."""
    reason = ""
    try:
        found = Path(path).expanduser()
        os.stat(found)  # noqa: PTH116 - it answers alike in every Python; Path.exists hides some errors in some
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text that names a file"
    if reason:  # Outside of the handler: the other error has the path, and would be the context of this one.
        unusable = f"What was passed as {what} is not a usable path: {reason}."
        raise ConfigurationError(unusable, "Pass another path.")
    return found
