"""Pictures of reports: the module that draws one, and the picture as SVG; matplotlib is imported only when one is drawn."""

from __future__ import annotations

import importlib
import io
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError
from ..interface.display import escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plotting(package: str | None = __package__) -> Any:
    """Return the module ``plot`` of a package, which draws its reports.

    Args:
        package: The package, as ``__package__`` names it; that of the memory curve where nobody says.

    Raises:
        ConfigurationError: Where matplotlib is not installed.
    """
    try:
        return importlib.import_module(".plot", package)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"The picture needs {error.name}, which is not installed.",
            "Install it: python -m pip install 'openmed-nb[train]'.",
        ) from error


def svg_of(figure: Figure, label: str) -> str:
    """Return a figure as an SVG element that describes itself to a screen reader; text is text, in any font.

    Args:
        figure: The figure.
        label: What is to be seen in it, in words.
    """
    from matplotlib import rc_context

    written = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "openmed_nb"}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    svg = written.getvalue()
    return svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)
