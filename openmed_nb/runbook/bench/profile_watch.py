"""Recording of steps for a profile: operator times, and calls that wait for the device with their code locations.

This module imports torch for its base classes. It is imported only when steps are profiled.
"""

from __future__ import annotations

import contextlib
import functools
import re
import statistics
import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple, TypeGuard

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.overrides import TorchFunctionMode
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from ..._utils.clock import time_call
from ...devices.moving import iter_operator_tensors
from ...devices.profilers import is_host_event, profile_device, push_modes
from ...devices.registry import get_device
from ...devices.request import device_type
from ...training.holders import INSTALLED_FOLDERS
from . import workloads
from .fallbacks import Fallback, fallbacks
from .timing import DATA, CodeLocation, OperatorTime, Reason, Synchronization, repeat_measurement
from .workloads import Workload

PHASE_PREFIX = "openmed_nb: "  # Prefix of the phase names in a trace.
SECONDS_PER_MICROSECOND = 1e-6  # torch's profiler reports microseconds.

# Names of operators. Ranges with any other name may contain text of the user and are ignored.
OPERATOR_PATTERN = re.compile(r"(?!autograd::)\w+(::[\w.]+)+")

NUM_LAUNCHES = 20  # With this number of operators, the synchronization at their end is a small part of their time.


def measure_launch_seconds(device: str) -> float:
    """Return the time of a linear layer on single numbers in seconds, which is launch overhead.

    Models consist mostly of linear layers, and their launch overhead is among the highest.
    """
    row = torch.ones((1, 1), dtype=torch.float32).to(device)

    def launch() -> None:
        for _ in range(NUM_LAUNCHES):
            torch.nn.functional.linear(row, row, row[0])
        get_device(device).synchronize()

    seconds = repeat_measurement(functools.partial(time_call, launch), NUM_LAUNCHES)
    return statistics.median(seconds) / NUM_LAUNCHES


def profile_operators(
    workload: Workload, batches: Iterator[object], steps: int, trace: Path | None
) -> tuple[OperatorTime, ...]:
    """Run steps under torch's profiler and return their operators, sorted by descending time.

    Args:
        workload: Workload to profile.
        batches: Batches of the workload.
        steps: Number of steps.
        trace: File for a trace in Chrome's format, or ``None``.
    """

    def phase_range(phase: str) -> record_function:
        return record_function(f"{PHASE_PREFIX}{phase}")

    def run_step() -> None:
        with phase_range(DATA):
            batch = next(batches)
        workload.run(batch, phase_range)

    with profile_device(workload.device):  # The first profiler of a process takes long to start.
        run_step()
    with profile_device(workload.device) as profiler:
        for _ in range(steps):
            run_step()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    return _aggregate_operator_times(profiler.events(), steps, get_device(workload.device).profiler_times_kernels)


def _aggregate_operator_times(
    events: Iterable[FunctionEvent], steps: int, records_device: bool
) -> tuple[OperatorTime, ...]:
    """Return the time per operator and phase from the events of torch's profiler, sorted by descending time.

    A backward pass on a GPU runs in its own thread, so that only timestamps assign operators to phases. An operator counts with
    its median over the steps: on a busy computer, the system occasionally suspends the process, and a step takes a thousand
    times as long. The sums of ``key_averages`` would then describe other programs.

    Args:
        events: Events of ``torch.profiler.profile.events``.
        steps: Number of profiled steps.
        records_device: Whether the profiler records kernels on the device.
    """
    phase = ""
    phase_end = 0.0
    step = 0
    # Host seconds of an operator in a phase, by step.
    seconds = defaultdict[tuple[str, str], Counter[int]](Counter)
    device_seconds = Counter[tuple[str, str]]()
    counts = Counter[tuple[str, str]]()
    # In order of time, with the range of a phase before the operators that start with it.
    host_events = sorted(
        filter(is_host_event, events),
        key=lambda event: (event.time_range.start, not event.name.startswith(PHASE_PREFIX)),
    )
    for event in host_events:
        if event.name.startswith(PHASE_PREFIX):
            phase = event.name.removeprefix(PHASE_PREFIX)
            phase_end = event.time_range.end
            if phase == DATA:
                step += 1
        elif OPERATOR_PATTERN.fullmatch(event.name):
            key = event.name, phase if event.time_range.start <= phase_end else ""
            counts[key] += 1
            seconds[key][step] += event.self_cpu_time_total * SECONDS_PER_MICROSECOND
            device_seconds[key] += event.self_device_time_total * SECONDS_PER_MICROSECOND

    times = [
        OperatorTime(
            operator=name,
            phase=phase,
            count=counts[name, phase] / steps,
            seconds=statistics.median(by_step.values()) * len(by_step) / steps,
            device_seconds=device_seconds[name, phase] / steps if records_device else None,
        )
        for (name, phase), by_step in seconds.items()
    ]
    sort_field = "device_seconds" if records_device else "seconds"
    return tuple(sorted(times, key=lambda time: (-getattr(time, sort_field), time.operator, time.phase)))


# Number of steps whose calls are traced. A traced step takes several times as long, and its counts are exact.
MAX_TRACED_STEPS = 3


class StepTrace(NamedTuple):
    """Calls of traced steps.

    Attributes:
        operators_per_step: Number of operators that compute per step.
        synchronizations: Calls that wait for the device, the most frequent first.
        fallbacks: Operators that fell back from MPS to the CPU.
    """

    operators_per_step: float
    synchronizations: tuple[Synchronization, ...]
    fallbacks: tuple[Fallback, ...]


def trace_steps(workload: Workload, batches: Iterator[object]) -> StepTrace:
    """Trace the calls of some steps."""
    recorder = StepRecorder(device_type(workload.device))
    has_fallbacks = get_device(recorder.device).has_fallbacks
    with fallbacks() if has_fallbacks else contextlib.nullcontext() as fallback_log:
        for _ in range(MAX_TRACED_STEPS):
            batch = next(batches)
            with _trace_calls(recorder):
                workload.run(batch)
    waits = sorted(recorder.waits.items(), key=lambda item: (-item[1], item[0]))
    synchronizations = tuple(
        Synchronization(call, location, count / MAX_TRACED_STEPS, reason) for (call, location, reason), count in waits
    )
    fallback_entries = () if fallback_log is None else fallback_log.entries
    return StepTrace(recorder.num_launched / MAX_TRACED_STEPS, synchronizations, fallback_entries)


@dataclass(eq=False)
class StepRecorder(TorchFunctionMode):
    """Mode that records the locations of Python calls of torch functions that wait for the device.

    Attributes:
        device: Type of the device: ``"cpu"``, ``"mps"`` or ``"cuda"``.
        waits: Number of waits by call, location and reason.
        num_launched: Number of operators that compute.
        has_started: Whether the current step has launched work on the device.
    """

    device: str
    waits: Counter[tuple[str, CodeLocation, Reason]] = field(default_factory=Counter)
    num_launched: int = 0
    has_started: bool = False

    def record(self, call: str, frame: FrameType, reason: Reason = "read") -> None:
        """Count a call that waits, unless the measurement itself makes the call."""
        location = _find_code_location(frame)
        if location is not None:
            self.waits[call, location, reason] += 1

    def __torch_function__(
        self,
        function: Callable[..., object],
        _types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        read_call, copy_call = _describe_wait(name, args, kwargs, self.device)
        if read_call or copy_call:
            copy_reason: Reason = "copy" if self.has_started else "batch"
            caller = sys._getframe(1)  # noqa: SLF001 - Python has no public function for the caller
            self.record(read_call or copy_call, caller, "read" if read_call else copy_reason)
        launched_before = self.num_launched
        result = function(*args, **kwargs)
        if not (self.has_started or copy_call) and self.num_launched > launched_before:
            tensors = iter_operator_tensors([*args, *kwargs.values()])
            self.has_started = any(_is_on(tensor, self.device) for tensor in tensors)
        return result


class LaunchCountMode(TorchDispatchMode):
    """Mode that counts the operators that compute. Views launch nothing on a device and do not count."""

    supports_higher_order_operators = True

    def __init__(self, recorder: StepRecorder) -> None:
        TorchDispatchMode.__init__(self)
        self._recorder = recorder

    def __torch_dispatch__(
        self,
        operator: Callable[..., object],
        _types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        schema = getattr(operator, "_schema", None)  # Higher-order operators have no schema.
        aliases = [result.alias_info for result in schema.returns] if schema is not None else []
        if all(alias is None or alias.is_write for alias in aliases):
            self._recorder.num_launched += 1
        return operator(*args, **(kwargs or {}))


@contextlib.contextmanager
def _trace_calls(recorder: StepRecorder) -> Iterator[None]:
    """Record the calls of this thread.

    Functions from ``torch.compile`` run uncompiled, because compiled code makes no calls that a mode can record.
    """
    recorder.has_started = False
    with torch.compiler.set_stance("force_eager"), push_modes(LaunchCountMode(recorder), recorder):
        yield


# torch functions that need values of the device on the host.
SYNC_CALLS: Mapping[str, str] = {
    **{name: f".{name}()" for name in ("item", "tolist", "numpy", "cpu", "nonzero")},
    **{f"__{name}__": f"{name}()" for name in ("bool", "float", "int")},
    **dict.fromkeys(("__repr__", "__str__", "__format__"), "printing a tensor"),
    "masked_select": "masked_select()",
    "unique": "unique()",
}


def _describe_wait(name: str, args: Sequence[object], kwargs: Mapping[str, object], device: str) -> tuple[str, str]:
    """Return the texts of a torch call that reads values from a device type, and of one that copies from the host to it.

    The text of a call that does not wait is empty. A blocking copy waits for all work that was launched before. On MPS,
    ``copy_and_sync`` commits and waits (``MPSStream.mm``). On CUDA, ``memcpy_and_sync`` does (``CUDAFunctions.h``).
    """
    first, *others = [*args, *kwargs.values()] or [None]
    on_device = _is_on(first, device)
    read = ""
    copied = ""
    if name in {"to", "cuda"}:
        targets = (
            {device} if name == "cuda" else {device_type(str(getattr(other, "device", other))) for other in others}
        )
        # Among the positional arguments of a copy, ``non_blocking`` is the one that is ``True``.
        blocking = not any(argument is True for argument in (kwargs.get("non_blocking"), *args[1:]))
        if blocking and on_device and "cpu" in targets:
            read = ".to('cpu')"
        elif blocking and not on_device and _is_on(first, "cpu") and device in targets:
            copied = f".to({device!r})"
    elif on_device and name == "__getitem__":
        index = others[0] if isinstance(others[0], (tuple, list)) else others[:1]
        # torch counts the true values of a mask.
        is_masked = any(getattr(part, "dtype", None) is torch.bool for part in index)
        read = "indexing with a boolean mask" if is_masked else ""
    elif on_device:
        read = SYNC_CALLS.get(name, "")
    return read, copied if get_device(device).is_accelerator else ""


def _is_on(value: object, device: str) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor on a device type."""
    return isinstance(value, torch.Tensor) and value.device.type == device


# Owner of a code file. Python's own code includes modules such as ``logging``.
CodeOwner = Literal["user", "library", "torch", "python"]

HARNESS_FILE = workloads.__file__  # File that calls a step. Its callers are not part of the step.
PACKAGE = Path(__file__).parents[2]

# torch's optimizers read counters that are stored on the CPU (``torch/optim/adam.py``), so these reads do not wait.
OPTIMIZERS = Path(torch.optim.__file__).parent

# Function of ``torch.nn.Module`` that runs ``forward`` (``torch/nn/modules/module.py``). It has no public name.
MODULE_CALL = "_call_impl"


def _find_code_location(frame: FrameType | None) -> CodeLocation | None:
    """Return the location of the code that caused a frame, or ``None`` if the measurement itself caused it.

    Frames of torch and Python are skipped: if a logger prints a tensor, the location is the call of the logger.
    """
    library = ""
    in_model = False
    while frame is not None and frame.f_code.co_filename != HARNESS_FILE:
        code = frame.f_code
        file = code.co_filename
        owner = _code_owner(file)
        if owner == "torch" and OPTIMIZERS in Path(file).parents:
            return None
        if owner == "user":
            return CodeLocation(
                _display_filename(file), frame.f_lineno, code.co_name, library if in_model else "", in_model
            )
        if owner == "library":
            library = library or str(frame.f_globals.get("__name__", Path(file).stem))
        in_model = in_model or bool(library and owner == "torch" and code.co_name == MODULE_CALL)
        frame = frame.f_back
    return CodeLocation(library=library, in_model=True) if library and not library.startswith(PACKAGE.name) else None


@functools.cache
def _code_owner(file: str) -> CodeOwner:
    """Return the owner of a code file.

    Example:
        >>> import logging
        >>> _code_owner(logging.__file__), _code_owner(torch.nn.__file__), _code_owner("/home/a/study/train.py")
        ('python', 'torch', 'user')
        >>> _code_owner("/usr/lib/python3/dist-packages/tqdm/std.py"), _code_owner(__file__)
        ('library', 'library')
    """
    path = Path(file)
    if Path(torch.__file__).parent in path.parents:
        return "torch"
    if PACKAGE in path.parents or INSTALLED_FOLDERS & set(path.parts):
        return "library"
    python_directories = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    return "python" if file.startswith("<frozen") or python_directories & set(path.parents) else "user"


def _display_filename(file: str) -> str:
    """Return the name of a file without its directory, or IPython's name of a notebook cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    cell = shell.compile.format_code_name(file) if shell is not None else None
    return " ".join(cell) if cell else Path(file).name
