"""Device requests: accepted names, environment variables and the resolution order; and secrets in values that are shown."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

from .._render.values import JsonMixin
from .._utils.text import describe_value, short_type_name
from .._utils.validation import invalid_value, suggest
from ..errors import ConfigurationError, UnknownDeviceError

# Names the device of a process. A choice with %openmed_device, %openmed_panel or nb.use is written to it.
TORCH_DEVICE_VARIABLE = "OPENMED_TORCH_DEVICE"
# Names the device if OPENMED_TORCH_DEVICE is not set.
DEVICE_VARIABLE = "OPENMED_DEVICE"
DEVICE_VARIABLES = (TORCH_DEVICE_VARIABLE, DEVICE_VARIABLE)

LIBRARY_VARIABLES = (
    "ACCELERATE_USE_CPU",
    "CUDA_VISIBLE_DEVICES",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
)
# Allow list: no other environment variable may be stored in a result.
VISIBLE_VARIABLES = (*DEVICE_VARIABLES, *LIBRARY_VARIABLES)

SECRET_NAME_PATTERN = re.compile(r"key|token|secret|passw|pwd|credential|auth", re.IGNORECASE)
SECRET_VALUE_PATTERN = re.compile(
    r"(?P<scheme>\w{1,32}://)[^/\s]+@"  # Credentials in a URL.
    r"|\b(hf|sk|gh[a-z]|github_pat)_\w+|\b(sk|glpat)-[\w-]+"  # Access tokens with a known prefix.
    r"|(key|token|secret|passw\w*|pwd)=\S+",
    re.IGNORECASE,
)
MASK = "***"


def mask_secrets(name: str, value: str) -> str:
    """Return the value of an environment variable with secrets replaced by ``***``.

    Args:
        name: Name of the variable. If the name indicates a secret, the whole value is masked.
        value: Value of the variable.
    """
    if SECRET_NAME_PATTERN.search(name):
        return MASK
    return SECRET_VALUE_PATTERN.sub(lambda match: f"{match['scheme']}{MASK}@" if match["scheme"] else MASK, value)


def visible_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the allow list that are set, with secrets masked."""
    return {name: mask_secrets(name, environ[name]) for name in VISIBLE_VARIABLES if name in environ}


@dataclass(frozen=True)
class DeviceNames:
    """Names of a device type.

    Attributes:
        spellings: Accepted spellings, the type itself first.
        supports_index: Whether there can be several devices of the type, each with an index.
    """

    spellings: tuple[str, ...]
    supports_index: bool = False


# One entry for each class of the registry, in the order of messages. The names are defined here and not in the classes,
# because ``backend`` and ``machine`` need them and the classes import both.
DEVICE_NAMES = {
    "cpu": DeviceNames(spellings=("cpu",)),
    "cuda": DeviceNames(spellings=("cuda", "cuda:N"), supports_index=True),
    "mps": DeviceNames(spellings=("mps", "mps:0")),
}
INDEXED_TYPES = tuple(name for name, names in DEVICE_NAMES.items() if names.supports_index)
INDEXED_PATTERN = re.compile(rf"({'|'.join(INDEXED_TYPES)}):(\d{{1,4}})", re.ASCII)
# torch writes "mps:0", and Accelerate's ``PartialState.set_device`` writes "cpu:0". There is no second device of the type.
SINGLE_DEVICE_ALIASES = {f"{name}:0": name for name, names in DEVICE_NAMES.items() if not names.supports_index}
CANONICAL_NAMES = {**{name: f"{name}:0" for name in INDEXED_TYPES}, **SINGLE_DEVICE_ALIASES}

AUTO_NAMES = ("auto", "default")
AUTO_SPELLINGS = ("", *AUTO_NAMES)
GPU = "gpu"  # The GPU type of the operating system.
ACCEPTED_SPELLINGS = (
    *AUTO_NAMES,
    *(spelling for names in DEVICE_NAMES.values() for spelling in names.spellings),
    GPU,
)
DEFAULT_SOURCE = "default"


@dataclass(frozen=True)
class DeviceRequest:
    """A parsed request for a device.

    Attributes:
        value: Normalized device: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:N"``, ``"mps"`` or ``"gpu"``.
        source: Origin of the request: ``"argument"``, ``"OpenMedConfig"``, ``"%openmed_device"``, the name of an
            environment variable, or ``"default"``.
    """

    value: str
    source: str

    @classmethod
    def parse(cls, spelling: str, source: str) -> DeviceRequest:
        """Parse a device name.

        Args:
            spelling: One of ``ACCEPTED_SPELLINGS``. Case and surrounding white space are ignored.
            source: Origin of the request.

        Returns:
            The parsed request.

        Raises:
            UnknownDeviceError: If the name is not valid. The message contains the source and the closest valid name.
            ConfigurationError: If ``source`` is not a string.

        Example:
            >>> DeviceRequest.parse(" MPS:0 ", "argument").value
            'mps'
            >>> DeviceRequest.parse("cdua:1", "OPENMED_DEVICE")
            Traceback (most recent call last):
            ...
            openmed_nb.errors.UnknownDeviceError: 'cdua:1' (from OPENMED_DEVICE) is not a valid device name. \
Did you mean 'cuda'? Valid values: cuda, cuda:N, cpu, auto, default, mps, mps:0, gpu.
        """
        if not isinstance(source, str):
            raise invalid_value("source", source, "Pass a string that identifies the caller.")
        value = str(spelling).strip().lower()
        if value in AUTO_SPELLINGS:
            return cls("auto", source)
        if match := INDEXED_PATTERN.fullmatch(value):
            return cls(f"{match[1]}:{int(match[2])}", source)
        if value in (*ACCEPTED_SPELLINGS, *SINGLE_DEVICE_ALIASES):
            return cls(SINGLE_DEVICE_ALIASES.get(value, value), source)
        displayed = mask_secrets(source, spelling) if isinstance(spelling, str) else spelling
        message = f"{describe_value(displayed)} (from {source}) is not a valid device name."
        word = device_type(value)
        remedy = suggest(word, ACCEPTED_SPELLINGS)
        if word == "mlx":
            remedy = "Use 'mps' for the GPU of a Mac: openmed_nb runs PyTorch models. docs/explanation/recommendations.md compares both."
        raise UnknownDeviceError(message, remedy)


@dataclass(frozen=True)
class DeviceSetting(JsonMixin):
    """One entry of the resolution order: a source and the device that it requests.

    Attributes:
        source: Origin of the setting.
        value: Requested device as written by the user, or ``None`` if the source is not set.
        overrides_auto: Whether ``"auto"`` from this source ends the search. For other sources, ``"auto"`` falls through
            to the next entry.
    """

    source: str
    value: str | None
    overrides_auto: bool = False

    JSON_EXCLUDE = ("value", "overrides_auto")
    JSON_PROPERTIES = ("display_value",)

    @property
    def is_explicit(self) -> bool:
        """Whether this setting determines the device."""
        return self.value is not None and (self.overrides_auto or self.value.strip().lower() not in AUTO_SPELLINGS)

    @property
    def display_value(self) -> str:
        """Value for display, with secrets masked."""
        return "(not set)" if self.value is None else mask_secrets(self.source, self.value)


def source_name(source: str) -> str:
    """Return the name of the source of a request in a sentence."""
    return "the device argument" if source == "argument" else source


def resolution_order(
    environ: Mapping[str, str], argument: DeviceSetting | None = None, override: DeviceRequest | None = None
) -> tuple[DeviceSetting, ...]:
    """Return the device settings in resolution order, highest priority first.

    The order is: argument, session override, ``OPENMED_TORCH_DEVICE``, ``OPENMED_DEVICE``. An argument or variable with
    the value ``"auto"`` falls through to the next entry. A session override with the value ``"auto"``, set by a magic,
    the panel or :func:`openmed_nb.use`, takes precedence over the variables.

    Args:
        environ: Environment variables.
        argument: Setting from a function argument.
        override: Override for the session.
    """
    if override is None:
        session = DeviceSetting("session", None)
    else:
        session = DeviceSetting(override.source, override.value, overrides_auto=True)
    variables = (DeviceSetting(name, environ.get(name)) for name in DEVICE_VARIABLES)
    return (argument or DeviceSetting("argument", None), session, *variables)


def first_explicit(settings: tuple[DeviceSetting, ...]) -> DeviceSetting | None:
    """Return the first setting that determines the device, or ``None``."""
    return next((setting for setting in settings if setting.is_explicit), None)


def resolve_request(settings: tuple[DeviceSetting, ...]) -> DeviceRequest:
    """Return the request of the first explicit setting, or a default request for ``"auto"``.

    Raises:
        UnknownDeviceError: If the first explicit setting has an invalid value.
    """
    setting = first_explicit(settings)
    if setting is None:
        return DeviceRequest("auto", DEFAULT_SOURCE)
    return DeviceRequest.parse(str(setting.value), setting.source)


def device_type(device: str) -> str:
    """Return the type of a device, without its index."""
    return device.partition(":")[0]


def normalize_device(device: str) -> str:
    """Return the canonical name of a device.

    ``"cuda"`` becomes ``"cuda:0"``. ``"mps:0"`` and ``"cpu:0"`` lose their redundant index.
    """
    return CANONICAL_NAMES.get(device, device)


def parse_device_argument(value: object) -> str:
    """Return the device name for a ``device=`` argument.

    Args:
        value: A device name, a ``torch.device``, an object with a ``device`` attribute such as an ``Accelerator``, or
            an integer as in transformers pipelines: -1 for the CPU, 0 for the first GPU.

    Returns:
        The device name. A string is returned unchanged.

    Raises:
        ConfigurationError: If the value has no device.

    Example:
        >>> [parse_device_argument(value) for value in (-1, 0, 1, "mps")]
        ['cpu', 'gpu', 'cuda:1', 'mps']
    """
    if not isinstance(value, bool) and isinstance(value, Integral):
        return {-1: "cpu", 0: GPU}.get(int(value), f"cuda:{value}")
    device = getattr(value, "device", value)
    if isinstance(device, str):
        return device
    if not (isinstance(getattr(device, "type", None), str) and hasattr(device, "index")):
        raise ConfigurationError(
            f"{short_type_name(value)} objects have no 'device' attribute.",
            "Pass a name such as 'cpu', or an Accelerator.",
        )
    return normalize_device(str(device))


SECRET_PATTERN = re.compile(
    r"\b(AKIA|ASIA)[A-Z0-9]{12,}"  # AWS access keys
    r"|\beyJ[\w-]{8,}(\.[\w-]+)*"  # JSON web tokens
    r"|\bxox[a-z]-[\w-]+"  # Slack tokens
    r"|\b(?=\w*[0-9])(?=\w*[A-Za-z])\w{32,}",  # any long sequence of letters and digits
    re.ASCII,
)
# Name of a function, a model or a model on the Hub. Spaces are not allowed, so that sentences are not stored.
NAME_PATTERN = re.compile(r"([\w.+<>-]{1,64}/)?[\w.+<>-]{1,64}")
MAX_VALUE_CHARACTERS = 10_000


def redact_secrets(text: str) -> str:
    """Mask everything in a text that looks like a secret, and replace unpaired surrogates, which UTF-8 cannot encode."""
    encodable = text[:MAX_VALUE_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
    return SECRET_PATTERN.sub(MASK, mask_secrets("", encodable))


def home_folder() -> Path:
    """Return the home directory, or ``~`` if it is unknown."""
    return Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home raises for an unknown user


def sanitize_path(path: str | Path) -> str:
    """Return the last segment of a path, or the whole name of a model on the Hub. A name that may be private becomes ``***``.

    Example:
        >>> sanitize_path("/home/jane/models/mine"), sanitize_path("OpenMed/NER"), sanitize_path("a text, not a path")
        ('mine', 'OpenMed/NER', '***')
    """
    name = redact_secrets(str(path))
    if not NAME_PATTERN.fullmatch(name):
        name = re.split(r"[/\\]", name)[-1]
    is_user_name = home_folder().name in name.split("/")
    return name if NAME_PATTERN.fullmatch(name) and not is_user_name else MASK
