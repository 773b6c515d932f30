"""Computers that are not here: a session with its own environment and a torch that tells what a real one would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openmed_nb.devices.backend import TorchFacts
from openmed_nb.devices.environment import FALLBACK, HIGH, LOW
from openmed_nb.devices.machine import Machine
from openmed_nb.session import Session

MAC = Machine("Darwin", "arm64", apple_silicon=True, chip="Apple M2", macos=(15, 5), gpu_driver=False)
BOX = Machine("Linux", "x86_64", gpu_driver=True)
PLAIN = Machine("Linux", "x86_64", gpu_driver=False)

MAC_TORCH = TorchFacts("2.13.0", loaded=True, gpu_build="", mps_built=True, mps_available=True, cuda_names=())
BOX_TORCH = TorchFacts("2.13.0+cu130", True, "CUDA 13.0", False, False, ("NVIDIA A100", "NVIDIA T4"))
PLAIN_TORCH = TorchFacts("2.13.0+cpu", True, "", False, False, ())


class SimulatedTorch:
    """The torch of a computer that is not here: it reads its variables when the real one does, and tells no more."""

    def __init__(self, facts: TorchFacts, environ: dict[str, str], **failures: str) -> None:
        self.facts = facts
        self.environ = environ
        self.failures = failures
        self.read: dict[str, str | None] = {}
        self.probed: list[str] = []
        self.loading: Callable[[], None] = lambda: None

    def torch_is_loaded(self) -> bool:
        """Tell whether torch is imported."""
        return FALLBACK in self.read

    def installed_torch(self) -> TorchFacts:
        """Return what the files say."""
        return TorchFacts(self.facts.version, gpu_build=self.facts.gpu_build)

    def loaded_torch(self) -> TorchFacts:
        """Import torch, which reads the switch of the fallback."""
        self.loading()
        self.read.setdefault(FALLBACK, self.environ.get(FALLBACK))
        return self.facts

    def probe(self, device: str) -> str:
        """Compute on the device, which starts the allocator where it is mps."""
        self.probed.append(device)
        if device == "mps":
            self.touch()
        return self.failures.get(device.replace(":", "_"), "")

    def touch(self) -> None:
        """Compute on mps and leave no tensor behind."""
        for name in (HIGH, LOW):
            self.read.setdefault(name, self.environ.get(name))

    def mps_allocator_started(self) -> bool | None:
        """Tell what can be known: nothing."""
        return None if self.torch_is_loaded() else False


class Computer:
    """A session with the environment and the torch that it sees."""

    def __init__(self, machine: Machine, facts: TorchFacts, environ: dict[str, str], **failures: str) -> None:
        self.environ = dict(environ)
        self.torch = SimulatedTorch(facts, self.environ, **failures)
        self.session = Session(self.environ, lambda: machine, self.torch)

    @property
    def effects(self) -> tuple[str, ...]:
        """What is told of the three MPS variables."""
        return tuple(one.effect for one in self.session.computer.environment("mps").settings)

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything that a failing verb must leave alone."""
        return (
            dict(self.environ),
            self.session.override,
            self.session.in_force,
            dict(self.session.computer.applied),
        )


def mac(*, failing: str = "", **environ: str) -> Computer:
    """Return a Mac whose MPS works, or fails with a message."""
    return Computer(MAC, MAC_TORCH, environ, mps=failing)


def rosetta(**environ: str) -> Computer:
    """Return a Mac whose Python runs under Rosetta."""
    return Computer(Machine("Darwin", "x86_64", apple_silicon=True, translated=True), MAC_TORCH, environ)


def box(**environ: str) -> Computer:
    """Return a computer with two NVIDIA GPUs."""
    return Computer(BOX, BOX_TORCH, environ)


def plain(**environ: str) -> Computer:
    """Return a computer without a GPU."""
    return Computer(PLAIN, PLAIN_TORCH, environ)
