"""The settings of a loader, checked when they are written down."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import NoneType
from typing import TYPE_CHECKING, Any

from .._utils.text import describe_value, short_type_name
from .._utils.validation import suggest
from .._utils.warning import warn
from ..devices.request import DeviceRequest, parse_device_argument
from ..errors import ConfigurationError

BACKEND = "hf"

# Backends of the openmed package that are not part of this one, and how to get them.
UNSUPPORTED_BACKENDS = {
    "mlx": "python -m pip install 'openmed[mlx]'",
    "onnx": "python -m pip install 'openmed[onnx]'",
    "remote": "python -m pip install openmed",
}

# The settings of OpenMed 3.1's own class (openmed/core/config.py) that mean nothing here, with their defaults there.
IGNORED_SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("use_medical_tokenizer", "clinical_protect_enabled", "clinical_protect_use_builtin"), True),
    **dict.fromkeys(("lazy_model_loading", "bnb_4bit_use_double_quant", "remote_inference_verify_tls"), True),
    **dict.fromkeys(("load_in_4bit", "transliteration_aware_name_matching"), False),
    **dict.fromkeys(("medical_tokenizer_exceptions", "chinese_user_dict_path", "chinese_target_script")),
    **dict.fromkeys(("clinical_protect_terms", "batch_size", "num_workers", "onnx_intra_op_num_threads", "profile")),
    **dict.fromkeys(("pii_model", "pii_model_revision", "remote_inference_endpoint", "remote_inference_tokenizer")),
    **dict.fromkeys(("remote_inference_model_name", "remote_inference_model_version")),
    "log_level": "INFO",
    "timeout": 300,
    "chinese_segmentation_backend": "jieba",
    "chinese_pkuseg_domain": "medicine",
    "onnx_variant": "auto",
    "torch_attention_backend": "auto",
    "cjk_width_convention": "cjk",
    "indic_name_similarity_threshold": 0.8,
    "remote_inference_protocol": "http",
    "remote_inference_timeout_seconds": 30.0,
}

# What the settings may be; a text where a flag is meant, such as "no", would count as yes.
SETTING_TYPES: dict[str, tuple[type, ...]] = {
    "revision": (str, NoneType),
    "cache_dir": (str, os.PathLike, NoneType),
    "hf_token": (str, bool, NoneType),
    "local_only": (bool,),
    "default_org": (str,),
    "remote_code_allowed": (str, tuple, list),
    "allow_pickle": (bool,),
}

# "auto" is a reduced type that was validated for the model on the device and is faster, or else float32.
DTYPES = ("float32", "float16", "bfloat16", "int8", "auto")
DTYPE_ALIASES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}

# Settings that the arguments of a load replace.
OVERRIDABLE_SETTINGS = (
    "dtype",
    "revision",
    "cache_dir",
    "hf_token",
    "local_only",
    "remote_code_allowed",
    "allow_pickle",
)

TASKS = ("token-classification", "ner")
STRATEGIES = ("none", "simple", "first", "average", "max")
# "first" labels a word by its first sub-token; "simple" lets a prediction inside a word break it.
DEFAULT_STRATEGY = "first"


def drop_ignored_settings(given: Mapping[str, Any], elsewhere: Mapping[str, Any]) -> dict[str, Any]:
    """Return what OpenMed's code gives without what means nothing here; one warning names what of it is not OpenMed's default."""
    # As text, because of a tensor or an array nobody knows whether it equals something.
    lost = sorted(name for name in given if name in elsewhere and repr(given[name]) != repr(elsewhere[name]))
    if len(lost) == 1:
        warn(f"OpenMed's {lost[0]} has no effect in openmed_nb. Leave it out.")
    elif lost:
        warn(f"OpenMed's {' and '.join(lost)} have no effect in openmed_nb. Leave them out.")
    return {name: value for name, value in given.items() if name not in elsewhere}


@dataclass(frozen=True)
class _Settings:
    """The settings of this package alone."""

    backend: str | None = BACKEND
    device: str | None = None
    dtype: str = "float32"
    revision: str | None = None
    cache_dir: str | os.PathLike[str] | None = None
    hf_token: str | None = field(default=None, repr=False)
    local_only: bool = False
    default_org: str = "OpenMed"
    remote_code_allowed: tuple[str, ...] = ()
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        backend = str(self.backend)
        if elsewhere := UNSUPPORTED_BACKENDS.get(backend):
            what = f"The backend {describe_value(backend)} is not part of openmed_nb, which runs PyTorch models."
            raise ConfigurationError(what, f"Use it through the openmed package: {elsewhere}.")
        if self.backend not in (BACKEND, None):
            raise ConfigurationError(f"There is no backend {describe_value(backend)}.", f"Use {BACKEND!r}.")
        if self.device is not None:
            object.__setattr__(self, "device", parse_device_argument(self.device))
            DeviceRequest.parse(str(self.device), "OpenMedConfig")
        for name, types in SETTING_TYPES.items():
            _check_type(name, getattr(self, name), types)
        allowed: Any = self.remote_code_allowed
        allowed = (allowed,) if isinstance(allowed, str) else tuple(allowed)
        for one in allowed:
            _check_type("remote_code_allowed", one, (str,))
        object.__setattr__(self, "remote_code_allowed", allowed)
        dtype = normalize_dtype(self.dtype)
        if dtype not in DTYPES:
            raise ConfigurationError(
                f"Models cannot be loaded as {describe_value(dtype)}.", f"Use one of {', '.join(DTYPES)}."
            )
        object.__setattr__(self, "dtype", dtype)


class OpenMedConfig(_Settings):
    """How models are found and loaded; it also takes what OpenMed's own class of this name takes, by keyword.

    A setting of OpenMed's that means nothing here, such as ``timeout``, is named in a warning, all in one, unless it has
    the value that it has there anyway.

    Args:
        backend: ``"hf"`` or ``None``: Hugging Face models on PyTorch, the only ones here.
        device: The device for every model of the loader; ``None`` or ``"auto"`` follows the session, -1 is the CPU, and
            0 the first GPU.
        dtype: ``"float32"`` (also the default), ``"float16"``, ``"bfloat16"``, or ``"int8"`` on the CPU; ``"auto"`` takes one
            of these three where :func:`openmed_nb.runbook.validate_precision` has accepted it here and it is faster.
        revision: The branch, tag or commit of hub models.
        cache_dir: Where hub models are stored; ``None`` is huggingface_hub's own place.
        hf_token: The token for gated models; ``None`` is the one that ``hf auth login`` stored.
        local_only: Whether the network is left alone.
        default_org: The organisation of bare model names.
        remote_code_allowed: The models, by alias, hub id or full path, that may run Python code of their own.
        allow_pickle: Whether weights in pickle files, which can run any code, may be loaded.

    Raises:
        ConfigurationError: For a backend or a type that is not here.
        UnknownDeviceError: For a device that is not one.

    Example:
        >>> OpenMedConfig(device="cpu").dtype
        'float32'
        >>> OpenMedConfig(backend="mlx")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: The backend 'mlx' is not part of openmed_nb, which runs PyTorch models. \
Use it through the openmed package: python -m pip install 'openmed[mlx]'.
    """

    if not TYPE_CHECKING:  # For who calls it, and for type checkers, it has the arguments of the settings here.

        @functools.wraps(_Settings.__init__)
        def __init__(self, *given: Any, **settings: Any) -> None:
            super().__init__(*given, **drop_ignored_settings(settings, IGNORED_SETTINGS))

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> OpenMedConfig:
        """Return settings from a mapping, such as :meth:`to_dict` gives, or OpenMed's own method of that name.

        Args:
            settings: The settings by name; those that are missing are the defaults.

        Raises:
            ConfigurationError: For what is no mapping, and for a name that neither this class nor OpenMed's has.

        Example:
            >>> OpenMedConfig.from_dict({"device": "cpu", "timeout": 300}).device
            'cpu'
        """
        if not isinstance(settings, Mapping):
            raise ConfigurationError(
                f"{short_type_name(settings)} holds no settings.", "Pass a mapping, such as a dict."
            )
        known = [*(one.name for one in fields(cls)), *IGNORED_SETTINGS]
        for name in settings:
            if name not in known:
                raise ConfigurationError(f"There is no setting {describe_value(name)}.", suggest(str(name), known))
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, ready for JSON, without the token.

        Example:
            >>> OpenMedConfig.from_dict(OpenMedConfig(device="cpu").to_dict()) == OpenMedConfig(device="cpu")
            True
        """
        cache_dir = None if self.cache_dir is None else os.fspath(self.cache_dir)
        shown = {one.name: getattr(self, one.name) for one in fields(self) if one.repr}
        return {**shown, "cache_dir": cache_dir, "remote_code_allowed": list(self.remote_code_allowed)}


def _check_type(name: str, value: object, types: tuple[type, ...]) -> None:
    """Check a setting; the error does not show its value, which could be a token."""
    if not isinstance(value, types):
        accepted = " or ".join("None" if one is NoneType else one.__name__ for one in types)
        raise ConfigurationError(f"{name!r} cannot be {short_type_name(value)}.", f"Use {accepted}.")


def normalize_dtype(dtype: object) -> str:
    """Return the name of a type as torch has it; Accelerate, the Trainer and torch have shorter ones for some."""
    name = str(dtype).removeprefix("torch.")
    return DTYPE_ALIASES.get(name, name)


def check_task(task: str) -> str:
    """Return the task under its full name."""
    if task not in TASKS:
        raise ConfigurationError(f"The task {describe_value(task)} is not supported.", f"Use {TASKS[0]!r}.")
    return TASKS[0]


def check_strategy(strategy: str | None) -> str:
    """Return how tokens become entities, in the spelling of transformers; ``None`` is the default."""
    if strategy is None:
        return DEFAULT_STRATEGY
    name = str(getattr(strategy, "value", strategy)).lower()
    if name not in STRATEGIES:
        what = f"There is no aggregation strategy {describe_value(strategy)}."
        raise ConfigurationError(what, f"Use one of {', '.join(STRATEGIES)}.")
    return name


def apply_overrides(config: OpenMedConfig, arguments: dict[str, Any]) -> tuple[OpenMedConfig, dict[str, Any]]:
    """Split the arguments of a load: those that settings have a name for change the settings, the others remain."""
    named = {("dtype" if name == "torch_dtype" else name): value for name, value in arguments.items()}
    settings = {name: named.pop(name) for name in OVERRIDABLE_SETTINGS if name in named}
    return replace(config, **settings), named
