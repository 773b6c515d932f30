"""The computer that a session runs on: its facts, what torch says, and the environment variables that we change."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace

from .backend import TorchBackend, TorchInfo
from .causes import DeviceContext
from .choice import DeviceChoice, DeviceStatus, select_device
from .environment import UNOBSERVED, VARIABLES, EnvPlan, TorchState, plan_mps_variables, watermarks
from .machine import MachineInfo
from .registry import DEVICE_TYPES, parse_device_argument
from .request import TORCH_DEVICE_VARIABLE, DeviceRequest, normalize_device


class DeviceManager:
    """Asks machine and torch, lets a GPU prove itself, and remembers every value that it writes to the environment."""

    def __init__(
        self, environ: MutableMapping[str, str], read_machine: Callable[[], MachineInfo], seam: TorchBackend
    ) -> None:
        self.environ = environ
        self.applied_variables: dict[
            str, str
        ] = {}  # The MPS variables that we set, with our values; replaced, never changed.
        self._read_machine = read_machine
        self._torch_backend = seam
        self.on_torch_import: Callable[[], None] = lambda: None  # Called before torch is imported, which takes seconds.
        self._torch: TorchInfo | None = None
        self._limits: dict[str, float] = {}
        # What torch had done, and which values of the MPS variables it may have read, when we looked last.
        self._moment = TorchState(observed_values=dict.fromkeys(VARIABLES, frozenset((UNOBSERVED,))))
        self._published: tuple[str | None, str] | None = None  # OPENMED_TORCH_DEVICE: what stood there, and our value.

    @functools.cached_property
    def machine(self) -> MachineInfo:
        """The facts of this computer."""
        return self._read_machine()

    @property
    def torch(self) -> TorchInfo:
        """What is known of torch; importing it is left to others, but once it is loaded it is asked."""
        loaded = self._torch_backend.is_torch_imported()
        if self._torch is None or (loaded and not self._torch.is_imported):
            self._torch = (
                self._torch_backend.inspect_imported_torch()
                if loaded
                else self._torch_backend.inspect_installed_torch()
            )
        return self._torch

    @property
    def user_environ(self) -> dict[str, str]:
        """The environment variables as the person set them, without what we wrote."""
        variables = {name: value for name, value in self.environ.items() if self.applied_variables.get(name) != value}
        if self._published and variables.get(TORCH_DEVICE_VARIABLE) == self._published[1]:
            del variables[TORCH_DEVICE_VARIABLE]
            if self._published[0] is not None:
                variables[TORCH_DEVICE_VARIABLE] = self._published[0]
        return variables

    @property
    def surroundings(self) -> DeviceContext:
        """All facts that decide about a device."""
        return DeviceContext(self.machine, self.torch, self.user_environ)

    def plan(self, request: DeviceRequest) -> DeviceChoice:
        """Return the device for a request from what is known so far; nothing is loaded and nothing is changed."""
        return select_device(request, self.surroundings)

    def confirm(self, request: DeviceRequest) -> DeviceChoice:
        """Return the device for a request after a GPU has computed; one that cannot is ruled out, and the next is taken.

        The environment of mps is applied before torch is loaded for it, and taken back where mps is ruled out.
        """
        applied = self.applied_variables
        while True:
            choice = select_device(request, DeviceContext(self.machine, self.torch, self.user_environ))
            device = choice.device
            if device == "cpu" or self.torch.probe_failure(device) is not None:
                break
            if device == "mps":
                self.apply_mps_variables()
            if self.torch.is_imported:
                probes = (*self.torch.probes, (device, self._torch_backend.probe_device(device)))
                self._torch = replace(self.torch, probes=probes)
                self.track_variable_reads()
            else:
                self.load_torch()
        if device != "mps" and self.applied_variables != applied:
            self.restore_mps_variables(applied)
        return choice

    def load_torch(self) -> None:
        """Import torch, so that what it says of itself is known."""
        if not self.torch.is_imported:
            if not self._torch_backend.is_torch_imported():
                self.on_torch_import()
            self._torch = self._torch_backend.inspect_imported_torch()
            self.track_variable_reads()

    def list_devices(self, chosen: str = "cpu") -> tuple[DeviceStatus, ...]:
        """Return every device of this computer, with why it cannot be used and whether it was tried."""
        here = self.surroundings
        names = [name for kind in DEVICE_TYPES for name in parse_device_argument(kind).names(here.torch)]
        if normalize_device(chosen) not in map(normalize_device, names):
            names.insert(-1, chosen)  # torch may not have told yet which GPUs there are.
        return tuple(DeviceStatus.of(parse_device_argument(name), here) for name in names)

    def track_variable_reads(self, state: TorchState | None = None) -> TorchState:
        """Keep watch over the values that torch may have read; call it around every change and every use of torch.

        ``moment`` is what torch had done before a change; without it, this looks now.
        """
        former = self._moment
        if state is None:  # Living tensors are looked through only where MPS could be in use.
            loaded = self._torch_backend.is_torch_imported()
            started: bool | None = loaded and former.allocator_started
            if loaded and not started:
                probed = self._torch is not None and self._torch.probe_failure("mps") is not None
                may_compute = self.machine.native_apple_silicon
                started = (probed or self._torch_backend.is_mps_allocator_initialized()) if may_compute else None
            state = TorchState(loaded, started)
        seen = dict(former.observed_values)
        for name in VARIABLES:
            if not former.has_read(name):
                value = frozenset((self.environ.get(name),))
                seen[name] = value if state.has_read(name) is False else seen[name] | value
        self._moment = replace(state, observed_values=seen)
        return self._moment

    def mps_environment(self, device: str) -> EnvPlan:
        """Return what became of the MPS variables for a device, and which a person set that torch does not read."""
        torch = self._torch.version if self._torch else None
        if device == "mps":
            return plan_mps_variables(self.user_environ, "mps", self.track_variable_reads(), torch=torch)
        standing = {name: value for name, value in self.applied_variables.items() if self.environ.get(name) == value}
        return plan_mps_variables(self.user_environ, device, applied_variables=standing, torch=torch)

    def enter(self, device: str, former: str | None = None, published: bool = False) -> None:
        """Bring the environment in line with a device that takes the place of a former one.

        If ``published``, the device is written where the openmed package looks for it.
        """
        if device == "mps":
            self.apply_mps_variables()
        elif former == "mps":
            self.restore_mps_variables()
        if published:
            self._published = (self.user_environ.get(TORCH_DEVICE_VARIABLE), device)
            self.environ[TORCH_DEVICE_VARIABLE] = device

    def apply_mps_variables(self) -> None:
        """Apply the MPS variables, in place of those that were applied before."""
        moment = self.track_variable_reads()
        self._apply(plan_mps_variables(self.user_environ, "mps", moment).variables_to_set, moment)

    def restore_mps_variables(self, previous: Mapping[str, str] | None = None) -> None:
        """Take back the MPS variables that were applied, or go back to those that had been."""
        self._apply(previous or {}, self.track_variable_reads())

    def _apply(self, applied: Mapping[str, str], moment: TorchState) -> None:
        """Set variables in place of those that we set; what a person has set since stays."""
        for name, value in self.applied_variables.items():
            if self.environ.get(name) == value:
                del self.environ[name]
        for name, value in applied.items():
            self.environ.setdefault(name, value)
        self.applied_variables = dict(applied)
        self.track_variable_reads(moment)

    def restore_device_variable(self) -> None:
        """Give ``OPENMED_TORCH_DEVICE`` its former value back, unless someone else changed it since."""
        former = self.user_environ.get(TORCH_DEVICE_VARIABLE)
        self._published = None
        if former is None:
            self.environ.pop(TORCH_DEVICE_VARIABLE, None)
        else:
            self.environ[TORCH_DEVICE_VARIABLE] = former

    def limit_memory(self, device: str, fraction: float) -> None:
        """Let torch refuse to hold more than a share of the memory of a device."""
        parse_device_argument(device).limit(fraction)
        self._limits[normalize_device(device)] = fraction

    def memory_fraction(self, device: str) -> float | None:
        """Return the share of its memory at which torch refuses more; on MPS that is the high watermark.

        ``None`` where there is no limit, and where torch has read another value than stands in the environment.
        """
        watermark = self.mps_environment(device).high_watermark if device == "mps" else None
        return self._limits.get(normalize_device(device), watermark) or None

    def low_watermark(self, device: str) -> float | None:
        """Return the share of its memory from which torch collects unused blocks; only MPS has one."""
        return watermarks(self.environ)[1] if device == "mps" else None
