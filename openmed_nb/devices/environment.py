"""The environment variables of MPS: three that we would set, and whether torch sees them; ``computer`` sets them.

When torch reads them decides everything (read out of torch 2.13's macOS binary):

- ``PYTORCH_ENABLE_MPS_FALLBACK`` while torch's library loads, so only before ``import torch`` (``MPSFallback.mm:101``).
- the two watermark ratios once, at the first touch of the MPS allocator, which the first MPS tensor or any question
  about MPS memory is; a bad pair then fails every MPS call of the process (``MPSAllocator.mm:86`` and ``:100``).

A value that a person set is never overwritten; ours adapts to it. A variable of MPS that torch does not read is named.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

from .._render.display import Displayable, Report, Table
from .._utils.validation import closest_match
from .backend import parse_release
from .request import mask_secrets

FALLBACK_VARIABLE = "PYTORCH_ENABLE_MPS_FALLBACK"
HIGH_WATERMARK_VARIABLE = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
LOW_WATERMARK_VARIABLE = "PYTORCH_MPS_LOW_WATERMARK_RATIO"
VARIABLES = (FALLBACK_VARIABLE, HIGH_WATERMARK_VARIABLE, LOW_WATERMARK_VARIABLE)

# The variables that torch reads for MPS, each with the first release that does, by the strings in its binaries for macOS.
SUPPORTED_SINCE = {
    **dict.fromkeys((*VARIABLES, "PYTORCH_DEBUG_MPS_ALLOCATOR"), "2.0"),
    **dict.fromkeys(("PYTORCH_MPS_LOG_PROFILE_INFO", "PYTORCH_MPS_TRACE_SIGNPOSTS"), "2.1"),
    "PYTORCH_MPS_PREFER_METAL": "2.3",
    "PYTORCH_MPS_FAST_MATH": "2.5",
    "PYTORCH_MPS_DISABLE_PREFILL_ATTENTION": "2.13",
    "PYTORCH_MPS_METAL_VERSION": "2.15",
}
LATEST_CHECKED_TORCH = "2.15"  # The newest torch whose binaries were looked at.
MPS_VARIABLE_PATTERN = re.compile(r"PYTORCH_([A-Z0-9]+_)*MPS(_[A-Z0-9]+)*")

DEFAULT_HIGH = 1.0
DEFAULT_LOW = 0.9

TORCH_HIGH = 1.7
TORCH_LOW = 1.4
MAX_RATIO = 2.0

PENDING = "in time"
ACTIVE = "in force"
TOO_LATE = "too late"
UNSURE = "unsure"
CONFLICT = "conflict"
IGNORED = "not read"
NOT_FOR_DEVICE = "not for this device"

# Whose value it is, by the origin of a setting.
SET_BY = {"set": "openmed_nb", "kept": "you", "unset": "nobody"}

# Stands for a value that stood there before anyone looked; no environment variable can hold it.
UNOBSERVED = "\0"

RESTART = "Restart the kernel and run %load_ext openmed_nb before anything imports torch."
UNSET_BOTH = f"Unset {HIGH_WATERMARK_VARIABLE} and {LOW_WATERMARK_VARIABLE}, then restart the kernel."


@dataclass(frozen=True)
class TorchState:
    """What torch has done by now."""

    torch_loaded: bool = False  # Whether torch is imported.
    allocator_started: bool | None = False  # Whether the MPS allocator has read its watermarks; ``None`` if unknown.
    # For each variable that was watched, the values that torch may have read; ``None`` among them is "unset".
    observed_values: Mapping[str, frozenset[str | None]] = field(default_factory=dict)

    def has_read(self, name: str) -> bool | None:
        """Tell whether torch has read a variable by now, ``None`` if unknown."""
        if not self.torch_loaded:
            return False
        return True if name == FALLBACK_VARIABLE else self.allocator_started


@dataclass(frozen=True)
class EnvSetting:
    """One variable of the plan.

    Attributes:
        name: The variable.
        value: Its value once the plan is applied; ``None`` where it stays unset.
        origin: ``"set"`` by us, ``"kept"`` from the person, or ``"unset"``.
        effect: ``"in time"`` (torch will read it), ``"in force"``, ``"too late"``, ``"unsure"``, ``"conflict"``,
            ``"not read"`` (torch has no such variable) or ``"not for this device"`` (the device is not mps).
        note: What to know about the value.
        remedy: One thing to do, empty where nothing is wrong.
    """

    name: str
    value: str | None
    source: str
    effect: str
    note: str = ""
    remedy: str = ""

    @property
    def display_value(self) -> str | None:
        """The value without what is secret in it."""
        return None if self.value is None else mask_secrets(self.name, self.value)

    def to_dict(self) -> dict[str, Any]:
        """Return the setting as a mapping of strings."""
        return {**vars(self), "value": self.display_value}


@dataclass(frozen=True, repr=False)
class EnvPlan(Displayable):
    """What becomes of the MPS variables, and whether torch will see it."""

    # The three that we would set, and then those that a person set and torch does not read.
    settings: tuple[EnvSetting, ...]

    @property
    def variables_to_set(self) -> dict[str, str]:
        """The variables to set."""
        return {one.name: one.value for one in self.settings if one.source == "set" and one.value is not None}

    @property
    def high_watermark(self) -> float | None:
        """The high watermark that torch reads or has read; ``None`` where it reads another one, or refuses this one."""
        high = next(one for one in self.settings if one.name == HIGH_WATERMARK_VARIABLE)
        if high.effect not in (PENDING, ACTIVE):
            return None
        return TORCH_HIGH if high.value is None else parse_ratio(high.value)

    def table(self) -> Table:
        """Return the plan as a table."""
        rows = []
        for setting in self.settings:
            note = ". ".join(filter(None, (setting.note, setting.remedy)))
            set_by = SET_BY[setting.source]
            rows.append((setting.name, setting.display_value or "(not set)", set_by, setting.effect, note))
        return Table("Environment", ("variable", "value", "set by", "effect", "note"), tuple(rows))

    def to_report(self) -> Report:
        """Return what there is to show: one table."""
        return Report("MPS environment", tables=(self.table(),))


def plan_mps_variables(
    environ: Mapping[str, str],
    device: str = "mps",
    state: TorchState | None = None,
    applied_variables: Mapping[str, str] | None = None,
    torch: str | None = None,
) -> EnvPlan:
    """Plan the MPS variables for a device, from those that the person set; nothing is changed.

    Only for ``"mps"`` is anything set. ``applied`` is what we set and what still stands there, for another device;
    ``torch`` is the version of torch, ``None`` if it is not known.
    """
    conflict = ""
    if device == "mps":
        high, low = watermark_defaults(environ.get(HIGH_WATERMARK_VARIABLE), environ.get(LOW_WATERMARK_VARIABLE))
        wanted = {FALLBACK_VARIABLE: "1", HIGH_WATERMARK_VARIABLE: high, LOW_WATERMARK_VARIABLE: low}
        applied_variables = {name: value for name, value in wanted.items() if value is not None}
        conflict = watermark_conflict(
            environ.get(HIGH_WATERMARK_VARIABLE, high), environ.get(LOW_WATERMARK_VARIABLE, low)
        )
    settings = []
    for name in VARIABLES:
        origin = "unset"
        if name in environ:
            origin = "kept"
        elif applied_variables and name in applied_variables:
            origin = "set"
        setting = EnvSetting(name, environ.get(name, (applied_variables or {}).get(name)), origin, NOT_FOR_DEVICE)
        if device == "mps":
            setting = _judged(setting, environ, "" if name == FALLBACK_VARIABLE else conflict, state or TorchState())
        settings.append(setting)
    return EnvPlan((*settings, *_ignored_variables(environ, device, torch)))


def _ignored_variables(environ: Mapping[str, str], device: str, torch: str | None) -> Iterator[EnvSetting]:
    """Yield the variables of MPS that this torch does not read, though a person has set them."""
    read = {
        name for name, since in SUPPORTED_SINCE.items() if torch is None or parse_release(since) <= parse_release(torch)
    }
    for name in sorted(name for name in environ if MPS_VARIABLE_PATTERN.fullmatch(name) and name not in read):
        note = f"no torch up to {LATEST_CHECKED_TORCH} reads it"
        if name in SUPPORTED_SINCE:
            note = f"torch {torch} does not read it; {SUPPORTED_SINCE[name]} is the first that does"
        unread = EnvSetting(name, environ[name], "kept", NOT_FOR_DEVICE, note)
        if device == "mps":
            near = closest_match(name, read, cutoff=0.8)
            remedy = f"Use {near}, or unset it." if near else "Unset it."
            unread = replace(unread, effect=IGNORED, remedy=remedy)
        yield unread


def watermark_defaults(high: str | None, low: str | None) -> tuple[str | None, str | None]:
    """Return the pair of watermark ratios to add to what a person set; ``None`` for one that stays as it is.

    The arguments are the person's ratios as written, ``None`` where unset.

    Example:
        >>> watermark_defaults(None, None), watermark_defaults("0.7", None), watermark_defaults(None, "1.2")
        (('1.0', '0.9'), (None, '0.63'), ('1.2', None))
        >>> watermark_defaults("2.5", None), watermark_defaults("1.5", "0.5")
        ((None, None), (None, None))
    """
    if high is None and low is None:
        return str(DEFAULT_HIGH), str(DEFAULT_LOW)
    person = parse_ratio(str(low if high is None else high))
    if None not in (high, low) or not 0 <= person <= MAX_RATIO:
        return None, None
    if high is None:
        return str(max(DEFAULT_HIGH, person)), None
    return None, str(DEFAULT_LOW) if person == 0 or person >= DEFAULT_LOW else f"{DEFAULT_LOW * person:.6g}"


def watermark_conflict(high: str | None, low: str | None) -> str:
    """Return the message with which torch will refuse a pair of ratios, empty where it takes them."""
    given = {HIGH_WATERMARK_VARIABLE: high, LOW_WATERMARK_VARIABLE: low}
    high_ratio, low_ratio = watermarks({name: ratio for name, ratio in given.items() if ratio is not None})
    if not 0 <= high_ratio <= MAX_RATIO:
        return f"invalid high watermark ratio {high_ratio:g}"
    if not 0 <= low_ratio <= (high_ratio or MAX_RATIO):
        return f"invalid low watermark ratio {low_ratio:g}"
    return ""


def watermarks(environ: Mapping[str, str]) -> tuple[float, float]:
    """Return the high and the low watermark that torch reads from an environment."""
    return parse_ratio(environ.get(HIGH_WATERMARK_VARIABLE, str(TORCH_HIGH))), parse_ratio(
        environ.get(LOW_WATERMARK_VARIABLE, str(TORCH_LOW))
    )


@contextlib.contextmanager
def preserve_variables(names: Collection[str], environ: MutableMapping[str, str]) -> Iterator[None]:
    """Give variables their values back at the end, whatever others have written there meanwhile."""
    before = {name: environ[name] for name in names if name in environ}
    try:
        yield
    finally:
        for name in names:
            environ.pop(name, None)
        environ.update(before)


FLOAT_PATTERN = r"\s*[+-]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|inf(?:inity)?|nan)"


def parse_ratio(text: str) -> float:
    """Return a ratio the way torch reads it, with C's ``strtod``: the longest number in front, 0 where there is none.

    Example:
        >>> parse_ratio("0.7"), parse_ratio("0,9"), parse_ratio("abc")
        (0.7, 0.0, 0.0)
    """
    match = re.match(FLOAT_PATTERN, text, flags=re.ASCII | re.IGNORECASE)
    return float(match.group()) if match else 0.0


def _judged(setting: EnvSetting, environ: Mapping[str, str], conflict: str, moment: TorchState) -> EnvSetting:
    """Return a setting with what torch makes of it."""
    name = setting.name
    value = setting.value
    if conflict:
        return replace(setting, effect=CONFLICT, note=f"torch will say: {conflict}", remedy=UNSET_BOTH)
    has_read = moment.has_read(name)
    seen = moment.observed_values.get(name, frozenset((UNOBSERVED, environ.get(name))))
    if has_read is False:
        effect = PENDING
    elif seen == {value}:
        effect = ACTIVE
    elif has_read is None or value in seen:
        effect = UNSURE
    else:
        effect = TOO_LATE
    note = ""
    remedy = RESTART if effect in (TOO_LATE, UNSURE) else ""
    shown = setting.display_value
    if value is None:
        return replace(setting, effect=effect, remedy=remedy)
    if name == FALLBACK_VARIABLE:
        if value not in ("0", "1"):
            note = f"torch reads {shown!r} as on"
            remedy = "Set it to 0 or 1."
    elif re.fullmatch(FLOAT_PATTERN + r"\s*", value, flags=re.ASCII | re.IGNORECASE) is None:
        note = f"{shown!r} is no number, and torch reads it as {parse_ratio(value):g}"
        remedy = "Set it to a number, 0 to 2."
    elif name == HIGH_WATERMARK_VARIABLE and parse_ratio(value) == 0:
        note = "no limit"
    return replace(setting, effect=effect, note=note, remedy=remedy)
