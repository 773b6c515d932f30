"""Which numbers a model is trained in: float32, or on request autocast to 16 bits, with what that means on this device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..devices.choice import FLOAT32_REASONS
from ..devices.machine import Machine, apple_generation
from ..devices.request import kind_of
from ..display import Report, Shown
from ..errors import ConfigurationError
from .steps import IGNORES_SCALER, ignores_scaler

if TYPE_CHECKING:
    import torch

SPELLINGS = {
    **dict.fromkeys(("float32", "fp32", "no"), "float32"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float16", "fp16", "half"), "float16"),
    "auto": "auto",
}
"""How a precision may be requested: as torch says it, and as Accelerate and the Trainer do; ``auto`` takes the best 16 bits."""

AUTOCAST = {("mps", "float16"): (2, 5), ("mps", "bfloat16"): (2, 6)}
"""The first torch with this autocast; there is none for MPS before (accelerate#3373)."""

SCALER = {"mps": (2, 8), "cpu": (2, 3), "cuda": (1, 6)}
"""The first torch whose ``GradScaler`` works on the device (MPS: pytorch#142397)."""

NATIVE_BFLOAT16 = (8, 0)
"""The first compute capability of CUDA with bfloat16."""

BFLOAT16_MACOS = (14,)
"""The first macOS whose MPS has bfloat16; torch asks for it itself from 2.9 on (``MPS BFloat16 is only supported on MacOS
14 or newer``)."""

EVERY_MACOS = (2, 9)
"""The first torch that runs on no older macOS on MPS."""

OBEYS_16_BITS = (2, 13)
"""The first torch whose ``GradScaler`` leaves 16-bit gradients alone on MPS (pytorch#184286, in the notes of that
release)."""

EMULATED = 2
"""The last generation of Apple's chips without bfloat16 of its own (transformers#40458)."""


@dataclass(frozen=True, repr=False)
class Precision(Shown):
    """The numbers that a model is trained in, and why.

    Attributes:
        device: The device, such as ``"mps"`` or ``"cuda:1"``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``: what matrix products run in; weights stay float32.
        reason: Why this type, in one sentence.
        needs_scaler: Whether small gradients would become 0 without a ``GradScaler``.
        notes: What to know about it.
    """

    device: str
    dtype: str
    reason: str
    needs_scaler: bool = False
    notes: tuple[str, ...] = ()

    @property
    def enabled(self) -> bool:
        """Whether products run in another type than float32."""
        return self.dtype != "float32"

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for the forward pass and the loss; ``backward`` stands outside of it."""
        import torch

        kind = kind_of(self.device)
        dtype = getattr(torch, self.dtype) if self.enabled else None
        context: contextlib.AbstractContextManager[Any] = torch.autocast(kind, dtype=dtype, enabled=self.enabled)
        return context

    def scaler(self) -> torch.amp.GradScaler:
        """Return a ``GradScaler``, which does nothing where none is needed."""
        import torch

        return torch.amp.GradScaler(kind_of(self.device), enabled=self.needs_scaler)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain strings, lists and truth values."""
        return {**vars(self), "notes": list(self.notes), "enabled": self.enabled}

    def report(self) -> Report:
        """Return the type, why, and what to know about it."""
        scaled = " with a GradScaler" if self.needs_scaler else ""
        title = f"Precision on {self.device}: {'autocast to ' if self.enabled else ''}{self.dtype}{scaled}"
        return Report(title, (self.reason, *self.notes))


@dataclass(frozen=True)
class Facts:
    """What decides about a type.

    Attributes:
        kind: ``"mps"``, ``"cuda"`` or ``"cpu"``.
        release: The release of torch.
        machine: The facts of this computer.
        capability: The compute capability of the GPU; ``None`` where it is not known.
    """

    kind: str
    release: tuple[int, ...]
    machine: Machine
    capability: tuple[int, int] | None

    @property
    def has_bfloat16(self) -> bool:
        """Whether the GPU computes in bfloat16."""
        return self.capability is not None and self.capability >= NATIVE_BFLOAT16

    @property
    def needs_newer_macos(self) -> bool:
        """Whether this macOS, where it is known, is older than what torch needs for bfloat16 on MPS."""
        macos = self.machine.macos
        return macos is not None and macos < BFLOAT16_MACOS and self.release < EVERY_MACOS


@dataclass(frozen=True)
class Obstacle:
    """A cause that rules a type out: when it applies, what to say then, and one thing to do."""

    applies: Callable[[Facts, str], bool]
    reason: str
    remedy: str


OBSTACLES = (
    Obstacle(
        lambda here, dtype: here.release < AUTOCAST.get((here.kind, dtype), (0,)),
        "torch {torch} has no autocast to {dtype} on {kind}",
        "Upgrade torch to {first} or later, or train in float32.",
    ),
    Obstacle(
        lambda here, dtype: dtype == "bfloat16" and here.kind == "mps" and here.needs_newer_macos,
        "torch {torch} computes {dtype} on {kind} from macOS 14 on, and this is macOS {macos}",
        "Update macOS to 14 or later, or train in float32.",
    ),
    Obstacle(
        lambda here, dtype: dtype == "float16" and here.release < SCALER[here.kind],
        "{dtype} needs a GradScaler, which does not work on {kind} with torch {torch} (pytorch#142397)",
        "Use 'bfloat16', which needs none, or torch 2.8 or later.",
    ),
    Obstacle(
        lambda here, dtype: dtype == "bfloat16" and here.kind == "cuda" and not here.has_bfloat16,
        "{gpu} has no bfloat16 of its own; that begins with compute capability 8.0",
        "Use 'float16', which comes with a GradScaler.",
    ),
)

PREFERRED = ("bfloat16", "float16")
"""In which order ``auto`` tries: bfloat16 has the range of float32 and needs no scaler."""


def autocast_policy(
    device: str,
    torch_release: tuple[int, ...],
    machine: Machine,
    requested: str | None = None,
    capability: tuple[int, int] | None = None,
) -> Precision:
    """Decide in which numbers a model is trained.

    Args:
        device: ``"mps"``, ``"cuda"``, ``"cuda:N"`` or ``"cpu"``.
        torch_release: The release of torch, such as ``(2, 13, 0)``.
        machine: The facts of this computer.
        requested: One of ``SPELLINGS``; ``None`` is float32, ``"auto"`` the best 16 bits, or float32 where there are none.
        capability: On CUDA the compute capability of the GPU, as ``torch.cuda.get_device_capability`` says.

    Returns:
        The type with its reason. Nothing but float32 is chosen without a request.

    Raises:
        ConfigurationError: For what is no precision, and for one that cannot be had on this device; it is never replaced.

    Example:
        >>> mac = Machine("Darwin", "arm64", apple_silicon=True, chip="Apple M1")
        >>> print(autocast_policy("mps", (2, 13), mac, requested="bf16"))
        Precision on mps: autocast to bfloat16
          bfloat16 was asked for; it has the range of float32 and needs no GradScaler.
          M1 computes bfloat16 in software: less memory for activations, but no speed gained (transformers#40458).
        >>> autocast_policy("mps", (2, 13), mac).dtype
        'float32'
    """
    wanted = parse_precision(requested)
    here = Facts(kind_of(device), tuple(torch_release), machine, capability)
    if wanted == "auto":
        return _best(device, here)
    if wanted == "float32":
        return Precision(device, wanted, _float32_reason(here.kind, asked=requested is not None))
    if found := obstacle(here, wanted):
        raise ConfigurationError(f"{wanted} cannot be used on {device}: {found[0]}.", found[1])
    return _reduced(device, here, wanted, "was asked for")


def parse_precision(requested: str | None) -> str:
    """Return the type that a spelling stands for.

    Raises:
        ConfigurationError: For a spelling that stands for none.

    Example:
        >>> parse_precision("BF16"), parse_precision(None)
        ('bfloat16', 'float32')
    """
    spelling = "float32" if requested is None else str(requested).strip().lower().removeprefix("torch.")
    if spelling not in SPELLINGS:
        accepted = ", ".join(repr(one) for one in SPELLINGS)
        raise ConfigurationError(f"{requested!r} is no precision.", f"Use one of {accepted}.")
    return SPELLINGS[spelling]


def obstacle(here: Facts, dtype: str) -> tuple[str, str] | None:
    """Return why a type cannot be used and what to do, ``None`` where it can."""
    words = {
        "torch": ".".join(str(part) for part in here.release),
        "kind": {"mps": "MPS", "cuda": "CUDA"}.get(here.kind, "the CPU"),
        "dtype": dtype,
        "first": ".".join(str(part) for part in AUTOCAST.get((here.kind, dtype), ())),
        "macos": ".".join(str(part) for part in here.machine.macos or ()),
        "gpu": "a GPU of compute capability {}.{}".format(*here.capability)
        if here.capability
        else "the GPU, as far as is known,",
    }
    for one in OBSTACLES:
        if one.applies(here, dtype):
            return one.reason.format(**words), one.remedy.format(**words)
    return None


def _best(device: str, here: Facts) -> Precision:
    """Return the first of the preferred types that can be had; on a CPU, where none is faster, float32."""
    possible = [dtype for dtype in PREFERRED if here.kind != "cpu" and obstacle(here, dtype) is None]
    if possible:
        return _reduced(device, here, possible[0], "is the best of the 16-bit types here")
    found = obstacle(here, PREFERRED[0])
    return Precision(device, "float32", f"{found[0]}." if found else _float32_reason(here.kind, asked=False))


def _float32_reason(kind: str, *, asked: bool) -> str:
    return "float32 was asked for." if asked else f"float32 is the default: {FLOAT32_REASONS[kind]}."


def _reduced(device: str, here: Facts, dtype: str, why: str) -> Precision:
    if dtype == "bfloat16":
        reason = f"bfloat16 {why}; it has the range of float32 and needs no GradScaler."
    else:
        reason = f"float16 {why}; its range is small, so a GradScaler keeps small gradients from becoming 0."
    return Precision(device, dtype, reason, needs_scaler=dtype == "float16", notes=tuple(_notes(here, dtype)))


def _scaler_notes(here: Facts) -> list[str]:
    """Return what to know about a ``GradScaler`` on MPS."""
    notes = []
    if here.release < OBEYS_16_BITS:
        what = "Keep weights in float32, as autocast does: GradScaler can set 16-bit gradients to 0 on MPS"
        notes.append(f"{what} before torch 2.13 (pytorch#184286).")
    if ignores_scaler(here.kind, here.release):
        notes.append(f"Use AdamW without fused=True. {IGNORES_SCALER}.")
    return notes


def _notes(here: Facts, dtype: str) -> list[str]:
    """Return what to know about a type on a device, where there is something."""
    generation = apple_generation(here.machine)
    if here.kind == "cpu":
        return [f"Most CPUs compute more slowly in {dtype} than in float32; measure it."]
    if here.kind != "mps":
        return []
    if dtype == "float16":
        return _scaler_notes(here)
    if generation is None:
        return ["The chip is not known; M1 and M2 compute bfloat16 in software and gain no speed (transformers#40458)."]
    if generation > EMULATED:
        return []
    what = f"M{generation} computes bfloat16 in software: less memory for activations, but no speed gained"
    return [f"{what} (transformers#40458)."]
