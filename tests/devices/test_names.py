"""What a device calls itself: a GPU as torch knows it, a Mac by its chip, and any other CPU by its processor."""

from __future__ import annotations

import platform

from openmed_nb.devices.backend import TorchFacts
from openmed_nb.devices.machine import CPU_FILE, Machine, own_name, parse_cpuinfo, processor_name

LINUX, MAC = Machine("Linux", "x86_64"), Machine("Darwin", "arm64", chip="Apple M2 Pro")
SIMULATED = Machine("Darwin", "arm64", chip="Apple M2", simulated=True)
TWO_GPUS, UNKNOWN = TorchFacts("2.13.0", cuda_names=("NVIDIA A100", "NVIDIA T4")), TorchFacts("2.13.0")
HERE = processor_name()


def test_name_of_a_device():
    """A GPU has the name that torch knows or its number, a Mac's devices that of the chip, and other CPUs the processor's."""
    for device, machine, torch, name in (
        ("cuda", LINUX, TWO_GPUS, "NVIDIA A100"),
        ("cuda:0", LINUX, TWO_GPUS, "NVIDIA A100"),
        ("cuda:1", LINUX, TWO_GPUS, "NVIDIA T4"),
        ("cuda:2", LINUX, TWO_GPUS, "GPU 2"),
        ("cuda", LINUX, UNKNOWN, "GPU 0"),
        ("mps", MAC, UNKNOWN, "Apple M2 Pro"),
        ("cpu", MAC, UNKNOWN, "Apple M2 Pro"),
        ("mps", SIMULATED, UNKNOWN, "Apple M2"),
        ("cpu", SIMULATED, UNKNOWN, HERE),
        ("cpu", LINUX, UNKNOWN, HERE),
    ):
        assert own_name(device, machine, torch) == name


def test_name_of_a_processor():
    """Linux tells the name of the first processor, with single spaces; without one it is the architecture at least."""
    told = "processor\t: 0\nvendor_id\t: AMD\nmodel name\t: AMD  EPYC \t9655 \nmodel name\t: another\n"

    assert parse_cpuinfo(told) == "AMD EPYC 9655"
    assert [parse_cpuinfo(text) for text in ("", "processor\t: 0\n", "model name\t:\nflags\t: fpu\n")] == ["", "", ""]
    there = parse_cpuinfo(CPU_FILE.read_text("utf-8", "replace")) if CPU_FILE.exists() else ""
    assert (there or platform.processor() or platform.machine()) == HERE


def test_name_in_another_encoding(tmp_path):
    """A name with a byte that is not UTF-8 is shown with a mark in its place."""
    (tmp_path / "cpuinfo").write_bytes(b"model name\t: Fast\xae 9\n")

    assert processor_name(tmp_path / "cpuinfo") == "Fast\N{REPLACEMENT CHARACTER} 9"
    assert processor_name(tmp_path / "none") in {platform.processor(), platform.machine()}
