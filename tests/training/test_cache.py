"""Release of cached device memory between steps: when it is due, what it costs, and what it leaves."""

import itertools
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from helpers.clock import use_clock
from openmed_nb.devices.device import Device, MemoryStats
from openmed_nb.devices.environment import HIGH_WATERMARK_VARIABLE, LOW_WATERMARK_VARIABLE
from openmed_nb.simulation.memory import MacMemory, SimulatedAllocator
from openmed_nb.training import EpochHooks
from openmed_nb.training import epochs as epochs_module
from openmed_nb.training.curve import CacheReleases
from openmed_nb.training.epochs import CacheReleaser

GIB = 1 << 30
GB = 10**9

pytestmark = pytest.mark.real_computer  # Each test starts its own simulation.
without_time_limits = pytest.mark.usefixtures("long_steps", "no_time_limit")


@pytest.fixture
def grow(monkeypatch):
    """Function that trains on a Mac with 64 GiB whose device memory grows as in pocket-tts#255.

    Tensors take 6.7 GB. A step takes a second and makes 20 tensors, each with a new size. The function returns the hooks,
    and the device memory after each step.
    """
    # The watermarks of torch, which pocket-tts did not change.
    monkeypatch.setenv(HIGH_WATERMARK_VARIABLE, "1.7")
    monkeypatch.setenv(LOW_WATERMARK_VARIABLE, "1.4")

    def grow(steps, release_when=2.0, release_seconds=0.015, epochs=1):
        after_steps = []
        with nb.simulated_mps("64 GiB") as mps:
            mps.allocator.has_size_classes = False
            with use_clock(lambda: len(after_steps) + release_seconds * mps.cache_clears):
                model = torch.empty(6_700_000_000, dtype=torch.uint8, device="mps")
                hooks = EpochHooks("mps", release_when=release_when)
                size = 650_000_000
                for _ in range(epochs):
                    for _ in range(steps):
                        for _ in range(20):
                            size += 10_000
                            torch.empty(size, dtype=torch.uint8, device="mps")
                        after_steps.append(0)
                        hooks.step()
                        after_steps[-1] = mps.allocator.driver_allocated
                    hooks.end_epoch()
                assert model.is_mps
            return hooks, after_steps

    return grow


def test_device_memory_grows_without_releases(grow):
    """In pocket-tts#255 it grew to 72 GB within five steps: to the low watermark of torch, 1.4 times 48 GiB."""
    hooks, after_steps = grow(5, release_when=None)

    assert after_steps[4] > 65 * GB
    assert hooks.releases == CacheReleases()


def test_device_memory_stays_below_twice_the_tensors(grow):
    hooks, after_steps = grow(5, epochs=2)

    assert max(after_steps) < 2 * 6.7 * GB
    assert hooks.releases.count == 10
    assert hooks.releases.seconds == pytest.approx(10 * 0.015)
    assert hooks.curve.releases == hooks.releases
    assert "the cache was emptied 10 times (" in str(hooks.curve)
    hooks.begin("cpu")
    assert hooks.releases == CacheReleases()


@pytest.mark.parametrize(("seconds", "count"), [(0.2, 2), (1.5, 1)])
def test_releases_keep_time_limit(grow, seconds, count):
    releases = grow(30, release_seconds=seconds)[0].releases

    assert releases.count == count
    assert count == 1 or releases.seconds <= 0.02 * releases.training_seconds


def test_constant_shapes_need_no_release():
    """The blocks of activations are cached between steps, and the next step needs them again."""
    with nb.simulated_mps("64 GiB") as mps:
        model = torch.empty(2 * GIB, dtype=torch.uint8, device="mps")
        hooks = EpochHooks("mps")
        for _ in range(3):
            tensors = [torch.empty(8 * GIB, dtype=torch.uint8, device="mps") for _ in range(4)]
            del tensors
            hooks.step()
        assert mps.allocator.driver_allocated >= model.nbytes + 32 * GIB

    assert hooks.releases.count == 0


@without_time_limits
def test_trainer_releases_between_accumulated_batches(make_trainer, monkeypatch):
    """Eight batches in four steps, whose gradients are accumulated; the smallest excess is released."""
    monkeypatch.setattr(epochs_module, "MIN_EXCESS_BYTES", 0)
    with nb.simulated_mps("8 GiB") as mps:
        callback = nb.training.callback("trainer", release_when=1.0001)
        options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 1}
        make_trainer(callback, **options, **nb.training.arguments("trainer")).train()
        assert mps.cache_clears > callback.hooks.releases.count > 4


@dataclass(frozen=True)
class RecordedDevice(Device):
    """Device whose memory statistics are given, and which releases what exceeds an amount."""

    has_allocator = True
    stats: list[MemoryStats] = field(default_factory=list)
    kept: int = 0

    def memory_stats(self) -> MemoryStats:
        return self.stats[-1]

    def empty_cache(self) -> None:
        self.stats[-1] = MemoryStats(self.stats[-1].allocated, self.kept, peak=self.stats[-1].peak)

    def step(self, releaser: CacheReleaser, reserved: float, peak: float | None = None) -> int:
        """End a step with an amount of device memory in GiB, and return the number of releases so far."""
        self.stats.append(MemoryStats(GIB, int(reserved * GIB), peak=None if peak is None else int(peak * GIB)))
        releaser.after_step()
        return releaser.releases.count


@pytest.fixture
def no_time_limit(monkeypatch):
    """Releases may take the whole time of a training."""
    monkeypatch.setattr(epochs_module, "MAX_TIME_FRACTION", 1)


@pytest.fixture
def long_steps():
    """A clock by which each step takes seconds, so that the memory is read after each."""
    with use_clock(map(float, itertools.count()).__next__):
        yield


@pytest.mark.usefixtures("no_time_limit")
def test_memory_is_read_once_for_short_steps():
    device = RecordedDevice("recorded", kept=5 * GIB)
    times = iter([0.0, 0.01, 0.05, 0.1, 0.12, 0.12, 0.13, 0.15])
    with use_clock(times.__next__):
        releaser = CacheReleaser(device, 2.0)
        assert device.step(releaser, 5, 5) == 0  # The first step is read.
        assert [device.step(releaser, size, 5) for size in (20, 20)] == [0, 0]
        assert device.step(releaser, 20, 5) == 1
        assert device.step(releaser, 5, 5) == 1  # As is the first one after a release.

    assert releaser.releases.training_seconds == 0.15
    assert next(times, None) is None


@without_time_limits
def test_first_step_is_the_reference_without_peaks():
    """Before torch 2.13, MPS counts no peaks. A step needs 5 GiB, and its tensors are 1 GiB."""
    device = RecordedDevice("recorded", kept=GIB)
    releaser = CacheReleaser(device, 2.0)

    assert [device.step(releaser, size) for size in (5, 5, 10, 10.5)] == [0, 0, 0, 1]
    # A longer batch raises the reference until the end of the epoch, and a shorter one does not lower it.
    assert [device.step(releaser, size) for size in (8, 16, 16.5, 3, 15)] == [1, 1, 2, 2, 2]
    releaser.note_empty_cache()
    assert [device.step(releaser, size) for size in (3, 6, 6.5)] == [2, 2, 3]


@without_time_limits
def test_release_without_effect_is_not_repeated():
    """Memory outside the cache, such as compiled graphs, remains."""
    device = RecordedDevice("recorded", kept=20 * GIB)
    releaser = CacheReleaser(device, 2.0)

    assert [device.step(releaser, size, 5) for size in (20, 20, 20.9, 21.1)] == [1, 1, 1, 2]


# Device memory and needed memory in GiB, and the number of releases.
DUE = [(15, 7, 1), (14, 7, 0), (1.9, 0.9, 0), (2.1, 0.9, 1), (0, 0, 0)]


@pytest.mark.parametrize(("reserved", "needed", "count"), DUE)
def test_release_needs_factor_and_gigabyte(reserved, needed, count):
    device = RecordedDevice("recorded", kept=GIB)

    assert device.step(CacheReleaser(device, 2.0), reserved, needed) == count


def test_memory_is_not_read_without_need():
    """The CPU has no allocator, and without a factor nothing is due."""
    for releaser in (CacheReleaser(Device("other"), 2.0), CacheReleaser(RecordedDevice("recorded"), None)):
        releaser.after_step()
        assert releaser.releases == CacheReleases()


@given(st.lists(st.lists(st.integers(1, 3 * GIB), min_size=1, max_size=4), min_size=1, max_size=40))
def test_device_memory_is_bounded(steps):
    """For any sizes, device memory after a step is at most twice the peak of tensors, or a gigabyte more."""
    allocator = SimulatedAllocator(MacMemory(64 * GIB), {})
    allocator.has_size_classes = False

    class AllocatorDevice(Device):
        has_allocator = True

        def memory_stats(self) -> MemoryStats:
            return MemoryStats(allocator.allocated, allocator.driver_allocated, peak=allocator.peak)

        def empty_cache(self) -> None:
            allocator.empty_cache()

    with use_clock(map(float, itertools.count()).__next__), pytest.MonkeyPatch.context() as patched:
        patched.setattr(epochs_module, "MAX_TIME_FRACTION", 1)
        releaser = CacheReleaser(AllocatorDevice("mps"), 2.0)
        allocator.allocate(GIB)
        for sizes in steps:
            for block in [allocator.allocate(size) for size in sizes]:
                allocator.free(block)
            releaser.after_step()
            assert allocator.driver_allocated <= max(2 * allocator.peak, allocator.peak + GIB)
