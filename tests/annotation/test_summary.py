"""Counts of what was found."""

from __future__ import annotations

import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as some

from openmed_nb.annotation.results import SHOWN_ROWS, Annotations, Answers, Summary

FOUND = some.lists(some.tuples(some.sampled_from("AB"), some.sampled_from(["Asthma", "asthma", "pain"])), max_size=4)


def summary_of(answers, show_text=True):
    """Return the summary of answers, each an error or pairs of label and word."""
    columns = Answers()
    for number, answer in enumerate(answers):
        entities = answer if isinstance(answer, str) else [of(*pair) for pair in answer]
        columns.add(number, entities)
    return Annotations(columns, (), "m", "cpu", show_text).summary()


def of(label, word):
    """Return an entity."""
    return {"entity_group": label, "score": 1.0, "word": word, "start": 0, "end": 1}


@given(some.lists(some.one_of(some.just("an error"), FOUND), max_size=8), some.booleans())
def test_counts(answers, show_text):
    """Texts, texts without any entity, errors, labels and words are counted; words only where texts may be shown."""
    summary = summary_of(answers, show_text)
    pairs = [pair for answer in answers if not isinstance(answer, str) for pair in answer]

    assert (summary.texts, summary.empty) == (len(answers), answers.count([]))
    assert [number for number, _why in summary.errors] == [n for n, one in enumerate(answers) if one == "an error"]
    assert dict(summary.labels) == Counter(label for label, _word in pairs)
    assert dict(summary.words) == (Counter(word.lower() for _label, word in pairs) if show_text else {})


def test_text_form():
    """It says how many of what were found, and lists failures and the most frequent words."""
    summary = summary_of([[("A", "Asthma"), ("B", "pain")], [], "why it failed", [("A", "asthma")]])

    assert str(summary) == (
        "3 entities found in 4 texts by m on cpu\n"
        "  By label: A 2, B 1.\n"
        "  Texts without any: 1.\n"
        "  Texts that could not be read or run: 1.\n"
        "Texts without an answer\n"
        "  text  why\n"
        "  2     why it failed\n"
        "Found most often\n"
        "  words   times\n"
        "  asthma  2\n"
        "  pain    1"
    )


def test_one_is_singular():
    """One entity in one text is said in the singular, and nothing is said of what there is none of."""
    assert str(summary_of([[("A", "asthma")]])).splitlines()[:2] == [
        "1 entity found in 1 text by m on cpu",
        "  By label: A 1.",
    ]
    assert str(summary_of([])) == "0 entities found in 0 texts by m on cpu"


def test_words_come_in_a_fixed_order():
    """The most frequent word comes first, and words that are as frequent come in alphabetical order."""
    words = ["b", "a", "c", "c"]
    assert [word for word, _count in summary_of([[("A", word) for word in words]]).words] == ["c", "a", "b"]


def test_shows_the_first_rows_and_holds_them_all():
    """Tables show the first rows; the value has them all."""
    summary = summary_of(["failed"] * 50 + [[("A", f"word {number:02}") for number in range(50)]])

    assert (len(summary.words), len(summary.errors)) == (50, 50)
    assert str(summary).count("\n  word ") == SHOWN_ROWS
    assert str(summary).count("failed") == SHOWN_ROWS


def test_plain_values_survive_json():
    """The mapping has counts as numbers and pairs as mappings."""
    summary = summary_of([[("A", "asthma")], "why"])
    plain = json.loads(json.dumps(summary.to_dict()))

    assert plain["labels"] == {"A": 1}
    assert plain["words"] == {"asthma": 1}
    assert plain["errors"] == {"1": "why"}
    assert (plain["texts"], plain["empty"]) == (2, 0)


def test_html_has_the_counts():
    """The HTML form has the same counts, as tables."""
    page = Summary("m", "cpu", 2, 0, ((1, "why"),), (("A", 2),), (("asthma", 2),))._repr_html_()

    assert "2 entities found in 2 texts by m on cpu" in page
    assert "<td>2</td>" in page
    assert page.count("<table>") == 2
