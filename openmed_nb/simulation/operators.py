"""Operators of MPS: unsupported operators with the error texts of torch, and simulated silent errors.

The table of unsupported operators is based on ``native_functions.yaml`` of torch 2.13. An operator is supported if its
``dispatch``, or that of the operator it delegates to, names MPS. In its messages, MPS names the operator that it
delegates to.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from .._utils.text import describe_value
from .._utils.warning import stacklevel_outside
from ..devices.moving import iter_operator_tensors
from ..devices.profilers import Arguments, Keywords, Result, TorchFunction
from ..errors import ConfigurationError

# Commit of torch 2.13.0, which its message contains.
COMMIT = "cf30153c4c131c8164ee7798e5022d810682e2cb"

# Dtypes that MPS does not support, with the error texts of torch.
UNSUPPORTED_DTYPES = {
    torch.float64: "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
    "Please use float32 instead.",  # EmptyTensor.cpp:45
    torch.complex128: "Trying to convert ComplexDouble to the MPS backend but it does not have support for that dtype.",
}

TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices, mps:0 and cpu!"
CPU_TENSOR = "Passed CPU tensor to MPS op"  # mtl_setBuffer, OperationUtils.h: what every Metal kernel says
OTHER_INDEX = (
    "indices should be either on cpu or on the same device as the indexed tensor (cpu)"  # TensorAdvancedIndexing.cpp
)
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
# Operators whose name in messages is the called name.
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

# Operators whose name in messages is the overload that they delegate to.
DELEGATING_NAMES = """
    _linalg_eigh:eigenvalues _linalg_svd:U _upsample_bicubic2d_aa_backward:grad_input _upsample_bilinear2d_aa_backward:grad_input
    _upsample_lanczos2d_aa:out _upsample_lanczos2d_aa_backward:grad_input adaptive_max_pool3d:out
    adaptive_max_pool3d_backward:grad_input fractional_max_pool2d:output fractional_max_pool2d_backward:grad_input
    fractional_max_pool3d:output hash_tensor:out heaviside:out linalg_ldl_factor_ex:out linalg_ldl_solve:out special_airy_ai:out
    special_laguerre_polynomial_l:out special_legendre_polynomial_p:out special_log_ndtr:out special_ndtri:out
"""

# Called operators, and their names in messages of MPS. The last ones consist of another unsupported operator.
UNSUPPORTED: Mapping[str, str] = {
    **{f"aten::{name}": f"aten::{name}" for name in UNSUPPORTED_NAMES.split()},
    **{f"aten::{pair.partition(':')[0]}": f"aten::{pair.replace(':', '.')}" for pair in DELEGATING_NAMES.split()},
    "aten::heaviside_": "aten::heaviside.out",
    "aten::frexp.Tensor": "aten::frexp.Tensor_out",
    "aten::linalg_lstsq": "aten::linalg_lstsq.out",
    **dict.fromkeys(
        (
            "aten::logspace",
            "aten::logspace.Tensor_Tensor",
            "aten::logspace.Tensor_Scalar",
            "aten::logspace.Scalar_Tensor",
        ),
        "aten::logspace.out",
    ),
}

# Operators that MPS always runs on the CPU, even if the fallback is disabled (``MPSFallback.mm:110``).
ALWAYS_ON_CPU = frozenset({"aten::embedding_renorm_", "aten::linalg_svd", "aten::linalg_svd.U"})

# Names of these operators below autograd on the CPU, and their names on MPS.
BELOW_AUTOGRAD: Mapping[str, str] = {
    "aten::_linalg_svd": "aten::linalg_svd",
    "aten::_linalg_svd.U": "aten::linalg_svd.U",
}


# Operators that copy into a copy of their first argument, on any device (TensorShape.cpp).
SCATTER_OPERATORS = frozenset({"slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter"})

# Operators that accept tensors of two devices: they copy, read only a shape or a dtype, or require lengths on the CPU.
TWO_DEVICE_OPERATORS = SCATTER_OPERATORS | {
    "_to_copy",
    "copy_",
    "copy",
    "_copy_from",
    "_foreach_copy_",
    "_local_scalar_dense",
    "set_",
    "resize_as_",
    "is_same_size",
    "result_type",
    "_has_compatible_shallow_copy_type",
    "_pack_padded_sequence",
    "_pad_packed_sequence",
}

# Operators whose indices may be on the CPU if the indexed tensor is on MPS; the reverse is an error.
INDEX_OPERATORS = frozenset(
    {
        "index",
        "index_put",
        "index_put_",
        "_index_put_impl_",
        "_unsafe_index",
        "_unsafe_index_put",
        "_unsafe_masked_index",
        "_unsafe_masked_index_put_accumulate",
    }
)

# Operators that check their index and source before anything else (TensorAdvancedIndexing.cpp).
SOURCE_OPERATORS = frozenset({"index_add", "index_add_", "index_copy", "index_copy_", "index_reduce", "index_reduce_"})

# Pointwise operators that move CPU scalars to the device, so that they accept several.
NUMBER_OPERATORS = frozenset({"where", "masked_fill", "masked_fill_"})

# Operators with Metal kernels whose source was read. For other operators, the text of a TensorIterator is used.
METAL_OPERATORS = frozenset({"embedding", "index_select"})


def base_name(operator: OpOverload) -> str:
    """Return the name of an operator without its overload, such as ``"add"``."""
    name: str = operator.name()
    return name.removeprefix("aten::").partition(".")[0]


def check_operator(
    operator: OpOverload, args: Arguments, kwargs: Keywords, cpu_tensors: Sequence[torch.Tensor]
) -> None:
    """Raise the error of torch for CPU tensors together with MPS tensors, if the operator does not accept them.

    Args:
        operator: Operator overload, called with MPS tensors.
        args: Positional arguments.
        kwargs: Keyword arguments.
        cpu_tensors: Those tensors among the arguments that are on the CPU.
    """
    name = base_name(operator)
    if name in TWO_DEVICE_OPERATORS:
        return
    on_cpu = {id(tensor) for tensor in cpu_tensors}
    if name in INDEX_OPERATORS:
        _check_index(args, on_cpu)
        return
    if name in SOURCE_OPERATORS:
        raise RuntimeError(TWO_DEVICES)
    if name in {"masked_fill", "masked_fill_"} and (id(args[0]) in on_cpu) != (id(args[1]) in on_cpu):
        raise RuntimeError(TWO_DEVICES)
    # Any other operator accepts CPU tensors without dimensions that it does not write to.
    written: list[object] = []
    for index, argument in enumerate(operator._schema.arguments):  # noqa: SLF001 - torch has no public name for it
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[index] if index < len(args) else kwargs.get(argument.name))
    written_ids = {id(tensor) for tensor in iter_operator_tensors(written)}
    if any(tensor.dim() or id(tensor) in written_ids for tensor in cpu_tensors):
        raise RuntimeError(CPU_TENSOR if name in METAL_OPERATORS else TWO_DEVICES)
    # A pointwise operator is a TensorIterator over its arguments, which accepts one CPU scalar.
    if len(on_cpu) > 1 and torch.Tag.pointwise in operator.tags and name not in NUMBER_OPERATORS:
        raise RuntimeError("Trying to pass too many CPU scalars to non-CPU kernel!")  # TensorIterator.cpp


def _check_index(args: Arguments, on_cpu: set[int]) -> None:
    """Raise an error if an indexed tensor and its indices or values are on devices that torch does not combine."""
    indexed, indices, *others = args
    if id(indexed) in on_cpu:
        # The indices of a masked index follow its mask.
        all_indices = iter_operator_tensors(
            [indices, *(other for other in others[:1] if isinstance(other, (list, tuple)))]
        )
        raise RuntimeError(TWO_DEVICES if all(id(index) in on_cpu for index in all_indices) else OTHER_INDEX)
    if any(id(value) in on_cpu and value.dim() for value in others):
        raise RuntimeError(TWO_DEVICES)


class FallbackPolicy:
    """Handling of unsupported operators: an error, or a fallback to the CPU."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self.counts: Counter[str] = Counter()
        self.names: Mapping[str, str] = {}  # Names of operators above autograd, by their names below it.
        self._warned = False

    def handle(self, operator: str, warn_always: bool) -> None:
        """Handle an operator that is called with a tensor of the device."""
        operator = self.names.get(operator, operator)
        name = operator if operator in ALWAYS_ON_CPU else UNSUPPORTED.get(operator)
        if name is None:
            return
        if operator not in ALWAYS_ON_CPU and not self.allowed:
            raise NotImplementedError(NOT_IMPLEMENTED.format(name))
        self.counts[name] += 1
        if warn_always or not self._warned:
            self._warned = self._warned or not warn_always  # Same as TORCH_WARN_ONCE.
            # The warning refers to the line that called torch, as warnings of torch do.
            level = stacklevel_outside((str(__package__), "torch"))
            warnings.warn(FALLS_BACK.format(name), UserWarning, stacklevel=level)


def names_above_autograd(function: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Mapping[str, str]:
    """Return the names above autograd of the operators of a function, which are indistinguishable below it.

    ``torch.linalg.svd`` calls ``linalg_svd``. Functions that need only singular values, such as ``svdvals`` or the
    matrix norm 2, do not (``LinearAlgebra.cpp``, ``BatchLinearAlgebra.cpp``). Below autograd, both call
    ``_linalg_svd``.
    """
    vectors = kwargs.get("compute_uv", args[2] if len(args) > 2 else True)  # noqa: PLR2004 - the signature of torch.svd
    return BELOW_AUTOGRAD if function == "linalg_svd" or (function == "svd" and vectors) else {}


# Silent errors of real MPS devices, by issue number, for teaching and for testing their detection. Each reproduces the
# described behavior on the CPU: valid input, incorrect results, no error. The last two end the process.

# From this number of products in one sum, a matrix product can be incorrect.
REDUCTION_LIMIT = 32_767

# Minimum number of rows and columns of the result.
MIN_TILE_ROWS = 16

DIRTY_VALUE = 1e4

# Number of 32-bit values in a memory page, which has 16 KiB on Apple chips.
PAGE_NUMBERS = 4096

# Values that a linear layer adds to the results of successive calls. The issue reports a difference of 123.5.
CALL_ERRORS = itertools.cycle((0.0, 123.5))

MATRIX_DIMENSIONS = 2
MAX_GRAPH_DIMENSIONS = 4  # Beyond this number, MPS reshapes the input of a linear layer.
HALF_BYTES = 2  # Size of an element of a 16-bit dtype.

# Attention uses another kernel for longer queries, the "prefill" kernel of torch 2.13.
MAX_SHORT_QUERY = 8


class OperatorCall(NamedTuple):
    """Call of an operator with tensors of the device.

    Attributes:
        name: Name of the operator.
        operator: Operator.
        args: Positional arguments.
        kwargs: Keyword arguments.
        dirty: Whether the cache of the device contains freed memory.
        holds: Function that returns whether a tensor is on the device.
    """

    name: str
    operator: TorchFunction
    args: Arguments
    kwargs: Keywords
    dirty: bool
    holds: Callable[[torch.Tensor], bool]

    def run(self, *args: object) -> Result:
        """Return the result of the operator for these arguments, or for those of the call."""
        return self.operator(*(args or self.args), **self.kwargs)

    def argument(self, index: int, name: str) -> Any:
        """Return an argument by index or name, or ``None`` if it was not passed."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name)


class Defect(NamedTuple):
    """Silent error.

    Attributes:
        issue: Issue that reports it, such as ``"pytorch#177116"``.
        description: Description.
        operators: Affected operators, such as ``"aten::mm"``, and functions that are operators on MPS only, such as
            ``"linear"``.
        compute: Function that computes the incorrect result.
    """

    issue: str
    description: str
    operators: tuple[str, ...]
    compute: Callable[[OperatorCall], Result]


def _sum_beyond_end(call: OperatorCall) -> Result:
    """Add the memory behind the operands, which contains values of freed tensors."""
    left, right = call.args[-2:]
    is_affected = left.shape[-1] >= REDUCTION_LIMIT and min(left.shape[-2], right.shape[-1]) >= MIN_TILE_ROWS
    result = call.run()
    return result + DIRTY_VALUE if is_affected and call.dirty else result


def _embed_as_zeros(call: OperatorCall) -> Result:
    """Return zeros for a token without an embedding; its gradient is discarded."""
    backward = call.name == "aten::embedding_dense_backward"
    values, tokens, *rest = call.args
    rows = rest[0] if backward else values.shape[0]
    outside = ((tokens < 0) | (tokens >= rows)).unsqueeze(-1)
    tokens = torch.where(outside.squeeze(-1), 0, tokens)
    if backward:
        return call.run(values.masked_fill(outside, 0), tokens, *rest)
    return call.run(values, tokens, *rest).masked_fill(outside, 0)


def _ignore_label(call: OperatorCall) -> Result:
    """Ignore labels outside the model's label range in the loss."""
    backward = "backward" in call.name
    args = list(call.args)
    index, logits, ignore_index = (2, args[1], args[5]) if backward else (1, args[0], args[4])
    labels = args[index]
    count = logits.shape[-3 if logits.dim() == 4 else -1]  # noqa: PLR2004 - rows, labels, height, width
    args[index] = torch.where((labels < 0) | (labels >= count), ignore_index, labels)
    result = call.run(*args)
    return result if backward else (result[0].nan_to_num(0.0), result[1])


def _skip_write(call: OperatorCall) -> Result:
    """Compute into temporary memory, and never copy it to a tensor that is not contiguous."""
    return call.run() if call.args[0].is_contiguous() else call.args[0]


def _change_weight_gradient(call: OperatorCall) -> Result:
    """Return an incorrect gradient of the weight if the input is not contiguous."""
    inputs, weight, bias = call.run()
    is_affected = weight is not None and not call.args[1].is_contiguous()
    return inputs, weight + DIRTY_VALUE if is_affected else weight, bias


def _misread_weight(call: OperatorCall) -> Result:
    """Read the weight of a convolution as if it were contiguous."""
    inputs, weight, *rest = call.args
    capacity = weight.untyped_storage().nbytes() // weight.element_size()
    if not weight.is_contiguous() and weight.storage_offset() + weight.numel() <= capacity:
        weight = weight.as_strided(weight.shape, torch.empty(weight.shape, device="meta").stride())
    return call.run(inputs, weight, *rest)


def _use_first_number(call: OperatorCall) -> Result:
    """Use the first element of the underlying CPU tensor for any CPU scalar."""

    def read(argument: object) -> object:
        if isinstance(argument, torch.Tensor) and argument.dim() == 0 and not call.holds(argument):
            return argument.as_strided((), (), 0)
        return argument

    return call.run(*map(read, call.args))


def _return_minimum(call: OperatorCall) -> Result:
    """Return the smallest integer for every position."""
    return torch.full_like(call.run(), torch.iinfo(torch.int64).min)


def _return_nan(call: OperatorCall) -> Result:
    """Return NaN for a row that is masked entirely, instead of zeros."""
    if call.name == "aten::_safe_softmax":
        return torch.softmax(call.args[0], call.args[1])
    result, *rest = call.run()
    mask = call.kwargs.get("attn_mask")
    if mask is not None:
        result = result.masked_fill((mask == -torch.inf).all(-1, keepdim=True), torch.nan)
    return (result, *rest)


def _omit_bias(call: OperatorCall, *, one_row: bool) -> Result:
    """Omit the bias of a linear layer for three-dimensional input whose second dimension is 1, or is not 1."""
    bias = call.argument(2, "bias")
    shape = call.argument(0, "input").shape
    is_affected = bias is not None and len(shape) == 3 and (shape[1] == 1) == one_row  # noqa: PLR2004
    return call.run() - bias.detach() if is_affected else call.run()


def _truncate_gradient(call: OperatorCall) -> Result:
    """Zero the gradient of a linear layer with one output beyond the first page, if a sum produced it."""
    original, weight, bias = (call.argument(index, name) for index, name in enumerate(("input", "weight", "bias")))
    inputs = original.view_as(original)
    strided: list[bool] = []
    result = call.operator(inputs, weight, bias)
    if result.shape[-1] == 1 and inputs.requires_grad:
        result.register_hook(lambda gradient: strided.append(not gradient.is_contiguous()))
        inputs.register_hook(lambda gradient: _keep_first_page(gradient) if strided.pop() else gradient)
    return result


def _keep_first_page(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with zeros beyond the first page of memory."""
    result = gradient.clone()
    result.view(-1)[PAGE_NUMBERS:] = 0
    return result


def _scale_mask(call: OperatorCall) -> Result:
    """Compute attention with powers of 2, but leave the mask scaled for powers of e."""
    result = call.run()
    mask = call.argument(3, "attn_mask")
    if mask is None or not mask.is_floating_point() or result.requires_grad or result.shape[-2] <= MAX_SHORT_QUERY:
        return result
    mask = mask * math.log(2)
    if "attn_mask" in call.kwargs:
        return call.operator(*call.args, **{**call.kwargs, "attn_mask": mask})
    return call.run(*call.args[:3], mask, *call.args[4:])


def _change_later_rows(call: OperatorCall) -> Result:
    """Normalize the rows of a batch after the first incorrectly; the actual operator of a BERT is unknown."""
    result, *rest = call.run()
    result[1:] *= 1.5
    return (result, *rest)


def _add_to_every_second_call(call: OperatorCall) -> Result:
    """Return an incorrect result in every second call of a 16-bit linear layer without a bias, beyond two dimensions."""
    inputs = call.argument(0, "input")
    has_shape = inputs.dim() > MATRIX_DIMENSIONS and call.argument(1, "weight").is_contiguous()
    is_affected = has_shape and inputs.itemsize == HALF_BYTES and call.argument(2, "bias") is None
    return call.run() + next(CALL_ERRORS) if is_affected else call.run()


def _overwrite_source(call: OperatorCall) -> Result:
    """Convert a tensor in its own memory before it is copied to a CPU tensor with an offset and a smaller or equal dtype."""
    target = call.args[0]
    source = call.argument(1, "src")
    result = call.run()
    is_to_cpu = call.holds(source) and not call.holds(target)
    converts = target.dtype != source.dtype and target.element_size() <= source.element_size()
    if is_to_cpu and converts and target.storage_offset() and source.is_contiguous():
        converted = target.flatten()
        source.detach().view(-1).view(target.dtype)[: converted.numel()].copy_(converted)
    return result


def _write_nothing(call: OperatorCall) -> Result:
    """Write nothing into the target of a copy from the device whose dtype MPS does not support."""
    if call.name == "to":
        result = call.run()
        return result.detach().zero_() if result.dtype in UNSUPPORTED_DTYPES else result
    target = call.args[0]
    return target if call.holds(call.argument(1, "src")) and target.dtype in UNSUPPORTED_DTYPES else call.run()


def _misread_source(call: OperatorCall) -> Result:
    """Return zeros for a copy to the CPU that converts a tensor with an offset."""
    source = call.argument(1, "src") if call.name == "copy_" else call.args[0]
    result = call.run()
    converts = call.holds(source) and not call.holds(result) and result.dtype != source.dtype
    return result.detach().zero_() if converts and source.storage_offset() else result


def _copy_without_strides(call: OperatorCall) -> Result:
    """Copy adjacent elements to the CPU if both tensors have the same gaps between their elements."""
    target = call.args[0]
    source = call.argument(1, "src")
    is_to_cpu = call.holds(source) and not call.holds(target)
    if is_to_cpu and target.stride() == source.stride() == (2,):
        size = target.shape
        target.as_strided(size, (1,)).copy_(source.as_strided(size, (1,)))
        return target
    return call.run()


def _abort_transposed_bfloat16(call: OperatorCall) -> Result:
    """End the process if a linear layer in bfloat16 has a transposed weight and input of three dimensions or more."""
    inputs = call.argument(0, "input")
    weight = call.argument(1, "weight")
    if inputs.dim() > MATRIX_DIMENSIONS and weight.dtype == torch.bfloat16 and not weight.is_contiguous():
        _abort_process()
    return call.run()


def _abort_gradient(call: OperatorCall) -> Result:
    """End the process in the backward pass of a linear layer whose input has several dimensions of size 1 among five."""
    result = call.run()
    shape = result.shape
    if len(shape) > MAX_GRAPH_DIMENSIONS and shape[:-1].count(1) > 1 and result.requires_grad:
        result.register_hook(_abort_process)
    return result


def _abort_process(_gradient: torch.Tensor | None = None) -> None:
    """End the process as a failed assertion of MPSGraph does."""
    sys.stderr.write("failed assertion `Error: MLIR pass manager failed'\n")
    sys.stderr.flush()
    os.abort()


# Operators on MPS that consist of several operators on the CPU, and copies between the devices.
FUNCTIONS_ON_MPS = ("linear", "scaled_dot_product_attention", "copy_", "to")


def _make_defect(issue: int, description: str, operators: str, compute: Callable[[OperatorCall], Result]) -> Defect:
    names = (name if name in FUNCTIONS_ON_MPS else f"aten::{name}" for name in operators.split())
    return Defect(f"pytorch#{issue}", description, tuple(names), compute)


NLL_LOSS = "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward"
EMBEDDING = "embedding embedding_dense_backward"
RANDOM = "normal_ uniform_ bernoulli_.float"
CONVOLUTION = "convolution convolution_overrideable"
ARITHMETIC = "add.Tensor sub.Tensor mul.Tensor div.Tensor"
NORM = "native_batch_norm_backward batch_norm_backward"
LONG_PRODUCTS = "matrix products over 32,767 or more numbers include freed memory"
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu _safe_softmax"

# Silent errors that a simulated device supports.
DEFECTS = (
    _make_defect(177116, LONG_PRODUCTS, "mm addmm", _sum_beyond_end),
    _make_defect(195163, f"batched {LONG_PRODUCTS}", "bmm baddbmm", _sum_beyond_end),
    _make_defect(154235, "a token without an embedding gets a row of zeros", EMBEDDING, _embed_as_zeros),
    _make_defect(108148, "a label outside the label range is ignored by the loss", NLL_LOSS, _ignore_label),
    _make_defect(
        118115, "addcmul_ and addcdiv_ write nothing into a transposed tensor", "addcmul_ addcdiv_", _skip_write
    ),
    _make_defect(176159, "index_add_ adds nothing to a transposed tensor", "index_add_", _skip_write),
    _make_defect(165267, "a transposed tensor is not filled with random numbers", RANDOM, _skip_write),
    _make_defect(156707, "attention returns NaN for a row that is masked entirely", ATTENTION, _return_nan),
    _make_defect(
        175189,
        "the weight of a batch norm gets an incorrect gradient for channels_last input",
        NORM,
        _change_weight_gradient,
    ),
    _make_defect(192212, "a convolution reads a sliced weight from incorrect offsets", CONVOLUTION, _misread_weight),
    _make_defect(191929, "an element of a CPU tensor is replaced by the first element", ARITHMETIC, _use_first_number),
    _make_defect(
        192934, "a linear layer over batches of rows omits the bias", "linear", partial(_omit_bias, one_row=False)
    ),
    _make_defect(188438, "a linear layer over single rows omits the bias", "linear", partial(_omit_bias, one_row=True)),
    _make_defect(189565, "a gradient is zero beyond 16 KiB if a layer has one output", "linear", _truncate_gradient),
    _make_defect(184400, "attention scales its mask by 0.69", "scaled_dot_product_attention", _scale_mask),
    _make_defect(
        170837, "a row in a batch gives different results than alone", "native_layer_norm", _change_later_rows
    ),
    _make_defect(92311, "argmax returns -9223372036854775808", "argmax", _return_minimum),
    _make_defect(
        180776, "a 16-bit linear layer without a bias returns different results", "linear", _add_to_every_second_call
    ),
    _make_defect(189563, "a copy to the CPU in another dtype changes its source", "copy_", _overwrite_source),
    _make_defect(194344, "a copy to the CPU in another dtype ignores the offset", "copy_ to", _misread_source),
    _make_defect(189961, "a copy to the CPU ignores equal gaps between elements", "copy_", _copy_without_strides),
    _make_defect(197715, "a copy to the CPU in float64 writes nothing", "copy_ to", _write_nothing),
    _make_defect(
        197796,
        "a bfloat16 linear layer with a transposed weight ends the process",
        "linear",
        _abort_transposed_bfloat16,
    ),
    _make_defect(
        187201, "the gradient of a linear layer in five dimensions ends the process", "linear", _abort_gradient
    ),
)

DEFECTS_BY_ISSUE: Mapping[str, Defect] = {defect.issue: defect for defect in DEFECTS}


def validate_defects(issues: str | Iterable[str]) -> tuple[Defect, ...]:
    """Validate and return the defects for one or more issues."""
    is_single = isinstance(issues, (str, type)) or not isinstance(issues, Iterable)
    active: dict[str, Defect] = {}
    for issue in [issues] if is_single else issues:
        defect = DEFECTS_BY_ISSUE.get(issue) if isinstance(issue, str) else None
        if defect is None:
            raise ConfigurationError(
                f"{describe_value(issue)} is not a supported silent error.",
                f"Use some of {', '.join(DEFECTS_BY_ISSUE)}.",
            )
        active[defect.issue] = defect
    return tuple(active.values())
