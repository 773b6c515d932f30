"""The panel, and how it is opened: widgets where a kernel can show them, otherwise the same state as text.

``state`` is what there is to see, ``rendering`` makes HTML of it, ``model`` is what can be asked for, and ``view`` has the
widgets; it imports ipywidgets, so it is imported only where a panel is opened.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ...errors import check_flag
from ...models.config import OpenMedConfig
from ...models.registry import find_model
from ...session import SESSION
from .state import PanelState, look

if TYPE_CHECKING:
    from .view import PanelView


NO_KERNEL = "Widgets need a notebook, and this is none: type the commands below."
NO_WIDGETS = "ipywidgets is not installed: python -m pip install ipywidgets, then restart the kernel."

# The panels that are open, each with the cell and the run of it that opened it; ipywidgets keeps them alive until they are
# closed.
OPEN: WeakKeyDictionary[PanelView, tuple[str | None, str | None]] = WeakKeyDictionary()


def panel(model: str | None = None, show_text: bool = True) -> PanelView | PanelState:
    """Open a panel over this session: device, environment, memory, models, and a text to try.

    Args:
        model: The model of "Try it": an alias, a hub id or a folder; ``None`` is the bundled one.
        show_text: Whether an answer shows the text that was annotated.

    Returns:
        The panel, a widget that shows itself in a notebook; where there is no kernel, as in a terminal, what it would
        show, with the commands to type. A panel is closed when its cell is run again, and by its ``close()``.

    Raises:
        UnknownModel: For a name that is no alias, hub id or folder.

    Example:
        >>> print(panel())  # doctest: +ELLIPSIS
        openmed_nb: device, environment, memory and models
        ...
    """
    check_flag("show_text", show_text)
    find_model(model, OpenMedConfig().default_org)
    shell: Any = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or not shell.has_trait("kernel"):
        return replace(PanelState(**look(SESSION)), note=NO_KERNEL)
    if not importlib.util.find_spec("ipywidgets"):
        return replace(PanelState(**look(SESSION)), note=NO_WIDGETS)
    from .model import CellThread, PanelModel, kernel_loop
    from .view import PanelView

    parent = shell.get_parent()
    cell, run = parent.get("metadata", {}).get("cellId"), parent.get("header", {}).get("msg_id")
    for former, (its_cell, its_run) in tuple(OPEN.items()):
        if its_cell is not None and its_cell == cell and its_run != run:  # The front end has thrown it away.
            former.close()
            del OPEN[former]
    shown = PanelModel(SESSION, model, show_text, cells=CellThread(kernel_loop(shell)), events=shell.events)
    try:
        view = PanelView(shown)
    except BaseException:  # An interrupt too.
        shown.close()
        raise
    OPEN[view] = cell, run
    return view


def close_panels() -> None:
    for view in tuple(OPEN):
        view.close()
    OPEN.clear()
