"""The seam to torch: what is learned of it, probes, random numbers, and arrays on their way to a device and back."""

import gc
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from openmed_nb.devices.backend import (
    MINIMUM_TORCH,
    OTHER_NUMBERS,
    TorchFacts,
    _metal_name,
    collector_at_rest,
    gpu_build,
    import_torch,
    installed_torch,
    loaded_torch,
    mps_allocator_started,
    parse_gpu_build,
    probe,
    random_numbers_from,
    random_states,
    reinstalling,
    set_random_states,
)
from openmed_nb.devices.moving import arrays_to_device, to_array, towards_host
from openmed_nb.devices.registry import device_of
from openmed_nb.simulation.device import simulated_device
from openmed_nb.simulation.modes import Copy

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "recorded"


def python(code, *options, folder=None):
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


def test_build_from_a_version_file():
    """The build is read from the text of torch's version.py as its generator writes it; only cuda and hip count."""
    texts = {
        **{
            (RECORDED / f"torch_version_{name}.txt").read_text("utf-8"): build
            for name, build in {"cpu": "", "cuda": "CUDA 13.0", "rocm": "ROCm 7.1.25424"}.items()
        },
        "": "",
        "cuda = '12.4'\nhip = None\n": "CUDA 12.4",
        "cuda: Optional[str] = None\nhip: Optional[str] = '6.2.41133-dd7f95766'\n": "ROCm 6.2.41133-dd7f95766",
        "__all__ = ['cuda', 'hip']\n": "",
        "cudart = '12.4'\n": "",
    }
    assert {text: parse_gpu_build(text) for text in texts} == texts
    assert [gpu_build("13.0", None), gpu_build(None, "7.1"), gpu_build(None, None)] == ["CUDA 13.0", "ROCm 7.1", ""]


def test_files_and_torch_agree():
    """What the files of the installed torch say is what torch says of itself once it is loaded."""
    planned, confirmed = installed_torch(), loaded_torch()

    # Wheels for a GPU leave their build out of the version in their files.
    assert confirmed.version in {planned.version, f"{planned.version}+{confirmed.version.partition('+')[2]}"}
    assert planned.gpu_build == confirmed.gpu_build
    assert (planned.loaded, confirmed.loaded) == (False, True)
    assert None not in (confirmed.mps_built, confirmed.mps_available, confirmed.cuda_names)
    assert confirmed.release >= MINIMUM_TORCH


def test_name_of_the_metal_device():
    """The Metal device is named with its cores; where torch or the driver do not know them, nothing is said of it."""

    def unknown():
        raise RuntimeError("Failed to find the service")

    named = SimpleNamespace(get_name=lambda: "Apple M2", get_core_count=lambda: 10)
    assert _metal_name(named) == "Apple M2, 10 GPU cores"
    assert _metal_name(SimpleNamespace(get_name=lambda: "Apple M2")) == ""
    assert _metal_name(SimpleNamespace(get_name=lambda: "Apple M2", get_core_count=unknown)) == ""


def test_release():
    """A version is compared as numbers, without what stands behind them."""
    releases = {"2.13.0+cpu": (2, 13, 0), "2.14.0a0+git035290b": (2, 14, 0), "2.6": (2, 6), None: (0,), "main": (0,)}
    assert {version: TorchFacts(version).release for version in releases} == releases


def test_what_is_no_release():
    """A nightly build of torch, and one from source, are named as what they are; a release, its patches and its builds are not."""
    nightly, source = "a nightly build", "built from source, not released"
    kinds = {
        **dict.fromkeys(("2.15.0.dev20261101", "2.15.0.dev20261101+cu130"), nightly),
        **dict.fromkeys(("2.15.0a0+git035290b", "2.14.0a0"), source),
        **dict.fromkeys(("2.13.0", "2.13.0+cpu", "2.14.1", "2.14.0rc2", "main", None), ""),
    }

    assert {version: TorchFacts(version).unreleased for version in kinds} == kinds
    assert TorchFacts("2.15.0.dev20261101").shown == f"2.15.0.dev20261101, {nightly}"
    assert (TorchFacts("2.13.0+cpu").shown, TorchFacts(None).shown) == ("2.13.0+cpu", "")


def test_probe_is_remembered_by_device():
    """The outcome of a probe holds for every spelling of the same device, and for no other."""
    same = [("mps", "mps"), ("mps", "mps:0"), ("cuda", "cuda:0"), ("cuda:0", "cuda")]
    for probed, asked in (*same, ("cuda", "cuda:1"), ("mps", "cpu")):
        answer = "no" if (probed, asked) in same else None
        assert TorchFacts("2.13.0", probes=((probed, "no"),)).failure(asked) == answer


def test_probe_of_the_cpu():
    """The CPU computes what the CPU computes, whatever type, device and reduced precision a person has set."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert probe("cpu") == ""
    finally:
        torch.set_default_dtype(former)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert probe("cpu") == ""


@pytest.mark.real_computer  # It begins its own simulation.
@pytest.mark.parametrize(
    ("defects", "failure"),
    [
        ((), ""),
        ("pytorch#192934", f"{OTHER_NUMBERS} in a linear layer over (2, 64, 128) with a bias (pytorch#192934)"),
        ("pytorch#188438", f"{OTHER_NUMBERS} in a linear layer over (80, 1, 2) with a bias (pytorch#188438)"),
    ],
)
def test_probe_computes_what_models_do(defects, failure):
    """A device on which linear layers over three dimensions go wrong fails its probe, also under autocast."""
    with simulated_device(environ={}, defects=defects):
        assert probe("mps") == failure
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype), torch.autocast("mps", dtype), torch.inference_mode():
                assert probe("mps") == failure


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
    kept = [type("OnMps", (torch.Tensor,), {"is_mps": True})()]
    assert mps_allocator_started() is True

    kept.clear()
    assert mps_allocator_started() is None


INTERRUPTED = """
from openmed_nb.devices.backend import import_torch
try:
    import_torch()
    print(json.dumps("not interrupted"))
except KeyboardInterrupt:
    print(json.dumps(hasattr(sys.modules.get("torch"), "Tensor")))"""


def test_an_interrupt_waits_until_torch_is_there(tmp_path):
    """An interrupt while torch is imported comes when it is there: after half of it, no process can import it any more."""
    (tmp_path / "torch.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nclass Tensor: pass\n")

    assert python(INTERRUPTED, folder=tmp_path) is True


def write_package(source):
    """Return what makes a torch package with this source in a folder."""

    def write(folder):
        (folder / "torch").mkdir()
        (folder / "torch" / "__init__.py").write_text(source, "utf-8")

    return write


def write_module(folder):
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
def test_torch_that_does_not_import(write, words, tmp_path):
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


def test_the_same_release_is_reinstalled():
    """Damaged files of torch are mended with the release that is installed: the newest may want a newer macOS."""
    for release, named in (("2.13.0+cpu", "torch==2.13.0"), ("2.14.1", "torch==2.14.1"), (None, "torch")):
        assert reinstalling(release) == f"Reinstall it: python -m pip install --force-reinstall {named}."


def test_what_is_imported_is_old_at_once():
    """What was made while the collector rested is not young afterwards, so that the next collection does not go through it."""
    gc.unfreeze()
    with collector_at_rest():
        assert not gc.isenabled()
        made = [[]]
    assert gc.isenabled()
    assert not any(thing is made for thing in gc.get_objects(generation=0))


def test_what_the_person_did_with_the_collector_stays():
    """A collector that was off stays off, and what was frozen stays frozen."""
    gc.disable()
    gc.freeze()
    try:
        with collector_at_rest():
            pass
        assert not gc.isenabled()
        gc.enable()
        with collector_at_rest():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.enable()
        gc.unfreeze()


def test_numbers_are_repeated():
    """From a state that was kept, the same numbers come again."""
    states = random_states("cpu")
    first = torch.rand(5)
    torch.rand(3)
    set_random_states(states)
    assert torch.equal(torch.rand(5), first)


def test_nothing_changes_around_it():
    """After a while with other numbers, random numbers go on from where they were, also after a failure."""
    states = random_states("cpu")
    torch.rand(2)
    before = torch.get_rng_state()
    with random_numbers_from(states):
        torch.rand(7)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(RuntimeError), random_numbers_from(states):
        torch.rand(7).reshape(2, 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_gpu(device):
    """The random numbers of a GPU are repeated with those of the CPU."""
    states = random_states(device)
    first = torch.rand(5, device=device), torch.rand(5)
    with random_numbers_from(states):
        again = torch.rand(5, device=device), torch.rand(5)
    assert [name for name, _ in states] == ["cpu", device]
    assert all(map(torch.equal, first, again))


ARRAYS = [
    np.arange(6).reshape(2, 3),
    np.zeros((0, 3), np.int64),
    np.array([0.5, -1], np.float32),
    np.array([True, False]),
]


def test_there_and_back_on_the_cpu():
    """An array comes back from the CPU as it went, in its type."""
    device = torch.device("cpu")
    for array in ARRAYS:
        (tensor,) = arrays_to_device([array], device)
        tensor = towards_host(tensor)
        device_of(device).finish()
        returned = to_array(tensor)
        assert returned.dtype == array.dtype
        np.testing.assert_array_equal(returned, array)


@pytest.mark.real_computer  # It begins its own simulation.
def test_there_and_back_on_mps():
    """An array comes back from MPS as it went; both copies wait, because one that does not can read freed memory."""
    with simulated_device() as mps:
        for array in ARRAYS:
            (tensor,) = arrays_to_device([array], torch.device("mps"))
            assert tensor.device == torch.device("mps", 0)
            tensor = towards_host(tensor)
            device_of(tensor.device).finish()
            np.testing.assert_array_equal(to_array(tensor), array)
    assert mps.copies == [Copy("cpu", "mps", False), Copy("mps", "cpu", False)] * len(ARRAYS)


@pytest.mark.real_computer  # It begins its own simulation.
def test_float64_does_not_reach_mps():
    """MPS has no float64, and the stand-in says so in torch's words."""
    with simulated_device(), pytest.raises(TypeError, match="doesn't support float64"):
        arrays_to_device([np.zeros(2)], torch.device("mps"))


@pytest.mark.real_computer  # It begins its own simulation.
def test_several_arrays_in_one_copy():
    """Arrays of one type go to MPS in one copy, because each waits for all work before it, and keep their shapes."""
    arrays = [np.arange(6).reshape(2, 3), np.arange(4)[::2], np.zeros((0, 5), np.int64), np.array(7)]
    with simulated_device() as mps:
        tensors = arrays_to_device(arrays, torch.device("mps"))
        assert mps.copies == [Copy("cpu", "mps", False)]
        for tensor, array in zip(tensors, arrays, strict=True):
            np.testing.assert_array_equal(to_array(tensor), array)
    assert arrays_to_device([], torch.device("mps")) == []


@pytest.mark.real_computer  # It begins its own simulation.
def test_simulation_is_over_outside_of_its_block():
    """Outside of the block torch has no MPS device, and its own function for the cache, again."""
    before = torch.mps.empty_cache
    with simulated_device() as mps:
        torch.mps.empty_cache()
        assert torch.zeros(2, device="mps").is_mps
    assert mps.emptied == 1
    assert torch.mps.empty_cache is before
    assert not torch.zeros(2).is_mps


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_there_and_back_on_cuda():
    """An array comes back from CUDA as it went, once everything that was started is done."""
    device = torch.device("cuda", 0)
    arrays = [np.arange(1_000_000) + shift for shift in range(8)]
    tensors = [towards_host(tensor * 2) for tensor in arrays_to_device(arrays, device)]
    device_of(device).finish()
    for array, tensor in zip(arrays, tensors, strict=True):
        np.testing.assert_array_equal(to_array(tensor), array * 2)
