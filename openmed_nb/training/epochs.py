"""The epoch boundary: hand memory back, look at it, and judge the curve; in a loop, a ``with`` block or a decorator."""

from __future__ import annotations

import functools
import gc
import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from ..devices.memory import allocator
from ..errors import ConfigurationError, OpenMedWarning, number, shorten, whole_number, whole_or_none
from .curve import GROWING, GROWTH_GATE, MemoryCurve, MemorySample, check_processes, take_sample, this_process
from .holders import Holder, Holders, grown_holders, named_holders, who_holds

Hook = Callable[[MemoryCurve], Any]
"""What runs at a boundary: it gets the curve so far."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass(frozen=True)
class HookFailure:
    """A hook that raised: its name, the epoch, and the kind of the error; its text may be clinical."""

    hook: str
    epoch: int
    error: str

    def __str__(self) -> str:
        return f"The hook {self.hook} raised {self.error} after epoch {self.epoch}."


class EpochBoundary:
    """What happens between two epochs, in this order: forget, collect, empty the device's cache, look, judge.

    Args:
        device: Where the training runs.
        every: Also hand memory back and look at it every so many steps; ``None`` only at the ends of epochs.
        before: Hooks that run at the end of an epoch, before memory is handed back.
        after: Hooks that run at the end of an epoch, with the new sample in the curve.
        forget: What lets go of what the toolkit itself holds, such as the last batch that a guard keeps.
        gate: The growth over ten epochs that is suspect, as a share.
        limit: The share of the device's memory at which torch refuses more, where there is one.

    Attributes:
        curve: The samples so far, and the verdict.
        failures: Hooks that raised; the epoch, its sample and the hooks after it went on.
    """

    def __init__(  # noqa: PLR0913 - each is one thing that a person may want to say
        self,
        device: str,
        *,
        every: int | None = None,
        before: Iterable[Hook] = (),
        after: Iterable[Hook] = (),
        forget: Iterable[Callable[[], None]] = (),
        gate: float = GROWTH_GATE,
        limit: float | None = None,
    ) -> None:
        self.every = whole_or_none("every", every)
        self.before, self.after, self.forget = check_hooks(before), check_hooks(after), list(forget)
        self.gate, self.limit = number("gate", gate, such_as="0.26, which is 26 %"), limit
        self.begin(device)

    def begin(self, device: str, epoch: int = 0, step: int = 0) -> None:
        """Begin a new training, and a new curve with it.

        Args:
            device: Where it runs.
            epoch: How many epochs were done before, where a training goes on from a checkpoint.
            step: How many steps were done before.

        Raises:
            DeviceUnavailable: For one of several processes on MPS.
        """
        process = this_process()
        check_processes(device, process)
        self.curve = MemoryCurve(device, gate=self.gate, limit=self.limit, process=process)
        self.failures: tuple[HookFailure, ...] = ()
        self._start = time.perf_counter()
        self._epochs, self._steps = epoch, step
        self._steady: Holders | None = None
        allocator(device).reset_peak()

    @property
    def device(self) -> str:
        """Where the training runs."""
        return self.curve.device

    @property
    def verdict(self) -> str:
        """The verdict on the curve so far."""
        return self.curve.verdict

    def step(self) -> None:
        """Count a step; every so many steps, where that was asked for, memory is handed back too."""
        self._steps += 1
        if self.every and self._steps % self.every == 0:
            self._look(boundary=False)

    def boundary(self) -> MemorySample:
        """End an epoch: hand memory back and return the new sample."""
        self._epochs += 1
        known, before = len(self.failures), self.curve
        self._run(self.before)
        sample = self._look(boundary=True)
        self._compare_holders()
        self._run(self.after)
        failures = [f"{failure} The training went on; correct the hook." for failure in self.failures[known:]]
        for message in (*failures, *unseen_growth(before, self.curve)):  # Last: a filter may turn one into an error.
            warnings.warn(message, OpenMedWarning, stacklevel=2)
        return sample

    def epochs(self, epochs: int | Iterable[Any]) -> Epochs:
        """Return a loop over epochs, numbered from 0, that ends each with a boundary.

        Raises:
            ConfigurationError: For what is neither a number of epochs nor an iterable.
        """
        return Epochs(self, check_epochs(epochs))

    def __call__(self, train_epoch: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        """Return a function that trains an epoch, with the boundary after it; one that raises has not ended an epoch.

        Raises:
            ConfigurationError: For a coroutine or a generator function, which returns before it has trained.
        """
        if inspect.iscoroutinefunction(train_epoch) or inspect.isgeneratorfunction(train_epoch):
            raise ConfigurationError(
                f"{named(train_epoch)} returns before it has trained.",
                "Call boundary() where an epoch ends.",
            )

        @functools.wraps(train_epoch)
        def trained(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            result = train_epoch(*args, **kwargs)
            self.boundary()
            return result

        return trained

    def __enter__(self) -> EpochBoundary:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(self, *_error: object) -> None:
        self._hand_back()

    def _look(self, boundary: bool) -> MemorySample:
        """Hand memory back, and take a sample."""
        self._hand_back()
        seconds = time.perf_counter() - self._start
        sample = take_sample(self.device, self._epochs, self._steps, seconds, boundary)
        self.curve = self.curve.with_sample(sample)
        return sample

    def _hand_back(self) -> None:
        """Collect cycles before the cache is emptied, so that what they held can leave it."""
        for let_go in self.forget:
            let_go()
        gc.collect()
        allocator(self.device).empty_cache()

    def _compare_holders(self) -> None:
        """Remember what holds tensors after the warm-up, and where tensors use more memory now, find what holds more.

        Without a suspect growth only graphs are of interest: where a backward pass has freed their tensors, they are
        small, and still a mistake.
        """
        first, last = self.curve.boundaries[0], self.curve.boundaries[-1]
        if self._steady is None:
            self._steady = who_holds()
        growing = self.verdict == GROWING
        grown: tuple[Holder, ...] = ()
        if growing or (last.allocated or 0) > (first.allocated or 0):
            grown = grown_holders(self._steady, who_holds() if growing else named_holders())
        self.curve = self.curve.with_holders([holder for holder in grown if growing or holder.graphs > 1])

    def _run(self, hooks: Iterable[Hook]) -> None:
        for hook in hooks:
            try:
                hook(self.curve)
            except Exception as error:  # noqa: BLE001, PERF203 - whatever a person's hook does, training is worth more
                self.failures += (HookFailure(named(hook), self._epochs, type(error).__name__),)


@dataclass(frozen=True)
class Epochs:
    """A loop over epochs with a boundary after each, also after the last of a loop that is left early or by an error.

    Attributes:
        hooks: The boundary, with the curve.
    """

    hooks: EpochBoundary
    _epochs: Iterable[Any]

    @property
    def curve(self) -> MemoryCurve:
        """The samples so far, and the verdict."""
        return self.hooks.curve

    def step(self) -> None:
        """Count a step."""
        self.hooks.step()

    def __len__(self) -> int:
        return len(self._epochs)  # type: ignore[arg-type]  # a TypeError of Python's where there is no length

    def __iter__(self) -> Iterator[Any]:
        for epoch in self._epochs:
            try:
                yield epoch
            finally:
                self.hooks.boundary()


def unseen_growth(before: MemoryCurve, after: MemoryCurve) -> list[str]:
    """Return what a process says that shows no curve, at the boundary at which its memory began to grow.

    Example:
        >>> unseen_growth(MemoryCurve("cpu"), MemoryCurve("cpu"))
        []
    """
    process = after.process
    if process.leads or after.verdict != GROWING or before.verdict == GROWING:
        return []
    return [f"Process {process.rank} of {process.count} on {after.device}: {after.reason} {after.advice}"]


def check_hooks(hooks: Any) -> list[Hook]:
    """Return hooks as a list.

    Raises:
        ConfigurationError: For anything but functions in an iterable.

    Example:
        >>> check_hooks([print]) == [print]
        True
    """
    found = list(hooks) if isinstance(hooks, Iterable) else None
    if found is None or not all(callable(hook) and not inspect.iscoroutinefunction(hook) for hook in found):
        raise ConfigurationError(
            f"{shorten(repr(hooks))} is no list of hooks.", "Pass functions that take the curve, in a list."
        )
    return found


def check_epochs(epochs: Any) -> Iterable[Any]:
    """Return what there is to loop over: the numbers below a whole number, or an iterable as it is.

    Raises:
        ConfigurationError: For anything else.

    Example:
        >>> list(check_epochs(2)), check_epochs(["first", "second"])
        ([0, 1], ['first', 'second'])
    """
    count = whole_number(epochs)
    if count is not None and count >= 0:
        return range(count)
    if isinstance(epochs, Iterable) and not isinstance(epochs, (str, bytes)):
        return epochs
    raise ConfigurationError(f"{shorten(repr(epochs))} is no number of epochs.", "Pass a whole number from 0.")


def named(function: Callable[..., Any]) -> str:
    """Return the name of a function, without the function that it was defined in.

    Example:
        >>> named(print), named(dict.fromkeys)
        ('print', 'dict.fromkeys')
    """
    return shorten(str(getattr(function, "__qualname__", type(function).__qualname__)).rpartition("<locals>.")[2])
