"""Pictures of reports: SVG that describes itself, and a clear error where nothing can draw."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from openmed_nb.errors import ConfigurationError
from openmed_nb.training.curve import plotting, svg_of


def test_picture_describes_itself():
    """A figure becomes one SVG element with a label, which cannot become HTML, the same every time."""
    svg = svg_of(Figure(), "<b>two</b> lines")

    assert svg.startswith('<svg role="img" aria-label="&lt;b&gt;two&lt;/b&gt; lines"')
    assert svg == svg_of(Figure(), "<b>two</b> lines")


@pytest.mark.parametrize("module", ["training.plot", "runbook.sweep_plot"])
def test_module_that_draws(module: str):
    """Each report has its own module that draws; without one it is that of the memory curve."""
    assert plotting(module).__name__ == f"openmed_nb.{module}"
    assert plotting().__name__ == "openmed_nb.training.plot"


def test_nothing_draws():
    """Where what draws is not installed, the error names it."""
    with pytest.raises(ConfigurationError, match="which is not installed"):
        plotting("devices.plot")
