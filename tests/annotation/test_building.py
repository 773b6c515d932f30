"""A pipeline over a loaded model: proven on a word, the same one when asked again."""

from __future__ import annotations

import pytest

from openmed_nb.errors import ConfigurationError, DeviceUnavailable

WORDS = ["diabetes mellitus", "hypertension", "asthma"]


class TestOptions:
    """The remaining arguments go to transformers' pipeline."""

    def test_option_is_used(self, pipe_of, keyword_model, words_of):
        """An option that the pipeline has takes effect."""
        pipe = pipe_of(keyword_model, "none", ignore_labels=["O", "I-DISEASE"])
        assert words_of(pipe) == ["diabetes", "hyper", "asthma"]

    @pytest.mark.parametrize(
        "options",
        [
            {"banana": 1},
            {"grouped_entities": True},
            {"stride": "wide"},
            {"stride": -1},
            {"stride": 1.5},
            {"stride": 64},
            {"batch_size": 0},
            {"batch_size": "x"},
            {"ignore_labels": 5},
            {"tokenizer": None},
            {"model_kwargs": {}},
        ],
        ids=str,
    )
    def test_option_that_does_not_work(self, pipe_of, keyword_model, options, words_of):
        """An option that the pipeline does not have or cannot use is one error, at once; the model stays loaded."""
        with pytest.raises(ConfigurationError, match=r"options|stride|batch_size|ignore_labels"):
            pipe_of(keyword_model, **options)
        assert words_of(pipe_of(keyword_model)) == WORDS


def test_same_when_asked_again(pipe_of, keyword_model):
    """A pipeline that is asked for again is the same one; other options give another one over the same model."""
    pipe, other = pipe_of(keyword_model), pipe_of(keyword_model, "none")
    assert pipe_of(keyword_model) is pipe
    assert other is not pipe
    assert other.model is pipe.model


def test_device_that_fails_while_it_computes(own_pipe_of, keyword_model):
    """A device that fails in the middle of a text gives one error of ours, without the text."""
    pipe = own_pipe_of(keyword_model)
    pipe.model.to("meta")

    with pytest.raises(DeviceUnavailable, match="could not run on") as caught:
        pipe("the patient has hypertension")
    assert "hypertension" not in str(caught.value)
