"""The signals of a computer: how they are read from recorded outputs, what they warn of, and how they are shown."""

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
from openmed_nb.runbook.records.signals import MAC_COMMANDS, NVIDIA_SMI, QUERY, GpuStatus, SystemStatus, read_signals

RECORDED = Path(__file__).parents[3] / "recorded" / "signals"
MAC = MachineInfo("Darwin", "arm64", apple_silicon=True, chip="Apple M4 Max", macos=(26, 6, 2), gpu_driver=False)
BOX = MachineInfo("Linux", "x86_64", gpu_driver=True)


def recorded(*names):
    """Return recorded outputs as one text."""
    return "".join((RECORDED / f"{name}.txt").read_text("utf-8") for name in names)


LAPTOP = {
    "ioreg": recorded("ioreg_m4"),
    "sysctl": recorded("sysctl_pressure", "sysctl_cores"),
    "memory": recorded("memory_pressure"),
    "battery": recorded("batt_battery"),
    "power": recorded("power_lowpowermode"),
    "heat": recorded("therm_limited"),
    "thermal pressure": recorded("pressure_moderate"),
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
    """Return the signals of a Mac whose commands print this, and the commands that were run."""
    commands = []

    def run(command):
        commands.append(command)
        return next((outputs.get(name) for name, known in MAC_COMMANDS.items() if known == command), None)

    return read_signals(MAC, "mps", run), commands


def read_nvidia(output, device="cuda:0", environ=None, uuid=None):
    """Return the GPU of a computer on which ``nvidia-smi`` prints this."""
    return read_signals(BOX, device, lambda _command: output, environ or {}, uuid).gpu


def test_laptop():
    """A Mac is read from its own commands, each asked once and by its full path."""
    signals, commands = read_mac(**LAPTOP)

    assert signals.gpu == M4
    assert (signals.memory_pressure, signals.memory_free) == ("warning", 70)
    assert (signals.power_source, signals.battery, signals.power_mode) == ("battery", 78, "low")
    assert (signals.thermal_state, signals.speed_limit) == ("limited", 62)
    assert (signals.chip, signals.performance_cores, signals.efficiency_cores) == ("Apple M4 Max", 12, 4)
    assert sorted(commands) == sorted(MAC_COMMANDS.values())
    assert all(command[0].startswith("/usr/") for command in commands)


def test_nvidia_smi_is_asked_where_the_driver_put_it():
    commands = []

    def run(command):
        commands.append(command)
        return recorded("nvidia_h200") if command == [NVIDIA_SMI[1], *QUERY] else None

    box = read_signals(BOX, "cuda:0", run, {})

    assert (box.gpu, [command[0] for command in commands]) == (H200, list(NVIDIA_SMI[:2]))
    assert box.memory_available > 0
    assert read_signals(BOX, "cpu", run, {}).gpu == GpuStatus()
    assert len(commands) == 2


def test_simulated_mac_is_not_read():
    """Of a simulated Mac nothing is read, and nothing of this computer is shown as the Mac's."""
    simulated = MachineInfo("Darwin", "arm64", apple_silicon=True, chip="Chip", simulated=True)
    signals = read_signals(simulated, "mps", pytest.fail)

    assert signals == SystemStatus(simulated=True)
    assert "SIMULATED" in str(signals)
    assert "SIMULATED" in signals._repr_html_()
    assert {finding.status for finding in signals.findings()} == {NOT_APPLICABLE}


OF_PSUTIL = read_mac()[0].battery
CALM = recorded("therm_calm")
PRESSURE = "com.apple.system.thermalpressurelevel"
DEVICE_BUSY = '"Device Utilization %"=30'
IOREG = LAPTOP["ioreg"]
READ = [
    ("ioreg", recorded("ioreg_m1"), "gpu", GpuStatus(utilization=2, memory_used=340983808)),
    ("ioreg", IOREG.replace(DEVICE_BUSY, '"Device Utilization %"=130'), "gpu", replace(M4, utilization=None)),
    ("ioreg", IOREG.replace(DEVICE_BUSY, '"Device Utilization %"=x'), "gpu", replace(M4, utilization=29)),
    ("ioreg", IOREG.replace("AGXAcceleratorG16G", "IntelAccelerator"), "gpu", GpuStatus()),
    ("ioreg", IOREG.replace("}", ""), "gpu", GpuStatus("Apple M4", 10)),
    ("ioreg", f'"IOReportLegend" = ({{{DEVICE_BUSY}}})', "gpu", GpuStatus()),
    ("sysctl", "hw.perflevel0.physicalcpu: 0\n", "performance_cores", None),
    ("sysctl", "hw.perflevel1.physicalcpu: 9999\n", "efficiency_cores", None),
    ("memory", "System-wide memory free percentage: 170%", "memory_free", None),
    ("battery", recorded("batt_charging"), "power_source", "adapter"),
    ("battery", recorded("batt_charging"), "battery", 90),
    ("battery", recorded("batt_not_charging"), "power_source", "adapter"),
    ("battery", recorded("batt_not_charging"), "battery", 7),
    ("battery", recorded("batt_desktop"), "power_source", "adapter"),
    ("battery", recorded("batt_none"), "power_source", "adapter"),
    ("battery", "Now drawing from 'UPS Power'\n", "power_source", "UPS"),
    ("battery", " -Back-UPS ES 700\t64%; charged present: true", "battery", OF_PSUTIL),
    ("battery", " -InternalBattery-0 (id=1)\t178%; discharging", "battery", OF_PSUTIL),
    ("power", recorded("power_powermode"), "power_mode", "automatic"),
    ("power", recorded("power_desktop"), "power_mode", None),
    ("power", " lowpowermode         0\n", "power_mode", "automatic"),
    ("power", " powermode            1\n", "power_mode", "low"),
    ("power", " lowpowermode         0\n powermode            2\n", "power_mode", "high"),
    ("power", " powermode            7\n", "power_mode", None),
    ("heat", CALM, "heat", "nothing reported"),
    ("heat", CALM, "speed_limit", None),
    ("heat", "CPU_Speed_Limit \t= 100\n", "heat", "nominal"),
    ("heat", f"{CALM}CPU_Speed_Limit \t= 100\n", "heat", "nominal"),
    ("heat", "CPU_Speed_Limit \t= 162\n", "speed_limit", None),
    ("heat", "Note: No thermal warning level has been recorded\n", "heat", None),
    ("thermal pressure", recorded("pressure_moderate"), "heat", "moderate"),
    ("thermal pressure", f"{PRESSURE} 2\n", "heat", "limited"),
    ("thermal pressure", f"{PRESSURE} 4\n", "heat", "limited"),
    ("thermal pressure", f"{PRESSURE} 5\n", "heat", None),
    ("thermal pressure", "com.apple.system.thermalpressure 1\n", "heat", None),
]


@pytest.mark.parametrize(("command", "output", "field", "value"), READ)
def test_output_of_a_mac_is_read(command, output, field, value):
    """A real output is read as what it says; a figure that cannot be is not known, and is never another one's."""
    signals, _ = read_mac(**{command: output})

    assert getattr(signals, field) == value


@pytest.mark.parametrize(
    ("output", "pressure", "heat"),
    [
        (CALM, "pressure_nominal", "nominal"),
        (CALM, "pressure_moderate", "moderate"),
        (recorded("therm_limited"), "pressure_nominal", "limited"),
    ],
)
def test_worse_of_two_reports_of_heat_counts(output, pressure, heat):
    assert read_mac(**{"heat": output, "thermal pressure": recorded(pressure)})[0].thermal_state == heat


UNREADABLE = ["", "not found", "Error: could not get the value", "\0\0", "-1", "[N/A]", "٣", "9" * 5000, None]


@pytest.mark.parametrize("output", UNREADABLE)
def test_unreadable_output_is_none(output):
    """What cannot be read is None, never 0: all that is known is what psutil says."""
    signals, _ = read_mac(**dict.fromkeys(MAC_COMMANDS, output))
    psutil_alone = read_signals(BOX, "cpu")

    assert replace(signals, memory_available=None) == replace(psutil_alone, memory_available=None, chip=MAC.chip)
    assert read_nvidia(output) == GpuStatus()


@given(
    st.text(max_size=300) | st.from_regex(r"(CPU_Speed_Limit|powermode)\s*=?\s*[\d.,]+[KMGT%]?", fullmatch=False),
    st.lists(st.text(alphabet="0123456789.[]N/A ", max_size=20), min_size=9, max_size=9),
)
def test_any_output_gives_values_in_their_ranges(text, cells):
    gpu = read_nvidia(",".join(cells))

    assert read_mac(**dict.fromkeys(MAC_COMMANDS, text))[0].chip == MAC.chip
    assert read_nvidia(text) == GpuStatus()
    assert gpu.utilization is None or 0 <= gpu.utilization <= 100
    assert gpu.memory_total is None or gpu.memory_total > 0


@pytest.mark.parametrize("word", ["[N/A]", "[Not Supported]", "[Unknown Error]", ""])
def test_field_that_a_gpu_does_not_support_is_none(word):
    row = ", ".join(("GPU-1", "NVIDIA T4", *[word] * 7))

    assert read_nvidia(row) == GpuStatus("NVIDIA T4", uuid="GPU-1")


@pytest.mark.parametrize("heat", ["Active, [N/A]", "Not Active, Active"])
def test_driver_or_hardware_may_report_heat(heat):
    assert read_nvidia(f"GPU-1, T4, 1, 1, 1, 1, 1, {heat}").thermal_throttling is True


T4S = [("GPU-aaaa", "Tesla T4"), ("GPU-bbbb", "Tesla T4"), ("GPU-cccc", "Tesla T4")]
MIXED = [("GPU-aaaa", "Tesla T4"), ("GPU-bbbb", "NVIDIA A100")]
VISIBLE = "CUDA_VISIBLE_DEVICES"
CHOICES = [
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


@pytest.mark.parametrize(("gpus", "device", "environ", "uuid", "expected"), CHOICES)
def test_gpu_is_found_by_uuid_or_order(gpus, device, environ, uuid, expected):
    """The GPU that torch calls by a name is found by its UUID, or by its place where the two orders are the same."""
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
    ({"heat": "nominal"}, "heat", OK),
    ({"heat": "nothing reported"}, "heat", NOT_APPLICABLE),
    ({"gpu": GpuStatus(thermal_throttling=False), "heat": "nothing reported"}, "heat", OK),
    ({"gpu": GpuStatus(thermal_throttling=True), "heat": "nothing reported"}, "heat", WARNING),
    ({"heat": "limited"}, "heat", WARNING),
    ({"heat": "moderate"}, "heat", WARNING),
    ({"gpu": GpuStatus(thermal_throttling=False), "heat": "moderate"}, "heat", WARNING),
    ({"gpu": GpuStatus(thermal_throttling=True), "heat": "nominal"}, "heat", WARNING),
    ({}, "heat", NOT_APPLICABLE),
]


@pytest.mark.parametrize(("state", "name", "status"), CONDITIONS)
def test_slow_state_is_a_warning_with_a_remedy(state, name, status):
    (finding,) = (finding for finding in SystemStatus(**state).findings() if finding.name == name)

    assert finding.status == status
    assert bool(finding.remedy) is (status == WARNING)
    assert not any(character.isdigit() for character in finding.evidence)


def test_text_has_states_and_html_has_figures():
    """The text form says states in words; figures stand in the HTML only, 0 as 0, and what is not known is shown so."""
    quiet = SystemStatus(M4, "normal", 70, 2**33, 0, "battery", 78, "automatic", "nominal")
    busy = SystemStatus(M4, "normal", 20, 2**31, 2**30, "battery", 12, "automatic", "nominal")
    page = SystemStatus(GpuStatus(utilization=0))._repr_html_()
    silent = SystemStatus(thermal_state="nothing reported")

    assert str(quiet) == str(busy)
    assert all(figure in quiet._repr_html_() for figure in ("78 %", "30 %"))
    assert "78" not in str(quiet)
    assert ">0 %</td>" in page
    assert "Not known here: memory pressure, power, power mode, heat<" in page
    assert "On a Mac, nb.signals() reads what is not known here." in re.sub("</?code>", "", page)
    assert "On a Mac" not in quiet._repr_html_()
    assert "Power: the processor may run slower than on the power adapter. Connect it" in quiet._repr_html_()
    assert silent.findings()[-1].evidence == "nothing reported"
    assert str(silent).splitlines()[-1].endswith("  nothing reported")
    assert json.loads(json.dumps(quiet.to_dict()))["gpu"]["cores"] == 10


@pytest.mark.real_computer
def test_this_computer_is_read():
    assert nb.system_status().memory_available > 0
    with nb.simulated_mps():
        assert nb.system_status() == SystemStatus(simulated=True)


def test_every_recorded_file_has_its_source():
    named = re.findall(r"`(\w+\.txt)`", (RECORDED / "README.md").read_text("utf-8"))

    assert sorted(named) == sorted(file.name for file in RECORDED.glob("*.txt"))
