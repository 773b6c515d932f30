"""Release of cached device memory between steps: when it is due, what it costs, and what it leaves."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from openmed_nb._utils.clock import use_clock
from openmed_nb.devices.device import Device, MemoryStats
from openmed_nb.devices.environment import HIGH_WATERMARK_VARIABLE, LOW_WATERMARK_VARIABLE
from openmed_nb.simulation.memory import MacMemory, SimulatedAllocator
from openmed_nb.training import EpochHooks
from openmed_nb.training import epochs as epochs_module
from openmed_nb.training.curve import NO_RELEASES
from openmed_nb.training.epochs import CacheReleaser

MIB = 1 << 20
GIB = 1 << 30
GB = 10**9


class Clock:
    """Clock of a training: a step takes a second, and each release of the simulated device some time."""

    def __init__(self, count_releases: Callable[[], int], release_seconds: float) -> None:
        self.steps = 0
        self.count_releases = count_releases
        self.release_seconds = release_seconds

    def __call__(self) -> float:
        return self.steps + self.release_seconds * self.count_releases()


@dataclass
class Growth:
    """Training on a Mac with 64 GiB whose device memory grows as in pocket-tts#255.

    Tensors take 6.7 GB. A step makes 20 tensors, one after the other, and each has a new size.
    """

    factor: float | None = 2.0
    release_seconds: float = 0.015
    after_steps: list[int] = field(default_factory=list)
    highest: int = 0

    def train(self, steps: int, epochs: int = 1) -> EpochHooks:
        """Train, and record the device memory after each step, and the highest within the steps."""
        with nb.simulated_mps("64 GiB") as mps:
            mps.allocator.has_size_classes = False
            clock = Clock(lambda: mps.cache_clears, self.release_seconds)
            with use_clock(clock):
                model = torch.empty(6_700_000_000, dtype=torch.uint8, device="mps")
                hooks = EpochHooks("mps", release_when=self.factor)
                size = 650_000_000
                for _ in hooks.epochs(epochs):
                    for _ in range(steps):
                        for _ in range(20):
                            size += 10_000
                            torch.empty(size, dtype=torch.uint8, device="mps")
                        clock.steps += 1
                        hooks.step()
                        self.highest = max(self.highest, mps.allocator.driver_peak)
                        self.after_steps.append(mps.allocator.driver_allocated)
                assert model.is_mps
            return hooks


@pytest.fixture
def default_watermarks(monkeypatch):
    """The watermarks of torch, which pocket-tts did not change."""
    monkeypatch.setenv(HIGH_WATERMARK_VARIABLE, "1.7")
    monkeypatch.setenv(LOW_WATERMARK_VARIABLE, "1.4")


pytestmark = pytest.mark.real_computer  # Each test starts its own simulation.


@pytest.mark.usefixtures("default_watermarks")
def test_device_memory_grows_without_releases():
    """In pocket-tts#255 it grew to 72 GB within five steps: to the low watermark of torch, 1.4 times 48 GiB."""
    growth = Growth(None)
    releases = growth.train(7).releases

    assert growth.after_steps[4] > 65 * GB
    assert growth.highest == pytest.approx(72 * GB, rel=0.02)
    assert releases == NO_RELEASES


@pytest.mark.usefixtures("default_watermarks")
def test_device_memory_stays_below_twice_the_tensors():
    growth = Growth()
    hooks = growth.train(25, epochs=2)
    releases = hooks.releases

    assert max(growth.after_steps) < 2 * 6.7 * GB
    assert releases.count == 50
    assert releases.seconds == pytest.approx(50 * 0.015)
    assert releases.time_fraction <= 0.02
    assert releases.postponed == 0
    assert releases.highest == growth.highest < 3 * 7 * GB
    assert hooks.curve.releases == releases
    assert hooks.curve.to_dict()["releases"]["count"] == 50
    assert "the cache was emptied 50 times (0.8 s, 1.5% of the time)" in str(hooks.curve)
    hooks.begin("cpu")
    assert hooks.releases == NO_RELEASES


@pytest.mark.usefixtures("default_watermarks")
@pytest.mark.parametrize("seconds", [0.2, 1.5])
def test_releases_keep_time_limit(seconds):
    growth = Growth(release_seconds=seconds)
    hooks = growth.train(100)
    releases = hooks.releases

    assert releases.count == (100 * 0.02) // seconds or 1
    assert releases.time_fraction <= 0.02
    assert releases.postponed > 0
    assert f"A release was postponed {releases.postponed} times" in str(hooks.curve)


@pytest.mark.parametrize("activations", [1 * GIB, 30 * GIB])
def test_constant_shapes_need_no_release(activations):
    """The blocks of activations are cached between steps, and the next step needs them again."""
    with nb.simulated_mps("64 GiB") as mps:
        model = torch.empty(2 * GIB, dtype=torch.uint8, device="mps")
        hooks = EpochHooks("mps")
        for _ in hooks.epochs(3):
            for _ in range(5):
                tensors = [torch.empty(activations // 4, dtype=torch.uint8, device="mps") for _ in range(4)]
                del tensors
                hooks.step()
            cached = mps.allocator.driver_allocated
        assert cached >= model.nbytes + activations

    assert (hooks.releases.count, hooks.releases.postponed) == (0, 0)
    assert hooks.releases.highest >= 2 * GIB + activations
    assert hooks.curve.releases.sentences == ()


@pytest.mark.usefixtures("long_steps", "no_time_limit")
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


@pytest.mark.usefixtures("long_steps", "no_time_limit")
def test_first_step_is_the_reference_without_peaks():
    """Before torch 2.13, MPS counts no peaks. A step needs 5 GiB, and its tensors are 1 GiB."""
    device = RecordedDevice("recorded", kept=GIB)
    releaser = CacheReleaser(device, 2.0)

    assert [device.step(releaser, size) for size in (5, 5, 9, 10)] == [0, 0, 0, 0]
    assert device.step(releaser, 10.5) == 1
    # A longer batch raises the reference until the end of the epoch, and a shorter one does not lower it.
    assert [device.step(releaser, size) for size in (8, 15, 16)] == [1, 1, 1]
    assert device.step(releaser, 16.5) == 2
    assert [device.step(releaser, size) for size in (3, 15)] == [2, 2]
    releaser.note_empty_cache()
    assert [device.step(releaser, size) for size in (3, 6, 6.5)] == [2, 2, 3]


@pytest.mark.usefixtures("long_steps", "no_time_limit")
def test_release_without_effect_is_not_repeated():
    """Memory outside the cache, such as compiled graphs, remains."""
    device = RecordedDevice("recorded", kept=20 * GIB)
    releaser = CacheReleaser(device, 2.0)

    assert [device.step(releaser, size, 5) for size in (20, 20, 20, 20.9)] == [1, 1, 1, 1]
    assert device.step(releaser, 21.1, 5) == 2


# Device memory, needed memory and memory after the previous release in GiB, and whether a release is due.
DUE = [
    (15, 7, 0, True),
    (14, 7, 0, False),  # Not more than twice the needed memory.
    (1.9, 0.9, 0, False),  # Not more than a gigabyte above it.
    (2.1, 0.9, 0, True),
    (15, 7, 14.5, False),  # The previous release left nearly as much.
    (15, 7, 13.5, True),
    (0, 0, 0, False),
]


@pytest.mark.parametrize(("reserved", "needed", "remaining", "is_due"), DUE)
def test_release_needs_factor_and_gigabyte(reserved, needed, remaining, is_due):
    device = RecordedDevice("recorded", kept=GIB)
    releaser = CacheReleaser(device, 2.0)
    releaser._remaining = int(remaining * GIB)

    assert device.step(releaser, reserved, needed) == is_due


def test_memory_is_not_read_without_need():
    """The CPU has no allocator, and without a factor nothing is due."""
    device = RecordedDevice("recorded")
    for releaser in (CacheReleaser(Device("other"), 2.0), CacheReleaser(device, None)):
        releaser.after_step()
        assert releaser.releases == NO_RELEASES


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
