"""Adapter to torch: facts, import, device checks and states of random number generators."""

import contextlib
import gc
import json
import os
from importlib.metadata import version
from unittest.mock import Mock

import pytest
import torch

from helpers import ROOT
from helpers.devices import needs_cuda
from helpers.processes import run_python
from openmed_nb.devices.backend import (
    MIN_TORCH,
    NUMERICAL_MISMATCH,
    TorchInfo,
    gc_disabled,
    get_rng_states,
    gpu_build,
    inspect_imported_torch,
    inspect_installed_torch,
    is_mps_allocator_initialized,
    parse_gpu_build,
    probe_device,
    reinstall_remedy,
    use_rng_states,
    without_autocast,
)
from openmed_nb.simulation.device import simulated_device

RECORDED = ROOT / "tests" / "recorded"


def python(code, *options, folder=None):
    """Run code in a new interpreter with a directory at the start of the path, and return its JSON output."""
    path = os.pathsep.join(str(part) for part in (folder, ROOT) if part)
    code = "import json, sys\nfrom openmed_nb.devices.backend import *\n" + code
    done = run_python(*options, "-c", code, environ={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_inspect_installed_torch_does_not_import():
    code = """
facts = inspect_installed_torch()
heavy = [name for name in sys.modules if name.split(".")[0] in ("torch", "transformers")]
print(json.dumps([facts.version, facts.gpu_build, facts.is_imported, is_torch_imported(), is_mps_allocator_initialized(), heavy]))"""

    assert python(code) == [version("torch"), inspect_imported_torch().gpu_build, False, False, False, []]


def test_inspect_installed_torch_without_torch():
    code = """print(json.dumps([inspect_installed_torch().version, "torch" in sys.modules]))"""

    assert python(code, "-S") == [None, False]


@pytest.mark.parametrize(
    ("text", "build"),
    [
        *(
            ((RECORDED / f"torch_version_{name}.txt").read_text("utf-8"), build)
            for name, build in {"cpu": "", "cuda": "CUDA 13.0", "rocm": "ROCm 7.1.25424"}.items()
        ),
        ("", ""),
        ("cuda = '12.4'\nhip = None\n", "CUDA 12.4"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.2.41133-dd7f95766'\n", "ROCm 6.2.41133-dd7f95766"),
        ("__all__ = ['cuda', 'hip']\n", ""),
        ("cudart = '12.4'\n", ""),
    ],
)
def test_parse_gpu_build_reads_version_file(text, build):
    assert parse_gpu_build(text) == build


def test_installed_and_imported_facts_agree():
    planned, confirmed = inspect_installed_torch(), inspect_imported_torch()

    # Wheels for a GPU leave their build out of the version in their files.
    assert confirmed.version in {planned.version, f"{planned.version}+{confirmed.version.partition('+')[2]}"}
    assert planned.gpu_build == confirmed.gpu_build == gpu_build(torch.version.cuda, torch.version.hip)
    assert (planned.is_imported, confirmed.is_imported) == (False, True)
    assert None not in (confirmed.mps_built, confirmed.mps_available, confirmed.cuda_names)
    assert confirmed.release >= MIN_TORCH


@pytest.mark.parametrize(
    ("num_cores", "name"), [(10, "Apple M2, 10 GPU cores"), (RuntimeError("no service"), ""), (AttributeError(), "")]
)
def test_metal_device_has_cores(num_cores, name, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M2", raising=False)
    monkeypatch.setattr(torch.backends.mps, "get_core_count", Mock(side_effect=[num_cores]), raising=False)
    assert inspect_imported_torch().metal_device == name


@pytest.mark.parametrize(
    ("text", "release", "unreleased"),
    [
        ("2.13.0+cpu", (2, 13, 0), ""),
        ("2.14.0rc2", (2, 14, 0), ""),
        ("2.6", (2, 6), ""),
        (None, (0,), ""),
        ("main", (0,), ""),
        ("2.15.0.dev20261101+cu130", (2, 15, 0), "a nightly build"),
        ("2.14.0a0+git035290b", (2, 14, 0), "built from source, not released"),
    ],
)
def test_torch_info_release_and_prerelease(text, release, unreleased):
    facts = TorchInfo(text)
    assert (facts.release, facts.prerelease_note) == (release, unreleased)
    assert facts.display_version == (f"{text}, {unreleased}" if unreleased else text or "")


@pytest.mark.parametrize(
    ("probed", "requested", "same"),
    [
        ("mps", "mps:0", True),
        ("cuda", "cuda:0", True),
        ("cuda:0", "cuda", True),
        ("cuda", "cuda:1", False),
        ("mps", "cpu", False),
    ],
)
def test_probe_failure_matches_all_spellings(probed, requested, same):
    assert TorchInfo("2.13.0", probes=((probed, "no"),)).probe_failure(requested) == ("no" if same else None)


def test_probe_device_passes_on_cpu():
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert probe_device("cpu") == ""
    finally:
        torch.set_default_dtype(former)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert probe_device("cpu") == ""


@pytest.mark.real_computer  # It begins its own simulation.
@pytest.mark.parametrize("defect", ["", "pytorch#192934", "pytorch#188438"])
def test_probe_device_detects_linear_defects(defect):
    with simulated_device(environ={}, defects=defect or ()):
        failure = probe_device("mps")
        assert (failure.startswith(NUMERICAL_MISMATCH), defect in failure) == (bool(defect), True)
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype), torch.autocast("mps", dtype), torch.inference_mode():
                assert probe_device("mps") == failure


@pytest.mark.parametrize(
    ("device", "words", "works"),
    [
        ("meta", "meta", False),
        ("mps", "PyTorch is not linked with support for mps devices", inspect_imported_torch().mps_available),
        ("cuda", "Torch not compiled with CUDA enabled", inspect_imported_torch().gpu_build),
    ],
)
def test_probe_device_reports_missing_device(device, words, works):
    if works:
        pytest.skip("this computer has it")

    assert words in probe_device(device)


def test_allocator_initialized_by_live_tensor():
    assert is_mps_allocator_initialized() is None
    kept = [type("OnMps", (torch.Tensor,), {"is_mps": True})()]
    assert is_mps_allocator_initialized() is True

    kept.clear()
    assert is_mps_allocator_initialized() is None


INTERRUPTED = """
try:
    import_torch()
    print(json.dumps("not interrupted"))
except KeyboardInterrupt:
    print(json.dumps(hasattr(sys.modules.get("torch"), "Tensor")))"""


def test_import_torch_defers_interrupt(tmp_path):
    (tmp_path / "torch.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nclass Tensor: pass\n")

    assert python(INTERRUPTED, folder=tmp_path) is True


@pytest.mark.parametrize(
    ("file", "source", "words"),
    [
        (
            "torch/__init__.py",
            "raise ImportError('libcudnn.so.9:\\n not found.')",
            "libcudnn.so.9: not found. Reinstall",
        ),
        ("torch/__init__.py", "raise OSError('[WinError 126] c10.dll')", "[WinError 126] c10.dll. Reinstall it: "),
        ("torch/__init__.py", "raise AttributeError('_ARRAY_API not found')", "_ARRAY_API not found. Reinstall"),
        ("torch/__init__.py", "raise AssertionError", "torch cannot be imported: AssertionError. Reinstall"),
        ("torch/__init__.py", "def half(:", "torch cannot be imported: invalid syntax"),
        ("torch/__init__.py", "", "shadows the package torch. Rename it, then restart the kernel."),
        ("torch.py", "light = 'on'\n", "torch.py shadows the package torch. Rename it, then restart the kernel."),
    ],
)
def test_import_torch_reports_damaged_installation(file, source, words, tmp_path):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(source, "utf-8")
    code = """
from openmed_nb.errors import TorchImportError
try:
    inspect_imported_torch()
except TorchImportError as error:
    print(json.dumps(str(error)))"""
    message = python(code, folder=tmp_path)

    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("release", "named"), [("2.13.0+cpu", "torch==2.13.0"), ("2.14.1", "torch==2.14.1"), (None, "torch")]
)
def test_reinstall_remedy_keeps_release(release, named):
    assert reinstall_remedy(release).endswith(f" --force-reinstall {named}.")


def test_gc_disabled_moves_objects_to_oldest_generation(monkeypatch):
    gc.unfreeze()
    monkeypatch.setattr(gc, "get_freeze_count", gc.get_freeze_count.__wrapped__)
    with gc_disabled():
        assert not gc.isenabled()
        made = [[]]
    assert gc.isenabled()
    assert not any(young is made for young in gc.get_objects(generation=0))
    gc.freeze()


def test_gc_disabled_preserves_user_state():
    gc.disable()
    gc.freeze()
    try:
        with gc_disabled():
            pass
        assert not gc.isenabled()
        gc.enable()
        with gc_disabled():
            pass
        assert gc.get_freeze_count.__wrapped__()
    finally:
        gc.enable()


@pytest.mark.parametrize("device", ["cpu", "mps:0"])
def test_without_autocast_computes_in_full_precision(device):
    kinds = sorted({"cpu", device.partition(":")[0]})
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast(kinds[-1], dtype=torch.bfloat16):
        before = [torch.is_autocast_enabled(kind) for kind in kinds]
        with without_autocast(device):
            assert not any(torch.is_autocast_enabled(kind) for kind in kinds)
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert [torch.is_autocast_enabled(kind) for kind in kinds] == before


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda:0", marks=needs_cuda)],
)
def test_use_rng_states_repeats_and_restores(device):
    def numbers():
        return torch.rand(5, device=device), torch.rand(5)

    states = get_rng_states(*{device} - {"cpu"})
    first = numbers()
    before = torch.get_rng_state()
    with contextlib.suppress(ZeroDivisionError), use_rng_states(states):
        again = numbers()
        raise ZeroDivisionError
    assert all(map(torch.equal, first, again))
    assert torch.equal(torch.get_rng_state(), before)
