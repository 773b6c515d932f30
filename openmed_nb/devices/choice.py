"""The resolver: a request and the facts in, a DeviceChoice with its reasons out. Pure: it asks nobody."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import DeviceUnavailable
from ..interface.display import Report, Shown, Table
from .availability import Rejection, Surroundings, rejection
from .backend import TorchFacts
from .machine import Machine
from .request import NOBODY, DeviceRequest, kind_of

AUTO_ORDER = ("mps", "cuda", "cpu")

FLOAT32_REASONS = {
    "mps": "float64 does not exist on MPS, and reduced precision has not been validated for this model",
    "cuda": "reduced precision has not been validated for this model",
    "cpu": "16-bit types are slower than float32 on most CPUs",
}


@dataclass(frozen=True, repr=False)
class DeviceChoice(Shown):
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
    """

    device: str
    requested: str
    requested_by: str
    reason: str
    certain: bool
    rejected: tuple[Rejection, ...] = ()
    dtype: str = "float32"
    dtype_reason: str = ""
    moved: tuple[str, ...] = ()
    simulated: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the choice as plain mappings, lists and strings, ready for JSON."""
        plain = {**vars(self), "moved": list(self.moved)}
        return {**plain, "rejected": [rejection.to_dict() for rejection in self.rejected]}

    def report(self) -> Report:
        """Return what there is to show: the device, why, the type, what moved, what was ruled out and the remedies."""
        sentences = [self.reason, f"{self.dtype}: {self.dtype_reason}."]
        if self.moved:
            sentences.append(f"Moved to {self.device}: {', '.join(self.moved)}.")
        tables = (rejection_table(self.rejected),) if self.rejected else ()
        return Report(f"Device: {self.device} ({self.grade})", tuple(sentences), tables=tables)

    @property
    def grade(self) -> str:
        """How sure this is, in a word or two."""
        sure = "confirmed" if self.certain else "planned; torch is not loaded yet"
        return f"SIMULATED, {sure}" if self.simulated else sure

    @property
    def computer(self) -> str:
        """Which computer this is about."""
        return "a SIMULATED Mac" if self.simulated else "this computer"


def resolve(
    request: DeviceRequest, machine: Machine, torch: TorchFacts, environ: Mapping[str, str] | None = None
) -> DeviceChoice:
    """Choose the device for a request.

    Args:
        request: The wish, and whose it is.
        machine: The facts of this computer.
        torch: What is known of torch: planned from its files, or confirmed by torch itself.
        environ: The environment variables.

    Returns:
        The choice. ``auto`` takes the first usable of mps, cuda and cpu, ``gpu`` the kind of this system.

    Raises:
        DeviceUnavailable: Where no candidate can be used; its remedy is that of the last, which needs the least.

    Example:
        >>> linux = Machine("Linux", "x86_64", gpu_driver=False)
        >>> choice = resolve(DeviceRequest("auto", "nobody"), linux, TorchFacts("2.13.0+cpu", gpu_build=""))
        >>> choice.device, [rejected.device for rejected in choice.rejected], choice.certain
        ('cpu', ['mps', 'cuda'], False)
    """
    environ = environ or {}
    switch = _cpu_switch(request, environ)
    rejected: list[Rejection] = []
    for device in candidates(request, machine):
        found = _switched_off(device, switch) or rejection(Surroundings(device, machine, torch, environ))
        if found is None:
            reason = _reason(request, tuple(rejected), switch) + _hardware(device, machine, torch)
            choice = _choice(request, device, f"{reason}.", tuple(rejected), torch)
            return replace(choice, simulated=machine.simulated)
        rejected.append(found)
    raise unavailable(request, rejected)


def candidates(request: DeviceRequest, machine: Machine) -> tuple[str, ...]:
    """Return the devices that would satisfy a request, the best first; macOS has no CUDA, and only macOS has MPS.

    Example:
        >>> candidates(DeviceRequest("gpu", "argument"), Machine("Darwin", "arm64"))
        ('mps',)
    """
    gpu = "mps" if machine.system == "Darwin" else "cuda"
    return {"auto": AUTO_ORDER, "gpu": (gpu,)}.get(request.value, (request.value,))


def needs_probe(choice: DeviceChoice, torch: TorchFacts) -> bool:
    """Tell whether the chosen device still has to prove itself by computing; the CPU has not."""
    return choice.device != "cpu" and torch.failure(choice.device) is None


def unavailable(request: DeviceRequest, rejected: Iterable[Rejection]) -> DeviceUnavailable:
    """Return the error for a request that no device satisfies."""
    found = list(rejected)
    reasons = "; ".join(f"{one.device}: {one.reason}" if len(found) > 1 else one.reason for one in found)
    return DeviceUnavailable(
        f"{request.value!r} (asked for by {request.source}) cannot be used: {reasons}.", found[-1].remedy
    )


def rejection_table(rejected: tuple[Rejection, ...]) -> Table:
    """Return the table of the devices that were ruled out."""
    rows = tuple((one.device, one.reason, one.remedy) for one in rejected)
    return Table("Ruled out", ("device", "why", "what to do"), rows)


def accelerate_wants_cpu(environ: Mapping[str, str]) -> bool:
    """Tell whether Accelerate's switch for the CPU is on: in the words of its ``str_to_bool``, perhaps between spaces.

    Example:
        >>> accelerate_wants_cpu({"ACCELERATE_USE_CPU": "True"}), accelerate_wants_cpu({"ACCELERATE_USE_CPU": "no"})
        (True, False)
    """
    return environ.get("ACCELERATE_USE_CPU", "").strip().lower() in ("y", "yes", "t", "true", "on", "1")


def _cpu_switch(request: DeviceRequest, environ: Mapping[str, str]) -> str:
    """Return what switches the GPUs off for a request, empty where nothing does."""
    off = request.value == "auto" and accelerate_wants_cpu(environ)
    return f"ACCELERATE_USE_CPU={environ['ACCELERATE_USE_CPU']} asks for the CPU" if off else ""


def _switched_off(device: str, switch: str) -> Rejection | None:
    return Rejection(device, switch, "Unset ACCELERATE_USE_CPU.") if switch and device != "cpu" else None


def _choice(
    request: DeviceRequest, device: str, reason: str, rejected: tuple[Rejection, ...], torch: TorchFacts
) -> DeviceChoice:
    kind = kind_of(device)
    return DeviceChoice(
        device=device,
        requested=request.value,
        requested_by=request.source,
        reason=reason,
        certain=torch.loaded and (kind == "cpu" or torch.failure(device) == ""),
        rejected=rejected,
        dtype_reason=FLOAT32_REASONS[kind],
    )


def _reason(request: DeviceRequest, rejected: tuple[Rejection, ...], switch: str) -> str:
    if request.asks:
        return f"{request.value!r} was asked for by {request.source}"
    asked = "No device was asked for" if request.source == NOBODY else f"'auto' was asked for by {request.source}"
    others = " and ".join(one.device for one in rejected)
    why = switch or (f"{others} cannot be used here" if others else f"{AUTO_ORDER[0]} comes first")
    return f"{asked}, and {why}"


def _hardware(device: str, machine: Machine, torch: TorchFacts) -> str:
    if device == "mps":
        return f"; the chip is {machine.chip or 'Apple Silicon'}"
    index = int(device.partition(":")[2] or 0)
    names = torch.cuda_names or ()
    return f"; the GPU is {names[index]}" if device != "cpu" and index < len(names) else ""
