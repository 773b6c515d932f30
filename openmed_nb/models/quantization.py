"""int8: the linear layers of a model with whole numbers for weights, as torch's dynamic quantization makes them.

Only a CPU computes them (the kernels are those of FBGEMM, oneDNN and QNNPACK), so such a model never leaves it. Embeddings
and norms stay in float32; the inputs of a layer are rounded while it runs.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from ..devices.backend import TENSOR_LOCK
from ..devices.request import kind_of
from ..errors import ConfigurationError, cause

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INT8 = "int8"
ANOTHER_TYPE = "Use dtype='bfloat16', or 'float32'."

# The package of the layers with packed weights.
PACKED = "torch.ao.nn.quantized"
FLOAT_BYTES = 4

# What torch warns of while it quantizes: that a later release will not, which is an error here on that day.
EXPECTED_WARNINGS = (
    (DeprecationWarning, r"torch\.ao\.quantization is deprecated and will be removed in"),
    (UserWarning, r"torch\.quantize_per_tensor, torch\.quantize_per_channel and other quantized tensor creation"),
)


def check_int8(dtype: str, device: str) -> None:
    """Refuse int8 on any device but the CPU."""
    if dtype == INT8 and kind_of(device) != "cpu":
        what = f"int8 runs on the CPU alone, and the device is {device}."
        raise ConfigurationError(what, "Pass device='cpu', or dtype='bfloat16'.")


def quantize(model: PreTrainedModel) -> PreTrainedModel:
    """Turn the linear layers of a model on the CPU into int8, in place; return the model."""
    import torch

    try:
        quantize_dynamic = torch.ao.quantization.quantize_dynamic
    except AttributeError as error:
        what = f"torch {torch.__version__} has no dynamic quantization, which int8 needs."
        raise ConfigurationError(what, ANOTHER_TYPE) from error
    with TENSOR_LOCK, warnings.catch_warnings():
        for category, message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message, category)
        try:
            quantized: PreTrainedModel = quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)
        except RuntimeError as error:
            raise ConfigurationError(f"This torch cannot quantize: {cause(error)}.", ANOTHER_TYPE) from error
    return quantized


def is_packed(layer: Any) -> bool:
    """Tell whether a layer is a linear one with packed weights, by its name: torch need not have such layers."""
    return type(layer).__module__.startswith(PACKED) and hasattr(layer, "in_features")


def packed_layers(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Return the layers whose weights are packed, with their names; such weights are no parameters."""
    return [(name, layer) for name, layer in model.named_modules() if is_packed(layer)]


def is_quantized(model: PreTrainedModel) -> bool:
    """Tell whether a model has layers in int8."""
    return any(map(is_packed, model.modules()))


def dtype_of(model: PreTrainedModel) -> str:
    """Return the type of a model's weights, such as ``"bfloat16"``; a quantized model is int8 whatever else is in it."""
    return INT8 if is_quantized(model) else str(model.dtype).removeprefix("torch.")


def packed_bytes(model: PreTrainedModel) -> int:
    """Return the size of packed weights in bytes, without unpacking them: one for each weight, four for each bias."""
    layers = [layer for _, layer in packed_layers(model)]
    return sum((one.in_features + FLOAT_BYTES) * one.out_features for one in layers)
