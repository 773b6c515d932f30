"""Simulated machines: a session with its own environment and a stub of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openmed_nb.devices.backend import TorchInfo
from openmed_nb.devices.environment import FALLBACK_VARIABLE, HIGH_WATERMARK_VARIABLE, LOW_WATERMARK_VARIABLE
from openmed_nb.devices.machine import MachineInfo
from openmed_nb.session import Session

MAC = MachineInfo("Darwin", "arm64", apple_silicon=True, chip="Apple M2", macos_version=(15, 5), gpu_driver=False)
BOX = MachineInfo("Linux", "x86_64", gpu_driver=True)
PLAIN = MachineInfo("Linux", "x86_64", gpu_driver=False)

MAC_TORCH = TorchInfo("2.13.0", is_imported=True, gpu_build="", mps_built=True, mps_available=True, cuda_names=())
BOX_TORCH = TorchInfo("2.13.0+cu130", True, "CUDA 13.0", False, False, ("NVIDIA A100", "NVIDIA T4"))
PLAIN_TORCH = TorchInfo("2.13.0+cpu", True, "", False, False, ())


class SimulatedTorch:
    """Stub of the torch of another machine. It reads environment variables at the same time as torch."""

    def __init__(self, facts: TorchInfo, environ: dict[str, str], **failures: str) -> None:
        self.facts = facts
        self.environ = environ
        self.failures = failures
        self.read: dict[str, str | None] = {}
        self.probed: list[str] = []
        self.loading: Callable[[], None] = lambda: None

    def is_torch_imported(self) -> bool:
        """Return whether torch is imported."""
        return FALLBACK_VARIABLE in self.read

    def inspect_installed_torch(self) -> TorchInfo:
        """Return the facts from the files of torch."""
        return TorchInfo(self.facts.version, gpu_build=self.facts.gpu_build)

    def inspect_imported_torch(self) -> TorchInfo:
        """Import torch, which reads the fallback variable."""
        self.loading()
        self.read.setdefault(FALLBACK_VARIABLE, self.environ.get(FALLBACK_VARIABLE))
        return self.facts

    def probe_device(self, device: str) -> str:
        """Compute on the device, which initializes the allocator of mps."""
        self.probed.append(device)
        if device == "mps":
            self.touch()
        return self.failures.get(device.replace(":", "_"), "")

    def touch(self) -> None:
        """Compute on mps without a remaining tensor."""
        for name in (HIGH_WATERMARK_VARIABLE, LOW_WATERMARK_VARIABLE):
            self.read.setdefault(name, self.environ.get(name))

    def is_mps_allocator_initialized(self) -> bool | None:
        """Return ``None``, because the state of the allocator is unknown after the import."""
        return None if self.is_torch_imported() else False


class Computer:
    """A session with its environment and its stub of torch."""

    def __init__(self, machine: MachineInfo, facts: TorchInfo, environ: dict[str, str], **failures: str) -> None:
        self.environ = dict(environ)
        self.torch = SimulatedTorch(facts, self.environ, **failures)
        self.session = Session(self.environ, lambda: machine, self.torch)

    @property
    def effects(self) -> tuple[str, ...]:
        """Reported effects of the three MPS variables."""
        return tuple(setting.effect for setting in self.session.device_manager.mps_environment("mps").settings)

    @property
    def state(self) -> tuple[Any, ...]:
        """State that a failed operation must not change."""
        return (
            dict(self.environ),
            self.session.override,
            self.session.active_device,
            dict(self.session.device_manager.applied_variables),
        )


def mac(*, failing: str = "", **environ: str) -> Computer:
    """Return a Mac whose MPS device works, or fails with a message."""
    return Computer(MAC, MAC_TORCH, environ, mps=failing)


def rosetta(**environ: str) -> Computer:
    """Return a Mac whose Python runs under Rosetta."""
    return Computer(MachineInfo("Darwin", "x86_64", apple_silicon=True, under_rosetta=True), MAC_TORCH, environ)


def box(**environ: str) -> Computer:
    """Return a computer with two NVIDIA GPUs."""
    return Computer(BOX, BOX_TORCH, environ)


def plain(**environ: str) -> Computer:
    """Return a computer without a GPU."""
    return Computer(PLAIN, PLAIN_TORCH, environ)


OPERATIONS: dict[str, Callable[[Computer], object]] = {
    "start": lambda here: here.session.start(),
    "stop": lambda here: here.session.stop(),
    "device": lambda here: here.session.device(),
    "list": lambda here: here.session.list_devices(),
    "explain": lambda here: here.session.explain(),
    "reset": lambda here: here.session.reset(),
    "tune": lambda here: here.session.apply_mps_variables(),
    "import torch": lambda here: here.torch.inspect_imported_torch(),
    "compute on mps": lambda here: (here.torch.inspect_imported_torch(), here.torch.touch()),
    **{
        f"use {device}": lambda here, device=device: here.session.use(device)
        for device in ("auto", "mps", "cuda:1", "cpu", "x")
    },
    **{
        f"ask {device}": lambda here, device=device: here.session.device(device)
        for device in ("mps", "cuda", "cpu", "x")
    },
}
"""Operations on a computer, by name."""
