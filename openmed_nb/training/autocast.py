"""Which numbers a model is trained in: float32, or on request autocast to 16 bits, with what that means on this device."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..devices.backend import cuda_capability
from ..devices.choice import FLOAT32_REASONS
from ..devices.machine import Machine, apple_generation
from ..devices.request import kind_of
from ..display import Report, Shown
from ..errors import ConfigurationError
from ..session import SESSION
from .steps import IGNORES_SCALER, ignores_scaler

if TYPE_CHECKING:
    import torch

# How a precision may be requested: as torch spells it, and as Accelerate and the Trainer do; auto takes the best 16 bits.
SPELLINGS = {
    **dict.fromkeys(("float32", "fp32", "no"), "float32"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float16", "fp16", "half"), "float16"),
    "auto": "auto",
}
# In which order auto tries: bfloat16 has the range of float32 and needs no scaler.
PREFERRED = ("bfloat16", "float16")

# The first torch whose GradScaler works on MPS (pytorch#142397).
SCALER_ON_MPS = (2, 8)
# The first torch whose GradScaler leaves 16-bit gradients alone on MPS (pytorch#184286, in the notes of that release).
OBEYS_16_BITS = (2, 13)
# The first compute capability of CUDA with bfloat16.
NATIVE_BFLOAT16 = (8, 0)
# The first macOS whose MPS has bfloat16, and the first torch that runs on no older macOS on MPS and asks for it itself.
BFLOAT16_MACOS = (14,)
EVERY_MACOS = (2, 9)
# The last generation of Apple's chips without bfloat16 of its own (transformers#40458).
EMULATED = 2


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

    ALSO = ("enabled",)

    @property
    def enabled(self) -> bool:
        """Whether products run in another type than float32."""
        return self.dtype != "float32"

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for the forward pass and the loss; ``backward`` stands outside of it."""
        import torch

        dtype = getattr(torch, self.dtype) if self.enabled else None
        context: contextlib.AbstractContextManager[Any] = torch.autocast(
            kind_of(self.device), dtype=dtype, enabled=self.enabled
        )
        return context

    def scaler(self) -> torch.amp.GradScaler:
        """Return a ``GradScaler``, which does nothing where none is needed."""
        import torch

        return torch.amp.GradScaler(kind_of(self.device), enabled=self.needs_scaler)

    def report(self) -> Report:
        """Return the type, why, and what to know about it."""
        scaled = " with a GradScaler" if self.needs_scaler else ""
        title = f"Precision on {self.device}: {'autocast to ' if self.enabled else ''}{self.dtype}{scaled}"
        return Report(title, (self.reason, *self.notes))


def precision(requested: str | None = None, device: Any = None) -> Precision:
    """Return in which numbers a model is trained on a device, and why.

    Args:
        requested: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"auto"``, the best of the 16-bit types; ``None`` is
            float32.
        device: As for :func:`~openmed_nb.training.to_device`.

    Returns:
        The precision, with ``autocast()`` for the forward pass and ``scaler()`` for the backward pass.

    Raises:
        ConfigurationError: For a precision that cannot be had on the device; it is never replaced.

    Example:
        >>> precision(device="cpu").dtype
        'float32'
    """
    name, computer = SESSION.device(device).device, SESSION.computer
    return autocast_policy(name, computer.torch.release, computer.machine, requested, cuda_capability(name))


def autocast_policy(
    device: str,
    torch_release: tuple[int, ...],
    machine: Machine,
    requested: str | None = None,
    capability: tuple[int, int] | None = None,
) -> Precision:
    """Decide in which numbers a model is trained; nothing but float32 is chosen without a request."""
    spelling = "float32" if requested is None else str(requested).strip().lower().removeprefix("torch.")
    if spelling not in SPELLINGS:
        accepted = ", ".join(repr(one) for one in SPELLINGS)
        raise ConfigurationError(f"The precision cannot be {requested!r}.", f"Use one of {accepted}.")
    kind, dtype, why = kind_of(device), SPELLINGS[spelling], "was asked for"
    default = f"float32 is the default: {FLOAT32_REASONS[kind]}."
    obstacles = {one: _obstacle(kind, one, torch_release, machine, capability) for one in PREFERRED}
    if dtype == "auto":
        # On a CPU none is faster than float32.
        dtype = next((one for one in PREFERRED if kind != "cpu" and not obstacles[one]), "float32")
        found, why = obstacles[PREFERRED[0]], "is the best of the 16-bit types here"
        if dtype == "float32":
            return Precision(device, dtype, f"{found[0]}." if found else default)
    if dtype == "float32":
        return Precision(device, dtype, default if requested is None else "float32 was asked for.")
    if found := obstacles[dtype]:
        raise ConfigurationError(f"{dtype} cannot be used on {device}: {found[0]}.", found[1])
    notes = _notes(kind, dtype, torch_release, machine)
    if dtype == "bfloat16":
        return Precision(
            device, dtype, f"bfloat16 {why}; it has the range of float32 and needs no GradScaler.", notes=notes
        )
    reason = f"float16 {why}; its range is small, so a GradScaler keeps small gradients from becoming 0."
    return Precision(device, dtype, reason, needs_scaler=True, notes=notes)


def _obstacle(
    kind: str, dtype: str, release: tuple[int, ...], machine: Machine, capability: tuple[int, int] | None
) -> tuple[str, str] | None:
    """Return why a type cannot be used and what to do, ``None`` where it can."""
    torch, macos = (".".join(str(part) for part in version or ()) for version in (release, machine.macos))
    if kind == "mps" and dtype == "float16" and release < SCALER_ON_MPS:
        what = f"float16 needs a GradScaler, which does not work on MPS with torch {torch} (pytorch#142397)"
        return what, "Use 'bfloat16', which needs none, or torch 2.8 or later."
    too_old = machine.macos is not None and machine.macos < BFLOAT16_MACOS and release < EVERY_MACOS
    if kind == "mps" and dtype == "bfloat16" and too_old:
        what = f"torch {torch} computes bfloat16 on MPS from macOS 14 on, and this is macOS {macos}"
        return what, "Update macOS to 14 or later, or train in float32."
    if kind == "cuda" and dtype == "bfloat16" and (capability is None or capability < NATIVE_BFLOAT16):
        known = "a GPU of compute capability {}.{}".format(*capability) if capability else ""
        gpu = known or "the GPU, as far as is known,"
        what = f"{gpu} has no bfloat16 of its own; that begins with compute capability 8.0"
        return what, "Use 'float16', which comes with a GradScaler."
    return None


def _notes(kind: str, dtype: str, release: tuple[int, ...], machine: Machine) -> tuple[str, ...]:
    """Return what to know about a 16-bit type on a device, where there is something."""
    generation, notes = apple_generation(machine), []
    if kind == "cpu":
        notes = [f"Most CPUs compute more slowly in {dtype} than in float32; measure it."]
    elif kind == "mps" and dtype == "float16":
        if release < OBEYS_16_BITS:
            what = "Keep weights in float32, as autocast does: GradScaler can set 16-bit gradients to 0 on MPS"
            notes.append(f"{what} before torch 2.13 (pytorch#184286).")
        if ignores_scaler(kind, release):
            notes.append(f"Use AdamW without fused=True. {IGNORES_SCALER}.")
    elif kind == "mps" and generation is None:
        notes = [
            "The chip is not known; M1 and M2 compute bfloat16 in software and gain no speed (transformers#40458)."
        ]
    elif kind == "mps" and generation is not None and generation <= EMULATED:
        what = f"M{generation} computes bfloat16 in software: less memory for activations, but no speed gained"
        notes = [f"{what} (transformers#40458)."]
    return tuple(notes)
