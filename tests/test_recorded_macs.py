"""Every page on recorded Macs: their commands return recorded outputs, and MPS is simulated."""

import json
import os
import re
from pathlib import Path

import pytest

import openmed_nb as nb
from helpers import html
from helpers.recorded_macs import NAMES, PARAMETERS, RECORDED, RecordedMac, on_recorded_mac
from openmed_nb._utils.plain import utc_timestamp
from openmed_nb.devices.machine import MachineInfo
from openmed_nb.runbook.records.report.record import SCHEMA, StepOutcome
from openmed_nb.runbook.records.report.report import DeviceReport
from openmed_nb.runbook.records.report.steps import STEPS, StepOptions
from openmed_nb.runbook.records.runner import current_subject
from openmed_nb.runbook.records.signals import (
    MAC_COMMANDS,
    GpuStatus,
    SystemStatus,
    make_power_meter,
    make_utilization_reader,
    read_power,
    read_system_status,
)
from openmed_nb.session import SESSION

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.real_computer  # Each Mac has its own simulation.

GIB = 2**30
CHIP = "CPU, GPU and Neural Engine"


def mac(chip, macos, memory, cores, architecture="arm64"):
    """Return the facts of a Mac."""
    is_apple = architecture == "arm64"
    return MachineInfo("Darwin", architecture, is_apple, False, chip, macos, memory * GIB, cores, gpu_driver=False)


MACHINES = {
    "m1_8gb": mac("Apple M1", (15, 7, 2), 8, 8),
    "m2_pro": mac("Apple M2 Pro", (26, 6, 2), 16, 12),
    "m4_max": mac("Apple M4 Max", (26, 6, 2), 64, 16),
    "m5": mac("Apple M5", (27, 0, 1), 32, 10),
    "intel": mac("Intel(R) Core(TM) i9-9980HK CPU @ 2.40GHz", (15, 7, 2), 32, 8, "x86_64"),
    "virtual": mac("Apple M1 (Virtual)", (15, 7, 2), 7, 3),
}
GPUS = {
    "m1_8gb": GpuStatus("Apple M1", 7, 64, 1503238553, power=4.5),
    "m2_pro": GpuStatus("Apple M2 Pro", 19, 42, 830029824, temperature=50, power=11.25),
    "m4_max": GpuStatus("Apple M4 Max", 40, 88, 9663676416, temperature=58, power=38.5),
    "m5": GpuStatus("Apple M5", 10, 33, 1210236928, temperature=45, power=2.75),
}
# Memory pressure, free memory, power source, battery, power mode, thermal state and speed limit.
CONDITIONS = {
    "m1_8gb": ("warning", 22, "battery", 61, "low", "moderate", None),
    "m2_pro": ("normal", 58, "adapter", 100, "automatic", "nominal", None),
    "m4_max": ("normal", 71, "adapter", 98, "high", "nominal", None),
    "m5": ("normal", 64, "adapter", 87, "automatic", "nominal", None),
    "intel": ("normal", 44, "battery", 34, "automatic", "limited", 62),
    "virtual": ("normal", 35, "adapter", None, None, "nominal", None),
}
# Performance and efficiency cores; power of the CPU, the Neural Engine and the Mac, temperature of the CPU, and macmon.
HARDWARE = {
    "m1_8gb": (4, 4, 6.25, 0.0, 15.5, 71, "read"),
    "m2_pro": (8, 4, 4.5, 0.25, pytest.approx(24.6), 52, "read"),
    "m4_max": (12, 4, 9.75, 0.0, pytest.approx(66.4), 61, "read"),
    "m5": (4, 6, None, None, 11.5, 48, "read"),
    "intel": (None, None, None, None, None, None, None),
    "virtual": (3, None, None, None, None, None, "no valid output"),
}
# What a meter reads while the Mac works: watts, what they include, and the suggested action.
POWER = {
    "m1_8gb": (10.75, CHIP, ""),
    "m2_pro": (16.0, CHIP, ""),
    "m4_max": (48.25, CHIP, ""),
    "m5": (11.5, "the whole Mac", ""),
    "intel": (None, None, "Only an administrator can read the power of this processor."),
    "virtual": (None, None, "macmon printed no valid values. Update it: brew upgrade macmon."),
}


@pytest.fixture(scope="module")
def macmon_folder(tmp_path_factory):
    """Folder with a program with the name of macmon, whose output is recorded."""
    program = tmp_path_factory.mktemp("bin") / "macmon"
    program.write_text("#!/bin/sh\nexit 1\n", "utf-8")
    program.chmod(0o755)
    return program.parent


def environ_of(name, macmon_folder):
    """Return the environment of a Mac."""
    return {"PATH": str(macmon_folder)} if RecordedMac(name).has_macmon else {}


def test_recorded_macs_are_complete_and_documented():
    documented = re.findall(r"`(\w+\.txt)`", (RECORDED / "README.md").read_text("utf-8"))

    assert sorted(MACHINES) == list(NAMES)
    assert sorted(documented) == [f"{name}.txt" for name in NAMES]


@pytest.mark.parametrize("name", MACHINES)
def test_facts_and_status_of_each_mac(name, macmon_folder):
    recorded = RecordedMac(name)
    machine = recorded.machine
    environ = environ_of(name, macmon_folder)
    device = "mps" if machine.apple_silicon else "cpu"
    status = read_system_status(machine, device, recorded.run, environ)
    status = read_power(status, machine, recorded.run, environ)
    pressure, free, source, battery, mode, thermal, limit = CONDITIONS[name]

    assert machine == MACHINES[name]
    assert status.gpu == GPUS.get(name, GpuStatus())
    assert (status.memory_pressure, status.memory_free) == (pressure, free)
    assert (status.power_source, status.power_mode, status.thermal_state) == (source, mode, thermal)
    assert status.cpu_speed_limit == limit
    assert status.battery == battery or battery is None
    hardware = (status.performance_cores, status.efficiency_cores, status.cpu_power, status.neural_engine_power)
    assert (*hardware, status.system_power, status.cpu_temperature, status.macmon) == HARDWARE[name]
    assert {" ".join(command) for command in MAC_COMMANDS.values()} <= set(recorded.commands)


@pytest.mark.parametrize("name", MACHINES)
def test_utilization_and_power_of_each_mac(name, macmon_folder):
    recorded = RecordedMac(name)
    environ = environ_of(name, macmon_folder)
    machine = recorded.machine
    read = make_utilization_reader("mps", machine, recorded.run, environ)
    meter = make_power_meter("cpu", machine, recorded.run, environ)
    reading = meter(3.0) if callable(meter) else meter

    assert (read and read()) == (GPUS[name].utilization / 100 if name in GPUS else None)
    assert (reading.watts, reading.scope, reading.remedy) == (pytest.approx(POWER[name][0]), *POWER[name][1:])


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
    return {
        "device": nb.device(),
        "devices": nb.list_devices(),
        "explanation": nb.explain_device(),
        "doctor": doctor,
        "status": nb.system_status(),
        "comparison": comparison,
        "sweep": nb.sweep(linear, batch, device=device, max_batch_size=2, seconds=1),
        "profile": nb.runbook.profile(linear, batch, device=device, steps=3, warm_up=1),
        "forecast": nb.runbook.forecast(linear, batch, training=True),
        "precision": nb.training.precision(device=device),
        "limit": nb.training.loader.settings([1, 2], device),
        "verdict": nb.verdict(comparison, doctor, nb.system_status()),
        "logbook": book,
        "logbook_diff": book.diff(nb.logbook(model=model)),
        "handoff": nb.handoff(folder / "bundle", model, ["He has asthma."], logbook=book, rounds=4, steps=1),
        "report": make_report(),
        "release": nb.release(models=False, history=False, traceback=False),
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
    chip = MACHINES[name].chip

    assert len(texts) == 17
    for page, (text, page_html) in texts.items():
        assert text.strip(), page
        assert html.read(page_html).text.strip(), page
        assert "None" not in re.findall(r"\bNone\b", text), page
    for page in ("status", "logbook", "report"):
        assert chip in html.read(texts[page][1]).text, page
    assert made["device"].device == ("cpu" if name == "intel" else "mps")
    macos = ".".join(map(str, MACHINES[name].macos_version))
    assert (macos in texts["doctor"][0]) == (name != "intel")
    assert isinstance(made["status"], SystemStatus)
    assert made["status"].macmon == HARDWARE[name][-1]
    assert (
        made["logbook"].to_dict()["software"]["system"] == f"macOS {'.'.join(map(str, MACHINES[name].macos_version))}"
    )
    assert made["logbook"].software.system == f"macOS {macos}"
    assert made["logbook"].hardware.memory_bytes == MACHINES[name].memory_bytes
    energy = texts["comparison"][1].partition("energy per 1,000 rows")[2]
    assert ("a simulated device computes on the CPU" in energy) == (name != "intel")


def test_a_measurement_on_a_simulated_device_is_marked(pages):
    name, _made, texts = pages

    for page in ("comparison", "sweep", "profile", "report"):
        assert ("SIMULATED" in texts[page][1]) == (name != "intel"), page


@pytest.mark.parametrize("name", ["m2_pro", "intel"])
def test_comparison_on_a_mac_has_the_energy_or_the_remedy(name, macmon_folder, monkeypatch):
    monkeypatch.setenv("PATH", f"{macmon_folder}{os.pathsep}{os.environ['PATH']}")
    linear = torch.nn.Linear(4, 4)
    with on_recorded_mac(name, simulates_mps=False):
        comparison = nb.compare(linear, torch.ones(2, 4), devices="cpu", rounds=6, utilization_seconds=2.5, seconds=20)
    metrics = comparison.for_device("cpu")

    assert (metrics.power.busy, metrics.power.scope) == POWER[name][:2]
    assert (metrics.joules_per_1000_rows is None) == (name == "intel")
    assert (POWER[name][1] or POWER[name][2]) in comparison._repr_html_()


def test_recorded_files_are_text_of_commands_of_this_package():
    for name in NAMES:
        text = Path(RECORDED / f"{name}.txt").read_text("utf-8")
        commands = re.findall(r"^\$ (.+)$", text, re.MULTILINE)
        run = {" ".join(command) for command in MAC_COMMANDS.values() if "sysctl" not in command[0]}
        assert set(commands) - {"macmon pipe", "/usr/sbin/sysctl -i"} == run
