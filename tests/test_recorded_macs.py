"""Every page on recorded Macs: their commands return recorded outputs, and MPS is simulated."""

import json
import re
from dataclasses import asdict

import pytest

import openmed_nb as nb
from helpers import html
from helpers.recorded_macs import NAMES, PARAMETERS, RECORDED, RecordedMac, on_recorded_mac
from openmed_nb._utils.plain import utc_timestamp
from openmed_nb.devices.system_status import MAC_COMMANDS, GpuStatus, make_utilization_reader, read_system_status
from openmed_nb.runbook.records.report.report import SCHEMA, DeviceReport, current_subject
from openmed_nb.runbook.records.report.running import StepOutcome
from openmed_nb.runbook.records.report.steps import STEPS, StepOptions
from openmed_nb.session import SESSION

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.real_computer  # Each Mac has its own simulation.

# Facts and status of each Mac. Fields of the GPU that are left out are unknown.
READINGS = json.loads((RECORDED / "readings.json").read_text("utf-8"))


def test_recorded_macs_are_complete_and_documented():
    documented = re.findall(r"`(\w+\.txt)`", (RECORDED / "README.md").read_text("utf-8"))

    assert sorted(READINGS) == list(NAMES)
    assert sorted(documented) == [f"{name}.txt" for name in NAMES]


def select(record, names):
    """Return the fields of a record with the given names, as in JSON."""
    return {name: value for name, value in json.loads(json.dumps(asdict(record))).items() if name in names}


@pytest.mark.parametrize("name", NAMES)
def test_readings_of_each_mac(name):
    recorded = RecordedMac(name)
    machine = recorded.machine
    device = "mps" if machine.apple_silicon else "cpu"
    status = read_system_status(machine, device, recorded.run)
    expected = READINGS[name]

    assert select(machine, expected["machine"]) == expected["machine"]
    assert status.gpu == GpuStatus(**expected["gpu"])
    assert select(status, expected["status"]) == expected["status"]
    assert {" ".join(command) for command in MAC_COMMANDS.values()} <= set(recorded.commands)

    utilization = make_utilization_reader("mps", machine, recorded.run)
    assert (utilization and 100 * utilization()) == status.gpu.utilization


def make_report():
    """Return a report of the session with the steps that need no measurement."""
    device = SESSION.device().device
    names = tuple(step.name for step in STEPS)
    report = DeviceReport(SCHEMA, utc_timestamp(), current_subject(StepOptions(quick=True)), None, names)
    for step in STEPS:
        if step.name in ("device", "doctor", "signals", "logbook"):
            result = step.run(StepOptions(quick=True, device=device))
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
    comparison = nb.compare(linear, batch, devices=[device], seconds=1)
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
        "handoff": nb.handoff(folder / "bundle", model, ["He has asthma."]),
        "report": make_report(),
    }


@pytest.fixture(scope="module", params=PARAMETERS)
def pages(request, keyword_model, tmp_path_factory):
    """Name of a Mac, its pages, and its commands."""
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENMED_NB_DATA", str(folder / "data"))
        patch.delenv("OPENMED_TORCH_DEVICE", raising=False)  # Another test may have requested a device.
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
    assert (made["logbook"].software.system, made["logbook"].hardware.memory_bytes) == (
        f"macOS {version}",
        machine["memory_bytes"],
    )
    for page in ("comparison", "report"):  # A measurement on a simulated device is marked.
        assert ("SIMULATED" in texts[page][1]) == (name != "intel"), page
