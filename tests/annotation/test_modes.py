"""A model that is left in training mode: it runs in evaluation mode, and every part has its own mode afterwards."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from helpers.annotations import annotated, on_forward, rounded
from openmed_nb.errors import DeviceUnavailableError

NOTE = "the patient has asthma and type 2 diabetes mellitus ."


def modes(model):
    """Return the mode of each part of a model."""
    return [part.training for part in model.modules()]


@pytest.fixture
def training(new_pipe):
    """A pipeline over a model with high dropout in training mode, except for one module."""
    pipe = new_pipe()
    for part in pipe.model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.9
    pipe.model.train()
    pipe.model.bert.embeddings.LayerNorm.eval()
    return pipe


class TestTrainingMode:
    """Answers of a model in training mode are those of evaluation mode."""

    def test_annotate_and_pipeline(self, training, new_pipe):
        """Each call has the same answers, and leaves the mode of each part."""
        before = modes(training.model)
        expected = new_pipe()([NOTE] * 3)
        for _ in range(3):
            assert list(annotated(training, [NOTE] * 3)) == training([NOTE] * 3) == expected
            assert modes(training.model) == before

    def test_options_of_transformers(self, training, new_pipe):
        """The methods of transformers run in evaluation mode too."""
        expected = new_pipe()([NOTE], stride=8)
        assert training([NOTE], stride=8) == training([NOTE], stride=8) == expected

    def test_single_module_in_training_mode(self, new_pipe):
        """A part in training mode below a model in evaluation mode counts as well."""
        pipe = new_pipe()
        expected = list(annotated(pipe, [NOTE]))
        dropout = pipe.model.bert.embeddings.dropout
        dropout.p = 0.9
        dropout.train()
        assert [list(annotated(pipe, [NOTE])) for _ in range(3)] == [expected] * 3
        assert sum(modes(pipe.model)) == 1

    @pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
    def test_mode_is_restored_after_an_error(self, training, error):
        """Neither an error nor an interrupt in the model leaves it in evaluation mode."""
        before = modes(training.model)

        def fail(_ids):
            raise error

        on_forward(training.model, fail)
        with pytest.raises((DeviceUnavailableError, KeyboardInterrupt)):
            annotated(training, [NOTE])
        assert modes(training.model) == before

    def test_concurrent_runs_restore_modes(self, training, new_pipe):
        """Of two runs at once over one model none ends the evaluation mode of the other."""
        before, expected = modes(training.model), list(annotated(new_pipe(), [NOTE] * 4))
        found = []

        def run(_number):
            found.extend(list(annotated(training, [NOTE] * 4)) for _ in range(10))

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(run, range(4)))
        assert found == [rounded(expected)] * 40
        assert modes(training.model) == before

    def test_random_state_is_unchanged(self, training):
        """Dropout draws no random numbers, so that a concurrent training is not affected."""
        state = torch.get_rng_state()
        annotated(training, [NOTE])
        assert torch.equal(torch.get_rng_state(), state)
