"""The state of the random numbers of a device, so that a pass can be repeated with the same dropout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .backend import import_torch
from .request import kind_of

if TYPE_CHECKING:
    import torch

States = tuple[tuple[str, "torch.Tensor"], ...]
"""Pairs of a device and the state of its random numbers, a copy in the memory of the host."""


def random_states(device: str) -> States:
    """Return the states of the CPU's random numbers and of the device's; no device is waited for.

    Example:
        >>> [name for name, state in random_states("cpu")]
        ['cpu']
    """
    return tuple((name, _source(name).get_rng_state(*_which(name))) for name in dict.fromkeys(("cpu", device)))


def set_random_states(states: States) -> None:
    """Let random numbers go on from these states."""
    for name, state in states:
        _source(name).set_rng_state(state, *_which(name))


@contextmanager
def random_numbers_from(states: States) -> Iterator[None]:
    """Let random numbers go on from these states for a while, and then from where they were before.

    Example:
        >>> import torch
        >>> states = random_states("cpu")
        >>> first = torch.rand(3)
        >>> with random_numbers_from(states):
        ...     torch.equal(torch.rand(3), first)
        True
    """
    before = tuple((name, _source(name).get_rng_state(*_which(name))) for name, _ in states)
    set_random_states(states)
    try:
        yield
    finally:
        set_random_states(before)


def _source(name: str) -> Any:
    torch = import_torch()
    kind = kind_of(name)
    return torch.random if kind == "cpu" else torch.get_device_module(kind)


def _which(name: str) -> tuple[str, ...]:
    return (name,) if kind_of(name) == "cuda" else ()  # The others have one device.
