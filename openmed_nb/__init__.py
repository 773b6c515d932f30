"""Medical NLP models in notebooks, on the best device of this computer, and the reason for that device.

In a notebook::

    %load_ext openmed_nb
    %openmed_device            # which device, and why
    %openmed_device cpu        # change it
    %openmed_panel             # all of it to look at and to click

    %%openmed_ner
    Patient with type 2 diabetes mellitus and hypertension.

In Python::

    import openmed_nb as nb
    pipe = nb.load_pipeline()  # the bundled, offline disease model
    pipe("Patient with type 2 diabetes mellitus.")

Importing this package imports neither torch nor transformers nor ipywidgets.
"""

from __future__ import annotations

import warnings
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from ._utils.lazy import face

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__version__ = "0.1.0"

_get, __dir__, __all__ = face(__name__, __file__)

# What stood at the top before: where it is now and, behind a colon, the argument that tells which of several it was.
_MOVED = {
    "DeviceChoice": "devices.choice.DeviceChoice",
    "EnvPlan": "devices.environment.EnvPlan",
    "EpochHooks": "training.EpochHooks",
    "GradientAccumulation": "training.GradientAccumulation",
    "Logbook": "runbook.Logbook",
    "MemoryCurve": "training.MemoryCurve",
    "MemorySample": "training.MemorySample",
    "ModelLoader": "compat.ModelLoader",
    "accelerator_arguments": "training.arguments:accelerate",
    "adamw": "training.adamw",
    "apply_mps_tuning": "compat.apply_mps_tuning",
    "check_loader": "training.loader.check",
    "checkpoint_activations": "training.checkpoint_activations",
    "explain_fused": "training.adamw.explain",
    "fallbacks": "runbook.fallbacks",
    "forecast": "runbook.forecast",
    "gates": "runbook.gates",
    "lightning_callback": "training.callback:lightning",
    "limit_memory": "training.limit_memory",
    "loader_settings": "training.loader.settings",
    "memory_curve": "training.last_curve",
    "parity": "runbook.parity",
    "precision": "training.precision",
    "profile": "runbook.profile",
    "resolve_torch_device": "compat.resolve_torch_device",
    "to_device": "training.to_device",
    "trainer_arguments": "training.arguments:trainer",
    "trainer_callback": "training.callback:trainer",
    "validate_precision": "runbook.validate_precision",
    "who_holds": "training.who_holds",
    "worker_ladder": "training.loader.ladder",
}


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        return _get(name)
    place, _, which = _MOVED[name].partition(":")
    now = f"{place}({which!r}, ...)" if which else place
    warnings.warn(f"openmed_nb.{name} is openmed_nb.{now} now.", DeprecationWarning, stacklevel=2)
    found = resolve_name(f"{__name__}.{place}")
    return partial(found, which) if which else found


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics; IPython calls this for ``%load_ext openmed_nb``."""
    from .notebook.extension import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove everything that :func:`load_ipython_extension` added; IPython calls this for ``%unload_ext``."""
    from .notebook.extension import unload

    unload(shell)
