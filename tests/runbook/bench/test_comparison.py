"""What the figures of a comparison mean: tables of values."""

import itertools
import json
import re
from dataclasses import replace

import pytest

from openmed_nb._render.display import OK, WARNING
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.bench.comparison import Comparison, DeviceMetrics, Utilization, device_metrics, select_devices
from openmed_nb.runbook.bench.timing import Interval, PhaseTimes
from openmed_nb.runbook.bench.workloads import Workload

EVEN = PhaseTimes({"data": 0.001, "transfer": 0.001, "forward": 0.001, "decode": 0.001})
LOAD = Utilization(0.05, 0.65, 5)


def compared(low=2.0, high=3.0, split=EVEN, **others):
    """Return a comparison of a GPU with the CPU."""
    cpu = DeviceMetrics("cpu", 0.0123, (0.012, 0.013), 32, EVEN)
    gpu = DeviceMetrics(
        "cuda:0", 0.00456, (0.004, 0.005), 32, split, Interval(low, (low + high) / 2, high, 0.9586), LOAD
    )
    return Comparison("bundled", "annotation", (cpu, gpu), 20, **others)


@pytest.mark.parametrize(
    ("low", "high", "words", "status"),
    [
        (1.01, 3.0, "faster than the CPU", OK),
        (0.2, 0.99, "slower than the CPU", WARNING),
        *((low, high, "no difference shown", WARNING) for low, high in ((0.99, 1.5), (1.0, 1.5), (0.5, 1.0))),
    ],
)
def test_words_of_a_speedup(low, high, words, status):
    """An interval that holds 1 shows no difference, whatever its middle is."""
    comparison = compared(low, high)

    assert comparison.for_device("cuda").speedup_category == words
    assert comparison.findings[0].status == status
    assert words in str(comparison)


@pytest.mark.parametrize(
    ("seconds", "dominating", "status"),
    [
        *(({name: 6, "forward": 4}, name, WARNING) for name in ("data", "transfer", "decode")),
        ({"data": 4, "forward": 6}, "forward", OK),
        ({"data": 5, "forward": 5}, None, OK),
        ({"data": 0, "forward": 0}, None, OK),
    ],
)
def test_phase_that_dominates(seconds, dominating, status):
    """A phase dominates with more than half of a step; only the model's own work may."""
    comparison = compared(split=PhaseTimes(seconds))

    assert comparison.for_device("cuda").phase_times.dominant_phase == dominating
    assert (comparison.findings[2].name, comparison.findings[2].status) == ("time on cuda:0", status)
    assert comparison.findings[2].evidence.startswith(dominating or "no phase")


def test_shares_are_of_all_steps():
    """A loader that keeps one step of several waiting takes its share of all; texts in memory that wait were another program."""
    steps = [{"data": 0.1, "forward": 1.0}] * 9 + [{"data": 9.1, "forward": 1.0}]
    for task, share in (("annotation", 1 / 11), ("forward pass", 0.5)):
        assert measured(task, "cpu", *steps).fractions["data"] == pytest.approx(share)


# Measured on an H100 with the bundled model, in tenths of a second.
GPU = {"data": 0.441, "transfer": 0.015, "forward": 0.404, "decode": 0.140}
LONG_TEXTS = {"data": 9.0, "forward": 3.0, "decode": 2.0}

# Task, device, phases as measured, and which part of a step waits for its data.
WAITING = [
    ("annotation", "cuda:0", GPU, 0.037 / 0.596),
    ("annotation", "mps", GPU, 0.037 / 0.596),
    ("annotation", "cuda:0", {"data": 3.0, "forward": 4.0}, 0.0),
    ("annotation", "cuda:0", LONG_TEXTS, 6 / 11),
    ("annotation", "cuda:0", {"data": 1.0}, 1.0),
    ("annotation", "cpu", GPU, 0.441),
    ("forward pass", "cuda:0", GPU, 0.441),
    ("training step", "cuda:0", LONG_TEXTS, 9 / 14),
    ("own step", "mps", LONG_TEXTS, 9 / 14),
]


class Measured(Workload):
    """Steps whose phases take as long as their batch says."""

    def seconds_of_phases(self, batches):
        """Return the next batch."""
        return next(batches)


def measured(task, device, *steps):
    """Return where the time of such steps goes."""
    return Measured("m", task, device, 8, None, lambda: iter(()), ()).split(itertools.cycle(steps), max(5, len(steps)))


@pytest.mark.parametrize(("task", "device", "seconds", "share"), WAITING)
def test_texts_are_tokenized_while_a_gpu_computes(task, device, seconds, share):
    """Of annotation on a GPU, only what tokenizing takes longer than the forward pass is a wait; all else waits for its data."""
    split = measured(task, device, seconds)

    assert split.fractions["data"] == pytest.approx(share)
    assert sum(split.fractions.values()) == pytest.approx(1)
    assert split.seconds == pytest.approx(seconds)


def test_remedy_for_texts_names_no_loader():
    """Who annotates has no loader to read ahead with."""
    for task, named in (("annotation", "nb.cluster"), ("forward pass", "nb.training.loader.check()")):
        (finding,) = Comparison(
            "m", task, (replace(compared().for_device("cpu"), phase_times=PhaseTimes({"data": 9, "forward": 1})),), 20
        ).findings

        assert finding.evidence == "data dominates"
        assert named in finding.remedy
        assert ("loader" in finding.remedy) is (task != "annotation")


def test_speedup_is_the_median_of_ratios():
    """The ratio of each round counts, not that of the medians."""
    turns = {"cpu": [1.0, 2.0, 3.0, 4.0, 5.0, 60.0], "mps": [0.5, 1.0, 1.0, 2.0, 2.5, 30.0]}
    workload = Workload("m", "annotation", "mps", 8, None, lambda: iter(()), ())

    figures = device_metrics(workload, "mps", turns, EVEN, LOAD)

    assert (figures.speedup.low, figures.speedup.median, figures.speedup.high) == (2.0, 2.0, 3.0)
    assert (figures.seconds, figures.quartiles) == (1.5, (1.0, 2.375))
    assert figures.rows_per_second == pytest.approx(8 / 1.5)


def test_text_has_no_figures():
    """The text says it in words; times, ratios and shares stand in the HTML."""
    comparison = compared()

    assert re.findall(r"\d+[.,]\d+|\d+ ?%| ms", str(comparison)) == []
    assert "2.50 (2.00 to 3.00, 95.9 % sure)" in comparison._repr_html_()
    assert "60 % (65 % less 5 % when idle)" in comparison._repr_html_()
    assert "1.00 ms (25 %)" in comparison._repr_html_()


def test_plain_numbers_for_others():
    """A row has plain numbers, and everything is JSON with the name of its schema."""
    comparison = compared(dtype="float32")
    row = comparison.for_device("cuda")
    plain = json.loads(json.dumps(comparison.to_dict()))

    assert (row.speedup.median, row.phase_fractions["data"], row.utilization) == (2.5, 0.25, pytest.approx(0.6))
    assert plain["schema"] == "openmed_nb/comparison/1"
    assert plain["devices"][1]["speedup"]["low"] == 2.0
    assert plain["devices"][0]["speedup"] is None
    assert plain["devices"][0]["utilization"]["net"] is None


def test_device_that_was_not_compared():
    """Asking for another device is a clear error."""
    with pytest.raises(ConfigurationError, match=r"'mps' was not compared\. Use one of cpu, cuda:0"):
        compared().for_device("mps")


def test_small_work_on_the_cpu_alone():
    """Without another device there is no speed, and work too small to tell is not said to copy too much."""
    small = DeviceMetrics("cpu", 0.01, (0.01, 0.01), 2, PhaseTimes({"transfer": 6, "forward": 4}))
    alone = Comparison("bundled", "annotation", (small,), 20)

    assert [(finding.name, finding.status) for finding in alone.findings] == [("time on cpu", OK)]


def test_devices_of_a_comparison():
    """The CPU comes first, and each device is there once, however it is spelled."""
    assert select_devices() == ("cpu",)
    assert select_devices("cuda", "cpu", "cuda:0", "cuda:1") == ("cpu", "cuda", "cuda:1")
