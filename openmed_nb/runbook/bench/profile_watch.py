"""Recording of steps for a profile: operator times, and calls that wait for the device with their code locations.

This module imports torch for its base classes. It is imported only when steps are profiled.
"""

from __future__ import annotations

import functools
import re
import statistics
import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from . import workloads
from .timing import DATA, OperatorTime, Synchronization, repeat_measurement
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

    A backward pass on a GPU runs in its own thread, so that only timestamps assign operators to phases.

    Args:
        events: Events of ``torch.profiler.profile.events``.
        steps: Number of profiled steps.
        records_device: Whether the profiler records kernels on the device.
    """
    phase = ""
    phase_end = 0.0
    counts = Counter[tuple[str, str]]()
    seconds = defaultdict[tuple[str, str], float](float)
    device_seconds = defaultdict[tuple[str, str], float](float)
    # In order of time, with the range of a phase before the operators that start with it.
    host_events = sorted(
        filter(is_host_event, events),
        key=lambda event: (event.time_range.start, not event.name.startswith(PHASE_PREFIX)),
    )
    for event in host_events:
        if event.name.startswith(PHASE_PREFIX):
            phase = event.name.removeprefix(PHASE_PREFIX)
            phase_end = event.time_range.end
        elif OPERATOR_PATTERN.fullmatch(event.name):
            key = event.name, phase if event.time_range.start <= phase_end else ""
            counts[key] += 1
            seconds[key] += event.self_cpu_time_total * SECONDS_PER_MICROSECOND / steps
            device_seconds[key] += event.self_device_time_total * SECONDS_PER_MICROSECOND / steps
    times = [
        OperatorTime(*key, count / steps, seconds[key], device_seconds[key] if records_device else None)
        for key, count in counts.items()
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
    """

    operators_per_step: float
    synchronizations: tuple[Synchronization, ...]


def trace_steps(workload: Workload, batches: Iterator[object]) -> StepTrace:
    """Trace the calls of some steps.

    Functions from ``torch.compile`` run uncompiled, because compiled code makes no calls that a mode can record.
    """
    device = device_type(workload.device)
    counter = OperatorCounter(device)
    waits = Counter[Synchronization]()
    for _ in range(MAX_TRACED_STEPS):
        batch = next(batches)
        recorder = WaitRecorder(device, counter, waits, counter.count)
        with torch.compiler.set_stance("force_eager"), push_modes(counter, recorder):
            workload.run(batch)
    synchronizations = [replace(wait, count=count / MAX_TRACED_STEPS) for wait, count in waits.items()]
    synchronizations.sort(key=lambda wait: (-wait.count, wait.call, wait.file, wait.line))
    return StepTrace(counter.count / MAX_TRACED_STEPS, tuple(synchronizations))


class OperatorCounter(TorchDispatchMode):
    """Mode that counts the outermost operators that compute with a tensor on a device type.

    Views launch nothing on a device and do not count.
    """

    supports_higher_order_operators = True

    def __init__(self, device: str) -> None:
        TorchDispatchMode.__init__(self)  # Type checkers do not know that of super(), because it has no annotations.
        self._device = device
        self.count = 0

    def __torch_dispatch__(
        self,
        operator: Callable[..., object],
        _types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator, and count it if it computes on the device."""
        kwargs = kwargs or {}
        schema = getattr(operator, "_schema", None)  # Higher-order operators have no schema.
        aliases = [result.alias_info for result in schema.returns] if schema is not None else []
        computes = all(alias is None or alias.is_write for alias in aliases)
        if computes and any(_is_on(tensor, self._device) for tensor in iter_operator_tensors([args, kwargs])):
            self.count += 1
        return operator(*args, **kwargs)


@dataclass(eq=False)
class WaitRecorder(TorchFunctionMode):
    """Mode that records the lines whose Python calls of torch functions wait for the device during a step.

    Attributes:
        device: Type of the device: ``"cpu"``, ``"mps"`` or ``"cuda"``.
        counter: Counter of the operators on the device.
        waits: Number of waits.
        count_before: Number of operators before the step.
    """

    device: str
    counter: OperatorCounter
    waits: Counter[Synchronization]
    count_before: int

    def __torch_function__(
        self,
        function: Callable[..., object],
        _types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        call, is_copy = _describe_wait(getattr(function, "__name__", ""), args, kwargs, self.device)
        # Each step copies its batch to the device before it has launched work there.
        if call and not (is_copy and self.counter.count == self.count_before):
            # sys._getframe is the only function of Python for the caller.
            line = _find_user_line(sys._getframe(1))  # noqa: SLF001
            if line is not None:
                self.waits[Synchronization(call, *line, "copy" if is_copy else "read")] += 1
        return function(*args, **kwargs)


# torch functions that need values of the device on the host.
SYNC_CALLS: Mapping[str, str] = {
    **{name: f".{name}()" for name in ("item", "tolist", "numpy", "cpu", "nonzero", "unique")},
    **{f"__{name}__": f"{name}()" for name in ("bool", "float", "int")},
    **dict.fromkeys(("__repr__", "__str__", "__format__"), "printing a tensor"),
}


def _describe_wait(name: str, args: Sequence[object], kwargs: Mapping[str, object], device: str) -> tuple[str, bool]:
    """Return the text of a torch call that waits for a device type, and whether the call copies from the host to it.

    The text of a call that does not wait is empty. A blocking copy waits for all work that was launched before. On MPS,
    ``copy_and_sync`` commits and waits (``MPSStream.mm``). On CUDA, ``memcpy_and_sync`` does (``CUDAFunctions.h``).
    """
    first, *others = [*args, *kwargs.values()] or [None]
    on_device = _is_on(first, device)
    if name == "__getitem__" and on_device:  # A boolean mask calls nonzero on the device.
        indices = others[0] if isinstance(others[0], tuple) else others
        has_mask = any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)
        return "indexing with a mask" if has_mask else "", False
    if name != "to":
        return SYNC_CALLS.get(name, "") if on_device else "", False
    targets = {device_type(str(getattr(other, "device", other))) for other in others}
    # Among the positional arguments of a copy, ``non_blocking`` is the one that is ``True``.
    if any(argument is True for argument in (kwargs.get("non_blocking"), *args[1:])):
        return "", False
    if on_device:
        return ".to('cpu')" if "cpu" in targets else "", False
    return f".to({device!r})" if _is_on(first, "cpu") and device in targets else "", True


def _is_on(value: object, device: str) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor on a device type."""
    return isinstance(value, torch.Tensor) and value.device.type == device


# Owner of a code file. Python's own code includes modules such as ``logging``.
CodeOwner = Literal["user", "library", "torch", "python"]

HARNESS_FILE = workloads.__file__  # File that calls a step. Its callers are not part of the step.
PACKAGE = Path(__file__).parents[2]
# Directories of installed packages: of this environment, of the user, and of a base environment.
INSTALLED_FOLDERS = {"site-packages", "dist-packages"}

# torch's optimizers read counters that are stored on the CPU (``torch/optim/adam.py``), so these reads do not wait.
OPTIMIZERS = Path(torch.optim.__file__).parent

# Function of ``torch.nn.Module`` that runs ``forward`` (``torch/nn/modules/module.py``). It has no public name.
MODULE_CALL = "_call_impl"


def _find_user_line(frame: FrameType | None) -> tuple[str, int, str] | None:
    """Return the file, line and function of the user code that caused a frame.

    Frames of torch, Python and libraries are skipped: if a logger prints a tensor, the line is the call of the logger.

    Returns:
        The line, or ``None`` if the model of a library, an optimizer of torch or the measurement itself caused the frame.
    """
    is_library = False
    while frame is not None and frame.f_code.co_filename != HARNESS_FILE:
        code = frame.f_code
        owner = _code_owner(code.co_filename)
        if owner == "user":
            return _display_filename(code.co_filename), frame.f_lineno, code.co_name
        if owner == "torch" and OPTIMIZERS in Path(code.co_filename).parents:
            return None
        if owner == "torch" and is_library and code.co_name == MODULE_CALL:
            return None
        is_library = is_library or owner == "library"
        frame = frame.f_back
    return None


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
