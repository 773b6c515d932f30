"""AdamW in its fused form wherever torch has one: on MPS the one cheap gain in speed, and never torch's own choice there.

By default torch loops over the tensors on MPS, one small kernel after the other (``torch/optim/optimizer.py``,
``torch/utils/_foreach_utils.py``); fused, one kernel updates many.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..devices.backend import import_torch, release_of
from ..devices.request import kind_of
from ..errors import ConfigurationError, cause
from ..interface.display import Report, Shown

if TYPE_CHECKING:
    import torch

FUSED_SINCE = {"mps": (2, 5), "cpu": (2, 4), "cuda": (2, 0)}
"""The first torch with a fused AdamW on the device (MPS: pytorch#127242)."""

FUSED_DTYPES = {
    "mps": ("float32", "float16", "bfloat16"),
    "cpu": ("float64", "float32", "float16", "bfloat16"),
    "cuda": ("float64", "float32", "float16", "bfloat16"),
}

OBEYS_SCALER = (2, 13)
"""The first torch whose fused optimizers obey a ``GradScaler`` on MPS (pytorch#186360, in the notes of that release)."""

IGNORES_SCALER = "On MPS before torch 2.13 a fused optimizer ignores the GradScaler (pytorch#186360)"
"""What is said where one does: a step with infinite gradients is not left out then."""

AS_TORCH = "Pass model.parameters(), or groups such as [{'params': model.parameters(), 'lr': 1e-4}]."

OTHER_WAYS = ("fused", "foreach", "differentiable", "capturable")
"""The arguments of ``torch.optim.AdamW`` by which a person chooses the implementation."""


@dataclass(frozen=True, repr=False)
class FusedSupport(Shown):
    """Whether AdamW runs fused, and why.

    Attributes:
        fused: Whether it does.
        reason: Why, in one sentence.
    """

    fused: bool
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return both as plain values."""
        return dict(vars(self))

    def report(self) -> Report:
        """Return both."""
        return Report(f"AdamW: {'fused' if self.fused else 'not fused'}", (self.reason,))


def fused_support(
    tensors: Iterable[tuple[str, str]],
    torch_release: tuple[int, ...],
    options: Mapping[str, Any] | None = None,
    *,
    scaled: bool = False,
) -> FusedSupport:
    """Decide whether AdamW runs fused.

    Args:
        tensors: The device and the type of each parameter, such as ``("mps", "float32")``.
        torch_release: The release of torch, such as ``(2, 13, 0)``.
        options: The arguments that a person gives to AdamW; what chooses an implementation is left alone.
        scaled: Whether a ``GradScaler`` is used.

    Example:
        >>> print(fused_support({("mps", "float32")}, (2, 13)))
        AdamW: fused
          torch has it for float32 on mps since 2.5.
        >>> fused_support({("mps", "float32")}, (2, 13), {"foreach": False}).fused
        False
    """
    chosen = [name for name in OTHER_WAYS if (options or {}).get(name) is not None]
    if chosen:
        named = ", ".join(f"{name}={(options or {})[name]}" for name in chosen)
        return FusedSupport(bool((options or {}).get("fused")), f"{named} was set, and is left as it is.")
    kinds = sorted({(kind_of(device), dtype) for device, dtype in tensors})
    for kind, dtype in kinds:
        if missing := _missing(kind, dtype, torch_release, scaled=scaled):
            return FusedSupport(fused=False, reason=missing)
    if not kinds:
        return FusedSupport(fused=False, reason="There are no parameters.")
    where = ", ".join(f"{dtype} on {kind} since {_dotted(FUSED_SINCE[kind])}" for kind, dtype in kinds)
    return FusedSupport(fused=True, reason=f"torch has it for {where}.")


def adamw(parameters: Iterable[Any], *, scaled: bool = False, **options: Any) -> torch.optim.AdamW:
    """Return ``torch.optim.AdamW``, fused where torch has that for these parameters.

    Args:
        parameters: As for torch: tensors, pairs of name and tensor, or dicts with ``params``. Move the model to its
            device before. Each iterator is read once, and the dict that held it then holds a list, as torch does.
        scaled: Whether a ``GradScaler`` is used; on MPS before torch 2.13 the fused form ignores it
            (pytorch#186360).
        options: Any argument of ``torch.optim.AdamW``; none is changed.

    Returns:
        The optimizer. :func:`explain_fused` tells why it is fused or not.

    Raises:
        ConfigurationError: For parameters that are nothing of these, for none, and for an argument that ``AdamW`` refuses.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> adamw(model.parameters(), lr=1e-3).defaults["fused"], adamw(model.parameters(), fused=False).defaults["fused"]
        (True, False)
    """
    import torch

    kept = _listed(parameters)
    support = explain_fused(kept, scaled=scaled, **options)
    try:
        return torch.optim.AdamW(kept, **{**options, "fused": True} if support.fused else options)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"torch.optim.AdamW refuses its arguments: {cause(error)}."
        raise ConfigurationError(what, "Pass what help(torch.optim.AdamW) names.") from error


def explain_fused(parameters: Iterable[Any], *, scaled: bool = False, **options: Any) -> FusedSupport:
    """Return whether :func:`adamw` runs fused with these arguments, and why.

    Args:
        parameters: As for :func:`adamw`; an iterator that is passed alone is at its end afterwards.
        scaled: Whether a ``GradScaler`` is used.
        options: As for :func:`adamw`.

    Returns:
        ``fused`` and the ``reason``.

    Raises:
        ConfigurationError: For parameters that :func:`adamw` does not take.

    Example:
        >>> import torch
        >>> print(explain_fused(torch.nn.Linear(2, 1, dtype=torch.complex64).parameters()))
        AdamW: not fused
          torch has it on cpu for float64, float32, float16, bfloat16, and there are parameters in complex64.
    """
    tensors = {(str(one.device), str(one.dtype).removeprefix("torch.")) for one in _tensors(parameters)}
    return fused_support(tensors, release_of(import_torch().__version__), options, scaled=scaled)


def _listed(parameters: Iterable[Any]) -> list[Any]:
    """Return what an optimizer takes as a list, with a list in each group; what a group held can be read only once."""
    kept = [parameters] if isinstance(parameters, dict) else _list(parameters)
    for group in kept:
        if isinstance(group, dict):
            held = group.get("params")
            group["params"] = [held] if _is_tensor(held) else _list(held)
    return kept


def _list(parameters: Any) -> list[Any]:
    if _is_tensor(parameters) or not isinstance(parameters, Iterable) or isinstance(parameters, (str, bytes)):
        what = f"The parameters must be several tensors, and they are of type {type(parameters).__name__}."
        raise ConfigurationError(what, AS_TORCH)
    return list(parameters)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, import_torch().Tensor)


def _tensors(parameters: Iterable[Any]) -> Iterable[torch.Tensor]:
    """Yield the tensors in what an optimizer takes."""
    for one in _listed(parameters):
        if isinstance(one, dict):
            yield from _tensors(one["params"])
            continue
        tensor = one[1] if isinstance(one, tuple) and len(one) == 2 else one  # noqa: PLR2004 - name and tensor
        if not _is_tensor(tensor):
            raise ConfigurationError(
                f"A parameter must be a tensor, and one is of type {type(tensor).__name__}.", AS_TORCH
            )
        yield tensor


def _missing(kind: str, dtype: str, release: tuple[int, ...], *, scaled: bool) -> str:
    """Return why torch has no fused AdamW for a tensor, empty where it has."""
    if kind not in FUSED_SINCE:
        return f"torch is not known to have it on {kind}."
    if release < FUSED_SINCE[kind]:
        return f"torch has it on {kind} since {_dotted(FUSED_SINCE[kind])}, and this is {_dotted(release)}."
    if dtype not in FUSED_DTYPES[kind]:
        return f"torch has it on {kind} for {', '.join(FUSED_DTYPES[kind])}, and there are parameters in {dtype}."
    return f"{IGNORES_SCALER}." if scaled and ignores_scaler(kind, release) else ""


def ignores_scaler(device: str, torch_release: tuple[int, ...]) -> bool:
    """Tell whether a fused optimizer steps where a ``GradScaler`` found infinite gradients.

    Example:
        >>> ignores_scaler("mps", (2, 12, 1)), ignores_scaler("mps", (2, 13)), ignores_scaler("cuda", (2, 12))
        (True, False, False)
    """
    return kind_of(device) == "mps" and tuple(torch_release) < OBEYS_SCALER


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in release)
