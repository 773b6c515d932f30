"""Settings of a model loader, validated when they are created."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import NoneType
from typing import Any, TypeVar

from .._utils.text import describe_value, short_type_name
from .._utils.validation import check_names
from .._utils.warning import warn
from ..devices.request import DeviceRequest, parse_device_argument
from ..errors import ConfigurationError

ConfigT = TypeVar("ConfigT")

BACKEND = "hf"

# The settings of the class in OpenMed 3.1 (openmed/core/config.py) that have no effect here.
IGNORED_SETTINGS = (
    "batch_size",
    "bnb_4bit_use_double_quant",
    "chinese_pkuseg_domain",
    "chinese_segmentation_backend",
    "chinese_target_script",
    "chinese_user_dict_path",
    "cjk_width_convention",
    "clinical_protect_enabled",
    "clinical_protect_terms",
    "clinical_protect_use_builtin",
    "indic_name_similarity_threshold",
    "lazy_model_loading",
    "load_in_4bit",
    "log_level",
    "medical_tokenizer_exceptions",
    "num_workers",
    "onnx_intra_op_num_threads",
    "onnx_variant",
    "pii_model",
    "pii_model_revision",
    "profile",
    "remote_inference_endpoint",
    "remote_inference_model_name",
    "remote_inference_model_version",
    "remote_inference_protocol",
    "remote_inference_timeout_seconds",
    "remote_inference_tokenizer",
    "remote_inference_verify_tls",
    "timeout",
    "torch_attention_backend",
    "transliteration_aware_name_matching",
    "use_medical_tokenizer",
)

# Valid types of the settings. A string for a flag, such as "no", would be truthy.
SETTING_TYPES: dict[str, tuple[type, ...]] = {
    "revision": (str, NoneType),
    "cache_dir": (str, os.PathLike, NoneType),
    "hf_token": (str, bool, NoneType),
    "local_only": (bool,),
    "default_org": (str,),
    "remote_code_allowed": (str, tuple, list),
    "allow_pickle": (bool,),
}

# "auto" selects a reduced dtype that is validated for the model on the device and is faster, or else float32.
DTYPES = ("float32", "float16", "bfloat16", "int8", "auto")
DTYPE_ALIASES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}

# Settings that arguments of a load override.
OVERRIDABLE_SETTINGS = {"dtype", *SETTING_TYPES} - {"default_org"}

# Options of load_model(), and of load_pipeline(): its own ones, and those of transformers' pipeline.
LOAD_OPTIONS = OVERRIDABLE_SETTINGS | {"device", "torch_dtype", "trust_remote_code"}
PIPELINE_OPTIONS = LOAD_OPTIONS | {
    "aggregation_strategy",
    "batch_size",
    "batch_tokens",
    "binary_output",
    "delimiter",
    "ignore_labels",
    "is_split_into_words",
    "num_workers",
    "offset_mapping",
    "stride",
    "task",
    "transformers_boundaries",
    "truncation",
}

TASKS = ("token-classification", "ner")
STRATEGIES = ("none", "simple", "first", "average", "max")
# "first" labels a word by its first subword; with "simple" a prediction inside a word can split it.
DEFAULT_STRATEGY = "first"


def drop_ignored_settings(settings: Mapping[str, Any], ignored: Iterable[str]) -> dict[str, Any]:
    """Return settings without those of OpenMed that have no effect here. One warning names those."""
    dropped = sorted(settings.keys() & set(ignored))
    if dropped:
        warn(f"Settings of OpenMed have no effect in openmed_nb: {', '.join(dropped)}. Remove them.")
    return {name: value for name, value in settings.items() if name not in dropped}


def _accept_openmed_settings(cls: type[ConfigT]) -> type[ConfigT]:
    """Let the constructor of a class accept the settings of OpenMed that have no effect here."""
    init = cls.__init__

    @functools.wraps(init)
    def accepting_init(self: ConfigT, *arguments: object, **settings: object) -> None:
        init(self, *arguments, **drop_ignored_settings(settings, IGNORED_SETTINGS))

    cls.__init__ = accepting_init  # type: ignore[assignment]
    return cls


@_accept_openmed_settings
@dataclass(frozen=True)
class OpenMedConfig:
    """Settings for finding and loading models, including the keyword arguments of OpenMed's class of this name.

    Settings of OpenMed without effect here, such as ``timeout``, are named in one warning.

    Args:
        backend: ``"hf"`` or ``None``: Hugging Face models on PyTorch, the only supported backend.
        device: Device for all models of the loader. ``None`` or ``"auto"`` follows the session, -1 is the CPU, and 0 is
            the first GPU.
        dtype: ``"float32"`` (default), ``"float16"``, ``"bfloat16"``, or ``"int8"`` on the CPU. ``"auto"`` selects a
            reduced dtype that :func:`openmed_nb.runbook.validate_precision` accepted here and that is faster.
        revision: Branch, tag or commit of Hub models.
        cache_dir: Directory for Hub models. If ``None``, use the cache of huggingface_hub.
        hf_token: Token for gated models. If ``None``, use the token that ``hf auth login`` stored.
        local_only: Whether to use local files only, without network access.
        default_org: Organization of model names without one.
        remote_code_allowed: Models that may execute remote code, by alias, Hub id or full path.
        allow_pickle: Whether to load weights from pickle files, which can execute arbitrary code.

    Raises:
        ConfigurationError: If the backend or the dtype is not supported.
        UnknownDeviceError: If the device name is not valid.

    Example:
        >>> OpenMedConfig(device="cpu").dtype
        'float32'
        >>> OpenMedConfig(backend="mlx")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: 'mlx' is not a backend of openmed_nb, which runs PyTorch models. \
Use 'hf', or the openmed package.
    """

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
        # A comparison with an array has no truth value.
        if not isinstance(self.backend, str | None) or self.backend not in (BACKEND, None):
            backend = describe_value(str(self.backend))
            raise ConfigurationError(
                f"{backend} is not a backend of openmed_nb, which runs PyTorch models.",
                f"Use {BACKEND!r}, or the openmed package.",
            )
        if self.device is not None:
            object.__setattr__(self, "device", parse_device_argument(self.device))
            DeviceRequest.parse(str(self.device), "OpenMedConfig")
        for name, types in SETTING_TYPES.items():
            _check_type(name, getattr(self, name), types)
        allowed: str | Iterable[str] = self.remote_code_allowed
        allowed = (allowed,) if isinstance(allowed, str) else tuple(allowed)
        for model in allowed:
            _check_type("remote_code_allowed", model, (str,))
        object.__setattr__(self, "remote_code_allowed", allowed)
        dtype = normalize_dtype(self.dtype)
        check_names("a valid dtype", [dtype], DTYPES)
        object.__setattr__(self, "dtype", dtype)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> OpenMedConfig:
        """Return settings from a mapping, such as the result of :meth:`to_dict`.

        Args:
            settings: Settings by name. Missing settings have their defaults.

        Example:
            >>> OpenMedConfig.from_dict({"device": "cpu"}).device
            'cpu'
        """
        return cls(**settings)

    def to_dict(self) -> dict[str, object]:
        """Return the settings as JSON-compatible values, without the token.

        Example:
            >>> OpenMedConfig.from_dict(OpenMedConfig(device="cpu").to_dict()) == OpenMedConfig(device="cpu")
            True
        """
        cache_dir = None if self.cache_dir is None else os.fspath(self.cache_dir)
        visible = {setting.name: getattr(self, setting.name) for setting in fields(self) if setting.repr}
        return {**visible, "cache_dir": cache_dir, "remote_code_allowed": list(self.remote_code_allowed)}


def _check_type(name: str, value: object, types: tuple[type, ...]) -> None:
    """Check the type of a setting. The error does not quote the value, which could be a token."""
    if not isinstance(value, types):
        accepted = " or ".join(
            "None" if accepted_type is NoneType else accepted_type.__name__ for accepted_type in types
        )
        raise ConfigurationError(f"Invalid type {short_type_name(value)} for {name!r}.", f"Use {accepted}.")


def normalize_dtype(dtype: object) -> str:
    """Return the name of a dtype in torch, also for the short names that Accelerate, the Trainer and torch accept."""
    name = str(dtype).removeprefix("torch.")
    return DTYPE_ALIASES.get(name, name)


def check_task(task: str) -> str:
    """Return the full name of a task, or raise an error if the task is not supported."""
    if task not in TASKS:
        raise ConfigurationError(f"The task {describe_value(task)} is not supported.", f"Use {TASKS[0]!r}.")
    return TASKS[0]


def check_strategy(strategy: str | None) -> str:
    """Return the name of an aggregation strategy as in transformers. If ``None``, return the default."""
    if strategy is None:
        return DEFAULT_STRATEGY
    name = str(getattr(strategy, "value", strategy)).lower()
    check_names("a valid aggregation strategy", [name], STRATEGIES)
    return name


def apply_overrides(config: OpenMedConfig, arguments: dict[str, Any]) -> tuple[OpenMedConfig, dict[str, Any]]:
    """Return the settings with the overrides in the arguments of a load, and the remaining arguments."""
    named = {("dtype" if name == "torch_dtype" else name): value for name, value in arguments.items()}
    settings = {name: named.pop(name) for name in OVERRIDABLE_SETTINGS if name in named}
    return replace(config, **settings), named
