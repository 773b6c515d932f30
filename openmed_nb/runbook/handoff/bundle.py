"""A bundle as a value: what was handed over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...devices.simulation import NOTE
from ...interface.display import Report, Shown, Table
from ...quantities import counted, in_bytes
from ..logbook.logbook import Logbook
from ..logbook.plain_values import to_plain
from .documents import WHAT, model_words, texts_words
from .golden import Golden
from .trial import Trial


@dataclass(frozen=True, repr=False)
class Handoff(Shown):
    """A folder that another computer can run.

    Attributes:
        folder: Where it is.
        golden: Its golden run.
        logbook: What the golden run was measured with, and its figures.
        trial: What was measured.
        files: Every file with its size in bytes.
    """

    folder: Path
    golden: Golden
    logbook: Logbook
    trial: Trial
    files: tuple[tuple[str, int], ...]

    @property
    def simulated(self) -> bool:
        """Whether the golden run was on a simulated device."""
        return self.logbook.simulated

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists, strings and numbers, ready for JSON."""
        return {
            "folder": str(self.folder),
            "simulated": self.simulated,
            "golden": to_plain(self.golden),
            "trial": self.trial.to_dict(),
            "files": dict(self.files),
        }

    def report(self) -> Report:
        """Return what is in it and how it is run; sizes and times stand in the HTML alone."""
        golden, there = self.golden, {top(name) for name, _ in self.files}
        entities = counted(sum(map(len, golden.entities)), "entity", "entities")
        found = f"The golden run found {entities} in {counted(len(golden.entities), 'text')} on {self.logbook.device}."
        sentences = [found, f"Memory over {golden.rounds} rounds: {self.trial.curve.verdict}.", model_words(golden)]
        sentences += [texts_words(golden), "Its README.md says how it is run."]
        sizes = tuple((name, in_bytes(size)) for name, size in self.files)
        return Report(
            f"Handoff bundle {self.folder.name!r}",
            (*([NOTE] if self.simulated else []), *(one.replace("**", "").replace("`", "") for one in sentences)),
            (Table("", ("file", "what it is"), tuple((name, what) for name, what in WHAT.items() if name in there)),),
            figures=(Table("Sizes", ("file", "size"), sizes), *self.trial.report().figures),
        )


def top(name: str) -> str:
    """Return the file or the folder of a bundle in which a file is.

    Example:
        >>> top("model/config.json"), top("run.sh")
        ('model/', 'run.sh')
    """
    first, slash, _ = name.partition("/")
    return first + slash
