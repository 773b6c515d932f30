"""Which texts can be read, and what is said of the others without repeating a word of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from openmed_nb.annotation.stream import unreadable
from openmed_nb.errors import UnreadableText

WHOLE = some.text(some.characters(exclude_categories=["Cs"]), max_size=20)
NO_TEXT = [None, float("nan"), 5, b"asthma", ["asthma"], {"note": "asthma"}, np.array(["asthma"])]


class UsersString(str):
    """A string of a class of its own, as some libraries give."""

    __slots__ = ()


@given(WHOLE, some.lists(WHOLE, max_size=5))
def test_every_text_that_can_be_encoded_is_read(text, words):
    """Every string without half of a surrogate pair can be read, whole or as one of some words."""
    assert unreadable(text, 0, split=False) is None
    assert unreadable(words, 0, split=True) is None


@pytest.mark.parametrize("text", ["", " ", "\0", "\n", UsersString("asthma"), np.str_("asthma")], ids=repr)
def test_unusual_strings_are_read(text):
    """Empty strings, control characters and strings of other classes can be read."""
    assert unreadable(text, 0, split=False) is None


def test_path_that_is_no_text():
    """A path in a stream is no text, and how to pass paths is said."""
    said = str(unreadable(Path("notes/smith.txt"), 3, split=False))

    assert said.startswith("Text 3 must be a string, not ")
    assert said.endswith("Path. Pass paths in a list, such as sorted(folder.glob('*.txt')).")


@pytest.mark.parametrize("text", NO_TEXT, ids=lambda text: type(text).__name__)
def test_what_is_no_text_is_named_by_number_and_type(text):
    """What is no string is refused by its number and type, with what to put in the place of a missing one."""
    said = str(unreadable(text, 12, split=False))

    assert said == f"Text 12 must be a string, not {type(text).__name__}. Pass a string, '' where there is no text."
    assert "asthma" not in said


@given(before=WHOLE, half=some.integers(0xD800, 0xDFFF), after=WHOLE)
def test_half_of_a_surrogate_pair_is_named_by_its_place(before, half, after):
    """A text with half of a surrogate pair is refused by number and place, and its words are not repeated."""
    error = unreadable(f"secret{before}{chr(half)}{after}", 3, split=False)

    assert error.what == f"Text 3 has half of a surrogate pair at character {len('secret' + before)}."
    assert "secret" not in str(error)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("asthma", "Text 7 must be a list of words, not str."),
        (("asthma",), "Text 7 must be a list of words, not tuple."),
        (None, "Text 7 must be a list of words, not NoneType."),
        (["the", None], "A word of text 7 must be a string, not NoneType."),
        (["the", "\udc00"], "A word of text 7 has half of a surrogate pair at character 0."),
        (["the", ["asthma"]], "A word of text 7 must be a string, not list."),
    ],
    ids=ascii,
)
def test_what_is_no_list_of_words_is_named(words, what):
    """A text that is split into words must be a list of strings that can be read; anything else is named."""
    assert unreadable(words, 7, split=True).what == what


def test_why_a_text_could_not_be_read_stays():
    """In the place of a text that could not be read stands why, and that is the answer."""
    failure = UnreadableText("Text 3: its file cannot be read.", "Make it readable.")

    assert unreadable(failure, 3, split=False) is failure
