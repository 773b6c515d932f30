"""What is in force on a computer: a device, and the override that asked for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..errors import OpenMedError
from .choice import DeviceChoice
from .computer import Computer
from .request import DeviceRequest, Wish, decide, precedence


class DeviceState:
    """The device in force on one computer; a session that goes to another computer takes another state, and comes back.

    Args:
        computer: The computer.

    Attributes:
        override: What was chosen for the session by hand; ``None`` where nothing was.
        in_force: The name of the device in force; ``None`` before the first.
    """

    def __init__(self, computer: Computer) -> None:
        self.computer = computer
        self.override: DeviceRequest | None = None
        self.in_force: str | None = None
        self._had_variables = False

    def chain(self, argument: str | None = None, source: str = "argument") -> tuple[Wish, ...]:
        """Return the wishes that count now, the strongest first."""
        return precedence(self.computer.changes.shell, Wish(source, argument), self.override)

    def start(self) -> None:
        """Apply the MPS variables where MPS is planned on a Mac, before anything imports torch."""
        if not self.computer.machine.native_apple_silicon:
            return
        try:
            choice = self.computer.plan(decide(self.chain()))
        except OpenMedError:
            return  # Loading the extension says nothing; the same wish is reported when the device is asked for.
        self.computer.prepare(choice.device)
        self.in_force = choice.device

    def enter(self, choice: DeviceChoice) -> None:
        """Bring the environment in line with the device that is now in force."""
        if choice.device == "mps":
            self.computer.prepare("mps")
        elif self.in_force == "mps":
            self.computer.leave_mps()
        self.in_force = choice.device
        if self.override is not None:
            self.computer.changes.publish(choice.device)

    def suspend(self) -> None:
        """Take back what was done to the environment, until :meth:`resume`."""
        self._had_variables = bool(self.computer.changes.applied)
        self.computer.changes.unpublish()
        self.computer.leave_mps()

    def resume(self) -> None:
        """Do again to the environment what was taken back; the MPS variables may have been asked for on any device."""
        if self._had_variables:
            self.computer.prepare("mps")
        if self.in_force is not None and self.override is not None:
            self.computer.changes.publish(self.in_force)

    def clear(self) -> None:
        """Forget the device and the override, and take back what was done to the environment."""
        self.override = self.in_force = None
        self.suspend()

    @contextlib.contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """Take back what was applied to the environment meanwhile if there is an error."""
        applied, in_force = self.computer.changes.applied, self.in_force
        try:
            yield
        except BaseException:  # An interrupted import of torch too.
            self.computer.leave_mps(applied)
            self.in_force = in_force
            raise
