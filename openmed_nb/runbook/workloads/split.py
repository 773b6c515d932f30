"""Where the time of a step goes: the seconds of its phases, their shares, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ..findings import OK, WARNING, Finding
from .workload import DATA, DECODE, TRANSFER

DOMINATES = 0.5
"""A phase dominates that takes more than this share of a step: whatever else is made faster, it stays the larger part."""

DATA_SHARE = 0.25
"""A loader is slow that keeps a step waiting for more than this share of it: without the wait, a third more steps are done."""

REMEDIES: Mapping[str, str] = {
    DATA: "Read ahead with workers, prepare the data once and keep it, or see nb.check_loader().",
    TRANSFER: "Copy less often and more at once: a larger batch, and smaller types for labels and masks.",
    DECODE: "Bring less to the host: labels and scores, not all logits.",
}
"""What to do about each phase that should not dominate."""

MORE_WORKERS = (
    "Read ahead with more workers, kept with persistent_workers=True, prepare the data once and keep it, "
    "or see nb.check_loader()."
)
"""What to do about the data where processes read ahead already."""


@dataclass(frozen=True)
class Split:
    """The phases of a step, each waited for.

    Attributes:
        seconds: How long each phase takes, in seconds, in their order.
    """

    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        """How long a step takes in which each phase is waited for, in seconds."""
        return sum(self.seconds.values())

    @property
    def shares(self) -> dict[str, float]:
        """Which part of a step each phase is, from 0 to 1."""
        return {name: seconds / self.total if self.total else 0.0 for name, seconds in self.seconds.items()}

    @property
    def dominating(self) -> str | None:
        """The phase that takes more than half of a step, ``None`` where none does.

        Example:
            >>> Split({"data": 3.0, "forward": 1.0}).dominating, Split({"data": 1.0, "forward": 1.0}).dominating
            ('data', None)
        """
        return next((name for name, share in self.shares.items() if share > DOMINATES), None)

    @property
    def words(self) -> str:
        """Where the time goes, in words.

        Example:
            >>> Split({"data": 3.0, "forward": 1.0}).words
            'data dominates'
        """
        return f"{self.dominating} dominates" if self.dominating else "no phase takes more than half of a step"

    def finding(self, name: str, workers: int = 0) -> Finding:
        """Return what to think of it.

        Args:
            name: What the finding is called.
            workers: How many processes read ahead.
        """
        remedy = data_remedy(workers) if self.dominating == DATA else REMEDIES.get(self.dominating or "", "")
        return Finding(name, WARNING if remedy else OK, self.words, remedy)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain mappings, numbers and strings."""
        return {"seconds": dict(self.seconds), "shares": self.shares, "dominating": self.dominating}


def data_remedy(workers: int) -> str:
    """Return what to do about a loader that keeps steps waiting.

    Args:
        workers: How many processes read ahead already.

    Example:
        >>> data_remedy(0) == REMEDIES["data"], data_remedy(2)[:26]
        (True, 'Read ahead with more worke')
    """
    return REMEDIES[DATA] if not workers else MORE_WORKERS


def split_of(steps: Iterable[Mapping[str, float]], typical: Callable[[list[float]], float] = fmean) -> Split:
    """Return how many seconds each phase takes.

    Args:
        steps: The seconds of each phase of some steps, as ``Workload.seconds_of_phases`` returns them.
        typical: What is taken of all steps, as :attr:`.Workload.typical` says.

    Example:
        >>> split_of([{"data": 1.0, "forward": 3.0}, {"data": 3.0, "forward": 3.0}]).seconds
        {'data': 2.0, 'forward': 3.0}
    """
    measured = list(steps)
    names = dict.fromkeys(name for step in measured for name in step)
    return Split({name: typical([step[name] for step in measured]) for name in names})
