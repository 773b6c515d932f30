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

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from . import errors
    from .devices.choice import DeviceChoice
    from .devices.environment import EnvPlan
    from .errors import OpenMedError, OpenMedWarning
    from .interface.cluster import cluster
    from .interface.devices import apply_mps_tuning, device, reset, resolve_torch_device, simulated_mps, use
    from .interface.evidence import handoff, logbook
    from .interface.models import ModelLoader, annotate, load_model, load_pipeline
    from .interface.panel.opening import panel
    from .interface.preparation import check_loader, loader_settings, precision, to_device
    from .interface.runbook import doctor, fallbacks, forecast, parity, signals, validate_precision
    from .interface.training import (
        EpochHooks,
        accelerator_arguments,
        epochs,
        lightning_callback,
        limit_memory,
        memory_curve,
        release,
        trainer_arguments,
        trainer_callback,
    )
    from .interface.worth import compare, gates, profile, sweep, verdict
    from .models.config import OpenMedConfig
    from .runbook.logbook.logbook import Logbook
    from .training.activations import checkpoint_activations
    from .training.curve import MemoryCurve
    from .training.guards import Guards
    from .training.holders import who_holds
    from .training.loader_checks import worker_ladder
    from .training.optimizers import adamw, explain_fused
    from .training.samples import MemorySample
    from .training.steps import GradientAccumulation

__version__ = "0.1.0"

_HOMES = {
    "DeviceChoice": "devices.choice",
    "EnvPlan": "devices.environment",
    "EpochHooks": "interface.training",
    "GradientAccumulation": "training.steps",
    "Guards": "training.guards",
    "Logbook": "runbook.logbook.logbook",
    "MemoryCurve": "training.curve",
    "MemorySample": "training.samples",
    "ModelLoader": "interface.models",
    "OpenMedConfig": "models.config",
    "OpenMedError": "errors",
    "OpenMedWarning": "errors",
    "accelerator_arguments": "interface.training",
    "adamw": "training.optimizers",
    "annotate": "interface.models",
    "apply_mps_tuning": "interface.devices",
    "check_loader": "interface.preparation",
    "checkpoint_activations": "training.activations",
    "cluster": "interface.cluster",
    "compare": "interface.worth",
    "device": "interface.devices",
    "doctor": "interface.runbook",
    "epochs": "interface.training",
    "explain_fused": "training.optimizers",
    "fallbacks": "interface.runbook",
    "forecast": "interface.runbook",
    "gates": "interface.worth",
    "handoff": "interface.evidence",
    "lightning_callback": "interface.training",
    "limit_memory": "interface.training",
    "load_model": "interface.models",
    "load_pipeline": "interface.models",
    "loader_settings": "interface.preparation",
    "logbook": "interface.evidence",
    "memory_curve": "interface.training",
    "panel": "interface.panel.opening",
    "parity": "interface.runbook",
    "precision": "interface.preparation",
    "profile": "interface.worth",
    "release": "interface.training",
    "reset": "interface.devices",
    "resolve_torch_device": "interface.devices",
    "signals": "interface.runbook",
    "simulated_mps": "interface.devices",
    "sweep": "interface.worth",
    "to_device": "interface.preparation",
    "trainer_arguments": "interface.training",
    "trainer_callback": "interface.training",
    "use": "interface.devices",
    "validate_precision": "interface.runbook",
    "verdict": "interface.worth",
    "who_holds": "training.holders",
    "worker_ladder": "training.loader_checks",
}

__all__ = [
    "DeviceChoice",
    "EnvPlan",
    "EpochHooks",
    "GradientAccumulation",
    "Guards",
    "Logbook",
    "MemoryCurve",
    "MemorySample",
    "ModelLoader",
    "OpenMedConfig",
    "OpenMedError",
    "OpenMedWarning",
    "__version__",
    "accelerator_arguments",
    "adamw",
    "annotate",
    "apply_mps_tuning",
    "check_loader",
    "checkpoint_activations",
    "cluster",
    "compare",
    "device",
    "doctor",
    "epochs",
    "errors",
    "explain_fused",
    "fallbacks",
    "forecast",
    "gates",
    "handoff",
    "lightning_callback",
    "limit_memory",
    "load_model",
    "load_pipeline",
    "loader_settings",
    "logbook",
    "memory_curve",
    "panel",
    "parity",
    "precision",
    "profile",
    "release",
    "reset",
    "resolve_torch_device",
    "signals",
    "simulated_mps",
    "sweep",
    "to_device",
    "trainer_arguments",
    "trainer_callback",
    "use",
    "validate_precision",
    "verdict",
    "who_holds",
    "worker_ladder",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module(".errors", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics; IPython calls this for ``%load_ext openmed_nb``."""
    from .interface.extension import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove everything that :func:`load_ipython_extension` added; IPython calls this for ``%unload_ext``."""
    from .interface.extension import unload

    unload(shell)
