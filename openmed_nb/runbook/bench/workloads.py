"""What is measured: steps of work in phases, over batches, on a device; how long they take, and where their time goes.

A step takes a batch from an iterator, which is the phase "data", and hands it from phase to phase. At full speed a step is
waited for at its end alone; phase by phase, the device is waited for after each, so that times say where they belong.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from ..._render.display import MARK, NOTE, OK, WARNING, Finding, Plain, Shown, milliseconds
from ..._utils.clock import now
from ...devices.backend import TENSOR_LOCK, random_numbers_from, random_numbers_kept, random_states
from ...devices.machine import mps_is_simulated
from ...devices.memory import SMALLER_BATCH, SMALLER_MODEL, empty_cache, out_of_memory_explained
from ...devices.registry import device_of

if TYPE_CHECKING:
    import torch

Name = TypeVar("Name")

# The tasks.
ANNOTATION, FORWARD_PASS, TRAINING_STEP, OWN_STEP = "annotation", "forward pass", "training step", "own step"

# The names of phases that are looked at; training adds its own.
DATA, TRANSFER, FORWARD, DECODE = "data", "transfer", "forward", "decode"

# A name, and what takes the value of the phase before it; the first phase takes a batch.
Phase = tuple[str, Callable[[Any], Any]]


@dataclass(frozen=True, repr=False)
class StepReport(Shown):
    """What every report of measured steps has.

    Attributes:
        name: What the person calls the model, or the function.
        task: ``"annotation"``, ``"forward pass"``, ``"training step"`` or ``"own step"``.
        dtype: The type of the model's numbers; ``None`` if it has none, or for a function.
        workers: How many processes of the loader read ahead.
        row_shape: The shape of a row, such as ``"3x224x224"``; ``None`` for texts, and if rows have no shape.
        simulated: Whether a simulated MPS device was on; then no figure of ``"mps"`` is one of MPS.
    """

    name: str
    task: str
    dtype: str | None = field(default=None, kw_only=True)
    workers: int = field(default=0, kw_only=True)
    row_shape: str | None = field(default=None, kw_only=True)
    simulated: bool = field(default=False, kw_only=True)

    WHEN_SIMULATED = (NOTE, "")  # The title marks only a device that is simulated, and the CPU is not.

    def shown(self, device: str) -> str:
        """Return the name of a device as it is shown, marked if it is simulated."""
        return f"{device}{MARK}" if self.simulated and device_of(device).can_be_simulated else device

    @property
    def data_remedy(self) -> str:
        """What to do where steps wait for their data."""
        return TOKENISE_MORE if self.task == ANNOTATION else MORE_WORKERS if self.workers else REMEDIES[DATA]


@dataclass(frozen=True)
class Workload:
    """Steps that can be measured."""

    name: str  # What the person calls the model, or the function.
    task: str  # One of the tasks.
    device: str  # As torch spells it.
    rows: int  # How many texts, or rows, a batch has.
    length: int | None  # How many tokens a row has; ``None`` if that differs, or if rows are not tokens.
    batches: Callable[[], Iterator[Any]]  # Begins the batches, again and again; they need not end.
    phases: tuple[Phase, ...]  # What is done with a batch, in order.
    workers: int = 0  # How many processes read ahead.
    dtype: str | None = None  # The type of the model's numbers, if it is known.
    ahead: int = 0  # How many batches the processes that read ahead hold ready together.
    # How many tokens a batch of texts may have on the device; ``None`` for other tasks.
    batch_tokens: int | None = None
    # How many batches of each number of rows a loader gave so far; empty if all have ``rows``.
    sizes: Counter[int] = field(default_factory=Counter)
    row_shape: str | None = None  # As in :class:`StepReport`.

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of :class:`StepReport`."""
        named = {name: getattr(self, name) for name in ("name", "task", "dtype", "workers", "row_shape")}
        return {**named, "simulated": mps_is_simulated()}

    @contextlib.contextmanager
    def begun(self) -> Iterator[Iterator[Any]]:
        """Begin the batches, and end them after a block, with the processes that read them ahead."""
        batches, what = self.batches(), f"A batch of {self.rows} rows"
        try:
            with out_of_memory_explained(what, self.device, SMALLER_BATCH):
                yield batches
        finally:
            getattr(batches, "close", lambda: None)()

    def drop_ready(self, batches: Iterator[Any]) -> None:
        """Take what a loader that reads ahead holds ready."""
        for _ in range(self.ahead):
            next(batches)

    def settle(self, batches: Iterator[Any]) -> None:
        """Bring a loader that reads ahead to where it is in a long run, after a pause in which it has filled up.

        What it holds ready is taken and not computed: after as many steps, a loader that is a little slower than the device
        would still hold some, and the steps that follow would not wait as they do in a long run. Then each worker gives a
        batch.
        """
        self.drop_ready(batches)
        for _ in range(self.workers):
            self.run(next(batches))

    def run(self, batch: Any, around: Callable[[str], Any] = contextlib.nullcontext) -> Any:
        """Do a step with a batch, to its end on the device, and return what the last phase gave; a block goes around each."""
        with TENSOR_LOCK:
            for name, phase in self.phases:
                with around(name):
                    batch = phase(batch)
            device_of(self.device).finish()
        return batch

    def seconds(self, batch: Any) -> float:
        """Return how long a step at full speed takes, in seconds, on a device with nothing else to do."""
        with TENSOR_LOCK:
            device_of(self.device).finish()
            begin = now()
            self.run(batch)
            return now() - begin

    def seconds_of_steps(self, batches: Iterator[Any], steps: int = 1) -> float:
        """Return how long a step takes at full speed, its data included, in seconds: the mean of several in a row."""
        device_of(self.device).finish()
        begin, apart = now(), 0.0
        for _ in range(steps):
            batch = next(batches)
            apart += starting(batches)
            self.run(batch)
        return (now() - begin - apart) / steps

    def seconds_of_phases(self, batches: Iterator[Any]) -> dict[str, float]:
        """Take the next batch and return how long each phase of its step takes, in seconds, each waited for."""
        value, seconds = next_batch(batches)
        times = {DATA: seconds}
        with TENSOR_LOCK:
            device_of(self.device).finish()
            for name, phase in self.phases:
                begin = now()
                value = phase(value)
                device_of(self.device).finish()
                times[name] = now() - begin
        return times

    def split(self, batches: Iterator[Any], steps: int, fewest: int = 0) -> Split:
        """Return where the time of so many steps goes, or of fewer if they are slow."""
        measured = series(lambda: self.seconds_of_phases(batches), steps, max(FEWEST, fewest))
        meanwhile = self.task == ANNOTATION and device_of(self.device).is_accelerator
        return replace(split_of(measured, self.typical), meanwhile=meanwhile)

    @property
    def typical(self) -> Callable[[list[float]], float]:
        """What is taken of the seconds of several steps.

        Texts lie in memory, and what one batch of them takes longer than another was another program: the median. A loader
        keeps only some steps waiting: the mean.
        """
        return statistics.median if self.task == ANNOTATION else statistics.fmean

    @property
    def usual_rows(self) -> int:
        """The median number of rows of a batch."""
        return statistics.median_low(self.sizes.elements()) if self.sizes else self.rows

    @property
    def mean_rows(self) -> float:
        return statistics.fmean(self.sizes.elements()) if self.sizes else self.rows

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device(self.device)


def starting(batches: Iterator[Any]) -> float:
    """Return how many seconds of the last batch went into starting a loader's processes, which belong to no step."""
    return float(getattr(batches, "starting", 0.0))


def next_batch(batches: Iterator[Any]) -> tuple[Any, float]:
    """Return the next batch, and how long it takes to get it, in seconds."""
    begin = now()
    batch = next(batches)
    return batch, now() - begin - starting(batches)


class Bench(Protocol):
    """A model, or a function, on a device, ready to be measured with batches of any size."""

    @property
    def device(self) -> str: ...

    def bucket(self, rows: int) -> Workload:
        """Return steps over batches of one shape that lie ready on the host."""

    def stream(self, rows: int | None = None) -> Workload:
        """Return steps over batches as they come: texts that are read and tokenised, or what a loader gives."""


@dataclass(frozen=True)
class Subject:
    """What a person wants measured, before a device is chosen."""

    name: str  # What the person calls it.
    task: str  # One of the tasks.
    # Puts it on a device, beside what the session holds, and leaves what the person passed as it is.
    on: Callable[[str], Bench]
    data: Any = None  # What the person passed as data, unless these are texts.


# A phase that takes more than this share of a step dominates: whatever else is made faster, it stays the larger part.
DOMINATES = 0.5

# A loader that keeps a step waiting for more than this share of it is slow: without the wait, a third more steps are done.
DATA_SHARE = 0.25

# What to do about each phase that should not dominate.
REMEDIES: Mapping[str, str] = {
    DATA: "Read ahead with workers, prepare the data once and keep it, or see nb.training.loader.check().",
    TRANSFER: "Copy less often and more at once: a larger batch, and smaller types for labels and masks.",
    DECODE: "Bring less to the host: labels and scores, not all logits.",
}
MORE_WORKERS = (
    "Read ahead with more workers, kept with persistent_workers=True, prepare the data once and keep it, "
    "or see nb.training.loader.check()."
)
TOKENISE_MORE = "Tokenise on more cores: nb.cluster(...) spreads texts over several computers. A larger model or longer texts keep the device busy."


@dataclass(frozen=True)
class Split(Plain):
    """The phases of a step, each waited for.

    Attributes:
        seconds: How long each phase takes, in seconds, in their order.
        meanwhile: Whether data are prepared while the device computes, as :func:`annotate` does on a GPU.

    Example:
        >>> Split({"data": 3.0, "forward": 1.0}).shares
        {'data': 0.75, 'forward': 0.25}
        >>> Split({"data": 3.0, "forward": 1.0}, meanwhile=True).waits
        {'data': 2.0, 'forward': 1.0}
    """

    seconds: Mapping[str, float]
    meanwhile: bool = False

    ALSO = ("shares", "dominating")

    @property
    def waits(self) -> dict[str, float]:
        """How long a step waits for each phase, in seconds: for data prepared meanwhile, as long as they outlast the forward pass."""
        hidden = self.seconds.get(FORWARD, 0.0) if self.meanwhile else 0.0
        return {name: max(0.0, one - hidden) if name == DATA else one for name, one in self.seconds.items()}

    @property
    def shares(self) -> dict[str, float]:
        """Which part of a step each phase is that is waited for, from 0 to 1."""
        total = sum(self.waits.values())
        return {name: seconds / total if total else 0.0 for name, seconds in self.waits.items()}

    @property
    def dominating(self) -> str | None:
        """The phase that takes more than half of a step, ``None`` if none does."""
        return next((name for name, share in self.shares.items() if share > DOMINATES), None)

    def finding(self, name: str, data_remedy: str) -> Finding:
        """Return what to think of it, under a name, with what to do about data that dominate."""
        main = self.dominating
        words = f"{main} dominates" if main else "no phase takes more than half of a step"
        remedy = data_remedy if main == DATA else REMEDIES.get(main or "", "")
        return Finding(name, WARNING if remedy else OK, words, remedy)

    def shown(self, name: str) -> str:
        """Return the time and the share of a phase as they are shown, empty for one that the step does not have."""
        if name not in self.seconds:
            return ""
        return f"{milliseconds(self.waits[name])} ({100 * self.shares[name]:.0f} %)"


@dataclass(frozen=True)
class OperatorTime(Plain):
    """An operator in one phase.

    Attributes:
        operator: Its name, such as ``"aten::addmm"``.
        phase: The phase in which it is called.
        count: How often in a step.
        seconds: How long the host is busy with it in a step, in seconds, without the operators that it calls: each of its
            calls counts as long as in the median of the steps.
        device_seconds: How long its kernels run on the GPU in a step, in seconds; ``None`` if torch's profiler does not see
            the device, as with MPS.
        starting_seconds: How much of ``seconds`` goes into starting it: of each call as much as an operator takes that has
            nothing to compute. ``None`` if no such operator was run.
    """

    operator: str
    phase: str
    count: float
    seconds: float
    device_seconds: float | None = None
    starting_seconds: float | None = None


@dataclass(frozen=True, order=True)
class CodePlace(Plain):
    """A line of a person's own code, or the library in which a model that was called from there does something.

    Attributes:
        file: The name of the file without its folder, or of the cell; empty if no code of the person was running.
        line: The number of the line, 0 if there is none.
        function: The name of the function.
        library: The module of a library in whose model it happened; empty if the person's own line asked for it, though
            through a library, such as one that shows progress.
        in_model: Whether it happened in a model of a library, which the person cannot change.
    """

    file: str = ""
    line: int = 0
    function: str = ""
    library: str = ""
    in_model: bool = False

    ALSO = ("is_own",)

    @property
    def is_own(self) -> bool:
        """Whether the person's own line asked for it."""
        return bool(self.file) and not self.in_model

    def __str__(self) -> str:
        own = f"{self.file}:{self.line}" + (f" in {self.function}" if self.function.isidentifier() else "")
        return own if self.is_own else f"inside of {self.library}"


# Why a call waits: numbers of the device are needed on the host; the batch is copied to the device, before the step has
# started anything there; or something else is, which waits for all that the step has started until then.
Reason = Literal["read", "batch", "copy"]


@dataclass(frozen=True)
class Synchronisation(Plain):
    """A call that waits for the device.

    Attributes:
        call: What is called, such as ``".item()"``.
        place: Where.
        count: How often in a step.
        reason: Why it waits: ``"read"`` for numbers that the host needs, ``"batch"`` for a copy to the device before the
            step has started anything there, ``"copy"`` for a later one.
    """

    call: str
    place: CodePlace
    count: float
    reason: Reason = "read"

    FLAT: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "place": {name: name for name in ("file", "line", "function", "library", "in_model", "is_own")}
    }

    def __str__(self) -> str:
        return f"{self.call} at {self.place}" if self.place.is_own else f"{self.call} {self.place}"


def split_of(steps: Sequence[Mapping[str, float]], typical: Callable[[list[float]], float] = statistics.fmean) -> Split:
    """Return how long each phase of measured steps typically takes."""
    names = dict.fromkeys(name for step in steps for name in step)
    return Split({name: typical([step[name] for step in steps]) for name in names})


@contextlib.contextmanager
def generators_kept(data: Any) -> Iterator[None]:
    """Let the random generators of a loader and of its samplers go on after a block from where they were."""
    import torch

    loader = data if isinstance(data, torch.utils.data.DataLoader) else None
    batches = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = (getattr(holder, "generator", None) for holder in holders)
    states = [(one, one.get_state()) for one in found if isinstance(one, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


@contextlib.contextmanager
def put_on_devices(
    subject: Subject, devices: Sequence[str], tell: Callable[[str], None] = lambda _device: None
) -> Iterator[dict[str, Bench]]:
    """Put a subject on devices for a block, telling which is made ready.

    Afterwards the memory is handed back, and random numbers go on as if nothing had been computed.
    """
    benches: dict[str, Bench] = {}
    try:
        with contextlib.ExitStack() as kept:
            kept.enter_context(generators_kept(subject.data))
            kept.enter_context(random_numbers_kept())
            for device in devices:
                tell(device)
                kept.enter_context(random_numbers_from(random_states(device)))
                with out_of_memory_explained(subject.name, device, SMALLER_MODEL):
                    benches[device] = subject.on(device)
            yield benches
    finally:
        benches.clear()
        gc.collect()
        for device in devices:
            empty_cache(device)


def whole_rounds(steps: int, workers: int) -> int:
    """Return a number of steps, or some more, in which each worker of a loader gives as many batches as the others.

    Example:
        >>> whole_rounds(10, 4), whole_rounds(10, 0), whole_rounds(1, 2)
        (12, 10, 2)
    """
    return steps + -steps % max(1, workers)


def in_turn(measures: Mapping[Name, Callable[[], float]], rounds: Iterable[int]) -> dict[Name, list[float]]:
    """Return what is measured in rounds, of which each begins with the next one.

    Example:
        >>> in_turn({"cpu": lambda: 2.0, "mps": lambda: 1.0}, range(3))
        {'cpu': [2.0, 2.0, 2.0], 'mps': [1.0, 1.0, 1.0]}
    """
    names, found = list(measures), {name: list[float]() for name in measures}
    for number in rounds:
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            found[name].append(measures[name]())
    return found


# A series of slow steps is cut short after LONGEST seconds, once it has FEWEST steps.
LONGEST, FEWEST = 3.0, 5


def series(measure: Callable[[], Any], steps: int, fewest: int = FEWEST) -> list[Any]:
    """Return what ``measure`` returns for each of so many steps, or for fewer if they are slow."""
    begin, measured = now(), []
    for number in range(steps):
        if number >= fewest and now() - begin > LONGEST:
            break
        measured.append(measure())
    return measured
