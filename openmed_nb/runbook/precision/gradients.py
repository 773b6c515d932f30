"""The gradients of one training step in two ways: on the CPU in float32, and on a device in a type.

Dropout is off, the labels are those that the reference itself gives, and the inputs are made on the CPU: a seed gives other
numbers on MPS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...devices.backend import TENSOR_LOCK, synchronize
from ...devices.simulation import shown_device
from ...errors import DeviceUnavailable, cause
from .parity import GradientDifference

if TYPE_CHECKING:
    import numpy as np

    from ...annotation.forward import Inputs, Network
    from ...annotation.stream import Annotator, Prepared

TOKENS = 1024
"""How many tokens the step has at most; its activations are kept on both devices."""

SCALE = 1024.0
"""The loss is multiplied by this, and the gradients divided, as a ``GradScaler`` does: float16 would make 0 of small ones."""

SMALLEST = 1e-2
"""Gradients shorter than this share of the longest are compared with that: some, such as those of the biases of keys in
attention, are zero but for rounding."""


def gradient_difference(reference: Annotator, candidate: Annotator, prepared: Prepared) -> GradientDifference | None:
    """Return how far the gradients of one batch are apart; ``None`` where no parameter has one.

    Raises:
        DeviceUnavailable: Where the device fails.
    """
    from ...annotation.forward import fill

    batch = candidate.batches(prepared, candidate.budget.within(TOKENS))[0]
    inputs = fill(prepared.tokens, prepared.windows, batch, candidate.network)
    labels = best_labels(reference.network, inputs)
    try:
        ours, theirs = (gradients_of(side.network, inputs, labels) for side in (reference, candidate))
    except RuntimeError as error:
        place = shown_device(str(candidate.network.model.device))
        what = f"A step could not be computed on {place}: {cause(error)}."
        raise DeviceUnavailable(what, "Leave gradients=True out, or use another device or type.") from error
    return largest_difference(ours, theirs) if ours else None


def best_labels(network: Network, inputs: Inputs) -> np.ndarray:
    """Return the labels that a model gives to a batch, ``(rows, length)`` int64."""
    import torch

    with TENSOR_LOCK, torch.no_grad():
        labels: np.ndarray = network.logits(inputs).argmax(-1).cpu().numpy()
    return labels


def gradients_of(network: Network, inputs: Inputs, labels: np.ndarray) -> dict[str, Any]:
    """Return the gradient of each parameter on the host in float32; the parameters themselves keep theirs."""
    import torch

    model = getattr(network.model, "_orig_mod", network.model)
    learning = {name: one for name, one in model.named_parameters() if one.requires_grad}
    if not learning:
        return {}
    device = model.device
    with TENSOR_LOCK, torch.enable_grad():
        output = model(**{name: torch.from_numpy(array).to(device) for name, array in inputs.items()})
        logits = output["logits"] if isinstance(output, dict) else output[0]
        inside = torch.from_numpy(inputs.get("attention_mask", labels >= 0)).to(device).bool()
        loss = torch.nn.functional.cross_entropy(logits.float()[inside], torch.from_numpy(labels).to(device)[inside])
        gradients = torch.autograd.grad(SCALE * loss, list(learning.values()), allow_unused=True)
        synchronize(device)
        found = zip(learning, gradients, strict=True)
        return {name: one.detach().cpu().float() / SCALE for name, one in found if one is not None}


def largest_difference(reference: Mapping[str, Any], candidate: Mapping[str, Any]) -> GradientDifference:
    """Return the largest relative difference of two sets of gradients, and the parameter where it is.

    Args:
        reference: Gradients by the names of parameters, as tensors on the CPU.
        candidate: The same in another way; one that is missing counts as zero.

    Example:
        >>> import torch
        >>> ones = {"weight": torch.ones(4), "bias": torch.ones(2)}
        >>> largest_difference(ones, {**ones, "bias": torch.tensor([1.0, 2.0])}).parameter
        'bias'
    """
    lengths = {name: float(one.norm()) for name, one in reference.items()}
    least = SMALLEST * max(lengths.values()) or 1.0
    apart = {
        name: float((candidate[name] - one).norm() if name in candidate else one.norm()) / max(lengths[name], least)
        for name, one in reference.items()
    }
    unknown = float("inf")
    apart = {name: unknown if one != one else one for name, one in apart.items()}  # noqa: PLR0124 - NaN is unlike itself
    worst = max(apart, key=apart.__getitem__)
    return GradientDifference(apart[worst], worst, len(apart))
