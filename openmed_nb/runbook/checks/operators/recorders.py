"""The modes of torch that see each operator: as it would be on MPS, and as it falls back from MPS.

``watching`` notes every operator that is called on the CPU, as it is on MPS. A ``FallbackRecorder`` has every fallback of MPS to
the CPU: which operator, in which module, how long. It takes three things together, because none of them knows all:

- torch's warnings name every operator that falls back, also inside of another (``MPSFallback.mm``), once
  ``torch.set_warn_always`` is on; but they come late: those of a backward pass when it has ended;
- a mode sees the outermost operators as they are called, and how long each takes;
- hooks of all modules know which module is running.

This file imports torch, because a subclass needs its base; it is itself imported where a model is traced.
"""

from __future__ import annotations

import functools
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ...._utils.clock import current_time
from ....devices.moving import iter_operator_tensors, mps_dtype_fallbacks
from ....devices.profilers import push_modes
from ....devices.registry import parse_device_argument
from ....simulation.operators import names_above_autograd
from .table import (
    ALWAYS_ON_CPU,
    BACKWARD,
    COMPOSITE,
    FALLS_BACK,
    FLOAT64,
    FORWARD,
    FUNCTION_RULES,
    NO_PLAIN_TENSOR,
    OPERATOR_RULES,
    CallSite,
    ModuleLocation,
    MpsLimitation,
    OperatorTable,
    composite_key,
    find_limitation,
    find_shape_limitation,
)

UNSUPPORTED_DTYPES = frozenset(mps_dtype_fallbacks("mps"))  # The types that MPS does not have.
ELSEWHERE = "elsewhere"


class _Stack(threading.local):
    """The modules that are running in a thread, the innermost last."""

    def __init__(self) -> None:
        self.modules: list[torch.nn.Module] = []


class ModuleTracker:
    """Knows which module is running, in each thread."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self._follows = False
        self._stack = _Stack()

    @property
    def current(self) -> ModuleLocation:
        """The innermost module that is running in this thread."""
        if not self._stack.modules:
            return ModuleLocation()
        module = self._stack.modules[-1]
        return ModuleLocation(self._names.get(module, ""), type(module).__name__)

    @contextmanager
    def track(self, model: torch.nn.Module | None = None) -> Iterator[None]:
        """See the modules that run; without a model, the outermost one that is running gives the names."""
        self._follows = model is None
        if model is not None:
            self._name(model)
        hooks = torch.nn.modules.module
        before = hooks.register_module_forward_pre_hook(self._enter)
        after = hooks.register_module_forward_hook(self._leave, always_call=True)  # After an error, too.
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: torch.nn.Module, _args: Any) -> None:
        if self._follows and not self._stack.modules:
            self._name(module)
        self._stack.modules.append(module)

    def _leave(self, module: torch.nn.Module, _args: Any, _output: Any) -> None:
        modules = self._stack.modules
        while modules and modules.pop() is not module:  # If a hook before ours failed, an end was not seen.
            pass

    def _name(self, model: torch.nn.Module) -> None:
        self._names.update({module: name for name, module in model.named_modules()})


@dataclass
class CallRecorder:
    """What was called so far."""

    table: OperatorTable  # What MPS has.
    phase: str = FORWARD  # What the model is doing.
    module_tracker: ModuleTracker = field(default_factory=ModuleTracker)  # Where in the model it is.
    calls: Counter[CallSite] = field(default_factory=Counter)  # How often each operator was called.
    # How often each call was one that MPS refuses, and why.
    refusals: Counter[tuple[MpsLimitation, CallSite]] = field(default_factory=Counter)
    # What operators are called above autograd, if the function that runs says so.
    names: Mapping[str, str] = field(default_factory=dict)
    # The tensors of types that MPS does not have and that were already noted.
    wide: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    def record_limitation(
        self, operator: str, why: Iterable[MpsLimitation], place: ModuleLocation | None = None
    ) -> None:
        """Count why MPS refuses a call."""
        for refusal in why:
            self.refusals[refusal, (operator, self.phase, place or self.module_tracker.current)] += 1

    def note_types(self, operator: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """Note a type that MPS does not have where it begins, and not in all that is computed with it.

        A number of Python comes to the operators as a float64 tensor without dimensions, and such a tensor may be on the
        CPU together with those of MPS; torch makes some for itself.
        """
        wide = [tensor for tensor in made if tensor.dtype in UNSUPPORTED_DTYPES]
        known = any(tensor in self.wide for tensor in given)
        numbers = not any(tensor.dim() for tensor in (*given, *wide))
        self.wide.update((tensor, True) for tensor in wide)
        if wide and not known and not numbers:
            self.record_limitation(operator, [FLOAT64])


class OperatorTracer(TorchDispatchMode):
    """Sees every operator, and takes apart those that are made of others on MPS, whatever they are on the CPU."""

    supports_higher_order_operators = True

    def __init__(self, record: CallRecorder) -> None:
        super().__init__()
        self._record = record
        self._inside: list[str] = []
        self._verdict = functools.cache(record.table.classify)

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, or the parts that it is made of on MPS."""
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - a mode would call the operator, not the kernel
            return self._called(operator, _with_tensors_for_numbers(operator, args), kwargs or {})

    def _called(self, operator: Any, args: Any, kwargs: Any) -> Any:
        name = self._name(operator.name())
        given = iter_operator_tensors([args, kwargs])
        if any(tensor.layout != torch.strided or tensor.is_nested for tensor in given):
            self._record.record_limitation(
                name, [NO_PLAIN_TENSOR]
            )  # The table knows what MPS has for plain tensors only.
            return operator(*args, **kwargs)
        why = find_limitation(OPERATOR_RULES, name, args, kwargs)
        # A kernel that is made of other operators may call its operator again, which is then the CPU's.
        apart = self._verdict(name) == COMPOSITE and name not in self._inside
        key = composite_key(name) if apart else ""
        if not key:
            result = operator(*args, **kwargs)
        elif key == "CompositeImplicitAutograd":
            with self:  # Not noted: above, autograd takes these apart, and nobody sees them.
                return _get_kernel(operator, key)(*args, **kwargs)
        else:
            self._inside.append(name)
            try:
                with self:
                    result = _get_kernel(operator, key)(*args, **kwargs)
            finally:
                self._inside.pop()
        made = iter_operator_tensors(result)
        self._record.calls[name, self._record.phase, self._record.module_tracker.current] += 1
        self._record.record_limitation(name, [*why, *find_shape_limitation([*given, *made])])
        if not self._inside:
            self._record.note_types(name, given, made)
        return result

    def _name(self, operator: str) -> str:
        """Return what an operator is on MPS, if autograd has already taken apart the one that MPS has."""
        above = self._record.names.get(operator, operator)
        forced = self._verdict(above) == ALWAYS_ON_CPU
        return above if forced and not torch.is_inference_mode_enabled() else operator


class FunctionTracer(TorchFunctionMode):
    """Sees the functions of torch that Python calls, of which some are taken apart before an operator is called."""

    def __init__(self, record: CallRecorder) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and note if MPS refuses it."""
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        self._record.record_limitation(name, find_limitation(FUNCTION_RULES, name, args, kwargs))
        before = self._record.names
        self._record.names = names_above_autograd(name, args, kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            self._record.names = before


@contextmanager
def record_calls(record: CallRecorder, model: torch.nn.Module | None = None) -> Iterator[None]:
    """Note every operator of this thread, as it is on MPS; ``model`` is the model whose modules are named."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        # torch's Transformer layers call their parts on MPS, which their fast path does not know.
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # What is compiled calls no operators.
        stack.enter_context(torch.device("cpu"))  # What a model makes without naming a device.
        stack.enter_context(record.module_tracker.track(model))
        stack.enter_context(push_modes(OperatorTracer(record), FunctionTracer(record)))
        yield


def _get_kernel(operator: Any, key: str) -> Callable[..., Any]:
    """Return the kernel of an operator for a dispatch key that MPS calls: not one in Python, which only compilers take."""
    return functools.partial(operator._op_dk, getattr(torch._C.DispatchKey, key))  # noqa: SLF001 - torch has no other name


def _with_tensors_for_numbers(operator: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with tensors in the place of numbers that an operator does not take.

    Inside of its operators, torch hands a number on as a tensor, and shows it to a mode as a number again.
    """
    schema = getattr(operator, "_schema", None)  # Operators of a higher order have none.
    name = operator.name().partition("::")[2].partition(".")[0]
    if schema is None or torch._C._should_allow_numbers_as_tensors(name):  # noqa: SLF001 - as FakeTensor does
        return args
    return tuple(
        torch.tensor(value)
        if argument.type.kind() == "TensorType" and isinstance(value, (int, float, complex))
        else value
        for value, argument in zip(args, schema.arguments, strict=False)
    )


FALLBACK_PATTERN = re.compile(
    r"The operator '([^']+)' is not currently supported on the MPS backend and will fall back to run on"
)
NOT_IMPLEMENTED_PATTERN = re.compile(r"The operator '([^']+)' is not currently implemented for the MPS device")


@dataclass(eq=False)
class OperatorCall:
    """An outermost operator that was called with a tensor of MPS."""

    name: str  # How MPS names it if it falls back by itself; else empty.
    place: ModuleLocation  # The module that was running.
    phase: str  # "forward", "backward", or "elsewhere": outside of both.
    seconds: float | None = None  # How long it took; None while it runs.


@dataclass(frozen=True)
class FallbackEvent:
    """One fallback, or one operator that was refused because falling back is off."""

    operator: str  # How MPS names it.
    sighting: OperatorCall  # The outermost operator that it was part of.
    refused: bool = False  # Whether it ended in an error.


@dataclass(eq=False)
class FallbackRecorder(TorchDispatchMode):
    """What fell back so far; as a mode it sees the outermost operators, and how long those take that have a tensor of MPS."""

    table: OperatorTable  # What MPS has.
    places: ModuleTracker = field(default_factory=ModuleTracker)  # Where in a model it is.
    events: list[FallbackEvent] = field(default_factory=list)  # The fallbacks, in the order in which they became known.
    # Operators that fall back by themselves, and of which torch has not warned yet.
    pending: list[OperatorCall] = field(default_factory=list)
    last: OperatorCall | None = None  # The outermost operator that runs, or that ran last.
    operators: int = 0  # How many outermost operators were called with a tensor of MPS.
    thread: int = field(default_factory=threading.get_ident)  # The thread that is watched.

    supports_higher_order_operators = True

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, and note it if it has a tensor of MPS."""
        kwargs = kwargs or {}
        if not any(
            tensor.is_mps and tensor.layout == torch.strided for tensor in iter_operator_tensors([args, kwargs])
        ):
            return operator(*args, **kwargs)
        sighting = self.begin(operator.name())
        if sighting.name and sighting.phase != BACKWARD:  # There, another thread may wait for us, with the lock.
            parse_device_argument(
                "mps"
            ).finish()  # What was started before is not the time of this one, which waits for it.
        start = current_time()
        try:
            made = operator(*args, **kwargs)
        except NotImplementedError as error:  # Falling back is off.
            named = NOT_IMPLEMENTED_PATTERN.search(str(error))
            if named:
                self.pending = [other for other in self.pending if other is not sighting]
                self.events.append(FallbackEvent(named[1], sighting, refused=True))
            raise
        sighting.seconds = current_time() - start
        return made

    def begin(self, operator: str) -> OperatorCall:
        """Note that an outermost operator is called."""
        falls = self.table.classify(operator) in {FALLS_BACK, ALWAYS_ON_CPU}
        self.operators += 1
        self.last = self._sighting(self.table.named_by_mps(operator) if falls else "")
        if falls:
            self.pending.append(self.last)
        return self.last

    def record_warning(self, operator: str) -> None:
        """Note a warning of torch: it is of the first such operator that waits for one, or of a part of the last."""
        waiting = next((sighting for sighting in self.pending if sighting.name == operator), None)
        # MPS may have another name for the last one.
        sighting = waiting or self.last or self._sighting("")
        if sighting in self.pending:
            self.pending.remove(sighting)
        self.events.append(FallbackEvent(operator, sighting))

    def all_events(self) -> list[FallbackEvent]:
        """Return every fallback, also those whose warning somebody else's filter kept from us."""
        silent = [FallbackEvent(sighting.name, sighting) for sighting in self.pending if sighting.seconds is not None]
        return [*self.events, *silent]

    def _sighting(self, name: str) -> OperatorCall:
        place = self.places.current
        phase = FORWARD if place.kind else ELSEWHERE
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - as torch.utils.module_tracker asks it
            phase = BACKWARD
        return OperatorCall(name, place, phase)


@dataclass(frozen=True)
class WarningInterceptor:
    """Takes the warnings of fallbacks, and hands every other one on to ``shown``, which showed warnings before."""

    record: FallbackRecorder
    original_showwarning: Callable[..., None]

    def __call__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        """Note a fallback, or show any other warning; a ledger around this one sees both."""
        named = FALLBACK_PATTERN.search(str(message)) if threading.get_ident() == self.record.thread else None
        if named:
            self.record.record_warning(named[1])
        if not named or isinstance(self.original_showwarning, WarningInterceptor):
            self.original_showwarning(message, *args, **kwargs)
