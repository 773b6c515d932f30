"""Reviews: a random sample of notes, marks that become gold, and the file that continues."""

import math
import subprocess
import sys

import numpy as np
import pytest
from jupyter_client.session import Session

import openmed_nb as nb
from openmed_nb.annotation.gold import GoldSpan
from openmed_nb.annotation.review import Review, ReviewListing
from openmed_nb.errors import ConfigurationError

TEXT = "She has asthma 🩺 and knee pain.\r\nNo flu."
NOTES = [f"{number}. {TEXT}" for number in range(10)]


def annotate(notes=NOTES, **options):
    return nb.annotate(notes, "bundled_small", device="cpu", progress=False, **options)


@pytest.fixture(scope="module")
def found():
    return annotate()


def finish(review, note):
    for span in review.entities[note]:
        review.mark(note, *span)
    review.finish(note)


def test_sample_is_random_seeded_and_grows(found):
    notes = found.review(sample=4).notes
    assert len({*notes}) == 4
    assert found.review(sample=4).notes == notes
    assert found.review(sample=7).notes[:4] == notes
    assert found.review(sample=4, seed=1).notes != notes
    assert sorted(found.review(sample=None).notes) == [*range(10)]
    assert len(found.review(sample=99).notes) == 10


def test_sample_is_uniform(found):
    counts = [sum(number in found.review(sample=3, seed=seed).notes for seed in range(400)) for number in range(10)]
    assert all(80 < count < 160 for count in counts)


def test_sample_excludes_missing_and_failed_notes():
    found = annotate(["She has asthma.", None, "Not read.", "No flu.", ""])
    found.results.errors[2] = "It cannot be read."
    assert sorted(found.review().notes) == [0, 3, 4]


def test_marks_become_gold(found):
    review = found.review(sample=None)
    asthma = review.entities[3][0]
    review.mark(3, *asthma)
    assert review.gold.texts == ()
    with pytest.raises(ConfigurationError, match="not marked"):
        review.finish(3)
    for span in review.entities[3]:
        review.mark(3, *span, right=span == asthma)
    review.mark(3, 24, 33, "SYMPTOM")
    review.finish(3)
    (text,) = review.gold
    assert (text.id, text.position) == (None, 3)
    assert text.spans == (asthma, GoldSpan(24, 33, "SYMPTOM"))
    assert review.num_reviewed == 1
    review.finish(3, finished=False)
    assert len(review.gold) == 0


def test_removed_mark_ends_the_review_of_the_note(found):
    review = found.review(sample=1)
    (note,) = review.notes
    finish(review, note)
    review.mark(note, *review.entities[note][0], right=None)
    assert not review.is_reviewed(note)


def test_frame_contains_the_marked_entities_of_reviewed_notes():
    pandas = pytest.importorskip("pandas")
    found = annotate({"a7": "No flu.", "b2": "She has asthma, migraine and ASD.", "c3": "Has gout."})
    review = found.review(sample=None)
    assert review.to_frame().empty
    asthma, migraine = review.entities["b2"][:2]
    for span in review.entities["b2"]:
        review.mark("b2", *span, right=span != migraine)
    review.mark("b2", 29, 32, "SYMPTOM")
    review.mark("b2", 0, 3, "SYMPTOM", right=False)
    review.mark("c3", *review.entities["c3"][0])
    review.finish("b2")
    frame = review.to_frame()
    assert [*frame] == ["note_index", "note_id", "entity_group", "span_text", "start", "end", "mark"]
    assert {*frame["note_id"]} == {"b2"}
    marks = dict(zip(frame["span_text"], frame["mark"], strict=True))
    assert marks == {"asthma": "right", "migraine": "wrong", "ASD": "missed"}
    assert frame["start"].tolist()[0] == asthma.start
    dates = pandas.DataFrame({"note_id": ["a7", "b2"], "date": ["2024-01-02", "2024-03-04"]})
    assert {*frame.merge(dates, on="note_id")["date"]} == {"2024-03-04"}
    assert found.review().to_frame().merge(dates, on="note_id").empty


def test_frame_has_the_index_of_a_series():
    pandas = pytest.importorskip("pandas")
    found = annotate(pandas.Series(["Unwell.", "Has gout."], index=["x", "y"]))
    review = found.review(sample=None)
    finish(review, "y")
    assert review.to_frame().index.tolist() == ["y"]


def test_review_continues_at_the_first_note_that_is_not_reviewed(found):
    review = found.review(sample=3)
    for note in (review.notes[0], review.notes[2]):
        finish(review, note)
    assert ReviewListing(review).note == review.notes[1]
    finish(review, review.notes[1])
    assert ReviewListing(review).note == review.notes[0]


def test_review_without_a_file_states_it(found, tmp_path):
    assert "not saved" in ReviewListing(found.review()).state()["review"]["notice"]
    assert "not saved" not in ReviewListing(found.review(tmp_path / "review.jsonl")).state()["review"]["notice"]


def test_score_counts_reviewed_notes_only(found):
    review = found.review(sample=None)
    with pytest.raises(ConfigurationError, match="No note"):
        review.score()
    for note in (2, 5):
        finish(review, note)
    review.mark(5, 0, 1, "DISEASE")
    scores = found.score(review)
    assert scores == review.score()
    assert scores.num_texts == 2
    assert scores.total.strict.missed == 1
    assert scores.total.strict.spurious == 0
    assert scores.total.strict.correct == len(found[2]) + len(found[5])


def test_review_scores_other_results_of_the_same_notes(found):
    review = found.review(sample=None)
    finish(review, 2)
    assert annotate(ids=[f"n{number}" for number in range(10)]).score(review).total.strict.recall == 1
    assert found.filter(min_score=1).score(review).total.strict.recall == 0
    with pytest.raises(ConfigurationError, match="other notes"):
        annotate(NOTES[1:]).score(review)


def test_file_continues_without_texts(found, tmp_path):
    path = tmp_path / "review.jsonl"
    review = found.review(path, sample=3)
    finish(review, review.notes[0])
    review.mark(review.notes[1], 0, 1, "DISEASE")
    again = annotate().review(path, sample=5)
    assert again.num_reviewed == 1
    assert again.gold.texts == review.gold.texts
    assert again.marked_spans(again.notes[1]) == {GoldSpan(0, 1, "DISEASE"): True}
    content = path.read_text("utf-8")
    assert "asthma" not in content
    assert "knee" not in content
    assert path.stat().st_mode & 0o077 == 0


def test_marks_of_other_entities_continue(found, tmp_path):
    path = tmp_path / "review.jsonl"
    review = found.review(path, sample=None)
    finish(review, 0)
    fewer = found.filter(min_score=1).review(path, sample=None)
    assert fewer.is_reviewed(0)
    assert fewer.gold.texts == review.gold.texts


def test_other_files_are_refused(found, tmp_path):
    path = tmp_path / "review.jsonl"
    finish(found.review(path, sample=None), 0)
    with pytest.raises(ConfigurationError, match="other notes"):
        annotate(NOTES[1:]).review(path)
    with pytest.raises(ConfigurationError, match="seed=0"):
        found.review(path, seed=1)


def test_deleted_file_is_written_again(found, tmp_path):
    path = tmp_path / "review.jsonl"
    review = found.review(path, sample=None)
    finish(review, 0)
    path.unlink()
    finish(review, 1)
    again = found.review(path, sample=None)
    assert again.gold.texts == review.gold.texts
    assert again.num_reviewed == 2


def test_two_kernels_can_write_one_file(found, tmp_path):
    path = tmp_path / "review.jsonl"
    first = found.review(path, sample=None)
    second = found.review(path, sample=None)
    first.mark(0, 0, 1, "DISEASE")
    second.mark(0, 1, 2, "DISEASE")
    finish(first, 1)
    second.finish(1, finished=False)
    marks = {GoldSpan(0, 1, "DISEASE"): True, GoldSpan(1, 2, "DISEASE"): True}
    assert found.review(path, sample=None).marked_spans(0) == marks
    assert found.review(path, sample=None).num_reviewed == 0


def test_file_that_became_another_one_is_not_changed(found, tmp_path):
    path = tmp_path / "review.jsonl"
    review = found.review(path, sample=None)
    finish(review, 0)
    path.write_bytes(b"a,b\n1,2")
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="not a review"):
            review.mark(1, 0, 1, "DISEASE")
    assert path.read_bytes() == b"a,b\n1,2"
    path.unlink()
    review.mark(2, 0, 1, "DISEASE")
    assert found.review(path, sample=None).num_reviewed == 1


def test_integers_of_numpy_are_saved(found, tmp_path):
    path = tmp_path / "review.jsonl"
    found.review(path, sample=None).mark(np.int64(0), np.int32(0), np.int64(1), "DISEASE")
    assert found.review(path, sample=None).marked_spans(0) == {GoldSpan(0, 1, "DISEASE"): True}


def test_killed_process_loses_no_mark(tmp_path):
    path = tmp_path / "review.jsonl"
    code = f"""
import os, signal, openmed_nb as nb
review = nb.annotate({NOTES!r}, "bundled_small", device="cpu", progress=False).review({str(path)!r}, sample=None)
review.mark(4, 0, 1, "DISEASE")
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    assert annotate().review(path, sample=None).marked_spans(4) == {GoldSpan(0, 1, "DISEASE"): True}


@pytest.mark.parametrize(
    "make",
    [
        lambda: annotate(iter(NOTES)),
        lambda: annotate(show_text=False),
        lambda: annotate([]),
        lambda: annotate([None]),
        lambda: annotate(aggregation_strategy="none"),
    ],
)
def test_notes_without_texts_or_entities_cannot_be_reviewed(make):
    with pytest.raises(ConfigurationError):
        make().review()


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("mark", (99, 0, 1, "DISEASE")),
        ("mark", (0, 1, 1, "DISEASE")),
        ("mark", (0, 0, 1, 5)),
        ("mark", (0, 0, 1, "DISEASE", "yes")),
        ("mark", (0, 0, 999, "DISEASE")),
        ("mark", (0, 0, 1, "\ud800")),
        ("mark", ([0], 0, 1, "DISEASE")),
        ("mark", (True, 0, 1, "DISEASE")),
        ("finish", (99,)),
        ("finish", (0, "She has asthma")),
    ],
)
def test_invalid_marks_are_rejected(found, method, arguments):
    with pytest.raises(ConfigurationError):
        getattr(found.review(sample=None), method)(*arguments)


@pytest.mark.parametrize("sample", [0, -1, 1.5, "all", True])
def test_invalid_sample_is_rejected(found, sample):
    with pytest.raises(ConfigurationError):
        found.review(sample=sample)


def test_clicks_change_the_review(found):
    review = found.review(sample=None)
    listing = ReviewListing(review)
    note = listing.note

    def click(**event):
        listing.handle({"note": note, **event})

    text = NOTES[note]
    start = text.index("knee")
    missed = {"action": "add", "label": "DISEASE"}
    click(action="finish", finished=True)
    assert "not marked" in listing.state()["alert"]
    click(action="all right")
    assert listing.state()["review"]["unmarked"] == 0
    click(**missed, text="knee ", start=start - 1, end=start + 5)
    click(**missed, text="No", start=None, end=None)
    click(**missed, text="asthma", start=None, end=None)
    assert "does not contain" in listing.state()["alert"]
    click(action="finish", finished=True)
    state = listing.state()
    assert state["alert"] == ""
    assert state["review"]["finished"]
    assert state["rows"][0][1].endswith(", reviewed")
    added = [(entity["text"], entity["label"]) for entity in state["review"]["entities"] if entity["missed"]]
    assert added == [("knee", "DISEASE"), ("No", "DISEASE")]
    assert "No<" in state["html"]
    click(action="mark", start=start, end=start + 4, label="DISEASE", right=None)
    assert "knee" not in [entity["text"] for entity in listing.state()["review"]["entities"]]


def test_typed_entity_is_added_at_the_next_whole_word():
    text = "WEIGHT 70, HT 1.7, no MRA. HT and RA: RA-factor."
    review = annotate([text]).review()
    listing = ReviewListing(review)

    def places_of(words):
        listing.handle({"action": "add", "note": 0, "label": "DISEASE", "text": words, "start": None, "end": None})
        return [span.start for span in review.marked_spans(0)]

    assert places_of("HT") == [11]
    assert places_of("HT") == [11, 27]
    assert places_of("HT") == [11, 27]
    assert "Select" in listing.state()["alert"]
    assert places_of("RA") == [11, 27, 34]
    assert places_of("EIG") == [11, 27, 34]


def test_late_click_belongs_to_the_displayed_note(found):
    """The front end may send a click before it has received the next note."""
    review = found.review(sample=None)
    listing = ReviewListing(review)
    first, second, *_ = review.notes
    listing.handle({"action": "move", "note": first, "position": 1})
    listing.handle({"action": "all right", "note": first})
    listing.handle({"action": "finish", "note": first, "finished": True})
    assert review.is_reviewed(first)
    assert review.marked_spans(second) == {}


def test_all_entities_are_saved_at_once(found, tmp_path):
    review = found.review(tmp_path / "review.jsonl", sample=1)
    ReviewListing(review).handle({"action": "all right", "note": review.notes[0]})
    assert len(review.path.read_bytes().splitlines()) == 2


VALUES = [
    *(None, True, -1, 0, 10**9, 10**30, 2.5, math.nan, math.inf, "", "x", "\ud800", "a" * 10_000),
    *([], [[]], {}, {"a": 1}, [None], [{}], TEXT, "DISEASE"),
]
EVENTS = [
    *({"action": "search", "query": None}, {"action": "filter", "hidden": [], "min_score": 0}),
    *({"action": "move", "position": 0}, {"action": "find", "name": "0"}, {"action": "finish", "finished": True}),
    *({"action": "mark", "start": 8, "end": 14, "label": "DISEASE", "right": True}, {"action": "all right"}),
    {"action": "add", "start": 8, "end": 14, "label": "DISEASE", "text": "asthma"},
]


@pytest.mark.filterwarnings("error")  # jupyter_client warns of a message that is not valid JSON.
@pytest.mark.parametrize("event", EVENTS, ids=[event["action"] for event in EVENTS])
def test_any_message_leaves_the_browser_usable(found, tmp_path, event):
    """A message that no front end sends neither raises an error nor writes a text to the file."""
    review = found.review(tmp_path / "review.jsonl", sample=None)
    views = [found._create_view(), review._create_view()]
    events = [{**event, "note": 0, key: value} for key in (*event, "note") for value in VALUES]
    events += [{name: value for name, value in event.items() if name != key} for key in event]
    for sent in [*events, *VALUES]:
        for view in views:
            view._handle(view, sent, [])
            Session().pack(view.state)
            assert "asthma" not in view.state["alert"]
    for view in views:
        view._handle(view, {"action": "search", "query": ""}, [])
        view._handle(view, {"action": "move", "note": 0, "position": 3}, [])
        assert view.state["position"] == 3
        assert view.state["alert"] == ""
    assert "asthma" not in review.path.read_text("utf-8")
    assert found.review(review.path, sample=None).gold.texts == review.gold.texts


def test_review_is_displayed_with_its_progress(found):
    review = found.review(sample=2)
    finish(review, review.notes[0])
    assert isinstance(review, Review)
    assert str(review).startswith("1 of 2 notes reviewed.")
    assert "recall" in review._repr_html_()
    assert review.to_dict() == {"num_notes": 2, "num_reviewed": 1}
    assert "asthma" not in str(review)
