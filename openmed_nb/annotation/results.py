"""Where the answers of an earlier run come from, and where those of this one go: a file, or nowhere."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import ConfigurationError
from .answers import Answered, Answers
from .resume import ResultsFile, differences


class NoFile(contextlib.nullcontext[Any]):
    """Stands where results are not written; earlier ones may be in memory."""

    name = ""
    answered = 0

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._answers = answers

    def __enter__(self) -> NoFile:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def earlier(self) -> Iterator[Answered]:
        """Yield the fingerprint and the answer of each text that is done."""
        return self._answers.items()

    def append(self, answers: Iterable[Answered]) -> None:
        """Write nothing."""


def results(resume: Any, settings: Mapping[str, Any]) -> ResultsFile | NoFile:
    """Return what has the results of an earlier run, and takes those of this one.

    Raises:
        ConfigurationError: For what has none, and for those of a run with other settings.
    """
    if resume is None:
        return NoFile(Answers())
    if isinstance(resume, (str, os.PathLike)):
        return ResultsFile(resume, settings)
    if resume and (other := differences(settings, resume.settings)):  # Without a text, it is of no run.
        what = f"The annotations are of a run with other settings ({other})."
        raise ConfigurationError(what, "Repeat the call as it was, or leave resume out.")
    return NoFile(resume.answers)
