"""This computer as a session sees it: its facts, what torch says, and the environment that is made ready for it."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

from .backend import TorchFacts, TorchSeam
from .choice import Candidate, DeviceChoice, Rejection, Surroundings, needs_probe, rejection, resolve
from .environment import EnvironmentChanges, EnvPlan, Moment, watermarks
from .machine import Machine
from .memory import allocator
from .request import DeviceRequest, canonical


class Computer:
    """The part of a session that asks machine and torch, and lets a GPU prove itself.

    Args:
        environ: The environment variables, read and written.
        machine: Reads the facts of this computer; called once, when first needed.
        seam: What answers for torch: the module ``devices.backend``, or a stand-in for a computer that is not here.
    """

    def __init__(self, environ: MutableMapping[str, str], machine: Callable[[], Machine], seam: TorchSeam) -> None:
        self.changes = EnvironmentChanges(environ)
        self._read_machine = machine
        self._machine: Machine | None = None
        self._seam = seam
        self._torch: TorchFacts | None = None
        self._limits: dict[str, float] = {}

    @property
    def machine(self) -> Machine:
        """The facts of this computer."""
        if self._machine is None:
            self._machine = self._read_machine()
        return self._machine

    @property
    def torch(self) -> TorchFacts:
        """What is known of torch; importing it is left to others, but once it is loaded it is asked."""
        if self._torch is None or (self._seam.torch_is_loaded() and not self._torch.loaded):
            self._torch = self._seam.loaded_torch() if self._seam.torch_is_loaded() else self._seam.installed_torch()
        return self._torch

    @property
    def moment(self) -> Moment:
        """What torch has done by now; living tensors are looked through only where MPS could be in use."""
        loaded = self._seam.torch_is_loaded()
        if not loaded or not self.machine.apple_silicon:
            return Moment(loaded, allocator_started=None if loaded else False)
        probed = self._torch is not None and self._torch.failure("mps") is not None
        return Moment(loaded, allocator_started=probed or self._seam.mps_allocator_started())

    def plan(self, request: DeviceRequest) -> DeviceChoice:
        """Return the device for a request from what is known so far; nothing is loaded and nothing is changed.

        Raises:
            DeviceUnavailable: Where no device satisfies the request.
        """
        return resolve(request, self.machine, self.torch, self.changes.shell)

    def confirm(self, request: DeviceRequest) -> DeviceChoice:
        """Return the device for a request after a GPU has computed; one that cannot is ruled out, and the next is taken.

        The environment of mps is applied before torch is loaded for it, and taken back where mps is ruled out.

        Raises:
            DeviceUnavailable: Where no device satisfies the request.
            TorchUnusable: Where a GPU is planned and torch does not import.
        """
        applied = self.changes.applied
        while needs_probe(choice := self.plan(request), self.torch):
            self.prepare(choice.device)
            self._try(choice.device)
        if choice.device != "mps":
            self.leave_mps(applied)
        return choice

    def load_torch(self) -> None:
        """Import torch, so that what it says of itself is known.

        Raises:
            TorchUnusable: Where it does not import.
        """
        if not self.torch.loaded:
            self._torch = self._seam.loaded_torch()
            self.changes.observe(self.moment)

    def prepare(self, device: str) -> None:
        """Apply the MPS variables where the device is mps."""
        if device == "mps":
            self.changes.enter_mps(self.moment)

    def leave_mps(self, applied: dict[str, str] | None = None) -> None:
        """Take back the MPS variables that were applied, or those that were applied since then."""
        self.changes.back_to(applied or {}, self.moment)

    def limit_memory(self, device: str, fraction: float) -> None:
        """Let torch refuse to hold more than a share of the memory of a device."""
        allocator(device).limit(fraction)
        self._limits[canonical(device)] = fraction

    def limit(self, device: str) -> float | None:
        """Return the share of its memory at which torch refuses more; on MPS that is the high watermark.

        ``None`` where there is no limit, and where torch has read another value than stands in the environment.
        """
        watermark = self.environment(device).high_watermark if device == "mps" else None
        return self._limits.get(canonical(device), watermark) or None

    def low_watermark(self, device: str) -> float | None:
        """Return the share of its memory from which torch collects unused blocks; only MPS has one."""
        return watermarks(self.changes.environ)[1] if device == "mps" else None

    def environment(self, device: str) -> EnvPlan:
        """Return what became of the MPS variables for a device; living tensors are looked through only for mps."""
        return self.changes.plan(device, self.moment if device == "mps" else None)

    def candidates(self, chosen: str = "cpu") -> tuple[Candidate, ...]:
        """Return every device of this computer, with why it cannot be used and whether it was tried.

        Args:
            chosen: A device that is one of them, though torch may not have told yet which GPUs there are.
        """
        gpus = [f"cuda:{index}" for index in range(len(self.torch.cuda_names or ()))] or ["cuda"]
        if canonical(chosen) not in ("mps", "cpu", *map(canonical, gpus)):
            gpus.append(chosen)
        return tuple(
            Candidate(device, self._rejection(device), tried=device == "cpu" or self.torch.failure(device) == "")
            for device in ("mps", *gpus, "cpu")
        )

    def _try(self, device: str) -> None:
        """Load torch, or where it is loaded, compute on the device; either way more is known than before."""
        if not self.torch.loaded:
            self._torch = self._seam.loaded_torch()
        else:
            self._torch = self.torch.with_probe(device, self._seam.probe(device))
        self.changes.observe(self.moment)

    def _rejection(self, device: str) -> Rejection | None:
        return rejection(Surroundings(device, self.machine, self.torch, self.changes.shell))
