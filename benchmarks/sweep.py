"""Print how near the knee of a sweep is to the best of an exhaustive one, measured in the same run.

    python benchmarks/sweep.py [--device cpu|cuda|mps] [--seconds N] [--largest N] [--only CASE] [--json FILE]

Compared is the throughput at the knee with the highest of all sizes: 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20 and so on,
four to each doubling, until one does not fit, or until they are eight times the largest that the sweep has tried. After a
first time alone, those within a fifth of the best are measured again alternately, and so is the knee. The models are the
bundled one and a DistilBERT of 66 million random weights, with rows of 128 tokens, annotating and training.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import DistilBertConfig, DistilBertForTokenClassification

from openmed_nb._utils.clock import current_time
from openmed_nb.runbook.bench.sweep import (
    Point,
    SweepMeasurement,
    SweepReport,
    find_best,
    memory_limit,
    release_memory,
    select_fitting,
    sweep,
)
from openmed_nb.runbook.bench.workloads import make_target
from openmed_nb.session import SESSION

ALLOWED = 0.95
"""The knee has at least this share of the best throughput."""

NEAR = 0.8
"""Sizes with this share of the best throughput are measured again."""

ROUND_SECONDS = 60.0
"""After this time, the rounds of the sizes near the best end."""

BEYOND = 8
"""So many times the largest size of the sweep is looked at."""

EXAMPLE = {name: torch.ones(1, 128, dtype=torch.long) for name in ("input_ids", "attention_mask")}


def sizes() -> Iterator[int]:
    """Yield the sizes of an exhaustive sweep: four to each doubling."""
    rows = 1
    while True:
        yield rows
        rows += max(1, (1 << rows.bit_length() - 1) // 4)


def exhaustive(measurement: SweepMeasurement, largest: int) -> list[Point]:
    """Return every size that fits, up to the largest; the clock of the search is not looked at."""
    points: list[Point] = []
    for rows in sizes():
        if rows > largest or (points and measurement.stop_reason(rows, points)):
            break
        point = measurement.measure_size(rows)
        if not point.fits:
            break
        points.append(point)
    return points


def again(measurement: SweepMeasurement, points: list[Point], knee: int) -> dict[int, Point]:
    """Return the sizes near the best, and the knee, measured alternately."""
    best = find_best(points)
    assert best is not None  # noqa: S101 - one row fits
    near = [point for point in select_fitting(points) if point.rows == knee or point.speed >= NEAR * best.speed]
    measurement.time_budget = current_time() - measurement.start + ROUND_SECONDS
    return {point.rows: point for point in measurement.measure_interleaved(near)}


def compared(asked: dict[str, Any], largest: int | None, seconds: float) -> dict[str, Any]:
    """Return a sweep next to an exhaustive one."""
    begin = time.perf_counter()
    report = sweep(**asked, max_batch_size=largest, seconds=seconds)
    seconds = time.perf_counter() - begin
    subject, device = make_target(**{"model": None, **asked}, arguments={})
    bench = subject.build(device)
    measurement = SweepMeasurement(
        bench, 1e9, memory_limit(bench.device, SESSION.device_manager.memory_fraction(device))
    )
    assert report.knee is not None  # noqa: S101 - one row fits
    largest = BEYOND * select_fitting(report.points)[-1].rows if largest is None else largest
    points = exhaustive(measurement, largest)
    knee = report.knee_point
    assert knee is not None  # noqa: S101
    turned = again(
        measurement, sorted({point.rows: point for point in [*points, knee]}.values(), key=rows_of), knee.rows
    )
    release_memory(device)
    best = find_best(turned.values())
    assert best is not None  # noqa: S101
    return {
        "report": report,
        "seconds": seconds,
        "exhaustive_seconds": current_time() - measurement.start,
        "best": best.rows,
        "largest": points[-1].rows,
        "ratio": turned[knee.rows].speed / best.speed,
    }


def rows_of(point: Point) -> int:
    """Return the rows of a point."""
    return point.rows


def show(name: str, found: dict[str, Any]) -> None:
    """Print a line of figures, and why."""
    report: SweepReport = found["report"]
    passed = "ok" if found["ratio"] >= ALLOWED else "BELOW"
    print(
        f"{name}: knee {report.knee}, best {found['best']} of up to {found['largest']} rows,"
        f" ratio {found['ratio']:.3f} ({passed}, {ALLOWED} wanted);"
        f" the sweep took {found['seconds']:.1f} s, the exhaustive one {found['exhaustive_seconds']:.1f} s"
    )
    print(f"  {report.reason}")


def main() -> None:
    """Run all comparisons on one device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None, help="the session's device where it is left out")
    parser.add_argument("--seconds", type=float, default=30.0, help="about how long each sweep may take")
    parser.add_argument("--largest", type=int, default=None, help="the most rows, of both sweeps")
    parser.add_argument("--only", default="", help="the cases whose names have this in them, such as training")
    parser.add_argument("--json", type=Path, default=None, help="write the points of the sweeps here")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    other = DistilBertForTokenClassification(DistilBertConfig(num_labels=3))
    labeled = {**EXAMPLE, "labels": torch.zeros(1, 128, dtype=torch.long)}
    wanted = {
        "bundled, annotating": {"device": arguments.device},
        "bundled, training": {"training": True, "device": arguments.device},
        "DistilBERT, forward": {"model": other, "data": EXAMPLE, "device": arguments.device},
        "DistilBERT, training": {"model": other, "data": labeled, "training": True, "device": arguments.device},
    }
    print(f"torch {torch.__version__}, {SESSION.device(arguments.device).device}")
    reports = {}
    for name, workload in ((name, workload) for name, workload in wanted.items() if arguments.only in name):
        found = compared(workload, arguments.largest, arguments.seconds)
        show(name, found)
        reports[name] = {**found, "report": found["report"].to_dict()}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(reports, indent=2), "utf-8")


if __name__ == "__main__":
    main()
