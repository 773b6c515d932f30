"""A profile as a value: where the time of some steps went, and what held them up."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from ...devices.request import kind_of
from ...devices.simulation import MARK, NOTE
from ...errors import ConfigurationError, given_path
from ...interface.display import Report, Shown, Table
from ...quantities import counted
from ..comparison.comparison import shown_phase
from ..findings import WARNING, Finding, findings_table
from ..logbook.files import write_whole
from ..operators.fallbacks import Fallback
from ..workloads.split import Split
from ..workloads.workload import OWN_STEP
from .judgement import findings_of
from .operator_times import OperatorTime
from .synchronisation import Synchronisation

SCHEMA = "openmed_nb/profile/1"

SHOWN_OPERATORS = 12
"""How many operators the report shows."""


@dataclass(frozen=True, repr=False)
class Profile(Shown):
    """A narrow look at some steps.

    Attributes:
        name: What the person calls the model, or the function.
        task: ``"annotation"``, ``"forward pass"``, ``"training step"`` or ``"own step"``.
        device: The device.
        rows: How many texts, or rows, a step has.
        steps: How many steps torch's profiler saw.
        warm_up: How many came before any that counts.
        seconds: How long a step takes at full speed, data included: the median, in seconds.
        split: Where the time of a step goes, each phase waited for.
        data_only: How long it takes to get a batch and do nothing with it, in seconds: the mean.
        compute_only: How long a step takes with the same batch again and again, in seconds: the median.
        operators: The operators that take longest, by phase.
        operators_per_step: How many operators a step starts that compute something; views do not count.
        device_seconds: How long kernels run on the GPU in a step, in seconds; ``None`` where torch's profiler cannot see that.
        operator_seconds: How long operators compute in a step, in seconds, where that is on the CPU; else ``None``.
        starting_seconds: How long it takes to start the operators of a step, in seconds, by what operators with nothing to
            compute took in turn with the steps; ``None`` where torch's profiler sees the kernels, which tell more.
        synchronisations: The calls that wait for the device within a step, but for those of this package.
        fallbacks: The operators that fell back from MPS to the CPU, in ``watched`` steps.
        watched: How many steps were watched for both.
        workers: How many processes read ahead.
        dtype: The type of the model's numbers, where that is known.
        row_shape: The shape of a row, such as ``"3x224x224"``; ``None`` where that is not known, and where texts are read.
        simulated: Whether the device is simulated; no figure is then one of the device.
        batch_tokens: How many tokens a batch might have on the device; ``None`` where no texts were annotated.
    """

    name: str
    task: str
    device: str
    rows: int
    steps: int
    warm_up: int
    seconds: float
    split: Split
    data_only: float
    compute_only: float
    operators: tuple[OperatorTime, ...]
    operators_per_step: float
    device_seconds: float | None = None
    synchronisations: tuple[Synchronisation, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    watched: int = 1
    workers: int = 0
    dtype: str | None = None
    simulated: bool = False
    batch_tokens: int | None = None
    row_shape: str | None = None
    operator_seconds: float | None = None
    starting_seconds: float | None = None

    @property
    def shares(self) -> dict[str, float]:
        """Which part of a step each phase is, from 0 to 1."""
        return self.split.shares

    @property
    def microseconds_per_operator(self) -> float | None:
        """How long a step takes for each operator that it starts, data left out; ``None`` where none was seen.

        On the CPU it is the time of the operators alone, without that of the person's own Python.
        """
        seconds = self.compute_only if self.operator_seconds is None else self.operator_seconds
        return 1e6 * seconds / self.operators_per_step if self.operators_per_step else None

    @property
    def starting_share(self) -> float | None:
        """Which part of a step goes into starting operators, data left out, from 0 to 1; ``None`` where nobody knows.

        On the CPU it is the part of the time of the operators alone, without that of the person's own Python.
        """
        seconds = self.compute_only if self.operator_seconds is None else self.operator_seconds
        known = self.starting_seconds is not None and self.operators_per_step and seconds > 0
        return min(1.0, (self.starting_seconds or 0.0) / seconds) if known else None

    @property
    def hides_python(self) -> bool:
        """Whether a step may spend its time in the person's own Python, which nobody tells apart on this device."""
        return self.task == OWN_STEP and self.operator_seconds is None

    @property
    def kernel_share(self) -> float | None:
        """Which part of a step kernels run on the GPU, data left out, from 0 to 1; ``None`` where nobody sees that."""
        known = self.device_seconds is not None and self.compute_only > 0
        return min(1.0, (self.device_seconds or 0.0) / self.compute_only) if known else None

    @property
    def fallbacks_per_step(self) -> float:
        """How often operators fall back to the CPU in a step."""
        return sum(one.count for one in self.fallbacks) / self.watched

    @property
    def fallback_share(self) -> float:
        """Which part of the operators falls back to the CPU, by number, from 0 to 1."""
        return min(1.0, self.fallbacks_per_step / self.operators_per_step) if self.operators_per_step else 0.0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was looked for and how it is: ``"data"``, ``"synchronisation"``, ``"tiny batch"`` and ``"fallback"``."""
        return findings_of(self)

    @property
    def bottlenecks(self) -> tuple[str, ...]:
        """The names of the findings that warn."""
        return tuple(one.name for one in self.findings if one.status == WARNING)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists, numbers and strings, ready for JSON; no path, no shape and no text."""
        return {
            "schema": SCHEMA,
            **vars(self),
            "split": self.split.to_dict(),
            "operators": [one.to_dict() for one in self.operators],
            "microseconds_per_operator": self.microseconds_per_operator,
            "starting_share": self.starting_share,
            "kernel_share": self.kernel_share,
            "synchronisations": [one.to_dict() for one in self.synchronisations],
            "fallbacks": [one.to_dict() for one in self.fallbacks],
            "fallback_share": self.fallback_share,
            "findings": [one.to_dict() for one in self.findings],
            "bottlenecks": list(self.bottlenecks),
        }

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the profile as JSON, in the schema that its first key names.

        Args:
            file: Where; a file that is there is written over, in one step.

        Raises:
            ConfigurationError: Where it cannot be written.
        """
        target = given_path(file, "the file of a profile")
        try:
            write_whole(target, json.dumps(self.to_dict(), indent=2) + "\n")
        except OSError as error:
            what = f"{target.name!r} cannot be written: {error.strerror or type(error).__name__}."
            raise ConfigurationError(what, "Use a folder that is there and can be written.") from error

    def report(self) -> Report:
        """Return what there is to show: what holds the steps up; the figures stand in the HTML."""
        shown = f"{self.device}{MARK}" if self.simulated and kind_of(self.device) == "mps" else self.device
        title = f"Profile of {self.name} ({self.task}) on {shown}"
        how = f"{counted(self.steps, 'step')} of {counted(self.rows, 'row')}, after {self.warm_up} for warming up."
        sentences = ((NOTE,) if self.simulated else ()) + (how,)
        waits = tuple((one.call, str(one.place), f"{one.count:g}") for one in self.synchronisations)
        tables = (
            findings_table("", self.findings),
            Table("What waits for the device", ("call", "where", "times a step"), waits),
        )
        return Report(title, sentences, tables, figures=(self._time_table(), self._operator_table()))

    def _time_table(self) -> Table:
        rows = [
            ("a step at full speed", f"{1000 * self.seconds:.2f} ms"),
            ("data only", f"{1000 * self.data_only:.2f} ms"),
            ("the same batch again", f"{1000 * self.compute_only:.2f} ms"),
            *((f"phase {name}", shown_phase(self.split, name)) for name in self.split.seconds),
            ("operators a step", f"{self.operators_per_step:g}"),
        ]
        if self.microseconds_per_operator is not None:
            rows.append(("time for each operator", f"{self.microseconds_per_operator:.1f} µs"))
        parts = (
            ("starting operators", self.starting_seconds, self.starting_share),
            ("kernels on the GPU", self.device_seconds, self.kernel_share),
        )
        rows += [
            (name, f"{1000 * seconds:.2f} ms ({100 * share:.0f} %)")
            for name, seconds, share in parts
            if seconds is not None and share is not None
        ]
        return Table("Times of a step", ("what", "figure"), tuple(rows))

    def _operator_table(self) -> Table:
        rows = tuple(
            (
                one.operator,
                one.phase,
                f"{one.count:g}",
                f"{1000 * one.seconds:.3f}",
                "" if one.device_seconds is None else f"{1000 * one.device_seconds:.3f}",
            )
            for one in self.operators[:SHOWN_OPERATORS]
        )
        columns = ("operator", "phase", "times a step", "ms on the host", "ms on the GPU")
        return Table("Operators that take longest in a step, without those that they call", columns, rows)
