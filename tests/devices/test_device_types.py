"""What each device type declares and refuses: the facts of torch and its GPUs that the other modules ask for."""

import pytest

from helpers.simulated_computers import BOX
from openmed_nb.devices.backend import TorchInfo
from openmed_nb.devices.choice import DeviceStatus
from openmed_nb.devices.device import DeviceFacts
from openmed_nb.devices.machine import MachineInfo
from openmed_nb.devices.registry import get_device
from openmed_nb.simulation.device import simulated_device

DEVICES = ("cpu", "cuda", "mps", "lazy")
"""The device types with a class, and one without."""

DECLARED = {
    "is_accelerator": (False, True, True, True),
    "supports_async_copies": (False, True, False, False),
    "can_be_simulated": (False, False, True, False),
    "has_fallbacks": (False, False, True, False),
    "supports_process_groups": (True, True, False, True),
    "uses_cudnn": (False, True, False, False),
    "profiler_times_kernels": (False, True, False, False),
    "checkpoints_restore_rng": (True, True, False, True),
    "sensor": ("", "nvidia-smi", "ioreg", ""),
    "has_allocator": (False, True, True, False),
    "max_fraction": (0.0, 1.0, 2.0, 0.0),
    "accepts_zero_limit": (False, False, True, False),
    "headroom_fraction": (0.7, 0.9, 0.9, 0.7),
    "pins_memory": (False, True, False, False),
    "recompiles_for_new_shapes": (False, False, True, False),
    "has_int8": (True, False, False, False),
    "dtype_fallbacks": ({}, {}, {"float64": "float32", "complex128": "complex64"}, {}),
    "batch_tokens": (512, 32768, 8192, 512),
    "max_batch_padding": (64, 2048, 256, 64),
    "supports_index": (False, True, False, False),
    "limit_caption": ("limit", "limit", "high watermark", "limit"),
}


@pytest.mark.parametrize("name", DECLARED)
def test_declared_values(name):
    assert tuple(getattr(get_device(device), name) for device in DEVICES) == DECLARED[name]


@pytest.mark.parametrize(
    ("device", "hidden_size", "tokens"),
    [("cuda", 768, 2048), ("cuda", None, 2048), ("cuda", 312, 5041), ("cuda:1", 1024, 1536), ("mps", 312, 256)],
)
def test_max_padding_tokens_follow_hidden_size(device, hidden_size, tokens):
    padding = get_device(device).max_padding_tokens(hidden_size)
    assert (padding, type(padding)) == (tokens, int)


MAC = MachineInfo("Darwin", "arm64", apple_silicon=True, macos_version=(15, 5))
INTEL = MachineInfo("Darwin", "x86_64", macos_version=(12, 6))
CONTAINER = MachineInfo("Linux", "aarch64", apple_silicon=True, gpu_driver=False)
ROSETTA = MachineInfo("Darwin", "x86_64", apple_silicon=True, under_rosetta=True)
CUDA_BUILD = {"gpu_build": "CUDA 13.0", "cuda_names": ("NVIDIA L4",)}

RULES = {
    "nothing is wrong": ("cuda", BOX, TorchInfo("2.13.0", **CUDA_BUILD), []),
    "there is no torch": ("cpu", BOX, TorchInfo(None), ["no torch"]),
    "torch is old": ("cpu", BOX, TorchInfo("2.5.1"), ["old torch"]),
    "torch is old on an Intel Mac": ("cpu", INTEL, TorchInfo("2.2.2"), ["old torch"]),
    "the GPU is not one of those": ("cuda:1", BOX, TorchInfo("2.13.0", **CUDA_BUILD), ["no such GPU"]),
    "the GPU fails": ("cuda", BOX, TorchInfo("2.13.0", **CUDA_BUILD, probes=(("cuda", "no"),)), ["failed probe"]),
    "the CPU fails": ("cpu", BOX, TorchInfo("2.13.0", probes=(("cpu", "no"),)), ["failed probe"]),
    "torch finds no GPU": (
        "cuda",
        BOX,
        TorchInfo("2.13.0", gpu_build="CUDA 13.0", cuda_names=()),
        ["no GPU", "no such GPU"],
    ),
    "CUDA on a Mac": ("cuda", MAC, TorchInfo("2.13.0", gpu_build=""), ["macOS", "CPU build"]),
    "a container": ("cuda", CONTAINER, TorchInfo("2.13.0", gpu_build=""), ["no driver", "CPU build"]),
    "MPS on Linux": ("mps", BOX, TorchInfo("2.13.0"), ["no Mac", "Intel"]),
    "MPS in a container": ("mps", CONTAINER, TorchInfo("2.13.0"), ["Linux on an Apple chip", "no Mac", "Rosetta"]),
    "MPS under Rosetta": ("mps", ROSETTA, TorchInfo("2.13.0"), ["Rosetta"]),
    "MPS on an old Mac": ("mps", INTEL, TorchInfo("2.6.0"), ["Intel", "old macOS", "new torch"]),
    "torch without MPS": ("mps", MAC, TorchInfo("2.13.0", mps_built=False), ["built without MPS"]),
    "a virtual Mac": ("mps", MAC, TorchInfo("2.13.0", mps_available=False), ["no Metal device"]),
    "MPS with bad watermarks": (
        "mps",
        MAC,
        TorchInfo("2.13.0", probes=(("mps", "invalid low watermark ratio 1.4"),)),
        ["bad watermarks", "failed probe"],
    ),
}
"""Facts, and the names of the rules that reject the device, which the doctor looks for."""


@pytest.mark.parametrize(("device", "machine", "torch", "names"), RULES.values(), ids=RULES)
def test_rejection_rules_in_order(device, machine, torch, names):
    rules = list(get_device(device).rejection_rules(DeviceFacts(machine, torch, {})))
    assert [rule.name for rule in rules] == names
    status = DeviceStatus.of(get_device(device), DeviceFacts(machine, torch, {}))
    assert (status.usable is False, status.reason) == (bool(rules), rules[0].reason if rules else status.reason)


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, []), ("0", []), ("", ["hidden GPUs"]), (" -1 ", ["hidden GPUs"]), ("1", [])],
)
def test_hidden_gpus_are_a_rule(visible, names):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    torch = TorchInfo("2.13.0", gpu_build="CUDA 13.0")
    rules = get_device("cuda").rejection_rules(DeviceFacts(BOX, torch, environ))
    assert [rule.name for rule in rules] == names


@pytest.mark.real_computer  # It begins its own simulation.
def test_only_mps_is_simulated():
    assert not any(get_device(device).is_simulated for device in DEVICES)
    with simulated_device():
        assert [device for device in DEVICES if get_device(device).is_simulated] == ["mps"]


@pytest.mark.parametrize(
    ("device", "dtype", "torch_release", "capability", "name"),
    [
        ("cpu", "bfloat16", (2, 6), None, None),
        ("cuda", "bfloat16", (2, 6), (8, 0), None),
        ("cuda", "bfloat16", (2, 6), (7, 5), "bfloat16"),
        ("cuda", "bfloat16", (2, 6), None, "bfloat16"),
        ("cuda", "float16", (2, 6), (7, 5), None),
        ("mps", "float16", (2, 7, 1), None, "float16"),
        ("mps", "float16", (2, 8), None, None),
        ("mps", "bfloat16", (2, 6), None, None),
    ],
)
def test_half_precision_is_rejected_by_dtype(device, dtype, torch_release, capability, name):
    rule = get_device(device).half_precision_rejection(dtype, torch_release, capability)
    assert (rule and rule.name) == name


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_devices_without_queue_have_nothing_to_wait_for(device):
    target = get_device(device)
    assert target.record_event()() is target.synchronize() is None
    assert (target.capability(), target.uuid()) == (None, None)


OLD, NEW = (2, 12, 1), (2, 13, 0)
# dtype, torch, chip, and the start of each note.
HALF_PRECISION_NOTES = [
    ("float16", OLD, "Apple M4 Max", ("Keep weights in float32", "Use AdamW without fused=True")),
    ("float16", NEW, "Apple M1", ()),
    ("bfloat16", NEW, "Apple M1", ("M1 computes bfloat16 in software",)),
    ("bfloat16", NEW, "Apple M1 (Virtual)", ("M1 computes bfloat16 in software",)),
    ("bfloat16", NEW, "Apple M5", ()),
    ("bfloat16", NEW, None, ("The chip is unknown",)),
]


@pytest.mark.parametrize(("dtype", "release", "chip", "starts"), HALF_PRECISION_NOTES)
def test_half_precision_notes_of_mps(dtype, release, chip, starts):
    machine = MachineInfo("Darwin", "arm64", apple_silicon=True, chip=chip)
    notes = get_device("mps").half_precision_notes(dtype, release, machine)

    assert len(notes) == len(starts)
    assert all(note.startswith(start) for note, start in zip(notes, starts, strict=True))


def test_fused_step_of_mps_ignores_a_scaler_before_torch_2_13():
    assert [get_device("mps").fused_step_ignores_found_inf(release) for release in (OLD, NEW)] == [True, False]


@pytest.mark.real_computer
def test_memory_limit_of_mps_is_a_fraction_of_the_recommended_memory():
    mps = get_device("mps")
    with simulated_device("8 GiB") as device:
        mps.set_memory_fraction(0.5)
        assert device.allocator.limit == mps.memory_stats().recommended // 2
        mps.set_memory_fraction(0)
        assert device.allocator.limit is None
