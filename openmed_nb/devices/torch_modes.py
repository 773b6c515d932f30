"""The modes of torch that see every call, taken off as they were put on, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from .backend import import_torch


@contextmanager
def modes_on(*modes: Any) -> Iterator[None]:
    """Put modes on for this thread, and take these very ones off at the end.

    torch takes a mode off its stack while the mode computes, and whoever ends takes off what is on top. Where an interrupt
    falls between the two, the mode would stay behind, and see all that is computed later, or another would be lost
    (``torch.utils._python_dispatch._pop_mode_temporarily``).

    Args:
        modes: Modes that see operators (``TorchDispatchMode``) or functions (``TorchFunctionMode``).

    Example:
        >>> import torch
        >>> from torch.overrides import BaseTorchFunctionMode
        >>> mode = BaseTorchFunctionMode()
        >>> with modes_on(mode):
        ...     again = mode.__enter__()
        >>> modes_like(mode)
        []
    """
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
            stack.callback(_bring_to_top, mode)
        yield


def modes_like(mode: Any) -> list[Any]:
    """Return the modes of the same kind that this thread has on, the outermost first."""
    module, kind = _stack_of(mode)
    modes: list[Any] = getattr(module, f"_get_current_{kind}_mode_stack")()
    return modes


def _bring_to_top(mode: Any) -> None:
    """Let a mode be on its stack once, and on top, where its own end takes it off."""
    module, _kind = _stack_of(mode)
    now = modes_like(mode)
    wanted = [*(one for one in now if one is not mode), mode]
    if [*map(id, now)] == [*map(id, wanted)]:
        return
    for _ in now:
        module._pop_mode()  # noqa: SLF001 - torch has no other name for it
    for one in wanted:
        module._push_mode(one)  # noqa: SLF001


def _stack_of(mode: Any) -> tuple[Any, str]:
    """Return the module of torch that keeps the stack of such modes, and what they see."""
    import_torch()
    from torch import overrides
    from torch.utils import _python_dispatch

    if isinstance(mode, _python_dispatch.TorchDispatchMode):
        return _python_dispatch, "dispatch"
    return overrides, "function"
