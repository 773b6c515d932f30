"""Readers of device utilization, with recorded outputs of commands."""

from pathlib import Path

import pytest

from openmed_nb.devices.machine import MachineInfo
from openmed_nb.runbook.records.signals import busy_fraction, make_utilization_reader

RECORDED = Path(__file__).parents[3] / "recorded" / "signals"
MAC = MachineInfo("Darwin", "arm64", apple_silicon=True)
BOX = MachineInfo("Linux", "x86_64", gpu_driver=True)


def make_runner(file):
    """Return a function that replaces ``run_command`` and returns a recorded output."""
    return lambda _command: (RECORDED / file).read_text("utf-8")


@pytest.mark.real_computer
def test_utilization_reader_runs_the_command_of_its_device():
    """Without a usable output there is no reader."""
    cases = [
        ("mps", MAC, "ioreg_m4.txt", 0.3),
        ("mps", MAC, "ioreg_m1.txt", 0.02),
        ("cuda", BOX, "nvidia_h200.txt", 0.0),
    ]
    for device, machine, file, utilization in cases:
        read = make_utilization_reader(device, machine, make_runner(file), {})
        assert read is not None, file
        assert read() == pytest.approx(utilization), file
    for device in ("mps", "cuda", "cuda:1", "lazy:0"):
        assert make_utilization_reader(device, MAC, lambda _command: None, {}) is None, device
        assert make_utilization_reader(device, BOX, lambda _command: "no such command", {}) is None, device


def test_utilization_reader_runs_no_command_on_a_simulated_machine():
    commands: list[object] = []
    for device in ("cpu", "mps", "cuda"):
        assert (
            make_utilization_reader(device, MachineInfo("Darwin", "arm64", simulated=True), commands.append, {}) is None
        )
    assert commands == []


@pytest.mark.real_computer
def test_cpu_reader_returns_a_fraction_after_its_counters_change():
    read = make_utilization_reader("cpu", BOX)
    while (utilization := read()) is None:
        pass

    assert 0 <= utilization <= 1


def test_busy_fraction_excludes_idle_time_and_counts_guests_once():
    cases = [
        ({"user": 1, "idle": 1}, {"user": 4, "idle": 2}, 0.75),
        ({"user": 1, "idle": 1, "iowait": 0}, {"user": 2, "idle": 2, "iowait": 2}, 0.25),
        ({"user": 1, "idle": 1, "guest": 0}, {"user": 2, "idle": 2, "guest": 1}, 0.5),
        ({"user": 1, "idle": 5}, {"user": 2, "idle": 4}, 1.0),
        ({"user": 1, "idle": 1}, {"user": 1, "idle": 1}, None),
        ({}, {"user": 1, "idle": 1}, None),
        ({}, {}, None),
    ]
    for before, after, fraction in cases:
        assert busy_fraction(before, after) == fraction, (before, after)
