"""Modes of torch are taken off as they were put on, also where an interrupt falls into torch's own bookkeeping."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import overrides
from torch.overrides import BaseTorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from openmed_nb.devices.profilers import modes_like, modes_on


class Passing(TorchDispatchMode):
    """Sees every operator, and changes nothing."""

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator."""
        return operator(*args, **(kwargs or {}))


KINDS = [Passing, BaseTorchFunctionMode]
POP = {Passing: _python_dispatch._pop_mode, BaseTorchFunctionMode: overrides._pop_mode}


@pytest.mark.parametrize("kind", KINDS)
def test_mode_that_is_put_on_again_is_taken_off(kind: Callable[[], Any]):
    """A mode that was put on twice and taken off once is gone afterwards, and the one around it is there."""
    with kind() as outer:
        mode = kind()
        with contextlib.suppress(KeyboardInterrupt), modes_on(mode):
            mode.__enter__()
            raise KeyboardInterrupt
        assert modes_like(outer) == [outer]

    assert modes_like(outer) == []


@pytest.mark.parametrize("kind", KINDS)
def test_mode_that_is_lost_takes_no_other_along(kind: Callable[[], Any]):
    """Where torch has taken a mode off and not put it back, the one around it stays."""
    with kind() as outer:
        with contextlib.suppress(KeyboardInterrupt), modes_on(kind()):
            POP[kind]()
            raise KeyboardInterrupt
        assert modes_like(outer) == [outer]

    assert modes_like(outer) == []


def test_default_device_that_is_set_meanwhile_stays():
    """What somebody else puts on inside of the block, such as a default device, stays as it is."""
    try:
        with modes_on(BaseTorchFunctionMode()):
            torch.set_default_device("meta")
        assert torch.empty(1).is_meta
    finally:
        torch.set_default_device(None)

    assert modes_like(BaseTorchFunctionMode()) == []
