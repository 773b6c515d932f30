"""Telling a text that can be read from what cannot, without repeating a word of it."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from ..errors import UnreadableText


def check_text(text: object, name: str = "The text") -> None:
    r"""Check that a text can be read.

    Args:
        text: What should be a string.
        name: What it is called in the error.

    Raises:
        UnreadableText: For anything but a text, and for half of a surrogate pair, which no encoding can write.

    Example:
        >>> check_text("\ud800")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.UnreadableText: The text has half of a surrogate pair at character 0. Remove it, or read the file it comes from with its right encoding.
    """
    if not isinstance(text, str):
        path = "Pass paths in a list, such as sorted(folder.glob('*.txt'))."
        remedy = path if isinstance(text, PurePath) else "Pass a string, '' where there is no text."
        raise UnreadableText(f"{name} must be a string, not {type(text).__name__}.", remedy)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnreadableText(
            f"{name} has half of a surrogate pair at character {error.start}.",
            "Remove it, or read the file it comes from with its right encoding.",
        ) from None


def check_words(words: object, name: str) -> None:
    """Check that a text that is split into words is a list of strings that can be read.

    Raises:
        UnreadableText: Where it is not.

    Example:
        >>> check_words("asthma", "Text 3")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.UnreadableText: Text 3 must be a list of words, not str. Pass a list of strings.
    """
    if not isinstance(words, list):
        raise UnreadableText(f"{name} must be a list of words, not {type(words).__name__}.", "Pass a list of strings.")
    for word in words:
        check_text(word, f"A word of {name[0].lower()}{name[1:]}")


def unreadable(text: Any, number: int, split: bool) -> UnreadableText | None:
    """Return why the text of a number cannot be read, ``None`` where it can; what it failed with stands in its place."""
    if isinstance(text, UnreadableText):
        return text
    try:
        (check_words if split else check_text)(text, f"Text {number}")
    except UnreadableText as error:
        return error
    return None
