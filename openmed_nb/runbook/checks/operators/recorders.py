"""torch modes that record operators and their fallbacks from MPS to the CPU.

``record_calls`` records every operator that is called on the CPU, as it would run on MPS. ``FallbackRecorder`` records every
fallback from MPS to the CPU with operator, module and duration. It combines three sources, because none is complete:

- Warnings of torch name every operator that falls back, also inside other operators (``MPSFallback.mm``), if
  ``torch.set_warn_always`` is on. They can be late: those of a backward pass appear when it has finished.
- A dispatch mode records the outermost operators and their durations.
- Hooks of all modules track the running module.

This module imports torch at import time, because its classes are subclasses of torch modes. It is imported only for tracing.
"""

from __future__ import annotations

import functools
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch._ops import OpOverload
from torch.nn import Module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ...._utils.clock import current_time
from ....devices.moving import iter_operator_tensors, mps_dtype_fallbacks
from ....devices.profilers import push_modes
from ....devices.registry import get_device
from ....simulation.operators import names_above_autograd
from .table import (
    ALWAYS_ON_CPU,
    COMPOSITE,
    FALLS_BACK,
    FLOAT64,
    FUNCTION_RULES,
    NOT_DENSE,
    OPERATOR_RULES,
    CallSite,
    ModuleLocation,
    MpsLimitation,
    OperatorTable,
    Phase,
    composite_key,
    find_limitation,
    find_shape_limitation,
)

Types = Sequence[type]
Arguments = tuple[object, ...]
Keywords = Mapping[str, object]

# Dtypes that MPS does not support.
UNSUPPORTED_DTYPES = frozenset(mps_dtype_fallbacks("mps"))


class _ModuleStack(threading.local):
    """Running modules of a thread, innermost last."""

    def __init__(self) -> None:
        self.modules: list[Module] = []


class ModuleTracker:
    """Tracker of the running module in each thread."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Module, str] = WeakKeyDictionary()
        self._names_outermost = False
        self._stack = _ModuleStack()

    @property
    def current(self) -> ModuleLocation:
        """Innermost module that is running in this thread."""
        if not self._stack.modules:
            return ModuleLocation()
        module = self._stack.modules[-1]
        return ModuleLocation(self._names.get(module, ""), type(module).__name__)

    @contextmanager
    def track(self, model: Module | None = None) -> Iterator[None]:
        """Track running modules.

        Names are relative to ``model``. If ``model`` is ``None``, they are relative to the outermost running module.
        """
        self._names_outermost = model is None
        if model is not None:
            self._name_modules(model)
        hooks = torch.nn.modules.module
        pre_hook = hooks.register_module_forward_pre_hook(self._enter)
        # always_call also runs the hook after an error.
        post_hook = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            pre_hook.remove()
            post_hook.remove()

    def _enter(self, module: Module, _args: object) -> None:
        if self._names_outermost and not self._stack.modules:
            self._name_modules(module)
        self._stack.modules.append(module)

    def _leave(self, module: Module, _args: object, _output: object) -> None:
        modules = self._stack.modules
        # If an earlier hook failed, the end of an inner module was missed.
        while modules and modules.pop() is not module:
            pass

    def _name_modules(self, model: Module) -> None:
        self._names.update({module: name for name, module in model.named_modules()})


@dataclass
class CallRecorder:
    """Recorded operator calls.

    Attributes:
        table: Operators that MPS supports.
        phase: Current phase of the model.
        module_tracker: Tracker of the running module.
        calls: Number of calls by operator, phase and module.
        limitations: Number of calls that MPS does not support, by limitation and call site.
        names: Names of operators above autograd, given by the running function.
        wide: Tensors of unsupported dtypes that are already recorded.
    """

    table: OperatorTable
    phase: Phase = "forward"
    module_tracker: ModuleTracker = field(default_factory=ModuleTracker)
    calls: Counter[CallSite] = field(default_factory=Counter)
    limitations: Counter[tuple[MpsLimitation, CallSite]] = field(default_factory=Counter)
    names: Mapping[str, str] = field(default_factory=dict)
    wide: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    def record_limitation(
        self, operator: str, limitations: Iterable[MpsLimitation], location: ModuleLocation | None = None
    ) -> None:
        """Count the limitations of MPS that a call meets."""
        for limitation in limitations:
            call_site = CallSite(operator, self.phase, location or self.module_tracker.current)
            self.limitations[limitation, call_site] += 1

    def record_dtypes(self, operator: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Record an unsupported dtype at the operator that introduces it, and not at the operators that use it.

        A Python number reaches the operators as a float64 tensor without dimensions. Such a tensor may be on the CPU together
        with MPS tensors, and torch creates some itself.
        """
        wide = [tensor for tensor in outputs if tensor.dtype in UNSUPPORTED_DTYPES]
        is_recorded = any(tensor in self.wide for tensor in inputs)
        are_scalars = not any(tensor.dim() for tensor in (*inputs, *wide))
        self.wide.update((tensor, True) for tensor in wide)
        if wide and not is_recorded and not are_scalars:
            self.record_limitation(operator, [FLOAT64])


class OperatorTracer(TorchDispatchMode):
    """Dispatch mode that records every operator and decomposes those that are composite on MPS."""

    supports_higher_order_operators = True

    def __init__(self, record: CallRecorder) -> None:
        TorchDispatchMode.__init__(self)  # Type checkers do not know that of super(), because it has no annotations.
        self._record = record
        self._decomposing: list[str] = []
        self._classify = functools.cache(record.table.classify)

    def __torch_dispatch__(
        self, operator: OpOverload, _types: Types, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        """Run an operator, or the operators of its composite kernel on MPS."""
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - otherwise a mode would call the operator, not the kernel
            return self._record_call(operator, _convert_numbers(operator, args), kwargs or {})

    def _record_call(self, operator: OpOverload, args: Arguments, kwargs: Keywords) -> object:
        name = operator.name()
        # Autograd may have decomposed the operator that MPS would run.
        whole_name = self._record.names.get(name, name)
        if self._classify(whole_name) == ALWAYS_ON_CPU and not torch.is_inference_mode_enabled():
            name = whole_name
        inputs = iter_operator_tensors([args, kwargs])
        if any(tensor.layout != torch.strided or tensor.is_nested for tensor in inputs):
            # The table covers dense tensors only.
            self._record.record_limitation(name, [NOT_DENSE])
            return operator(*args, **kwargs)
        limitations = find_limitation(OPERATOR_RULES, name, args, kwargs)
        # A composite kernel may call its own operator again, which is then the operator of the CPU.
        is_decomposed = self._classify(name) == COMPOSITE and name not in self._decomposing
        key = composite_key(name) if is_decomposed else ""
        if not key:
            result = operator(*args, **kwargs)
        else:
            # The kernel has no Python decompositions, which only compilers use.
            kernel = functools.partial(operator._op_dk, getattr(torch._C.DispatchKey, key))  # noqa: SLF001 - not public
            with self:
                if key == "CompositeImplicitAutograd":
                    # Not recorded: autograd decomposes these operators before dispatch.
                    return kernel(*args, **kwargs)
                self._decomposing.append(name)
                try:
                    result = kernel(*args, **kwargs)
                finally:
                    self._decomposing.pop()
        outputs = iter_operator_tensors(result)
        call_site = CallSite(name, self._record.phase, self._record.module_tracker.current)
        self._record.calls[call_site] += 1
        self._record.record_limitation(name, [*limitations, *find_shape_limitation([*inputs, *outputs])])
        if not self._decomposing:
            self._record.record_dtypes(name, inputs, outputs)
        return result


class FunctionTracer(TorchFunctionMode):
    """Function mode that records calls of torch functions, because some are decomposed before an operator is called."""

    def __init__(self, record: CallRecorder) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(
        self, function: Callable[..., object], _types: Types, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        """Run a function and record its limitations on MPS."""
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        self._record.record_limitation(name, find_limitation(FUNCTION_RULES, name, args, kwargs))
        previous_names = self._record.names
        self._record.names = names_above_autograd(name, args, kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            self._record.names = previous_names


@contextmanager
def record_calls(record: CallRecorder, model: Module | None = None) -> Iterator[None]:
    """Record every operator of this thread as it would run on MPS. ``model`` is the model whose modules are named."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        # The fast path of torch's Transformer layers does not support MPS, so it is disabled.
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # Compiled code calls no operators.
        stack.enter_context(torch.device("cpu"))  # Default device of tensors that the model creates.
        stack.enter_context(record.module_tracker.track(model))
        stack.enter_context(push_modes(OperatorTracer(record), FunctionTracer(record)))
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


# Texts of torch's MPSFallback.mm.
FALLBACK_PATTERN = re.compile(
    r"The operator '([^']+)' is not currently supported on the MPS backend and will fall back to run on"
)
NOT_IMPLEMENTED_PATTERN = re.compile(r"The operator '([^']+)' is not currently implemented for the MPS device")


@dataclass(eq=False)
class OperatorCall:
    """Call of an outermost operator with an MPS tensor.

    Attributes:
        name: Name in the messages of MPS if the operator itself falls back, or an empty string.
        module_location: Module that was running.
        phase: ``"forward"``, ``"backward"``, or ``"elsewhere"``.
        seconds: Duration, or ``None`` while the operator runs.
    """

    name: str
    module_location: ModuleLocation
    phase: Phase
    seconds: float | None = None


@dataclass(frozen=True)
class FallbackEvent:
    """A fallback, or an error because fallback is disabled.

    Attributes:
        operator: Name of the operator in the messages of MPS.
        call: Outermost operator that contains it.
        raised: Whether torch raised an error.
    """

    operator: str
    call: OperatorCall
    raised: bool = False


@dataclass(eq=False)
class FallbackRecorder(TorchDispatchMode):
    """Dispatch mode that records fallbacks, and times the outermost operators that have an MPS tensor.

    Attributes:
        table: Operators that MPS supports.
        module_tracker: Tracker of the running module.
        events: Fallbacks, in the order of their detection.
        pending: Operators that fall back themselves and that torch has not warned about yet.
        last: Outermost operator that runs or that ran last.
        operators: Number of outermost operators that were called with an MPS tensor.
        thread: Thread that is recorded.
    """

    table: OperatorTable
    module_tracker: ModuleTracker = field(default_factory=ModuleTracker)
    events: list[FallbackEvent] = field(default_factory=list)
    pending: list[OperatorCall] = field(default_factory=list)
    last: OperatorCall | None = None
    operators: int = 0
    thread: int = field(default_factory=threading.get_ident)

    supports_higher_order_operators = True

    def __post_init__(self) -> None:
        TorchDispatchMode.__init__(self)

    def __torch_dispatch__(
        self, operator: OpOverload, _types: Types, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        """Run an operator and record it if it has an MPS tensor."""
        kwargs = kwargs or {}
        if not any(
            tensor.is_mps and tensor.layout == torch.strided for tensor in iter_operator_tensors([args, kwargs])
        ):
            return operator(*args, **kwargs)
        call = self.begin(operator.name())
        # A fallback waits for queued work, which must not count as its duration. In a backward pass, another thread may hold
        # the lock and wait for this one.
        if call.name and call.phase != "backward":
            get_device("mps").synchronize()
        start = current_time()
        try:
            result = operator(*args, **kwargs)
        except NotImplementedError as error:  # Fallback is disabled.
            match = NOT_IMPLEMENTED_PATTERN.search(str(error))
            if match:
                self.pending = [pending for pending in self.pending if pending is not call]
                self.events.append(FallbackEvent(match[1], call, raised=True))
            raise
        call.seconds = current_time() - start
        return result

    def begin(self, operator: str) -> OperatorCall:
        """Record the start of an outermost operator."""
        falls_back = self.table.classify(operator) in {FALLS_BACK, ALWAYS_ON_CPU}
        self.operators += 1
        self.last = self._create_call(self.table.named_by_mps(operator) if falls_back else "")
        if falls_back:
            self.pending.append(self.last)
        return self.last

    def record_warning(self, operator: str) -> None:
        """Record a warning of torch for the first pending operator of that name, or for the last operator."""
        pending = next((call for call in self.pending if call.name == operator), None)
        # MPS may use a different name for the last operator.
        call = pending or self.last or self._create_call("")
        if call in self.pending:
            self.pending.remove(call)
        self.events.append(FallbackEvent(operator, call))

    def all_events(self) -> list[FallbackEvent]:
        """Return all fallbacks, including those whose warning a filter of the user suppressed."""
        unreported = [FallbackEvent(call.name, call) for call in self.pending if call.seconds is not None]
        return [*self.events, *unreported]

    def _create_call(self, name: str) -> OperatorCall:
        location = self.module_tracker.current
        phase: Phase = "forward" if location.kind else "elsewhere"
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - used by torch.utils.module_tracker as well
            phase = "backward"
        return OperatorCall(name, location, phase)


@dataclass(frozen=True)
class WarningInterceptor:
    """Replacement of ``warnings.showwarning`` that records fallback warnings and passes on all others.

    Attributes:
        recorder: Recorder of the fallbacks.
        original_showwarning: Function that is replaced.
    """

    recorder: FallbackRecorder
    original_showwarning: Callable[..., None]

    def __call__(self, message: Warning | str, *args: object, **kwargs: object) -> None:
        """Record a fallback, or show any other warning. An enclosing fallback log receives both."""
        match = FALLBACK_PATTERN.search(str(message)) if threading.get_ident() == self.recorder.thread else None
        if match:
            self.recorder.record_warning(match[1])
        if not match or isinstance(self.original_showwarning, WarningInterceptor):
            self.original_showwarning(message, *args, **kwargs)
