"""Detection of texts that are not in English, which is the only language of the included models.

The fraction of words that the tokenizer splits does not tell languages apart: it is 75% in a line of English abbreviations, and
44% in French. The words below are rare in English notes. Words in capitals, such as DES and LE, are abbreviations, and short
Greek ones are symbols.
"""

from __future__ import annotations

import re
import unicodedata

# Frequent words of English, and of German, French, Spanish, Portuguese, Italian and Dutch.
_ENGLISH_WORDS = "a and are at for had has he her his in is no not of on or she the to was with"
_OTHER_WORDS = (
    "de der das und mit ist bei wegen keine kein eine einer seit von dem den zur wurde nach nicht auf "
    "le les des une et du avec pour dans sans pas est aux sur depuis "
    "el las con por una sin sem com dos uma di il che nel della non het een van met geen"
)
_LAST_LATIN_LETTER = "\u024f"
_SYMBOL = re.compile("[A-Z]{2,}|[\u0370-\u03ff]{1,2}")


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
