"""Context of entities: negation, uncertainty, temporality and experiencer.

The rules for English follow NegEx (Chapman et al. 2001, doi:10.1006/jbin.2001.1029) and ConText (Harkema et al. 2009,
doi:10.1016/j.jbi.2009.05.002): a cue such as "denies" gives a value to the findings after it, or before it, up to the end of its clause.
The cues are data, in ``context_cues.json``. The rules for other languages are those of OpenMed.
"""

from __future__ import annotations

import functools
import json
import operator
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .._utils.text import describe_value
from .._utils.validation import check_bool, check_choice, check_names, invalid_value
from ..errors import ConfigurationError
from .boundaries import LINE_END, find_line_ends

# Selects all columns.
ALL = "all"

# Values of each column. Findings without a cue have the first one.
CONTEXT_VALUES: Mapping[str, tuple[Any, ...]] = {
    "negated": (False, True),
    "uncertain": (False, True),
    "temporality": ("recent", "historical", "hypothetical"),
    "experiencer": ("patient", "family", "other"),
}

# Column and value of each label of displayed texts.
CONTEXT_LABELS: Mapping[str, tuple[str, bool | str]] = {
    "negated": ("negated", True),
    "uncertain": ("uncertain", True),
    "historical": ("temporality", "historical"),
    "hypothetical": ("temporality", "hypothetical"),
    "family": ("experiencer", "family"),
    "other person": ("experiencer", "other"),
}

# Suffix of the columns with the cue that decided on a value.
CUE_SUFFIX = "_by"

# Names of the columns of values.
CONTEXT_COLUMNS = tuple(CONTEXT_VALUES)

# Positions of a cue: before all findings of the rest of a clause; next to one finding or to findings that "and" joins; after its
# findings; after a finding, or else next to the following one; at the end of a clause, before another one; or as the heading of the lines below it.
_DIRECTIONS = ("before", "next", "after", "either", "end", "heading")

_WORD = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")
_FINDING = "<finding>"
_YEAR = "<year>"
_NUMBER = "<number>"
_YEAR_PATTERN = re.compile(r"(?:19|20)\d\d")

# End of a sentence or line, as a word in a cue.
_END = "^"

# Words that a cue can require after it.
_FOLLOWING = frozenset({_END, ",", ":"})

# Words of a cue that are not named in the columns of cues.
_UNNAMED = frozenset({_END, ":", ",", "-", "=", ".", "|"})

# End of a sentence, except in abbreviations such as "vs." or, before a word in lower case, "q.d.".
_PUNCTUATION = re.compile(
    r"(?<=\S)[.!?;](?:(?=\s|$)|(?<=[^\W\d]{2}\.)(?=(?-i:[A-Z])))(?<!\b(?:dr|mr|ms|st|vs|cf|hx|dx|pt)\.)(?<!\b(?:mrs|e\.g|i\.e|neg|pos)\.)"
    r"(?<!\bprof\.)(?<!\bapprox\.)(?:(?<!\.\w\.)|(?=\s+(?-i:[A-Z])))",
    re.IGNORECASE,
)

# Line without findings that may be a heading: in capitals, or with a colon at its end.
_CAPITALS = re.compile("[A-Z]{6}|EXAM|LABS|MEDS|PLAN")
_HEADING_LINE = "<heading>"

_JOINING = frozenset({"and", "or", "nor", "/", "&"})

# Words after which a cue next to its findings has no effect.
_PHRASE_ENDS = frozenset({",", "with"})

# Most words between a finding of a list and the word that joins it to the list, such as an adjective.
_MAX_WORDS_IN_LIST = 2

# Most words between a cue and the findings before it. A limit keeps the time linear in the length of the text.
_MAX_DISTANCE = 40

# Key of a column in the context of OpenMed.
_OPENMED_AXES: Mapping[str, str] = {
    "negated": "negation",
    "uncertain": "uncertainty",
    "temporality": "temporality",
    "experiencer": "experiencer",
}

# End of a sentence for the rules of OpenMed.
_SENTENCE_END = re.compile(rf"(?<=[.!?;])\s+|{LINE_END.pattern}")

_CUES_FILE = Path(__file__).with_name("context_cues.json")


class _Cue(NamedTuple):
    """What a cue states about findings.

    Attributes:
        direction: One of ``_DIRECTIONS``.
        values: Value by column.
    """

    direction: str
    values: Mapping[str, bool | str]


# Node of the graph of all cues, which is read word by word: the nodes after the next word, and the cues that end at the node as _CUES.
_Node = dict[str, list[Any]]
_CUES = "<cues>"


class _Mark(NamedTuple):
    """Part of a text that is one word for the rules.

    Attributes:
        start: Index of the first character.
        end: Index after the last character.
        word: ``_END``, ``_HEADING_LINE``, or the index of the entity of a finding.
    """

    start: int
    end: int
    word: str | int


class _Value(NamedTuple):
    """Value of a column, with the words of the cue that gave it and the direction of this cue."""

    value: bool | str
    words: str = ""
    direction: str = ""


# Values of findings by column. Columns without a cue have their usual value.
_State = dict[str, _Value]

_Entities = Sequence[Mapping[str, Any]]
# Function that returns the value of each column for each entity of a text.
ContextFinder = Callable[[str, _Entities], dict[str, list[Any]]]


def context_labels(entity: Mapping[str, Any]) -> dict[str, str]:
    """Return the context labels of an entity, each with the cue that decided, or an empty string if the cue is not known."""
    labels = CONTEXT_LABELS.items()
    return {label: entity.get(name + CUE_SUFFIX, "") for label, (name, value) in labels if entity.get(name) == value}


def check_context_values(columns: Iterable[str], values: Mapping[str, object]) -> None:
    """Raise an error if values of context are not valid, or if the entities do not have their columns."""
    check_names("a context of entities", values, CONTEXT_COLUMNS, "Contexts")
    for name, value in values.items():
        if name not in columns:
            raise ConfigurationError(
                f"The entities do not have the context {name!r}.",
                "Add the context first, with found.with_context('all').",
            )
        if False in CONTEXT_VALUES[name]:
            check_bool(name, value)
        else:
            check_choice(name, value, CONTEXT_VALUES[name])


def context_mark(entity: Mapping[str, Any], with_cues: bool = False) -> str:
    """Return the context labels of an entity, optionally with their cues, or an empty string.

    Example:
        >>> entity = {"negated": True, "negated_by": "denies", "experiencer": "family"}
        >>> context_mark(entity), context_mark(entity, with_cues=True), context_mark({"negated": False})
        ('negated, family', 'negated by “denies”, family', '')
    """
    labels = context_labels(entity)
    return ", ".join(f"{label} by “{cue}”" if with_cues and cue else label for label, cue in labels.items())


def create_context_finder(columns: Sequence[str], language: str = "en", cues: Any = None) -> ContextFinder:
    """Return a function that determines columns of context.

    Args:
        columns: Names of columns, or ``"all"``; empty for ``"negated"`` only.
        language: ``"en"``, or the code of another language for which OpenMed has cues.
        cues: Additional cues in English; see :meth:`Annotations.with_context`.

    Raises:
        ConfigurationError: If a column, the language or a cue is invalid, or if openmed is needed and not installed.
    """
    names = columns or ("negated",)
    is_english = language == "en"
    cue_columns = [name + CUE_SUFFIX for name in CONTEXT_COLUMNS if is_english]
    for name in names:
        if not isinstance(name, str):
            raise invalid_value("the context", name, "Pass each name, as in with_context('negated', 'experiencer').")
        check_choice("the context", name, (*CONTEXT_COLUMNS, *cue_columns, ALL))
    selected = [name for name in CONTEXT_COLUMNS if name in names or ALL in names]
    selected += [name for name in cue_columns if name in names]
    if not is_english:
        if cues is not None:
            raise invalid_value("language", language, "Remove cues=, which are in English.")
        return _create_openmed_finder(selected, language)
    graphs = [_load_graph()]
    if cues is not None:
        graphs.insert(0, _create_graph(_read_own_cues(cues)))

    def find_context(text: str, entities: _Entities) -> dict[str, list[Any]]:
        states = _find_states(text, entities, graphs) if entities else []
        return {name: [_column_value(state, name) for state in states] for name in selected}

    return find_context


def _column_value(state: _State, name: str) -> bool | str:
    """Return the value of a column of a finding, or the cue that decided on it."""
    column = name.removesuffix(CUE_SUFFIX)
    usual_value = CONTEXT_VALUES[column][0]
    value = state.get(column, _Value(usual_value))
    if name == column:
        return value.value
    return "" if value.value == usual_value else value.words


@functools.cache
def _load_data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_CUES_FILE.read_text(encoding="utf-8"))
    return data


@functools.cache
def _load_graph() -> _Node:
    return _create_graph(_load_data()["groups"])


def _create_graph(groups: Iterable[Mapping[str, Any]]) -> _Node:
    """Return the graph of groups of cues. In a cue, ``a|b`` is "a" or "b", and a name in angle brackets is one of several words."""
    root: _Node = {}
    for group in groups:
        values: dict[str, bool | str] = {}
        for name in group["values"]:
            values.update(_load_data()["values"][name])
        cue = _Cue(group["direction"], values)
        for text in group["cues"]:
            nodes = [root]
            for element in (f"^ {text} :|^" if cue.direction == "heading" else text).split():
                nodes = _add_element(nodes, element)
            for node in nodes:
                node.setdefault(_CUES, []).append(cue)
    return root


def _add_element(nodes: list[_Node], element: str) -> list[_Node]:
    """Add an element of a cue after nodes of a graph, and return the nodes after it."""
    target: _Node = {}
    targets = [target]
    for words in _list_alternatives(element):
        if not words:
            targets += nodes  # The element is optional.
            continue
        next_node = target
        for word in reversed(words[1:]):
            next_node = {word: [next_node]}
        for node in nodes:
            node.setdefault(words[0], []).append(next_node)
    return targets


@functools.cache
def _list_alternatives(element: str) -> list[list[str]]:
    """Return the words of each alternative of an element of a cue."""
    classes = _load_data()["words"]
    alternatives: list[list[str]] = []
    for alternative in element.split("|"):
        if alternative in classes:
            alternatives += _list_alternatives(classes[alternative])
        elif alternative in {_YEAR, _NUMBER, _FINDING}:
            alternatives.append([alternative])
        else:
            alternatives.append(_split_words(alternative.replace("_", " ")))
    return alternatives


def _read_own_cues(cues: Any) -> list[dict[str, Any]]:
    """Return the cues of a user, a mapping of values to mappings of directions to lists of cues, as groups."""
    remedy = "Pass cues by value and direction, such as cues={'negated': {'after': ['not detected']}}."
    if not isinstance(cues, Mapping) or not all(isinstance(texts, Mapping) for texts in cues.values()):
        raise invalid_value("cues", cues, remedy)
    groups = []
    for value, texts_by_direction in cues.items():
        check_choice("a value in cues", value, _load_data()["values"])
        for direction, texts in texts_by_direction.items():
            check_choice("a direction in cues", direction, _DIRECTIONS)
            if not isinstance(texts, (list, tuple)) or not all(
                isinstance(text, str) and text.strip(" |_") for text in texts
            ):
                raise invalid_value("cues", texts, remedy)
            groups.append({"values": [value], "direction": direction, "cues": texts})
    return groups


def _find_states(  # noqa: C901, PLR0912 - one branch for each kind of word and for each position of a cue
    text: str, entities: _Entities, graphs: Sequence[_Node]
) -> list[_State]:
    """Return the values of each entity."""
    words, findings = _read_words(text, entities)
    states: list[_State] = [{} for _ in entities]
    section: _State = {}  # Values of a heading, for the lines below it.
    active: _State = {}  # Values of the cues before a position, in the same sentence.
    limit = 0  # Start of the findings that a cue after them can reach.
    heading = 0  # Position after the last heading.
    subjects = _list_alternatives(
        "<visit>"
    )  # Starts of sentences about the patient; a pronoun until a relative is named.
    position = 0
    while words[position]:
        word = words[position]
        cues, stop = _match_cues(words, position, graphs)
        if word == _HEADING_LINE:
            section = {}
        elif word == _END and not any(cue.direction == "after" for cue in cues):
            limit = position + 1
            if words[position - 1] == ":":
                section = {**section, **active}
            elif position != heading and any(words[limit : limit + len(subject)] == subject for subject in subjects):
                section.pop("experiencer", None)
            active = {}
        elif word == _FINDING:
            for number in findings[position]:
                states[number] = {**section, **active}
        if word in _PHRASE_ENDS or (word == _FINDING and words[position + 1] not in _JOINING):
            active = {column: value for column, value in active.items() if value.direction != "next"}
        for cue in cues:
            direction = cue.direction
            if direction == "either":
                direction = "after" if words[position - 1] == _FINDING else "next"
            cue_words = " ".join(cue_word for cue_word in words[position:stop] if cue_word not in _UNNAMED)
            values = {column: _Value(value, cue_words, direction) for column, value in cue.values.items()}
            if direction == "heading":
                section = values
                heading = stop
                subjects = _list_alternatives("<visit>|he|she")
            elif cue.values.get("experiencer") in {"family", "other"}:
                subjects = _list_alternatives("<visit>")
            if direction == "after":
                for listed in _iter_listed_findings(words, limit, position):
                    for number in findings[listed]:
                        # What may happen is not past, as in "vaccinated against influenza in 2014".
                        state = states[number]
                        time = state.get("temporality")
                        state.update(values)
                        if time and time.value == "hypothetical":
                            state["temporality"] = time
            elif direction != "heading":
                active.update(values)
            limit = stop if direction == "end" else limit
        position = max(stop, position + 1)
    for state in states:
        # "No history of" denies a finding at any time, so it is not past, unless one cue says both, such as "resolved".
        time = state.get("temporality", _Value(""))
        negated = state.get("negated", _Value(False))
        if time.value == "historical" and negated.value and negated.words != time.words:
            del state["temporality"]
    return states


def _next_node(node: _Node, word: str) -> _Node:
    """Return the node after a word, which is empty if no cue continues. Several nodes are merged into one when they are first reached."""
    if word not in node and word.isdecimal():
        word = _YEAR if _YEAR_PATTERN.fullmatch(word) else _NUMBER
    targets = node.get(word, [])
    if len(targets) > 1:
        merged: _Node = {}
        for target in targets:
            for next_word, items in target.items():
                merged.setdefault(next_word, []).extend(items)
        node[word] = targets = [merged]
    return targets[0] if targets else {}


def _match_cues(words: list[str], position: int, graphs: Sequence[_Node]) -> tuple[list[_Cue], int]:
    """Return the longest cues at a position, and the position after them. Cues of the first graph precede those of the next."""
    best: list[_Cue] = []
    best_stop = position
    for graph in graphs:
        node = graph
        stop = position
        while node := _next_node(node, words[stop]):
            stop += 1
            if _CUES in node and stop > best_stop:
                best = node[_CUES]
                best_stop = stop
    # A finding in a cue is not a part of it, and neither is a mark after it.
    if _FINDING in words[position + 1 : best_stop]:
        best_stop = words.index(_FINDING, position + 1)
    elif best_stop - 1 > position and words[best_stop - 1] in _FOLLOWING:
        best_stop -= 1
    return best, best_stop


def _iter_listed_findings(words: list[str], limit: int, position: int) -> Iterator[int]:
    """Yield the position of the finding before a cue, and those of the findings that "and" or "or" joins to it."""
    is_list = False
    is_joined = True
    num_words: int | None = None  # Number of words since the last finding.
    for previous in range(position - 1, max(limit, position - _MAX_DISTANCE) - 1, -1):
        word = words[previous]
        if word == _FINDING:
            if not is_joined:
                return
            yield previous
            is_joined = False
            num_words = 0
        elif num_words is None:
            continue  # There is no finding yet.
        elif word in _JOINING:
            is_list = True
            is_joined = True
        elif word == ",":
            is_joined = is_list
        else:
            num_words += 1
            if num_words > _MAX_WORDS_IN_LIST:
                return


def _read_words(text: str, entities: _Entities) -> tuple[list[str], dict[int, list[int]]]:
    """Return the words of a text in lower case, and the indices of the entities at each position of a finding.

    Entities that overlap are one finding, and a finding is one word. So is the end of a sentence or line, and the start of a line
    that may be a heading. The last word is empty.
    """
    marks = [_Mark(entity["start"], entity["end"], number) for number, entity in enumerate(entities)]
    marks += _find_headings(text, entities)
    marks += [_Mark(match.start(), match.end(), _END) for match in find_line_ends(text, 0, len(text))]
    for match in _PUNCTUATION.finditer(text):
        # A question mark can be a cue.
        start = match.end() if match.group() == "?" else match.start()
        marks.append(_Mark(start, match.end(), _END))
    words = [_END]
    findings: dict[int, list[int]] = {}
    position = 0
    for mark in sorted(marks, key=operator.attrgetter("start")):
        is_inside = mark.start < position
        words += _split_words(text, position, mark.start)
        if isinstance(mark.word, int):
            if not (is_inside and words[-1] == _FINDING):
                findings[len(words)] = []
                words.append(_FINDING)
            findings[len(words) - 1].append(mark.word)
        elif is_inside or mark.word == words[-1]:
            continue
        else:
            words.append(mark.word)
        position = max(position, mark.end)
    words += _split_words(text, position)
    words += [_END, ""]
    return words, findings


def _split_words(text: str, start: int = 0, end: int = sys.maxsize) -> list[str]:
    return [word.lower().replace("\u2019", "'") for word in _WORD.findall(text, start, end)]


def _find_headings(text: str, entities: _Entities) -> Iterator[_Mark]:
    """Yield the start and end of each line that may be a heading: without entities, in capitals or with a colon at its end."""
    starts = sorted(entity["start"] for entity in entities)
    line_start = 0
    for line in text.splitlines(keepends=True):
        line_end = line_start + len(line)
        title = line.strip()
        is_heading = title.endswith(":") or (title.isupper() and _CAPITALS.search(title))
        if is_heading and bisect_left(starts, line_start) == bisect_left(starts, line_end):  # without entities
            start = line_start + line.index(title)
            yield _Mark(start, start, _HEADING_LINE)
            yield _Mark(start, start, _END)
            yield _Mark(start + len(title), line_end, _END)
        line_start = line_end


def _create_openmed_finder(selected: Sequence[str], language: str) -> ContextFinder:
    """Return a function that determines columns of context by the rules of OpenMed for a language."""
    try:
        from openmed.clinical.context import assert_context
        from openmed.clinical.lexicons import available_clinical_cue_languages
    except ImportError as error:
        raise ConfigurationError(
            f"The context in the language {describe_value(language)} needs openmed.",
            "Install it: python -m pip install 'openmed_nb[context]'.",
        ) from error
    languages = available_clinical_cue_languages()
    if language not in languages:
        raise ConfigurationError(
            f"No context rules for the language {describe_value(language)}.", f"Pass one of {', '.join(languages)}."
        )

    def find_context(text: str, entities: _Entities) -> dict[str, list[Any]]:
        context: dict[str, list[Any]] = {name: [] for name in selected}
        ends = [0, *(match.start() for match in _SENTENCE_END.finditer(text)), len(text)]
        for entity in entities:
            # An entity that crosses the end of a sentence joins both.
            start = ends[bisect_right(ends, entity["start"]) - 1]
            stop = ends[bisect_left(ends, entity["end"])]
            span = {"start": entity["start"] - start, "end": entity["end"] - start}
            (values,) = assert_context(text[start:stop], [span], language=language)
            for name in selected:
                value = values[_OPENMED_AXES[name]]
                context[name].append(value == name if False in CONTEXT_VALUES[name] else value)
        return context

    return find_context
