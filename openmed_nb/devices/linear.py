"""How torch computes products and attention: by the faster of two libraries on a CPU, without plans and waits on a GPU.

torch computes float32 products with MKL where it has it, and MKL leaves half of the vector units of AMD's processors
idle: on an EPYC with AVX-512 oneDNN is twice as fast (``benchmarks/annotate.py`` prints the gain).
oneDNN is part of torch; ``torch.compile`` uses the same function. Nothing is packed or remembered, so weights may change.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .profilers import push_modes
from .registry import parse_device_argument

if TYPE_CHECKING:
    import torch

MIN_ONEDNN_SPEEDUP = 1.2  # oneDNN is taken where it is at least 1.2 times faster.
MIN_ROWS = 32  # Below, a product is too small to gain.


def fast_linear(device: torch.device, rows: int) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which ``torch.nn.functional.linear`` is as fast as this computer can.

    Args:
        device: The device of the model; on any but the CPU the context does nothing.
        rows: About how many rows the products have; for few of them it does nothing either, because it looks at every
            function that torch calls, which takes longer than it gains.
    """
    useful = (
        not parse_device_argument(device).is_accelerator
        and rows >= MIN_ROWS
        and measure_onednn_speedup() >= MIN_ONEDNN_SPEEDUP
    )
    return push_modes(get_linear_mode_class()()) if useful else contextlib.nullcontext()


def cudnn_attention_disabled(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which attention makes no plan for each new shape, as that of cuDNN does in 16 bits, and only there.

    The first pass over 20,000 notes took 15.3 s with its plans and 4.4 s without, on one H200 with torch 2.11.
    """
    if not parse_device_argument(device).uses_cudnn or dtype.itemsize > 2:  # noqa: PLR2004 - bytes
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kinds = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    without: contextlib.AbstractContextManager[Any] = sdpa_kernel(kinds)
    return without


def wrap_mask(mask: torch.Tensor, full: bool) -> torch.Tensor:
    """Return a mask that knows whether it is full, that is hides nothing.

    A model asks that of each batch, and would wait until the device has done all work before it.
    """
    if not parse_device_argument(mask.device).is_accelerator:
        return mask
    telling: torch.Tensor = mask.as_subclass(get_mask_class())
    telling.full = full
    return telling


@functools.cache
def get_mask_class() -> Any:
    """Return the class of such masks; it is made here, because its base is torch's."""
    import torch

    class TellingMask(torch.Tensor):
        full: bool

        @classmethod
        def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            mask: Any = args[0] if args else None
            if function in {torch.Tensor.all, torch.all} and len(args) == 1 and not kwargs:
                return torch.tensor(mask.full)
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                result = function(*args, **(kwargs or {}))
            cast = function in {torch.Tensor.to, torch.Tensor.bool} and isinstance(mask, cls)
            return wrap_mask(result, mask.full) if cast else result

    return TellingMask


@functools.cache
def get_linear_mode_class() -> Callable[[], Any]:
    """Return the class of the context; it is made here, because its base is torch's."""
    import torch
    from torch.overrides import TorchFunctionMode

    linear = torch.nn.functional.linear
    onednn = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001

    class OneDnnLinear(TorchFunctionMode):
        """Sends linear layers to oneDNN, and every other function where it belongs."""

        def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is linear and not kwargs and is_onednn_candidate(*args):
                inputs, weight, bias = (*args, None)[:3]
                return onednn(inputs, weight, bias, "none", [], "")
            return function(*args, **(kwargs or {}))

    return OneDnnLinear


def is_onednn_candidate(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Tell whether a product is one that oneDNN takes and speeds up: dense float32, many rows, and only its result."""
    import torch

    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    tensors = (inputs, weight) if bias is None else (inputs, weight, bias)
    plain = all(
        type(tensor) in {torch.Tensor, torch.nn.Parameter}
        and tensor.is_cpu
        and tensor.dtype == torch.float32
        and tensor.layout == torch.strided
        for tensor in tensors
    )
    fitting = inputs.shape[-1:] == weight.shape[1:]
    return plain and fitting and inputs.numel() >= MIN_ROWS * weight.shape[1] > 0


@functools.cache
def measure_onednn_speedup() -> float:
    """Return how many times faster oneDNN is here than torch's own choice, 0 where it cannot be used.

    Measured once in a process, in some 30 milliseconds, and in turn: what else this computer does then slows both down.
    """
    import torch

    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return 0.0
    numbers = torch.linspace(-1, 1, 768 * 768).reshape(768, 768)
    product = functools.partial(torch.nn.functional.linear, numbers[:512], numbers)

    def by_onednn() -> torch.Tensor:
        with get_linear_mode_class()():
            return product()

    with torch.inference_mode():
        expected = product()
        computed = by_onednn()
        turns = [(min_runtime(product, times=1), min_runtime(by_onednn, times=1)) for _ in range(4)]
    own, onednn = map(min, zip(*turns, strict=True))
    return own / onednn if torch.allclose(computed, expected, rtol=1e-4, atol=1e-3) else 0.0


def min_runtime(function: Callable[[], Any], times: int) -> float:
    """Return the shortest of some runs, in seconds."""
    # By the real clock, whatever a block is timed by: the gain is learnt once and holds for the whole process.
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
