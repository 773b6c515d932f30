"""Charts of a memory curve with its limits, in matplotlib and in HTML."""

import io
import sys
from dataclasses import replace

import pytest

from openmed_nb._render.display import SIMULATION_NOTICE, escape
from openmed_nb.errors import ConfigurationError
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
    device, process = CURVE.plot().axes
    limits = [("recommended by Metal", 300), ("high watermark (1.7)", 510)]
    far = make_curve([50, 80], recommended=64 * GIB)

    assert [(limit.name, limit.position) for limit in CURVE.charts[0].axes.reference_lines] == limits
    assert device.get_legend_handles_labels()[1] == ["tensors", limits[0][0], limits[1][0], "warm-up ends"]
    assert process.get_legend_handles_labels()[1] == ["process"]
    assert far.charts[0].axes.reference_lines == ()


def test_large_memory_uses_gib():
    device = make_curve([11, 12, 13], unit=GIB, recommended=20 * GIB).plot().axes[0]

    assert device.get_ylabel() == "GiB"
    assert [list(line.get_ydata()) for line in device.lines[:2]] == [[11, 12, 13], [20, 20]]


def test_only_ends_of_epochs_have_markers():
    inside = replace(CURVE.samples[2], is_boundary=False)
    line = replace(CURVE, samples=(*CURVE.samples[:2], inside, *CURVE.samples[3:])).plot().axes[0].lines[0]

    assert line.get_markevery() == [0, 1, 3, 4]
    assert len(line.get_xdata()) == 5


@pytest.mark.parametrize("count", range(3))
def test_short_curves_can_be_drawn(count):
    curve = replace(CURVE, samples=CURVE.samples[:count])

    assert len(curve.plot().axes) == 2
    assert curve._repr_html_().count("<img") == (2 if count else 0)


def test_charts_of_simulated_curve_are_labeled():
    live = LiveMemoryCurve()
    simulated = replace(CURVE, samples=tuple(replace(sample, simulated=True) for sample in CURVE.samples))
    live(simulated)

    assert simulated.plot()._suptitle.get_text() == "SIMULATED MPS, mps: growing"
    assert all("(SIMULATED)" in picture.caption for picture in simulated.final_report().charts)
    assert escape(SIMULATION_NOTICE) in live.value


def test_figure_is_transparent_with_visible_text():
    """It must be readable on a light and on a dark page."""
    from matplotlib import image

    pixels = image.imread(io.BytesIO(CURVE.plot()._repr_png_()), format="png")
    drawn = pixels[pixels[..., 3] > 0.9][:, :3]  # Opaque pixels.

    assert pixels[0][0][3] == pixels[-1][-1][3] == 0
    assert drawn.max(axis=1).min() > 0.4  # No pixel is nearly black.
    assert drawn.min(axis=1).max() < 0.75  # No pixel is nearly white.


def test_drawing_does_not_change_matplotlib_state():
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    settings = dict(mpl.rcParams)
    figure_numbers = plt.get_fignums()
    CURVE.plot()

    assert dict(mpl.rcParams) == settings
    assert plt.get_fignums() == figure_numbers


def test_missing_matplotlib_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for loaded in ("matplotlib.figure", "openmed_nb.training.plot"):
        monkeypatch.delitem(sys.modules, loaded)

    with pytest.raises(ConfigurationError, match="The chart requires matplotlib, which is not installed") as caught:
        CURVE.plot()

    assert caught.value.remedy.endswith("pip install matplotlib.")
