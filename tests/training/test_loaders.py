"""Settings of a DataLoader for a device."""

import functools
import multiprocessing
import subprocess
import sys
from collections import deque
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader

from openmed_nb.devices.machine import MachineInfo
from openmed_nb.training.loader import (
    default_start_method,
    find_main_definitions,
    make_settings,
)

MAC = MachineInfo("Darwin", "arm64", apple_silicon=True, chip="Apple M3", cores=8)
LINUX = MachineInfo("Linux", "x86_64", cores=4)


class Items(torch.utils.data.Dataset):
    """Dataset of indexed items."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((4,), float(index))


class Stream(torch.utils.data.IterableDataset):
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
SETTINGS = [
    # device, machine, dataset, (notebook, start) -> arguments
    ("mps", MAC, CELL_CLASS, (True, None), {"pin_memory": False, "num_workers": 0}),
    ("cpu", MAC, CELL_CLASS, (True, "spawn"), {"pin_memory": False, "num_workers": 0}),
    ("mps", MAC, deque, (True, None), {"pin_memory": False, **SPAWNED}),
    ("mps", MAC, CELL_CLASS, (False, None), {"pin_memory": False, **SPAWNED}),
    ("cuda:1", LINUX, CELL_CLASS, (True, "fork"), {"pin_memory": True, "num_workers": 2, "persistent_workers": True}),
    ("cuda", LINUX, CELL_CLASS, (True, "forkserver"), {"pin_memory": True, "num_workers": 0}),
    ("cpu", LINUX, deque, (False, "fork"), {"pin_memory": False, "num_workers": 2, "persistent_workers": True}),
    ("cpu", replace(LINUX, cores=1), deque, (False, "fork"), {"pin_memory": False, "num_workers": 0}),
]


@pytest.mark.parametrize(("device", "machine", "kind", "context", "arguments"), SETTINGS)
def test_settings_depend_on_device_and_dataset(device, machine, kind, context, arguments):
    settings = make_settings(device, kind([1, 2]), machine, in_notebook=context[0], start_method=context[1])

    assert settings.arguments == arguments
    assert settings.reasons.keys() == arguments.keys()


@pytest.mark.parametrize(("device", "start"), [("cpu", "fork"), ("mps", "spawn"), ("cuda", "fork")])
def test_dataloader_accepts_settings(device, start):
    for machine in (MAC, LINUX, replace(LINUX, cores=1)):
        settings = make_settings(device, Items(), machine, start_method=start)
        DataLoader(Items(), batch_size=2, **settings.arguments)


def test_reason_names_class_of_cell():
    settings = make_settings("mps", CELL_CLASS(), MAC, in_notebook=True)

    assert (
        "cannot import Notes from a cell; write the class into a .py file"
        in settings.to_dict()["reasons"]["num_workers"]
    )
    assert "non_blocking=True corrupts them (pytorch#189690)" in str(settings)
    assert "non_blocking" not in str(make_settings("cpu", [1], LINUX, in_notebook=False))


def test_datasets_in_memory_and_streams_have_no_workers():
    for dataset in ([1, 2], (1, 2), torch.utils.data.TensorDataset(torch.zeros(2)), Stream()):
        settings = make_settings("cpu", dataset, LINUX, in_notebook=False, start_method="fork")
        assert settings.arguments["num_workers"] == 0, type(dataset)


def test_find_main_definitions():
    wrapped = torch.utils.data.Subset(CELL_CLASS([1, 2]), [0])
    both = torch.utils.data.ConcatDataset([Items(), CELL_CLASS([1])])
    transformed = Items()
    transformed.transform = functools.partial(
        define_in_cell("def shorten(text):\n    return text[:9]", "shorten"), text=""
    )
    endless = CELL_CLASS([1])
    endless.itself = endless

    for dataset in (CELL_CLASS(), wrapped, both, {"train": CELL_CLASS()}, endless):
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
