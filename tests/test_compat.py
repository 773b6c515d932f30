"""OpenMed's names behave as OpenMed's tests require, except for docs/explanation/differences_from_openmed.md."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

import openmed_nb as nb
from openmed_nb.compat import MPS_ENV_DEFAULTS, ModelLoader, OpenMedConfig
from openmed_nb.devices.environment import FALLBACK_VARIABLE, HIGH_WATERMARK_VARIABLE, LOW_WATERMARK_VARIABLE
from openmed_nb.errors import ConfigurationError, DeviceUnavailableError, OpenMedWarning, UnknownDeviceError
from openmed_nb.models.registry import find_model
from openmed_nb.session import SESSION

without_models = pytest.mark.usefixtures("no_models")

TORCH, LEGACY = nb.compat.TORCH_DEVICE_ENV_VAR, nb.compat.LEGACY_DEVICE_ENV_VAR


@pytest.fixture
def no_models():
    """No model is loaded before and after."""
    ModelLoader().unload()
    yield
    ModelLoader().unload()


def test_constants_have_the_values_of_openmed():
    assert (TORCH, LEGACY) == ("OPENMED_TORCH_DEVICE", "OPENMED_DEVICE")
    assert dict(MPS_ENV_DEFAULTS) == {
        FALLBACK_VARIABLE: "1",
        HIGH_WATERMARK_VARIABLE: "1.0",
        LOW_WATERMARK_VARIABLE: "0.9",
    }


@pytest.mark.real_computer
@without_models
def test_loader_on_a_mac():
    with nb.simulated_mps():
        loader = ModelLoader(OpenMedConfig(backend="hf"))
        pipe = loader.create_pipeline("bundled_small")

        assert (pipe.device.type, pipe.tokenizer.is_fast) == ("mps", True)
        assert set(MPS_ENV_DEFAULTS) <= set(os.environ)
        assert loader.load_model("bundled_small")["model"].device.type == "mps"
        on_cpu = ModelLoader(OpenMedConfig(backend="hf", device="cpu")).create_pipeline("bundled_small")
        assert on_cpu.device.type == "cpu"
        for given, device in ((-1, "cpu"), ("cpu:0", "cpu"), (0, "mps"), ("mps:0", "mps")):
            assert loader.create_pipeline("bundled_small", device=given).device.type == device


@pytest.mark.real_computer
def test_device_numbers_are_those_of_pipelines():
    assert nb.device(-1).device == "cpu"
    for device, error in ((-2, UnknownDeviceError), (True, ConfigurationError), (9999, DeviceUnavailableError)):
        with pytest.raises(error):
            nb.device(device)
    assert OpenMedConfig(device=-1) == OpenMedConfig(device="cpu")


def test_config_warns_about_ignored_settings():
    message = "^Settings of OpenMed have no effect in openmed_nb: load_in_4bit, timeout. Remove them.$"
    with pytest.warns(OpenMedWarning, match=message) as caught:
        config = OpenMedConfig(device="cpu", timeout=60, load_in_4bit=True)

    assert config == OpenMedConfig(device="cpu")
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(TypeError, match="timeot"):
        OpenMedConfig(timeot=60)


def test_config_round_trip_omits_token():
    settings = {"device": "cpu", "cache_dir": "here", "remote_code_allowed": ["org/name"]}
    config = OpenMedConfig.from_dict({**settings, "cache_dir": Path("here"), "hf_token": "hf_secret"})
    data = json.loads(json.dumps(config.to_dict()))

    assert "hf_secret" not in str(data)
    assert OpenMedConfig.from_dict(data) == replace(config, cache_dir="here", hf_token=None)
    with pytest.warns(OpenMedWarning, match="timeout"):
        assert OpenMedConfig.from_dict({"timeout": 60, "device": "cpu"}).device == "cpu"
    with pytest.raises(TypeError, match="devise"):
        OpenMedConfig.from_dict({"devise": "cpu"})


def test_available_models_can_be_found():
    with_registry = ModelLoader().list_available_models()

    assert with_registry == sorted(set(with_registry))
    assert {"bundled", "bundled_small", "OpenMed/OpenMed-NER-OncologyDetect-TinyMed-65M"} <= set(with_registry)
    assert ModelLoader().list_available_models(include_registry=False) == ["bundled", "bundled_small"]
    assert all(find_model(name).location for name in with_registry)


@without_models
def test_force_reload_replaces_model():
    loader = ModelLoader(OpenMedConfig(device="cpu"))
    first = loader.load_model("bundled_small")
    again = loader.load_model("bundled_small")
    reloaded = loader.load_model("bundled_small", force_reload=True)

    assert first["model"] is again["model"]
    assert first["model"] is not reloaded["model"] is loader.load_model("bundled_small")["model"]
    assert len(SESSION.inventory()) == 1
    with pytest.raises(ConfigurationError, match="force_reload"):
        loader.load_model("bundled_small", force_reload="no")


@without_models
def test_loader_warns_about_ignored_arguments():
    loader = ModelLoader(OpenMedConfig(device="cpu"))
    pipe = loader.create_pipeline("bundled_small", local_files_only=True)
    with pytest.warns(OpenMedWarning, match="attn_implementation, use_fast_tokenizer") as caught:
        other = loader.create_pipeline("bundled_small", use_fast_tokenizer=False, attn_implementation="sdpa")

    assert other is pipe
    assert [warning.filename for warning in caught] == [__file__]
