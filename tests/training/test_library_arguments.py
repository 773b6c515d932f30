"""Trainer and Accelerate are told of the device that was chosen, and are found out where they use another."""

from __future__ import annotations

import warnings

import pytest
import torch

import openmed_nb as nb
from openmed_nb.devices.request import device_of
from openmed_nb.errors import DeviceUnavailable, OpenMedWarning
from openmed_nb.training.libraries import warn_of_another_device


def test_accelerate_uses_the_cpu():
    """An Accelerator made with our arguments computes on the CPU, and is recognised as such."""
    from accelerate import Accelerator

    accelerator = Accelerator(**nb.accelerator_arguments("cpu"))

    assert accelerator.device.type == "cpu"
    assert device_of(accelerator) == "cpu"


def test_trainer_uses_the_cpu(tmp_path):
    """TrainingArguments made with our arguments compute on the CPU and pin no memory."""
    from transformers import TrainingArguments

    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], **nb.trainer_arguments("cpu"))

    assert device_of(arguments) == "cpu"
    assert arguments.dataloader_pin_memory is False


@pytest.mark.real_computer  # It begins its own simulation.
def test_trainer_and_accelerate_use_the_simulated_mps(tmp_path):
    """Where the session runs on the simulated MPS, both are told nothing that keeps them from it."""
    from accelerate import Accelerator
    from transformers import TrainingArguments

    with nb.simulated_mps("8 GiB"):
        arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], **nb.trainer_arguments())
        assert device_of(arguments) == "mps"
        assert device_of(Accelerator(**nb.accelerator_arguments())) == "mps"


def test_a_device_that_is_not_there():
    """A device that this computer does not have is refused before a training begins."""
    if torch.cuda.is_available():
        pytest.skip("this computer has CUDA")
    with pytest.raises(DeviceUnavailable):
        nb.EpochHooks("cuda")


AGREE = [
    ("cpu", "cpu"),
    ("mps:0", "mps"),
    ("cuda:0", "cuda"),
    ("cuda", "cuda:0"),
    ("cuda:1", "cuda:1"),
    ("cuda:1", "cuda"),
]
DISAGREE = {
    ("cpu", "mps"): "Do so.",
    ("mps", "cpu"): "Do so.",
    ("cuda:0", "cpu"): "Do so.",
    ("cuda:0", "cuda:1"): "Set CUDA_VISIBLE_DEVICES=1 before torch is loaded",
    ("cuda", "cuda:2"): "Set CUDA_VISIBLE_DEVICES=2 before torch is loaded",
}


@pytest.mark.parametrize(("device", "chosen"), AGREE)
def test_the_same_device_under_two_names(device, chosen):
    """Two names of one device agree, and so do all GPUs where no other than the first was asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_another_device("Trainer", device, chosen, "Do so.")


@pytest.mark.parametrize(("devices", "remedy"), DISAGREE.items(), ids=str)
def test_another_device_is_warned_of(devices, remedy):
    """A library that computes elsewhere, on another GPU too, is warned of with what to do."""
    device, chosen = devices
    with pytest.warns(OpenMedWarning, match=f"Trainer computes on {device}, but {chosen} was chosen. {remedy}"):
        warn_of_another_device("Trainer", device, chosen, "Do so.")
