"""Known errors of devices that give wrong numbers without saying so: what each is, and the probe that shows it.

The table says what is known from the issues, as a hint; whether a device has an error is told by running its probe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...devices.request import kind_of
from ...training.batch_checks import REDUCTION
from ...training.dropout import LSTM_REMEDY
from ..findings import FAILED, WARNING
from . import probes

if TYPE_CHECKING:
    import torch

NEAR = 1e-3
"""How far a result may be from that of the CPU; the errors are a thousand times as large."""

ROUNDED = 1e-2
"""The same where a device rounds more: attention, recurrent networks and 16 bits."""


@dataclass(frozen=True)
class SilentBug:
    """A known error.

    Attributes:
        issue: Where it was reported.
        name: What is computed.
        what: What goes wrong.
        known: With which chips and which releases of torch it was seen.
        probe: Computes it on a device.
        remedy: One thing to do.
        tolerance: How far a result may be from that of the CPU, absolutely and relatively.
        kinds: The kinds of devices on which the probe runs.
        status: How bad it is: ``"failed"`` where a transformer or its training computes that, ``"warning"`` where only
            some programs do, and where wrong input passes.
    """

    issue: str
    name: str
    what: str
    known: str
    probe: Callable[[str], torch.Tensor]
    remedy: str
    tolerance: float = NEAR
    kinds: tuple[str, ...] = ("mps", "cuda")
    status: str = FAILED


UPGRADE = "Upgrade torch: python -m pip install --upgrade torch."
FEWER_TOKENS = f"Train with fewer than {REDUCTION:,} tokens in one step and accumulate gradients, or use torch 2.14."
CHECK_BATCHES = "Train with nb.Guards on, which look at every batch on the CPU."
CONTIGUOUS = "Call .contiguous() on the tensor first, or upgrade torch."

MENDED = ", and mended in every torch that this package takes"
"""What is said of an error that only releases before torch 2.6 had."""

BUGS = (
    SilentBug(
        "pytorch#177116",
        "long matrix product",
        "sums of 32,767 products or more take freed memory in",
        "M1 and M2, torch 2.7 to 2.13",
        probes.long_product,
        FEWER_TOKENS,
    ),
    SilentBug(
        "pytorch#183535",
        "weight gradient of many tokens",
        "it can be 1,000 to 100,000 times too large",
        "M1 and M2, torch 2.7 to 2.13",
        probes.long_weight_gradient,
        FEWER_TOKENS,
    ),
    SilentBug(
        "pytorch#195163",
        "long batched matrix product",
        "sums of 32,767 products or more take freed memory in",
        "M1 and M2, torch 2.7 to 2.14",
        probes.long_batched_product,
        f"Keep sums in batched products and einsum below {REDUCTION:,} products.",
    ),
    SilentBug(
        "pytorch#154235",
        "token without an embedding",
        "it gets a row of zeros and no error",
        "every torch until 2.13 at least",
        probes.token_without_embedding,
        CHECK_BATCHES,
        kinds=("mps",),
        status=WARNING,
    ),
    SilentBug(
        "pytorch#108148",
        "label that the model does not have",
        "the loss leaves it out without an error",
        "every torch until 2.13 at least",
        probes.label_without_logit,
        CHECK_BATCHES,
        kinds=("mps",),
        status=WARNING,
    ),
    SilentBug(
        "pytorch#162730",
        "linear layer with a transposed weight",
        "the weight is read in another order",
        "torch 2.8",
        probes.transposed_weight,
        CONTIGUOUS,
    ),
    SilentBug(
        "pytorch#189495",
        "linear layer over many rows",
        "rows from 65,536 on are wrong where there is a bias",
        "torch 2.12 and 2.13",
        probes.many_rows,
        "Reshape the input to two dimensions first, or use torch 2.14.",
        status=WARNING,
    ),
    SilentBug(
        "pytorch#156707",
        "attention of a row that is masked as a whole",
        "it gives NaN in the place of zeros",
        "torch until 2.8",
        probes.masked_row,
        "Load the model with attn_implementation='eager', or upgrade torch.",
        ROUNDED,
    ),
    SilentBug(
        "pytorch#184180",
        "attention with one mask for all heads",
        "a row of a batch gets the mask of another one",
        "torch until 2.12",
        probes.mask_for_all_heads,
        "Load the model with attn_implementation='eager', or upgrade torch.",
        ROUNDED,
    ),
    SilentBug(
        "pytorch#182285",
        "attention with a mask of yes and no",
        "a short query gets another mask",
        "builds before torch 2.12",
        probes.mask_for_short_query,
        "Load the model with attn_implementation='eager', or upgrade torch.",
        ROUNDED,
    ),
    SilentBug(
        "pytorch#195910",
        "causal attention in 16 bits",
        "it looks at later tokens",
        "torch 2.10",
        probes.later_tokens,
        "Compute in float32, or upgrade torch.",
        ROUNDED,
    ),
    SilentBug(
        "pytorch#118115",
        "optimizer step of a transposed weight",
        "addcmul_ and addcdiv_ do not change it",
        f"torch until 2.3{MENDED}",
        probes.into_transposed,
        CONTIGUOUS,
    ),
    SilentBug(
        "pytorch#165267",
        "random numbers in a transposed tensor",
        "it is not filled",
        "macOS before 15, torch until 2.9",
        probes.random_transposed,
        CONTIGUOUS,
        status=WARNING,
    ),
    SilentBug(
        "pytorch#190056",
        "LSTM with dropout between its layers",
        "the dropout is computed wrongly, also in gradients",
        "every torch until 2.13",
        probes.recurrent_dropout,
        LSTM_REMEDY,
        ROUNDED,
        status=WARNING,
    ),
    SilentBug(
        "pytorch#175189",
        "gradients of a batch norm, channels last",
        "the weight's gradient is wrong by orders of magnitude",
        "torch 2.10 and later",
        probes.normalized_channels,
        CONTIGUOUS,
        ROUNDED,
        status=WARNING,
    ),
    SilentBug(
        "pytorch#192212",
        "convolution with a sliced weight",
        "the weight is read from the wrong places",
        "macOS 15 and later, torch until 2.13",
        probes.sliced_kernel,
        CONTIGUOUS,
        status=WARNING,
    ),
    SilentBug(
        "pytorch#191929",
        "arithmetic with one number of a tensor on the CPU",
        "the first number of that tensor is taken",
        "torch before 2.14",
        probes.number_of_the_cpu,
        "Call .item() on the number first.",
        status=WARNING,
    ),
    SilentBug(
        "pytorch#183631",
        "filling a part of a tensor of yes and no",
        "other places are filled",
        "torch 2.12",
        probes.filled_slice,
        UPGRADE,
        status=WARNING,
    ),
    SilentBug(
        "pytorch#131285",
        "masked_fill_ of a part of a tensor",
        "other places are filled",
        f"torch 2.3 and 2.4{MENDED}",
        probes.masked_slice,
        UPGRADE,
        status=WARNING,
    ),
    SilentBug(
        "pytorch#163327",
        "scatter_add_ to a part of a tensor",
        "nothing is added",
        "torch 2.8",
        probes.added_to_slice,
        "Add to the whole tensor, or to a clone of the part.",
        status=WARNING,
    ),
    SilentBug(
        "pytorch#92311",
        "argmax",
        "it is a number far below zero",
        f"macOS 13 with torch 1.13 to 2.0{MENDED}",
        probes.largest_places,
        UPGRADE,
    ),
)
"""The errors that are looked for, which are not all. Those that are ``MENDED`` are looked for in case they come back, as
errors with transposed tensors and with parts of tensors have done. Left out are those that need more than some megabytes or
could end the process, and copies that do not wait (pytorch#189690), which this package never makes."""


def bugs_of(device: str) -> tuple[SilentBug, ...]:
    """Return the errors that are looked for on a device; the CPU is what others are compared with.

    On CUDA a wrong id would end all work on the GPU until the process ends, so those probes are for MPS.

    Example:
        >>> len(bugs_of("cpu")), len(bugs_of("mps")) > len(bugs_of("cuda:1")) > 0
        (0, True)
    """
    return tuple(bug for bug in BUGS if kind_of(device) in bug.kinds)
