"""Macs whose commands return recorded outputs, with a simulated MPS device where the Mac has a GPU that torch can use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import openmed_nb as nb
from openmed_nb.devices import backend
from openmed_nb.devices.computer import DeviceManager
from openmed_nb.devices.machine import MachineInfo, read_machine
from openmed_nb.session import SESSION

RECORDED = Path(__file__).parents[1] / "recorded" / "macs"
NAMES = tuple(sorted(file.stem for file in RECORDED.glob("*.txt")))

# The Macs that differ most from each other: little memory, and no Apple silicon. The others are slow tests.
DIFFERENT = ("m1_8gb", "intel")
PARAMETERS = tuple(name if name in DIFFERENT else pytest.param(name, marks=pytest.mark.slow) for name in NAMES)

SYSCTL = "/usr/sbin/sysctl"


class RecordedMac:
    """A Mac with recorded outputs of its commands.

    Attributes:
        commands: The commands that were run.
    """

    def __init__(self, name: str) -> None:
        sections = (RECORDED / f"{name}.txt").read_text("utf-8").removeprefix("$ ").split("\n$ ")
        self._outputs = {command: f"{output}\n" for command, _newline, output in (s.partition("\n") for s in sections)}
        self.commands: list[str] = []

    def run(self, command: list[str], *, seconds: float = 2.0) -> str | None:
        """Return the recorded output of a command.

        Raises:
            KeyError: If the command was not recorded.
        """
        assert seconds > 0
        program, *arguments = command
        self.commands.append(" ".join([program, *arguments]))
        if program == SYSCTL:  # With -i, unknown keys are left out.
            lines = self._outputs[f"{SYSCTL} -i"].splitlines(keepends=True)
            return "".join(line for line in lines if line.partition(":")[0] in arguments)
        return self._outputs[self.commands[-1]]

    @property
    def machine(self) -> MachineInfo:
        """Facts of the machine, as read on the Mac itself."""
        is_apple = "hw.optional.arm64: 1" in self._outputs[f"{SYSCTL} -i"]
        return read_machine("Darwin", "arm64" if is_apple else "x86_64", self.run)


@contextlib.contextmanager
def on_recorded_mac(name: str, *, simulates_mps: bool = True) -> Iterator[RecordedMac]:
    """Run the session on a recorded Mac, by default with a simulated MPS device if it has Apple silicon."""
    mac = RecordedMac(name)
    machine = mac.machine
    original = SESSION.device_manager
    if simulates_mps and machine.apple_silicon:
        with nb.simulated_mps(machine.memory_bytes):
            SESSION.device_manager.run = mac.run
            SESSION.device_manager.machine = machine  # Instead of the simulated machine, whose status is unknown.
            yield mac
        return
    SESSION.device_manager = DeviceManager(SESSION.environ, lambda: machine, backend, mac.run)
    try:
        yield mac
    finally:
        SESSION.device_manager = original
