"""Run medical NLP models in notebooks on the best available device, and explain the choice of the device.

In a notebook::

    %load_ext openmed_nb
    %openmed_device            # show the active device and the reason
    %openmed_device cpu        # use this device from now on
    %openmed_panel             # open the interactive panel

    %%openmed_ner
    Patient with type 2 diabetes mellitus and hypertension.

In Python::

    import openmed_nb as nb
    pipe = nb.load_pipeline()  # the bundled, offline disease model
    pipe("Patient with type 2 diabetes mellitus.")

Importing this package imports neither torch nor transformers nor ipywidgets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._utils.lazy import attach_stub

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics; IPython calls this for ``%load_ext openmed_nb``."""
    from .notebook.extension import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove the magics and undo all changes of :func:`load_ipython_extension`; IPython calls this for ``%unload_ext``."""
    from .notebook.extension import unload

    unload(shell)
