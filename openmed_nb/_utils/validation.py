"""Validation of arguments. Invalid values raise :class:`~openmed_nb.errors.ConfigurationError`.

An argument may be a note that was passed in the wrong place, so errors contain the value as ``describe_value`` returns it.
"""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

from ..errors import ConfigurationError, OpenMedError
from .text import describe_file, describe_names, describe_value, is_identifier, short_type_name

# Number of values that an error lists without a guess: "other" is not what "mother" means.
MAX_LISTED = 3

# Number of words that an error contains, and similarity of the words that it suggests, in [0, 1].
MAX_SUGGESTIONS = 10
MIN_SIMILARITY = 0.55


def check_not_shadowed(module: ModuleType, attribute: str, error: type[OpenMedError] = ConfigurationError) -> None:
    """Raise an error if an imported module is a file of the user instead of the package with that name.

    Args:
        module: The imported module.
        attribute: Name of an attribute of the package.
        error: Type of the error.
    """
    if not hasattr(module, attribute):
        location = getattr(module, "__file__", None) or f"A module named {module.__name__!r} without a file"
        raise error(f"{location} shadows the package {module.__name__}.", "Rename it, then restart the kernel.")


def invalid_value(name: str, value: object, remedy: str) -> ConfigurationError:
    """Return the error for an argument with an invalid value."""
    return ConfigurationError(f"Invalid value for {name}: {describe_value(value)}.", remedy)


def invalid_type(name: str, value: object, remedy: str) -> ConfigurationError:
    """Return the error for an argument with an invalid type. It does not contain the value."""
    return ConfigurationError(f"Invalid type for {name}: {short_type_name(value)}.", remedy)


def check_bool(name: str, value: object) -> None:
    """Raise an error if a value is not a bool. The truth value of other types, such as tensors, can be ambiguous."""
    if not isinstance(value, bool):
        raise invalid_value(name, value, "Pass True or False.")


def is_hashable(value: Any) -> bool:
    """Return whether a value has a hash. A tuple with a list inside does not, although its type defines ``__hash__``."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def as_integer(value: Any) -> int | None:
    """Return an integer, such as one of numpy, as ``int``, or ``None`` for any other value, including bools."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def check_integer(name: str, value: object, minimum: int = 1, maximum: int | None = None, otherwise: str = "") -> int:
    """Validate an integer argument.

    Args:
        name: Name of the argument.
        value: Value of the argument.
        minimum: Minimum value.
        maximum: Maximum value. If ``None``, there is no maximum.
        otherwise: Alternative to an integer, as the end of the remedy.

    Returns:
        The value as ``int``.

    Raises:
        ConfigurationError: If the value is not an integer in the range.

    Example:
        >>> check_integer("batch_size", 0, maximum=4096)
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: Invalid value for batch_size: 0. Pass an integer from 1 to 4,096.
    """
    number = as_integer(value)
    if number is None or number < minimum or (maximum is not None and number > maximum):
        valid_range = f"from {minimum:,}" + ("" if maximum is None else f" to {maximum:,}")
        raise invalid_value(name, value, f"Pass an integer {valid_range}{otherwise}.")
    return number


def check_optional_integer(
    name: str, value: object, minimum: int = 1, maximum: int | None = None, otherwise: str = ""
) -> int | None:
    """Validate an integer argument as in :func:`check_integer`, which may be ``None``."""
    return None if value is None else check_integer(name, value, minimum, maximum, otherwise)


def is_finite_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number, except for bools, that is finite as a float.

    ``math.isfinite`` raises an error for an integer that is too large for a float.
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def check_number(
    name: str, value: object, maximum: float = math.inf, *, above: float | None = None, example: str = ""
) -> float:
    """Validate a finite number.

    Args:
        name: Name of the argument.
        value: Value of the argument.
        maximum: Maximum value.
        above: Exclusive minimum. If ``None``, the minimum is 0.
        example: Example of a valid value for the remedy.

    Returns:
        The value as ``float``.

    Raises:
        ConfigurationError: If the value is not a finite number in the range.

    Example:
        >>> check_number("max_norm", 0, above=0, example="1.0, or None")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: Invalid value for max_norm: 0. Pass a number above 0, such as 1.0, or None.
    """
    if not is_finite_number(value) or value > maximum or (value < 0 if above is None else value <= above):
        lower = "from 0" if above is None else f"above {above:g}"
        upper = "" if maximum == math.inf else f" up to {maximum:g}"
        example = f", such as {example}" if example else ""
        raise invalid_value(name, value, f"Pass a number {lower}{upper}{example}.")
    return float(value)


def _closest_matches(word: str, words: Iterable[str]) -> list[str]:
    """Return the similar words that an error may contain, the nearest first, without regard to case."""
    import difflib

    names = {name.casefold(): name for name in words if is_identifier(name)}
    return [
        names[match] for match in difflib.get_close_matches(word.casefold(), names, MAX_SUGGESTIONS, MIN_SIMILARITY)
    ]


def suggest_one(word: str, words: Iterable[str]) -> str:
    """Return a question with the most similar word, or an empty string if no word is similar enough.

    Example:
        >>> suggest_one("CUAD", ["cpu", "cuda"]), suggest_one("xyz", ["cpu", "cuda"])
        ("Did you mean 'cuda'?", '')
    """
    return "".join(f"Did you mean {match!r}?" for match in _closest_matches(word, words)[:1])


def suggest_folder(path: str) -> str:
    """Return a question with the folder beside a path whose name is the most similar, or an empty string.

    Args:
        path: Path that does not exist.
    """
    root, name = os.path.split(path)
    try:
        with os.scandir(root or ".") as entries:
            return suggest_one(name, [entry.name for entry in entries if entry.is_dir()])
    except (OSError, ValueError):  # The parent folder does not exist or cannot be read.
        return ""


def check_folder_of(path: Path) -> None:
    """Raise an error if the folder of a file to write does not exist."""
    if not path.parent.is_dir():
        remedy = suggest_folder(str(path.parent)) or "Create it, or use another folder."
        raise ConfigurationError(f"There is no folder {describe_file(path.parent)}.", remedy)


def suggest(word: str, words: Iterable[str], noun: str = "Valid values") -> str:
    """Return the remedy for an invalid word: the most similar valid word, and up to ten valid words, the nearest first.

    Args:
        word: The invalid word.
        words: The valid words.
        noun: Plural noun for the valid words.

    Example:
        >>> suggest("cuad", ["cpu", "cuda"]), suggest("xyz", ["cpu", "cuda"])
        ("Did you mean 'cuda'? Valid values: cuda, cpu.", 'Valid values: cpu, cuda.')
    """
    valid_words = list(words)
    more = ", …" if len(valid_words) > MAX_SUGGESTIONS else ""
    distinct = list(dict.fromkeys([*_closest_matches(word, valid_words), *valid_words]))[:MAX_SUGGESTIONS]
    return f"{suggest_one(word, valid_words)} {noun}: {describe_names(distinct)}{more}.".lstrip()


def check_names(subject: str, names: Iterable[str], valid_names: Iterable[str], noun: str = "Valid values") -> None:
    """Raise an error for the first name that is not valid.

    Example:
        >>> check_names("an option of annotate()", ["batchsize"], ["batch_tokens", "batch_size"], "Options")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: 'batchsize' is not an option of annotate(). Did you mean 'batch_size'? \
Options: batch_size, batch_tokens.
    """
    valid = list(valid_names)
    for name in names:
        if name not in valid:
            raise ConfigurationError(f"{describe_value(name)} is not {subject}.", suggest(name, valid, noun))


def check_choice(name: str, value: object, words: Iterable[str]) -> None:
    """Raise an error if a value is not one of the valid words of an argument.

    Example:
        >>> check_choice("library", "trainr", ["trainer", "lightning"])
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: Invalid value for library: 'trainr'. Valid values: trainer, lightning.
    """
    valid_words = list(words)
    if not isinstance(value, str) or value not in valid_words:
        word = value if isinstance(value, str) and len(valid_words) > MAX_LISTED else ""
        raise invalid_value(name, value, suggest(word, valid_words))


def check_path(path: str | os.PathLike[str], name: str) -> Path:
    """Validate a path argument.

    Args:
        path: The path. It does not need to exist.
        name: Name of the argument.

    Returns:
        The path with ``~`` replaced by the home directory.

    Raises:
        ConfigurationError: If the value is not a valid path.
    """
    reason = ""
    try:
        expanded = Path(path).expanduser()
        os.stat(expanded)  # noqa: PTH116 - Path.exists hides some errors in some versions of Python
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        reason = getattr(error, "strerror", None) or "not the name of a file or directory"
    if reason:  # Outside the handler, because the original error contains the path and would become the context.
        raise ConfigurationError(f"Invalid path for {name}: {reason}.", "Pass another path.")
    return expanded
