"""How work is put on devices, and how its steps are run and timed: at full speed, or phase by phase."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...devices.allocators import empty_cache
from ...devices.backend import finish
from ...devices.memory import is_out_of_memory
from ...devices.random_state import random_numbers_from, random_states
from ...errors import DeviceUnavailable, cause
from ..operators.copies import random_numbers_kept
from .batches import generators_kept
from .clock import now
from .split import Split, split_of
from .workload import Bench, Subject, Workload, starting

LONGEST, FEWEST = 3.0, 5
"""A series of steps ends after so many seconds, where it has so many steps, though more are asked for."""

TORCH_SAYS = re.compile(
    r"(CUDA|HIP|MPS backend) out of memory|Invalid buffer size|\[enforce fail at |could not (create|execute) a (primitive|memory)"
    r"|CUDA error: CUBLAS_STATUS|cuDNN error: CUDNN_STATUS"
)
"""How torch's own messages about a lack of memory begin; ``devices.memory`` names their sources."""


@contextlib.contextmanager
def put_on_devices(
    subject: Subject, devices: Sequence[str], tell: Callable[[str], None] = lambda _device: None
) -> Iterator[dict[str, Bench]]:
    """Put a subject on devices for a block, and hand the memory back after it.

    Args:
        subject: What is measured.
        devices: Where.
        tell: Is told which device is made ready.

    Raises:
        DeviceUnavailable: Where the subject itself does not fit in the memory of a device.
    """
    benches: dict[str, Bench] = {}
    kept = contextlib.ExitStack()
    kept.enter_context(generators_kept(subject.data))
    try:
        for device in devices:
            tell(device)
            with out_of_memory_explained(subject.name, device, "Pass a smaller model, or other devices."):
                benches[device] = subject.on(device)
        yield benches
    finally:
        kept.close()
        benches.clear()
        gc.collect()
        for device in devices:
            empty_cache(device)


@contextlib.contextmanager
def begun(workload: Workload) -> Iterator[Iterator[Any]]:
    """Begin the batches of a workload, and end them after a block, with the processes that read them ahead.

    Raises:
        DeviceUnavailable: Where a batch does not fit in the memory of the device.
    """
    batches, what = workload.batches(), f"A batch of {workload.rows} rows"
    try:
        with out_of_memory_explained(
            what, workload.device, "Pass a smaller batch_size; nb.sweep() finds one that fits."
        ):
            yield batches
    finally:
        getattr(batches, "close", lambda: None)()


@contextlib.contextmanager
def out_of_memory_explained(what: str, device: str, remedy: str) -> Iterator[None]:
    """Say what does not fit in the memory of a device, and what can be done.

    Example:
        >>> with out_of_memory_explained("A batch of 9 rows", "mps", "Pass a smaller batch_size."):
        ...     raise RuntimeError("MPS backend out of memory")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.DeviceUnavailable: A batch of 9 rows does not fit in the memory of mps: \
MPS backend out of memory. Pass a smaller batch_size.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, DeviceUnavailable) or not is_out_of_memory(error):  # Of two devices, one has said it.
            raise
        raise DeviceUnavailable(f"{what} does not fit in the memory of {device}: {said(error)}.", remedy) from error


def said(error: BaseException) -> str:
    """Return what torch says about a lack of memory; of an error of someone else the type, because its text may be anything.

    Example:
        >>> said(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")), said(MemoryError("a note"))
        ('CUDA out of memory. Tried to allocate 2.00 GiB', 'MemoryError')
    """
    return cause(error) if isinstance(error, RuntimeError) and TORCH_SAYS.match(str(error)) else type(error).__name__


@contextlib.contextmanager
def same_random_numbers(device: str) -> Iterator[None]:
    """Let the random numbers of the host and of a device go on afterwards as if nothing had been computed."""
    with random_numbers_kept(), random_numbers_from(random_states(device)):
        yield


def drop_ready(workload: Workload, batches: Iterator[Any]) -> None:
    """Take what a loader that reads ahead holds ready."""
    for _ in range(workload.ahead):
        next(batches)


def settle(workload: Workload, batches: Iterator[Any]) -> None:
    """Bring a loader that reads ahead to where it is in a long run, after a pause in which it has filled up.

    What it holds ready is taken and not computed: after as many steps, a loader that is a little slower than the device
    would still hold some, and the steps that follow would not wait as they do in a long run. Then each worker gives a batch.
    """
    drop_ready(workload, batches)
    for _ in range(workload.workers):
        workload.run(next(batches))


def whole_rounds(steps: int, workers: int) -> int:
    """Return a number of steps, or some more, in which each worker of a loader gives as many batches as the others.

    Example:
        >>> whole_rounds(10, 4), whole_rounds(10, 0), whole_rounds(1, 2)
        (12, 10, 2)
    """
    return steps + -steps % max(1, workers)


def seconds_of_step(workload: Workload, batches: Iterator[Any], steps: int = 1) -> float:
    """Return how long a step takes at full speed, its data included, in seconds: the mean of some in a row."""
    finish(workload.torch_device)
    begin, apart = now(), 0.0
    for _ in range(steps):
        batch = next(batches)
        apart += starting(batches)
        workload.run(batch)
    return (now() - begin - apart) / steps


def series(measure: Callable[[], Any], steps: int, fewest: int = FEWEST) -> list[Any]:
    """Return what some steps measure; slow ones are cut short after some seconds, and so many are there in any case."""
    begin, measured = now(), []
    for number in range(steps):
        if number >= fewest and now() - begin > LONGEST:
            break
        measured.append(measure())
    return measured


def split_of_steps(workload: Workload, batches: Iterator[Any], steps: int, fewest: int = 0) -> Split:
    """Return where the time of some steps goes."""
    measured = series(lambda: workload.seconds_of_phases(batches), steps, max(FEWEST, fewest))
    return split_of(measured, workload.typical)
