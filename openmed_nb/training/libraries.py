"""What Trainer, Accelerate and Lightning are given: arguments, and what their callbacks share."""

from __future__ import annotations

import warnings
from typing import Any

from ..devices.machine import Machine
from ..devices.request import canonical, kind_of
from ..errors import OpenMedWarning
from .curve import MemoryCurve
from .epochs import EpochBoundary
from .guards import Guards


def trainer_arguments(device: str) -> dict[str, Any]:
    """Return the arguments of ``transformers.TrainingArguments`` that make Trainer use a device.

    Trainer takes the best GPU by itself; only the CPU has to be asked for. Pinned memory is for CUDA: on MPS torch refuses
    it with a warning, and beside a chosen CPU on a Mac it warns too (torchgeo-bench#253).

    Example:
        >>> trainer_arguments("cpu"), trainer_arguments("mps")
        ({'use_cpu': True, 'dataloader_pin_memory': False}, {'use_cpu': False, 'dataloader_pin_memory': False})
    """
    return {"use_cpu": canonical(device) == "cpu", "dataloader_pin_memory": kind_of(device) == "cuda"}


def accelerator_arguments(device: str) -> dict[str, Any]:
    """Return the arguments of ``accelerate.Accelerator`` that make it use a device.

    Example:
        >>> accelerator_arguments("cpu"), accelerator_arguments("cuda")
        ({'cpu': True}, {'cpu': False})
    """
    return {"cpu": canonical(device) == "cpu"}


def warn_of_another_device(who: str, device: str, chosen: str, remedy: str) -> None:
    """Warn where a library computes on another device than was chosen; the first GPU stands for all of them."""
    kind, _, index = canonical(chosen).partition(":")
    same_kind = kind == kind_of(device)
    if same_kind and (index in {"", "0"} or canonical(device) == chosen):
        return
    if same_kind:
        remedy = f"Set CUDA_VISIBLE_DEVICES={index} before torch is loaded, and choose 'cuda'."
    warnings.warn(f"{who} computes on {device}, but {chosen} was chosen. {remedy}", OpenMedWarning, stacklevel=3)


class GuardedTraining:
    """The boundary and the guards of one training, behind the callback of a library.

    Args:
        hooks: The boundary, with the curve.
        guards: What looks for silently wrong numbers.
        machine: This computer.
    """

    library = ""
    """Who trains."""

    def __init__(self, hooks: EpochBoundary, guards: Guards, machine: Machine) -> None:
        self.hooks, self.guards, self.machine = hooks, guards, machine
        self._chosen = hooks.device

    @property
    def remedy(self) -> str:
        """What to do where the library uses another device than was chosen."""
        raise NotImplementedError

    @property
    def curve(self) -> MemoryCurve:
        """The samples so far, and the verdict."""
        return self.hooks.curve

    def begin(self, device: object, epoch: int, step: int) -> str:
        """Begin a curve on the device that the library uses, and return its name; another than was chosen is warned of."""
        name = canonical(str(device))
        warn_of_another_device(self.library, name, self._chosen, self.remedy)
        self.hooks.begin(name, epoch, step)
        return name
