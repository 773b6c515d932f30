"""The arguments of a DataLoader, with their reasons: a table of devices, computers and datasets."""

from __future__ import annotations

import functools
import multiprocessing
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest
import torch

from openmed_nb.devices.machine import Machine
from openmed_nb.training.loaders import (
    defined_in_main,
    is_stream,
    loader_settings,
    usual_start_method,
    worker_count,
)

MAC = Machine("Darwin", "arm64", apple_silicon=True, chip="Apple M3", cores=8)
LINUX = Machine("Linux", "x86_64", cores=4)


@pytest.fixture(scope="module")
def items(helper):
    """The module of datasets, which is imported like any other."""
    return helper(Path(__file__).parent / "slow_items.py")


def in_cell(source, name):
    """Return what a cell of a notebook defines."""
    names = {"__name__": "__main__"}
    exec(source, names)  # noqa: S102
    return names[name]


CELL_CLASS = in_cell("class Notes(list):\n    pass", "Notes")


MANY = {"num_workers": 4, "persistent_workers": True, "multiprocessing_context": "spawn"}
SETTINGS = [
    # device, machine, dataset, (notebook, start) -> arguments
    ("mps", MAC, CELL_CLASS, (True, None), {"pin_memory": False, "num_workers": 0}),
    ("cpu", MAC, CELL_CLASS, (True, "spawn"), {"pin_memory": False, "num_workers": 0}),
    ("mps", MAC, deque, (True, None), {"pin_memory": False, **MANY}),
    ("mps", MAC, CELL_CLASS, (False, None), {"pin_memory": False, **MANY}),
    ("cuda:1", LINUX, CELL_CLASS, (True, "fork"), {"pin_memory": True, "num_workers": 2, "persistent_workers": True}),
    ("cuda", LINUX, CELL_CLASS, (True, "forkserver"), {"pin_memory": True, "num_workers": 0}),
    ("cpu", LINUX, deque, (False, "fork"), {"pin_memory": False, "num_workers": 2, "persistent_workers": True}),
    ("cpu", Machine("Linux", "x86_64", cores=1), deque, (False, "fork"), {"pin_memory": False, "num_workers": 0}),
]


@pytest.mark.parametrize(("device", "machine", "kind", "how", "arguments"), SETTINGS)
def test_arguments(device, machine, kind, how, arguments):
    """Memory is pinned for CUDA alone, and workers read what they can import."""
    settings = loader_settings(device, kind([1, 2]), machine, in_notebook=how[0], start_method=how[1])

    assert settings.arguments == arguments
    assert all(setting.reason for setting in settings.settings)


@pytest.mark.parametrize(("device", "start"), [("cpu", "fork"), ("mps", "spawn"), ("cuda", "fork")])
def test_a_loader_takes_them(items, device, start):
    """The DataLoader of torch takes the arguments, for every device and every number of workers."""
    few = [
        Machine(system, "arm64", apple_silicon=system == "Darwin", cores=cores)
        for system in ("Linux", "Darwin")
        for cores in (1, 2)
    ]
    for machine in few:
        settings = loader_settings(device, items.Items(), machine, start_method=start)
        torch.utils.data.DataLoader(items.Items(), batch_size=2, **settings.arguments)


def test_reasons():
    """The reason names the class of the cell and the way out, and the report for MPS warns of copies that do not wait."""
    settings = loader_settings("mps", CELL_CLASS(), MAC, in_notebook=True)

    assert (
        "cannot import Notes from a cell; write the class into a .py file"
        in settings.to_dict()["reasons"]["num_workers"]
    )
    assert "non_blocking=True corrupts them (pytorch#189690)" in str(settings)
    assert "non_blocking" not in str(loader_settings("cpu", [1], LINUX, in_notebook=False))


@pytest.mark.parametrize("dataset", [[1, 2], (1, 2), torch.utils.data.TensorDataset(torch.zeros(2))])
def test_items_in_memory_have_no_workers(dataset):
    """A list, a tuple and a dataset of tensors are read without workers, which would only copy what is there."""
    assert worker_count(dataset, LINUX, "fork", in_notebook=False).value == 0


def test_streams_have_no_workers(items):
    """A stream would come once from each worker, so there are none."""
    assert is_stream(items.Stream())
    assert not is_stream(items.Items())
    assert worker_count(items.Stream(), LINUX, "fork", in_notebook=False).value == 0


def test_what_a_cell_defines_is_found(items):
    """A class, a function or a wrapped dataset from a cell is found, and nothing where there is none."""
    wrapped = torch.utils.data.Subset(CELL_CLASS([1, 2]), [0])
    both = torch.utils.data.ConcatDataset([items.Items(), CELL_CLASS([1])])
    transformed = items.Items()
    transformed.transform = in_cell("def shorten(text):\n    return text[:9]", "shorten")

    assert set(defined_in_main(CELL_CLASS())) == {"Notes"}
    assert set(defined_in_main(wrapped)) == {"Notes"}
    assert set(defined_in_main(both)) == {"Notes"}
    assert set(defined_in_main(transformed)) == {"shorten"}
    assert set(defined_in_main(functools.partial(transformed.transform, text=""))) == {"shorten"}
    assert set(defined_in_main({"train": CELL_CLASS()})) == {"Notes"}
    assert list(defined_in_main(items.Items())) == []
    assert list(defined_in_main(torch.utils.data.TensorDataset(torch.ones(3)))) == []


def test_a_dataset_that_holds_itself():
    """A dataset that refers to itself is looked at for a while, not for ever."""
    dataset = CELL_CLASS([1])
    dataset.itself = dataset
    assert set(defined_in_main(dataset)) == {"Notes"}


def test_start_methods():
    """A Mac spawns; elsewhere it is Python's own way, which the question does not fix."""
    before = multiprocessing.get_start_method(allow_none=True)
    assert usual_start_method(MAC) == "spawn"
    assert usual_start_method(LINUX) in multiprocessing.get_all_start_methods()
    assert multiprocessing.get_start_method(allow_none=True) == before


def test_a_program_in_a_file_is_no_notebook(tmp_path):
    """A program that was started from a file is no notebook."""
    program = tmp_path / "program.py"
    program.write_text("from openmed_nb.training.loaders import in_a_notebook; print(in_a_notebook())")

    assert subprocess.check_output([sys.executable, program], text=True) == "False\n"
