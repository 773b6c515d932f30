"""Profilers of torch and of MPS, and mode stacks."""

import contextlib
import itertools
import signal
import sys

import pytest
import torch
from torch import overrides
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.overrides import BaseTorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from openmed_nb.devices.profilers import (
    capture_name,
    check_profiling,
    is_host_event,
    is_profiler_active,
    iter_memory_changes,
    profile_device,
    push_modes,
)
from openmed_nb.errors import ConfigurationError
from openmed_nb.simulation.device import simulated_device


class Passing(TorchDispatchMode):
    """Mode that intercepts every operator without a change."""

    def __torch_dispatch__(self, operator, _types, args=(), kwargs=None):
        """Call the operator."""
        return operator(*args, **(kwargs or {}))


KINDS = [Passing, BaseTorchFunctionMode]
STACK = {
    Passing: _python_dispatch._get_current_dispatch_mode_stack,
    BaseTorchFunctionMode: overrides._get_current_function_mode_stack,
}
POP = {Passing: _python_dispatch._pop_mode, BaseTorchFunctionMode: overrides._pop_mode}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lost", [False, True], ids=["put on again", "lost"])
def test_push_modes_removes_only_its_mode(kind, lost):
    with kind() as outer:
        mode = kind()
        with contextlib.suppress(KeyboardInterrupt), push_modes(mode):
            (POP[kind] if lost else mode.__enter__)()
            raise KeyboardInterrupt
        assert STACK[kind]() == [outer]

    assert STACK[kind]() == []


def test_push_modes_preserves_default_device():
    """Modes that other code enters inside the block, such as a default device, are preserved."""
    try:
        with push_modes(BaseTorchFunctionMode()):
            torch.set_default_device("meta")
        assert torch.empty(1).is_meta
    finally:
        torch.set_default_device(None)

    assert STACK[BaseTorchFunctionMode]() == []


def test_memory_changes_are_in_order():
    with profile_device("cpu", profile_memory=True) as profiler:
        first = torch.ones(10, device="cpu")
        second = torch.ones(20, device="cpu")
        del first
        del second

    assert iter_memory_changes(profiler) == [40, 80, -40, -80]


def test_interrupt_leaves_no_profiler_active():
    number, ended = 0, False
    while not ended:
        ended, number = profile_interrupted_at(number + 1), number + 1
        assert not is_profiler_active(), number
    assert number > 1


def profile_interrupted_at(number):
    """Profile with an interrupt at the given call of torch's profiler, and return whether there were fewer calls."""
    left = itertools.count(1 - number)

    def interrupt(frame, event, _argument):
        if event == "call" and "profiler" in frame.f_globals["__name__"].split(".") and next(left) == 0:
            signal.raise_signal(signal.SIGINT)

    try:
        sys.setprofile(interrupt)
        with profile_device("cpu"):
            pass
    except KeyboardInterrupt:
        return False
    finally:
        sys.setprofile(None)
    return True


def test_second_profiler_is_an_error():
    with profile_device("cpu"):
        assert is_profiler_active()
        with pytest.raises(ConfigurationError, match="Another torch profiler is already running"):
            check_profiling("cpu", False, None)

    assert not is_profiler_active()


@pytest.mark.real_computer  # It begins its own simulation.
@pytest.mark.parametrize(
    ("request_of", "feature", "remedy"),
    [((True, None), "Signposts", "signposts=True"), ((False, "step"), "Metal captures", "metal_capture")],
)
@pytest.mark.parametrize("device", ["cpu", "cuda:1", "mps"])
def test_check_profiling_rejects_other_devices(device, request_of, feature, remedy):
    place = "a simulated MPS device" if device == "mps" else f"MPS only, not on {device}"
    with simulated_device(), pytest.raises(ConfigurationError, match=f"{feature} are .*supported on {place}") as caught:
        check_profiling(device, *request_of)
    assert caught.value.remedy == f"Remove {remedy}."


@pytest.mark.real_computer
def test_check_profiling_accepts_mps():
    for device in ("mps", "mps:0"):
        check_profiling(device, True, None)


@pytest.mark.parametrize("name", ["", ".gputrace", "folder/step", "/step", 5, None])
def test_capture_name_has_no_directory(name):
    with pytest.raises(ConfigurationError, match="not a valid name for a Metal capture"):
        capture_name(name)
    assert [capture_name(name) for name in ("step", "step.gputrace", "step.gputrace.gputrace")] == [
        "step",
        "step",
        "step.gputrace",
    ]


@pytest.mark.parametrize(
    ("device", "on_host"), [(DeviceType.CPU, True), (DeviceType.CUDA, False), (DeviceType.MPS, False)]
)
def test_host_events_are_those_of_the_cpu(device, on_host):
    assert is_host_event(FunctionEvent(0, "aten::mm", 0, 0, 1, device_type=device)) == on_host


@pytest.mark.real_computer
def test_metal_capture_requirements(monkeypatch):
    monkeypatch.setattr(torch.mps.profiler, "is_metal_capture_enabled", lambda: False)
    with pytest.raises(ConfigurationError, match="MTL_CAPTURE_ENABLED=1"):
        check_profiling("mps", False, "step")
    monkeypatch.setattr(torch.mps.profiler, "is_metal_capture_enabled", lambda: True)
    check_profiling("mps", False, "step")
    monkeypatch.delattr(torch.mps.profiler, "metal_capture")
    with pytest.raises(ConfigurationError, match=r"Install torch 2\.7 or newer\."):
        check_profiling("mps", False, "step")
