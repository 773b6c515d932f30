"""Where words begin and end: for tokens, whose labels become those of words, and for masking, which never cuts a word."""

from __future__ import annotations

import functools
import re
import unicodedata

JOINER = "\u200d"  # of emoji

# The scripts in which words have no spaces between them: Thai, Lao, Myanmar, Khmer; and from the radicals of Han to the
# ideographs with Hiragana, Katakana and Bopomofo, their compatibility forms and the planes of Han.
UNSPACED_SCRIPTS = re.compile(
    r"[\u0E00-\u0EFF\u1000-\u109F\u1780-\u17FF\u2E80-\u9FFF\uF900-\uFAFF\U00020000-\U0003FFFF]"
)

# Characters that join two letters or two digits to one word, by UAX #29 (classes MidLetter, MidNum, MidNumLet and
# Single_Quote). Two are different: the colon separates, because in notes it stands between a name and its value
# ("Patient:Smith"), and the quotation mark joins letters of every script, not only Hebrew ones.
# https://www.unicode.org/reports/tr29/#Word_Boundaries
BETWEEN_BOTH = frozenset(".'\u2018\u2019\u2024\ufe52\uff07\uff0e")
BETWEEN_LETTERS = BETWEEN_BOTH | frozenset('\u00b7\u0387\u055f\u05f4\u2027"')
BETWEEN_DIGITS = BETWEEN_BOTH | frozenset(
    ",;\u037e\u0589\u060c\u060d\u066c\u07f8\u2044\ufe10\ufe14\ufe50\ufe54\uff0c\uff1b"
)

# Where a tokenizer drops such a character, its word continues, so a rest of a name could stand behind it.
REPLACEMENT_CHARACTER = "\ufffd"


def is_combining_mark(character: str) -> bool:
    """Return whether a character is an accent or another mark of the letter before it."""
    return unicodedata.category(character).startswith("M")


def is_ignorable(character: str) -> bool:
    """Return whether word boundaries ignore a character: marks, soft hyphens, zero-width and control characters."""
    category = unicodedata.category(character)
    if category == "Cc":
        return not character.isspace()
    return category == "Cf" or category.startswith("M") or character == REPLACEMENT_CHARACTER


@functools.lru_cache(maxsize=1 << 16)
def is_separator(code: int) -> bool:
    """Return whether a code point is never inside a word of several tokens: white space, punctuation, an ideograph."""
    character = chr(code)
    if UNSPACED_SCRIPTS.match(character):
        return True
    return not (character.isalnum() or is_ignorable(character))


def whole_words(text: str, start: int, end: int) -> tuple[int, int]:
    """Return a span without white space at its ends, extended to whole words.

    Words are those of UAX #29, with the exceptions above. In scripts without spaces between words, nothing is extended: a
    whole sentence would be one.

    Example:
        >>> whole_words("by O'Brien-Lee", 5, 10), whole_words("by Schmi\u00addt", 2, 8)
        ((3, 10), (3, 11))
    """
    start = max(0, start)
    end = min(len(text), end)
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    if start == end:
        return start, end
    while start > 0 and _is_inside_word(text, start):
        start = max(0, _base_before(text, start))
    while end < len(text) and _is_inside_word(text, end):
        end = _base_from(text, end + 1)
    return start, end


def _base_before(text: str, position: int) -> int:
    """Return the position of the last character before a position that is not ignorable, -1 if there is none."""
    position -= 1
    while position >= 0 and is_ignorable(text[position]):
        position -= 1
    return position


def _base_from(text: str, position: int) -> int:
    """Return the first position, from a position on, of a character that is not ignorable; the length if there is none."""
    while position < len(text) and is_ignorable(text[position]):
        position += 1
    return position


def _is_inside_word(text: str, position: int) -> bool:
    """Return whether a position is inside a word, or between a character and its marks."""
    before = _base_before(text, position)
    if before < 0:
        return False
    left = text[before]
    right = text[position]
    if is_ignorable(right) or text[position - 1] == JOINER:
        return not left.isspace()
    if _is_word_character(left) and _is_word_character(right):
        return True
    after = _base_from(text, position + 1)
    if after < len(text) and _joins(left, right, text[after]):
        return True
    earlier = _base_before(text, before)
    return earlier >= 0 and _joins(text[earlier], left, right)


def _is_word_character(character: str) -> bool:
    return character == "_" or (character.isalnum() and not UNSPACED_SCRIPTS.match(character))


def _joins(left: str, middle: str, right: str) -> bool:
    """Return whether a character between two others makes one word of them."""
    if UNSPACED_SCRIPTS.match(left) or UNSPACED_SCRIPTS.match(right):
        return False
    if left.isalpha() and right.isalpha():
        return middle in BETWEEN_LETTERS
    return left.isnumeric() and right.isnumeric() and middle in BETWEEN_DIGITS
