"""How steps are run and timed: at full speed, or phase by phase."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from ...devices.backend import finish
from ...devices.memory import is_out_of_memory
from ...devices.random_state import random_numbers_from, random_states
from ...errors import ConfigurationError, DeviceUnavailable, cause, shorten
from ..operators.copies import random_numbers_kept
from ..workloads.workload import Workload
from .split import Split, split_of


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
        if not is_out_of_memory(error):
            raise
        raise DeviceUnavailable(f"{what} does not fit in the memory of {device}: {cause(error)}.", remedy) from error


@contextlib.contextmanager
def same_random_numbers(device: str) -> Iterator[None]:
    """Let the random numbers of the host and of a device go on afterwards as if nothing had been computed."""
    with random_numbers_kept(), random_numbers_from(random_states(device)):
        yield


def seconds_of_step(workload: Workload, batches: Iterator[Any], steps: int = 1) -> float:
    """Return how long a step takes at full speed, its data included, in seconds: the mean of some in a row."""
    finish(workload.torch_device)
    begin = time.perf_counter()
    for _ in range(steps):
        workload.run(next(batches))
    return (time.perf_counter() - begin) / steps


def split_of_steps(workload: Workload, batches: Iterator[Any], steps: int) -> Split:
    """Return where the time of some steps goes."""
    return split_of([workload.seconds_of_phases(batches) for _ in range(steps)])


def checked_count(name: str, value: Any, least: int = 1) -> int:
    """Return a number of something.

    Raises:
        ConfigurationError: For anything but a whole number from the least.

    Example:
        >>> checked_count("steps", 0)
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: steps cannot be 0. Pass a whole number from 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} cannot be {shorten(repr(value))}.", f"Pass a whole number from {least}.")
    return value
