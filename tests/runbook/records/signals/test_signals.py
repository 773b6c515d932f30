"""The signals of a computer: how they are read, what they warn of, how they are shown, and the parsers of recorded outputs."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from openmed_nb._render.display import NOT_APPLICABLE, OK, WARNING
from openmed_nb.devices.machine import Machine, parse_sysctl
from openmed_nb.runbook.records import signals as parsers
from openmed_nb.runbook.records.signals import Gpu, Signals, number_in, read_signals, whole_number_in

RECORDED = Path(__file__).parents[3] / "recorded" / "signals"
MAC = Machine("Darwin", "arm64", apple_silicon=True, chip="Apple M4 Max", macos=(26, 6, 2), gpu_driver=False)
BOX = Machine("Linux", "x86_64", gpu_driver=True)

LAPTOP = {
    tuple(parsers.IOREG): "ioreg_m4",
    tuple(parsers.SYSCTL): "sysctl_pressure sysctl_swap sysctl_cores",
    tuple(parsers.MEMORY_PRESSURE): "memory_pressure",
    tuple(parsers.BATTERY): "batt_battery",
    tuple(parsers.POWER_SETTINGS): "power_lowpowermode",
    tuple(parsers.HEAT): "therm_limited",
    tuple(parsers.THERMAL_PRESSURE): "pressure_moderate",
}
GPU_BOX = {(parsers.NVIDIA_SMI[1], *parsers.QUERY): "nvidia_h200"}


def answering(files):
    """Return what runs commands on a computer that is not here, and the list of what was asked."""
    asked = []

    def run(command):
        asked.append(command)
        names = files.get(tuple(command))
        return names and "".join((RECORDED / f"{name}.txt").read_text("utf-8") for name in names.split())

    return run, asked


def test_laptop():
    """A Mac is read from its own commands, each asked once and by its full path."""
    run, asked = answering(LAPTOP)
    signals = read_signals(MAC, "mps", run)

    assert signals.gpu == Gpu("Apple M4", 10, 30, 356089856)
    assert (signals.memory_pressure, signals.memory_free, signals.swap_used) == ("warning", 70, round(6119.06 * 2**20))
    assert (signals.power_source, signals.battery, signals.power_mode) == ("battery", 78, "low")
    assert (signals.heat, signals.speed_limit) == ("limited", 62)
    assert (signals.chip, signals.performance_cores, signals.efficiency_cores) == ("Apple M4 Max", 12, 4)
    assert sorted(map(tuple, asked)) == sorted(LAPTOP)
    assert all(command[0].startswith("/usr/") for command in asked)


def test_other_computers():
    """On CUDA nvidia-smi is asked where the driver put it, and psutil for the rest; what no command tells is not known."""
    run, asked = answering(GPU_BOX)
    box = read_signals(BOX, "cuda:0", run, {})
    silent = read_signals(MAC, "mps", lambda _: None)

    assert (box.gpu.name, [command[0] for command in asked]) == ("NVIDIA H200", list(parsers.NVIDIA_SMI[:2]))
    assert box.memory_available > 0
    assert {getattr(silent, name) for name in ("memory_pressure", "power_mode", "heat", "speed_limit")} == {None}
    assert read_signals(BOX, "cpu", run, {}).gpu == silent.gpu == Gpu()
    assert len(asked) == 2


HEATS = [
    ("therm_calm", "", "nothing reported"),
    ("therm_calm", "pressure_nominal", "nominal"),
    ("therm_calm", "pressure_moderate", "moderate"),
    ("therm_limited", "pressure_nominal", "limited"),
    ("", "pressure_moderate", "moderate"),
    ("", "", None),
]


def test_heat_of_a_mac():
    """Pmset says nothing on Apple Silicon; the thermal pressure does, and the worse of the two counts."""
    for recorded_heat, pressure, heat in HEATS:
        run, _ = answering({**LAPTOP, tuple(parsers.HEAT): recorded_heat, tuple(parsers.THERMAL_PRESSURE): pressure})
        assert read_signals(MAC, "mps", run).heat == heat, (recorded_heat, pressure)


def test_simulated_mac_is_not_read():
    """Of a simulated Mac nothing is read, and nothing of this computer is shown as the Mac's."""
    simulated = Machine("Darwin", "arm64", apple_silicon=True, chip="Chip", simulated=True)
    run, asked = answering(LAPTOP)
    signals = read_signals(simulated, "mps", run)

    assert signals == Signals(simulated=True)
    assert asked == []
    assert "SIMULATED" in str(signals)
    assert "SIMULATED" in signals._repr_html_()
    assert {finding.status for finding in signals.findings()} == {NOT_APPLICABLE}


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
    ({"gpu": Gpu(slowed_by_heat=False), "heat": "nothing reported"}, "heat", OK),
    ({"gpu": Gpu(slowed_by_heat=True), "heat": "nothing reported"}, "heat", WARNING),
    ({"heat": "limited"}, "heat", WARNING),
    ({"heat": "moderate"}, "heat", WARNING),
    ({"gpu": Gpu(slowed_by_heat=False), "heat": "moderate"}, "heat", WARNING),
    ({"gpu": Gpu(slowed_by_heat=True)}, "heat", WARNING),
    ({"gpu": Gpu(slowed_by_heat=True), "heat": "nominal"}, "heat", WARNING),
    ({"gpu": Gpu(slowed_by_heat=False)}, "heat", OK),
    ({}, "heat", NOT_APPLICABLE),
]


def test_finding():
    """A state that makes a computer slow is a warning with a remedy, one that is not known is no finding."""
    for state, name, status in CONDITIONS:
        (finding,) = (one for one in Signals(**state).findings() if one.name == name)
        assert finding.status == status, (state, name)
        assert bool(finding.remedy) is (status == WARNING), (state, name)
        assert not any(character.isdigit() for character in finding.evidence), (state, name)


def test_how_signals_are_shown():
    """The text form says states in words; figures stand in the HTML only, 0 as 0, and what is not known is shown so."""
    quiet = Signals(Gpu("Apple M4", 10, 30, 2**30), "normal", 70, 2**33, 0, "battery", 78, "automatic", "nominal")
    busy = Signals(Gpu("Apple M4", 10, 99, 2**31), "normal", 20, 2**31, 2**30, "battery", 12, "automatic", "nominal")
    page, silent = Signals(Gpu(utilisation=0))._repr_html_(), Signals(heat="nothing reported")

    assert str(quiet) == str(busy)
    assert all(figure in quiet._repr_html_() for figure in ("78 %", "30 %"))
    assert "78" not in str(quiet)
    assert ">0 %</td>" in page
    assert "Not known here: memory pressure, power, power mode, heat<" in page
    assert "On a Mac, nb.signals() reads what is not known here." in re.sub("</?code>", "", page)
    assert "On a Mac" not in quiet._repr_html_()
    assert "Power: the processor may run slower than on the power adapter. Connect it" in quiet._repr_html_()
    assert silent.findings()[-1].evidence == "nothing reported"
    assert str(silent).splitlines()[-1].split("  ")[-1].strip() == "nothing reported"
    assert json.loads(json.dumps(quiet.to_dict()))["gpu"]["cores"] == 10


@pytest.mark.real_computer
def test_this_computer():
    """The signals of this computer are read without an error; under the simulation they say SIMULATED and nothing else."""
    assert nb.signals().memory_available > 0
    with nb.simulated_mps():
        assert nb.signals() == Signals(simulated=True)


def recorded(name):
    """Return a recorded output."""
    return (RECORDED / f"{name}.txt").read_text("utf-8")


SYSCTL = parse_sysctl("".join(map(recorded, ("sysctl_pressure", "sysctl_swap", "sysctl_cores"))))
PRESSURE = parsers.THERMAL_PRESSURE[-1]
M1 = Gpu(utilisation=2, memory_used=340983808)
M4 = Gpu("Apple M4", 10, 30, 356089856)
H200 = Gpu(
    "NVIDIA H200",
    None,
    0,
    0,
    143771 * 2**20,
    41,
    82.07,
    slowed_by_heat=False,
    uuid="GPU-00000000-1111-2222-3333-444444444444",
)

READ = [
    (parsers.parse_ioreg, recorded("ioreg_m1"), M1),
    (parsers.parse_ioreg, recorded("ioreg_m4"), M4),
    (parsers.parse_free_memory, recorded("memory_pressure"), 70),
    (parsers.parse_swap, SYSCTL[parsers.SWAP], round(6119.06 * 2**20)),
    (parsers.parse_swap, "vm.swapusage: total = 7168,00M  used = 6119,06M  free = 1048,94M", round(6119.06 * 2**20)),
    (parsers.parse_swap, "total = 0.00M  used = 0.00M  free = 0.00M", 0),
    (parsers.parse_swap, "total = 8.00G  used = 1.50G  free = 6.50G", 3 * 2**29),
    (parsers.parse_power_source, recorded("batt_battery"), "battery"),
    (parsers.parse_power_source, recorded("batt_charging"), "adapter"),
    (parsers.parse_power_source, recorded("batt_not_charging"), "adapter"),
    (parsers.parse_power_source, recorded("batt_desktop"), "adapter"),
    (parsers.parse_power_source, recorded("batt_none"), "adapter"),
    (parsers.parse_power_source, "Now drawing from 'UPS Power'\n", "UPS"),
    (parsers.parse_battery, recorded("batt_battery"), 78),
    (parsers.parse_battery, recorded("batt_charging"), 90),
    (parsers.parse_battery, recorded("batt_not_charging"), 7),
    (parsers.parse_battery, recorded("batt_desktop"), None),
    (parsers.parse_battery, recorded("batt_none"), None),
    (parsers.parse_battery, "Now drawing from 'UPS Power'\n -Back-UPS ES 700\t100%; charged present: true", None),
    (parsers.parse_power_mode, recorded("power_lowpowermode"), "low"),
    (parsers.parse_power_mode, recorded("power_powermode"), "automatic"),
    (parsers.parse_power_mode, recorded("power_desktop"), None),
    (parsers.parse_power_mode, " lowpowermode         0\n", "automatic"),
    (parsers.parse_power_mode, " powermode            1\n", "low"),
    (parsers.parse_power_mode, " powermode            2\n", "high"),
    (parsers.parse_heat, recorded("therm_calm"), "nothing reported"),
    (parsers.parse_heat, "CPU_Speed_Limit \t= 100\n", "nominal"),
    (parsers.parse_heat, f"{recorded('therm_calm')}CPU_Speed_Limit \t= 100\n", "nominal"),
    (parsers.parse_heat, "Note: No thermal warning level has been recorded\n", None),
    (parsers.parse_heat, recorded("therm_limited"), "limited"),
    (parsers.parse_thermal_pressure, recorded("pressure_nominal"), "nominal"),
    (parsers.parse_thermal_pressure, recorded("pressure_moderate"), "moderate"),
    *((parsers.parse_thermal_pressure, f"{PRESSURE} {level}\n", "limited") for level in (2, 3, 4)),
    (parsers.parse_thermal_pressure, f"{PRESSURE} 5\n", None),
    (parsers.parse_thermal_pressure, f"{PRESSURE} failed: 1\n", None),
    (parsers.parse_thermal_pressure, "com.apple.system.thermalpressure 1\n", None),
    (parsers.parse_speed_limit, recorded("therm_calm"), None),
    (parsers.parse_speed_limit, recorded("therm_limited"), 62),
    (parsers.parse_nvidia_smi, recorded("nvidia_h200"), (H200,)),
]

DAMAGED = [
    (
        parsers.parse_ioreg,
        recorded("ioreg_m4").replace('"Device Utilization %"=30', '"Device Utilization %"=130'),
        None,
    ),
    (parsers.parse_ioreg, recorded("ioreg_m4").replace('"Device Utilization %"=30', '"Device Utilization %"=x'), 29),
    (parsers.parse_ioreg, recorded("ioreg_m4").replace("AGXAcceleratorG16G", "IntelAccelerator"), None),
    (parsers.parse_ioreg, recorded("ioreg_m4").replace("}", ""), None),
    (parsers.parse_ioreg, '"IOReportLegend" = ({"Device Utilization %"=30})', None),
]
"""What is left of the utilisation."""

UNREADABLE = [
    *("", "not found", "Error: could not get the value", "\0\0", "-1", "[N/A]", "٣"),
    "System-wide memory free percentage: 170%",
    "used = 1.2.3M",
    "used = 99999999T",
    "Now drawing from 'Solar Power'",
    " -InternalBattery-0 (id=1)\t178%; discharging",
    " powermode            7",
    "CPU_Speed_Limit \t= 162",
]

PARSERS = [
    parsers.parse_free_memory,
    parsers.parse_swap,
    parsers.parse_power_source,
    parsers.parse_battery,
    parsers.parse_power_mode,
    parsers.parse_heat,
    parsers.parse_speed_limit,
    parsers.parse_thermal_pressure,
]


def test_every_recorded_file_has_its_source():
    """The list of sources names every recorded file, and no other."""
    named = re.findall(r"`(\w+\.txt)`", (RECORDED / "README.md").read_text("utf-8"))

    assert sorted(named) == sorted(file.name for file in RECORDED.glob("*.txt"))


def test_recorded_output():
    """A real output is read as what it says."""
    for parse, output, expected in READ:
        assert parse(output) == expected, (parse, output)


def test_damaged_figure_is_none():
    """A figure that cannot be is not known, and is never taken from another accelerator."""
    for parse, output, expected in DAMAGED:
        assert parse(output).utilisation == expected, output


def test_unreadable_output_is_none():
    """What cannot be read, or cannot be, is None, never 0, and a GPU that cannot be read has no figures."""
    for output in (*UNREADABLE, None):
        assert [parse(output) for parse in PARSERS] == [None] * len(PARSERS), output
        assert parsers.parse_ioreg(output) == Gpu(), output
        assert parsers.parse_nvidia_smi(output) == (), output


@given(
    st.text(max_size=300) | st.from_regex(r"(used|CPU_Speed_Limit|powermode)\s*=?\s*[\d.,]+[KMGT%]?", fullmatch=False)
)
def test_any_text_gives_a_value_or_none(text):
    """Whatever a command prints, a parser returns a value or None."""
    for parse in (*PARSERS, parsers.parse_ioreg, parsers.parse_nvidia_smi):
        parse(text)
        assert parse(None) in (None, Gpu(), ())


@given(st.lists(st.text(alphabet="0123456789.[]N/A ", max_size=20), min_size=9, max_size=9))
def test_any_row_of_nvidia_smi(cells):
    """Whatever stands in the cells of a row, the figures are in their ranges or not known."""
    for gpu in parsers.parse_nvidia_smi(",".join(cells)):
        assert gpu.utilisation is None or 0 <= gpu.utilisation <= 100
        assert gpu.memory_total is None or gpu.memory_total > 0


def test_what_a_gpu_does_not_support():
    """A field that a GPU does not support is not known, and the others are; driver or hardware may say that heat slows it."""
    for word in ("[N/A]", "[Not Supported]", "[Unknown Error]", ""):
        row = ", ".join(("GPU-1", "NVIDIA T4", *[word] * 7))
        assert parsers.parse_nvidia_smi(row) == (Gpu("NVIDIA T4", uuid="GPU-1"),), word
    for heat in ("Active, [N/A]", "Not Active, Active"):
        assert parsers.parse_nvidia_smi(f"GPU-1, T4, 1, 1, 1, 1, 1, {heat}")[0].slowed_by_heat is True


def test_cores():
    """Cores are counted by their kind, and a kind that a chip has not is not known."""
    cores = {parsers.PERFORMANCE_CORES: 12, parsers.EFFICIENCY_CORES: 4, "hw.perflevel2.physicalcpu": None}

    assert {name: parsers.parse_cores(SYSCTL, name) for name in cores} == cores


T4S = tuple(Gpu("Tesla T4", uuid=f"GPU-{letter * 4}") for letter in "abc")
MIXED = (Gpu("Tesla T4", uuid="GPU-aaaa"), Gpu("NVIDIA A100", uuid="GPU-bbbb"))

CHOICES = [
    (T4S, "cuda", {}, None, 0),
    (T4S, "cuda:2", {}, None, 2),
    (T4S, "cuda:3", {}, None, None),
    (T4S, "cuda:0", {"CUDA_VISIBLE_DEVICES": "2,0"}, None, 2),
    (T4S, "cuda:1", {"CUDA_VISIBLE_DEVICES": "2, 0"}, None, 0),
    (T4S, "cuda:2", {"CUDA_VISIBLE_DEVICES": "2,0"}, None, None),
    (T4S, "cuda:0", {"CUDA_VISIBLE_DEVICES": "GPU-bb"}, None, 1),
    (T4S, "cuda:0", {"CUDA_VISIBLE_DEVICES": "MIG-bb"}, None, None),
    (T4S, "cuda:0", {"CUDA_VISIBLE_DEVICES": "0,x"}, None, None),
    (T4S, "cuda:0", {"CUDA_VISIBLE_DEVICES": ""}, None, None),
    (T4S, "cuda:0", {"CUDA_VISIBLE_DEVICES": "9"}, "cccc", 2),
    (T4S, "cuda:0", {}, "dddd", None),
    (MIXED, "cuda:0", {}, None, None),
    (MIXED, "cuda:1", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, None, 1),
    (MIXED, "cuda:0", {}, "bbbb", 1),
    ((), "cuda:0", {}, None, None),
]
"""The GPUs, the device, the environment, what torch says, and which GPU is meant."""


def test_which_gpu_is_meant():
    """The GPU that torch calls by a name is found by its UUID, or by its place where the two orders are the same."""
    for gpus, device, environ, uuid, place in CHOICES:
        chosen = parsers.chosen_gpu(gpus, device, environ, uuid)
        assert chosen is (None if place is None else gpus[place]), (device, environ, uuid)


def test_number():
    """A number is read with a point or a comma, and nothing else is a number."""
    numbers = {"1": 1, "1,5": 1.5, " 2.50 ": 2.5, "-1": None, "1e3": None, "9" * 5000: None, None: None}
    for text, number in numbers.items():
        assert number_in(text) == number, text
        assert whole_number_in(text) == (number if number == 1 else None), text
