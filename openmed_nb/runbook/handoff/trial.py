"""The smoke test's measurement: texts a second, and the memory after each round, judged as that of a training is."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from ...devices.allocators import empty_cache
from ...devices.simulation import MARK, NOTE, active, shows_simulated
from ...errors import ConfigurationError, shorten
from ...interface.display import Report, Shown, Table
from ...training.curve import MemoryCurve
from ...training.samples import take_sample
from ...training.verdict import GATE_EPOCHS
from ..workloads.clock import now

if TYPE_CHECKING:
    from ..workloads.workload import Bench

ROUNDS = GATE_EPOCHS
"""After how many rounds memory is judged; the gate of memory growth is over as many epochs."""

STEPS = 3
"""How many steps a round has."""

WARM_UP = 2
"""Steps that are not timed: the first one of each shape is slower, most of all on MPS."""

LIMITS = {"batch_size": (1, 4096), "rounds": (4, 1000), "steps": (1, 1000)}
"""The least and the most of each number of a trial; a bundle comes from somebody else, and its trial has to end."""


def check_numbers(asked: Any) -> None:
    """Check the numbers of a trial.

    Args:
        asked: What has ``batch_size``, ``rounds`` and ``steps``.

    Raises:
        ConfigurationError: For the first that is out of its limits.
    """
    for name, (least, most) in LIMITS.items():
        number = getattr(asked, name)
        if type(number) is not int or not least <= number <= most:
            what = f"{name} cannot be {shorten(repr(number))}."
            raise ConfigurationError(what, f"Pass a whole number from {least} to {most:,}.")


@dataclass(frozen=True, repr=False)
class Trial(Shown):
    """What was measured.

    Attributes:
        name: What a person calls the model.
        device: Where it ran, marked where it is simulated.
        batch_size: How many texts a step reads.
        texts_per_second: Of each round.
        curve: The memory after each round, the first one a warm-up.
    """

    name: str
    device: str
    batch_size: int
    texts_per_second: tuple[float, ...]
    curve: MemoryCurve

    @property
    def simulated(self) -> bool:
        """Whether the device was a simulated one."""
        return shows_simulated(self.device)

    @property
    def fastest(self) -> float:
        """Texts a second in the fastest round: what other programs disturb least."""
        return max(self.texts_per_second)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists, strings and numbers, ready for JSON."""
        return {
            "name": self.name,
            "device": self.device,
            "batch_size": self.batch_size,
            "texts_per_second": list(self.texts_per_second),
            "fastest": self.fastest,
            "memory": self.curve.to_dict(),
        }

    def report(self) -> Report:
        """Return what became of the memory; times stand in the HTML alone."""
        rows = (("fastest round", f"{self.fastest:.1f}"), ("middle round", f"{median(self.texts_per_second):.1f}"))
        return Report(
            f"Trial of {self.name} on {self.device}: memory is {self.curve.verdict}",
            (NOTE,) if self.simulated else (),
            figures=(Table("Texts a second", ("round", "texts a second"), rows), *self.curve.report().tables),
        )


def measure(bench: Bench, batch_size: int, rounds: int = ROUNDS, steps: int = STEPS) -> Trial:
    """Annotate the texts of a bench again and again, and look at times and memory.

    Args:
        bench: The model with its texts.
        batch_size: How many texts a step reads.
        rounds: After how many rounds memory is judged; one more goes before them.
        steps: How many steps a round has.
    """
    stream = bench.stream(batch_size)
    batches, begin = stream.batches(), now()
    for _ in range(WARM_UP):
        stream.run(next(batches))
    curve, rates = MemoryCurve(stream.device), []
    for number in range(1, rounds + 2):
        started = now()
        for _ in range(steps):
            stream.run(next(batches))
        rates.append(batch_size * steps / (now() - started))
        gc.collect()
        empty_cache(stream.device)
        curve = curve.with_sample(take_sample(stream.device, number, number * steps, now() - begin))
    mark = MARK if active() and stream.device.startswith("mps") else ""
    return Trial(stream.name, f"{stream.device}{mark}", batch_size, tuple(rates), curve)
