"""A run over many texts: progress, a file to resume from, errors, interrupts.

A file of results that an interrupted run goes on from: a header, then one line of JSON for each text in order.

A process can be killed in the middle of a line; that line is cut off when the run goes on, and its text is read again. Each
line ends with a checksum of what stands before it, so that a damaged file is an error and not another answer.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from ..devices.simulated import shown_device
from ..errors import ConfigurationError, Interrupted, OpenMedError, cause, given_path, shorten
from .fingerprints import fingerprint_of, settings_of
from .references import Reference
from .results import SHOWN_TEXTS, Annotations
from .stream import Answered, Answers, is_entity

if TYPE_CHECKING:
    from .pipeline import AnnotationPipeline
    from .stream import Answer


BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}]"
COUNT = "{desc}: {n_fmt} texts [{elapsed}, {rate_noinv_fmt}]"


def progress_bar(total: int | None, shown: bool, device: str) -> Any:
    """Return a bar with texts per second, in the form that the front end can show; none for what takes under a second."""
    from tqdm.auto import tqdm

    form = COUNT if total is None else BAR
    return tqdm(total=total, unit=" texts", desc=f"annotating on {device}", disable=not shown, delay=1, bar_format=form)


FORMAT = "openmed_nb annotations, 2"
FORMAT_WITHOUT_CHECKSUMS = "openmed_nb annotations, 1"

CHECKSUM = re.compile(rb', "checksum": "([0-9a-f]{8})"\}\n')
CHECKSUM_LENGTH = len(b', "checksum": "01234567"}\n')

LONGEST_HEADER = 2**20
"""A file without a line end within so many bytes is no file of results."""


class ResultsFile:
    """A file of results, locked while it is open.

    Args:
        path: Where it is; made where it is not there.
        settings: What tells this run from another: the model and everything that changes its answers.

    Raises:
        ConfigurationError: Where it cannot be written, is of another run, is damaged, or another process writes it.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        # One file has one lock, however its name is spelled.
        self.path = Path(os.path.realpath(given_path(path, "resume")))
        self.name = str(path)
        self.settings = settings
        self.header = line_of({"format": FORMAT, **settings})
        self._file: BinaryIO = io.BytesIO()  # Until the real one is open.
        self._checksums = True

    @property
    def answered(self) -> int:
        """How many texts have their answer in the file."""
        return answers_in(self.path)

    def __enter__(self) -> ResultsFile:  # noqa: PYI034 - Self came with Python 3.11
        from filelock import FileLock, Timeout

        lock = Path(f"{self.path}.lock")
        if not self.path.parent.exists():
            raise self._unusable("is in a folder that does not exist", "Make the folder, or name another file.")
        if holds_data(lock):
            raise self._unusable(f"needs the name {lock.name!r}, which is a file of yours", "Name another file.")
        self._lock = FileLock(lock)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise self._unusable("is being written by another run", "Wait for it, or name another file.") from error
        except OSError as error:
            raise self._unusable(f"cannot be written: {cause(error)}", "Name a file in a folder of yours.") from error
        try:
            self.path.touch(mode=0o600)  # It will hold words of notes.
            self._file = self.path.open("r+b")
            self._check_header()
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                raise self._unusable(f"cannot be written: {cause(error)}", "Name another file.") from error
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._close()

    def earlier(self) -> Iterator[Answered]:
        """Yield the fingerprint and the answer of each text that is done; then the file is ready for the next."""
        for number in itertools.count(2):
            position = self._file.tell()
            line = self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(position)
                self._file.truncate()
                return
            yield self._read(line, number)

    def append(self, answers: Iterable[Answered]) -> None:
        """Write answers so that they survive whatever happens to the process next.

        Raises:
            ConfigurationError: Where they cannot be written, as on a full disk.
        """
        try:
            self._file.writelines(with_checksum(line_of(answer)) for answer in map(as_mapping, answers))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            remedy = "Make room for it, and run the same again: it goes on from there."
            raise self._unusable(f"cannot be written any further: {cause(error)}", remedy) from error

    def _check_header(self) -> None:
        line = self._file.readline(LONGEST_HEADER)
        if line != self.header and self.header.startswith(line):  # New, or killed while the header was written.
            self._file.seek(0)
            self._file.truncate()
            self._file.write(self.header)
            self._file.flush()
            return
        header = value_of(line)
        if not isinstance(header, dict) or header.get("format") not in {FORMAT, FORMAT_WITHOUT_CHECKSUMS}:
            raise self._unusable("holds something else than results", "Name another file.")
        self._checksums = header["format"] == FORMAT
        other = differences(self.settings, header)
        if other:
            raise self._unusable(f"is of a run with other settings ({other})", "Name another file, or delete this one.")

    def _read(self, line: bytes, number: int) -> Answered:
        try:
            answered = answer_in(value_of(line))
            if not checksum_is_right(line, required=self._checksums):
                raise ValueError("checksum")  # noqa: TRY301 - one error for every damage
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise self._unusable(f"is damaged in line {number}", "Delete the file from that line on.") from error
        return answered

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # What a full disk did not take was reported when it was written.
            self._file.close()
        with contextlib.suppress(OSError):  # Windows removes no file that is open; there the lock does it itself.
            Path(self._lock.lock_file).unlink()  # Before it is free: afterwards, it could be another process's.
        self._lock.release()

    def _unusable(self, what: str, remedy: str) -> ConfigurationError:
        return ConfigurationError(f"The file {str(self.path)!r} {what}.", remedy)


def answers_in(path: str | os.PathLike[str]) -> int:
    """Return how many texts have their answer in a file of results; 0 where it cannot be read."""
    try:
        with given_path(path, "resume").open("rb") as file:
            return max(0, sum(line.endswith(b"\n") for line in file) - 1)
    except (OSError, ConfigurationError):
        return 0


def line_of(value: Mapping[str, Any]) -> bytes:
    """Return a value as a line of JSON."""
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def value_of(line: bytes) -> Any:
    """Return the value of a line of JSON, ``None`` for anything else."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def as_mapping(answered: Answered) -> dict[str, Any]:
    """Return the answer to a text as a line of the file has it."""
    fingerprint, answer = answered
    return {"fingerprint": f"{fingerprint:016x}", "error" if isinstance(answer, str) else "entities": answer}


def answer_in(value: Any) -> Answered:
    """Return what a line of the file says, the reverse of :func:`as_mapping`.

    Raises:
        ValueError, TypeError, LookupError, ArithmeticError: Where it is not what :func:`as_mapping` returns.
    """
    answer = value["error"] if "error" in value else value["entities"]
    if not isinstance(answer, str) and not (isinstance(answer, list) and all(map(is_entity, answer))):
        raise TypeError(type(answer).__name__)
    fingerprint = int(value["fingerprint"], 16)
    Answers().add(fingerprint, answer)  # Its numbers have a size.
    return fingerprint, answer


def with_checksum(line: bytes) -> bytes:
    """Return a line of JSON with a checksum of what it holds as its last value."""
    body = line.removesuffix(b"}\n")
    return body + b', "checksum": "%08x"}\n' % zlib.crc32(body)


def checksum_is_right(line: bytes, *, required: bool) -> bool:
    r"""Tell whether a line has its checksum; files of the first format have none.

    Example:
        >>> line = with_checksum(b'{"entities": []}\n')
        >>> checksum_is_right(line, required=True), checksum_is_right(line.replace(b"[]", b"[1]"), required=False)
        (True, False)
    """
    body, end = line[:-CHECKSUM_LENGTH], CHECKSUM.fullmatch(line[-CHECKSUM_LENGTH:])
    return not required if end is None else int(end[1], 16) == zlib.crc32(body)


def differences(settings: Mapping[str, Any], earlier: Mapping[str, Any]) -> str:
    """Return the names of what an earlier run had otherwise; empty where its answers are as good as this one's.

    Example:
        >>> differences({"model": "a", "strategy": "first"}, {"model": "b", "strategy": "first"})
        'model'
    """
    return ", ".join(sorted(name for name in settings if earlier.get(name) != settings[name]))


def holds_data(path: Path) -> bool:
    """Tell whether there is a file with something in it; a lock is empty."""
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


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
