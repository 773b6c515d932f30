"""Settings of a DataLoader for a device, and measurements of its speed."""

import functools
import multiprocessing
import subprocess
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import openmed_nb as nb
from openmed_nb.devices.machine import MachineInfo
from openmed_nb.errors import ConfigurationError
from openmed_nb.training import loader
from openmed_nb.training.loader import (
    LoaderCheck,
    default_start_method,
    find_main_definitions,
    make_settings,
)

MAC = MachineInfo("Darwin", "arm64", apple_silicon=True, chip="Apple M3", cores=8)
LINUX = MachineInfo("Linux", "x86_64", cores=4)


@pytest.fixture(scope="module")
def items(helper):
    """Module of datasets, which is imported normally."""
    return helper(Path(__file__).parent / "slow_items.py")


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
def test_dataloader_accepts_settings(items, device, start):
    for machine in (MAC, LINUX, replace(LINUX, cores=1)):
        settings = make_settings(device, items.Items(), machine, start_method=start)
        DataLoader(items.Items(), batch_size=2, **settings.arguments)


def test_reason_names_class_of_cell():
    settings = make_settings("mps", CELL_CLASS(), MAC, in_notebook=True)

    assert (
        "cannot import Notes from a cell; write the class into a .py file"
        in settings.to_dict()["reasons"]["num_workers"]
    )
    assert "non_blocking=True corrupts them (pytorch#189690)" in str(settings)
    assert "non_blocking" not in str(make_settings("cpu", [1], LINUX, in_notebook=False))


def test_datasets_in_memory_and_streams_have_no_workers(items):
    for dataset in ([1, 2], (1, 2), torch.utils.data.TensorDataset(torch.zeros(2)), items.Stream()):
        settings = make_settings("cpu", dataset, LINUX, in_notebook=False, start_method="fork")
        assert settings.arguments["num_workers"] == 0, type(dataset)


def test_find_main_definitions(items):
    wrapped = torch.utils.data.Subset(CELL_CLASS([1, 2]), [0])
    both = torch.utils.data.ConcatDataset([items.Items(), CELL_CLASS([1])])
    transformed = items.Items()
    transformed.transform = functools.partial(
        define_in_cell("def shorten(text):\n    return text[:9]", "shorten"), text=""
    )
    endless = CELL_CLASS([1])
    endless.itself = endless

    for dataset in (CELL_CLASS(), wrapped, both, {"train": CELL_CLASS()}, endless):
        assert set(find_main_definitions(dataset)) == {"Notes"}
    assert set(find_main_definitions(transformed)) == {"shorten"}
    assert list(find_main_definitions(items.Items())) == []


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


def make_loader(dataset, **arguments):
    """Return a loader of small batches."""
    return DataLoader(dataset, batch_size=2, **arguments)


class Counting(torch.nn.Module):
    """Model that records its calls, mode and gradient state."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.norm.eval()
        self.calls = []

    def forward(self, inputs):
        self.calls.append((self.layer.training, torch.is_grad_enabled(), inputs.device.type))
        return self.norm(self.layer(inputs))


def test_check_restores_model(items):
    model = Counting()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    check = loader.check(make_loader(items.Items()), model, "cpu", batches=5)

    assert (check.batches, check.workers, check.device, check.simulated) == (5, 0, "cpu", False)
    assert model.calls == [(False, False, "cpu")] * 7
    assert (model.training, model.layer.training, model.norm.training) == (True, True, False)
    torch.testing.assert_close(dict(model.state_dict()), state)
    assert min(check.data_seconds, check.step_seconds) > 0


def test_check_restores_model_after_error(items):
    model = Counting()
    model.layer = torch.nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        loader.check(make_loader(items.Items()), model, "cpu")
    assert model.layer.training


def test_check_passes_mappings_by_name(tiny):
    rows = [{"input_ids": torch.arange(5, 9), "labels": torch.zeros(4, dtype=torch.long)}] * 12
    seen = []
    for step in (seen.append, tiny.random_bert()):
        assert loader.check(make_loader(rows), step, "cpu", batches=2).batches == 2
    assert set(seen[0]) == set(rows[0])


def test_check_preserves_random_number_state(items):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    loader.check(make_loader(items.Items(), shuffle=True), lambda _batch: torch.rand(5), "cpu", batches=2)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    ("count", "what"), [(0, "has 0 batches, and 2 are used"), (2, "has 1 batches"), (4, "has 2 batches")]
)
def test_check_rejects_too_few_batches(items, count, what):
    with pytest.raises(ConfigurationError, match=what):
        loader.check(make_loader(items.Items(count)), print, "cpu")
    assert loader.check(make_loader(items.Items(8)), lambda _batch: None, "cpu", batches=100).batches == 2


def test_check_rejects_iterators():
    batches = iter([torch.ones(2)] * 5)
    with pytest.raises(ConfigurationError, match="would be exhausted"):
        loader.check(batches, print, "cpu")
    assert len(list(batches)) == 5


@pytest.mark.parametrize("batches", [0, -1, "x", 2.5, True, None])
def test_check_rejects_invalid_number_of_batches(batches):
    with pytest.raises(ConfigurationError, match=f"^Invalid value for batches: {batches!r}"):
        loader.check([torch.ones(2)] * 5, print, "cpu", batches=batches)


@pytest.mark.real_computer  # It starts its own simulation.
def test_check_on_simulated_mps(items):
    with nb.simulated_mps() as mps:
        model = Counting().to("mps")
        check = loader.check(make_loader(items.Items()), model, "mps", batches=2)
    assert {device for _training, _gradients, device in model.calls} == {"mps"}
    assert str(check).startswith("mps (SIMULATED): ")
    assert not any(copy.non_blocking for copy in mps.copies)


@pytest.fixture
def stopped_workers():
    """Check that no worker process is left."""
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) == before


START_METHODS = ["fork", pytest.param("spawn", marks=[pytest.mark.slow, pytest.mark.real_computer])]


@pytest.mark.usefixtures("stopped_workers")
@pytest.mark.parametrize("method", START_METHODS)
def test_check_stops_workers(method):
    dataset = torch.utils.data.TensorDataset(torch.ones(24, 2))
    workers = make_loader(dataset, num_workers=2, multiprocessing_context=method)

    assert loader.check(workers, lambda _batch: None, "cpu", batches=3).workers == 2


@pytest.mark.usefixtures("stopped_workers")
def test_check_stops_workers_after_error(items):
    workers = make_loader(items.Items(40, broken=1), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(ValueError, match="a broken item"):
        loader.check(workers, print, "cpu", batches=3)


CHECKS = [
    # (data, step, workers) -> bottleneck, wait fraction, fragment of the advice
    ((0.030, 0.010, 0), "loader", 0.75, "use workers"),
    ((0.030, 0.010, 2), "loader", 2 / 3, "more workers"),
    ((0.010, 0.030, 0), "model", 0.25, "Loading and computing alternate. Use workers"),
    ((0.010, 0.030, 2), "model", 0.0, "would not help"),
    ((0.001, 0.030, 0), "model", 1 / 31, "would not help"),
    ((0.010, 0.0105, 0), "neither", 10 / 20.5, "alternate"),
    ((0.0105, 0.010, 1), "neither", 0.5 / 10.5, "would not help"),
    ((0.0, 0.0, 0), "neither", 0.0, "would not help"),
]


@pytest.mark.parametrize(("times", "bottleneck", "wait_fraction", "advice"), CHECKS)
def test_check_reports_bottleneck_and_advice(times, bottleneck, wait_fraction, advice):
    """If the model is slower, the advice does not mention preprocessing."""
    check = LoaderCheck("cpu", *times, 20)

    assert check.bottleneck == bottleneck
    assert check.wait_fraction == pytest.approx(wait_fraction)
    assert advice in str(check)
    assert f"waits {100 * wait_fraction:.0f}% of its time" in str(check)
    assert bottleneck == "loader" or "Preprocess the texts" not in str(check)
