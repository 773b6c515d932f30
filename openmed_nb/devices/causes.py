"""Facts and rules for the availability of devices, and the torch release to install on a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .backend import TorchInfo
from .machine import MachineInfo, Version

# Pairs of a torch release and the oldest macOS on which it supports MPS, according to its error messages (EmptyTensor.cpp in
# the binaries for macOS). pip does not check this: it installs 2.9 to 2.11 on macOS 11, and 2.15.0 on macOS 14. No release has a
# newest macOS: that MPS computes correctly on macOS 26 and 27 is up to the device check and the probes of the doctor.
MIN_MACOS_BY_TORCH = (((2, 6), (13,)), ((2, 9), (14,)), ((2, 15), (15,)))

# Release to install on a Mac. From macOS 14 on it is the version in binder/constraints.txt: 2.13 and older have silent errors
# on M1 and M2 that are fixed in it (pytorch#177116, #183535). 2.15.0 also fixes copies in float64 (pytorch#197715), but needs
# macOS 15 and Python 3.11. Before macOS 14 it is the last release that supports MPS on macOS 13, which also runs on macOS 11;
# it has no wheel for Python 3.14. 2.14.1 has wheels for Python 3.10 to 3.14.
MAC_TORCH = "torch==2.14.1"
MACOS_13_TORCH = "torch==2.8.0"

ARM_PYTHON_REMEDY = "Install an arm64 build of Python and recreate the environment with it."


def min_macos_for(release: Version) -> Version:
    """Return the oldest macOS on which a torch release supports MPS; for releases before 2.6, that of 2.6."""
    return max((macos for first, macos in MIN_MACOS_BY_TORCH if first <= release), default=MIN_MACOS_BY_TORCH[0][1])


def torch_requirement(machine: MachineInfo) -> str:
    """Return the pip requirement for torch: on a Mac, a release that supports MPS on its macOS.

    Example:
        >>> torch_requirement(MachineInfo("Darwin", "arm64", macos_version=(14, 5)))
        'torch==2.14.1'
    """
    if machine.system != "Darwin":
        return "torch"
    return (
        MACOS_13_TORCH
        if machine.macos_version is not None and machine.macos_version < min_macos_for((2, 14))
        else MAC_TORCH
    )


@dataclass(frozen=True)
class DeviceFacts:
    """Facts that determine the availability of devices."""

    machine: MachineInfo
    torch: TorchInfo
    environ: Mapping[str, str]


class RejectionRule(NamedTuple):
    """Reason why a device cannot be used.

    Attributes:
        name: Identifier for the checks of the doctor.
        reason: Reason as a clause.
        remedy: Suggested action. It is empty if nothing can be done on this machine; no remedy suggests another machine.
        is_absent: Whether this machine does not have the hardware, as far as this is known.
    """

    name: str
    reason: str
    remedy: str = ""
    is_absent: bool = False


NO_TORCH = "no torch"
OLD_TORCH = "old torch"
FAILED_PROBE = "failed probe"
