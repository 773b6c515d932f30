"""Measuring once how many tokens should run at once on this computer with this model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..devices.allocators import empty_cache
from ..devices.backend import TENSOR_LOCK, synchronize
from ..devices.memory import is_out_of_memory
from ..devices.simulation import shown_device
from ..devices.transfer import to_array
from ..interface.display import Report, Shown, Table
from .forward import Network

LADDER = tuple(256 * 2**power for power in range(9))
"""The numbers of tokens that are tried, from the smallest up."""

LENGTH = 128
"""How long the rows are that are tried."""

GAIN = 1.03
"""A larger batch must be so many times faster to be worth its memory."""


@dataclass(frozen=True, repr=False)
class Calibration(Shown):
    """How fast a model is with batches of several sizes.

    Attributes:
        device: The device that was measured.
        speeds: Pairs of tokens at once and tokens per second.
    """

    device: str
    speeds: tuple[tuple[int, float], ...]

    @property
    def batch_tokens(self) -> int:
        """The smallest batch that no larger one beats by much.

        Example:
            >>> Calibration("cpu", ((256, 900.0), (512, 1000.0), (1024, 1010.0))).batch_tokens
            512
        """
        best = self.speeds[0]
        for tokens, speed in self.speeds[1:]:
            best = (tokens, speed) if speed > GAIN * best[1] else best
        return best[0]

    def to_dict(self) -> dict[str, Any]:
        """Return device, choice and speeds as plain mappings and numbers."""
        return {"device": self.device, "batch_tokens": self.batch_tokens, "tokens_per_second": dict(self.speeds)}

    def report(self) -> Report:
        """Return the choice, and a table of the speeds."""
        rows = tuple((f"{tokens:,}", f"{speed:,.0f}") for tokens, speed in self.speeds)
        table = Table("Measured", ("tokens at once", "tokens per second"), rows)
        return Report(f"{self.batch_tokens:,} tokens at once on {self.device}", tables=(table,))


def calibrate(network: Network, longest: int) -> Calibration:
    """Measure a model on its device with batches of several sizes, until larger ones gain nothing or do not fit.

    Args:
        network: The model.
        longest: The most tokens that it takes.
    """
    length = min(LENGTH, longest)
    speeds: list[tuple[int, float]] = []
    with TENSOR_LOCK:
        for tokens in LADDER:
            speed = measured_speed(network, max(1, tokens // length), length)
            if speed == 0 and speeds:
                break
            speeds.append((tokens, speed))
            if len(speeds) > 2 and all(one[1] <= GAIN * speeds[-3][1] for one in speeds[-2:]):  # noqa: PLR2004
                break
    return Calibration(shown_device(str(network.model.device)), tuple(speeds))


def measured_speed(network: Network, rows: int, length: int) -> float:
    """Return how many tokens per second run in batches of a shape, 0 where these do not fit in memory."""
    ids = np.full((rows, length), network.frame.padding, np.int64)
    values = {"input_ids": ids, "token_type_ids": np.zeros_like(ids), "attention_mask": np.ones_like(ids)}
    inputs = {name: array for name, array in values.items() if name in network.inputs}
    try:
        seconds = min(timed(lambda: finish(network, inputs)) for _ in range(3))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        empty_cache(str(network.model.device))
        return 0.0
    return rows * length / seconds


def finish(network: Network, inputs: dict[str, np.ndarray]) -> None:
    """Run a batch to its end."""
    outputs = network(inputs)
    synchronize(network.model.device)
    for tensor in outputs:
        to_array(tensor)


def timed(function: Callable[[], None]) -> float:
    """Return how long a function takes, in seconds."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin
