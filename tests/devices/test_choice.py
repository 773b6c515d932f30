"""Device selection: the rows of choice_matrix.txt, and the reports of choices, lists and explanations."""

import json
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from openmed_nb.devices.backend import TorchInfo
from openmed_nb.devices.choice import (
    DeviceChoice,
    DeviceList,
    DeviceStatus,
    Explanation,
    Rejection,
    select_device,
)
from openmed_nb.devices.device import DeviceFacts
from openmed_nb.devices.environment import plan_mps_variables
from openmed_nb.devices.machine import MachineInfo
from openmed_nb.devices.registry import DEVICE_TYPES, get_device
from openmed_nb.devices.request import DeviceRequest, DeviceSetting, resolution_order, resolve_request
from openmed_nb.errors import DeviceUnavailableError, OpenMedError, UnknownDeviceError


def mac(chip, macos_version):
    """Return a Mac with an Apple chip."""
    return MachineInfo("Darwin", "arm64", apple_silicon=True, chip=chip, macos_version=macos_version, gpu_driver=False)


MACHINES = {
    "M4 Max": mac("Apple M4 Max", (15, 5)),
    "M1 with macOS 13": mac("Apple M1", (13, 6)),
    "M1 with macOS 14": mac("Apple M1", (14,)),
    "M1 with macOS 14.0": mac("Apple M1", (14, 0)),
    "M2 whose sysctl does not answer": MachineInfo("Darwin", "arm64", apple_silicon=True),
    "M2 Pro under Rosetta": MachineInfo(
        "Darwin", "x86_64", apple_silicon=True, under_rosetta=True, macos_version=(14, 5)
    ),
    "Intel Mac": MachineInfo(
        "Darwin", "x86_64", chip="Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz", macos_version=(14, 5)
    ),
    "virtual Mac": mac("Apple M2 (Virtual)", (14, 5)),
    "M5 with macOS 26": mac("Apple M5", (26, 6, 2)),
    "M5 with macOS 27": mac("Apple M5", (27, 0)),
    "virtual Mac with macOS 15": mac("Apple M1 (Virtual)", (15, 7)),
    "virtual Mac with macOS 26": mac("Apple M1 (Virtual)", (26, 6)),
    "Linux without a GPU": MachineInfo("Linux", "x86_64", gpu_driver=False),
    "Linux with NVIDIA driver": MachineInfo("Linux", "x86_64", gpu_driver=True),
    "Linux with AMD driver": MachineInfo("Linux", "x86_64", gpu_driver=True),
    "Linux whose driver is unknown": MachineInfo("Linux", "x86_64"),
    "Linux on arm64": MachineInfo("Linux", "aarch64", gpu_driver=False),
    "Linux container on a Mac": MachineInfo("Linux", "aarch64", apple_silicon=True, gpu_driver=False),
    "WSL": MachineInfo("Linux", "x86_64", gpu_driver=True),
    "Windows with NVIDIA driver": MachineInfo("Windows", "AMD64", gpu_driver=True),
    "Windows without a GPU": MachineInfo("Windows", "AMD64", gpu_driver=False),
}

CUDA = {"version": "2.13.0+cu130", "gpu_build": "CUDA 13.0"}
ROCM = {"version": "2.13.0+rocm7.1", "gpu_build": "ROCm 7.1.25424"}
METAL = {"is_imported": True, "gpu_build": "", "mps_built": True, "mps_available": True, "cuda_names": ()}
NO_METAL = {**METAL, "mps_available": False}
NO_MPS = {"is_imported": True, "mps_built": False, "mps_available": False}
VIRTUAL_GPU = {**METAL, "metal_device": "Apple Paravirtual device, 0 GPU cores"}
NO_BIAS = "results differ from the CPU in a linear layer with a bias and input shape (80, 1, 2) (pytorch#188438)"
TWO_GPUS = {**NO_MPS, "cuda_names": ("NVIDIA A100", "NVIDIA T4")}

TORCHES = {
    "no torch": TorchInfo(None),
    "torch 1.12": TorchInfo("1.12.1", gpu_build=""),
    "torch 2.2": TorchInfo("2.2.2", gpu_build=""),
    "torch 2.5": TorchInfo("2.5.1", gpu_build=""),
    "torch 2.6": TorchInfo("2.6.0", gpu_build=""),
    "torch of unknown build": TorchInfo("2.14.0a0+git035290b"),
    "planned Mac build": TorchInfo("2.13.0", gpu_build=""),
    "loaded Mac build": TorchInfo("2.13.0", **METAL),
    "MPS works": TorchInfo("2.13.0", **METAL, probes=(("mps", ""),)),
    "MPS fails": TorchInfo("2.13.0", **METAL, probes=(("mps", "MPS backend out of memory"),)),
    "MPS computes incorrect results": TorchInfo("2.13.0", **METAL, probes=(("mps", "results differ from the CPU"),)),
    "MPS rejects its watermarks": TorchInfo("2.13.0", **METAL, probes=(("mps", "invalid low watermark ratio 1.4"),)),
    "torch 2.15": TorchInfo("2.15.0", gpu_build=""),
    "virtual GPU not probed": TorchInfo("2.14.1", **VIRTUAL_GPU),
    "virtual GPU works": TorchInfo("2.14.1", **VIRTUAL_GPU, probes=(("mps", ""),)),
    "virtual GPU omits a bias": TorchInfo("2.13.0", **VIRTUAL_GPU, probes=(("mps", NO_BIAS),)),
    "built without MPS": TorchInfo("2.13.0", gpu_build="", cuda_names=(), **NO_MPS),
    "no Metal device": TorchInfo("2.13.0", **NO_METAL),
    "planned CPU build": TorchInfo("2.13.0+cpu", gpu_build=""),
    "loaded CPU build": TorchInfo("2.13.0+cpu", gpu_build="", cuda_names=(), **NO_MPS),
    "planned CUDA build": TorchInfo(**CUDA),
    "CUDA build that finds none": TorchInfo(**CUDA, cuda_names=(), **NO_MPS),
    "one GPU, not probed": TorchInfo(**CUDA, cuda_names=("NVIDIA L4",), **NO_MPS),
    "two GPUs that work": TorchInfo(**CUDA, **TWO_GPUS, probes=(("cuda", ""), ("cuda:1", ""))),
    "first of two GPUs fails": TorchInfo(
        **CUDA, **TWO_GPUS, probes=(("cuda", "CUDA error: no kernel image is available"),)
    ),
    "planned ROCm build": TorchInfo(**ROCM),
    "ROCm build that finds none": TorchInfo(**ROCM, cuda_names=(), **NO_MPS),
    "ROCm build with a GPU that works": TorchInfo(
        **ROCM, cuda_names=("AMD Instinct MI210",), **NO_MPS, probes=(("cuda", ""),)
    ),
}

ERRORS = {"unavailable": DeviceUnavailableError, "unknown": UnknownDeviceError}


class Row(NamedTuple):
    """A row of the table: facts, request, result, and text that the result contains."""

    machine: str
    torch: str
    request: str
    answer: str
    words: tuple[str, ...]


def read_rows(text):
    """Return the rows of the table, whose header explains the format."""
    rows = []
    for line in text.splitlines():
        if line.startswith("## "):
            machine, torch = line[3:].split(" | ")
        elif "->" in line and not line.startswith("#"):
            request, answer = line.split("->")
            expected, *words = map(str.strip, answer.split(" | "))
            rows.append(Row(machine, torch, request.strip(), expected, tuple(words)))
    return rows


ROWS = read_rows(Path(__file__).with_name("choice_matrix.txt").read_text("utf-8"))


def select(row):
    """Return the result of the request of a row in the notation of the table, and its text."""
    environ = dict(pair.split("=", 1) for pair in shlex.split(row.request.removeprefix("-")))
    argument = DeviceSetting("argument", environ.pop("argument", None))
    if "config" in environ:
        argument = DeviceSetting("OpenMedConfig", environ.pop("config"))
    session = environ.pop("session", None)
    torch = TORCHES[row.torch]
    try:
        override = None if session is None else DeviceRequest.parse(session, "use()")
        choice = select_device(
            resolve_request(resolution_order(environ, argument, override)),
            DeviceFacts(MACHINES[row.machine], torch, environ),
        )
    except OpenMedError as error:
        return next(name for name, kind in ERRORS.items() if type(error) is kind), str(error)
    grade = "confirmed" if choice.confirmed else "planned"
    unprobed = choice.device != "cpu" and torch.probe_failure(choice.device) is None
    reasons = " ".join(f"{rejection.reason} {rejection.remedy}" for rejection in choice.rejected)
    return (
        f"{choice.device} {grade}{' probe' if unprobed else ''}",
        f"{choice} {choice.reason} {choice.dtype_reason} {reasons}",
    )


def test_select_device_matches_table():
    for row in ROWS:
        answer, text = select(row)
        assert (answer, [word for word in row.words if word not in text]) == (row.answer, []), f"{row}: {text}"
        assert answer not in ERRORS or (text.endswith(".") and "\n" not in text), f"{row}: {text}"


def test_remedies_never_suggest_another_machine():
    for name, machine in MACHINES.items():
        for torch in TORCHES.values():
            for device in DEVICE_TYPES:
                remedy = DeviceStatus.of(get_device(device), DeviceFacts(machine, torch, {})).remedy
                assert ("the Mac itself" if "Mac" in name else "") in remedy or "Mac" not in remedy, (name, remedy)
                assert "Use a " not in remedy, (name, remedy)


def test_table_has_all_machines_and_torches():
    assert len(set(ROWS)) == len(ROWS) >= 200
    assert ({row.machine for row in ROWS}, {row.torch for row in ROWS}) == (set(MACHINES), set(TORCHES))


NO_MAC = Rejection("mps", "this computer runs Linux", "Use a Mac.")


def choice(device="cpu", **facts):
    """Return the choice of a requested device."""
    return DeviceChoice(device, device, "argument", f"{device!r} was asked for.", confirmed=True, **facts)


@pytest.mark.parametrize(("in_force", "place"), {"cuda": 1, "cuda:0": 1, "cuda:1": 2, "cpu": 3, None: None}.items())
def test_device_list_labels_active_device(in_force, place):
    gpus = (DeviceStatus("cuda:0"), DeviceStatus("cuda:1", usable=None))
    listed = DeviceList(
        (DeviceStatus("mps", False, NO_MAC.reason, NO_MAC.remedy), *gpus, DeviceStatus("cpu")),
        in_force and choice(in_force),
    )
    states = ["unavailable", "usable", "not tested", "usable"]
    if place is not None:
        states[place] = "active"
    (table,) = listed.to_report().tables
    data = listed.to_dict()
    assert [row[1] for row in table.rows] == states
    assert data["active_device"] == in_force
    assert [device["usable"] for device in data["devices"]] == [False, True, None, True]
    assert data["devices"][0] == {**vars(NO_MAC), "usable": False}
    assert table.columns == ("device", "status", "reason", "suggested action")
    assert table.rows[0] == ("mps", "unavailable", NO_MAC.reason, NO_MAC.remedy)


@pytest.mark.parametrize(
    ("active", "title"),
    [(None, "this machine"), ({}, "this machine"), ({"simulated": True}, "a SIMULATED Mac")],
)
def test_device_list_names_the_computer(active, title):
    listed = DeviceList((DeviceStatus("cpu"),), None if active is None else choice(**active))
    assert listed.to_report().title == f"Devices on {title}"


def automatic(reason, *rejected, **facts):
    """Return an automatic choice of the CPU."""
    reasons = tuple(Rejection("mps", text, "") for text in rejected)
    return DeviceChoice("cpu", "auto", "default", reason, confirmed=True, rejected=reasons, **facts)


CHIP = "the chip is Apple M2"
HEADLINES = {
    "as requested": (choice(), "Device: cpu (requested by the device argument)"),
    "by another name": (
        DeviceChoice("mps", "gpu", "argument", "", confirmed=True, hardware=CHIP),
        "Device: mps (requested by the device argument as 'gpu'; the chip is Apple M2)",
    ),
    "automatic": (
        DeviceChoice("mps", "auto", "default", "", confirmed=True, hardware=CHIP),
        "Device: mps (selected automatically: the chip is Apple M2)",
    ),
    "a GPU without a name": (
        DeviceChoice("cuda", "auto", "default", "", confirmed=True),
        "Device: cuda (selected automatically: the first available device)",
    ),
    "no GPU": (
        automatic("mps and cuda are unavailable.", "Linux", "no driver"),
        "Device: cpu (selected automatically: no GPU available to PyTorch on this machine)",
    ),
    "one reason": (
        automatic("mps and cuda are unavailable.", "a variable hides them", "a variable hides them"),
        "Device: cpu (selected automatically: a variable hides them)",
    ),
    "simulated": (
        automatic("nothing else.", simulated=True),
        "Device: cpu (SIMULATED) (selected automatically: no GPU available to PyTorch on a SIMULATED Mac)",
    ),
}


@pytest.mark.parametrize(("chosen", "headline"), HEADLINES.values(), ids=HEADLINES)
def test_headline_of_choice(chosen, headline):
    assert chosen.headline == headline
    assert chosen.to_report().title == headline


@pytest.mark.parametrize(
    ("environ", "argument", "used"),
    [
        ({"OPENMED_DEVICE": "cpu"}, None, "OPENMED_DEVICE"),
        ({"OPENMED_TORCH_DEVICE": "cpu"}, "cpu", "argument"),
        ({"OPENMED_TORCH_DEVICE": ""}, "auto", "automatic"),
    ],
)
def test_explanation_marks_decisive_setting(environ, argument, used):
    chain = resolution_order(environ, DeviceSetting("argument", argument))
    explained = Explanation(chain, choice(), plan_mps_variables({}, "cpu"), {})
    assert [row[0] for row in explained.to_report().tables[0].rows if row[2] == "used"] == [used]


def test_explanation_to_dict():
    chain = resolution_order({"OPENMED_DEVICE": "cpu"})
    explained = Explanation(
        chain, choice(rejected=(NO_MAC,)), plan_mps_variables({}), {"HF_HUB_OFFLINE": "1"}, "2.16.0.dev1"
    )

    data = json.loads(json.dumps(explained.to_dict()))
    assert list(data) == ["resolution_order", "choice", "environment", "variables", "unreleased"]
    assert data["resolution_order"][-1] == {"source": "OPENMED_DEVICE", "display_value": "cpu"}
    assert data["choice"]["rejected"] == [vars(NO_MAC)]
    assert (data["variables"], data["unreleased"]) == ({"HF_HUB_OFFLINE": "1"}, "2.16.0.dev1")
    assert "2.16.0.dev1" in str(explained)


@pytest.mark.parametrize(
    ("spelling", "shown", "leak"),
    [
        ("hf_s3cret", "***", "s3cret"),
        ("https://me:s3cret@host", "https://***@host", "s3cret"),
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;", "<script>"),
    ],
)
def test_explanation_masks_and_escapes_values(spelling, shown, leak):
    chain = resolution_order({"OPENMED_TORCH_DEVICE": "cpu", "OPENMED_DEVICE": spelling})
    explained = Explanation(chain, choice(), plan_mps_variables({}, "cpu"), {})
    html = explained._repr_html_()

    assert shown in html
    assert leak not in html
    assert "s3cret" not in str(explained) + json.dumps(explained.to_dict())


def test_device_choice_report():
    moved = choice("mps", rejected=(NO_MAC,), moved_models=("a", "b"))
    planned = DeviceChoice("cpu", "auto", "default", "nothing else.", confirmed=False, simulated=True)

    tuned = choice("cuda", tuned_batch_tokens=(("small", 4096), ("large", 512)), dtype_reason="it is safe")

    assert str(moved) == f"{moved.headline}\n  Moved to mps: a, b."
    assert planned.to_report().title.startswith("Device: cpu (SIMULATED) (selected automatically: ")
    assert planned.to_report().sentences == ()
    assert [(table.caption, table.columns, table.rows, table.collapsed) for table in tuned.to_report().metrics] == [
        ("Tuned batch sizes", ("model", "tokens per batch"), (("small", "4,096"), ("large", "512")), True)
    ]
    assert moved.to_dict() == {
        **vars(moved),
        "rejected": [vars(NO_MAC)],
        "moved_models": ["a", "b"],
        "tuned_batch_tokens": [],
    }
