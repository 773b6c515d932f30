"""The seam to torch: what is learned from its files, from itself, and from a failure, with the real torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from openmed_nb.devices.backend import (
    MINIMUM_TORCH,
    TorchFacts,
    gpu_build,
    import_torch,
    installed_torch,
    loaded_torch,
    mps_allocator_started,
    parse_gpu_build,
    probe,
)

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "recorded"


def python(code: str, *options: str, folder: Path | None = None) -> Any:
    """Return what code prints as JSON in a fresh interpreter, with a folder in front of the packages."""
    path = os.pathsep.join(str(one) for one in (folder, ROOT) if one)
    command = [sys.executable, *options, "-c", "import json, sys\n" + code]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=True)
    return json.loads(done.stdout)


def test_installed_torch_is_not_imported():
    """What is installed is read from files: version and build are known, and torch stays unimported."""
    code = """
from openmed_nb.devices.backend import installed_torch, mps_allocator_started, torch_is_loaded
facts = installed_torch()
print(json.dumps([facts.version, facts.gpu_build, facts.loaded, torch_is_loaded(), mps_allocator_started(),
                  [name for name in sys.modules if name.split(".")[0] in ("torch", "transformers")]]))"""
    found = python(code)

    assert found == [version("torch"), loaded_torch().gpu_build, False, False, False, []]


def test_no_torch_installed():
    """Where no torch is installed, that is known without an attempt to import it."""
    code = """
from openmed_nb.devices.backend import installed_torch
print(json.dumps([installed_torch().version, "torch" in sys.modules]))"""

    assert python(code, "-S") == [None, False]


@pytest.mark.parametrize(("recorded", "build"), [("cpu", ""), ("cuda", "CUDA 13.0"), ("rocm", "ROCm 7.1.25424")])
def test_build_from_version_file(recorded: str, build: str):
    """The build is read from the text of torch's version.py as its generator writes it."""
    assert parse_gpu_build((RECORDED / f"torch_version_{recorded}.txt").read_text("utf-8")) == build


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("", ""),
        ("cuda = '12.4'\nhip = None\n", "CUDA 12.4"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.2.41133-dd7f95766'\n", "ROCm 6.2.41133-dd7f95766"),
        ("__all__ = ['cuda', 'hip']\n", ""),
        ("cudart = '12.4'\n", ""),
    ],
)
def test_build_from_other_texts(text: str, build: str):
    """Only the lines of cuda and hip count, with or without a type."""
    assert parse_gpu_build(text) == build


def test_files_and_torch_agree():
    """What the files of the installed torch say is what torch says of itself once it is loaded."""
    planned, confirmed = installed_torch(), loaded_torch()

    # Wheels for a GPU leave their build out of the version in their files.
    assert confirmed.version in {planned.version, f"{planned.version}+{confirmed.version.partition('+')[2]}"}
    assert planned.gpu_build == confirmed.gpu_build
    assert (planned.loaded, confirmed.loaded) == (False, True)
    assert None not in (confirmed.mps_built, confirmed.mps_available, confirmed.cuda_names)
    assert confirmed.release >= MINIMUM_TORCH


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.13.0+cpu", (2, 13, 0)), ("2.14.0a0+git035290b", (2, 14, 0)), ("2.6", (2, 6)), (None, (0,)), ("main", (0,))],
)
def test_release(version: str | None, release: tuple[int, ...]):
    """A version is compared as numbers, without what stands behind them."""
    assert TorchFacts(version).release == release


@pytest.mark.parametrize(
    ("probed", "asked", "answer"),
    [
        ("mps", "mps", "no"),
        ("mps", "mps:0", "no"),
        ("cuda", "cuda:0", "no"),
        ("cuda:0", "cuda", "no"),
        ("cuda", "cuda:1", None),
        ("mps", "cpu", None),
    ],
)
def test_probe_is_remembered_by_device(probed: str, asked: str, answer: str | None):
    """The outcome of a probe holds for every spelling of the same device, and for no other."""
    assert TorchFacts("2.13.0").with_probe(probed, "no").failure(asked) == answer


def test_gpu_build_prefers_cuda():
    """A build is named after CUDA or ROCm, and has no name where it computes on the CPU only."""
    assert [gpu_build("13.0", None), gpu_build(None, "7.1"), gpu_build(None, None)] == ["CUDA 13.0", "ROCm 7.1", ""]


def test_probe_of_the_cpu():
    """The CPU computes what the CPU computes."""
    assert probe("cpu") == ""


def test_probe_under_the_defaults_of_a_person():
    """A probe does not depend on the default type and default device that a person has set."""
    torch = import_torch()
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert probe("cpu") == ""
    finally:
        torch.set_default_dtype(former)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_probe_under_autocast(dtype: str):
    """A device is not blamed for the reduced precision that a person has switched on around the call."""
    torch = import_torch()
    with torch.autocast("cpu", getattr(torch, dtype)):
        assert probe("cpu") == ""


def test_probe_that_gives_no_numbers():
    """A device that computes nothing comparable fails its probe in words."""
    assert "meta" in probe("meta")


def test_probe_of_mps_without_mps():
    """Without MPS the probe of mps fails with torch's own words, in one line without a full stop."""
    if loaded_torch().mps_available:
        pytest.skip("this computer has MPS")

    assert probe("mps") == "PyTorch is not linked with support for mps devices"


def test_probe_of_cuda_without_cuda():
    """A CPU build fails the probe of cuda with torch's own words."""
    if loaded_torch().gpu_build:
        pytest.skip("this torch is built for a GPU")

    assert probe("cuda") == "Torch not compiled with CUDA enabled"


def test_allocator_before_any_mps_tensor():
    """With torch loaded and no MPS tensor alive, nobody can tell whether the allocator started."""
    import_torch()

    assert mps_allocator_started() is None


def test_allocator_with_a_living_mps_tensor():
    """A living tensor that says it is on MPS proves that the allocator has started; one that is gone proves nothing."""
    torch = import_torch()
    kept = [type("OnMps", (torch.Tensor,), {"is_mps": True})()]
    assert mps_allocator_started() is True

    kept.clear()
    assert mps_allocator_started() is None


def write_package(source: str) -> Callable[[Path], None]:
    """Return what makes a torch package with this source in a folder."""

    def write(folder: Path) -> None:
        (folder / "torch").mkdir()
        (folder / "torch" / "__init__.py").write_text(source, "utf-8")

    return write


def write_module(folder: Path) -> None:
    """Make the file torch.py that a person may have in the folder of their notebook."""
    (folder / "torch.py").write_text("light = 'on'\n", "utf-8")


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (
            write_package("raise ImportError('libcudnn.so.9: cannot open\\n shared object file.')"),
            "libcudnn.so.9: cannot open shared object file. Reinstall",
        ),
        (
            write_package("raise OSError('[WinError 126] c10.dll')"),
            "[WinError 126] c10.dll. Reinstall it: python -m pip",
        ),
        (write_package("raise AttributeError('_ARRAY_API not found')"), "_ARRAY_API not found. Reinstall"),
        (write_package("raise AssertionError"), "torch cannot be imported: AssertionError. Reinstall"),
        (write_package("def half(:"), "torch cannot be imported: invalid syntax"),
        (write_package(""), "hides the real torch. Rename it, then restart the kernel."),
        (write_module, "torch.py hides the real torch. Rename it, then restart the kernel."),
    ],
    ids=["ImportError", "OSError", "AttributeError", "no message", "SyntaxError", "empty package", "torch.py"],
)
def test_torch_that_does_not_import(write: Callable[[Path], None], words: str, tmp_path: Path):
    """A torch that is damaged, or hidden by a file of the same name, is one clean error of ours."""
    write(tmp_path)
    code = """
from openmed_nb.devices.backend import loaded_torch
from openmed_nb.errors import TorchUnusable
try:
    loaded_torch()
except TorchUnusable as error:
    print(json.dumps(str(error)))"""
    said = python(code, folder=tmp_path)

    assert words in said
    assert "\n" not in said
