"""What the callbacks of all training libraries share: a boundary, guards, and the device that was chosen."""

from __future__ import annotations

from ..devices.machine import Machine
from ..devices.request import canonical
from .curve import MemoryCurve
from .epochs import EpochBoundary
from .guards import Guards
from .library_arguments import warn_of_another_device


class GuardedTraining:
    """The boundary and the guards of one training, behind the callback of a library.

    Args:
        hooks: The boundary, with the curve.
        guards: What looks for silently wrong numbers.
        machine: This computer.
    """

    library = ""
    """Who trains."""

    def __init__(self, hooks: EpochBoundary, guards: Guards, machine: Machine) -> None:
        self.hooks, self.guards, self.machine = hooks, guards, machine
        self._chosen = hooks.device

    @property
    def remedy(self) -> str:
        """What to do where the library uses another device than was chosen."""
        raise NotImplementedError

    @property
    def curve(self) -> MemoryCurve:
        """The samples so far, and the verdict."""
        return self.hooks.curve

    def begin(self, device: object, epoch: int, step: int) -> str:
        """Begin a curve on the device that the library uses, and return its name; another than was chosen is warned of."""
        name = canonical(str(device))
        warn_of_another_device(self.library, name, self._chosen, self.remedy)
        self.hooks.begin(name, epoch, step)
        return name
