"""Which device, and why: the choice and its explanation; each device's own class knows what speaks against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .._render.display import SIMULATED_SUFFIX, Displayable, JsonMixin, Report, Table, to_plain_data
from ..errors import DeviceUnavailableError, OpenMedError
from .causes import DeviceContext, RejectionRule
from .device import Device
from .environment import EnvPlan
from .registry import DEVICE_TYPES, parse_device_argument
from .request import DEFAULT_SOURCE, DeviceRequest, DeviceSetting, first_explicit, normalize_device


@dataclass(frozen=True)
class Rejection:
    """A device that cannot be used, why, and one thing to do about it, empty where nothing can be done here."""

    device: str
    reason: str
    remedy: str


USE_AUTO_REMEDY = "Use 'auto', which takes the best device of this computer."
# What Accelerate's str_to_bool reads as on; its switch for the CPU counts only if nobody asks for a device.
TRUTHY_VALUES = ("y", "yes", "t", "true", "on", "1")


@dataclass(frozen=True, repr=False)
class DeviceChoice(Displayable):
    """The device in force, and why.

    Attributes:
        device: ``"mps"``, ``"cuda"``, ``"cuda:N"`` or ``"cpu"``: what ``Tensor.to`` takes.
        requested: What was asked for: a device, ``"gpu"`` or ``"auto"``.
        requested_by: Who asked; ``"nobody"`` where nothing was asked for.
        reason: Why this device, in one sentence.
        certain: Whether torch, loaded, confirmed it; otherwise it is planned from the facts of the machine.
        rejected: The candidates that were ruled out, each with its reason and its remedy.
        dtype: The recommended floating-point type.
        dtype_reason: Why that type.
        moved: The models that this choice moved to the device.
        simulated: Whether the computer is a simulated one; no figure of it is one of the device.
        learned: The loaded models whose batches were measured on the device, with how many tokens run at once.
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

    SIMULATION_MARKERS = ("", "")  # Its reason names the simulated chip.

    def to_report(self) -> Report:
        """Return what there is to show: the device, why, the type, what moved, what was ruled out and the remedies."""
        facts = [f"{self.dtype}: {self.dtype_reason}."]
        if self.moved_models:
            facts.append(f"Moved to {self.device}: {', '.join(self.moved_models)}.")
        tables: tuple[Table, ...] = ()
        figures: tuple[Table, ...] = ()
        if self.tuned_batch_tokens:
            facts.append(
                f"Batches as they were measured here: {', '.join(name for name, _ in self.tuned_batch_tokens)}."
            )
            learned = tuple((name, f"{tokens:,}") for name, tokens in self.tuned_batch_tokens)
            figures = (Table("Measured here", ("model", "tokens at once"), learned, collapsed=True),)
        if self.rejected:
            rows = tuple((rejection.device, rejection.reason, rejection.remedy) for rejection in self.rejected)
            tables = (Table("Ruled out", ("device", "why", "what to do"), rows, collapsed=True),)
        spoken = [self.headline]
        if not self.confirmed:
            spoken.append(f"It is {self.status}.")
        return Report(
            f"Device: {self.device} ({self.status})",
            (self.reason, *facts),
            tables,
            metrics=figures,
            html_sentences=(*spoken, *facts),
        )

    @property
    def headline(self) -> str:
        """The device and why, as a person would say it."""
        device = f"{self.device}{SIMULATED_SUFFIX if self.simulated else ''}"
        hardware = self.reason.rstrip(".").partition("; ")[2]
        if self.requested != "auto":
            wish = "" if self.requested == self.device else f" as {self.requested!r}"
            asked = f"Device: {device}, asked for by {self.requested_by}{wish}"
            return f"{asked}: {hardware}" if hardware else asked
        if not hardware:
            reasons = {rejection.reason for rejection in self.rejected}
            hardware = f"{self.computer} has no GPU that torch can use"
            if len(reasons) == 1:  # A single one, such as a variable, speaks against every GPU.
                hardware = reasons.pop()
        return f"Device: {device}, chosen automatically: {hardware}"

    @property
    def status(self) -> str:
        """How sure this is, in a word or two."""
        sure = "confirmed" if self.confirmed else "planned; torch is not loaded yet"
        return f"SIMULATED, {sure}" if self.simulated else sure

    @property
    def computer(self) -> str:
        """Which computer this is about."""
        return "a SIMULATED Mac" if self.simulated else "this computer"


def select_device(request: DeviceRequest, here: DeviceContext) -> DeviceChoice:
    """Choose the device for a request: ``auto`` takes the first usable of mps, cuda and cpu, ``gpu`` the kind of the system.

    Where no candidate can be used, the remedy of the DeviceUnavailableError is that of the last, which needs the least.
    """
    value = request.value
    torch = here.torch
    candidates = [value]
    switch = ""
    if value == "gpu":
        candidates = [here.machine.gpu]
    elif value == "auto":
        candidates = [*DEVICE_TYPES]
        asked = here.environ.get("ACCELERATE_USE_CPU", "")
        if asked.strip().lower() in TRUTHY_VALUES:
            switch = f"ACCELERATE_USE_CPU={asked} asks for the CPU"
    rejected: list[Rejection] = []
    for name in candidates:
        device = parse_device_argument(name)
        cause = next(device.causes(here), None)
        if switch and device.is_accelerator:
            cause = RejectionRule("switch", switch, "Unset ACCELERATE_USE_CPU.")
        if cause is not None:
            rejected.append(Rejection(name, cause.reason, cause.remedy))
            continue
        if value != "auto":
            reason = f"{value!r} was asked for by {request.source}"
        else:
            source = (
                "No device was asked for"
                if request.source == DEFAULT_SOURCE
                else f"'auto' was asked for by {request.source}"
            )
            others = " and ".join(other.device for other in rejected)
            why = switch or (f"{others} cannot be used here" if others else f"{name} comes first")
            reason = f"{source}, and {why}"
        hardware = device.hardware(here) if device.is_accelerator else ""
        return DeviceChoice(
            device=name,
            requested=value,
            requested_by=request.source,
            reason=f"{reason}; {hardware}." if hardware else f"{reason}.",
            confirmed=torch.is_imported and (not device.is_accelerator or torch.probe_failure(name) == ""),
            rejected=tuple(rejected),
            dtype_reason=device.float32_reason,
            simulated=here.machine.simulated,
        )
    reasons = rejected[0].reason
    if len(rejected) > 1:
        reasons = "; ".join(f"{rejection.device}: {rejection.reason}" for rejection in rejected)
    what = f"{value!r} (asked for by {request.source}) cannot be used: {reasons}."
    raise DeviceUnavailableError(what, rejected[-1].remedy or USE_AUTO_REMEDY)


@dataclass(frozen=True)
class DeviceStatus(JsonMixin):
    """A device of this computer."""

    device: str  # Its name.
    usable: bool | None = True  # Whether it can be used; ``None`` if it was not tried.
    reason: str = ""  # Why it cannot be used, or that nobody tried.
    remedy: str = ""  # One thing to do, empty where there is nothing to do.

    @classmethod
    def of(cls, device: Device, here: DeviceContext) -> DeviceStatus:
        """Return what is known of a device so far; a GPU was tried where it has computed."""
        cause = next(device.causes(here), None)
        if cause is not None:
            return cls(device.name, False, cause.reason, cause.remedy)
        if device.is_accelerator and here.torch.probe_failure(device.name) is None:
            return cls(device.name, None, "no computation on it was tried yet", f"%openmed_device {device.name}")
        return cls(device.name)


@dataclass(frozen=True, repr=False)
class DeviceList(Displayable):
    """Every device of this computer, with why it cannot be used where it cannot.

    Attributes:
        candidates: The devices.
        choice: The choice in force, ``None`` where the wishes are in error.
    """

    devices: tuple[DeviceStatus, ...]
    choice: DeviceChoice | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the devices as plain mappings, ready for JSON."""
        return {"devices": to_plain_data(self.devices), "active_device": self.choice.device if self.choice else None}

    def to_report(self) -> Report:
        """Return what there is to show: one row for each device."""
        states = {True: "usable", False: "cannot be used", None: "not tried"}
        computer = "this computer" if self.choice is None else self.choice.computer
        rows = []
        for candidate in self.devices:
            state = states[candidate.usable]
            if self.choice is not None and normalize_device(candidate.device) == normalize_device(self.choice.device):
                state = "in force"
            rows.append((candidate.device, state, candidate.reason, candidate.remedy))
        table = Table("", ("device", "state", "why", "what to do"), tuple(rows))
        return Report(f"Devices of {computer}", tables=(table,))


@dataclass(frozen=True, repr=False)
class Explanation(Displayable):
    """The way to the choice: who wished what, what was ruled out, and what became of the environment.

    Attributes:
        chain: The wishes, the strongest first.
        choice: The choice that came out, or the error that did.
        environment: The MPS variables.
        variables: Other variables that matter, from an allow list, with secrets masked.
        unreleased: The version of a torch that is no release, and what it is, such as a nightly build; empty for a release.
    """

    resolution_order: tuple[DeviceSetting, ...]
    choice: DeviceChoice | OpenMedError
    environment: EnvPlan
    variables: Mapping[str, str]
    unreleased: str = ""

    def to_report(self) -> Report:
        """Return what there is to show: the choice or the error, and up to four tables."""
        decides = first_explicit(self.resolution_order)
        chain = tuple(
            (wish.source, wish.display_value, "decides" if wish is decides else "") for wish in self.resolution_order
        )
        automatic = ("automatic", ", then ".join(DEVICE_TYPES), "" if decides else "decides")
        asked = Table("Who asks, the strongest first", ("source", "says", "result"), (*chain, automatic))
        if isinstance(self.choice, OpenMedError):
            answer = Report("Device: none", (self.choice.message, self.choice.remedy))
        else:
            answer = self.choice.to_report()
        others = Table("Other variables", ("variable", "value"), tuple(self.variables.items()))
        torch = (f"torch is {self.unreleased}.",) if self.unreleased else ()
        tables = (asked, *answer.tables, self.environment.table(), others)
        return replace(answer, sentences=(*answer.sentences, *torch), tables=tables)
