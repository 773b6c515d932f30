"""What a sweep says: the knee in words, why, the tables, the marks of the simulation, and the picture."""

import json
import math
import re
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
OWN = SweepReport("step", "own step", "cpu", POINTS, POINTS, knee=32, stopped=TIME)
FULL = SweepReport(
    "bundled",
    "annotation",
    "cuda:0",
    (*POINTS, Point(128, fits=False)),
    POINTS[1:],
    knee=32,
    stopped=OUT_OF_MEMORY,
    limit=64 * MEBIBYTE,
    method="counted",
    length=128,
    workers=2,
)
EMPTY = SweepReport("step", "own step", "cpu", (Point(1, fits=False),), stopped=OUT_OF_MEMORY)


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
def test_the_knee_is_the_smallest_from_which_nothing_larger_pays(speeds, gain, knee):
    """The smallest size is taken from which no larger one gains more than the share, in whatever order they come."""
    points = [Point(rows, speed) for rows, speed in speeds.items()]
    found = knee_of([Point(64, fits=False), *points[::-1]], gain)

    assert (found.rows if found else None) == knee


def test_sizes_near_the_best():
    """Sizes within a tenth of the best are near it; points that do not fit are neither best nor near it."""
    points = [Point(8, 50.0), Point(16, 95.0), Point(32, 100.0), Point(64, fits=False)]

    assert best_of(points).rows == 32
    assert [one.rows for one in close_points(points)] == [16, 32]
    assert (best_of(points[3:]), close_points(points[3:])) == (None, [])


@pytest.mark.parametrize(
    ("seconds", "throughput", "spread"),
    [
        ([2.0], 2.0, None),
        ([0.1, 1.0], 4 / 0.55, None),
        ([1.0, 5.0], 4 / 3, None),
        ([1.0, 2.0, 4.0], 2.0, (4 / 3, 4 / 1.5)),
        ([1.0] * 5, 4.0, (4.0, 4.0)),
    ],
)
def test_spread_is_within_the_steps(seconds, throughput, spread):
    """The quartiles lie between the times of the steps, and one or two steps have none."""
    point = Point(4).timed(seconds)

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
def test_why_in_one_sentence(knee, points, why):
    """The knee is explained by the best of the larger sizes."""
    assert SweepReport("x", "own step", "cpu", tuple(points), knee=knee).why == why


@pytest.mark.parametrize(
    ("stopped", "end", "rising"),
    [
        (THROUGHPUT, "too little", "nothing larger was measured that fits"),
        (MEMORY, "1.0 MiB", "nothing larger was tried, because of the memory"),
        (OUT_OF_MEMORY, "ran out", "nothing larger fits into the memory"),
        (LARGEST, "asked for", "nothing larger was asked for"),
        (TIME, "long", "nothing larger was tried, because of the time"),
    ],
)
def test_the_end_is_explained(stopped, end, rising):
    """Each reason to end has its sentence, with the largest size that fits, and another if throughput still rises there."""
    report = replace(FULL, stopped=stopped, limit=MEBIBYTE)
    larger = SweepReport("step", "own step", "cpu", (Point(1, 3.0),), (Point(1, 3.0),), knee=1, stopped=stopped)

    assert end in report.end
    assert "64 rows" in report.end
    assert str(larger).splitlines()[2] == f"  The largest batch that was tried; still rising: {rising}."
    assert larger.why == f"1 row: still rising: {rising}."


def test_text_has_the_knee_and_no_other_figure():
    """The text form names the knee, what was measured and how; throughput and memory stand in the HTML alone."""
    assert str(FULL).splitlines() == [
        "Batch sweep on cuda:0: 32 rows",
        "  bundled, annotation, rows of 128 tokens; 2 workers in the loader.",
        "  The smallest batch from which no larger one that was tried is more than 3 % faster.",
        "  To annotate in such batches: nb.annotate(notes, batch_tokens=4096).",
        "  Memory: counted.",
    ]
    html = FULL._repr_html_()
    assert all(word in html for word in (FULL.why, FULL.end, "12,800", "30.0 MiB", "did not fit", "knee", "<img"))
    assert "<b>" not in replace(FULL, name="<b>x</b>")._repr_html_()


@pytest.mark.parametrize(
    ("stopped", "seconds", "heading"),
    [
        (TIME, 8, "best batch not found in 8 s; try seconds=60"),
        (TIME, 90.5, "best batch not found in 90.5 s; try seconds=181"),
        (LARGEST, 30, "best batch not found; only 1 row tried"),
    ],
)
def test_a_single_size_has_no_knee(stopped, seconds, heading):
    """Of one size that was measured although larger ones may fit, no form names a knee or advises a batch; it says what to try."""
    alone = SweepReport("bundled", "annotation", "cpu", (point(1, 2.0),), stopped=stopped, length=128, seconds=seconds)

    assert str(alone).splitlines() == [
        f"Batch sweep on cpu: {heading}",
        "  bundled, annotation, rows of 128 tokens.",
        "  Only 1 row was measured, and a single size has no knee.",
    ]
    assert (alone.batch_tokens, alone.best.rows, alone.still_rising) == (None, 1, False)
    assert not re.search("the knee|knee, |<img|batch_tokens", alone._repr_html_())
    assert "seconds" not in alone.to_dict()


def test_the_headline_claims_no_more_than_was_tried():
    """Where a larger batch might be faster still, the headline says that the best one has at least so many rows."""
    rising = replace(OWN, knee=64)

    assert OWN.report().spoken[0] == "The best batch on cpu has 32 rows"
    assert rising.report().spoken[0] == "The best batch on cpu has at least 64 rows"
    assert replace(rising, stopped=OUT_OF_MEMORY).report().spoken[0] == "The best batch on cpu has 64 rows"


def test_plain_form():
    """The report as a mapping survives JSON, with its schema and every point."""
    plain = json.loads(json.dumps(FULL.to_dict()))

    assert plain["schema"] == "openmed_nb/sweep/1"
    assert (plain["knee"], plain["best"], plain["workers"], plain["still_rising"]) == (32, 64, 2, False)
    assert [one["fits"] for one in plain["points"]] == [True, True, True, False]
    assert (plain["points"][1]["tokens"], plain["compared"]) == (12800.0, [32, 64])


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
    assert (EMPTY.knee, EMPTY.at_knee, EMPTY.best, EMPTY.still_rising) == (None, None, None, False)
    assert EMPTY.why == EMPTY.end == "Not even 1 row fits into the memory."
    assert EMPTY.why in str(EMPTY)
    assert "nothing fits" in str(EMPTY)
    assert EMPTY.why in EMPTY._repr_html_()
    assert json.dumps(EMPTY.to_dict())


def test_picture():
    """Both curves, the knee, what ran out of memory and a near limit are drawn and named once, and no figure stays open."""
    from matplotlib import pyplot as plt

    above, below = FULL.plot().axes
    names = [text.get_text() for axes in (above, below) for text in axes.get_legend().get_texts()]
    far = replace(OWN, limit=1 << 40).plot().axes[1]
    EMPTY.plot()

    assert sorted(names) == ["knee: 32 rows", "limit", "memory", "out of memory", "speed"]
    assert (above.get_ylabel(), below.get_ylabel(), below.get_xlabel()) == ("rows/s", "MiB", "rows in a batch")
    assert [tick.get_text() for tick in below.get_xticklabels()] == ["1", "2", "4", "8", "16", "32", "64", "128"]
    assert "limit" not in [text.get_text() for text in far.get_legend().get_texts()]
    assert plt.get_fignums() == []


def test_what_the_page_draws():
    """The page draws the same, with the knee, what ran out of memory and a near limit; of a single size it draws nothing."""
    speed, memory = FULL.report().pictures
    far, single = (replace(OWN, limit=1 << 40).report().pictures, replace(OWN, points=OWN.points[:1]).report().pictures)

    assert [one.name for one in speed.axes.marks] == ["knee: 32 rows", "out of memory"]
    assert [one.at for one in speed.axes.marks] == [5.0, math.log2(next(p.rows for p in FULL.points if not p.fits))]
    assert (speed.axes.unit, memory.axes.unit, speed.axes.below) == ("rows/s", "MiB", "rows in a batch")
    assert [one.name for one in memory.axes.limits] == ["limit"]
    assert [one.axes.limits for one in far[1:]] == [()] * len(far[1:])
    assert single == ()
    assert FULL._repr_html_().count("<img") == 2
