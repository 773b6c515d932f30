"""The operators that MPS does not have, what happens where one of them is called, and the words of torch for it.

The table was read out of ``native_functions.yaml`` of torch 2.13: an operator is native where its own ``dispatch``, or
that of the operator it delegates to, names MPS. MPS names the operator that it delegates to in its messages.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..devices.moving import level_of_caller

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
NO_LIMIT = (
    " Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations"
    " (may cause system failure)."
)


def out_of_memory(allocated: int, other: int, allowed: int | None, wanted: int) -> str:
    """Return what the allocator says where a block does not fit (``MPSAllocator.mm:286``, and ``:297`` without a limit)."""
    limit = "" if allowed is None else f", max allowed: {size(allowed)}"
    return (
        f"MPS backend out of memory (MPS allocated: {size(allocated)}, other allocations: {size(other)}{limit}). "
        f"Tried to allocate {size(wanted)} on private pool.{'' if allowed is None else NO_LIMIT}"
    )


def size(count: int) -> str:
    """Return a number of bytes as torch 2.13 writes it; before 2.13 it wrote ``GB`` for ``GiB``."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 2**power:
            return f"{count / 2**power:.2f} {unit}"
    return f"{count} bytes"


# Operators that are named as they are called.
ALONE = """
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
DELEGATING = """
    _linalg_eigh:eigenvalues _linalg_svd:U _upsample_bicubic2d_aa_backward:grad_input _upsample_bilinear2d_aa_backward:grad_input
    _upsample_lanczos2d_aa:out _upsample_lanczos2d_aa_backward:grad_input adaptive_max_pool3d:out
    adaptive_max_pool3d_backward:grad_input fractional_max_pool2d:output fractional_max_pool2d_backward:grad_input
    fractional_max_pool3d:output heaviside:out linalg_ldl_factor_ex:out linalg_ldl_solve:out special_airy_ai:out
    special_laguerre_polynomial_l:out special_legendre_polynomial_p:out special_log_ndtr:out special_ndtri:out
"""

# What is called, and how MPS names it: the last ones are made of another operator, which MPS does not have.
UNSUPPORTED: Mapping[str, str] = {
    **{f"aten::{name}": f"aten::{name}" for name in ALONE.split()},
    **{f"aten::{pair.partition(':')[0]}": f"aten::{pair.replace(':', '.')}" for pair in DELEGATING.split()},
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


class Fallbacks:
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

    def meet(self, operator: str, warn_always: bool) -> None:
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
            level = level_of_caller(str(__package__), "torch")
            warnings.warn(FALLS_BACK.format(name), UserWarning, stacklevel=level)


def names_above_autograd(function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the names above autograd of what a function of torch calls, which below it cannot be told apart.

    ``torch.linalg.svd`` calls ``linalg_svd``, and what needs singular values only, such as ``svdvals`` or the matrix norm 2,
    does not (``LinearAlgebra.cpp``, ``BatchLinearAlgebra.cpp``); below autograd, both are ``_linalg_svd``.
    """
    vectors = kwargs.get("compute_uv", args[2] if len(args) > 2 else True)  # noqa: PLR2004 - the signature of torch.svd
    return BELOW_AUTOGRAD if function == "linalg_svd" or (function == "svd" and vectors) else {}
