"""Text for messages: one line, without control characters and without possible text of a note."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any


def collapse_whitespace(text: str) -> str:
    r"""Return the text with all consecutive white space, including line breaks, replaced by one space.

    Example:
        >>> collapse_whitespace("two\n  lines")
        'two lines'
    """
    return escape_control_characters(" ".join(text.split()))


def straighten_apostrophes(text: str) -> str:
    r"""Return the text with typewriter apostrophes, for comparisons. Its length stays the same.

    Example:
        >>> straighten_apostrophes("Crohn\u2019s, Crohn`s")
        "Crohn's, Crohn's"
    """
    for apostrophe in "\u2019\u2018`\u00b4":  # faster than str.translate
        text = text.replace(apostrophe, "'")
    return text


CONTROL_CHARACTER_SYMBOLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


def escape_control_characters(text: str) -> str:
    r"""Return the text with visible symbols for control characters, so that a note or a model cannot control the terminal.

    Example:
        >>> escape_control_characters("\x1b[2J cleared\r\n")
        '␛[2J cleared\n'
    """
    return text.replace("\r\n", "\n").translate(CONTROL_CHARACTER_SYMBOLS)


def shorten(text: str, length: int = 60) -> str:
    """Return a text in one line, truncated after ``length`` characters.

    Example:
        >>> shorten("a" * 70) == "a" * 60 + "…"
        True
    """
    line = collapse_whitespace(text)
    return line if len(line) <= length else line[:length] + "…"


# Maximum length of a string in an error, and of a string that consists of several names: a path, a Hub id, a class.
MAX_SHOWN_CHARACTERS = 40
MAX_COMPOUND_CHARACTERS = 160

# Strings that an error may contain: visible ASCII characters without spaces.
IDENTIFIER_PATTERN = re.compile(r"[!-~]*")
COMPOUND_PATTERN = re.compile(r"(<class ')?[/~.]*\w{1,40}([./\\:_-]+\w{1,40})+('>)?", re.ASCII)

# Word that does not have the form of an option, such as "--model".
NO_OPTION_PATTERN = re.compile(r"(?<!\S)(?!--[a-z-]+(?!\S))\S+")

# Quoted part of a message. An apostrophe inside a word is not a quotation mark.
QUOTED_PATTERN = re.compile(r"""(?<!\w)(?:[bru]{1,2}(?=['"]))?(['"`])(.*?)\1(?!\w)""", re.DOTALL)

# Quotation mark, without apostrophes inside a word.
QUOTATION_MARK_PATTERN = re.compile(r"""["`]|(?<!\w)'|'(?!\w)""")


def is_identifier(text: str) -> bool:
    """Return whether a text is short and without spaces, so that an error may contain it."""
    if len(text) <= MAX_SHOWN_CHARACTERS:
        return IDENTIFIER_PATTERN.fullmatch(text) is not None
    return len(text) <= MAX_COMPOUND_CHARACTERS and COMPOUND_PATTERN.fullmatch(text) is not None


def describe_value(value: Any) -> str:
    """Return a value for an error. A possible note is described and not quoted.

    ``None``, bools, numbers, and short ASCII strings and paths without spaces are quoted.

    Example:
        >>> describe_value("cuad"), describe_value(0.5), describe_value("Has asthma."), describe_value(["asthma"])
        ("'cuad'", '0.5', 'a string of 11 characters', 'a list of 1 item')
    """
    kind = type(value)
    if value is None or kind in {bool, int, float, complex, type(...), range}:
        # Python raises an error for the text of a very large integer.
        too_long = isinstance(value, int) and value.bit_length() > MAX_COMPOUND_CHARACTERS
        described = "" if too_long else repr(value)
        if too_long or len(described) > MAX_SHOWN_CHARACTERS:
            described = "a number with many digits"
    elif isinstance(value, (str, PurePath)):
        text = str.__str__(value) if isinstance(value, str) else str(value)
        noun = "string" if isinstance(value, str) else "path"
        described = (
            repr(text) if is_identifier(text) else f"a {noun} of {len(text):,} character{'' if len(text) == 1 else 's'}"
        )
    elif kind in {list, tuple, set, frozenset, dict}:
        described = f"a {kind.__name__} of {len(value):,} item{'' if len(value) == 1 else 's'}"
    elif kind in {bytes, bytearray}:
        described = f"{len(value):,} bytes"
    elif kind.__module__ == "torch" and kind.__name__ in {"dtype", "device"}:
        described = str(value)
    else:
        described = f"an object of type {short_type_name(value)}"
    return described


def describe_names(names: Iterable[str]) -> str:
    """Return names from a caller, such as columns, for an error. A possible note is replaced.

    Example:
        >>> describe_names(["speed", "Has asthma."])
        'speed, …'
    """
    return ", ".join(dict.fromkeys(name if is_identifier(name) else "…" for name in names))


def model_label(name: str) -> str:
    """Return the name of a model for progress events. A long name, or one with spaces, may be a note and is replaced."""
    return name if is_identifier(name) else "a model"


def describe_file(path: PurePath) -> str:
    """Return the name of a file for an error. A long name, or one with spaces, may be a note and is replaced.

    Example:
        >>> describe_file(PurePath("results.json")), describe_file(PurePath("Has asthma."))
        ("'results.json'", "'…'")
    """
    return repr(path.name) if is_identifier(path.name) else "'…'"


def short_type_name(value: object) -> str:
    """Return the name of the type of a value. A name that may be a text is replaced."""
    name = type(value).__name__
    return name if is_identifier(name) else "a class with a long name"


def without_quotes(message: str) -> str:
    """Return a message of another library without quoted parts that may be a note.

    Example:
        >>> without_quotes("invalid int value: 'Has asthma.'"), without_quotes("can't find 'cuda'")
        ("invalid int value: '…'", "can't find 'cuda'")
        >>> without_quotes('bad value "He said "very ill" today" at 3')
        'bad value … at 3'
    """
    if QUOTATION_MARK_PATTERN.search(QUOTED_PATTERN.sub("", message)):
        # The quotation marks are not balanced, so the text between any two of them may be quoted.
        marks = [match.span() for match in QUOTATION_MARK_PATTERN.finditer(message)]
        return f"{message[: marks[0][0]]}…{message[marks[-1][1] :]}"

    def replace_quoted(match: re.Match[str]) -> str:
        return match[0] if is_identifier(match[2]) else f"{match[1]}…{match[1]}"

    return QUOTED_PATTERN.sub(replace_quoted, message)


def parser_problem(message: str) -> str:
    """Return the message of argparse without the words of the parsed line, which may be part of a note.

    Example:
        >>> parser_problem("unrecognized arguments: asthma --modl"), parser_problem("argument --length: expected one argument")
        ('unexpected arguments: … --modl', 'argument --length: expected one argument')
    """
    kind, _, words = message.partition(": ")
    if kind == "unrecognized arguments":
        return f"unexpected arguments: {NO_OPTION_PATTERN.sub('…', words)}"
    return "an ambiguous option" if kind == "ambiguous option" else without_quotes(message)


def describe_error(error: BaseException) -> str:
    """Return the message of another library's error in one short line, without a period and without a possible note."""
    message = getattr(error, "strerror", None) or str(error)  # Without the number of the error and the path.
    return shorten(without_quotes(message), 200).rstrip(".") or short_type_name(error)
