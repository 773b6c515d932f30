"""Settings of a loader: their checks and their normal forms."""

import pytest
import torch
from transformers.pipelines.token_classification import AggregationStrategy

from openmed_nb.errors import ConfigurationError
from openmed_nb.models.config import OpenMedConfig, apply_overrides, check_strategy, check_task

REJECTED = [
    *({"backend": backend} for backend in ("", "HF", "mlx", "tensorflow", 5, [])),
    *({"dtype": dtype} for dtype in ("float64", torch.float64, "int4", torch.int32, "", None, 5, float)),
    {"revision": 5},
    {"cache_dir": 5},
    {"hf_token": {"secret": "hf_abc"}},
    {"default_org": None},
    {"local_only": "no"},
    {"local_only": None},
    {"allow_pickle": "no"},
    {"allow_pickle": 1},
    *({"remote_code_allowed": allowed} for allowed in (None, 5, (5,), [None])),
]


@pytest.mark.parametrize("settings", REJECTED, ids=str)
def test_config_rejects_invalid_settings(settings):
    (name,) = settings
    words = {"backend": "is not a backend of openmed_nb", "dtype": "is not a valid dtype"}.get(name, f"for '{name}'")
    with pytest.raises(ConfigurationError, match=words) as caught:
        OpenMedConfig(**settings)
    assert "hf_abc" not in str(caught.value)


def test_config_normalizes_settings():
    assert OpenMedConfig(backend=None).backend is None
    for dtype in ("bfloat16", "bf16", "torch.bfloat16", torch.bfloat16):
        assert OpenMedConfig(dtype=dtype) == OpenMedConfig(dtype="bfloat16")
    for allowed in ("acme/model", ["acme/model"], ("acme/model",)):
        config = OpenMedConfig(remote_code_allowed=allowed)
        assert config.remote_code_allowed == ("acme/model",)
        assert hash(config) == hash(OpenMedConfig(remote_code_allowed=("acme/model",)))


def test_config_repr_has_no_token():
    assert "hf_abc" not in repr(OpenMedConfig(hf_token="hf_abc"))


def test_check_task():
    assert [check_task(task) for task in ("token-classification", "ner")] == ["token-classification"] * 2
    for task in ("fill-mask", "NER", "", None, 5, ["ner"]):
        with pytest.raises(ConfigurationError, match="is not supported"):
            check_task(task)


def test_check_strategy():
    strategies = (None, "SIMPLE", "none", "max", AggregationStrategy.AVERAGE)
    assert [check_strategy(strategy) for strategy in strategies] == ["first", "simple", "none", "max", "average"]
    for strategy in ("", "last", 5, ["first"], False):
        with pytest.raises(ConfigurationError, match="is not a valid aggregation strategy"):
            check_strategy(strategy)


def test_apply_overrides():
    arguments = {"revision": "v2", "stride": 16, "torch_dtype": "bfloat16"}
    config, rest = apply_overrides(OpenMedConfig(revision="v1"), arguments)
    assert (config.revision, config.dtype, rest) == ("v2", "bfloat16", {"stride": 16})
    with pytest.raises(ConfigurationError, match="'local_only'"):
        apply_overrides(OpenMedConfig(), {"local_only": "no"})
