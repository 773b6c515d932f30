"""Context of entities: negation, uncertainty, temporality and experiencer."""

import json
import pickle
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openmed.clinical.negation_scope import negated_spans

import openmed_nb as nb
from openmed_nb.annotation.context import context_mark, create_context_finder
from openmed_nb.errors import ConfigurationError

NOTES = [
    "She denies chest pain and has asthma. Mother had breast cancer.",
    None,
    "No complaints.",
    "Possible pneumonia. History of hypertension.",
]
MARKER = "Zyxwvut"


@pytest.fixture(scope="module")
def found():
    return nb.annotate(NOTES, "bundled_small", device="cpu", progress=False, ids=["a", "b", "c", "d"])


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

    def test_all_adds_every_column(self, found):
        frame = found.with_context("all").to_frame().set_index("word")
        assert frame.loc["breast cancer", "experiencer"] == "family"
        assert frame.loc["hypertension", "temporality"] == "historical"
        assert frame.loc["pneumonia", "uncertain"]
        assert frame.loc["asthma", ["negated", "uncertain", "temporality", "experiencer"]].tolist() == [
            False, False, "recent", "patient",
        ]  # fmt: skip

    def test_original_annotations_are_unchanged(self, found):
        before = found.to_dict()
        found.with_context("all")
        assert found.to_dict() == before

    def test_no_entity_is_dropped_and_filter_selects(self, found):
        in_context = found.with_context("negated", "experiencer")
        assert [len(entities) for entities in in_context] == [len(entities) for entities in found]
        own = in_context.filter(negated=False, experiencer="patient")
        assert [entity["word"] for entities in own for entity in entities] == ["asthma", "pneumonia", "hypertension"]
        assert [entity["negated"] for entity in own[0]] == [False]

    def test_columns_accumulate_over_calls(self, found):
        assert list(found.with_context().with_context("experiencer").results.context) == ["negated", "experiencer"]

    def test_shown_text_marks_context_in_words(self, found):
        shown = found.with_context("all").show("a")
        assert "[chest pain](DISEASE, negated)" in str(shown)
        assert "[asthma](DISEASE)" in str(shown)
        assert "DISEASE, family" in shown._repr_html_()

    def test_single_text_and_json(self):
        single = nb.annotate("No asthma.", "bundled_small", device="cpu", progress=False).with_context()
        assert single.to_dict()["entities"][0]["negated"] is True

    def test_hidden_texts_keep_context_when_pickled(self):
        hidden = nb.annotate(NOTES, "bundled_small", device="cpu", progress=False, show_text=False).with_context()
        copy = pickle.loads(pickle.dumps(hidden))  # noqa: S301 - own data
        assert copy.results.context == hidden.results.context
        assert copy[0][0]["negated"] is True

    def test_run_does_not_resume_from_context(self, found):
        with pytest.raises(ConfigurationError, match="context"):
            nb.annotate(NOTES, "bundled_small", device="cpu", progress=False, resume=found.with_context())

    def test_notes_of_a_generator_that_are_not_stored_are_rejected(self):
        found = nb.annotate(iter(["No asthma."] * 7), "bundled_small", device="cpu", progress=False)
        with pytest.raises(ConfigurationError, match="generator"):
            found.with_context()

    def test_texts_without_entities_have_columns(self):
        found = nb.annotate(["Fine."], "bundled_small", device="cpu", progress=False).with_context()
        assert "negated" in found.to_frame()
        assert not found.filter(negated=True)[0]

    @pytest.mark.parametrize(
        ("columns", "language"), [(("negation",), "en"), ((MARKER,), "en"), ((), "xx"), ((5,), "en"), ((), None)]
    )
    def test_unknown_columns_and_languages_are_rejected(self, found, columns, language):
        with pytest.raises(ConfigurationError):
            found.with_context(*columns, language=language)

    @pytest.mark.parametrize("context", [{"negatd": True}, {"negated": "no"}, {"experiencer": True}])
    def test_filter_rejects_context_that_entities_do_not_have(self, found, context):
        with pytest.raises(ConfigurationError, match="with_context"):
            found.with_context("all").filter(**context)
        with pytest.raises(ConfigurationError, match="with_context"):
            found.filter(negated=False)

    @pytest.mark.parametrize("context", [{"temporality": "historicl"}, {"experiencer": "mother"}])
    def test_filter_rejects_values_that_context_never_has(self, found, context):
        with pytest.raises(ConfigurationError, match="Invalid value"):
            found.with_context("all").filter(**context)


class TestSentences:
    """Cues act within a sentence. A wrapped line continues it; a new line of a list does not."""

    @pytest.mark.parametrize(
        ("text", "negated"),
        [
            ("No fever. Asthma.", [True, False]),
            ("No fever\nAsthma", [True, False]),
            ("No fever\r\nAsthma", [True, False]),
            ("No fever\n- asthma", [True, False]),
            ("No fever\n\nasthma", [True, False]),
            ("No fever\rAsthma", [True, False]),
            ("No fever\x85Asthma", [True, False]),
            ("No fever\u2028Asthma", [True, False]),
            ("No fever\u2029Asthma", [True, False]),
            ("No fever\fAsthma", [True, False]),
            ("No fever\vAsthma", [True, False]),
            ("No fever<br>Asthma", [True, False]),
            ("No fever<BR />Asthma", [True, False]),
            ("No fever\nb) asthma", [True, False]),
            ("no fever,\r\n  asthma", [True, True]),
            ("Denies:   Fever,\tAsthma", [True, False]),
            ("no signs of fever,\nasthma", [True, True]),
            ("K 3.5, no fever; asthma", [True, False]),
        ],
    )
    def test_negation_ends_at_the_sentence(self, text, negated):
        spans = [{"start": match.start(), "end": match.end()} for match in re.finditer("(?i:fever|asthma)", text)]
        assert create_context_finder(("negated",), "en")(text, spans) == {"negated": negated}

    def test_sentences_end_in_linear_time_in_white_space(self):
        text = f"No fever{' ' * 100_000}and asthma"
        find_context = create_context_finder(("negated",), "en")
        start = time.perf_counter()
        assert find_context(text, spans_of(text, "fever")) == {"negated": [True]}
        assert time.perf_counter() - start < 5

    def test_entity_across_sentences_joins_them(self):
        text = "No St. Vitus dance. Asthma."
        find_context = create_context_finder(("negated",), "en")
        context = find_context(text, spans_of(text, "St. Vitus dance", "Asthma"))
        assert len(context["negated"]) == 2
        assert context["negated"][1] is False

    @given(st.lists(st.sampled_from(["no", "fever", "asthma", "denies", "but", "pain", ".", "\n", "and"]), max_size=12))
    def test_negation_equals_openmed_within_a_sentence(self, words):
        text = " ".join(words)
        entities = []
        position = 0
        for word in words:
            if word in {"fever", "asthma", "pain"}:
                entities.append({"start": position, "end": position + len(word)})
            position += len(word) + 1
        negated = create_context_finder(("negated",), "en")(text, entities)["negated"]
        assert len(negated) == len(entities)
        if "\n" not in words:
            expected = set(negated_spans(text, entities))
            assert negated == [(entity["start"], entity["end"]) in expected for entity in entities]

    def test_other_languages_use_their_own_cues(self):
        text = "Kein Fieber. Asthma."
        find_context = create_context_finder(("negated",), "de")
        assert find_context(text, spans_of(text, "Fieber", "Asthma")) == {"negated": [True, False]}


def test_context_mark_names_unusual_values_only():
    usual = {"negated": False, "uncertain": False, "temporality": "recent", "experiencer": "patient"}
    assert context_mark(usual) == ""
    assert context_mark({"temporality": "historical", "experiencer": "family"}) == "historical, family"


# Each documented value of context: its column, and the value of an entity that has it.
DOCUMENTED_VALUES = {
    "negated": ("negated", True),
    "uncertain": ("uncertain", True),
    "historical": ("temporality", "historical"),
    "hypothetical": ("temporality", "hypothetical"),
    "family": ("experiencer", "family"),
}


def test_documented_precision_and_recall_are_those_of_the_labeled_notes():
    """The notes were labeled by hand, before the rules were run on them."""
    lines = (Path(__file__).parent / "context_notes.jsonl").read_text("utf-8").splitlines()
    notes = [json.loads(line) for line in lines]
    find_context = create_context_finder(("all",), "en")
    gold = []
    predicted = []
    for note in notes:
        context = find_context(note["text"], note["entities"])
        for index, entity in enumerate(note["entities"]):
            gold.append(entity)
            predicted.append({column: values[index] for column, values in context.items()})
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "find_negated_entities.md").read_text("utf-8")
    for name, (column, value) in DOCUMENTED_VALUES.items():
        is_gold = [entity[column] == value for entity in gold]
        is_predicted = [entity[column] == value for entity in predicted]
        correct = sum(1 for pair in zip(is_gold, is_predicted, strict=True) if all(pair))
        row = f"| {name} | {correct / sum(is_predicted):.2f} | {correct / sum(is_gold):.2f} | {sum(is_gold)} |"
        assert row in page
    assert f"{len(notes)} notes with {len(gold)} entities" in page


def test_documented_values_of_found_entities_are_those_of_the_labeled_notes():
    """Entities that cross a line would have the context of another line."""
    lines = (Path(__file__).parent / "context_notes.jsonl").read_text("utf-8").splitlines()
    notes = [json.loads(line) for line in lines]
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
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "find_negated_entities.md").read_text("utf-8")
    assert f"precision of {correct / sum(predicted):.2f} and a recall of {correct / sum(gold):.2f}" in page
