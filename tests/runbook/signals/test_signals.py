"""The signals of a computer: how they are read, what they warn of, and how they are shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import openmed_nb as nb
from openmed_nb.devices.machine import Machine
from openmed_nb.display import NOT_APPLICABLE, OK, WARNING
from openmed_nb.runbook import signals as parsers
from openmed_nb.runbook.signals import Gpu, Signals, read_signals

RECORDED = Path(__file__).parents[2] / "recorded" / "signals"
MAC = Machine("Darwin", "arm64", apple_silicon=True, chip="Apple M4 Max", macos=(26, 6, 2), gpu_driver=False)
BOX = Machine("Linux", "x86_64", gpu_driver=True)

LAPTOP = {
    tuple(parsers.IOREG): "ioreg_m4",
    tuple(parsers.SYSCTL): "sysctl_pressure sysctl_swap sysctl_cores",
    tuple(parsers.MEMORY_PRESSURE): "memory_pressure",
    tuple(parsers.BATTERY): "batt_battery",
    tuple(parsers.POWER_SETTINGS): "power_lowpowermode",
    tuple(parsers.HEAT): "therm_limited",
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
    assert "<td>0 %</td>" in page
    assert page.count("<td>not known</td>") == 4 + 9 - 1  # One of thirteen is known.
    assert silent.findings()[-1].evidence == "nothing reported"
    assert str(silent).splitlines()[-1].split("  ")[-1].strip() == "nothing reported"
    assert json.loads(json.dumps(quiet.to_dict()))["gpu"]["cores"] == 10


@pytest.mark.real_computer
def test_this_computer():
    """The signals of this computer are read without an error; under the simulation they say SIMULATED and nothing else."""
    assert nb.signals().memory_available > 0
    with nb.simulated_mps():
        assert nb.signals() == Signals(simulated=True)
