"""Faster linear layers on the CPU, and attention on the GPU without plans and synchronization.

torch computes float32 matrix products with MKL if it is available. MKL leaves half of the vector units of AMD processors
idle: on an EPYC with AVX-512, oneDNN is twice as fast (``benchmarks/annotate.py`` prints the speedup). oneDNN is part of
torch. No weights are packed or cached, so they may change. A job that is large enough measures which library is faster.
"""

from __future__ import annotations

import contextlib
import functools
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .profilers import Arguments, Keywords, Result, TorchFunction, push_modes
from .registry import get_device

if TYPE_CHECKING:
    import torch
    from torch.overrides import TorchFunctionMode

# Matrix products with fewer rows are too small for a speedup. With the bundled model on two cores of an EPYC, a text of 21
# tokens takes 0.77 of the time with oneDNN, and one of 14 tokens 0.97.
MIN_ROWS = 16

# Minimum speedup for the use of oneDNN, and number of tokens that run before it is measured.
MIN_ONEDNN_SPEEDUP = 1.2
MIN_ONEDNN_TOKENS = 4096


def cudnn_attention_disabled(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that disables the attention of cuDNN, which creates a plan for each new shape.

    torch uses cuDNN for attention in 16 bits only. The first pass over 20,000 notes took 15.3 s with plans and 4.4 s
    without, on one H200 with torch 2.11.
    """
    if not get_device(device).uses_cudnn or dtype.itemsize > 2:  # noqa: PLR2004 - bytes
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def wrap_mask(mask: torch.Tensor, full: bool) -> torch.Tensor:
    """Return an attention mask that stores whether it is full, so that it does not hide any token.

    A model checks this for each batch, and the check of a plain tensor would synchronize with the device.
    """
    return define_known_mask()(mask, full) if get_device(mask.device).is_accelerator else mask


@functools.cache
def define_known_mask() -> Callable[[torch.Tensor, bool], torch.Tensor]:
    """Define the class of masks that store whether they are full on first use, because torch is its base.

    Returns:
        Function that returns a mask as an object of this class.
    """
    import torch

    class KnownMask(torch.Tensor):
        full: bool

        @classmethod
        def wrap(cls, mask: torch.Tensor, full: bool) -> KnownMask:
            wrapped = mask.as_subclass(cls)
            wrapped.full = full
            return wrapped

        @classmethod
        def __torch_function__(
            cls, function: TorchFunction, _types: object, args: Arguments = (), kwargs: Keywords | None = None
        ) -> Result:
            if function in {torch.Tensor.all, torch.all} and len(args) == 1 and not kwargs:
                return torch.tensor(args[0].full)
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                result = function(*args, **(kwargs or {}))
            is_cast = function in {torch.Tensor.to, torch.Tensor.bool} and isinstance(args[0], cls)
            return cls.wrap(result, args[0].full) if is_cast else result

    return KnownMask.wrap


@functools.cache
def get_linear_mode_class() -> type[TorchFunctionMode]:
    """Return the class of the mode for linear layers. It is defined on first use, because a torch class is its base."""
    import torch
    from torch.overrides import TorchFunctionMode

    linear = torch.nn.functional.linear
    onednn = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001

    class OneDnnLinear(TorchFunctionMode):
        """Computes linear layers with oneDNN, and calls every other function unchanged."""

        def __torch_function__(
            self, function: TorchFunction, _types: object, args: Arguments = (), kwargs: Keywords | None = None
        ) -> Result:
            if function is linear and not kwargs and is_onednn_candidate(*args):
                inputs, weight, bias = (*args, None)[:3]
                return onednn(inputs, weight, bias, "none", [], "")
            return function(*args, **(kwargs or {}))

    return OneDnnLinear


def is_onednn_candidate(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Return whether oneDNN supports a linear layer and is faster: dense float32, many rows, no gradients or autocast.

    ``torch.compile`` cannot compile this function of oneDNN, and selects its own.
    """
    import torch

    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
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


@dataclass
class LinearTuning:
    """Choice of the library for linear layers on the CPU.

    Attributes:
        num_tokens: Number of tokens that ran on the CPU in this process.
        onednn_speedup: Measured speedup of oneDNN, or ``None`` before the measurement.
    """

    num_tokens: int = 0
    onednn_speedup: float | None = None


LINEAR_TUNING = LinearTuning()


def fast_linear(device: torch.device, num_tokens: int) -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which ``torch.nn.functional.linear`` uses the faster library on this machine.

    The libraries are compared when the tokens of this process are numerous enough to gain from it.

    Args:
        device: Device of the model. The context manager has an effect on the CPU only.
        num_tokens: Number of tokens in the batch. The context manager has no effect for few tokens, because it intercepts
            every torch function, which would take longer than it saves.
    """
    if get_device(device).is_accelerator or num_tokens < MIN_ROWS:
        return contextlib.nullcontext()
    LINEAR_TUNING.num_tokens += num_tokens
    if LINEAR_TUNING.onednn_speedup is None and LINEAR_TUNING.num_tokens >= MIN_ONEDNN_TOKENS:
        LINEAR_TUNING.onednn_speedup = measure_onednn_speedup()
    use_onednn = (LINEAR_TUNING.onednn_speedup or 0) >= MIN_ONEDNN_SPEEDUP
    return push_modes(get_linear_mode_class()()) if use_onednn else contextlib.nullcontext()


def measure_onednn_speedup() -> float:
    """Return the speedup of oneDNN over the default of torch on this machine, or 0 if oneDNN cannot be used.

    It takes about 30 milliseconds. The rounds are interleaved, so that background load affects both. The clock is the real
    one, even if ``CLOCK`` is replaced: the speedup applies to the whole process.
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
        if not torch.allclose(onednn_product(), product(), rtol=1e-4, atol=1e-3):
            return 0.0
        rounds = [(timeit.timeit(product, number=1), timeit.timeit(onednn_product, number=1)) for _ in range(4)]
    return min(default for default, _ in rounds) / min(onednn for _, onednn in rounds)
