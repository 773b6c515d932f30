"""End-of-epoch hooks: order of operations, and loops that end early."""

import contextlib
import gc
import subprocess
import sys
import weakref
from functools import partial

import pytest
import torch

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError
from openmed_nb.training import EpochHooks

pytestmark = pytest.mark.usefixtures("by_itself")

CLINICAL = "Jane Doe has asthma"


class Cycle:
    """Object that only the garbage collector frees."""

    def __init__(self):
        self.itself = self
        self.tensor = torch.zeros(1 << 18)


@pytest.fixture
def hooks():
    """End-of-epoch hooks on the CPU."""
    return EpochHooks("cpu")


def test_end_epoch_collects_cycles_before_sample(hooks):
    gc.disable()
    try:
        gone = weakref.ref(Cycle())
        first = hooks.end_epoch()
    finally:
        gc.enable()

    assert gone() is None
    assert first.allocated == hooks.end_epoch().allocated


@pytest.mark.real_computer  # It starts its own simulation.
def test_end_epoch_empties_cache_before_sample():
    with nb.simulated_mps("8 GiB") as mps:
        hooks = EpochHooks("mps")
        first = hooks.end_epoch()
        cycle = Cycle()
        cycle.tensor = torch.zeros(1 << 20, device="mps")
        del cycle
        emptied = mps.cache_clears
        second = hooks.end_epoch()

    assert mps.cache_clears == emptied + 1
    assert (second.allocated, second.reserved) == (first.allocated, first.reserved)
    assert second.peak >= 4 << 20


def test_loop_ends_each_epoch_and_continues_curve(hooks):
    loop = hooks.epochs(3)

    assert (list(loop), len(loop), list(hooks.epochs(0)), list(hooks.epochs(1))) == ([0, 1, 2], 3, [], [0])
    assert [sample.epoch for sample in loop.curve.epoch_samples] == [1, 2, 3, 4]
    assert nb.training.last_curve() is hooks.curve
    seconds = [sample.seconds for sample in hooks.curve.samples]
    assert seconds == sorted(seconds)


def test_loop_accepts_iterable_without_length(hooks):
    loop = hooks.epochs(name for name in ("first", "second"))

    assert list(loop) == ["first", "second"]
    assert len(hooks.curve.epoch_samples) == 2
    with pytest.raises(TypeError):
        len(loop)


@pytest.mark.parametrize("epochs", [1, 2])
def test_loop_left_by_error_ends_epoch(hooks, epochs):
    with contextlib.suppress(RuntimeError):
        for epoch in hooks.epochs(5):
            if epoch + 1 == epochs:
                raise RuntimeError(CLINICAL)

    assert [sample.epoch for sample in hooks.curve.epoch_samples] == list(range(1, epochs + 1))


def test_with_block_releases_memory_without_sample():
    hooks = EpochHooks("cpu")
    with contextlib.suppress(ValueError), hooks as same:
        assert same is hooks
        hooks.end_epoch()
        gone = weakref.ref(Cycle())
        raise ValueError(CLINICAL)

    assert gone() is None
    assert len(hooks.curve.samples) == 1


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
    assert hooks.curve.samples == ()
    sample = hooks.end_epoch()

    assert (sample.epoch, sample.step) == (8, 71)
    assert hooks.curve.samples == (sample,)


def test_referrers_are_cleared_when_growth_ends(hooks):
    kept = []
    for epoch in hooks.epochs(12):
        if epoch < 5:
            kept.extend(torch.zeros(1 << 18) for _ in range(8))
        if epoch == 5:
            assert (hooks.verdict, hooks.curve.referrers[0].name) == ("growing", "kept")

    assert (hooks.verdict == "growing") == (hooks.curve.referrers != ())


BAD = [
    *(("every_n_steps", count) for count in (0, -1, 0.5, True, "10")),
    *(("release_when", factor) for factor in (1, 0.5, float("nan"), "2", True)),
]


def test_invalid_arguments_are_rejected(catch_error):
    for name, argument in BAD:
        error = catch_error(partial(EpochHooks, "cpu", **{name: argument}))
        assert isinstance(error, ConfigurationError), f"{name}={argument!r}"
        assert error.remedy.startswith("Pass "), f"{name}={argument!r}"


@pytest.mark.parametrize("epochs", [-1, 1.5, True, None, "3", b"3"])
def test_invalid_epochs_are_rejected(epochs):
    with pytest.raises(ConfigurationError, match=r"^Invalid value for epochs: "):
        nb.epochs(epochs, "cpu")


def test_flat_curve_names_list_of_losses():
    """The last loss is counted for the loop variable."""
    losses = []
    weight = torch.ones(1 << 12, requires_grad=True)
    hooks = EpochHooks("cpu")
    for _ in hooks.epochs(5):
        loss = weight.square().sum()
        loss.backward()
        losses.append(loss)

    assert hooks.verdict == "flat"
    assert hooks.curve.likely_cause.name == "losses"
    assert "losses (list) holds 4 tensors with their autograd graphs" in hooks.curve.advice


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


def test_unfinished_loops_are_silent_at_exit():
    done = subprocess.run([sys.executable, "-c", UNFINISHED], capture_output=True, text=True, check=True)

    assert (done.stdout, done.stderr) == ("0 0 0 1\n", "")


def train_lbfgs(steps, size, leak=None):
    """Return the curve of some epochs with LBFGS, whose history is bounded, with an optional leak."""
    torch.manual_seed(0)
    model = torch.nn.Linear(200, 200)
    inputs, targets = torch.randn(2, 64, 200)
    options = {"max_iter": 2, "history_size": size, "tolerance_grad": 0, "tolerance_change": 0}
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, **options)

    def loss():
        optimizer.zero_grad()
        value = (model(inputs).tanh() - targets).square().mean()
        value.backward()
        return value

    loop = nb.epochs(steps, "cpu")
    for _ in loop:
        optimizer.step(loss)
        if leak is not None:
            leak.append(torch.zeros(200 * 200 * 2))
    return loop.curve


def test_growing_lbfgs_history_is_insufficient_data():
    filling = train_lbfgs(8, 100)
    full = train_lbfgs(12, 3)

    assert (filling.verdict, filling.deciding_metric) == ("insufficient data", "allocated")
    assert "history" in filling.reason
    assert "history_size" in filling.advice
    assert filling.likely_cause is None
    assert (full.verdict, full.advice) == ("flat", "No action needed.")
    assert not full.referrers


def test_leak_next_to_bounded_history_is_found():
    kept = []
    curve = train_lbfgs(8, 100, kept)

    assert curve.verdict == "growing"
    assert curve.likely_cause.name == "kept"
