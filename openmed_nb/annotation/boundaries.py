"""Words of a text: their boundaries and those of lines, for entities, masking and sentences, and whether they are English."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterator

# Zero-width joiner, which combines emoji.
JOINER = "\u200d"

# Scripts without spaces between words: Thai, Lao, Myanmar and Khmer, and the range from the Han radicals to the ideographs
# (including Hiragana, Katakana and Bopomofo), their compatibility forms, and the supplementary Han planes.
UNSPACED_SCRIPTS = re.compile(
    r"[\u0E00-\u0EFF\u1000-\u109F\u1780-\u17FF\u2E80-\u9FFF\uF900-\uFAFF\U00020000-\U0003FFFF]"
)

# Characters that join two letters or two digits into one word, according to UAX #29 (classes MidLetter, MidNum, MidNumLet
# and Single_Quote). Two characters differ from UAX #29: the colon separates words, because notes use it between a name and
# its value ("Patient:Smith"), and the quotation mark joins letters of every script, not only Hebrew.
# https://www.unicode.org/reports/tr29/#Word_Boundaries
MID_NUM_LETTERS = frozenset(".'\u2018\u2019\u2024\ufe52\uff07\uff0e")
MID_LETTERS = MID_NUM_LETTERS | frozenset('\u00b7\u0387\u055f\u05f4\u2027"')
MID_DIGITS = MID_NUM_LETTERS | frozenset(
    ",;\u037e\u0589\u060c\u060d\u066c\u07f8\u2044\ufe10\ufe14\ufe50\ufe54\uff0c\uff1b"
)

# A line break, or the tag of one. CRLF is one line break.
_LINE_BREAK = r"(?:[\n\v\f\x1c-\x1e\x85\u2028\u2029]|\r(?!\n)|<[Bb][Rr]\s?/?>)"

# A wrapped line continues with a lower-case letter (Latin, Greek or Cyrillic), except for bullets and enumerations such as "o" and "b)".
_CONTINUATION = r"\s*(?!(?:o|[a-z][.)])\s)[a-z\u00df-\u00f6\u00f8-\u00ffąćčďđęěğłńňřśšşťůźżžά-ώа-џ]"

# End of a line that ends sentences and entities, with the white space around it and the bullet or number of the next line: a line
# break that no wrapped line follows, a blank line, or the gap between two columns, except after the colon of a heading. Matches do not
# start inside of white space, where the search would take quadratic time.
LINE_END = re.compile(
    rf"(?=[\s<])(?<!\s)(?:\s*{_LINE_BREAK}(?:(?!{_CONTINUATION})|\s*{_LINE_BREAK})"
    rf"|(?<!:)(?!{_CONTINUATION})\s*(?:\t|[ \xa0]{{3}}))\s*(?:(?:[-*o\u00b7\u2013\u2014\u2022]|(?:[a-z]|\d{{1,2}})[.)])\s+)?"
)

# Number of characters after a letter that show whether it is a bullet.
NUM_BULLET_CHARACTERS = 2

# If a tokenizer drops this character, the word continues after it, so the rest of a name could follow.
REPLACEMENT_CHARACTER = "\ufffd"


def is_ignorable(character: str) -> bool:
    """Return whether word segmentation ignores a character (mark, soft hyphen, zero-width or control character)."""
    category = unicodedata.category(character)
    if category == "Cc":
        return not character.isspace()
    return category == "Cf" or category.startswith("M") or character == REPLACEMENT_CHARACTER


@functools.lru_cache(maxsize=1 << 16)
def is_separator(code: int) -> bool:
    """Return whether a code point is never inside a word of several tokens (white space, punctuation or an ideograph)."""
    character = chr(code)
    if UNSPACED_SCRIPTS.match(character):
        return True
    return not (character.isalnum() or is_ignorable(character))


def split_lines(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    r"""Yield the parts of a span between the line ends in it.

    Example:
        >>> list(split_lines("No fever\nAsthma", 3, 15)), list(split_lines("Has breast\ncancer", 4, 17))
        ([(3, 8), (9, 15)], [(4, 17)])
    """
    for match in find_line_ends(text, start, end):
        if start < match.start():
            yield start, match.start()
        start = match.end()
    if start < end:
        yield start, end


def find_line_ends(text: str, start: int, end: int) -> Iterator[re.Match[str]]:
    """Yield the line ends that start in a span. The pattern sees the characters that follow, such as the ")" of a bullet."""
    for match in LINE_END.finditer(text, start, end + NUM_BULLET_CHARACTERS):
        if match.start() < end:
            yield match


def strip_span(text: str, start: int, end: int) -> tuple[int, int]:
    """Return a span without surrounding white space."""
    span = text[start:end]
    start += len(span) - len(span.lstrip())
    return start, max(start, end - len(span) + len(span.rstrip()))


def whole_words(text: str, start: int, end: int) -> tuple[int, int]:
    """Return a span without surrounding white space, extended to whole words.

    Words follow UAX #29, with the exceptions documented in this module. A span is not extended in scripts without spaces
    between words, because a whole sentence would count as one word.

    Example:
        >>> whole_words("by O'Brien-Lee", 5, 10), whole_words("by Schmi\u00addt", 2, 8)
        ((3, 10), (3, 11))
    """
    start, end = strip_span(text, max(0, start), min(len(text), end))
    if start == end:
        return start, end
    while start > 0 and is_inside_word(text, start):
        start = max(0, _previous_base(text, start))
    while end < len(text) and is_inside_word(text, end):
        end = _next_base(text, end + 1)
    return start, end


def _previous_base(text: str, position: int) -> int:
    """Return the index of the last character before a position that is not ignorable, or -1."""
    position -= 1
    while position >= 0 and is_ignorable(text[position]):
        position -= 1
    return position


def _next_base(text: str, position: int) -> int:
    """Return the index of the first character at or after a position that is not ignorable, or the text length."""
    while position < len(text) and is_ignorable(text[position]):
        position += 1
    return position


def is_inside_word(text: str, position: int) -> bool:
    """Return whether a position is inside a word, or between a character and its combining marks."""
    before = _previous_base(text, position)
    if before < 0:
        return False
    left = text[before]
    right = text[position]
    if is_ignorable(right) or (text[position - 1] == JOINER and not right.isspace()):
        return not left.isspace()
    if _is_word_character(left) and _is_word_character(right):
        return True
    after = _next_base(text, position + 1)
    if after < len(text) and _joins(left, right, text[after]):
        return True
    earlier = _previous_base(text, before)
    return earlier >= 0 and _joins(text[earlier], left, right)


def _is_word_character(character: str) -> bool:
    return character == "_" or (character.isalnum() and not UNSPACED_SCRIPTS.match(character))


def _joins(left: str, middle: str, right: str) -> bool:
    """Return whether the middle character joins its neighbors into one word."""
    if UNSPACED_SCRIPTS.match(left) or UNSPACED_SCRIPTS.match(right):
        return False
    if left.isalpha() and right.isalpha():
        return middle in MID_LETTERS
    return left.isnumeric() and right.isnumeric() and middle in MID_DIGITS


# Frequent words of English, and those of German, French, Spanish, Portuguese, Italian and Dutch that are rare in English notes. The
# fraction of words that the tokenizer splits does not tell languages apart: it is 75% in a line of English abbreviations, and 44%
# in French.
_ENGLISH_WORDS = "a and are at for had has he her his in is no not of on or she the to was with"
_OTHER_WORDS = (
    "de der das und mit ist bei wegen keine kein eine einer seit von dem den zur wurde nach nicht auf "
    "le les des une et du avec pour dans sans pas est aux sur depuis "
    "el las con por una sin sem com dos uma di il che nel della non het een van met geen"
)
_LAST_LATIN_LETTER = "\u024f"

# Words in capitals, such as DES and LE, are abbreviations, and short Greek ones are symbols.
_SYMBOL = re.compile("[A-Z]{2,}|[\u0370-\u03ff]{1,2}")


# UTF-8 that was read as cp1252 or ISO 8859-1, such as "Ã©" for "é" and "â€™" for an apostrophe.
MISREAD = re.compile("Ã[\x80-\xbf\u0152-\u2122]|â€")


def is_other_language(text: str) -> bool:
    """Return whether a text has more distinct words of other languages and scripts, or with accents, than words of English.

    Example:
        >>> texts = "Keine Hinweise auf eine Meningitis.", "喘息の既往。2年前。", "Hx: Ménière disease.", "Asthma"
        >>> [is_other_language(text) for text in texts]
        [True, True, False, False]
    """
    words = re.findall(r"[^\W\d_]+", unicodedata.normalize("NFKC", text))  # PDF files have ligatures.
    words = [word.lower() for word in words if not _SYMBOL.fullmatch(word)]
    other_words = {word for word in words if word in _OTHER_WORDS.split() or word[0] > _LAST_LATIN_LETTER}
    accented_words = {word for word in words if not word.isascii()}
    num_english = len([word for word in words if word in _ENGLISH_WORDS.split()])
    return len(other_words) > 0 and len(other_words | accented_words) > max(1, num_english)
