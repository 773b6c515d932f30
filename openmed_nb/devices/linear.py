"""Faster linear layers on the CPU, and attention on the GPU without plans and synchronization.

torch computes float32 matrix products with MKL if it is available. MKL leaves half of the vector units of AMD processors
idle: on an EPYC with AVX-512, oneDNN is twice as fast (``benchmarks/annotate.py`` prints the speedup).
oneDNN is part of torch, and ``torch.compile`` uses the same function. No weights are packed or cached, so they may change.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .profilers import push_modes
from .registry import get_device

if TYPE_CHECKING:
    import torch

MIN_ONEDNN_SPEEDUP = 1.2  # Minimum measured speedup for the use of oneDNN.
MIN_ROWS = 32  # Matrix products with fewer rows are too small for a speedup.


def fast_linear(device: torch.device, rows: int) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager in which ``torch.nn.functional.linear`` uses the faster library on this machine.

    Args:
        device: Device of the model. The context manager has an effect on the CPU only.
        rows: Approximate number of rows of the matrix products. The context manager has no effect for few rows, because
            it intercepts every torch function, which would take longer than it saves.
    """
    use_onednn = (
        not get_device(device).is_accelerator and rows >= MIN_ROWS and measure_onednn_speedup() >= MIN_ONEDNN_SPEEDUP
    )
    return push_modes(get_linear_mode_class()()) if use_onednn else contextlib.nullcontext()


def cudnn_attention_disabled(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that disables the attention of cuDNN, which creates a plan for each new shape.

    torch uses cuDNN for attention in 16 bits only. The first pass over 20,000 notes took 15.3 s with plans and 4.4 s
    without, on one H200 with torch 2.11.
    """
    if not get_device(device).uses_cudnn or dtype.itemsize > 2:  # noqa: PLR2004 - bytes
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    context: contextlib.AbstractContextManager[Any] = sdpa_kernel(backends)
    return context


def wrap_mask(mask: torch.Tensor, full: bool) -> torch.Tensor:
    """Return an attention mask that stores whether it is full, so that it does not hide any token.

    A model checks this for each batch, and the check of a plain tensor would synchronize with the device.
    """
    if not get_device(mask.device).is_accelerator:
        return mask
    wrapped: torch.Tensor = mask.as_subclass(get_mask_class())
    wrapped.full = full
    return wrapped


@functools.cache
def get_mask_class() -> Any:
    """Return the class of masks that store whether they are full. It is defined on first use, because torch is its base."""
    import torch

    class KnownMask(torch.Tensor):
        full: bool

        @classmethod
        def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            mask: Any = args[0] if args else None
            if function in {torch.Tensor.all, torch.all} and len(args) == 1 and not kwargs:
                return torch.tensor(mask.full)
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                result = function(*args, **(kwargs or {}))
            is_cast = function in {torch.Tensor.to, torch.Tensor.bool} and isinstance(mask, cls)
            return wrap_mask(result, mask.full) if is_cast else result

    return KnownMask


@functools.cache
def get_linear_mode_class() -> Callable[[], Any]:
    """Return the class of the mode for linear layers. It is defined on first use, because a torch class is its base."""
    import torch
    from torch.overrides import TorchFunctionMode

    linear = torch.nn.functional.linear
    onednn = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001

    class OneDnnLinear(TorchFunctionMode):
        """Computes linear layers with oneDNN, and calls every other function unchanged."""

        def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is linear and not kwargs and is_onednn_candidate(*args):
                inputs, weight, bias = (*args, None)[:3]
                return onednn(inputs, weight, bias, "none", [], "")
            return function(*args, **(kwargs or {}))

    return OneDnnLinear


def is_onednn_candidate(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Return whether oneDNN supports a linear layer and is faster: dense float32, many rows, no gradients or autocast."""
    import torch

    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    tensors = (inputs, weight) if bias is None else (inputs, weight, bias)
    are_supported = all(
        type(tensor) in {torch.Tensor, torch.nn.Parameter}
        and tensor.is_cpu
        and tensor.dtype == torch.float32
        and tensor.layout == torch.strided
        for tensor in tensors
    )
    shapes_match = inputs.shape[-1:] == weight.shape[1:]
    return are_supported and shapes_match and inputs.numel() >= MIN_ROWS * weight.shape[1] > 0


@functools.cache
def measure_onednn_speedup() -> float:
    """Return the speedup of oneDNN over the default of torch on this machine, or 0 if oneDNN cannot be used.

    It is measured once per process and takes about 30 milliseconds. The rounds are interleaved, so that background load
    affects both.
    """
    import torch

    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return 0.0
    numbers = torch.linspace(-1, 1, 768 * 768).reshape(768, 768)
    product = functools.partial(torch.nn.functional.linear, numbers[:512], numbers)

    def onednn_product() -> torch.Tensor:
        with get_linear_mode_class()():
            return product()

    with torch.inference_mode():
        expected = product()
        computed = onednn_product()
        rounds = [(min_runtime(product, times=1), min_runtime(onednn_product, times=1)) for _ in range(4)]
    default_seconds, onednn_seconds = map(min, zip(*rounds, strict=True))
    return default_seconds / onednn_seconds if torch.allclose(computed, expected, rtol=1e-4, atol=1e-3) else 0.0


def min_runtime(function: Callable[[], Any], times: int) -> float:
    """Return the shortest duration of several calls, in seconds."""
    # The real clock, even inside use_clock: the speedup is measured once and applies to the whole process.
    durations = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        durations.append(time.perf_counter() - start)
    return min(durations)
