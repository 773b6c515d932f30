"""The Python face of steps that fit the device: each asks the session for it, and calls one function of ``training``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ..devices.backend import cuda_capability
from ..devices.moving import to_device as moved_to
from ..devices.request import device_of
from ..session import SESSION
from ..training.loader_checks import LoaderCheck
from ..training.loader_checks import check_loader as checked
from ..training.loaders import LoaderSettings
from ..training.loaders import loader_settings as settings_for
from ..training.precision import Precision, autocast_policy

Thing = TypeVar("Thing")


def device_name(device: Any = None) -> str:
    """Return the name of a device: the session's for ``None``, else that of what names or has one.

    Raises:
        DeviceError: Where it cannot be used.
        ConfigurationError: For what has no device.
    """
    return SESSION.device(None if device is None else device_of(device)).device


def to_device(thing: Thing, device: Any = None) -> Thing:
    """Return tensors on a device, the session's where none is named; on MPS float64 becomes float32 before.

    Args:
        thing: A tensor, a module, or a batch or a state dict in any depth. NumPy arrays of numbers become tensors; what
            else is no tensor stays as it is.
        device: A name, a ``torch.device``, an ``Accelerator``; ``None`` is the session's device.

    Returns:
        A module itself, moved in place; for anything else a new value of the same type.

    Raises:
        NumberTooLarge: For a float64 number that would become infinite in float32; nothing was moved then.
        ConfigurationError: For an optimizer, a module inside of something else, and a value that holds itself.

    Example:
        >>> import torch
        >>> to_device({"input_ids": torch.ones(1, 3)}, "cpu")["input_ids"].device
        device(type='cpu')
    """
    return moved_to(thing, device_name(device))


def loader_settings(dataset: Any, device: Any = None) -> LoaderSettings:
    """Return the arguments for a ``DataLoader`` on a device, each with its reason.

    Args:
        dataset: The dataset; it is looked at and not read.
        device: As for :func:`to_device`.

    Returns:
        The settings: ``DataLoader(dataset, batch_size=8, **settings.arguments)``.

    Raises:
        DeviceError: For a device that cannot be used.
        ConfigurationError: For what has no device.

    Example:
        >>> loader_settings([1, 2], "cpu").arguments["pin_memory"]
        False
    """
    return settings_for(device_name(device), dataset, SESSION.computer.machine)


def precision(requested: str | None = None, device: Any = None) -> Precision:
    """Return in which numbers a model is trained on a device, and why.

    Args:
        requested: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"auto"``, the best of the 16-bit types; ``None`` is
            float32.
        device: As for :func:`to_device`.

    Returns:
        The precision, with ``autocast()`` for the forward pass and ``scaler()`` for the backward pass.

    Raises:
        ConfigurationError: For a precision that cannot be had on the device; it is never replaced.

    Example:
        >>> precision(device="cpu").dtype
        'float32'
    """
    name = device_name(device)
    computer = SESSION.computer
    return autocast_policy(name, computer.torch.release, computer.machine, requested, cuda_capability(name))


def check_loader(loader: Iterable[Any], step: Callable[..., Any], device: Any = None, batches: int = 20) -> LoaderCheck:
    """Measure a loader without the model, then the model without the loader, and say which one training waits for.

    Args:
        loader: A ``DataLoader``, or anything that can be gone through again and again.
        step: A module, or a function that takes a batch on the device.
        device: As for :func:`to_device`.
        batches: How many of each are measured, at most.

    Returns:
        The times in seconds; ``bottleneck`` names the longer one, ``waiting`` the share of time that training waits.

    Raises:
        DeviceError: For a device that cannot be used.
        ConfigurationError: For a loader that gives nothing, or would be used up, and for no number of batches.

    Example:
        >>> import torch
        >>> loader = torch.utils.data.DataLoader(torch.ones(12, 2), batch_size=2)
        >>> check_loader(loader, torch.nn.Linear(2, 1), "cpu", batches=3).batches
        3
    """
    return checked(loader, step, device_name(device), batches)
