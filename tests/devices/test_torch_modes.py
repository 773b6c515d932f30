"""Modes of torch are given back as they were, also where an interrupt falls between taking one away and putting it back."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from openmed_nb.devices.torch_modes import modes_given_back, modes_of


class Passing(TorchDispatchMode):
    """Sees every operator, and changes nothing."""

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator."""
        return operator(*args, **(kwargs or {}))


MODES = {"dispatch": Passing, "function": BaseTorchFunctionMode}


@pytest.mark.parametrize("kind", MODES)
def test_mode_that_stays_behind_is_taken_away(kind: str):
    """A mode that was put on in the block and never taken off is gone afterwards, and the one around the block is there."""
    with MODES[kind]() as outer:
        with contextlib.suppress(KeyboardInterrupt), modes_given_back():
            MODES[kind]().__enter__()
            raise KeyboardInterrupt
        assert modes_of(kind) == [outer]

    assert modes_of(kind) == []


@pytest.mark.parametrize("kind", MODES)
def test_mode_that_was_lost_is_put_back(kind: str):
    """A mode that was taken off in the block and never put back is there again afterwards."""
    with MODES[kind]() as outer:
        with modes_given_back():
            getattr(torch._C, f"_pop_torch_{kind}_stack")()
        assert modes_of(kind) == [outer]

    assert modes_of(kind) == []
