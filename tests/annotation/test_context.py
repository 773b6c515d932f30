"""Context of entities: negation, uncertainty, temporality and experiencer."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from helpers.annotations import annotate, make_text
from openmed_nb.annotation.context import create_context_finder
from openmed_nb.errors import ConfigurationError

NOTES = [
    "She denies chest pain and has asthma. Mother had breast cancer.",
    None,
    "No complaints.",
    "Possible pneumonia. History of hypertension.",
]
MARKER = "Zyxwvut"
FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "how_to" / "find_negated_entities.md"
MARK = re.compile(r"\[\[(.+?)\]\]", re.DOTALL)
COLUMNS = ("negated", "uncertain", "temporality", "experiencer")

# Words that are cues, or parts of cues, or neither.
WORDS = [
    "no", "not", "denies", "without", "but", "and", "or", "nor", ",", ".", ";", ":", "?", "\n", "\n\n", "\t", "-", "(", ")", "/", "+",
    "if", "history", "of", "family", "mother", "PMH:", "FAMILY HISTORY", "2010", "3", "years", "ago", "in", "ruled", "out", "was",
    "possible", "unlikely", "resolved", "has", "she", "vs.", "q.d.", "Dr.", "fever", "asthma", "asthma\u0301", "\u2019s", "\U0001f637",
]  # fmt: skip


@pytest.fixture(scope="module")
def found():
    return annotate(NOTES, ids=["a", "b", "c", "d"])


def spans_of(text, *words):
    return [{"start": text.index(word), "end": text.index(word) + len(word)} for word in words]


class TestWithContext:
    def test_default_adds_negation_to_entities_and_frame(self, found):
        frame = found.with_context().to_frame()
        assert dict(zip(frame["word"], frame["negated"], strict=True)) == {
            "chest pain": True, "asthma": False, "breast cancer": False, "pneumonia": False, "hypertension": False,
        }  # fmt: skip
        assert frame["negated"].dtype == bool
        assert "temporality" not in frame

    def test_no_entity_is_dropped_and_filter_selects(self, found):
        in_context = found.with_context("negated", "experiencer")
        assert [len(entities) for entities in in_context] == [len(entities) for entities in found]
        own = in_context.filter(negated=False, experiencer="patient")
        assert [entity["word"] for entities in own for entity in entities] == ["asthma", "pneumonia", "hypertension"]
        assert [entity["negated"] for entity in own[0]] == [False]
        frame = found.with_context("temporality").filter(temporality=["historical", "hypothetical"]).to_frame()
        assert frame["word"].tolist() == ["hypertension"]

    def test_note_has_the_same_context_alone_and_after_json_and_filter(self, found):
        in_context = found.with_context("all", "negated_by")
        for text, entities in zip(NOTES, in_context, strict=True):
            if text:
                alone = annotate(text).with_context("all", "negated_by")
                assert [{**entity, "score": 0} for entity in alone] == [{**entity, "score": 0} for entity in entities]
        assert json.loads(json.dumps(in_context.to_dict())) == in_context.to_dict()
        filtered = found.filter("disease", min_score=0.5)
        assert list(filtered.with_context("all", "negated_by")) == list(in_context.filter("disease", min_score=0.5))

    def test_columns_of_cues_name_the_words_that_decided(self, found):
        frame = found.with_context("all", "negated_by", "experiencer_by", "temporality_by", "uncertain_by").to_frame()
        cues = {
            row.span_text: (row.negated_by, row.uncertain_by, row.temporality_by, row.experiencer_by)
            for row in frame.itertuples()
        }
        assert cues == {
            "chest pain": ("denies", "", "", ""),
            "asthma": ("", "", "", ""),
            "breast cancer": ("", "", "", "mother"),
            "pneumonia": ("", "possible", "", ""),
            "hypertension": ("", "", "history of", ""),
        }

    def test_disease_of_past_vaccination_is_hypothetical(self):
        text = "Immunised against measles in 2014, had asthma in 2015."
        context = create_context_finder(("temporality",))(text, spans_of(text, "measles", "asthma"))
        assert context == {"temporality": ["hypothetical", "historical"]}

    def test_own_cues_precede_those_of_the_package(self):
        text = "Asthma spurious today. Gout is unlikely. Migraine possible. Sippe: stroke"
        spans = spans_of(text, "Asthma", "Gout", "Migraine", "stroke")
        cues = {
            "negated": {"after": ["spurious|bogus |today", "possible"]},
            "ignored": {"after": ["is unlikely"]},
            "family": {"heading": ["sippe"]},
        }
        plain = create_context_finder(("negated", "experiencer"))(text, spans)
        assert plain == {"negated": [False, True, False, False], "experiencer": ["patient"] * 4}
        own = create_context_finder(("negated", "experiencer"), "en", cues)(text, spans)
        assert own == {
            "negated": [True, False, True, False],
            "experiencer": ["patient", "patient", "patient", "family"],
        }

    @pytest.mark.parametrize(
        "cues",
        [
            ["no"], {"negatd": {"after": ["x"]}}, {"negated": ["x"]}, {"negated": {"behind": ["x"]}}, {"negated": {"after": "x"}},
            {"negated": {"after": [5]}}, {"negated": {"after": ["|"]}}, {5: {}},
        ],
    )  # fmt: skip
    def test_invalid_cues_are_rejected(self, found, cues):
        with pytest.raises(ConfigurationError, match="cue"):
            found.with_context(cues=cues)

    @pytest.mark.parametrize(
        ("columns", "options"),
        [
            (("negation",), {}),
            ((MARKER,), {}),
            ((5,), {}),
            ((), {"language": "xx"}),
            ((), {"language": None}),
            (("negated_by",), {"language": "de"}),
            ((), {"language": "de", "cues": {}}),
        ],
    )
    def test_unknown_columns_and_languages_are_rejected(self, found, columns, options):
        with pytest.raises(ConfigurationError):
            found.with_context(*columns, **options)

    @pytest.mark.parametrize(
        "context",
        [
            {"negated": "no"},
            {"negated": []},
            {"experiencer": True},
            {"temporality": ["recent", "historicl"]},
        ],
    )
    def test_filter_rejects_context_that_entities_never_have(self, found, context):
        with pytest.raises(ConfigurationError):
            found.with_context("all").filter(**context)


class TestDisplay:
    """A single displayed text marks context that its entities do not have."""

    def test_display_marks_and_counts_context_without_storing_it(self):
        text = "No evidence of pneumonia. Mother had breast cancer."
        found = annotate(text)
        before = found.to_dict()
        assert str(found).startswith("2 mentions of diseases found, 1 of them negated, 1 in the family\n")
        assert found.to_dict() == before

    def test_display_does_not_determine_context_that_is_present(self, found):
        shown = make_text("Possible asthma. No asthma.", {**found[0][0], "start": 9, "end": 15})
        context = {"negated": [False], "experiencer": ["family"], "experiencer_by": ["mother"]}
        shown = replace(shown.found, results=shown.found.results.with_columns(context)).at(0)
        assert str(shown).endswith("  family by “mother”")
        assert '15, family by “mother”">asthma' in shown._repr_html_()
        assert shown.filter(experiencer="family")[0]["experiencer_by"] == "mother"

    @pytest.mark.parametrize(
        "changes",
        [
            {"show_text": False},
            {"known_labels": None},
            {"known_labels": ("private_person", "private_date", "secret")},
        ],
    )
    def test_display_of_hidden_texts_and_identifiers_marks_stored_context_only(self, found, changes):
        shown = replace(found, **changes).at(0)
        assert "negated" not in str(shown) + shown._repr_html_()
        assert "negated" in str(replace(found.with_context(), **changes).at(0))


class TestSentences:
    """Cues act within a sentence. A wrapped line continues it; a new line of a list does not."""

    @pytest.mark.parametrize(
        ("text", "negated"),
        [
            ("No fever. Asthma.", [True, False]),
            ("No fever\nAsthma", [True, False]),
            ("No fever\n- asthma", [True, False]),
            ("No fever\n\nasthma", [True, False]),
            ("No fever\u2028Asthma", [True, False]),
            ("No fever<br>Asthma", [True, False]),
            ("No fever\nb) asthma", [True, False]),
            ("no fever,\r\n  asthma", [True, True]),
            ("Denies:   Fever,\tAsthma", [True, False]),
            ("K 3.5, no fever; asthma", [True, False]),
        ],
    )
    def test_negation_ends_at_the_sentence(self, text, negated):
        spans = [{"start": match.start(), "end": match.end()} for match in re.finditer("(?i:fever|asthma)", text)]
        assert create_context_finder(("negated",))(text, spans) == {"negated": negated}

    @pytest.mark.parametrize(
        ("text", "experiencers"),
        [
            ("FH: gout. She has asthma. Also migraine.", "family patient patient"),
            ("Family history: no gout; he denies asthma.", "family patient"),
            ("FH: noncontributory. Pt has asthma.", "patient"),
            ("FH: mother had gout. The patient has asthma.", "family patient"),
            ("FH: mother had gout. She also had asthma.", "family family"),
            ("FH: gout (father). He has asthma.", "family family"),
            ("FH: gout in the father. Admitted with asthma.", "family patient"),
            ("FH: gout. Known asthma.", "family patient"),
            ("FH: gout. No asthma.\nPMH: mother helps. FH: stroke. She has flu.", "family family family patient"),
            ("Family history:\nShe has gout. Asthma.", "family family"),
        ],
    )
    def test_family_heading_ends_at_a_sentence_about_the_patient(self, text, experiencers):
        spans = [match.span() for match in re.finditer("(?i:gout|asthma|migraine|stroke|flu)", text)]
        entities = [{"start": start, "end": end} for start, end in spans]
        assert create_context_finder(("experiencer",))(text, entities)["experiencer"] == experiencers.split()

    @pytest.mark.parametrize("filler", ["no ", ": ", "or ", "was not "])
    def test_long_text_has_context(self, filler):
        text = f"No fever{filler * 20_000} asthma"
        find_context = create_context_finder(("negated",))
        assert find_context(text, spans_of(text, "fever")) == {"negated": [True]}

    @given(words=st.lists(st.sampled_from(WORDS), max_size=25), data=st.data())
    def test_every_entity_has_context(self, words, data):
        text = " ".join(words)
        offset = st.integers(0, len(text))
        spans = data.draw(st.lists(st.tuples(offset, offset), max_size=5))
        entities = [{"start": min(span), "end": max(span)} for span in spans]
        before = [dict(entity) for entity in entities]
        columns = create_context_finder(COLUMNS)(text, entities)
        assert entities == before
        assert {name: len(values) for name, values in columns.items()} == dict.fromkeys(COLUMNS, len(entities))
        negated = create_context_finder(("negated", "negated_by"))(text, entities)
        assert negated["negated"] == columns["negated"]
        assert [bool(cue) for cue in negated["negated_by"]] == columns["negated"]

    def test_other_languages_use_their_own_cues(self):
        text = "Kein Fieber. Asthma."
        find_context = create_context_finder(("negated",), "de")
        assert find_context(text, spans_of(text, "Fieber", "Asthma")) == {"negated": [True, False]}


# Each documented value of context: its column, and the value of an entity that has it.
DOCUMENTED_VALUES = {
    "negated": ("negated", True),
    "uncertain": ("uncertain", True),
    "historical": ("temporality", "historical"),
    "hypothetical": ("temporality", "hypothetical"),
    "family": ("experiencer", "family"),
}


def read_sentences(name):
    """Yield each labeled sentence, its text, and its entities with the values of their labels."""
    for line in (FOLDER / name).read_text("utf-8").splitlines():
        sentence = json.loads(line)
        parts = MARK.split(sentence["text"])
        entities = []
        position = 0
        for index, part in enumerate(parts):
            if index % 2:
                labels = sentence["labels"][index // 2]
                entities.append({"start": position, "end": position + len(part), **read_labels(labels)})
            position += len(part)
        yield sentence, "".join(parts), entities


def read_labels(labels):
    """Return the columns of context that labels such as "negated family" stand for."""
    words = set(labels.split())
    return {
        "negated": "negated" in words,
        "uncertain": "uncertain" in words,
        "temporality": next(iter(words & {"historical", "hypothetical"}), "recent"),
        "experiencer": next(iter(words & {"family", "other"}), "patient"),
    }


def test_sentences_of_other_projects_have_their_labels_or_a_reason():
    find_context = create_context_finder(("all",))
    for sentence, text, entities in read_sentences("context_peers.jsonl"):
        context = find_context(text, entities)
        expected = list(map(read_labels, sentence.get("rules", sentence["labels"])))
        found = [{name: context[name][index] for name in COLUMNS} for index in range(len(entities))]
        assert found == expected, text
        assert ("rules" in sentence) == ("rules_reason" in sentence)


def count_values(notes):
    """Return the number of correct, predicted and labeled entities with each documented value."""
    find_context = create_context_finder(("all",))
    predicted = []
    labeled = []
    for number, (text, entities) in enumerate(notes):
        context = find_context(text, entities)
        for index, entity in enumerate(entities):
            predicted += [(number, index, column, context[column][index]) for column in COLUMNS]
            labeled += [(number, index, column, entity[column]) for column in COLUMNS]
    counts = {}
    for name, value in DOCUMENTED_VALUES.items():
        is_predicted = {key for key in predicted if key[2:] == value}
        is_labeled = {key for key in labeled if key[2:] == value}
        counts[name] = (len(is_predicted & is_labeled), len(is_predicted), len(is_labeled))
    return counts


@pytest.fixture(scope="module")
def notes():
    return [json.loads(line) for line in (FOLDER / "context_notes.jsonl").read_text("utf-8").splitlines()]


def test_documented_precision_and_recall_are_those_of_the_labeled_notes(notes):
    """The notes were labeled by hand, before the rules were run on them."""
    page = PAGE.read_text("utf-8")
    counts = count_values([(note["text"], note["entities"]) for note in notes])
    for name, (correct, predicted, labeled) in counts.items():
        assert f"| {name} | {correct / predicted:.2f} | {correct / labeled:.2f} | {labeled} |" in page
    assert f"{len(notes)} notes with {sum(len(note['entities']) for note in notes)} entities" in page


def test_documented_precision_and_recall_are_those_of_the_labeled_sentences():
    sentences = list(read_sentences("context_sentences.jsonl"))
    page = PAGE.read_text("utf-8")
    rows = {name: f"| {name} |" for name in DOCUMENTED_VALUES}
    for part, title in (("development", "hard"), ("kept apart", "hard, kept apart"), ("usual", "usual")):
        notes = [(text, entities) for sentence, text, entities in sentences if sentence["part"] == part]
        assert f"| {len(notes)} {title} |" in page
        for name, (correct, predicted, labeled) in count_values(notes).items():
            rows[name] += f" {correct / predicted:.2f} / {correct / labeled:.2f} |"
    assert all(row in page for row in rows.values())


def test_documented_values_of_found_entities_are_those_of_the_labeled_notes(notes):
    """Entities that cross a line would have the context of another line."""
    found = nb.annotate([note["text"] for note in notes], "bundled", device="cpu", progress=False).with_context()
    gold = []
    predicted = []
    for note, entities in zip(notes, found, strict=True):
        for entity in note["entities"]:
            for other in entities:
                if entity["start"] < other["end"] and other["start"] < entity["end"]:
                    gold.append(entity["negated"])
                    predicted.append(other["negated"])
    correct = sum(1 for pair in zip(gold, predicted, strict=True) if all(pair))
    page = PAGE.read_text("utf-8")
    assert f"precision of {correct / sum(predicted):.2f} and a recall of {correct / sum(gold):.2f}" in page
