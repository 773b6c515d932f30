"""Reviews: a random sample of notes, marks that become gold, and the file that continues."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from helpers.annotations import annotate
from openmed_nb.annotation.browsing import ReviewListing
from openmed_nb.annotation.gold import GoldSpan
from openmed_nb.annotation.json_lines import append_checksum, to_json_line
from openmed_nb.errors import ConfigurationError

TEXT = "She has asthma 🩺 and knee pain.\r\nNo flu."
NOTES = [f"{number}. {TEXT}" for number in range(10)]


@pytest.fixture(scope="module")
def found():
    return annotate(NOTES)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "review.jsonl"


def finish(review, note):
    for span in review.entities[note]:
        review.mark(note, *span)
    review.finish(note)


def test_sample_is_random_seeded_and_grows(found):
    notes = found.review(sample=4).notes
    assert len({*notes}) == 4
    assert found.review(sample=4).notes == notes
    assert found.review(sample=7).notes[:4] == notes
    assert sorted(found.review(sample=None).notes) == [*range(10)]
    assert len(found.review(sample=99).notes) == 10
    counts = np.bincount([note for seed in range(300) for note in found.review(sample=3, seed=seed).notes])
    assert all(50 < count < 130 for count in counts)


def test_sample_excludes_missing_and_failed_notes():
    found = annotate(["She has asthma.", None, "Not read.", "No flu.", ""])
    found.results.errors[2] = "It cannot be read."
    assert sorted(found.review().notes) == [0, 3]


def test_marks_become_gold_when_the_note_is_reviewed(found):
    review = found.review(sample=None)
    asthma = review.entities[3][0]
    review.mark(3, *asthma)
    assert review.gold.texts == ()
    with pytest.raises(ConfigurationError, match="not marked"):
        review.finish(3)
    for span in review.entities[3]:
        review.mark(3, *span, right=span == asthma)
    review.mark(3, 24, 28, "DISEASE")
    review.finish(3)
    (text,) = review.gold
    assert (text.id, text.position) == (None, 3)
    assert text.spans == (asthma, GoldSpan(24, 28, "DISEASE"))
    assert str(review).startswith("1 of 10 notes reviewed.")
    assert review.to_dict() == {"num_notes": 10, "num_reviewed": 1}
    assert "asthma" not in str(review)
    review.finish(3, finished=False)
    assert len(review.gold) == 0
    review.finish(3)
    review.mark(3, *asthma, right=None)
    assert not review.is_reviewed(3)


def test_frame_contains_the_marked_entities_of_reviewed_notes():
    found = annotate({"a7": "No flu.", "b2": "She has asthma, migraine and walks.", "c3": "Has gout."})
    review = found.review(sample=None)
    assert review.to_frame().empty
    asthma, migraine = review.entities["b2"][:2]
    for span in review.entities["b2"]:
        review.mark("b2", *span, right=span != migraine)
    review.mark("b2", 29, 34, "DISEASE")
    review.mark("b2", 0, 3, "DISEASE")
    review.mark("b2", 0, 3, "DISEASE", right=False)
    review.mark("c3", *review.entities["c3"][0])
    review.finish("b2")
    frame = review.to_frame()
    assert [*frame] == ["note_index", "note_id", "entity_group", "span_text", "start", "end", "mark"]
    marks = dict(zip(frame["span_text"], frame["mark"], strict=True))
    assert marks == {"asthma": "right", "migraine": "wrong", "walks": "missed"}
    assert frame["start"].tolist()[0] == asthma.start
    dates = pd.DataFrame({"note_id": ["b2", "a7", "c3"], "date": ["2024-03-04", "2024-01-02", ""]})
    assert {*review.to_frame(dates)["date"]} == {"2024-03-04"}
    assert found.review().to_frame(dates).empty
    with pytest.raises(ConfigurationError, match="table is that of a review"):
        found.score(frame)

    review = annotate(pd.Series(["Unwell.", "Has gout."], index=["x", "y"])).review(sample=None)
    finish(review, "y")
    assert review.to_frame().index.tolist() == ["y"]


def test_score_counts_reviewed_notes_only_and_other_results_of_them(found):
    review = found.review(sample=None)
    with pytest.raises(ConfigurationError, match="No note"):
        review.score()
    for note in (2, 5):
        finish(review, note)
    review.mark(5, 0, 1, "DISEASE")
    scores = found.score(review)
    assert scores == review.score()
    assert scores.num_texts == 2
    total = scores.total.strict
    assert (total.missed, total.spurious, total.correct) == (1, 0, len(found[2]) + len(found[5]))
    assert annotate(NOTES, ids=[f"n{number}" for number in range(10)]).score(review).total.strict.missed == 1
    assert found.filter(min_score=1).score(review).total.strict.recall == 0
    with pytest.raises(ConfigurationError, match="other notes"):
        annotate(NOTES[1:]).score(review)


def test_accept_marks_the_rest_as_right_and_undo_restores_each_change(found, path):
    review = found.review(path, sample=None)
    wrong, *others = review.entities[3]
    review.mark(3, *wrong, right=False)
    review.accept(3)
    review.accept(3)  # A key that is pressed twice changes nothing.
    assert review.is_reviewed(3)
    assert review.marked_spans(3) == {wrong: False, **dict.fromkeys(others, True)}
    assert review.undo() == 3
    assert found.review(path, sample=None).marked_spans(3) == {wrong: False}
    review.undo()
    assert review.marked_spans(3) == {}
    with pytest.raises(ConfigurationError, match="undo"):
        review.undo()


def test_added_entity_marks_overlapping_ones_with_its_label_as_wrong():
    review = replace(annotate(["Has asthma today."]), known_labels=("DISEASE", "SYMPTOM")).review()
    (asthma,) = review.entities[0]
    disease = asthma._replace(start=6, end=16)
    symptom = disease._replace(label="SYMPTOM")
    for span in (symptom, disease):
        review.mark(0, *span)
    assert review.marked_spans(0) == {symptom: True, disease: True, asthma: False}
    review.undo()
    assert review.marked_spans(0) == {symptom: True}
    for span in (disease, asthma, disease):  # The user decides otherwise.
        review.mark(0, *span)
    assert all(review.marked_spans(0).values())


def test_corrected_context_is_scored_and_saved(path):
    notes = ["Asked about asthma, never had it.", "No flu. Has gout.", "No migraine."]
    found = annotate(notes).with_context("negated", "experiencer")
    review = found.review(path, sample=None)
    asthma = review.entities[0][0]
    review.mark(0, *asthma, negated=True)
    review.mark(1, *review.entities[1][1], right=False)
    for note in (0, 1):
        review.accept(note)
    again = found.review(path, sample=None)
    assert again.score() == review.score()
    scores = again.score().context
    assert [*scores] == ["negated"]
    assert [row[:2] for row in again.score().to_report().tables[0].rows if row[0] == "negated"] == [
        ("negated", "context")
    ]
    assert (scores["negated"].precision, scores["negated"].recall) == (1, 0.5)
    assert scores["negated"].f1_interval.low < scores["negated"].f1 < scores["negated"].f1_interval.high
    assert again.to_frame()["negated"].tolist() == [True, True, None]
    assert annotate(notes).score(again).context == {}
    for context, right in (({"uncertain": True}, True), ({"experiencer": "nurse"}, True), ({"negated": True}, False)):
        with pytest.raises(ConfigurationError):
            review.mark(0, *asthma, right=right, **context)


def test_corrected_context_belongs_to_an_entity_with_its_label():
    labels = ("DISEASE", "SYMPTOM")
    review = replace(annotate(["No flu. Has gout."]).with_context(), known_labels=labels).review()
    review.accept(0)
    flu = review.entities[0][0]
    review.mark(0, *flu[:2], "SYMPTOM", negated=False)
    assert review.score().context["negated"].recall == 1
    review.mark(0, *flu, right=False)
    assert review.score().context["negated"].spurious == 1


def test_missed_entity_has_the_context_of_the_entity_it_corrects():
    review = annotate(["No type 2 diabetes mellitus. She walks."]).with_context().review()
    review.mark(0, 3, 27, "DISEASE", right=False)
    listing = ReviewListing(review)
    assert "3 to 27" in listing.state()["html"]
    review.mark(0, 10, 27, "DISEASE")
    review.mark(0, 33, 38, "DISEASE")
    review.accept(0)
    state = listing.state()
    assert "3 to 27" not in state["html"]
    assert [entity["context"]["negated"] for entity in state["review"]["entities"]][1:] == [True, False]
    assert review.to_frame()["negated"].tolist() == [None, True, False]


def test_corrected_context_is_displayed_without_the_cue():
    review = annotate(["History of asthma."]).with_context("temporality", "temporality_by").review()
    review.mark(0, *review.entities[0][0], temporality="hypothetical")
    assert 'to 17, hypothetical"' in ReviewListing(review).state()["html"]


def test_file_of_an_older_review_has_no_context_until_it_is_accepted(path):
    found = annotate(["No flu."]).with_context()
    found.review(path).accept(0)
    header, line = path.read_bytes().splitlines(keepends=True)
    values = json.loads(line)
    del values["context"], values["checksum"]
    path.write_bytes(header + append_checksum(to_json_line(values)))
    review = found.review(path)
    assert review.is_reviewed(0)
    assert review.score().context == {}
    review.accept(0)
    assert review.score().context["negated"].recall == 1


def test_file_continues_without_texts(found, path):
    review = found.review(path, sample=3)
    assert "not saved" not in ReviewListing(review).state()["review"]["notice"]
    assert "not saved" in ReviewListing(found.review()).state()["review"]["notice"]
    finish(review, review.notes[0])
    review.mark(np.int64(review.notes[1]), np.int32(0), np.int64(1), "DISEASE")
    again = annotate(NOTES).review(path, sample=5)
    assert again.gold.texts == review.gold.texts
    assert again.marked_spans(again.notes[1]) == {GoldSpan(0, 1, "DISEASE"): True}
    assert ReviewListing(again).note == again.notes[1]  # The first one that is not reviewed.
    fewer = found.filter(min_score=1).review(path, sample=None)
    assert fewer.is_reviewed(review.notes[0])
    content = path.read_text("utf-8")
    assert "asthma" not in content
    assert "knee" not in content
    assert path.stat().st_mode & 0o077 == 0


def test_other_files_are_refused_and_kept(found, path):
    review = found.review(path, sample=None)
    finish(review, 0)
    with pytest.raises(ConfigurationError, match=r"\(notes\)"):
        annotate(NOTES[1:]).review(path)
    with pytest.raises(ConfigurationError, match=r"\(seed\)"):
        found.review(path, seed=1)
    path.write_bytes(b"a,b\n1,2")
    with pytest.raises(ConfigurationError, match="not a review"):
        review.mark(1, 0, 1, "DISEASE")
    assert path.read_bytes() == b"a,b\n1,2"


def test_label_that_no_file_can_contain_is_rejected(found, path):
    review = found.review(path)
    with pytest.raises(ConfigurationError, match="label"):
        review.mark(0, 0, 3, "\ud800")
    review.mark(0, 0, 3, "DISEASE")

    assert found.review(path).marked_spans(0) == {GoldSpan(0, 3, "DISEASE"): True}


def test_deleted_file_is_written_again_with_all_marks(found, path):
    review = found.review(path, sample=None)
    finish(review, 0)
    path.unlink()
    review.mark(1, 0, 1, "DISEASE")

    again = found.review(path, sample=None)
    assert again.is_reviewed(0)
    assert again.marked_spans(0) == review.marked_spans(0)
    assert again.marked_spans(1) == {GoldSpan(0, 1, "DISEASE"): True}
    path.unlink()
    review.undo()
    assert found.review(path, sample=None).num_reviewed == 1


def test_two_reviews_of_one_file_have_the_same_marks(found, path):
    """A cell that runs twice makes two reviews, and the browser of the first one may still be displayed."""
    first = found.review(path, sample=None)
    second = found.review(path, sample=None)
    first.mark(0, 0, 1, "DISEASE")
    second.mark(0, 1, 2, "DISEASE")
    finish(first, 1)
    second.finish(1, finished=False)
    marks = {GoldSpan(0, 1, "DISEASE"): True, GoldSpan(1, 2, "DISEASE"): True}
    assert found.review(path, sample=None).marked_spans(0) == marks
    assert found.review(path, sample=None).num_reviewed == 0
    with pytest.raises(ConfigurationError, match="elsewhere"):
        first.undo()
    second.undo()
    assert first.undo() == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_killed_process_loses_no_mark(found, path):
    child = os.fork()
    if child == 0:
        found.review(path, sample=None).mark(4, 0, 1, "DISEASE")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)

    assert found.review(path, sample=None).marked_spans(4) == {GoldSpan(0, 1, "DISEASE"): True}


@pytest.mark.parametrize(
    ("notes", "options"),
    [
        (iter(NOTES), {}),
        (NOTES, {"show_text": False}),
        ([None], {}),
        (NOTES, {"aggregation_strategy": "none"}),
    ],
)
def test_notes_without_texts_or_entities_cannot_be_reviewed(notes, options):
    with pytest.raises(ConfigurationError):
        annotate(notes, **options).review()


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("mark", (99, 0, 1, "DISEASE")),
        ("mark", (0, 1, 1, "DISEASE")),
        ("mark", (0, 0, 1, "DISEASE", "yes")),
        ("mark", (0, 0, 999, "DISEASE")),
        ("mark", (True, 0, 1, "DISEASE")),
        ("mark", (0, 0, 1, "DISEASE", False)),
        ("finish", (0, "She has asthma")),
    ],
)
def test_invalid_marks_are_rejected(found, method, arguments):
    with pytest.raises(ConfigurationError):
        getattr(found.review(sample=None), method)(*arguments)


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
    # The front end may send a click before it has received the next note.
    click(action="move", position=1)
    click(action="accept")
    assert listing.note == review.notes[1]
    assert review.marked_spans(review.notes[1]) == {}
    click(action="move", position=0)
    assert listing.state()["rows"][0][1] == "✓ reviewed"
    click(action="finish", finished=False)
    assert listing.state()["review"]["unmarked"] == 0
    click(**missed, text="knee ", start=start - 1, end=start + 5)
    click(**missed, text="No", start=None, end=None)
    click(**missed, text="asthma", start=None, end=None)
    assert "starts at each place" in listing.state()["alert"]
    click(action="finish", finished=True)
    state = listing.state()
    assert state["alert"] == ""
    assert state["review"]["finished"]
    added = [(entity["text"], entity["label"]) for entity in state["review"]["entities"] if entity["missed"]]
    assert added == [("knee", "DISEASE"), ("No", "DISEASE")]
    assert "No<" in state["html"]
    click(action="mark", start=start, end=start + 4, label="DISEASE", right=None, context={})
    assert "knee" not in [entity["text"] for entity in listing.state()["review"]["entities"]]
    click(action="next")
    click(action="undo")
    assert listing.note == note
    assert "knee" in [entity["text"] for entity in listing.state()["review"]["entities"]]


def test_typed_entity_is_added_at_the_next_whole_word():
    """It may start where a wrong entity does."""
    text = "WEIGHT 70, HT 1.7, no MRA. HT and RA: RA-factor. A day\u2019s\n work.\n\nKnown asthma attack."
    review = annotate([text]).review()
    review.mark(0, *review.entities[0][-1], right=False)
    listing = ReviewListing(review)
    problems = [" HT : starts at", "EIG:longer", "RAs:not contain", " :No text", "ASTHMA:starts at"]
    for typed in ["asthma", "HT", "HT ", "RA", "day's  WORK", *problems]:
        words, _, problem = typed.partition(":")
        listing.handle({"action": "add", "note": 0, "label": "DISEASE", "text": words, "start": None, "end": None})
        alert = listing.state()["alert"]
        assert problem in alert
        assert bool(problem) == bool(alert)
    right = [span[:2] for span, is_right in review.marked_spans(0).items() if is_right]
    assert right == [(71, 77), (11, 13), (27, 29), (34, 36), (51, 62)]


@pytest.mark.filterwarnings("ignore:1 id occurs more than once")
@pytest.mark.parametrize(
    ("ids", "names"),
    [([2, 1, 1, None], [2, "#1", "#2", "#3"]), (["#2", "b", "b", None], ["#2", "##1", "##2", "##3"])],
)
def test_only_unique_ids_name_notes(ids, names):
    review = annotate(pd.DataFrame({"id": ids, "text": NOTES[:4]}), text_column="text", id_column="id").review()
    assert {*review.notes} == {*names}
    assert {name for name, _ in ReviewListing(review).state()["rows"]} == {*map(str, review.notes)}
    for note, problem in {ids[1]: "Several notes have this id", 0: "not in the sample"}.items():
        with pytest.raises(ConfigurationError, match=problem):
            review.accept(note)
    review.accept(names[1])
    assert [note for note in review.notes if review.is_reviewed(note)] == names[1:2]
    assert "score()" not in review.progress()
    for note in review.notes:
        review.accept(note)
    assert "review.score()" in review.progress()
