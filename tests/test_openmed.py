"""Beside the real openmed package in one kernel: it follows our choices, and our functions answer as its own do."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from openmed_nb.devices.environment import VARIABLES

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("openmed") is None, reason="the package openmed is not installed"
)

OUR_VARIABLES = ("OPENMED_TORCH_DEVICE", "OPENMED_DEVICE", "ACCELERATE_USE_CPU", *VARIABLES)

OF_THE_SHELL = {"OPENMED_TORCH_DEVICE": "Cuda:1", "OPENMED_DEVICE": "mps"}

KERNEL = """
import json, os, sys
import openmed_nb as nb
from openmed.torch import device as theirs
from openmed_nb.session import SESSION
for line in sys.stdin:
    shell, code = json.loads(line)
    os.environ.update(shell)
    names = {**globals()}
    exec(code, names)
    SESSION.stop()
    for name in ("OPENMED_TORCH_DEVICE", "OPENMED_DEVICE", *theirs.MPS_ENV_DEFAULTS, *shell):
        os.environ.pop(name, None)
    print(json.dumps(names["answer"]), flush=True)
"""
"""A kernel that runs code in turn, each time with other variables of the shell."""


@pytest.fixture(scope="module")
def kernel():
    """Runs code in one kernel in which both packages are imported; with the answer to its first code."""
    environ = {name: value for name, value in os.environ.items() if name not in OUR_VARIABLES} | OF_THE_SHELL
    with subprocess.Popen(
        [sys.executable, "-c", KERNEL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    ) as kernel:

        def run(code, **shell):
            kernel.stdin.write(json.dumps([shell, code]) + "\n")
            kernel.stdin.flush()
            return json.loads(kernel.stdout.readline())

        yield run, run(FOLLOW.format(back="SESSION.stop()"))
        kernel.stdin.close()


@pytest.fixture
def run(kernel):
    """Runs code in that kernel, each time with other variables of the shell."""
    return kernel[0]


FOLLOW = """
def said():
    return [theirs.resolve_torch_device(), os.environ.get("OPENMED_TORCH_DEVICE")]
answer = [said()]
nb.use("CPU")
answer.append(said())
nb.use("auto")
answer.append(said()[0] == nb.device().device)
try:
    nb.use("mpss")
except nb.OpenMedError:
    answer.append(said()[0] == nb.device().device)
{back}
answer.append(said())
"""


@pytest.mark.parametrize(
    ("shell", "back", "before"),
    [
        ({"OPENMED_TORCH_DEVICE": " Cpu"}, "nb.reset()", ["cpu", " Cpu"]),
        ({"OPENMED_TORCH_DEVICE": "cuda:1"}, "SESSION.stop()", ["cuda:1", "cuda:1"]),
        ({"OPENMED_DEVICE": "mps"}, "SESSION.stop()", ["mps", None]),
        ({"OPENMED_TORCH_DEVICE": "auto", "OPENMED_DEVICE": "cpu"}, "nb.reset()", ["cpu", "auto"]),
    ],
)
def test_openmed_follows(run, shell, back, before):
    """The openmed package resolves to what was chosen here, and to what the shell says once that is taken back."""
    assert run(FOLLOW.format(back=back), **shell) == [before, ["cpu", "cpu"], True, True, before]


def test_openmed_follows_variable_of_a_new_process(kernel):
    before = ["cuda:1", "Cuda:1"]
    assert kernel[1] == [before, ["cpu", "cpu"], True, True, before]


@pytest.mark.parametrize(
    ("preferences", "shell", "device"),
    [
        (["cpu", "CPU", " cpu "], {}, "cpu"),
        (["cuda", "Cuda"], {}, "cuda"),
        ([" CUDA:3\n"], {}, "cuda:3"),
        (["mps", "MPS", "\tMps"], {}, "mps"),
        (
            ["auto", None, "default", "", " AUTO "],
            {"OPENMED_TORCH_DEVICE": "Cuda:1", "OPENMED_DEVICE": "mps"},
            "cuda:1",
        ),
        (["auto", None], {"OPENMED_TORCH_DEVICE": "default", "OPENMED_DEVICE": "MPS"}, "mps"),
    ],
)
def test_both_packages_resolve_preference(run, preferences, shell, device):
    """Whether or not the device is available."""
    code = f"""
answer = [[resolve(name) for name in {preferences!r}]
    for resolve in (nb.compat.resolve_torch_device, theirs.resolve_torch_device)]"""
    assert run(code, **shell) == [[device] * len(preferences)] * 2


def test_both_packages_choose_the_same_device(run):
    ours, their = run('answer = [nb.compat.resolve_torch_device(), theirs.resolve_torch_device("auto")]')
    assert ours == their


@pytest.mark.parametrize(
    "shell",
    [
        {},
        {"PYTORCH_ENABLE_MPS_FALLBACK": "0"},
        {"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "1.4"},
        {"PYTORCH_MPS_LOW_WATERMARK_RATIO": "0.5"},
        {"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "1.2", "PYTORCH_MPS_LOW_WATERMARK_RATIO": "0.8"},
    ],
)
def test_tuning(run, shell):
    """Our tuning gives openmed's values and recommendation wherever openmed's are a pair that torch takes."""
    code = """
ours = nb.compat.apply_mps_tuning()
set_by_us = {name: os.environ[name] for name in theirs.MPS_ENV_DEFAULTS}
SESSION.stop()
left = [name for name in theirs.MPS_ENV_DEFAULTS if name in os.environ]
tuning = theirs.apply_mps_tuning()
answer = [dict(ours.env), set_by_us, ours.recommended_dtype, left, dict(tuning.env), tuning.recommended_dtype]
"""
    env, set_by_us, dtype, left, their_env, their_dtype = run(code, **shell)

    assert env == set_by_us == their_env
    assert dtype == their_dtype == "float32"
    assert sorted(left) == sorted(shell)


def test_ignored_settings_are_those_of_openmed_that_config_lacks(run):
    code = """
from dataclasses import fields
from openmed.core.config import OpenMedConfig as Theirs
from openmed_nb.models.config import IGNORED_SETTINGS
ours = {setting.name for setting in fields(nb.OpenMedConfig)}
answer = [sorted(setting.name for setting in fields(Theirs) if setting.name not in ours), IGNORED_SETTINGS]"""
    missing, ignored = run(code)

    assert missing == ignored


def test_loader_accepts_config_of_openmed(run):
    """One warning names the settings without effect that differ from the defaults of OpenMed."""
    code = """
import warnings
from dataclasses import dataclass, field
from openmed.core.config import OpenMedConfig as Theirs
@dataclass
class Subclass(Theirs):
    added_later: list = field(default_factory=list)
answer = []
for kind in (Theirs, Subclass):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        theirs = kind(device="cpu", cache_dir="models", local_only=True, timeout=60, load_in_4bit=True)
        ours = nb.compat.ModelLoader(theirs).config
        plain = nb.compat.ModelLoader(kind()).config
    messages = [str(warning.message) for warning in caught]
    answer.append([ours.device, ours.cache_dir, ours.local_only, plain.device, plain.cache_dir == kind().cache_dir, messages])
    with warnings.catch_warnings(record=True):
        assert nb.OpenMedConfig.from_dict(theirs.to_dict()).device == "cpu"
"""
    warning = "Settings of OpenMed have no effect in openmed_nb: load_in_4bit, timeout. Remove them."

    assert run(code) == [["cpu", "models", True, None, True, [warning]]] * 2


def test_available_models_of_openmed(run):
    """Where openmed is installed, its models for PyTorch are those that our loader lists besides the bundled ones."""
    code = """
from openmed.core.models import ModelLoader as Theirs
ours = {*nb.compat.ModelLoader().list_available_models()}
answer = [sorted(ours - {*Theirs().list_available_models()}), len(ours)]"""
    only_here, count = run(code)

    assert {name for name in only_here if not name.startswith("bundled")} <= {"openai/privacy-filter"}
    assert {"bundled", "bundled_small"} <= {*only_here}
    assert count > 100
