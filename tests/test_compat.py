"""OpenMed's names do here what OpenMed's own tests expect of them, but for what docs/explanation/differences_from_openmed.md explains."""

import json
import os
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

import openmed_nb as nb
from helpers import simulated_computers as computers
from openmed_nb.compat import MPS_ENV_DEFAULTS, ModelLoader, OpenMedConfig
from openmed_nb.devices.environment import FALLBACK_VARIABLE, HIGH_WATERMARK_VARIABLE, LOW_WATERMARK_VARIABLE
from openmed_nb.errors import ConfigurationError, DeviceUnavailableError, OpenMedWarning, UnknownDeviceError
from openmed_nb.models.registry import find_model
from openmed_nb.session import SESSION

PAGE = (Path(__file__).parents[1] / "docs" / "how_to" / "come_from_openmed.md").read_text("utf-8")
TORCH, LEGACY = nb.compat.TORCH_DEVICE_ENV_VAR, nb.compat.LEGACY_DEVICE_ENV_VAR


@pytest.fixture
def no_models():
    """No model is loaded before and after."""
    ModelLoader().unload()
    yield
    ModelLoader().unload()


def make_computer(kind, **environ):
    """Return a computer: a Mac, one with CUDA, one with neither, or one of OpenMed's tests with both."""
    computer = getattr(computers, "mac" if kind == "both" else kind)(**environ)
    if kind == "both":
        computer.torch.facts = replace(computers.MAC_TORCH, cuda_names=("NVIDIA A100",))
    return computer


RESOLVED = [
    ("both", "auto", {}, "mps"),
    ("box", "auto", {}, "cuda"),
    ("plain", "auto", {}, "cpu"),
    ("both", "cpu", {}, "cpu"),
    ("both", "cuda:1", {}, "cuda:1"),
    ("box", "gpu", {}, "cuda"),
    ("both", "auto", {TORCH: "cpu"}, "cpu"),
    ("box", "auto", {TORCH: "mps", LEGACY: "cpu"}, "mps"),
    ("box", "default", {LEGACY: "cpu"}, "cpu"),
    ("box", None, {TORCH: " Cuda:1 "}, "cuda:1"),
    ("box", "cpu:0", {}, "cpu"),
    ("box", -1, {}, "cpu"),
    ("box", 0, {}, "cuda"),
    ("box", 1, {}, "cuda:1"),
    ("mac", 0, {}, "mps"),
    ("both", "gpu", {}, "mps"),  # OpenMed says "cuda", which a Mac does not have.
]


@pytest.mark.parametrize(("kind", "prefer", "environ", "device"), RESOLVED)
def test_resolved_device(kind, prefer, environ, device):
    """The automatic choice is mps, cuda, cpu; a wish wins over the variables, and the newer variable over the older one."""
    assert make_computer(kind, **environ).session.resolve(prefer) == device


TUNED = [
    ({}, {}),
    ({FALLBACK_VARIABLE: "0"}, {FALLBACK_VARIABLE: "0"}),
    ({HIGH_WATERMARK_VARIABLE: "1.4"}, {HIGH_WATERMARK_VARIABLE: "1.4"}),
    ({LOW_WATERMARK_VARIABLE: "0.5"}, {LOW_WATERMARK_VARIABLE: "0.5"}),
    (
        {HIGH_WATERMARK_VARIABLE: "0.7"},
        {HIGH_WATERMARK_VARIABLE: "0.7", LOW_WATERMARK_VARIABLE: "0.63"},
    ),  # With OpenMed's 0.9, torch refuses every call.
]


@pytest.mark.parametrize(("environ", "others"), TUNED)
def test_tuned_variables(environ, others):
    """The three variables have the values of the constant, and what a person has set stays."""
    computer = make_computer("mac", **environ)

    assert computer.session.apply_mps_variables() == {**MPS_ENV_DEFAULTS, **others}
    assert {name: computer.environ[name] for name in MPS_ENV_DEFAULTS} == {**MPS_ENV_DEFAULTS, **others}


def test_constants():
    """The constants have the values that they have there; that of the variables cannot be changed."""
    assert (TORCH, LEGACY) == ("OPENMED_TORCH_DEVICE", "OPENMED_DEVICE")
    assert dict(MPS_ENV_DEFAULTS) == {
        FALLBACK_VARIABLE: "1",
        HIGH_WATERMARK_VARIABLE: "1.0",
        LOW_WATERMARK_VARIABLE: "0.9",
    }
    with pytest.raises(TypeError):
        MPS_ENV_DEFAULTS[HIGH_WATERMARK_VARIABLE] = "1.7"


@pytest.mark.real_computer
@pytest.mark.usefixtures("no_models")
def test_loader_on_a_mac():
    """Without a wish pipelines and models are on mps with its variables set; a setting or an argument names another device."""
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


@pytest.mark.parametrize("spelling", ["metal", "Metal", "apple", "apple silicon", "metal:0"])
def test_names_of_the_gpu_of_a_mac(spelling):
    """Who asks for Metal, or for Apple's GPU, is pointed to mps."""
    with pytest.raises(UnknownDeviceError, match="Use 'mps'"):
        nb.device(spelling)


@pytest.mark.real_computer
def test_numbers_of_devices():
    """A GPU by its number is refused where there is none, and a number that is none, or a flag, is an error."""
    assert nb.device(-1).device == "cpu"
    with pytest.raises(UnknownDeviceError, match="'cuda:-2'"):
        nb.device(-2)
    with pytest.raises(ConfigurationError, match="bool"):
        nb.device(True)
    with pytest.raises(DeviceUnavailableError, match="'cuda:9999'"):
        nb.device(9999)
    assert OpenMedConfig(device=-1) == OpenMedConfig(device="cpu")


def test_keywords_of_openmed():
    """Settings of OpenMed's are taken; one warning names those whose values would change something there, at the line."""
    with pytest.warns(OpenMedWarning, match="^OpenMed's load_in_4bit and timeout have no effect in openmed_nb") as told:
        config = OpenMedConfig(device="cpu", timeout=60, load_in_4bit=True, log_level="INFO")

    assert config == OpenMedConfig(device="cpu")
    assert [event.filename for event in told] == [__file__]
    with pytest.raises(TypeError, match="timeot"):
        OpenMedConfig(timeot=60)


def test_mapping():
    """Settings go to plain values and back, without the token; a mapping of OpenMed's is taken, and no other name."""
    kept = {"device": "cpu", "cache_dir": "here", "remote_code_allowed": ["org/name"]}
    config = OpenMedConfig.from_dict({**kept, "cache_dir": Path("here"), "hf_token": "hf_secret"})
    told = json.loads(json.dumps(config.to_dict()))

    assert "hf_secret" not in str(told)
    assert OpenMedConfig.from_dict(told) == replace(config, cache_dir="here", hf_token=None)
    with pytest.warns(OpenMedWarning, match="OpenMed's timeout has no effect"):
        assert OpenMedConfig.from_dict({"timeout": 60, "device": "cpu", "cjk_width_convention": "cjk"}).device == "cpu"
    with pytest.raises(ConfigurationError, match=r"Unknown setting 'devise'\. Did you mean 'device'\?"):
        OpenMedConfig.from_dict({"devise": "cpu"})
    with pytest.raises(ConfigurationError, match="Invalid type list for settings"):
        OpenMedConfig.from_dict(["device"])


def test_available_models():
    """The bundled models and those of OpenMed's registry are named, sorted, and each of them is one that can be found."""
    with_registry = ModelLoader().list_available_models()

    assert with_registry == sorted(set(with_registry))
    assert {"bundled", "bundled_small", "OpenMed/OpenMed-NER-OncologyDetect-TinyMed-65M"} <= set(with_registry)
    assert ModelLoader().list_available_models(include_registry=False) == ["bundled", "bundled_small"]
    assert all(find_model(name).location for name in with_registry)


@pytest.mark.usefixtures("no_models")
def test_reload():
    """A model is loaded once; with force_reload it is read again, and stands in the place of the one before."""
    loader = ModelLoader(OpenMedConfig(device="cpu"))
    first, again = loader.load_model("bundled_small"), loader.load_model("bundled_small")
    anew = loader.load_model("bundled_small", force_reload=True)

    assert first["model"] is again["model"]
    assert first["model"] is not anew["model"] is loader.load_model("bundled_small")["model"]
    assert SESSION.inventory().names == ("bundled_small",)
    assert len(SESSION.inventory()) == 1
    with pytest.raises(ConfigurationError, match="force_reload"):
        loader.load_model("bundled_small", force_reload="no")


@pytest.mark.usefixtures("no_models")
def test_arguments_of_openmed():
    """Arguments of OpenMed's methods are taken; one warning names those that would change something there."""
    loader = ModelLoader(OpenMedConfig(device="cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = loader.create_pipeline("bundled_small", use_fast_tokenizer=True, local_files_only=True)
        loader.load_model("bundled_small", attn_implementation=None)
    with pytest.warns(OpenMedWarning, match="OpenMed's attn_implementation and use_fast_tokenizer have") as told:
        other = loader.create_pipeline("bundled_small", use_fast_tokenizer=False, attn_implementation="sdpa")

    assert other is pipe
    assert [event.filename for event in told] == [__file__]
    with pytest.raises(ConfigurationError, match="require_integrity"):
        loader.load_model("bundled_small", require_integrity=True)


def test_page_runs():
    """Each block of Python on the page for those who come from OpenMed runs as it stands there, in one notebook."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(block, names)  # noqa: S102 - it is ours

    assert names["entities"][0]["word"] == "type 2 diabetes mellitus"
