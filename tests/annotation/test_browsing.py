"""The browser of notes: search, filters and the displayed note, without a widget."""

import pytest
from jupyter_client.session import Session

import openmed_nb as nb
from openmed_nb.annotation.browsing import NUM_LISTED, NoteListing
from openmed_nb.annotation.references import text_fingerprint
from openmed_nb.annotation.results import Annotations, ResultStore

NOTES = [
    "She has Asthma and takes aspirin.",
    "No complaints.",
    "Aspirin for <b>flu</b>.\r\nThen 🩺 flu.",
    None,
    "Straße, fever.",
]
ENTITIES = [
    [("DISEASE", 0.9, "asthma", 8, 14), ("DRUG", 0.6, "aspirin", 25, 32)],
    [],
    [("DRUG", 0.8, "aspirin", 0, 7), ("DISEASE", 0.4, "flu", 15, 18)],
    [],
    [("DISEASE", 0.7, "fever", 8, 13)],
]


def annotations(notes=NOTES, entities=ENTITIES, **options):
    store = ResultStore()
    for note, spans in zip(notes, entities, strict=True):
        names = ("entity_group", "score", "word", "start", "end")
        store.add(text_fingerprint(note), [dict(zip(names, span, strict=True)) for span in spans])
    return Annotations(store, (), "m", "cpu", **{"texts": notes, "known_labels": ("DISEASE", "DRUG"), **options})


def after(*events, found=None):
    listing = NoteListing(found or annotations())
    for event in events:
        listing.handle(event)
    return listing


def search(query):
    return {"action": "search", "query": query}


def filtered(*hidden, min_score=0):
    return {"action": "filter", "hidden": hidden, "min_score": min_score}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((), [0, 1, 2, 3, 4]),
        ((search("ASPIRIN"),), [0, 2]),
        ((search("STRASSE"),), [4]),
        ((search("complaints"),), [1]),
        ((search("<b>"),), [2]),
        ((search("none of them"),), []),
        ((search("aspirin"), search("")), [0, 1, 2, 3, 4]),
        ((filtered("DRUG"),), [0, 2, 4]),
        ((filtered("DRUG", min_score=0.5),), [0, 4]),
        ((filtered("DRUG", "DISEASE"),), []),
        ((filtered("UNKNOWN"),), [0, 1, 2, 3, 4]),
        ((filtered(min_score=0.85),), [0]),
        ((filtered("DISEASE"), search("flu")), [2]),
        ((filtered("DISEASE"), filtered()), [0, 1, 2, 3, 4]),
    ],
)
def test_search_and_filters_select_notes(events, expected):
    assert after(*events).matches.tolist() == expected


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (({"action": "move", "position": 2},), 2),
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


def test_note_is_found_by_the_id_that_is_shown():
    listing = after({"action": "find", "name": "1"}, found=annotations(ids=[4, 3, 2, 1, 0]))
    assert (listing.note, listing.state()["name"]) == (3, "1")


def test_filters_hide_entities_of_the_displayed_note():
    html = after(filtered("DRUG")).state()["html"]
    assert html.count("<mark") == 1
    assert "aspirin" in html


def test_note_is_escaped_and_keeps_its_characters():
    html = after({"action": "move", "position": 2}).state()["html"]
    assert "&lt;b&gt;" in html
    assert "&#13;\nThen" in html


def test_rows_are_a_window_around_the_displayed_note():
    notes = [f"Note {number}." for number in range(1000)]
    listing = after({"action": "move", "position": 700}, found=annotations(notes, [[]] * 1000))
    state = listing.state()
    assert len(state["rows"]) == NUM_LISTED
    assert state["first"] < 700 < state["first"] + NUM_LISTED
    assert after({"action": "move", "position": 999}, found=listing.found).state()["first"] == 1000 - NUM_LISTED


def test_rows_have_ids_counts_and_states():
    found = annotations(ids=["a", "b", "c", "d", "e"])
    found.results.errors[1] = "It cannot be read."
    rows = NoteListing(found).state()["rows"]
    assert rows[:4] == [("a", "2 entities"), ("b", "error"), ("c", "2 entities"), ("d", "missing")]


def test_notes_that_are_not_stored_are_searched_by_their_entities():
    listing = after(search("flu"), found=annotations(texts=None))
    assert listing.matches.tolist() == [2]
    assert "not stored: 4" in listing.state()["status"]
    assert "changed or not stored" in listing.state()["html"]


def test_files_are_searched(tmp_path):
    for name, text in (("a.txt", "She has asthma."), ("b.txt", "No complaints.")):
        (tmp_path / name).write_text(text)
    found = nb.annotate(tmp_path / "*.txt", "bundled_small", device="cpu", progress=False)
    assert after(search("COMPLAINTS"), found=found).matches.tolist() == [1]


def test_hidden_texts_are_neither_displayed_nor_searched():
    listing = after(search("asthma"), found=annotations(show_text=False))
    state = listing.state()
    assert state["query"] is None
    assert len(listing.matches) == len(NOTES)
    assert "sthma" not in str(state)


def test_tokens_and_no_notes_can_be_browsed():
    pipe = nb.load_pipeline("bundled_small", device="cpu", aggregation_strategy="none")
    found = nb.annotate(["She has asthma.", "No."], pipe, progress=False)
    assert "asthma" in NoteListing(found).state()["html"]
    assert NoteListing(annotations([], [])).state()["note"] is None


def test_annotations_have_a_static_form_without_a_user():
    assert set(annotations()._repr_mimebundle_()) == {"text/plain", "text/html"}
    assert annotations()._create_view().state["count"] == len(NOTES)


def test_failed_search_keeps_the_list_and_is_reported():
    """The texts of the user may raise any error while they are read."""

    class Texts:
        broken = False

        def __iter__(self):
            for index, note in enumerate(NOTES):
                if self.broken and index:
                    raise RuntimeError(note)
                yield note

    texts = Texts()
    view = annotations(texts=texts)._create_view()
    view._handle(view, search("asthma"), [])
    texts.broken = True
    view._handle(view, search("aspirin"), [])
    assert "RuntimeError" in view.state["alert"]
    assert NOTES[1] not in view.state["alert"]
    assert (view.listing.query, view.listing.matches.tolist()) == ("asthma", [0])


def test_unpaired_surrogates_do_not_reach_the_front_end():
    listing = after(search("asthma \ud83d"), search(""), found=annotations(ids=["a\ud83d", *"bcde"]))
    Session().pack(listing.state())
    Session().pack(annotations(ids=["a\ud83d", *"bcde"]).show()._repr_mimebundle_())


def test_state_starts_with_the_result_and_the_filters():
    found = annotations()
    state = NoteListing(found).state()
    assert (state["title"], state["details"]) == ("5 entities found in 5 notes", ["Model: m, device: cpu"])
    state = NoteListing(found.filter("disease", min_score=0.5)).state()
    assert state["title"] == "2 mentions of diseases found in 5 notes"
    assert state["details"][1:] == list(found.filter("disease", min_score=0.5).settings["only"])


@pytest.mark.parametrize(("ids", "expected"), [(None, "1"), (["A", "B", "C", "D", "E"], "B"), ([0, 1, 2, 3, 4], "1")])
def test_row_repeats_no_id_that_is_the_index(ids, expected):
    assert NoteListing(annotations(ids=ids)).row(1)[0] == expected
