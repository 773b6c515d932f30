"""Measurements of a model and of this machine: whether rows may be padded, and whether oneDNN is faster."""

from __future__ import annotations

import contextlib
import functools
import timeit
from dataclasses import dataclass

import numpy as np
import torch

from ..devices.linear import MIN_ROWS, get_linear_mode_class
from ..devices.profilers import push_modes
from ..devices.registry import get_device
from .forward import Inputs, TokenClassifier, evaluation_mode, read_logits

# Length of the row that is used to check whether a model masks padding. Rows on MPS are padded to this length anyway.
PROBE_LENGTH = 32

# Minimum speedup for the use of oneDNN, and number of tokens that run before it is measured.
MIN_ONEDNN_SPEEDUP = 1.2
MIN_ONEDNN_TOKENS = 4096


def is_padding_masked(network: TokenClassifier, max_length: int) -> bool:
    """Return whether padding a row leaves the predictions for its tokens unchanged, except for rounding.

    A model may accept an attention mask and still read the padding, such as the convolutions of ConvBERT, the pooling of Funnel
    and the hashes of YOSO. A row of synthetic tokens therefore runs with and without padding. Hooks of the user are not called.
    An error of the model is raised, so that no answer is cached.
    """
    if "attention_mask" not in network.input_names:
        return False
    padded_length = min(PROBE_LENGTH, max_length)
    length = padded_length * 2 // 3
    ids = np.full((1, padded_length), network.special_tokens.pad_token_id, np.int64)
    ids[0, :length] = np.resize([*network.special_tokens.prefix_ids, *network.special_tokens.suffix_ids] or [0], length)
    inputs = network.build_inputs(ids, (np.arange(padded_length) < length)[None])

    def forward(row: Inputs) -> torch.Tensor:
        """Return the logits of the tokens, without calling the hooks of users."""
        output = network.model.forward(**network.copy_to_device([row])[0])
        return read_logits(output)[0, :length].float()

    with evaluation_mode(network.model), torch.no_grad():
        padded = forward(inputs)
        unpadded = forward({name: array[:, :length] for name, array in inputs.items()})
        difference = float((padded - unpadded).abs().max())
        magnitude = float(unpadded.abs().max())
    rounding = torch.finfo(network.model.dtype).eps ** 0.5
    return not difference > rounding * max(1.0, magnitude)  # NaN is reported with the results.


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
