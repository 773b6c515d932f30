"""``nb.runbook.fallbacks``: the ledger of what really fell back from MPS to the CPU while a program ran."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...._render.display import Displayable, Report, Table, pluralize
from ....devices.backend import import_torch
from ....devices.machine import is_mps_simulated
from ....devices.moving import get_module
from ....devices.profilers import push_modes
from .table import ModuleLocation, ModuleRow, operator_table

if TYPE_CHECKING:
    from .recorders import FallbackEvent, FallbackRecorder

FELL_BACK = "fell back to the CPU"
REFUSED = "met an error"

# What to do about each outcome.
REMEDIES = {FELL_BACK: "", REFUSED: " Set PYTORCH_ENABLE_MPS_FALLBACK=1 before torch is imported."}


@dataclass(frozen=True)
class Fallback(ModuleRow):
    """An operator that fell back, in one module and one phase.

    Attributes:
        operator: How MPS names it in its messages, such as ``"aten::special_ndtri.out"``.
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
    module_location: ModuleLocation
    count: int
    seconds: float | None


@dataclass(frozen=True, repr=False)
class FallbackLog(Displayable):
    """What fell back to the CPU since the ledger was opened; it can be read while it is open, and afterwards.

    Attributes:
        device_available: Whether torch had an MPS device when it was opened.
        simulated: Whether that was a simulated one.
    """

    device_available: bool
    simulated: bool
    _record: FallbackRecorder = field(repr=False)

    JSON_EXCLUDE = ("_record",)
    JSON_PROPERTIES = ("verdict", "count", "operators_on_mps", "entries")

    @property
    def entries(self) -> tuple[Fallback, ...]:
        """The operators that fell back, the most frequent first."""
        groups: dict[tuple[str, str, str, ModuleLocation], list[FallbackEvent]] = {}
        for fall in self._record.all_events():
            outcome = REFUSED if fall.refused else FELL_BACK
            groups.setdefault((fall.operator, outcome, fall.sighting.phase, fall.sighting.place), []).append(fall)
        entries = []
        for key, falls in groups.items():
            sightings = {id(fall.sighting): fall.sighting for fall in falls}  # One operator may hold several falls.
            seconds = None if self.simulated else sum(one.seconds or 0.0 for one in sightings.values())
            entries.append(Fallback(*key, len(falls), seconds))
        return tuple(
            sorted(entries, key=lambda entry: (-entry.count, entry.operator, entry.phase, entry.module_location))
        )

    @property
    def count(self) -> int:
        """How often anything fell back."""
        return sum(entry.count for entry in self.entries if entry.outcome == FELL_BACK)

    @property
    def operators(self) -> tuple[str, ...]:
        """The different operators that fell back or were refused, in alphabetical order."""
        return tuple(sorted({entry.operator for entry in self.entries}))

    @property
    def operators_on_mps(self) -> int:
        """How many operators were called with a tensor of MPS, without those inside of others."""
        return self._record.operators

    @property
    def verdict(self) -> str:
        """What happened, in one sentence for each outcome."""
        sentences = []
        for outcome, remedy in REMEDIES.items():
            entries = [entry for entry in self.entries if entry.outcome == outcome]
            if entries:
                calls = pluralize(sum(entry.count for entry in entries), "call")
                names = ", ".join(sorted({entry.operator for entry in entries}))
                sentences.append(f"{calls} {outcome}: {names}.{remedy}")
        if sentences:
            return " ".join(sentences)
        if self._record.operators:
            return "Nothing fell back to the CPU."
        return "Only MPS has operators that fall back to the CPU, and nothing was computed on MPS here."

    def to_report(self) -> Report:
        """Return what there is to show: what fell back and where; the seconds are among the figures."""
        entries = self.entries
        rows = tuple(
            (one.operator, one.outcome, one.phase, str(one.module_location), str(one.count)) for one in entries
        )
        timed = tuple(
            (one.operator, one.phase, str(one.module_location), f"{one.seconds:.4f}")
            for one in entries
            if one.seconds is not None
        )
        return Report(
            "Fallbacks of MPS",
            (self.verdict,),
            (Table("", ("operator", "what happened", "phase", "module", "times"), rows),),
            metrics=(Table("How long it took", ("operator", "phase", "module", "seconds"), timed),),
        )


@contextmanager
def fallbacks(model: Any = None) -> Iterator[FallbackLog]:
    """Write down what really falls back from MPS to the CPU in a block: which operators, how often, where, how long.

    Args:
        model: The model whose modules are named, or a pipeline; ``None`` to name those of whatever module is called.

    Returns:
        A context manager that gives the ledger. Its ``entries`` have, for each operator, module and phase
        (``"forward"``, ``"backward"`` or ``"elsewhere"``), ``count`` and ``seconds``; ``verdict`` is one sentence. Its text
        has no seconds, and is the same in every run.

    Raises:
        ConfigurationError: For anything that is not a model.

    torch by itself warns of the first fallback of the process only. In the block it warns of each
    (``torch.set_warn_always``), and the ledger takes those warnings, which name the operators, also inside of others; every
    other warning goes where it went before. A mode of torch measures the outermost operators and waits for each before and
    after, except in a backward pass, where waiting counts too; hooks of all modules tell which one is running. Where
    falling back is off, torch's error passes through, and the ledger keeps what it saw. Warnings, hooks and settings are
    given back in any case. The ledger sees the thread that opens it.

    Example:
        >>> import torch
        >>> from openmed_nb import simulated_mps
        >>> with simulated_mps(fallback=True), fallbacks() as ledger:
        ...     mode = torch.ones(3, device="mps").mode()
        >>> ledger.entries[0].operator, ledger.entries[0].count
        ('aten::mode', 1)
    """
    module = None if model is None else get_module(model, "Pass a torch module, a pipeline, or nothing.")
    torch = import_torch()
    from .recorders import FALLBACK_PATTERN, FallbackRecorder, WarningInterceptor

    record = FallbackRecorder(operator_table())
    with ExitStack() as stack:  # It gives everything back as it was, whatever ends the block.
        stack.callback(torch.set_warn_always, torch.is_warn_always_enabled())
        torch.set_warn_always(True)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("always", message=FALLBACK_PATTERN.pattern, category=UserWarning)
        warnings.showwarning = WarningInterceptor(record, warnings.showwarning)
        stack.enter_context(record.places.track(module))
        stack.enter_context(push_modes(record))
        yield FallbackLog(torch.backends.mps.is_available(), is_mps_simulated(), record)
