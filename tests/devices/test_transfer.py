"""Arrays go to a device and back; only towards CUDA without waiting."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from openmed_nb.devices.backend import array_to_device, synchronize, to_array, towards_host
from openmed_nb.simulation.device import simulated_device
from openmed_nb.simulation.modes import Copy

ARRAYS = [
    np.arange(6).reshape(2, 3),
    np.zeros((0, 3), np.int64),
    np.array([0.5, -1], np.float32),
    np.array([True, False]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_there_and_back_on_the_cpu(array):
    """An array comes back from the CPU as it went, in its type."""
    device = torch.device("cpu")
    tensor = towards_host(array_to_device(array, device))
    synchronize(device)
    returned = to_array(tensor)
    assert returned.dtype == array.dtype
    np.testing.assert_array_equal(returned, array)


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
@pytest.mark.real_computer  # It begins its own simulation.
def test_there_and_back_on_mps(array):
    """An array comes back from MPS as it went; both copies wait, because one that does not can read freed memory."""
    with simulated_device() as mps:
        tensor = array_to_device(array, torch.device("mps"))
        assert tensor.device == torch.device("mps", 0)
        tensor = towards_host(tensor)
        synchronize(tensor.device)
        returned = to_array(tensor)
    np.testing.assert_array_equal(returned, array)
    assert mps.copies == [Copy("cpu", "mps", False), Copy("mps", "cpu", False)]


@pytest.mark.real_computer  # It begins its own simulation.
def test_float64_does_not_reach_mps():
    """MPS has no float64, and the stand-in says so in torch's words."""
    with simulated_device(), pytest.raises(TypeError, match="doesn't support float64"):
        array_to_device(np.zeros(2), torch.device("mps"))


@pytest.mark.real_computer  # It begins its own simulation.
def test_simulation_is_over_outside_of_its_block():
    """Outside of the block torch has no MPS device, and its own function for the cache, again."""
    before = torch.mps.empty_cache
    with simulated_device() as mps:
        torch.mps.empty_cache()
        assert torch.zeros(2, device="mps").is_mps
    assert mps.emptied == 1
    assert torch.mps.empty_cache is before
    assert not torch.zeros(2).is_mps


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_there_and_back_on_cuda():
    """An array comes back from CUDA as it went, once everything that was started is done."""
    device = torch.device("cuda", 0)
    arrays = [np.arange(1_000_000) + shift for shift in range(8)]
    tensors = [towards_host(array_to_device(array, device) * 2) for array in arrays]
    synchronize(device)
    for array, tensor in zip(arrays, tensors, strict=True):
        np.testing.assert_array_equal(to_array(tensor), array * 2)
