"""The memory bars: figures and their words, and that no allocator is asked before its device has computed."""

from dataclasses import replace

import psutil
import pytest
import torch

import openmed_nb as nb
from openmed_nb.devices.choice import DeviceChoice
from openmed_nb.devices.registry import get_device
from openmed_nb.notebook.panel.state import PanelState, memory_bars, read_state
from openmed_nb.session import SESSION

CPU = DeviceChoice("cpu", "auto", "default", "", confirmed=True)
CAPACITY = get_device("mps").memory_limit_base
PLANNED = DeviceChoice("mps", "auto", "default", "", confirmed=False)


@pytest.fixture
def simulated():
    """A simulated Mac with 6 GiB, of which Metal recommends 4."""
    before = SESSION.device_manager
    with nb.simulated_mps("6 GiB") as device:
        yield device
    assert SESSION.device_manager is before


CHOICES = [None, CPU, *(replace(PLANNED, device=device) for device in ("cpu", "mps", "cuda", "cuda:1"))]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_process_is_the_only_bar_without_a_confirmed_gpu(choice):
    """The question would start the allocator of a planned GPU, or fail."""
    (bar,) = memory_bars(choice)

    assert bar.name == "Python session"
    assert 0 < bar.parts[0].size < bar.limit == psutil.virtual_memory().total
    assert bar.row[2].endswith("(memory of this computer)")


@pytest.mark.real_computer  # It begins its own simulation.
class TestSimulatedMps:
    """A device that counts its memory."""

    def test_bar_counts_tensors_and_cache(self, simulated):
        """Living tensors are allocated, freed ones are cached, and both are counted against what Metal recommends."""
        kept, gone = (torch.zeros(1 << 26, device="mps") for _ in range(2))
        bar, process = memory_bars(nb.device())
        assert [part.name for part in bar.parts] == ["allocated", "cached"]
        assert bar.parts[0].size >= kept.nbytes + gone.nbytes
        assert bar.limit == simulated.allocator.memory.recommended == torch.mps.recommended_max_memory()
        assert process.name == "Python session"

        del gone
        after, _ = memory_bars(nb.device())
        assert bar.parts[0].size - after.parts[0].size == kept.nbytes
        assert after.parts[1].size >= kept.nbytes
        assert sum(part.size for part in after.parts) == torch.mps.driver_allocated_memory()

    @pytest.mark.parametrize(
        ("fraction", "expected", "description"),
        [
            (None, 1, CAPACITY),
            (1.0, 1, CAPACITY),
            (0.5, 0.5, f"50% of {CAPACITY}"),
            (1.7, 1.7, f"170% of {CAPACITY}"),
        ],
    )
    def test_bar_ends_at_the_limit_of_the_allocator(self, simulated, fraction, expected, description):
        """The end of the bar is where torch refuses more, and says so where that is not what Metal recommends."""
        bar = memory_bars(nb.device(), fraction)[0]

        assert bar.limit == int(expected * simulated.allocator.memory.recommended)
        assert bar.limit_name == description

    def test_bar_ends_at_the_limit_of_the_session(self, simulated):
        """A limit that the session has set is the end of the bar."""
        nb.training.limit_memory(0.25)
        bar = PanelState(**read_state(SESSION)).memory[0]

        assert bar.limit == simulated.allocator.memory.recommended // 4
        assert bar.limit_name == f"25% of {CAPACITY}"
