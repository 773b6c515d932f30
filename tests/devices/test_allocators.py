"""The memory of each device is asked of the chosen device only."""

from __future__ import annotations

import pytest
import torch

from openmed_nb.devices.backend import release_of
from openmed_nb.devices.memory import (
    AllocatorMemory,
    CpuAllocator,
    CudaAllocator,
    MpsAllocator,
    allocator,
    empty_cache,
)
from openmed_nb.simulation.device import simulated_device

MIB = 1 << 20


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", CpuAllocator()),
        ("mps", MpsAllocator()),
        ("mps:0", MpsAllocator()),
        ("cuda", CudaAllocator("cuda")),
        ("cuda:1", CudaAllocator("cuda:1")),
        ("lazy:0", CpuAllocator()),
    ],
)
def test_each_device_has_its_allocator(device, expected):
    """The name of a device decides which allocator is asked; what torch has no allocator for is asked nothing."""
    made = allocator(device)

    assert type(made) is type(expected)
    assert getattr(made, "device", None) == getattr(expected, "device", None)


def test_the_cpu_has_no_figures():
    """On the CPU there is nothing to empty, to limit and to ask, and nothing raises."""
    cpu = allocator("cpu")
    empty_cache("cpu")
    cpu.reset_peak()
    cpu.limit(0.5)

    assert cpu.memory() == AllocatorMemory(None, None, None, None)


def test_mps_figures_and_cache():
    """On MPS the figures follow the tensors, and emptying the cache hands back what no tensor uses."""
    with simulated_device("8 GiB") as device:
        mps = allocator("mps")
        before = mps.memory()
        tensor = torch.zeros(16 * MIB, device="mps")
        held = mps.memory()
        del tensor
        freed = mps.memory()
        empty_cache("mps")
        emptied = mps.memory()

    assert held.allocated - before.allocated == 64 * MIB
    assert (freed.allocated, freed.reserved) == (before.allocated, held.reserved)
    assert emptied.reserved == before.reserved < held.reserved
    assert device.emptied == 1
    assert before.recommended == device.allocator.memory.recommended


def test_mps_peaks():
    """On MPS the peak is the most since it was reset; torch counts it from 2.13 on, and before there is none."""
    with simulated_device("8 GiB"):
        mps = allocator("mps")
        mps.reset_peak()
        tensor = torch.zeros(16 * MIB, device="mps")
        del tensor
        peak = mps.memory().peak
        mps.reset_peak()

        if release_of(torch.__version__) < (2, 13):
            assert peak is None
        else:
            assert peak >= 64 * MIB
            assert mps.memory().peak == mps.memory().allocated


def test_a_limit_on_mps_is_kept():
    """Behind a limit MPS refuses more memory, with its real words, and 0 takes the limit away."""
    with simulated_device("8 GiB"):
        mps = allocator("mps")
        mps.limit(0.01)
        with pytest.raises(RuntimeError, match="MPS backend out of memory"):
            torch.zeros(64 * MIB, device="mps")
        mps.limit(0)
        assert torch.zeros(64 * MIB, device="mps").is_mps


def test_mps_is_not_asked_where_it_is_not():
    """Asking for MPS on a computer without it raises torch's own error instead of answering with zeros."""
    if torch.backends.mps.is_available():
        pytest.skip("this computer has MPS")
    with pytest.raises((RuntimeError, AttributeError)):
        allocator("mps").memory()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_figures_and_cache():
    """On CUDA the figures follow the tensors, the peak can be reset, and emptying the cache hands blocks back."""
    cuda = allocator("cuda:0")
    empty_cache("cuda:0")
    before = cuda.memory()
    tensor = torch.zeros(16 * MIB, device="cuda:0")
    held = cuda.memory()
    del tensor
    freed = cuda.memory()
    empty_cache("cuda:0")
    emptied = cuda.memory()
    cuda.reset_peak()

    assert held.allocated - before.allocated == 64 * MIB
    assert freed.allocated == before.allocated
    assert freed.peak >= held.allocated
    assert emptied.reserved <= freed.reserved - 64 * MIB
    assert cuda.memory().peak == cuda.memory().allocated
    assert before.recommended == torch.cuda.get_device_properties(0).total_memory


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_limit_on_cuda_is_kept():
    """Behind a limit CUDA refuses more memory."""
    cuda = allocator("cuda:0")
    share = 0.05
    cuda.limit(share)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(int(cuda.memory().recommended * 2 * share), dtype=torch.uint8, device="cuda:0")
    finally:
        cuda.limit(1.0)
