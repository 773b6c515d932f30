"""The logbook as a value: its sections, its text, its HTML, and the Markdown that holds all of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ...devices.simulation import MARK, NOTE
from ...errors import ConfigurationError
from ...interface.display import Report, Shown, Table
from ...quantities import counted
from .figures import check_device, joined, told_by
from .hypotheses import WARNING
from .plain_values import to_plain
from .sections import Dataset, Day, Figures, Hypothesis, Loader, Model, Run
from .surroundings import Background, Code, Conditions, Hardware, Place, Randomness, RoundTrip, Setting, Software

if TYPE_CHECKING:
    import os

    from .differences import LogbookDiff

SCHEMA: Literal["openmed_nb/logbook/1"] = "openmed_nb/logbook/1"

SECTIONS = {
    "software": "Software",
    "code": "Code",
    "hardware": "Hardware",
    "model": "Model",
    "dataset": "Dataset",
    "run": "Run",
    "loader": "Loader",
    "randomness": "Random numbers",
    "environment": "Environment variables",
    "mps_variables": "What became of the MPS variables",
    "conditions": "Power, heat and memory",
    "background": "Other programs",
    "storage": "Storage",
    "network": "Way to the artifact store",
    "hypotheses": "Hypotheses that are ruled out",
    "figures": "Figures of reports",
}
"""What each section is called, in the order in which they are shown."""


@dataclass(frozen=True, repr=False)
class Logbook(Shown):
    """What figures were measured with. No text of a note, no secret and no name of a file is in it.

    Attributes:
        schema: The name and the number of this form.
        written: When it was written, in UTC.
        simulated: Whether the device was a simulated one, whose figures are none of a real one.
        software: What ran.
        code: The state of the person's own code.
        hardware: Where it ran.
        model: Which model; null where nobody said.
        dataset: Which texts; null where nobody said.
        run: What was done.
        loader: How batches were loaded; null where nobody said.
        randomness: Where random numbers came from.
        environment: The variables of an allow list that were set, by their names.
        mps_variables: What became of the variables of MPS; empty on other devices.
        conditions: Power, heat and memory.
        background: What other programs did.
        storage: Where caches and models lie.
        network: The way to an artifact store; null where nobody asked.
        hypotheses: What is ruled out, in the person's words.
        figures: What reports found, in numbers.
    """

    schema: Literal["openmed_nb/logbook/1"]
    written: Day
    simulated: bool
    software: Software
    code: Code
    hardware: Hardware
    model: Model | None
    dataset: Dataset | None
    run: Run
    loader: Loader | None
    randomness: Randomness
    environment: dict[str, str]
    mps_variables: tuple[Setting, ...]
    conditions: Conditions
    background: Background
    storage: tuple[Place, ...]
    network: RoundTrip | None = None
    hypotheses: tuple[Hypothesis, ...] = ()
    figures: tuple[Figures, ...] = field(default=())

    @property
    def device(self) -> str:
        """Where it ran, marked where that is simulated."""
        return f"{self.hardware.device}{MARK if self.simulated else ''}"

    def with_reports(self, *reports: Any) -> Logbook:
        """Return the logbook with what reports found since it was written, so that power and heat are those from before.

        Args:
            reports: What ``nb.sweep()`` and the others returned.

        Raises:
            ConfigurationError: For what is no report, and for a report of another device, which the logbook tells nothing of.
        """
        told = told_by(reports)
        check_device(told, self.hardware.device)
        return replace(
            self,
            run=joined(told, self.run),
            figures=(*self.figures, *told),
            simulated=self.simulated or any(one.simulated for one in told),
        )

    def diff(self, other: Any) -> LogbookDiff:
        """Compare with another logbook: first whether their figures may be compared at all.

        Args:
            other: The second one, a logbook too.

        Raises:
            ConfigurationError: For what is no logbook.
        """
        from .differences import LogbookDiff

        if not isinstance(other, Logbook):
            what = f"{type(other).__name__} is no logbook to compare with."
            raise ConfigurationError(what, "Pass what nb.logbook() or Logbook.read() returned.")
        return LogbookDiff(self, other)

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write it in one step into a file, ``.json`` to be read again or ``.md`` to be read by people; return its path.

        A logbook that is there already is replaced.

        Raises:
            ConfigurationError: For another ending, for a file that is no logbook, and where it cannot be written.
        """
        from .files import save

        return save(self, path)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Logbook:
        """Return the logbook of a ``.json`` file.

        Raises:
            ConfigurationError: For a file that is no logbook, is cut off, or was written by a newer version.
        """
        from .files import read

        return read(path)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists, strings and numbers, as the published schema says."""
        return dict(to_plain(self))

    def markdown(self) -> str:
        """Return everything as Markdown."""
        from .markdown import to_markdown

        return to_markdown(self)

    def report(self) -> Report:
        """Return what it is of; all that it holds stands in the HTML alone, because it differs from computer to computer."""
        sentences = [*([NOTE] if self.simulated else []), ALL_OF_IT]
        return Report(
            f"Logbook on {self.device}",
            (*sentences, *([WARNING] if self.hypotheses else [])),
            (Table("", ("of", "what"), tuple(_summary(self))),),
            figures=tuple(section_tables(self.to_dict())),
        )


YES_NO = {True: "yes", False: "no"}

ALL_OF_IT = "Everything is in .markdown(), .to_dict() and .save('logbook.json')."


def _summary(book: Logbook) -> Iterator[tuple[str, str]]:
    """Yield what the person said of it, and nothing that differs from computer to computer."""
    run, model = book.run, book.model
    length = f" of {counted(run.length, 'token')}" if run.length else ""
    yield "model", f"{model.name}{f' in {model.dtype}' if model.dtype else ''}" if model else "not said"
    yield (
        "dataset",
        counted(book.dataset.items, "text" if book.dataset.kind == "texts" else "file") if book.dataset else "not said",
    )
    yield "batch", f"{counted(run.batch_size, 'row')}{length}" if run.batch_size else "not said"
    yield "reports", ", ".join(dict.fromkeys(one.report for one in book.figures)) or "none"
    if book.hypotheses:
        yield "ruled out", counted(len(book.hypotheses), "hypothesis", "hypotheses")


def section_tables(plain: Mapping[str, Any]) -> Iterator[Table]:
    """Yield each section that holds something as a table; what is not known is left out of it.

    Args:
        plain: A logbook as mappings, or a part of one.

    Example:
        >>> [table.rows for table in section_tables({"code": {"commit": None, "changed": 2}})]
        [(('changed', '2'),)]
    """
    for name, caption in SECTIONS.items():
        rows = tuple(_rows(plain.get(name)))
        if rows:
            yield Table(caption, ("what", "value"), rows)


def _rows(section: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield a row for each value that is known, however deep it stands."""
    if isinstance(section, Mapping):
        items: Any = ((_name(prefix, name), one) for name, one in section.items())
    elif isinstance(section, Sequence) and not isinstance(section, str):
        items = ((_name(prefix, str(number)), one) for number, one in enumerate(section, 1))
    else:
        if section is not None:
            yield prefix, YES_NO[section] if isinstance(section, bool) else str(section)
        return
    for name, one in items:
        yield from _rows(one, name)


def _name(prefix: str, name: str) -> str:
    return f"{prefix}: {name}" if prefix else name
