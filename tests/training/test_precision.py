"""Precision of a training for requests, devices, releases of torch and chips."""

from dataclasses import replace

import pytest
import torch

import openmed_nb as nb
from openmed_nb.devices.machine import MachineInfo
from openmed_nb.errors import ConfigurationError
from openmed_nb.training.steps import select_precision

M1 = MachineInfo("Darwin", "arm64", apple_silicon=True, chip="Apple M1 Max", macos_version=(15, 0))
M3 = replace(M1, chip="Apple M3 Pro")
UNKNOWN = MachineInfo("Darwin", "arm64", apple_silicon=True)
MACOS_27 = replace(M1, chip="Apple M5", macos_version=(27, 0))
MACOS_26 = replace(MACOS_27, macos_version=(26, 6, 2))
LINUX = MachineInfo("Linux", "x86_64")
T26 = (2, 6)
T27 = (2, 7, 1)
T28 = (2, 8)
T213 = (2, 13, 0)

CHOICES = [
    # (device, torch, machine, requested, capability) -> type, scaler, fragment of a note
    (("mps", T213, M3, None, None), "float32", False, ""),
    (("mps", T213, M3, "bf16", None), "bfloat16", False, ""),
    (("mps", T213, M1, "bf16", None), "bfloat16", False, "without a speedup"),
    (("mps", T213, UNKNOWN, "bf16", None), "bfloat16", False, "The chip is unknown"),
    (("mps", T26, M3, "bfloat16", None), "bfloat16", False, ""),
    (("mps", T28, M3, "fp16", None), "float16", True, "184286"),
    (("mps", (2, 12, 1), M1, "fp16", None), "float16", True, "186360"),
    (("mps", T213, M1, "fp16", None), "float16", True, ""),
    (("mps", T213, M1, "auto", None), "bfloat16", False, "without a speedup"),
    (("mps", T213, MACOS_26, "auto", None), "bfloat16", False, ""),
    (("mps", T213, MACOS_27, "auto", None), "float16", True, ""),
    (("cuda:1", T213, LINUX, "auto", (9, 0)), "bfloat16", False, ""),
    (("cuda", T213, LINUX, "auto", (7, 5)), "float16", True, ""),
    (("cuda", T213, LINUX, "auto", None), "float16", True, ""),
    (("cpu", T213, LINUX, "auto", None), "float32", False, ""),
    (("cpu", T213, LINUX, "bf16", None), "bfloat16", False, "more slowly"),
    (("cpu", T213, LINUX, "fp16", None), "float16", True, "more slowly"),
]


def test_select_precision():
    for arguments, dtype, scaler, note in CHOICES:
        precision = select_precision(*arguments)
        found = (precision.dtype, precision.needs_scaler, precision.enabled, precision.device)

        assert found == (dtype, scaler, dtype != "float32", arguments[0]), arguments
        assert precision.reason.startswith(dtype) or "auto" in arguments, arguments
        assert note in " ".join(precision.notes), arguments
        assert bool(note) == bool(precision.notes), arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mps", T26, M3, "fp16", None), "which does not work on MPS with torch 2.6.*Use 'bfloat16'"),
        (("mps", T27, M1, "fp16", None), "pytorch#142397.*torch 2.8 or later"),
        (("mps", T213, MACOS_27, "bf16", None), "pytorch#197796.*python -m pip install torch==2.14.1"),
        (("mps", T27, MACOS_27, "fp16", None), "pytorch#142397.*python -m pip install torch==2.14.1"),
        (("mps", T27, MACOS_27, "auto", None), "pytorch#142397.*python -m pip install torch==2.14.1"),
        (("cuda", T213, LINUX, "bf16", (7, 5)), "requires compute capability 8.0; this GPU has 7.5.*Use 'float16'"),
        (("cuda", T213, LINUX, "bf16", None), "the compute capability of the GPU is unknown.*Use 'float16'"),
    ],
)
def test_select_precision_rejects_unsupported(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        select_precision(*arguments)


@pytest.mark.parametrize("requested", ["int8", "", "float64", "bf 16"])
def test_precision_rejects_unknown_names(requested):
    with pytest.raises(ConfigurationError, match=r"for precision: .*\. Use one of 'float32', 'fp32', 'no'"):
        nb.training.precision(requested, "cpu")


def test_precision_accepts_names_of_libraries():
    for dtype, spellings in {
        "float32": ("float32", "fp32", "no", torch.float32),
        "bfloat16": ("bfloat16", "bf16", torch.bfloat16),
        "float16": ("float16", "fp16", "half", torch.float16),
    }.items():
        for spelling in (*spellings, f" {spellings[1].upper()} "):
            assert nb.training.precision(spelling, "cpu").dtype == dtype, spelling


def test_precision_report():
    precision = select_precision("mps", T28, M1, "fp16")

    title = "Precision on mps: autocast to float16 with a GradScaler"
    assert str(precision).startswith(f"{title}\n  float16 was requested;")
    assert precision.to_dict()["notes"] == list(precision.notes)
    assert "pytorch#186360" in precision._repr_html_()


@pytest.mark.parametrize(
    ("requested", "dtype"), [(None, torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_step_with_autocast_and_scaler(requested, dtype):
    precision = nb.training.precision(requested, "cpu")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    scaler = precision.scaler()
    with precision.autocast():
        output = model(torch.full((2, 4), 0.25))  # With larger inputs, scaled gradients can exceed float16.
        loss = output.float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)

    assert (output.dtype, model.weight.dtype) == (dtype, torch.float32)
    assert scaler.is_enabled() == (requested == "fp16")
    assert not torch.equal(model.weight, before)


# Operators, and the devices whose autocast selects their type. docs/how_to/train_in_16_bits.md has the same table.
AUTOCAST = [
    (("conv2d", "linear", "matmul", "bmm"), ("MPS", "CUDA", "CPU")),
    (("layer_norm", "group_norm", "softmax.int", "sum"), ("MPS", "CUDA")),
    (("batch_norm",), ("MPS",)),
    (("nll_loss", "mse_loss"), ("MPS", "CUDA", "CPU")),
]


@pytest.mark.parametrize(("operators", "devices"), AUTOCAST)
def test_operators_with_autocast_kernels(operators, devices):
    for operator in operators:
        found = {
            device
            for device in ("MPS", "CUDA", "CPU")
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", f"Autocast{device}")
        }
        assert found == set(devices), operator
