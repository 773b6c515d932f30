"""Batches as they come: nothing of the person's changes by being measured, and no rows are made up."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError
from openmed_nb.notebook import verbs
from openmed_nb.runbook.measure.benches import Asked
from openmed_nb.runbook.measure.workloads import Repeated, begun, fresh, put_on_devices, seconds_of_step
from openmed_nb.session import SESSION

pytestmark = pytest.mark.usefixtures("quick_collection")

EXAMPLE = torch.ones(4, 8)


class Writing(torch.nn.Module):
    """A model that writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an answer, and leave other numbers in the input."""
        return self.linear(x.mul_(3))


class Named(torch.nn.Module):
    """A model that takes names of rows beside them."""

    def forward(self, x: torch.Tensor, identity: list[str]) -> torch.Tensor:
        """Return the rows."""
        assert all(isinstance(one, str) for one in identity)
        return x + 1


def subject_of(*arguments: Any, **named: Any) -> Any:
    """Return what is measured, as the session says."""
    return verbs.subject_of(SESSION, Asked(*arguments, **named))[0]


def steps(workload: Any, count: int) -> list[Any]:
    """Return what some steps gave."""
    return [workload.run(batch) for batch in itertools.islice(workload.batches(), count)]


def rows(sizes: list[int]) -> DataLoader:
    """Return a loader with batches of these sizes."""
    return DataLoader(torch.ones(max(sizes), 8), batch_sampler=[list(range(size)) for size in sizes])


def test_model_that_writes_into_its_input():
    """The tensors that a loader hands out as they are keep their numbers, and every step has the same ones."""
    for training in (False, True):
        items = [torch.ones(4, 8), torch.ones(4, 8)]
        bench = subject_of(Writing(), DataLoader(items, batch_size=None), training=training).on("cpu")
        steps(bench.stream(), 5)
        bucket = bench.bucket(3)
        batch = next(bucket.batches())
        for _ in range(3):
            bucket.run(batch)
        assert all(bool((item == 1).all()) for item in items), training
        assert bool((batch.args[0] == 1).all()), training


def test_model_that_only_reads_gets_the_batch_itself():
    """On the CPU a batch is not copied for a model that leaves it as it is."""
    bench = subject_of(torch.nn.Identity(), EXAMPLE).on("cpu")
    workload = bench.bucket(4)
    batch = next(workload.batches())

    assert [workload.run(batch) is batch.args[0] for _ in range(2)] == [False, True]


def test_generator_of_a_loader_stays():
    """The generators of a shuffling loader and of its sampler go on from where they were."""
    generator = torch.Generator().manual_seed(7)
    loader = DataLoader(EXAMPLE, batch_size=2, shuffle=True, generator=generator)
    before = generator.get_state()
    for model in (torch.nn.Identity(), lambda batch: batch):
        subject = subject_of(model, loader)
        with put_on_devices(subject, ["cpu"]) as benches, begun(benches["cpu"].stream()) as batches:
            list(itertools.islice(batches, 5))
        assert torch.equal(generator.get_state(), before), model


def test_step_that_takes_things_out():
    """A step may take things out of its batch: each one gets a mapping or list of its own."""
    data = [{"x": EXAMPLE, "labels": [1]}, {"x": EXAMPLE, "labels": [2]}]
    bench = subject_of(lambda batch: batch.pop("labels"), data).on("cpu")

    assert steps(bench.stream(), 5) == [[1], [2], [1], [2], [1]]
    assert [sorted(one) for one in data] == [["labels", "x"]] * 2


def test_fresh_leaves_tensors_themselves():
    """Only mappings and lists are copied, also those inside of others."""
    batch = {"inside": {"x": EXAMPLE}}
    copied = fresh(batch)

    assert copied["inside"] is not batch["inside"]
    assert copied["inside"]["x"] is EXAMPLE
    assert fresh(EXAMPLE) is EXAMPLE


def test_sizes_of_batches_are_counted():
    """Of a loader with batches of several sizes, the mean and the usual number of rows are told."""
    workload = subject_of(torch.nn.Identity(), rows([1, 100, 100, 100])).on("cpu").stream()
    steps(workload, 8)

    assert (workload.rows, workload.usual_rows, workload.mean_rows) == (1, 100, 75.25)


def test_throughput_of_several_sizes():
    """Rows a second are those of all batches, not of the first."""
    one = nb.compare(torch.nn.Linear(8, 8), rows([1, 50]), devices="cpu", pairs=6, seconds=0).of("cpu")

    assert one.rows in {1, 50}
    assert one.rows_per_second == pytest.approx(one.mean_rows / one.seconds)
    assert 20 < one.mean_rows < 30


class Begins:
    """A loader with processes, of which each beginning is late."""

    num_workers, persistent_workers = 1, False

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([EXAMPLE] * self.count)


def test_start_of_processes_is_left_out():
    """The start of a loader's processes is told apart, but where they are kept, and where each pass has one batch."""
    for count, persistent, left_out in ((3, False, 2), (3, True, 0), (1, False, 0)):
        loader = Begins(count)
        loader.persistent_workers = persistent
        batches = iter(Repeated(loader))
        apart = [batches.starting for _ in itertools.islice(batches, 7)]
        assert sum(seconds > 0 for seconds in apart) == left_out, (count, persistent)


def test_time_without_the_start():
    """What is left out of a step's time is no longer in it, and a step never takes less than nothing."""
    workload = subject_of(torch.nn.Identity(), DataLoader(EXAMPLE, batch_size=2, num_workers=1)).on("cpu").stream()
    with begun(workload) as batches:
        taken = [seconds_of_step(workload, batches) for _ in range(4)]
        phases = [workload.seconds_of_phases(batches)["data"] for _ in range(4)]

    assert min(*taken, *phases) >= 0


def test_enough_rows():
    """A batch with the rows that were asked for passes, also where the sequence comes first, and one without tensors."""
    for batch in (torch.ones(4, 2), torch.ones(9, 2), torch.ones(3, 4, 2), {"ids": [1]}):
        workload = subject_of(len, lambda _rows, batch=batch: batch).on("cpu").bucket(4)
        assert steps(workload, 1) == [len(batch)]


def test_strings_beside_tensors():
    """Strings at the top of a loader's batch are left as they are."""
    items = [{"x": torch.ones(8), "identity": "a"} for _ in range(4)]
    bench = subject_of(Named(), DataLoader(items, batch_size=2)).on("cpu")

    assert [len(one) for one in steps(bench.stream(), 2)] == [2, 2]


def test_data_that_the_model_does_not_take():
    """Batches that a model cannot be called with are an error of ours before anything is measured."""
    cases = [
        (DataLoader(TensorDataset(EXAMPLE, EXAMPLE)), "Linear does not take what the data give: too many positional"),
        (DataLoader([{"x": EXAMPLE}]), "Linear does not take what the data give: missing a required argument"),
        (torch.ones(0, 8), "has no rows"),
    ]
    for data, says in cases:
        with pytest.raises(ConfigurationError, match=says):
            subject_of(torch.nn.Linear(8, 8), data)


@pytest.mark.real_computer
def test_model_of_64_bits_on_mps():
    """MPS has no numbers of 64 bits, which is an error of ours."""
    with nb.simulated_mps():
        for verb in (nb.sweep, nb.compare, nb.profile):
            with pytest.raises(ConfigurationError, match="Linear has numbers in float64"):
                verb(torch.nn.Linear(8, 8).double(), EXAMPLE.double())
