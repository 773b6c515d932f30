"""A mode of torch in which the CPU rounds otherwise: the same computation, with the sums of another order of addition."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ....devices.moving import iter_operator_tensors

ROUNDED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
# They convert and compute nothing; and kernels of oneDNN have no float64.
EXCLUDED_OPERATORS = ("aten::_to_copy", "aten::copy_", "aten::mkldnn", "mkldnn::", "onednn::")


class Float64RoundingMode(TorchDispatchMode):  # type: ignore[misc]
    """Each operator computes in float64, also backwards and in the optimizer, and rounds its result once to its own type.

    Whatever order an operator adds up in, in float64 it makes no difference that is left after rounding. So this is as far from
    the CPU as a device that rounds no worse.
    """

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator; views, random numbers and what has no number of a narrow type stay as they are."""
        kwargs = kwargs or {}
        draws = torch.Tag.nondeterministic_seeded in operator.tags
        tensors = iter_operator_tensors([args, kwargs])
        narrow = [tensor for tensor in tensors if tensor.dtype in ROUNDED_DTYPES and tensor.layout == torch.strided]
        if (
            not narrow
            or draws
            or operator.is_view
            or "dtype" in kwargs
            or operator.name().startswith(EXCLUDED_OPERATORS)
        ):
            return operator(*args, **kwargs)
        wide = {id(tensor): tensor.double() for tensor in narrow}
        narrow_of = {id(wide[id(tensor)]): tensor for tensor in narrow}
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in narrow))

        def widened(tensor: torch.Tensor) -> torch.Tensor:
            return wide.get(id(tensor), tensor)

        def narrowed(tensor: torch.Tensor) -> torch.Tensor:
            return narrow_of.get(id(tensor), tensor.to(dtype) if tensor.dtype == torch.float64 else tensor)

        wide_args, wide_kwargs = tree_map_only(torch.Tensor, widened, (args, kwargs))
        result = operator(*wide_args, **wide_kwargs)
        arguments = operator._schema.arguments  # noqa: SLF001 - torch has no public name for it
        passed = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        written = [passed.get(one.name) for one in arguments if one.alias_info is not None and one.alias_info.is_write]
        for tensor in iter_operator_tensors(written):
            if id(tensor) in wide:
                tensor.copy_(wide[id(tensor)])
        return tree_map_only(torch.Tensor, narrowed, result)
