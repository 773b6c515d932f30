"""Drop-in replacements for ``openmed.core`` and ``openmed.torch.device`` under the names of OpenMed.

docs/explanation/differences_from_openmed.md describes the differences in behavior and their reasons.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
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
from .models.config import IGNORED_SETTINGS, OpenMedConfig, drop_ignored_settings
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

# The values of the MPS variables if the user has set none of them.
MPS_ENV_DEFAULTS: Mapping[str, str] = MappingProxyType(
    {FALLBACK_VARIABLE: "1", HIGH_WATERMARK_VARIABLE: str(DEFAULT_HIGH), LOW_WATERMARK_VARIABLE: str(DEFAULT_LOW)}
)

# Arguments of OpenMed's loader that have no effect here. Tokenizers are always fast, and torch selects the attention
# implementation.
_IGNORED_ARGUMENTS = (*IGNORED_SETTINGS, "use_fast_tokenizer", "attn_implementation")


class ModelLoader:
    """Loads models and builds pipelines on the device of its configuration or of the session.

    Args:
        config: Settings, or an ``OpenMedConfig`` of OpenMed. If ``None``, use ``OpenMedConfig()``.

    Raises:
        ConfigurationError: If ``config`` has another type, or a backend that is not supported.

    Example:
        >>> loader = ModelLoader(OpenMedConfig(device="cpu"))
        >>> pipe = loader.create_pipeline("bundled_small")
        >>> [entity["word"] for entity in pipe("He has type 2 diabetes mellitus.")]
        ['type 2 diabetes mellitus']
    """

    def __init__(self, config: object = None) -> None:
        openmed_class = getattr(sys.modules.get("openmed.core.config"), "OpenMedConfig", ())
        if config is None:
            config = OpenMedConfig()
        elif isinstance(config, openmed_class):
            names = {setting.name for setting in fields(OpenMedConfig)}
            settings = {}
            for setting in fields(config):
                value = getattr(config, setting.name)
                is_changed = setting.default is not MISSING and value != setting.default
                if setting.name in names or is_changed:
                    settings[setting.name] = value
            config = OpenMedConfig(**drop_ignored_settings(settings, settings.keys() - names))
        elif not isinstance(config, OpenMedConfig):
            raise ConfigurationError(f"Invalid type {short_type_name(config)} for config.", "Pass an OpenMedConfig.")
        self.config = config

    def list_available_models(self, include_registry: bool = True, include_remote: bool = True) -> list[str]:
        """Return the names of available models in alphabetical order, without network access.

        Args:
            include_registry: Whether to include OpenMed's registry: all of it if the openmed package is installed, otherwise
                the aliases in this package. The bundled models are always included.
            include_remote: Accepted for compatibility; has no effect, as in OpenMed.

        Example:
            >>> ModelLoader().list_available_models(include_registry=False)
            ['bundled', 'bundled_small']
        """
        del include_remote
        return sorted({*BUNDLED, *(all_aliases().values() if include_registry else ())})

    def load_model(
        self, model_name: str | None = None, force_reload: bool = False, **arguments: object
    ) -> dict[str, object]:
        """Return ``{"model", "tokenizer", "config"}``, with the model on its device in evaluation mode.

        Args:
            model_name: An alias, a Hub id, a name in the default organization, a folder, or ``None`` for the bundled model.
            force_reload: Whether to read the files again if the model is already loaded. Variables and pipelines keep the
                previous model.
            arguments: Arguments of :func:`openmed_nb.load_model`, which override the configuration, and those of OpenMed's
                method.

        Raises:
            ModelError: If the model cannot be found or loaded.
            DeviceError: If the device is unavailable.
        """
        return SESSION.load_model(model_name, self.config, force_reload, **_translate_arguments(arguments)).to_dict()

    def create_pipeline(
        self,
        model_name: str | None = None,
        task: str = "token-classification",
        aggregation_strategy: str | None = None,
        **arguments: object,
    ) -> object:
        """Return a replacement for transformers' token-classification pipeline, with the same results.

        Args:
            model_name: An alias, a Hub id, a name in the default organization, a folder, or ``None`` for the bundled model.
            task: ``"token-classification"`` or ``"ner"``.
            aggregation_strategy: ``"first"`` (default, because ``"simple"`` can split words), ``"simple"``, ``"average"``,
                ``"max"`` or ``"none"``.
            arguments: Arguments of :func:`openmed_nb.load_pipeline` and of OpenMed's method.

        Raises:
            ModelError: If the model cannot be found or loaded.
            DeviceError: If the device is unavailable; the model is not loaded then.
            ConfigurationError: If the task, strategy or an option is not valid.
        """
        options = _translate_arguments(arguments)
        return create_pipeline(SESSION, model_name, self.config, task, aggregation_strategy, **options)

    def unload(self, model_name: str | None = None) -> tuple[str, ...]:
        """Unload a model, or all models, release their memory, and return the names of those that were loaded."""
        return SESSION.unload(model_name)


def _translate_arguments(arguments: dict[str, object]) -> dict[str, Any]:
    """Return arguments of OpenMed's loader under the names of this package, without those that have no effect."""
    renamed = {("local_only" if name == "local_files_only" else name): value for name, value in arguments.items()}
    return drop_ignored_settings(renamed, _IGNORED_ARGUMENTS)


def resolve_torch_device(prefer: str | int | None = "auto") -> str:
    """Return the name of the device, for code that uses OpenMed's function of this name.

    Args:
        prefer: A device; -1 for the CPU and 0 for the first GPU, as in pipelines. If ``"auto"`` or ``None``, the active
            device.

    Returns:
        ``"mps"``, ``"cuda"``, ``"cuda:N"`` or ``"cpu"``. A device that is requested here, for the session or in an
        environment variable is normalized but not checked for availability. Loading a model checks it. ``"gpu"`` is
        ``"mps"`` on a Mac, where OpenMed returns ``"cuda"``.

    Raises:
        UnknownDeviceError: If the device name is not valid.

    Example:
        >>> resolve_torch_device(" CUDA:1 ")
        'cuda:1'
    """
    return SESSION.resolve(prefer)


@dataclass(frozen=True)
class MpsTuning:
    """The MPS variables in the environment and the recommended dtype, under OpenMed's names."""

    env: Mapping[str, str]
    recommended_dtype: str = "float32"


def apply_mps_tuning() -> MpsTuning:
    """Set the MPS variables that the user has not set, to values that torch accepts together, for any device.

    Returns:
        The current variables and the recommended dtype. ``%openmed_device --explain`` shows which of them torch has read
        or will read. :func:`openmed_nb.device` sets them automatically if the device is mps.

    Example:
        >>> from openmed_nb.session import SESSION
        >>> apply_mps_tuning().recommended_dtype
        'float32'
        >>> SESSION.stop()
    """
    return MpsTuning(SESSION.apply_mps_variables())
