"""System status and utilization: parsing of recorded outputs, findings, and display."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from openmed_nb._render.display import NOT_APPLICABLE, OK, WARNING
from openmed_nb.devices.machine import MachineInfo
from openmed_nb.runbook.records.signals import (
    CONDITIONS,
    MAC_COMMANDS,
    NVIDIA_SMI,
    QUERY,
    GpuStatus,
    SystemStatus,
    busy_fraction,
    make_utilization_reader,
    read_system_status,
)

RECORDED = Path(__file__).parents[3] / "recorded" / "signals"
MAC = MachineInfo(
    "Darwin", "arm64", apple_silicon=True, chip="Apple M4 Max", macos_version=(26, 6, 2), gpu_driver=False
)
BOX = MachineInfo("Linux", "x86_64", gpu_driver=True)
SIMULATED_MAC = MachineInfo("Darwin", "arm64", apple_silicon=True, chip="Chip", simulated=True)


def load_outputs(*names):
    """Return the concatenated recorded outputs."""
    return "".join((RECORDED / f"{name}.txt").read_text("utf-8") for name in names)


LAPTOP = {
    "ioreg": load_outputs("ioreg_m4"),
    "sysctl": load_outputs("sysctl_pressure", "sysctl_cores"),
    "memory": load_outputs("memory_pressure"),
    "battery": load_outputs("batt_battery"),
    "power": load_outputs("power_lowpowermode"),
    "thermal state": load_outputs("therm_limited"),
    "thermal pressure": load_outputs("pressure_moderate"),
}
M4 = GpuStatus("Apple M4", 10, 30, 356089856)
H200 = GpuStatus(
    "NVIDIA H200",
    utilization=0,
    memory_used=0,
    memory_total=143771 << 20,
    temperature=41,
    power=82.07,
    thermal_throttling=False,
    uuid="GPU-00000000-1111-2222-3333-444444444444",
)


def read_mac(**outputs):
    """Return the status of a Mac with the given outputs of commands."""
    by_command = {tuple(command): outputs.get(name) for name, command in MAC_COMMANDS.items()}
    return read_system_status(MAC, "mps", lambda command: by_command[tuple(command)])


def read_nvidia(output, device="cuda:0", environ=None, uuid=None):
    """Return the GPU of a machine with the given output of ``nvidia-smi``."""
    return read_system_status(BOX, device, lambda _command: output, environ or {}, uuid).gpu


def test_read_signals_runs_each_command_of_macos_once():
    commands = []
    status = read_mac(**LAPTOP)
    read_system_status(MAC, "mps", commands.append)

    assert status.gpu == M4
    assert (status.memory_pressure, status.memory_free) == ("warning", 70)
    assert (status.power_source, status.battery, status.power_mode) == ("battery", 78, "low")
    assert (status.thermal_state, status.cpu_speed_limit) == ("limited", 62)
    assert (status.chip, status.performance_cores, status.efficiency_cores) == ("Apple M4 Max", 12, 4)
    assert sorted(commands) == sorted(MAC_COMMANDS.values())
    assert all(command[0].startswith("/usr/") for command in commands)


def test_read_signals_searches_nvidia_smi():
    commands = []

    def run(command):
        commands.append(command)
        return load_outputs("nvidia_h200") if command == [NVIDIA_SMI[1], *QUERY] else None

    status = read_system_status(BOX, "cuda:0", run, {})

    assert (status.gpu, [command[0] for command in commands]) == (H200, list(NVIDIA_SMI[:2]))
    assert status.memory_available > 0
    assert read_system_status(BOX, "cpu", run, {}).gpu == GpuStatus()
    assert len(commands) == 2


def test_read_signals_reads_no_values_of_a_simulated_mac():
    status = read_system_status(SIMULATED_MAC, "mps", pytest.fail)

    assert status == SystemStatus(simulated=True)
    assert "SIMULATED" in str(status)
    assert "SIMULATED" in status._repr_html_()
    assert {finding.status for finding in status.findings()} == {NOT_APPLICABLE}


PSUTIL_BATTERY = read_mac().battery
CALM = load_outputs("therm_calm")
PRESSURE = "com.apple.system.thermalpressurelevel"
DEVICE_UTILIZATION = '"Device Utilization %"=30'
IOREG = LAPTOP["ioreg"]
# Outputs of a command, and the value of a field for each of them.
MAC_OUTPUTS = {
    ("ioreg", "gpu"): [
        (load_outputs("ioreg_m1"), GpuStatus(utilization=2, memory_used=340983808)),
        (IOREG.replace(DEVICE_UTILIZATION, '"Device Utilization %"=130'), replace(M4, utilization=None)),
        (IOREG.replace(DEVICE_UTILIZATION, '"Device Utilization %"=x'), replace(M4, utilization=29)),
        (IOREG.replace("AGXAcceleratorG16G", "IntelAccelerator"), GpuStatus()),
        (IOREG.replace("}", ""), GpuStatus("Apple M4", 10)),
        (f'"IOReportLegend" = ({{{DEVICE_UTILIZATION}}})', GpuStatus()),
    ],
    ("sysctl", "performance_cores"): [("hw.perflevel0.physicalcpu: 0\n", None)],
    ("sysctl", "efficiency_cores"): [("hw.perflevel1.physicalcpu: 9999\n", None)],
    ("memory", "memory_free"): [("System-wide memory free percentage: 170%", None)],
    ("battery", "power_source"): [
        (load_outputs("batt_charging"), "adapter"),
        (load_outputs("batt_not_charging"), "adapter"),
        (load_outputs("batt_desktop"), "adapter"),
        (load_outputs("batt_none"), "adapter"),
        ("Now drawing from 'UPS Power'\n", "UPS"),
    ],
    ("battery", "battery"): [
        (load_outputs("batt_charging"), 90),
        (load_outputs("batt_not_charging"), 7),
        (" -Back-UPS ES 700\t64%; charged present: true", PSUTIL_BATTERY),
        (" -InternalBattery-0 (id=1)\t178%; discharging", PSUTIL_BATTERY),
    ],
    ("power", "power_mode"): [
        (load_outputs("power_powermode"), "automatic"),
        (load_outputs("power_desktop"), None),
        (" lowpowermode         0\n", "automatic"),
        (" powermode            1\n", "low"),
        (" lowpowermode         0\n powermode            2\n", "high"),
        (" powermode            7\n", None),
    ],
    ("thermal state", "thermal_state"): [
        (CALM, "nothing reported"),
        ("CPU_Speed_Limit \t= 100\n", "nominal"),
        (f"{CALM}CPU_Speed_Limit \t= 100\n", "nominal"),
        ("Note: No thermal warning level has been recorded\n", None),
    ],
    ("thermal state", "cpu_speed_limit"): [(CALM, None), ("CPU_Speed_Limit \t= 162\n", None)],
    ("thermal pressure", "thermal_state"): [
        (load_outputs("pressure_moderate"), "moderate"),
        (f"{PRESSURE} 2\n", "limited"),
        (f"{PRESSURE} 4\n", "limited"),
        (f"{PRESSURE} 5\n", None),
        ("com.apple.system.thermalpressure 1\n", None),
    ],
}


@pytest.mark.parametrize(("command", "field"), MAC_OUTPUTS)
def test_read_signals_parses_outputs_of_macos(command, field):
    for output, value in MAC_OUTPUTS[command, field]:
        status = read_mac(**{command: output})

        assert getattr(status, field) == value, output


THERMAL_REPORTS = [
    (CALM, "pressure_nominal", "nominal"),
    (CALM, "pressure_moderate", "moderate"),
    (load_outputs("therm_limited"), "pressure_nominal", "limited"),
]


@pytest.mark.parametrize(("output", "pressure", "thermal_state"), THERMAL_REPORTS)
def test_thermal_state_is_the_worse_of_two_reports(output, pressure, thermal_state):
    status = read_mac(**{"thermal state": output, "thermal pressure": load_outputs(pressure)})

    assert status.thermal_state == thermal_state


UNREADABLE = ["", "not found", "Error: could not get the value", "\0\0", "-1", "[N/A]", "٣", "9" * 5000, None]


@pytest.mark.parametrize("output", UNREADABLE)
def test_read_signals_returns_none_for_unreadable_output(output):
    """Only the values of psutil remain."""
    status = read_mac(**dict.fromkeys(MAC_COMMANDS, output))
    psutil_alone = read_system_status(BOX, "cpu")

    assert replace(status, memory_available=None) == replace(psutil_alone, memory_available=None, chip=MAC.chip)
    assert read_nvidia(output) == GpuStatus()


@given(
    st.text(max_size=300) | st.from_regex(r"(CPU_Speed_Limit|powermode)\s*=?\s*[\d.,]+[KMGT%]?", fullmatch=False),
    st.lists(st.text(alphabet="0123456789.[]N/A ", max_size=20), min_size=9, max_size=9),
)
def test_parsed_values_are_in_their_ranges(text, cells):
    gpu = read_nvidia(",".join(cells))

    assert read_mac(**dict.fromkeys(MAC_COMMANDS, text)).chip == MAC.chip
    assert read_nvidia(text) == GpuStatus()
    assert gpu.utilization is None or 0 <= gpu.utilization <= 100
    assert gpu.memory_total is None or gpu.memory_total > 0


@pytest.mark.parametrize("cell", ["[N/A]", "[Not Supported]", "[Unknown Error]", ""])
def test_unsupported_gpu_values_are_none(cell):
    row = ", ".join(("GPU-1", "NVIDIA T4", *[cell] * 7))

    assert read_nvidia(row) == GpuStatus("NVIDIA T4", uuid="GPU-1")


@pytest.mark.parametrize("cells", ["Active, [N/A]", "Not Active, Active"])
def test_software_or_hardware_slowdown_is_thermal_throttling(cells):
    assert read_nvidia(f"GPU-1, T4, 1, 1, 1, 1, 1, {cells}").thermal_throttling is True


T4S = [("GPU-aaaa", "Tesla T4"), ("GPU-bbbb", "Tesla T4"), ("GPU-cccc", "Tesla T4")]
MIXED = [("GPU-aaaa", "Tesla T4"), ("GPU-bbbb", "NVIDIA A100")]
VISIBLE = "CUDA_VISIBLE_DEVICES"
SELECTIONS = [
    (T4S, "cuda", {}, None, "GPU-aaaa"),
    (T4S, "cuda:2", {}, None, "GPU-cccc"),
    (T4S, "cuda:3", {}, None, None),
    (T4S, "cuda:0", {VISIBLE: "2,0"}, None, "GPU-cccc"),
    (T4S, "cuda:1", {VISIBLE: "2, 0"}, None, "GPU-aaaa"),
    (T4S, "cuda:2", {VISIBLE: "2,0"}, None, None),
    (T4S, "cuda:0", {VISIBLE: "GPU-bb"}, None, "GPU-bbbb"),
    (T4S, "cuda:0", {VISIBLE: "MIG-bb"}, None, None),
    (T4S, "cuda:0", {VISIBLE: "0,x"}, None, None),
    (T4S, "cuda:0", {VISIBLE: ""}, None, None),
    (T4S, "cuda:0", {VISIBLE: "9"}, "cccc", "GPU-cccc"),
    (T4S, "cuda:0", {}, "dddd", None),
    (MIXED, "cuda:0", {}, None, None),
    (MIXED, "cuda:1", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, None, "GPU-bbbb"),
    (MIXED, "cuda:0", {}, "bbbb", "GPU-bbbb"),
]


@pytest.mark.parametrize(("gpus", "device", "environ", "uuid", "expected"), SELECTIONS)
def test_gpu_is_selected_by_uuid_or_order(gpus, device, environ, uuid, expected):
    """The order counts only if torch and ``nvidia-smi`` number the GPUs in the same order."""
    output = "\n".join(", ".join((*gpu, *["1"] * 7)) for gpu in gpus)

    assert read_nvidia(output, device, environ, uuid).uuid == expected


# Status of the finding for each state of a condition.
STATES = {
    "memory_pressure": {"normal": OK, "warning": WARNING, "critical": WARNING},
    "power_source": {"adapter": OK, "battery": WARNING, "UPS": WARNING},
    "power_mode": {"automatic": OK, "high": OK, "low": WARNING},
    "thermal_state": {"nominal": OK, "nothing reported": NOT_APPLICABLE, "limited": WARNING, "moderate": WARNING},
}
# Thermal state of the system, whether the GPU throttles, and status of the finding.
GPU_STATES = [
    ("nothing reported", False, OK),
    ("nothing reported", True, WARNING),
    ("moderate", False, WARNING),
    ("nominal", True, WARNING),
]


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.name)
def test_finding_warns_of_slow_states_with_a_remedy(condition):
    cases = [(SystemStatus(**{condition.field: state}), status) for state, status in STATES[condition.field].items()]
    if condition.field == "thermal_state":
        cases += [
            (SystemStatus(GpuStatus(thermal_throttling=throttling), thermal_state=state), status)
            for state, throttling, status in GPU_STATES
        ]
    for system_status, status in [(SystemStatus(), NOT_APPLICABLE), *cases]:
        (finding,) = (finding for finding in system_status.findings() if finding.name == condition.name)

        assert finding.status == status
        assert bool(finding.remedy) is (status == WARNING)
        assert not any(character.isdigit() for character in finding.evidence)


def test_report_displays_measurements_only_in_html():
    quiet = SystemStatus(M4, "normal", 70, 2**33, 0, "battery", 78, "automatic", "nominal")
    busy = SystemStatus(M4, "normal", 20, 2**31, 2**30, "battery", 12, "automatic", "nominal")
    page = SystemStatus(GpuStatus(utilization=0))._repr_html_()
    unreported = SystemStatus(thermal_state="nothing reported")

    assert str(quiet) == str(busy)
    assert all(value in quiet._repr_html_() for value in ("78%", "30%"))
    assert "78" not in str(quiet)
    assert ">0%</td>" in page
    assert "memory pressure, power, power mode, thermal state<" in page
    assert "On a Mac, nb.system_status() reads the missing values." in re.sub("</?code>", "", page)
    assert "On a Mac" not in quiet._repr_html_()
    assert "Power: the processor may run slower than on the power adapter. Connect the machine" in quiet._repr_html_()
    assert unreported.findings()[-1].evidence == "nothing reported"
    assert str(unreported).splitlines()[-1].endswith("  nothing reported")
    assert json.loads(json.dumps(quiet.to_dict()))["gpu"]["cores"] == 10


@pytest.mark.real_computer
def test_system_status_reads_this_machine():
    assert nb.system_status().memory_available > 0
    with nb.simulated_mps():
        assert nb.system_status() == SystemStatus(simulated=True)


def test_readme_names_every_recorded_file():
    documented = re.findall(r"`(\w+\.txt)`", (RECORDED / "README.md").read_text("utf-8"))

    assert sorted(documented) == sorted(file.name for file in RECORDED.glob("*.txt"))


@pytest.mark.real_computer
@pytest.mark.parametrize(
    ("device", "machine", "output", "utilization"),
    [
        ("mps", MAC, "ioreg_m4", 0.3),
        ("mps", MAC, "ioreg_m1", 0.02),
        ("cuda", BOX, "nvidia_h200", 0.0),
    ],
)
def test_utilization_reader_runs_the_command_of_its_device(device, machine, output, utilization):
    read = make_utilization_reader(device, machine, lambda _command: load_outputs(output), {})

    assert read() == pytest.approx(utilization)


@pytest.mark.real_computer
@pytest.mark.parametrize("device", ["mps", "cuda", "cuda:1", "lazy:0"])
def test_utilization_reader_needs_a_usable_output(device):
    assert make_utilization_reader(device, MAC, lambda _command: None, {}) is None
    assert make_utilization_reader(device, BOX, lambda _command: "no such command", {}) is None


@pytest.mark.parametrize("device", ["cpu", "mps", "cuda"])
def test_utilization_reader_runs_no_command_on_a_simulated_machine(device):
    assert make_utilization_reader(device, SIMULATED_MAC, pytest.fail, {}) is None


@pytest.mark.real_computer
def test_cpu_reader_returns_a_fraction_after_its_counters_change():
    read = make_utilization_reader("cpu", BOX)
    while (utilization := read()) is None:
        pass

    assert 0 <= utilization <= 1


@pytest.mark.real_computer
def test_cpu_reader_measures_across_threads():
    """The functions of psutil for percentages keep the counters of each thread."""
    read = make_utilization_reader("cpu", BOX)
    time.sleep(0.1)
    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(read).result() is not None


@pytest.mark.real_computer
def test_cpu_without_counters_has_no_reader(monkeypatch):
    def raise_error():
        raise PermissionError

    monkeypatch.setattr(psutil, "cpu_times", raise_error)

    assert make_utilization_reader("cpu", BOX) is None


# Counters before and after, and the busy fraction between them.
CPU_TIMES = [
    ({"user": 1, "idle": 1}, {"user": 4, "idle": 2}, 0.75),
    ({"user": 1, "idle": 1, "iowait": 0}, {"user": 2, "idle": 2, "iowait": 2}, 0.25),
    ({"user": 1, "idle": 1, "guest": 0}, {"user": 2, "idle": 2, "guest": 1}, 0.5),
    ({"user": 1, "idle": 5}, {"user": 2, "idle": 4}, 1.0),
    ({"user": 1, "idle": 1}, {"user": 1, "idle": 1}, None),
    ({}, {"user": 1, "idle": 1}, None),
    ({}, {}, None),
]


@pytest.mark.parametrize(("before", "after", "fraction"), CPU_TIMES)
def test_busy_fraction_excludes_idle_time_and_counts_guests_once(before, after, fraction):
    assert busy_fraction(before, after) == fraction
