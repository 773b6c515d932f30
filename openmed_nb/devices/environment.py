"""The variables that MPS reads: the plan, what it changes, and how that is undone.

The three MPS environment defaults: planned as a value, applied in time, undone without a trace.

When torch reads them decides everything (read out of torch 2.13's macOS binary):

- ``PYTORCH_ENABLE_MPS_FALLBACK`` while torch's library loads, so only before ``import torch`` (``MPSFallback.mm:101``).
- the two watermark ratios once, at the first touch of the MPS allocator, which the first MPS tensor or any question
  about MPS memory is; a bad pair then fails every MPS call of the process (``MPSAllocator.mm:86`` and ``:100``).

A value that a person set is never overwritten; ours adapts to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..display import Report, Shown, Table
from .request import TORCH_DEVICE_VARIABLE, masked

FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
HIGH = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
LOW = "PYTORCH_MPS_LOW_WATERMARK_RATIO"
VARIABLES = (FALLBACK, HIGH, LOW)

DEFAULT_FALLBACK = "1"
DEFAULT_HIGH = 1.0
DEFAULT_LOW = 0.9

TORCH_HIGH = 1.7
TORCH_LOW = 1.4
LARGEST_RATIO = 2.0

IN_TIME = "in time"
IN_FORCE = "in force"
TOO_LATE = "too late"
UNSURE = "unsure"
CONFLICT = "conflict"
IDLE = "not for this device"

SET_BY = {"set": "openmed_nb", "kept": "you", "unset": "nobody"}
"""Whose value it is, by the origin of a setting."""

UNSEEN = "\0"
"""Stands for a value that stood there before anyone looked; no environment variable can hold it."""

RESTART = "Restart the kernel and run %load_ext openmed_nb before anything imports torch."
UNSET_BOTH = f"Unset {HIGH} and {LOW}, then restart the kernel."


@dataclass(frozen=True)
class Moment:
    """What torch has done by now.

    Attributes:
        torch_loaded: Whether torch is imported.
        allocator_started: Whether the MPS allocator has read its watermarks; ``None`` where nobody can tell.
        seen: For each variable that was watched, the values that torch may have read; ``None`` among them is "unset".
    """

    torch_loaded: bool = False
    allocator_started: bool | None = False
    seen: Mapping[str, frozenset[str | None]] = field(default_factory=dict)

    def has_read(self, name: str) -> bool | None:
        """Tell whether torch has read a variable by now, ``None`` where nobody can tell."""
        if not self.torch_loaded:
            return False
        return True if name == FALLBACK else self.allocator_started


@dataclass(frozen=True)
class EnvSetting:
    """One variable of the plan.

    Attributes:
        name: The variable.
        value: Its value once the plan is applied; ``None`` where it stays unset.
        origin: ``"set"`` by us, ``"kept"`` from the person, or ``"unset"``.
        effect: ``"in time"`` (torch will read it), ``"in force"``, ``"too late"``, ``"unsure"``, ``"conflict"`` or
            ``"not for this device"`` (the device is not mps).
        note: What to know about the value.
        remedy: One thing to do, empty where nothing is wrong.
    """

    name: str
    value: str | None
    origin: str
    effect: str
    note: str = ""
    remedy: str = ""

    @property
    def shown(self) -> str | None:
        """The value without what is secret in it."""
        return None if self.value is None else masked(self.name, self.value)

    def to_dict(self) -> dict[str, Any]:
        """Return the setting as a mapping of strings."""
        return {**vars(self), "value": self.shown}


@dataclass(frozen=True, repr=False)
class EnvPlan(Shown):
    """What becomes of the MPS variables, and whether torch will see it."""

    settings: tuple[EnvSetting, ...]

    @property
    def additions(self) -> dict[str, str]:
        """The variables to set."""
        return {one.name: one.value for one in self.settings if one.origin == "set" and one.value is not None}

    @property
    def high_watermark(self) -> float | None:
        """The high watermark that torch reads or has read; ``None`` where it reads another one, or refuses this one."""
        high = next(one for one in self.settings if one.name == HIGH)
        if high.effect not in (IN_TIME, IN_FORCE):
            return None
        return TORCH_HIGH if high.value is None else parse_ratio(high.value)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain mappings, lists and strings, ready for JSON."""
        return {"settings": [setting.to_dict() for setting in self.settings]}

    def table(self) -> Table:
        """Return the plan as a table."""
        rows = tuple(
            (one.name, one.shown or "(not set)", SET_BY[one.origin], one.effect, _advice(one)) for one in self.settings
        )
        return Table("Environment", ("variable", "value", "set by", "effect", "note"), rows)

    def report(self) -> Report:
        """Return what there is to show: one table."""
        return Report("MPS environment", tables=(self.table(),))


def plan(
    environ: Mapping[str, str],
    device: str = "mps",
    moment: Moment | None = None,
    applied: Mapping[str, str] | None = None,
) -> EnvPlan:
    """Plan the MPS variables for a device; nothing is changed.

    Args:
        environ: The environment variables as the person set them.
        device: The device in force; only for ``"mps"`` is anything set.
        moment: What torch has done by now.
        applied: What we set and what still stands there, for another device of this session.

    Returns:
        The plan, one setting for each variable.

    Example:
        >>> for one in plan({"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "0.7"}).settings:
        ...     print(one.name, one.value, one.origin, one.effect)
        PYTORCH_ENABLE_MPS_FALLBACK 1 set in time
        PYTORCH_MPS_HIGH_WATERMARK_RATIO 0.7 kept in time
        PYTORCH_MPS_LOW_WATERMARK_RATIO 0.63 set in time
    """
    moment = moment or Moment()
    if device != "mps":
        return EnvPlan(tuple(_idle_setting(name, environ, applied or {}) for name in VARIABLES))
    high, low = watermark_defaults(environ.get(HIGH), environ.get(LOW))
    wanted = {FALLBACK: DEFAULT_FALLBACK, HIGH: high, LOW: low}
    conflict = watermark_conflict(environ.get(HIGH, high), environ.get(LOW, low))
    return EnvPlan(tuple(_setting(name, environ, wanted[name], conflict, moment) for name in VARIABLES))


def apply(planned: EnvPlan, environ: MutableMapping[str, str]) -> dict[str, str]:
    """Set what the plan adds, and return it."""
    environ.update(planned.additions)
    return planned.additions


def undo(
    applied: Mapping[str, str], environ: MutableMapping[str, str], before: Mapping[str, str] | None = None
) -> None:
    """Remove what was set, or give it the value of before, but only where it still has the value that was set."""
    former = before or {}
    for name in [name for name, value in applied.items() if environ.get(name) == value]:
        if name in former:
            environ[name] = former[name]
        else:
            del environ[name]


def watermark_defaults(high: str | None, low: str | None) -> tuple[str | None, str | None]:
    """Return the pair of watermark ratios to set beside what a person set; ``None`` where nothing is to be set.

    Args:
        high: The person's high ratio as written, ``None`` where unset.
        low: The person's low ratio as written, ``None`` where unset.

    Example:
        >>> watermark_defaults(None, None), watermark_defaults("0.7", None), watermark_defaults(None, "1.2")
        (('1.0', '0.9'), (None, '0.63'), ('1.2', None))
        >>> watermark_defaults("2.5", None), watermark_defaults("1.5", "0.5")
        ((None, None), (None, None))
    """
    if high is None and low is None:
        return str(DEFAULT_HIGH), str(DEFAULT_LOW)
    if low is None and high is not None and is_ratio(high):
        return None, _low_below(parse_ratio(high))
    if high is None and low is not None and is_ratio(low):
        return str(max(DEFAULT_HIGH, parse_ratio(low))), None
    return None, None


def watermark_conflict(high: str | None, low: str | None) -> str:
    """Return the message with which torch will refuse a pair of ratios, empty where it takes them.

    Example:
        >>> watermark_conflict("0.7", None), watermark_conflict("0.0", "1.4"), watermark_conflict("2.5", None)
        ('invalid low watermark ratio 1.4', '', 'invalid high watermark ratio 2.5')
    """
    given = {HIGH: high, LOW: low}
    high_ratio, low_ratio = watermarks({name: text for name, text in given.items() if text is not None})
    if not 0 <= high_ratio <= LARGEST_RATIO:
        return f"invalid high watermark ratio {high_ratio:g}"
    if not 0 <= low_ratio <= (high_ratio or LARGEST_RATIO):
        return f"invalid low watermark ratio {low_ratio:g}"
    return ""


def watermarks(environ: Mapping[str, str]) -> tuple[float, float]:
    """Return the high and the low watermark that torch reads from an environment.

    Example:
        >>> watermarks({}), watermarks({"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "1.0"})
        ((1.7, 1.4), (1.0, 1.4))
    """
    high, low = environ.get(HIGH), environ.get(LOW)
    return (TORCH_HIGH if high is None else parse_ratio(high), TORCH_LOW if low is None else parse_ratio(low))


NUMBER = r"\s*[+-]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|inf(?:inity)?|nan)"


def parse_ratio(text: str) -> float:
    """Return a ratio the way torch reads it, with C's ``strtod``: the longest number in front, 0 where there is none.

    Example:
        >>> parse_ratio("0.7"), parse_ratio("0,9"), parse_ratio("abc")
        (0.7, 0.0, 0.0)
    """
    match = re.match(NUMBER, text, flags=re.ASCII | re.IGNORECASE)
    return float(match.group()) if match else 0.0


def is_number(text: str) -> bool:
    """Tell whether the whole text is one number; torch silently reads any other as far as it can.

    Example:
        >>> is_number("0.7"), is_number("0,7"), is_number("")
        (True, False, False)
    """
    return re.fullmatch(NUMBER + r"\s*", text, flags=re.ASCII | re.IGNORECASE) is not None


def is_ratio(text: str) -> bool:
    """Tell whether torch takes what it reads of the text as a high ratio: 0 to 2.

    Example:
        >>> is_ratio("2.0"), is_ratio("2.1"), is_ratio("nan")
        (True, False, False)
    """
    return 0 <= parse_ratio(text) <= LARGEST_RATIO


def _low_below(high: float) -> str:
    return str(DEFAULT_LOW) if high == 0 or high >= DEFAULT_LOW else f"{DEFAULT_LOW * high:.6g}"


def _idle_setting(name: str, environ: Mapping[str, str], applied: Mapping[str, str]) -> EnvSetting:
    origin = "set" if name in applied else "kept" if name in environ else "unset"
    return EnvSetting(name, applied.get(name, environ.get(name)), origin, IDLE)


def _setting(name: str, environ: Mapping[str, str], wanted: str | None, conflict: str, moment: Moment) -> EnvSetting:
    value = environ.get(name, wanted)
    origin = "kept" if name in environ else "unset" if wanted is None else "set"
    if name != FALLBACK and conflict:
        return EnvSetting(name, value, origin, CONFLICT, f"torch will say: {conflict}", UNSET_BOTH)
    effect = _effect(value, moment.has_read(name), moment.seen.get(name, frozenset((UNSEEN, environ.get(name)))))
    note, correction = _value_advice(name, value)
    restart = RESTART if effect in (TOO_LATE, UNSURE) else ""
    return EnvSetting(name, value, origin, effect, note, correction or restart)


def _effect(value: str | None, has_read: bool | None, seen: frozenset[str | None]) -> str:
    """Return whether torch sees a value, from the values that it may have read."""
    if has_read is False:
        return IN_TIME
    if seen == {value}:
        return IN_FORCE
    return UNSURE if has_read is None or value in seen else TOO_LATE


def _value_advice(name: str, value: str | None) -> tuple[str, str]:
    """Return what to know of a value that torch reads otherwise than it looks, and what to write instead."""
    if value is None:
        return "", ""
    shown = masked(name, value)
    if name == FALLBACK:
        odd = value not in ("0", "1")
        return (f"torch reads {shown!r} as on", "Set it to 0 or 1.") if odd else ("", "")
    if not is_number(value):
        return f"{shown!r} is no number, and torch reads it as {parse_ratio(value):g}", "Set it to a number, 0 to 2."
    return ("no limit", "") if name == HIGH and parse_ratio(value) == 0 else ("", "")


def _advice(setting: EnvSetting) -> str:
    return ". ".join(part for part in (setting.note, setting.remedy) if part)


@dataclass(frozen=True)
class Published:
    """What we wrote into ``OPENMED_TORCH_DEVICE``, so that the openmed package follows, and what stood there before."""

    before: str | None
    ours: str


class EnvironmentChanges:
    """The part of a session that writes to the environment, and remembers every value that it wrote.

    Args:
        environ: The environment variables, read and written.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._environ = environ
        self._applied: dict[str, str] = {}
        self._seen: dict[str, frozenset[str | None]] = dict.fromkeys(VARIABLES, frozenset((UNSEEN,)))
        self._settled: set[str] = set()
        self._published: Published | None = None

    @property
    def applied(self) -> dict[str, str]:
        """The MPS variables that we set, with our values."""
        return dict(self._applied)

    @property
    def environ(self) -> dict[str, str]:
        """A copy of the environment variables as they stand now."""
        return dict(self._environ)

    @property
    def shell(self) -> dict[str, str]:
        """The environment variables as the person set them, without what we wrote."""
        variables = {name: value for name, value in self._environ.items() if self._applied.get(name) != value}
        published = self._published
        if published and variables.get(TORCH_DEVICE_VARIABLE) == published.ours:
            del variables[TORCH_DEVICE_VARIABLE]
            if published.before is not None:
                variables[TORCH_DEVICE_VARIABLE] = published.before
        return variables

    def observe(self, moment: Moment) -> None:
        """Keep watch over the values that torch may have read; call it around every change and every use of torch."""
        for name in VARIABLES:
            has_read, value = moment.has_read(name), frozenset((self._environ.get(name),))
            if name not in self._settled:
                self._seen[name] = value if has_read is False else self._seen[name] | value
            if has_read:
                self._settled.add(name)

    def plan(self, device: str, moment: Moment | None = None) -> EnvPlan:
        """Return the plan for a device, knowing which values torch may have read; for others than mps that is no matter."""
        standing = {name: value for name, value in self._applied.items() if self._environ.get(name) == value}
        if moment is None:
            return plan(self.shell, device, applied=standing)
        self.observe(moment)
        started = True if HIGH in self._settled else moment.allocator_started
        return plan(self.shell, device, replace(moment, allocator_started=started, seen=dict(self._seen)), standing)

    def enter_mps(self, moment: Moment) -> None:
        """Apply the MPS variables, in place of those that were applied before."""
        planned = self.plan("mps", moment)
        undo(self._applied, self._environ, planned.additions)
        self._applied = apply(planned, self._environ)
        self.observe(moment)

    def back_to(self, applied: Mapping[str, str], moment: Moment) -> None:
        """Take back what was done to the MPS variables since then.

        Args:
            applied: What had been applied; empty to take everything back.
            moment: What torch has done by now.
        """
        self.observe(moment)
        undo(self._applied, self._environ, applied)
        self._applied = dict(applied)
        self.observe(moment)

    def publish(self, device: str) -> None:
        """Write the device where the openmed package looks for it."""
        self._published = Published(self.shell.get(TORCH_DEVICE_VARIABLE), device)
        self._environ[TORCH_DEVICE_VARIABLE] = device

    def unpublish(self) -> None:
        """Give ``OPENMED_TORCH_DEVICE`` its former value back, unless someone else changed it since."""
        published, self._published = self._published, None
        if published is None or self._environ.get(TORCH_DEVICE_VARIABLE) != published.ours:
            return
        if published.before is None:
            del self._environ[TORCH_DEVICE_VARIABLE]
        else:
            self._environ[TORCH_DEVICE_VARIABLE] = published.before
