"""Facts of the machine, names of devices, and memory footprint."""

import ctypes
import math
import os
import platform
import struct
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.devices.backend import TorchInfo
from openmed_nb.devices.machine import (
    Footprint,
    MachineInfo,
    apple_chip_generation,
    format_device,
    is_marked_simulated,
    parse_memory,
    processor_name,
    read_footprint,
    read_machine,
    run_command,
)
from openmed_nb.devices.registry import get_device
from openmed_nb.errors import ConfigurationError
from openmed_nb.simulation.device import simulated_device

RECORDED = Path(__file__).parents[1] / "recorded"


def mac(*facts):
    """Return the facts of a Mac with the given output of sysctl."""
    return MachineInfo("Darwin", *facts, gpu_driver=False)


GIB = 2**30
INTEL = "Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz"
# The recorded answer of sysctl and the architecture of this Python -> the Mac.
MACS = {
    ("m4_max", "arm64"): mac("arm64", True, False, "Apple M4 Max", (26, 6, 2), 64 * GIB, 16),
    ("rosetta", "x86_64"): mac("x86_64", True, True, "Apple M2 Pro", (14, 5), 16 * GIB, 10),
    ("rosetta_compatible_version", "x86_64"): mac("x86_64", True, True, "VirtualApple @ 2.50GHz", None, 8 * GIB, 8),
    ("intel", "x86_64"): mac("x86_64", False, False, INTEL, (12, 6), 16 * GIB, 6),
    ("old_macos", "arm64"): mac("arm64", True, False, "Apple M1", (13, 6, 1), 8 * GIB, 8),
    ("unreadable", "arm64"): mac("arm64", True),
    ("unreadable", "x86_64"): mac("x86_64"),
}


@pytest.mark.parametrize(("recorded", "architecture"), MACS, ids=lambda value: value)
def test_read_machine_parses_sysctl(recorded, architecture):
    text = (RECORDED / f"sysctl_{recorded}.txt").read_text("utf-8")

    assert read_machine("Darwin", architecture, run=lambda _: text) == MACS[recorded, architecture]


def test_read_machine_without_sysctl():
    calls: list[list[str]] = []

    assert read_machine("Darwin", "arm64", run=calls.append) == MACS["unreadable", "arm64"]
    (command,) = calls
    assert command[:2] == ["/usr/sbin/sysctl", "-i"]
    assert set(command[2:]) == {
        "sysctl.proc_translated",
        "hw.optional.arm64",
        "machdep.cpu.brand_string",
        "kern.osproductversion",
        "hw.memsize",
        "hw.physicalcpu",
    }


def test_native_apple_silicon_requires_arm_python():
    native = {recorded for (recorded, _), machine in MACS.items() if machine.native_apple_silicon}

    assert native == {"m4_max", "old_macos", "unreadable"}
    assert not MACS["unreadable", "x86_64"].native_apple_silicon


def test_gpu_driver_is_detected():
    for file in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd"):
        assert read_machine("Linux", "x86_64", exists=lambda path, file=file: path == file).gpu_driver is True
    assert read_machine("Windows", "AMD64", exists=lambda path: path.endswith("nvcuda.dll")).gpu_driver is True
    for system in ("Linux", "Windows"):
        machine = read_machine(system, "x86_64", run=pytest.fail, exists=lambda _: False, cpuinfo=Path(os.devnull))
        assert machine == MachineInfo(system, "x86_64", gpu_driver=False)


CPUINFO = {
    "CPU implementer\t: 0x61\nCPU architecture: 8\nCPU part\t: 0x000\n": True,
    "CPU implementer : 0x61": True,
    "vendor_id\t: VirtualApple\nmodel name\t: VirtualApple @ 2.50GHz\n": True,
    "CPU implementer\t: 0x00\nCPU part\t: 0x000\n": False,
    "CPU implementer\t: 0x41\nCPU part\t: 0xd0c\n": False,
    "CPU implementer\t: 0x610\n": False,
    "vendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R)\n": False,
    "": False,
}
"""Texts of Linux for the first processor, and whether it is an Apple chip. The fourth is from docker/for-mac#6512 (2022)."""


def test_apple_chip_on_linux_is_detected(tmp_path):
    file = tmp_path / "cpuinfo"
    for text, apple in CPUINFO.items():
        file.write_text("processor\t: 0\nBogoMIPS\t: 48.00\n" + text)
        machine = read_machine("Linux", "aarch64", exists=lambda _: False, cpuinfo=file)
        assert machine == MachineInfo("Linux", "aarch64", apple_silicon=apple, gpu_driver=False), text
        assert not machine.native_apple_silicon
    assert not read_machine("Linux", "aarch64", cpuinfo=tmp_path / "none").apple_silicon


@given(st.text(max_size=200))
def test_read_machine_accepts_any_sysctl_output(text):
    assert read_machine("Darwin", "arm64", run=lambda _: text).system == "Darwin"


def test_read_machine_parses_version_and_counts():
    versions = {"26.6.2": (26, 6, 2), "14": (14,), "10.15.7": (10, 15, 7), "15.0-beta": (15, 0)}
    for text, version in {**versions, "10.16": None, "10.16.1": None, "": None, "beta": None}.items():
        mac = read_machine("Darwin", "arm64", run=lambda _, text=text: f"kern.osproductversion: {text}")
        assert mac.macos_version == version
    for text, number in {"8": 8, "": None, "-1": None, "8.5": None, "many": None}.items():
        assert read_machine("Darwin", "arm64", run=lambda _, text=text: f"hw.physicalcpu: {text}").cores == number


def test_run_command_returns_output(monkeypatch):
    monkeypatch.setenv("TOLD", "é\udcff")
    assert run_command([sys.executable, "-c", "import os; print(os.environ['LC_ALL'])"]) == "C\n"
    assert run_command([sys.executable, "-c", "import os; print(os.environ['TOLD'])"]) == "é\N{REPLACEMENT CHARACTER}\n"
    assert [run_command([path]) for path in ("/nowhere/sysctl", "/")] == [None, None]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no process groups")
def test_run_command_ends_a_hanging_command_and_its_children(tmp_path):
    """The child keeps the pipe of the output open after its parent was killed."""
    script = tmp_path / "hang"
    pids = tmp_path / "pids"
    script.write_text(f"#!/bin/sh\nsleep 600 &\necho $! >{pids}\nwait\n")
    script.chmod(0o755)

    assert run_command([str(script)], seconds=1) is None
    _ended, running = psutil.wait_procs(find_processes(int(pids.read_text())), timeout=10)
    assert running == []


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal")
@pytest.mark.real_computer
def test_interrupt_ends_a_running_command(tmp_path):
    """The command does not receive the interrupt, because it has its own session."""
    pid_file = tmp_path / "pid"
    script = tmp_path / "slow"
    script.write_text(f"#!/bin/sh\necho $$ >{pid_file}\nsleep 1\nkill -INT {os.getpid()}\nexec sleep 600\n")
    script.chmod(0o755)

    with pytest.raises(KeyboardInterrupt):
        run_command([str(script)], seconds=60)
    _ended, running = psutil.wait_procs(find_processes(int(pid_file.read_text())), timeout=10)
    assert running == []


def find_processes(pid):
    """Return the process with an id, or nothing if it ended."""
    try:
        process = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return []
    return [] if process.status() == psutil.STATUS_ZOMBIE else [process]


@pytest.mark.parametrize(
    ("size", "number"),
    [
        ("8 GiB", 8 * GIB),
        ("8GB", 8 * GIB),
        (" 1.5 gib ", 3 * GIB // 2),
        ("2 TB", 2048 * GIB),
        ("512 MiB", GIB // 2),
        ("1024 KB", 1 << 20),
        (1 << 20, 1 << 20),
        (2.5e9, 2_500_000_000),
    ],
)
def test_parse_memory(size, number):
    assert parse_memory(size) == number


@pytest.mark.parametrize(
    "size",
    ["8", "GiB", "-8 GiB", "8 GiBs", "1e3 GiB", "8 PB", 0, 8, (1 << 20) - 1, True, math.inf, math.nan, None, "", []],
)
def test_parse_memory_rejects_other_sizes(size):
    with pytest.raises(ConfigurationError, match="is not a valid memory size") as caught:
        parse_memory(size)
    assert "8 GiB" in caught.value.remedy


@pytest.mark.real_computer  # It begins its own simulation.
def test_format_device_marks_simulated_mps():
    names = ("mps", "mps:0", "cuda", "cpu:0")
    assert [format_device(name) for name in names] == ["mps", "mps", "cuda:0", "cpu"]
    with simulated_device():
        shown = [format_device(name) for name in names]
    assert shown == ["mps (SIMULATED)", "mps (SIMULATED)", "cuda:0", "cpu"]
    assert [is_marked_simulated(name) for name in shown] == [True, True, False, False]


def test_read_machine_matches_platform():
    machine = read_machine()

    assert (machine.system, machine.architecture) == (platform.system(), platform.machine())
    assert machine.gpu_driver is not None


def test_apple_chip_generation():
    names = {"M1": 1, "M1 Ultra": 1, "M1 (Virtual)": 1, "M2 Pro": 2, "M3 Max": 3, "M10": 10, "M22": 22, "A18 Pro": 4}
    names |= dict.fromkeys(("A18", "A12Z Bionic", "processor", "M", "M2X"))
    others = dict.fromkeys(("VirtualApple @ 2.50GHz", "Intel(R) Core(TM) M3-7Y32", None))
    for chip, generation in {**{f"Apple {name}": number for name, number in names.items()}, **others}.items():
        assert apple_chip_generation(MachineInfo("Darwin", "arm64", chip=chip)) == generation


LINUX, MAC = MachineInfo("Linux", "x86_64"), MachineInfo("Darwin", "arm64", chip="Apple M2 Pro")
SIMULATED = MachineInfo("Darwin", "arm64", chip="Apple M2", simulated=True)
TWO_GPUS, UNKNOWN = TorchInfo("2.13.0", cuda_names=("NVIDIA A100", "NVIDIA T4")), TorchInfo("2.13.0")
HERE = processor_name()


def test_device_own_name():
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
        assert get_device(device).hardware_name(machine, torch) == name


def test_processor_name_on_linux(tmp_path):
    here, file = {platform.processor(), platform.machine()}, tmp_path / "cpuinfo"
    two = b"processor\t: 0\nvendor_id\t: AMD\nmodel name\t: AMD  EPYC \t9655 \nmodel name\t: another\n"
    texts = {
        two: {"AMD EPYC 9655"},
        b"model name\t: Fast\xae 9\n": {"Fast\N{REPLACEMENT CHARACTER} 9"},
        **dict.fromkeys((b"", b"processor\t: 0\n", b"model name\t:\nflags\t: fpu\n"), here),
    }
    for text, names in texts.items():
        file.write_bytes(text)
        assert processor_name(file) in names

    assert processor_name(tmp_path / "none") in here


class Library:
    """A stub of the C library that fills the usage of a process, or returns an error."""

    def __init__(self, footprint, peak=0, fails=False):
        # rusage_info_v4 of xnu's bsd/sys/resource.h: a uuid and 35 numbers of 64 bits, ri_phys_footprint the eighth and
        # ri_lifetime_max_phys_footprint the 29th.
        self.numbers = [*range(101, 108), footprint, *range(109, 129), peak, *range(130, 136)]
        self.fail_if, self.calls = fails, []

    def proc_pid_rusage(self, process, flavor, buffer):
        """Fill the buffer."""
        self.calls.append((process, flavor, ctypes.sizeof(buffer)))
        ctypes.memmove(buffer, struct.pack("<16s35Q", b"\xff" * 16, *self.numbers), ctypes.sizeof(buffer))
        return -self.fail_if


def test_read_footprint_of_this_process():
    library = Library(6 * GIB, 7 * GIB)

    assert read_footprint(library) == Footprint(6 * GIB, 7 * GIB)
    assert library.calls == [(os.getpid(), 4, 296)]


@pytest.mark.parametrize("library", [Library(1, fails=True), Library(0)])
def test_read_footprint_unavailable(library):
    assert read_footprint(library) is None
    assert (read_footprint() is None) is (sys.platform != "darwin")
