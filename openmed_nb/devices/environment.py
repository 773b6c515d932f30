"""Plan of the MPS environment variables: values to set, and whether torch reads them. ``computer`` sets the variables.

A variable has an effect only if it is set before torch reads it (from torch 2.13's binary for macOS):

- ``PYTORCH_ENABLE_MPS_FALLBACK`` is read while torch is imported (``MPSFallback.mm:101``).
- The two watermark ratios are read once, when the MPS allocator is initialized by the first MPS tensor or memory query.
  An invalid pair makes every MPS call of the process fail (``MPSAllocator.mm:86`` and ``:100``).

Values of the user are never overwritten, and the values of the package adapt to them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from .._render.values import Displayable, Report, Table
from .request import mask_secrets

# If it is "1", torch computes operators without an MPS kernel on the CPU instead of raising an error.
FALLBACK_VARIABLE = "PYTORCH_ENABLE_MPS_FALLBACK"
# Limit of MPS memory, as a ratio of the recommended working set, in [0, 2]. Above it torch raises an out-of-memory error.
HIGH_WATERMARK_VARIABLE = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
# Ratio from which the MPS allocator returns cached memory, in [0, high watermark].
LOW_WATERMARK_VARIABLE = "PYTORCH_MPS_LOW_WATERMARK_RATIO"
VARIABLES = (FALLBACK_VARIABLE, HIGH_WATERMARK_VARIABLE, LOW_WATERMARK_VARIABLE)

DEFAULT_HIGH = 1.0
DEFAULT_LOW = 0.9

TORCH_HIGH = 1.7
TORCH_LOW = 1.4
MAX_RATIO = 2.0

Effect: TypeAlias = Literal["pending", "active", "too late", "unknown", "conflict", "not applicable"]

PENDING: Final = "pending"
ACTIVE: Final = "active"
TOO_LATE: Final = "too late"
UNKNOWN: Final = "unknown"
CONFLICT: Final = "conflict"
NOT_FOR_DEVICE: Final = "not applicable"

SettingSource: TypeAlias = Literal["set", "kept", "unset"]

# Display text for the source of a setting.
SET_BY: dict[SettingSource, str] = {"set": "openmed_nb", "kept": "you", "unset": "default"}

# Stands for an unknown value before the first check. No environment variable can contain it.
UNOBSERVED = "\0"

RESTART_REMEDY = "Restart the kernel and run %load_ext openmed_nb before torch is imported."
UNSET_BOTH_REMEDY = f"Unset {HIGH_WATERMARK_VARIABLE} and {LOW_WATERMARK_VARIABLE}, then restart the kernel."


@dataclass(frozen=True)
class TorchState:
    """State of torch that determines which environment variables it has read.

    Attributes:
        torch_loaded: Whether torch is imported.
        allocator_started: Whether the MPS allocator has read its watermarks, or ``None`` if unknown.
        observed_values: For each tracked variable, the values that torch may have read. ``None`` means "not set".
    """

    torch_loaded: bool = False
    allocator_started: bool | None = False
    observed_values: Mapping[str, frozenset[str | None]] = field(default_factory=dict)

    def has_read(self, name: str) -> bool | None:
        """Return whether torch has read a variable, or ``None`` if unknown."""
        if not self.torch_loaded:
            return False
        return True if name == FALLBACK_VARIABLE else self.allocator_started


@dataclass(frozen=True)
class EnvSetting:
    """One variable of the plan.

    Attributes:
        name: Name of the variable.
        value: Value after the plan is applied, or ``None`` if the variable remains unset.
        source: ``"set"`` by the package, ``"kept"`` from the user, or ``"unset"``.
        effect: ``"pending"`` (torch will read the value), ``"active"``, ``"too late"``, ``"unknown"``, ``"conflict"``
            or ``"not applicable"`` (the device is not mps).
        note: Note about the value.
        remedy: Suggested action, empty if there is no problem.
    """

    name: str
    value: str | None
    source: SettingSource
    effect: Effect
    note: str = ""
    remedy: str = ""

    @property
    def display_value(self) -> str | None:
        """Value for display, with secrets masked."""
        return None if self.value is None else mask_secrets(self.name, self.value)

    def to_dict(self) -> dict[str, str | None]:
        """Return the setting as JSON-compatible values."""
        return {**vars(self), "value": self.display_value}


@dataclass(frozen=True, repr=False)
class EnvPlan(Displayable):
    """Plan of the MPS variables.

    Attributes:
        settings: The three variables of the package.
    """

    settings: tuple[EnvSetting, ...]

    @property
    def variables_to_set(self) -> dict[str, str]:
        """The variables to set, with their values."""
        return {
            setting.name: setting.value
            for setting in self.settings
            if setting.source == "set" and setting.value is not None
        }

    @property
    def high_watermark(self) -> float | None:
        """High watermark that torch reads or has read; ``None`` if torch uses another value or rejects this one."""
        high = next(setting for setting in self.settings if setting.name == HIGH_WATERMARK_VARIABLE)
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
        """Return the report: one table."""
        return Report("MPS environment", tables=(self.table(),))


def plan_mps_variables(
    environ: Mapping[str, str],
    device: str = "mps",
    state: TorchState | None = None,
    applied_variables: Mapping[str, str] | None = None,
) -> EnvPlan:
    """Plan the MPS variables for a device without changing the environment.

    Args:
        environ: Environment variables of the user.
        device: Name of the device. Variables are set only for ``"mps"``.
        state: State of torch. If ``None``, torch is not imported.
        applied_variables: For other devices than ``"mps"``, the variables that the package set before and that still have
            its values.
    """
    variables_to_set = applied_variables or {}
    conflict = ""
    if device == "mps":
        variables_to_set = {FALLBACK_VARIABLE: "1", **_watermark_defaults(environ)}
        conflict = watermark_conflict({**variables_to_set, **environ})
    settings = []
    for name in VARIABLES:
        source: SettingSource = "unset"
        if name in environ:
            source = "kept"
        elif name in variables_to_set:
            source = "set"
        setting = EnvSetting(name, environ.get(name, variables_to_set.get(name)), source, NOT_FOR_DEVICE)
        if device == "mps":
            watermark_error = "" if name == FALLBACK_VARIABLE else conflict
            setting = _with_effect(setting, environ, watermark_error, state or TorchState())
        settings.append(setting)
    return EnvPlan(tuple(settings))


def _watermark_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the watermark ratios to set, which the ratios of the user determine. An invalid ratio remains alone.

    Example:
        >>> _watermark_defaults({HIGH_WATERMARK_VARIABLE: "0.7"})
        {'PYTORCH_MPS_LOW_WATERMARK_RATIO': '0.63'}
        >>> _watermark_defaults({LOW_WATERMARK_VARIABLE: "1.2"})
        {'PYTORCH_MPS_HIGH_WATERMARK_RATIO': '1.2'}
        >>> _watermark_defaults({HIGH_WATERMARK_VARIABLE: "2.5"})
        {}
    """
    high = environ.get(HIGH_WATERMARK_VARIABLE)
    low = environ.get(LOW_WATERMARK_VARIABLE)
    if high is None and low is None:
        return {HIGH_WATERMARK_VARIABLE: str(DEFAULT_HIGH), LOW_WATERMARK_VARIABLE: str(DEFAULT_LOW)}
    user_ratio = parse_ratio(str(low if high is None else high))
    if None not in (high, low) or not 0 <= user_ratio <= MAX_RATIO:
        return {}
    if high is None:
        return {HIGH_WATERMARK_VARIABLE: str(max(DEFAULT_HIGH, user_ratio))}
    is_scaled = 0 < user_ratio < DEFAULT_LOW
    return {LOW_WATERMARK_VARIABLE: f"{DEFAULT_LOW * user_ratio:.6g}" if is_scaled else str(DEFAULT_LOW)}


def watermark_conflict(environ: Mapping[str, str]) -> str:
    """Return the error of torch for the ratios of an environment, or an empty string if torch accepts them."""
    high, low = watermarks(environ)
    if not 0 <= high <= MAX_RATIO:
        return f"invalid high watermark ratio {high:g}"
    if not 0 <= low <= (high or MAX_RATIO):
        return f"invalid low watermark ratio {low:g}"
    return ""


def watermarks(environ: Mapping[str, str]) -> tuple[float, float]:
    """Return the high and the low watermark ratio that torch reads from an environment."""
    high = parse_ratio(environ.get(HIGH_WATERMARK_VARIABLE, str(TORCH_HIGH)))
    return high, parse_ratio(environ.get(LOW_WATERMARK_VARIABLE, str(TORCH_LOW)))


@contextlib.contextmanager
def preserve_variable(name: str, environ: MutableMapping[str, str]) -> Iterator[None]:
    """Restore an environment variable after a block, even if other code changed it in the meantime."""
    previous = environ.get(name)
    try:
        yield
    finally:
        environ.pop(name, None)
        if previous is not None:
            environ[name] = previous


FLOAT_PATTERN = r"\s*[+-]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|inf(?:inity)?|nan)"


def parse_ratio(text: str) -> float:
    """Return a ratio as torch parses it, with C's ``strtod``: the longest number at the start, or 0 if there is none.

    Example:
        >>> parse_ratio("0.7"), parse_ratio("0,9"), parse_ratio("abc")
        (0.7, 0.0, 0.0)
    """
    match = re.match(FLOAT_PATTERN, text, flags=re.ASCII | re.IGNORECASE)
    return float(match.group()) if match else 0.0


def _with_effect(setting: EnvSetting, environ: Mapping[str, str], conflict: str, state: TorchState) -> EnvSetting:
    """Return a setting with its effect on torch, a note and a remedy."""
    name = setting.name
    value = setting.value
    if conflict:
        return replace(setting, effect=CONFLICT, note=f"torch will reject it: {conflict}", remedy=UNSET_BOTH_REMEDY)
    has_read = state.has_read(name)
    effect: Effect
    observed = state.observed_values.get(name, frozenset((UNOBSERVED, environ.get(name))))
    if has_read is False:
        effect = PENDING
    elif observed == {value}:
        effect = ACTIVE
    elif has_read is None or value in observed:
        effect = UNKNOWN
    else:
        effect = TOO_LATE
    note = ""
    remedy = RESTART_REMEDY if effect in (TOO_LATE, UNKNOWN) else ""
    if value is None:
        return replace(setting, effect=effect, remedy=remedy)
    if name == FALLBACK_VARIABLE:
        if value not in ("0", "1"):
            note = f"torch treats {setting.display_value!r} as enabled"
            remedy = "Set it to 0 or 1."
    elif re.fullmatch(FLOAT_PATTERN + r"\s*", value, flags=re.ASCII | re.IGNORECASE) is None:
        note = f"{setting.display_value!r} is not a number; torch parses it as {parse_ratio(value):g}"
        remedy = "Set it to a number from 0 to 2."
    elif name == HIGH_WATERMARK_VARIABLE and parse_ratio(value) == 0:
        note = "no limit"
    return replace(setting, effect=effect, note=note, remedy=remedy)
