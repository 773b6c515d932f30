"""Charts of a memory curve with its limits."""

from dataclasses import replace

import pytest

from openmed_nb._render.display import SIMULATION_NOTICE, escape
from openmed_nb._render.drawing import AxisMarker
from openmed_nb.training import MemoryCurve, MemorySample
from openmed_nb.training.live import LiveMemoryCurve

MIB = 1 << 20
GIB = 1 << 30


def make_curve(sizes, device="mps", unit=MIB, recommended=None, **options):
    """Return a curve from the memory of tensors at the ends of its epochs."""
    samples = [
        MemorySample(epoch, 10 * epoch, 1.0, allocated=size * unit, resident=2 * size * unit, recommended=recommended)
        for epoch, size in enumerate(sizes, 1)
    ]
    return MemoryCurve(device, tuple(samples), **options)


CURVE = make_curve([50, 80, 110, 140, 170], recommended=300 * MIB, limit=1.7)


def test_limits_are_reference_lines():
    chart, process = CURVE.charts
    limits = [("recommended by Metal", 300), ("high watermark (1.7)", 510)]
    far = make_curve([50, 80], recommended=64 * GIB)

    assert [(limit.name, limit.position) for limit in chart.axes.reference_lines] == limits
    assert process.axes.reference_lines == ()
    assert far.charts[0].axes.reference_lines == ()


def test_charts_of_curve():
    inside = replace(CURVE.samples[2], is_boundary=False, epoch=2)
    samples = (*CURVE.samples[:2], inside, *CURVE.samples[2:])
    device, process = replace(CURVE, device="cuda", samples=samples).charts
    x = (1.0, 2.0, 2.5, 3.0, 4.0, 5.0)
    epochs = tuple(AxisMarker(epoch, str(epoch)) for epoch in range(6))

    assert (device.caption, process.caption) == ("Memory of the device", "Memory of the process")
    (tensors,) = device.lines
    assert (tensors.name, tensors.x, tensors.y) == ("tensors", x, (50.0, 80.0, 110.0, 110.0, 140.0, 170.0))
    assert tensors.tooltips == (
        "after epoch 1: tensors 50.0 MiB",
        "after epoch 2: tensors 80.0 MiB",
        "",
        *(f"after epoch {epoch}: tensors {size}.0 MiB" for epoch, size in ((3, 110), (4, 140), (5, 170))),
    )
    assert [(line.name, line.y[-1]) for line in process.lines] == [("process", 340.0)]
    assert (device.axes.y_unit, device.axes.x_label, device.axes.ticks) == ("MiB", "epoch", epochs)
    assert device.axes.vertical_markers == (AxisMarker(1, "warm-up ends"),)
    assert process.axes.vertical_markers == ()
    assert (device.axes.height, process.axes.height) == (12, 6)


def test_lines_have_all_values_of_the_device():
    values = {"allocated": 1 * MIB, "reserved": 2 * MIB, "peak": 3 * MIB, "swap": 4 * MIB}
    samples = [MemorySample(epoch, 1, 1.0, **values) for epoch in (1, 2)]
    lines = MemoryCurve("cuda", tuple(samples)).charts[0].lines
    partial = MemoryCurve("cuda", (samples[0], replace(samples[1], peak=None))).charts[0].lines

    assert [(line.name, line.y) for line in lines] == [
        ("tensors", (1.0, 1.0)),
        ("reserved by the device", (2.0, 2.0)),
        ("peak in the epoch", (3.0, 3.0)),
    ]
    assert [line.name for line in partial] == ["tensors", "reserved by the device"]


def test_limit_follows_recommended_memory():
    cuda = make_curve([50], "cuda", recommended=100 * MIB, limit=0.5)
    assert cuda.limits == (AxisMarker(100 * MIB, "memory of the device"), AxisMarker(50 * MIB, "limit (0.5)"))
    assert replace(cuda, limit=None).limits == cuda.limits[:1]
    assert make_curve([50], limit=0.5).limits == ()
    at_ratio = make_curve([50], "cuda", recommended=150 * MIB).charts[0].axes.reference_lines
    beyond = make_curve([50], "cuda", recommended=151 * MIB).charts[0].axes.reference_lines
    assert ([line.position for line in at_ratio], beyond) == ([150], ())


def test_large_memory_uses_gib():
    chart, process = make_curve([11, 12, 13], unit=GIB, recommended=20 * GIB).charts

    assert chart.axes.y_unit == "GiB"
    assert (chart.lines[0].y, process.lines[0].y) == ((11, 12, 13), (22, 24, 26))


@pytest.mark.parametrize("count", range(3))
def test_short_curves_can_be_drawn(count):
    curve = replace(CURVE, samples=CURVE.samples[:count])

    assert len(curve.charts) == 2
    assert curve._repr_html_().count("<img") == (2 if count else 0)


def test_charts_of_simulated_curve_are_labeled():
    live = LiveMemoryCurve()
    simulated = replace(CURVE, samples=tuple(replace(sample, simulated=True) for sample in CURVE.samples))
    live(simulated)

    assert all("(SIMULATED)" in picture.caption for picture in simulated.final_report().charts)
    assert escape(SIMULATION_NOTICE) in live.value
