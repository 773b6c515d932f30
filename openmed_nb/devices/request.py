"""Which device is asked for: spellings, names, variables, and who has precedence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from .._render.display import JsonMixin
from .._utils.text import describe_value, short_type_name
from .._utils.validation import invalid_value
from ..errors import ConfigurationError, UnknownDeviceError

TORCH_DEVICE_VARIABLE = "OPENMED_TORCH_DEVICE"
DEVICE_VARIABLE = "OPENMED_DEVICE"
VARIABLES = (TORCH_DEVICE_VARIABLE, DEVICE_VARIABLE)

LIBRARY_VARIABLES = (
    "ACCELERATE_USE_CPU",
    "CUDA_VISIBLE_DEVICES",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
)
# The variables that may be shown; nothing else of the environment may be kept in a value.
VISIBLE_VARIABLES = (*VARIABLES, *LIBRARY_VARIABLES)

SECRET_NAME = re.compile(r"key|token|secret|passw|pwd|credential|auth", re.IGNORECASE)
SECRET_VALUE = re.compile(
    r"(?P<scheme>\w{1,32}://)[^/\s]+@"  # the user and password of an address
    r"|\b(hf|sk|gh[a-z]|github_pat)_\w+|\b(sk|glpat)-[\w-]+"  # tokens whose prefix tells whose they are
    r"|(key|token|secret|passw\w*|pwd)=\S+",
    re.IGNORECASE,
)
MASK = "***"


def mask_secrets(name: str, value: str) -> str:
    """Return the value of a variable without what is secret in it."""
    if SECRET_NAME.search(name):
        return MASK
    return SECRET_VALUE.sub(lambda match: f"{match['scheme']}{MASK}@" if match["scheme"] else MASK, value)


def visible_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may be shown and are set, masked."""
    return {name: mask_secrets(name, environ[name]) for name in VISIBLE_VARIABLES if name in environ}


ACCEPTED_SPELLINGS = ("auto", "default", "cpu", "cuda", "cuda:N", "mps", "mps:0", "gpu")
AUTO_SPELLINGS = ("", "auto", "default")
SINGLE_DEVICE_ALIASES = {
    "mps:0": "mps",
    "cpu:0": "cpu",
}  # Of these there is no second one, but their number is written, too.
MISSPELT = 0.6  # How like a device a word is that misspells it, by difflib.
NUMBERED = re.compile(r"(cuda):(\d{1,4})", re.ASCII)  # Of these there may be several.
DEFAULT_SOURCE = "nobody"


@dataclass(frozen=True)
class DeviceRequest:
    """A wish for a device, and who has it."""

    value: str  # ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:N"``, ``"mps"`` or ``"gpu"``.
    # Who asks: ``"argument"``, ``"OpenMedConfig"``, ``"%openmed_device"``, a variable's name, ``"nobody"``.
    source: str

    @classmethod
    def parse(cls, spelling: str, source: str) -> DeviceRequest:
        """Return the wish that a spelling stands for: one of ``SPELLINGS``, in any case, with any space around it.

        Raises:
            UnknownDeviceError: For any other spelling; it names the source and the nearest spelling.
            ConfigurationError: For a source that is not a text.

        Example:
            >>> DeviceRequest.parse(" MPS:0 ", "argument").value
            'mps'
            >>> DeviceRequest.parse("cdua:1", "OPENMED_DEVICE")
            Traceback (most recent call last):
            ...
            openmed_nb.errors.UnknownDeviceError: 'cdua:1' (from OPENMED_DEVICE) names no device. Use 'cuda:1'; accepted \
are auto, default, cpu, cuda, cuda:N, mps, mps:0, gpu.
        """
        if not isinstance(source, str):
            raise invalid_value("source", source, "Pass a text that says who asks.")
        value = str(spelling).strip().lower()
        if value in AUTO_SPELLINGS:
            return cls("auto", source)
        if match := NUMBERED.fullmatch(value):
            return cls(f"{match[1]}:{int(match[2])}", source)
        if value in (*ACCEPTED_SPELLINGS, *SINGLE_DEVICE_ALIASES):
            return cls(SINGLE_DEVICE_ALIASES.get(value, value), source)
        kind, _, index = value.partition(":")
        shown = mask_secrets(source, spelling) if isinstance(spelling, str) else spelling
        what = f"{describe_value(shown)} (from {source}) names no device."
        near = _meant(kind)
        if not near:
            raise UnknownDeviceError(what, f"Use one of {', '.join(ACCEPTED_SPELLINGS)}.")
        suggestion = f"{near}:{index}" if NUMBERED.fullmatch(f"{near}:{index}") else near
        raise UnknownDeviceError(what, f"Use {suggestion!r}; accepted are {', '.join(ACCEPTED_SPELLINGS)}.")


# By whose GPU it is, or what drives it, a device is asked for too.
OF_VENDORS = {"apple": "mps", "metal": "mps", "nvidia": "cuda"}


def _meant(kind: str) -> str:
    """Return the device that a word misspells, empty where it is as near to another one: a tpu is neither a cpu nor a gpu."""
    import difflib

    for vendor, device in OF_VENDORS.items():
        if kind.startswith(vendor):
            return device
    matcher = difflib.SequenceMatcher(b=kind)
    likeness = {}
    for known in ("cpu", "cuda", "mps", "gpu", "auto", "default"):
        matcher.set_seq1(known)
        likeness[known] = matcher.ratio()
    first, second = sorted(likeness, key=likeness.__getitem__, reverse=True)[:2]
    return first if likeness[first] >= MISSPELT and likeness[first] > likeness[second] else ""


@dataclass(frozen=True)
class DeviceSetting(JsonMixin):
    """One link of the precedence chain."""

    source: str  # Whose wish it is.
    value: str | None  # The device as it was spelled; ``None`` where nothing was.
    overrides_auto: bool = False  # Whether ``auto`` ends the search here instead of leaving it to the next in line.

    JSON_EXCLUDE = ("value", "overrides_auto")
    JSON_PROPERTIES = ("display_value",)

    @property
    def is_explicit(self) -> bool:
        """Whether the search ends here."""
        return self.value is not None and (self.overrides_auto or self.value.strip().lower() not in AUTO_SPELLINGS)

    @property
    def display_value(self) -> str:
        """The spelling without what is secret in it."""
        return "(nothing)" if self.value is None else mask_secrets(self.source, self.value)


def resolution_order(
    environ: Mapping[str, str], argument: DeviceSetting | None = None, override: DeviceRequest | None = None
) -> tuple[DeviceSetting, ...]:
    """Return the chain of wishes, the strongest first: an argument, the session's override, the two variables.

    ``auto`` as an argument or in a variable leaves the choice to the next in line; ``auto`` that a person chose for the
    session (by magic, panel or ``use``) is a wish of its own: it silences the variables.
    """
    session = (
        DeviceSetting(override.source, override.value, overrides_auto=True)
        if override
        else DeviceSetting("session", None)
    )
    return (
        argument or DeviceSetting("argument", None),
        session,
        *(DeviceSetting(name, environ.get(name)) for name in VARIABLES),
    )


def first_explicit(chain: tuple[DeviceSetting, ...]) -> DeviceSetting | None:
    """Return the first wish of the chain that asks for a device, ``None`` where none does."""
    return next((wish for wish in chain if wish.is_explicit), None)


def resolve_request(chain: tuple[DeviceSetting, ...]) -> DeviceRequest:
    """Return what the first wish of the chain that asks for a device asks for, or ``auto`` by nobody."""
    wish = first_explicit(chain)
    return DeviceRequest.parse(str(wish.value), wish.source) if wish else DeviceRequest("auto", DEFAULT_SOURCE)


def device_type(device: str) -> str:
    """Return what kind of device a name names: without the number of a GPU."""
    return device.partition(":")[0]


def normalize_device(device: str) -> str:
    """Return the one spelling of a device: ``cuda`` is the first GPU, and torch calls ``mps`` also ``mps:0``.

    Accelerate calls the CPU ``cpu:0`` in one of several processes (its ``PartialState.set_device``).
    """
    return {"cuda": "cuda:0", **SINGLE_DEVICE_ALIASES}.get(device, device)


def parse_device_argument(thing: Any) -> str:
    """Return the device of an argument: its name, a ``torch.device``, or what has one, such as an ``Accelerator``.

    A whole number is what it is to pipelines of transformers: -1 is the CPU, and 0 the first GPU.

    Example:
        >>> [parse_device_argument(thing) for thing in (-1, 0, 1, "mps")]
        ['cpu', 'gpu', 'cuda:1', 'mps']
    """
    if not isinstance(thing, bool) and isinstance(thing, Integral):
        return {-1: "cpu", 0: "gpu"}.get(int(thing), f"cuda:{thing}")
    device = getattr(thing, "device", thing)
    if isinstance(device, str):
        return device
    if not (isinstance(getattr(device, "type", None), str) and hasattr(device, "index")):
        what = f"{short_type_name(thing)} has no device."
        raise ConfigurationError(what, "Pass a name such as 'cpu', or an Accelerator.")
    return normalize_device(str(device))
