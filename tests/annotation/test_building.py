"""A pipeline over a loaded model: proven on a word, the same one when asked again."""

from __future__ import annotations

import pytest

from openmed_nb.annotation.building import pipeline_over
from openmed_nb.errors import ConfigurationError, DeviceUnavailable
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.models.loading import LoadSpec, load

WORDS = ["diabetes mellitus", "hypertension", "asthma"]


@pytest.fixture
def loaded(keyword_model):
    """The keyword model on the CPU."""
    return load(LoadSpec.of(str(keyword_model), OpenMedConfig()), "cpu")


class TestOptions:
    """The remaining arguments go to transformers' pipeline."""

    def test_option_is_used(self, loaded, words_of):
        """An option that the pipeline has takes effect."""
        pipe = pipeline_over(loaded, "none", {"ignore_labels": ["O", "I-DISEASE"]})
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
    def test_option_that_does_not_work(self, loaded, options, words_of):
        """An option that the pipeline does not have or cannot use is one error, at once; the model stays loaded."""
        with pytest.raises(ConfigurationError, match=r"options|stride|batch_size|ignore_labels"):
            pipeline_over(loaded, "first", options)
        assert words_of(pipeline_over(loaded, "first", {})) == WORDS


def test_device_that_fails_while_it_computes(loaded):
    """A device that fails in the middle of a text gives one error of ours, without the text."""
    pipe = pipeline_over(loaded, "first", {})
    pipe.model.to("meta")

    with pytest.raises(DeviceUnavailable, match="could not run on") as caught:
        pipe("the patient has hypertension")
    assert "hypertension" not in str(caught.value)
