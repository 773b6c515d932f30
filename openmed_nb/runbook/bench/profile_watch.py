"""What a profile runs, and what it sees of steps: operators with their times, and calls that wait for the device with their lines.

This file imports torch, because a subclass needs its base; it is itself imported only when steps are profiled.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import statistics
import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from ...devices.moving import iter_operator_tensors
from ...devices.profilers import is_host_event, profile_device, push_modes
from ...devices.registry import parse_device_argument
from ...devices.request import device_type
from ...training.holders import INSTALLED_FOLDERS
from ..checks.operators.fallbacks import Fallback, fallbacks
from . import workloads
from .timing import DATA, CodeLocation, OperatorTime, Reason, Synchronization
from .workloads import CUSTOM_STEP, Workload

PREFIX = "openmed_nb: "  # Begins the names under which the phases stand in a trace.
MICRO = 1e-6  # torch's profiler counts microseconds.

# How names of operators look, and what is shown instead of any other name.
OPERATOR = re.compile(r"\w+(::[\w.]+)+")
USER_RANGE = "a range of yours"

# The phase of operators with nothing to compute, and how many of them follow a step, so that waiting for the device once, at
# their end, is a small part of their time.
EMPTY = "empty operators"
CALLS = 20


def empty_operators(device: str) -> Workload:
    """Return steps of a few linear layers of one number: what models mostly consist of, and among what costs most to start."""
    row, weight, bias = (torch.ones(size, dtype=torch.float32).to(device) for size in ((1, 1), (1, 1), (1,)))

    def start(_batch: Any) -> None:
        for _ in range(CALLS):
            torch.nn.functional.linear(row, weight, bias)

    return Workload(EMPTY, CUSTOM_STEP, device, 1, None, lambda: itertools.repeat(None), ((EMPTY, start),))


def profile_operators(
    workload: Workload, batches: Iterator[Any], steps: int, trace: Path | None, beside: Workload | None
) -> tuple[OperatorTime, ...]:
    """Run steps under torch's profiler and return their operators, those that take longest first.

    ``beside`` are operators with nothing to compute, which follow each step; the trace is written in the format of Chrome.
    """

    def marked(phase: str) -> Any:
        return record_function(f"{PREFIX}{phase}")

    def marked_step() -> None:
        with marked(DATA):
            value = next(batches)
        workload.run(value, marked)

    with profile_device(workload.device):  # The first profile of a process takes long to start.
        marked_step()
    with profile_device(workload.device) as profiler:
        for _ in range(steps):
            marked_step()
            if beside is not None:
                beside.run(None, marked)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    return operator_times(profiler.events(), steps, parse_device_argument(workload.device).profiler_times_kernels)


def operator_times(events: Iterable[Any], steps: int, sees_device: bool) -> tuple[OperatorTime, ...]:
    """Return the operators of so many steps, those that take longest first, from ``torch.profiler.profile.events``.

    A backward pass on a GPU runs in a thread of its own, so that only the clock tells in which phase an operator was called.

    The first call of an operator in each step is compared with the first of the others, and so on. The median over the steps
    is what such a call takes: on a busy computer the system stops the process now and then, and a call in which it does takes
    a thousand times as long, so that the sums of ``key_averages`` would tell of other programs.
    """
    phase = ""
    phase_end = 0.0
    step = 0
    # The seconds of an operator in a phase on the host, by the number of the call in its step.
    seconds = defaultdict[tuple[str, str], defaultdict[int, list[float]]](lambda: defaultdict(list))
    device_seconds = Counter[tuple[str, str]]()
    calls_in_step = Counter[tuple[int, tuple[str, str]]]()
    for event in sorted(filter(is_host_event, events), key=_start):
        if event.name.startswith(PREFIX):
            phase = event.name.removeprefix(PREFIX)
            phase_end = event.time_range.end
            if phase == DATA:
                step += 1
        elif "::" in event.name and not event.name.startswith("autograd::"):  # No call of the driver, and no node.
            # A person's own range may be named anything.
            name = event.name if OPERATOR.fullmatch(event.name) else USER_RANGE
            key = name, phase if event.time_range.start <= phase_end else ""
            number = calls_in_step[step, key]
            calls_in_step[step, key] += 1
            seconds[key][number].append(event.self_cpu_time_total * MICRO)
            device_seconds[key] += event.self_device_time_total * MICRO

    empty = [itertools.chain(*calls.values()) for (_name, phase), calls in seconds.items() if phase == EMPTY]
    longest_empty = max(map(statistics.median, empty), default=None)
    times = []
    for (name, phase), calls in seconds.items():
        if phase == EMPTY:
            continue
        typical = [(statistics.median(call), len(call)) for call in calls.values()]
        starting = None
        if longest_empty is not None:
            starting = sum(min(longest_empty, call) * count for call, count in typical) / steps
        times.append(
            OperatorTime(
                name,
                phase,
                sum(count for _, count in typical) / steps,
                sum(call * count for call, count in typical) / steps,
                device_seconds[name, phase] / steps if sees_device else None,
                starting,
            )
        )
    longest = "device_seconds" if sees_device else "seconds"
    return tuple(sorted(times, key=lambda one: (-getattr(one, longest), one.operator, one.phase)))


def _start(event: Any) -> tuple[float, bool]:
    """Return when an event began; the mark of a phase comes before what begins with it."""
    return event.time_range.start, not event.name.startswith(PREFIX)


def sum_operators(times: Sequence[OperatorTime], name: str, with_data: bool = False) -> float | None:
    """Return the sum of a figure of operators, usually without those that make the data; ``None`` if it is not known of any.

    Example:
        >>> times = [OperatorTime("aten::mm", "forward", 2.0, 0.25), OperatorTime("aten::stack", "data", 1.0, 0.1)]
        >>> sum_operators(times, "seconds"), sum_operators(times, "launch_seconds")
        (0.25, None)
    """
    values = [getattr(one, name) for one in times if with_data or one.phase != DATA]
    known = [value for value in values if value is not None]
    return sum(known) if known else None


MAX_TRACED_STEPS = (
    3  # How many steps are watched for what they call: that takes several times as long, and the count is exact.
)


def trace_steps(
    workload: Workload, batches: Iterator[Any]
) -> tuple[float, tuple[Synchronization, ...], tuple[Fallback, ...]]:
    """Return how many operators a step starts, which calls wait for the device, and what fell back from MPS to the CPU."""
    record = StepRecorder(device_type(workload.device))
    with fallbacks() if parse_device_argument(record.kind).has_fallbacks else contextlib.nullcontext() as ledger:
        for _ in range(MAX_TRACED_STEPS):
            batch = next(batches)
            with watching(record):
                workload.run(batch)
    waits = sorted(record.waits.items(), key=lambda item: (-item[1], item[0]))  # The most frequent first.
    synchronizations = (
        Synchronization(call, place, count / MAX_TRACED_STEPS, reason) for (call, place, reason), count in waits
    )
    return record.started / MAX_TRACED_STEPS, tuple(synchronizations), () if ledger is None else ledger.entries


class StepRecorder(TorchFunctionMode):
    """Sees the functions of torch that Python calls, and notes where one is called from that waits for the device.

    Attributes:
        kind: The kind of device: ``"cpu"``, ``"mps"`` or ``"cuda"``.
        waits: How often each call waited for the device, where and why.
        started: How many operators were started that compute something.
        begun: Whether this step has started one on the device.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.waits = Counter[tuple[str, CodeLocation, Reason]]()
        self.started = 0
        self.has_started = False

    def record(self, call: str, frame: FrameType, reason: Reason = "read") -> None:
        """Count a call that waits, unless the measurement itself makes it."""
        place = find_code_location(frame)
        if place is not None:
            self.waits[call, place, reason] += 1

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        read = describe_sync_call(name, args, kwargs, self.kind)
        copied = "" if read else describe_copy_call(name, args, kwargs, self.kind)
        if read or copied:
            copy: Reason = "copy" if self.has_started else "batch"
            self.record(read or copied, sys._getframe(1), "read" if read else copy)  # noqa: SLF001 - Python has no other name for it
        before = self.started
        answer = function(*args, **kwargs)
        if not (self.has_started or copied) and self.started > before:
            self.has_started = any(
                is_on(tensor, self.kind) for tensor in iter_operator_tensors([*args, *kwargs.values()])
            )
        return answer


class LaunchCountMode(TorchDispatchMode):
    """Counts the operators that compute; a view starts nothing on a device."""

    supports_higher_order_operators = True

    def __init__(self, record: StepRecorder) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = getattr(operator, "_schema", None)  # Operators of a higher order have none.
        aliases = [one.alias_info for one in schema.returns] if schema is not None else []
        if all(alias is None or alias.is_write for alias in aliases):
            self._record.started += 1
        return operator(*args, **(kwargs or {}))


SYNCHRONIZE = "synchronize"  # The function of ``torch.mps``, ``torch.cuda`` and ``torch.accelerator`` that only waits.


@contextlib.contextmanager
def watching(record: StepRecorder) -> Iterator[None]:
    """Note what is called in this thread; what ``torch.compile`` made runs uncompiled, since it calls nothing that is seen."""
    record.has_started = False
    with contextlib.ExitStack() as stack:
        for module in (
            (getattr(torch, record.kind), torch.accelerator)
            if parse_device_argument(record.kind).is_accelerator
            else ()
        ):
            synchronize = getattr(module, SYNCHRONIZE)
            stack.callback(setattr, module, SYNCHRONIZE, synchronize)
            call = f"{module.__name__}.{SYNCHRONIZE}()"
            setattr(module, SYNCHRONIZE, functools.partial(noted, record, call, synchronize))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(push_modes(LaunchCountMode(record), record))
        yield


def noted(record: StepRecorder, call: str, synchronize: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Note a call of a function that only waits, which takes no tensor, so that no mode sees it."""
    caller = sys._getframe(1)  # noqa: SLF001 - Python has no other name for it
    if PACKAGE not in Path(caller.f_code.co_filename).parents:  # What looks for fallbacks waits, too.
        record.record(call, caller)
    return synchronize(*args, **kwargs)


# Functions of torch that need numbers of the device on the host: to return them, or to know the size of what they make.
SYNC_CALLS: Mapping[str, str] = {
    **{name: f".{name}()" for name in ("item", "tolist", "numpy", "cpu")},
    **{f"__{name}__": f"{name}()" for name in ("bool", "float", "int", "complex")},
    **dict.fromkeys(("__repr__", "__str__"), "printing a tensor"),
    **{name: f"torch.{name}()" for name in ("equal", "allclose")},
    **{name: f"{name}()" for name in ("nonzero", "argwhere", "masked_select", "bincount")},
    **{name: f"{name}()" for name in ("unique", "unique_consecutive")},
    "__array__": "an array of numpy",
    "is_nonzero": "bool()",
    "__index__": "a Python index",
    "__format__": "formatting a tensor",
    "__contains__": "in",
}


def describe_sync_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], kind: str) -> str:
    """Return how a call of torch that waits for numbers of a kind of device is shown, empty for any other."""
    first, *others = [*args, *kwargs.values()] or [None]
    if name == "copy_":
        waits = is_on(others[0], kind) and not is_on(first, kind) and not is_non_blocking(args, kwargs)
        return ".copy_() to the host" if waits else ""
    if not is_on(first, kind):
        return ""
    if name == "to":
        return ".to('cpu')" if "cpu" in devices_in(others) and not is_non_blocking(args, kwargs) else ""
    if name == "__getitem__":  # torch has to count the true values of a mask.
        masked = any(str(getattr(part, "dtype", "")) in {"torch.bool", "torch.uint8"} for part in index_in(others))
        return "a boolean mask" if masked else ""
    if name == "where":
        return "" if others else "torch.where() with a condition alone"
    return SYNC_CALLS.get(name, "")


def describe_copy_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], kind: str) -> str:
    """Return how a call of torch that copies from the host to a kind of device is shown, empty for any other.

    Unless it may go on meanwhile, torch waits there for all that was started before: on MPS ``copy_and_sync`` commits and
    waits (``MPSStream.mm``), on CUDA ``memcpy_and_sync`` (``CUDAFunctions.h``).
    """
    first, *others = [*args, *kwargs.values()] or [None]
    if not parse_device_argument(kind).is_accelerator or is_non_blocking(args, kwargs):
        return ""
    if is_on(first, kind):
        return describe_copy_into(name, others) if others else ""
    if name in {"to", "cuda"} and is_on(first, "cpu"):
        return f".to({kind!r})" if name == kind or kind in devices_in(others) else ""
    made_there = name in {"tensor", "as_tensor", "asarray"} and kind in devices_in(others)
    return f"torch.{name}() on the device" if made_there else ""


def describe_copy_into(name: str, others: Sequence[Any]) -> str:
    """Return how a method of a tensor of the device is shown that copies from the host, given its arguments."""
    index = index_in(others)
    value = others[-1]
    if name == "copy_":
        return ".copy_() to the device" if is_on(others[0], "cpu") else ""
    if name == "new_tensor":
        return ".new_tensor() on the device"
    if name in {"__getitem__", "__setitem__"} and any(is_on(part, "cpu") and part.dim() for part in index):
        return "an index of the host"
    # A single number is not copied.
    return "a value of the host" if name == "__setitem__" and is_on(value, "cpu") and value.dim() else ""


def is_on(thing: Any, kind: str) -> bool:
    return isinstance(thing, torch.Tensor) and thing.device.type == kind


def is_non_blocking(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether the program goes on while a copy is made; among the arguments by their place that is the one which is true."""
    return any(one is True for one in (kwargs.get("non_blocking"), *args[1:]))


def devices_in(arguments: Sequence[Any]) -> list[str]:
    """Return the kinds of devices that arguments name, among others that name none."""
    return [device_type(str(getattr(one, "device", one))) for one in arguments]


def index_in(arguments: Sequence[Any]) -> Sequence[Any]:
    """Return the parts of the index with which a tensor is asked for numbers, or given some."""
    return arguments[0] if isinstance(arguments[0], (tuple, list)) else arguments[:1]


# Whose code a file is: the person's, a library's, torch's, or Python's own, such as ``logging``.
USER_CODE = "own"
LIBRARY = "library"
TORCH = "torch"
PYTHON = "python"

HARNESS_FILE = workloads.__file__  # The file that calls a step; what is outside of it is not the step.
PACKAGE = Path(__file__).parents[2]

# torch's optimizers read counters that they keep on the CPU (``torch/optim/adam.py``), so they wait for nothing.
OPTIMIZERS = Path(torch.optim.__file__).parent

# How ``torch.nn.Module`` runs a ``forward`` (``torch/nn/modules/module.py``); no public name tells that.
CALL_OF_A_MODULE = "_call_impl"


def find_code_location(frame: FrameType | None) -> CodeLocation | None:
    """Return where the code is that led to the innermost frame, ``None`` if that is the measurement itself.

    torch's and Python's own code is passed over: whoever asks a logger to print a tensor prints it.
    """
    library = ""
    in_model = False
    while frame is not None and frame.f_code.co_filename != HARNESS_FILE:
        code = frame.f_code
        file = code.co_filename
        owner = code_owner(file)
        if owner == TORCH and OPTIMIZERS in Path(file).parents:
            return None
        if owner == USER_CODE:
            return CodeLocation(
                display_filename(file), frame.f_lineno, code.co_name, library if in_model else "", in_model
            )
        if owner == LIBRARY:
            library = library or str(frame.f_globals.get("__name__", Path(file).stem))
        in_model = in_model or bool(library and owner == TORCH and code.co_name == CALL_OF_A_MODULE)
        frame = frame.f_back
    return CodeLocation(library=library, in_model=True) if library and not library.startswith(PACKAGE.name) else None


@functools.cache
def code_owner(file: str) -> str:
    """Return whose code a file is.

    Example:
        >>> import logging
        >>> code_owner(logging.__file__), code_owner(torch.nn.__file__), code_owner("/home/a/study/train.py")
        ('python', 'torch', 'own')
        >>> code_owner("/usr/lib/python3/dist-packages/tqdm/std.py"), code_owner(__file__)
        ('library', 'library')
    """
    path = Path(file)
    if Path(torch.__file__).parent in path.parents:
        return TORCH
    if PACKAGE in path.parents or INSTALLED_FOLDERS & set(path.parts):
        return LIBRARY
    homes = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    return PYTHON if file.startswith("<frozen") or homes & set(path.parents) else USER_CODE


def display_filename(file: str) -> str:
    """Return a file by its name, and a cell of a notebook as IPython names it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    cell = shell.compile.format_code_name(file) if shell is not None else None
    return " ".join(cell) if cell else Path(file).name
