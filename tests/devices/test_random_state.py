"""Random numbers can be repeated, and go on afterwards as if nothing had been."""

from __future__ import annotations

import pytest
import torch

from openmed_nb.devices.backend import random_numbers_from, random_states, set_random_states


def test_numbers_are_repeated():
    """From a state that was kept, the same numbers come again."""
    states = random_states("cpu")
    first = torch.rand(5)
    torch.rand(3)
    set_random_states(states)
    assert torch.equal(torch.rand(5), first)


def test_nothing_changes_around_it():
    """After a while with other numbers, random numbers go on from where they were, also after a failure."""
    states = random_states("cpu")
    torch.rand(2)
    before = torch.get_rng_state()
    with random_numbers_from(states):
        torch.rand(7)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(RuntimeError), random_numbers_from(states):
        torch.rand(7).reshape(2, 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_gpu(device: str):
    """The random numbers of a GPU are repeated with those of the CPU."""
    states = random_states(device)
    first = torch.rand(5, device=device), torch.rand(5)
    with random_numbers_from(states):
        again = torch.rand(5, device=device), torch.rand(5)
    assert [name for name, _ in states] == ["cpu", device]
    assert all(map(torch.equal, first, again))
