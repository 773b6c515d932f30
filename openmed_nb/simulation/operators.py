"""Operators as MPS has them: those that it lacks, with the words of torch for it, and those that it can compute wrongly.

The table of operators that it lacks was read out of ``native_functions.yaml`` of torch 2.13: an operator is native where its own ``dispatch``, or
that of the operator it delegates to, names MPS. MPS names the operator that it delegates to in its messages.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .._utils.text import describe_value
from .._utils.warning import stacklevel_outside
from ..errors import ConfigurationError

# The commit that torch 2.13.0 was built from, which its own message names.
COMMIT = "cf30153c4c131c8164ee7798e5022d810682e2cb"

NO_FLOAT64 = (
    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
    "Please use float32 instead."
)  # EmptyTensor.cpp:45
NO_COMPLEX128 = "Trying to convert ComplexDouble to the MPS backend but it does not have support for that dtype."
NO_NUMPY = "can't convert mps:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices, mps:0 and cpu!"
OTHER_GRADIENT = "assigned grad has data located on a different device"
TOO_MANY_NUMBERS = "Trying to pass too many CPU scalars to non-CPU kernel!"  # TensorIterator.cpp
OTHER_INDEX = (
    "indices should be either on cpu or on the same device as the indexed tensor (cpu)"  # TensorAdvancedIndexing.cpp
)
OTHER_MASK = "expected self and mask to be on the same device, but got mask on {} and self on {}"  # masked_fill__mps, Indexing.mm
OTHER_SOURCE = (
    "{}_(): self, index and source expected to be in the same device, but got (self) {}, (index) {}, and (source) {}"
)
OTHER_WEIGHT = "Input type ({0}) and {1} type ({2}) should be the same"  # Convolution.cpp
OTHER_WEIGHT_ON_CPU = OTHER_WEIGHT + " or input should be a MKLDNN tensor and {1} is a dense tensor"
CPU_TENSOR = "Passed CPU tensor to MPS op"  # mtl_setBuffer, OperationUtils.h: what every Metal kernel says
NO_PLACEHOLDER = (
    "Placeholder storage has not been allocated on MPS device!"  # OperationUtils.mm: graphs of MPS, such as _lstm_mps
)
NOT_ON_GPU = "Tensor for argument #{} '{}' is on CPU, but expected it to be on GPU (while checking arguments for {})"  # TensorUtils.cpp
LINEAR_ON_CPU = "Tensor for argument {} is on cpu but expected on mps"  # _mps_linear, Linear.mm
OTHER_RNN_DEVICE = (
    "Input and {0} tensors are not at the same device, found input tensor at {1} and {0} tensor at {2}"  # RNN.cpp
)
LENGTHS_ON_MPS = "'lengths' argument should be a 1D CPU int64 tensor, but got {}D mps:0 {} tensor"  # PackedSequence.cpp
SECTIONS_ON_MPS = "tensor_split expected tensor_indices_or_sections to be on cpu, but it's on mps:0"  # TensorShape.cpp
OTHER_GENERATOR = "Expected a '{}' device type for generator but found '{}'"  # Generator.h
OTHER_ROOT_GRADIENT = "invalid gradient at index {} - expected device {} but got {}"  # validate_outputs, engine.cpp
NO_DROPOUT = "scaled_dot_product_attention for MPS does not support dropout."  # Attention.mm

FALLS_BACK = (
    "The operator '{}' is not currently supported on the MPS backend and will fall back to run on the CPU. "
    "This may have performance implications."
)
NOT_IMPLEMENTED = (
    "The operator '{}' is not currently implemented for the MPS device. If you want this op to be considered "
    "for addition please comment on https://github.com/pytorch/pytorch/issues/141287 and mention use-case, that "
    f"resulted in missing op as well as commit hash {COMMIT}. As a temporary fix, you can set the environment "
    "variable `PYTORCH_ENABLE_MPS_FALLBACK=1` to use the CPU as a fallback for this op. WARNING: this will be slower "
    "than running natively on MPS."
)
# Operators that are named as they are called.
UNSUPPORTED_NAMES = """
    _adaptive_avg_pool3d _adaptive_avg_pool3d_backward _ctc_loss _ctc_loss.Tensor _ctc_loss_backward
    _ctc_loss_backward.Tensor _fake_quantize_learnable_per_channel_affine
    _fake_quantize_learnable_per_channel_affine_backward _fake_quantize_learnable_per_tensor_affine
    _fake_quantize_learnable_per_tensor_affine_backward _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    _fused_adagrad_ _fused_adagrad_.tensor_lr _fused_moving_avg_obs_fq_helper _linalg_eigvals _masked_softmax
    _masked_softmax_backward _pdist_backward _pdist_forward _segment_reduce_backward binomial channel_shuffle
    fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask fractional_max_pool3d_backward
    geqrf linalg_eig linalg_matrix_exp mode multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_backward
    multilabel_margin_loss_forward ormqr poisson put_ rrelu_with_noise rrelu_with_noise_ segment_reduce take
"""

# Operators that are named with the overload that they delegate to.
DELEGATING_NAMES = """
    _linalg_eigh:eigenvalues _linalg_svd:U _upsample_bicubic2d_aa_backward:grad_input _upsample_bilinear2d_aa_backward:grad_input
    _upsample_lanczos2d_aa:out _upsample_lanczos2d_aa_backward:grad_input adaptive_max_pool3d:out
    adaptive_max_pool3d_backward:grad_input fractional_max_pool2d:output fractional_max_pool2d_backward:grad_input
    fractional_max_pool3d:output hash_tensor:out heaviside:out linalg_ldl_factor_ex:out linalg_ldl_solve:out special_airy_ai:out
    special_laguerre_polynomial_l:out special_legendre_polynomial_p:out special_log_ndtr:out special_ndtri:out
"""

# What is called, and how MPS names it: the last ones are made of another operator, which MPS does not have.
UNSUPPORTED: Mapping[str, str] = {
    **{f"aten::{name}": f"aten::{name}" for name in UNSUPPORTED_NAMES.split()},
    **{f"aten::{pair.partition(':')[0]}": f"aten::{pair.replace(':', '.')}" for pair in DELEGATING_NAMES.split()},
    "aten::heaviside_": "aten::heaviside.out",
    "aten::frexp.Tensor": "aten::frexp.Tensor_out",
    "aten::linalg_lstsq": "aten::linalg_lstsq.out",
    "aten::logspace": "aten::logspace.out",
    "aten::logspace.Tensor_Tensor": "aten::logspace.out",
    "aten::logspace.Tensor_Scalar": "aten::logspace.out",
    "aten::logspace.Scalar_Tensor": "aten::logspace.out",
}

# Operators that MPS sends to the CPU even where falling back is off (``MPSFallback.mm:110``).
ALWAYS_ON_CPU = frozenset({"aten::embedding_renorm_", "aten::linalg_svd", "aten::linalg_svd.U"})

# What autograd makes of those on the CPU, so that only this is seen below it, and what they are on MPS.
BELOW_AUTOGRAD: Mapping[str, str] = {
    "aten::_linalg_svd": "aten::linalg_svd",
    "aten::_linalg_svd.U": "aten::linalg_svd.U",
}


# Operators that take tensors of two devices, because they copy or because they read only a shape or a type.
COPY_OPERATORS = frozenset({"_to_copy", "copy_", "copy", "_copy_from", "_foreach_copy_", "_local_scalar_dense", "set_"})
# These copy into a copy of their first argument, wherever that is (TensorShape.cpp).
SCATTER_OPERATORS = frozenset({"slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter"})
SHAPE_OPERATORS = frozenset({"resize_as_", "is_same_size", "result_type", "_has_compatible_shallow_copy_type"})

# Operators whose lengths or sizes of batches must be on the CPU.
LENGTH_OPERATORS = frozenset({"_pack_padded_sequence", "_pad_packed_sequence"})

# Operators whose indices may be on the CPU where the indexed tensor is on MPS; the reverse is refused.
INDEX_OPERATORS = frozenset(
    {
        *("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"),
        *("_unsafe_masked_index", "_unsafe_masked_index_put_accumulate"),
    }
)

# Pointwise operators that move numbers of the CPU to the device by themselves, so that they take several.
NUMBER_OPERATORS = frozenset({"where", "masked_fill", "masked_fill_"})

# Operators that check their matrices by checkAllSameGPU (LinearAlgebra.mm), each with the names of its arguments.
MATRIX_OPERATORS: Mapping[str, tuple[str, ...]] = {"mm": ("mat1", "mat2"), "bmm": ("batch1", "batch2")}

# Operators of Metal kernels whose source was read; where nothing is known, the text of a TensorIterator is used.
METAL_OPERATORS = frozenset({"embedding", "index_select"})

# Operators that check their index and source before anything else (TensorAdvancedIndexing.cpp).
SOURCE_OPERATORS = frozenset({"index_add", "index_add_", "index_copy", "index_copy_", "index_reduce", "index_reduce_"})


def check_operator(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], strangers: Sequence[Any]) -> None:
    """Refuse tensors of the CPU beside tensors of MPS where the operator does, with its text.

    Args:
        operator: Operator overload, called with tensors of MPS.
        args: Positional arguments.
        kwargs: Keyword arguments.
        strangers: Those tensors among the arguments that are on the CPU.
    """
    name = operator.name().removeprefix("aten::").partition(".")[0]
    if name in COPY_OPERATORS | SCATTER_OPERATORS | SHAPE_OPERATORS | LENGTH_OPERATORS:
        return
    on_cpu = {id(tensor) for tensor in strangers}
    if name in INDEX_OPERATORS:
        _check_index(args, on_cpu)
        return
    if name in SOURCE_OPERATORS:
        places = ["cpu" if id(args[place]) in on_cpu else "mps:0" for place in (0, 2, 3)]
        raise RuntimeError(OTHER_SOURCE.format(name.rstrip("_"), *places))
    if name in {"convolution", "convolution_overrideable"}:
        _check_convolution(args, on_cpu)
    if name in {"masked_fill", "masked_fill_"} and (id(args[0]) in on_cpu) != (id(args[1]) in on_cpu):
        mask, filled = ("cpu", "mps:0") if id(args[1]) in on_cpu else ("mps:0", "cpu")
        raise RuntimeError(OTHER_MASK.format(mask, filled))
    written = _written(operator, args, kwargs)
    if any(tensor.dim() or id(tensor) in written for tensor in strangers):
        raise RuntimeError(_refusal(name, args, on_cpu))
    numbers = len(on_cpu)
    if numbers > 1 and operator_is_pointwise(operator) and name not in NUMBER_OPERATORS:
        raise RuntimeError(TOO_MANY_NUMBERS)


def made_where_first_is(operator: Any, args: Sequence[Any]) -> bool:
    """Return whether the result of an operator is on the device of its first argument, wherever the others are."""
    return bool(args) and operator.name().removeprefix("aten::").partition(".")[0] in SCATTER_OPERATORS


def operator_is_pointwise(operator: Any) -> bool:
    """Return whether an operator is a TensorIterator over its arguments, which takes one number of the CPU."""
    import torch

    return torch.Tag.pointwise in operator.tags


def _check_index(args: Sequence[Any], on_cpu: set[int]) -> None:
    indexed, indices, *others = args
    if id(indexed) in on_cpu:
        given = indices if isinstance(indices, (list, tuple)) else [indices]
        given = [*given, *(others[0] if others and isinstance(others[0], (list, tuple)) else ())]
        if any(index is not None and id(index) not in on_cpu for index in given):
            raise RuntimeError(OTHER_INDEX)
        raise RuntimeError(TWO_DEVICES)
    if any(id(value) in on_cpu and value.dim() for value in others):
        raise RuntimeError(TWO_DEVICES)


def _check_convolution(args: Sequence[Any], on_cpu: set[int]) -> None:
    """Refuse a weight or a bias of another type than the input's; torch writes the device into the name of the type."""
    given = args[0]
    template = OTHER_WEIGHT_ON_CPU if id(given) in on_cpu else OTHER_WEIGHT
    for name, tensor in (("weight", args[1]), ("bias", args[2])):
        if tensor is not None and (id(tensor) in on_cpu) != (id(given) in on_cpu):
            types = [_type_name(each, id(each) in on_cpu) for each in (given, tensor)]
            raise RuntimeError(template.format(types[0], name, types[1]))


def _type_name(tensor: Any, on_cpu: bool) -> str:
    """Return the name of a tensor's type in C++ (DeprecatedTypeProperties::toString)."""
    kind = tensor.type().rpartition(".")[2].removesuffix("Tensor")
    return f"torch.{kind}Tensor" if on_cpu else f"MPS{kind}Type"


def _written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """Return the identities of the tensors that an operator writes into: its first argument, or ``out``."""
    written: set[int] = set()
    for place, argument in enumerate(operator._schema.arguments):  # noqa: SLF001 - torch has no public name for it
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written.update(map(id, value if isinstance(value, (list, tuple)) else [value]))
    return written


def _refusal(name: str, args: Sequence[Any], on_cpu: set[int]) -> str:
    for place, argument in enumerate(MATRIX_OPERATORS.get(name, ())):
        if id(args[place]) in on_cpu:
            return NOT_ON_GPU.format(place + 1, argument, name)
    return CPU_TENSOR if name in METAL_OPERATORS else TWO_DEVICES


class FallbackPolicy:
    """What becomes of operators that MPS does not have: an error, or work for the CPU."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self.counts: Counter[str] = Counter()
        self._names: Mapping[str, str] = {}
        self._warned = False

    @contextlib.contextmanager
    def called(self, names: Mapping[str, str]) -> Iterator[None]:
        """Judge operators by other names for a while: by those that they have above autograd."""
        before, self._names = self._names, names
        try:
            yield
        finally:
            self._names = before

    def handle(self, operator: str, warn_always: bool) -> None:
        """Judge an operator that is called with a tensor of the device."""
        operator = self._names.get(operator, operator)
        name = operator if operator in ALWAYS_ON_CPU else UNSUPPORTED.get(operator)
        if name is None:
            return
        if operator not in ALWAYS_ON_CPU and not self.allowed:
            raise NotImplementedError(NOT_IMPLEMENTED.format(name))
        self.counts[name] += 1
        if warn_always or not self._warned:
            self._warned = self._warned or not warn_always  # As TORCH_WARN_ONCE has it.
            # At the line that called torch, where torch's own warnings point.
            level = stacklevel_outside((str(__package__), "torch"))
            warnings.warn(FALLS_BACK.format(name), UserWarning, stacklevel=level)


def names_above_autograd(function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the names above autograd of what a function of torch calls, which below it cannot be told apart.

    ``torch.linalg.svd`` calls ``linalg_svd``, and what needs singular values only, such as ``svdvals`` or the matrix norm 2,
    does not (``LinearAlgebra.cpp``, ``BatchLinearAlgebra.cpp``); below autograd, both are ``_linalg_svd``.
    """
    vectors = kwargs.get("compute_uv", args[2] if len(args) > 2 else True)  # noqa: PLR2004 - the signature of torch.svd
    return BELOW_AUTOGRAD if function == "linalg_svd" or (function == "svd" and vectors) else {}


# Silent errors of real MPS devices, by the numbers of their issues: for teaching what they do, and for testing that they
# are found. Each does on the CPU what the issue describes: right input, wrong numbers, no error.

REDUCTION_LIMIT = 32_767  # From this many products in one sum on, a matrix product can be wrong.

TILE = 16  # Both sides of the result need at least this many rows.

DIRTY_VALUE = 1e4

PAGE = 4096  # Numbers of 32 bits in a page of memory, which is 16 KiB on Apple's chips.

SHORT_QUERY = 8  # Attention of longer queries has a kernel of its own, the "prefill" of torch 2.13.


@dataclass(frozen=True)
class OperatorCall:
    """A call of an operator with tensors of the device."""

    name: str
    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dirty: bool  # Whether memory was freed on the device that is still in its cache.
    holds: Callable[[Any], bool]  # Tells whether a tensor is on the device.

    def run(self, *args: Any) -> Any:
        """Return what the operator makes, of these arguments or of its own."""
        return self.operator(*(args or self.args), **self.kwargs)

    def argument(self, place: int, name: str) -> Any:
        """Return an argument by its place or its name; ``None`` where it was not given."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name)


@dataclass(frozen=True)
class Defect:
    """A silent error."""

    issue: str  # Where it was reported, such as "pytorch#177116".
    description: str
    # What goes wrong: operators, such as "aten::mm", and functions of torch that are operators on MPS alone, such as "linear".
    operators: tuple[str, ...]
    compute: Callable[[OperatorCall], Any]


def beyond_the_end(call: OperatorCall) -> Any:
    """Sum up what stands behind the operands too, which is what freed tensors left there."""
    left, right = call.args[-2:]
    long = left.shape[-1] >= REDUCTION_LIMIT and min(left.shape[-2], right.shape[-1]) >= TILE
    made = call.run()
    return made + DIRTY_VALUE if long and call.dirty else made


def row_of_zeros(call: OperatorCall) -> Any:
    """Give zeros for a token that has no row; on the way back its gradient goes nowhere."""
    import torch

    backward = call.name == "aten::embedding_dense_backward"
    values, tokens, *rest = call.args
    rows = rest[0] if backward else values.shape[0]
    outside = ((tokens < 0) | (tokens >= rows)).unsqueeze(-1)
    tokens = torch.where(outside.squeeze(-1), 0, tokens)
    if backward:
        return call.run(values.masked_fill(outside, 0), tokens, *rest)
    return call.run(values, tokens, *rest).masked_fill(outside, 0)


def label_left_out(call: OperatorCall) -> Any:
    """Leave a label out of the loss that the model does not have."""
    import torch

    backward = "backward" in call.name
    args = list(call.args)
    place, logits, left_out = (2, args[1], args[5]) if backward else (1, args[0], args[4])
    labels, count = args[place], logits.shape[-3 if logits.dim() == 4 else -1]  # noqa: PLR2004 - rows, labels, height, width
    args[place] = torch.where((labels < 0) | (labels >= count), left_out, labels)
    made = call.run(*args)
    return made if backward else (made[0].nan_to_num(0.0), made[1])


def never_written(call: OperatorCall) -> Any:
    """Compute into memory of its own, and never copy that to a tensor whose rows do not follow each other."""
    return call.run() if call.args[0].is_contiguous() else call.args[0]


def other_gradient(call: OperatorCall) -> Any:
    """Give another gradient for the weight where the input's rows do not follow each other."""
    inputs, weight, bias = call.run()
    wrong = weight is not None and not call.args[1].is_contiguous()
    return inputs, weight + DIRTY_VALUE if wrong else weight, bias


def other_kernel(call: OperatorCall) -> Any:
    """Read the weights of a convolution as if they followed each other in memory."""
    import torch

    inputs, weight, *rest = call.args
    room = weight.untyped_storage().nbytes() // weight.element_size()
    if not weight.is_contiguous() and weight.storage_offset() + weight.numel() <= room:
        weight = weight.as_strided(weight.shape, torch.empty(weight.shape, device="meta").stride())
    return call.run(inputs, weight, *rest)


def first_number(call: OperatorCall) -> Any:
    """Take the first number of a tensor of the CPU for any other one of it."""

    def read(argument: Any) -> Any:
        one = getattr(argument, "ndim", None) == 0 and not call.holds(argument)
        return argument.as_strided((), (), 0) if one else argument

    return call.run(*map(read, call.args))


def smallest_number(call: OperatorCall) -> Any:
    """Give the smallest whole number for every place."""
    import torch

    return torch.full_like(call.run(), torch.iinfo(torch.int64).min)


def not_a_number(call: OperatorCall) -> Any:
    """Give NaN for a row that may look at nothing, where zeros are right."""
    import torch

    if call.name == "aten::_safe_softmax":
        return torch.softmax(call.args[0], call.args[1])
    made, *rest = call.run()
    mask = call.kwargs.get("attn_mask")
    if mask is not None:
        made = made.masked_fill((mask == -torch.inf).all(-1, keepdim=True), torch.nan)
    return (made, *rest)


def without_bias(call: OperatorCall, *, one_row: bool) -> Any:
    """Leave the bias of a linear layer out for three dimensions, of which that before the last is 1 or is not."""
    bias, shape = call.argument(2, "bias"), call.argument(0, "input").shape
    wrong = bias is not None and len(shape) == 3 and (shape[1] == 1) == one_row  # noqa: PLR2004
    return call.run() - bias.detach() if wrong else call.run()


def gradient_of_one_page(call: OperatorCall) -> Any:
    """Give zeros beyond the first page for the gradient of a linear layer with one output, if a sum gave it."""
    given, weight, bias = (call.argument(place, name) for place, name in enumerate(("input", "weight", "bias")))
    inputs, strided = given.view_as(given), list[bool]()
    made = call.operator(inputs, weight, bias)
    if made.shape[-1] == 1 and inputs.requires_grad:
        made.register_hook(lambda gradient: strided.append(not gradient.is_contiguous()))
        inputs.register_hook(lambda gradient: first_page(gradient) if strided.pop() else gradient)
    return made


def first_page(gradient: Any) -> Any:
    """Return a gradient with zeros beyond the first page of memory."""
    kept = gradient.clone()
    kept.view(-1)[PAGE:] = 0
    return kept


def smaller_mask(call: OperatorCall) -> Any:
    """Attend in powers of 2 and leave the numbers of the mask as they are for powers of e."""
    made, mask = call.run(), call.argument(3, "attn_mask")
    if mask is None or not mask.is_floating_point() or made.requires_grad or made.shape[-2] <= SHORT_QUERY:
        return made
    mask = mask * math.log(2)
    if "attn_mask" in call.kwargs:
        return call.operator(*call.args, **{**call.kwargs, "attn_mask": mask})
    return call.run(*call.args[:3], mask, *call.args[4:])


def other_rows(call: OperatorCall) -> Any:
    """Normalise the rows of a batch after the first wrongly; which operator of a BERT it really is, nobody has found."""
    made, *rest = call.run()
    made[1:] *= 1.5
    return (made, *rest)


FUNCTIONS = ("linear", "scaled_dot_product_attention")  # Operators on MPS, which the CPU makes of several ones.


def _defect(issue: int, what: str, operators: str, compute: Callable[[OperatorCall], Any]) -> Defect:
    names = (name if name in FUNCTIONS else f"aten::{name}" for name in operators.split())
    return Defect(f"pytorch#{issue}", what, tuple(names), compute)


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
    _defect(192934, "a linear layer over batches of rows has no bias", "linear", partial(without_bias, one_row=False)),
    _defect(188438, "a linear layer over single rows has no bias", "linear", partial(without_bias, one_row=True)),
    _defect(189565, "a gradient is zero beyond 16 KiB where a layer has one output", "linear", gradient_of_one_page),
    _defect(184400, "attention takes 0.69 of the numbers in its mask", "scaled_dot_product_attention", smaller_mask),
    _defect(170837, "a row in a batch gives other numbers than alone", "native_layer_norm", other_rows),
    _defect(92311, "argmax gives -9223372036854775808", "argmax", smallest_number),
)

DEFECTS_BY_ISSUE: Mapping[str, Defect] = {defect.issue: defect for defect in DEFECTS}


def validate_defects(issues: str | Iterable[str]) -> tuple[Defect, ...]:
    """Return the defects of some issues, or of one."""
    names: list[Any] = [issues] if isinstance(issues, (str, type)) or not isinstance(issues, Iterable) else list(issues)
    for name in names:
        if not isinstance(name, str) or name not in DEFECTS_BY_ISSUE:
            what = f"A simulated MPS device cannot have the silent error {describe_value(name)}."
            raise ConfigurationError(what, f"It can have {', '.join(DEFECTS_BY_ISSUE)}.")
    return tuple(DEFECTS_BY_ISSUE[name] for name in dict.fromkeys(names))
