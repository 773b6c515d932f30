"""Why a device cannot be used: the facts that decide, a cause in words, and which torch to install instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .backend import TorchInfo
from .machine import MachineInfo

# From which release on torch supports MPS on which macOS, as it says itself (EmptyTensor.cpp in its binaries for macOS).
# pip does not know: it installs 2.9 to 2.11 on macOS 11, and 2.15.0 on macOS 14.
MIN_MACOS_BY_TORCH = (((2, 6), (13,)), ((2, 9), (14,)), ((2, 15), (15,)))

# What a Mac installs: from macOS 14 on the pin of binder/constraints.txt (2.13 and older have silent errors on M1 and M2 that
# it has not: pytorch#177116, #183535), and before that the last release with MPS on macOS 13, which also runs on 11.
MAC_TORCH = "torch==2.14.1"
MACOS_13_TORCH = "torch==2.8.0"

ARM_PYTHON = "Install an arm64 Python and make the environment with it."


def min_macos_for(release: tuple[int, ...]) -> tuple[int, ...]:
    """Return the oldest macOS on which a release of torch supports MPS; for those before 2.6, that of 2.6."""
    return max((macos for first, macos in MIN_MACOS_BY_TORCH if first <= release), default=MIN_MACOS_BY_TORCH[0][1])


def torch_requirement(machine: MachineInfo) -> str:
    """Return what pip is asked for where torch is to be installed: on a Mac, a release that supports MPS on its macOS.

    Example:
        >>> torch_requirement(MachineInfo("Darwin", "arm64", macos=(14, 5)))
        'torch==2.14.1'
    """
    if machine.system != "Darwin":
        return "torch"
    return MACOS_13_TORCH if machine.macos is not None and machine.macos < min_macos_for((2, 14)) else MAC_TORCH


@dataclass(frozen=True)
class DeviceContext:
    """All facts that decide about a device."""

    machine: MachineInfo
    torch: TorchInfo
    environ: Mapping[str, str]


class RejectionRule(NamedTuple):
    """Why a device cannot be used.

    The remedy is empty where nothing can be done on this computer: nobody is sent to buy another one.
    """

    name: str  # By which the doctor knows it.
    reason: str
    remedy: str = ""


NO_TORCH = "no torch"
OLD_TORCH = "old torch"
FAILED_PROBE = "failed probe"
