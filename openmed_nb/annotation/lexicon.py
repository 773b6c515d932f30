"""Word-level token cache: a BERT tokenizer is called once for each distinct word.

A BERT tokenizer splits a text at white space and punctuation, and then tokenizes each word independently. This module therefore
splits all texts of a chunk with vectorized operations on their characters, and looks up each word by a hash. The class of each
character is queried from the tokenizer. The tokenizers library processes texts that contain an added token, a very long word,
or a character that is not in code page 1252, or that the tokenizer removes or replaces by several characters.

Design: words are looked up in a hash table of NumPy arrays. ``numpy.unique`` with a dictionary, and a sorted array with
``numpy.searchsorted``, take 1.7 times the time of a chunk. Annotating sentences on an H100 then takes 5 to 6% longer, and
annotating notes does not.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from ..devices.backend import TOKENIZER_LOCK
from .tokens import Tokens, continuation_prefix, expand_ranges, get_token_names, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# For fewer characters, the tokenizers library is faster.
MIN_CHARACTERS = 4096

MAX_WORD_LENGTH = 100

# Random seed of the word hashes.
HASH_SEED = np.frombuffer(os.urandom(8), np.uint64)[0]

# The final mixing steps of SplitMix64, a bijection in which each output bit depends on all input bits.
# Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
MIXING_STEPS = np.array([[30, 0xBF58476D1CE4E5B9], [27, 0x94D049BB133111EB], [31, 1]], np.uint64)

# Approximate number of words after which the cache is cleared.
MAX_CACHED_WORDS = 1 << 16

# Texts are searched for each added token. With more added tokens, the tokenizers library is faster.
MAX_ADDED_TOKENS = 32

# Character classes of a tokenizer. Each punctuation character is a separate word.
SPACE, LETTER, PUNCTUATION, OTHER = range(4)


def supports_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer splits texts into words like the tokenizer of BERT."""
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
    """Tokens of cached words.

    There are ``W`` words with ``P`` tokens in total. Word 0 represents all words that are not cached.

    Attributes:
        keys: Hash of each word, uint64 array of shape ``(W,)``.
        slots: Hash table of word ids as built by :func:`_build_hash_table`, int32 array of shape ``(S,)``.
        token_starts: Index of the first token of each word, int64 array of shape ``(W,)``.
        counts: Number of tokens of each word, int64 array of shape ``(W,)``.
        ids: Token ids, int64 array of shape ``(P,)``.
        starts: Start of each token in characters of the word, int64 array of shape ``(P,)``.
        ends: End of each token in characters of the word, int64 array of shape ``(P,)``.
    """

    keys: np.ndarray
    slots: np.ndarray
    token_starts: np.ndarray
    counts: np.ndarray
    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    def lookup(self, keys: np.ndarray) -> np.ndarray:
        """Return the word id of each key, or 0 if the word is not cached."""
        slots = _home_slots(keys, len(self.slots))
        word_ids = np.zeros(len(keys), np.int32)
        remaining = np.arange(len(keys))
        while len(remaining):
            candidates = self.slots[slots[remaining]]
            word_ids[remaining] = candidates
            # Continue with the keys whose slot contains a different word.
            remaining = remaining[(candidates > 0) & (self.keys[candidates] != keys[remaining])]
            slots[remaining] = (slots[remaining] + 1) % len(self.slots)
        return word_ids

    def add_words(self, tokenizer: PreTrainedTokenizerBase, keys: np.ndarray, words: Sequence[str]) -> WordTokens:
        """Return a copy with additional words, which must be normalized by the tokenizer."""
        tokenize_word = tokenizer.backend_tokenizer.model.tokenize
        prefix = continuation_prefix(tokenizer) or ""
        word_ids = [[token.id for token in tokenize_word(word)] for word in words]
        counts = np.array([*map(len, word_ids)])
        ids = np.fromiter(chain.from_iterable(word_ids), np.int64)
        token_starts = np.cumsum(counts) - counts
        is_single = counts == 1
        lengths = get_token_names(tokenizer, ids).lengths[ids] - len(prefix)
        lengths[token_starts] += len(prefix)  # Only tokens that continue a word have the prefix.
        # The name of the only token of a word can be that of the unknown token.
        lengths[token_starts[is_single]] = np.array([*map(len, words)])[is_single]
        ends = np.cumsum(lengths)
        ends -= np.repeat(ends[token_starts] - lengths[token_starts], counts)
        keys = np.append(self.keys, keys)
        return WordTokens(
            keys,
            _build_hash_table(keys),
            np.append(self.token_starts, token_starts + len(self.ids)),
            np.append(self.counts, counts),
            np.append(self.ids, ids),
            np.append(self.starts, ends - lengths),
            np.append(self.ends, ends),
        )


def _build_hash_table(keys: np.ndarray) -> np.ndarray:
    """Return a hash table with linear probing, an int32 array of word ids where 0 marks a free slot."""
    table = np.zeros(4 << len(keys).bit_length(), np.int32)
    word_ids = np.arange(1, len(keys), dtype=np.int32)
    slots = _home_slots(keys[1:], len(table))
    while len(word_ids):
        free = table[slots] == 0
        table[slots[free]] = word_ids[free]  # If several words map to one slot, one of them is stored.
        collided = table[slots] != word_ids
        word_ids = word_ids[collided]
        slots = (slots[collided] + 1) % len(table)
    return table


def _home_slots(keys: np.ndarray, size: int) -> np.ndarray:
    """Return the first slot to probe for each key. The table size must be a power of two."""
    return (keys & np.uint64(size - 1)).astype(np.int64)


EMPTY_WORD_TOKENS = WordTokens(
    keys=np.zeros(1, np.uint64),
    slots=np.zeros(1, np.int32),
    token_starts=np.zeros(1, np.int64),
    counts=np.zeros(1, np.int64),
    ids=np.zeros(0, np.int64),
    starts=np.zeros(0, np.int64),
    ends=np.zeros(0, np.int64),
)


class WordTokenCache:
    """Token cache of the words of one call. It is not shared between calls, because it contains words of the texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._words = EMPTY_WORD_TOKENS  # Replaced as a whole, because other threads of a worker read it.

    @functools.cached_property
    def character_table(self) -> tuple[bytes, bytes]:
        """Class and normalized form of each character of the code page, one byte each; 0 means no normalized form."""
        backend = self.tokenizer.backend_tokenizer
        classes = bytearray([OTHER] * 256)
        normalized = bytearray(256)
        for code in range(1, 256):
            character = backend.normalizer.normalize_str(bytes([code]).decode("cp1252", "ignore"))
            if len(as_bytes := _encode_single_byte(character).strip(b"\0")) == 1:
                words = backend.pre_tokenizer.pre_tokenize_str(f"a{character}a")
                classes[code] = {1: LETTER, 2: SPACE, 3: PUNCTUATION}[len(words)]
                normalized[code] = 0 if classes[code] == SPACE else as_bytes[0]
        return bytes(classes), bytes(normalized)

    def tokens(self, texts: Sequence[str]) -> Tokens:
        """Return the tokens of texts."""
        sizes = np.array([*map(len, texts)])
        joined = " ".join(texts)
        characters = joined.encode() if joined.isascii() else b" ".join(map(_encode_single_byte, texts))
        text_starts = np.append(0, np.cumsum(sizes + 1))
        classes = np.frombuffer(characters.translate(self.character_table[0]), np.uint8)
        starts, ends = _find_word_spans(classes)
        unsupported = [
            np.flatnonzero(classes == OTHER),
            starts[ends - starts > MAX_WORD_LENGTH],
            self._find_added_tokens(characters),
        ]
        needs_library = np.zeros(len(texts), bool)
        needs_library[np.searchsorted(text_starts, np.concatenate(unsupported), side="right") - 1] = True
        text_ids = np.repeat(np.arange(len(texts)), np.diff(np.searchsorted(starts, text_starts)))
        kept = ~needs_library[text_ids]
        if not kept.any():
            return tokenize(self.tokenizer, texts)
        starts = starts[kept]
        ends = ends[kept]
        text_ids = text_ids[kept]
        cached, word_ids = self._lookup_words(characters.translate(self.character_table[1]), starts, ends)
        counts = cached.counts[word_ids]
        word_offsets = np.searchsorted(starts, text_starts)
        positions = expand_ranges(cached.token_starts[word_ids], cached.token_starts[word_ids] + counts)
        starts_in_word = cached.starts[positions]
        word_starts = np.repeat(starts - text_starts[text_ids], counts)
        tokens = Tokens(
            cached.ids[positions],
            starts_in_word + word_starts,
            cached.ends[positions] + word_starts,
            starts_in_word > 0,
            np.append(0, np.cumsum(counts))[word_offsets],
        )
        if not needs_library.any():
            return tokens
        others = tokenize(self.tokenizer, [texts[index] for index in np.flatnonzero(needs_library).tolist()])
        return _merge_tokens(tokens, others, needs_library)

    def _lookup_words(self, normalized: bytes, starts: np.ndarray, ends: np.ndarray) -> tuple[WordTokens, np.ndarray]:
        """Return cached words that include the given words, and the id of each word."""
        keys = _hash_words(normalized, starts, ends)
        cached = self._words
        word_ids = cached.lookup(keys)
        if word_ids.all():
            return cached, word_ids
        with TOKENIZER_LOCK:  # Another thread may have added words or cleared the cache in the meantime.
            cached = self._words if len(self._words.keys) <= MAX_CACHED_WORDS else EMPTY_WORD_TOKENS
            missing = np.flatnonzero(cached.lookup(keys) == 0)
            new_keys, indices = np.unique(keys[missing], return_index=True)
            if len(new_keys):
                text = normalized.decode("cp1252")
                spans = zip(starts[missing[indices]].tolist(), ends[missing[indices]].tolist(), strict=True)
                cached = cached.add_words(self.tokenizer, new_keys, [text[start:end] for start, end in spans])
                self._words = cached
        return cached, cached.lookup(keys)

    def _find_added_tokens(self, characters: bytes) -> np.ndarray:
        """Return the positions of added tokens."""
        positions = []
        for token in self.tokenizer.added_tokens_decoder.values():
            content = _encode_single_byte(token.content)
            position = characters.find(content) if content.strip(b"\0") else -1
            while position >= 0:
                positions.append(position)
                position = characters.find(content, position + 1)
        return np.array(positions, np.int64)


def _encode_single_byte(text: str) -> bytes:
    """Encode a text as one byte per character. All bytes are 0 if a character is not in code page 1252."""
    try:
        return text.encode("ascii" if text.isascii() else "cp1252")
    except UnicodeEncodeError:
        return bytes(len(text))


def _find_word_spans(classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and end positions of words in a sequence of character classes."""
    is_letter = classes == LETTER
    is_start = is_letter | (classes == PUNCTUATION)
    is_end = is_start.copy()
    is_inside = is_letter[1:] & is_letter[:-1]
    is_start[1:] &= ~is_inside
    is_end[:-1] &= ~is_inside
    return np.flatnonzero(is_start), np.flatnonzero(is_end) + 1


def _hash_words(characters: bytes, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return a uint64 hash of each word, computed from eight characters at a time. No character may be 0.

    Words of up to eight characters have distinct hashes. Longer words collide once in about 2**64 pairs.
    """
    eights = np.ndarray(len(characters), "<u8", characters + bytes(8), strides=(1,))  # eight bytes from each position
    keys: np.ndarray = np.full(len(starts), HASH_SEED)
    words = np.arange(len(starts))
    while len(words):
        num_excess = np.maximum(8 - (ends - starts), 0)
        mixed = keys[words] ^ (eights[starts] << (8 * num_excess).astype(np.uint64))
        for shift, factor in MIXING_STEPS:
            mixed = (mixed ^ (mixed >> shift)) * factor
        keys[words] = mixed
        is_longer = ends - starts > 8  # noqa: PLR2004 - the bytes of a key
        words = words[is_longer]
        starts = starts[is_longer] + 8
        ends = ends[is_longer]
    return keys


def _merge_tokens(tokens: Tokens, others: Tokens, in_others: np.ndarray) -> Tokens:
    """Return the tokens of all texts, from ``others`` for the texts that are marked in ``in_others``.

    The marked texts must have no tokens in ``tokens``.
    """
    starts = tokens.text_offsets[:-1].copy()
    counts = np.diff(tokens.text_offsets)
    starts[in_others] = others.text_offsets[:-1] + len(tokens)
    counts[in_others] = np.diff(others.text_offsets)
    positions = expand_ranges(starts, starts + counts)
    return Tokens(
        np.append(tokens.ids, others.ids)[positions],
        np.append(tokens.starts, others.starts)[positions],
        np.append(tokens.ends, others.ends)[positions],
        np.append(tokens.is_subword, others.is_subword)[positions],
        np.append(0, np.cumsum(counts)),
    )
