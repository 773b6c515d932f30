"""torch mode that counts the operators of a model on the CPU as they would run on MPS.

This module imports torch at import time, because the mode is a subclass of a torch mode. It is imported only for tracing.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch._ops import OpOverload
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

from ...devices.profilers import push_modes

Arguments = tuple[object, ...]


class OperatorTracer(TorchDispatchMode):
    """Dispatch mode that counts every operator, and decomposes those that are composite on MPS.

    Args:
        find_composite_key: Function that returns the dispatch key of the kernel of a composite operator, or an empty string.
        model: Model whose modules are named.

    Attributes:
        calls: Number of calls by operator, such as ``"aten::addmm"``, and module, such as ``"encoder.layer.0 (Layer)"``.
    """

    supports_higher_order_operators = True

    def __init__(self, find_composite_key: Callable[[str], str], model: Module) -> None:
        TorchDispatchMode.__init__(self)  # Type checkers do not know that of super(), because it has no annotations.
        self.calls: Counter[tuple[str, str]] = Counter()
        self._find_composite_key = functools.cache(find_composite_key)
        self._decomposing: list[str] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._modules: list[str] = []

    def enter_module(self, module: Module, _args: object) -> None:
        """Record the start of a module."""
        self._modules.append(f"{self._names.get(module, '')} ({type(module).__name__})".strip())

    def leave_module(self, *_args: object) -> None:
        """Record the end of the innermost module."""
        self._modules.pop()

    def __torch_dispatch__(
        self,
        operator: OpOverload,
        _types: Sequence[type],
        args: Arguments = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator, or the operators of its composite kernel on MPS."""
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - otherwise a mode would call the operator, not the kernel
            return self._record_call(operator, _convert_numbers(operator, args), kwargs or {})

    def _record_call(self, operator: OpOverload, args: Arguments, kwargs: Mapping[str, object]) -> object:
        name = operator.name()
        # A composite kernel may call its own operator again, which is then the operator of the CPU.
        key = "" if name in self._decomposing else self._find_composite_key(name)
        if key != "CompositeImplicitAutograd":  # Autograd decomposes these operators before dispatch.
            self.calls[name, self._modules[-1] if self._modules else ""] += 1
        if not key:
            return operator(*args, **kwargs)
        # The kernel has no Python decompositions, which only compilers use.
        kernel = functools.partial(operator._op_dk, getattr(torch._C.DispatchKey, key))  # noqa: SLF001 - not public
        self._decomposing.append(name)
        try:
            with self:
                return kernel(*args, **kwargs)
        finally:
            self._decomposing.pop()


@contextmanager
def trace_operators(tracer: OperatorTracer) -> Iterator[None]:
    """Count every operator of this thread as it would run on MPS."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        # The fast path of torch's Transformer layers does not support MPS, so it is disabled.
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # Compiled code calls no operators.
        stack.enter_context(torch.device("cpu"))  # Default device of tensors that the model creates.
        hooks = torch.nn.modules.module
        stack.callback(hooks.register_module_forward_pre_hook(tracer.enter_module).remove)
        # always_call also runs the hook after an error.
        stack.callback(hooks.register_module_forward_hook(tracer.leave_module, always_call=True).remove)
        stack.enter_context(push_modes(tracer))
        yield


def _convert_numbers(operator: OpOverload, args: Arguments) -> Arguments:
    """Convert numbers to tensors where an operator does not accept numbers.

    Inside its operators, torch passes a number as a tensor, but a mode receives it as a number again.
    """
    schema = getattr(operator, "_schema", None)  # Higher-order operators have no schema.
    name = operator.name().partition("::")[2].partition(".")[0]
    if schema is None or torch._C._should_allow_numbers_as_tensors(name):  # noqa: SLF001 - used by FakeTensor as well
        return args
    return tuple(
        torch.tensor(value)
        if argument.type.kind() == "TensorType" and isinstance(value, (int, float, complex))
        else value
        for value, argument in zip(args, schema.arguments, strict=False)
    )
