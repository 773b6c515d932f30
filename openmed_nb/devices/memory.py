"""Telling a lack of memory from other failures, by what the allocators of torch say."""

from __future__ import annotations

import re

OUT_OF_MEMORY = re.compile(
    r"out of memory"  # CUDA's allocator, and "MPS backend out of memory" (MPSAllocator.mm:286, 297)
    r"|invalid buffer size"  # one MPS buffer larger than Metal allows (MPSAllocator.mm:236)
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"  # c10/core/impl/alloc_cpu.cpp
    r"|could not (create|execute) a (primitive|memory)"  # oneDNN on the CPU
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that a smaller batch could work.

    On MPS it is a plain ``RuntimeError``, not ``torch.OutOfMemoryError``, hence the texts.

    Example:
        >>> is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GiB, ...)"))
        True
        >>> is_out_of_memory(RuntimeError("Invalid buffer size: 21.47 GiB")), is_out_of_memory(ValueError("no"))
        (True, False)
    """
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None
    )
