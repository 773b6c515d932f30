"""Texts in which entities are replaced, such as the personal data that a model finds: the spans, and the text without them."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..display import WARNING, Piece, Report, Shown, counted
from ..errors import ConfigurationError, cannot_be, shorten, wrong_type

REPLACEMENT = "[{label}]"
SHOWN_TEXTS = 5  # Of many texts; only these are kept.
NO_GUARANTEE = "This is no guarantee: what the model did not find stays in the text. Read it before you pass it on."

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
class MaskedText(Shown):
    """A text whose entities are replaced; of what was replaced nothing is kept but its label and its place.

    Attributes:
        text: The text with replacements; empty where there is an error.
        spans: What was replaced, in order.
        error: Why the text has no answer, so that nothing of it is shown; empty where it has one.
        show_text: Whether the text is part of what is shown.
        known_labels: The labels of the model that are replaced where it finds them; ``None`` where that is not known.
    """

    text: str
    spans: tuple[MaskedSpan, ...] = ()
    error: str = ""
    show_text: bool = True
    known_labels: tuple[str, ...] | None = None

    HIDDEN = ("known_labels",)

    def original(self, position: int) -> int:
        """Return where a character of the masked text stands in the text that was annotated.

        Args:
            position: A place in :attr:`text`, from 0 to its length.

        Returns:
            Its place there; for one inside a replacement, where what it replaces begins.

        Raises:
            ConfigurationError: For a place that the text does not have.

        Example:
            >>> masked = masked_text("Ann Lee coughs.", [(0, 7, "NAME")], "[{label}]")
            >>> masked.text, masked.original(6), masked.original(3)
            ('[NAME] coughs.', 7, 0)
        """
        if type(position) is not int or not 0 <= position <= len(self.text):
            raise cannot_be("position", position, f"Pass a whole number from 0 to {len(self.text)}.")
        moved = 0
        for one in self.spans:
            if position < one.masked_start:
                break
            if position < one.masked_end:
                return one.start
            moved = one.end - one.masked_end
        return position + moved

    def report(self) -> Report:
        """Return the text with its replacements marked, and what masking does not promise."""
        if self.error:
            return Report("Nothing masked", (self.error,), status=WARNING)
        hidden = () if self.show_text else ("(the text is hidden)",)
        stay, known = what_stays(self.known_labels)
        title = f"{counted(len(self.spans), 'entity', 'entities')} masked{stay}"
        pieces = tuple(self._pieces()) if self.show_text else ()
        return Report(title, (*known, NO_GUARANTEE, *hidden), pieces=pieces, status=WARNING)

    def _pieces(self) -> Iterator[Piece]:
        position = 0
        for one in self.spans:
            yield Piece(self.text[position : one.masked_start])
            if one.masked_end > one.masked_start:
                yield Piece(self.text[one.masked_start : one.masked_end], one.label)
            position = one.masked_end
        yield Piece(self.text[position:])


class MaskedTexts(Shown, list[MaskedText]):
    """The masked texts of a run: a list that shows how much was replaced, and the first texts."""

    known_labels: tuple[str, ...] | None = None  # As in :class:`MaskedText`.

    def to_dict(self) -> dict[str, Any]:
        return {"texts": [one.to_dict() for one in self]}

    def report(self) -> Report:
        """Return how much was replaced, the first texts with their replacements marked, and what masking does not promise."""
        count = counted(sum(len(one.spans) for one in self), "entity", "entities")
        more = len(self) > SHOWN_TEXTS
        first = f"Shown: the first {SHOWN_TEXTS} texts." if more else ""
        another = f"The first {SHOWN_TEXTS} of {len(self):,} texts. masked[{SHOWN_TEXTS}] is another, where masked is this result."
        pieces: list[Piece] = []
        for number, one in enumerate(self[:SHOWN_TEXTS]):
            text = one.report()
            said = text.pieces or (Piece(text.sentences[-1]),)
            pieces += [Piece(f"{number}: ", begins=True), *said, Piece("\n")]
        stay, known = what_stays(self.known_labels)
        sentences = tuple(filter(None, (*known, NO_GUARANTEE, first)))
        title = f"{count} masked in {counted(len(self), 'text')}{stay}"
        spoken = (title, *known, NO_GUARANTEE, another) if more else ()
        return Report(title, sentences, pieces=tuple(pieces), spoken=spoken, status=WARNING)


def checked_policy(replacement: Any) -> Policy:
    """Return what entities are replaced with, or raise what is wrong with it.

    Raises:
        ConfigurationError: For what is neither a text nor a mapping of labels to texts, and for a field other than ``{label}``.

    Example:
        >>> checked_policy("<{name}>")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: A replacement has no field 'name'. Use {label}, as in '[{label}]'.
    """
    if not isinstance(replacement, (str, Mapping)):
        raise cannot_be(
            "A replacement", replacement, f"Pass a text such as {REPLACEMENT!r}, or a mapping of labels to such texts."
        )
    given = replacement if isinstance(replacement, Mapping) else {"": replacement}
    for label, text in given.items():
        if not isinstance(label, str) or not (text is None or isinstance(text, str)):
            raise cannot_be("A replacement", text, "Pass a text for each label, or None for a label that stays.")
        try:
            fields = [one[1:] for one in string.Formatter().parse(text or "") if one[1] is not None]
        except ValueError as error:
            remedy = "Write {{ and }} for braces, and {label} for the label."
            raise ConfigurationError(f"{shorten(repr(text))} is no replacement: {error}.", remedy) from error
        if wrong := next((one for one in fields if one != ("label", "", None)), None):
            what = f"A replacement has no field {shorten(':'.join(filter(None, wrong)))!r}."
            raise ConfigurationError(what, f"Use {{label}}, as in {REPLACEMENT!r}.")
    return replacement


def entity_labels(id2label: Mapping[int, str]) -> tuple[str, ...]:
    """Return the labels of a model's entities, each once.

    Example:
        >>> entity_labels({0: "O", 1: "B-NAME", 2: "I-NAME", 3: "DATE"})
        ('NAME', 'DATE')
    """
    return tuple(dict.fromkeys(bare(label) for label in id2label.values() if label != "O"))


def replaced(labels: Iterable[str] | None, policy: Policy) -> tuple[str, ...] | None:
    """Return the labels that a policy replaces; ``None`` where the labels are not known."""
    if labels is None:
        return None
    stays = {label for label, text in policy.items() if text is None} if isinstance(policy, Mapping) else set()
    return tuple(label for label in labels if label not in stays)


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


def bare(label: str) -> str:
    """Return a label without the prefix of a token: ``B-NAME`` is NAME."""
    prefix, dash, rest = label.partition("-")
    return rest if dash and prefix in set("BIESLU") and rest else label


def masked_text(
    text: str,
    spans: Iterable[tuple[int, int, str]],
    policy: Policy,
    show_text: bool = True,
    labels: tuple[str, ...] | None = None,
) -> MaskedText:
    """Return a text in which spans, each two places and a label, are replaced.

    A span that begins or ends inside a word takes the whole word, because the rest of a name still tells it. Spans that overlap
    are replaced once, with the label of the longest; those of one label that touch, too. ``labels`` are those that the model knows.

    Example:
        >>> masked_text("Jo Ann-Lee", [(0, 1, "NAME"), (3, 10, "NAME"), (5, 6, "CITY")], "<{label}>").text
        '<NAME> <NAME>'
        >>> masked_text("on 3 May, Jo", [(3, 8, "DATE"), (10, 12, "NAME")], {"DATE": None, "NAME": "X"}).text
        'on 3 May, X'
    """
    templates: Mapping[str, str | None] = policy if isinstance(policy, Mapping) else {}
    usual = policy if isinstance(policy, str) else REPLACEMENT
    there = ((*widened(text, start, end, is_inside), bare(label)) for start, end, label in spans if end > start)
    parts: list[str] = []
    found: list[MaskedSpan] = []
    position = length = 0
    for start, end, label in joined([one for one in there if templates.get(one[-1], usual) is not None]):
        template = templates.get(label, usual) or ""
        before, replacement = text[position:start], template.format(label=label)
        begin = length + len(before)
        length = begin + len(replacement)
        parts += before, replacement
        found.append(MaskedSpan(label, start, end, begin, length))
        position = end
    return MaskedText("".join((*parts, text[position:])), tuple(found), "", show_text, replaced(labels, policy))


def joined(spans: Iterable[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Return spans that do not overlap, in order: those that did are one, with the label of the longest."""
    found: list[tuple[int, int, str]] = []
    longest = 0
    for start, end, label in sorted(spans, key=lambda one: (one[0], -one[1])):
        begin, last, former = found[-1] if found else (-1, -1, "")
        if start < last or (start == last and label == former):
            found[-1] = begin, max(end, last), label if end - start > longest else former
            longest = max(longest, end - start)
        else:
            found.append((start, end, label))
            longest = end - start
    return found


def widened(text: str, start: int, end: int, is_within: Callable[[str, int], bool]) -> tuple[int, int]:
    """Return a span that begins and ends at no place within something, such as a word."""
    start, end = max(0, start), min(len(text), end)
    while 0 < start < len(text) and is_within(text, start):
        start -= 1
    while 0 < end < len(text) and is_within(text, end):
        end += 1
    return start, end


def is_inside(text: str, place: int) -> bool:
    """Tell whether a place is inside a word, or between a letter and its accents.

    In scripts that write no spaces between words none is inside: a whole sentence would be one.
    """
    both = text[place - 1], text[place]
    return belongs(text, place) or all((one.isalnum() or is_mark(one)) and not UNSPACED.match(one) for one in both)


def belongs(text: str, place: int) -> bool:
    """Tell whether the character at a place belongs to the letter before it, as an accent does, or what a joiner joins."""
    return is_mark(text[place]) or JOINER in text[place - 1 : place + 1]


def is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("M")


JOINER = "\u200d"

# Where the scripts begin and end in Unicode whose words have no spaces between them: Thai, Lao, Myanmar, Khmer; and from the
# radicals of Han to the ideographs with Hiragana, Katakana and Bopomofo, their compatibility forms and the planes of Han.
UNSPACED = re.compile(r"[\u0E00-\u0EFF\u1000-\u109F\u1780-\u17FF\u2E80-\u9FFF\uF900-\uFAFF\U00020000-\U0003FFFF]")

# By what the label of a privacy filter holds: how such a thing looks, so that a span with more around it shrinks to that.
LOOKS = {
    "email": re.compile(r"\b[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}\b"),
    "url": re.compile(r"\b(?:https?://|www\.)[^\s,;)\]]+"),
    "phone": re.compile(r"(?:\+?1[\s.-]?)?\(?\d{3}\)?[\s.-]?\d{3}[\s.-]?\d{4}"),
}
THOSE_FOUND = "Pass the entities that a pipeline found in this text."
CONJUNCTION = re.compile(r" (?:and|or)$", re.IGNORECASE)


def refine_spans(text: str, entities: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the entities of a privacy filter with tighter spans, as OpenMed gives them.

    White space at the ends goes, and so does a last "and" or "or"; what is labelled as an address of mail, a web address or a
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
        raise wrong_type("The text", text, "Pass the text that the entities were found in.")
    if not isinstance(entities, Iterable):
        raise wrong_type("entities", entities, THOSE_FOUND)
    found = []
    for one in entities:
        try:
            label = str(one.get("entity_group") or one.get("entity") or "")
            first, last, score = int(one["start"]), int(one["end"]), float(one["score"])
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise ConfigurationError("An entity has no start, end or score that is a number.", THOSE_FOUND) from error
        if not 0 <= first <= last <= len(text):
            what = f"An entity from {first} to {last} is not in a text of {len(text)} characters."
            raise ConfigurationError(what, THOSE_FOUND)
        start, end = trimmed(text, *widened(text, first, last, belongs))
        span = text[start:end]
        looks = (pattern.search(span) for name, pattern in LOOKS.items() if name in label.lower())
        if match := next(filter(None, looks), None):
            start, end = start + match.start(), start + match.end()
        elif label:
            start, end = trimmed(text, start, start + len(CONJUNCTION.sub("", span)))
        found.append({"entity_group": label, "score": score, "word": text[start:end], "start": start, "end": end})
    return found


def trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """Return a span without white space at its ends."""
    span = text[start:end]
    start += len(span) - len(span.lstrip())
    return start, max(start, end - len(span) + len(span.rstrip()))
