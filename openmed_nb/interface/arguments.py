"""From the line behind a magic to its arguments; every mistake is one of our errors."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError
from IPython.utils.process import arg_split

from ..errors import MagicError, cause, shorten

QUOTED = re.compile(r"([\"'])(.*?)\1", flags=re.DOTALL)


def asked(magic: Callable[..., Any], line: str) -> argparse.Namespace | None:
    """Return the arguments of a magic; ``None`` where help was asked for, which is then printed.

    Args:
        magic: As for :func:`parse`.
        line: As for :func:`parse`.

    Raises:
        MagicError: As for :func:`parse`.
    """
    arguments = parse(magic, line)
    if not arguments.help:
        return arguments
    print(usage(magic))
    return None


def parse(magic: Callable[..., Any], line: str) -> argparse.Namespace:
    """Return the arguments of a magic.

    A comment and a semicolon at the end are left out, as Python would leave them out.

    Args:
        magic: The method, decorated with ``magic_arguments``.
        line: What stands behind the name of the magic.

    Raises:
        MagicError: For an argument that the magic does not have, or quotes that do not close. IPython's own
            ``UsageError`` prints a text and lets nbval pass.
    """
    parser: argparse.ArgumentParser = magic.parser  # type: ignore[attr-defined]  # set by magic_arguments
    try:
        arguments, others = parser.parse_known_args(words(line))
    except (UsageError, ValueError) as error:
        raise _mistake(magic, f"cannot read its line: {cause(error)}") from None
    options = [action.dest for action in parser._actions if action.option_strings]  # noqa: SLF001 - argparse has no name
    # What argparse makes of "--option=--": an empty list, and from Python 3.13 on the two dashes.
    if any(getattr(arguments, option) in ([], "--") for option in options):
        raise _mistake(magic, "got an option without its value")
    if others:
        raise _mistake(magic, _unknown(others), _nearest(others, parser))
    return arguments


def usage(magic: Callable[..., Any]) -> str:
    """Return the help of a magic, without the marks that IPython puts in front for its documentation."""
    return (magic.__doc__ or "").removeprefix("::").strip()


def words(line: str) -> list[str]:
    r"""Return the words of a line, without the quotes that hold a word with spaces together.

    A backslash is kept, because Windows writes paths with it.

    Example:
        >>> words("--model 'my models/mine' --device=\"cpu\" ; # the slow one")
        ['--model', 'my models/mine', '--device=cpu']
    """
    return [QUOTED.sub(r"\2", word) for word in arg_split(clean(line))]


def clean(line: str) -> str:
    """Return the line without a comment and a semicolon at its end.

    A comment starts with a number sign at the start or after white space, outside of quotes.

    Example:
        >>> clean("cpu;  # the slow one"), clean("--model 'a #b'")
        ('cpu', "--model 'a #b'")
    """
    quote = ""
    for index, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and (index == 0 or line[index - 1].isspace() or line[index - 1] == ";"):
            line = line[:index]
            break
    return line.strip().removesuffix(";").strip()


def _unknown(others: list[str]) -> str:
    """Name the first unknown flag; other words may be part of a note, so they are only counted."""
    flags = [word for word in others if word.startswith("-")]
    return f"has no option {shorten(flags[0])}" if flags else f"got {len(others)} words too many"


def _nearest(others: list[str], parser: argparse.ArgumentParser) -> str:
    """Return the option that the first unknown flag may have meant, empty where there is none like it."""
    import difflib

    options = [option for action in parser._actions for option in action.option_strings]  # noqa: SLF001
    flags = [word for word in others if word.startswith("-")]
    near = difflib.get_close_matches(flags[0], options, n=1) if flags else []
    return near[0] if near else ""


def _mistake(magic: Callable[..., Any], what: str, nearest: str = "") -> MagicError:
    name = f"%{magic.__name__}"
    remedy = f"Use {nearest}, or see {name} --help." if nearest else f"See {name} --help."
    return MagicError(f"{name} {what}.", remedy)
