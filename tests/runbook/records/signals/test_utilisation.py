"""How busy a device is: read from recorded outputs, sampled in a thread that always ends, and never guessed."""

from pathlib import Path

import pytest

from openmed_nb.devices.machine import MachineInfo
from openmed_nb.runbook.records.signals import busy_fraction, make_utilization_reader

RECORDED = Path(__file__).parents[3] / "recorded" / "signals"
MAC = MachineInfo("Darwin", "arm64", apple_silicon=True)
BOX = MachineInfo("Linux", "x86_64", gpu_driver=True)


def printing(file):
    """Return what stands in for running any command: the recorded output of one."""
    return lambda _command: (RECORDED / file).read_text("utf-8")


@pytest.mark.real_computer
def test_reader_asks_the_command_of_its_device():
    """The share of a GPU is what the command of its kind says; if that is not there, or says something else, there is no reader."""
    cases = [
        ("mps", MAC, "ioreg_m4.txt", 0.3),
        ("mps", MAC, "ioreg_m1.txt", 0.02),
        ("cuda", BOX, "nvidia_h200.txt", 0.0),
    ]
    for device, machine, file, share in cases:
        read = make_utilization_reader(device, machine, printing(file), {})
        assert read is not None, file
        assert read() == pytest.approx(share), file
    for device in ("mps", "cuda", "cuda:1", "lazy:0"):
        assert make_utilization_reader(device, MAC, lambda _command: None, {}) is None, device
        assert make_utilization_reader(device, BOX, lambda _command: "no such thing", {}) is None, device


def test_nothing_is_read_under_a_simulation():
    """Of a simulated computer no command is asked, not even about the CPU."""
    asked: list[object] = []
    for device in ("cpu", "mps", "cuda"):
        assert make_utilization_reader(device, MachineInfo("Darwin", "arm64", simulated=True), asked.append, {}) is None
    assert asked == []


@pytest.mark.real_computer
def test_the_processor_is_read_from_its_counters():
    """The share of the processor is known once its counters have moved, and is a share."""
    read = make_utilization_reader("cpu", BOX)
    answers = []
    while not answers:
        answers += [answer for answer in [read()] if answer is not None]

    assert 0 <= answers[0] <= 1


def test_share_of_the_processor():
    """Idle time and waiting for the disk are no work, what a guest ran counts once, and no time is no share."""
    cases = [
        ({"user": 1, "idle": 1}, {"user": 4, "idle": 2}, 0.75),
        ({"user": 1, "idle": 1, "iowait": 0}, {"user": 2, "idle": 2, "iowait": 2}, 0.25),
        ({"user": 1, "idle": 1, "guest": 0}, {"user": 2, "idle": 2, "guest": 1}, 0.5),
        ({"user": 1, "idle": 5}, {"user": 2, "idle": 4}, 1.0),
        ({"user": 1, "idle": 1}, {"user": 1, "idle": 1}, None),
        ({}, {"user": 1, "idle": 1}, None),
        ({}, {}, None),
    ]
    for before, after, share in cases:
        assert busy_fraction(before, after) == share, (before, after)
