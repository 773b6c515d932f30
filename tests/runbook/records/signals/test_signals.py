"""System status: parsing of recorded outputs, findings, and display."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from openmed_nb._render.display import NOT_APPLICABLE, OK, WARNING
from openmed_nb.devices.machine import MachineInfo
from openmed_nb.runbook.records.signals import (
    MAC_COMMANDS,
    NVIDIA_SMI,
    QUERY,
    GpuStatus,
    SystemStatus,
    read_system_status,
)

RECORDED = Path(__file__).parents[3] / "recorded" / "signals"
MAC = MachineInfo("Darwin", "arm64", apple_silicon=True, chip="Apple M4 Max", macos=(26, 6, 2), gpu_driver=False)
BOX = MachineInfo("Linux", "x86_64", gpu_driver=True)


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
    """Return the status of a Mac with the given outputs of commands, and the commands that were run."""
    commands = []

    def run(command):
        commands.append(command)
        return next((outputs.get(name) for name, mac_command in MAC_COMMANDS.items() if mac_command == command), None)

    return read_system_status(MAC, "mps", run), commands


def read_nvidia(output, device="cuda:0", environ=None, uuid=None):
    """Return the GPU of a machine with the given output of ``nvidia-smi``."""
    return read_system_status(BOX, device, lambda _command: output, environ or {}, uuid).gpu


def test_read_signals_runs_each_command_of_macos_once():
    status, commands = read_mac(**LAPTOP)

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
    simulated = MachineInfo("Darwin", "arm64", apple_silicon=True, chip="Chip", simulated=True)
    status = read_system_status(simulated, "mps", pytest.fail)

    assert status == SystemStatus(simulated=True)
    assert "SIMULATED" in str(status)
    assert "SIMULATED" in status._repr_html_()
    assert {finding.status for finding in status.findings()} == {NOT_APPLICABLE}


PSUTIL_BATTERY = read_mac()[0].battery
CALM = load_outputs("therm_calm")
PRESSURE = "com.apple.system.thermalpressurelevel"
DEVICE_UTILIZATION = '"Device Utilization %"=30'
IOREG = LAPTOP["ioreg"]
MAC_OUTPUTS = [
    ("ioreg", load_outputs("ioreg_m1"), "gpu", GpuStatus(utilization=2, memory_used=340983808)),
    ("ioreg", IOREG.replace(DEVICE_UTILIZATION, '"Device Utilization %"=130'), "gpu", replace(M4, utilization=None)),
    ("ioreg", IOREG.replace(DEVICE_UTILIZATION, '"Device Utilization %"=x'), "gpu", replace(M4, utilization=29)),
    ("ioreg", IOREG.replace("AGXAcceleratorG16G", "IntelAccelerator"), "gpu", GpuStatus()),
    ("ioreg", IOREG.replace("}", ""), "gpu", GpuStatus("Apple M4", 10)),
    ("ioreg", f'"IOReportLegend" = ({{{DEVICE_UTILIZATION}}})', "gpu", GpuStatus()),
    ("sysctl", "hw.perflevel0.physicalcpu: 0\n", "performance_cores", None),
    ("sysctl", "hw.perflevel1.physicalcpu: 9999\n", "efficiency_cores", None),
    ("memory", "System-wide memory free percentage: 170%", "memory_free", None),
    ("battery", load_outputs("batt_charging"), "power_source", "adapter"),
    ("battery", load_outputs("batt_charging"), "battery", 90),
    ("battery", load_outputs("batt_not_charging"), "power_source", "adapter"),
    ("battery", load_outputs("batt_not_charging"), "battery", 7),
    ("battery", load_outputs("batt_desktop"), "power_source", "adapter"),
    ("battery", load_outputs("batt_none"), "power_source", "adapter"),
    ("battery", "Now drawing from 'UPS Power'\n", "power_source", "UPS"),
    ("battery", " -Back-UPS ES 700\t64%; charged present: true", "battery", PSUTIL_BATTERY),
    ("battery", " -InternalBattery-0 (id=1)\t178%; discharging", "battery", PSUTIL_BATTERY),
    ("power", load_outputs("power_powermode"), "power_mode", "automatic"),
    ("power", load_outputs("power_desktop"), "power_mode", None),
    ("power", " lowpowermode         0\n", "power_mode", "automatic"),
    ("power", " powermode            1\n", "power_mode", "low"),
    ("power", " lowpowermode         0\n powermode            2\n", "power_mode", "high"),
    ("power", " powermode            7\n", "power_mode", None),
    ("thermal state", CALM, "thermal_state", "nothing reported"),
    ("thermal state", CALM, "cpu_speed_limit", None),
    ("thermal state", "CPU_Speed_Limit \t= 100\n", "thermal_state", "nominal"),
    ("thermal state", f"{CALM}CPU_Speed_Limit \t= 100\n", "thermal_state", "nominal"),
    ("thermal state", "CPU_Speed_Limit \t= 162\n", "cpu_speed_limit", None),
    ("thermal state", "Note: No thermal warning level has been recorded\n", "thermal_state", None),
    ("thermal pressure", load_outputs("pressure_moderate"), "thermal_state", "moderate"),
    ("thermal pressure", f"{PRESSURE} 2\n", "thermal_state", "limited"),
    ("thermal pressure", f"{PRESSURE} 4\n", "thermal_state", "limited"),
    ("thermal pressure", f"{PRESSURE} 5\n", "thermal_state", None),
    ("thermal pressure", "com.apple.system.thermalpressure 1\n", "thermal_state", None),
]


@pytest.mark.parametrize(("command", "output", "field", "value"), MAC_OUTPUTS)
def test_read_signals_parses_outputs_of_macos(command, output, field, value):
    status, _ = read_mac(**{command: output})

    assert getattr(status, field) == value


@pytest.mark.parametrize(
    ("output", "pressure", "thermal_state"),
    [
        (CALM, "pressure_nominal", "nominal"),
        (CALM, "pressure_moderate", "moderate"),
        (load_outputs("therm_limited"), "pressure_nominal", "limited"),
    ],
)
def test_thermal_state_is_the_worse_of_two_reports(output, pressure, thermal_state):
    status, _ = read_mac(**{"thermal state": output, "thermal pressure": load_outputs(pressure)})

    assert status.thermal_state == thermal_state


UNREADABLE = ["", "not found", "Error: could not get the value", "\0\0", "-1", "[N/A]", "٣", "9" * 5000, None]


@pytest.mark.parametrize("output", UNREADABLE)
def test_read_signals_returns_none_for_unreadable_output(output):
    """Only the values of psutil remain."""
    status, _ = read_mac(**dict.fromkeys(MAC_COMMANDS, output))
    psutil_alone = read_system_status(BOX, "cpu")

    assert replace(status, memory_available=None) == replace(psutil_alone, memory_available=None, chip=MAC.chip)
    assert read_nvidia(output) == GpuStatus()


@given(
    st.text(max_size=300) | st.from_regex(r"(CPU_Speed_Limit|powermode)\s*=?\s*[\d.,]+[KMGT%]?", fullmatch=False),
    st.lists(st.text(alphabet="0123456789.[]N/A ", max_size=20), min_size=9, max_size=9),
)
def test_parsed_values_are_in_their_ranges(text, cells):
    gpu = read_nvidia(",".join(cells))

    assert read_mac(**dict.fromkeys(MAC_COMMANDS, text))[0].chip == MAC.chip
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


CONDITIONS = [
    ({"memory_pressure": "normal"}, "memory pressure", OK),
    ({"memory_pressure": "warning"}, "memory pressure", WARNING),
    ({"memory_pressure": "critical"}, "memory pressure", WARNING),
    ({}, "memory pressure", NOT_APPLICABLE),
    ({"power_source": "adapter"}, "power", OK),
    ({"power_source": "battery"}, "power", WARNING),
    ({"power_source": "UPS"}, "power", WARNING),
    ({}, "power", NOT_APPLICABLE),
    ({"power_mode": "automatic"}, "power mode", OK),
    ({"power_mode": "high"}, "power mode", OK),
    ({"power_mode": "low"}, "power mode", WARNING),
    ({}, "power mode", NOT_APPLICABLE),
    ({"thermal_state": "nominal"}, "thermal state", OK),
    ({"thermal_state": "nothing reported"}, "thermal state", NOT_APPLICABLE),
    ({"gpu": GpuStatus(thermal_throttling=False), "thermal_state": "nothing reported"}, "thermal state", OK),
    ({"gpu": GpuStatus(thermal_throttling=True), "thermal_state": "nothing reported"}, "thermal state", WARNING),
    ({"thermal_state": "limited"}, "thermal state", WARNING),
    ({"thermal_state": "moderate"}, "thermal state", WARNING),
    ({"gpu": GpuStatus(thermal_throttling=False), "thermal_state": "moderate"}, "thermal state", WARNING),
    ({"gpu": GpuStatus(thermal_throttling=True), "thermal_state": "nominal"}, "thermal state", WARNING),
    ({}, "thermal state", NOT_APPLICABLE),
]


@pytest.mark.parametrize(("state", "name", "status"), CONDITIONS)
def test_findings_warn_of_slow_states_with_a_remedy(state, name, status):
    (finding,) = (finding for finding in SystemStatus(**state).findings() if finding.name == name)

    assert finding.status == status
    assert bool(finding.remedy) is (status == WARNING)
    assert not any(character.isdigit() for character in finding.evidence)


def test_report_displays_measurements_only_in_html():
    quiet = SystemStatus(M4, "normal", 70, 2**33, 0, "battery", 78, "automatic", "nominal")
    busy = SystemStatus(M4, "normal", 20, 2**31, 2**30, "battery", 12, "automatic", "nominal")
    page = SystemStatus(GpuStatus(utilization=0))._repr_html_()
    unreported = SystemStatus(thermal_state="nothing reported")

    assert str(quiet) == str(busy)
    assert all(value in quiet._repr_html_() for value in ("78 %", "30 %"))
    assert "78" not in str(quiet)
    assert ">0 %</td>" in page
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
