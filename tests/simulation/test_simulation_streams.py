"""Streams of MPS in the simulation: as in the installed torch, absent up to release 2.15 (pytorch#191415)."""

import pytest
import torch

import openmed_nb as nb

pytestmark = pytest.mark.real_computer  # Each test starts its own simulation.

NAMES = ("Stream", "stream", "current_stream", "default_stream", "set_stream")


def test_streams_exist_as_in_the_installed_torch():
    installed = [name for name in NAMES if hasattr(torch.mps, name)]
    with nb.simulated_mps():
        assert [name for name in NAMES if hasattr(torch.mps, name)] == installed
        assert hasattr(torch._C, "_mps_setStream") == bool(installed)


class EmptyBase:
    """Base class of ``torch.mps.Stream`` in a build without MPS."""

    def __new__(cls, *_args, **_options):
        raise RuntimeError("Tried to instantiate dummy base class Stream")

    def __init__(self, *_args, **_options):
        raise RuntimeError("Tried to instantiate dummy base class Stream")


class Stream(EmptyBase):
    """Stream with the documented interface of ``torch.mps.Stream``."""

    def synchronize(self):
        super().synchronize()

    @property
    def stream_id(self):
        return super().stream_id


@pytest.fixture
def stream_class(monkeypatch):
    """The class of a torch that has streams of MPS."""
    monkeypatch.setattr(torch.mps, "Stream", Stream, raising=False)
    return Stream


def test_streams_have_numbers_of_a_pool(stream_class):
    with nb.simulated_mps():
        streams = [stream_class() for _ in range(33)]
        default = stream_class(stream_id=0)

        assert [stream.stream_id for stream in streams] == [*range(1, 33), 1]
        assert streams[0] == streams[32] != streams[1]
        assert len(set(streams)) == 32
        assert (default.stream_id, default.device, default.query()) == (0, torch.device("mps", 0), True)
        for wait in (default.synchronize, lambda: default.wait_stream(streams[0]), lambda: default.wait_event(None)):
            assert wait() is None


def test_current_stream_is_set_and_tensors_do_not_change(stream_class):
    with nb.simulated_mps():
        assert torch._C._mps_getCurrentStream().stream_id == 0
        torch._C._mps_setStream(stream_class())
        assert torch._C._mps_getCurrentStream().stream_id == 1
        assert torch.ones(3, device="mps").sum().item() == 3
    with nb.simulated_mps():
        assert torch._C._mps_getCurrentStream().stream_id == 0


def test_streams_are_restored(stream_class):
    with nb.simulated_mps():
        stream_class()
    with pytest.raises(RuntimeError, match="dummy base class"):
        stream_class()

    assert not hasattr(stream_class.__base__, "query")


def test_real_streams_of_a_mac_stay(monkeypatch):
    """On a Mac, the class is derived from ``torch.Stream``, and cannot be changed."""

    class RealStream(torch.Stream):
        """Stream of a build with MPS."""

    monkeypatch.setattr(torch.mps, "Stream", RealStream, raising=False)
    with nb.simulated_mps():
        assert torch.mps.Stream is RealStream
        assert not hasattr(torch._C, "_mps_setStream")
