"""What a sweep says: the knee in words, why, the tables, the marks of the simulation, and the picture."""

from __future__ import annotations

import json

import pytest

from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.sweep import SweepReport, ended, explained, none_fits
from openmed_nb.runbook.sweep_plot import draw
from openmed_nb.runbook.sweep_search import (
    LARGEST,
    MEMORY,
    OUT_OF_MEMORY,
    THROUGHPUT,
    TIME,
    Point,
    SweepRules,
    best_of,
    close_points,
    knee_of,
    rates,
)

MEBIBYTE = 1 << 20


def point(rows, speed, memory=None):
    """Return a point that fits."""
    return Point(rows, speed, (speed * 0.9, speed * 1.1), memory, 0.5, 9)


POINTS = (point(16, 50.0, MEBIBYTE * 20), point(32, 100.0, MEBIBYTE * 30), point(64, 102.0, MEBIBYTE * 57))


@pytest.fixture
def report():
    """A sweep that ran out of memory."""
    return SweepReport(
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


@pytest.fixture
def simulated():
    """A sweep on the simulated MPS."""
    return SweepReport("bundled", "training step", "mps", POINTS, POINTS, knee=32, stopped=TIME, simulated=True)


@pytest.fixture
def empty():
    """A sweep in which nothing fits."""
    return SweepReport("step", "own step", "cpu", (Point(1, fits=False),), stopped=OUT_OF_MEMORY)


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


def test_what_does_not_fit_is_never_best():
    """Points that do not fit are neither best nor near it."""
    points = [Point(1, 5.0), Point(2, fits=False)]

    assert best_of(points).rows == 1
    assert [one.rows for one in close_points(points)] == [1]
    assert (best_of(points[1:]), close_points(points[1:])) == (None, [])


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
    assert rates(4, seconds) == {
        "throughput": pytest.approx(throughput),
        "spread": spread and pytest.approx(spread),
        "steps": len(seconds),
    }


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
    """For annotating texts, the knee is told in tokens too, as nb.annotate takes them."""
    report = SweepReport("x", task, "cpu", POINTS, POINTS, knee=knee, length=length, stopped=TIME)

    assert report.batch_tokens == report.to_dict()["batch_tokens"] == tokens
    assert (f"nb.annotate(notes, batch_tokens={tokens})" in str(report)) == bool(tokens)


@pytest.mark.parametrize(
    ("knee", "points", "why"),
    [
        (POINTS[1], POINTS, "32 rows: 64 would be 2 % faster and take 1.9 times the memory."),
        (point(1, 9.0), [point(1, 9.0), point(2, 4.5)], "1 row: 2 would be 50 % slower."),
        (point(1, 9.0), [point(1, 9.0), point(2, 9.01)], "1 row: 2 would be as fast."),
        (POINTS[2], POINTS, "64 rows: still rising: nothing larger was measured that fits."),
        (None, [], "Not even 1 row fits into the memory."),
    ],
)
def test_why_in_one_sentence(knee, points, why):
    """The knee is explained by the best of the larger sizes."""
    assert explained(knee, points) == why


@pytest.mark.parametrize(
    ("stopped", "words"),
    [
        (THROUGHPUT, "too little"),
        (MEMORY, "1.0 MiB"),
        (OUT_OF_MEMORY, "ran out"),
        (LARGEST, "asked for"),
        (TIME, "long"),
    ],
)
def test_the_end_is_explained(stopped, words):
    """Each reason to end has its sentence, with the largest size that fits."""
    said = ended(stopped, [*POINTS, Point(128, fits=False)], MEBIBYTE)

    assert words in said
    assert "64 rows" in said


def test_text_has_the_knee_and_no_other_figure(report):
    """The text form names the knee, what was measured and how; throughput and memory stand in the HTML alone."""
    assert str(report).splitlines() == [
        "Batch sweep on cuda:0: 32 rows",
        "  bundled, annotation, rows of 128 tokens; 2 workers in the loader.",
        "  The smallest batch from which no larger one that was tried is more than 3 % faster.",
        "  To annotate in such batches: nb.annotate(notes, batch_tokens=4096).",
        "  Memory: counted.",
    ]
    html = report._repr_html_()
    assert all(word in html for word in (report.why, report.end, "12,800", "30.0 MiB", "did not fit", "knee", "<svg"))


@pytest.mark.parametrize(
    ("stopped", "words"),
    [
        (TIME, "nothing larger was tried, because of the time"),
        (MEMORY, "nothing larger was tried, because of the memory"),
        (OUT_OF_MEMORY, "nothing larger fits into the memory"),
        (LARGEST, "nothing larger was asked for"),
    ],
)
def test_throughput_that_still_rises_is_said(stopped, words):
    """Where the largest size is the knee, text and reason say that throughput still rises, and why the sweep ended."""
    rising = SweepReport("step", "own step", "cpu", (Point(1, 3.0),), (Point(1, 3.0),), knee=1, stopped=stopped)

    assert str(rising).splitlines()[2] == f"  The largest batch that was tried; still rising: {words}."
    assert rising.why == f"1 row: still rising: {words}."


def test_the_mark_belongs_to_the_simulated_device():
    """A sweep of the CPU inside of a simulation is not marked as one of a simulated device."""
    inside = SweepReport("step", "own step", "cpu", POINTS, POINTS, knee=32, stopped=TIME, simulated=True)

    assert str(inside).splitlines()[0] == "Batch sweep on cpu: 32 rows"


def test_plain_form(report):
    """The report as a mapping survives JSON, with its schema and every point."""
    plain = json.loads(json.dumps(report.to_dict()))

    assert plain["schema"] == "openmed_nb/sweep/1"
    assert (plain["knee"], plain["best"], plain["workers"], plain["still_rising"]) == (32, 64, 2, False)
    assert [one["fits"] for one in plain["points"]] == [True, True, True, False]
    assert plain["points"][1]["tokens"] == 12800.0


def test_simulated_figures_are_marked(simulated):
    """Text, HTML and picture of a simulated sweep say that they are none of MPS."""
    assert "mps (SIMULATED)" in str(simulated)
    assert "no figure here is one of MPS" in str(simulated)
    assert simulated._repr_html_().count("SIMULATED") >= 4
    assert "SIMULATED" in simulated.plot()._suptitle.get_text()


def test_nothing_fits(empty):
    """Where not even one row fits, every form says so."""
    assert (empty.knee, empty.at_knee, empty.best, empty.still_rising) == (None, None, None, False)
    assert "nothing fits" in str(empty)
    assert none_fits(empty.points) in str(empty)
    assert "<svg" in empty._repr_html_()
    assert json.dumps(empty.to_dict())


def test_names_are_escaped(report):
    """A name cannot become HTML, also not in the picture."""
    named = SweepReport("<b>x</b>", "own step", "cpu", report.points, knee=32, stopped=LARGEST)

    assert "<b>" not in named._repr_html_()


class TestPicture:
    """The figure of matplotlib."""

    def test_curves_marks_and_limit(self, report):
        """Both curves, the knee, what ran out of memory and the limit are drawn, and named once."""
        above, below = draw(report).axes
        names = [text.get_text() for axes in (above, below) for text in axes.get_legend().get_texts()]

        assert sorted(names) == ["knee: 32 rows", "limit", "median and quartiles", "memory of a step", "out of memory"]
        assert (above.get_ylabel(), below.get_ylabel(), below.get_xlabel()) == ("rows/s", "MiB", "rows in a batch")
        assert above.get_xscale() == "log"

    def test_a_far_limit_is_left_out(self):
        """A limit far above the curve is not drawn, because the curve would lie on the axis."""
        far = SweepReport("x", "own step", "cpu", POINTS, knee=32, stopped=TIME, limit=1 << 40)

        assert "limit" not in [text.get_text() for text in draw(far).axes[1].get_legend().get_texts()]

    def test_the_same_picture_every_time(self, report):
        """The SVG of the same report is the same, and describes itself."""
        first = report._repr_html_()

        assert first == report._repr_html_()
        assert 'role="img"' in first
        assert report.why in first

    def test_drawing_leaves_no_figure_open(self, report, empty):
        """No figure stays open, whatever was found."""
        from matplotlib import pyplot as plt

        draw(report)
        draw(empty)
        assert plt.get_fignums() == []


@pytest.mark.parametrize(
    "given",
    [
        *({"gain": gain} for gain in (0, 1, -0.1, True, "much", float("nan"))),
        *({"largest": largest} for largest in (0, -1, 1.5, True, "8")),
        *({"smallest": smallest} for smallest in (0, 1.5, True)),
        {"smallest": 4, "largest": 2},
        *({"seconds": seconds} for seconds in (0, -1, float("inf"), float("nan"), False, "30")),
    ],
)
def test_bad_rules(given):
    """A value out of its range is an error that shows it."""
    with pytest.raises(ConfigurationError, match=next(iter(given))):
        SweepRules(**given)


def test_whole_numbers_of_numpy():
    """A whole number of numpy is one of Python afterwards."""
    import numpy as np

    rules = SweepRules(largest=np.int64(8), smallest=np.int32(2))

    assert (type(rules.largest), rules.largest, type(rules.smallest), rules.smallest) == (int, 8, int, 2)
