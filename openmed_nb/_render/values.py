"""Values that describe what is displayed: tables, segments of text, findings and reports, without their rendering.

``%load_ext`` imports this module. :mod:`.display` renders the values on first use, as text and HTML.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from .._utils.validation import suggest_one

if TYPE_CHECKING:
    from .drawing import Chart

# The keys of a JSON object with their JSON-compatible values.
JsonObject: TypeAlias = dict[str, Any]

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def format_bytes(size: int | None) -> str:
    """Return a size in the units of torch, or an empty string for ``None``.

    Example:
        >>> format_bytes(512), format_bytes(3 << 20), format_bytes(-(5 << 30)), format_bytes(None)
        ('512 bytes', '3.0 MiB', '-5.0 GiB', '')
    """
    if size is None:
        return ""
    amount = float(size)
    unit = 0
    while abs(amount) >= 1024 and unit < len(UNITS) - 1:  # noqa: PLR2004 - ratio of consecutive units
        amount /= 1024
        unit += 1
    return f"{amount:.1f} {UNITS[unit]}" if unit else f"{size} bytes"


def format_milliseconds(seconds: float) -> str:
    """Return a duration in milliseconds with two decimals.

    Example:
        >>> format_milliseconds(0.0123), format_milliseconds(2.5)
        ('12.30 ms', '2,500.00 ms')
    """
    return f"{1000 * seconds:,.2f} ms"


def format_percent(fraction: float, number_format: str = ".0f") -> str:
    """Return a fraction as a percentage.

    Example:
        >>> format_percent(0.224), format_percent(0.9586, ".1f"), format_percent(0.224, "+.0f"), format_percent(0.03, "g")
        ('22%', '95.9%', '+22%', '3%')
    """
    return f"{100 * fraction:{number_format}}%"


def format_duration(seconds: float) -> str:
    """Return a human-readable duration.

    Example:
        >>> format_duration(0.0352), format_duration(0.4), format_duration(12.6), format_duration(75), format_duration(3700)
        ('35 ms', '0.4 s', '12 s', '1:15', '1:01:40')
    """
    if seconds < 0.1:  # noqa: PLR2004 - less than a tenth of a second
        return f"{max(1, round(1000 * seconds))} ms"
    if seconds < 10:  # noqa: PLR2004 - short durations are displayed with tenths of a second
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"


def pluralize(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun. Pass the plural if it is irregular.

    Example:
        >>> pluralize(1, "tensor"), pluralize(1200, "tensor"), pluralize(2, "entity", "entities")
        ('1 tensor', '1,200 tensors', '2 entities')
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


@dataclass(frozen=True)
class Table:
    """A table of strings. The first cell of a row is the name of the row.

    Attributes:
        caption: Caption, or an empty string.
        columns: Column headers.
        rows: Cells of each row.
        collapsed: Whether the HTML displays only the caption until the user expands the table.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    collapsed: bool = False


@dataclass(frozen=True)
class OverlappingSpan:
    """Labeled span that overlaps another one.

    Attributes:
        start: Start in characters of the segment.
        end: End in characters of the segment.
        label: Entity label.
        score: Score of the label.
        details: Further text of the tooltip.
        context: Context of the entity; see :class:`TextSegment`.
    """

    start: int
    end: int
    label: str
    score: str = ""
    details: str = ""
    context: str = ""

    @property
    def suffix(self) -> str:
        """Label and context."""
        return f"{self.label}, {self.context}" if self.context else self.label


@dataclass(frozen=True)
class TextSegment:
    """Segment of a text, which is highlighted if it has a label.

    Attributes:
        text: Text of the segment.
        label: Entity label, or an empty string.
        score: Score of the label. The HTML displays it in a tooltip and for screen readers. A replacement does not have a
            score; one that contains its label, such as ``[NAME]``, is displayed unchanged.
        details: Further text of the tooltip.
        starts_text: Whether another text starts with this segment.
        context: Context of the entity after its label, such as ``"no"``, or an empty string.
        spans: Spans in a segment without a label of its own, if they overlap.
    """

    text: str
    label: str = ""
    score: str = ""
    details: str = ""
    starts_text: bool = False
    context: str = ""
    spans: tuple[OverlappingSpan, ...] = ()

    @property
    def suffix(self) -> str:
        """Label and context after the text; empty if the text contains the label."""
        if not self.score and self.label in self.text:
            return ""
        return f"{self.label}, {self.context}" if self.context else self.label


@dataclass(frozen=True)
class Report:
    """Description of a value for display.

    Attributes:
        title: Title.
        details: Origin of the result, such as its model and device, in a small line below the title.
        sentences: Sentences below the title.
        tables: Tables.
        segments: Text with highlighted segments.
        metrics: Tables of times and other values that differ between runs, below the other tables. In the text, their captions
            end with "(this run)", so that ``tests/nbval_sanitize.cfg`` ignores them.
        status: One of :data:`SEVERITY`, displayed as a badge before the title of the HTML, or an empty string.
        charts: Charts of values in the tables, which the HTML displays above them.
    """

    title: str
    sentences: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    segments: tuple[TextSegment, ...] = ()
    metrics: tuple[Table, ...] = ()
    status: str = ""
    charts: tuple[Chart, ...] = ()
    details: str = ""


# First sentence of every result that was measured in the simulation.
SIMULATION_NOTICE = "SIMULATED MPS: these measurements do not represent real MPS hardware."

# Suffix of the name of a simulated device.
SIMULATED_SUFFIX = " (SIMULATED)"


def to_plain_data(value: object) -> Any:
    """Return a value as JSON-compatible mappings, lists, numbers and strings.

    A value with a ``to_dict`` method is converted with it, and any other dataclass by its fields. NaN and infinity, which JSON
    does not support, become ``None``.

    Example:
        >>> to_plain_data({1: (Table("", ("a",), ()), None, float("nan"))})
        {'1': [{'caption': '', 'columns': ['a'], 'rows': [], 'collapsed': False}, None, None]}
    """
    if hasattr(value, "to_dict") and not isinstance(value, type):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain_data(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain_data(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JsonMixin:
    """Mixin that adds ``to_dict`` to a dataclass.

    Attributes:
        SCHEMA: Name and version of the JSON schema; empty for a value inside another.
        JSON_PROPERTIES: Properties that the JSON contains in addition to the fields.
        JSON_EXCLUDE: Fields that the JSON does not contain.

    Example:
        >>> @dataclass(frozen=True)
        ... class Rows(JsonMixin):
        ...     count: int
        ...     raw: object
        ...     SCHEMA, JSON_PROPERTIES, JSON_EXCLUDE = "rows/1", ("twice",), ("raw",)
        ...     @property
        ...     def twice(self) -> int:
        ...         return 2 * self.count
        >>> Rows(4, object()).to_dict()
        {'schema': 'rows/1', 'count': 4, 'twice': 8}
    """

    SCHEMA: ClassVar[str] = ""
    JSON_PROPERTIES: ClassVar[tuple[str, ...]] = ()
    JSON_EXCLUDE: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> JsonObject:
        """Return the value as JSON-compatible mappings, lists, numbers and strings."""
        data: JsonObject = {"schema": self.SCHEMA} if self.SCHEMA else {}
        field_names: list[str] = [field.name for field in fields(self)] if is_dataclass(self) else []
        names = [name for name in field_names if name not in self.JSON_EXCLUDE]
        for name in (*names, *self.JSON_PROPERTIES):
            data[name] = to_plain_data(getattr(self, name))
        return data


def _rendering() -> ModuleType:
    """Return the module that renders reports. It imports this module, so it is imported on first use and by its name."""
    return importlib.import_module(f"{__package__}.display")


class Displayable(JsonMixin):
    """Mixin for values that are displayed as text, HTML and JSON. Subclasses implement ``to_report``.

    A displayable dataclass is defined with ``repr=False``, because its fields may contain text that must not be displayed, such
    as a note. A value is simulated if its attribute ``simulated`` is true or, without it, if its ``device`` has the suffix of a
    simulated device.
    """

    def to_report(self) -> Report:
        """Return the report of the value."""
        raise NotImplementedError

    # Notice and title suffix of a simulated report; empty if the report itself states that it is simulated.
    SIMULATION_MARKERS: ClassVar[tuple[str, str]] = (SIMULATION_NOTICE, SIMULATED_SUFFIX)

    def final_report(self) -> Report:
        """Return the report, with notice and suffix if its measurements come from the simulation."""
        report = self.to_report()
        is_labeled = str(getattr(self, "device", "")).endswith(SIMULATED_SUFFIX)
        if not getattr(self, "simulated", is_labeled):
            return report
        notice, suffix = self.SIMULATION_MARKERS
        return replace(
            report,
            title=report.title if suffix in report.title else f"{report.title}{suffix}",
            sentences=tuple(filter(None, (notice, *report.sentences))),
            charts=tuple(replace(chart, caption=f"{chart.caption}{suffix}") for chart in report.charts),
        )

    if not TYPE_CHECKING:  # A type checker knows the attributes.

        def __getattr__(self, name: str) -> Any:
            try:
                return object.__getattribute__(self, name)
            except AttributeError as error:
                # pickle, copy and IPython look up many names with an underscore.
                if name.startswith("_") or name in dir(self):
                    raise
                table = "Use to_frame() for a pandas table." if hasattr(type(self), "to_frame") else ""
                raise AttributeError(f"{error}. {suggest_one(name, dir(self))} {table}".rstrip()) from None

    def __str__(self) -> str:
        return str(_rendering().to_text(self.final_report()))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return str(_rendering().to_html(self.final_report()))


class Json(str):
    r"""A JSON string that a notebook displays without quotation marks."""

    __slots__ = ()

    @classmethod
    def of(cls, value: object) -> Json:
        """Return a JSON-compatible value as indented JSON."""
        return cls(json.dumps(value, indent=2, ensure_ascii=False))

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(str(self))


OK = "ok"
WARNING = "warning"
FAILED = "failed"
NOT_APPLICABLE = "not applicable"

# Text of a metric that could not be measured.
UNKNOWN = "not known"

# Statuses in order of severity.
SEVERITY = (NOT_APPLICABLE, OK, WARNING, FAILED)


@dataclass(frozen=True)
class Finding:
    """Result of a check.

    Attributes:
        name: Name of the check.
        status: ``"ok"``, ``"warning"``, ``"failed"`` or ``"not applicable"``.
        evidence: Observation that determines the status. It is equal in every run and never contains a time.
        remedy: One suggested action as a sentence; empty if there is no problem.
        details: Further information.
    """

    name: str
    status: str
    evidence: str
    remedy: str = ""
    details: str = ""

    def __str__(self) -> str:
        """Return the finding as one line."""
        return f"{self.name}, {self.status}: {self.evidence.rstrip('.')}. {self.remedy}".rstrip()


def worst_status(findings: Iterable[Finding]) -> str:
    """Return the worst status of findings."""
    return max((finding.status for finding in findings), key=SEVERITY.index, default=NOT_APPLICABLE)


def findings_table(caption: str, findings: Iterable[Finding]) -> Table:
    """Return findings as a table."""
    rows = tuple(
        (finding.name, finding.status, "; ".join(filter(None, (finding.evidence, finding.details))), finding.remedy)
        for finding in findings
    )
    return Table(caption, ("check", "result", "evidence", "suggested action"), rows)
