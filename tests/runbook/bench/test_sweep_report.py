"""What a sweep says: the knee in words, why, the tables, the marks of the simulation, and the picture."""

import json
import math
from dataclasses import replace

import pytest

from openmed_nb.runbook.bench.sweep import (
    LARGEST,
    MEMORY,
    OUT_OF_MEMORY,
    THROUGHPUT,
    TIME,
    Point,
    SweepReport,
    best_of,
    close_points,
    knee_of,
)

MEBIBYTE = 1 << 20


def point(rows, speed, memory=None):
    """Return a point that fits."""
    return Point(rows, speed, (speed * 0.9, speed * 1.1), memory, 0.5, 9)


POINTS = (point(16, 50.0, MEBIBYTE * 20), point(32, 100.0, MEBIBYTE * 30), point(64, 102.0, MEBIBYTE * 57))
OWN = SweepReport("step", "own step", "cpu", POINTS, POINTS, knee=32, stop_code=TIME)
FULL = SweepReport(
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
RISING = replace(OWN, knee=64)


@pytest.mark.parametrize(
    ("speeds", "gain", "knee"),
    [
        ({1: 1.0}, 0.03, 1),
        ({1: 1.0, 2: 1.02}, 0.03, 1),
        ({1: 1.0, 2: 1.04}, 0.03, 2),
        ({1: 1.0, 2: 1.04}, 0.05, 1),
        ({8: 100.0, 16: 90.0, 32: 101.0}, 0.03, 8),
        ({8: 50.0, 16: 100.0, 32: 60.0}, 0.03, 16),
        ({}, 0.03, None),
    ],
)
def test_knee_is_the_smallest_from_which_nothing_larger_pays(speeds, gain, knee):
    points = [Point(rows, speed) for rows, speed in speeds.items()]
    found = knee_of([Point(64, fits=False), *points[::-1]], gain)

    assert (found.rows if found else None) == knee


def test_sizes_near_the_best():
    """Sizes within a tenth of the best are near it; points that do not fit are neither best nor near it."""
    points = [Point(8, 50.0), Point(16, 95.0), Point(32, 100.0), Point(64, fits=False)]

    assert best_of(points).rows == 32
    assert [near.rows for near in close_points(points)] == [16, 32]
    assert (best_of(points[3:]), close_points(points[3:])) == (None, [])


@pytest.mark.parametrize(
    ("seconds", "throughput", "spread"),
    [([0.1, 1.0], 4 / 0.55, None), ([1.0, 2.0, 4.0], 2.0, (4 / 3, 4 / 1.5)), ([1.0] * 5, 4.0, (4.0, 4.0))],
)
def test_throughput_and_its_quartiles(seconds, throughput, spread):
    """Both are those of the steps; one or two steps have no quartiles."""
    timed = Point(4).with_timings(seconds)

    assert (timed.throughput, timed.steps) == (pytest.approx(throughput), len(seconds))
    assert timed.spread == (spread and pytest.approx(spread))


@pytest.mark.parametrize(
    ("task", "knee", "length", "tokens"),
    [
        ("annotation", 32, 128, 4096),
        ("annotation", None, 128, None),
        ("forward pass", 32, None, None),
        ("training step", 32, 128, None),
    ],
)
def test_knee_in_tokens(task, knee, length, tokens):
    """For annotating texts, the knee is also given in tokens, as nb.annotate takes them."""
    report = replace(OWN, task=task, knee=knee, length=length)

    assert report.batch_tokens == report.to_dict()["batch_tokens"] == tokens
    assert (f"nb.annotate(notes, batch_tokens={tokens})" in str(report)) == bool(tokens)


@pytest.mark.parametrize(
    ("knee", "points", "why"),
    [
        (32, POINTS, "32 rows: 64 would be 2 % faster and take 1.9 times the memory."),
        (1, [point(1, 9.0), point(2, 4.5)], "1 row: 2 would be 50 % slower."),
        (1, [point(1, 9.0), point(2, 9.01)], "1 row: 2 would be as fast."),
        (64, POINTS, "64 rows: still rising: nothing larger was measured that fits."),
        (None, [], "Not even 1 row fits into the memory."),
        (None, [Point(2, fits=False)], "Not even 2 rows fit into the memory."),
    ],
)
def test_knee_is_explained_by_the_best_of_the_larger_sizes(knee, points, why):
    assert SweepReport("x", "own step", "cpu", tuple(points), knee=knee).knee_reason == why


@pytest.mark.parametrize(
    ("stopped", "end", "rising", "least"),
    [
        (THROUGHPUT, "too little", "was measured that fits", ""),
        (MEMORY, "1.0 MiB", "because of the memory", ""),
        (OUT_OF_MEMORY, "ran out", "fits into the memory", ""),
        (LARGEST, "asked for", "was asked for", "at least "),
        (TIME, "long", "because of the time", "at least "),
    ],
)
def test_end_is_explained(stopped, end, rising, least):
    """Each reason to end has its words, others if throughput still rises there; the headline claims no more than was tried."""
    report = replace(FULL, stop_code=stopped, limit=MEBIBYTE)
    larger = replace(RISING, stop_code=stopped)

    assert end in report.stop_reason
    assert "64 rows" in report.stop_reason
    assert larger.knee_reason.endswith(f"{rising}.")
    assert larger.knee_reason.removeprefix("64 rows: ") in str(larger)
    assert larger.to_report().html_sentences[0] == f"The best batch on cpu has {least}64 rows"
    assert OWN.to_report().html_sentences[0] == "The best batch on cpu has 32 rows"


def test_text_has_the_knee_and_no_other_figure():
    """The text form names the knee, what was measured and how; throughput and memory stand in the HTML alone."""
    assert str(FULL).splitlines() == [
        "Batch sweep on cuda:0: 32 rows",
        "  bundled, annotation, rows of 128 tokens; 2 workers in the loader.",
        "  The smallest batch from which no larger one that was tried is more than 3 % faster.",
        "  To annotate in such batches: nb.annotate(notes, batch_tokens=4096).",
        "  Memory: counted.",
    ]
    html = replace(FULL, name="<b>x</b>")._repr_html_()
    assert all(
        word in html
        for word in (FULL.knee_reason, FULL.stop_reason, "12,800", "30.0 MiB", "did not fit", "knee", "<img")
    )
    assert "<b>" not in html


@pytest.mark.parametrize(
    ("stopped", "seconds", "heading"),
    [
        (TIME, 8, "best batch not found in 8 s; try seconds=60"),
        (TIME, 90.5, "best batch not found in 90.5 s; try seconds=181"),
        (LARGEST, 30, "best batch not found; only 1 row tried"),
    ],
)
def test_single_size_has_no_knee(stopped, seconds, heading):
    """If larger sizes may fit, no form names a knee or advises a batch; it says what to try."""
    alone = SweepReport(
        "bundled", "annotation", "cpu", (point(1, 2.0),), stop_code=stopped, length=128, seconds=seconds
    )

    assert str(alone).splitlines()[0] == f"Batch sweep on cpu: {heading}"
    assert "a single size has no knee" in str(alone)
    assert (alone.batch_tokens, alone.best.rows, alone.still_increasing, alone.to_report().charts) == (
        None,
        1,
        False,
        (),
    )
    assert not any(words in alone._repr_html_() for words in ("the knee", "knee, ", "batch_tokens"))
    assert "seconds" not in alone.to_dict()


def test_plain_form():
    plain = json.loads(json.dumps(FULL.to_dict()))

    assert plain["schema"] == "openmed_nb/sweep/1"
    assert (plain["knee"], plain["best"], plain["workers"], plain["still_increasing"]) == (32, 64, 2, False)
    assert [size["fits"] for size in plain["points"]] == [True, True, True, False]
    assert (plain["points"][1]["tokens"], plain["remeasured_points"]) == (12800.0, [32, 64])


def test_simulated_figures_are_marked():
    """Text, HTML and picture of a simulated device say that they are none of MPS; the CPU beside it is not marked."""
    simulated = replace(OWN, device="mps", simulated=True)

    assert "mps (SIMULATED)" in str(simulated)
    assert "no figure here is one of MPS" in str(simulated)
    assert simulated._repr_html_().count("SIMULATED") >= 4
    assert "SIMULATED" in simulated.plot()._suptitle.get_text()
    assert str(replace(OWN, simulated=True)).splitlines()[0] == "Batch sweep on cpu: 32 rows"


def test_nothing_fits():
    """If not even one row fits, every form says so."""
    empty = SweepReport("step", "own step", "cpu", (Point(1, fits=False),), stop_code=OUT_OF_MEMORY)

    assert (empty.knee, empty.knee_point, empty.best, empty.still_increasing) == (None, None, None, False)
    assert empty.knee_reason == empty.stop_reason
    assert all(
        words in form for words in (empty.knee_reason, "nothing fits") for form in (str(empty), empty._repr_html_())
    )
    assert json.dumps(empty.to_dict())
    assert empty.plot()


def test_pictures():
    """Both curves, the knee, what ran out of memory and a near limit are drawn and named once, on the page and by matplotlib."""
    from matplotlib import pyplot as plt

    speed, memory = replace(FULL, points=(*FULL.points, Point(256, fits=False))).pictures
    above, below = FULL.plot().axes
    names = [text.get_text() for axes in (above, below) for text in axes.get_legend().get_texts()]

    assert sorted(names) == ["knee: 32 rows", "limit", "memory", "out of memory", "speed"]
    assert [mark.name for mark in speed.axes.vertical_markers] == ["knee: 32 rows", "out of memory", "out of memory"]
    assert [mark.position for mark in speed.axes.vertical_markers] == [5.0, math.log2(128), math.log2(256)]
    assert [tick.get_text() for tick in below.get_xticklabels()] == ["1", "2", "4", "8", "16", "32", "64", "128"]
    assert (above.get_ylabel(), below.get_ylabel(), below.get_xlabel()) == ("rows/s", "MiB", "rows in a batch")
    assert [limit.name for limit in memory.axes.reference_lines] == ["limit"]
    assert replace(OWN, limit=1 << 40).pictures[1].axes.reference_lines == ()
    assert FULL._repr_html_().count("<img") == 2
    assert plt.get_fignums() == []
