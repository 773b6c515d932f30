"""Word-level token cache: a BERT tokenizer is called once for each distinct word.

A BERT tokenizer splits a text at white space and punctuation, and then tokenizes each word independently. This module therefore
splits all texts of a chunk with vectorized operations on their characters, and looks up each word by a hash. The class of each
character is queried from the tokenizer. The tokenizers library processes texts that contain an added token, a very long word,
or a character that is not in code page 1252, or that the tokenizer removes or replaces by several characters.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from ..devices.backend import TOKENIZER_LOCK
from .tokens import MAX_PART_CHARACTERS, Tokens, continuation_prefix, expand_ranges, get_token_names, tokenize

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


def supports_tokenizer(tokenizer: PreTrainedTokenizerBase, transformers_boundaries: bool = False) -> bool:
    """Return whether a tokenizer splits texts into words like the tokenizer of BERT.

    With the word boundaries of transformers, an unknown token starts a word only if the ``unk_token`` of the tokenizer equals
    that of its model.
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
    """Tokens of cached words: ``W`` words with ``P`` tokens in total.

    Attributes:
        word_ids: Index of each word by its hash.
        token_starts: Index of the first token of each word, int64 array of shape ``(W,)``.
        counts: Number of tokens of each word, int64 array of shape ``(W,)``.
        ids: Token ids, int64 array of shape ``(P,)``.
        starts: Start of each token in characters of the word, int64 array of shape ``(P,)``.
        ends: End of each token in characters of the word, int64 array of shape ``(P,)``.
    """

    word_ids: Mapping[int, int]
    token_starts: np.ndarray
    counts: np.ndarray
    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    def add_words(self, tokenizer: PreTrainedTokenizerBase, words: Mapping[int, str]) -> WordTokens:
        """Return a copy with additional words by their hashes. The words must be normalized by the tokenizer."""
        tokenize_word = tokenizer.backend_tokenizer.model.tokenize
        prefix = continuation_prefix(tokenizer) or ""
        token_ids = [[token.id for token in tokenize_word(word)] for word in words.values()]
        counts = np.array([*map(len, token_ids)])
        ids = np.fromiter(chain.from_iterable(token_ids), np.int64)
        token_starts = np.cumsum(counts) - counts
        is_single = counts == 1
        lengths = get_token_names(tokenizer, ids).lengths[ids] - len(prefix)
        lengths[token_starts] += len(prefix)  # Only tokens that continue a word have the prefix.
        # The name of the only token of a word can be that of the unknown token.
        lengths[token_starts[is_single]] = np.array([*map(len, words.values())])[is_single]
        ends = np.cumsum(lengths)
        ends -= np.repeat(ends[token_starts] - lengths[token_starts], counts)
        return WordTokens(
            {**self.word_ids, **dict(zip(words, itertools.count(len(self.word_ids)), strict=False))},
            np.append(self.token_starts, token_starts + len(self.ids)),
            np.append(self.counts, counts),
            np.append(self.ids, ids),
            np.append(self.starts, ends - lengths),
            np.append(self.ends, ends),
        )


NO_INTEGERS = np.zeros(0, np.int64)
EMPTY_WORD_TOKENS = WordTokens({}, NO_INTEGERS, NO_INTEGERS, NO_INTEGERS, NO_INTEGERS, NO_INTEGERS)


class WordTokenCache:
    """Token cache of the words of one call. It is not shared between calls, because it contains words of the texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, transformers_boundaries: bool = False) -> None:
        self.tokenizer = tokenizer
        self._transformers_boundaries = transformers_boundaries
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
        """Return the tokens of texts, one sequence per text."""
        sizes = np.array([*map(len, texts)])
        if sizes.sum() < MIN_CHARACTERS or sizes.max() > MAX_PART_CHARACTERS:
            return self._tokenize_with_library(texts)
        joined = " ".join(texts)
        characters = joined.encode() if joined.isascii() else b" ".join(map(_encode_single_byte, texts))
        text_starts = np.append(0, np.cumsum(sizes + 1))
        classes = np.frombuffer(characters.translate(self.character_table[0]), np.uint8)
        # Letters are joined to words, and each punctuation character is a word.
        is_letter = classes == LETTER
        is_start = is_letter | (classes == PUNCTUATION)
        is_end = is_start.copy()
        is_inside = is_letter[1:] & is_letter[:-1]
        is_start[1:] &= ~is_inside
        is_end[:-1] &= ~is_inside
        starts = np.flatnonzero(is_start)
        ends = np.flatnonzero(is_end) + 1
        # An added token contains no white space, so each of its occurrences is inside one text.
        contents = [_encode_single_byte(token.content) for token in self.tokenizer.added_tokens_decoder.values()]
        added = [
            match.start()
            for content in contents
            if content.strip(b"\0")
            for match in re.finditer(re.escape(content), characters)
        ]
        unsupported = [
            np.flatnonzero(classes == OTHER),
            starts[ends - starts > MAX_WORD_LENGTH],
            np.array(added, np.int64),
        ]
        needs_library = np.zeros(len(texts), bool)
        needs_library[np.searchsorted(text_starts, np.concatenate(unsupported), side="right") - 1] = True
        text_ids = np.repeat(np.arange(len(texts)), np.diff(np.searchsorted(starts, text_starts)))
        kept = ~needs_library[text_ids]
        if not kept.any():
            return self._tokenize_with_library(texts)
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
            np.arange(len(texts)),
        )
        if not needs_library.any():
            return tokens
        # The other texts have no tokens so far. Insert those of the tokenizers library.
        others = self._tokenize_with_library([texts[index] for index in np.flatnonzero(needs_library).tolist()])
        sequence_starts = tokens.sequence_offsets[:-1].copy()
        sequence_starts[needs_library] = others.sequence_offsets[:-1] + len(tokens)
        lengths = np.diff(tokens.sequence_offsets)
        lengths[needs_library] = np.diff(others.sequence_offsets)
        positions = expand_ranges(sequence_starts, sequence_starts + lengths)
        return Tokens(
            np.append(tokens.ids, others.ids)[positions],
            np.append(tokens.starts, others.starts)[positions],
            np.append(tokens.ends, others.ends)[positions],
            np.append(tokens.is_subword, others.is_subword)[positions],
            np.append(0, np.cumsum(lengths)),
            tokens.text_ids,
        )

    def _tokenize_with_library(self, texts: Sequence[str]) -> Tokens:
        return tokenize(self.tokenizer, texts, transformers_boundaries=self._transformers_boundaries)

    def _lookup_words(self, normalized: bytes, starts: np.ndarray, ends: np.ndarray) -> tuple[WordTokens, np.ndarray]:
        """Return cached words that include the given words, and the id of each word."""
        keys, first_positions, inverse = np.unique(
            _hash_words(normalized, starts, ends), return_index=True, return_inverse=True
        )
        distinct = keys.tolist()
        with TOKENIZER_LOCK:  # Another thread may add words or clear the cache at the same time.
            if len(self._words.word_ids) > MAX_CACHED_WORDS:
                self._words = EMPTY_WORD_TOKENS
            cached = self._words
            text = normalized.decode("cp1252")
            words = {
                key: text[starts[position] : ends[position]]
                for key, position in zip(distinct, first_positions.tolist(), strict=True)
                if key not in cached.word_ids
            }
            if words:
                cached = cached.add_words(self.tokenizer, words)
                self._words = cached
        return cached, np.array([cached.word_ids[key] for key in distinct])[inverse]


def _encode_single_byte(text: str) -> bytes:
    """Encode a text as one byte per character. All bytes are 0 if a character is not in code page 1252."""
    try:
        return text.encode("ascii" if text.isascii() else "cp1252")
    except UnicodeEncodeError:
        return bytes(len(text))


def _hash_words(characters: bytes, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return a uint64 hash of each word, computed from eight characters at a time. No character may be 0.

    Words of up to eight characters have distinct hashes. Longer words collide once in about 2**64 pairs.
    """
    eights = np.ndarray(len(characters), "<u8", characters + bytes(8), strides=(1,))  # eight bytes from each position
    keys: np.ndarray = np.full(len(starts), HASH_SEED)
    words = np.arange(len(starts))
    while len(words):
        num_excess = np.maximum(8 - (ends - starts), 0)
        numbers = keys[words] ^ (eights[starts] << (8 * num_excess).astype(np.uint64))
        for shift, factor in MIXING_STEPS:
            numbers = (numbers ^ (numbers >> shift)) * factor
        keys[words] = numbers
        is_longer = ends - starts > 8  # noqa: PLR2004 - the bytes of a key
        words = words[is_longer]
        starts = starts[is_longer] + 8
        ends = ends[is_longer]
    return keys
