"""Collection of logbooks on this machine: contents, privacy, and comparison between processes."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch

import openmed_nb as nb
from helpers.sample_reports import COMPARISON
from openmed_nb.devices.machine import Footprint
from openmed_nb.errors import ConfigurationError, DeviceError
from openmed_nb.runbook.bench.profile import Profile
from openmed_nb.runbook.bench.sweep import Point, SweepReport
from openmed_nb.runbook.bench.timing import Disturbance, PhaseTimes
from openmed_nb.runbook.records import gathering
from openmed_nb.runbook.records.gathering import resident_peak
from openmed_nb.runbook.records.logbook import SCHEMA_FILE, report_device
from openmed_nb.runbook.verdict.metrics import extract_metrics
from openmed_nb.session import SESSION
from openmed_nb.training.steps import ActivationCheckpointing

NOTE = "The patient John Smith has diabetes mellitus."
PLANTED = "hf_abcdefghijklmnop1234"

WRITE = f"""
import sys
import openmed_nb as nb
nb.logbook(model="bundled_small", dataset=[{NOTE!r}], batch_size=8, seeds=3).save(sys.argv[1])
"""


@pytest.fixture(autouse=True)
def unload_models():
    """Unload the models after each test, because a logbook describes the last model of the session."""
    yield
    SESSION.unload()


@pytest.fixture(scope="module")
def logbook_file(tmp_path_factory):
    """File of a logbook from another process, whose environment contains secrets and a note."""
    folder = tmp_path_factory.mktemp("logbook")
    planted = {
        "HF_TOKEN": PLANTED,
        "OMP_NUM_THREADS": "2",
        "PYTHONHASHSEED": "0",
        "OPENMED_DEVICE": "cpu",
        "CUBLAS_WORKSPACE_CONFIG": NOTE,
        "MY_PASSWORD": PLANTED,
        "NOTE": NOTE,
        "KMP_BLOCKTIME": PLANTED[3:],
    }
    environment = {name: value for name, value in os.environ.items() if name != "OPENMED_TORCH_DEVICE"}
    done = subprocess.run(
        [sys.executable, "-c", WRITE, str(folder / "run.json")],
        env={**environment, **planted},
        cwd=Path(nb.__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return folder / "run.json"


@pytest.fixture(scope="module")
def book(logbook_file):
    """Logbook in that file."""
    return nb.runbook.Logbook.read(logbook_file)


@pytest.mark.real_computer
def test_read_returns_logbook_of_another_process(book, logbook_file):
    schema = json.loads(SCHEMA_FILE.read_text("utf-8"))
    jsonschema.Draft202012Validator(schema).validate(json.loads(logbook_file.read_text("utf-8")))

    assert book.software.openmed_nb == nb.__version__
    assert book.software.torch == torch.__version__
    assert (book.run.batch_size, book.randomness.seeds) == (8, {"seed": 3})
    assert (book.model.name, book.dataset.items) == ("bundled_small", 1)
    assert book.environment["OMP_NUM_THREADS"] == "2"
    assert book.hardware.threads == 2
    assert book.storage.keys() == {"Hugging Face cache", "torch cache", "model"}


@pytest.mark.real_computer
def test_logbook_does_not_contain_secrets_and_notes(book, logbook_file):
    forms = (logbook_file.read_text("utf-8"), str(book), repr(book), book._repr_html_())

    for word in ("Smith", "diabetes", PLANTED, "abcdefghij", "MY_PASSWORD", "HF_TOKEN"):
        assert not [form for form in (*forms, json.dumps(book.to_dict())) if word in form], word
    assert book.environment["CUBLAS_WORKSPACE_CONFIG"] == "***"
    assert book.environment["KMP_BLOCKTIME"] == "***"


@pytest.mark.real_computer
def test_diff_compares_logbooks_of_two_processes(book):
    arguments = {"model": "bundled_small", "dataset": [NOTE], "batch_size": 8}
    changes = {"dataset": ["other"], "model": "bundled"}
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        same = nb.logbook(**arguments)
        others = {name: nb.logbook(**{**arguments, name: value}) for name, value in changes.items()}
    finally:
        torch.set_num_threads(threads)

    assert book.diff(same).comparable, str(book.diff(same))
    for name, other in others.items():
        reasons = [reason.name for reason in book.diff(other).reasons]
        assert reasons
        assert all(reason.startswith(f"{name}.") for reason in reasons)


def test_logbook_takes_run_and_metrics_from_reports(home):
    """The metrics are the same if the report is added later."""
    sweep = SweepReport("mine", "annotation", home, (Point(4, 10.0, memory=5),), knee=4, length=64, workers=1)
    early = nb.logbook()
    late = nb.logbook(sweep, batch_size=2)

    assert (late.run.batch_size, late.metrics[0].run.length, late.metrics[0].run.peak_memory_bytes) == (2, 64, 5)
    assert "2 rows of 64 tokens" in str(late)
    disturbed = str(late.with_reports(replace(COMPARISON, disturbance=Disturbance("busy"))))
    assert "at most 2,048 tokens" in disturbed
    assert "times of comparison" in disturbed
    assert early.with_reports(sweep).conditions == early.conditions
    assert late.metrics == early.with_reports(sweep).metrics


def test_logbook_stores_training_strategies():
    model = torch.nn.Linear(2, 2)
    accumulation = nb.training.GradientAccumulation(torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
    checkpointing = ActivationCheckpointing(("0", "1"))
    active = [checkpointing, accumulation, nb.training.precision("bfloat16", device="cpu")]
    book = nb.logbook(*active)

    assert (book.run.checkpointed, book.run.accumulation, book.run.autocast) == ("0, 1", 4, "bfloat16")
    assert book.metrics == ()
    assert nb.logbook().with_reports(accumulation).run.accumulation == 4


def test_logbook_rejects_reports_of_other_devices(home):
    for device in ("cuda:7", "xpu"):
        with pytest.raises(DeviceError):
            nb.logbook(SweepReport("mine", "annotation", device, ()))
    with pytest.raises(ConfigurationError, match=f"the logbook is of {home}"):
        nb.logbook().with_reports(SweepReport("mine", "annotation", "cuda", ()))


INVALID_ARGUMENTS = {
    "dataset": [NOTE],
    "seeds": [{NOTE: 1}, {"torch": "1"}, True, 10**5000],
    "hypotheses": [3],
    "artifact_store": [
        "store",
        NOTE,
        "host:99999",
        "https://me:Smith_word1234567@host:80",
    ],
    "model": [3, torch.nn.Linear(2, 2)],
    "batch_size": [0, 10**5000, "64"],
}


@pytest.mark.parametrize("name", INVALID_ARGUMENTS)
def test_logbook_rejects_invalid_arguments_without_quoting_them(name):
    for value in INVALID_ARGUMENTS[name]:
        with pytest.raises(ConfigurationError) as caught:
            nb.logbook(**{name: value})
        assert "Smith" not in str(caught.value)


@pytest.mark.real_computer
def test_logbook_of_simulated_device_is_labeled_and_not_comparable():
    real = nb.logbook()
    with nb.simulated_mps():
        book = nb.logbook(model="bundled_small")

    assert book.simulated
    assert "SIMULATED" in str(book)
    assert book.hardware.device == "mps"
    assert book.environment["PYTORCH_ENABLE_MPS_FALLBACK"] == "1"
    assert (book.conditions.power_source, book.background.busy_processes) == (None, None)
    assert "simulated" in [reason.name for reason in real.diff(book).reasons]


@pytest.mark.real_computer
def test_loading_the_model_does_not_change_the_logbook():
    before = nb.logbook(model="bundled_small")
    nb.load_pipeline("bundled_small")

    assert before.model == nb.logbook(model="bundled_small").model


def test_resident_peak_is_that_of_this_process(monkeypatch):
    assert 1 << 20 < resident_peak() < 1 << 40
    monkeypatch.setattr(gathering, "read_footprint", lambda: Footprint(1 << 40, 1 << 41))
    assert resident_peak() == 1 << 41


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        ("The patient John Smith has asthma", "***"),
        ("make.<locals>.step", "make.<locals>.step"),
        ("OpenMed/NER-Disease", "OpenMed/NER-Disease"),
        ("/data/John Smith/model", "model"),
    ],
)
def test_extract_metrics_masks_names_that_are_sentences(name, subject):
    phase_times = PhaseTimes({"forward": 0.01})
    profile = Profile(name, "own step", "cpu", 2, 50, 0.04, phase_times, 0.03, 0.01, (), 100.0)

    assert extract_metrics(profile).subject == subject


def test_report_device_is_normalized_and_unique():
    first, second = (extract_metrics(SweepReport("mine", "annotation", device, ())) for device in ("cuda", "cpu"))

    assert (report_device([first]), report_device([second, second]), report_device([])) == ("cuda:0", "cpu", None)
    with pytest.raises(ConfigurationError, match="cover several devices: cpu, cuda:0"):
        report_device([first, second])
