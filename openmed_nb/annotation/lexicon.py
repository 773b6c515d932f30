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
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from ..devices.backend import TOKENIZER_LOCK
from .tokens import MAX_PART_CHARACTERS, Tokens, continuation_prefix, expand_ranges, get_token_names, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MIN_CHARACTERS = 4096  # For less text the library is quicker.
MAX_WORD_LENGTH = 100
SEED = np.frombuffer(os.urandom(8), np.uint64)[0]  # of the keys
MAX_CACHED_WORDS = 1 << 16  # After about so many words, all are forgotten.
MAX_ADDED_TOKENS = 32  # Texts are searched for each added token; with more of them the library is quicker.

# What a character can be to a tokenizer; a mark is a word of its own.
SPACE, LETTER, PUNCTUATION, OTHER = range(4)


def supports_tokenizer(tokenizer: PreTrainedTokenizerBase, transformers_boundaries: bool = False) -> bool:
    """Tell whether a tokenizer cuts texts into words as BERT's does.

    By the boundaries of transformers, an unknown word starts a word only if the tokenizer's ``unk_token`` is the one of its model.
    """
    if transformers_boundaries and tokenizer.unk_token != getattr(tokenizer.backend_tokenizer.model, "unk_token", None):
        return False
    backend = tokenizer.backend_tokenizer
    parts = [type(part).__name__ for part in (backend.normalizer, backend.pre_tokenizer, backend.model)]
    added = tokenizer.added_tokens_decoder.values()
    return (
        parts == ["BertNormalizer", "BertPreTokenizer", "WordPiece"]
        and continuation_prefix(tokenizer) is not None
        and len(added) <= MAX_ADDED_TOKENS
        and not any(token.normalized or any(map(str.isspace, token.content)) for token in added)
    )


@dataclass(frozen=True)
class WordTokens:
    """The tokens of words; ``W`` words, of which the first stands for all that are not known, and ``P`` tokens."""

    keys: np.ndarray  # (W,) uint64
    slots: np.ndarray  # (S,) int32, the numbers of the words where :func:`hash_table` puts them
    firsts: np.ndarray  # (W,) int64, the first token of each word
    counts: np.ndarray  # (W,) int64
    ids: np.ndarray  # (P,) int64
    starts: np.ndarray  # (P,) int64, in characters of the word
    ends: np.ndarray  # (P,) int64

    def lookup(self, keys: np.ndarray) -> np.ndarray:
        """Return the number of the word of each key, 0 where there is none."""
        slots, numbers = home_slots(keys, len(self.slots)), np.zeros(len(keys), np.int32)
        left = np.arange(len(keys))
        while len(left):
            numbers[left] = there = self.slots[slots[left]]
            left = left[(there > 0) & (self.keys[there] != keys[left])]  # Another word has the slot.
            slots[left] = (slots[left] + 1) % len(self.slots)
        return numbers

    def add_words(self, tokenizer: PreTrainedTokenizerBase, keys: np.ndarray, words: Sequence[str]) -> WordTokens:
        """Return the tokens of more words too; these have the letters that the tokenizer makes of theirs."""
        cut, prefix = tokenizer.backend_tokenizer.model.tokenize, continuation_prefix(tokenizer) or ""
        each = [[piece.id for piece in cut(word)] for word in words]
        counts, ids = np.array([*map(len, each)]), np.fromiter(chain.from_iterable(each), np.int64)
        firsts, single = np.cumsum(counts) - counts, counts == 1
        lengths = get_token_names(tokenizer, ids).lengths[ids] - len(prefix)
        lengths[firsts] += len(prefix)  # Only the pieces that go on with a word have it.
        lengths[firsts[single]] = np.array([*map(len, words)])[single]  # Its name may be that of the unknown token.
        ends = np.cumsum(lengths)
        ends -= np.repeat(ends[firsts] - lengths[firsts], counts)
        keys = np.append(self.keys, keys)
        return WordTokens(
            keys,
            hash_table(keys),
            np.append(self.firsts, firsts + len(self.ids)),
            np.append(self.counts, counts),
            np.append(self.ids, ids),
            np.append(self.starts, ends - lengths),
            np.append(self.ends, ends),
        )


def hash_table(keys: np.ndarray) -> np.ndarray:
    """Return the number of a key in each slot, int32, 0 where there is none: each key has the first free one from its own on."""
    table = np.zeros(4 << len(keys).bit_length(), np.int32)
    numbers = np.arange(1, len(keys), dtype=np.int32)
    slots = home_slots(keys[1:], len(table))
    while len(numbers):
        free = table[slots] == 0
        table[slots[free]] = numbers[free]  # Of those that want one slot, one gets it.
        left = table[slots] != numbers
        numbers, slots = numbers[left], (slots[left] + 1) % len(table)
    return table


def home_slots(keys: np.ndarray, size: int) -> np.ndarray:
    """Return the own slot of each key in a table of a size that is a power of two."""
    return (keys & np.uint64(size - 1)).astype(np.int64)


EMPTY_WORD_TOKENS = WordTokens(
    np.zeros(1, np.uint64), np.zeros(1, np.int32), *[np.zeros(1, np.int64)] * 2, *[np.zeros(0, np.int64)] * 3
)


class WordTokenCache:
    """What a tokenizer makes of the words of one call; another call does not know the words of its texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, transformers_boundaries: bool = False) -> None:
        self.tokenizer = tokenizer
        self._transformers_boundaries = transformers_boundaries
        self._known = EMPTY_WORD_TOKENS  # Replaced as a whole, because other threads of a worker read it too.

    @functools.cached_property
    def character_table(self) -> tuple[bytes, bytes]:
        """What each character of the code page is, and what the tokenizer changes it to, 0 for none; a byte for each."""
        backend = self.tokenizer.backend_tokenizer
        kinds, folded = bytearray([OTHER] * 256), bytearray(256)
        for code in range(1, 256):
            character = backend.normalizer.normalize_str(bytes([code]).decode("cp1252", "ignore"))
            if len(as_bytes := encode_single_byte(character).strip(b"\0")) == 1:
                words = backend.pre_tokenizer.pre_tokenize_str(f"a{character}a")
                kinds[code] = {1: LETTER, 2: SPACE, 3: PUNCTUATION}[len(words)]
                folded[code] = 0 if kinds[code] == SPACE else as_bytes[0]
        return bytes(kinds), bytes(folded)

    def tokens(self, texts: Sequence[str]) -> Tokens:
        """Return the tokens of texts, one sequence for each."""
        sizes = np.array([*map(len, texts)])
        if sizes.sum() < MIN_CHARACTERS or sizes.max() > MAX_PART_CHARACTERS:
            return self._by_library(texts)
        joined = " ".join(texts)
        characters = joined.encode() if joined.isascii() else b" ".join(map(encode_single_byte, texts))
        begins = np.append(0, np.cumsum(sizes + 1))
        kinds = np.frombuffer(characters.translate(self.character_table[0]), np.uint8)
        firsts, lasts = find_word_spans(kinds)
        odd = [
            np.flatnonzero(kinds == OTHER),
            firsts[lasts - firsts > MAX_WORD_LENGTH],
            self._find_added_tokens(characters),
        ]
        by_library = np.zeros(len(texts), bool)
        by_library[np.searchsorted(begins, np.concatenate(odd), side="right") - 1] = True
        owners = np.repeat(np.arange(len(texts)), np.diff(np.searchsorted(firsts, begins)))
        kept = ~by_library[owners]
        if not kept.any():
            return self._by_library(texts)
        firsts, lasts, owners = firsts[kept], lasts[kept], owners[kept]
        known, numbers = self._lookup_words(characters.translate(self.character_table[1]), firsts, lasts)
        counts, bounds = known.counts[numbers], np.searchsorted(firsts, begins)
        places = expand_ranges(known.firsts[numbers], known.firsts[numbers] + counts)
        starts, words = known.starts[places], np.repeat(firsts - begins[owners], counts)
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
        return merge_tokens(
            tokens,
            self._by_library([texts[number] for number in np.flatnonzero(by_library).tolist()]),
            by_library,
        )

    def _by_library(self, texts: Sequence[str]) -> Tokens:
        return tokenize(self.tokenizer, texts, transformers_boundaries=self._transformers_boundaries)

    def _lookup_words(self, folded: bytes, firsts: np.ndarray, lasts: np.ndarray) -> tuple[WordTokens, np.ndarray]:
        """Return the tokens of words, among them these, and the number of each."""
        keys, known = hash_words(folded, firsts, lasts), self._known
        numbers = known.lookup(keys)
        if numbers.all():
            return known, numbers
        with TOKENIZER_LOCK:  # Another thread may have learnt words meanwhile, or forgotten them.
            known = self._known if len(self._known.keys) <= MAX_CACHED_WORDS else EMPTY_WORD_TOKENS
            missing = np.flatnonzero(known.lookup(keys) == 0)
            new, places = np.unique(keys[missing], return_index=True)
            if len(new):
                text = folded.decode("cp1252")
                spans = zip(firsts[missing[places]].tolist(), lasts[missing[places]].tolist(), strict=True)
                known = self._known = known.add_words(self.tokenizer, new, [text[first:last] for first, last in spans])
        return known, known.lookup(keys)

    def _find_added_tokens(self, characters: bytes) -> np.ndarray:
        """Return where added tokens stand."""
        added = [encode_single_byte(token.content) for token in self.tokenizer.added_tokens_decoder.values()]
        found = [place for token in added if token.strip(b"\0") for place in find_occurrences(token, characters)]
        return np.array(found, np.int64)


def encode_single_byte(text: str) -> bytes:
    """Return a byte for each character of a text, all 0 if one of them is not of Western Europe's code page."""
    try:
        return text.encode("ascii" if text.isascii() else "cp1252")
    except UnicodeEncodeError:
        return bytes(len(text))


def find_occurrences(part: bytes, whole: bytes) -> Iterator[int]:
    """Yield where a part stands."""
    place = whole.find(part)
    while place >= 0:
        yield place
        place = whole.find(part, place + 1)


def find_word_spans(kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where words begin and end among characters of some kinds."""
    letters = kinds == LETTER
    begins = letters | (kinds == PUNCTUATION)
    ends, joined = begins.copy(), letters[1:] & letters[:-1]
    begins[1:] &= ~joined
    ends[:-1] &= ~joined
    return np.flatnonzero(begins), np.flatnonzero(ends) + 1


def hash_words(characters: bytes, firsts: np.ndarray, lasts: np.ndarray) -> np.ndarray:
    """Return a key for each word, uint64, from eight characters at a time; no character is 0.

    Words of up to eight have different keys, others equal ones once in about 2**64 pairs.
    """
    eights = np.ndarray(len(characters), "<u8", characters + bytes(8), strides=(1,))  # from each character on
    keys: np.ndarray = np.full(len(firsts), SEED)
    words = np.arange(len(firsts))
    while len(words):
        beyond = np.maximum(8 - (lasts - firsts), 0)
        keys[words] = mix_bits(keys[words] ^ (eights[firsts] << (8 * beyond).astype(np.uint64)))
        longer = lasts - firsts > 8  # noqa: PLR2004 - the bytes of a key
        words, firsts, lasts = words[longer], firsts[longer] + 8, lasts[longer]
    return keys


def mix_bits(numbers: np.ndarray) -> np.ndarray:
    """Return other numbers, as different as these, in which each bit depends on all: the last step of SplitMix64.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers


def merge_tokens(tokens: Tokens, others: Tokens, elsewhere: np.ndarray) -> Tokens:
    """Return the tokens of all texts: those of ``others`` for the texts that are ``elsewhere``, which have none in ``tokens``."""
    firsts, counts = tokens.sequence_offsets[:-1].copy(), np.diff(tokens.sequence_offsets)
    firsts[elsewhere], counts[elsewhere] = others.sequence_offsets[:-1] + len(tokens), np.diff(others.sequence_offsets)
    places = expand_ranges(firsts, firsts + counts)
    return Tokens(
        np.append(tokens.ids, others.ids)[places],
        np.append(tokens.starts, others.starts)[places],
        np.append(tokens.ends, others.ends)[places],
        np.append(tokens.is_subword, others.is_subword)[places],
        np.append(0, np.cumsum(counts)),
        tokens.text_ids,
    )
