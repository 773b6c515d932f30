"""torch mode that counts the operators on MPS.

This module imports torch at import time, because the mode is a subclass of a torch mode. It is imported only for counting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ...devices.moving import iter_operator_tensors

Arguments = tuple[object, ...]


class MpsOperatorCounter(TorchDispatchMode):
    """Dispatch mode that counts the outermost operators with an MPS tensor."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)  # Type checkers do not know that of super(), because it has no annotations.
        self.count = 0

    def __torch_dispatch__(
        self,
        operator: OpOverload,
        _types: Sequence[type],
        args: Arguments = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator, and count it if it has an MPS tensor."""
        self.count += any(tensor.is_mps for tensor in iter_operator_tensors([args, kwargs or {}]))
        return operator(*args, **(kwargs or {}))
