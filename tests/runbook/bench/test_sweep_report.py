"""Report of a sweep for given measurements: knee, reason, table, simulation labels and charts."""

import json
import math
from dataclasses import replace

import pytest

from openmed_nb._render.display import SIMULATION_NOTICE
from openmed_nb.runbook.bench.sweep import (
    BATCH_SIZE_LIMIT,
    MEMORY,
    OUT_OF_MEMORY,
    THROUGHPUT,
    TIME,
    Point,
    SweepReport,
)

MEBIBYTE = 1 << 20


def make_point(rows, speed, memory=None):
    """Return a point that fits."""
    return Point(rows, speed, (speed * 0.9, speed * 1.1), memory, 0.5)


POINTS = (
    make_point(16, 50.0, MEBIBYTE * 20),
    make_point(32, 100.0, MEBIBYTE * 30),
    make_point(64, 102.0, MEBIBYTE * 57),
)
CPU_REPORT = SweepReport("step", "own step", "cpu", POINTS, knee=32, stop_code=TIME)
CUDA_REPORT = SweepReport(
    "bundled",
    "annotation",
    "cuda:0",
    (*POINTS, Point(128, fits=False)),
    knee=32,
    stop_code=OUT_OF_MEMORY,
    limit=64 * MEBIBYTE,
    length=128,
    workers=2,
)


@pytest.mark.parametrize(
    ("seconds", "throughput", "spread"),
    [([0.1, 1.0], 4 / 0.55, None), ([1.0, 2.0, 4.0], 2.0, (4 / 3, 4 / 1.5)), ([1.0] * 5, 4.0, (4.0, 4.0))],
)
def test_with_timings_uses_median_and_quartiles(seconds, throughput, spread):
    """One or two steps have no quartiles."""
    point = Point(4).with_timings(seconds)

    assert point.throughput == pytest.approx(throughput)
    assert point.spread == (spread and pytest.approx(spread))


@pytest.mark.parametrize(
    ("task", "knee", "length", "tokens"),
    [
        ("annotation", 32, 128, 4096),
        ("annotation", None, 128, None),
        ("forward pass", 32, None, None),
        ("training step", 32, 128, None),
    ],
)
def test_batch_tokens_are_given_for_annotation(task, knee, length, tokens):
    report = replace(CPU_REPORT, task=task, knee=knee, length=length)

    assert report.batch_tokens == report.to_dict()["batch_tokens"] == tokens
    assert (f"nb.annotate(notes, batch_tokens={tokens})" in str(report)) == bool(tokens)


@pytest.mark.parametrize(
    ("stop_code", "title", "reason"),
    [
        (THROUGHPUT, "64 rows", "too little improvement"),
        (MEMORY, "64 rows", "because of the memory limit"),
        (OUT_OF_MEMORY, "64 rows", "do not fit in memory"),
        (BATCH_SIZE_LIMIT, "at least 64 rows", "were not requested"),
        (TIME, "at least 64 rows", "because of the time budget"),
    ],
)
def test_reason_explains_end_of_increasing_curve(stop_code, title, reason):
    """The title says at least if larger sizes may be better."""
    report = replace(CPU_REPORT, knee=64, stop_code=stop_code)

    assert report.still_increasing
    assert reason in report.reason in str(report)
    assert str(report).splitlines()[0] == f"Best batch size on cpu: {title}"


def test_report_text_has_the_knee():
    assert str(CUDA_REPORT).splitlines()[:5] == [
        "Best batch size on cuda:0: 32 rows",
        "  Model: bundled, task: annotation. Each row has 128 tokens. The loader has 2 workers.",
        "  No larger batch size in this sweep is more than 3% faster.",
        "  To set this batch size (32 rows of 128 tokens) yourself: nb.annotate(notes, batch_tokens=4096).",
        "Batch sizes (this run)",
    ]
    assert "30.0 MiB" in str(CUDA_REPORT)
    html = replace(CUDA_REPORT, name="<b>x</b>")._repr_html_()
    assert all(text in html for text in (CUDA_REPORT.reason, "30.0 MiB", OUT_OF_MEMORY, "knee", "<img"))
    assert "<b>" not in html


@pytest.mark.parametrize(
    ("point", "stop_code", "reason"),
    [
        (make_point(1, 2.0), TIME, "Increase seconds or max_batch_size."),
        (Point(2, fits=False), OUT_OF_MEMORY, "Not even 2 rows fit in memory."),
    ],
)
def test_sweep_without_knee_recommends_no_size(point, stop_code, reason):
    report = SweepReport("bundled", "annotation", "cpu", (point,), stop_code=stop_code, length=128)

    assert report.reason.endswith(reason)
    assert report.reason in str(report)
    assert (report.batch_tokens, report.knee_point, report.still_increasing) == (None, None, False)
    assert report.to_report().charts == ()
    assert not any(text in report._repr_html_() for text in (">knee<", "knee, ", "batch_tokens"))
    assert json.dumps(report.to_dict())


def test_to_dict_is_json_compatible():
    data = json.loads(json.dumps(CUDA_REPORT.to_dict()))

    assert data["schema"] == "openmed_nb/sweep/1"
    assert (data["knee"], data["best"], data["workers"], data["still_increasing"]) == (32, 64, 2, False)
    assert [size["fits"] for size in data["points"]] == [True, True, True, False]


def test_simulated_report_is_labeled():
    """The CPU is not labeled."""
    simulated = replace(CPU_REPORT, device="mps", simulated=True)

    assert "mps (SIMULATED)" in str(simulated)
    assert SIMULATION_NOTICE in str(simulated)
    assert str(replace(CPU_REPORT, simulated=True)).splitlines()[0] == "Best batch size on cpu: 32 rows"


def test_charts_label_knee_limit_and_out_of_memory():
    throughput, memory = replace(CUDA_REPORT, points=(*CUDA_REPORT.points, Point(256, fits=False))).charts

    assert [line.name for chart in (throughput, memory) for line in chart.lines] == ["throughput", "memory"]
    assert [(marker.position, marker.name) for marker in throughput.axes.vertical_markers] == [
        (5.0, "knee: 32 rows"),
        (math.log2(128), "out of memory"),
        (math.log2(256), "out of memory"),
    ]
    assert [tick.name for tick in CUDA_REPORT.charts[1].axes.ticks] == ["1", "2", "4", "8", "16", "32", "64", "128"]
    assert (throughput.axes.y_unit, memory.axes.y_unit, memory.axes.x_label) == ("rows/s", "MiB", "rows per batch")
    assert [limit.name for limit in memory.axes.reference_lines] == ["limit"]
    assert replace(CPU_REPORT, limit=1 << 40).charts[1].axes.reference_lines == ()
