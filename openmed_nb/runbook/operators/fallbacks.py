"""The ledger of what really fell back from MPS to the CPU while a program ran."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...devices.backend import import_torch
from ...devices.moving import module_in
from ...devices.simulated import active
from ...display import MARK, NOTE, Report, Shown, Table
from .calls import Place
from .table import operator_table

if TYPE_CHECKING:
    from .recorders import Fall, Record

FELL_BACK, REFUSED = "fell back to the CPU", "met an error"

SAID_OF = {FELL_BACK: "", REFUSED: " Set PYTORCH_ENABLE_MPS_FALLBACK=1 before torch is imported."}
"""What to do about each outcome."""

OUTSIDE = "Only MPS has operators that fall back to the CPU, and nothing was computed on MPS here."
NOTHING = "Nothing fell back to the CPU."


@dataclass(frozen=True)
class Fallback:
    """An operator that fell back, in one module and one phase.

    Attributes:
        operator: How MPS names it in its messages, such as ``"aten::_linalg_eigh.eigenvalues"``.
        outcome: ``"fell back to the CPU"``, or ``"met an error"`` where falling back is off.
        phase: ``"forward"``, ``"backward"`` or ``"elsewhere"``.
        place: The module that was running; empty in a backward pass, and outside of every module.
        count: How often.
        seconds: How long the calls took, copies included, of the outermost operators in which it happened; ``None`` on a
            simulated device, whose seconds are none of MPS.
    """

    operator: str
    outcome: str
    phase: str
    place: Place
    count: int
    seconds: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as a mapping, ready for JSON."""
        place = {"module": self.place.module, "class": self.place.kind}
        return {**{name: value for name, value in vars(self).items() if name != "place"}, **place}


@dataclass(frozen=True, repr=False)
class FallbackLedger(Shown):
    """What fell back to the CPU since the ledger was opened; it can be read while it is open, and afterwards.

    Attributes:
        device_is_there: Whether torch had an MPS device when it was opened.
        simulated: Whether that was a simulated one.
    """

    device_is_there: bool
    simulated: bool
    _record: Record = field(repr=False)

    @property
    def entries(self) -> tuple[Fallback, ...]:
        """The operators that fell back, the most frequent first."""
        groups: dict[tuple[str, str, str, Place], list[Fall]] = {}
        for fall in self._record.all_falls():
            outcome = REFUSED if fall.refused else FELL_BACK
            groups.setdefault((fall.operator, outcome, fall.sighting.phase, fall.sighting.place), []).append(fall)
        entries = [Fallback(*key, len(falls), self._seconds(falls)) for key, falls in groups.items()]
        return tuple(sorted(entries, key=lambda entry: (-entry.count, entry.operator, entry.phase, entry.place)))

    @property
    def count(self) -> int:
        """How often anything fell back."""
        return sum(entry.count for entry in self.entries if entry.outcome == FELL_BACK)

    @property
    def operators(self) -> tuple[str, ...]:
        """The different operators that fell back or were refused, in alphabetical order."""
        return tuple(sorted({entry.operator for entry in self.entries}))

    @property
    def verdict(self) -> str:
        """What happened, in one sentence for each outcome."""
        said = [self._said(outcome) for outcome in (FELL_BACK, REFUSED)]
        nothing = NOTHING if self._record.operators else OUTSIDE
        return " ".join(sentence for sentence in said if sentence) or nothing

    def _said(self, outcome: str) -> str:
        entries = [entry for entry in self.entries if entry.outcome == outcome]
        count, names = sum(entry.count for entry in entries), sorted({entry.operator for entry in entries})
        calls = "1 call" if count == 1 else f"{count} calls"
        return f"{calls} {outcome}: {', '.join(names)}.{SAID_OF[outcome]}" if count else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the ledger as a mapping, ready for JSON; seconds are left out of a simulated device."""
        return {
            "verdict": self.verdict,
            "device_is_there": self.device_is_there,
            "simulated": self.simulated,
            "count": self.count,
            "operators_on_mps": self._record.operators,
            "entries": [entry.to_dict() for entry in self.entries],
        }

    def report(self) -> Report:
        """Return what there is to show: what fell back and where; the seconds are among the figures."""
        entries = self.entries
        rows = tuple(
            (entry.operator, entry.outcome, entry.phase, str(entry.place), str(entry.count)) for entry in entries
        )
        timed = tuple(
            (entry.operator, entry.phase, str(entry.place), f"{entry.seconds:.4f}")
            for entry in entries
            if entry.seconds is not None
        )
        return Report(
            f"Fallbacks of MPS{MARK if self.simulated else ''}",
            (*((NOTE,) if self.simulated else ()), self.verdict),
            (Table("", ("operator", "what happened", "phase", "module", "times"), rows),),
            figures=(Table("How long it took", ("operator", "phase", "module", "seconds"), timed),),
        )

    def _seconds(self, falls: list[Fall]) -> float | None:
        if self.simulated:
            return None
        sightings = {id(fall.sighting): fall.sighting for fall in falls}  # One operator may hold several.
        return sum(sighting.seconds or 0.0 for sighting in sightings.values())


@contextmanager
def fallbacks(model: Any = None) -> Iterator[FallbackLedger]:
    """Write down what falls back to the CPU; see :func:`openmed_nb.fallbacks`."""
    module = None if model is None else module_in(model, "Pass a torch module, a pipeline, or nothing.")
    torch = import_torch()
    from .recorders import Record, recording

    record = Record(operator_table())
    ledger = FallbackLedger(torch.backends.mps.is_available(), active(), record)
    with recording(record, module):
        yield ledger
