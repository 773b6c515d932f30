"""The browser of notes: search, filters and the displayed note, without a widget."""

from dataclasses import replace

import pytest
from jupyter_client.session import Session

import openmed_nb as nb
from helpers.annotations import make_annotations
from openmed_nb.annotation.browsing import NUM_LISTED, NoteListing

NOTES = [
    "She has Asthma and takes aspirin.",
    "No complaints.",
    "Aspirin for <b>flu</b>.\r\nThen 🩺 flu.",
    None,
    "Straße, fever. Crohn\u2019s.",
]
ENTITIES = [
    [("DISEASE", 0.9, "asthma", 8, 14), ("DRUG", 0.6, "aspirin", 25, 32)],
    [],
    [("DRUG", 0.8, "aspirin", 0, 7), ("DISEASE", 0.4, "flu", 15, 18)],
    [],
    [("DISEASE", 0.7, "fever", 8, 13)],
]


def annotations(notes=NOTES, entities=ENTITIES, **options):
    names = ("entity_group", "score", "word", "start", "end")
    results = [[dict(zip(names, span, strict=True)) for span in spans] for spans in entities]
    options = {"preview_texts": (), "known_labels": ("DISEASE", "DRUG"), **options}
    return make_annotations(results, notes, **options)


def after(*events, found=None):
    listing = NoteListing(found or annotations())
    for event in events:
        listing.handle(event)
    return listing


def search(query):
    return {"action": "search", "query": query}


def filtered(*hidden, min_score=0, context=""):
    return {"action": "filter", "hidden": hidden, "min_score": min_score, "context": context}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((), [0, 1, 2, 3, 4]),
        ((search("ASPIRIN"),), [0, 2]),
        ((search("STRASSE"),), [4]),
        ((search("complaints"),), [1]),
        ((search("crohn's"),), [4]),
        ((search("<b>"),), [2]),
        ((search("none of them"),), []),
        ((search("aspirin"), search("")), [0, 1, 2, 3, 4]),
        ((filtered("DRUG"),), [0, 2, 4]),
        ((filtered("DRUG", min_score=0.5),), [0, 4]),
        ((filtered("DRUG", "DISEASE"),), []),
        ((filtered("UNKNOWN"),), [0, 1, 2, 3, 4]),
        ((filtered(min_score=0.85),), [0]),
        ((filtered("DISEASE"), search("flu")), []),
        ((search("flu"), filtered("DRUG")), [2]),
        ((filtered("DRUG"), search("STRASSE")), []),
        ((filtered("DRUG"), search("takes")), []),
        ((filtered("DRUG"), search("4")), [4]),
        ((filtered("DISEASE"), filtered()), [0, 1, 2, 3, 4]),
    ],
)
def test_search_and_filters_select_notes(events, expected):
    assert after(*events).matches.tolist() == expected


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (({"action": "move", "position": 99},), 4),
        (({"action": "move", "position": -1},), 0),
        (({"action": "find", "name": "4"},), 4),
        (({"action": "find", "name": "7"},), 0),
        (({"action": "move", "position": 2}, search("aspirin")), 2),
        (({"action": "move", "position": 1}, search("aspirin")), 0),
        ((search("none of them"), {"action": "move", "position": 1}), None),
    ],
)
def test_displayed_note_stays_if_it_is_still_listed(events, expected):
    listing = after(*events)
    assert listing.note == expected
    assert listing.state()["note"] == expected


def test_displayed_note_is_escaped_and_has_the_entities_that_filters_leave():
    html = after({"action": "move", "position": 2}, filtered("DRUG")).state()["html"]
    assert html.count("<mark") == 1
    assert "&lt;b&gt;" in html
    assert "&#13;\nThen" in html


def test_context_filter_leaves_entities_with_the_label():
    listing = NoteListing(nb.annotate(["Asthma, no flu.", "Has gout."], "bundled_small", device="cpu").with_context())
    contexts = listing.state()["contexts"]
    assert contexts == {"negated": 1, "no context": 2}
    listing.handle(filtered(context="negated"))
    assert listing.matches.tolist() == [0]
    assert [entity["word"] for entity in listing.displayed_entities(0)] == ["flu"]
    listing.handle(filtered(context="no context"))
    assert listing.matches.tolist() == [0, 1]
    listing.handle(filtered(context="family"))
    assert listing.state()["context"] == ""


def test_rows_are_a_window_around_the_displayed_note():
    notes = [f"Note {number}." for number in range(1000)]
    listing = after({"action": "move", "position": 700}, found=annotations(notes, [[]] * 1000))
    state = listing.state()
    assert len(state["rows"]) == NUM_LISTED
    assert state["first"] < 700 < state["first"] + NUM_LISTED
    assert after({"action": "move", "position": 999}, found=listing.found).state()["first"] == 1000 - NUM_LISTED


def test_rows_have_ids_counts_and_states():
    found = annotations(ids=["a\ud83d", *"bcde"])
    found.results.errors[1] = "It cannot be read."
    listing = after({"action": "find", "name": "e"}, found=found)
    state = listing.state()
    assert state["rows"][:4] == [("a?", "2 entities"), ("b", "error"), ("c", "2 entities"), ("d", "missing")]
    assert (listing.note, state["name"]) == (4, "e")
    assert "No note" in after({"action": "find", "name": "0"}, found=found).alert
    assert after(search("A?"), found=found).matches.tolist() == [0]
    Session().pack(state)
    unmatched = after(search("asthma \ud83d")).state()
    assert "one phrase" in unmatched["status"]
    Session().pack(unmatched)
    Session().pack(found.show()._repr_mimebundle_())


def test_notes_that_are_not_stored_are_searched_by_their_entities():
    listing = after(search("flu"), found=replace(annotations(), texts=None))
    assert listing.matches.tolist() == [2]
    assert "not stored: 4" in listing.state()["status"]
    assert "changed or not stored" in listing.state()["html"]


def test_files_are_searched_and_unaggregated_tokens_are_displayed(tmp_path):
    for name, text in (("a.txt", "She has asthma."), ("b.txt", "No complaints.")):
        (tmp_path / name).write_text(text)
    pipe = nb.load_pipeline("bundled_small", device="cpu", aggregation_strategy="none")
    found = nb.annotate(tmp_path / "*.txt", pipe, progress=False)
    assert "asthma" in NoteListing(found).state()["html"]
    assert after(search("COMPLAINTS"), found=found).matches.tolist() == [1]
    assert NoteListing(annotations([], [])).state()["note"] is None


def test_hidden_texts_are_neither_displayed_nor_searched():
    listing = after(search("asthma"), found=annotations(show_text=False))
    state = listing.state()
    assert state["query"] is None
    assert len(listing.matches) == len(NOTES)
    assert "sthma" not in str(state)


def test_failed_action_keeps_the_list_and_is_reported():
    """The texts of the user may raise any error while they are read."""

    def texts():
        yield NOTES[0]
        raise RuntimeError(NOTES[1])

    view = annotations()._create_view()
    view._handle(view, search("asthma"), [])
    object.__setattr__(view.listing.found, "texts", texts())
    view._handle(view, search("aspirin"), [])
    assert "RuntimeError" in view.state["alert"]
    assert NOTES[1] not in view.state["alert"] + repr(view)
    assert (view.listing.query, view.listing.matches.tolist()) == ("asthma", [0])
    view._handle(view, filtered(min_score="high"), [])
    assert "min_score" in view.state["alert"]
    view._handle(view, {}, [])
    assert "KeyError" in view.state["alert"]


def test_state_starts_with_the_result_and_the_filters():
    found = annotations().filter("disease", min_score=0.5)
    state = found._create_view().state
    assert state["title"] == "2 mentions of diseases found in 5 notes"
    assert state["details"] == [
        "Model: bundled, device: cpu",
        *found.filters,
        "2 notes have text but no entities.",
        "1 note has no text.",
    ]
    assert (state["count"], state["total"]) == (2, 5)
    assert set(found._repr_mimebundle_()) == {"text/plain", "text/html"}
