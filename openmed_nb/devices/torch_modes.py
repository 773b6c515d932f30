"""The modes of torch that see every call, given back as they were whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .backend import import_torch

KINDS = ("dispatch", "function")
"""torch keeps two stacks of modes for each thread: those that see operators, and those that see functions."""


@contextmanager
def modes_given_back() -> Iterator[None]:
    """Leave this thread's modes of torch as they were.

    torch takes a mode off its stack while the mode computes, and loses count of it where an interrupt falls between the two
    (``torch.utils._python_dispatch._pop_mode_temporarily``). A mode that stays behind would see all that is computed later.

    Example:
        >>> from torch.overrides import BaseTorchFunctionMode
        >>> with modes_given_back():
        ...     mode = BaseTorchFunctionMode().__enter__()
        >>> modes_of("function")
        []
    """
    before = {kind: modes_of(kind) for kind in KINDS}
    try:
        yield
    finally:
        for kind, modes in before.items():
            _set_modes(kind, modes)


def modes_of(kind: str) -> list[Any]:
    """Return the modes of a kind in this thread, the outermost first."""
    library = import_torch()._C  # noqa: SLF001 - torch has no other name for it
    mode_at = getattr(library, f"_get_{kind}_stack_at")
    return [mode_at(place) for place in range(getattr(library, f"_len_torch_{kind}_stack")())]


def _set_modes(kind: str, modes: list[Any]) -> None:
    library = import_torch()._C  # noqa: SLF001
    while (now := modes_of(kind)) != modes[: len(now)]:
        getattr(library, f"_pop_torch_{kind}_stack")()
    for mode in modes[len(now) :]:
        getattr(library, f"_push_on_torch_{kind}_stack")(mode)
