"""int8: the linear layers of a model with whole numbers for weights, as torch's dynamic quantization makes them.

Only a CPU computes them (the kernels are those of FBGEMM, oneDNN and QNNPACK), so such a model never leaves it. Embeddings
and norms stay in float32; the inputs of a layer are rounded while it runs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..devices.backend import TENSOR_LOCK
from ..devices.request import kind_of
from ..errors import ConfigurationError, cause

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INT8 = "int8"

PACKED = "torch.ao.nn.quantized"
"""The package of the layers with packed weights."""

FLOAT_BYTES = 4

SAID = (
    (DeprecationWarning, r"torch\.ao\.quantization is deprecated and will be removed in"),
    (UserWarning, r"torch\.quantize_per_tensor, torch\.quantize_per_channel and other quantized tensor creation"),
)
"""What torch says while it quantizes: that it will do so no more one day, which is an error of ours on that day."""

ANOTHER_TYPE = "Use dtype='bfloat16', or 'float32'."


def check_int8(dtype: str, device: str) -> None:
    """Check that a type can be had on a device.

    Raises:
        ConfigurationError: For int8 on any device but the CPU.

    Example:
        >>> check_int8("int8", "mps")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: int8 runs on the CPU alone, and the device is mps. Pass device='cpu', \
or dtype='bfloat16'.
    """
    if dtype == INT8 and kind_of(device) != "cpu":
        what = f"int8 runs on the CPU alone, and the device is {device}."
        raise ConfigurationError(what, "Pass device='cpu', or dtype='bfloat16'.")


def quantize(model: PreTrainedModel) -> PreTrainedModel:
    """Turn the linear layers of a model on the CPU into int8, in place; return the model.

    Raises:
        ConfigurationError: Where this torch does not quantize, or has no kernels for it.
    """
    import torch

    quantize_dynamic = quantizer(torch)
    with TENSOR_LOCK, without_what_is_said():
        try:
            quantized: PreTrainedModel = quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)
        except RuntimeError as error:
            raise ConfigurationError(f"This torch cannot quantize: {cause(error)}.", ANOTHER_TYPE) from error
    return quantized


def quantizer(torch: Any) -> Any:
    """Return torch's function for dynamic quantization.

    Raises:
        ConfigurationError: Where this torch has it no more; its documentation points to the package torchao then.
    """
    quantization = getattr(getattr(torch, "ao", None), "quantization", None)
    function = getattr(quantization, "quantize_dynamic", None)
    if function is None:
        what = f"torch {torch.__version__} has no dynamic quantization, which int8 is made with."
        raise ConfigurationError(what, ANOTHER_TYPE)
    return function


@contextlib.contextmanager
def without_what_is_said() -> Iterator[None]:
    """Silence what torch is known to say while it quantizes, and nothing else."""
    with warnings.catch_warnings():
        for category, message in SAID:
            warnings.filterwarnings("ignore", message, category)
        yield


def packed_layers(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Return the layers of a model whose weights are packed, with their names; such weights are no parameters."""
    return [(name, layer) for name, layer in model.named_modules() if is_packed(layer)]


def is_packed(layer: Any) -> bool:
    """Tell whether a layer is a linear one with packed weights; torch need not have such layers to be asked."""
    return type(layer).__module__.startswith(PACKED) and hasattr(layer, "in_features")


def is_quantized(model: PreTrainedModel) -> bool:
    """Tell whether a model has layers in int8."""
    return any(is_packed(layer) for layer in model.modules())


def dtype_of(model: PreTrainedModel) -> str:
    """Return the type of a model's weights, such as ``"bfloat16"``; a quantized model is int8 whatever else is in it."""
    return INT8 if is_quantized(model) else str(model.dtype).removeprefix("torch.")


def packed_bytes(model: PreTrainedModel) -> int:
    """Return the size of packed weights in bytes, without unpacking them: one for each weight, four for each bias."""
    return sum(
        layer.in_features * layer.out_features + FLOAT_BYTES * layer.out_features for _, layer in packed_layers(model)
    )
