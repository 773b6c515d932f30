"""nb.compare at work: on this CPU, and on a simulated Mac."""

import gc
import json
import random
import re
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import openmed_nb as nb
from openmed_nb._render.display import NOT_APPLICABLE
from openmed_nb.errors import ConfigurationError, DeviceError, DeviceUnavailableError, InvalidTextError, ModelError
from openmed_nb.session import SESSION

pytestmark = [pytest.mark.real_computer, pytest.mark.usefixtures("clock", "quick_collection")]

NOTE = "the patient has diabetes mellitus and hypertension . no asthma ."
QUICK = {"rounds": 6, "utilization_seconds": 0}


def compared(*args, **named):
    """Return a quick comparison."""
    return nb.compare(*args, **{**QUICK, **named})


def test_cpu_alone_still_gives_the_split():
    """On a computer with a CPU only, annotation is split into its four phases, without a word of the texts."""
    comparison = compared("bundled_small", [NOTE] * 3, devices="cpu", batch_size=2)
    row = comparison.for_device("cpu")

    assert list(row.phase_fractions) == ["data", "transfer", "forward", "decode"]
    assert sum(row.phase_fractions.values()) == pytest.approx(1)
    assert (row.rows, row.speedup, row.utilization) == (2, None, None)
    assert comparison.batch_tokens == comparison.to_dict()["batch_tokens"] == 2 * 128
    assert "nothing to compare it with" in str(comparison)
    assert "diabetes" not in str(comparison) + json.dumps(comparison.to_dict()) + comparison._repr_html_()


def test_all_usable_devices_where_nobody_says():
    """Without names, the CPU and every usable device are compared, under a simulation marked as such."""
    with nb.simulated_mps():
        comparison = compared(nn.Linear(4, 4), torch.ones(2, 4))

    row = comparison.for_device("mps")
    assert [one.device for one in comparison.devices] == ["cpu", "mps"]
    assert comparison.simulated
    assert row.speedup.low <= row.speedup.median <= row.speedup.high
    assert row.speedup.confidence >= 0.95
    assert row.utilization is None
    assert row.speedup_category == row.to_dict()["speedup_category"] == "not applicable: simulated"
    assert row.to_dict()["speedup"] is None
    assert (comparison.findings[0].name, comparison.findings[0].status) == ("speed on mps (SIMULATED)", NOT_APPLICABLE)
    assert "slower" not in str(comparison)
    assert "SIMULATED MPS: no figure here is one of MPS." in str(comparison)
    assert "SIMULATED" in comparison._repr_html_()
    assert comparison.to_dict()["simulated"]


@pytest.mark.parametrize(("size", "tokens"), [(None, 8192), (8, 8 * 128)])
def test_both_devices_have_the_same_batches(size, tokens):
    """The CPU computes the very batches that the device computes, of few shapes and with their filling."""
    shapes = {"cpu": set(), "mps": set()}

    def note(model, _args, inputs):
        shapes[model.device.type].add(tuple(inputs["input_ids"].shape))

    pipe = nb.load_pipeline("bundled_small", device="cpu")
    texts = [" ".join([NOTE] * (1 + number % 5)) for number in range(40)]
    with nb.simulated_mps(), pipe.model.register_forward_pre_hook(note, with_kwargs=True):
        comparison = compared(pipe, texts, devices="mps", batch_size=size)

    assert shapes["cpu"] == shapes["mps"] != set()
    assert comparison.batch_tokens == tokens


@pytest.mark.parametrize("device", [torch.device("cpu"), [torch.device("cpu")], "cpu"])
def test_training_steps_have_their_own_phases(device):
    """A training step has five phases; a device may be torch's own value, alone or among others, and numbers those of numpy."""
    comparison = compared(nn.Linear(4, 4), torch.ones(2, 4), training=True, devices=device, rounds=np.int64(6))

    assert list(comparison.for_device("cpu").phase_fractions) == ["data", "transfer", "forward", "backward", "optimizer"]
    assert (comparison.task, type(comparison.rounds)) == ("training step", int)
    assert re.findall(r"\d+\.\d+", str(comparison)) == []
    assert re.findall(r"\d+\.\d+ ms", comparison._repr_html_())


def test_a_function_computes_where_its_batch_is():
    """A function gets its batches on each device in turn; the copy is a phase of its own, and what it was passed stays."""
    seen, batch = set(), torch.ones(4, 2)

    def step(batch):
        seen.add(batch["x"].device.type)
        return batch.pop("x").sum()

    with nb.simulated_mps():
        comparison = compared(step, [{"x": batch}], devices=["mps"])

    assert seen == {"cpu", "mps"}
    assert (comparison.name, comparison.task, batch.device.type) == ("step", "own step", "cpu")
    assert [list(one.phase_fractions) for one in comparison.devices] == [["data", "transfer", "step"]] * 2


def test_processes_that_read_ahead_end():
    """The workers of a loader are started for the comparison and ended with it."""
    loader = DataLoader([torch.ones(4)] * 8, batch_size=2, num_workers=1)

    comparison = compared(nn.Linear(4, 4), loader, devices="cpu")

    import multiprocessing

    assert comparison.workers == 1
    assert multiprocessing.active_children() == []


class Own(nn.Linear):
    """A class of which no other test has instances."""


def test_model_and_random_numbers_stay():
    """Random numbers are untouched, and the copies of a model are gone afterwards."""
    layer = Own(4, 4)
    model = nn.Sequential(layer, nn.Dropout()).train()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the numbers that other libraries draw
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    compared(model, torch.ones(2, 4), training=True, devices="cpu")

    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # noqa: NPY002
    assert [one for one in gc.get_objects() if type(one) is Own] == [layer]


def test_processor_is_watched():
    """Of the CPU, moments are read while it works, too few make no mean, and no thread is left."""
    row = compared(nn.Linear(4, 4), torch.ones(2, 4), devices="cpu", utilization_seconds=0.01).for_device("cpu")

    assert row.utilization_details.samples >= 5 or row.utilization is None
    assert "openmed_nb utilization" not in [thread.name for thread in threading.enumerate()]


def test_what_does_not_fit():
    """Out of memory, of a batch or of the model, is an error of ours that says what to do, and the memory is handed back."""
    with nb.simulated_mps("96 MiB") as device:
        for size, words in ((1_000_000, "^A batch of 16 rows .*batch_size"), (20_000_000, "^Linear does not fit")):
            with pytest.raises(DeviceUnavailableError, match=words):
                compared(nn.Linear(1, size), torch.ones(16, 1), devices="mps")
            gc.collect()
            assert device.allocator.allocated == 0


@pytest.mark.parametrize(
    ("asked", "error", "value"),
    [
        ({"device": "cpu"}, ConfigurationError, "devices="),
        *(({"rounds": rounds}, ConfigurationError, rounds) for rounds in (5, True)),
        ({"batch_size": 0}, ConfigurationError, 0),
        *(({"utilization_seconds": seconds}, ConfigurationError, seconds) for seconds in (-1, float("nan"), "long", 1e300)),
        ({"seconds": 0}, ConfigurationError, 0),
        *(({"devices": devices}, DeviceError, "'mps'") for devices in (["mps"], "mps")),
        *(({"devices": devices}, ConfigurationError, "float has no device") for devices in ([0.5], 0.5)),
        ({"model": "no_such_folder/model"}, ModelError, "no_such_folder"),
        ({"data": [None], "devices": "cpu"}, InvalidTextError, "NoneType"),
    ],
)
def test_bad_arguments_are_refused(asked, error, value):
    with pytest.raises(error, match=re.escape(str(value))):
        nb.compare(**{**QUICK, **asked})


def test_it_ends_when_its_time_is_over():
    """Where there is no time for more, each device has its turn as often as an interval needs, and is not watched."""
    comparison = nb.compare(nn.Linear(4, 4), torch.ones(2, 4), devices="cpu", rounds=1000, seconds=1e-6)

    assert comparison.rounds == 6
    assert comparison.for_device("cpu").utilization is None


def test_listeners_hear_which_device_is_made_ready():
    """A session tells its listeners what it compares, and to look again at the end."""
    heard = []
    stop = SESSION.subscribe(heard.append)
    try:
        compared(nn.Linear(4, 4), torch.ones(2, 4), devices="cpu")
    finally:
        stop()

    said = [str(one) for one in heard]
    assert said[:2] == [
        "Loading: Linear on cpu, the only device here",
        "Comparing: Linear with nothing but the CPU (turn 1 of 6)",
    ]
    assert said[-2:] == ["Comparing: Linear", "None"]
