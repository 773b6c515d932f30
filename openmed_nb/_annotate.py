"""Annotation of one or many texts, with progress, resuming, error handling and interrupts.

This module is in the layer above ``distributed``, because a run uses the workers of a cluster or a local pipeline.
"""

from __future__ import annotations

import contextlib
import os
import re
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from ._events.activity import ProgressEvent
from ._utils.clock import current_time
from ._utils.text import describe_value, model_label, short_type_name
from ._utils.validation import check_bool, check_choice, check_optional_integer, invalid_type
from ._utils.warning import warn
from .annotation.context import CONTEXT_COLUMNS
from .annotation.inputs import NoteInputs, read_inputs
from .annotation.loading import create_pipeline
from .annotation.masking import MAX_DISPLAYED_TEXTS
from .annotation.matching import warn_if_not_unique
from .annotation.references import (
    MISSING_FINGERPRINT,
    TextReference,
    effective_length,
    file_name_remedy,
    iter_texts,
    text_fingerprint,
)
from .annotation.results import AnnotatedText, Annotations
from .annotation.resume import ResultsFile, changed_settings, run_settings
from .annotation.storage import FingerprintedResult, ResultStore
from .devices.machine import format_device
from .errors import ConfigurationError, RunInterrupted
from .models.config import PIPELINE_OPTIONS, OpenMedConfig
from .models.registry import is_model_name
from .session import SESSION, Session, check_options

if TYPE_CHECKING:
    from .annotation.pipeline import AnnotationPipeline
    from .annotation.stream import AnnotationSource


# Seconds between two events of a chunk in progress. A batch can take less.
MIN_EVENT_SECONDS = 0.1

# Whether a run stops at the first error or records errors.
OnError = Literal["raise", "record"]


@overload
def annotate(texts: str, model: object = None, **options: Any) -> AnnotatedText: ...
@overload
def annotate(texts: Any, model: object = None, **options: Any) -> Annotations: ...
def annotate(  # noqa: PLR0913 - independent options of a public function
    texts: Any,
    model: object = None,
    *,
    ids: object = None,
    text_column: str | None = None,
    id_column: str | None = None,
    client: object = None,
    batch_tokens: int | None = None,
    progress: bool = True,
    resume: object = None,
    on_error: OnError = "raise",
    show_text: bool = True,
    **arguments: Any,
) -> Annotations | AnnotatedText:
    """Annotate one or many texts near the speed of the bare model.

    Args:
        texts: One text as a string, or many texts. Texts are read on demand. The run stores the first texts, a reference to
            ``texts`` (no copy), 16 bytes per text, 32 bytes per entity, and each distinct word once. Many texts can be:

            - An iterable of strings, such as a list, a generator, a pandas Series or a column of a ``datasets.Dataset``.
            - A ``pathlib.Path`` or a list of paths of files that contain one text each. Paths support ``*``, ``?``, ``[a-z]`` and
              ``**`` as in ``Path.glob``, but a path component that exists is not treated as a pattern. Files have the order of
              ``sorted(paths)``, without repetitions and without hidden files. ``sources`` contains the file of each text.
            - A column of ``dask.dataframe``. It is read once to count its rows, and then one partition at a time. A column
              after ``persist()`` on a cluster is not supported. Dask may have converted values that are not strings: with its
              setting ``dataframe.convert-string``, it converts 5 to ``"5"``.
            - A mapping of ids to texts.
            - A DataFrame, an Arrow table or a ``datasets.Dataset``, with ``text_column``, or an iterator of tables, such as
              ``pandas.read_csv(path, chunksize=1000)``.

            A missing value (``None``, NaN, ``pd.NA`` and similar, or only white space) has no entities, and its index is in
            ``missing``.
        model: Alias, Hugging Face model id, model name or local directory, or a pipeline of :func:`load_pipeline`. If ``None``,
            use the bundled model.
        ids: One id per text, such as a note number; also ``"name"`` or ``"path"`` to use those of files. A Series of ids is aligned
            with the index of a Series of texts. The ids are in the results only: not in errors, logs, reports or the file of
            ``resume``. If ``None``, the index of a Series or the keys of a mapping.
        text_column: Name of the column with the texts, if ``texts`` is a table.
        id_column: Name of the column with the ids, if ``texts`` is a table.
        client: A ``dask.distributed.Client``. If specified, the workers of its cluster annotate the texts, each with the model
            on the best device of its host; see :func:`openmed_nb.cluster`. The workers read files and columns of
            ``dask.dataframe`` themselves. The model must be specified by name, and a local directory must exist on every host.
        batch_tokens: Maximum number of tokens per batch. If ``None``, use the value that :func:`openmed_nb.sweep` measured for
            this model on this computer, or the device default.
        progress: Whether to display a line of progress if it takes longer than half a second.
        resume: ``.jsonl`` file to which results are written, a few hundred texts at a time, one line of JSON per text. If it exists, the
            run takes the results of its texts from it, in any order, and processes the others, even if the process was killed.
            Texts that had an error are processed again, after all others. A text that occurs twice is processed once. ``True``
            takes the results of the last run of this kernel that was interrupted or raised an error, with its model and
            options except for ``client``. The kernel stores them until the run finishes, or until :func:`release`.
        on_error: ``"raise"`` stops at a text that cannot be read or does not fit in memory. ``"record"`` stores the error in
            ``errors`` and continues. The error of a single string is always raised.
        show_text: Whether to display texts and their words.
        arguments: Options of :func:`load_pipeline`, such as ``device`` or ``aggregation_strategy``.

    Returns:
        For many texts :class:`Annotations`, a sequence with one list of entities per text, in order. For a single string
        :class:`AnnotatedText`, the sequence of its entities.

    Raises:
        InvalidTextError: If a text cannot be read, with ``on_error="raise"``.
        DeviceUnavailableError: If a text does not fit in memory alone, or if the device fails.
        ConfigurationError: If ``texts`` is not an iterable of texts, if a single text is the name of a file, if an option is not
            valid, or if there is no run to resume, or if it has different settings. A generator that was consumed must be created
            again.
        ClusterError: If workers would return different results, if no worker is left, or if a text crashes every worker that
            processes it, with ``on_error="raise"``.
        RunInterrupted: If the run was interrupted; a ``KeyboardInterrupt``. Every error has an attribute ``annotations`` with the
            completed results.

    Example:
        >>> found = annotate(["She has asthma.", "No complaints."], "bundled_small", device="cpu")
        >>> [[entity["word"] for entity in entities] for entities in found]
        [['asthma'], []]
        >>> [entity["word"] for entity in annotate("She has asthma.", "bundled_small", device="cpu")]
        ['asthma']
    """
    check_choice("on_error", on_error, ("raise", "record"))
    check_bool("show_text", show_text)
    if names := {"context", *CONTEXT_COLUMNS} & arguments.keys():
        message = f"{min(names)!r} is not an option of annotate()."
        raise ConfigurationError(message, "Add the context to the results: nb.annotate(notes).with_context('all').")
    check_options(annotate, arguments, PIPELINE_OPTIONS)
    # Options that were passed, for a run that resumes this one.
    options = {
        "model": model,
        "ids": ids,
        "text_column": text_column,
        "id_column": id_column,
        "batch_tokens": check_optional_integer("batch_tokens", batch_tokens),
        "on_error": None if on_error == "raise" else on_error,
        "show_text": None if show_text else False,
    }
    options = {name: value for name, value in options.items() if value is not None}
    return annotate_in_session(SESSION, texts, options, arguments, client=client, progress=progress, resume=resume)


def annotate_in_session(  # noqa: C901, PLR0912, PLR0913, PLR0915 - one run, from its arguments to its results
    session: Session,
    texts: Any,
    options: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    client: object = None,
    progress: bool = True,
    resume: object = None,
) -> Annotations | AnnotatedText:
    """Annotate one or many texts in a session; see :func:`annotate`.

    Args:
        session: The session.
        texts: The texts.
        options: Options of :func:`annotate` that a resumed run shares.
        arguments: Options of :func:`load_pipeline`.
        client: As in :func:`annotate`.
        progress: As in :func:`annotate`.
        resume: As in :func:`annotate`.
    """
    earlier: _InterruptedRun | None = None
    path: str | None = None
    if resume is True:
        earlier = session.interrupted_run
        if earlier is None:
            raise ConfigurationError(
                "This kernel has no interrupted run.", 'Pass the file of the run, as in resume="file.jsonl".'
            )
        if "model" not in options:  # Options of one model may not apply to another one.
            arguments = {**earlier.arguments, **arguments}
        options = {**earlier.options, **options}
        path = earlier.path or None
    elif isinstance(resume, (str, os.PathLike)):
        path = os.fspath(resume)
    elif resume is not None:
        raise ConfigurationError(
            f"Invalid type for resume: {short_type_name(resume)}.", "Pass True, or the name of a file."
        )
    model = options.get("model")
    batch_tokens = options.get("batch_tokens")
    show_text = options.get("show_text", True)
    is_single = isinstance(texts, str)
    if is_single and (remedy := file_name_remedy(texts.strip())) and len(texts.split()) == 1:
        raise ConfigurationError(f"The text looks like a file name ({describe_value(texts.strip())}).", remedy)
    notes = read_inputs(texts, options.get("ids"), options.get("text_column"), options.get("id_column"))
    file: ResultsFile | None = None
    run: _AnnotationRun | None = None
    with session.operation(progress):
        try:
            texts = [texts] if is_single else notes.texts
            if client is None:
                name, texts, source = _local_source(session, texts, model, arguments, batch_tokens)
            else:
                from .distributed.stream import cluster_source

                session.notify(ProgressEvent("Asking", "the workers"))
                name, texts, source = cluster_source(client, texts, model, arguments, batch_tokens)
            inputs = _Inputs(texts, notes.resolve_ids(texts), notes.id_name)
            run = _AnnotationRun(session, inputs, source, name, notes)
            with contextlib.nullcontext() if path is None else ResultsFile(path, source.settings) as file:
                run.restore(file, earlier)
                run.run("raise" if is_single else options.get("on_error", "raise"))
            inputs.check_ids()
            annotations = run.to_annotations(show_text)
            interrupted = session.interrupted_run
            if interrupted and len(annotations) >= interrupted.num_texts:
                is_same_file = path is not None and interrupted.path == os.path.realpath(path)
                if interrupted is earlier or is_same_file:  # This run has resumed it.
                    session.interrupted_run = None
            return annotations.at(0) if is_single else annotations
        except (KeyboardInterrupt, Exception) as error:
            completed = Annotations(ResultStore(), (), "no model", "no device")
            if run:
                completed = run.to_annotations(show_text)
                run.remember(options, arguments, path)
            unfinished = replace(completed, unfinished=True)
            if isinstance(error, KeyboardInterrupt):
                hint = "Repeat the call to start again."
                if path is not None:
                    hint = f"Repeat the call to continue from {path!r}."
                elif run and len(run.results):
                    hint = f"Run nb.annotate(notes, {'client=client, ' if client else ''}resume=True) to continue."
                raise RunInterrupted(len(completed), unfinished, path or "", resume_hint=hint) from None
            # A user's exception class may reject new attributes (a frozen dataclass) or define this name, so the value is
            # written to the instance dictionary. ``vars(error)["annotations"]`` is always available.
            vars(error)["annotations"] = unfinished
            raise


@dataclass(frozen=True)
class _InterruptedRun:
    """The last run of this kernel that did not finish.

    Attributes:
        options: Options of ``annotate`` that were passed, except for ``client``, ``progress`` and ``resume``.
        arguments: Options of :func:`load_pipeline`.
        settings: Model and settings that affect the results.
        results: Its results, without the texts; empty if they are in a file.
        path: Path of the file that contains the results, or an empty string.
        num_texts: Number of its texts that are known.
    """

    options: Mapping[str, Any]
    arguments: Mapping[str, Any]
    settings: Mapping[str, Any]
    results: ResultStore
    path: str
    num_texts: int


def _local_source(
    session: Session, texts: object, model: object, arguments: Mapping[str, Any], batch_tokens: int | None
) -> tuple[str, Iterable[object], AnnotationSource]:
    """Return the model name, the texts, and the local source of their results."""
    from .annotation.stream import AnnotationSource
    from .distributed.columns import to_references

    references = to_references(texts)
    if is_model_name(model):
        name = "bundled" if model is None else str(model)
        pipe = create_pipeline(session, name, OpenMedConfig(), **arguments)
    else:
        pipe = validate_pipeline(model, arguments)
        name = type(pipe.model).__name__
    annotator = pipe.default_annotator(batch_tokens)
    source = AnnotationSource(
        partial(annotator.annotate, in_memory=isinstance(references, Sequence)),
        run_settings(pipe, annotator),
        format_device(str(pipe.device)),
        annotator.decoder.entity_labels,
    )
    return name, references, source


def resolve_notes(texts: object) -> NoteInputs:
    """Return the texts and ids of an argument ``texts``, with references to the texts of files, as :func:`annotate` reads them."""
    from .distributed.columns import to_references

    notes = read_inputs(texts)
    references = to_references(notes.texts)
    return replace(notes, texts=references, ids=notes.resolve_ids(references))


def validate_pipeline(pipe: object, arguments: Mapping[str, object]) -> AnnotationPipeline:
    """Validate and return a pipeline that was passed instead of a model name."""
    from .annotation.pipeline import AnnotationPipeline

    if not isinstance(pipe, AnnotationPipeline):
        raise invalid_type(
            "model",
            pipe,
            "Pass the name of a model, or a pipeline of load_pipeline(). Pass the client of a cluster as client=.",
        )
    if arguments:
        raise ConfigurationError(
            f"An existing pipeline does not accept {', '.join(sorted(arguments))}.",
            "Pass it to load_pipeline() instead.",
        )
    return pipe


class _PendingText(NamedTuple):
    """A text that was read and has no result yet.

    Attributes:
        position: Position of the text.
        fingerprint: Fingerprint of the text.
        size: Approximate number of characters.
        is_new: Whether the model processes the text. If not, its result is known, or that of an equal text is pending.
    """

    position: int
    fingerprint: int
    size: int
    is_new: bool


class _Inputs(Iterator[object]):
    """The texts of a run without a known result, read one by one.

    Texts that had an error in an earlier run come after all others, because they may crash workers again.

    Attributes:
        known: Fingerprints of texts that are not processed again, or ``None`` to process all texts.
        failed: Fingerprints of texts that had an error in an earlier run.
        retries: These texts with their positions, until they are processed.
        pending: All texts that were read and have no result yet.
    """

    def __init__(self, texts: Iterable[object], ids: Any = None, id_name: str = "") -> None:
        self.texts = texts
        self.ids = ids
        self.id_name = id_name
        self.preview_texts: list[str] = []
        self.pending: deque[_PendingText] = deque()
        self.known: dict[int, int] | None = None
        self.failed: frozenset[int] = frozenset()
        self.retries: deque[tuple[_PendingText, object]] = deque()
        self.count = length_or_none(texts)
        self._stream = iter_texts(texts)
        self._first_new: list[object] = []
        self._read = 0
        self._has_warned = False
        # The ids of a table that is read in chunks are known at the end.
        self._has_late_ids = ids is not None and self.count is None and not len(ids)
        if ids is not None:
            warn_if_not_unique(ids, id_name)

    def __next__(self) -> object:
        if self._first_new:
            return self._first_new.pop()
        for text in self._stream:
            fingerprint = text_fingerprint(text)
            read_text = self._check_text(text, fingerprint)
            is_new = self.known is None or fingerprint not in self.known
            pending = _PendingText(self._read - 1, fingerprint, effective_length(read_text), is_new)
            if fingerprint in self.failed:
                self.retries.append((pending._replace(is_new=True), read_text))
                pending = pending._replace(size=0)  # Counted when it is processed again.
            elif is_new and self.known is not None:
                self.known[fingerprint] = -1  # Equal texts wait for this one.
            self.pending.append(pending)
            if is_new:
                return read_text
        if not self.retries:
            raise StopIteration
        retry, retried_text = self.retries.popleft()
        self.pending.append(retry)
        return retried_text

    def _check_text(self, text: Any, fingerprint: int) -> object:
        """Count and preview the next text, and return the value that the model processes."""
        self._read += 1
        if self.ids is not None and self._read > len(self.ids):
            raise self._ids_error(f"more than {len(self.ids):,}")
        # The model processes an empty text; the fingerprint identifies the missing value.
        if fingerprint == MISSING_FINGERPRINT:
            text = ""
        if len(self.preview_texts) < MAX_DISPLAYED_TEXTS and not isinstance(text, TextReference):
            preview = text if isinstance(text, str) else ""
            if not self._has_warned and (remedy := file_name_remedy(preview)):
                name = describe_value(preview)
                warn(
                    f"Text {len(self.preview_texts)} looks like a file name ({name}), but is processed as text. {remedy}"
                )
                self._has_warned = True
            self.preview_texts.append(preview)
        return text

    def skip_known(self) -> None:
        """Read up to the first new text."""
        self._first_new.extend(islice(self, 1))

    def check_ids(self) -> None:
        """Check, after all texts were read, that there are texts, and no ids without a text."""
        if self.ids is not None and self._read < len(self.ids):
            raise self._ids_error(f"{self._read:,}")
        if not self._read and isinstance(self.texts, Iterator):
            warn("The iterator has no texts. If it was read before, create it again.")
        if self._has_late_ids:
            warn_if_not_unique(self.ids, self.id_name)

    def _ids_error(self, count: str) -> ConfigurationError:
        return ConfigurationError(f"There are {len(self.ids):,} ids for {count} texts.", "Pass one id per text.")

    def __length_hint__(self) -> int:
        return (
            NotImplemented
            if self.count is None
            else max(0, self.count - self._read + len(self._first_new) + len(self.retries))
        )


class _AnnotationRun:
    """A run over many texts, which takes known results, and annotates the other texts.

    Attributes:
        results: Known and new results, in the order in which they were added. With known results, equal texts have one.
        rows: Index in ``results`` of each completed text.
    """

    def __init__(
        self, session: Session, inputs: _Inputs, source: AnnotationSource, model: str, notes: NoteInputs
    ) -> None:
        self.session = session
        self.inputs = inputs
        self.source = source
        self.model = model
        self.notes = notes
        self.results = ResultStore("entity" if source.settings["aggregation_strategy"] == "none" else "entity_group")
        self.rows = array("q")
        # The approximate number of characters, or None if texts would have to be read twice.
        self._total_size: int | None = None
        is_column = type(inputs.texts).__module__.startswith("pandas.") and isinstance(inputs.texts, Sized)
        if type(inputs.texts) in {list, tuple} or is_column:
            self._total_size = sum(map(effective_length, inputs.texts))
        self._completed_size = 0
        self._file: ResultsFile | None = None
        self._is_restored = False
        self._num_known = 0
        self._notified_at = 0.0
        self._start_time: float | None = current_time()

    def restore(self, file: ResultsFile | None, earlier: _InterruptedRun | None) -> None:
        """Read the known results, and use them for equal texts."""
        self._file = file
        if earlier and (changed := changed_settings(self.source.settings, earlier.settings)):
            raise ConfigurationError(
                f"The interrupted run had different settings ({changed}).",
                "Use the original arguments, or remove resume.",
            )
        if file or earlier:
            known: dict[int, int] = {}
            stored: Iterable[FingerprintedResult] = earlier.results.items() if earlier else ()
            if file:
                stored = file.results()
            for result in stored:
                known[result.fingerprint] = len(self.results)
                self.results.add(*result)
            errors = self.results.errors
            self.inputs.failed = frozenset(fingerprint for fingerprint, row in known.items() if row in errors)
            self.inputs.known = known
        self._is_restored = True
        self._num_known = len(self.results)
        if len(self.results):
            self._start_time = None  # The duration of a part of the run would be misleading.

    def run(self, on_error: OnError) -> None:
        """Annotate the texts. With ``on_error="raise"``, raise the first error after storing the results before it."""

        def on_progress(count: int, fraction: float) -> None:
            """Report the completed fraction of a chunk with the given number of texts, which are counted with its end."""
            if current_time() - self._notified_at >= MIN_EVENT_SECONDS:
                self._notify(int(fraction * sum(pending.size for pending in islice(self.inputs.pending, count))))

        try:
            if self.inputs.known is not None:
                try:
                    self.inputs.skip_known()
                finally:
                    self._complete_texts()
            self._notify()
            for chunk in self.source.annotate(self.inputs, on_progress):
                count = len(chunk)
                if on_error == "raise":  # Only the results before the first error are stored.
                    count = min(chunk.errors, default=count)
                self._complete_texts(chunk, count)
                self._notify()
                if count < len(chunk):
                    error = chunk.errors[count]
                    raise type(error)(_number_message(error.message, self.inputs.pending[0].position), error.remedy)  # noqa: TRY301 - as the source
        except Exception:
            self._complete_texts()
            raise
        self._complete_texts()

    def _complete_texts(self, chunk: ResultStore | None = None, count: int = 0) -> None:
        """Store the first results of a chunk, and complete their texts and the texts with known results between and after them."""
        pending = self.inputs.pending
        known = self.inputs.known
        fingerprints: list[int] = []
        rows: list[int] = []
        for text in pending:
            if text.is_new and len(fingerprints) == count:
                break
            row = len(self.results) + len(fingerprints)
            if text.is_new:
                fingerprints.append(text.fingerprint)
                if known is not None:
                    known[text.fingerprint] = row
            elif known is not None:
                row = known[text.fingerprint]
            rows.append(row)
        if chunk is not None and fingerprints:
            if self._file:
                # An error of a repeated text is in the file already.
                failed = self.inputs.failed
                results = chunk.items(fingerprints)
                self._file.add(
                    result
                    for result in results
                    if result.fingerprint not in failed or not isinstance(result.answer, str)
                )
            self.results.extend(fingerprints, chunk)
        # The texts are complete only now, because storing their results may fail.
        for row in rows:
            text = pending.popleft()
            self.rows[text.position : text.position + 1] = array("q", [row])
            self._completed_size += text.size

    def _notify(self, further_size: int = 0) -> None:
        """Report the number of texts with a result, as an interrupt does, and the approximate number of characters.

        Args:
            further_size: Approximate number of characters that are processed, but not in the results yet.
        """
        self._notified_at = current_time()
        # Texts to retry are read before their first row exists.
        count = max(0, len(self.rows) - len(self.inputs.retries))
        name = f"{model_label(self.model)} on {self.source.device}"
        size = self._completed_size + further_size
        self.session.notify(ProgressEvent("Annotating", name, count, self.inputs.count, "note", size, self._total_size))

    def remember(self, options: Mapping[str, Any], arguments: Mapping[str, Any], path: str | None) -> None:
        """Store the run in the session if it has results, so that it can be resumed."""
        if self._is_restored and len(self.results):
            self.session.interrupted_run = _InterruptedRun(
                options,
                arguments,
                self.source.settings,
                self.results if path is None else ResultStore(),
                "" if path is None else os.path.realpath(path),
                max(self.inputs.count or 0, len(self.rows)),
            )

    def to_annotations(self, show_text: bool) -> Annotations:
        """Return the results so far."""
        texts = self.inputs.texts
        count = len(self.rows)
        results = self.results
        if self.inputs.known is not None:
            results = results.take(self.rows)
            results.errors = {index: _number_message(message, index) for index, message in results.errors.items()}
        return Annotations(
            results,
            tuple(self.inputs.preview_texts[:count]),
            self.model,
            self.source.device,
            show_text,
            None if isinstance(texts, Iterator) else texts,
            ids=None if self.inputs.ids is None else self.inputs.ids[:count],
            id_name=self.notes.id_name,
            text_name=self.notes.text_name,
            known_labels=self.source.known_labels,
            seconds=None if self._start_time is None else current_time() - self._start_time,
            num_resumed=len([row for row in self.rows if row < self._num_known]),
        )


def _number_message(message: str, position: int) -> str:
    """Return the message of an error with the position of its text. The source counts the texts that it gets."""
    return re.sub(r"\b([Tt]ext) \d+", rf"\1 {position}", message, count=1)


def length_or_none(texts: object) -> int | None:
    """Return the number of texts, or ``None`` if it is unknown before they are read."""
    try:
        return len(texts) if isinstance(texts, Sized) else None
    except Exception:  # noqa: BLE001 - a user-defined __len__ may raise anything or return an invalid length
        return None
