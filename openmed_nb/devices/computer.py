"""The computer that a session runs on: its facts, what torch says, and the environment variables that we change."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace

from .backend import TorchFacts, TorchSeam
from .causes import Surroundings
from .choice import Candidate, DeviceChoice, resolve
from .environment import UNSEEN, VARIABLES, EnvPlan, Moment, plan, watermarks
from .machine import Machine
from .registry import DEVICE_TYPES, device_of
from .request import TORCH_DEVICE_VARIABLE, DeviceRequest, canonical


class Computer:
    """Asks machine and torch, lets a GPU prove itself, and remembers every value that it writes to the environment."""

    def __init__(self, environ: MutableMapping[str, str], read_machine: Callable[[], Machine], seam: TorchSeam) -> None:
        self.environ = environ
        self.applied: dict[str, str] = {}  # The MPS variables that we set, with our values; replaced, never changed.
        self._read_machine = read_machine
        self._seam = seam
        self.importing: Callable[[], None] = lambda: None  # Called before torch is imported, which takes seconds.
        self._torch: TorchFacts | None = None
        self._limits: dict[str, float] = {}
        # What torch had done, and which values of the MPS variables it may have read, when we looked last.
        self._moment = Moment(seen=dict.fromkeys(VARIABLES, frozenset((UNSEEN,))))
        self._published: tuple[str | None, str] | None = None  # OPENMED_TORCH_DEVICE: what stood there, and our value.

    @functools.cached_property
    def machine(self) -> Machine:
        """The facts of this computer."""
        return self._read_machine()

    @property
    def torch(self) -> TorchFacts:
        """What is known of torch; importing it is left to others, but once it is loaded it is asked."""
        loaded = self._seam.torch_is_loaded()
        if self._torch is None or (loaded and not self._torch.loaded):
            self._torch = self._seam.loaded_torch() if loaded else self._seam.installed_torch()
        return self._torch

    @property
    def shell(self) -> dict[str, str]:
        """The environment variables as the person set them, without what we wrote."""
        variables = {name: value for name, value in self.environ.items() if self.applied.get(name) != value}
        if self._published and variables.get(TORCH_DEVICE_VARIABLE) == self._published[1]:
            del variables[TORCH_DEVICE_VARIABLE]
            if self._published[0] is not None:
                variables[TORCH_DEVICE_VARIABLE] = self._published[0]
        return variables

    @property
    def surroundings(self) -> Surroundings:
        """All facts that decide about a device."""
        return Surroundings(self.machine, self.torch, self.shell)

    def plan(self, request: DeviceRequest) -> DeviceChoice:
        """Return the device for a request from what is known so far; nothing is loaded and nothing is changed."""
        return resolve(request, self.surroundings)

    def confirm(self, request: DeviceRequest) -> DeviceChoice:
        """Return the device for a request after a GPU has computed; one that cannot is ruled out, and the next is taken.

        The environment of mps is applied before torch is loaded for it, and taken back where mps is ruled out.
        """
        applied = self.applied
        while True:
            choice = resolve(request, Surroundings(self.machine, self.torch, self.shell))
            device = choice.device
            if device == "cpu" or self.torch.failure(device) is not None:
                break
            if device == "mps":
                self.enter_mps()
            if self.torch.loaded:
                probes = (*self.torch.probes, (device, self._seam.probe(device)))
                self._torch = replace(self.torch, probes=probes)
                self.observe()
            else:
                self.load_torch()
        if device != "mps" and self.applied != applied:
            self.leave_mps(applied)
        return choice

    def load_torch(self) -> None:
        """Import torch, so that what it says of itself is known."""
        if not self.torch.loaded:
            if not self._seam.torch_is_loaded():
                self.importing()
            self._torch = self._seam.loaded_torch()
            self.observe()

    def candidates(self, chosen: str = "cpu") -> tuple[Candidate, ...]:
        """Return every device of this computer, with why it cannot be used and whether it was tried."""
        here = self.surroundings
        names = [name for kind in DEVICE_TYPES for name in device_of(kind).names(here.torch)]
        if canonical(chosen) not in map(canonical, names):
            names.insert(-1, chosen)  # torch may not have told yet which GPUs there are.
        return tuple(Candidate.of(device_of(name), here) for name in names)

    def observe(self, moment: Moment | None = None) -> Moment:
        """Keep watch over the values that torch may have read; call it around every change and every use of torch.

        ``moment`` is what torch had done before a change; without it, this looks now.
        """
        former = self._moment
        if moment is None:  # Living tensors are looked through only where MPS could be in use.
            loaded = self._seam.torch_is_loaded()
            started: bool | None = loaded and former.allocator_started
            if loaded and not started:
                probed = self._torch is not None and self._torch.failure("mps") is not None
                may_compute = self.machine.native_apple_silicon
                started = (probed or self._seam.mps_allocator_started()) if may_compute else None
            moment = Moment(loaded, started)
        seen = dict(former.seen)
        for name in VARIABLES:
            if not former.has_read(name):
                value = frozenset((self.environ.get(name),))
                seen[name] = value if moment.has_read(name) is False else seen[name] | value
        self._moment = replace(moment, seen=seen)
        return self._moment

    def environment(self, device: str) -> EnvPlan:
        """Return what became of the MPS variables for a device, and which a person set that torch does not read."""
        torch = self._torch.version if self._torch else None
        if device == "mps":
            return plan(self.shell, "mps", self.observe(), torch=torch)
        standing = {name: value for name, value in self.applied.items() if self.environ.get(name) == value}
        return plan(self.shell, device, applied=standing, torch=torch)

    def enter(self, device: str, former: str | None = None, published: bool = False) -> None:
        """Bring the environment in line with a device that takes the place of a former one.

        If ``published``, the device is written where the openmed package looks for it.
        """
        if device == "mps":
            self.enter_mps()
        elif former == "mps":
            self.leave_mps()
        if published:
            self._published = (self.shell.get(TORCH_DEVICE_VARIABLE), device)
            self.environ[TORCH_DEVICE_VARIABLE] = device

    def enter_mps(self) -> None:
        """Apply the MPS variables, in place of those that were applied before."""
        moment = self.observe()
        self._apply(plan(self.shell, "mps", moment).additions, moment)

    def leave_mps(self, applied: Mapping[str, str] | None = None) -> None:
        """Take back the MPS variables that were applied, or go back to those that had been."""
        self._apply(applied or {}, self.observe())

    def _apply(self, applied: Mapping[str, str], moment: Moment) -> None:
        """Set variables in place of those that we set; what a person has set since stays."""
        for name, value in self.applied.items():
            if self.environ.get(name) == value:
                del self.environ[name]
        for name, value in applied.items():
            self.environ.setdefault(name, value)
        self.applied = dict(applied)
        self.observe(moment)

    def unpublish(self) -> None:
        """Give ``OPENMED_TORCH_DEVICE`` its former value back, unless someone else changed it since."""
        former = self.shell.get(TORCH_DEVICE_VARIABLE)
        self._published = None
        if former is None:
            self.environ.pop(TORCH_DEVICE_VARIABLE, None)
        else:
            self.environ[TORCH_DEVICE_VARIABLE] = former

    def limit_memory(self, device: str, fraction: float) -> None:
        """Let torch refuse to hold more than a share of the memory of a device."""
        device_of(device).limit(fraction)
        self._limits[canonical(device)] = fraction

    def limit(self, device: str) -> float | None:
        """Return the share of its memory at which torch refuses more; on MPS that is the high watermark.

        ``None`` where there is no limit, and where torch has read another value than stands in the environment.
        """
        watermark = self.environment(device).high_watermark if device == "mps" else None
        return self._limits.get(canonical(device), watermark) or None

    def low_watermark(self, device: str) -> float | None:
        """Return the share of its memory from which torch collects unused blocks; only MPS has one."""
        return watermarks(self.environ)[1] if device == "mps" else None
