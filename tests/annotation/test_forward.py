"""Rows of tokens as a model takes them, and what it says of each token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from openmed_nb.annotation.forward import Batch, ForwardRun, Network, collect, fill, input_names, start
from openmed_nb.annotation.tokens import Frame, Windows, plan_windows, tokenise
from openmed_nb.errors import ModelUnusable

ALL = frozenset({"input_ids", "token_type_ids", "attention_mask"})
FRAME = Frame((7, 8), (9,), (0, 1), (2,), token_type=3, padding=5, padding_type=4)
BARE = Frame((), (), (), (), token_type=0, padding=5, padding_type=0)


@pytest.fixture
def network(tiny):
    """A random model, what its tokenizer puts around a text, and the names of its inputs."""
    return Network(tiny.random_bert(), Frame.of(tiny.tokenizer()), ALL)


@pytest.fixture
def run(tiny):
    """A run over two texts of three tokens and one, in a window each."""
    tokens = tokenise(tiny.tokenizer(), ["asthma has type", "asthma"])
    return ForwardRun(tokens, plan_windows(tokens.bounds, np.arange(4), limit=10))


class TestRows:
    """Tokens become rectangles of numbers."""

    @pytest.mark.parametrize(
        ("frame", "expected"),
        [
            (FRAME, ([7, 8, 16, 7, 17, 9], [0, 1, 3, 3, 3, 2], [1, 1, 1, 1, 1, 1])),
            (FRAME, ([7, 8, 16, 7, 17, 9, 5, 5], [0, 1, 3, 3, 3, 2, 4, 4], [1, 1, 1, 1, 1, 1, 0, 0])),
            (BARE, ([16, 7, 17, 5], [0, 0, 0, 0], [1, 1, 1, 0])),
        ],
        ids=["full", "filled up", "bare"],
    )
    def test_one_row(self, run, tiny, frame, expected):
        """Special tokens stand around a text's own, and filling after them, not seen by the model."""
        run.tokens.ids[:3] = [16, 7, 17]
        network = Network(tiny.random_bert(), frame, ALL)
        arrays = fill(run.tokens, run.windows, Batch(np.array([0]), len(expected[0]), 1), network)
        names = "input_ids", "token_type_ids", "attention_mask"
        assert [arrays[name].tolist() for name in names] == [[row] for row in expected]
        assert {array.dtype for array in arrays.values()} == {np.dtype(np.int64)}

    def test_several_rows_and_an_empty_one(self, run, tiny):
        """Rows come in the order of the batch; a row without a window has the special tokens alone."""
        network = Network(tiny.random_bert(), FRAME, ALL)
        run.tokens.ids[:] = [16, 7, 17, 16]
        arrays = fill(run.tokens, run.windows, Batch(np.array([1, 0]), 6, 3), network)
        assert arrays["input_ids"].tolist() == [[7, 8, 16, 9, 5, 5], [7, 8, 16, 7, 17, 9], [7, 8, 9, 5, 5, 5]]
        assert arrays["attention_mask"].sum(1).tolist() == [4, 6, 3]

    @pytest.mark.parametrize("names", [{"input_ids"}, {"input_ids", "attention_mask"}])
    def test_only_what_the_model_takes(self, run, tiny, names):
        """A model gets no array that it has no name for."""
        network = Network(tiny.random_bert(), FRAME, frozenset(names))
        assert fill(run.tokens, run.windows, Batch(np.array([0]), 6, 1), network).keys() == names

    def test_names(self, tiny):
        """A model takes what its tokenizer names if it can, and a mask wherever it can read one."""
        bert = tiny.random_bert()
        assert input_names(bert, ["input_ids"]) == {"input_ids", "attention_mask"}
        assert input_names(bert, ["input_ids", "token_type_ids", "bbox"]) == ALL

        class Unmasked(torch.nn.Module):
            def forward(self, input_ids):
                return input_ids

        assert input_names(Unmasked(), ["input_ids", "attention_mask"]) == {"input_ids"}


class TestPredictions:
    """What comes back is in the order of the tokens."""

    @pytest.mark.parametrize("whole", [False, True])
    def test_equal_to_the_model(self, network, run, whole):
        """Labels and scores are the model's for each text alone, whatever stood beside it in a batch."""
        network = Network(network.model, network.frame, network.inputs, whole)
        start(network, run, [Batch(np.array([1, 0]), 12, 4)])
        predictions, failures = collect(run, network)
        alone = []
        for first, last in ((0, 3), (3, 4)):
            ids = torch.tensor([[*network.frame.before, *run.tokens.ids[first:last].tolist(), *network.frame.after]])
            with torch.no_grad():
                alone.append(network.model(ids).logits.softmax(-1)[0, 1:-1])
        expected = torch.cat(alone)
        np.testing.assert_allclose(predictions.scores, expected.max(-1).values, atol=1e-5)
        assert predictions.labels.tolist() == expected.argmax(-1).tolist()
        assert (predictions.probabilities is not None) is whole
        assert failures == {}

    def test_each_token_from_the_window_that_owns_it(self, network, run):
        """Of overlapping windows only the one that owns a token has a say about it."""
        bounds = np.array([[0, 3, 0, 2], [1, 3, 2, 3]])
        overlapping = ForwardRun(run.tokens, Windows(*bounds.T))
        start(network, overlapping, [Batch(np.array([0, 1]), 5, 2)])
        predictions, _failures = collect(overlapping, network)
        for window, owned in (([0, 3, 0, 3], slice(0, 2)), ([1, 3, 1, 3], slice(2, 3))):
            single = ForwardRun(run.tokens, Windows(*np.array([window]).T))
            start(network, single, [Batch(np.array([0]), window[1] - window[0] + 2, 1)])
            np.testing.assert_allclose(predictions.scores[owned], collect(single, network)[0].scores[owned], atol=1e-5)

    def test_batches_in_several_starts(self, network, run):
        """A run that is started in two parts has the answers of both."""
        start(network, run, [Batch(np.array([1]), 3, 1)])
        start(network, run, [Batch(np.array([0]), 5, 1)])
        predictions, _failures = collect(run, network)
        assert (predictions.scores > 0).all()

    def test_nothing(self, network, run):
        """A run without a batch has a score of zero for every token, and no failure."""
        predictions, failures = collect(run, network)
        assert predictions.scores.tolist() == [0, 0, 0, 0]
        assert failures == {}

    def test_tuple_of_outputs(self, network, run):
        """A model that returns a tuple is read as one that returns names."""
        start(network, run, [Batch(np.array([0, 1]), 5, 2)])
        expected, _failures = collect(run, network)
        network.model.config.return_dict = False
        again = ForwardRun(run.tokens, run.windows)
        start(network, again, [Batch(np.array([0, 1]), 5, 2)])
        np.testing.assert_array_equal(collect(again, network)[0].scores, expected.scores)


class TestNoNumbers:
    """A model that computes NaN is reported, not believed."""

    @pytest.mark.parametrize("whole", [False, True])
    def test_only_texts_with_it(self, network, run, tiny, whole):
        """A text whose token has NaN is a failure that names device and type; the others are not."""
        network = Network(network.model, network.frame, network.inputs, whole)
        with torch.no_grad():
            network.model.bert.embeddings.word_embeddings.weight[tiny.VOCABULARY["has"]] = torch.nan
        start(network, run, [Batch(np.array([0, 1]), 5, 2)])
        predictions, failures = collect(run, network)
        assert list(failures) == [0]
        assert isinstance(failures[0], ModelUnusable)
        assert str(failures[0]).startswith("The model computes no numbers (NaN) on cpu in torch.float32.")
        assert predictions.scores[3] > 0

    @pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
    def test_pipeline(self, new_pipe, tiny, rounded, strategy):
        """A pipeline raises for such a text, whatever the strategy, and answers the one before it."""
        expected = new_pipe(strategy)(["asthma"])
        pipe = new_pipe(strategy)
        with torch.no_grad():
            pipe.model.bert.embeddings.word_embeddings.weight[tiny.VOCABULARY["has"]] = torch.nan
        answers = pipe(text for text in ["asthma", "asthma has type"])
        assert [next(answers)] == rounded(expected)
        with pytest.raises(ModelUnusable, match="NaN"):
            next(answers)
