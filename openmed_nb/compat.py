"""What OpenMed has in ``openmed.core`` and ``openmed.torch.device``, under the same names, for code that was written for it.

Where the same call does something else here, and why, stands in docs/coming_from_openmed.md.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from ._utils.text import short_type_name
from .annotation.loading import create_pipeline
from .annotation.masking import refine_spans
from .devices.environment import (
    DEFAULT_HIGH,
    DEFAULT_LOW,
    FALLBACK_VARIABLE,
    HIGH_WATERMARK_VARIABLE,
    LOW_WATERMARK_VARIABLE,
)
from .devices.request import DEVICE_VARIABLE as LEGACY_DEVICE_ENV_VAR
from .devices.request import TORCH_DEVICE_VARIABLE as TORCH_DEVICE_ENV_VAR
from .errors import ConfigurationError
from .models.config import OpenMedConfig, drop_ignored_settings
from .models.registry import BUNDLED, all_aliases
from .session import SESSION

__all__ = [
    "LEGACY_DEVICE_ENV_VAR",
    "MPS_ENV_DEFAULTS",
    "TORCH_DEVICE_ENV_VAR",
    "ModelLoader",
    "MpsTuning",
    "OpenMedConfig",
    "apply_mps_tuning",
    "refine_spans",
    "resolve_torch_device",
]

# What the MPS variables are set to where a person has set none of them.
MPS_ENV_DEFAULTS: Mapping[str, str] = MappingProxyType(
    {FALLBACK_VARIABLE: "1", HIGH_WATERMARK_VARIABLE: str(DEFAULT_HIGH), LOW_WATERMARK_VARIABLE: str(DEFAULT_LOW)}
)

# Arguments of OpenMed's loader that mean nothing here, with their defaults there: tokenizers are always fast ones, torch
# chooses the attention, and weights are float32 unless ``dtype`` says otherwise.
_IGNORED_ARGUMENTS = {
    "use_fast_tokenizer": True,
    "attn_implementation": None,
    "load_in_4bit": False,
    "bnb_4bit_use_double_quant": True,
}


class ModelLoader:
    """Loads models and builds pipelines on the device of its configuration, or of the session.

    Args:
        config: The settings, or an object of OpenMed's own ``OpenMedConfig``; ``None`` is ``OpenMedConfig()``.

    Raises:
        ConfigurationError: For anything else, and for a backend of OpenMed that is not here.

    Example:
        >>> loader = ModelLoader(OpenMedConfig(device="cpu"))
        >>> pipe = loader.create_pipeline("bundled_small")
        >>> [entity["word"] for entity in pipe("He has type 2 diabetes mellitus.")]
        ['type 2 diabetes mellitus']
    """

    def __init__(self, config: Any = None) -> None:
        theirs = getattr(sys.modules.get("openmed.core.config"), "OpenMedConfig", ())
        if config is None:
            config = OpenMedConfig()
        elif isinstance(config, theirs):
            known = {setting.name for setting in fields(OpenMedConfig)}
            elsewhere = {setting.name: setting.default for setting in fields(config) if setting.name not in known}
            config = OpenMedConfig(**drop_ignored_settings(vars(config), elsewhere))
        elif not isinstance(config, OpenMedConfig):
            raise ConfigurationError(f"A loader cannot be made of {short_type_name(config)}.", "Pass an OpenMedConfig.")
        self.config = config

    def list_available_models(self, include_registry: bool = True, include_remote: bool = True) -> list[str]:
        """Return the names of models that can be loaded, in the order of the alphabet; nothing is asked of the network.

        Args:
            include_registry: Whether those of OpenMed's registry are among them: all of it where the openmed package is
                installed, else the few that are known here. The bundled models always are.
            include_remote: Takes what OpenMed's method takes, and changes nothing, as there.

        Example:
            >>> ModelLoader().list_available_models(include_registry=False)
            ['bundled', 'bundled_small']
        """
        del include_remote
        return sorted({*BUNDLED, *(all_aliases().values() if include_registry else ())})

    def load_model(self, model_name: str | None = None, force_reload: bool = False, **arguments: Any) -> dict[str, Any]:
        """Return ``{"model", "tokenizer", "config"}`` of a model, the model on its device and in evaluation mode.

        Args:
            model_name: An alias, a hub id, a bare name, a folder, or ``None`` for the bundled model.
            force_reload: Whether to read the files again where the model is loaded already. What a variable or a pipeline
                holds stays the model of before.
            arguments: Those of :func:`openmed_nb.load_model`, instead of the configuration's, and those of OpenMed's method.

        Raises:
            ModelError: If the model cannot be found or loaded; its remedy says what to do.
            DeviceError: If the device cannot be used.
        """
        return SESSION.load_model(model_name, self.config, force_reload, **_translate_arguments(arguments)).to_dict()

    def create_pipeline(
        self,
        model_name: str | None = None,
        task: str = "token-classification",
        aggregation_strategy: str | None = None,
        **arguments: Any,
    ) -> Any:
        """Return a drop-in for transformers' token-classification pipeline over a model, with the same answers.

        Args:
            model_name: An alias, a hub id, a bare name, a folder, or ``None`` for the bundled model.
            task: ``"token-classification"`` or ``"ner"``.
            aggregation_strategy: How tokens become entities: ``"first"`` (also the default, because ``"simple"`` breaks
                words), ``"simple"``, ``"average"``, ``"max"`` or ``"none"``.
            arguments: Those of :func:`openmed_nb.load_pipeline`, and those of OpenMed's method.

        Raises:
            ModelError: If the model cannot be found or loaded.
            DeviceError: If the device cannot be used; nothing is loaded then.
            ConfigurationError: For a task, strategy or option that does not exist.
        """
        options = _translate_arguments(arguments)
        return create_pipeline(SESSION, model_name, self.config, task, aggregation_strategy, **options)

    def unload(self, model_name: str | None = None) -> tuple[str, ...]:
        """Forget a model, or all, and hand the memory back; return the names of those that were loaded."""
        return SESSION.unload(model_name)


def _translate_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of OpenMed's loader under their names here, without those that mean nothing here."""
    named = {("local_only" if name == "local_files_only" else name): value for name, value in arguments.items()}
    return drop_ignored_settings(named, _IGNORED_ARGUMENTS)


def resolve_torch_device(prefer: str | int | None = "auto") -> str:
    """Return the name of the device, for code that takes the string of OpenMed's function of this name.

    Args:
        prefer: A device; -1 for the CPU and 0 for the first GPU, as in pipelines; ``"auto"`` or ``None`` for the one in force.

    Returns:
        ``"mps"``, ``"cuda"``, ``"cuda:N"`` or ``"cpu"``. A device that is asked for, here, for the session or in a
        variable, comes back normalized, whether or not it is there; loading a model checks that. ``"gpu"`` is
        ``"mps"`` on a Mac, where OpenMed says ``"cuda"``.

    Raises:
        UnknownDeviceError: For a spelling that names no device.

    Example:
        >>> resolve_torch_device(" CUDA:1 ")
        'cuda:1'
    """
    return SESSION.resolve(prefer)


@dataclass(frozen=True)
class MpsTuning:
    """The MPS variables in the environment, and the recommended type, under OpenMed's names."""

    env: Mapping[str, str]
    recommended_dtype: str = "float32"


def apply_mps_tuning() -> MpsTuning:
    """Set the MPS variables that nobody has set, as a pair that torch accepts, whatever the device is.

    Returns:
        The variables as they now stand, and the recommended type. ``%openmed_device --explain`` tells which of them
        torch will read or has read; :func:`openmed_nb.device` applies them by itself where the device is mps.

    Example:
        >>> from openmed_nb.session import SESSION
        >>> apply_mps_tuning().recommended_dtype
        'float32'
        >>> SESSION.stop()
    """
    return MpsTuning(SESSION.apply_mps_variables())
