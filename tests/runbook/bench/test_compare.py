"""End-to-end tests of nb.compare on the CPU and on a simulated Mac."""

import gc
import json
import random
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import openmed_nb as nb
from openmed_nb._render.display import NOT_APPLICABLE, SIMULATION_NOTICE
from openmed_nb.errors import ConfigurationError, DeviceError, DeviceUnavailableError, InvalidTextError, ModelError
from openmed_nb.runbook.bench.comparison import CPU_ONLY_NOTICE
from openmed_nb.session import SESSION

pytestmark = [pytest.mark.real_computer, pytest.mark.usefixtures("clock", "quick_collection")]

NOTE = "the patient has diabetes mellitus and hypertension . no asthma ."
QUICK = {"seconds": 1e-6}  # The minimum number of rounds, and no utilization.


def run_compare(*args, **options):
    """Run a quick comparison."""
    return nb.compare(*args, **{**QUICK, **options})


def test_compare_cpu_only_reports_phases():
    """The report of the phases contains no text content."""
    comparison = run_compare("bundled_small", [NOTE] * 3, devices="cpu", batch_size=2)
    row = comparison.for_device("cpu")

    assert list(row.phase_fractions) == ["data", "transfer", "forward", "decode"]
    assert sum(row.phase_fractions.values()) == pytest.approx(1)
    assert (row.rows, row.speedup, row.utilization) == (2, None, None)
    assert comparison.batch_tokens == comparison.to_dict()["batch_tokens"] == 2 * 128
    assert CPU_ONLY_NOTICE in str(comparison)
    assert "diabetes" not in str(comparison) + json.dumps(comparison.to_dict()) + comparison._repr_html_()


def test_compare_uses_all_usable_devices_by_default():
    with nb.simulated_mps():
        comparison = run_compare(nn.Linear(4, 4), torch.ones(2, 4))
        duplicates = run_compare(nn.Linear(4, 4), torch.ones(2, 4), devices=["mps", "cpu", "mps:0"])

    row = comparison.for_device("mps")
    for each in (comparison, duplicates):
        assert [metrics.device for metrics in each.devices] == ["cpu", "mps"]
    assert comparison.simulated
    assert row.speedup.low <= row.speedup.median <= row.speedup.high
    assert row.speedup.confidence >= 0.95
    assert row.utilization is None
    assert row.to_dict()["speedup"] is None
    assert (comparison.findings[0].name, comparison.findings[0].status) == ("speed on mps (SIMULATED)", NOT_APPLICABLE)
    assert "slower" not in str(comparison)
    assert SIMULATION_NOTICE in str(comparison)
    assert "SIMULATED" in comparison._repr_html_()
    assert comparison.to_dict()["simulated"]


@pytest.mark.parametrize(("size", "tokens"), [(None, 8192), (8, 8 * 128)])
def test_compare_uses_same_batches_on_all_devices(size, tokens):
    shapes = {"cpu": set(), "mps": set()}

    def record_shape(model, _args, inputs):
        shapes[model.device.type].add(tuple(inputs["input_ids"].shape))

    pipe = nb.load_pipeline("bundled_small", device="cpu")
    texts = [" ".join([NOTE] * (1 + number % 5)) for number in range(40)]
    with nb.simulated_mps(), pipe.model.register_forward_pre_hook(record_shape, with_kwargs=True):
        comparison = run_compare(pipe, texts, devices="mps", batch_size=size)

    assert shapes["cpu"] == shapes["mps"] != set()
    assert comparison.batch_tokens == tokens


@pytest.mark.parametrize("device", [torch.device("cpu"), [torch.device("cpu")], "cpu"])
def test_compare_training_has_training_phases(device):
    """Devices may be torch devices or an iterable of them."""
    comparison = run_compare(nn.Linear(4, 4), torch.ones(2, 4), training=True, devices=device)

    assert list(comparison.for_device("cpu").phase_fractions) == [
        "data",
        "transfer",
        "forward",
        "backward",
        "optimizer",
    ]
    assert (comparison.task, comparison.rounds) == ("training step", 6)
    assert re.findall(r"\d+\.\d+ ms", comparison._repr_html_())


def test_compare_moves_batches_of_step_function():
    """The copy is a separate phase, and the batch of the caller is unchanged."""
    devices = set()
    batch = torch.ones(4, 2)

    def step(batch):
        devices.add(batch["x"].device.type)
        return batch.pop("x").sum()

    with nb.simulated_mps():
        comparison = run_compare(step, [{"x": batch}], devices=["mps"])

    assert devices == {"cpu", "mps"}
    assert (comparison.name, comparison.task, batch.device.type) == ("step", "own step", "cpu")
    assert [list(metrics.phase_fractions) for metrics in comparison.devices] == [["data", "transfer", "step"]] * 2


def test_compare_stops_loader_workers():
    loader = DataLoader([torch.ones(4)] * 8, batch_size=2, num_workers=1)

    comparison = run_compare(nn.Linear(4, 4), loader, devices="cpu")

    import multiprocessing

    assert comparison.workers == 1
    assert multiprocessing.active_children() == []


class UniqueLinear(nn.Linear):
    """Class without instances in other tests."""


def test_compare_keeps_random_state_and_releases_copies():
    layer = UniqueLinear(4, 4)
    model = nn.Sequential(layer, nn.Dropout()).train()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - other libraries use the global generator
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    numpy_state = np.random.get_state()[1].tolist()  # noqa: NPY002

    run_compare(model, torch.ones(2, 4), training=True, devices="cpu")

    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert np.random.get_state()[1].tolist() == numpy_state  # noqa: NPY002
    assert [instance for instance in gc.get_objects() if type(instance) is UniqueLinear] == [layer]


def test_compare_measures_utilization_if_there_is_time(monkeypatch):
    """The load without the work is subtracted."""
    readings = iter([[0.25] * 5, [0.75] * 5, [0.25] * 5, [0.75] * 4])
    monkeypatch.setattr("openmed_nb.runbook.bench.comparison._samples_during", lambda *_: next(readings))
    model = nn.Linear(4, 4)
    utilizations = [nb.compare(model, torch.ones(2, 4), devices="cpu").for_device("cpu").utilization for _ in range(2)]

    assert utilizations == [0.5, None]


def test_compare_out_of_memory_raises_error_with_remedy():
    """The memory is released after an error for a batch or a model."""
    with nb.simulated_mps("96 MiB") as device:
        for size, message in ((1_000_000, "^A batch of 16 rows .*batch_size"), (20_000_000, "^Linear does not fit")):
            with pytest.raises(DeviceUnavailableError, match=message):
                run_compare(nn.Linear(1, size), torch.ones(16, 1), devices="mps")
            gc.collect()
            assert device.allocator.allocated == 0


@pytest.mark.parametrize(
    ("options", "error", "value"),
    [
        ({"device": "cpu"}, ConfigurationError, "devices="),
        ({"batch_size": 0}, ConfigurationError, 0),
        ({"seconds": 0}, ConfigurationError, 0),
        ({"devices": ["mps"]}, DeviceError, "'mps'"),
        ({"devices": "mps"}, DeviceError, "'mps'"),
        ({"devices": [0.5]}, ConfigurationError, "float"),
        ({"devices": 0.5}, ConfigurationError, "float"),
        ({"model": "no_such_folder/model"}, ModelError, "no_such_folder"),
        ({"data": [None], "devices": "cpu"}, InvalidTextError, "NoneType"),
    ],
)
def test_compare_rejects_invalid_arguments(options, error, value):
    with pytest.raises(error, match=re.escape(str(value))):
        nb.compare(**{**QUICK, **options})


def test_compare_notifies_listeners():
    events = []
    unsubscribe = SESSION.subscribe(events.append)
    try:
        run_compare(nn.Linear(4, 4), torch.ones(2, 4), devices="cpu")
    finally:
        unsubscribe()

    messages = [str(event) for event in events]
    assert messages[:2] == [
        "Loading: Linear on cpu",
        "Comparing: Linear, CPU only (round 1 of 6)",
    ]
    assert messages[-2:] == ["Comparing: Linear", "None"]
