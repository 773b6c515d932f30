"""``nb.runbook.fallbacks``: log of the operators that fell back from MPS to the CPU while a program ran."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from ..._render.display import Displayable, Report, Table, pluralize
from ..._utils.text import short_type_name
from ...devices.backend import import_torch
from ...devices.machine import is_mps_simulated
from ...devices.profilers import push_modes
from ...errors import ConfigurationError

if TYPE_CHECKING:
    from .profile_watch import OperatorCounter

FallbackOutcome = Literal["fell back to the CPU", "raised an error"]

FELL_BACK: Final = "fell back to the CPU"
RAISED_ERROR: Final = "raised an error"

# Remedy of each outcome.
REMEDIES: dict[FallbackOutcome, str] = {
    FELL_BACK: "",
    RAISED_ERROR: " Set PYTORCH_ENABLE_MPS_FALLBACK=1 before torch is imported.",
}

# Texts of torch's MPSFallback.mm.
FALLBACK_PATTERN = re.compile(
    r"The operator '([^']+)' is not currently supported on the MPS backend and will fall back to run on"
)
NOT_IMPLEMENTED_PATTERN = re.compile(r"The operator '([^']+)' is not currently implemented for the MPS device")


@dataclass(frozen=True)
class Fallback:
    """Fallbacks of one operator.

    Attributes:
        operator: Name of the operator in the messages of MPS, such as ``"aten::special_ndtri.out"``.
        outcome: ``"fell back to the CPU"``, or ``"raised an error"`` if fallback is disabled.
        count: Number of calls.
    """

    operator: str
    outcome: FallbackOutcome
    count: int


@dataclass(frozen=True, repr=False)
class FallbackLog(Displayable):
    """Log of CPU fallbacks. It can be read inside and after the ``with`` block.

    Attributes:
        simulated: Whether the MPS device was simulated.
    """

    simulated: bool
    _counter: OperatorCounter = field(repr=False)
    _calls: Counter[tuple[str, FallbackOutcome]] = field(default_factory=Counter, repr=False)

    JSON_EXCLUDE = ("_counter", "_calls")
    JSON_PROPERTIES = ("verdict", "count", "num_mps_operators", "entries")

    @property
    def entries(self) -> tuple[Fallback, ...]:
        """Fallbacks by operator, most frequent first."""
        entries = (Fallback(*key, count) for key, count in self._calls.items())
        return tuple(sorted(entries, key=lambda entry: (-entry.count, entry.operator)))

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
        """Number of outermost operators that computed with an MPS tensor."""
        return self._counter.count

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
        if self.num_mps_operators:
            return "No operator fell back to the CPU."
        return "No operator ran on MPS, and only MPS has CPU fallbacks."

    def to_report(self) -> Report:
        """Return the report: fallbacks by operator."""
        rows = tuple((entry.operator, entry.outcome, str(entry.count)) for entry in self.entries)
        return Report("CPU fallbacks on MPS", (self.verdict,), (Table("", ("operator", "outcome", "count"), rows),))


@dataclass(frozen=True)
class _WarningInterceptor:
    """Replacement of ``warnings.showwarning`` that records fallbacks and shows all other warnings."""

    log: FallbackLog
    original_showwarning: Callable[..., None]

    def __call__(self, message: Warning | str, *args: object, **kwargs: object) -> None:
        """Record a fallback, or show any other warning. An enclosing fallback log receives both."""
        match = FALLBACK_PATTERN.search(str(message))
        if match:
            self.log._calls[match[1], FELL_BACK] += 1  # noqa: SLF001 - of this module
        if not match or isinstance(self.original_showwarning, _WarningInterceptor):
            self.original_showwarning(message, *args, **kwargs)


def fallbacks(*arguments: object) -> AbstractContextManager[FallbackLog]:
    """Return a context manager that counts CPU fallbacks by operator.

    By default, torch warns only about the first fallback of the process. In the block it warns about each fallback
    (``torch.set_warn_always``), and the log intercepts these warnings, which also name operators inside other operators. Other
    warnings are not affected. If fallback is disabled, an error of torch that leaves the block is recorded. To find the modules
    that call an operator, use :func:`forecast`.

    Args:
        arguments: Not accepted; the model runs inside the block.

    Returns:
        The context manager, which yields the log. Its ``entries`` have a ``count`` for each operator. ``verdict`` is a sentence.

    Example:
        >>> import torch
        >>> from openmed_nb import simulated_mps
        >>> with simulated_mps(fallback=True), fallbacks() as log:
        ...     mode = torch.ones(3, device="mps").mode()
        >>> log.entries[0].operator, log.entries[0].count
        ('aten::mode', 1)
    """
    if arguments:
        raise ConfigurationError(
            f"fallbacks() is a context manager and does not accept {short_type_name(arguments[0])}.",
            "Run the model in its block: with nb.runbook.fallbacks() as log: model(x)",
        )
    return _record_fallbacks()


@contextmanager
def _record_fallbacks() -> Iterator[FallbackLog]:
    """Yield a log of the CPU fallbacks in the block."""
    torch = import_torch()
    from .profile_watch import OperatorCounter

    counter = OperatorCounter("mps")
    log = FallbackLog(is_mps_simulated(), counter)
    warns_always = torch.is_warn_always_enabled()
    with warnings.catch_warnings(), push_modes(counter):
        warnings.filterwarnings("always", message=FALLBACK_PATTERN.pattern, category=UserWarning)
        warnings.showwarning = _WarningInterceptor(log, warnings.showwarning)
        torch.set_warn_always(True)
        try:
            yield log
        except NotImplementedError as error:  # Fallback is disabled.
            if match := NOT_IMPLEMENTED_PATTERN.search(str(error)):
                log._calls[match[1], RAISED_ERROR] += 1  # noqa: SLF001 - of this module
            raise
        finally:
            torch.set_warn_always(warns_always)
