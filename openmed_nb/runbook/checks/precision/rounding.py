"""torch dispatch mode in which the CPU rounds differently, as if sums were computed in a different order."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ....devices.moving import iter_operator_tensors

ROUNDED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
# Conversions compute nothing, and oneDNN kernels do not support float64.
EXCLUDED_OPERATORS = ("aten::_to_copy", "aten::copy_", "aten::mkldnn", "mkldnn::", "onednn::")


class Float64RoundingMode(TorchDispatchMode):
    """Mode in which each operator computes in float64 and rounds its result once to the original dtype.

    The mode covers the backward pass and the optimizer as well. In float64, differences in summation order disappear after
    rounding. The result therefore differs from that of the CPU about as much as that of a device with accurate rounding.
    """

    def __torch_dispatch__(
        self,
        operator: OpOverload,
        _types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run an operator in float64. Views, random operators and calls without reduced-precision tensors run unchanged."""
        kwargs = kwargs or {}
        is_random = torch.Tag.nondeterministic_seeded in operator.tags
        tensors = iter_operator_tensors([args, kwargs])
        narrow = [tensor for tensor in tensors if tensor.dtype in ROUNDED_DTYPES and tensor.layout == torch.strided]
        if (
            not narrow
            or is_random
            or operator.is_view
            or "dtype" in kwargs
            or operator.name().startswith(EXCLUDED_OPERATORS)
        ):
            return operator(*args, **kwargs)
        wide = {id(tensor): tensor.double() for tensor in narrow}
        narrow_of = {id(wide[id(tensor)]): tensor for tensor in narrow}
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in narrow))

        def widen(tensor: torch.Tensor) -> torch.Tensor:
            return wide.get(id(tensor), tensor)

        def narrow_result(tensor: torch.Tensor) -> torch.Tensor:
            return narrow_of.get(id(tensor), tensor.to(dtype) if tensor.dtype == torch.float64 else tensor)

        wide_args, wide_kwargs = tree_map_only(torch.Tensor, widen, (args, kwargs))
        result = operator(*wide_args, **wide_kwargs)
        arguments = operator._schema.arguments  # noqa: SLF001 - torch has no public API for it
        passed = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        written = [
            passed.get(argument.name)
            for argument in arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for tensor in iter_operator_tensors(written):
            if id(tensor) in wide:
                tensor.copy_(wide[id(tensor)])
        return tree_map_only(torch.Tensor, narrow_result, result)
