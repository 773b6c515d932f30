"""The picture of a curve: an SVG of text and lines, the same for the same curve."""

import re
import sys
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from matplotlib.figure import Figure

from openmed_nb.display import NOTE, escape
from openmed_nb.errors import ConfigurationError
from openmed_nb.training import MemoryCurve, MemorySample
from openmed_nb.training.curve import plotting
from openmed_nb.training.plot import LiveCurve, svg_of, to_svg

MIB, GIB = 1 << 20, 1 << 30


def curve_of(sizes, device="mps", unit=MIB, recommended=None, **options):
    """Return a curve from what tensors use at the ends of its epochs."""
    samples = [
        MemorySample(epoch, 10 * epoch, 1.0, allocated=size * unit, resident=2 * size * unit, recommended=recommended)
        for epoch, size in enumerate(sizes, 1)
    ]
    return MemoryCurve(device, tuple(samples), **options)


CURVE = curve_of([50, 80, 110, 140, 170], recommended=300 * MIB, limit=1.7)


@pytest.fixture(scope="module")
def picture():
    """The picture of the curve."""
    return to_svg(CURVE)


def labels(axes):
    """Return the names of the lines of a plot."""
    return axes.get_legend_handles_labels()[1]


def test_the_picture_is_well_formed_and_has_no_script(picture):
    """The picture can be read as XML, and has no script, no link and no picture of elsewhere in it."""
    root = ET.fromstring(picture)  # noqa: S314 - it was made here
    names = {element.tag.rpartition("}")[2] for element in root.iter()}

    assert root.get("role") == "img"
    assert names.isdisjoint({"script", "a", "image", "foreignObject", "iframe"})
    assert not [name for element in root.iter() for name in element.attrib if name.lower().startswith("on")]


def test_the_picture_describes_itself():
    """A screen reader gets the verdict and the reason, escaped."""
    curve = replace(CURVE, device='mps"><script>')
    drawn = to_svg(curve)
    root = ET.fromstring(drawn)  # noqa: S314 - it was made here

    assert root.get("aria-label") == f'Memory on mps"><script>: growing. {curve.reason}'
    assert "<script>" not in drawn


def test_the_picture_is_the_same_for_the_same_curve(picture):
    """Two pictures of one curve are equal, so that a notebook that is run again does not change."""
    assert to_svg(replace(CURVE)) == picture


def test_the_words_are_text(picture):
    """Title, axes and names of lines are text, which a reader can enlarge and search."""
    words = re.findall(r"<text[^>]*>([^<]*)</text>", picture)

    assert {"mps: growing", "MiB", "epoch", "tensors", "warm-up", "process"} <= set(words)


def test_the_limits_are_lines():
    """The recommended memory and the high watermark are lines where they are near enough to be seen."""
    device, process = CURVE.plot().axes

    assert labels(device) == ["tensors", "recommended by Metal", "high watermark (1.7)", "warm-up"]
    assert labels(process) == ["process", "warm-up"]
    assert labels(curve_of([50, 80], recommended=64 * GIB).plot().axes[0]) == ["tensors", "warm-up"]


def test_large_memory_is_counted_in_gib():
    """From ten GiB on the axis counts in GiB, and the limits are drawn in the same unit."""
    device = curve_of([11, 12, 13], unit=GIB, recommended=20 * GIB).plot().axes[0]

    assert device.get_ylabel() == "GiB"
    assert list(device.lines[0].get_ydata()) == [11, 12, 13]
    assert list(device.lines[1].get_ydata()) == [20, 20]


def test_only_ends_of_epochs_have_markers():
    """Samples inside an epoch are part of the line, without a marker."""
    inside = replace(CURVE.samples[2], boundary=False)
    line = replace(CURVE, samples=(*CURVE.samples[:2], inside, *CURVE.samples[3:])).plot().axes[0].lines[0]

    assert line.get_markevery() == [0, 1, 3, 4]
    assert len(line.get_xdata()) == 5


@pytest.mark.parametrize("count", range(3))
def test_short_curves_can_be_drawn(count):
    """A curve without samples, or with one, is a picture too."""
    assert ET.fromstring(to_svg(replace(CURVE, samples=CURVE.samples[:count]))) is not None  # noqa: S314


def test_a_simulated_curve_says_so_in_its_picture():
    """The title and the description of a simulated curve say that it is simulated."""
    simulated = replace(CURVE, samples=tuple(replace(sample, simulated=True) for sample in CURVE.samples))
    drawn = to_svg(simulated)

    assert "SIMULATED MPS, mps: growing" in drawn
    assert "SIMULATED" in ET.fromstring(drawn).get("aria-label")  # noqa: S314 - it was made here


def test_a_simulated_live_curve_says_so():
    """What a live curve shows of the simulation says in a sentence that no figure is one of MPS."""
    live = LiveCurve()
    live(replace(CURVE, samples=tuple(replace(sample, simulated=True) for sample in CURVE.samples)))

    assert escape(NOTE) in live.value


def test_drawing_leaves_matplotlib_as_it_was():
    """No figure stays open, and no setting of matplotlib is changed."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    before, figures = dict(mpl.rcParams), plt.get_fignums()
    to_svg(CURVE)

    assert dict(mpl.rcParams) == before
    assert plt.get_fignums() == figures


def test_a_figure_describes_itself():
    """A figure becomes one SVG element with a label, which cannot become HTML, the same every time."""
    svg = svg_of(Figure(), "<b>two</b> lines")

    assert svg.startswith('<svg role="img" aria-label="&lt;b&gt;two&lt;/b&gt; lines"')
    assert svg == svg_of(Figure(), "<b>two</b> lines")


def test_nothing_draws(monkeypatch):
    """Where what draws is not installed, the error names it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "openmed_nb.training.plot")

    with pytest.raises(ConfigurationError, match="The picture needs matplotlib, which is not installed"):
        plotting()
