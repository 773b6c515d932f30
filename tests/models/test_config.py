"""The settings of a loader are checked when they are written down."""

from __future__ import annotations

import pytest
import torch

from openmed_nb.errors import ConfigurationError
from openmed_nb.models.config import BACKENDS_ELSEWHERE, OpenMedConfig, check_strategy, check_task, with_arguments


@pytest.mark.parametrize("backend", ["hf", None])
def test_backend_of_this_package(backend):
    """The backend "hf", or none at all, is accepted."""
    assert OpenMedConfig(backend=backend).backend == backend


@pytest.mark.parametrize("backend", BACKENDS_ELSEWHERE)
def test_backend_that_lives_elsewhere(backend):
    """A backend of the openmed package is refused with how to get it."""
    with pytest.raises(ConfigurationError, match="not part of openmed_nb") as caught:
        OpenMedConfig(backend=backend)
    assert BACKENDS_ELSEWHERE[backend] in caught.value.remedy


@pytest.mark.parametrize("backend", ["", "HF", "tensorflow", 5, []])
def test_backend_that_does_not_exist(backend):
    """Any other backend is refused."""
    with pytest.raises(ConfigurationError, match="There is no backend"):
        OpenMedConfig(backend=backend)


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_every_spelling_of_a_type_is_the_same_setting(dtype):
    """A type is accepted as a name, as torch spells it, and as torch's own object, and all are equal settings."""
    assert OpenMedConfig(dtype=dtype) == OpenMedConfig(dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["float64", torch.float64, "int4", torch.int32, "", None, 5, float])
def test_type_that_models_are_not_loaded_in(dtype):
    """Any other type is refused with the list of those that work."""
    with pytest.raises(ConfigurationError, match="float32, float16, bfloat16, int8, auto"):
        OpenMedConfig(dtype=dtype)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("revision", 5),
        ("cache_dir", 5),
        ("hf_token", {"secret": "hf_abc"}),
        ("local_only", "no"),
        ("local_only", None),
        ("allow_pickle", "no"),
        ("allow_pickle", 1),
        ("default_org", None),
        ("remote_code_allowed", None),
        ("remote_code_allowed", 5),
        ("remote_code_allowed", (5,)),
        ("remote_code_allowed", [None]),
    ],
)
def test_setting_of_the_wrong_type(setting, value):
    """A setting of the wrong type is refused by name; its value, which could be a token, is not shown."""
    with pytest.raises(ConfigurationError, match=f"'{setting}' cannot be") as caught:
        OpenMedConfig(**{setting: value})
    assert "hf_abc" not in str(caught.value)


@pytest.mark.parametrize("allowed", ["acme/model", ["acme/model"], ("acme/model",)])
def test_models_that_may_run_code(allowed):
    """One name, a list and a tuple of names allow the same."""
    config = OpenMedConfig(remote_code_allowed=allowed)
    assert config == OpenMedConfig(remote_code_allowed=("acme/model",))
    assert hash(config) == hash(OpenMedConfig(remote_code_allowed=("acme/model",)))


def test_token_is_not_shown():
    """The token is no part of how the settings are shown."""
    assert "hf_abc" not in repr(OpenMedConfig(hf_token="hf_abc"))  # noqa: S106


@pytest.mark.parametrize("task", ["token-classification", "ner"])
def test_task(task):
    """Token classification has two names."""
    assert check_task(task) == "token-classification"


@pytest.mark.parametrize("task", ["fill-mask", "NER", "", None, 5, ["ner"]])
def test_task_that_is_not_supported(task):
    """Any other task is refused."""
    with pytest.raises(ConfigurationError, match="is not supported"):
        check_task(task)


@pytest.mark.parametrize(
    ("strategy", "expected"), [(None, "first"), ("SIMPLE", "simple"), ("none", "none"), ("max", "max")]
)
def test_strategy(strategy, expected):
    """Strategies are accepted in any case; none given is "first"."""
    assert check_strategy(strategy) == expected


def test_strategy_of_transformers():
    """The member of transformers' enumeration is accepted as well."""
    from transformers.pipelines.token_classification import AggregationStrategy

    assert check_strategy(AggregationStrategy.AVERAGE) == "average"


@pytest.mark.parametrize("strategy", ["", "last", 5, ["first"], False])
def test_strategy_that_does_not_exist(strategy):
    """Any other strategy is refused with the list of those that exist."""
    with pytest.raises(ConfigurationError, match="none, simple, first, average, max"):
        check_strategy(strategy)


def test_arguments_of_a_load_change_the_settings():
    """Arguments with the name of a setting replace it, checked in the same way; the others are left for the pipeline."""
    config, rest = with_arguments(OpenMedConfig(revision="v1"), {"revision": "v2", "stride": 16})
    assert (config.revision, rest) == ("v2", {"stride": 16})
    with pytest.raises(ConfigurationError, match="'local_only'"):
        with_arguments(OpenMedConfig(), {"local_only": "no"})
