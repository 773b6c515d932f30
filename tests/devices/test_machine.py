"""The facts of a computer from what its system answers, the footprint of a process, and the names of devices."""

import os
import platform
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.devices.backend import TorchInfo
from openmed_nb.devices.machine import (
    SYSCTL_KEYS,
    Footprint,
    MachineInfo,
    apple_chip_generation,
    parse_sysctl,
    processor_name,
    read_footprint,
    read_machine,
    run_command,
)
from openmed_nb.devices.registry import parse_device_argument

RECORDED = Path(__file__).parents[1] / "recorded"


def mac(*facts):
    """Return a Mac, which is never asked for a driver."""
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
def test_mac(recorded, architecture):
    """A Mac is read from one answer of sysctl, and what it does not say is unknown."""
    text = (RECORDED / f"sysctl_{recorded}.txt").read_text("utf-8")

    assert read_machine("Darwin", architecture, run=lambda _: text) == MACS[recorded, architecture]


def test_mac_whose_sysctl_cannot_be_run():
    """A Mac is asked once, by the full path of sysctl, and with -i, which passes over what the system does not know.

    Where that cannot be run it is still known by its system and the architecture of this Python.
    """
    asked: list[list[str]] = []

    assert read_machine("Darwin", "arm64", run=asked.append) == MACS["unreadable", "arm64"]
    assert asked == [["/usr/sbin/sysctl", "-i", *SYSCTL_KEYS]]


def test_native_apple_silicon():
    """Only an Apple chip with a Python built for it counts as native."""
    native = {recorded for (recorded, _), machine in MACS.items() if machine.native_apple_silicon}

    assert native == {"m4_max", "old_macos", "unreadable"}
    assert not MACS["unreadable", "x86_64"].native_apple_silicon


def test_gpu_driver():
    """A file of an NVIDIA, WSL or AMD driver on Linux, or NVIDIA's library on Windows, tells of a driver; sysctl is not asked."""
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
"""What Linux says of its first processor, and whether it is one of Apple's: docker/for-mac#6512 has the fourth, of 2022."""


def test_linux_on_an_apple_chip(tmp_path):
    """Linux in a container on a Mac is known by its processor; it is no native Mac, and nothing else is changed."""
    file = tmp_path / "cpuinfo"
    for text, apple in CPUINFO.items():
        file.write_text("processor\t: 0\nBogoMIPS\t: 48.00\n" + text)
        machine = read_machine("Linux", "aarch64", exists=lambda _: False, cpuinfo=file)
        assert machine == MachineInfo("Linux", "aarch64", apple_silicon=apple, gpu_driver=False), text
        assert not machine.native_apple_silicon
    assert not read_machine("Linux", "aarch64", cpuinfo=tmp_path / "none").apple_silicon


@given(st.text(max_size=200))
def test_any_answer_of_sysctl(text):
    """Whatever sysctl prints, a Mac comes out, and a value is never empty."""
    assert read_machine("Darwin", "arm64", run=lambda _: text).system == "Darwin"
    assert all(parse_sysctl(text).values())


def test_version_and_counts():
    """A version is read as numbers, but for the 10.16 that old programs are told; a count is a number or unknown."""
    versions = {"26.6.2": (26, 6, 2), "14": (14,), "10.15.7": (10, 15, 7), "15.0-beta": (15, 0)}
    for text, version in {**versions, "10.16": None, "10.16.1": None, "": None, "beta": None}.items():
        mac = read_machine("Darwin", "arm64", run=lambda _, text=text: f"kern.osproductversion: {text}")
        assert mac.macos == version
    for text, number in {"8": 8, "": None, "-1": None, "8.5": None, "many": None}.items():
        assert read_machine("Darwin", "arm64", run=lambda _, text=text: f"hw.physicalcpu: {text}").cores == number


def test_command():
    """A command's output comes back, in the plain C locale; one that is missing or cannot be run gives nothing, and no error."""
    assert run_command([sys.executable, "-c", "import os; print(os.environ['LC_ALL'])"]) == "C\n"
    assert [run_command([path]) for path in ("/nowhere/sysctl", "/")] == [None, None]


def test_this_computer():
    """This computer is read as what Python's own platform module says."""
    machine = read_machine()

    assert (machine.system, machine.architecture) == (platform.system(), platform.machine())
    assert machine.gpu_driver is not None


def test_generation_of_a_chip():
    """A chip's name tells its generation where it is one of Apple's M chips, or the one of another kind in a Mac."""
    names = {"M1": 1, "M1 Ultra": 1, "M1 (Virtual)": 1, "M2 Pro": 2, "M3 Max": 3, "M10": 10, "M22": 22, "A18 Pro": 4}
    names |= dict.fromkeys(("A18", "A12Z Bionic", "processor", "M", "M2X"))
    others = dict.fromkeys(("VirtualApple @ 2.50GHz", "Intel(R) Core(TM) M3-7Y32", None))
    for chip, generation in {**{f"Apple {name}": number for name, number in names.items()}, **others}.items():
        assert apple_chip_generation(MachineInfo("Darwin", "arm64", chip=chip)) == generation


LINUX, MAC = MachineInfo("Linux", "x86_64"), MachineInfo("Darwin", "arm64", chip="Apple M2 Pro")
SIMULATED = MachineInfo("Darwin", "arm64", chip="Apple M2", simulated=True)
TWO_GPUS, UNKNOWN = TorchInfo("2.13.0", cuda_names=("NVIDIA A100", "NVIDIA T4")), TorchInfo("2.13.0")
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
        assert parse_device_argument(device).own_name(machine, torch) == name


def test_name_of_a_processor(tmp_path):
    """Linux tells the name of the first processor, with single spaces; without one it is the architecture at least."""
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
    """A C library that fills in the usage of a process as the kernel does, or refuses to."""

    def __init__(self, footprint, peak=0, fails=False):
        # rusage_info_v4 of xnu's bsd/sys/resource.h: a uuid and 35 numbers of 64 bits, ri_phys_footprint the eighth and
        # ri_lifetime_max_phys_footprint the 29th.
        self.numbers = [*range(101, 108), footprint, *range(109, 129), peak, *range(130, 136)]
        self.fail_if, self.asked = fails, []

    def proc_pid_rusage(self, process, flavor, buffer):
        """Fill the buffer."""
        self.asked.append((process, flavor, len(buffer)))
        buffer[:] = struct.pack("<16s35Q", b"\xff" * 16, *self.numbers)
        return -self.fail_if


def test_footprint_of_this_process():
    """The kernel is asked for this process, in the fourth form, with as much room as that form needs."""
    library = Library(6 * GIB, 7 * GIB)

    assert read_footprint(library) == Footprint(6 * GIB, 7 * GIB)
    assert library.asked == [(os.getpid(), 4, 296)]


@pytest.mark.parametrize("library", [Library(1, fails=True), Library(0)])
def test_no_footprint(library):
    """Where the kernel refuses, and where it says 0, the footprint is not known; only macOS has one."""
    assert read_footprint(library) is None
    assert (read_footprint() is None) is (sys.platform != "darwin")
