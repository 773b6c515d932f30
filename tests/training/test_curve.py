"""Memory samples and curves: trend of a series of sizes, deciding metric, advice and charts."""

import itertools
import json
from dataclasses import replace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from openmed_nb._render.display import WARNING
from openmed_nb._render.drawing import AxisMarker
from openmed_nb.devices.machine import Footprint
from openmed_nb.training import MemoryCurve, MemorySample
from openmed_nb.training.curve import (
    DETACH_REMEDY,
    GROWTH_CAUSES,
    KEEP_FEWER_REMEDY,
    MIN_BASELINE_BYTES,
    PAD_REMEDY,
    CacheReleases,
    ProcessInfo,
    classify_trend,
    resident_bytes,
    take_sample,
)
from openmed_nb.training.holders import TensorReferrer

MIB = 1 << 20
FLAT = [100] * 6
LEAK = [100, 150, 200, 250, 300, 350]
SAWTOOTH = [100, 180, 100, 180, 100, 180]
UNKNOWN = [None] * 6


def make_curve(device="mps", referrers=(), recommended=None, limit=None, unit=MIB, **series):
    """Return a curve from the metrics at the ends of its epochs, in MiB."""
    samples = []
    for epoch, sizes in enumerate(zip(*series.values(), strict=True), 1):
        metrics = {name: None if size is None else size * unit for name, size in zip(series, sizes, strict=True)}
        samples.append(MemorySample(epoch, 10 * epoch, 1.5 * epoch, recommended=recommended, **metrics))
    return MemoryCurve(device, tuple(samples), referrers=tuple(referrers), limit=limit)


LOSSES = TensorReferrer("losses", "list", 40, 12 * MIB, 40)
KEPT = TensorReferrer("Trainer.kept", "deque", 1, 512)
RETAINED, GRAPHS, BLOCKS, PROCESS, MPS_PROCESS = (
    GROWTH_CAUSES[name][0] for name in ("allocated", "graphs", "reserved", "resident", "resident on mps")
)
# Memory of tensors, device and process, with referrers -> deciding metric, verdict and advice.
VERDICTS = {
    "tensors": ((LEAK, LEAK, LEAK), [], "allocated", "growing", f"{RETAINED}. {DETACH_REMEDY}"),
    "named": ((LEAK, LEAK, LEAK), [LOSSES], "allocated", "growing", f"{RETAINED}: {LOSSES}. {DETACH_REMEDY}"),
    "no graphs": ((LEAK, LEAK, LEAK), [KEPT], "allocated", "growing", f"{RETAINED}: {KEPT}. {KEEP_FEWER_REMEDY}"),
    "slow": (
        [range(100, 108)] * 3,
        [KEPT],
        "allocated",
        "growing below the limit",
        f"{RETAINED}: {KEPT}. {KEEP_FEWER_REMEDY}",
    ),
    "blocks": ((FLAT, LEAK, LEAK), [KEPT], "reserved", "growing", f"{BLOCKS}. {PAD_REMEDY}"),
    "graphs": ((FLAT, LEAK, FLAT), [KEPT, LOSSES], "reserved", "growing", f"{GRAPHS}: {LOSSES}. {DETACH_REMEDY}"),
    "process": ((FLAT, FLAT, LEAK), [KEPT], "resident", "growing", f"{MPS_PROCESS}. {PAD_REMEDY} torch 2.14"),
    "flat": ((FLAT, FLAT, FLAT), [], "allocated", "flat", "No action needed."),
    "empty graphs": ((FLAT, FLAT, FLAT), [LOSSES], "allocated", "flat", f"{LOSSES}. {DETACH_REMEDY}"),
    "growing first": ((SAWTOOTH, LEAK, FLAT), [], "reserved", "growing", BLOCKS),
    "sawtooth first": ((FLAT, SAWTOOTH, FLAT), [], "reserved", "sawtooth", "Memory rises in some epochs"),
    "no device metrics": ((UNKNOWN, UNKNOWN, FLAT), [], "resident", "flat", "No action needed."),
    "no metrics": ((UNKNOWN, UNKNOWN, UNKNOWN), [], "resident", "insufficient data", "Keep training: "),
}


@pytest.mark.parametrize(("process", "is_main"), [((0, 1), True), ((3, 1), True), ((0, 4), True), ((3, 4), False)])
def test_main_process_is_the_first_or_the_only_one(process, is_main):
    assert ProcessInfo(*process).is_main_process == is_main


@pytest.mark.parametrize(("series", "referrers", "metric", "verdict", "advice"), VERDICTS.values(), ids=VERDICTS)
def test_verdict_is_that_of_the_worst_metric(series, referrers, metric, verdict, advice):
    curve = make_curve(referrers=referrers, **dict(zip(("allocated", "reserved", "resident"), series, strict=True)))

    assert (curve.deciding_metric, curve.verdict, curve.trend.kind) == (metric, verdict, verdict)
    assert curve.advice.startswith(advice)
    assert curve.advice in str(curve)
    has_graphs = LOSSES in referrers and verdict != "growing"
    headline = f"{verdict}, but autograd graphs are retained" if has_graphs else verdict
    assert str(curve).splitlines()[0] == f"Memory on mps: {headline}"
    assert (curve.to_report().status == WARNING) == (has_graphs or verdict in {"growing", "sawtooth"})


def test_growing_process_on_the_cpu_has_another_cause():
    assert make_curve("cpu", allocated=FLAT, resident=LEAK).advice == f"{PROCESS}. {GROWTH_CAUSES['resident'][1]}"


def test_first_epoch_is_warm_up():
    curve = make_curve(allocated=[10, 100, 100, 100, 100, 100])

    assert (curve.verdict, curve.trend.baseline) == ("flat", 100 * MIB)


@pytest.mark.parametrize("epochs", range(5))
def test_short_training_has_insufficient_data(epochs):
    curve = make_curve(allocated=LEAK[:epochs])

    assert curve.verdict == ("growing" if epochs == 4 else "insufficient data")
    if epochs < 4:
        assert curve.reason == f"{max(0, epochs - 1)} {'epoch' if epochs == 2 else 'epochs'} after the warm-up."
    assert curve._repr_html_().count("<img") == (1 if epochs else 0)


def test_samples_within_an_epoch_do_not_affect_verdict():
    flat = make_curve(allocated=FLAT)
    inside = [replace(sample, is_boundary=False) for sample in make_curve(allocated=LEAK).samples]
    mixed = replace(flat, samples=tuple(itertools.chain(*zip(inside, flat.samples, strict=True))))

    assert (mixed.trend, len(mixed.samples), len(mixed.epoch_samples)) == (flat.trend, 12, 6)


REASONS = [
    ({"allocated": LEAK}, "Memory of tensors went from 150.0 MiB after epoch 2 to 350.0 MiB after epoch 6; "),
    ({"allocated": FLAT, "resident": LEAK}, "Memory of the process went from 150.0 MiB"),
    ({"allocated": FLAT}, "; 5 epochs after the warm-up are too few to exclude slower growth."),
    ({"allocated": FLAT * 2}, "; growth above 0.0% is excluded with 95% confidence."),
    ({"allocated": SAWTOOTH}, "; it rose and fell by 44% in between."),
    ({"allocated": [100] * 8 + [180]}, "; it rose in the last epochs only."),
    (
        {"allocated": FLAT * 2, "resident": [100 + n + n % 2 for n in range(12)]},
        "9.8% in 10 epochs (95% CI: 8.4% to 11.2%), below the limit of 26%, which such growth reaches in 27 epochs.",
    ),
    (
        {"allocated": [0.3] + [0.3 + n / 128 for n in range(7)]},
        "7.8% of 1 MiB in 10 epochs (95% CI: 7.8% to 7.8%), below",
    ),
]


@pytest.mark.parametrize(("series", "reason"), REASONS)
def test_reason_contains_measured_values(series, reason):
    assert reason in make_curve(**series).reason


def test_simulated_curve_is_labeled():
    real = make_curve(allocated=FLAT)
    curve = real.append(replace(real.samples[-1], simulated=True))

    assert "SIMULATED" in str(curve)
    assert "SIMULATED" in curve._repr_html_()
    assert (curve.to_dict()["simulated"], real.simulated) == (True, False)


def test_releases_state_number_and_duration():
    assert CacheReleases(0, 0.0, 9.0).sentence == ""
    assert CacheReleases(12, 0.35, 30.0).sentence == (
        "Between steps, the cache was emptied 12 times (0.3 s, 1.2% of the time)."
    )


SIZE = st.none() | st.integers(0, 1 << 44)


@given(st.lists(st.tuples(SIZE, SIZE, SIZE, SIZE, st.booleans()), max_size=15), st.floats(0, 5))
def test_any_curve_has_verdict_and_report(metrics, threshold):
    samples = tuple(
        MemorySample(epoch, epoch, 0.0, boundary, allocated, reserved, recommended, resident=resident)
        for epoch, (allocated, reserved, recommended, resident, boundary) in enumerate(metrics)
    )
    curve = MemoryCurve("mps", samples, threshold)

    assert curve.verdict in str(curve)
    assert json.dumps(curve.to_dict())
    assert curve._repr_html_().startswith("<div")


def test_table_columns_match_metrics():
    sizes = {name: size * MIB for size, name in enumerate(("allocated", "reserved", "peak", "resident"), 1)}
    table = MemoryCurve("mps", (MemorySample(1, 10, 2.5, **sizes),)).to_report().tables[0]

    assert table.columns == ("epoch", "step", *sizes, "")
    assert table.rows == (("1", "10", "1.0 MiB", "2.0 MiB", "3.0 MiB", "4.0 MiB", "warm-up"),)


@pytest.mark.real_computer  # It is about the CPU.
def test_take_sample_on_cpu():
    before = take_sample("cpu", 1, 10, 2.5)
    kept = torch.zeros(MIB)
    after = take_sample("cpu", 1, 10, 2.5, boundary=False)

    assert after.allocated - before.allocated == kept.nbytes
    assert (after.reserved, after.peak, after.simulated) == (None, None, False)
    assert 0 < after.resident < after.recommended == psutil.virtual_memory().total
    assert (after.epoch, after.step, after.seconds, after.is_boundary) == (1, 10, 2.5, False)
    assert json.loads(json.dumps(after.to_dict()))["allocated"] == after.allocated


def test_resident_bytes_prefers_footprint():
    """On macOS, a compressed leak is only in the footprint."""
    resident = psutil.Process().memory_info().rss

    assert resident_bytes(lambda: Footprint(1 << 50, 1 << 51)) == 1 << 50
    assert resident // 2 < resident_bytes(lambda: None) < 2 * resident


@pytest.mark.real_computer  # It starts its own simulation.
def test_take_sample_on_simulated_mps():
    with nb.simulated_mps("8 GiB") as mps:
        kept = torch.zeros(MIB, device="mps")
        torch.zeros(4 * MIB, device="mps")
        first, second = (take_sample("mps", 1, 10, 2.5) for _ in range(2))
        assert kept.is_mps

    assert first.simulated
    assert first.reserved >= first.allocated == second.allocated >= kept.nbytes
    assert first.recommended == mps.allocator.memory.recommended
    assert (first.peak >= 20 * MIB, second.peak) == (True, second.allocated)


def test_chart_has_limits_and_positions():
    curve = make_curve(allocated=[50, 80, 110], reserved=[50, 80, None], recommended=100 * MIB, limit=1.7)
    inside = replace(curve.samples[1], is_boundary=False, epoch=1)
    chart = replace(curve, samples=(curve.samples[0], inside, *curve.samples[1:])).chart
    (tensors,) = chart.lines

    assert (tensors.name, tensors.x, tensors.y) == ("tensors", (1.0, 2.0, 3.0, 4.0), (50.0, 80.0, 80.0, 110.0))
    assert (tensors.tooltips[0], tensors.tooltips[1]) == ("after epoch 1: tensors 50.0 MiB", "")
    limits = AxisMarker(100, "recommended by Metal"), AxisMarker(170, "high watermark (1.7)")
    assert chart.axes.reference_lines == limits
    assert (chart.axes.y_unit, chart.axes.x_label) == ("MiB", "epoch")
    assert chart.axes.ticks == (AxisMarker(1, "1"), AxisMarker(3, "2"), AxisMarker(4, "3"))


def test_chart_of_growing_process():
    chart = make_curve(allocated=FLAT, resident=LEAK, unit=1 << 30).chart

    assert (chart.caption, [line.name for line in chart.lines]) == ("Memory of the process", ["process"])
    assert (chart.axes.y_unit, chart.lines[0].y) == ("GiB", tuple(LEAK))


@pytest.mark.parametrize(("recommended", "lines"), [(150, 1), (151, 0), (None, 0)])
def test_distant_limits_are_not_drawn(recommended, lines):
    curve = make_curve(allocated=[50], recommended=recommended and recommended * MIB)

    assert len(curve.chart.axes.reference_lines) == lines


# Sizes in MiB -> verdict.
SERIES = {
    "flat": ([100] * 9, "flat"),
    "noise of 2%": ([100, 102, 98, 101, 99, 102, 100, 98, 101], "flat"),
    "a slow rise below the threshold": ([100 + 2 * epoch for epoch in range(9)], "growing below the limit"),
    "a slow rise of five epochs": ([100 + 2 * epoch for epoch in range(5)], "flat"),
    "a rise of less than 1%": ([1000 + 0.9 * epoch for epoch in range(9)], "flat"),
    "a rise just below the threshold": ([100 + 2.55 * epoch for epoch in range(9)], "growing below the limit"),
    "a rise just above the threshold": ([100 + 2.65 * epoch for epoch in range(9)], "growing"),
    "a steady leak": ([100 + 10 * epoch for epoch in range(9)], "growing"),
    "a steady leak of three epochs": ([100, 105, 110], "growing"),
    "a leak with noise": ([100, 108, 112, 124, 127, 139, 141, 152, 160], "growing"),
    "a leak every third epoch": ([100] * 3 + [140] * 3 + [180] * 3, "growing"),
    "a leak under a sawtooth": ([100, 150, 120, 170, 140, 190], "growing"),
    "a leak after a slow start": ([100, 100, 100, 130, 160, 190, 220], "growing"),
    "one jump at the end, of three": ([100, 100, 180], "insufficient data"),
    "one jump at the end, of nine": ([100] * 8 + [180], "insufficient data"),
    "a leak that begins late": ([100] * 6 + [130, 160, 190], "growing"),
    "a late rise that has ended": ([100] * 9 + [120, 140, 140, 140], "flat"),
    "a leak under an evaluation every second epoch": ([1000 + 50 * n + 900 * (n % 2) for n in range(12)], "growing"),
    "a cache that fills and stays": ([1000, 1200, 1400, 1600] + [1800] * 6, "flat"),
    "a slow rise for long": ([1000 + 20 * n for n in range(100)], "growing below the limit"),
    "a small late rise": ([100] * 6 + [103, 106, 109], "flat"),
    "one jump kept, of four": ([100, 100, 180, 180], "flat"),
    "one jump with noise": ([100, 101, 99, 180, 181, 178], "flat"),
    "one fall kept": ([180] * 4 + [100] * 5, "flat"),
    "a spike": ([100, 100, 180, 100, 100], "sawtooth"),
    "a sawtooth": ([100, 180] * 4, "sawtooth"),
    "a slow sawtooth": ([100, 140, 180] * 3, "sawtooth"),
    "falling": ([200 - 10 * epoch for epoch in range(9)], "flat"),
    "a rise that falls back as often as a growth may": ([100, 120, 150, 180, 140], "growing"),
    "a rise that falls back more often": ([100, 160, 160, 150, 160, 210, 200], "flat"),
    "a rise of six epochs that ends falling": ([100, 100, 104, 111, 115, 107], "flat"),
    "a rise of six epochs that ends below half the pace": ([100, 106, 114, 122, 112, 124], "flat"),
    "a rise of six epochs that ends above half the pace": ([100, 100, 102, 107, 111, 111], "growing"),
    "a rise that is nearly one jump": ([100, 104, 106], "flat"),
    "two rises alike": ([100, 103, 106], "growing"),
    "a last rise below half the threshold": ([100, 102, 109], "flat"),
    "a last rise above half the threshold": ([100, 102, 114], "insufficient data"),
    "three last rises": ([100, 102, 114, 116], "growing"),
    "a fall by a quarter of the spread": ([100, 140, 130], "flat"),
    "a fall by more than a quarter of the spread": ([100, 130, 122], "sawtooth"),
    "a rise from zero": ([0, 10, 20, 30], "growing"),
    "kilobytes for six epochs": ([0.001 * 2**epoch for epoch in range(6)], "growing below the limit"),
    "kilobytes for nine epochs": ([0.001 * 3**epoch for epoch in range(9)], "growing"),
    "one epoch": ([100], "insufficient data"),
    "two epochs that leak": ([100, 200], "insufficient data"),
    "no epoch": ([], "insufficient data"),
}


def test_classify_trend():
    """After fifty constant epochs, no series is growing."""
    for name, (sizes, kind) in SERIES.items():
        series = [round(size * MIB) for size in sizes]
        assert classify_trend(series).kind == kind, name
        assert classify_trend([*series, *series[-1:] * 50]).kind != "growing", name


@pytest.mark.parametrize("epochs", [3, 9, 900])
def test_growth_is_scaled_to_ten_epochs(epochs):
    sizes = [(100 + 5 * epoch) * MIB for epoch in range(epochs)]
    trend = classify_trend(sizes)

    assert trend.growth == pytest.approx(0.5)
    assert (trend.kind, trend.baseline, trend.last) == ("growing", sizes[0], sizes[-1])


@pytest.mark.parametrize(
    ("sizes", "growth", "spread"),
    [
        ([100, 110, 120, 130], 1.0, 0.3),
        ([100, 100, 100, 130], 0.5, 0.3),
        ([100] * 8 + [110, 120, 130], 1.0, 0.3),
        ([100, 180, 100, 180, 100], 0.0, 0.8),
        ([200, 180, 160], -1.0, 0.2),
        ([0.5, 1, 1.5], 5.0, 1.0),
    ],
)
def test_trend_has_measured_fractions(sizes, growth, spread):
    """Below 1 MiB, the fractions are those of 1 MiB."""
    trend = classify_trend([round(size * MIB) for size in sizes])

    assert (trend.growth, trend.spread) == pytest.approx((growth, spread))


def test_threshold_changes_classification():
    sizes = [(100 + 3 * epoch) * MIB for epoch in range(9)]

    assert [classify_trend(sizes, threshold).kind for threshold in (0, 0.26, 0.5)] == [
        "growing",
        "growing",
        "growing below the limit",
    ]


@given(st.lists(st.integers(0, 1 << 45), max_size=40), st.floats(0, 10))
def test_any_series_has_a_verdict(sizes, threshold):
    trend = classify_trend(sizes, threshold)

    assert trend.kind in {"flat", "growing below the limit", "growing", "sawtooth", "insufficient data"}
    assert trend.kind != "growing" or trend.growth > threshold
    if len(sizes) < 3:
        assert trend.kind == "insufficient data"
    elif trend.kind == "insufficient data":
        assert sizes[-1] > sizes[-2]


@given(st.integers(MIN_BASELINE_BYTES, 1 << 40), st.lists(st.floats(-0.02, 0.02), min_size=3, max_size=40))
def test_bounded_noise_is_not_above_the_limit(size, noise):
    assert classify_trend([round(size * (1 + deviation)) for deviation in noise]).kind != "growing"
