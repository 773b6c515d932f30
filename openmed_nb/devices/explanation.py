"""Two longer answers about the device: every device with why or why not, and the whole way to the choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..interface.display import Report, Shown, Table
from .availability import Rejection
from .choice import DeviceChoice, rejection_table
from .environment import EnvPlan
from .request import DeviceRequest, Wish
from .variables import masked


@dataclass(frozen=True, repr=False)
class DeviceList(Shown):
    """Every device of this computer, with why it cannot be used where it cannot.

    Attributes:
        devices: Pairs of a device and its rejection, ``None`` where nothing speaks against it.
        choice: The choice in force, ``None`` where the wishes are in error.
    """

    devices: tuple[tuple[str, Rejection | None], ...]
    choice: DeviceChoice | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the devices as plain mappings, ready for JSON."""
        devices = [
            {"device": name, "usable": found is None, "reason": _reason(found), "remedy": found.remedy if found else ""}
            for name, found in self.devices
        ]
        return {"devices": devices, "in_force": self.choice.device if self.choice else None}

    def report(self) -> Report:
        """Return what there is to show: one row for each device."""
        rows = tuple(self._row(name, found) for name, found in self.devices)
        table = Table("Devices of this computer", ("device", "state", "why", "what to do"), rows)
        return Report("Devices", tables=(table,))

    def _row(self, name: str, found: Rejection | None) -> tuple[str, str, str, str]:
        in_force = self.choice is not None and self.choice.device in (name, name.removesuffix(":0"))
        state = "cannot be used" if found else "in force" if in_force else "usable"
        return name, state, _reason(found) or "nothing speaks against it", found.remedy if found else ""


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """The way to the choice: who wished what, what was ruled out, and what became of the environment.

    Attributes:
        chain: The wishes, the strongest first.
        choice: The choice that came out.
        environment: The MPS variables.
        variables: Other variables that matter, from an allow list, with secrets masked.
    """

    chain: tuple[Wish, ...]
    choice: DeviceChoice
    environment: EnvPlan
    variables: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists and strings, ready for JSON."""
        return {
            "chain": [{"source": wish.source, "says": self._says(wish)} for wish in self.chain],
            "choice": self.choice.to_dict(),
            "environment": self.environment.to_dict(),
            "variables": dict(self.variables),
        }

    def report(self) -> Report:
        """Return what there is to show: four tables."""
        chain = tuple((wish.source, self._says(wish), self._part(wish)) for wish in self.chain)
        automatic = ("automatic", "mps, then cuda, then cpu", "" if self._winner else "decides")
        tables = [Table("Who asks, the strongest first", ("source", "says", ""), (*chain, automatic))]
        tables += [rejection_table(self.choice.rejected)] if self.choice.rejected else []
        others = Table("Other variables", ("variable", "value"), tuple(self.variables.items()))
        tables += [self.environment.table(), others]
        return Report(self.choice.report().title, self.choice.report().sentences, tuple(tables))

    @property
    def _winner(self) -> Wish | None:
        said = (wish for wish in self.chain if wish.spelling is not None)
        return next((wish for wish in said if wish.final or _asks(wish)), None)

    def _part(self, wish: Wish) -> str:
        return "decides" if wish == self._winner else ""

    def _says(self, wish: Wish) -> str:
        return "(nothing)" if wish.spelling is None else masked(wish.source, wish.spelling)


def _asks(wish: Wish) -> bool:
    return DeviceRequest.parse(wish.spelling or "auto", wish.source).asks


def _reason(found: Rejection | None) -> str:
    return found.reason if found else ""
