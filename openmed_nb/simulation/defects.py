"""Silent errors of real MPS devices that a simulated one can have, by the numbers of their issues.

For teaching what they do, and for testing that they are found. Each does on the CPU what the issue describes: right input,
wrong numbers, no error. A defect is one row of ``DEFECTS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError, shorten

LONG = 32_767  # From this many products in one sum on, a matrix product can be wrong.

TILE = 16  # Both sides of the result need at least this many rows.

DIRT = 1e4


@dataclass(frozen=True)
class OperatorCall:
    """A call of an operator with tensors of the device."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dirty: bool  # Whether memory was freed on the device that is still in its cache.
    holds: Callable[[Any], bool]  # Tells whether a tensor is on the device.

    def result(self, *args: Any) -> Any:
        """Return what the operator makes, of these arguments or of its own."""
        return self.operator(*(args or self.args), **self.kwargs)


@dataclass(frozen=True)
class Defect:
    """A silent error."""

    issue: str  # Where it was reported, such as "pytorch#177116".
    what: str
    operators: tuple[str, ...]
    compute: Callable[[OperatorCall], Any]


def beyond_the_end(call: OperatorCall) -> Any:
    """Sum up what stands behind the operands too, which is what freed tensors left there."""
    left, right = call.args[-2:]
    long = left.shape[-1] >= LONG and min(left.shape[-2], right.shape[-1]) >= TILE
    made = call.result()
    return made + DIRT if long and call.dirty else made


def row_of_zeros(call: OperatorCall) -> Any:
    """Give zeros for a token that has no row; on the way back its gradient goes nowhere."""
    import torch

    backward = call.operator.name() == "aten::embedding_dense_backward"
    values, tokens, *rest = call.args
    rows = rest[0] if backward else values.shape[0]
    outside = ((tokens < 0) | (tokens >= rows)).unsqueeze(-1)
    tokens = torch.where(outside.squeeze(-1), 0, tokens)
    if backward:
        return call.result(values.masked_fill(outside, 0), tokens, *rest)
    return call.result(values, tokens, *rest).masked_fill(outside, 0)


def label_left_out(call: OperatorCall) -> Any:
    """Leave a label out of the loss that the model does not have."""
    import torch

    backward = "backward" in call.operator.name()
    args = list(call.args)
    place, logits, left_out = (2, args[1], args[5]) if backward else (1, args[0], args[4])
    labels, count = args[place], logits.shape[-3 if logits.dim() == 4 else -1]  # noqa: PLR2004 - rows, labels, height, width
    args[place] = torch.where((labels < 0) | (labels >= count), left_out, labels)
    made = call.result(*args)
    return made if backward else (made[0].nan_to_num(0.0), made[1])


def never_written(call: OperatorCall) -> Any:
    """Compute into memory of its own, and never copy that to a tensor whose rows do not follow each other."""
    return call.result() if call.args[0].is_contiguous() else call.args[0]


def other_gradient(call: OperatorCall) -> Any:
    """Give another gradient for the weight where the input's rows do not follow each other."""
    inputs, weight, bias = call.result()
    wrong = weight is not None and not call.args[1].is_contiguous()
    return inputs, weight + DIRT if wrong else weight, bias


def other_kernel(call: OperatorCall) -> Any:
    """Read the weights of a convolution as if they followed each other in memory."""
    import torch

    inputs, weight, *rest = call.args
    if not weight.is_contiguous() and weight.storage_offset() + weight.numel() <= _room(weight):
        weight = weight.as_strided(weight.shape, torch.empty(weight.shape, device="meta").stride())
    return call.result(inputs, weight, *rest)


def first_number(call: OperatorCall) -> Any:
    """Take the first number of a tensor of the CPU for any other one of it."""

    def read(argument: Any) -> Any:
        one = getattr(argument, "ndim", None) == 0 and not call.holds(argument)
        return argument.as_strided((), (), 0) if one else argument

    return call.result(*map(read, call.args))


def smallest_number(call: OperatorCall) -> Any:
    """Give the smallest whole number for every place."""
    import torch

    return torch.full_like(call.result(), torch.iinfo(torch.int64).min)


def not_a_number(call: OperatorCall) -> Any:
    """Give NaN for a row that may look at nothing, where zeros are right."""
    import torch

    if call.operator.name() == "aten::_safe_softmax":
        return torch.softmax(call.args[0], call.args[1])
    made, *rest = call.result()
    mask = call.kwargs.get("attn_mask")
    if mask is not None:
        made = made.masked_fill((mask == -torch.inf).all(-1, keepdim=True), torch.nan)
    return (made, *rest)


def _room(tensor: Any) -> int:
    return int(tensor.untyped_storage().nbytes() // tensor.element_size())


def _defect(issue: int, what: str, operators: str, compute: Callable[[OperatorCall], Any]) -> Defect:
    return Defect(f"pytorch#{issue}", what, tuple(f"aten::{name}" for name in operators.split()), compute)


NLL_LOSS = "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward"
EMBEDDING = "embedding embedding_dense_backward"
RANDOM = "normal_ uniform_ bernoulli_.float"
CONVOLUTION = "convolution convolution_overrideable"
ARITHMETIC = "add.Tensor sub.Tensor mul.Tensor div.Tensor"
NORM = "native_batch_norm_backward batch_norm_backward"
LONG_PRODUCTS = "matrix products over 32,767 numbers or more sum up freed memory too"
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu _safe_softmax"

# What a simulated device can have.
DEFECTS = (
    _defect(177116, LONG_PRODUCTS, "mm addmm", beyond_the_end),
    _defect(195163, f"batched {LONG_PRODUCTS}", "bmm baddbmm", beyond_the_end),
    _defect(154235, "a token that has no embedding gets a row of zeros", EMBEDDING, row_of_zeros),
    _defect(108148, "a label that the model does not have adds nothing to the loss", NLL_LOSS, label_left_out),
    _defect(118115, "addcmul_ and addcdiv_ write nothing into a transposed tensor", "addcmul_ addcdiv_", never_written),
    _defect(165267, "a transposed tensor is not filled with random numbers", RANDOM, never_written),
    _defect(156707, "attention gives NaN for a row that is masked as a whole", ATTENTION, not_a_number),
    _defect(175189, "the weight of a batch norm gets a wrong gradient for channels_last input", NORM, other_gradient),
    _defect(192212, "a convolution reads a sliced weight from the wrong places", CONVOLUTION, other_kernel),
    _defect(191929, "one number of a tensor on the CPU is taken for its first one", ARITHMETIC, first_number),
    _defect(92311, "argmax gives -9223372036854775808", "argmax", smallest_number),
)

KNOWN: Mapping[str, Defect] = {defect.issue: defect for defect in DEFECTS}


def checked_defects(issues: str | Iterable[str]) -> tuple[Defect, ...]:
    """Return the defects of some issues, or of one."""
    names: list[Any] = [issues] if isinstance(issues, (str, type)) or not isinstance(issues, Iterable) else list(issues)
    for name in names:
        if not isinstance(name, str) or name not in KNOWN:
            what = f"A simulated MPS device cannot have the silent error {shorten(repr(name))}."
            raise ConfigurationError(what, f"It can have {', '.join(KNOWN)}.")
    return tuple(KNOWN[name] for name in dict.fromkeys(names))
