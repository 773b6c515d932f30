"""Memory statistics, caches and limits of devices, and out-of-memory errors."""

import runpy
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.devices.backend import parse_release
from openmed_nb.devices.cpu import Cpu
from openmed_nb.devices.cuda import Cuda
from openmed_nb.devices.device import Device, MemoryStats
from openmed_nb.devices.memory import (
    OutOfMemoryDetails,
    empty_cache,
    explain_out_of_memory,
    is_out_of_memory,
    out_of_memory_error,
)
from openmed_nb.devices.mps import Mps
from openmed_nb.devices.registry import DEVICE_TYPES, get_device
from openmed_nb.errors import DeviceUnavailableError
from openmed_nb.simulation.device import simulated_device

# Errors without a recorded file.
ROCM = "HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"
NUMPY = "Unable to allocate 7.28 TiB for an array with shape (1000000, 1000000) and data type float64"
SHORT = {
    "ROCm": torch.OutOfMemoryError(ROCM),
    "cuDNN": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "Python": MemoryError(),
    "numpy": MemoryError(NUMPY),
}

K, M, G, T = (1 << power for power in (10, 20, 30, 40))
TRIED = {"ROCm": 2 * G, "numpy": round(7.28 * T)}
ALLOWED = {"ROCm": 8 * G}

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


@pytest.mark.parametrize("name", SHORT)
def test_out_of_memory_is_recognized(name):
    assert is_out_of_memory(SHORT[name])
    device = "cpu" if name in {"Python", "numpy"} else "cuda"
    assert OutOfMemoryDetails.parse(SHORT[name]) == OutOfMemoryDetails(
        device, requested=TRIED.get(name), limit=ALLOWED.get(name)
    )


@pytest.mark.parametrize("error", OTHER, ids=repr)
def test_other_errors_are_not_out_of_memory(error):
    assert not is_out_of_memory(error)
    assert OutOfMemoryDetails.parse(error) is None


def test_device_class_without_patterns_matches_no_error(monkeypatch):
    """The defaults of a new device class are empty patterns, which match every text."""
    monkeypatch.setitem(DEVICE_TYPES, "lazy", Device)
    memory = runpy.run_module("openmed_nb.devices.memory")
    for error in OTHER:
        assert not memory["is_out_of_memory"](error)
    assert memory["OutOfMemoryDetails"].parse(SHORT["Python"]).device == "cpu"


def test_cpu_allocator_error_is_recognized():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert OutOfMemoryDetails.parse(caught.value) == OutOfMemoryDetails("cpu", requested=4 * 10**15)


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


RECORDED = Path(__file__).parents[1] / "recorded" / "out_of_memory"
TEXTS = {file.stem: file.read_text("utf-8") for file in RECORDED.glob("*.txt")}


def size(number, unit):
    return round(number * unit)


EXPECTED_DETAILS = {
    "mps_gib": OutOfMemoryDetails("mps", size(9.57, G), size(17.35, G), size(27.20, G), size(292.5, M)),
    "mps_gib_small_other": OutOfMemoryDetails("mps", size(15.72, G), size(2.41, M), size(18.13, G), size(5.81, G)),
    "mps_gb": OutOfMemoryDetails("mps", size(8.89, G), size(172.98, M), size(9.07, G), size(6.25, M)),
    "mps_gb_shared_bytes": OutOfMemoryDetails("mps", 16 * G, size(3.31, G), size(18.13, G), 256),
    "mps_no_limit": OutOfMemoryDetails("mps", size(15.21, G), 384 * K, None, 256 * M),
    "mps_buffer": OutOfMemoryDetails("mps", requested=size(21.47, G)),
    "cuda_2_2": OutOfMemoryDetails("cuda", size(22.9, G), size(23.6, G) - size(22.9, G), size(23.65, G), 22 * M),
    "cuda_in_a_container": OutOfMemoryDetails("cuda", size(47.14, G), size(57.79, M), size(47.53, G), 256 * M),
    "cuda_2_11": OutOfMemoryDetails("cuda", 0, 518 * M, size(139.8, G), 4096 * G),
    "cuda_2_11_limited": OutOfMemoryDetails("cuda", 512 * M, size(1.01, G) - 512 * M, size(1.4, G), 4 * G),
    "cuda_runtime": OutOfMemoryDetails("cuda"),
    "cublas": OutOfMemoryDetails("cuda"),
    "cpu": OutOfMemoryDetails("cpu", requested=4_000_000_000_000_000),
    "cpu_windows": OutOfMemoryDetails("cpu", requested=4_000_000_000_000),
}


@pytest.mark.parametrize("name", EXPECTED_DETAILS)
def test_parse_recorded_sizes(name):
    assert OutOfMemoryDetails.parse(RuntimeError(TEXTS[name])) == EXPECTED_DETAILS[name]
    assert EXPECTED_DETAILS.keys() == TEXTS.keys()


@pytest.mark.parametrize("error", [*map(RuntimeError, TEXTS.values()), SHORT["ROCm"], SHORT["cuDNN"]])
def test_error_quotes_torch(error):
    assert str(error)[:20] in out_of_memory_error("A batch", "cuda", error, "Pass a smaller one.").message


@pytest.mark.parametrize(
    "error", [RuntimeError("John Doe is out of memory"), RuntimeError("Out of memory: John"), MemoryError("John")]
)
def test_error_does_not_quote_other_errors(error):
    refused = out_of_memory_error("A window", "mps", error, "Pass a shorter one.")
    assert type(error).__name__ in refused.message
    assert "John" not in str(refused)


def test_details_list_known_sizes():
    texts = {name: str(OutOfMemoryDetails.parse(RuntimeError(text))) for name, text in TEXTS.items()}
    assert texts["mps_gib"] == (
        "an out-of-memory error on mps: 292.5 MiB requested, 9.6 GiB allocated, "
        "17.3 GiB in use by other allocations, 27.2 GiB allowed"
    )
    assert texts["cuda_2_11"].startswith("an out-of-memory error on cuda: 4.0 TiB requested, 0 bytes allocated")
    assert texts["mps_buffer"] == "an out-of-memory error on mps: 21.5 GiB requested"
    assert texts["cublas"] == "an out-of-memory error on cuda"
    xpu = OutOfMemoryDetails.parse(RuntimeError("xpu out of memory. tried to allocate 2.00 gib."))
    assert xpu == OutOfMemoryDetails("xpu", requested=2 * G)


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


@given(st.text(max_size=200), st.sampled_from([RuntimeError, MemoryError, ValueError]))
def test_parse_any_text(text, kind):
    error = kind(text)
    assert (OutOfMemoryDetails.parse(error) is None) == (not is_out_of_memory(error))


@given(st.integers(0, 1023), st.sampled_from(["bytes", "KB", "KiB", "MB", "MiB", "GB", "GiB", "TiB"]))
def test_parse_every_unit(number, unit):
    power = "bkmgt".index(unit[0].lower())
    message = f"MPS backend out of memory. Tried to allocate {number} {unit} on private pool."
    assert OutOfMemoryDetails.parse(RuntimeError(message)) == OutOfMemoryDetails("mps", requested=number * 1024**power)


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_limit_is_enforced():
    cuda = get_device("cuda:0")
    fraction = 0.05
    cuda.set_memory_fraction(fraction)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(int(cuda.memory_stats().recommended * 2 * fraction), dtype=torch.uint8, device="cuda:0")
    finally:
        cuda.set_memory_fraction(1.0)
