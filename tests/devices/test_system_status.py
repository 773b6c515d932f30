"""System status and utilization: parsing of recorded outputs, findings, and display."""

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

import openmed_nb as nb
from helpers import recorded_macs
from helpers.simulated_computers import BOX
from openmed_nb._render.display import NOT_APPLICABLE, OK, WARNING
from openmed_nb.devices import system_status
from openmed_nb.devices.cuda import Cuda
from openmed_nb.devices.machine import MachineInfo
from openmed_nb.devices.system_status import (
    CONDITIONS,
    MAC_COMMANDS,
    BackgroundLoadReader,
    GpuStatus,
    SystemStatus,
    busy_fraction,
    make_utilization_reader,
    read_system_status,
)

RECORDED = Path(__file__).parents[1] / "recorded" / "signals"
MAC = MachineInfo(
    "Darwin", "arm64", apple_silicon=True, chip="Apple M4 Max", macos_version=(26, 6, 2), gpu_driver=False
)
SIMULATED_MAC = MachineInfo("Darwin", "arm64", apple_silicon=True, chip="Chip", simulated=True)


def load_outputs(*names):
    """Return the concatenated recorded outputs."""
    return "".join((RECORDED / f"{name}.txt").read_text("utf-8") for name in names)


M4 = GpuStatus("Apple M4", 30, 356089856)
UUID = "00000000-1111-2222-3333-444444444444"


def read_mac(**outputs):
    """Return the status of a Mac with the given outputs of commands."""
    by_command = {tuple(command): outputs.get(name) for name, command in MAC_COMMANDS.items()}
    return read_system_status(MAC, "mps", lambda command: by_command[tuple(command)])


@pytest.fixture
def read_nvidia(monkeypatch):
    """Function that returns the GPU of a machine with the given output of ``nvidia-smi``, or with a torch without UUIDs."""

    def read(output, uuid=UUID):
        monkeypatch.setattr(Cuda, "uuid", lambda _device: uuid)
        return read_system_status(BOX, "cuda:0", lambda command: output if f"--id=GPU-{UUID}" in command else None).gpu

    return read


def test_read_system_status_runs_each_command_of_macos_once():
    commands = []
    read_system_status(MAC, "mps", commands.append)

    assert sorted(commands) == sorted(MAC_COMMANDS.values())
    assert all(command[0].startswith("/usr/") for command in commands)


# Facts and status of each recorded Mac. Fields of the GPU that are left out are unknown.
READINGS = json.loads((recorded_macs.RECORDED / "readings.json").read_text("utf-8"))


def select(record, names):
    """Return the fields of a record with the given names, as in JSON."""
    return {name: value for name, value in json.loads(json.dumps(asdict(record))).items() if name in names}


@pytest.mark.parametrize("name", recorded_macs.NAMES)
def test_readings_of_each_mac(name):
    recorded = recorded_macs.RecordedMac(name)
    machine = recorded.machine
    status = read_system_status(machine, "mps" if machine.apple_silicon else "cpu", recorded.run)
    utilization = make_utilization_reader("mps", machine, recorded.run)
    expected = READINGS[name]

    assert select(machine, expected["machine"]) == expected["machine"]
    assert status.gpu == GpuStatus(**expected["gpu"])
    assert select(status, expected["status"]) == expected["status"]
    assert (utilization and 100 * utilization()) == status.gpu.utilization


NVIDIA_OUTPUTS = [
    (load_outputs("nvidia_h200"), GpuStatus("NVIDIA H200", utilization=0, memory_used=0)),
    ("170, 1, NVIDIA T4", GpuStatus("NVIDIA T4", memory_used=1 << 20)),
    ("No devices were found", GpuStatus()),
]


def test_gpu_is_read_by_its_uuid(read_nvidia):
    for output, gpu in NVIDIA_OUTPUTS:
        assert read_nvidia(output) == gpu
        assert read_nvidia(output, f"GPU-{UUID}") == gpu
        assert read_nvidia(output, None) == read_nvidia(output, "other") == GpuStatus()


def test_read_system_status_reads_no_values_of_a_simulated_mac():
    status = read_system_status(SIMULATED_MAC, "mps", pytest.fail)

    assert status == SystemStatus(simulated=True)
    assert "SIMULATED" in str(status)
    assert "SIMULATED" in status._repr_html_()
    assert {finding.status for finding in status.findings} == {NOT_APPLICABLE}


PRESSURE = "com.apple.system.thermalpressurelevel"
DEVICE_UTILIZATION = '"Device Utilization %"=30'
IOREG = load_outputs("ioreg_m4")
# Outputs of a command, and the value of a field for each of them.
MAC_OUTPUTS = {
    ("ioreg", "gpu"): [
        (IOREG, M4),
        (load_outputs("ioreg_m1"), GpuStatus(utilization=2, memory_used=340983808)),
        (IOREG.replace(DEVICE_UTILIZATION, '"Device Utilization %"=130'), replace(M4, utilization=None)),
        (IOREG.replace(DEVICE_UTILIZATION, '"Device Utilization %"=x'), replace(M4, utilization=29)),
        (IOREG.replace("AGXAcceleratorG16G", "IntelAccelerator"), GpuStatus()),
        (IOREG.replace("}", ""), GpuStatus("Apple M4")),
        (f'"IOReportLegend" = ({{{DEVICE_UTILIZATION}}})', GpuStatus()),
    ],
    ("memory", "memory_pressure"): [(load_outputs("sysctl_pressure"), "warning")],
    ("battery", "power_source"): [
        (load_outputs("batt_battery"), "battery"),
        (load_outputs("batt_desktop"), "adapter"),
        (load_outputs("batt_none"), "adapter"),
        ("Now drawing from 'UPS Power'\n", "UPS"),
    ],
    ("power", "power_mode"): [
        (load_outputs("power_lowpowermode"), "low"),
        (load_outputs("power_powermode"), "automatic"),
        (load_outputs("power_desktop"), None),
        (" lowpowermode         0\n", "automatic"),
        (" lowpowermode         0\n powermode            2\n", "high"),
        (" powermode            7\n", None),
    ],
    ("thermal state", "thermal_state"): [
        (load_outputs("pressure_nominal"), "nominal"),
        (load_outputs("pressure_moderate"), "moderate"),
        (f"{PRESSURE} 2\n", "limited"),
        (f"{PRESSURE} 5\n", None),
        ("com.apple.system.thermalpressure 1\n", None),
    ],
}


@pytest.mark.parametrize(("command", "field"), MAC_OUTPUTS)
def test_read_system_status_parses_outputs_of_macos(command, field):
    for output, value in MAC_OUTPUTS[command, field]:
        assert getattr(read_mac(**{command: output}), field) == value, output


UNREADABLE = ["", "not found", "\0\0", "٣", "9" * 5000, None]


@pytest.mark.parametrize("output", UNREADABLE)
def test_read_system_status_returns_none_for_unreadable_output(read_nvidia, output):
    """Only the values of psutil remain."""
    status = read_mac(**dict.fromkeys(MAC_COMMANDS, output))
    psutil_alone = read_system_status(BOX, "cpu")

    assert replace(status, memory_available=None) == replace(psutil_alone, memory_available=None, chip=MAC.chip)
    assert read_nvidia(output) == GpuStatus()


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.name)
def test_finding_warns_of_slow_states_with_a_remedy(condition):
    statuses = {None: NOT_APPLICABLE, "nominal": OK, **dict.fromkeys(condition.messages, WARNING)}
    for state, status in statuses.items():
        finding = condition.finding(SystemStatus(**{condition.field: state}))

        assert finding.status == status
        assert bool(finding.remedy) is (status == WARNING)


def test_report_displays_states_and_readings():
    quiet = SystemStatus(M4, "normal", 2**33, 0, "battery", "automatic", "nominal")
    page = SystemStatus(GpuStatus(utilization=0))._repr_html_()

    assert "30%" in quiet._repr_html_()
    assert "30%" in str(quiet)
    assert "nominal" in str(quiet)
    assert ">0%</td>" in page
    assert "On a Mac, nb.system_status() reads the missing values." in re.sub("</?code>", "", page)
    assert "On a Mac" not in quiet._repr_html_()
    assert "Power: the processor may run slower than on the power adapter. Connect the machine" in quiet._repr_html_()
    assert json.loads(json.dumps(quiet.to_dict()))["gpu"]["utilization"] == 30


@pytest.mark.real_computer
def test_system_status_reads_this_machine():
    assert nb.system_status().memory_available > 0
    with nb.simulated_mps():
        assert nb.system_status() == SystemStatus(simulated=True)


def test_readme_names_every_recorded_file():
    for folder in (RECORDED, recorded_macs.RECORDED):
        documented = re.findall(r"`(\w+\.txt)`", (folder / "README.md").read_text("utf-8"))
        assert sorted(documented) == sorted(file.name for file in folder.glob("*.txt"))


@pytest.mark.real_computer
@pytest.mark.parametrize(
    ("device", "machine", "output", "utilization"),
    [
        ("mps", MAC, load_outputs("ioreg_m1"), 0.02),
        ("cuda", BOX, load_outputs("nvidia_h200"), 0.0),
        ("lazy:0", BOX, None, None),
    ],
)
def test_utilization_reader_runs_the_command_of_its_device(monkeypatch, device, machine, output, utilization):
    monkeypatch.setattr(Cuda, "uuid", lambda _device: UUID)
    read = make_utilization_reader(device, machine, lambda _command: output)

    assert (read and read()) == (utilization and pytest.approx(utilization))


@pytest.mark.parametrize("device", ["cpu", "mps", "cuda"])
def test_utilization_reader_runs_no_command_on_a_simulated_machine(device):
    assert make_utilization_reader(device, SIMULATED_MAC, pytest.fail) is None


@pytest.mark.real_computer
def test_cpu_reader_measures_across_threads():
    """The functions of psutil for percentages keep the counters of each thread."""
    read = make_utilization_reader("cpu", BOX)
    time.sleep(0.1)
    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(read).result() is not None


# Counters before and after, and the busy fraction between them.
CPU_TIMES = [
    ({"user": 1, "idle": 1}, {"user": 4, "idle": 2}, 0.75),
    ({"user": 1, "idle": 1, "iowait": 0}, {"user": 2, "idle": 2, "iowait": 2}, 0.25),
    ({"user": 1, "idle": 1, "guest": 0}, {"user": 2, "idle": 2, "guest": 1}, 0.5),
    ({"user": 1, "idle": 1}, {"user": 1, "idle": 1}, None),
    ({}, {"user": 1, "idle": 1}, None),
]


@pytest.mark.parametrize(("before", "after", "fraction"), CPU_TIMES)
def test_busy_fraction_excludes_idle_time_and_counts_guests_once(before, after, fraction):
    assert busy_fraction(before, after) == fraction


@pytest.mark.parametrize(
    ("before", "after", "is_own", "fraction"),
    [
        ((0, 0, 0), (0, 0, 8), False, 0.0),  # A child has the time of its children that ended, as a fork server.
        (None, (8, 0), False, 0.0),  # Started by the measurement.
        ((5, 0), (13, 0), False, 0.8),  # Left running by an earlier cell.
        ((5, 0), (13, 0), True, 0.0),  # A persistent loader worker.
        ((5, 0), None, False, 0.8),  # Ended: the time before the measurement hides no load of other programs.
    ],
)
def test_background_load_includes_earlier_children(monkeypatch, before, after, is_own, fraction):
    process = psutil.Process()

    def plant(times, busy_seconds, idle_seconds):
        monkeypatch.setattr(system_status, "_cpu_times", lambda: {"user": busy_seconds, "idle": idle_seconds})
        monkeypatch.setattr(os, "times", lambda: () if times or not busy_seconds else (5,))
        monkeypatch.setattr(psutil.Process, "children", lambda *_, **_options: [process] if times else [])
        monkeypatch.setattr(psutil.Process, "cpu_times", lambda _process: times)

    plant(before, 0, 0)
    read_load = BackgroundLoadReader({process.pid} if is_own else ())
    plant(after, 8, 2)

    assert read_load() == pytest.approx(fraction)


@pytest.mark.parametrize(("own_seconds", "fraction"), [(2.0, 0.25), (3.5, 0.0)])
def test_busy_fraction_excludes_own_time(own_seconds, fraction):
    assert busy_fraction({"user": 1, "idle": 1}, {"user": 4, "idle": 2}, own_seconds) == fraction
