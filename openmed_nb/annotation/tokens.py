"""From texts to tokens, and the windows in which long texts are read.

Everything is flat: the tokens of all texts of a chunk stand end to end in arrays, and windows are stretches of them. A
window reads some tokens on either side of those that it owns, so that each token has context; what other windows compute
for it is not used. Nothing is cut off.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ..devices.backend import TOKENIZER_LOCK
from .boundaries import is_separator

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase


# Tokens of context on either side: as few as cost no accuracy that could be seen on long texts, because each is read twice.
WINDOW_CONTEXT = 16

# A text of more characters is read in parts of about this size: a tokenizer takes about 150 bytes for each character (10 MB
# of English notes took 1.5 GB at once, and 0.3 GB in parts).
MAX_PART_CHARACTERS = 1 << 19

# A part is read with this many characters of its neighbours, so that its tokens are those of the whole text.
PART_CONTEXT = 1 << 10

# Texts of which every tokenizer makes at least one token, to see what it puts around it.
PROBE_TEXTS = ("a", "the", "1", ".", "中")

SPACE = ord(" ")

# What :func:`names_of` knows of each tokenizer.
TOKEN_NAME_CACHE: weakref.WeakKeyDictionary[Any, TokenNames] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Windows:
    """Stretches of flat token positions, each an int64 array of ``(W,)``; an end is one past the last token."""

    starts: np.ndarray  # read
    ends: np.ndarray
    owned_starts: np.ndarray  # owned
    owned_ends: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """How many tokens each window reads."""
        lengths: np.ndarray = self.ends - self.starts
        return lengths


def plan_windows(bounds: np.ndarray, word_starts: np.ndarray, max_tokens: int) -> Windows:
    """Return windows over sequences: one for a short sequence, several that overlap for a long one."""
    lengths = bounds[1:] - bounds[:-1]
    short = (lengths > 0) & (lengths <= max_tokens)
    firsts, lasts = bounds[:-1][short], bounds[1:][short]
    if len(lengths) == len(firsts):
        return Windows(firsts, lasts, firsts, lasts)
    whole = np.stack([firsts, lasts, firsts, lasts], axis=1)
    long = [
        window
        for number in np.flatnonzero(lengths > max_tokens).tolist()
        for window in plan_overlapping_windows(int(bounds[number]), int(bounds[number + 1]), word_starts, max_tokens)
    ]
    return Windows(*np.concatenate([whole, np.array(long, np.int64).reshape(-1, 4)]).T)


def plan_overlapping_windows(
    begin: int, end: int, word_starts: np.ndarray, limit: int
) -> list[tuple[int, int, int, int]]:
    """Return the windows over one long sequence, as first, last, first owned and last owned."""
    context = min(WINDOW_CONTEXT, limit // 4)
    windows: list[tuple[int, int, int, int]] = []
    owned = begin
    while owned < end:
        first = max(begin, owned - context)
        last = owned_last = min(end, first + limit)
        if last < end:
            # Hand over at the last word start, or anywhere if a single word fills the window.
            owned_last = last - context
            place = int(np.searchsorted(word_starts, owned_last, side="right")) - 1
            if place >= 0 and word_starts[place] > owned:
                owned_last = int(word_starts[place])
        windows.append((first, last, owned, owned_last))
        owned = owned_last
    return windows


@dataclass(frozen=True)
class SpecialTokens:
    """What a tokenizer puts before and after the tokens of a text, with token types, and what fills a row up."""

    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    prefix_type_ids: tuple[int, ...]
    suffix_type_ids: tuple[int, ...]
    token_type_id: int  # of the text's own tokens
    pad_token_id: int
    pad_token_type_id: int

    @property
    def num_special_tokens(self) -> int:
        """How many tokens it adds."""
        return len(self.prefix_ids) + len(self.suffix_ids)

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> SpecialTokens | None:
        """Return the frame of a tokenizer, ``None`` if it makes no token of anything."""
        for sample in encode(tokenizer, PROBE_TEXTS, special_tokens=True):
            positions = np.flatnonzero(np.equal(sample.special_tokens_mask, 0))
            if len(positions):
                before, after = slice(0, positions[0]), slice(positions[-1] + 1, None)
                ids, types = tuple(sample.ids), tuple(sample.type_ids)
                return cls(
                    prefix_ids=ids[before],
                    suffix_ids=ids[after],
                    prefix_type_ids=types[before],
                    suffix_type_ids=types[after],
                    token_type_id=types[positions[0]],
                    pad_token_id=tokenizer.pad_token_id or 0,
                    pad_token_type_id=tokenizer.pad_token_type_id,
                )
        return None


@dataclass(frozen=True)
class Truncation:
    """How the tokenizers library cuts what is longer than a model takes, as transformers asks it to."""

    frame: SpecialTokens
    max_length: int  # tokens of the text in a piece
    stride: int | None  # tokens that two pieces share; None drops all pieces but the first
    side: str  # where it cuts off

    def split_overflow(self, encoding: Encoding) -> list[Encoding]:
        """Return the pieces of a text in transformers' order, without what stands around them."""
        pieces = [encoding] if self.stride is None else [encoding, *encoding.overflowing]
        for piece in pieces:
            piece.truncate(len(piece) - len(self.frame.suffix_ids))
            piece.truncate(len(piece) - len(self.frame.prefix_ids), direction="left")
        return pieces


@dataclass(frozen=True)
class Tokens:
    """The tokens of some sequences, end to end; ``T`` tokens in ``S`` sequences."""

    ids: np.ndarray  # (T,) int64
    starts: np.ndarray  # (T,) int64, in characters of the text
    ends: np.ndarray  # (T,) int64
    is_subword: np.ndarray  # (T,) bool, whether a token goes on with the word of the one before it
    sequence_offsets: np.ndarray  # (S + 1,) int64, where each sequence begins; the last is T
    text_ids: np.ndarray  # (S,) int64, the number of the text that a sequence is of

    def __len__(self) -> int:
        return len(self.ids)

    @functools.cached_property
    def sequence_starts(self) -> np.ndarray:
        """The position of the first token of each sequence that has one."""
        begins = self.sequence_offsets[:-1]
        starts: np.ndarray = begins[begins < self.sequence_offsets[1:]]
        return starts

    @functools.cached_property
    def word_starts(self) -> np.ndarray:
        """The positions of the tokens that begin a word; every sequence begins with one."""
        begins = ~self.is_subword
        begins[self.sequence_starts] = True
        return np.flatnonzero(begins)

    def sequence_ids(self, positions: np.ndarray) -> np.ndarray:
        """Return the number of the sequence that each token position is in."""
        return np.searchsorted(self.sequence_offsets, positions, side="right") - 1

    def token_text(self, texts: Sequence[str], position: int) -> str:
        """Return what the text has in the place of a token."""
        text = int(self.text_ids[int(self.sequence_ids(np.array(position)))])
        return texts[text][int(self.starts[position]) : int(self.ends[position])]


def expand_ranges(firsts: np.ndarray, lasts: np.ndarray) -> np.ndarray:
    """Return the positions in stretches of tokens, one stretch after another."""
    if len(firsts) == 1:  # A short text alone, whose answer takes little longer than what numpy does here.
        return np.arange(firsts[0], lasts[0])
    counts = lasts - firsts
    shifts: np.ndarray = np.repeat(firsts - (np.cumsum(counts) - counts), counts)
    return shifts + np.arange(len(shifts))


def encode(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Any],
    truncation: Truncation | None = None,
    words: bool = False,
    special_tokens: bool = False,
) -> list[Encoding]:
    """Return what a fast tokenizer makes of texts: whole unless a truncation is given, and nothing filled up."""
    backend = tokenizer.backend_tokenizer
    with TOKENIZER_LOCK:
        if truncation is None:
            backend.no_truncation()
        else:
            special_tokens, length = True, truncation.max_length + truncation.frame.num_special_tokens
            backend.enable_truncation(length, stride=truncation.stride or 0, direction=truncation.side)
        backend.no_padding()
        backend.encode_special_tokens = tokenizer.split_special_tokens
        if len(texts) == 1:  # No threads for one text.
            return [backend.encode(texts[0], is_pretokenized=words, add_special_tokens=special_tokens)]
        encodings: list[Encoding] = backend.encode_batch(
            list(texts), is_pretokenized=words, add_special_tokens=special_tokens
        )
    return encodings


@dataclass(frozen=True)
class JoinedEncoding:
    """The tokens of a text that was read in parts; it stands in the place of an ``Encoding``."""

    ids: np.ndarray  # (T,) int64
    offsets: np.ndarray  # (T, 2) int64, in characters
    starts_piece: np.ndarray  # (T,) bool, whether the tokenizer's pre-tokenizer starts a piece there

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def word_ids(self) -> np.ndarray:
        """The number of the piece of each token."""
        return np.cumsum(self.starts_piece)

    def tokens_starting_in(self, first: int, last: int) -> JoinedEncoding:
        """Return the tokens that begin in a stretch of the text."""
        return self._only((self.offsets[:, 0] >= first) & (self.offsets[:, 0] < last))

    def tokens_overlapping(self, first: int, last: int) -> JoinedEncoding:
        """Return the tokens that have a character of a stretch of the text."""
        return self._only((self.offsets[:, 1] > first) & (self.offsets[:, 0] < last))

    def _only(self, inside: np.ndarray) -> JoinedEncoding:
        return JoinedEncoding(self.ids[inside], self.offsets[inside], self.starts_piece[inside])


def encode_in_parts(
    tokenizer: PreTrainedTokenizerBase, text: str, length: int = MAX_PART_CHARACTERS, context: int = PART_CONTEXT
) -> JoinedEncoding | Encoding:
    """Return the tokens of a long text, read in parts; at once if two parts do not agree on what both have read."""
    # A part begins at white space if some is near.
    cuts = (
        next((near for near in range(place, place - context // 2, -1) if text[near].isspace()), place)
        for place in range(length, len(text), length)
    )
    parts: list[JoinedEncoding] = []
    before: JoinedEncoding | None = None
    for begin, end in pairwise([0, *cuts, len(text) + 1]):
        left = max(0, begin - context)
        (encoding,) = encode(tokenizer, [text[left : end + context]])
        read = JoinedEncoding(
            np.array(encoding.ids, np.int64),
            np.array(encoding.offsets, np.int64).reshape(-1, 2) + left,
            changes(piece_numbers([encoding], len(encoding))),
        )
        if before is not None:
            one, other = (
                part.tokens_overlapping(begin - context // 2, begin + context // 2) for part in (before, read)
            )
            if not (np.array_equal(one.ids, other.ids) and np.array_equal(one.offsets, other.offsets)):
                return encode(tokenizer, [text])[0]
        parts.append(read.tokens_starting_in(begin, end))
        before = read
    return JoinedEncoding(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.offsets for part in parts]),
        np.concatenate([part.starts_piece for part in parts]),
    )


def tokenize(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    truncation: Truncation | None = None,
    transformers_boundaries: bool = False,
) -> Tokens:
    """Return the tokens of some texts, one sequence for each or for each piece of it."""
    encodings, owners = encode_batch(tokenizer, texts, truncation)
    return build_tokens(tokenizer, encodings, owners, texts, transformers_boundaries=transformers_boundaries)


def encode_batch(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], truncation: Truncation | None
) -> tuple[Sequence[Encoding | JoinedEncoding], np.ndarray]:
    """Return what :func:`assemble` makes tokens of; other threads run meanwhile, for it is hardly work of Python."""
    if truncation is None and max(map(len, texts), default=0) > MAX_PART_CHARACTERS:
        return [encode_in_parts(tokenizer, text) for text in texts], np.arange(len(texts))
    return split_all_overflow(encode(tokenizer, texts, truncation), truncation)


def tokenize_words(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Sequence[str]],
    delimiter: str,
    truncation: Truncation | None = None,
    transformers_boundaries: bool = False,
) -> Tokens:
    """Return the tokens of texts that are split into words; offsets count in the words joined by the delimiter."""
    encodings, owners = split_all_overflow(encode(tokenizer, texts, truncation, words=True), truncation)
    begins = [np.array([0, *accumulate(len(word) + len(delimiter) for word in words)]) for words in texts]
    shifts = [
        begins[owner][np.array(encoding.word_ids, np.int64)]
        for owner, encoding in zip(owners.tolist(), encodings, strict=True)
    ]
    joined = [delimiter.join(words) for words in texts]
    shift = np.concatenate([np.zeros(0, np.int64), *shifts])
    return build_tokens(
        tokenizer, encodings, owners, joined, shift=shift, transformers_boundaries=transformers_boundaries
    )


def split_all_overflow(encodings: list[Encoding], truncation: Truncation | None) -> tuple[list[Encoding], np.ndarray]:
    """Return the pieces of all texts, and the number of the text that each is of."""
    if truncation is None:
        return encodings, np.arange(len(encodings))
    pieces = [truncation.split_overflow(encoding) for encoding in encodings]
    return list(chain.from_iterable(pieces)), np.repeat(np.arange(len(pieces)), [*map(len, pieces)])


def build_tokens(  # noqa: PLR0913 - the last two are options
    tokenizer: PreTrainedTokenizerBase,
    encodings: Sequence[Encoding | JoinedEncoding],
    owners: np.ndarray,
    texts: Sequence[str],
    *,
    shift: np.ndarray | None = None,
    transformers_boundaries: bool = False,
) -> Tokens:
    """Return encodings as one flat value.

    Args:
        tokenizer: The tokenizer that made them.
        encodings: The encodings, one for each sequence.
        owners: int64 of ``(S,)``, the number of the text of each sequence.
        texts: The texts.
        shift: int64 of ``(T,)``, the first character of the word of each token, if texts are split into words.
        transformers_boundaries: Whether words start where transformers has them start, see :func:`transformers_subwords`.
    """
    bounds = np.array([0, *accumulate(map(len, encodings))])
    ids = np.fromiter(chain.from_iterable(encoding.ids for encoding in encodings), np.int64, bounds[-1])
    offsets = chain.from_iterable(chain.from_iterable(encoding.offsets for encoding in encodings))
    starts, ends = np.fromiter(offsets, np.int64).reshape(-1, 2).T
    if shift is not None:
        starts, ends = starts + shift, ends + shift
    text_numbers = np.repeat(owners, np.diff(bounds))
    if transformers_boundaries:
        lengths = ends - starts
        subwords = transformers_subwords(tokenizer, ids, lengths, lacks_leading_space(texts, starts, text_numbers))
        return Tokens(ids, starts, ends, subwords, bounds, owners)
    starts_word = changes(piece_numbers(encodings, int(bounds[-1])))
    if continuation_prefix(tokenizer):
        starts_word |= ~get_token_names(tokenizer, ids).continues[ids]
    else:
        # A token that shares a character with the one before it continues that character, whatever it is.
        shares_character = np.append(False, starts[1:] < ends[:-1])
        starts_word |= beside_separators(texts, starts, text_numbers) & ~shares_character
    return Tokens(ids, starts, ends, ~starts_word, bounds, owners)


def transformers_subwords(
    tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, lengths: np.ndarray, inside: np.ndarray
) -> np.ndarray:
    """Return for each token whether it continues a word by the rule of ``TokenClassificationPipeline.gather_pre_entities``.

    A token does whose name is longer than its part of the text, by a prefix such as ``##``; without such a prefix, a token
    that no space starts or precedes, as ``inside`` tells. The unknown token never does.
    """
    subwords: np.ndarray = (
        get_token_names(tokenizer, ids).lengths[ids] != lengths if continuation_prefix(tokenizer) else inside
    )
    if tokenizer.unk_token_id is not None:
        subwords &= ids != tokenizer.unk_token_id
    return subwords


def piece_numbers(encodings: Sequence[Encoding | JoinedEncoding], count: int) -> np.ndarray:
    """Return for each token the number of the piece that the pre-tokenizer has made of its text, -1 without one."""
    numbers = chain.from_iterable(encoding.word_ids for encoding in encodings)
    return np.fromiter((-1 if number is None else number for number in numbers), np.int64, count)


def changes(numbers: np.ndarray) -> np.ndarray:
    """Return for each number whether it is not the one before it; true for the first."""
    changed = np.ones(len(numbers), bool)
    changed[1:] = numbers[1:] != numbers[:-1]
    return changed


@dataclass(frozen=True)
class TokenNames:
    """The names of a tokenizer's tokens by their numbers; each array is ``(V,)``."""

    names: np.ndarray  # of strings, None for tokens that no text had
    lengths: np.ndarray  # int64
    continues: np.ndarray  # bool, whether a name has the prefix of tokens that continue a word


def get_token_names(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> TokenNames:
    """Return the names of tokens, right for these ids; asked of the tokenizer once, because it is slow to answer."""
    size = max(len(tokenizer), 1 + int(ids.max(initial=0)))
    known = TOKEN_NAME_CACHE.get(tokenizer)
    if known is None or len(known.names) < size:
        known = TokenNames(np.full(size, None), np.zeros(size, np.int64), np.zeros(size, bool))
        TOKEN_NAME_CACHE[tokenizer] = known
    missing = ids[known.lengths[ids] == 0]
    if len(missing):
        new = np.flatnonzero(np.bincount(missing))  # np.unique imports numpy.ma.
        names = known.names[new] = tokenizer.convert_ids_to_tokens(new.tolist())
        if prefix := continuation_prefix(tokenizer):
            known.continues[new] = [name.startswith(prefix) for name in names]
        known.lengths[new] = [*map(len, names)]  # Last: it tells other threads that the names are known.
    return known


def continuation_prefix(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return what begins the name of a token that goes on with a word, ``None`` if the names do not tell that."""
    prefix: str | None = getattr(tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None)
    return prefix or None


def beside_separators(texts: Sequence[str], starts: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Return for each token whether a separator is its first character or the one before it.

    Args:
        texts: The texts.
        starts: int64 of ``(T,)``, the first character of each token.
        owners: int64 of ``(T,)``, the number of the text of each token.

    Returns:
        bool of ``(T,)``; also true for the first token of a text.
    """
    codes = np.frombuffer("".join(f"\n{text}\0" for text in texts).encode("utf-32-le"), np.uint32)
    text_starts = np.array([1, *accumulate(len(text) + 2 for text in texts)])
    text_starts[1:] += 1
    positions = text_starts[owners] + starts
    pairs = np.stack([codes[positions - 1], codes[positions]])
    distinct = sorted(set(pairs.ravel().tolist()))
    separators = np.array([is_separator(code) for code in distinct], bool)
    before, at = separators[np.searchsorted(np.array(distinct, np.uint32), pairs)]
    beside: np.ndarray = before | at
    return beside


def lacks_leading_space(texts: Sequence[str], starts: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Return for each token whether there is no space at its first character or just before it.

    This is what transformers takes for the inside of a word if a tokenizer does not mark it (byte-level BPE and Unigram),
    also in languages without spaces.
    """
    codes = np.frombuffer("".join(f"{text}\0" for text in texts).encode("utf-32-le"), np.uint32)
    begins = np.array([0, *accumulate(len(text) + 1 for text in texts)])
    positions = begins[owners] + starts
    spaces = codes == SPACE
    inside: np.ndarray = (starts > 0) & ~spaces[positions] & ~spaces[positions - 1]
    return inside
