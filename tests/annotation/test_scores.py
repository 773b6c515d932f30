"""Scores against gold entities, compared with nervaluate and seqeval."""

import dataclasses
import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.annotations import annotate
from openmed_nb.annotation.gold import GoldSpan, GoldText, GoldTexts
from openmed_nb.annotation.scores import (
    OUTCOMES,
    SCHEMES,
    SchemeScores,
    count_characters,
    count_matches,
    score_spans,
    summarize_counts,
)
from openmed_nb.errors import ConfigurationError

LABELS = ("NAME", "DATE", "TOWN")
NERVALUATE_SCHEMES = {"strict": "strict", "partial": "partial", "type": "ent_type"}


@st.composite
def entities(draw):
    """Return non-overlapping entities of a text in order."""
    edges = sorted(draw(st.sets(st.integers(0, 40), max_size=12)))
    spans = [GoldSpan(start, end, draw(st.sampled_from(LABELS))) for start, end in itertools.pairwise(edges)]
    return [span for span in spans if draw(st.booleans())]


def corpora():
    """Return predicted and gold entities of several texts."""
    return st.lists(st.tuples(entities(), entities()), min_size=1, max_size=6)


def to_tags(spans, length=41):
    """Return entities as IOB2 tags of characters."""
    tags = ["O"] * length
    for span in spans:
        tags[span.start : span.end] = [f"B-{span.label}"] + [f"I-{span.label}"] * (span.end - span.start - 1)
    return tags


def known_rates(scores):
    """Return precision, recall and F1, 0 for 0/0 as in nervaluate and seqeval."""
    return [rate or 0 for rate in (scores.precision, scores.recall, scores.f1)]


def assert_same_counts(ours, theirs):
    expected = (theirs.correct, theirs.incorrect, theirs.partial, theirs.missed, theirs.spurious)
    assert (ours.correct, ours.incorrect, ours.partial, ours.missed, ours.spurious) == expected
    assert known_rates(ours) == pytest.approx([theirs.precision, theirs.recall, theirs.f1])


def sum_matches(texts, scheme, label=None):
    """Return the counts over texts, of one label if it is given."""
    rows = [
        count_matches(*([span for span in spans if label in {None, span.label}] for spans in text))[
            SCHEMES.index(scheme)
        ]
        for text in texts
    ]
    return SchemeScores(*(sum(column) for column in zip(*rows, strict=True)))


def test_partial_match_does_not_compare_labels():
    texts = [([GoldSpan(0, 6, LABELS[0])], [GoldSpan(0, 6, LABELS[1])])]
    assert [sum_matches(texts, scheme).correct for scheme in ("strict", "partial")] == [0, 1]


@given(corpora())
def test_counts_equal_nervaluate(texts):
    nervaluate = pytest.importorskip("nervaluate")  # It needs Python 3.11.
    # The ends of nervaluate are inclusive.
    gold, predicted = (
        [[{"label": span.label, "start": span.start, "end": span.end - 1} for span in text[side]] for text in texts]
        for side in (1, 0)
    )
    result = nervaluate.Evaluator(gold, predicted, tags=list(LABELS), loader="dict").evaluate()
    for ours, theirs in NERVALUATE_SCHEMES.items():
        assert_same_counts(sum_matches(texts, ours), result["overall"][theirs])
        for label, of_label in result["entities"].items():
            assert_same_counts(sum_matches(texts, ours, label), of_label[theirs])


@given(corpora().filter(lambda texts: any(actual or gold for actual, gold in texts)))
def test_strict_counts_equal_seqeval(texts):
    import seqeval.metrics
    import seqeval.scheme

    tags = [[to_tags(spans) for spans in side] for side in zip(*texts, strict=True)]
    ours = sum_matches(texts, "strict")
    metrics = (seqeval.metrics.precision_score, seqeval.metrics.recall_score, seqeval.metrics.f1_score)
    options = {"mode": "strict", "scheme": seqeval.scheme.IOB2, "zero_division": 0}
    theirs = [metric(tags[1], tags[0], **options) for metric in metrics]
    assert known_rates(ours) == pytest.approx(theirs)


@pytest.mark.parametrize(
    ("spans", "count"),
    [
        ([], 0),
        ([(3, 5), (4, 8), (9, 10)], 6),
        ([(0, 10**15), (5, 10**15 + 3)], 10**15 + 3),
    ],
)
def test_count_characters_counts_each_once(spans, count):
    assert count_characters([GoldSpan(*span, "NAME") for span in spans]) == count


def test_intervals_contain_the_scores_and_are_reproducible():
    counts = np.array([[[2, 0, 0, index % 2, 0], [0, 0, 0, 0, 0]] for index in range(50)])
    scores, empty = summarize_counts(counts, seed=1)
    assert scores.recall == 0.8
    assert scores.f1_interval.low < scores.f1 < scores.f1_interval.high
    assert scores.f1_interval.high - scores.f1 == pytest.approx(scores.f1 - scores.f1_interval.low, rel=0.3)
    assert empty.f1_interval is None
    assert summarize_counts(counts, seed=1) == [scores, empty]
    assert summarize_counts(counts, seed=2)[0].f1_interval != scores.f1_interval
    # Without errors, the lower end is 46 / (46 + 1.96 squared).
    (exact,) = summarize_counts(np.array([[[46, 0, 0, 0, 0]]]), seed=0)
    assert exact.f1_interval == pytest.approx((0.923, 1.0), abs=5e-4)
    # Of 20 texts, 3 have one entity each.
    (rare,) = summarize_counts(np.array([[[index < 3, 0, 0, 0, 0]] for index in range(20)], int), seed=0)
    assert rare.f1_interval == pytest.approx((0.439, 1.0), abs=5e-4)
    (one_text,) = summarize_counts(np.array([[[2, 0, 0, 1, 1]]]), seed=0)
    assert one_text.f1_interval.low < one_text.f1 < one_text.f1_interval.high
    (without_texts,) = summarize_counts(np.zeros((0, 1, 5), int), seed=0)
    assert (without_texts.gold, without_texts.f1_interval) == (0, None)


@pytest.mark.parametrize(
    ("predicted", "counts"),
    [
        pytest.param([(4, 11, "DATE")], [[0, 1, 0, 2, 0], [0, 0, 1, 2, 0], [1, 0, 0, 2, 0]], id="over two"),
        pytest.param([(0, 5, "NAME")] * 2, [[1, 0, 0, 2, 1]] * 3, id="twice"),
    ],
)
def test_counts_of_overlapping_entities_by_scheme(predicted, counts):
    """Columns: correct, incorrect, partial, missed, spurious."""
    gold = [GoldSpan(0, 5, "NAME"), GoldSpan(10, 15, "DATE"), GoldSpan(20, 25, "TOWN")]
    assert count_matches([GoldSpan(*span) for span in predicted], gold) == counts


def test_type_is_paired_with_the_closest_entity():
    """The second predicted entity overlaps only the gold entity that the first one is closest to."""
    gold = [GoldSpan(0, 5, "NAME"), GoldSpan(6, 25, "NAME")]
    *_, of_type = count_matches([GoldSpan(4, 24, "NAME"), GoldSpan(23, 30, "NAME")], gold)
    assert of_type == [1, 0, 0, 1, 1]


def make_scores(seed=0):
    """Return the scores of three texts, of which one failed."""
    gold = {
        0: [GoldSpan(0, 5, "NAME"), GoldSpan(10, 14, "DATE")],
        2: [GoldSpan(0, 10, "NAME")],
        5: [GoldSpan(3, 4, "TOWN")],
    }
    predicted = {0: [GoldSpan(0, 5, "NAME"), GoldSpan(20, 24, "DATE")], 2: [GoldSpan(5, 12, "NAME")], 5: None}
    return score_spans("model", predicted, gold, lambda span: f"shown {span.start}", seed)


def test_scores_of_texts():
    scores = make_scores()
    counts = {label: of_label.strict for label, of_label in {"all": scores.total, **scores.labels}.items()}

    assert (scores.num_texts, scores.num_failed) == (3, 1)
    assert (scores.gold_characters, scores.uncovered_characters) == (20, 10)
    assert {label: [getattr(strict, name) for name in OUTCOMES] for label, strict in counts.items()} == {
        "all": [1, 1, 0, 2, 1],
        "DATE": [0, 0, 0, 1, 1],
        "NAME": [1, 1, 0, 0, 0],
        "TOWN": [0, 0, 0, 1, 0],
    }
    assert (scores.total.partial.partial, scores.total.type.correct) == (1, 2)
    assert [(span.text, span.start, span.label) for span in scores.missed] == [(0, 10, "DATE"), (5, 3, "TOWN")]
    assert [(span.text, span.start, span.label) for span in scores.added] == [(0, 20, "DATE")]
    assert scores.missed[0].show() == "shown 10"
    assert {"missed", "added"}.isdisjoint(scores.to_dict())
    assert make_scores() == scores


def test_rate_of_no_entities_is_not_known():
    names = [GoldSpan(0, 1, "NAME")]
    sides = (([], []), ([], names), (names, []))
    totals = [
        score_spans("model", {0: spans}, {0: gold}, str, 0).to_report().tables[0].rows[0] for spans, gold in sides
    ]
    assert [total[2:5] for total in totals] == [
        ("not known", "not known", "not known"),
        ("not known", "0.0%", "0.0%"),
        ("0.0%", "not known", "0.0%"),
    ]


def test_report_of_scores():
    report = make_scores().to_report()
    (table,) = report.tables

    assert report.title == 'The model "model" found 1 of 4 gold entities exactly'
    assert report.sentences[2] == "1 text failed; gold entities there count as missed."
    assert (table.rows[0][:5], table.rows[0][6:]) == (("all", "strict", "33.3%", "25.0%", "28.6%"), ("4", "3"))
    assert table.rows[4][2:5] == ("50.0%", "50.0%", "50.0%")


@pytest.fixture(scope="module")
def annotations():
    return annotate(["She has asthma.", "No complaints.", None])


def test_report_has_one_row_per_match_for_the_only_label(annotations):
    (table,) = annotations.score([[(8, 14, "DISEASE")], [], []]).to_report().tables
    assert [row[:2] for row in table.rows] == [("DISEASE", "strict"), ("DISEASE", "partial"), ("DISEASE", "type")]


@pytest.mark.parametrize(
    "gold",
    [
        pytest.param([[(8, 14, "DISEASE")], [(3, 13, "DISEASE")], []], id="tuples"),
        pytest.param(
            pd.DataFrame({"note_index": [1, 0], "start": [3, 8], "end": [13, 14], "label": ["DISEASE", "DISEASE"]}),
            id="frame",
        ),
    ],
)
def test_score_accepts_each_form_of_gold(annotations, gold):
    scores = annotations.score(gold)
    assert (scores.total.strict.correct, scores.total.strict.missed, scores.total.strict.predicted) == (1, 1, 1)
    assert (scores.gold_characters, scores.uncovered_characters) == (16, 10)
    (missed,) = scores.missed
    assert (missed.text, missed.start, missed.end, missed.label) == (1, 3, 13, "DISEASE")
    lines = str(missed.show()).splitlines()
    assert (lines[0], lines[1]) == ("Note 1, characters 3 to 13", "No [complaints](DISEASE, negated).")
    assert [entity["word"] for entity in missed.show()] == ["complaints"]


def test_score_aligns_gold_by_id(annotations):
    identified = dataclasses.replace(annotations, ids=["b", "a", "c"])
    asthma = GoldText("b", "She has asthma.", (GoldSpan(8, 14, "DISEASE"),))
    complaints = GoldText("a", None, (GoldSpan(3, 13, "DISEASE"),))

    scores = identified.score(GoldTexts((complaints, asthma)))
    assert (scores.num_texts, scores.total.strict.correct, scores.missed[0].text) == (2, 1, 1)
    assert identified.score({"a": [(3, 13, "DISEASE")], "b": [(8, 14, "DISEASE")]}).total.strict.recall == 0.5
    frame = pd.DataFrame({"id": ["b"], "start": [8], "end": [14], "label": ["DISEASE"]})
    assert identified.score(frame).num_texts == 3


@pytest.mark.parametrize(
    "gold",
    [
        pytest.param(pd.Series([[], [], []]), id="Series"),
        pytest.param([[(8, 14, "DISEASE")]], id="other-count"),
        pytest.param([[(8, 16, "DISEASE")], [], []], id="after-the-end"),
        pytest.param(GoldTexts((GoldText("0", "He has asthma.", ()),)), id="other-text"),
        pytest.param(GoldTexts((GoldText("asthma", None, ()),)), id="unknown-id"),
    ],
)
def test_score_rejects_other_gold_without_quoting(annotations, gold):
    with pytest.raises(ConfigurationError) as caught:
        annotations.score(gold)
    assert "asthma" not in str(caught.value)


def test_score_rejects_tokens():
    tokens = annotate(["She has asthma."], aggregation_strategy="none")
    with pytest.raises(ConfigurationError, match="tokens"):
        tokens.score([[(8, 14, "DISEASE")]])


def test_scores_show_no_text(annotations):
    scores = annotations.score([[(0, 3, "DISEASE")], [], []])
    assert [(span.text, span.start, span.end) for span in scores.added] == [(0, 8, 14)]
    for shown in (str(scores), scores._repr_html_(), repr(scores.missed), str(scores.to_dict())):
        assert "She" not in shown
        assert "asthma" not in shown
