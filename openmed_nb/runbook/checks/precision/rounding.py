"""A mode of torch in which the CPU rounds otherwise: the same computation, with the sums of another order of addition."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ....devices.moving import operator_tensors

NARROW = frozenset({torch.float32, torch.bfloat16, torch.float16})
# They convert and compute nothing; and kernels of oneDNN have no float64.
LEFT = ("aten::_to_copy", "aten::copy_", "aten::mkldnn", "mkldnn::", "onednn::")


class RoundedOnce(TorchDispatchMode):  # type: ignore[misc]
    """Each operator computes in float64, also backwards and in the optimizer, and rounds its result once to its own type.

    Whatever order an operator adds up in, in float64 it makes no difference that is left after rounding. So this is as far from
    the CPU as a device that rounds no worse.
    """

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator; views, random numbers and what has no number of a narrow type stay as they are."""
        kwargs = kwargs or {}
        draws = torch.Tag.nondeterministic_seeded in operator.tags
        given = [one for one in operator_tensors([args, kwargs]) if one.dtype in NARROW and one.layout == torch.strided]
        if not given or draws or operator.is_view or "dtype" in kwargs or operator.name().startswith(LEFT):
            return operator(*args, **kwargs)
        wide = {id(one): one.double() for one in given}
        own = {id(copy): one for one, copy in zip(given, (wide[id(one)] for one in given), strict=True)}
        dtype = given[0].dtype
        for one in given:
            dtype = torch.promote_types(dtype, one.dtype)
        widened = tree_map_only(torch.Tensor, lambda one: wide.get(id(one), one), (args, kwargs))
        made = operator(*widened[0], **widened[1])
        schema = operator._schema.arguments  # noqa: SLF001 - torch has no public name for it
        passed = {**dict(zip((one.name for one in schema), args, strict=False)), **kwargs}
        for argument in schema:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for one in operator_tensors([passed.get(argument.name)]):
                    if id(one) in wide:
                        one.copy_(wide[id(one)])

        def narrowed(one: torch.Tensor) -> torch.Tensor:
            return own.get(id(one), one.to(dtype) if one.dtype == torch.float64 else one)

        return tree_map_only(torch.Tensor, narrowed, made)
