"""Annotate one text, or many: progress, a file to resume from, errors, interrupts.

It stands above ``distributed``, because a run over many texts goes to the workers of a cluster, or here.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from ._events.activity import ProgressEvent
from ._utils.text import model_label, short_type_name
from ._utils.validation import check_bool, check_choice, check_optional_integer, invalid_type
from .annotation.loading import create_pipeline
from .annotation.masking import MAX_DISPLAYED_TEXTS
from .annotation.references import (
    BLANK,
    MISSING,
    TextReference,
    check_iterable,
    effective_length,
    index_of,
    iter_texts,
    text_fingerprint,
    warn_if_file_name,
)
from .annotation.results import AnnotatedText, Annotations, FingerprintedResult, ResultStore
from .annotation.resume import ResultsFile, changed_settings, count_results, run_settings
from .devices.machine import format_device
from .errors import ConfigurationError, RunInterrupted
from .models.config import OpenMedConfig
from .models.registry import is_model_name
from .session import SESSION, Session

if TYPE_CHECKING:
    from .annotation.pipeline import AnnotationPipeline
    from .annotation.stream import AnnotationSource


@overload
def annotate(texts: str, model: Any = None, **options: Any) -> AnnotatedText: ...
@overload
def annotate(texts: Any, model: Any = None, **options: Any) -> Annotations: ...
def annotate(  # noqa: PLR0913 - each is one thing that a person may want to say
    texts: Any,
    model: Any = None,
    *,
    client: Any = None,
    batch_tokens: int | None = None,
    progress: bool = True,
    resume: Any = None,
    on_error: str = "raise",
    show_text: bool = True,
    **arguments: Any,
) -> Annotations | AnnotatedText:
    """Return the entities that a model finds in one text, or in many, near the speed of the bare model.

    Args:
        texts: One text as a string, or many: a list, a generator, a pandas Series, a column of a ``datasets.Dataset``:
            anything that gives strings one by one. They are read as they are needed; kept are the first texts, what all of
            them came in (no copy), 16 bytes for each text and 24 for each entity, and each word once. Or the
            ``pathlib.Path`` of files that are a text each, with ``*``, ``?``, ``[a-z]`` and ``**`` as in ``Path.glob``, or a
            list of such paths. A part of a path that exists under its own name is no pattern. Files come in the order of
            ``sorted(paths)``, each once, without hidden ones; ``sources`` has the file of each text. Or a column of
            ``dask.dataframe``, of which a partition is read at a time, after all were read once to count their rows; not as
            it is after ``persist()`` on a cluster. Dask may have changed what is not a text in it: it makes ``"5"`` of a 5
            (its setting ``dataframe.convert-string``). A missing value (``None``, NaN, ``pd.NA`` and the like) has no
            entities, and its number is in ``missing``.
        model: An alias, a hub id, a bare name, a folder, ``None`` for the bundled model, or a pipeline of
            :func:`load_pipeline`.
        client: A ``dask.distributed.Client``: the workers of its cluster do it, each with the model on the best device of
            its computer; see :func:`openmed_nb.cluster`. They then read files, and columns of ``dask.dataframe``, themselves.
            A model is named, and a folder must be there on every computer.
        batch_tokens: How many tokens run at once; ``None`` takes what :func:`openmed_nb.sweep` or ``pipe.calibrate()`` found
            for this model on this computer, else what suits the device.
        progress: Whether to show a line with a bar and texts per second, for what takes more than half a second.
        resume: A file that answers are written to as they come, some hundred texts at a time, one line of JSON for each.
            If it is there already, the run goes on after its last text, also when the process was killed; what was
            under way then is read again, and so is a text that had an error, or was missing and is there now. Or the
            ``annotations`` that an interrupted run has left.
        on_error: ``"raise"`` stops at a text that cannot be read or does not fit in memory; ``"record"`` goes on and notes
            it in ``errors``.
        show_text: Whether texts, and the words in them, are part of what is shown.
        arguments: Those of :func:`load_pipeline`, such as ``device`` or ``aggregation_strategy``.

    Returns:
        For many texts :class:`Annotations`, a sequence with one list of entities for each text, in their order. For a single
        string :class:`AnnotatedText`, the sequence of its entities.

    Raises:
        InvalidTextError: For a text that cannot be read, with ``on_error="raise"``.
        DeviceUnavailableError: For a text that does not fit in memory alone, and if the device fails.
        ConfigurationError: For what is not a series of texts, an option that does not exist, or a file of another run.
        ClusterError: If workers would give other answers than others, if none is left, and for a text that ends
            every worker that reads it, with ``on_error="raise"``.
        Interrupted: If the run was stopped, a ``KeyboardInterrupt``. Every error has an attribute ``annotations``
            with what was done until then.

    Example:
        >>> found = annotate(["She has asthma.", "No complaints."], "bundled_small", device="cpu")
        >>> [[entity["word"] for entity in entities] for entities in found]
        [['asthma'], []]
        >>> [entity["word"] for entity in annotate("She has asthma.", "bundled_small", device="cpu")]
        ['asthma']
    """
    # All is checked before a model is loaded.
    is_single = isinstance(texts, str)
    check_choice("on_error", on_error, ("raise", "record"))
    check_bool("show_text", show_text)
    batch_tokens = check_optional_integer("batch_tokens", batch_tokens)
    if resume is not None and not isinstance(resume, (str, os.PathLike, Annotations)):
        what = f"resume cannot be {short_type_name(resume)}."
        raise ConfigurationError(what, "Pass the name of a file, or the annotations of an interrupted run.")
    path = resume if isinstance(resume, (str, os.PathLike)) else None
    earlier = resume if isinstance(resume, Annotations) else Annotations(ResultStore(), (), "no model", "no device")
    done = earlier
    collector: _Collector | None = None
    with SESSION.operation(progress):
        try:
            texts = [texts] if is_single else texts
            if client is None:
                name, texts, source = local_source(texts, model, arguments, batch_tokens)
            else:
                from .distributed.stream import cluster_source

                SESSION.notify(ProgressEvent("Asking", "the workers"))
                name, texts, source = cluster_source(client, texts, model, arguments, batch_tokens)
            collector = _Collector(_Inputs(texts, source.settings["delimiter"]), source, name)
            with contextlib.nullcontext() if path is None else ResultsFile(path, source.settings) as file:
                collector.replay(file or earlier)
                collector.run(on_error, file)
            annotations = collector.annotations(show_text)
            return annotations.show(0) if is_single else annotations
        except (KeyboardInterrupt, Exception) as error:
            if collector and len(collector.answers) >= len(earlier):  # It may end while earlier answers are taken over.
                done = collector.annotations(show_text)
            if isinstance(error, KeyboardInterrupt):
                count = len(done) if path is None else max(len(done), count_results(path))
                left = replace(done, unfinished=True)
                raise RunInterrupted(count, left, "" if path is None else str(path)) from None
            # A person's own class may refuse new attributes (a frozen dataclass) or have something else of that name, so
            # the value goes past what the class says; ``vars(error)["annotations"]`` always has it.
            vars(error)["annotations"] = replace(done, unfinished=True)
            raise


def annotate_text(  # noqa: PLR0913, PLR0917 - what the faces ask for
    session: Session,
    text: str,
    name: str | None = None,
    device: str | None = None,
    strategy: str | None = None,
    show_text: bool = True,
) -> AnnotatedText:
    """Return the entities that a model finds in one text; ``show_text`` tells whether the result may show it."""
    with session.operation():
        from .annotation.stream import check_text, unwrap_result

        check_text(text)
        pipe = create_pipeline(session, name, OpenMedConfig(), aggregation_strategy=strategy, device=device)
        model = name or "bundled"
        session.notify(ProgressEvent("Annotating", model_label(model)))
        annotator = pipe.default_annotator()
        (answers,) = annotator.annotate([text])
        (answer,) = answers.outcomes()
        entities = tuple(unwrap_result(answer))
        dropped = answers.dropped.get(0, ())
        return AnnotatedText(
            text,
            entities,
            model,
            format_device(str(pipe.device)),
            show_text,
            dropped=dropped,
            known_labels=annotator.decoder.entity_labels,
        )


def local_source(
    texts: Any, model: Any, arguments: Mapping[str, Any], batch_tokens: int | None
) -> tuple[str, Any, AnnotationSource]:
    """Return the name of a model, the texts to read, and what answers them here."""
    from .annotation.stream import AnnotationSource
    from .distributed.columns import to_references

    found = to_references(texts)
    check_iterable(found)
    if is_model_name(model):
        name = "bundled" if model is None else str(model)
        pipe = create_pipeline(SESSION, name, OpenMedConfig(), **arguments)
    else:
        pipe, name = validate_pipeline(model, arguments), type(model.model).__name__
    annotator = pipe.default_annotator(batch_tokens)
    shapes = annotator.network.shapes if annotator.budget.limit_shapes else None
    at_hand = isinstance(found, Sequence)

    def answers(
        texts: Iterator[Any], first: int, tell: Callable[[int, float], None] | None = None
    ) -> Iterator[ResultStore]:
        found: Iterator[ResultStore] = annotator.annotate(texts, first, at_hand, tell)
        return found

    labels = annotator.decoder.entity_labels
    return (
        name,
        found,
        AnnotationSource(answers, run_settings(pipe, annotator), format_device(str(pipe.device)), shapes, labels),
    )


def validate_pipeline(pipe: Any, arguments: Mapping[str, Any]) -> AnnotationPipeline:
    """Return a pipeline that was passed in the place of a model's name."""
    from .annotation.pipeline import AnnotationPipeline

    if not isinstance(pipe, AnnotationPipeline):
        remedy = "Pass the name of a model, or a pipeline of load_pipeline(); a client of a cluster is client=."
        raise invalid_type("model", pipe, remedy)
    if arguments:
        what = f"A pipeline that is built cannot take {', '.join(sorted(arguments))}."
        raise ConfigurationError(what, "Pass it to load_pipeline() instead.")
    return pipe


class _Pending(NamedTuple):
    """What is remembered of a text without an answer."""

    fingerprint: int
    size: int  # about how many characters it has


class _Inputs(Iterator[Any]):
    """The texts of a run, read one by one; what has no answer yet is remembered by its fingerprint."""

    def __init__(self, texts: Any, delimiter: str | None) -> None:
        self.texts = texts
        self.first_texts: list[str] = []  # to be shown
        self.pending: deque[_Pending] = deque()
        self.count = length_or_none(texts)
        self._stream = iter_texts(texts)
        self._delimiter = delimiter
        self._read = 0
        self._has_warned = False

    def __next__(self) -> Any:
        text = next(self._stream)
        self._read += 1
        fingerprint = text_fingerprint(text)
        if fingerprint == MISSING:  # A model reads nothing in its place; it is known by its fingerprint.
            text = "" if self._delimiter is None else []
        self.pending.append(_Pending(fingerprint, effective_length(text)))
        if len(self.first_texts) < MAX_DISPLAYED_TEXTS and not isinstance(text, TextReference):
            if isinstance(text, str) and not self._has_warned:
                self._has_warned = warn_if_file_name(text, len(self.first_texts))
            words = text if isinstance(text, list) else [text]
            self.first_texts.append((self._delimiter or "").join(word for word in words if isinstance(word, str)))
        return text

    def __length_hint__(self) -> int:
        return NotImplemented if self.count is None else max(0, self.count - self._read)

    def take(self, count: int) -> list[_Pending]:
        """Return what is remembered of the next texts without an answer, and forget it."""
        return [self.pending.popleft() for _ in range(count)]


class _Collector:
    """The answers to the texts of a run: those of an earlier run, then those that come, then those that are read again."""

    def __init__(self, inputs: _Inputs, source: AnnotationSource, model: str) -> None:
        self.inputs = inputs
        self.source = source
        self.model = model
        self.answers = ResultStore("entity" if source.settings["aggregation_strategy"] == "none" else "entity_group")
        # The fingerprints and texts, by number, of which an earlier run has no result.
        self._again: dict[int, tuple[int, Any]] = {}
        self._size = known_size(inputs.texts)
        self._size_done = 0

    def replay(self, earlier: ResultsFile | Annotations) -> None:
        """Take over the answers of an earlier run over the same texts."""
        remedy = "Pass the same texts in the same order, or resume from something else."
        if isinstance(earlier, Annotations):
            # Those that were filtered lack entities, and those that were pickled without texts lack words.
            other = changed_settings({**self.source.settings, "only": None, "words": None}, earlier.settings)
            if other and earlier:  # Without a text, it is of no run.
                what = f"The annotations are of a run with other settings ({other})."
                raise ConfigurationError(what, "Repeat the call as it was, or leave resume out.")
        answered = earlier.results.items() if isinstance(earlier, Annotations) else earlier.completed_results()
        for before, answer, dropped in answered:
            number = len(self.answers)
            text = next(self.inputs, None)
            if not self.inputs.pending:
                what = f"The earlier run has answers for more than these {number} texts."
                raise ConfigurationError(what, remedy)
            (read,) = self.inputs.take(1)
            has_failed = isinstance(answer, str)
            was_blank = before in BLANK
            if read.fingerprint != before and not (has_failed or was_blank):
                what = f"Text {number} is not the one that the earlier run has an answer for."
                raise ConfigurationError(what, remedy)
            # It is read again only after all results were found to be of the same texts: otherwise, another series of texts
            # would leave a result in the file.
            if has_failed or (was_blank and read.fingerprint not in BLANK):
                self._again[number] = read.fingerprint, text
                self.answers.add(before, answer)
            else:
                self._size_done += read.size
                self.answers.add(read.fingerprint, answer, dropped)

    def run(self, on_error: str, file: ResultsFile | None) -> None:
        """Collect the answers to the texts that are left; with ``raise``, up to the first that has none."""

        def tell_within(count: int, share: float) -> None:
            """Report how far a chunk of so many texts is."""
            size = sum(pending.size for pending in islice(self.inputs.pending, count))
            self._tell(size_within=int(share * size))

        self._tell()
        for chunk in self.source.annotate(self.inputs, len(self.answers), tell_within):
            count = _answered_count(chunk, on_error)
            pending = self.inputs.take(count)
            fingerprints = [text.fingerprint for text in pending]
            if file:
                file.append(chunk.items(fingerprints))
            self.answers.extend(fingerprints, chunk)
            self._size_done += sum(text.size for text in pending)
            self._tell()
            if count < len(chunk):
                raise chunk.errors[count]
        self._run_again(on_error, file)

    def _run_again(self, on_error: str, file: ResultsFile | None) -> None:
        """Annotate the texts of which an earlier run has no result, after all others: they may fail, or end workers, again."""
        results: dict[int, FingerprintedResult] = {}
        try:
            for numbers in _consecutive(self._again):
                left = deque(numbers)
                for chunk in self.source.annotate([self._again[number][1] for number in numbers], numbers[0]):
                    count = _answered_count(chunk, on_error)
                    done = [left.popleft() for _ in range(count)]
                    answered = dict(zip(done, chunk.items([self._again[number][0] for number in done]), strict=True))
                    results.update(answered)
                    new = {number: result for number, result in answered.items() if not isinstance(result.answer, str)}
                    if file and new:
                        file.append(new.values(), new)
                    self._size_done += sum(effective_length(self._again[number][1]) for number in done)
                    self._tell(again=len(results))
                    if count < len(chunk):
                        raise chunk.errors[count]
        finally:
            self.answers = self.answers.replaced(results)
            self._again.clear()

    def _tell(self, again: int = 0, size_within: int = 0) -> None:
        """Report how many texts have an answer, and about how many characters these have."""
        count = len(self.answers) - len(self._again) + again
        name = f"{model_label(self.model)} on {self.source.device}"
        size = self._size_done + size_within
        SESSION.notify(ProgressEvent("Annotating", name, count, self.inputs.count, "text", size, self._size))

    def annotations(self, show_text: bool) -> Annotations:
        """Return what was collected so far."""
        texts = self.inputs.texts
        shapes = self.source.shapes
        return Annotations(
            self.answers,
            tuple(self.inputs.first_texts[: len(self.answers)]),
            self.model,
            self.source.device,
            show_text,
            self.source.settings,
            None if shapes is None else len(shapes),
            None if isinstance(texts, Iterator) else texts,
            row_index=index_of(texts),
            known_labels=self.source.known_labels,
        )


def _answered_count(chunk: ResultStore, on_error: str) -> int:
    """Return how many answers of a chunk count: all, or those before the first error that is to be raised."""
    return min(chunk.errors, default=len(chunk)) if on_error == "raise" else len(chunk)


def _consecutive(numbers: Iterable[int]) -> list[list[int]]:
    """Return numbers in runs of consecutive ones, because errors count texts from the first."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def known_size(texts: Any) -> int | None:
    """Return how many characters texts have, ``None`` where to ask would read them twice."""
    if type(texts) not in {list, tuple} and not type(texts).__module__.startswith("pandas."):
        return None
    return sum(map(effective_length, texts))


def length_or_none(texts: Any) -> int | None:
    """Return how many texts there are, ``None`` if that is not known before they are read."""
    try:
        return len(texts) if isinstance(texts, Sized) else None
    except Exception:  # noqa: BLE001 - a person's own __len__ may raise anything, or return what is not a length
        return None
