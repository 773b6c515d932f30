"""A lack of memory is told from other failures by what torch's allocators say."""

from __future__ import annotations

import pytest
import torch

from openmed_nb.devices.memory import is_out_of_memory

WATERMARKS = (
    "Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations (may cause system failure)."
)
SHORT = {
    "MPS, now": RuntimeError(
        "MPS backend out of memory (MPS allocated: 5.21 GiB, other allocations: 384.00 KiB, max allowed: 5.33 GiB). "
        f"Tried to allocate 256.00 MiB on private pool. {WATERMARKS}"
    ),
    "MPS, before 2.13": RuntimeError(
        "MPS backend out of memory (MPS allocated: 8.96 GB, other allocations: 1.02 MB, max allowed: 9.07 GB). "
        f"Tried to allocate 512 bytes on private pool. {WATERMARKS}"
    ),
    "MPS, shared pool": RuntimeError(
        "MPS backend out of memory (MPS allocated: 5.21 GiB, other allocations: 384.00 KiB, max allowed: 5.33 GiB). "
        f"Tried to allocate 1.00 GiB on shared pool. {WATERMARKS}"
    ),
    "MPS, shared pool, before 2.13": RuntimeError(
        "MPS backend out of memory (MPS allocated: 8.96 GB, other allocations: 1.02 MB, max allowed: 9.07 GB). "
        f"Tried to allocate 1.00 GB on shared pool. {WATERMARKS}"
    ),
    "MPS, no limit": RuntimeError(
        "MPS backend out of memory (MPS allocated: 15.21 GiB, other allocations: 384.00 KiB). "
        "Tried to allocate 256.00 MiB on private pool."
    ),
    "MPS, no limit, before 2.13": RuntimeError(
        "MPS backend out of memory (MPS allocated: 15.21 GB, other allocations: 384.00 KB). "
        "Tried to allocate 256.00 MB on shared pool."
    ),
    "MPS, one buffer": RuntimeError("Invalid buffer size: 21.47 GiB"),
    "MPS, one buffer, before 2.13": RuntimeError("Invalid buffer size: 21.47 GB"),
    "CUDA": torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 14.74 GiB of which 10.25 GiB is "
        "free. Including non-PyTorch memory, this process has 4.49 GiB memory in use. Of the allocated memory 4.36 GiB "
        "is allocated by PyTorch, and 1.02 MiB is reserved by PyTorch but unallocated."
    ),
    "CUDA, before 2.0": RuntimeError(
        "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 14.76 GiB total capacity)"
    ),
    "CUDA's own": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    "ROCm": torch.OutOfMemoryError(
        "HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"
    ),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cuDNN": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "CPU": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
        "4000000000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "CPU on Windows": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: you tried to allocate "
        "4000000000000 bytes."
    ),
    "Python": MemoryError(),
    "numpy": MemoryError(
        "Unable to allocate 7.28 TiB for an array with shape (1000000, 1000000) and data type float64"
    ),
}

OTHER = {
    "high watermark": RuntimeError("invalid high watermark ratio 2.5"),
    "low watermark": RuntimeError("invalid low watermark ratio 1.4"),
    "device-side assert": RuntimeError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`"),
    "cuBLAS, not initialised": RuntimeError(
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
    ),
    "shapes": RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x32 and 64x64)"),
    "two devices": RuntimeError("Expected all tensors to be on the same device, but found at least two devices"),
    "float64": TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."),
    "missing operator": NotImplementedError(
        "The operator 'aten::mode' is not currently implemented for the MPS device."
    ),
    "no device": RuntimeError("PyTorch is not linked with support for mps devices"),
    "position": IndexError("index out of range in self"),
    "another class": ValueError("out of memory"),
    "interrupt": KeyboardInterrupt("out of memory"),
}


@pytest.mark.parametrize("error", SHORT.values(), ids=SHORT.keys())
def test_lack_of_memory(error):
    """What an allocator says where memory is short is known as that."""
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHER.values(), ids=OTHER.keys())
def test_other_failures(error):
    """A failure that a smaller batch would meet again is not taken for a lack of memory."""
    assert not is_out_of_memory(error)


def test_allocator_of_this_computer():
    """More memory than any computer has is refused by torch's own allocator, in words that are known."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "fails",
    [
        lambda: torch.zeros(2, 3) @ torch.zeros(2, 3),
        lambda: torch.zeros(2).expand(3, 3),
        lambda: torch.embedding(torch.zeros(2, 3), torch.tensor([5])),
        lambda: torch.zeros(2, device="mps" if not torch.backends.mps.is_available() else "cuda"),
    ],
    ids=["product", "shape", "row", "device"],
)
def test_other_errors_of_this_torch(fails):
    """Torch's real errors about shapes, rows and devices are no lack of memory."""
    with pytest.raises((RuntimeError, IndexError, AssertionError)) as caught:
        fails()
    assert not is_out_of_memory(caught.value)
