"""Texts in which entities are replaced, such as the personal data that a model finds: the spans, and the text without them."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .._render.display import WARNING, Displayable, Report, TextSegment, pluralize
from .._utils.text import describe_value, shorten
from .._utils.validation import invalid_type, invalid_value
from ..errors import ConfigurationError
from .boundaries import JOINER, is_combining_mark, whole_words

REPLACEMENT = "[{label}]"
MAX_DISPLAYED_TEXTS = 5  # Of many texts; only these are kept.
IS_MISSING = "The text is missing."
MASKING_DISCLAIMER = (
    "This is no guarantee: what the model did not find stays in the text. Read it before you pass it on."
)

# What identifies somebody, in kinds, each with the labels of models that stand for it: in capitals, and letters alone.
KINDS = {
    "names": (
        *("NAME", "PERSON", "PER", "PATIENT", "DOCTOR", "PHYSICIAN", "PROVIDER", "CLINICIAN", "STAFF", "HCW"),
        *("FIRSTNAME", "GIVENNAME", "MIDDLENAME", "LASTNAME", "SURNAME", "FAMILYNAME", "FULLNAME", "HUMANNAME"),
        *("PERSONNAME", "PERSONALNAME", "PATIENTNAME", "NAMEPATIENT", "DOCTORNAME", "NAMEDOCTOR", "STAFFNAME"),
    ),
    "dates": (
        "DATE",
        "DATES",
        "DATETIME",
        "DOB",
        "DATEOFBIRTH",
        "BIRTHDATE",
        "BIRTHDAY",
        "ADMISSIONDATE",
        "DISCHARGEDATE",
    ),
    "places": (
        *("LOCATION", "LOC", "PLACE", "GPE", "ADDRESS", "STREET", "STREETADDRESS", "CITY", "TOWN", "STATE", "COUNTY"),
        *("COUNTRY", "ZIP", "ZIPCODE", "POSTCODE", "POSTALCODE", "HOSPITAL", "HOSP", "LOCATIONOTHER", "LOCATIONCITY"),
    ),
    "numbers": (
        *("ID", "IDNUM", "IDNUMBER", "NUMBER", "PHONE", "PHONENUMBER", "TELEPHONE", "TELEPHONENUM", "TELEPHONENUMBER"),
        *("FAX", "FAXNUMBER", "MRN", "MEDICALRECORD", "MEDICALRECORDNUMBER", "PATIENTID", "NATIONALID", "NHSNUMBER"),
        *("SSN", "SOCIALSECURITYNUMBER", "PASSPORT", "PASSPORTNUMBER", "ACCOUNT", "ACCOUNTNUMBER", "IDCARDNUM"),
    ),
}
OF_FILTERS = ("PRIVATE", "PERSONAL", "PII", "PHI")  # What some models write before each of their labels.
SHOWN_LABELS = 12
MAX_SHOWN_TEXT_CHARACTERS = 100_000  # A browser renders no more in reasonable time.

# What a replacement may be: a text for every label, or one for each, with None for a label that stays.
Policy = str | Mapping[str, str | None]


@dataclass(frozen=True)
class MaskedSpan:
    """A part of a text that was replaced; nothing of it is kept.

    Attributes:
        label: The label of the entity.
        start: Where it began in the text that was annotated, in characters.
        end: Where it ended there.
        masked_start: Where its replacement begins.
        masked_end: Where that ends.
    """

    label: str
    start: int
    end: int
    masked_start: int
    masked_end: int


@dataclass(frozen=True, repr=False)
class MaskedText(Displayable):
    """A text whose entities are replaced; of what was replaced nothing is kept but its label and its place.

    Attributes:
        text: The text with replacements; empty where there is an error.
        spans: What was replaced, in order.
        error: Why the text has no answer, so that nothing of it is shown; empty where it has one.
        show_text: Whether the text is part of what is shown.
        missing: Whether there was a missing value in its place.
        known_labels: The labels of the model that are replaced where it finds them; ``None`` where that is not known.
        filters: What :meth:`Annotations.filter` kept, as sentences; all else stays in the text.
    """

    text: str
    spans: tuple[MaskedSpan, ...] = ()
    error: str = ""
    show_text: bool = True
    missing: bool = False
    known_labels: tuple[str, ...] | None = None
    filters: tuple[str, ...] = ()

    JSON_EXCLUDE = ("known_labels", "filters")

    def original_offset(self, position: int) -> int:
        """Return where a character of the masked text stands in the text that was annotated.

        Args:
            position: A place in :attr:`text`, from 0 to its length.

        Returns:
            Its place there; for one inside a replacement, where what it replaces begins.

        Raises:
            ConfigurationError: For a place that the text does not have.

        Example:
            >>> masked = mask_text("Ann Lee coughs.", [(0, 7, "NAME")], "[{label}]")
            >>> masked.text, masked.original_offset(6), masked.original_offset(3)
            ('[NAME] coughs.', 7, 0)
        """
        if type(position) is not int or not 0 <= position <= len(self.text):
            raise invalid_value("position", position, f"Pass a whole number from 0 to {len(self.text)}.")
        moved = 0
        for one in self.spans:
            if position < one.masked_start:
                break
            if position < one.masked_end:
                return one.start
            moved = one.end - one.masked_end
        return position + moved

    def to_report(self) -> Report:
        """Return the text with its replacements marked, and what masking does not promise."""
        if self.error:
            return Report("Nothing masked", (self.error,), status=WARNING)
        if self.missing:
            return Report("Nothing masked", (IS_MISSING,), status=WARNING)
        hidden = () if self.show_text else ("(the text is hidden)",)
        stay, known = what_stays(self.known_labels)
        title = f"{pluralize(len(self.spans), 'entity', 'entities')} masked{stay}"
        pieces = tuple(self._pieces()) if self.show_text else ()
        cut = long_text_sentence(self.text) if self.show_text else ()
        return Report(
            title, (*self.filters, *known, MASKING_DISCLAIMER, *hidden, *cut), segments=pieces, status=WARNING
        )

    def _pieces(self) -> Iterator[TextSegment]:
        text = self.text[:MAX_SHOWN_TEXT_CHARACTERS]
        position = 0
        for span in self.spans:
            if span.masked_end > len(text):
                break
            yield TextSegment(text[position : span.masked_start])
            if span.masked_end > span.masked_start:
                yield TextSegment(text[span.masked_start : span.masked_end], span.label)
            position = span.masked_end
        yield TextSegment(text[position:])
        if len(text) < len(self.text):
            yield TextSegment("…")


def long_text_sentence(text: str) -> tuple[str, ...]:
    """Return the sentence on a text that is too long to be shown whole, none for another."""
    if len(text) <= MAX_SHOWN_TEXT_CHARACTERS:
        return ()
    return (f"Shown: the first {MAX_SHOWN_TEXT_CHARACTERS:,} of {len(text):,} characters; .text has all.",)


class MaskedTexts(Displayable, list[MaskedText]):
    """The masked texts of a run: a list that shows how much was replaced, and the first texts."""

    known_labels: tuple[str, ...] | None = None  # As in :class:`MaskedText`.
    filters: tuple[str, ...] = ()  # What :meth:`Annotations.filter` kept, as sentences; all else stays in the texts.

    def to_dict(self) -> dict[str, Any]:
        return {"texts": [one.to_dict() for one in self]}

    def to_report(self) -> Report:
        """Return how much was replaced, the first texts with their replacements marked, and what masking does not promise."""
        count = pluralize(sum(len(one.spans) for one in self), "entity", "entities")
        more = len(self) > MAX_DISPLAYED_TEXTS
        first = f"Shown: the first {MAX_DISPLAYED_TEXTS} texts." if more else ""
        another = f"The first {MAX_DISPLAYED_TEXTS} of {len(self):,} texts. masked[{MAX_DISPLAYED_TEXTS}] is another, where masked is this result."
        pieces: list[TextSegment] = []
        for number, one in enumerate(self[:MAX_DISPLAYED_TEXTS]):
            text = one.to_report()
            said = text.segments or (TextSegment(text.sentences[-1]),)
            pieces += [TextSegment(f"{number}: ", starts_text=True), *said, TextSegment("\n")]
        stay, known = what_stays(self.known_labels)
        sentences = tuple(filter(None, (*self.filters, *known, MASKING_DISCLAIMER, first)))
        title = f"{count} masked in {pluralize(len(self), 'text')}{stay}"
        spoken = (title, *self.filters, *known, MASKING_DISCLAIMER, another) if more else ()
        return Report(title, sentences, segments=tuple(pieces), html_sentences=spoken, status=WARNING)


def validate_policy(replacement: Any) -> Policy:
    """Return what entities are replaced with, or raise what is wrong with it.

    Raises:
        ConfigurationError: For what is neither a text nor a mapping of labels to texts, and for a field other than ``{label}``.

    Example:
        >>> validate_policy("<{name}>")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: A replacement has no field 'name'. Use {label}, as in '[{label}]'.
    """
    if not isinstance(replacement, (str, Mapping)):
        raise invalid_value(
            "A replacement", replacement, f"Pass a text such as {REPLACEMENT!r}, or a mapping of labels to such texts."
        )
    given = replacement if isinstance(replacement, Mapping) else {"": replacement}
    folded = [label.casefold() for label in given if isinstance(label, str)]
    if len(set(folded)) < len(folded):
        what = "A replacement names one label twice: capitals make no difference."
        raise ConfigurationError(what, "Name each label once.")
    for label, text in given.items():
        if not isinstance(label, str) or not (text is None or isinstance(text, str)):
            raise invalid_value("A replacement", text, "Pass a text for each label, or None for a label that stays.")
        try:
            fields = [one[1:] for one in string.Formatter().parse(text or "") if one[1] is not None]
        except ValueError as error:
            remedy = "Write {{ and }} for braces, and {label} for the label."
            raise ConfigurationError(f"{describe_value(text)} is no replacement: {error}.", remedy) from None
        if wrong := next((one for one in fields if one != ("label", "", None)), None):
            what = f"A replacement has no field {describe_value(':'.join(filter(None, wrong)))}."
            raise ConfigurationError(what, f"Use {{label}}, as in {REPLACEMENT!r}.")
    return replacement


class LabeledSpan(NamedTuple):
    """Characters with a label, the start and the end in characters of the text."""

    start: int
    end: int
    label: str
    continues: bool = False  # whether it continues a span of its label that it touches


def replaced(labels: Iterable[str] | None, policy: Policy) -> tuple[str, ...] | None:
    """Return the labels that a policy replaces; ``None`` where the labels are not known."""
    if labels is None:
        return None
    items = policy.items() if isinstance(policy, Mapping) else ()
    stays = {label.casefold() for label, text in items if text is None}
    return tuple(label for label in labels if label.casefold() not in stays)


def unknown_kinds(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the kinds of what identifies somebody that none of a model's labels stands for.

    Example:
        >>> unknown_kinds(["DISEASE"]), unknown_kinds(["private_person", "First Name", "DATE", "MRN"])
        (('names', 'dates', 'places', 'numbers'), ('places',))
    """
    plain = {re.sub(r"[^A-Z]", "", label.upper()) for label in labels}
    for word in OF_FILTERS:
        plain |= {label.removeprefix(word) for label in plain}
    return tuple(kind for kind, known in KINDS.items() if plain.isdisjoint(known))


def what_stays(labels: tuple[str, ...] | None) -> tuple[str, tuple[str, ...]]:
    """Return the end of a headline, and a sentence: which labels a model knows, and which kinds stay in the text.

    Example:
        >>> what_stays(("DISEASE",))
        ('; names, dates, places and numbers stay', ('Only what the model labels DISEASE is replaced.',))
    """
    if labels is None:
        return "", ()
    kinds = unknown_kinds(labels)
    more = f" and {len(labels) - SHOWN_LABELS} more" if len(labels) > SHOWN_LABELS else ""
    known = ", ".join(map(shorten, labels[:SHOWN_LABELS])) + more if labels else "nothing"
    end = f"; {' and '.join(filter(None, (', '.join(kinds[:-1]), kinds[-1])))} stay" if kinds else ""
    return end, (f"Only what the model labels {known} is replaced.",)


def strip_bio_prefix(label: str) -> str:
    """Return a token's label without its prefix: ``B-NAME`` is NAME."""
    prefix, dash, rest = label.partition("-")
    return rest if dash and prefix in set("BIESLU") and rest else label


def continues_entity(label: str) -> bool:
    """Return whether a token's label continues the entity before it; ``B-NAME``, ``S-NAME`` and ``U-NAME`` start another."""
    return not (strip_bio_prefix(label) != label and label[0] in "BSU")


def mask_text(  # noqa: PLR0913 - the last three are kept with the result
    text: str,
    spans: Iterable[tuple[Any, ...]],
    policy: Policy,
    show_text: bool = True,
    *,
    labels: tuple[str, ...] | None = None,
    filters: tuple[str, ...] = (),
) -> MaskedText:
    """Return a text in which spans, each a :class:`LabeledSpan` or its values, are replaced.

    White space at the ends of a span stays. A span that starts or ends inside a word takes the whole word, because the rest of a
    name still identifies it. Spans that overlap are replaced once, with the label of the longest. ``labels`` are those that the
    model knows.

    Example:
        >>> mask_text("Jo Ann-Lee", [(0, 1, "NAME"), (3, 10, "NAME"), (5, 6, "CITY")], "<{label}>").text
        '<NAME> <NAME>'
        >>> mask_text("on 3 May, Jo", [(3, 8, "DATE"), (10, 12, "NAME")], {"DATE": None, "NAME": "X"}).text
        'on 3 May, X'
    """
    given: Mapping[str, str | None] = policy if isinstance(policy, Mapping) else {}
    templates = {label.casefold(): template for label, template in given.items()}  # As ``only`` takes labels.
    usual = policy if isinstance(policy, str) else REPLACEMENT
    masked: list[LabeledSpan] = []
    last = LabeledSpan(-1, -1, "")
    for span in sorted(LabeledSpan(*values) for values in spans):
        if span.end <= span.start or templates.get(span.label.casefold(), usual) is None:
            continue
        if last.start <= span.start and span.end <= last.end:  # Its words were looked for already.
            masked.append(span)
            continue
        start, end = whole_words(text, span.start, span.end)
        if start < end:
            last = span._replace(start=start, end=end)
            masked.append(last)
    parts: list[str] = []
    found: list[MaskedSpan] = []
    position = length = 0
    for start, end, label, _continues in merge_overlapping(masked):
        template = templates.get(label.casefold(), usual) or ""
        before, replacement = text[position:start], template.format(label=label)
        begin = length + len(before)
        length = begin + len(replacement)
        parts += before, replacement
        found.append(MaskedSpan(label, start, end, begin, length))
        position = end
    return MaskedText(
        "".join((*parts, text[position:])),
        tuple(found),
        show_text=show_text,
        known_labels=replaced(labels, policy),
        filters=filters,
    )


def merge_overlapping(spans: Iterable[LabeledSpan]) -> list[LabeledSpan]:
    """Return spans that do not overlap, in order: those that did are one, with the label of the longest."""
    found: list[LabeledSpan] = []
    longest = 0
    for span in sorted(spans, key=lambda one: (one.start, -one.end)):
        length = span.end - span.start
        last = found[-1] if found else LabeledSpan(-1, -1, "")
        if span.start < last.end or (span.start == last.end and span.label == last.label and span.continues):
            label = span.label if length > longest else last.label
            found[-1] = last._replace(end=max(span.end, last.end), label=label)
            longest = max(longest, length)
        else:
            found.append(span)
            longest = length
    return found


def continues_character(text: str, position: int) -> bool:
    """Return whether a character belongs to the one before it, as an accent does, or as a joiner joins them."""
    return is_combining_mark(text[position]) or JOINER in text[position - 1 : position + 1]


def expand_to_words(text: str, start: int, end: int) -> tuple[int, int]:
    """Return a span that starts and ends at no position between a letter and its marks."""
    start, end = max(0, start), min(len(text), end)
    while 0 < start < len(text) and continues_character(text, start):
        start -= 1
    while 0 < end < len(text) and continues_character(text, end):
        end += 1
    return start, end


# By what the label of a privacy filter holds: how such a thing looks, so that a span with more around it shrinks to that.
LABEL_PATTERNS = {
    "email": re.compile(r"\b[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}\b"),
    "url": re.compile(r"\b(?:https?://|www\.)[^\s,;)\]]+"),
    "phone": re.compile(r"(?:\+?1[\s.-]?)?\(?\d{3}\)?[\s.-]?\d{3}[\s.-]?\d{4}"),
}
ENTITIES_REMEDY = "Pass the entities that a pipeline found in this text."
CONJUNCTION = re.compile(r" (?:and|or)$", re.IGNORECASE)


def refine_spans(text: str, entities: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the entities of a privacy filter with tighter spans, as OpenMed gives them.

    White space at the ends goes, and so does a last "and" or "or"; what is labeled as an address of mail, a web address or a
    telephone number shrinks to the part that looks like one. Masking does not need it: it replaces whole words.

    Args:
        text: The text that the entities were found in.
        entities: Mappings with ``entity_group`` or ``entity``, ``score``, ``start`` and ``end``, in characters.

    Returns:
        For each, ``entity_group``, ``score``, ``word``, ``start`` and ``end``.

    Raises:
        ConfigurationError: For what is no text, and for an entity without a score or a place in the text.

    Example:
        >>> refine_spans("Mail ann@x.org and call.", [{"entity_group": "private_email", "score": 0.9, "start": 4, "end": 18}])
        [{'entity_group': 'private_email', 'score': 0.9, 'word': 'ann@x.org', 'start': 5, 'end': 14}]
    """
    if not isinstance(text, str):
        raise invalid_type("The text", text, "Pass the text that the entities were found in.")
    if not isinstance(entities, Iterable):
        raise invalid_type("entities", entities, ENTITIES_REMEDY)
    found = []
    for one in entities:
        score = None
        try:
            label = str(one.get("entity_group") or one.get("entity") or "")
            first, last, score = int(one["start"]), int(one["end"]), float(one["score"])
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError):
            pass
        if (
            score is None
        ):  # Outside of the handler: Python's error quotes the value, and would be the context of this one.
            raise ConfigurationError("An entity has no start, end or score that is a number.", ENTITIES_REMEDY)
        if not 0 <= first <= last <= len(text):
            what = f"An entity from {first} to {last} is not in a text of {len(text)} characters."
            raise ConfigurationError(what, ENTITIES_REMEDY)
        start, end = strip_span(text, *expand_to_words(text, first, last))
        span = text[start:end]
        looks = (pattern.search(span) for name, pattern in LABEL_PATTERNS.items() if name in label.lower())
        if match := next(filter(None, looks), None):
            start, end = start + match.start(), start + match.end()
        elif label:
            start, end = strip_span(text, start, start + len(CONJUNCTION.sub("", span)))
        found.append({"entity_group": label, "score": score, "word": text[start:end], "start": start, "end": end})
    return found


def strip_span(text: str, start: int, end: int) -> tuple[int, int]:
    """Return a span without white space at its ends."""
    span = text[start:end]
    start += len(span) - len(span.lstrip())
    return start, max(start, end - len(span) + len(span.rstrip()))
