"""A sweep from its beginning to its end: search, compare the best in turn, choose the knee, let everything go."""

from __future__ import annotations

from ...devices.request import canonical
from ...devices.simulation import active
from ..workloads.timing import put_on_devices, same_random_numbers
from ..workloads.workload import TRAINING_STEP, Bench, Subject
from .measurement import Measurement
from .memory import limit_of
from .points import Point, knee_of
from .report import SweepReport
from .rules import SweepRules
from .search import Search


def sweep_of(subject: Subject, device: str, rules: SweepRules, fraction: float | None = None) -> SweepReport:
    """Return throughput and memory of a subject over batch sizes, with the knee.

    Args:
        subject: What is measured; it is put on the device beside what is there, and let go afterwards.
        device: Where.
        rules: How.
        fraction: The share of the device's memory at which torch refuses more; ``None`` where that is not known.

    Random numbers go on as if nothing had been.

    Raises:
        DeviceUnavailable: Where the subject itself does not fit in the memory of the device.
    """
    with same_random_numbers(device), put_on_devices(subject, [device]) as benches:
        return swept(subject, benches[device], rules, fraction)


def swept(subject: Subject, bench: Bench, rules: SweepRules, fraction: float | None) -> SweepReport:
    """Return what a sweep of a bench finds; the caches of its device are emptied before and after it."""
    measurement = Measurement(bench, rules, None)
    measurement.clean()
    measurement.limit = limit_of(bench.device, fraction)
    try:
        search = Search(measurement.point, measurement.hindrance, measurement.again, rules.gain, rules.largest)
        search.smallest = rules.first_rows(subject.task == TRAINING_STEP)
        points = search.run()
        compared = measurement.in_turn(points)
    finally:
        measurement.clean()
    knee, last = knee_of(compared, rules.gain), measurement.last
    return SweepReport(
        subject.name,
        subject.task,
        canonical(bench.device),
        points=merged(points, compared),
        compared=compared,
        knee=knee.rows if knee else None,
        stopped=search.stopped,
        limit=measurement.limit,
        method=measurement.method,
        gain=rules.gain,
        length=last.length if last else None,
        workers=last.workers if last else 0,
        dtype=last.dtype if last else None,
        row_shape=last.row_shape if last else None,
        simulated=active(),
    )


def merged(points: tuple[Point, ...], newer: tuple[Point, ...]) -> tuple[Point, ...]:
    """Return points, some of them replaced by newer ones of the same rows."""
    by_rows = {point.rows: point for point in newer}
    return tuple(by_rows.get(point.rows, point) for point in points)
