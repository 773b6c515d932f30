"""The operators that MPS does not have, and what happens where one of them is called.

The table was read out of ``native_functions.yaml`` of torch 2.13: an operator is native where its own ``dispatch``, or
that of the operator it delegates to, names MPS. MPS names the operator that it delegates to in its messages.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Mapping

from .messages import falls_back, not_implemented

ALONE = """
    _adaptive_avg_pool3d _adaptive_avg_pool3d_backward _ctc_loss _ctc_loss.Tensor _ctc_loss_backward
    _ctc_loss_backward.Tensor _fake_quantize_learnable_per_channel_affine
    _fake_quantize_learnable_per_channel_affine_backward _fake_quantize_learnable_per_tensor_affine
    _fake_quantize_learnable_per_tensor_affine_backward _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    _fused_adagrad_ _fused_adagrad_.tensor_lr _fused_moving_avg_obs_fq_helper _linalg_eigvals _masked_softmax
    _masked_softmax_backward _pdist_backward _pdist_forward _segment_reduce_backward binomial channel_shuffle
    fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask fractional_max_pool3d_backward
    frexp.Tensor geqrf linalg_eig linalg_eigvals linalg_lstsq linalg_matrix_exp logspace mode multi_margin_loss
    multi_margin_loss_backward multilabel_margin_loss_backward multilabel_margin_loss_forward ormqr poisson put_
    rrelu_with_noise rrelu_with_noise_ segment_reduce take
"""
"""Operators that are named as they are called."""

DELEGATING = """
    _linalg_eigh:eigenvalues _upsample_bicubic2d_aa_backward:grad_input _upsample_bilinear2d_aa_backward:grad_input
    _upsample_lanczos2d_aa:out _upsample_lanczos2d_aa_backward:grad_input adaptive_max_pool3d:out
    adaptive_max_pool3d_backward:grad_input fractional_max_pool2d:output fractional_max_pool2d_backward:grad_input
    fractional_max_pool3d:output heaviside:out linalg_ldl_factor_ex:out linalg_ldl_solve:out special_airy_ai:out
    special_laguerre_polynomial_l:out special_legendre_polynomial_p:out special_log_ndtr:out special_ndtri:out
"""
"""Operators that are named with the overload that they delegate to."""

UNSUPPORTED: Mapping[str, str] = {
    **{f"aten::{name}": f"aten::{name}" for name in ALONE.split()},
    **{f"aten::{pair.partition(':')[0]}": f"aten::{pair.replace(':', '.')}" for pair in DELEGATING.split()},
    "aten::heaviside_": "aten::heaviside.out",
}
"""What is called, and how MPS names it."""

ALWAYS_ON_CPU: Mapping[str, str] = {
    "aten::_linalg_svd": "aten::linalg_svd",
    "aten::embedding_renorm_": "aten::embedding_renorm_",
}
"""Operators that MPS sends to the CPU even where falling back is off (``MPSFallback.mm:110``)."""


class Fallbacks:
    """What becomes of operators that MPS does not have: an error, or work for the CPU.

    Args:
        allowed: Whether they fall back to the CPU.

    Attributes:
        counts: How often each fell back, by the name that MPS uses.
    """

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self.counts: Counter[str] = Counter()
        self._warned = False

    def meet(self, operator: str, warn_always: bool) -> None:
        """Judge an operator that is called with a tensor of the device.

        Args:
            operator: Its name, such as ``"aten::mode"``.
            warn_always: Whether torch shall warn every time (``torch.set_warn_always``), and not once.

        Raises:
            NotImplementedError: Where MPS does not have it, and falling back is off.
        """
        name = UNSUPPORTED.get(operator)
        if name is not None and not self.allowed:
            raise NotImplementedError(not_implemented(name))
        name = name or ALWAYS_ON_CPU.get(operator)
        if name is None:
            return
        self.counts[name] += 1
        if warn_always or not self._warned:
            self._warned = self._warned or not warn_always  # As TORCH_WARN_ONCE has it.
            warnings.warn(falls_back(name), UserWarning, stacklevel=_depth_of_caller())


def reads_as_on(value: str | None) -> bool:
    """Tell whether torch 2.13 reads a value of ``PYTORCH_ENABLE_MPS_FALLBACK`` as on: anything but exactly ``0``.

    Example:
        >>> [reads_as_on(value) for value in (None, "0", "1", "", "false")]
        [False, False, True, True, True]
    """
    return value is not None and value != "0"


def _depth_of_caller() -> int:
    """Return the ``stacklevel`` of the line that called torch, which is where torch's own warnings point."""
    frame, depth = sys._getframe(1), 1  # noqa: SLF001 - the only way to walk the stack without reading files
    while frame is not None and frame.f_globals.get("__name__", "").startswith((__package__, "torch.")):
        frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
    return depth
