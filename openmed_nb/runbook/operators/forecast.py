"""Which operators of a model would leave MPS for the CPU, foretold on any computer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...devices.backend import release_of
from ...devices.simulation import active
from ...errors import ConfigurationError
from ...interface.display import Report, Shown, Table
from ...quantities import counted
from .calls import PHASES, Trace
from .examples import Example, read_example, synthetic_example
from .places import Place
from .refusals import MAY_BE_WRONG, REFUSED
from .table import ALWAYS_ON_CPU, COMPOSITE, FALLS_BACK, NATIVE, NOT_KNOWN, OperatorTable, operator_table
from .tracing import trace

if TYPE_CHECKING:
    import torch

VERDICTS = (REFUSED, FALLS_BACK, ALWAYS_ON_CPU, MAY_BE_WRONG, NOT_KNOWN, COMPOSITE, NATIVE)
"""What can become of an operator, the worst first."""

REMEDIES: Mapping[str, str] = {
    FALLS_BACK: "Compute it another way; without PYTORCH_ENABLE_MPS_FALLBACK=1 it is an error.",
    ALWAYS_ON_CPU: "Compute it another way; each call waits for the GPU.",
    NOT_KNOWN: "It is not one of torch's own: try it on a Mac.",
}
"""What to do about a verdict."""

OWN_REMEDIES: Mapping[str, str] = {
    "aten::embedding_renorm_": "Leave max_norm out of the Embedding: each call waits for the GPU.",
}
"""What to do about one operator, where that is known better."""

LIMITS = (
    "Not seen: branches of the model's own code on the type of the device, the inside of operators that others wrote "
    "in C++, and what torch.compile makes."
)
"""What no run on the CPU can show."""

SIMULATED = "SIMULATED MPS is on; the forecast does not depend on it."
"""What is said under the simulation: nothing of it is measured there."""

SHOWN_ROWS = 20
SHOWN_NAMES = 6


@dataclass(frozen=True)
class OperatorForecast:
    """What becomes of an operator, in one module and one phase.

    Attributes:
        operator: As it is called, such as ``"aten::_linalg_eigh"``; of what is refused also a function of torch, such as
            ``"linear"``, or a tensor, such as ``"buffer scale"``.
        verdict: One of ``VERDICTS``.
        phase: ``"inference"``, ``"forward"``, ``"backward"`` or ``"optimizer"``.
        place: The module that calls it; empty in the backward pass and in the optimizer.
        count: How often it is called.
        refusal: What MPS refuses, such as ``"float64"``; empty where it is the operator that counts.
        reason: In the words of MPS, or how MPS names the operator in its messages where that is another name.
        remedy: One thing to do; empty where nothing needs to be done.
    """

    operator: str
    verdict: str
    phase: str
    place: Place
    count: int
    refusal: str = ""
    reason: str = ""
    remedy: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the row as a mapping, ready for JSON."""
        place = {"module": self.place.module, "class": self.place.kind}
        return {**{name: value for name, value in vars(self).items() if name != "place"}, **place}

    @property
    def order(self) -> tuple[Any, ...]:
        """What rows are sorted by: the worst first."""
        return VERDICTS.index(self.verdict), self.refusal, self.operator, PHASES.index(self.phase), self.place


@dataclass(frozen=True, repr=False)
class Forecast(Shown):
    """What becomes of every operator of a model on MPS, in the installed torch.

    It stands on a run on the CPU. Not seen are branches of the model's own code on ``device.type``, the inside of
    operators that others wrote in C++, and what ``torch.compile`` makes.

    Attributes:
        model: The name of the model's class.
        torch: The version of torch.
        source: Where it was read what MPS has.
        rows: The operators, and what is refused, the worst first.
        notes: What could not be traced, as sentences.
        simulated: Whether a simulated MPS device was on.
    """

    model: str
    torch: str
    source: str
    rows: tuple[OperatorForecast, ...]
    notes: tuple[str, ...] = ()
    simulated: bool = False

    @property
    def operators(self) -> tuple[str, ...]:
        """The different operators that are called, in alphabetical order."""
        return unique(row.operator for row in self.rows if not row.refusal)

    @property
    def leaving(self) -> tuple[str, ...]:
        """The different operators that fall back to the CPU, or are always computed there."""
        return self.named(FALLS_BACK, ALWAYS_ON_CPU)

    @property
    def refused(self) -> tuple[str, ...]:
        """What MPS refuses, such as ``"float64"``."""
        return unique(row.refusal for row in self.rows if row.verdict == REFUSED)

    @property
    def troubles(self) -> tuple[OperatorForecast, ...]:
        """The rows of all that does not simply run on MPS."""
        return tuple(row for row in self.rows if row.verdict not in {NATIVE, COMPOSITE})

    @property
    def exit_code(self) -> int:
        """The status that a command ends with: 1 where an operator leaves MPS, or MPS refuses something."""
        return int(bool(self.leaving or self.refused))

    @property
    def verdict(self) -> str:
        """The forecast in a sentence or a few."""
        risks = unique(row.refusal for row in self.rows if row.verdict == MAY_BE_WRONG)
        said = [
            *([f"MPS refuses {listed(self.refused)}."] if self.refused else []),
            *([f"MPS may be wrong with {listed(risks)}."] if risks else []),
            *([f"It is not known whether MPS has {listed(self.named(NOT_KNOWN))}."] if self.named(NOT_KNOWN) else []),
        ]
        return " ".join([self._verdict_on_operators(bool(said)), *said])

    def _verdict_on_operators(self, but: bool) -> str:
        count, leaving = len(self.operators), self.leaving
        if leaving:
            leave = "leaves" if len(leaving) == 1 else "leave"
            return f"{len(leaving)} of {counted(count, 'operator')} {leave} MPS: {listed(leaving)}."
        if count <= 1:
            return "No operator leaves MPS."
        return f"None of {count} operators leaves MPS." if but else f"Every one of {count} operators runs on MPS."

    def named(self, *verdicts: str) -> tuple[str, ...]:
        """Return the different operators of some verdicts, in alphabetical order."""
        return unique(row.operator for row in self.rows if row.verdict in verdicts)

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as a mapping, ready for JSON."""
        about = {name: getattr(self, name) for name in ("model", "torch", "source", "verdict", "simulated")}
        lists = {name: list(getattr(self, name)) for name in ("operators", "leaving", "refused", "notes")}
        return {**about, **lists, "limits": LIMITS, "rows": [row.to_dict() for row in self.rows]}

    def report(self) -> Report:
        """Return what there is to show: the verdict, what leaves MPS and where, and the counts of each phase."""
        troubles = grouped(self.troubles)
        hidden = len(troubles) - SHOWN_ROWS
        more = (f"{hidden} more rows are in to_dict().",) if hidden > 0 else ()
        simulated = (SIMULATED,) if self.simulated else ()
        release = ".".join(map(str, release_of(self.torch)))  # Not the build, so that texts of two builds are the same.
        about = f"Read in {self.source}, for torch {release}."
        sentences = (*simulated, self.verdict, *self.notes, *more, about, LIMITS)
        columns = ("operator", "on MPS", "module", "phase", "times", "why", "what to do")
        rows = tuple(troubles[:SHOWN_ROWS])
        tables = (Table("What does not simply run on MPS", columns, rows), self._phases())
        return Report(f"Forecast of {self.model} on MPS", sentences, tables)

    def _phases(self) -> Table:
        columns = ("phase", "calls", "operators", "leave MPS")
        rows = [phase_row(phase, [row for row in self.rows if row.phase == phase]) for phase in PHASES]
        return Table("What the model calls", columns, tuple(row for row in rows if row[1] != "0"))


def grouped(rows: Iterable[OperatorForecast]) -> list[tuple[str, ...]]:
    """Return rows as they are shown, those of one operator in one module together, whatever the phase."""
    groups: dict[tuple[str, ...], list[OperatorForecast]] = {}
    for row in rows:
        groups.setdefault((row.operator, row.verdict, str(row.place), row.reason, row.remedy), []).append(row)
    return [
        (*key[:3], ", ".join(row.phase for row in group), ", ".join(str(row.count) for row in group), *key[3:])
        for key, group in groups.items()
    ]


def phase_row(phase: str, rows: Iterable[OperatorForecast]) -> tuple[str, ...]:
    """Return the counts of a phase as they are shown."""
    calls = [row for row in rows if not row.refusal]
    leaving = unique(row.operator for row in calls if row.verdict in {FALLS_BACK, ALWAYS_ON_CPU})
    different = unique(row.operator for row in calls)
    return phase, str(sum(row.count for row in calls)), str(len(different)), str(len(leaving))


def listed(names: tuple[str, ...]) -> str:
    """Return names with commas between them, only the first few of many.

    Example:
        >>> listed(("aten::mode", "aten::put_")), listed(tuple("abcdefgh"))
        ('aten::mode, aten::put_', 'a, b, c, d, e, f and 2 more')
    """
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def unique(names: Iterable[str]) -> tuple[str, ...]:
    """Return the different names in alphabetical order.

    Example:
        >>> unique(["b", "a", "b"])
        ('a', 'b')
    """
    return tuple(sorted(set(names)))


def judged(model: str, trace: Trace, table: OperatorTable, simulated: bool = False) -> Forecast:
    """Return what becomes of everything that a model called.

    Args:
        model: The name of the model's class.
        trace: What was called.
        table: What MPS has.
        simulated: Whether a simulated MPS device was on.
    """
    calls = [
        OperatorForecast(call.operator, table.verdict(call.operator), call.phase, call.place, count)
        for call, count in trace.calls.items()
    ]
    named = [advised(row, table.named_by_mps(row.operator)) for row in calls]
    refused = [
        OperatorForecast(
            *(call.operator, refusal.verdict, call.phase, call.place, count),
            *(refusal.name, refusal.says, refusal.remedy),
        )
        for (refusal, call), count in trace.refusals.items()
    ]
    rows = tuple(sorted([*named, *refused], key=lambda row: row.order))
    return Forecast(model, table.torch, table.source, rows, trace.notes, simulated)


def advised(row: OperatorForecast, named_by_mps: str) -> OperatorForecast:
    """Return a row with what to do, and with how MPS names the operator where that is another name."""
    remedy = OWN_REMEDIES.get(row.operator, REMEDIES.get(row.verdict, ""))
    other = row.verdict == FALLS_BACK and named_by_mps != row.operator
    reason = f"MPS names it {named_by_mps}." if other else ""
    return OperatorForecast(row.operator, row.verdict, row.phase, row.place, row.count, "", reason, remedy)


def forecast(model: Any, example_inputs: Any = None, training: bool = True) -> Forecast:
    """Return which operators of a model would leave MPS; see :func:`openmed_nb.forecast`.

    Args:
        model: A module of torch, or a pipeline.
        example_inputs: What the model is called with; ``None`` for a pipeline: two synthetic sentences.
        training: Whether to look at one training step too.
    """
    module, example = read_model(model, example_inputs)
    table = operator_table()
    inner = getattr(module, "_orig_mod", module)  # What torch.compile was given.
    return judged(type(inner).__name__, trace(module, example, table, training), table, active())


def read_model(model: Any, example_inputs: Any) -> tuple[torch.nn.Module, Example]:
    """Return a module and what it is called with.

    Raises:
        ConfigurationError: For what is neither a module nor a pipeline, and for a module without example inputs.
    """
    import torch

    module = model if isinstance(model, torch.nn.Module) else getattr(model, "model", None)
    if not isinstance(module, torch.nn.Module):
        what = f"{type(model).__name__} is no model."
        raise ConfigurationError(what, "Pass a torch module, a pipeline, or the name of a model.")
    if example_inputs is not None:
        return module, read_example(example_inputs)
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None or module is model:
        what = f"{type(model).__name__} needs example inputs: only a pipeline has a tokenizer to make them with."
        raise ConfigurationError(what, "Pass example_inputs: a tensor, a tuple of tensors, or a mapping of them.")
    return module, synthetic_example(module, tokenizer)
