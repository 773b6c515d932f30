"""The panel, and how it is opened: widgets where a kernel can show them, otherwise the same state as text.

``state`` is what there is to see, ``rendering`` makes HTML of it, ``model`` is what can be asked for, and ``view`` has the
widgets; it imports ipywidgets, so it is imported only where a panel is opened.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..._utils.validation import check_bool
from ...models.config import OpenMedConfig
from ...models.files import read_config
from ...models.registry import download_model, find_model
from ...session import SESSION
from .state import PanelState, read_state

if TYPE_CHECKING:
    from .view import PanelView


NO_KERNEL_NOTICE = "Widgets need a notebook, and this is none: type the commands below."
NO_WIDGETS_NOTICE = "ipywidgets is not installed: python -m pip install ipywidgets, then restart the kernel."

# The panels that are open, each with the cell and the run of it that opened it; ipywidgets keeps them alive until they are
# closed.
OPEN_PANELS: WeakKeyDictionary[PanelView, tuple[str | None, str | None]] = WeakKeyDictionary()


def panel(model: str | None = None, show_text: bool = True) -> PanelView | PanelState:
    """Open a panel over this session: device, environment, memory, models, and a text to try.

    Args:
        model: The model of "Try it": an alias, a hub id or a folder; ``None`` is the bundled one.
        show_text: Whether an answer shows the text that was annotated.

    Returns:
        The panel, a widget that shows itself in a notebook; where there is no kernel, as in a terminal, what it would
        show, with the commands to type. A panel is closed when its cell is run again, and by its ``close()``.

    Raises:
        ModelError: For a name that is no alias, hub id or folder, for a folder without a token classifier, and without a
            network for a model of the hub that is not on this computer.

    Example:
        >>> print(panel())  # doctest: +ELLIPSIS
        openmed_nb: device, environment, memory and models
        ...
    """
    check_bool("show_text", show_text)
    _check_model(model)
    shell: Any = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or not shell.has_trait("kernel"):
        return PanelState(**read_state(SESSION), notice=NO_KERNEL_NOTICE)
    if not importlib.util.find_spec("ipywidgets"):
        return PanelState(**read_state(SESSION), notice=NO_WIDGETS_NOTICE)
    from .model import MainThreadRunner, PanelModel, kernel_loop
    from .view import PanelView

    parent = shell.get_parent()
    cell = parent.get("metadata", {}).get("cellId")
    run = parent.get("header", {}).get("msg_id")
    for former, (its_cell, its_run) in tuple(OPEN_PANELS.items()):
        if its_cell is not None and its_cell == cell and its_run != run:  # The front end has thrown it away.
            former.close()
            del OPEN_PANELS[former]
    shown = PanelModel(SESSION, model, show_text, cells=MainThreadRunner(kernel_loop(shell)), events=shell.events)
    try:
        view = PanelView(shown)
    except BaseException:  # An interrupt too.
        shown.close()
        raise
    OPEN_PANELS[view] = (cell, run)
    return view


def _check_model(name: str | None) -> None:
    """Refuse a model that could not be annotated with, as far as this computer tells without asking another."""
    reference = find_model(name, OpenMedConfig().default_org)
    if not reference.on_hub:
        read_config(Path(reference.location), reference.name)
        return
    from huggingface_hub import constants

    if constants.is_offline_mode():
        download_model(reference.location, OpenMedConfig())


def close_panels() -> None:
    for view in tuple(OPEN_PANELS):
        view.close()
    OPEN_PANELS.clear()
