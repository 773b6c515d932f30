"""Two longer answers about the device: every device with why or why not, and the whole way to the choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import OpenMedError
from ..interface.display import Report, Shown, Table
from .availability import Rejection
from .choice import DeviceChoice
from .environment import EnvPlan
from .request import Wish, canonical, winner
from .variables import masked


@dataclass(frozen=True)
class Candidate:
    """A device of this computer.

    Attributes:
        device: Its name.
        rejection: Why it cannot be used, ``None`` where nothing known so far speaks against it.
        tried: Whether it has computed; the CPU need not.
    """

    device: str
    rejection: Rejection | None = None
    tried: bool = True

    @property
    def usable(self) -> bool | None:
        """Whether it can be used; ``None`` where nobody tried."""
        return False if self.rejection else True if self.tried else None

    @property
    def reason(self) -> str:
        """Why it cannot be used, or that nobody tried."""
        return self.rejection.reason if self.rejection else "" if self.tried else "no computation on it was tried yet"

    @property
    def remedy(self) -> str:
        """One thing to do, empty where there is nothing to do."""
        return self.rejection.remedy if self.rejection else "" if self.tried else f"%openmed_device {self.device}"


@dataclass(frozen=True, repr=False)
class DeviceList(Shown):
    """Every device of this computer, with why it cannot be used where it cannot.

    Attributes:
        candidates: The devices.
        choice: The choice in force, ``None`` where the wishes are in error.
    """

    candidates: tuple[Candidate, ...]
    choice: DeviceChoice | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the devices as plain mappings, ready for JSON."""
        names = ("device", "usable", "reason", "remedy")
        devices = [{name: getattr(one, name) for name in names} for one in self.candidates]
        return {"devices": devices, "in_force": self.choice.device if self.choice else None}

    def report(self) -> Report:
        """Return what there is to show: one row for each device."""
        rows = tuple((one.device, self._state(one), one.reason, one.remedy) for one in self.candidates)
        computer = self.choice.computer if self.choice is not None else "this computer"
        return Report(f"Devices of {computer}", tables=(Table("", ("device", "state", "why", "what to do"), rows),))

    def _state(self, one: Candidate) -> str:
        if self.choice is not None and canonical(self.choice.device) == canonical(one.device):
            return "in force"
        return {True: "usable", False: "cannot be used", None: "not tried"}[one.usable]


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """The way to the choice: who wished what, what was ruled out, and what became of the environment.

    Attributes:
        chain: The wishes, the strongest first.
        choice: The choice that came out, or the error that did.
        environment: The MPS variables.
        variables: Other variables that matter, from an allow list, with secrets masked.
    """

    chain: tuple[Wish, ...]
    choice: DeviceChoice | OpenMedError
    environment: EnvPlan
    variables: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists and strings, ready for JSON."""
        return {
            "chain": [{"source": wish.source, "says": _says(wish)} for wish in self.chain],
            "choice": self.choice.to_dict(),
            "environment": self.environment.to_dict(),
            "variables": dict(self.variables),
        }

    def report(self) -> Report:
        """Return what there is to show: the choice or the error, and up to four tables."""
        decides = winner(self.chain)
        chain = tuple((wish.source, _says(wish), "decides" if wish is decides else "") for wish in self.chain)
        automatic = ("automatic", "mps, then cuda, then cpu", "" if decides else "decides")
        tables = [Table("Who asks, the strongest first", ("source", "says", "result"), (*chain, automatic))]
        if isinstance(self.choice, OpenMedError):
            answer = Report("Device: none", (self.choice.what, self.choice.remedy))
        else:
            answer = self.choice.report()
        others = Table("Other variables", ("variable", "value"), tuple(self.variables.items()))
        return replace(answer, tables=(*tables, *answer.tables, self.environment.table(), others))


def _says(wish: Wish) -> str:
    return "(nothing)" if wish.spelling is None else masked(wish.source, wish.spelling)
