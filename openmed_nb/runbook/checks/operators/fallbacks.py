"""``nb.runbook.fallbacks``: log of the operators that fell back from MPS to the CPU while a program ran."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from ...._render.display import Displayable, Report, Table, pluralize
from ....devices.backend import import_torch
from ....devices.machine import is_mps_simulated
from ....devices.moving import get_module
from ....devices.profilers import push_modes
from .table import ModuleLocation, ModuleRow, Phase, operator_table

if TYPE_CHECKING:
    from .recorders import FallbackEvent, FallbackRecorder

Outcome = Literal["fell back to the CPU", "raised an error"]

FELL_BACK: Final = "fell back to the CPU"
RAISED_ERROR: Final = "raised an error"

# Remedy of each outcome.
REMEDIES: dict[Outcome, str] = {
    FELL_BACK: "",
    RAISED_ERROR: " Set PYTORCH_ENABLE_MPS_FALLBACK=1 before torch is imported.",
}


@dataclass(frozen=True)
class Fallback(ModuleRow):
    """Fallbacks of one operator in one module and one phase.

    Attributes:
        operator: Name of the operator in the messages of MPS, such as ``"aten::special_ndtri.out"``.
        outcome: ``"fell back to the CPU"``, or ``"raised an error"`` if fallback is disabled.
        phase: ``"forward"``, ``"backward"`` or ``"elsewhere"``.
        module_location: Module that was running, or empty in a backward pass and outside modules.
        count: Number of fallbacks.
        seconds: Duration of the outermost operators that fell back, including copies. ``None`` on a simulated device, whose
            durations do not represent MPS.
    """

    operator: str
    outcome: Outcome
    phase: Phase
    module_location: ModuleLocation
    count: int
    seconds: float | None


@dataclass(frozen=True, repr=False)
class FallbackLog(Displayable):
    """Log of CPU fallbacks. It can be read inside and after the ``with`` block.

    Attributes:
        mps_available: Whether torch had an MPS device when the block started.
        simulated: Whether that device was simulated.
    """

    mps_available: bool
    simulated: bool
    _recorder: FallbackRecorder = field(repr=False)

    JSON_EXCLUDE = ("_recorder",)
    JSON_PROPERTIES = ("verdict", "count", "num_mps_operators", "entries")

    @property
    def entries(self) -> tuple[Fallback, ...]:
        """Fallbacks by operator, module and phase, most frequent first."""
        groups: dict[tuple[str, Outcome, Phase, ModuleLocation], list[FallbackEvent]] = {}
        for event in self._recorder.all_events():
            outcome: Outcome = RAISED_ERROR if event.raised else FELL_BACK
            key = (event.operator, outcome, event.call.phase, event.call.module_location)
            groups.setdefault(key, []).append(event)
        entries = []
        for key, events in groups.items():
            calls = {id(event.call): event.call for event in events}  # One call can have several fallbacks.
            seconds = None if self.simulated else sum(call.seconds or 0.0 for call in calls.values())
            entries.append(Fallback(*key, len(events), seconds))
        return tuple(sorted(entries, key=_sort_key))

    @property
    def count(self) -> int:
        """Number of fallbacks."""
        return sum(entry.count for entry in self.entries if entry.outcome == FELL_BACK)

    @property
    def operators(self) -> tuple[str, ...]:
        """Operators that fell back or raised an error, in alphabetical order."""
        return tuple(sorted({entry.operator for entry in self.entries}))

    @property
    def num_mps_operators(self) -> int:
        """Number of outermost operators that were called with an MPS tensor."""
        return self._recorder.operators

    @property
    def verdict(self) -> str:
        """Result, with one sentence for each outcome."""
        sentences = []
        for outcome, remedy in REMEDIES.items():
            entries = [entry for entry in self.entries if entry.outcome == outcome]
            if entries:
                calls = pluralize(sum(entry.count for entry in entries), "call")
                names = ", ".join(sorted({entry.operator for entry in entries}))
                sentences.append(f"{calls} {outcome}: {names}.{remedy}")
        if sentences:
            return " ".join(sentences)
        if self._recorder.operators:
            return "No operator fell back to the CPU."
        return "No operator ran on MPS, and only MPS has CPU fallbacks."

    def to_report(self) -> Report:
        """Return the report: fallbacks by module and phase. The durations are among the metrics."""
        rows = []
        timed = []
        for entry in self.entries:
            module = str(entry.module_location)
            rows.append((entry.operator, entry.outcome, entry.phase, module, str(entry.count)))
            if entry.seconds is not None:
                timed.append((entry.operator, entry.phase, module, f"{entry.seconds:.4f}"))
        return Report(
            "CPU fallbacks on MPS",
            (self.verdict,),
            (Table("", ("operator", "outcome", "phase", "module", "count"), tuple(rows)),),
            metrics=(Table("Durations", ("operator", "phase", "module", "seconds"), tuple(timed)),),
        )


def _sort_key(entry: Fallback) -> tuple[int, str, str, ModuleLocation]:
    return -entry.count, entry.operator, entry.phase, entry.module_location


@contextmanager
def fallbacks(model: Any = None) -> Iterator[FallbackLog]:
    """Context manager that records CPU fallbacks: operators, modules, counts and durations.

    By default, torch warns only about the first fallback of the process. In the block it warns about each fallback
    (``torch.set_warn_always``), and the log intercepts these warnings, which also name operators inside other operators. Other
    warnings are not affected. A torch dispatch mode times the outermost operators and synchronizes before and after each one,
    except in a backward pass, where the duration includes earlier work. Hooks of all modules track the running module. If
    fallback is disabled, the error of torch is recorded and propagates. Warnings, hooks and settings are restored at the end.
    Only the thread that enters the context manager is recorded.

    Args:
        model: Model or pipeline whose modules are named. If ``None``, name the submodules of the outermost module that runs.

    Yields:
        The log. Its ``entries`` have a ``count`` and ``seconds`` for each operator, module and phase (``"forward"``,
        ``"backward"`` or ``"elsewhere"``). ``verdict`` is a sentence. The text form of the log does not include durations,
        so that it is the same in every run.

    Raises:
        ConfigurationError: If ``model`` is not a model.

    Example:
        >>> import torch
        >>> from openmed_nb import simulated_mps
        >>> with simulated_mps(fallback=True), fallbacks() as log:
        ...     mode = torch.ones(3, device="mps").mode()
        >>> log.entries[0].operator, log.entries[0].count
        ('aten::mode', 1)
    """
    module = None if model is None else get_module(model, "Pass a torch module, a pipeline, or nothing.")
    torch = import_torch()
    from .recorders import FALLBACK_PATTERN, FallbackRecorder, WarningInterceptor

    recorder = FallbackRecorder(operator_table())
    with ExitStack() as stack:
        stack.callback(torch.set_warn_always, torch.is_warn_always_enabled())
        torch.set_warn_always(True)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("always", message=FALLBACK_PATTERN.pattern, category=UserWarning)
        warnings.showwarning = WarningInterceptor(recorder, warnings.showwarning)
        stack.enter_context(recorder.module_tracker.track(module))
        stack.enter_context(push_modes(recorder))
        yield FallbackLog(torch.backends.mps.is_available(), is_mps_simulated(), recorder)
