"""Long texts: windows over their tokens, and answers that do not show where a window ends."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from transformers import TokenClassificationPipeline

from openmed_nb.annotation.pipeline import AnnotationPipeline
from openmed_nb.annotation.tokens import WINDOW_CONTEXT as CONTEXT
from openmed_nb.annotation.tokens import plan_windows

STRATEGIES = ("none", "simple", "first", "average", "max")

LONG_TEXT = "patient has no " * 40 + "hypertension"
"""A text whose only disease is beyond the model's limit."""

WORD = some.sampled_from(
    ["the", "patient", ".", "2", "Ωmega", "asthma", "diabetes", "mellitus", "hypertension", "hyper"]
    + ["hyper" + "tension" * times for times in (3, 20, 80)],
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
    table = np.stack([windows.firsts, windows.lasts, windows.owned_firsts, windows.owned_lasts], axis=1)
    return [tuple(row) for row in table.tolist()]


class TestPlanWindows:
    """Sequences of tokens are read in windows."""

    @pytest.mark.parametrize(
        ("bounds", "word_starts", "limit", "expected"),
        [
            ([0], [], 8, []),
            ([0, 0, 0], [], 8, []),
            ([0, 8], range(8), 8, [(0, 8, 0, 8)]),
            ([0, 3, 3, 5], range(5), 8, [(0, 3, 0, 3), (3, 5, 3, 5)]),
            ([0, 9], range(9), 8, [(0, 8, 0, 6), (4, 9, 6, 9)]),
            ([0, 9], [0, 3, 7], 8, [(0, 8, 0, 3), (1, 9, 3, 9)]),
            ([0, 9], [0], 8, [(0, 8, 0, 6), (4, 9, 6, 9)]),
            ([0, 2, 11], range(11), 8, [(0, 2, 0, 2), (2, 10, 2, 8), (6, 11, 8, 11)]),
            ([0, 3], range(3), 1, [(0, 1, 0, 1), (1, 2, 1, 2), (2, 3, 2, 3)]),
        ],
    )
    def test_table(self, bounds, word_starts, limit, expected):
        """Short sequences are one window; long ones are several, with context, that change hands where a word begins."""
        windows = plan_windows(np.array(bounds), np.array(word_starts, np.int64), limit)
        assert sorted(rows(windows)) == sorted(expected)

    @given(sequences())
    def test_every_token_has_one_owner(self, drawn):
        """Every token is owned by exactly one window, of its own sequence, and windows own stretches in order."""
        bounds, word_starts, limit = drawn
        windows = rows(plan_windows(bounds, word_starts, limit))
        owned = [token for *_, first, last in sorted(windows) for token in range(first, last)]
        assert owned == list(range(bounds[-1]))
        assert all(
            np.searchsorted(bounds, first, side="right") == np.searchsorted(bounds, last - 1, side="right")
            for first, last, *_ in windows
        )

    @given(sequences())
    def test_windows_fit(self, drawn):
        """No window is empty or longer than the limit, and each reads what it owns."""
        for first, last, owned_first, owned_last in rows(plan_windows(*drawn)):
            assert first <= owned_first < owned_last <= last <= first + drawn[2]

    @given(sequences())
    def test_words_stay_together(self, drawn):
        """A word that fits between the contexts of a window is owned by one window."""
        bounds, word_starts, limit = drawn
        fitting = limit - 2 * min(CONTEXT, limit // 4)
        words = [(first, last) for first, last in pairwise([*word_starts, bounds[-1]]) if last - first <= fitting]
        edges = {first for *_, first, _ in rows(plan_windows(*drawn))}
        assert not [word for word in words if edges & {*range(word[0] + 1, word[1])}]

    @given(sequences())
    def test_context(self, drawn):
        """Inside a sequence, an owned token has its context on both sides."""
        bounds, _, limit = drawn
        context = min(CONTEXT, limit // 4)
        for first, last, owned_first, owned_last in rows(plan_windows(*drawn)):
            assert owned_first - first >= context or first in bounds
            assert last - owned_last >= context or last in bounds


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
    """A function that returns a pipeline over the keyword model that reads so many tokens at once."""
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
    def test_edges_change_nothing(self, architectures, keywords, whole, words, limit, strategy):  # noqa: PLR0913, PLR0917
        """What a model says of words alone is found as by a model that takes the whole text, however little fits."""
        text = " ".join(words)
        found = keywords(limit)(text, aggregation_strategy=strategy)
        architectures.assert_same([found], [whole(text, aggregation_strategy=strategy)])

    @given(some.lists(WORD, max_size=80), some.integers(3, 64), some.sampled_from(STRATEGIES[2:]))
    def test_no_word_is_cut(self, tiny, words, limit, strategy):
        """Where the model says something else of every token, entities still begin and end with words."""
        text = " ".join(words)
        model, tokenizer = tiny.random_bert(), tiny.tokenizer(model_max_length=limit)
        pipe = AnnotationPipeline(model=model, tokenizer=tokenizer, device=-1, aggregation_strategy=strategy)
        for entity in pipe(text, ignore_labels=[]):
            assert f" {text} "[entity["start"]] == " "
            assert f" {text} "[entity["end"] + 1] == " "

    def test_beyond_the_limit(self, keywords):
        """A disease beyond the model's limit is found, also in a text that is split into words."""
        pipe = keywords()
        assert words_of(pipe(LONG_TEXT)) == ["hypertension"]
        assert [words_of(answer) for answer in pipe(LONG_TEXT.split(), is_split_into_words=True)] == [["hypertension"]]

    def test_offsets_beyond_the_limit(self, keywords):
        """Offsets count from the beginning of the text, not of a window."""
        [entity] = keywords()(LONG_TEXT)
        assert LONG_TEXT[entity["start"] : entity["end"]] == "hypertension"

    def test_dropping_the_rest(self, keywords):
        """With ``truncation=True`` what is beyond the limit is dropped, as transformers always does."""
        assert keywords()(LONG_TEXT, truncation=True) == []

    def test_transformers_drops_the_rest(self, tiny):
        """Transformers' own pipeline finds nothing beyond the limit, which is why ours differs."""
        tokenizer = tiny.tokenizer(model_max_length=tiny.POSITIONS)
        assert TokenClassificationPipeline(model=tiny.keyword_bert(), tokenizer=tokenizer, device=-1)(LONG_TEXT) == []
