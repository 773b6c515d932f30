"""The machine of a session: its facts, the state of torch, and the environment variables that the package sets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import NamedTuple

from ..errors import ConfigurationError
from .backend import TorchBackend, TorchInfo
from .choice import DeviceChoice, DeviceStatus, select_device
from .device import DeviceFacts, RejectionRule
from .environment import UNOBSERVED, VARIABLES, EnvPlan, TorchState, plan_mps_variables
from .machine import MachineInfo, RunCommand, run_command
from .registry import DEVICE_TYPES, get_device
from .request import TORCH_DEVICE_VARIABLE, DeviceRequest, normalize_device


class _ExportedDevice(NamedTuple):
    """Value that the package wrote to ``OPENMED_TORCH_DEVICE``, and the value before."""

    device: str
    previous: str | None


def _do_nothing() -> None:
    """Ignore an event."""


class DeviceManager:
    """Selects and checks devices, and records every value that it writes to the environment.

    Args:
        environ: Environment variables, which are changed.
        read_machine: Function that returns the facts of the machine. It is called once, on first use.
        torch_backend: Adapter to torch.
        run: Function that runs a command of the machine, such as ``ioreg``.
    """

    def __init__(
        self,
        environ: MutableMapping[str, str],
        read_machine: Callable[[], MachineInfo],
        torch_backend: TorchBackend,
        run: RunCommand = run_command,
    ) -> None:
        self.environ = environ
        self.run = run
        # MPS variables that the package set, with their values. The dict is replaced and never changed in place.
        self.applied_variables: dict[str, str] = {}
        self._read_machine = read_machine
        self._torch_backend = torch_backend
        self.on_torch_import: Callable[[], None] = _do_nothing  # Called before torch is imported, which takes seconds.
        # Called once, before torch is used for the first time. It may raise the error of an import in the background.
        self.on_torch_use: Callable[[], None] | None = None
        self._torch: TorchInfo | None = None
        self._memory_fractions: dict[str, float] = {}
        # State of torch and values of the MPS variables that it may have read, as of the last check.
        self._state = TorchState(observed_values=dict.fromkeys(VARIABLES, frozenset((UNOBSERVED,))))
        self._exported: _ExportedDevice | None = None

    @functools.cached_property
    def machine(self) -> MachineInfo:
        """Facts of this machine."""
        return self._read_machine()

    @property
    def torch(self) -> TorchInfo:
        """Facts of torch, from its files or, once another module imported it, from torch itself."""
        if self._torch_backend.is_torch_imported():
            if self._torch is None or not self._torch.is_imported:
                self._report_torch_use()
                self._torch = self._torch_backend.inspect_imported_torch()
        elif self._torch is None:
            self._torch = self._torch_backend.inspect_installed_torch()
        return self._torch

    @property
    def user_environ(self) -> dict[str, str]:
        """Environment variables as the user set them, without the values that the package wrote."""
        variables = {name: value for name, value in self.environ.items() if self.applied_variables.get(name) != value}
        exported = self._exported
        if exported and variables.get(TORCH_DEVICE_VARIABLE) == exported.device:
            del variables[TORCH_DEVICE_VARIABLE]
            if exported.previous is not None:
                variables[TORCH_DEVICE_VARIABLE] = exported.previous
        return variables

    @property
    def device_facts(self) -> DeviceFacts:
        """Facts that determine the availability of devices."""
        return DeviceFacts(self.machine, self.torch, self.user_environ)

    def plan(self, request: DeviceRequest) -> DeviceChoice:
        """Return the device for a request from the available facts, without importing torch or changing anything."""
        return select_device(request, self.device_facts)

    def confirm(self, request: DeviceRequest) -> DeviceChoice:
        """Return the device for a request after the device check of a GPU. If it fails, the next device is selected.

        The MPS variables are set before torch is imported for mps, and restored if mps is rejected.
        """
        applied = self.applied_variables
        while True:
            choice = select_device(request, self.device_facts)
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

    def forget_failed_probes(self) -> None:
        """Check devices again whose check has failed, because another program may have used their memory."""
        if self._torch is not None:
            self._torch = replace(self._torch, probes=tuple(probe for probe in self._torch.probes if not probe[1]))

    def load_torch(self) -> None:
        """Import torch and read its facts."""
        if not self.torch.is_imported:
            if not self._torch_backend.is_torch_imported():
                self.on_torch_import()
            self._report_torch_use()
            self._torch = self._torch_backend.inspect_imported_torch()
            self.track_variable_reads()

    def _report_torch_use(self) -> None:
        """Call ``on_torch_use`` once."""
        report = self.on_torch_use
        self.on_torch_use = None
        if report is not None:
            report()

    def list_devices(self, chosen: str = "cpu") -> tuple[DeviceStatus, ...]:
        """Return every device of this machine with its status."""
        device_facts = self.device_facts
        names = [name for kind in DEVICE_TYPES for name in get_device(kind).names(device_facts.torch)]
        if normalize_device(chosen) not in map(normalize_device, names):
            names.insert(-1, chosen)  # torch may not have reported its GPUs yet.
        return tuple(DeviceStatus.of(get_device(name), device_facts) for name in names)

    def track_variable_reads(self, state: TorchState | None = None) -> TorchState:
        """Record the values of the MPS variables that torch may have read. Call it around every change and use of torch.

        Args:
            state: State of torch before a change. If ``None``, the current state.

        Returns:
            The state with all observed values.
        """
        previous = self._state
        if state is None:
            is_imported = self._torch_backend.is_torch_imported()
            started = previous.allocator_started
            if is_imported and not started:
                started = None
                if self.machine.native_apple_silicon:  # Otherwise MPS is not in use, and no tensors are searched.
                    was_probed = self._torch is not None and self._torch.probe_failure("mps") is not None
                    started = was_probed or self._torch_backend.is_mps_allocator_initialized()
            state = TorchState(is_imported, started)
        observed = dict(previous.observed_values)
        for name in VARIABLES:
            if not previous.has_read(name):
                value = frozenset((self.environ.get(name),))
                observed[name] = value if state.has_read(name) is False else observed[name] | value
        self._state = replace(state, observed_values=observed)
        return self._state

    def mps_environment(self, device: str) -> EnvPlan:
        """Return the MPS variables for a device."""
        if device == "mps":
            return plan_mps_variables(self.user_environ, "mps", self.track_variable_reads())
        applied = {name: value for name, value in self.applied_variables.items() if self.environ.get(name) == value}
        return plan_mps_variables(self.user_environ, device, applied_variables=applied)

    def dtype_rejection(self, dtype: str, device: str) -> RejectionRule | None:
        """Return the reason why a dtype is neither validated nor recommended on a device, or ``None`` if it can be used."""
        return get_device(device).dtype_rejection(dtype, self.torch.release, self.machine)

    def check_dtype(self, dtype: str, device: str) -> None:
        """Raise an error if a dtype is neither validated nor recommended on a device."""
        if rule := self.dtype_rejection(dtype, device):
            raise ConfigurationError(f"{dtype} cannot be used on {device}: {rule.reason}.", rule.remedy)

    def enter(self, device: str, previous: str | None = None, export: bool = False) -> None:
        """Update the environment variables for a new device.

        Args:
            device: The new device.
            previous: The previous device, or ``None``.
            export: Whether to set the variable that the openmed package reads.
        """
        if device == "mps":
            self.apply_mps_variables()
        elif previous == "mps":
            self.restore_mps_variables()
        if export:
            self._exported = _ExportedDevice(device, previous=self.user_environ.get(TORCH_DEVICE_VARIABLE))
            self.environ[TORCH_DEVICE_VARIABLE] = device

    def apply_mps_variables(self) -> None:
        """Set the MPS variables, replacing those that were applied before."""
        self.restore_mps_variables(plan_mps_variables(self.user_environ).variables_to_set)

    def restore_mps_variables(self, previous: Mapping[str, str] | None = None) -> None:
        """Remove the applied MPS variables, or replace them. Values that the user has set since then are preserved.

        Args:
            previous: Variables to apply instead.
        """
        state = self.track_variable_reads()
        for name, value in self.applied_variables.items():
            if self.environ.get(name) == value:
                del self.environ[name]
        self.applied_variables = dict(previous or {})
        for name, value in self.applied_variables.items():
            self.environ.setdefault(name, value)
        self.track_variable_reads(state)

    def restore_device_variable(self) -> None:
        """Restore the previous value of ``OPENMED_TORCH_DEVICE``, unless it was changed since then."""
        previous = self.user_environ.get(TORCH_DEVICE_VARIABLE)
        self._exported = None
        if previous is None:
            self.environ.pop(TORCH_DEVICE_VARIABLE, None)
        else:
            self.environ[TORCH_DEVICE_VARIABLE] = previous

    def limit_memory(self, device: str, fraction: float) -> None:
        """Limit the memory that torch may allocate to a fraction of the device memory."""
        get_device(device).set_memory_fraction(fraction)
        self._memory_fractions[normalize_device(device)] = fraction

    def memory_fraction(self, device: str) -> float | None:
        """Return the fraction of the device memory that torch may allocate; on MPS this is the high watermark.

        Returns:
            The fraction, or ``None`` if there is no limit or torch has read another value than the environment has.
        """
        watermark = self.mps_environment(device).high_watermark if device == "mps" else None
        return self._memory_fractions.get(normalize_device(device), watermark) or None
