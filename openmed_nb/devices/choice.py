"""Device selection: the chosen device, the list of devices, and the explanation of the choice.

The rules that reject a device are in the class of its type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .._render.values import SIMULATED_SUFFIX, Displayable, JsonMixin, Report, Table, to_plain_data
from ..errors import DeviceUnavailableError, OpenMedError
from .device import Device, DeviceFacts, RejectionRule
from .environment import EnvPlan
from .registry import DEVICE_TYPES, get_device, gpu_type
from .request import (
    DEFAULT_SOURCE,
    GPU,
    DeviceRequest,
    DeviceSetting,
    first_explicit,
    normalize_device,
    source_name,
)


@dataclass(frozen=True)
class Rejection:
    """A device that cannot be used.

    Attributes:
        device: Name of the device.
        reason: Reason as a clause.
        remedy: Suggested action, empty if nothing can be done on this machine.
    """

    device: str
    reason: str
    remedy: str


USE_AUTO_REMEDY = "Use 'auto' to select the best available device."
# Values that Accelerate's str_to_bool reads as true. Its CPU switch applies only if no device is requested.
TRUTHY_VALUES = ("y", "yes", "t", "true", "on", "1")


@dataclass(frozen=True, repr=False)
class DeviceChoice(Displayable):
    """The active device and the reason for it.

    Attributes:
        device: Device in the notation of torch: ``"mps"``, ``"cuda"``, ``"cuda:N"`` or ``"cpu"``.
        requested: Requested device, ``"gpu"`` or ``"auto"``.
        requested_by: Source of the request; ``"default"`` if no device was requested.
        reason: Reason for the device, one sentence.
        confirmed: Whether the imported torch confirmed the device. Otherwise it is planned from the facts of the machine.
        rejected: Rejected devices, each with its reason and remedy.
        dtype: Recommended floating-point dtype.
        dtype_reason: Reason for the dtype.
        moved_models: Models that this choice moved to the device.
        simulated: Whether the machine is simulated. Measurements then do not represent the device.
        tuned_batch_tokens: Loaded models with a tuned batch size on the device, each with its tokens per batch.
        hardware: Clause that names a GPU, such as ``"the chip is Apple M4"``; empty if it is not known.
    """

    device: str
    requested: str
    requested_by: str
    reason: str
    confirmed: bool
    rejected: tuple[Rejection, ...] = ()
    dtype: str = "float32"
    dtype_reason: str = ""
    moved_models: tuple[str, ...] = ()
    simulated: bool = False
    tuned_batch_tokens: tuple[tuple[str, int], ...] = ()
    hardware: str = ""

    SIMULATION_MARKERS = ("", "")  # The reason names the simulated chip.

    def to_report(self) -> Report:
        """Return the report: device and reason, moved models, and collapsed the reasons why it is not a GPU."""
        sizes = tuple((model, f"{tokens:,}") for model, tokens in self.tuned_batch_tokens)
        tuned = Table("Tuned batch sizes", ("model", "tokens per batch"), sizes, collapsed=True)
        reasons = () if get_device(self.device).is_accelerator else self.rejected
        return Report(self.headline, self.facts, (gpu_reasons_table(reasons),), metrics=(tuned,))

    @property
    def facts(self) -> tuple[str, ...]:
        """Further facts as sentences: a check that is pending, models that were moved, and tuned batch sizes."""
        facts = list(self.notices)
        if self.moved_models:
            facts.append(f"Moved to {self.device}: {', '.join(self.moved_models)}.")
        if self.tuned_batch_tokens:
            models = ", ".join(model for model, _ in self.tuned_batch_tokens)
            facts.append(f"Tuned batch sizes on this machine: {models}.")
        return tuple(facts)

    @property
    def notices(self) -> tuple[str, ...]:
        """A sentence if the device is a GPU that was not checked yet."""
        if self.confirmed or not get_device(self.device).is_accelerator:
            return ()
        return ("The device is checked when it is first used.",)

    @property
    def headline(self) -> str:
        """The device and the reason for it, as a headline."""
        device = f"{self.device}{SIMULATED_SUFFIX if self.simulated else ''}"
        if self.requested != "auto":
            spelling = "" if self.requested == self.device else f" as {self.requested!r}"
            details = f"; {self.hardware}" if self.hardware else ""
            return f"Device: {device} (requested by {source_name(self.requested_by)}{spelling}{details})"
        hardware = self.hardware or "the first available device"
        if not get_device(self.device).is_accelerator:
            reasons = {rejection.reason for rejection in self.rejected}
            hardware = f"no GPU available to PyTorch on {self.computer}"
            if len(reasons) == 1:  # A single reason, such as a variable, applies to every GPU.
                hardware = reasons.pop()
        return f"Device: {device} (selected automatically: {hardware})"

    @property
    def status(self) -> str:
        """Whether the device is confirmed, as text."""
        status = "confirmed" if self.confirmed else "not checked yet, because torch has not been imported"
        return f"SIMULATED, {status}" if self.simulated else status

    @property
    def computer(self) -> str:
        """The machine, as text."""
        return "a SIMULATED Mac" if self.simulated else "this machine"


GPU_QUESTION = "Why not a GPU?"


def gpu_reasons_table(devices: Iterable[Rejection | DeviceStatus], caption: str = GPU_QUESTION) -> Table:
    """Return a collapsed table of the reasons against devices."""
    rows = tuple((device.device, device.reason, device.remedy) for device in devices)
    return Table(caption, ("device", "reason", "suggested action"), rows, collapsed=True)


def select_device(request: DeviceRequest, facts: DeviceFacts) -> DeviceChoice:
    """Select the device for a request.

    ``auto`` selects the first usable device of mps, cuda and cpu, and ``gpu`` the GPU type of the operating system.

    Raises:
        DeviceUnavailableError: If no candidate can be used. The remedy is that of the last candidate, which has the
            fewest requirements.
    """
    value = request.value
    source = source_name(request.source)
    torch = facts.torch
    candidates = [value]
    cpu_switch = ""
    if value == GPU:
        candidates = [gpu_type(facts.machine)]
    elif value == "auto":
        candidates = [*DEVICE_TYPES]
        use_cpu = facts.environ.get("ACCELERATE_USE_CPU", "")
        if use_cpu.strip().lower() in TRUTHY_VALUES:
            cpu_switch = f"ACCELERATE_USE_CPU={use_cpu} requests the CPU"
    rejected: list[Rejection] = []
    for name in candidates:
        device = get_device(name)
        rule = next(device.rejection_rules(facts), None)
        if cpu_switch and device.is_accelerator:
            rule = RejectionRule("switch", cpu_switch, "Unset ACCELERATE_USE_CPU.")
        if rule is not None:
            rejected.append(Rejection(name, rule.reason, rule.remedy))
            continue
        reason = f"{value!r} was requested by {source}"
        if value == "auto":
            automatic = "No device was requested" if request.source == DEFAULT_SOURCE else reason
            cause = f"{name} has the highest priority"
            if rejected:
                devices = " and ".join(rejection.device for rejection in rejected)
                cause = f"{devices} {'is' if len(rejected) == 1 else 'are'} unavailable"
            reason = f"{automatic}, and {cpu_switch or cause}"
        hardware = device.describe_hardware(facts) if device.is_accelerator else ""
        return DeviceChoice(
            device=name,
            requested=value,
            requested_by=request.source,
            reason=f"{reason}; {hardware}." if hardware else f"{reason}.",
            confirmed=torch.is_imported and (not device.is_accelerator or torch.probe_failure(name) == ""),
            rejected=tuple(rejected),
            dtype_reason=device.float32_reason,
            simulated=facts.machine.simulated,
            hardware=hardware,
        )
    reasons = rejected[0].reason
    if len(rejected) > 1:
        reasons = "; ".join(f"{rejection.device}: {rejection.reason}" for rejection in rejected)
    raise DeviceUnavailableError(
        f"{value!r} is not available (requested by {source}): {reasons}.", rejected[-1].remedy or USE_AUTO_REMEDY
    )


@dataclass(frozen=True)
class DeviceStatus(JsonMixin):
    """Availability of a device of this machine.

    Attributes:
        device: Name of the device.
        usable: Whether it can be used, or ``None`` if it has not been tested.
        reason: Reason why it cannot be used or is not tested.
        remedy: Suggested action, empty if there is none.
        is_absent: Whether this machine does not have the hardware, as far as this is known.
    """

    device: str
    usable: bool | None = True
    reason: str = ""
    remedy: str = ""
    is_absent: bool = False

    JSON_EXCLUDE = ("is_absent",)

    @classmethod
    def of(cls, device: Device, facts: DeviceFacts) -> DeviceStatus:
        """Return the status of a device from the available facts. A GPU counts as tested after a device check."""
        rule = next(device.rejection_rules(facts), None)
        if rule is not None:
            return cls(device.name, False, rule.reason, rule.remedy, rule.is_absent)
        if device.is_accelerator and facts.torch.probe_failure(device.name) is None:
            return cls(device.name, None, "not tested yet", f"%openmed_device {device.name}")
        return cls(device.name)


@dataclass(frozen=True, repr=False)
class DeviceList(Displayable):
    """All devices of this machine and their status.

    Attributes:
        devices: The devices.
        choice: The active choice, or ``None`` if the device request is in error.
    """

    devices: tuple[DeviceStatus, ...]
    choice: DeviceChoice | None = None

    @property
    def unavailable(self) -> tuple[DeviceStatus, ...]:
        """The GPUs, if none of them can be used."""
        gpus = tuple(status for status in self.devices if status.device != "cpu")
        return () if any(status.usable is not False for status in gpus) else gpus

    @property
    def has_mps(self) -> bool:
        """Whether this machine has MPS hardware, or may have it."""
        return not any(status.is_absent and status.device == "mps" for status in self.devices)

    def to_dict(self) -> dict[str, object]:
        """Return the devices and the name of the active device as JSON-compatible values."""
        return {"devices": to_plain_data(self.devices), "active_device": self.choice.device if self.choice else None}

    def to_report(self) -> Report:
        """Return the report: a table with one row per device."""
        labels = {True: "usable", False: "unavailable", None: "not tested"}
        computer = "this machine" if self.choice is None else self.choice.computer
        rows = []
        for candidate in self.devices:
            label = labels[candidate.usable]
            if self.choice is not None and normalize_device(candidate.device) == normalize_device(self.choice.device):
                label = "active"
            rows.append((candidate.device, label, candidate.reason, candidate.remedy))
        table = Table("", ("device", "status", "reason", "suggested action"), tuple(rows))
        return Report(f"Devices on {computer}", tables=(table,))


@dataclass(frozen=True, repr=False)
class Explanation(Displayable):
    """Explanation of the device choice: settings, rejected devices and environment.

    Attributes:
        resolution_order: Device settings, highest priority first.
        choice: The choice, or the error that prevented it.
        environment: The MPS variables.
        variables: Other relevant variables from an allow list, with secrets masked.
        unreleased: Version and kind of a torch that is not a release, such as a nightly build; empty for a release.
    """

    resolution_order: tuple[DeviceSetting, ...]
    choice: DeviceChoice | OpenMedError
    environment: EnvPlan
    variables: Mapping[str, str]
    unreleased: str = ""

    def to_report(self) -> Report:
        """Return the report: the choice or the error, and up to four tables."""
        decisive = first_explicit(self.resolution_order)
        rows = [
            (setting.source, setting.display_value, "used" if setting is decisive else "")
            for setting in self.resolution_order
        ]
        rows.append(("automatic", ", then ".join(DEVICE_TYPES), "" if decisive else "used"))
        order = Table(
            "Settings that can determine the device (highest priority first)",
            ("source", "value", "result"),
            tuple(rows),
        )
        choice = self.choice
        if isinstance(choice, OpenMedError):
            report = Report("Device: none", (choice.message, choice.remedy))
            rejected: tuple[Rejection, ...] = ()
        else:
            sentences = (
                f"Status: {choice.status}.",
                f"Data type {choice.dtype}: {choice.dtype_reason}.",
                *choice.facts,
            )
            report = replace(choice.to_report(), sentences=sentences)
            rejected = choice.rejected
        reasons = gpu_reasons_table(rejected, "Devices that cannot be used")
        variables = Table("Other variables", ("variable", "value"), tuple(self.variables.items()))
        torch = (f"torch is {self.unreleased}.",) if self.unreleased else ()
        tables = (order, reasons, self.environment.table(), variables)
        return replace(report, sentences=(*report.sentences, *torch), tables=tables)
