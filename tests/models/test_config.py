"""The settings of a loader are checked when they are written down."""

import re

import pytest
import torch
from transformers.pipelines.token_classification import AggregationStrategy

from openmed_nb.errors import ConfigurationError
from openmed_nb.models.config import UNSUPPORTED_BACKENDS, OpenMedConfig, apply_overrides, check_strategy, check_task

TYPES = "float32, float16, bfloat16, int8, auto"

REFUSED = [
    *({"backend": backend} for backend in ("", "HF", "tensorflow", 5, [])),
    *({"dtype": dtype} for dtype in ("float64", torch.float64, "int4", torch.int32, "", None, 5, float)),
    *({"revision": 5}, {"cache_dir": 5}, {"hf_token": {"secret": "hf_abc"}}, {"default_org": None}),
    *({"local_only": "no"}, {"local_only": None}, {"allow_pickle": "no"}, {"allow_pickle": 1}),
    *({"remote_code_allowed": allowed} for allowed in (None, 5, (5,), [None])),
]


@pytest.mark.parametrize("settings", REFUSED, ids=str)
def test_config_rejects_invalid_settings(settings):
    """A setting of another value or type is refused by name; the value, which could be a token, is not shown."""
    (name,) = settings
    words = {"backend": "not a valid backend", "dtype": TYPES}.get(name, f"for '{name}'")
    with pytest.raises(ConfigurationError, match=words) as caught:
        OpenMedConfig(**settings)
    assert "hf_abc" not in str(caught.value)


def test_config_checks_backend():
    """The backend "hf", or none, is accepted; one of the openmed package is refused with how to get it."""
    assert [OpenMedConfig(backend=backend).backend for backend in ("hf", None)] == ["hf", None]
    for backend, command in UNSUPPORTED_BACKENDS.items():
        with pytest.raises(ConfigurationError, match=f"not supported by openmed_nb.*{re.escape(command)}"):
            OpenMedConfig(backend=backend)


def test_config_normalizes_settings():
    """A type in any spelling, and one name or several in a list or tuple, make equal settings."""
    for dtype in ("bfloat16", "bf16", "torch.bfloat16", torch.bfloat16):
        assert OpenMedConfig(dtype=dtype) == OpenMedConfig(dtype="bfloat16")
    for allowed in ("acme/model", ["acme/model"], ("acme/model",)):
        config = OpenMedConfig(remote_code_allowed=allowed)
        assert (config.remote_code_allowed, hash(config) == hash(OpenMedConfig())) == (("acme/model",), False)
        assert hash(config) == hash(OpenMedConfig(remote_code_allowed=("acme/model",)))


def test_config_repr_has_no_token():
    """The text form of the settings does not contain the token."""
    assert "hf_abc" not in repr(OpenMedConfig(hf_token="hf_abc"))


def test_check_task():
    """Token classification has two names; any other task is refused."""
    assert [check_task(task) for task in ("token-classification", "ner")] == ["token-classification"] * 2
    for task in ("fill-mask", "NER", "", None, 5, ["ner"]):
        with pytest.raises(ConfigurationError, match="is not supported"):
            check_task(task)


def test_check_strategy():
    """Strategies are accepted in any case and as transformers' own; none given is "first"; any other is refused."""
    strategies = (None, "SIMPLE", "none", "max", AggregationStrategy.AVERAGE)
    assert [check_strategy(strategy) for strategy in strategies] == ["first", "simple", "none", "max", "average"]
    for strategy in ("", "last", 5, ["first"], False):
        with pytest.raises(ConfigurationError, match="none, simple, first, average, max"):
            check_strategy(strategy)


def test_apply_overrides():
    """Arguments with the name of a setting replace it, checked in the same way; the others are left for the pipeline."""
    arguments = {"revision": "v2", "stride": 16, "torch_dtype": "bfloat16"}
    config, rest = apply_overrides(OpenMedConfig(revision="v1"), arguments)
    assert (config.revision, config.dtype, rest) == ("v2", "bfloat16", {"stride": 16})
    with pytest.raises(ConfigurationError, match="'local_only'"):
        apply_overrides(OpenMedConfig(), {"local_only": "no"})
