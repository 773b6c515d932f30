"""What only a Mac can write down, signposts and captures of Metal, is refused elsewhere with the reason."""

from __future__ import annotations

import pytest
import torch

from openmed_nb.devices.profilers import check_metal_capture, check_signposts, reason_against
from openmed_nb.errors import ConfigurationError
from openmed_nb.simulation.device import simulated_device

WRITERS = [
    (check_signposts, "signposts", "Leave signposts=True out."),
    (check_metal_capture, "Metal captures", "Leave metal_capture out."),
]


def test_other_devices():
    """On another device than MPS there are none, and the remedy is to leave them out."""
    for check, what, remedy in WRITERS:
        for device in ("cpu", "cuda:1"):
            with pytest.raises(ConfigurationError) as caught:
                check(device)
            assert caught.value.what == f"There are no {what} of {device}: torch writes them for MPS alone."
            assert caught.value.remedy == remedy


@pytest.mark.real_computer  # It begins its own simulation.
def test_simulated_device():
    """Of a simulated MPS device there are none either."""
    for check, what, remedy in WRITERS:
        with simulated_device(), pytest.raises(ConfigurationError) as caught:
            check("mps")
        assert caught.value.what == f"There are no {what} of a simulated MPS device."
        assert caught.value.remedy == remedy


@pytest.mark.real_computer
def test_mps():
    """Nothing speaks against them on MPS itself, under either of its names."""
    assert [reason_against("signposts", device) for device in ("mps", "mps:0")] == ["", ""]
    check_signposts("mps")


@pytest.mark.real_computer
def test_captures_that_torch_or_the_process_does_not_allow(monkeypatch):
    """A torch without captures of Metal names the first that has them, and a process without them the variable."""
    monkeypatch.setattr(torch.mps.profiler, "is_metal_capture_enabled", lambda: False)
    with pytest.raises(ConfigurationError, match="MTL_CAPTURE_ENABLED=1"):
        check_metal_capture("mps")
    monkeypatch.setattr(torch.mps.profiler, "is_metal_capture_enabled", lambda: True)
    check_metal_capture("mps")
    monkeypatch.delattr(torch.mps.profiler, "metal_capture")
    with pytest.raises(
        ConfigurationError, match=r"no torch\.mps\.profiler\.metal_capture\. Install torch 2\.7 or newer\."
    ):
        check_metal_capture("mps")
