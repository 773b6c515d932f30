"""Settings of a DataLoader for a device."""

import multiprocessing
import subprocess
import sys
from collections import deque
from dataclasses import replace

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from openmed_nb.devices.machine import MachineInfo
from openmed_nb.training.loader import default_start_method, find_main_definitions, make_settings

MAC = MachineInfo("Darwin", "arm64", apple_silicon=True, chip="Apple M3", cores=8)
LINUX = MachineInfo("Linux", "x86_64", cores=4)


class Items(Dataset):
    """Dataset of indexed items."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((4,), float(index))


class Stream(IterableDataset):
    """Dataset without indices."""

    def __iter__(self):
        return iter(())


def define_in_cell(source, name):
    """Return an object that a notebook cell defines."""
    names = {"__name__": "__main__"}
    exec(source, names)  # noqa: S102
    return names[name]


CELL_CLASS = define_in_cell("class Notes(list):\n    pass", "Notes")


SPAWNED = {"num_workers": 4, "persistent_workers": True, "multiprocessing_context": "spawn"}
PERSISTENT = {"num_workers": 2, "persistent_workers": True}
SETTINGS = [
    # device, machine, dataset, (in a notebook, start method) -> arguments
    ("mps", MAC, CELL_CLASS([1]), (True, None), {"pin_memory": False, "num_workers": 0}),
    ("cpu", MAC, CELL_CLASS([1]), (True, "spawn"), {"pin_memory": False, "num_workers": 0}),
    ("mps", MAC, Items(), (True, None), {"pin_memory": False, **SPAWNED}),
    ("mps", MAC, CELL_CLASS([1]), (False, None), {"pin_memory": False, **SPAWNED}),
    ("cuda:1", LINUX, CELL_CLASS([1]), (True, "fork"), {"pin_memory": True, **PERSISTENT}),
    ("cuda", LINUX, CELL_CLASS([1]), (True, "forkserver"), {"pin_memory": True, "num_workers": 0}),
    ("cpu", LINUX, deque([1]), (False, "fork"), {"pin_memory": False, **PERSISTENT}),
    ("cpu", replace(LINUX, cores=1), deque([1]), (False, "fork"), {"pin_memory": False, "num_workers": 0}),
    *(
        ("cpu", LINUX, dataset, (False, "fork"), {"pin_memory": False, "num_workers": 0})
        for dataset in ([1, 2], (1, 2), TensorDataset(torch.zeros(2)), Stream())
    ),
]


@pytest.mark.parametrize(("device", "machine", "dataset", "context", "arguments"), SETTINGS)
def test_settings_depend_on_device_and_dataset(device, machine, dataset, context, arguments):
    settings = make_settings(device, dataset, machine, in_notebook=context[0], start_method=context[1])

    assert settings.arguments == arguments
    assert settings.reasons.keys() == arguments.keys()
    if not isinstance(dataset, Stream):
        DataLoader(dataset, batch_size=2, **settings.arguments)


def test_reason_names_class_of_cell():
    settings = make_settings("mps", CELL_CLASS(), MAC, in_notebook=True)

    assert "cannot import Notes from a cell; write the class into a .py file" in settings.reasons["num_workers"]


def test_find_main_definitions():
    transformed = Items()
    transformed.transform = define_in_cell("def shorten(text):\n    return text[:9]", "shorten")
    endless = CELL_CLASS([1])
    endless.itself = endless
    datasets = (
        CELL_CLASS(),
        Subset(CELL_CLASS([1, 2]), [0]),
        ConcatDataset([Items(), CELL_CLASS([1])]),
        endless,
    )

    for dataset in datasets:
        assert set(find_main_definitions(dataset)) == {"Notes"}
    assert set(find_main_definitions(transformed)) == {"shorten"}
    assert list(find_main_definitions(Items())) == []


def test_default_start_method():
    """The call does not set the start method of Python."""
    before = multiprocessing.get_start_method(allow_none=True)
    assert default_start_method("Darwin") == "spawn"
    assert default_start_method("Linux") in multiprocessing.get_all_start_methods()
    assert multiprocessing.get_start_method(allow_none=True) == before


def test_script_is_not_interactive(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("from openmed_nb.training.loader import is_interactive_main; print(is_interactive_main())")

    assert subprocess.check_output([sys.executable, program], text=True) == "False\n"
