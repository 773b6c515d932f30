"""Every page on recorded Macs: their commands return recorded outputs, and MPS is simulated."""

import json
import os
import re
from dataclasses import asdict

import pytest

import openmed_nb as nb
from helpers import html
from helpers.recorded_macs import NAMES, PARAMETERS, RECORDED, RecordedMac, on_recorded_mac
from openmed_nb._utils.plain import utc_timestamp
from openmed_nb.runbook.records.report.record import SCHEMA, StepOutcome
from openmed_nb.runbook.records.report.report import DeviceReport
from openmed_nb.runbook.records.report.steps import STEPS, StepOptions
from openmed_nb.runbook.records.runner import current_subject
from openmed_nb.runbook.records.signals import (
    MAC_COMMANDS,
    GpuStatus,
    PowerReading,
    make_power_meter,
    make_utilization_reader,
    read_power,
    read_system_status,
)
from openmed_nb.session import SESSION

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.real_computer  # Each Mac has its own simulation.

# Facts, status and power of each Mac. Fields of the GPU that are left out are unknown.
READINGS = json.loads((RECORDED / "readings.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def macmon_folder(tmp_path_factory):
    """Folder with a program with the name of macmon, whose output is recorded."""
    program = tmp_path_factory.mktemp("bin") / "macmon"
    program.write_text("#!/bin/sh\nexit 1\n", "utf-8")
    program.chmod(0o755)
    return program.parent


def test_recorded_macs_are_complete_and_documented():
    documented = re.findall(r"`(\w+\.txt)`", (RECORDED / "README.md").read_text("utf-8"))

    assert sorted(READINGS) == list(NAMES)
    assert sorted(documented) == [f"{name}.txt" for name in NAMES]


def select(record, names):
    """Return the fields of a record with the given names, as in JSON."""
    return {name: value for name, value in json.loads(json.dumps(asdict(record))).items() if name in names}


@pytest.mark.parametrize("name", NAMES)
def test_readings_of_each_mac(name, macmon_folder):
    recorded = RecordedMac(name)
    machine = recorded.machine
    environ = {"PATH": str(macmon_folder)} if recorded.has_macmon else {}
    device = "mps" if machine.apple_silicon else "cpu"
    status = read_system_status(machine, device, recorded.run, environ)
    status = read_power(status, machine, recorded.run, environ)
    expected = READINGS[name]

    assert select(machine, expected["machine"]) == expected["machine"]
    assert status.gpu == GpuStatus(**expected["gpu"])
    assert select(status, expected["status"]) == pytest.approx(expected["status"])
    assert {" ".join(command) for command in MAC_COMMANDS.values()} <= set(recorded.commands)

    utilization = make_utilization_reader("mps", machine, recorded.run, environ)
    meter = make_power_meter("cpu", machine, recorded.run, environ)
    assert (utilization and 100 * utilization()) == status.gpu.utilization
    assert (meter(3.0) if callable(meter) else meter) == PowerReading(**expected["power"])


def make_report():
    """Return a report of the session with the steps that need no measurement."""
    device = SESSION.device().device
    names = tuple(step.name for step in STEPS)
    report = DeviceReport(SCHEMA, utc_timestamp(), current_subject(False, quick=True), None, names)
    for step in STEPS:
        if step.name in ("device", "doctor", "signals", "logbook"):
            result = step.run(StepOptions(True, False, device, ()))
            displayed = result.displayed.final_report()
            summary = result.summary or "Finished."
            data = json.loads(json.dumps(result.displayed.to_dict()))
            outcome = StepOutcome(
                step.name, "done", "ok", summary, "", (), utc_timestamp(), 1.0, report=displayed, report_json=data
            )
            report = report.with_outcome(outcome)
    return report


def make_pages(folder, model):
    """Return every page of the session by name."""
    linear = torch.nn.Linear(4, 4)
    batch = torch.ones(2, 4)
    device = SESSION.device().device
    comparison = nb.compare(linear, batch, devices=[device], rounds=6, utilization_seconds=0)
    book = nb.logbook(comparison, model=model)
    doctor = nb.doctor()
    status = nb.system_status()
    return {
        "device": nb.device(),
        "devices": nb.list_devices(),
        "explanation": nb.explain_device(),
        "doctor": doctor,
        "status": status,
        "comparison": comparison,
        "verdict": nb.verdict(comparison, doctor, status),
        "logbook": book,
        "logbook_diff": book.diff(nb.logbook(model=model)),
        "handoff": nb.handoff(folder / "bundle", model, ["He has asthma."], logbook=book, rounds=4, steps=1),
        "report": make_report(),
    }


@pytest.fixture(scope="module", params=PARAMETERS)
def pages(request, macmon_folder, keyword_model, tmp_path_factory):
    """Name of a Mac, its pages, and its commands."""
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENMED_NB_DATA", str(folder / "data"))
        patch.delenv("OPENMED_TORCH_DEVICE", raising=False)  # Another test may have requested a device.
        patch.setenv("PATH", f"{macmon_folder}{os.pathsep}{os.environ['PATH']}")
        with on_recorded_mac(request.param):
            made = make_pages(folder, keyword_model)
            texts = {name: (str(page), page._repr_html_()) for name, page in made.items()}
        yield request.param, made, texts
    SESSION.unload()
    SESSION.stop()


@pytest.mark.filterwarnings("ignore::openmed_nb.errors.OpenMedWarning")
def test_every_page_renders_on_each_mac(pages):
    name, made, texts = pages
    machine = READINGS[name]["machine"]
    version = ".".join(map(str, machine["macos_version"]))

    for page, (text, page_html) in texts.items():
        assert text.strip(), page
        assert html.read(page_html).text.strip(), page
    for page in ("status", "logbook", "report"):
        assert machine["chip"] in html.read(texts[page][1]).text, page
    assert made["device"].device == ("cpu" if name == "intel" else "mps")
    assert (version in texts["doctor"][0]) == (name != "intel")
    assert made["status"].macmon == READINGS[name]["status"]["macmon"]
    assert (made["logbook"].software.system, made["logbook"].hardware.memory_bytes) == (
        f"macOS {version}",
        machine["memory_bytes"],
    )
    for page in ("comparison", "report"):  # A measurement on a simulated device is marked.
        assert ("SIMULATED" in texts[page][1]) == (name != "intel"), page


@pytest.mark.parametrize("name", ["m2_pro", "intel"])
def test_comparison_on_a_mac_has_the_energy_or_the_remedy(name, macmon_folder, monkeypatch):
    monkeypatch.setenv("PATH", f"{macmon_folder}{os.pathsep}{os.environ['PATH']}")
    linear = torch.nn.Linear(4, 4)
    with on_recorded_mac(name, simulates_mps=False):
        comparison = nb.compare(linear, torch.ones(2, 4), devices="cpu", rounds=6, utilization_seconds=2.5, seconds=20)
    metrics = comparison.for_device("cpu")
    power = PowerReading(**READINGS[name]["power"])

    assert (metrics.power.busy, metrics.power.scope) == (power.watts, power.scope)
    assert (metrics.joules_per_1000_rows is None) == (name == "intel")
    assert (power.scope or power.remedy) in comparison._repr_html_()
