"""Tokens of many texts from those of their words: a BERT tokenizer is asked once for each different word.

Such a tokenizer cuts a text at white space and punctuation, and then each word by itself. So all texts of a chunk are cut by
arithmetic over their characters, and each word is looked up by a key. What a character is to the tokenizer, the tokenizer
says itself. The tokenizers library reads the texts that have an added token, a very long word, or a character that is not of
Western Europe's code page or that the tokenizer leaves out or changes to several.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import numpy as np

from ..devices.backend import TOKENIZER_LOCK
from .tokens import PART, Tokens, encode, positions, prefix_of, tokenise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


FEWEST_CHARACTERS = 4096  # For less text the library is quicker.
LONGEST_WORD = 100
REMEMBERED = 1 << 16  # After about so many words, all are forgotten.
MOST_ADDED = 32  # Texts are searched for each added token; with more of them the library is quicker.
TOGETHER = 64  # So many new words are tokenised as one text, because each text takes longer than a word.

# What a character can be to a tokenizer; a mark is a word of its own.
SPACE, LETTER, MARK, OTHER = range(4)


def serves(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether a tokenizer cuts texts into words as BERT's does."""
    backend = tokenizer.backend_tokenizer
    parts = [type(part).__name__ for part in (backend.normalizer, backend.pre_tokenizer, backend.model)]
    added = tokenizer.added_tokens_decoder.values()
    return (
        parts == ["BertNormalizer", "BertPreTokenizer", "WordPiece"]
        and prefix_of(tokenizer) is not None
        and len(added) <= MOST_ADDED
        and not any(token.normalized or any(map(str.isspace, token.content)) for token in added)
    )


@dataclass(frozen=True)
class Pieces:
    """The tokens of words; ``W`` words, ``P`` tokens."""

    keys: np.ndarray  # (W,) uint64, ascending
    firsts: np.ndarray  # (W,) int64, the first token of each word
    counts: np.ndarray  # (W,) int64
    ids: np.ndarray  # (P,) int64
    starts: np.ndarray  # (P,) int64, in characters of the word
    ends: np.ndarray  # (P,) int64

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of the word of each key, and whether there is one."""
        numbers = np.searchsorted(self.keys, keys)
        found = self.keys.take(numbers, mode="clip") == keys if len(self.keys) else np.zeros(len(keys), bool)
        return numbers, found

    def with_words(self, tokenizer: PreTrainedTokenizerBase, keys: np.ndarray, words: Sequence[str]) -> Pieces:
        """Return the tokens of more words too."""
        texts = [" ".join(words[place : place + TOGETHER]) for place in range(0, len(words), TOGETHER)]
        encodings = encode(tokenizer, texts)
        ids = np.fromiter(chain.from_iterable(encoding.ids for encoding in encodings), np.int64)
        offsets = np.fromiter(chain.from_iterable(chain.from_iterable(one.offsets for one in encodings)), np.int64)
        # As characters of all words in a row, with a space after each.
        begins = np.array([0, *accumulate(len(word) + 1 for word in words)])
        spans = offsets.reshape(-1, 2) + np.repeat(begins[:-1:TOGETHER], [*map(len, encodings)])[:, None]
        bounds = np.searchsorted(spans[:, 0], begins)
        spans -= np.repeat(begins[:-1], np.diff(bounds))[:, None]
        keys = np.append(self.keys, keys)
        order = np.argsort(keys)
        return Pieces(
            keys[order],
            np.append(self.firsts, bounds[:-1] + len(self.ids))[order],
            np.append(self.counts, np.diff(bounds))[order],
            np.append(self.ids, ids),
            np.append(self.starts, spans[:, 0]),
            np.append(self.ends, spans[:, 1]),
        )


NONE = Pieces(np.zeros(0, np.uint64), *[np.zeros(0, np.int64)] * 5)


class Lexicon:
    """What a tokenizer makes of the words of one call; another call does not know the words of its texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._known = NONE  # Replaced as a whole, because other threads of a worker read it too.

    @functools.cached_property
    def alphabet(self) -> tuple[np.ndarray, np.ndarray]:
        """What each character of the code page is, and what the tokenizer changes it to, 0 for none; each uint8 of ``(256,)``."""
        backend = self.tokenizer.backend_tokenizer
        kinds, folded = np.full(256, OTHER, np.uint8), np.zeros(256, np.uint8)
        for code in range(1, 256):
            character = backend.normalizer.normalize_str(bytes([code]).decode("cp1252", "ignore"))
            if len(as_bytes := western_bytes(character)) == 1:
                words = backend.pre_tokenizer.pre_tokenize_str(f"a{character}a")
                kinds[code] = {1: LETTER, 2: SPACE, 3: MARK}[len(words)]
                folded[code] = 0 if kinds[code] == SPACE else as_bytes[0]
        return kinds, folded

    def tokens(self, texts: Sequence[str]) -> Tokens:
        """Return the tokens of texts, one sequence for each."""
        sizes = np.array([*map(len, texts)])
        if sizes.sum() < FEWEST_CHARACTERS or sizes.max() > PART:
            return tokenise(self.tokenizer, texts)
        each = [western_bytes(text) for text in texts]
        joined = b" ".join(each)
        begins = np.array([0, *accumulate(len(text) + 1 for text in each)])
        codes, (kinds, folded) = np.frombuffer(joined, np.uint8), self.alphabet
        firsts, lasts = words_in(kinds[codes])
        odd = [np.flatnonzero(kinds[codes] == OTHER), firsts[lasts - firsts > LONGEST_WORD], self._added(joined)]
        by_library = np.diff(begins) - 1 != sizes
        by_library[owners(np.concatenate(odd), begins)] = True
        kept = ~by_library[owners(firsts, begins)]
        if not kept.any():
            return tokenise(self.tokenizer, texts)
        keys = keys_of(folded[codes], firsts)[kept]
        firsts, lasts = firsts[kept], lasts[kept]
        known, numbers = self._looked_up(joined, firsts, lasts, keys)
        counts, bounds = known.counts[numbers], np.searchsorted(firsts, begins)
        places = positions(known.firsts[numbers], known.firsts[numbers] + counts)
        starts, words = known.starts[places], np.repeat(firsts - begins[owners(firsts, begins)], counts)
        tokens = Tokens(
            known.ids[places],
            starts + words,
            known.ends[places] + words,
            starts > 0,
            np.append(0, np.cumsum(counts))[bounds],
            np.arange(len(texts)),
        )
        if not by_library.any():
            return tokens
        return merged(
            tokens,
            tokenise(self.tokenizer, [texts[number] for number in np.flatnonzero(by_library).tolist()]),
            by_library,
        )

    def _looked_up(
        self, joined: bytes, firsts: np.ndarray, lasts: np.ndarray, keys: np.ndarray
    ) -> tuple[Pieces, np.ndarray]:
        """Return the tokens of words, among them these, and the number of each."""
        known = self._known
        numbers, found = known.find(keys)
        if found.all():
            return known, numbers
        with TOKENIZER_LOCK:  # Another thread may have learnt the words meanwhile.
            known = self._known if len(self._known.keys) <= REMEMBERED else NONE
            missing = np.flatnonzero(~known.find(keys)[1])
            new, places = np.unique(keys[missing], return_index=True)
            spans = zip(firsts[missing[places]].tolist(), lasts[missing[places]].tolist(), strict=True)
            words = [joined[first:last].decode("cp1252") for first, last in spans]
            known = self._known = known.with_words(self.tokenizer, new, words)
        return known, known.find(keys)[0]

    def _added(self, joined: bytes) -> np.ndarray:
        """Return where added tokens stand."""
        added = [western_bytes(token.content) for token in self.tokenizer.added_tokens_decoder.values()]
        return np.array([place for token in added if token for place in places_of(token, joined)], np.int64)


def western_bytes(text: str) -> bytes:
    """Return a byte for each character of a text, nothing if a character is not of Western Europe's code page."""
    try:
        return text.encode("ascii" if text.isascii() else "cp1252")
    except UnicodeEncodeError:
        return b""


def places_of(part: bytes, whole: bytes) -> Iterator[int]:
    """Yield where a part stands."""
    place = whole.find(part)
    while place >= 0:
        yield place
        place = whole.find(part, place + 1)


def owners(places: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Return the number of the text that each character is of."""
    return np.searchsorted(begins, places, side="right") - 1


def words_in(kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where words begin and end among characters of some kinds."""
    letters, marks = kinds == LETTER, kinds == MARK
    begins, ends = letters | marks, letters | marks
    begins[1:] &= ~(letters[1:] & letters[:-1])
    ends[:-1] &= ~(letters[1:] & letters[:-1])
    return np.flatnonzero(begins), np.flatnonzero(ends) + 1


@functools.cache
def random_numbers() -> np.ndarray:
    """Return a number for each place in a word and each character there, uint64; characters that are none count nothing."""
    numbers = np.frombuffer(os.urandom(LONGEST_WORD * 256 * 8), np.uint64).reshape(LONGEST_WORD, 256).copy()
    numbers[:, 0] = 0
    return numbers.ravel()


def keys_of(codes: np.ndarray, firsts: np.ndarray) -> np.ndarray:
    """Return a key for each word, uint64: sums of random numbers, which are equal for different words once in 2**64 pairs."""
    lengths = np.diff(np.append(firsts, len(codes)))
    within = np.minimum(np.arange(firsts[0], len(codes)) - np.repeat(firsts, lengths), LONGEST_WORD - 1)
    numbers = random_numbers().take(within * 256 + codes[firsts[0] :])
    keys: np.ndarray = np.add.reduceat(numbers, firsts - firsts[0])
    return keys


def merged(tokens: Tokens, others: Tokens, elsewhere: np.ndarray) -> Tokens:
    """Return the tokens of all texts: those of ``others`` for the texts that are ``elsewhere``, which have none in ``tokens``."""
    firsts, counts = tokens.bounds[:-1].copy(), np.diff(tokens.bounds)
    firsts[elsewhere], counts[elsewhere] = others.bounds[:-1] + len(tokens), np.diff(others.bounds)
    places = positions(firsts, firsts + counts)
    return Tokens(
        np.append(tokens.ids, others.ids)[places],
        np.append(tokens.starts, others.starts)[places],
        np.append(tokens.ends, others.ends)[places],
        np.append(tokens.subwords, others.subwords)[places],
        np.append(0, np.cumsum(counts)),
        tokens.owners,
    )
