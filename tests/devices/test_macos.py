"""What macOS tells through its C library: bytes as its headers lay them out, and a library that answers as the real one does."""

import ctypes

import pytest

from openmed_nb.devices.macos import Footprint, footprint_in, read_footprint

GIB = 2**30

# The fields of rusage_info_v4 after its uuid, each of 64 bits, in the order of xnu's bsd/sys/resource.h.
FIELDS = (
    *("user_time", "system_time", "pkg_idle_wkups", "interrupt_wkups", "pageins", "wired_size", "resident_size"),
    *("phys_footprint", "proc_start_abstime", "proc_exit_abstime", "child_user_time", "child_system_time"),
    *("child_pkg_idle_wkups", "child_interrupt_wkups", "child_pageins", "child_elapsed_abstime", "diskio_bytesread"),
    *("diskio_byteswritten", "cpu_time_qos_default", "cpu_time_qos_maintenance", "cpu_time_qos_background"),
    *("cpu_time_qos_utility", "cpu_time_qos_legacy", "cpu_time_qos_user_initiated", "cpu_time_qos_user_interactive"),
    *("billed_system_time", "serviced_system_time", "logical_writes", "lifetime_max_phys_footprint", "instructions"),
    *("cycles", "billed_energy", "serviced_energy", "interval_max_phys_footprint", "runnable_time"),
)


class Usage(ctypes.LittleEndianStructure):
    """What ``proc_pid_rusage`` fills in."""

    _fields_ = (("uuid", ctypes.c_uint8 * 16), *((name, ctypes.c_uint64) for name in FIELDS))


def usage(**sizes):
    """Return the bytes of a process; every field that is not named has a number of its own."""
    others = {name: number for number, name in enumerate(FIELDS, 1)}
    return bytes(Usage((ctypes.c_uint8 * 16)(*b"\xff" * 16), **{**others, **sizes}))


class Library:
    """A C library in which one process has a footprint, or in which every call fails."""

    def __init__(self, fails=False, **sizes):
        self.fails, self.sizes, self.asked = fails, sizes, []

    def proc_pid_rusage(self, process, flavor, buffer):
        """Fill the buffer as the kernel does."""
        self.asked.append((process, flavor, len(buffer)))
        if not self.fails:
            buffer[:] = usage(**self.sizes)
        return -self.fails


def test_footprint_of_a_process():
    """The footprint counts compressed pages, which are neither resident nor unique; it and its peak are told from 33 other numbers."""
    compressed = usage(resident_size=GIB, phys_footprint=6 * GIB, lifetime_max_phys_footprint=7 * GIB)

    assert footprint_in(compressed) == Footprint(6 * GIB, 7 * GIB)
    assert len(compressed) == 296


def test_this_process_is_asked_for():
    """The kernel is asked for this process, in the fourth form, with as much room as that form needs."""
    library = Library(phys_footprint=5 * GIB, lifetime_max_phys_footprint=5 * GIB)

    assert read_footprint(library, 1234) == Footprint(5 * GIB, 5 * GIB)
    assert library.asked == [(1234, 4, 296)]


@pytest.mark.parametrize("library", [None, Library(fails=True), Library(phys_footprint=0)])
def test_no_footprint(library):
    """Where there is no such library, where the kernel refuses, and where it says 0, the footprint is not known."""
    assert read_footprint(library) is None
