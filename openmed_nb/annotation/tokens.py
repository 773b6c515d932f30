"""Tokenization of texts, and overlapping windows over long texts.

All data is flat: the tokens of all texts of a chunk are concatenated in arrays, and windows are ranges of these arrays. A window
reads some tokens before and after the tokens that it owns, so that each token has context. Predictions for tokens that a window
does not own are discarded. Nothing is truncated.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING
from unicodedata import category, normalize

import numpy as np

from ..devices.backend import TOKENIZER_LOCK
from .boundaries import is_separator

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase


# Number of context tokens on each side of a window. It is the smallest number without a visible loss of accuracy on long texts;
# each context token is processed twice.
WINDOW_CONTEXT = 16

# Texts used to find the special tokens of a tokenizer. Every tokenizer produces a token for at least one of them.
PROBE_TEXTS = ("a", "the", "1", ".", "中")

SPACE = ord(" ")
DELETE = 127

# Results of :func:`get_token_names` by tokenizer.
TOKEN_NAME_CACHE: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, TokenNames] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Windows:
    """Half-open ranges of token positions, each an int64 array of shape ``(W,)``.

    Attributes:
        starts: Start of the tokens that each window reads.
        ends: End of the tokens that each window reads.
        owned_starts: Start of the tokens whose predictions come from each window.
        owned_ends: End of the tokens whose predictions come from each window.
    """

    starts: np.ndarray
    ends: np.ndarray
    owned_starts: np.ndarray
    owned_ends: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens that each window reads."""
        lengths: np.ndarray = self.ends - self.starts
        return lengths


def plan_windows(text_offsets: np.ndarray, word_starts: np.ndarray, max_tokens: int) -> Windows:
    """Split the tokens of texts into windows that fit the model.

    A short text has one window. A long text is split at word boundaries into overlapping windows.

    Args:
        text_offsets: Position of the first token of each text, followed by the number of tokens, int64 array of shape ``(S + 1,)``.
        word_starts: Sorted positions of the tokens that start a word, int64.
        max_tokens: Maximum number of tokens per window, without special tokens.
    """
    lengths = text_offsets[1:] - text_offsets[:-1]
    is_short = (lengths > 0) & (lengths <= max_tokens)
    starts = text_offsets[:-1][is_short]
    ends = text_offsets[1:][is_short]
    if len(lengths) == len(starts):
        return Windows(starts, ends, starts, ends)
    windows = np.stack([starts, ends, starts, ends], axis=1).tolist()
    context = min(WINDOW_CONTEXT, max_tokens // 4)
    for text_id in np.flatnonzero(lengths > max_tokens).tolist():
        text_start = owned_start = int(text_offsets[text_id])
        text_end = int(text_offsets[text_id + 1])
        while owned_start < text_end:
            start = max(text_start, owned_start - context)
            end = min(text_end, start + max_tokens)
            owned_end = end
            if end < text_end:
                # The next window starts at the last word start, or anywhere if a single word spans the window.
                owned_end = end - context
                index = int(np.searchsorted(word_starts, owned_end, side="right")) - 1
                if index >= 0 and word_starts[index] > owned_start:
                    owned_end = int(word_starts[index])
            windows.append([start, end, owned_start, owned_end])
            owned_start = owned_end
    return Windows(*np.array(windows, np.int64).reshape(-1, 4).T)


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens that a tokenizer adds before and after a text, and the padding token.

    Attributes:
        prefix_ids: Ids of the tokens before a text.
        suffix_ids: Ids of the tokens after a text.
        prefix_type_ids: Token type ids of the prefix.
        suffix_type_ids: Token type ids of the suffix.
        token_type_id: Token type id of the text tokens.
        pad_token_id: Id of the padding token.
        pad_token_type_id: Token type id of the padding token.
    """

    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    prefix_type_ids: tuple[int, ...]
    suffix_type_ids: tuple[int, ...]
    token_type_id: int
    pad_token_id: int
    pad_token_type_id: int

    @property
    def num_special_tokens(self) -> int:
        """The number of special tokens around one text."""
        return len(self.prefix_ids) + len(self.suffix_ids)

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> SpecialTokens | None:
        """Return the special tokens of a tokenizer, or ``None`` if it produces no tokens for the probe texts."""
        for encoding in encode(tokenizer, PROBE_TEXTS, special_tokens=True):
            positions = np.flatnonzero(np.equal(encoding.special_tokens_mask, 0))
            if len(positions):
                prefix = slice(0, positions[0])
                suffix = slice(positions[-1] + 1, None)
                ids = tuple(encoding.ids)
                types = tuple(encoding.type_ids)
                return cls(
                    prefix_ids=ids[prefix],
                    suffix_ids=ids[suffix],
                    prefix_type_ids=types[prefix],
                    suffix_type_ids=types[suffix],
                    token_type_id=types[positions[0]],
                    pad_token_id=tokenizer.pad_token_id or 0,
                    pad_token_type_id=tokenizer.pad_token_type_id,
                )
        return None


@dataclass(frozen=True)
class Tokens:
    """The concatenated tokens of ``S`` texts; ``T`` tokens in total.

    Attributes:
        ids: Token ids, int64 array of shape ``(T,)``.
        starts: Start of each token in characters of the text, int64 array of shape ``(T,)``.
        ends: End of each token in characters of the text, int64 array of shape ``(T,)``.
        is_subword: Whether a token continues the word of the previous token, bool array of shape ``(T,)``.
        text_offsets: Position of the first token of each text, followed by ``T``, int64 array of shape ``(S + 1,)``.
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    is_subword: np.ndarray
    text_offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @functools.cached_property
    def text_starts(self) -> np.ndarray:
        """The positions of the first tokens of non-empty texts."""
        offsets = self.text_offsets[:-1]
        starts: np.ndarray = offsets[offsets < self.text_offsets[1:]]
        return starts

    @functools.cached_property
    def word_starts(self) -> np.ndarray:
        """The positions of the tokens that start a word. The first token of a text always starts a word."""
        starts_word = ~self.is_subword
        starts_word[self.text_starts] = True
        return np.flatnonzero(starts_word)

    def text_ids(self, positions: np.ndarray) -> np.ndarray:
        """Return the index of the text that contains each token position."""
        return np.searchsorted(self.text_offsets, positions, side="right") - 1


def expand_ranges(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the concatenated positions of half-open ranges."""
    if len(starts) == 1:  # Fast path for a single short text, where the operations below would dominate the runtime.
        return np.arange(starts[0], ends[0])
    counts = ends - starts
    shifts: np.ndarray = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return shifts + np.arange(len(shifts))


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], special_tokens: bool = False, with_offsets: bool = True
) -> list[Encoding]:
    """Encode texts with a fast tokenizer, without padding and truncation."""
    backend = tokenizer.backend_tokenizer
    with TOKENIZER_LOCK:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = tokenizer.split_special_tokens
        if len(texts) == 1:  # Threads are not worthwhile for one text.
            return [backend.encode(texts[0], add_special_tokens=special_tokens)]
        encode_batch = backend.encode_batch if with_offsets else backend.encode_batch_fast
        encodings: list[Encoding] = encode_batch(list(texts), add_special_tokens=special_tokens)
    return encodings


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], transformers_boundaries: bool = False) -> Tokens:
    """Return the tokens of texts."""
    encodings = encode(tokenizer, texts, with_offsets=not _can_measure_spans(tokenizer, texts))
    return build_tokens(tokenizer, encodings, texts, transformers_boundaries)


def build_tokens(
    tokenizer: PreTrainedTokenizerBase,
    encodings: Sequence[Encoding],
    texts: Sequence[str],
    transformers_boundaries: bool = False,
) -> Tokens:
    """Concatenate the encodings of texts into flat arrays of tokens.

    Args:
        tokenizer: The tokenizer of the encodings.
        encodings: The encodings, one per text.
        texts: The texts.
        transformers_boundaries: Whether to use the word boundaries of transformers.
    """
    text_offsets = np.array([0, *accumulate(map(len, encodings))])
    ids = np.fromiter(chain.from_iterable(encoding.ids for encoding in encodings), np.int64, text_offsets[-1])
    text_ids = np.repeat(np.arange(len(encodings)), np.diff(text_offsets))
    if _can_measure_spans(tokenizer, texts):
        starts, ends = _measure_spans(tokenizer, texts, ids, text_offsets)
    else:
        starts, ends = _read_spans(encodings)
    prefix = _continuation_prefix(tokenizer)
    if transformers_boundaries:
        # As in TokenClassificationPipeline.gather_pre_entities: with a continuation prefix such as ``##``, a token is a
        # subword if its name is longer than its characters. Otherwise (byte-level BPE and Unigram), it is a subword if it
        # neither starts with a space nor follows one, even in languages without spaces. The unknown token is never a subword.
        if prefix:
            is_subword = get_token_names(tokenizer, ids).lengths[ids] != ends - starts
        else:
            previous, first = _adjacent_characters(texts, starts, text_ids)
            is_subword = (starts > 0) & (first != SPACE) & (previous != SPACE)
        if tokenizer.unk_token_id is not None:
            is_subword &= ids != tokenizer.unk_token_id
    elif prefix:
        is_subword = get_token_names(tokenizer, ids).continues[ids]
        # Other pre-tokenizers may leave the prefix in a piece, as in the text "##ing": then a token with the prefix starts a word.
        if not _splits_as_bert(tokenizer):
            is_subword &= ~_starts_piece(encodings, len(ids))
    else:
        pairs = np.stack(_adjacent_characters(texts, starts, text_ids))
        distinct = sorted(set(pairs.ravel().tolist()))
        separators = np.array([is_separator(code) for code in distinct], bool)
        is_next_to_separator = separators[np.searchsorted(np.array(distinct, np.uint32), pairs)].any(0)
        # A token that shares a character with the previous token continues that character, even if it is a separator.
        shares_character = np.append(False, starts[1:] < ends[:-1])
        is_subword = ~_starts_piece(encodings, len(ids)) & (shares_character | ~is_next_to_separator)
    return Tokens(ids, starts, ends, is_subword, text_offsets)


def _read_spans(encodings: Iterable[Encoding]) -> np.ndarray:
    """Return the starts and the ends of tokens in characters of their texts, int64 array of shape ``(2, T)``."""
    offsets = chain.from_iterable(chain.from_iterable(encoding.offsets for encoding in encodings))
    return np.fromiter(offsets, np.int64).reshape(-1, 2).T


def _can_measure_spans(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> bool:
    return len(texts) > 1 and _splits_as_bert(tokenizer)


def _measure_spans(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], ids: np.ndarray, text_offsets: np.ndarray
) -> np.ndarray:
    """Return the same as :func:`_read_spans` from the lengths of BERT's tokens.

    The tokens are the characters of a text without its spaces, unless its normal form has more or fewer characters. The offsets
    of an encoding are Python objects, which take longer than the rest of the host's work; they are read for the other texts.
    """
    # With the full stop, a character is visible even if all tokens are of spaces, which a tokenizer may have added.
    codes = np.frombuffer(("".join(texts) + ".").encode("ascii", "replace"), np.uint8)
    is_control = (codes < SPACE) | (codes == DELETE)
    visible = np.flatnonzero((codes != SPACE) & ~is_control)
    removed = np.flatnonzero(is_control)
    removed = removed[~np.isin(codes[removed], list(b"\t\n\r"))]
    text_starts = np.array([0, *accumulate(map(len, texts))])
    first_visible = np.searchsorted(visible, text_starts)
    names = get_token_names(tokenizer, ids)
    lengths = names.lengths[ids] - len(_continuation_prefix(tokenizer) or "") * names.continues[ids]
    lengths[ids == tokenizer.unk_token_id] = len(codes)  # Its length is not known. No text is as long.
    bounds = np.append(0, np.cumsum(lengths))
    num_tokens = np.diff(text_offsets)
    shifts = np.repeat(first_visible[:-1] - bounds[text_offsets[:-1]], num_tokens)
    starts = visible.take(bounds[:-1] + shifts, mode="clip") - np.repeat(text_starts[:-1], num_tokens)
    spans = np.stack([starts, starts + lengths])
    is_read = np.diff(bounds[text_offsets]) != np.diff(first_visible)
    is_read |= np.diff(np.searchsorted(removed, text_starts)) > 0
    is_read |= [not (text.isascii() or all(map(_is_one_character, set(text)))) for text in texts]
    indices = np.flatnonzero(is_read).tolist()
    for index, encoding in zip(indices, encode(tokenizer, [texts[index] for index in indices]), strict=True):
        spans[:, text_offsets[index] : text_offsets[index + 1]] = _read_spans([encoding])
    return spans


@functools.lru_cache(maxsize=4096)
def _is_one_character(character: str) -> bool:
    """Return whether BERT's normalizer returns one visible character for a character, or whether it is ASCII."""
    letters = [part for part in normalize("NFD", character.lower()) if category(part) != "Mn"]
    return character.isascii() or (len(letters) == 1 and category(character)[0] in "LNPS")


def _splits_as_bert(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether words are split as in BERT: at spaces and punctuation, and then into the longest known pieces."""
    backend = tokenizer.backend_tokenizer
    parts = (backend.normalizer, backend.pre_tokenizer, backend.model)
    return [type(part).__name__ for part in parts] == ["BertNormalizer", "BertPreTokenizer", "WordPiece"]


def _starts_piece(encodings: Sequence[Encoding], num_tokens: int) -> np.ndarray:
    """Return whether each token is the first of a piece of the pre-tokenizer."""
    word_ids = chain.from_iterable(encoding.word_ids for encoding in encodings)
    # A token without a piece of the pre-tokenizer has the piece -1.
    return mark_changes(np.fromiter((-1 if word_id is None else word_id for word_id in word_ids), np.int64, num_tokens))


def mark_changes(values: np.ndarray) -> np.ndarray:
    """Return whether each value differs from the previous value; ``True`` for the first."""
    changed = np.ones(len(values), bool)
    changed[1:] = values[1:] != values[:-1]
    return changed


@dataclass(frozen=True)
class TokenNames:
    """Vocabulary entries of a tokenizer, indexed by token id; each array has shape ``(V,)``.

    Attributes:
        names: Vocabulary entries as strings, or ``None`` for tokens that have not been looked up.
        lengths: Lengths of the entries, int64; 0 for tokens that have not been looked up.
        continues: Whether an entry has the prefix of tokens that continue a word, bool.
    """

    names: np.ndarray
    lengths: np.ndarray
    continues: np.ndarray


def get_token_names(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> TokenNames:
    """Return the vocabulary entries that include the given ids.

    Each entry is looked up once, because the lookup is slow. So is counting the entries if many tokens were added.
    """
    cached = TOKEN_NAME_CACHE.get(tokenizer)
    min_size = 1 + int(ids.max(initial=0))
    if cached is None or len(cached.names) < min_size:
        size = max(len(tokenizer), min_size)
        cached = TokenNames(np.full(size, None), np.zeros(size, np.int64), np.zeros(size, bool))
        # Added tokens are found in the text as they are: with the prefix as well, they start a word.
        for name, token_id in tokenizer.get_added_vocab().items():
            if token_id < size:
                cached.names[token_id] = name
                cached.lengths[token_id] = len(name)
        TOKEN_NAME_CACHE[tokenizer] = cached
    missing = ids[cached.lengths[ids] == 0]
    if len(missing):
        new = np.flatnonzero(np.bincount(missing))  # np.unique would import numpy.ma.
        names = tokenizer.convert_ids_to_tokens(new.tolist())
        cached.names[new] = names
        if prefix := _continuation_prefix(tokenizer):
            cached.continues[new] = [name.startswith(prefix) for name in names]
        cached.lengths[new] = [
            *map(len, names)
        ]  # Set last, because a length marks the entry as complete for other threads.
    return cached


def _continuation_prefix(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the prefix of tokens that continue a word, such as ``##``, or ``None`` if the tokenizer has none."""
    prefix: str | None = getattr(tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None)
    return prefix or None


def _adjacent_characters(
    texts: Sequence[str], starts: np.ndarray, text_ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the code points of the character before each token and of its first character.

    Args:
        texts: The texts.
        starts: Start of each token in characters, int64 array of shape ``(T,)``.
        text_ids: Index of the text of each token, int64 array of shape ``(T,)``.

    Returns:
        Two uint32 arrays of shape ``(T,)``. The character before the first character of a text is a line break.
    """
    codes = np.frombuffer("".join(f"\n{text}\0" for text in texts).encode("utf-32-le"), np.uint32)
    text_starts = np.array([0, *accumulate(len(text) + 2 for text in texts)]) + 1
    positions = text_starts[text_ids] + starts
    return codes[positions - 1], codes[positions]
