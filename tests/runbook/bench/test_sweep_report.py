"""Report of a sweep for given measurements: knee, reasons, tables, simulation labels and charts."""

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
    return Point(rows, speed, (speed * 0.9, speed * 1.1), memory, 0.5, 9)


POINTS = (
    make_point(16, 50.0, MEBIBYTE * 20),
    make_point(32, 100.0, MEBIBYTE * 30),
    make_point(64, 102.0, MEBIBYTE * 57),
)
CPU_REPORT = SweepReport("step", "own step", "cpu", POINTS, POINTS, knee=32, stop_code=TIME)
CUDA_REPORT = SweepReport(
    "bundled",
    "annotation",
    "cuda:0",
    (*POINTS, Point(128, fits=False)),
    POINTS[1:],
    knee=32,
    stop_code=OUT_OF_MEMORY,
    limit=64 * MEBIBYTE,
    method="counted",
    length=128,
    workers=2,
)
INCREASING_REPORT = replace(CPU_REPORT, knee=64)


@pytest.mark.parametrize(
    ("seconds", "throughput", "spread"),
    [([0.1, 1.0], 4 / 0.55, None), ([1.0, 2.0, 4.0], 2.0, (4 / 3, 4 / 1.5)), ([1.0] * 5, 4.0, (4.0, 4.0))],
)
def test_with_timings_uses_median_and_quartiles(seconds, throughput, spread):
    """One or two steps have no quartiles."""
    point = Point(4).with_timings(seconds)

    assert (point.throughput, point.steps) == (pytest.approx(throughput), len(seconds))
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
    ("knee", "points", "reason"),
    [
        (32, POINTS, "32 rows: 64 would be 2% faster and take 1.9 times the memory."),
        (1, [make_point(1, 9.0), make_point(2, 4.5)], "1 row: 2 would be 50% slower."),
        (1, [make_point(1, 9.0), make_point(2, 9.01)], "1 row: 2 would be as fast."),
        (64, POINTS, "64 rows: throughput is still increasing; no larger size that fits was measured."),
        (None, [], "Not even 1 row fits in memory."),
        (None, [Point(2, fits=False)], "Not even 2 rows fit in memory."),
    ],
)
def test_knee_reason_compares_best_larger_size(knee, points, reason):
    assert SweepReport("x", "own step", "cpu", tuple(points), knee=knee).knee_reason == reason


@pytest.mark.parametrize(
    ("stop_code", "stop_reason", "knee_reason", "at_least"),
    [
        (THROUGHPUT, "too little", "that fits was measured", ""),
        (MEMORY, "1.0 MiB", "because of the memory limit", ""),
        (OUT_OF_MEMORY, "ran out", "do not fit in memory", ""),
        (BATCH_SIZE_LIMIT, "not requested", "were not requested", "at least "),
        (TIME, "time budget", "because of the time budget", "at least "),
    ],
)
def test_stop_reason_explains_stop_code(stop_code, stop_reason, knee_reason, at_least):
    """The headline says at least if larger sizes may be better."""
    report = replace(CUDA_REPORT, stop_code=stop_code, limit=MEBIBYTE)
    increasing = replace(INCREASING_REPORT, stop_code=stop_code)

    assert stop_reason in report.stop_reason
    assert "64 rows" in report.stop_reason
    assert increasing.knee_reason.endswith(f"{knee_reason}.")
    assert increasing.knee_reason.removeprefix("64 rows: ") in str(increasing)
    assert increasing.to_report().html_sentences[0] == f"The best batch size on cpu is {at_least}64 rows"
    assert CPU_REPORT.to_report().html_sentences[0] == "The best batch size on cpu is 32 rows"


def test_report_text_has_only_the_knee():
    """Throughput and memory appear only in the HTML."""
    assert str(CUDA_REPORT).splitlines() == [
        "Best batch size on cuda:0: 32 rows",
        "  Model: bundled, task: annotation. Each row has 128 tokens. The loader has 2 workers.",
        "  No larger batch size in this sweep is more than 3% faster.",
        "  To set this batch size (32 rows of 128 tokens) yourself: nb.annotate(notes, batch_tokens=4096).",
    ]
    html = replace(CUDA_REPORT, name="<b>x</b>")._repr_html_()
    assert all(
        text in html
        for text in (
            CUDA_REPORT.knee_reason,
            CUDA_REPORT.stop_reason,
            "Memory: counted.",
            "12,800",
            "30.0 MiB",
            OUT_OF_MEMORY,
            "knee",
            "<img",
        )
    )
    assert "<b>" not in html


@pytest.mark.parametrize(
    ("stop_code", "seconds", "heading"),
    [
        (TIME, 8, "no best batch size found in 8 s; try seconds=60"),
        (TIME, 90.5, "no best batch size found in 90.5 s; try seconds=181"),
        (BATCH_SIZE_LIMIT, 30, "no best batch size found; only 1 row tried"),
    ],
)
def test_single_size_has_no_knee(stop_code, seconds, heading):
    """No form names a knee or recommends a batch size."""
    report = SweepReport(
        "bundled", "annotation", "cpu", (make_point(1, 2.0),), stop_code=stop_code, length=128, seconds=seconds
    )

    assert str(report).splitlines()[0] == f"Batch sweep on cpu: {heading}"
    assert "at least two sizes are needed" in str(report)
    assert report.batch_tokens is None
    assert report.best.rows == 1
    assert not report.still_increasing
    assert report.to_report().charts == ()
    assert not any(text in report._repr_html_() for text in (">knee<", "knee, ", "batch_tokens"))
    assert "seconds" not in report.to_dict()


def test_to_dict_is_json_compatible():
    data = json.loads(json.dumps(CUDA_REPORT.to_dict()))

    assert data["schema"] == "openmed_nb/sweep/1"
    assert (data["knee"], data["best"], data["workers"], data["still_increasing"]) == (32, 64, 2, False)
    assert [size["fits"] for size in data["points"]] == [True, True, True, False]
    assert (data["points"][1]["tokens"], data["remeasured_points"]) == (12800.0, [32, 64])


def test_simulated_report_is_labeled():
    """The CPU is not labeled."""
    simulated = replace(CPU_REPORT, device="mps", simulated=True)

    assert "mps (SIMULATED)" in str(simulated)
    assert SIMULATION_NOTICE in str(simulated)
    assert simulated._repr_html_().count("SIMULATED") >= 4
    assert str(replace(CPU_REPORT, simulated=True)).splitlines()[0] == "Best batch size on cpu: 32 rows"


def test_report_without_fitting_size():
    empty = SweepReport("step", "own step", "cpu", (Point(1, fits=False),), stop_code=OUT_OF_MEMORY)

    assert (empty.knee, empty.knee_point, empty.best, empty.still_increasing) == (None, None, None, False)
    assert empty.knee_reason == empty.stop_reason
    assert all(
        text in form for text in (empty.knee_reason, "no batch size fits") for form in (str(empty), empty._repr_html_())
    )
    assert json.dumps(empty.to_dict())
    assert [chart.lines[0].y for chart in empty.charts] == [(), ()]


def test_charts_label_knee_limit_and_out_of_memory():
    throughput, memory = replace(CUDA_REPORT, points=(*CUDA_REPORT.points, Point(256, fits=False))).charts

    assert [line.name for chart in (throughput, memory) for line in chart.lines] == ["throughput", "memory"]
    assert [marker.name for marker in throughput.axes.vertical_markers] == [
        "knee: 32 rows",
        "out of memory",
        "out of memory",
    ]
    assert [marker.position for marker in throughput.axes.vertical_markers] == [5.0, math.log2(128), math.log2(256)]
    assert [tick.name for tick in CUDA_REPORT.charts[1].axes.ticks] == ["1", "2", "4", "8", "16", "32", "64", "128"]
    assert (throughput.axes.y_unit, memory.axes.y_unit, memory.axes.x_label) == ("rows/s", "MiB", "rows per batch")
    assert [limit.name for limit in memory.axes.reference_lines] == ["limit"]
    assert replace(CPU_REPORT, limit=1 << 40).charts[1].axes.reference_lines == ()
    assert CUDA_REPORT._repr_html_().count("<img") == 2
