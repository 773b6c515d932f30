"""Results of annotation: the entities of one or many texts, and the operations on them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from .._render.display import Displayable, Json, Report, Table, pluralize, to_text
from .._utils.text import describe_names, describe_value, shorten
from .._utils.validation import (
    check_integer,
    check_names,
    check_number,
    invalid_type,
    invalid_value,
    is_hashable,
    suggest,
)
from .._utils.warning import warn
from ..errors import ConfigurationError, InvalidTextError, UnmatchedIdsError
from ..session import SESSION, check_options
from .annotated_notes import AnnotatedNotes
from .context import (
    ALL,
    CONTEXT_COLUMNS,
    CUE_SUFFIX,
    check_context_values,
    context_labels,
    context_mark,
    create_context_finder,
)
from .inputs import ID_COLUMN, NOTE_COLUMN
from .masking import (
    HIDDEN_TEXT_NOTICE,
    IS_MISSING,
    MAX_SHOWN_TEXT_CHARACTERS,
    REPLACEMENT,
    MaskedText,
    MaskedTexts,
    Policy,
    are_identifying,
    compile_rules,
    describe_limits,
    find_rule_spans,
    long_text_sentence,
    mask_text,
    normalize_label,
    validate_policy,
)
from .matching import are_positions
from .presentation import entities_headline, note_name, origin_details
from .references import raise_if_error
from .storage import Entity, ResultStore, entity_span, masked_spans

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from spacy import Language
    from spacy.tokens import Doc

    from .export.registry import ExportReport
    from .review import Review
    from .scores import SchemeScores, ScoredSpan, Scores


MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def _with_checked_options(method: MethodT) -> MethodT:
    """Return a public method whose error about an unknown option lists its options.

    It is in this module, because doctest omits the examples of functions with the globals of another module.
    """

    @wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        check_options(method, options, ())
        return method(*arguments, **options)

    return call  # type: ignore[return-value]  # wraps() keeps the signature.


# Names of the base class that completion lists, too. The others belong to the package.
_DOCUMENTED_NAMES = ("device", "errors", "missing", "model", "position", "sources", "summary", "to_dict")


def _warn_unknown_labels(labels: Iterable[str], present: Iterable[str], known: Iterable[str] | None) -> None:
    """Warn about labels that no entity has and the model does not predict. Without entities, there is no warning."""
    available = {normalize_label(label) for label in present}
    if not available:
        return
    available |= {normalize_label(label) for label in known or ()}
    for label in labels:
        if normalize_label(label) not in available:
            warn(f"No entity has the label {describe_value(label)}. {suggest(label.casefold(), sorted(available))}")


@dataclass(frozen=True, repr=False, eq=False)
class AnnotatedText(Displayable, Sequence[Entity]):
    """The entities of one text: a sequence of dictionaries as in the pipeline of transformers.

    Its display marks the context of entities, such as "negated", by the English rules. The entities have it only after
    :meth:`with_context`. ``%config OpenMedMagics.context = False`` removes these marks.

    Attributes:
        found: Annotations of this text alone.
        title: Headline, or an empty string for the number of entities.
    """

    found: Annotations
    title: str = ""

    if not TYPE_CHECKING:  # A type checker knows the attributes.

        def __getattr__(self, name: str) -> Any:
            if hasattr(Annotations, name):
                raise AttributeError(f"A single text has no attribute {name!r}. Use its annotations: .found.{name}.")
            return super().__getattr__(name)

    def __len__(self) -> int:
        return len(self.entities)

    def __getitem__(self, index: Any) -> Any:
        return self.entities[index]

    @property
    def text(self) -> str:
        """The annotated text."""
        return self.found.preview_texts[0]

    @cached_property
    def entities(self) -> tuple[Entity, ...]:
        """Mappings with ``entity_group`` (or ``entity``), ``score``, ``word``, ``start`` and ``end``."""
        return tuple(self.found.results[0])

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.found.model

    @property
    def device(self) -> str:
        """Device of the model."""
        return self.found.device

    @property
    def missing(self) -> bool:
        """Whether the input was a missing value."""
        return self.found.results.is_missing(0)

    def to_dict(self) -> dict[str, Any]:
        """Return text, entities, model and device as JSON-compatible data."""
        (record,) = self.found.to_dict()["texts"]
        return {"text": self.text, **record, "model": self.model, "device": self.device}

    def to_report(self) -> Report:
        """Return the text with highlighted entities, or a table of the entities if the text is hidden."""
        found = self.found
        # The model did not find a missed entity.
        details = "" if self.title else origin_details(self.model, self.device, found.seconds)
        if self.missing:
            return Report(entities_headline({}, None), (IS_MISSING,), details=details)
        entities = self._displayed_entities()
        counts = Counter(entity_span(entity)[2] for entity in entities)
        context = Counter(tuple(labels) for labels in map(context_labels, entities) if labels)
        title = self.title or entities_headline(counts, found.known_labels, context=context)
        notices = (*found.text_notices, *found.filters)
        if not found.show_text:
            return Report(title, (*notices, HIDDEN_TEXT_NOTICE), (self._table(),), details=details)
        sentences = (*notices, *long_text_sentence(self.text))
        segments = found.note_segments(0, self.text, entities, MAX_SHOWN_TEXT_CHARACTERS)
        return Report(title, sentences, segments=tuple(segments), details=details)

    def __str__(self) -> str:
        # The table contains the scores, which highlighted text does not show.
        return to_text(replace(self.final_report(), tables=(self._table(),)))

    def _displayed_entities(self) -> Sequence[Entity]:
        """Return the entities with the context to display, which is not determined again."""
        found = self.found
        is_marked = SESSION.should_mark_context and found.show_text and not found.results.context
        # Names and dates have no context. A model whose labels are unknown may find them.
        if not is_marked or are_identifying(found.known_labels or ()):
            return self.entities
        return self.with_context(ALL, *(name + CUE_SUFFIX for name in CONTEXT_COLUMNS)).entities

    def _table(self) -> Table:
        rows = []
        for entity in self._displayed_entities():
            start, end, label = entity_span(entity)
            word = " ".join(self.text[start:end].split()) if self.found.show_text else ""
            rows.append((label, f"{entity['score']:.2f}", f"{start}-{end}", word, context_mark(entity, with_cues=True)))
        return Table("Entities", ("label", "score", "characters", "text", "context"), tuple(rows))

    def with_context(
        self, *columns: str, language: str = "en", cues: Mapping[str, Mapping[str, Sequence[str]]] | None = None
    ) -> AnnotatedText:
        """Return the annotated text with the context of each entity; see :meth:`Annotations.with_context`.

        Example:
            >>> from openmed_nb import annotate
            >>> annotate("No asthma.", "bundled_small", device="cpu").with_context()[0]["negated"]
            True
        """
        return AnnotatedText(self.found.with_context(*columns, language=language, cues=cues))

    def mask(self, replacement: Policy = REPLACEMENT, *, rules: Mapping[str, str] | None = None) -> MaskedText:
        """Replace the entities of the text; see :meth:`Annotations.mask`.

        Example:
            >>> from openmed_nb import annotate
            >>> annotate("She has asthma.", "bundled_small", device="cpu").mask("[{label}]").text
            'She has [DISEASE].'
        """
        return self.found.mask(replacement, rules=rules).texts[0]

    def filter(self, *labels: str, min_score: float = 0.0, **context: bool | str | Sequence[str]) -> AnnotatedText:
        """Return the text with only the entities that have one of the labels, a score and a context; see :meth:`Annotations.filter`.

        Example:
            >>> from openmed_nb import annotate
            >>> len(annotate("She has asthma.", "bundled_small", device="cpu").filter(min_score=1.0))
            0
        """
        return AnnotatedText(self.found.filter(*labels, min_score=min_score, **context))


class Annotations(AnnotatedNotes):
    """The entities of many texts: a sequence with one list per text, in the order of the texts.

    ``found[17]`` contains the entities of one text, :meth:`show` displays this text with highlighted entities, and :meth:`filter`
    selects entities by label or score.

    Attributes:
        results: Entities of all texts.
        preview_texts: The first texts, for display.
        model: Name of the model.
        device: Device of the model.
        show_text: Whether to display texts and their words.
        texts: The texts as passed, not copied, or ``None`` if they came from an iterator.
        ids: One id per text: those that were passed, the keys of a mapping, or the index of a Series; otherwise ``None``.
            ``found["a7"]`` and ``found.show("a7")`` select a text by its id. An integer is a position, and an error if the ids
            are numbers, unless they are the positions; :meth:`at` always takes a position. Loops and slices go by position.
        unfinished: Whether the results are attached to an error. Results and texts are not pickled then.
        known_labels: Labels that the model can predict and that are not ignored, or ``None`` if unknown.
        seconds: Duration of the run without loading the model, or ``None`` if it was resumed.
        id_name: Name of the ids as a column of :meth:`to_frame`.
        text_name: Name of the column of the texts, or ``None``.
        filters: Filters applied with :meth:`filter`, as sentences.
        num_resumed: Number of notes with results of an earlier run; see ``resume`` of :func:`annotate`.
    """

    def __dir__(self) -> list[str]:
        """Return the names that completion lists: those of the documentation."""
        listed = {*vars(Annotations), *_DOCUMENTED_NAMES}
        return [name for name in super().__dir__() if name in listed or name.startswith("_")]

    def at(self, position: int) -> AnnotatedText:
        """Return the text at a position with its entities.

        Args:
            position: Position of the text, from 0. It is not an id.

        Raises:
            ConfigurationError: As in :meth:`show`.
            InvalidTextError: As in :meth:`show`.

        Example:
            >>> from openmed_nb import annotate
            >>> found = annotate({1: "No pain.", 2: "She has asthma."}, "bundled_small", device="cpu")
            >>> [entity["word"] for entity in found.at(1)], found.position(2)
            (['asthma'], 1)
        """
        otherwise = "" if self.own_ids is None else ", or one of found.ids to found.show()"
        index = check_integer("position", position, 0, len(self) - 1, otherwise)
        if message := self.results.errors.get(index):
            raise InvalidTextError(message, "Select a different text; .errors contains the failed texts.")
        text = raise_if_error(next(self.read_texts(index))) or ""
        return AnnotatedText(
            replace(
                self,
                results=self.results.take([index]),
                preview_texts=(text,),
                texts=(text,),
                ids=None if self.ids is None else [self.ids[index]],
                seconds=self.seconds if len(self) == 1 else None,
            )
        )

    def to_json(self) -> Json:
        """Return :meth:`to_dict` as JSON."""
        return Json(json.dumps(self.to_dict(), ensure_ascii=False))

    @_with_checked_options
    def to_frame(self, table: pd.DataFrame | None = None) -> pd.DataFrame:
        """Return a DataFrame with one row per entity.

        The columns are ``note_index`` (position of the text), the ids under their name (``note_id`` if they have none), the label,
        ``score``, ``word`` (as the tokenizer decodes it), ``span_text`` (the characters of the note, to count), ``start`` and
        ``end``, and the columns of :meth:`with_context`. If the texts are files, the column ``source`` contains their paths; see
        :attr:`sources`. ``span_text`` is missing for a note that cannot be read again, such as one of a generator.

        Args:
            table: Table of the notes, whose other columns are added to the entities of each note. Its rows are matched by the
                column of the ids if there is one, otherwise by the index, and their texts are compared.

        Returns:
            The DataFrame. If the texts came from a Series, it has the index of the Series. The suffix ``_index`` is added to an
            index name that is also a column name. Otherwise, the rows are numbered.

        Raises:
            ConfigurationError: If pandas is not installed, or if the table has columns of the same names.
            UnmatchedIdsError: If a note does not have exactly one row in the table.

        Example:
            >>> import pandas as pd
            >>> from openmed_nb import annotate
            >>> notes = pd.DataFrame({"note": ["Has asthma.", "Well."], "patient": ["p1", "p2"]})
            >>> found = annotate(notes, "bundled_small", device="cpu", text_column="note")
            >>> found.to_frame(notes)[["patient", "span_text"]].to_numpy().tolist()
            [['p1', 'asthma']]
        """
        return self.add_columns(self.to_keyed_frame(self.entity_columns()), table)

    @_with_checked_options
    def by_patient(self, groups: pd.Series | Sequence[Any]) -> pd.DataFrame:
        """Return a DataFrame with one row per patient and disease, for counts of patients instead of mentions.

        Entities that are negated, hypothetical, or of another person are not counted. Possible and historical ones are. If the
        entities have no context, the English rules determine it; see :meth:`with_context`. Use :meth:`filter` first to select
        labels, or to leave out possible entities, as in ``found.filter(uncertain=False)``. The entities are those of
        the model, without the corrections of a :meth:`review`.

        Args:
            groups: The patient of each note, such as the column of the table that you annotated, or another group such as the ward.
                Its rows are matched by the ids in an index with their name, or by the index of the annotated table. A column has
                no texts to compare, so an index that only numbers the rows must not be sorted. A list of notes needs
                a list of groups, in the same order.

        Returns:
            A DataFrame with the group under the name of the column (``group`` if it has none), ``span_text`` in lower case and
            with typewriter apostrophes, and the numbers of ``mentions`` and ``notes``. Each note counts, also if its id occurs
            twice. Notes without a group do not count, with a warning.

        Raises:
            ConfigurationError: If ``groups`` is neither a column nor a list, if the entities have only a part of the context, or as for
                :meth:`with_context`.
            UnmatchedIdsError: If a note does not have exactly one group.

        Example:
            >>> import pandas as pd
            >>> from openmed_nb import annotate
            >>> notes = pd.DataFrame({"note": ["Has asthma.", "Asthma is stable.", "No asthma."], "patient": ["p1", "p1", "p2"]})
            >>> found = annotate(notes, "bundled_small", device="cpu", text_column="note")
            >>> found.by_patient(notes["patient"]).to_dict("records")
            [{'patient': 'p1', 'span_text': 'asthma', 'mentions': 2, 'notes': 2}]
        """
        import pandas as pd

        self.check_aggregated()
        if not isinstance(groups, (pd.Series, list, tuple)):
            raise invalid_type("groups", groups, "Pass a column of the table of the notes, such as notes['patient'].")
        column = pd.Series(groups)
        if not all(map(is_hashable, column)):
            raise ConfigurationError(
                "The groups contain lists or other values without a hash.", "Pass strings or numbers."
            )
        if isinstance(groups, pd.Series):
            table = pd.DataFrame(index=column.index)
            if self.own_ids and column.index.name == self.id_name:
                table = table.reset_index()
            try:
                column = column.take(self.note_keys.find_rows(table))
            except UnmatchedIdsError as error:
                raise UnmatchedIdsError(error.message, self._groups_remedy(column.name), error.unmatched) from None
        elif self.row_index is not None or len(groups) != len(self):
            message = f"A list of {len(groups):,} groups cannot be matched with the {len(self):,} notes."
            raise UnmatchedIdsError(message, self._groups_remedy(None))
        if num_missing := int(column.isna().sum()):
            warn(f"{pluralize(num_missing, 'note has', 'notes have')} no group. Their entities are not counted.")
        found = self if self.results.context else self.with_context("all")
        found = found.filter(negated=False, experiencer="patient", temporality=["recent", "historical"])
        if self.results.labels and not found.results.labels:
            warn(
                "All entities are negated, hypothetical or of another person, which are not counted. "
                "Count them in the table found.to_frame(notes)."
            )
        rows: list[tuple[Any, str, int]] = []
        texts = zip(self.read_texts(), found, strict=True)
        words = found.iter_counted_words(raise_if_error(text) if entities else None for text, entities in texts)
        for note, (group, note_words) in enumerate(zip(column.tolist(), words, strict=True)):
            rows += [(group, word, note) for word in note_words]
        frame = pd.DataFrame(rows, columns=["group", "span_text", "note"])
        counts = frame.groupby(["group", "span_text"])["note"].agg(mentions="size", notes="nunique").reset_index()
        is_free = column.name is not None and column.name not in counts.columns
        return counts.rename(columns={"group": column.name}) if is_free else counts

    def _groups_remedy(self, name: Any) -> str:
        """Return the remedy for groups of :meth:`by_patient`, such as a column with a name, that do not match the notes."""
        column = f"[{describe_names([str(name or 'patient')])!r}]"
        if self.own_ids and len(self.indices_by_id) == len(self):
            ids = f"set_index({describe_names([self.id_name])!r})"
            return f"Pass the column with the ids of all notes as its index, as in notes.{ids}{column}."
        if self.row_index is None:
            return f"Pass a list with one group per note, in the order of the notes, such as notes{column}.tolist()."
        return f"Pass the whole column notes{column} of the annotated table. Annotate a table again that was read again, merged or sorted."

    def _create_view(self) -> Any:
        """Return a browser of the notes, with a search box and filters."""
        from .browsing import BrowserView, NoteListing

        return BrowserView(NoteListing(self))

    @_with_checked_options
    def show(self, number: int | str | None = None) -> AnnotatedText | Annotations:
        """Return one of the texts with highlighted entities, or the annotations, whose display is a browser of the notes.

        Args:
            number: Position of the text, from 0, or its id if that is a string; see :attr:`ids` for ids that are numbers. If
                ``None``, all texts.

        Returns:
            The annotated text, as ``annotate`` returns it for a single text. Files and texts that are not stored are read again.

        Raises:
            ConfigurationError: If the index is out of range, if the text has changed since it was annotated, or if it came from a
                generator and is not one of the stored first texts.
            InvalidTextError: If the text has an error or cannot be read again.

        Example:
            >>> from openmed_nb import annotate
            >>> print(annotate(["No pain.", "She has asthma."], "bundled_small", device="cpu").show(1))
            1 mention of a disease found
              Model: bundled_small, device: cpu
            She has [asthma](DISEASE).
            Labels: DISEASE (1 entity)
            Entities
              label    score  characters  text
              DISEASE  1.00   8-14        asthma
        """
        return self if number is None else self.at(self.locate(number))

    @_with_checked_options
    def mask(self, replacement: Policy = REPLACEMENT, *, rules: Mapping[str, str] | None = None) -> MaskedTexts:
        r"""Replace the entities of the texts, such as the personal data that a privacy filter detects.

        Masking is not guaranteed to be complete, because entities that the model misses remain. Measure the recall of the model on
        similar texts before you rely on it.

        Args:
            replacement: Replacement of an entity, with ``{label}`` as placeholder of its label. Alternatively, a mapping of labels to
                replacements. Labels are not case-sensitive. Labels that are not in the mapping are replaced by ``"[{label}]"``;
                :meth:`filter` selects the labels to mask.
            rules: Regular expressions of the package ``regex`` by label, such as ``{"MRN": r"\bMRN[:# ]*\d{6,}\b"}``. Their matches
                are replaced too. A text for which a rule takes more than a second has an error.

        Returns:
            A sequence that displays the first texts, with ``to_frame(table)`` and ``counts`` by label and source. Each item has the masked
            ``text``, and ``spans`` with offsets in both texts. Spans are extended to whole words. A failed text has an ``error`` and
            no text. A missing value is ``missing``.

        Raises:
            ConfigurationError: If the replacement or a rule is not valid, if a text has changed since it was annotated, or if it came from a
                generator and is not one of the stored first texts.
            InvalidTextError: If a text cannot be read again.

        Example:
            >>> from openmed_nb import annotate
            >>> found = annotate(["She has asthma.", "No complaints."], "bundled_small", device="cpu")
            >>> [masked.text for masked in found.mask({"DISEASE": "***"})]
            ['She has ***.', 'No complaints.']
        """
        policy = validate_policy(replacement)
        compiled_rules = compile_rules(rules)
        results = self.results
        if isinstance(policy, Mapping):
            labels = {*results.labels, *(rule.label for rule in compiled_rules)}
            labels |= {span.label for spans in results.dropped.values() for span in spans}
            _warn_unknown_labels(policy, labels, self.known_labels)
        limits = describe_limits(self.known_labels, self.filters, len(compiled_rules))
        masked: list[MaskedText] = []
        for index, text in enumerate(map(raise_if_error, self.read_texts())):
            error = results.errors.get(index, "")
            if text is None:
                masked.append(MaskedText("", error=error, show_text=self.show_text, missing=not error))
                continue
            spans = masked_spans(results[index], results.dropped.get(index, ()))
            try:
                spans += find_rule_spans(text, compiled_rules)
            except ConfigurationError as rule_error:
                masked.append(MaskedText("", error=str(rule_error)))
                continue
            masked.append(mask_text(text, spans, policy, self.show_text, limits))
        return MaskedTexts(tuple(masked), self.note_keys, limits)

    @_with_checked_options
    def with_context(
        self,
        *columns: str,
        language: str = "en",
        cues: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
    ) -> Annotations:
        """Return the annotations with the context of each entity.

        Rules look for cues such as "denies" or "mother" in the sentence of the entity, and for headings such as "Family history:"
        above it. They have errors in both directions: see docs/how_to/find_negated_entities.md for measured values. No entity is
        removed; use :meth:`filter`.

        Args:
            columns: Columns to add: ``"negated"``, the default, ``"all"`` for the first four, or any of:

                - ``"negated"``: ``True`` in "denies pain".
                - ``"uncertain"``: ``True`` in "possible pneumonia".
                - ``"temporality"``: ``"recent"``, ``"historical"`` as in "history of asthma", or ``"hypothetical"`` as in "if fever
                  develops".
                - ``"experiencer"``: ``"patient"``, ``"family"`` as in "mother had diabetes", or ``"other"``.
                - ``"negated_by"``, ``"uncertain_by"``, ``"temporality_by"`` and ``"experiencer_by"``: the cue that decided, such as
                  ``"denies"``, or an empty string for the usual value.
            language: Language of the notes: ``"en"``, or ``"de"``, ``"es"``, ``"fr"``, ``"hi"``, ``"ja"``, ``"pt"`` or ``"zh"``,
                which use the rules of OpenMed, take about 10 ms per entity, and have no columns of cues.
            cues: Additional cues in English by value and position, such as ``{"negated": {"after": ["not detected"]}}``; see
                docs/how_to/find_negated_entities.md. They precede the cues of the package of the same length.

        Returns:
            Annotations of the same texts, whose entities and :meth:`to_frame` have the columns. They mark negated entities with
            "negated", for example, as a single displayed text always does.

        Raises:
            ConfigurationError: If a column, the language or a cue is invalid, if openmed is needed and not installed, or if a text
                with entities has changed since it was annotated or came from a generator and is not one of the stored first texts.
            InvalidTextError: If a text cannot be read again.

        Example:
            >>> from openmed_nb import annotate
            >>> found = annotate(["She has asthma, but no pneumonia."], "bundled_small", device="cpu").with_context()
            >>> [(entity["word"], entity["negated"]) for entity in found[0]]
            [('asthma', False), ('pneumonia', True)]
            >>> [entity["word"] for entity in found.filter(negated=False)[0]]
            ['asthma']
        """
        find_context = create_context_finder(columns, language, cues)
        context = find_context("", ())  # The columns, also without entities.
        for text, entities in zip(self.read_texts(), self, strict=True):
            for name, values in find_context(raise_if_error(text) or "", entities).items() if entities else ():
                context[name].extend(values)
        return replace(self, results=self.results.with_columns(context))

    def filter(self, *labels: str, min_score: float = 0.0, **context: bool | str | Sequence[str]) -> Annotations:
        """Return the annotations with only the entities that have one of the labels, at least a score, and a context.

        Args:
            labels: Labels to keep, not case-sensitive. Without labels, the entities of all labels are kept.
            min_score: Minimum score, in [0, 1].
            context: Values of columns of :meth:`with_context`, such as ``negated=False``, ``experiencer="patient"``, or several values
                as ``temporality=["recent", "historical"]``.

        Returns:
            Annotations of the same texts. A text without remaining entities has an empty list.

        Raises:
            ConfigurationError: If a label is not one of the model, if a score is not valid, or if the entities have no such context.

        Example:
            >>> from openmed_nb import annotate
            >>> found = annotate(["She has asthma.", "No complaints."], "bundled_small", device="cpu")
            >>> [[entity["word"] for entity in entities] for entities in found.filter("disease", min_score=0.9)]
            [['asthma'], []]
        """
        min_score = check_number("min_score", min_score, 1.0, example="0.9")
        for label in labels:
            if not isinstance(label, str):
                raise invalid_value("a label", label, "Pass a label as in the results, such as 'disease'.")
        check_names("an argument of filter()", context, ("min_score", *CONTEXT_COLUMNS), "Arguments")
        for name, value in context.items():
            for choice in value if value and isinstance(value, (list, tuple)) else [value]:
                check_context_values(self.results.context, {name: choice})
        if not (labels or context or min_score):
            return self
        known_labels = self.known_labels
        if known_labels is None:
            _warn_unknown_labels(labels, self.results.labels, None)
        elif labels:
            selected = [*map(normalize_label, labels)]
            available = map(normalize_label, {*known_labels, *self.results.labels})
            check_names("a label of the model", selected, sorted(available), "Labels")
            known_labels = tuple(label for label in known_labels if normalize_label(label) in selected)
        conditions = [f"label {' or '.join(map(shorten, labels))}"] if labels else []
        conditions += [f"{name}={value!r}" for name, value in context.items()]
        conditions += [f"score of at least {min_score:g}"] if min_score else []
        sentence = f"{'Filters' if len(conditions) > 1 else 'Filter'}: {', '.join(conditions)}."
        # An entity of several tokens has no prefix, although the labels of its model do.
        select_by = str.casefold if self.results.key == "entity" else normalize_label
        results = self.results.filter({*map(select_by, labels)}, min_score, context)
        return replace(self, results=results, known_labels=known_labels, filters=(*self.filters, sentence))

    @_with_checked_options
    def score(self, gold: Any, *, labels: Mapping[str, str] | None = None, seed: int = 0) -> Scores:
        """Return the scores of the entities against gold entities of the same texts.

        Args:
            gold: A :meth:`review`, of which the reviewed notes are scored, or the result of :func:`read_annotations`. Alternatively,
                the true entities of each text, as ``(start, end, label)`` or as mappings with ``start``, ``end`` and ``label`` or
                ``entity_group``: a mapping by id, or a list for texts without ids. Or a DataFrame with one row per entity and the
                columns ``start``, ``end``, ``label``, and the ids or ``note_index``.
            labels: New names for labels of the gold, such as ``{"Disease": "DISEASE"}``.
            seed: Seed of the resampling for the intervals.

        Returns:
            The scores by label and in total: strict (boundaries and label), partial (boundaries, and an overlap counts as half)
            and type (label, with an overlap), as in SemEval 2013 and nervaluate. Also the number of gold characters outside of
            all entities, and the missed and added entities, each with ``show()``. Only texts with gold are scored, except that a
            table contains all notes. Against a review, also the scores of the context, such as ``scores.context["negated"]``, of
            the entities with the boundaries of a true entity.

        Raises:
            ConfigurationError: If ``gold`` is not valid or belongs to other texts, or if the results are not entities.
            UnmatchedIdsError: If ids of the gold are not ids of the texts, or if only one side has ids.

        Example:
            >>> from openmed_nb import annotate
            >>> found = annotate(["She has asthma.", "No complaints."], "bundled_small", device="cpu")
            >>> scores = found.score([[(8, 14, "DISEASE")], [(3, 13, "DISEASE")]])
            >>> scores.total.strict.recall, [(span.text, span.start) for span in scores.missed]
            (0.5, [(1, 3)])
        """
        from .gold import align_gold, read_gold
        from .review import Review
        from .scores import score_spans

        seed = check_integer("seed", seed, 0)
        ids = self.ids
        if ids is None and any(self.sources):
            ids = [PurePath(source or "").name for source in self.sources]
        context: dict[str, SchemeScores] = {}
        if isinstance(gold, Review):
            review = gold
            gold = review.gold_of(self)
            context = review.score_context(self, seed)
            ids = None
        elif self._is_own_frame(gold):
            ids = None
        texts = read_gold(gold, labels, self.id_name)
        aligned = align_gold(texts, ids, self.iter_note_texts(), len(self))
        for index, text in enumerate(self.iter_note_texts()):
            expected = aligned.get(index)
            if text is None or expected is None:
                continue
            has_same_words = all(text[start:end] == words for start, end, words in expected.span_texts)
            if expected.text not in {None, text} or not has_same_words:
                message = f"The gold of text {index} belongs to a different text."
                raise ConfigurationError(message, "Pass the gold of the same texts.")
            if any(span.end > len(text) for span in expected.spans):
                message = f"The gold of text {index} has an entity that ends after the end of the text."
                raise ConfigurationError(message, "Pass offsets in characters of the text.")
        predicted = {index: None if index in self.results.errors else self.note_spans(index) for index in aligned}
        gold_labels = {span.label for text in texts for span in text.spans}
        own_labels = {*self.results.labels, *(self.known_labels or ())}
        if gold_labels and own_labels and gold_labels.isdisjoint(own_labels):  # No entity can be right.
            names = f"{{{describe_value(min(gold_labels))}: {describe_value(min(own_labels))}}}"
            warn(f"The gold and the results have different labels. Rename those of the gold, as in labels={names}.")
        expected_spans = {index: text.spans for index, text in aligned.items()}
        scores = score_spans(self.model, predicted, expected_spans, self._show_span, seed)
        return replace(scores, context=context, num_without_rows=len(aligned) - len(texts))

    def _is_own_frame(self, gold: Any) -> bool:
        """Return whether a DataFrame has the index of :meth:`to_frame`, so that its positions are those of the same notes.

        Raises:
            UnmatchedIdsError: If it has another index, but no ids.
        """
        columns = getattr(gold, "columns", ())
        if self.row_index is None or self.own_ids or NOTE_COLUMN not in columns or ID_COLUMN in columns:
            return False
        positions = gold[NOTE_COLUMN]
        is_own = bool(positions.isin(range(len(self))).all() and gold.index.equals(self.row_index.take(positions)))
        if not is_own and not are_positions(gold.index):
            message = "The index of the gold is not that of the notes at these positions."
            raise UnmatchedIdsError(message, "Pass the gold of these notes, or their ids as a column.")
        return is_own

    @_with_checked_options
    def review(self, path: str | os.PathLike[str] | None = None, *, sample: int | None = 20, seed: int = 0) -> Review:
        """Return a review of a random sample of the notes, in which you mark right, wrong and missed entities.

        In a notebook, it is displayed as a browser of these notes. Mark each entity, add the entities that the model missed, and
        then mark the note as reviewed. Only reviewed notes count. Ticks of the entities alone measure precision, but no recall. The
        sample is uniform and without replacement, over the notes that have no error and are not missing.

        Args:
            path: ``.jsonl`` file in which the review is saved after each change, and from which it continues. It contains offsets,
                labels, marks and fingerprints, but no text. If ``None``, the review is not saved.
            sample: Number of notes, at least 1. A larger sample contains the smaller ones with the same seed. If ``None``, all notes are
                listed, in random order.
            seed: Seed of the sample.

        Returns:
            The review, with ``gold`` and ``score()``. Other results of the same notes can be scored with ``other.score(review)``.

        Raises:
            ConfigurationError: If the file is a review of other notes or has another seed, if the texts are hidden or not stored, or
                if the results are not entities.

        Example:
            >>> from openmed_nb import annotate
            >>> found = annotate(["She has asthma.", "Unwell."], "bundled_small", device="cpu")
            >>> review = found.review(sample=2)
            >>> review.mark(0, 8, 14, "DISEASE", right=True)
            >>> review.mark(1, 0, 6, "DISEASE")  # a missed entity
            >>> review.finish(0), review.finish(1)
            (None, None)
            >>> review.score().total.strict.recall
            0.5
        """
        from .review import Review

        return Review(self, path, sample, seed)

    def _show_span(self, span: ScoredSpan) -> AnnotatedText:
        """Return a text in which only one span is highlighted."""
        text = self.at(span.text)
        word = text.text[span.start : span.end]
        entity = {"entity_group": span.label, "score": 1.0, "word": word, "start": span.start, "end": span.end}
        results = ResultStore()
        results.add(self.results.fingerprints[span.text], [entity])
        title = f"Note {note_name(span.text, self.ids)}, characters {span.start} to {span.end}"
        return AnnotatedText(replace(text.found, results=results), title)

    @_with_checked_options
    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the results to a file.

        A ``.jsonl`` file contains one object per note with ``id``, or its position as ``note_index``, ``text`` and ``entities``, also
        for missing and failed notes.
        A ``.parquet`` or ``.csv`` (UTF-8) file contains the rows of :meth:`to_arrow`, without the texts of the notes. Except for an
        ``.html`` page with the marked notes, which hides them then, texts are written even with ``show_text=False``. An existing
        file is replaced.

        Args:
            path: File whose suffix selects the format. It is readable by its owner only.

        Raises:
            ConfigurationError: If the suffix is unknown, or if the file cannot be written.

        Example:
            >>> import pathlib, tempfile
            >>> from openmed_nb import annotate
            >>> found = annotate(["She has asthma."], "bundled_small", device="cpu")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     found.save(f"{folder}/notes.csv")
            ...     print(pathlib.Path(folder, "notes.csv").read_text().splitlines()[0])
            note_index,entity_group,score,word,span_text,start,end
        """
        from .export.registry import save_annotations

        save_annotations(path, self)

    @_with_checked_options
    def export(self, format: str, path: str | os.PathLike[str] | None = None) -> ExportReport:  # noqa: A002 - public name
        """Write notes and entities in the format of an annotation tool.

        Notes without a text are omitted and counted: missing and failed notes, notes that have changed, and those from a
        generator. :func:`read_annotations` reads the files.

        Args:
            format: ``"brat"``, ``"conll"``, ``"doccano"`` or ``"label-studio"``.
            path: File, or a new folder for brat. It is required. Files are readable by their owner only.

        Returns:
            The number of notes and entities, and ``losses``: counts of what the format cannot contain.

        Raises:
            ConfigurationError: If the format is unknown, there is no path, its suffix is not one of the format, the results are not
                entities, or the file cannot be written.

        Example:
            >>> import tempfile
            >>> from openmed_nb import annotate
            >>> found = annotate(["She has asthma."], "bundled_small", device="cpu")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     print(found.export("conll", f"{folder}/notes.conll"))
            Exported 1 note with 1 entity to conll
              The file contains all of them.
        """
        from .export.notes import Export
        from .export.registry import export_notes

        return export_notes(format, path, Export(self.iter_exported_notes(), self.model))

    def to_arrow(self) -> pa.Table:
        """Return an Arrow table with one row per entity and the columns of :meth:`to_frame`, for polars, DuckDB and Parquet.

        The index of a Series is in a column, because an Arrow table has no index.

        Raises:
            ConfigurationError: If pandas or pyarrow is not installed.

        Example:
            >>> from openmed_nb import annotate
            >>> annotate(["She has asthma."], "bundled_small", device="cpu").to_arrow().column_names
            ['note_index', 'entity_group', 'score', 'word', 'span_text', 'start', 'end']
        """
        from .export.formats import to_arrow

        return to_arrow(self.to_frame_with_ids())

    def to_spacy(self, nlp: Language) -> Iterator[Doc]:
        """Yield a spaCy document for each note that has a text.

        ``doc.ents`` contains the entities, and ``doc.spans["openmed"]`` those that overlap them. ``doc.user_data["id"]`` is the
        id of the note. If the notes have no ids, ``doc.user_data["note_index"]`` is its position. At the end, a warning contains the
        number of entities that do not start and end at the boundaries of tokens.

        Args:
            nlp: Pipeline whose tokenizer is used.

        Raises:
            ConfigurationError: If ``nlp`` is not a spaCy pipeline, or if the results are not entities.

        Example:
            >>> import spacy
            >>> from openmed_nb import annotate
            >>> found = annotate(["She has asthma."], "bundled_small", device="cpu")
            >>> [doc.ents for doc in found.to_spacy(spacy.blank("en"))]
            [(asthma,)]
        """
        from .export.formats import iter_docs

        return iter_docs(nlp, self.iter_exported_notes())
