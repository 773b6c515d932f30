"""Memory statistics, caches and limits of devices, and out-of-memory errors."""

import runpy
from pathlib import Path

import pytest
import torch

from helpers.devices import needs_cuda
from openmed_nb.devices.backend import parse_release
from openmed_nb.devices.cpu import Cpu
from openmed_nb.devices.cuda import Cuda
from openmed_nb.devices.device import Device, MemoryStats
from openmed_nb.devices.mps import Mps
from openmed_nb.devices.registry import (
    DEVICE_TYPES,
    empty_cache,
    explain_out_of_memory,
    get_device,
    is_out_of_memory,
    out_of_memory_error,
)
from openmed_nb.errors import DeviceUnavailableError
from openmed_nb.simulation.device import simulated_device

RECORDED = Path(__file__).parents[1] / "recorded" / "out_of_memory"
ROCM = "HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"
NUMPY = "Unable to allocate 7.28 TiB for an array with shape (1000000, 1000000) and data type float64"
OF_TORCH = [
    *(RuntimeError(file.read_text("utf-8")) for file in sorted(RECORDED.glob("*.txt"))),
    torch.OutOfMemoryError(ROCM),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
]
M = 1 << 20

OTHER = [
    RuntimeError("invalid high watermark ratio 2.5"),
    RuntimeError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("Expected all tensors to be on the same device, but found at least two devices"),
    TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."),
    NotImplementedError("The operator 'aten::mode' is not currently implemented for the MPS device."),
    ValueError("out of memory"),
    KeyboardInterrupt("out of memory"),
]


@pytest.mark.parametrize("error", [*OF_TORCH, MemoryError(), MemoryError(NUMPY)])
def test_out_of_memory_is_recognized(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHER, ids=repr)
def test_other_errors_are_not_out_of_memory(error):
    assert not is_out_of_memory(error)


def test_device_class_without_patterns_matches_no_error(monkeypatch):
    """The defaults of a new device class are empty patterns, which match every text."""
    monkeypatch.setitem(DEVICE_TYPES, "lazy", Device)
    memory = runpy.run_module("openmed_nb.devices.registry")
    for error in OTHER:
        assert not memory["is_out_of_memory"](error)


def test_cpu_allocator_error_is_recognized():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "fails",
    [
        lambda: torch.zeros(2, 3) @ torch.zeros(2, 3),
        lambda: torch.embedding(torch.zeros(2, 3), torch.tensor([5])),
        lambda: torch.zeros(2, device="cuda" if torch.backends.mps.is_available() else "mps"),
    ],
)
def test_torch_errors_are_not_out_of_memory(fails):
    with pytest.raises((RuntimeError, IndexError, AssertionError)) as caught:
        fails()
    assert not is_out_of_memory(caught.value)


@pytest.mark.parametrize("error", OF_TORCH)
def test_error_quotes_torch(error):
    assert str(error)[:20] in out_of_memory_error("A batch", "cuda", error, "Pass a smaller one.").message


@pytest.mark.parametrize(
    "error", [RuntimeError("John Doe is out of memory"), RuntimeError("Out of memory: John"), MemoryError("John")]
)
def test_error_does_not_quote_other_errors(error):
    refused = out_of_memory_error("A window", "mps", error, "Pass a shorter one.")
    assert type(error).__name__ in refused.message
    assert "John" not in str(refused)


def test_explained_error_names_subject_device_and_remedy():
    error = torch.OutOfMemoryError(ROCM)
    with (
        pytest.raises(DeviceUnavailableError, match="A batch does not fit in the memory of cuda: HIP out of") as caught,
        explain_out_of_memory("Outer", "cpu", "Outer."),
        explain_out_of_memory("A batch", "cuda", "Pass a smaller one."),
    ):
        raise error
    assert (caught.value.remedy, caught.value.__cause__) == ("Pass a smaller one.", error)


@pytest.mark.parametrize("error", OTHER[:5], ids=repr)
def test_explained_block_keeps_other_errors(error):
    with pytest.raises(type(error)) as caught, explain_out_of_memory("A batch", "cuda", "Pass a smaller one."):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("name", "kind"),
    [("cuda", Cuda), ("cuda:1", Cuda), ("mps", Mps), ("mps:0", Mps), ("cpu", Cpu), ("lazy:0", Device)],
)
def test_parse_device_argument_selects_class(name, kind):
    device = get_device(name)
    assert (type(device), device.name, device.type) == (kind, name, name.partition(":")[0])
    assert get_device(torch.device(name)).type == device.type


def test_cpu_has_no_memory_stats():
    cpu = get_device("cpu")
    empty_cache("cpu")
    cpu.reset_peak_memory_stats()
    cpu.set_memory_fraction(0.5)

    assert cpu.memory_stats() == MemoryStats()


def measure_memory(device):
    """Return memory statistics before a tensor of 64 MiB, with it, after its deletion and after emptying the cache."""
    before = get_device(device).memory_stats()
    tensor = torch.zeros(16 * M, device=device)
    held = get_device(device).memory_stats()
    del tensor
    freed = get_device(device).memory_stats()
    empty_cache(device)
    return before, held, freed, get_device(device).memory_stats()


def test_mps_memory_stats_and_cache():
    with simulated_device("8 GiB") as device:
        before, held, freed, emptied = measure_memory("mps")

    assert held.allocated - before.allocated == 64 * M
    assert (freed.allocated, freed.reserved) == (before.allocated, held.reserved)
    assert emptied.reserved == before.reserved < held.reserved
    assert device.cache_clears == 1
    assert before.recommended == device.allocator.memory.recommended


def test_mps_peak_since_torch_2_13():
    with simulated_device("8 GiB"):
        mps = get_device("mps")
        mps.reset_peak_memory_stats()
        tensor = torch.zeros(16 * M, device="mps")
        del tensor
        peak = mps.memory_stats().peak
        mps.reset_peak_memory_stats()

        if parse_release(torch.__version__) < (2, 13):
            assert peak is None
        else:
            assert peak >= 64 * M
            assert mps.memory_stats().peak == mps.memory_stats().allocated


@needs_cuda
def test_cuda_memory_stats_and_cache():
    cuda = get_device("cuda:0")
    cuda.empty_cache()
    before, held, freed, emptied = measure_memory("cuda:0")
    cuda.reset_peak_memory_stats()

    assert held.allocated - before.allocated == 64 * M
    assert freed.allocated == before.allocated
    assert freed.peak >= held.allocated
    assert emptied.reserved <= freed.reserved - 64 * M
    assert cuda.memory_stats().peak == cuda.memory_stats().allocated
    assert before.recommended == torch.cuda.get_device_properties(0).total_memory


@needs_cuda
def test_cuda_limit_is_enforced():
    cuda = get_device("cuda:0")
    fraction = 0.05
    cuda.set_memory_fraction(fraction)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(int(cuda.memory_stats().recommended * 2 * fraction), dtype=torch.uint8, device="cuda:0")
    finally:
        cuda.set_memory_fraction(1.0)
