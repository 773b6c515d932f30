"""From the line behind a magic to its arguments; every mistake is one of our errors."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import parse_argstring

from ..errors import MagicError, shorten


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
    name = f"%{magic.__name__}"
    try:
        arguments: argparse.Namespace = parse_argstring(magic, clean(line))
    except (UsageError, ValueError) as error:
        raise MagicError(f"{name} does not understand {shorten(line)!r}: {error}.", f"See {name} --help.") from None
    return arguments


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
