"""From texts to rows of tokens, long texts in windows.

Long sequences of tokens -> overlapping windows that a model can take; nothing is cut off.

Each token is owned by one window, in which it has context on both sides; what other windows say of it is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ..devices.backend import TENSOR_LOCK

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase


WINDOW_CONTEXT = 16
"""How many tokens a window reads on either side of those that it owns: as few as cost no accuracy that could be seen on
long texts, because each is read twice."""


@dataclass(frozen=True)
class Windows:
    """Stretches of flat token positions; ``W`` windows.

    Attributes:
        firsts: ``(W,)`` int64, the first token that a window reads.
        lasts: ``(W,)`` int64, one past the last.
        owned_firsts: ``(W,)`` int64, the first token that it owns.
        owned_lasts: ``(W,)`` int64, one past the last.
    """

    firsts: np.ndarray
    lasts: np.ndarray
    owned_firsts: np.ndarray
    owned_lasts: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """How many tokens each window reads."""
        lengths: np.ndarray = self.lasts - self.firsts
        return lengths


def plan_windows(bounds: np.ndarray, word_starts: np.ndarray, limit: int) -> Windows:
    """Return windows over sequences: one for a short one, several that overlap for a long one.

    Args:
        bounds: ``(S + 1,)`` where each sequence begins.
        word_starts: Sorted positions of tokens that begin a word; a word is owned by one window if it fits in it.
        limit: How many tokens a window may read.

    Example:
        >>> windows = plan_windows(np.array([0, 3, 103]), np.arange(103), limit=80)
        >>> windows.firsts, windows.lasts, windows.owned_firsts, windows.owned_lasts
        (array([ 0,  3, 51]), array([  3,  83, 103]), array([ 0,  3, 67]), array([  3,  67, 103]))
    """
    lengths = np.diff(bounds)
    short = (lengths > 0) & (lengths <= limit)
    firsts, lasts = bounds[:-1][short], bounds[1:][short]
    plain = np.stack([firsts, lasts, firsts, lasts], axis=1)
    long = [
        window
        for number in np.flatnonzero(lengths > limit).tolist()
        for window in cut(bounds, number, word_starts, limit)
    ]
    table = np.concatenate([plain, np.array(long, np.int64).reshape(-1, 4)])
    return Windows(*table.T)


def cut(bounds: np.ndarray, number: int, word_starts: np.ndarray, limit: int) -> list[tuple[int, int, int, int]]:
    """Return the windows over one long sequence, as first, last, first owned and last owned."""
    begin, end = int(bounds[number]), int(bounds[number + 1])
    context = min(WINDOW_CONTEXT, limit // 4)
    windows: list[tuple[int, int, int, int]] = []
    owned = begin
    while owned < end:
        first = max(begin, owned - context)
        last = min(end, first + limit)
        owned_last = end if last == end else last_word_start(word_starts, owned, last - context)
        windows.append((first, last, owned, owned_last))
        owned = owned_last
    return windows


def last_word_start(word_starts: np.ndarray, after: int, until: int) -> int:
    """Return the last word start in ``(after, until]``, or ``until`` where a single word fills it all."""
    place = int(np.searchsorted(word_starts, until, side="right")) - 1
    return int(word_starts[place]) if place >= 0 and word_starts[place] > after else until


SPACE = ord(" ")

PART = 1 << 19
"""A text of more characters is read in parts of about as many: a tokenizer takes about 150 bytes for each (10 MB of
English notes took 1.5 GB at once, and 0.3 GB in parts)."""

CONTEXT = 1 << 10
"""A part is read with so many characters of its neighbours, so that its tokens are those of the whole text."""

SAMPLES = ("a", "the", "1", ".", "中")
"""Texts of which a tokenizer surely makes a token, to see what it puts around it."""


@dataclass(frozen=True)
class Frame:
    """What a tokenizer puts before and after the tokens of a text, and what fills a row up.

    Attributes:
        before: Token numbers before the text's.
        after: Token numbers after the text's.
        before_types: The token types of ``before``.
        after_types: The token types of ``after``.
        token_type: The token type of the text's own tokens.
        padding: The token number that fills a row up.
        padding_type: Its token type.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    before_types: tuple[int, ...]
    after_types: tuple[int, ...]
    token_type: int
    padding: int
    padding_type: int

    @property
    def size(self) -> int:
        """How many tokens it adds."""
        return len(self.before) + len(self.after)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Frame | None:
        """Return the frame of a tokenizer, ``None`` where it makes no token of anything."""
        samples = encode(tokenizer, SAMPLES, special_tokens=True)
        inner = [(sample, np.flatnonzero(np.equal(sample.special_tokens_mask, 0))) for sample in samples]
        for sample, positions in inner:
            if len(positions):
                before, after = slice(0, positions[0]), slice(positions[-1] + 1, None)
                ids, types = tuple(sample.ids), tuple(sample.type_ids)
                return cls(
                    before=ids[before],
                    after=ids[after],
                    before_types=types[before],
                    after_types=types[after],
                    token_type=types[positions[0]],
                    padding=tokenizer.pad_token_id or 0,
                    padding_type=tokenizer.pad_token_type_id,
                )
        return None


@dataclass(frozen=True)
class Truncation:
    """How the tokenizers library cuts what is longer than a model takes, as transformers has it do.

    Attributes:
        frame: What stands around a piece.
        limit: How many tokens of the text a piece may have.
        stride: By how many tokens two pieces overlap; ``None`` drops all pieces but the first.
        side: On which side it cuts off.
    """

    frame: Frame
    limit: int
    stride: int | None
    side: str

    def pieces(self, encoding: Encoding) -> list[Encoding]:
        """Return the pieces of a text in transformers' order, without what stands around them."""
        pieces = [encoding] if self.stride is None else [encoding, *encoding.overflowing]
        for piece in pieces:
            piece.truncate(len(piece) - len(self.frame.after))
            piece.truncate(len(piece) - len(self.frame.before), direction="left")
        return pieces


@dataclass(frozen=True)
class Tokens:
    """The tokens of some sequences, end to end; ``T`` tokens in ``S`` sequences.

    Attributes:
        ids: ``(T,)`` int64, token numbers.
        starts: ``(T,)`` int64, where in its text a token begins, in characters.
        ends: ``(T,)`` int64, where it ends.
        subwords: ``(T,)`` bool, whether a token goes on with the word of the one before it.
        bounds: ``(S + 1,)`` int64, where each sequence begins; the last is ``T``.
        owners: ``(S,)`` int64, the number of the text that a sequence is of.
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    subwords: np.ndarray
    bounds: np.ndarray
    owners: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def sequences(self, positions: np.ndarray) -> np.ndarray:
        """Return the number of the sequence that each token position is in."""
        return np.searchsorted(self.bounds, positions, side="right") - 1

    def piece(self, texts: Sequence[str], position: int) -> str:
        """Return what the text has in the place of a token."""
        text = int(self.owners[int(self.sequences(np.array(position)))])
        return texts[text][int(self.starts[position]) : int(self.ends[position])]


def encode(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Any],
    truncation: Truncation | None = None,
    words: bool = False,
    special_tokens: bool = False,
) -> list[Encoding]:
    """Return what a fast tokenizer makes of texts: whole, where no truncation is asked for, and nothing filled up.

    A tokenizer's settings for both are its own state, hence the lock.
    """
    backend = tokenizer.backend_tokenizer
    with TENSOR_LOCK:
        if truncation is None:
            backend.no_truncation()
        else:
            special_tokens, length = True, truncation.limit + truncation.frame.size
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
class Joined:
    """What a tokenizer makes of a text that it reads in parts, as an ``Encoding`` has it.

    Attributes:
        ids: ``(T,)`` int64, token numbers.
        offsets: ``(T, 2)`` int64, where each token begins and ends, in characters.
    """

    ids: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def between(self, first: int, last: int) -> Joined:
        """Return the tokens that begin in a stretch of the text."""
        inside = (self.offsets[:, 0] >= first) & (self.offsets[:, 0] < last)
        return Joined(self.ids[inside], self.offsets[inside])

    def same(self, other: Joined) -> bool:
        """Tell whether other tokens are the same."""
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.offsets, other.offsets)


def in_parts(
    tokenizer: PreTrainedTokenizerBase, text: str, length: int = PART, context: int = CONTEXT
) -> Joined | Encoding:
    """Return the tokens of a long text, read in parts; at once where two parts do not agree on what both have read.

    Args:
        tokenizer: A fast tokenizer.
        text: The text.
        length: About how many characters a part has.
        context: How many characters beside it are read with it.
    """
    seams = [0, *(seam_before(text, place, context) for place in range(length, len(text), length)), len(text) + 1]
    parts: list[Joined] = []
    before: Joined | None = None
    for begin, end in pairwise(seams):
        left = max(0, begin - context)
        (encoding,) = encode(tokenizer, [text[left : end + context]])
        read = Joined(np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2) + left)
        around = begin - context // 2, begin + context // 2
        if before is not None and not before.between(*around).same(read.between(*around)):
            return encode(tokenizer, [text])[0]
        parts.append(read.between(begin, end))
        before = read
    return Joined(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "offsets")))


def seam_before(text: str, place: int, context: int) -> int:
    """Return where white space begins a word before a place in a text, and the place itself where none is near."""
    return next((near for near in range(place, place - context // 2, -1) if text[near].isspace()), place)


def tokenise(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], truncation: Truncation | None = None) -> Tokens:
    """Return the tokens of some texts, one sequence for each or for each piece of it.

    Args:
        tokenizer: A fast tokenizer.
        texts: The texts, of any length.
        truncation: How to cut those that are too long; ``None`` leaves them whole.
    """
    encodings: Sequence[Encoding | Joined]
    if truncation is None and max(map(len, texts), default=0) > PART:
        encodings, owners = [in_parts(tokenizer, text) for text in texts], np.arange(len(texts))
    else:
        encodings, owners = flat(encode(tokenizer, texts, truncation), truncation)
    starts, ends = offsets(encodings)
    return assemble(tokenizer, encodings, owners, texts, starts, ends)


def tokenise_words(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Sequence[str]],
    delimiter: str,
    truncation: Truncation | None = None,
) -> Tokens:
    """Return the tokens of texts that are split into words; offsets count in the words joined by the delimiter."""
    encodings, owners = flat(encode(tokenizer, texts, truncation, words=True), truncation)
    begins = [np.array([0, *accumulate(len(word) + len(delimiter) for word in words)]) for words in texts]
    shifts = [
        begins[owner][np.array(encoding.word_ids, np.int64)]
        for owner, encoding in zip(owners.tolist(), encodings, strict=True)
    ]
    shift = np.concatenate([np.zeros(0, np.int64), *shifts])
    starts, ends = offsets(encodings)
    joined = [delimiter.join(words) for words in texts]
    return assemble(tokenizer, encodings, owners, joined, starts + shift, ends + shift)


def flat(encodings: Sequence[Encoding], truncation: Truncation | None) -> tuple[list[Encoding], np.ndarray]:
    """Return the pieces of all texts, and the number of the text that each is of."""
    if truncation is None:
        return list(encodings), np.arange(len(encodings))
    pieces = [truncation.pieces(encoding) for encoding in encodings]
    return list(chain.from_iterable(pieces)), np.repeat(np.arange(len(pieces)), [*map(len, pieces)])


def assemble(  # noqa: PLR0913, PLR0917 - the arrays of a value
    tokenizer: PreTrainedTokenizerBase,
    encodings: Sequence[Encoding | Joined],
    owners: np.ndarray,
    texts: Sequence[str],
    starts: np.ndarray,
    ends: np.ndarray,
) -> Tokens:
    """Return encodings as one flat value."""
    bounds = np.array([0, *accumulate(map(len, encodings))])
    ids = np.fromiter(chain.from_iterable(encoding.ids for encoding in encodings), np.int64, bounds[-1])
    if getattr(tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None):
        subwords = token_lengths(tokenizer, ids) != ends - starts
    else:
        subwords = without_space(texts, starts, np.repeat(owners, np.diff(bounds)))
    if tokenizer.unk_token_id is not None:
        subwords &= ids != tokenizer.unk_token_id
    return Tokens(ids, starts, ends, subwords, bounds, owners)


def offsets(encodings: Sequence[Encoding | Joined]) -> tuple[np.ndarray, np.ndarray]:
    """Return where all tokens begin and end, in characters."""
    if any(isinstance(encoding, Joined) for encoding in encodings):
        table = np.concatenate([np.array(encoding.offsets, np.int64).reshape(-1, 2) for encoding in encodings])
    else:
        pairs = chain.from_iterable(encoding.offsets for encoding in encodings)
        table = np.fromiter(chain.from_iterable(pairs), np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def token_lengths(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> np.ndarray:
    """Return the length of each token as it stands in the vocabulary, in characters.

    A token that is longer than its piece of the text, by a prefix such as ``##``, goes on with a word: the rule of
    transformers' ``TokenClassificationPipeline.gather_pre_entities``.
    """
    distinct, places = np.unique(ids, return_inverse=True)
    names = tokenizer.convert_ids_to_tokens(distinct.tolist())
    return np.fromiter(map(len, names), np.int64, len(names))[places]


def without_space(texts: Sequence[str], starts: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Tell of each token whether there is no space at its first character or just before it.

    This is what transformers takes for the inside of a word where a tokenizer does not mark it (byte-level BPE and
    Unigram), also in languages without spaces.
    """
    codes = np.frombuffer("".join(f"{text}\0" for text in texts).encode("utf-32-le"), np.uint32)
    begins = np.array([0, *accumulate(len(text) + 1 for text in texts)])
    positions = begins[owners] + starts
    spaces = codes == SPACE
    inside: np.ndarray = (starts > 0) & ~spaces[positions] & ~spaces[positions - 1]
    return inside
