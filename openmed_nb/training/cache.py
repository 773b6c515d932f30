"""Release of cached device memory between the steps of a training, if the cache has grown.

The allocator of a device keeps the blocks of freed tensors for later tensors. That of MPS keeps blocks for each new
shape of a batch: users report 72 GB of device memory for 6.7 GB of tensors after five steps, and a twelfth of the speed
(https://github.com/kyutai-labs/pocket-tts/pull/255), and a process that macOS stopped at 43 GB
(https://github.com/aedocw/epub2tts-chatterbox/pull/20).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .._render.values import JsonMixin, format_bytes, format_duration, format_percent, pluralize
from .._utils.clock import current_time, time_call
from ..devices.device import Device

# The cache is emptied if the device memory exceeds the memory that a step needs by this factor, and by this number of
# bytes. A step needs the peak memory of live tensors. If torch counts no peaks, it is the device memory after the first
# step that follows an empty cache.
DEFAULT_RELEASE_FACTOR = 2.0
MIN_EXCESS_BYTES = 1 << 30
# Maximum fraction of the training time for all releases. The first is always allowed, because its duration is unknown.
MAX_TIME_FRACTION = 0.02
# Minimum time between two readings of the memory. A reading takes 0.13 ms on an H100 (measured 2026-11-26 with
# benchmarks/training.py), which would be 2% of a step of 7 ms.
SECONDS_BETWEEN_READINGS = 0.1


@dataclass(frozen=True)
class CacheReleases(JsonMixin):
    """Releases of cached device memory between the steps of a training.

    Attributes:
        count: Number of releases.
        seconds: Duration of all releases, without the time that the device needed to finish its work.
        training_seconds: Time from the start of the training to the last reading of the memory.
        postponed: Number of readings after which a release was due, but would have exceeded the time limit.
        highest: Highest device memory of the process that was read at the end of a step, in bytes, before a release.
    """

    count: int = 0
    seconds: float = 0.0
    training_seconds: float = 0.0
    postponed: int = 0
    highest: int = 0

    JSON_PROPERTIES = ("time_fraction",)

    @property
    def time_fraction(self) -> float | None:
        """Fraction of the training time; ``None`` before the first step."""
        return self.seconds / self.training_seconds if self.training_seconds else None

    @property
    def sentences(self) -> tuple[str, ...]:
        """Sentences for a report; empty if no release was due."""
        if not self.count:
            return ()
        times = pluralize(self.count, "time")
        duration = format_duration(self.seconds)
        if self.time_fraction is not None:
            duration += f", {format_percent(self.time_fraction, '.1f')} of the time"
        highest = format_bytes(self.highest)
        sentences = [f"Between steps, the cache was emptied {times} ({duration}); device memory reached {highest}."]
        if self.postponed:
            times = pluralize(self.postponed, "time")
            limit = format_percent(MAX_TIME_FRACTION)
            sentences.append(f"A release was postponed {times} to take at most {limit} of the time.")
        return tuple(sentences)


NO_RELEASES = CacheReleases()


class CacheReleaser:
    """Empties the cache of a device after a step of a training, if the cache has grown.

    Attributes:
        releases: Releases so far.
    """

    def __init__(self, device: Device, factor: float | None) -> None:
        self.releases = NO_RELEASES
        self._device = device
        self._factor = factor
        self._start = current_time()
        self._last_seconds = 0.0
        self._next_reading = self._start
        self.note_empty_cache()

    def note_empty_cache(self) -> None:
        """Forget the memory of earlier steps, because the cache was emptied at the end of an epoch."""
        self._remaining = 0  # Device memory after the previous release.
        self._step_memory = 0  # Highest device memory after the first step that follows an empty cache.
        self._is_first_step = True

    def after_step(self) -> None:
        """Empty the cache if it has grown and the time limit allows it. The memory is read once for several short steps."""
        if self._factor is None or not self._device.has_allocator:
            return
        now = current_time()
        if now < self._next_reading and not self._is_first_step:
            return
        self._next_reading = now + SECONDS_BETWEEN_READINGS
        training_seconds = now - self._start
        memory = self._device.memory_stats()
        reserved = memory.reserved or 0
        highest = max(self.releases.highest, reserved)
        releases = replace(self.releases, training_seconds=training_seconds, highest=highest)
        if self._is_first_step:
            self._step_memory = max(self._step_memory, reserved)
            self._is_first_step = False
        needed = self._step_memory if memory.peak is None else memory.peak
        excess = reserved - max(needed, self._remaining)
        if reserved > self._factor * needed and excess > MIN_EXCESS_BYTES:
            allowed_seconds = MAX_TIME_FRACTION * training_seconds
            if releases.count and releases.seconds + self._last_seconds > allowed_seconds:
                releases = replace(releases, postponed=releases.postponed + 1)
            else:
                # Waiting for the device is not counted, because this work is part of the training.
                self._device.synchronize()
                self._last_seconds = time_call(self._device.empty_cache)
                self._remaining = self._device.memory_stats().reserved or 0
                self._is_first_step = True
                releases = replace(releases, count=releases.count + 1, seconds=releases.seconds + self._last_seconds)
        self.releases = releases
