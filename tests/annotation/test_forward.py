"""Windows become batches, batches rows of tokens; what a model computes comes back in the order of the tokens, whatever fills a row up."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import architectures
from helpers import tiny_models as tiny
from helpers.annotations import annotated, on_forward, rounded
from openmed_nb.annotation.forward import Batch, TokenBudget, input_names, length_buckets, plan_batches
from openmed_nb.errors import InvalidModelError

MODEL_LENGTHS = (128, 512, 8192)
"""Maximum lengths of typical models, in tokens."""


budgets = st.builds(
    TokenBudget,
    max_tokens=st.integers(1, 40_000),
    max_padding=st.integers(0, 2_000),
    limit_shapes=st.booleans(),
    allow_padding=st.booleans(),
)


@st.composite
def corpora(draw):
    """Return the most tokens that a model takes, and the lengths of some windows."""
    longest = draw(st.sampled_from(MODEL_LENGTHS))
    around = st.integers(3, longest) | st.integers(3, min(40, longest)) | st.just(longest)
    return longest, np.array(draw(st.lists(around, max_size=200)), np.int64)


def shapes(batches):
    """Return the distinct shapes of batches."""
    return {(batch.num_rows, batch.length) for batch in batches}


class TestEveryBatch:
    """What holds for any corpus, any model and any budget."""

    @given(corpora(), budgets)
    def test_plan_batches_for_any_corpus(self, corpus, budget):
        """Every window is in one batch, which is long enough for it. A batch of several rows fits the budget."""
        longest, lengths = corpus
        batches = plan_batches(lengths, budget, longest)
        assert sorted(row for batch in batches for row in batch.window_ids.tolist()) == list(range(len(lengths)))
        for batch in batches:
            padding = batch.length - lengths[batch.window_ids]
            assert (padding >= 0).all()
            assert 1 <= len(batch.window_ids) <= batch.num_rows
            assert batch.length <= longest
            assert batch.num_rows == 1 or batch.num_rows * batch.length <= budget.max_tokens
            if not budget.allow_padding:
                assert not padding.any()
                assert batch.num_rows == len(batch.window_ids)
            else:
                num_tokens = batch.num_rows * batch.length
                assert batch.num_rows == 1 or num_tokens <= 2 * lengths[batch.window_ids].sum()
                assert budget.limit_shapes or padding.sum() <= budget.max_padding


class TestFewShapes:
    """A device that compiles for every shape meets few of them."""

    @given(st.sampled_from(MODEL_LENGTHS), st.sampled_from([64, 1024, 8192, 32768]), st.data())
    def test_number_of_shapes_is_limited(self, longest, tokens, data):
        """However many corpora a model reads, and whatever the budget is, it meets at most 35 shapes in all."""
        met = set()
        for _ in range(5):
            lengths = data.draw(st.lists(st.integers(3, longest), max_size=300))
            met |= shapes(plan_batches(np.array(lengths, np.int64), TokenBudget(tokens, limit_shapes=True), longest))
        assert len(met) <= 35

    @pytest.mark.parametrize(
        ("longest", "expected"),
        [
            (8, [8]),
            (33, [16, 24, 32, 33]),
            (514, [16, 32, 56, 96, 168, 296, 514]),
            (8192, [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]),
        ],
    )
    def test_length_buckets(self, longest, expected):
        """Lengths grow by one factor up to what the model takes, and are multiples of eight but for the last."""
        assert length_buckets(longest) == expected

    @pytest.mark.parametrize(
        ("lengths", "expected"),
        [
            ([10], [([0], 16, 1)]),
            ([10] * 8, [([*range(8)], 16, 8)]),
            ([10] * 7, [([*range(7)], 16, 8)]),
            ([10] * 10, [([*range(8)], 16, 8), ([8], 16, 1), ([9], 16, 1)]),
            ([10, 90], [([1], 96, 1), ([0], 16, 1)]),
            ([10, *[90] * 9], [([1, 2, 3, 4, 5, 6, 7, 8, 9, 0], 96, 10)]),
        ],
    )
    def test_plan_batches_of_remaining_windows(self, lengths, expected):
        """Remaining windows run with longer windows or alone, depending on the padding."""
        batches = plan_batches(np.array(lengths), TokenBudget(8192, limit_shapes=True), 512)
        assert [(batch.window_ids.tolist(), batch.length, batch.num_rows) for batch in batches] == expected


class TestOrder:
    """Where every shape is welcome, rows are no longer than they must be."""

    @pytest.mark.parametrize(
        ("lengths", "budget", "expected"),
        [
            ([], TokenBudget(10), []),
            ([3, 9, 4], TokenBudget(10), [([1], 9), ([2, 0], 4)]),
            ([3, 3, 3], TokenBudget(100), [([0, 1, 2], 3)]),
            ([3, 3, 3], TokenBudget(1), [([0], 3), ([1], 3), ([2], 3)]),
            ([5, 4, 5], TokenBudget(100, allow_padding=False), [([0, 2], 5), ([1], 4)]),
            ([5, 4, 5], TokenBudget(5, allow_padding=False), [([0], 5), ([2], 5), ([1], 4)]),
        ],
    )
    def test_plan_batches_in_order(self, lengths, budget, expected):
        """Batches go from the longest window to the shortest, equal ones in their order."""
        batches = plan_batches(np.array(lengths, np.int64), budget, 64)
        assert [(batch.window_ids.tolist(), batch.length) for batch in batches] == expected


class TestHalves:
    """A batch that does not fit in memory is run in two."""

    @pytest.mark.parametrize(
        ("rows", "height", "expected"),
        [
            (5, 5, [([0, 1, 2], 30, 3), ([3, 4], 27, 3)]),
            (3, 8, [([0, 1], 30, 4), ([2], 28, 4)]),
            (1, 7, [([0], 30, 4)]),
            (1, 1, [([0], 30, 1)]),
        ],
    )
    def test_split_halves_batch(self, rows, height, expected):
        """Each half has about half of the windows and of the height, at least one window, and the length of its longest."""
        halves = Batch(np.arange(rows), 32, height).split(30 - np.arange(rows))
        assert [(half.window_ids.tolist(), half.length, half.num_rows) for half in halves] == expected

    @given(st.integers(1, 50), st.integers(0, 50))
    def test_halving_ends_with_single_rows(self, rows, more):
        """Repeated halving ends with each window in a separate batch of its length."""
        batches, ended, lengths = [Batch(np.arange(rows), 64, rows + more)], [], np.arange(rows) + 3
        while batches:
            batch = batches.pop()
            halves = batch.split(lengths)
            batches += halves
            if not halves:
                ended.append((*batch.window_ids.tolist(), batch.length, batch.num_rows))
        assert sorted(ended) == [(row, row + 3, 1) for row in range(rows)]

    @pytest.mark.parametrize(("tokens", "expected"), [(2048, 1024), (1024, 1024), (512, 512), (0, 1)])
    def test_capped_at_never_grows(self, tokens, expected):
        """A budget never grows, is at least one token, and keeps everything else."""
        whole = TokenBudget(1024, limit_shapes=True, allow_padding=False)
        assert whole.capped_at(tokens) == TokenBudget(expected, limit_shapes=True, allow_padding=False)


def test_input_names():
    """A model takes what its tokenizer names if it can, and a mask wherever it can read one."""
    bert, arrays = tiny.random_bert(), {"input_ids", "token_type_ids", "attention_mask"}
    assert input_names(bert, ["input_ids"]) == {"input_ids", "attention_mask"}
    assert input_names(bert, ["input_ids", "token_type_ids", "bbox"]) == arrays

    class Unmasked(torch.nn.Module):
        def forward(self, input_ids):
            return input_ids

    assert input_names(Unmasked(), ["input_ids", "attention_mask"]) == {"input_ids"}


def test_model_may_return_tuple(new_pipe):
    """A model that returns a tuple is read as one that returns names."""
    pipe = new_pipe()
    expected = pipe(["asthma has type", "asthma"])
    pipe.model.config.return_dict = False
    assert pipe(["asthma has type", "asthma"]) == rounded(expected)


@pytest.mark.parametrize("strategy", ["first", "average"])
def test_nan_is_an_error_of_its_text(new_pipe, strategy):
    """A text with NaN is an error that names device and type, whatever the strategy; the others are answered."""
    expected = new_pipe(strategy)(["asthma"])
    pipe = new_pipe(strategy)
    with torch.no_grad():
        pipe.model.bert.embeddings.word_embeddings.weight[tiny.VOCABULARY["has"]] = torch.nan
    answers = pipe(text for text in ["asthma", "asthma has type"])
    assert [next(answers)] == rounded(expected)
    with pytest.raises(InvalidModelError, match="NaN"):
        next(answers)

    found = annotated(pipe, ["asthma has type", "asthma"], on_error="record")
    what = f"Text 0: The model produces NaN on {pipe.device} in torch.float32."
    assert [why[: len(what)] for why in found.errors.values()] == [what]
    assert "Load it in float32" not in found.errors[0]
    assert [found[1]] == rounded(expected)


NOTES = ["She has asthma; no history of type 2 diabetes mellitus, hypertension.", "fever", "a b c d e f"]

slow = pytest.mark.slow
READERS = [
    "bert",
    "convbert",
    *(pytest.param(name, marks=slow) for name in ("yoso", "fnet")),
]


@pytest.mark.parametrize("name", READERS)
def test_results_do_not_depend_on_other_texts(name):
    """A text has the same result alone, among others, and in the pipeline of transformers."""
    theirs, ours = architectures.both(name)
    expected = [theirs(text) for text in NOTES]

    architectures.assert_same([ours(text) for text in NOTES], expected)
    architectures.assert_same(ours(NOTES), expected)


def test_only_models_that_mask_padding_are_padded():
    """BERT runs texts of different lengths together, ConvBERT does not."""
    rows = {}
    for name in ("bert", "convbert"):
        shapes = rows[name] = []
        _theirs, ours = architectures.both(name, "first")
        on_forward(ours.model, lambda ids, shapes=shapes: shapes.append(len(ids)))
        ours(["a b c d e f", "a b c d e", "a b c d"])

    assert rows == {"bert": [3], "convbert": [1, 1, 1]}
