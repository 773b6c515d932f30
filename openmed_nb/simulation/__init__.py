"""A simulated MPS device for computers without one: it computes on the CPU, and says, counts and refuses what MPS does."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import DeviceUnavailable

if TYPE_CHECKING:
    from .device import SimulatedMps


@dataclass(frozen=True)
class Simulation:
    """A simulated computer that the session runs on.

    Attributes:
        device: Its MPS device.
        undo: Comes back to this computer.
        thread: The thread that began it; torch's modes count in one thread only.
    """

    device: SimulatedMps
    undo: contextlib.ExitStack
    thread: int = field(default_factory=threading.get_ident)

    def end(self) -> None:
        """Come back to this computer.

        Raises:
            DeviceUnavailable: In another thread than the one that began it; nothing is ended then.
        """
        if threading.get_ident() != self.thread:
            what = "The simulated MPS device belongs to the thread that began it, and this is another one."
            raise DeviceUnavailable(what, "End it there.")
        self.undo.close()
