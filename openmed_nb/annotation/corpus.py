"""Many texts -> Annotations: any kind of series of texts, a progress bar, and nothing lost when a run ends early."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..devices.simulation import shown_device
from ..errors import ConfigurationError, Interrupted, OpenMedError, shorten
from .annotations import SHOWN_TEXTS, Annotations
from .answers import Answered, Answers
from .fingerprints import fingerprint_of, settings_of
from .progress import progress_bar
from .references import Reference
from .results import NoFile, results
from .resume import ResultsFile, answers_in

if TYPE_CHECKING:
    from .pipeline import AnnotationPipeline
    from .stream import Answer

Resume = str | os.PathLike[str] | Annotations | None
"""A file of results, or what an interrupted run has left in memory."""

ON_ERROR = ("raise", "record")


@dataclass(frozen=True)
class Source:
    """What answers a stream of texts: a pipeline of this process, or the workers of a cluster.

    Attributes:
        answers: Takes texts and the number of the first, and yields the answers to them chunk by chunk, in their order.
        settings: What tells a run from another, the model and everything that changes its answers.
        device: Where it runs.
    """

    answers: Callable[[Iterable[Any], int], Iterator[list[Answer]]]
    settings: Mapping[str, Any]
    device: str

    @classmethod
    def of(cls, pipe: AnnotationPipeline, batch_tokens: int | None = None) -> Source:
        """Return a pipeline as what answers, with so many tokens at once."""
        annotator = pipe.own_annotator(batch_tokens)
        return cls(annotator.answers, settings_of(pipe, annotator), shown_device(str(pipe.device)))


class NothingLost:
    """Lets what ends a run before its first text carry what an earlier run has left, as what ends it later does.

    It is not a generator, for the reason of :meth:`openmed_nb.activity.Listeners.told_after`.

    Args:
        resume: Where the earlier run's answers are.
    """

    def __init__(self, resume: Resume) -> None:
        empty = Annotations(Answers(), (), "no model", "no device")
        self.earlier = resume if isinstance(resume, Annotations) else empty
        self.file = str(resume) if isinstance(resume, (str, os.PathLike)) else ""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted):
            done = answers_in(self.file) if self.file else len(self.earlier)
            raise Interrupted(done, self.earlier, self.file) from None
        if isinstance(error, Exception) and "annotations" not in vars(error):
            attach(error, self.earlier)


def attach(error: Exception, done: Annotations) -> None:
    """Let an error carry what was done, in its attribute ``annotations``.

    A person's own class may refuse new attributes (a frozen dataclass) or have something else of that name, so the value
    goes past what the class says; ``vars(error)["annotations"]`` always has it.
    """
    vars(error)["annotations"] = done


def check_running(resume: Any = None, on_error: Any = "raise", **_others: Any) -> None:
    """Refuse options of :func:`annotate_from` that cannot be used, before a model is loaded.

    Raises:
        ConfigurationError: For what is no result of an earlier run, and for another way to treat errors.
    """
    if not isinstance(on_error, str) or on_error not in ON_ERROR:
        raise ConfigurationError(f"on_error cannot be {shorten(repr(on_error))}.", f"Use one of {', '.join(ON_ERROR)}.")
    if resume is not None and not isinstance(resume, (str, os.PathLike, Annotations)):
        what = f"resume cannot be {type(resume).__name__}."
        raise ConfigurationError(what, "Pass the name of a file, or the annotations of an interrupted run.")


def annotate_from(  # noqa: PLR0913 - the options of openmed_nb.annotate
    source: Source,
    texts: Iterable[Any],
    model: str,
    *,
    progress: bool = True,
    resume: Resume = None,
    on_error: str = "raise",
    show_text: bool = True,
) -> Annotations:
    """Return what a source of answers says of many texts; see :func:`openmed_nb.annotate`.

    Whatever ends a run early carries what was done until then in its attribute ``annotations``.
    """
    settings, device = source.settings, source.device
    reading = Reading(stream_of(texts), settings["delimiter"] or "")
    answers = Answers("entity" if settings["aggregation_strategy"] == "none" else "entity_group")
    total = length_of(texts)

    def done() -> Annotations:
        if isinstance(resume, Annotations) and len(resume) > len(answers):
            return resume  # It ended before all of the earlier answers were taken over.
        return Annotations(answers, tuple(reading.first_texts[: len(answers)]), model, device, show_text, settings)

    with progress_bar(total, progress, device) as bar, results(resume, settings) as file:
        run = CorpusRun(reading, answers, file, bar)
        try:
            run.replay(file.earlier())
            run.go_on(source, on_error)
        except KeyboardInterrupt:
            raise Interrupted(max(len(done()), file.answered), done(), file.name) from None
        except Exception as error:
            attach(error, done())
            raise
    return done()


def checked_pipeline(pipe: Any, arguments: Mapping[str, Any]) -> AnnotationPipeline:
    """Return a pipeline that was passed in the place of a model's name.

    Raises:
        ConfigurationError: For anything but a pipeline of ours, and for arguments that would build another.
    """
    from .pipeline import AnnotationPipeline

    if not isinstance(pipe, AnnotationPipeline):
        what = f"{type(pipe).__name__} is no model to annotate with."
        remedy = "Pass the name of a model, or a pipeline of load_pipeline(); a client of a cluster is client=."
        raise ConfigurationError(what, remedy)
    if arguments:
        what = f"A pipeline that is built already takes no {', '.join(sorted(arguments))}."
        raise ConfigurationError(what, "Pass it to load_pipeline() instead.")
    return pipe


def stream_of(texts: Any) -> Iterator[Any]:
    """Return an iterator over texts.

    Raises:
        ConfigurationError: For what is no series of texts, or would be read as something else.

    Example:
        >>> stream_of("asthma")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: str is no series of texts. Pass a list, a generator or a column, such as [text].
    """
    check_series(texts)
    try:
        return iter(texts)
    except TypeError:
        raise no_series(texts) from None


def check_series(texts: Any) -> None:
    """Refuse what is no series of texts, without reading it.

    Raises:
        ConfigurationError: For a table, a text, a mapping, and what cannot be gone through.
    """
    if is_table(texts):
        what = f"{type(texts).__name__} is a table."
        raise ConfigurationError(what, "Pass its column of texts, such as table['text'].")
    # Some series have no __iter__, transformers' KeyDataset among them.
    series = hasattr(type(texts), "__iter__") or hasattr(type(texts), "__getitem__")
    if not series or isinstance(texts, (str, bytes, Mapping)) or type(texts).__module__ == "dask.delayed":
        raise no_series(texts)


def no_series(texts: Any) -> ConfigurationError:
    """Return the error for what is no series of texts."""
    what = f"{type(texts).__name__} is no series of texts."
    return ConfigurationError(what, "Pass a list, a generator or a column, such as [text].")


def length_of(texts: Any) -> int | None:
    """Return how many texts there are, where that is known; it is only shown, so a series that cannot tell may fail."""
    try:
        return len(texts) if isinstance(texts, Sized) else None
    except Exception:  # noqa: BLE001 - a person's own __len__ may raise anything, or return what is no length
        return None


def is_table(texts: Any) -> bool:
    """Tell whether something has columns; what is only computed later can have anything, but no number of dimensions."""
    dimensions = getattr(texts, "ndim", 2)
    named = hasattr(texts, "columns") or hasattr(texts, "column_names")
    return named and isinstance(dimensions, int) and dimensions > 1


@dataclass
class Reading(Iterator[Any]):
    """The texts of a run, as they are pulled.

    Attributes:
        stream: The texts that were not pulled yet.
        delimiter: What joins the words of a text that is split.
        first_texts: The first of all, to be shown.
        pulled: The fingerprints of those that have no answer yet.
    """

    stream: Iterator[Any]
    delimiter: str = ""
    first_texts: list[str] = field(default_factory=list)
    pulled: deque[int] = field(default_factory=deque)

    def __next__(self) -> Any:
        text = next(self.stream)
        self.pulled.append(fingerprint_of(text))
        if len(self.first_texts) < SHOWN_TEXTS and not isinstance(text, Reference):
            self.first_texts.append(self.shown(text))
        return text

    def shown(self, text: Any) -> str:
        """Return a text as it can be shown, empty for what is none."""
        words = text if isinstance(text, list) else [text]
        return self.delimiter.join(word for word in words if isinstance(word, str))


@dataclass(frozen=True)
class CorpusRun:
    """A run over many texts.

    Attributes:
        reading: The texts.
        answers: The answers so far.
        file: The file that they are written to.
        bar: The progress bar.
    """

    reading: Reading
    answers: Answers
    file: ResultsFile | NoFile
    bar: Any

    def replay(self, earlier: Iterable[Answered]) -> None:
        """Take over the answers of an earlier run, text by text.

        Raises:
            ConfigurationError: Where the texts are not those of that run.
        """
        pulled = self.reading.pulled
        for answered in earlier:
            remedy = "Pass the same texts in the same order, or resume from something else."
            next(self.reading, None)
            if not pulled:
                what = f"The earlier run has answers for more than these {len(self.answers)} texts."
                raise ConfigurationError(what, remedy)
            if pulled.popleft() != answered[0]:
                what = f"Text {len(self.answers)} is not the one that the earlier run has an answer for."
                raise ConfigurationError(what, remedy)
            self.add(answered)
        self.bar.initial = self.bar.n  # What was done before is no part of the speed.

    def go_on(self, source: Source, on_error: str) -> None:
        """Annotate the texts that are left; with ``raise``, up to the first that cannot be."""
        for chunk in source.answers(self.reading, len(self.answers)):
            failures = [answer for answer in chunk if isinstance(answer, OpenMedError)]
            stop = chunk.index(failures[0]) if failures and on_error == "raise" else len(chunk)
            told = [str(answer) if isinstance(answer, OpenMedError) else answer for answer in chunk[:stop]]
            answered = [(self.reading.pulled.popleft(), answer) for answer in told]
            self.file.append(answered)
            for one in answered:
                self.add(one)
            if stop < len(chunk):
                raise failures[0]

    def add(self, answered: Answered) -> None:
        """Keep the answer to the next text."""
        self.answers.add(*answered)
        self.bar.update(1)
