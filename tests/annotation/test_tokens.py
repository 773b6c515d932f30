"""Texts as tokens, and the windows over those of long texts; answers do not show where a window ends."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TokenClassificationPipeline

from helpers import architectures
from helpers import tiny_models as tiny
from openmed_nb.annotation.pipeline import AnnotationPipeline
from openmed_nb.annotation.tokens import WINDOW_CONTEXT as CONTEXT
from openmed_nb.annotation.tokens import (
    SpecialTokens,
    build_tokens,
    plan_windows,
    tokenize,
)

KINDS = ("bert", "roberta", "modernbert", "xlm-roberta")
"""One architecture for each kind of tokenizer."""

ASCII_TEXTS = some.text(some.characters(codec="ascii"), max_size=40)


@pytest.mark.parametrize(
    ("name", "prefix", "suffix"),
    [
        ("bert", ["[CLS]"], ["[SEP]"]),
        ("roberta", ["<s>"], ["</s>"]),
        ("xlnet", [], ["</s>", "<s>"]),
        ("gpt2", [], []),
    ],
)
def test_special_tokens_of_tokenizer(name, prefix, suffix):
    tokenizer = architectures.tokenizer_of(name)
    special = SpecialTokens.from_tokenizer(tokenizer)
    names = [tokenizer.convert_ids_to_tokens(list(ids)) for ids in (special.prefix_ids, special.suffix_ids)]
    assert names == [prefix, suffix]
    assert special.num_special_tokens == tokenizer.num_special_tokens_to_add()


@pytest.mark.parametrize(("letters", "is_known"), [("the", True), ("中", True), ("x", False)])
def test_special_tokens_need_one_known_letter(letters, is_known):
    """Without a padding token, rows are padded with token 0, which is masked."""
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, [])))
    expected = SpecialTokens((), (), (), (), 0, 0, 0) if is_known else None
    assert SpecialTokens.from_tokenizer(tokenizer) == expected


@given(some.sampled_from(KINDS), some.lists(some.text(max_size=40) | ASCII_TEXTS, max_size=5))
def test_tokenize_equals_transformers(name, texts):
    """All arrays are int64, except for the bool array ``is_subword``, even without tokens."""
    tokenizer = architectures.tokenizer_of(name)
    tokens = tokenize(tokenizer, texts)
    expected = [tokenizer(text, add_special_tokens=False, return_offsets_mapping=True) for text in texts]
    assert tokens.ids.tolist() == [number for encoding in expected for number in encoding.input_ids]
    pairs = zip(tokens.starts.tolist(), tokens.ends.tolist(), strict=True)
    assert list(pairs) == [pair for encoding in expected for pair in encoding.offset_mapping]
    types = {name: array.dtype.name for name, array in vars(tokens).items()}
    assert types == {**dict.fromkeys(types, "int64"), "is_subword": "bool"}


@dataclass
class Pieces:
    """Tokens in the form of an ``Encoding``."""

    ids: list
    offsets: list
    word_ids: list

    def __len__(self):
        return len(self.ids)


@pytest.mark.parametrize("transformers_boundaries", [False, True])
@pytest.mark.parametrize(
    ("text", "expected"),
    [("asthma", "0"), ("no asthmad", "001"), ("asthma,", "00"), ("a ᚠ", "00")],
)
def test_is_subword_follows_prefix(text, expected, transformers_boundaries):
    """If the tokenizer marks subwords, the marks are used. Punctuation and unknown tokens start a word."""
    is_subword = tokenize(architectures.tokenizer_of("bert"), [text], transformers_boundaries).is_subword
    assert "".join(str(int(flag)) for flag in is_subword) == expected


@pytest.mark.parametrize(("splitter", "added"), [("BertPreTokenizer", ["##ma"]), ("WhitespaceSplit", [])])
def test_prefix_in_text_starts_word(splitter, added):
    """As an added token, or where the pre-tokenizer does not separate punctuation."""
    vocabulary = {name: number for number, name in enumerate(["[UNK]", "as", "##thma", "##ma"])}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = getattr(pre_tokenizers, splitter)()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    tokenizer.add_tokens(added)
    tokens = tokenize(tokenizer, ["asthma ##ma"])
    assert tokens.is_subword.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("text", "offsets", "pieces", "expected"),
    [
        ("abc", [(0, 1), (1, 2), (2, 3)], [0, 0, 0], [False, True, True]),
        ("abc", [(0, 1), (1, 2), (2, 3)], [1, None, None], [False, False, True]),
        ("abc", [(0, 1), (1, 2), (2, 3)], [0, 1, 0], [False, False, False]),
        ("a-b", [(0, 1), (1, 2), (2, 3)], [0, 0, 0], [False, False, False]),
        ("a b", [(0, 1), (1, 3), (2, 3)], [0, 0, 0], [False, False, True]),
        ("a.b", [(0, 1), (1, 2), (1, 3)], [0, 0, 0], [False, False, True]),
    ],
)
def test_is_subword_follows_pieces_and_separators(text, offsets, pieces, expected):
    """Tokens without a piece form one. A token at a separator starts a word, unless it shares a character."""
    encoding = Pieces([5, 6, 7], offsets, pieces)
    tokens = build_tokens(architectures.tokenizer_of("roberta"), [encoding], [text])
    assert tokens.is_subword.tolist() == expected


@given(some.lists(some.text(some.sampled_from(" a中\t\u00a0\0🙂"), min_size=1, max_size=12), min_size=1, max_size=4))
def test_transformers_boundaries_are_those_of_transformers(texts):
    """Its rule is ``start > 0 and " " not in sentence[start - 1 : start + 1]``."""
    tokens = tokenize(architectures.tokenizer_of("roberta"), texts, transformers_boundaries=True)
    places = zip(tokens.text_ids(np.arange(len(tokens))), tokens.starts, strict=True)
    expected = [start > 0 and " " not in texts[index][start - 1 : start + 1] for index, start in places]
    assert tokens.is_subword.tolist() == expected


STRATEGIES = ("none", "simple", "first", "average", "max")

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
def whole():
    """The keyword model with room for any text, in transformers' own pipeline."""
    model = tiny.random_bert(size={"max_position_embeddings": 32768})
    weights = {name: tensor for name, tensor in tiny.keyword_bert().state_dict().items() if "position" not in name}
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        model.bert.embeddings.position_embeddings.weight.zero_()
    return TokenClassificationPipeline(model=model, tokenizer=tiny.tokenizer(), device=-1)


@pytest.fixture(scope="module")
def keywords():
    """A function that returns a pipeline over the keyword model with a maximum number of tokens per window."""
    model = tiny.keyword_bert()

    def keywords(limit=tiny.POSITIONS):
        tokenizer = tiny.tokenizer(model_max_length=limit)
        return AnnotationPipeline(model=model, tokenizer=tokenizer, device=-1, aggregation_strategy="simple")

    return keywords


class TestLongTexts:
    """All of a text is read, and a window's edge changes nothing."""

    @given(some.lists(WORD, max_size=120), some.integers(3, 64), some.sampled_from(STRATEGIES))
    def test_results_do_not_depend_on_window_size(self, keywords, whole, words, limit, strategy):
        """A model that depends on single words has the same results for any window size."""
        text = " ".join(words)
        found = keywords(limit)(text, aggregation_strategy=strategy)
        architectures.assert_same([found], [whole(text, aggregation_strategy=strategy)])
