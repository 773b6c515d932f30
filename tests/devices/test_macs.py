"""MPS, CPU and bfloat16 on Macs by torch release, and the suggested actions: the cells of mac_matrix.txt."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from openmed_nb.devices.backend import MIN_TORCH, TorchInfo, parse_release
from openmed_nb.devices.choice import USE_AUTO_REMEDY, select_device
from openmed_nb.devices.device import MIN_MACOS_BY_TORCH, DeviceFacts, min_macos_for, torch_requirement
from openmed_nb.devices.machine import MachineInfo
from openmed_nb.devices.registry import get_device
from openmed_nb.devices.request import DeviceRequest
from openmed_nb.errors import DeviceUnavailableError

REMEDIES = {
    "update": "Update macOS to 14 or later.",
    "arm64": "Install an arm64 build of Python and recreate the environment with it.",
    "conda": "Install it from conda-forge: conda install -c conda-forge pytorch.",
    "outside": "Run on the Mac itself, outside of containers, virtual machines and sandboxes.",
    "nothing": USE_AUTO_REMEDY,
}
"""Remedies by the words of the table. A version of torch stands for a command."""


class Cell(NamedTuple):
    """A case: the Mac, its torch, the requested device, and the suggested action."""

    chip: str
    python: str
    macos: str
    torch: str
    device: str
    helps: str


def read_cells(text):
    """Return the cells of the tables. The header of the file explains the format."""
    device, releases, cells = "", [], []
    for line in text.splitlines():
        left, bar, right = line.partition("|")
        if line.startswith("## "):
            device, releases = left.split()[1], right.split()
        elif bar and not line.startswith("#"):
            *chip, python, macos = left.split()
            cases = zip(releases, right.split(), strict=True)
            cells += [Cell(" ".join(chip), python, macos, torch, device, helps) for torch, helps in cases]
    return cells


ALL_CELLS = read_cells(Path(__file__).with_name("mac_matrix.txt").read_text("utf-8"))
BFLOAT16_CELLS = [cell for cell in ALL_CELLS if cell.device == "bfloat16"]
CELLS = [cell for cell in ALL_CELLS if cell.device != "bfloat16"]


def machine_of(cell):
    """Return the machine of a cell."""
    if cell.chip.startswith("container"):
        return MachineInfo(
            "Linux", {"amd64": "x86_64"}.get(cell.python, cell.python), apple_silicon=True, gpu_driver=False
        )
    rosetta, macos = cell.python == "rosetta", None
    if cell.macos != "?":
        macos = tuple(map(int, cell.macos.split(".")))
    apple = cell.chip.startswith("Apple") or rosetta
    return MachineInfo(
        "Darwin", "x86_64" if rosetta else cell.python, apple, rosetta, cell.chip, macos, gpu_driver=False
    )


def answer(cell, torch):
    """Return the selected device for a cell and a torch, and the remedy of the error."""
    try:
        return select_device(
            DeviceRequest(cell.device, "argument"), DeviceFacts(machine_of(cell), torch, {})
        ).device, ""
    except DeviceUnavailableError as error:
        return "", error.remedy


def commanded(cell):
    """Return the remedy that installs the torch of a cell."""
    requirement = "torch" if cell.helps == "torch" else f"torch=={cell.helps}"
    if cell.torch == "none":
        return f"Install it: python -m pip install {requirement}."
    if parse_release(cell.torch) < MIN_TORCH:
        return f"Upgrade it: python -m pip install --upgrade {requirement}."
    return f"Update macOS, or install a torch that supports it: python -m pip install {requirement}."


@pytest.mark.parametrize("row", sorted({cell[:3] for cell in CELLS}), ids=" ".join)
def test_remedy_matches_table(row):
    for cell in (cell for cell in CELLS if cell[:3] == row):
        facts = TorchInfo(None) if cell.torch == "none" else TorchInfo(cell.torch, gpu_build="")
        device, remedy = answer(cell, facts)
        if cell.helps == cell.device:
            assert (device, remedy) == (cell.device, ""), cell
        else:
            assert (device, remedy) == ("", REMEDIES.get(cell.helps) or commanded(cell)), cell


def test_remedy_makes_device_usable():
    named = [cell for cell in CELLS if re.fullmatch(r"[\d.]+", cell.helps)]

    assert len(named) > 50
    for cell in named:
        assert torch_requirement(machine_of(cell)) == f"torch=={cell.helps}", cell
        assert answer(cell, TorchInfo(cell.helps, gpu_build="")) == (cell.device, ""), cell


@pytest.mark.parametrize("row", sorted({cell[:3] for cell in BFLOAT16_CELLS}), ids=" ".join)
def test_bfloat16_matches_table(row):
    mps = get_device("mps")
    for cell in (cell for cell in BFLOAT16_CELLS if cell[:3] == row):
        machine = machine_of(cell)
        rule = mps.dtype_rejection("bfloat16", parse_release(cell.torch), machine)
        if cell.helps == "yes":
            assert rule is None, cell
        else:
            assert rule.remedy.endswith(f"python -m pip install torch=={cell.helps}."), cell
            assert "pytorch#197796" in rule.reason, cell
            assert mps.dtype_rejection("bfloat16", parse_release(cell.helps), machine) is None, cell
        assert mps.dtype_rejection("float16", parse_release(cell.torch), machine) is None, cell


def test_table_has_all_cells():
    releases = {parse_release(cell.torch)[:2] for cell in CELLS}

    assert len({cell[:5] for cell in ALL_CELLS}) == len(ALL_CELLS) >= 700
    assert len({(cell.chip, cell.python, cell.macos, cell.device) for cell in ALL_CELLS}) >= 75
    assert {"26", "27"} <= {cell.macos.partition(".")[0] for cell in ALL_CELLS}
    assert {(2, minor) for minor in range(6, 16)} <= releases
    assert {first for first, _ in MIN_MACOS_BY_TORCH} <= releases
    oldest = [min_macos_for((2, minor, 1)) for minor in (5, 6, 8, 9, 14, 15, 16)]
    assert oldest == [(13,), (13,), (13,), (14,), (14,), (15,), (15,)]


# Some torch releases with wheels for Apple silicon: the oldest macOS in the message of its binary, the oldest macOS in the names
# of its wheels, and the first and last Python that they support, as listed by PyPI on 2026-11-26.
WHEELS = [
    ("2.6.0", (13,), (11,), (9, 13)),
    ("2.8.0", (13,), (11,), (9, 13)),
    ("2.9.1", (14,), (11,), (10, 14)),
    ("2.12.1", (14,), (14,), (10, 14)),
    ("2.14.1", (14,), (14,), (10, 14)),
    ("2.15.0", (15,), (14,), (11, 15)),
]


def test_minimum_macos_and_recommended_release_have_wheels():
    for release, macos, wheel_macos, _pythons in WHEELS:
        assert min_macos_for(parse_release(release)) == macos, release
        assert wheel_macos <= macos, release  # pip installs each release on every macOS that its MPS supports.
    pythons = {release: range(first, last + 1) for release, _macos, _wheel_macos, (first, last) in WHEELS}
    # torch 2.8 is the last release for macOS 13, and has no wheel for Python 3.14.
    for macos, supported in (((13, 6), range(10, 14)), ((14,), range(10, 15)), ((27, 0), range(10, 15))):
        requirement = torch_requirement(MachineInfo("Darwin", "arm64", apple_silicon=True, macos_version=macos))
        release = requirement.partition("==")[2]
        assert set(supported) <= set(pythons[release]), macos
