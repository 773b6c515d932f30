"""What MPS says, word for word, as torch 2.13 has it (read out of its macOS binary; the files are those of its source)."""

from __future__ import annotations

COMMIT = "cf30153c4c131c8164ee7798e5022d810682e2cb"
"""The commit that torch 2.13.0 was built from, which its own message names."""

NO_FLOAT64 = (
    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
    "Please use float32 instead."
)  # EmptyTensor.cpp:45
NO_COMPLEX128 = "Trying to convert ComplexDouble to the MPS backend but it does not have support for that dtype."
NO_NUMPY = "can't convert mps:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices, mps:0 and cpu!"
OTHER_GRADIENT = "assigned grad has data located on a different device"
NO_DROPOUT = "scaled_dot_product_attention for MPS does not support dropout."  # Attention.mm

NO_LIMIT = (
    " Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations"
    " (may cause system failure)."
)


def out_of_memory(allocated: int, other: int, allowed: int | None, wanted: int) -> str:
    """Return what the allocator says where a block does not fit (``MPSAllocator.mm:286``, and ``:297`` without a limit).

    Args:
        allocated: The bytes of living tensors.
        other: The bytes of the process that no tensor has.
        allowed: The bytes that the high watermark allows; ``None`` where there is no limit.
        wanted: The bytes of the block.

    Example:
        >>> print(out_of_memory(5 * 2**30, 384 * 2**10, None, 2**28))
        MPS backend out of memory (MPS allocated: 5.00 GiB, other allocations: 384.00 KiB). Tried to allocate 256.00 MiB \
on private pool.
    """
    limit = "" if allowed is None else f", max allowed: {size(allowed)}"
    return (
        f"MPS backend out of memory (MPS allocated: {size(allocated)}, other allocations: {size(other)}{limit}). "
        f"Tried to allocate {size(wanted)} on private pool.{'' if allowed is None else NO_LIMIT}"
    )


def invalid_buffer(wanted: int) -> str:
    """Return what the allocator says of one tensor that is larger than a Metal buffer can be (``MPSAllocator.mm:236``).

    Example:
        >>> invalid_buffer(21 * 2**30)
        'Invalid buffer size: 21.00 GiB'
    """
    return f"Invalid buffer size: {size(wanted)}"


def not_implemented(operator: str) -> str:
    """Return what MPS says of an operator that it does not have, where falling back to the CPU is off."""
    return (
        f"The operator '{operator}' is not currently implemented for the MPS device. If you want this op to be considered "
        "for addition please comment on https://github.com/pytorch/pytorch/issues/141287 and mention use-case, that "
        f"resulted in missing op as well as commit hash {COMMIT}. As a temporary fix, you can set the environment "
        "variable `PYTORCH_ENABLE_MPS_FALLBACK=1` to use the CPU as a fallback for this op. WARNING: this will be slower "
        "than running natively on MPS."
    )


def falls_back(operator: str) -> str:
    """Return the warning for the first operator that falls back to the CPU."""
    return (
        f"The operator '{operator}' is not currently supported on the MPS backend and will fall back to run on the CPU. "
        "This may have performance implications."
    )


def size(count: int) -> str:
    """Return a number of bytes as torch 2.13 writes it; before 2.13 it wrote ``GB`` for ``GiB``.

    Example:
        >>> size(512), size(393216), size(5 * 2**30)
        ('512 bytes', '384.00 KiB', '5.00 GiB')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 2**power:
            return f"{count / 2**power:.2f} {unit}"
    return f"{count} bytes"
