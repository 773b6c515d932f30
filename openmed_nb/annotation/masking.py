"""Masking: replace entities in texts, such as personal data that a model detects."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from .._render.display import WARNING, Displayable, Report, Table, TextSegment, pluralize
from .._utils.text import shorten
from .._utils.validation import invalid_type, invalid_value
from ..errors import ConfigurationError
from .boundaries import JOINER, split_lines, strip_span, whole_words
from .inputs import make_id_column
from .matching import NoteKeys
from .presentation import note_name

if TYPE_CHECKING:
    import pandas as pd

REPLACEMENT = "[{label}]"
HIDDEN_TEXT_NOTICE = "(text hidden)"
MAX_DISPLAYED_TEXTS = 5  # Only these texts are stored for display.
IS_MISSING = "The text is missing."
MASKING_DISCLAIMER = (
    "Masking is not guaranteed to be complete: entities that the model misses remain in the text. "
    "Review the text before you share it."
)

# Categories of identifying data, each with the model labels that belong to it, as upper-case words.
IDENTIFIER_LABELS = {
    "names": "NAME PERSON PER PATIENT DOCTOR PHYSICIAN PROVIDER CLINICIAN STAFF HCW FIRSTNAME GIVENNAME MIDDLENAME LASTNAME "
    "SURNAME FAMILYNAME FULLNAME HUMANNAME PERSONNAME PERSONALNAME PATIENTNAME NAMEPATIENT DOCTORNAME NAMEDOCTOR STAFFNAME",
    "dates": "DATE DATES DATETIME DOB DATEOFBIRTH BIRTHDATE BIRTHDAY ADMISSIONDATE DISCHARGEDATE",
    "places": "LOCATION LOC PLACE GPE ADDRESS STREET STREETADDRESS CITY TOWN STATE COUNTY COUNTRY ZIP ZIPCODE POSTCODE "
    "POSTALCODE HOSPITAL HOSP LOCATIONOTHER LOCATIONCITY",
    "numbers": "ID IDNUM IDNUMBER NUMBER PHONE PHONENUMBER TELEPHONE TELEPHONENUM TELEPHONENUMBER FAX FAXNUMBER MRN "
    "MEDICALRECORD MEDICALRECORDNUMBER PATIENTID NATIONALID NHSNUMBER SSN SOCIALSECURITYNUMBER PASSPORT PASSPORTNUMBER "
    "ACCOUNT ACCOUNTNUMBER IDCARDNUM",
}

# Prefixes that some models add to each of their labels.
LABEL_PREFIXES = ("PRIVATE", "PERSONAL", "PII", "PHI")

# A browser does not render longer texts in reasonable time.
MAX_SHOWN_TEXT_CHARACTERS = 100_000

# Seconds after which the search for the matches of a rule in a text fails, because a pattern may take exponential time.
RULE_TIMEOUT_SECONDS = 1.0

# The end of a possessive, such as "'s", which stays in the text.
_POSSESSIVE = re.compile(r"(?<=[^\s'\u2019])(?:['\u2019]s|(?<=s)['\u2019])\Z", re.IGNORECASE)

# Sources of a masked span: an entity, a word that the model labeled only in part, or a match of a rule.
MODEL = "model"
PARTIAL = "partial"
RULE = "rule"

# A replacement for all labels, or a mapping of labels to replacements.
Policy = str | Mapping[str, str]


class MaskingLimits(NamedTuple):
    """What masking leaves in a text.

    Attributes:
        title_suffix: End of a headline with the categories of identifying data that are not masked.
        sentences: Sentences about filters, labels and rules.
    """

    title_suffix: str = ""
    sentences: tuple[str, ...] = (MASKING_DISCLAIMER,)


NO_LIMITS_KNOWN = MaskingLimits()


@dataclass(frozen=True)
class MaskedSpan:
    """A masked span. It does not contain the replaced text.

    Attributes:
        label: Label of the entity.
        start: Start of the span in the original text, in characters.
        end: End of the span in the original text.
        masked_start: Start of the replacement in the masked text.
        masked_end: End of the replacement in the masked text.
        source: ``"model"``; ``"partial"`` for a word that the model labeled only in part, so that it is not an entity; or
            ``"rule"`` for a match of a regular expression.
    """

    label: str
    start: int
    end: int
    masked_start: int
    masked_end: int
    source: str = MODEL


@dataclass(frozen=True, repr=False)
class MaskedText(Displayable):
    """A text whose entities are replaced. Only the labels and offsets of the replaced entities are stored.

    Attributes:
        text: The text with replacements, or an empty string if there is an error.
        spans: The replaced spans, in order.
        error: The error if the text could not be processed, else an empty string. The text is not returned then.
        show_text: Whether to display the text.
        missing: Whether the input was a missing value.
        limits: What masking leaves in the text.
    """

    text: str
    spans: tuple[MaskedSpan, ...] = ()
    error: str = ""
    show_text: bool = True
    missing: bool = False
    limits: MaskingLimits = NO_LIMITS_KNOWN

    JSON_EXCLUDE = ("limits",)

    def to_report(self) -> Report:
        """Return the text with highlighted replacements, and the limits of masking."""
        problem = self.error or (IS_MISSING if self.missing else "")
        if problem:
            return Report("Nothing masked", (problem,), status=WARNING)
        title_suffix, limits = self.limits
        sentences = (*_partial_sentence(self.spans), *limits)
        title = f"{_count_entities(self.spans)} masked{title_suffix}"
        if not self.show_text:
            return Report(title, (*sentences, HIDDEN_TEXT_NOTICE), status=WARNING)
        sentences = (*sentences, *long_text_sentence(self.text))
        return Report(title, sentences, segments=tuple(self._segments()), status=WARNING)

    def _segments(self) -> Iterator[TextSegment]:
        position = 0
        for span in self.spans:
            if span.masked_end > MAX_SHOWN_TEXT_CHARACTERS:
                break
            yield TextSegment(self.text[position : span.masked_start])
            if span.masked_end > span.masked_start:
                yield TextSegment(self.text[span.masked_start : span.masked_end], span.label)
            position = span.masked_end
        yield TextSegment(self.text[position:MAX_SHOWN_TEXT_CHARACTERS])


def _partial_sentence(spans: Iterable[MaskedSpan]) -> tuple[str, ...]:
    """Return the number of masked words that are not entities, as a sentence, or an empty tuple."""
    count = len([span for span in spans if span.source == PARTIAL])
    return (f"Also masked: {pluralize(count, 'word')} that the model labeled only in part.",) if count else ()


def _count_entities(spans: Iterable[MaskedSpan]) -> str:
    return pluralize(len([span for span in spans if span.source != PARTIAL]), "entity", "entities")


def long_text_sentence(text: str) -> tuple[str, ...]:
    """Return the notice about a text that is too long to display in full, or an empty tuple."""
    if len(text) <= MAX_SHOWN_TEXT_CHARACTERS:
        return ()
    return (f"Displayed: the first {MAX_SHOWN_TEXT_CHARACTERS:,} of {len(text):,} characters; .text contains all.",)


@dataclass(frozen=True, repr=False)
class MaskedTexts(Displayable, Sequence[MaskedText]):
    """The masked texts of a run: a sequence that displays the number of replacements and the first texts.

    Attributes:
        texts: The masked texts, in the order of the notes.
        keys: What identifies the notes.
        limits: What masking leaves in the texts.
    """

    texts: tuple[MaskedText, ...]
    keys: NoteKeys
    limits: MaskingLimits = NO_LIMITS_KNOWN

    JSON_EXCLUDE = ("keys", "limits")

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: Any) -> Any:
        return self.texts[index]

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """Number of replacements by label and source; see :class:`MaskedSpan`."""
        counts = Counter((span.label, span.source) for masked in self for span in masked.spans)
        return dict(sorted(counts.items()))

    def to_frame(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return a copy of the table of the notes with the column ``masked_text``.

        A missing text is missing, and so is a text with an error.

        Args:
            table: Table of the notes. Its rows are matched by the column of the ids if there is one, otherwise by the index, and their
                texts are compared.

        Raises:
            ConfigurationError: If the table already has the column ``masked_text``.
            UnmatchedIdsError: If a row of the table is not one of the notes.

        Example:
            >>> import pandas as pd
            >>> from openmed_nb import annotate
            >>> notes = pd.DataFrame({"note": ["She has asthma."], "ward": [3]})
            >>> found = annotate(notes, "bundled_small", device="cpu", text_column="note")
            >>> found.mask().to_frame(notes)["masked_text"].tolist()
            ['She has [DISEASE].']
        """
        notes = self.keys.find_notes(table)
        if "masked_text" in table.columns:
            raise ConfigurationError("The table already has a column 'masked_text'.", "Rename that column.")
        texts = [None if masked.error or masked.missing else masked.text for masked in self]
        return table.assign(masked_text=make_id_column([texts[note] for note in notes]))

    def to_report(self) -> Report:
        """Return the number of replacements, the first texts with highlighted replacements, and the limits of masking."""
        spans = [span for masked in self for span in masked.spans]
        segments: list[TextSegment] = []
        for index, masked in enumerate(self[:MAX_DISPLAYED_TEXTS]):
            report = masked.to_report()
            text_segments = report.segments or (TextSegment(report.sentences[-1]),)
            name = note_name(index, self.keys.row_index if self.keys.ids is None else self.keys.ids)
            segments += [TextSegment(f"{name}: ", starts_text=True), *text_segments, TextSegment("\n")]
        title_suffix, sentences = self.limits
        sentences = (*_partial_sentence(spans), *sentences)
        title = f"{_count_entities(spans)} masked in {pluralize(len(self), 'text')}{title_suffix}"
        if len(self) > MAX_DISPLAYED_TEXTS:
            sentences = (*sentences, f"Displayed: the first {MAX_DISPLAYED_TEXTS} texts.")
        rows = tuple((label, source, f"{count:,}") for (label, source), count in self.counts.items())
        table = Table("Replaced", ("label", "source", "count"), rows)
        return Report(title, sentences, (table,), tuple(segments), status=WARNING)


def validate_policy(replacement: Any) -> Policy:
    """Validate and return a replacement policy.

    Raises:
        ConfigurationError: If the policy is not a string or a mapping of labels to strings, or if it contains a placeholder other
            than ``{label}``.

    Example:
        >>> validate_policy("<{name}>")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: Unknown placeholder in the replacement. Use {label}, as in '[{label}]'.
    """
    if not isinstance(replacement, (str, Mapping)):
        raise invalid_value(
            "a replacement",
            replacement,
            f"Pass a string such as {REPLACEMENT!r}, or a mapping of labels to such strings.",
        )
    templates = replacement if isinstance(replacement, Mapping) else {"": replacement}
    for label, template in templates.items():
        if not (isinstance(label, str) and isinstance(template, str)):
            raise invalid_value("a replacement", template, "Pass a string for each label.")
        if re.search(r"[\ud800-\udfff]", template):
            raise ConfigurationError("The replacement contains an unpaired surrogate.", "Pass printable characters.")
        if re.search(r"[{}]", template.replace("{label}", "")):
            raise ConfigurationError(
                "Unknown placeholder in the replacement.", f"Use {{label}}, as in {REPLACEMENT!r}."
            )
    return replacement


class LabeledSpan(NamedTuple):
    """A labeled span of a text.

    Attributes:
        start: Start in characters.
        end: End in characters.
        label: Label of the span.
        continues: Whether the span is merged with an adjacent preceding span of the same label.
        source: As for :class:`MaskedSpan`.
    """

    start: int
    end: int
    label: str
    continues: bool = False
    source: str = MODEL


class MaskingRule(NamedTuple):
    """A regular expression whose matches are masked in addition to the entities of the model.

    Attributes:
        label: Label of the matches.
        pattern: Compiled pattern of the package ``regex``.
    """

    label: str
    pattern: Any


def compile_rules(rules: Any) -> tuple[MaskingRule, ...]:
    """Compile regular expressions by label.

    Raises:
        ConfigurationError: If the rules are not a mapping of labels to regular expressions.
    """
    import regex

    if rules is None:
        return ()
    if not isinstance(rules, Mapping):
        raise invalid_type("rules", rules, r"Pass a mapping of labels to patterns, such as {'MRN': r'\d{8}'}.")
    compiled = []
    for position, (label, pattern) in enumerate(rules.items(), 1):
        try:
            compiled.append(MaskingRule(label, regex.compile(pattern)))
            problem = "" if isinstance(label, str) else "has no label"
        except regex.error as error:
            problem = f"is not a valid regular expression: {error.msg} at position {error.pos}"
        except (TypeError, ValueError, RecursionError, MemoryError):
            problem = "is not a valid regular expression"
        # Raised outside of the handler, so that the original error, which contains the pattern, is not the context.
        if problem:
            remedy = r"Pass a pattern of the package regex, such as r'\bMRN[:# ]*\d{6,}\b'."
            raise ConfigurationError(f"Rule {position} {problem}.", remedy)
    return tuple(compiled)


def find_rule_spans(text: str, rules: Iterable[MaskingRule]) -> list[LabeledSpan]:
    """Return the matches of rules.

    Raises:
        ConfigurationError: If the search for the matches of a rule takes more than :data:`RULE_TIMEOUT_SECONDS`, or all of the memory
            that the package regex allows.
    """
    spans = []
    for position, rule in enumerate(rules, 1):
        is_expensive = False
        try:
            matches = list(rule.pattern.finditer(text, timeout=RULE_TIMEOUT_SECONDS))
        except (TimeoutError, MemoryError):
            is_expensive = True
        if is_expensive:
            raise ConfigurationError(
                f"Rule {position} takes more than {RULE_TIMEOUT_SECONDS:g} s or too much memory for this text.",
                "Simplify its pattern, such as nested repetitions.",
            )
        spans += [LabeledSpan(match.start(), match.end(), rule.label, source=RULE) for match in matches]
    return spans


def _find_uncovered_categories(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the categories of identifying data that the labels of a model do not cover.

    Example:
        >>> _find_uncovered_categories(["DISEASE"]), _find_uncovered_categories(["private_person", "First Name", "DATE", "MRN"])
        (('names', 'dates', 'places', 'numbers'), ('places',))
    """
    normalized = {re.sub(r"[^A-Z]", "", label.upper()) for label in labels}
    for prefix in LABEL_PREFIXES:
        normalized |= {label.removeprefix(prefix) for label in normalized}
    return tuple(
        category for category, identifiers in IDENTIFIER_LABELS.items() if normalized.isdisjoint(identifiers.split())
    )


def are_identifying(labels: Collection[str]) -> bool:
    """Return whether a model with these labels finds identifying data: labels of two categories, or a single label of one.

    Example:
        >>> are_identifying(["DISEASE", "DATE"]), are_identifying(["PATIENT", "DATE", "AGE"]), are_identifying(["NAME"])
        (False, True, True)
    """
    return len(_find_uncovered_categories(labels)) + min(2, len(labels)) <= len(IDENTIFIER_LABELS)


def describe_limits(labels: Sequence[str] | None, filters: Sequence[str] = (), num_rules: int = 0) -> MaskingLimits:
    """Return the categories that remain in the text, and sentences about the limits of masking.

    Args:
        labels: Labels of the model, or ``None`` if unknown.
        filters: Filters applied with :meth:`Annotations.filter`, as sentences. Other entities remain in the text.
        num_rules: Number of rules whose matches are replaced too.

    Example:
        >>> describe_limits(("DISEASE",)).title_suffix
        '; names, dates, places and numbers are not masked'
    """
    sentences = [*filters]
    categories = () if labels is None else _find_uncovered_categories(labels)
    if labels:
        plural = "" if len(labels) == 1 else "s"
        sentences.append(f"Only entities with the label{plural} {_join_names([*map(shorten, labels)])} are replaced.")
    if num_rules:
        sentences.append(f"Matches of {pluralize(num_rules, 'rule')} are replaced too.")
    suffix = f"; {_join_names(categories)} are not masked" if categories else ""
    return MaskingLimits(suffix, (*sentences, MASKING_DISCLAIMER))


def _join_names(names: Sequence[str]) -> str:
    """Return names as a list in a sentence, such as ``"names, dates and numbers"``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def strip_bio_prefix(label: str) -> str:
    """Return a token label without its prefix, such as ``NAME`` for ``B-NAME``."""
    prefix, dash, rest = label.partition("-")
    return rest if dash and prefix in set("BIESLU") and rest else label


def normalize_label(label: str) -> str:
    """Return a label without its token prefix and casefolded, such as ``name`` for ``b-Name``."""
    return strip_bio_prefix(label.upper()).casefold()


def mask_text(
    text: str,
    spans: Iterable[tuple[Any, ...]],
    policy: Policy,
    show_text: bool = True,
    limits: MaskingLimits = NO_LIMITS_KNOWN,
) -> MaskedText:
    """Replace labeled spans in a text.

    White space at the ends of a span, line ends and the ending of a possessive are kept. A span that starts or ends inside a word is
    extended to the whole word, because the rest of a name is still identifying. Overlapping spans are replaced once, with the label
    of the longest span.

    Args:
        text: The original text.
        spans: The spans, as :class:`LabeledSpan` or as tuples of its values.
        policy: The replacement of each label.
        show_text: Whether to display the masked text.
        limits: What masking leaves in the text.

    Example:
        >>> mask_text("Jo Ann-Lee", [(0, 1, "NAME"), (3, 10, "NAME"), (5, 6, "CITY")], "<{label}>").text
        '<NAME> <NAME>'
        >>> mask_text("on 3 May, Jo's", [(3, 8, "DATE"), (10, 14, "NAME")], {"DATE": "then"}).text
        "on then, [NAME]'s"
    """
    # Labels are not case-sensitive, as in Annotations.filter.
    templates = (
        {normalize_label(label): template for label, template in policy.items()} if isinstance(policy, Mapping) else {}
    )
    default_template = policy if isinstance(policy, str) else REPLACEMENT
    expanded_spans: list[LabeledSpan] = []
    last = LabeledSpan(-1, -1, "")
    for span in sorted(LabeledSpan(*values) for values in spans):
        if span.end <= span.start:
            continue
        if last.start <= span.start and span.end <= last.end:  # The last span already includes these words.
            expanded_spans.append(span)
            continue
        start, end = whole_words(text, span.start, span.end)
        if start < end:
            last = span._replace(start=start, end=end)
            expanded_spans.append(last)
    parts: list[str] = []
    masked_spans: list[MaskedSpan] = []
    position = 0
    length = 0
    for span in _merge_overlapping(expanded_spans):
        for start, line_end in split_lines(text, span.start, span.end):
            end = start + len(_POSSESSIVE.sub("", text[start:line_end]))
            before = text[position:start]
            replacement = templates.get(normalize_label(span.label), default_template).replace("{label}", span.label)
            masked_start = length + len(before)
            length = masked_start + len(replacement)
            parts += before, replacement
            masked_spans.append(MaskedSpan(span.label, start, end, masked_start, length, span.source))
            position = end
    masked = "".join((*parts, text[position:]))
    return MaskedText(masked, tuple(masked_spans), show_text=show_text, limits=limits)


def _merge_overlapping(spans: Iterable[LabeledSpan]) -> list[LabeledSpan]:
    """Return sorted spans without overlaps. Overlapping spans are merged and get the label of the longest span."""
    merged: list[LabeledSpan] = []
    max_length = 0
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        length = span.end - span.start
        last = merged[-1] if merged else LabeledSpan(-1, -1, "")
        if span.start < last.end or (span.start == last.end and span.label == last.label and span.continues):
            longest = span if length > max_length else last
            merged[-1] = last._replace(end=max(span.end, last.end), label=longest.label, source=longest.source)
            max_length = max(max_length, length)
        else:
            merged.append(span)
            max_length = length
    return merged


def _continues_character(text: str, position: int) -> bool:
    """Return whether a character continues the previous character, as a combining mark or through a joiner."""
    if position in {0, len(text)}:
        return False
    return unicodedata.category(text[position]).startswith("M") or JOINER in text[position - 1 : position + 1]


# Patterns of entities by a word in their label. A span that is too long is reduced to the match.
LABEL_PATTERNS = {
    "email": re.compile(r"\b[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}\b"),
    "url": re.compile(r"\b(?:https?://|www\.)[^\s,;)\]]+"),
    "phone": re.compile(r"(?:\+?1[\s.-]?)?\(?\d{3}\)?[\s.-]?\d{3}[\s.-]?\d{4}"),
}
ENTITIES_REMEDY = "Pass the entities that a pipeline returned for this text."
CONJUNCTION = re.compile(r" (?:and|or)$", re.IGNORECASE)


def refine_spans(text: str, entities: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the entities of a privacy filter with tighter spans, as in OpenMed.

    Surrounding white space and a trailing "and" or "or" are removed. Entities labeled as email address, URL or phone number are
    reduced to the part that matches such a pattern. Masking does not need this function, because it replaces whole words.

    Args:
        text: Text that contains the entities.
        entities: Mappings with ``entity_group`` or ``entity``, ``score``, ``start`` and ``end``, in characters.

    Returns:
        A list of dictionaries with ``entity_group``, ``score``, ``word``, ``start`` and ``end``.

    Raises:
        ConfigurationError: If ``text`` is not a string, or if an entity has no score or is not within the text.

    Example:
        >>> refine_spans("Mail ann@x.org and call.", [{"entity_group": "private_email", "score": 0.9, "start": 4, "end": 18}])
        [{'entity_group': 'private_email', 'score': 0.9, 'word': 'ann@x.org', 'start': 5, 'end': 14}]
    """
    if not isinstance(text, str):
        raise invalid_type("the text", text, "Pass the text that contains the entities.")
    if not isinstance(entities, Iterable):
        raise invalid_type("entities", entities, ENTITIES_REMEDY)
    refined = []
    for entity in entities:
        has_numbers = isinstance(entity, Mapping) and all(
            isinstance(entity.get(name), Real) for name in ("score", "start", "end")
        )
        if not has_numbers or not 0 <= entity["start"] <= entity["end"] <= len(text):
            raise ConfigurationError("An entity has no score, start and end within the text.", ENTITIES_REMEDY)
        label = str(entity.get("entity_group") or entity.get("entity") or "")
        score = entity["score"]
        start = int(entity["start"])
        end = int(entity["end"])
        while _continues_character(text, start):
            start -= 1
        while _continues_character(text, end):
            end += 1
        start, end = strip_span(text, start, end)
        span = text[start:end]
        matches = (pattern.search(span) for name, pattern in LABEL_PATTERNS.items() if name in label.lower())
        if match := next(filter(None, matches), None):
            end = start + match.end()
            start += match.start()
        elif label:
            start, end = strip_span(text, start, start + len(CONJUNCTION.sub("", span)))
        refined.append(
            {"entity_group": label, "score": float(score), "word": text[start:end], "start": start, "end": end}
        )
    return refined
