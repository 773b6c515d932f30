"""Loaders and models are measured apart, without changing either; workers are gone afterwards."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError

UNSENDABLE = "cannot be imported by a worker process: Notes is defined in a cell. Write the class"


@pytest.fixture(scope="module")
def items(helper):
    """The module of datasets."""
    return helper(Path(__file__).parent / "slow_items.py")


def loader(dataset, **arguments):
    """Return a loader of small batches."""
    return torch.utils.data.DataLoader(dataset, batch_size=2, **arguments)


class Counting(torch.nn.Module):
    """A model that counts its calls, in which mode, and with gradients or not."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.norm.eval()
        self.calls = []

    def forward(self, inputs):
        """Return two numbers for each row."""
        self.calls.append((self.layer.training, torch.is_grad_enabled(), inputs.device.type))
        return self.norm(self.layer(inputs))


def test_model_is_left_as_it_was(items):
    """A model runs forward in evaluation mode without gradients, and then every part is in its former mode."""
    model = Counting()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    check = nb.check_loader(loader(items.Items()), model, "cpu", batches=5)

    assert (check.batches, check.workers, check.device, check.simulated) == (5, 0, "cpu", False)
    assert set(model.calls) == {(False, False, "cpu")}
    assert len(model.calls) == 7
    assert (model.training, model.layer.training, model.norm.training) == (True, True, False)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert check.data_seconds > 0
    assert check.step_seconds > 0


def test_model_is_left_as_it_was_after_an_error(items):
    """A model that fails is in its former mode too, and the error is its own."""
    model = Counting()
    model.layer = torch.nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        nb.check_loader(loader(items.Items()), model, "cpu")
    assert model.layer.training


def test_steps_and_mappings(tiny):
    """A function gets the batch on the device; a model of transformers gets a mapping by name."""
    rows = [{"input_ids": torch.arange(5, 9), "labels": torch.zeros(4, dtype=torch.long)} for _ in range(12)]
    seen = []
    nb.check_loader(loader(rows), seen.append, "cpu", batches=2)
    assert sorted(seen[0]) == ["input_ids", "labels"]
    assert nb.check_loader(loader(rows), tiny.random_bert(), "cpu", batches=2).batches == 2


def test_random_numbers_go_on(items):
    """A shuffled loader is measured without moving the random numbers of the program."""
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    nb.check_loader(loader(items.Items(), shuffle=True), lambda _batch: torch.rand(5), "cpu", batches=2)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    ("count", "what"), [(0, "has 0 batches, and 2 are left out"), (2, "has 1 batches"), (4, "has 2 batches")]
)
def test_too_few_batches(items, count, what):
    """A loader that has nothing beyond the warm-up cannot be measured."""
    with pytest.raises(ConfigurationError, match=what):
        nb.check_loader(loader(items.Items(count)), print, "cpu")


def test_iterators_are_not_used_up():
    """A generator is refused before anything is taken from it."""
    batches = iter([torch.ones(2)] * 5)
    with pytest.raises(ConfigurationError, match="would be used up"):
        nb.check_loader(batches, print, "cpu")
    assert len(list(batches)) == 5


def test_numbers_of_batches_that_are_none():
    """What is no number of batches from 1 up is refused, with the value."""
    for batches in (0, -1, "x", 2.5, True, None):
        with pytest.raises(ConfigurationError, match=f"^batches cannot be {batches!r}"):
            nb.check_loader([torch.ones(2)] * 5, print, "cpu", batches=batches)


def test_short_loader_is_measured_as_far_as_it_goes(items):
    """Fewer batches than asked for are measured and counted."""
    assert nb.check_loader(loader(items.Items(8)), lambda _batch: None, "cpu", batches=100).batches == 2


@pytest.mark.real_computer  # It begins its own simulation.
def test_under_simulated_mps(items):
    """Under the simulated device the batches are on it, and the answer says SIMULATED."""
    with nb.simulated_mps() as mps:
        model = Counting().to("mps")
        check = nb.check_loader(loader(items.Items()), model, "mps", batches=2)
    assert {device for _training, _gradients, device in model.calls} == {"mps"}
    assert str(check).startswith("SIMULATED mps: ")
    assert not any(copy.non_blocking for copy in mps.copies)


def test_ladder_with_forked_workers(items):
    """Workers are measured with their memory, and none is left."""
    before = set(multiprocessing.active_children())
    ladder = nb.worker_ladder(items.Items(40), 2, workers=(2, 0, 1), batches=3, start_method="fork")

    assert [rung.workers for rung in ladder.rungs] == [0, 1, 2]
    assert [len(rung.worker_bytes) for rung in ladder.rungs] == [0, 1, 2]
    assert all(size > 2**20 for rung in ladder.rungs for size in rung.worker_bytes)
    assert set(multiprocessing.active_children()) == before


def test_no_worker_is_left_after_an_error(items):
    """An error in a worker is raised here, and the workers are gone."""
    before = set(multiprocessing.active_children())
    with pytest.raises(ValueError, match="a broken item") as caught:
        nb.worker_ladder(items.Items(40, broken=1), 2, workers=(1,), batches=3, start_method="fork")
    assert set(multiprocessing.active_children()) == before
    assert caught.value is not None


@pytest.mark.slow
@pytest.mark.real_computer  # Workers are processes of their own.
def test_ladder_with_spawned_workers():
    """Workers that begin empty are measured too."""
    dataset = torch.utils.data.TensorDataset(torch.ones(24, 2))
    ladder = nb.worker_ladder(dataset, 2, workers=(1,), batches=3, start_method="spawn")

    assert len(ladder.rungs[0].worker_bytes) == 1
    assert multiprocessing.active_children() == []


def test_what_cannot_be_sent_is_refused(items):
    """What pickle cannot send is refused before a worker starts, by the name of the argument; forked workers need none."""
    before = set(multiprocessing.active_children())
    with pytest.raises(ConfigurationError, match=r"collate_fn cannot be sent to a worker process"):
        nb.worker_ladder(items.Items(), 2, start_method="spawn", collate_fn=lambda batch: batch)
    dataset = items.Items()
    dataset.file = (number for number in range(3))
    with pytest.raises(ConfigurationError, match=r"dataset cannot be sent .*generator"):
        nb.worker_ladder(dataset, 2, start_method="forkserver")
    assert set(multiprocessing.active_children()) == before
    nb.worker_ladder(items.Items(), 2, workers=(0, 1), batches=2, start_method="fork", collate_fn=lambda batch: batch)


def test_numbers_of_workers_that_are_none(items, refusal):
    """What is no series of numbers from zero up is refused, before anything is read."""
    for workers in ((), (-1, 0), 3, None, ("a",), (1.5,), (True,)):
        refused = refusal(partial(nb.worker_ladder, items.Items(), 2, workers=workers))
        assert "cannot be tried" in str(refused), workers


@pytest.mark.parametrize(("name", "other"), [("num_workers", "workers"), ("multiprocessing_context", "start_method")])
def test_arguments_that_the_ladder_sets(items, name, other):
    """An argument that the ladder sets itself is refused, with the one to pass instead."""
    with pytest.raises(ConfigurationError, match=f"sets {name} itself. Pass {other}= instead"):
        nb.worker_ladder(items.Items(), 2, **{name: 1})


def test_classes_of_cells_are_refused(monkeypatch):
    """Where there is no main file, as in a notebook, a class of a cell is refused by name before a worker starts."""
    cell = {"__name__": "__main__"}
    exec("class Notes(list):\n    pass", cell)  # noqa: S102
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    with pytest.raises(ConfigurationError, match=f"dataset {UNSENDABLE}"):
        nb.worker_ladder(cell["Notes"](range(40)), 2, start_method="spawn")


@pytest.mark.slow
@pytest.mark.real_computer  # The program is a process of its own.
def test_classes_of_a_prompt_are_refused():
    """So is one of a program that is typed in, whose workers would hang."""
    program = """
    import openmed_nb as nb
    class Notes(list):
        pass
    try:
        nb.worker_ladder(Notes(range(40)), 2, start_method="spawn")
    except nb.OpenMedError as error:
        print(error)
    """
    done = subprocess.run(
        [sys.executable, "-"], input=textwrap.dedent(program), capture_output=True, text=True, check=True
    )
    assert UNSENDABLE in done.stdout
