"""What macOS tells through its C library alone: the footprint of a process. No rights are needed, and no other system has an answer."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from dataclasses import dataclass
from typing import Any


def system_library() -> Any:
    """Return the C library of macOS; ``None`` on any other system."""
    return ctypes.CDLL("/usr/lib/libSystem.B.dylib") if sys.platform == "darwin" else None


@dataclass(frozen=True)
class Footprint:
    """The memory by which macOS and its Activity Monitor judge a process, in bytes: compressed pages and memory of Metal count."""

    now: int
    peak: int  # The largest in the life of the process.


# Struct rusage_info_v4 of xnu's bsd/sys/resource.h, in every macOS since 10.13: a UUID and 35 numbers, of which
# ri_phys_footprint is the eighth and ri_lifetime_max_phys_footprint the 29th. Every later form begins in the same way.
USAGE, USAGE_FORM = struct.Struct("<16x35Q"), 4
NOW, PEAK = 7, 28


def read_footprint(library: Any = None, process: int | None = None) -> Footprint | None:
    """Return the footprint of a process, this one if none is named; ``None`` where there is no such figure."""
    library = library or system_library()
    if library is None:
        return None
    usage = ctypes.create_string_buffer(USAGE.size)
    failed = library.proc_pid_rusage(os.getpid() if process is None else process, USAGE_FORM, usage)
    return None if failed else footprint_in(usage.raw)


def footprint_in(usage: bytes) -> Footprint | None:
    """Return the footprint in what ``proc_pid_rusage`` filled in; ``None`` for one of no bytes, which no process has."""
    numbers = USAGE.unpack(usage)
    return Footprint(numbers[NOW], numbers[PEAK]) if numbers[NOW] else None
