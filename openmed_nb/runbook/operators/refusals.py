"""Why MPS refuses a call although it has the operator: types, shapes and options that its kernels do not take.

Each rule is one row of a table, with the words of MPS (torch 2.13). Some can be seen of an operator, the others only of the
function that Python calls: below autograd, a linear layer is already a product of matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .table import NOT_KNOWN

if TYPE_CHECKING:
    import torch

MOST_DIMENSIONS = 16
MOST_ELEMENTS = 2**31
REFUSED = "refused"
MAY_BE_WRONG = "may be wrong"


@dataclass(frozen=True)
class Refusal:
    """A reason why MPS refuses a call, or computes it wrongly.

    Attributes:
        name: What it is about, in a few words.
        says: What MPS says or does, and where that is written.
        remedy: One thing to do, as a sentence.
        verdict: ``"refused"``, ``"may be wrong"``, or ``"not known"``.
    """

    name: str
    says: str
    remedy: str
    verdict: str = REFUSED


FLOAT64 = Refusal(
    "float64",
    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64 (EmptyTensor.cpp).",
    "Use float32: say dtype=torch.float32, or call .float().",
)
DIMENSIONS = Refusal(
    "more than 16 dimensions",
    "MPS supports tensors with dimensions <= 16.",
    "Reshape the tensor to fewer dimensions.",
)
ELEMENTS = Refusal(
    "more than 2**31 elements",
    "Some kernels of MPS count in 32 bits and give wrong numbers without an error (pytorch#188756, #189960).",
    "Use a smaller batch or shorter texts.",
    MAY_BE_WRONG,
)
ADAPTIVE_POOL = Refusal(
    "adaptive pooling to sizes that do not divide",
    "Adaptive pool MPS: input sizes must be divisible by output sizes (pytorch#96056).",
    "Choose an output size that divides the input's, or pool on the CPU.",
)
INTEGER_CONVOLUTION = Refusal(
    "convolution of integers",
    "MPS has no convolution of integers (torch/testing/_internal/common_mps.py).",
    "Convert the input with .float() first.",
)
INTEGER_LINEAR = Refusal(
    "linear layer of integers",
    "MPS device does not support linear for non-float inputs.",
    "Convert the input with .float() first.",
)
LSTM_PROJECTION = Refusal(
    "LSTM with a projection",
    "LSTM with projections is not currently supported with MPS.",
    "Leave proj_size out, and put a Linear behind the LSTM.",
)
ATTENTION_DROPOUT = Refusal(
    "attention with dropout and without gradients",
    "scaled_dot_product_attention for MPS does not support dropout (Attention.mm).",
    "Set its dropout to 0 where no gradients are needed (model.eval()), or load the model with "
    "attn_implementation='eager'.",
)
NO_PLAIN_TENSOR = Refusal(
    "sparse and nested tensors",
    "MPS has other kernels for them than for plain tensors, and only a few (SparseMPS in native_functions.yaml).",
    "Use plain tensors, as .to_dense() and .to_padded_tensor() make them, or try it on a Mac.",
    NOT_KNOWN,
)


@dataclass(frozen=True)
class Rule:
    """A refusal, and what tells from the arguments of a call whether it applies."""

    refusal: Refusal
    applies: Callable[..., bool]


def _of_integers(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _unevenly(tensor: torch.Tensor, sizes: Iterable[int], *_args: Any, **_kwargs: Any) -> bool:
    """Tell whether the average cannot be taken in equal windows, or one side grows while the other shrinks."""
    pairs = [(given, wanted) for given, wanted in zip(tensor.shape[-2:], sizes, strict=True) if given and wanted]
    return _in_two_directions(tensor, sizes) or any(max(pair) % min(pair) for pair in pairs)


def _in_two_directions(tensor: torch.Tensor, sizes: Iterable[int], *_args: Any, **_kwargs: Any) -> bool:
    signs = [given - wanted for given, wanted in zip(tensor.shape[-2:], sizes, strict=True)]
    return bool(min(signs) < 0 < max(signs))


def _with_projection(*args: Any, **_kwargs: Any) -> bool:
    """Tell whether an LSTM's last state is shorter than its cells, in torch's two signatures: plain and packed."""
    states = next((value for value in args if isinstance(value, (tuple, list)) and len(value) == 2), ())  # noqa: PLR2004
    return len(states) == 2 and bool(states[0].shape[-1] != states[1].shape[-1])  # noqa: PLR2004


def _drops_without_gradient(*args: Any, **kwargs: Any) -> bool:
    import torch

    named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args, strict=False)) | kwargs
    learns = torch.is_grad_enabled() and any(named[name].requires_grad for name in ("query", "key", "value"))
    return bool(named.get("dropout_p", 0.0)) and not learns


OF_OPERATORS: Mapping[str, Rule] = {
    "aten::convolution": Rule(INTEGER_CONVOLUTION, _of_integers),
    "aten::_adaptive_avg_pool2d": Rule(ADAPTIVE_POOL, _unevenly),
    "aten::adaptive_max_pool2d": Rule(ADAPTIVE_POOL, _in_two_directions),
}
"""What is seen of an operator and its arguments."""

OF_FUNCTIONS: Mapping[str, Rule] = {
    "linear": Rule(INTEGER_LINEAR, _of_integers),
    "lstm": Rule(LSTM_PROJECTION, _with_projection),
    "scaled_dot_product_attention": Rule(ATTENTION_DROPOUT, _drops_without_gradient),
}
"""What is seen of a function of torch that Python calls."""


def of_call(rules: Mapping[str, Rule], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Refusal]:
    """Return why MPS refuses a call with these arguments; types and shapes of all tensors are not looked at here.

    Example:
        >>> import torch
        >>> [refusal.name for refusal in of_call(OF_FUNCTIONS, "linear", (torch.ones(1, 2).long(),), {})]
        ['linear layer of integers']
    """
    rule = rules.get(name)
    return [rule.refusal] if rule and rule.applies(*args, **kwargs) else []


def of_shapes(tensors: Iterable[torch.Tensor]) -> list[Refusal]:
    """Return what is wrong with the shapes of tensors.

    Example:
        >>> import torch
        >>> [refusal.name for refusal in of_shapes([torch.ones([1] * 17)])]
        ['more than 16 dimensions']
    """
    shapes = [tensor.shape for tensor in tensors if not tensor.is_nested]  # The shape of those is another question.
    many_dimensions = any(len(shape) > MOST_DIMENSIONS for shape in shapes)
    many_elements = any(shape.numel() > MOST_ELEMENTS for shape in shapes)
    return [DIMENSIONS] * many_dimensions + [ELEMENTS] * many_elements
