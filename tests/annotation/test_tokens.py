"""Texts as tokens, and the windows over those of long texts; answers do not show where a window ends."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TokenClassificationPipeline

from openmed_nb.annotation.pipeline import AnnotationPipeline
from openmed_nb.annotation.tokens import WINDOW_CONTEXT as CONTEXT
from openmed_nb.annotation.tokens import (
    SpecialTokens,
    build_tokens,
    lacks_leading_space,
    plan_windows,
    tokenize,
)

KINDS = ("bert", "roberta", "modernbert", "xlm-roberta")
"""One architecture for each kind of tokenizer."""


def names(tokenizer, numbers):
    """Return tokens by their names."""
    return tokenizer.convert_ids_to_tokens(list(numbers))


class TestFrame:
    """What a tokenizer puts around a text."""

    @pytest.mark.parametrize(
        ("name", "before", "after"),
        [
            ("bert", ["[CLS]"], ["[SEP]"]),
            ("roberta", ["<s>"], ["</s>"]),
            ("xlnet", [], ["</s>", "<s>"]),
            ("gpt2", [], []),
        ],
    )
    def test_special_tokens(self, architectures, name, before, after):
        """The special tokens of every kind of tokenizer are found on the side where they stand."""
        tokenizer = architectures.tokenizer_of(name)
        frame = SpecialTokens.from_tokenizer(tokenizer)
        assert (names(tokenizer, frame.prefix_ids), names(tokenizer, frame.suffix_ids)) == (before, after)
        assert frame.num_special_tokens == len(before) + len(after) == tokenizer.num_special_tokens_to_add()

    @pytest.mark.parametrize("letters", ["the", "中"])
    def test_special_tokens_need_one_known_letter(self, letters):
        """A tokenizer of any script is probed with a text that it knows."""
        vocabulary = {letter: number for number, letter in enumerate(letters)}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, [])))
        assert SpecialTokens.from_tokenizer(tokenizer) == SpecialTokens((), (), (), (), 0, 0, 0)

    def test_no_special_tokens_without_a_known_letter(self):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"x": 0}, [])))
        assert SpecialTokens.from_tokenizer(tokenizer) is None


class TestParts:
    """Long texts, which are read in parts."""

    @given(some.sampled_from(KINDS), some.lists(some.text(max_size=40), max_size=5))
    def test_tokenize_equals_transformers(self, architectures, name, texts):
        """Tokens and offsets of any texts are those that transformers has for each."""
        tokenizer = architectures.tokenizer_of(name)
        tokens = tokenize(tokenizer, texts)
        expected = [tokenizer(text, add_special_tokens=False, return_offsets_mapping=True) for text in texts]
        assert tokens.ids.tolist() == [number for encoding in expected for number in encoding.input_ids]
        pairs = zip(tokens.starts.tolist(), tokens.ends.tolist(), strict=True)
        assert list(pairs) == [pair for encoding in expected for pair in encoding.offset_mapping]


@dataclass
class Pieces:
    """Tokens in the form of an ``Encoding``."""

    ids: list
    offsets: list
    word_ids: list

    def __len__(self):
        return len(self.ids)


class TestSubwords:
    """Tokens that continue the previous word."""

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("asthma", [False]),
            ("no asthmad", [False, False, True]),
            ("asthma,", [False, False]),
            ("a ᚠ", [False, False]),
        ],
    )
    def test_is_subword_follows_prefix(self, architectures, text, expected):
        """If the tokenizer marks subwords, the marks are used. Punctuation and unknown tokens start a word."""
        assert tokenize(architectures.tokenizer_of("bert"), [text]).is_subword.tolist() == expected

    @pytest.mark.parametrize(
        ("pieces", "expected"),
        [
            ([0, 0, 0], [False, True, True]),
            ([1, None, None], [False, False, True]),
            ([None, 1, 1], [False, False, True]),
            ([0, 1, 0], [False, False, False]),
        ],
    )
    def test_is_subword_follows_pieces(self, architectures, pieces, expected):
        """Without a prefix, a token continues the piece of the previous token. Tokens without a piece form one."""
        encoding = Pieces([5, 6, 7], [(0, 1), (1, 2), (2, 3)], pieces)
        tokens = build_tokens(architectures.tokenizer_of("roberta"), [encoding], ["abc"])
        assert tokens.is_subword.tolist() == expected

    @pytest.mark.parametrize(
        ("text", "offsets", "expected"),
        [
            ("a-b", [(0, 1), (1, 2), (2, 3)], [False, False, False]),
            ("abc", [(0, 1), (1, 2), (2, 3)], [False, True, True]),
            ("a b", [(0, 1), (1, 3), (2, 3)], [False, False, True]),
            ("a.b", [(0, 1), (1, 2), (1, 3)], [False, False, True]),
        ],
    )
    def test_is_subword_ends_at_separators(self, architectures, text, offsets, expected):
        """A token at a separator starts a word, unless it shares a character with the previous token."""
        encoding = Pieces([5, 6, 7], offsets, [0, 0, 0])
        tokens = build_tokens(architectures.tokenizer_of("roberta"), [encoding], [text])
        assert tokens.is_subword.tolist() == expected

    @pytest.mark.parametrize(
        ("text", "inside"),
        [
            ("no asthma", "010011111"),
            (" a,b", "0011"),
            ("a  b", "0000"),
            ("a\tb\nc\u00a0d", "0111111"),
            ("患者 有", "0100"),
        ],
    )
    def test_lacks_leading_space(self, text, inside):
        """Elsewhere a character is inside a word unless it or the one before it is a space; only U+0020 counts as one."""
        starts = np.arange(len(text))
        found = lacks_leading_space([text], starts, np.zeros(len(text), np.int64))
        assert "".join(str(int(flag)) for flag in found) == inside

    @given(some.lists(some.text(some.sampled_from(" a中\u00a0\0🙂"), min_size=1, max_size=12), min_size=1, max_size=4))
    def test_lacks_leading_space_equals_transformers(self, texts):
        """The rule is transformers': ``start > 0 and " " not in sentence[start - 1 : start + 1]``, in every text."""
        places = [(owner, start) for owner, text in enumerate(texts) for start in range(len(text) + 1)]
        owners, starts = np.array(places).T
        expected = [start > 0 and " " not in texts[owner][start - 1 : start + 1] for owner, start in places]
        assert lacks_leading_space(texts, starts, owners).tolist() == expected


def test_tokens_have_fixed_dtypes(architectures):
    """All arrays are int64, except for the bool array ``is_subword``, even without tokens."""
    for kind in KINDS:
        tokenizer = architectures.tokenizer_of(kind)
        for texts in (["no asthma", "", "患者"], [""], []):
            types = {name: array.dtype.name for name, array in vars(tokenize(tokenizer, texts)).items()}
            assert types == {**dict.fromkeys(types, "int64"), "is_subword": "bool"}, (kind, texts)


STRATEGIES = ("none", "simple", "first", "average", "max")

LONG_TEXT = "patient has no " * 40 + "hypertension"
"""A text whose only disease is beyond the model's limit."""

WORD = some.sampled_from(
    ["the", "patient", ".", "2", "Ωmega", "asthma", "diabetes", "mellitus", "hypertension", "hyper"]
    + ["hyper" + "tension" * times for times in (3, 20, 80)]
)
"""Words of one token and of up to 81, known and unknown, inside a disease and not."""


@some.composite
def sequences(draw):
    """Return the bounds of sequences of tokens, the tokens that begin a word, and a limit."""
    lengths = draw(some.lists(some.integers(0, 150), max_size=5))
    bounds = np.cumsum([0, *lengths])
    begins = draw(some.lists(some.booleans(), min_size=int(bounds[-1]), max_size=int(bounds[-1])))
    marked = np.array(begins, bool)
    marked[bounds[:-1][np.diff(bounds) > 0]] = True
    return bounds, np.flatnonzero(marked), draw(some.integers(1, 100))


def rows(windows):
    """Return windows as rows of first, last, first owned and last owned."""
    table = np.stack([windows.starts, windows.ends, windows.owned_starts, windows.owned_ends], axis=1)
    return [tuple(row) for row in table.tolist()]


class TestPlanWindows:
    """Sequences of tokens are read in windows."""

    @pytest.mark.parametrize(
        ("bounds", "word_starts", "limit", "expected"),
        [
            ([0, 0, 0], [], 8, []),
            ([0, 3, 3, 5], range(5), 8, [(0, 3, 0, 3), (3, 5, 3, 5)]),
            ([0, 9], range(9), 8, [(0, 8, 0, 6), (4, 9, 6, 9)]),
            ([0, 9], [0, 3, 7], 8, [(0, 8, 0, 3), (1, 9, 3, 9)]),
            ([0, 9], [0], 8, [(0, 8, 0, 6), (4, 9, 6, 9)]),
            ([0, 2, 11], range(11), 8, [(0, 2, 0, 2), (2, 10, 2, 8), (6, 11, 8, 11)]),
            ([0, 3], range(3), 1, [(0, 1, 0, 1), (1, 2, 1, 2), (2, 3, 2, 3)]),
        ],
    )
    def test_plan_windows(self, bounds, word_starts, limit, expected):
        """Short sequences are one window; long ones are several, with context, that change hands where a word begins."""
        windows = plan_windows(np.array(bounds), np.array(word_starts, np.int64), limit)
        assert sorted(rows(windows)) == sorted(expected)

    @given(sequences())
    def test_plan_windows_for_any_sequences(self, drawn):
        """Each token has one owner with context on both sides. Windows fit the model and cut no word that fits."""
        bounds, word_starts, limit = drawn
        context = min(CONTEXT, limit // 4)
        windows = rows(plan_windows(bounds, word_starts, limit))
        assert [token for *_, first, last in sorted(windows) for token in range(first, last)] == list(range(bounds[-1]))
        for first, last, owned_first, owned_last in windows:
            assert first <= owned_first < owned_last <= last <= first + limit
            assert np.searchsorted(bounds, first, side="right") == np.searchsorted(bounds, last - 1, side="right")
            assert owned_first - first >= context or first in bounds
            assert last - owned_last >= context or last in bounds
        words = pairwise([*word_starts, bounds[-1]])
        fitting = [(first, last) for first, last in words if last - first <= limit - 2 * context]
        edges = {owned_first for *_, owned_first, _ in windows}
        assert not [(first, last) for first, last in fitting if edges & {*range(first + 1, last)}]


@pytest.fixture(scope="module")
def whole(tiny):
    """The keyword model with room for any text, in transformers' own pipeline."""
    model = tiny.random_bert(size={"max_position_embeddings": 32768})
    weights = {name: tensor for name, tensor in tiny.keyword_bert().state_dict().items() if "position" not in name}
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        model.bert.embeddings.position_embeddings.weight.zero_()
    return TokenClassificationPipeline(model=model, tokenizer=tiny.tokenizer(), device=-1)


@pytest.fixture(scope="module")
def keywords(tiny):
    """A function that returns a pipeline over the keyword model with a maximum number of tokens per window."""
    model = tiny.keyword_bert()

    def keywords(limit=tiny.POSITIONS):
        tokenizer = tiny.tokenizer(model_max_length=limit)
        return AnnotationPipeline(model=model, tokenizer=tokenizer, device=-1, aggregation_strategy="simple")

    return keywords


def words_of(answer):
    """Return the words of an answer."""
    return [entity["word"] for entity in answer]


class TestLongTexts:
    """All of a text is read, and a window's edge changes nothing."""

    @given(some.lists(WORD, max_size=120), some.integers(3, 64), some.sampled_from(STRATEGIES))
    def test_results_do_not_depend_on_window_size(self, architectures, keywords, whole, words, limit, strategy):  # noqa: PLR0913, PLR0917
        """A model that depends on single words has the same results for any window size."""
        text = " ".join(words)
        found = keywords(limit)(text, aggregation_strategy=strategy)
        architectures.assert_same([found], [whole(text, aggregation_strategy=strategy)])

    def test_long_texts_are_processed_in_full(self, keywords):
        """A disease beyond the model's limit is found."""
        assert words_of(keywords()(LONG_TEXT)) == ["hypertension"]
