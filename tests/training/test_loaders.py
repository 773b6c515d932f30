"""Settings of a DataLoader for a device."""

import multiprocessing
import subprocess
import sys
from collections import deque
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from openmed_nb.devices.machine import MachineInfo
from openmed_nb.training.loader import default_start_method, make_settings

MAC = MachineInfo("Darwin", "arm64", apple_silicon=True, chip="Apple M3", cores=8)
LINUX = MachineInfo("Linux", "x86_64", cores=4)


class Stream(IterableDataset):
    """Dataset without indices."""

    def __iter__(self):
        return iter(())


NOTES = type("Notes", (list,), {"__module__": "__main__"})([1])  # A dataset whose class a cell defines.

TRANSFORMED = type("Transformed", (deque,), {})([1])
TRANSFORMED.transform = NOTES  # Only a part of the dataset is from a cell.

SPAWNED = {"num_workers": 4, "persistent_workers": True, "multiprocessing_context": "spawn"}
PERSISTENT = {"num_workers": 2, "persistent_workers": True}
SETTINGS = [
    # device, machine, dataset, (in a notebook, start method) -> arguments
    ("mps", MAC, NOTES, (True, "spawn"), {"pin_memory": False, "num_workers": 0}),
    ("mps", MAC, TRANSFORMED, (True, "spawn"), {"pin_memory": False, "num_workers": 0}),
    ("cpu", MAC, NOTES, (True, "spawn"), {"pin_memory": False, "num_workers": 0}),
    ("mps", MAC, deque([1]), (True, "spawn"), {"pin_memory": False, **SPAWNED}),
    ("mps", MAC, NOTES, (False, "spawn"), {"pin_memory": False, **SPAWNED}),
    ("cuda:1", LINUX, NOTES, (True, "fork"), {"pin_memory": True, **PERSISTENT}),
    ("cuda", LINUX, NOTES, (True, "forkserver"), {"pin_memory": True, "num_workers": 0}),
    ("cpu", LINUX, deque([1]), (False, "fork"), {"pin_memory": False, **PERSISTENT}),
    ("cpu", replace(LINUX, cores=1), deque([1]), (False, "fork"), {"pin_memory": False, "num_workers": 0}),
    *(
        ("cpu", LINUX, dataset, (False, "fork"), {"pin_memory": False, "num_workers": 0})
        for dataset in ([1, 2], (1, 2), TensorDataset(torch.zeros(2)), Stream())
    ),
]


@pytest.mark.parametrize(("device", "machine", "dataset", "context", "arguments"), SETTINGS)
def test_settings_depend_on_device_and_dataset(device, machine, dataset, context, arguments):
    settings = make_settings(device, dataset, machine, context[1], context[0])

    assert settings.arguments == arguments
    assert settings.reasons.keys() == arguments.keys()
    if not isinstance(dataset, Stream):
        DataLoader(dataset, batch_size=2, **settings.arguments)


def test_reason_names_class_of_cell():
    settings = make_settings("mps", Subset(NOTES, [0]), MAC, "spawn", True)

    assert "cannot import Notes from a cell; write the class into a .py file" in settings.reasons["num_workers"]


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
