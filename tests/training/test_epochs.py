"""End-of-epoch hooks: order of operations, and loops that end early."""

import contextlib
import gc
import weakref
from functools import partial

import pytest
import torch

import openmed_nb as nb
from helpers.processes import run_python
from helpers.trainings import catch_error
from openmed_nb.errors import ConfigurationError
from openmed_nb.training import EpochHooks

pytestmark = pytest.mark.usefixtures("by_itself")


class Cycle:
    """Object that only the garbage collector frees."""

    def __init__(self, device="cpu"):
        self.itself = self
        self.tensor = torch.zeros(1 << 18, device=device)


@pytest.fixture
def hooks():
    """End-of-epoch hooks on the CPU."""
    return EpochHooks("cpu")


def test_end_epoch_collects_cycles_before_sample(hooks):
    gc.disable()
    try:
        cycle = weakref.ref(Cycle())
        first = hooks.end_epoch()
    finally:
        gc.enable()

    assert cycle() is None
    assert first.allocated == hooks.end_epoch().allocated


@pytest.mark.real_computer  # It starts its own simulation.
def test_end_epoch_empties_cache_before_sample():
    with nb.simulated_mps("8 GiB") as mps:
        hooks = EpochHooks("mps")
        first = hooks.end_epoch()
        Cycle("mps")
        emptied = mps.cache_clears
        second = hooks.end_epoch()

    assert mps.cache_clears == emptied + 1
    assert (second.allocated, second.reserved) == (first.allocated, first.reserved)
    assert second.peak >= 1 << 20


def test_loop_ends_each_epoch():
    loop = nb.epochs(3, "cpu")

    assert (list(loop), len(loop), list(nb.epochs(0, "cpu"))) == ([0, 1, 2], 3, [])
    assert [sample.epoch for sample in loop.curve.epoch_samples] == [1, 2, 3]
    assert nb.training.last_curve() is loop.curve
    seconds = [sample.seconds for sample in loop.curve.samples]
    assert seconds == sorted(seconds)


def test_loop_left_by_error_ends_epoch():
    loop = nb.epochs(5, "cpu")
    with contextlib.suppress(ZeroDivisionError):
        for epoch in loop:
            _ = 1 / (1 - epoch)

    assert [sample.epoch for sample in loop.curve.epoch_samples] == [1, 2]


def test_with_block_releases_memory_without_sample(hooks):
    with contextlib.suppress(ValueError), hooks as same:
        assert same is hooks
        cycle = weakref.ref(Cycle())
        raise ValueError

    assert cycle() is None
    assert hooks.curve.samples == ()


def test_every_n_steps_samples_within_epoch():
    loop = nb.epochs(2, "cpu", every_n_steps=2)
    for _ in loop:
        for _ in range(3):
            loop.step()

    samples = [(sample.epoch, sample.step, sample.is_boundary) for sample in loop.curve.samples]
    assert samples == [(0, 2, False), (1, 3, True), (1, 4, False), (1, 6, False), (2, 6, True)]


def test_begin_continues_from_checkpoint(hooks):
    hooks.end_epoch()
    hooks.begin("cpu", epoch=7, step=70)
    hooks.step()
    sample = hooks.end_epoch()

    assert (sample.epoch, sample.step) == (8, 71)
    assert hooks.curve.samples == (sample,)


def test_referrers_are_cleared_when_growth_ends():
    """Growth ends early enough that the interval of the slope contains 0."""
    kept = []
    loop = nb.epochs(20, "cpu")
    for epoch in loop:
        if epoch < 5:
            kept.extend(torch.zeros(1 << 18) for _ in range(8))
        if epoch == 5:
            assert (loop.verdict, loop.curve.referrers[0].name) == ("growing", "kept")

    assert (loop.verdict, loop.curve.referrers) == ("flat", ())


def test_invalid_arguments_are_rejected():
    for name, argument in (("every_n_steps", 0), ("every_n_steps", True), ("release_when", 1), ("release_when", "2")):
        assert isinstance(catch_error(partial(EpochHooks, "cpu", **{name: argument})), ConfigurationError), argument
    for epochs in (-1, 1.5, True, None, "3", 10**30):
        assert isinstance(catch_error(partial(nb.epochs, epochs, "cpu")), ConfigurationError), epochs


def test_flat_curve_names_list_of_losses():
    """The last loss is counted for the loop variable."""
    losses = []
    weight = torch.ones(1 << 12, requires_grad=True)
    loop = nb.epochs(5, "cpu")
    for _ in loop:
        loss = weight.square().sum()
        loss.backward()
        losses.append(loss)

    assert loop.verdict == "flat"
    assert loop.curve.likely_cause.name == "losses"
    assert "losses (list) holds 4 tensors with their autograd graphs" in loop.curve.advice


# Iterations over five epochs that are unfinished at the end of the program: an iterator, a generator, a cycle, and an
# iterator after one epoch.
UNFINISHED = """
import openmed_nb as nb
loops = [nb.epochs(5, "cpu") for _ in range(4)]
first = iter(loops[0]); next(first)
second = (epoch for epoch in loops[1]); next(second)
third = [iter(loops[2])]; third.append(third); next(third[0])
fourth = iter(loops[3]); next(fourth); next(fourth)
print(*(len(loop.curve.epoch_samples) for loop in loops))
"""


@pytest.mark.slow
def test_unfinished_loops_are_silent_at_exit():
    done = run_python("-c", UNFINISHED)

    assert (done.returncode, done.stdout, done.stderr) == (0, "0 0 0 1\n", "")
