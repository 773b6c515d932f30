"""Labels and scores of tokens become entities, by tables written by hand."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from helpers import tiny_models as tiny
from openmed_nb.annotation.decoding import Decoder, Detokenizer, Predictions, build_label_tables
from openmed_nb.annotation.tokens import tokenize


@pytest.mark.parametrize(
    ("labels", "groups", "begins"),
    [
        (["O", "B-DRUG", "I-DRUG"], ["O", "DRUG", "DRUG"], [False, True, False]),
        (["DRUG", "DISEASE"], ["DRUG", "DISEASE"], [False, False]),
        (["B-CELL-LINE", "I-CELL-LINE"], ["CELL-LINE", "CELL-LINE"], [True, False]),
        (["E-DRUG", "S-DRUG"], ["DRUG", "DRUG"], [False, False]),
        (["b-drug", "B-", "-"], ["drug", "", ""], [False, True, False]),
    ],
)
def test_label_tables_have_entity_names(labels, groups, begins):
    """The entity name follows the first hyphen. Only ``B-`` starts an entity after one of the same type."""
    tables = build_label_tables(tuple(labels), ("O",))
    assert tables.names == tuple(labels)
    assert tables.entity_names == tuple(groups)
    assert tables.is_begin.tolist() == begins


@pytest.mark.parametrize(
    ("labels", "equal"),
    [
        (["B-DRUG", "I-DRUG"], True),
        (["DRUG", "I-DRUG"], True),
        (["B-DRUG", "I-DISEASE"], False),
        (["E-DRUG", "I-DRUG"], False),
        (["O", "B-O"], True),
        (["drug", "DRUG"], False),
    ],
)
def test_label_tables_have_entity_types(labels, equal):
    """Labels that differ in no more than ``B-`` and ``I-`` can be in one entity."""
    first, second = build_label_tables(tuple(labels), ()).entity_type_ids
    assert bool(first == second) is equal


LABELS = ("O", "B-DRUG", "I-DRUG", "B-AGE", "I-AGE")
SPELLINGS = {"O": 0, "B": 1, "I": 2, "BA": 3, "IA": 4}

HYPERTENSION = "patient has hypertension ."
"""Five tokens: patient, has, hyper, ##tension and the full stop."""


@pytest.fixture(scope="module")
def tokenizer():
    """A fast tokenizer of a few words."""
    return tiny.tokenizer()


@pytest.fixture(scope="module")
def make_decoder(tokenizer):
    """A function that returns a decoder of the labels."""

    def make_decoder(strategy, ignored=("O",)):
        return Decoder(
            Detokenizer(tokenizer),
            build_label_tables(LABELS, tuple(ignored)),
            strategy,
            num_prefix_tokens=1,
            ends_at_lines=True,
        )

    return make_decoder


@pytest.fixture(scope="module")
def decode(tokenizer, make_decoder):
    """A function that returns the results of texts from a label and a score for each token."""

    def decode(strategy, texts, spoken, ignored=("O",)):
        tokens = tokenize(tokenizer, texts)
        labels, scores = zip(*(word.split("=") for word in spoken.split()), strict=True)
        numbers = np.array([SPELLINGS[label] for label in labels])
        predictions = Predictions(numbers, np.array(scores, np.float32))
        return make_decoder(strategy, ignored).entities(texts, tokens, predictions)

    return decode


@pytest.fixture(scope="module")
def entities(decode):
    """A function that returns the entities of these results, in one line each."""
    return lambda *arguments: [[line(entity) for entity in result] for result in decode(*arguments)]


def line(entity):
    """Return an entity in one line."""
    label = entity.get("entity_group") or f"{entity['entity']}@{entity['index']}"
    return f"{label} {entity['word']} {entity['start']}-{entity['end']} {entity['score']:.2f}"


@pytest.mark.parametrize(
    ("strategy", "ignored", "labels"),
    [
        ("none", ("O",), ("DRUG", "AGE")),
        ("none", ("O", "B-DRUG", "I-DRUG"), ("AGE",)),
        ("first", ("O", "DRUG"), ("AGE",)),
        ("max", ("O", "B-DRUG", "I-DRUG"), ("DRUG", "AGE")),
    ],
)
def test_entity_labels_are_those_that_are_kept(make_decoder, strategy, ignored, labels):
    assert make_decoder(strategy, ignored).entity_labels == labels


@pytest.mark.parametrize("strategy", ["simple", "first", "max"])
def test_entities_of_two_lines_have_their_own_scores(entities, strategy):
    found = entities(strategy, ["patient has\n\nhas patient ."], "B=.8 I=.6 I=.4 I=.2 O=.9")
    assert found == [["DRUG patient has 0-11 0.70", "DRUG has patient 13-24 0.30"]]


@pytest.mark.parametrize(
    ("spoken", "dropped"),
    [
        ("O=.9 O=.9 O=.8 B=.7 O=.9", [("DRUG", 0.7, 17, 24)]),
        ("O=.9 O=.9 O=.8 BA=.7 I=.6", [("AGE", 0.7, 17, 24)]),
        ("O=.9 O=.9 B=.8 I=.7 O=.9", []),
        ("O=.9 O=.9 B=.8 IA=.7 O=.9", [("AGE", 0.7, 17, 24)]),
        ("O=.9 O=.9 O=.9 O=.7 O=.9", []),
    ],
)
def test_dropped_spans_are_labeled_tokens_outside_entities(decode, spoken, dropped):
    """With ``first``, the label of a later token of a word is not that of the word."""
    found = decode("first", [HYPERTENSION], spoken)
    spans = [(span.label, round(span.score, 2), span.start, span.end) for span in found.dropped.get(0, ())]
    assert spans == dropped


def test_dropped_spans_end_with_their_text(decode):
    """With ``max``, the last token of one text and the first of the next are dropped."""
    dropped = decode("max", ["hypertension"] * 2, "O=.9 I=.6 I=.7 O=.9").dropped
    assert {text: [span[2:] for span in spans] for text, spans in dropped.items()} == {0: [(5, 12)], 1: [(0, 5)]}


@pytest.mark.parametrize(
    ("strategy", "spoken", "expected"),
    [
        ("none", "O=.9 O=.9 B=.8 I=.6 O=.9", ["B-DRUG@3 hyper 12-17 0.80", "I-DRUG@4 ##tension 17-24 0.60"]),
        ("simple", "O=.9 O=.9 B=.8 I=.6 O=.9", ["DRUG hypertension 12-24 0.70"]),
        ("simple", "O=.9 O=.9 B=.8 O=.6 O=.9", ["DRUG hyper 12-17 0.80"]),
        ("simple", "O=.9 O=.9 O=.8 I=.6 O=.9", ["DRUG ##tension 17-24 0.60"]),
        ("first", "O=.9 O=.9 B=.8 O=.9 O=.9", ["DRUG hypertension 12-24 0.80"]),
        ("first", "O=.9 O=.9 O=.8 B=.9 O=.9", []),
        ("max", "O=.9 O=.9 B=.8 O=.9 O=.9", []),
        ("max", "O=.9 O=.9 O=.8 B=.9 O=.9", ["DRUG hypertension 12-24 0.90"]),
        ("max", "O=.9 O=.9 B=.8 BA=.8 O=.9", ["DRUG hypertension 12-24 0.80"]),
        ("first", "O=.9 B=.6 I=.8 I=.9 O=.9", ["DRUG has hypertension 8-24 0.70"]),
        ("first", "O=.9 B=.6 B=.8 I=.9 O=.9", ["DRUG has 8-11 0.60", "DRUG hypertension 12-24 0.80"]),
        ("first", "O=.9 I=.6 I=.8 O=.9 O=.9", ["DRUG has hypertension 8-24 0.70"]),
        (
            "first",
            "B=.9 O=.6 B=.8 O=.9 B=.7",
            ["DRUG patient 0-7 0.90", "DRUG hypertension 12-24 0.80", "DRUG . 25-26 0.70"],
        ),
    ],
)
def test_entities_follow_strategy(entities, strategy, spoken, expected):
    """Each strategy makes the entities that it promises: of tokens, or of words by their first or best token."""
    assert entities(strategy, [HYPERTENSION], spoken) == [expected]


@pytest.mark.parametrize(
    ("probabilities", "expected"),
    [
        ([[0.1, 0.9, 0, 0, 0], [0.7, 0.3, 0, 0, 0]], ["DRUG hypertension 0-12 0.60"]),
        ([[0.4, 0.6, 0, 0, 0], [0.9, 0.1, 0, 0, 0]], []),
        ([[0.3, 0, 0, 0.5, 0.2], [0.3, 0, 0, 0.1, 0.6]], ["AGE hypertension 0-12 0.40"]),
    ],
)
def test_entities_average_probabilities(tokenizer, make_decoder, probabilities, expected):
    """With ``average`` a word has the label whose mean probability over its tokens is the highest."""
    texts = ["hypertension"]
    matrix = np.array(probabilities, np.float32)
    predictions = Predictions(matrix.argmax(1), matrix.max(1), matrix)
    found = make_decoder("average").entities(texts, tokenize(tokenizer, texts), predictions)
    assert [[line(entity) for entity in entities] for entities in found] == [expected]


@pytest.mark.parametrize("place", range(1, 25))
def test_decoder_is_thread_safe(tokenizer, make_decoder, place):
    """A thread has every word, wherever it is when another thread, as on a worker of a cluster, spells the same entity."""
    texts = ["hypertension"]
    tokens, labels = tokenize(tokenizer, texts), np.full(2, SPELLINGS["I"])
    decoder = make_decoder("first")
    left = iter(range(place))

    def decoded():
        [[entity]] = decoder.entities(texts, tokens, Predictions(labels, np.ones(2, np.float32)))
        return entity["word"]

    def between(_frame, event, _argument):
        if event == "line" and next(left, None) == place - 1:
            decoded()
        return between

    before = sys.gettrace()
    sys.settrace(lambda frame, *_event: between if frame.f_code is Detokenizer.decode_spans.__code__ else None)
    try:
        word = decoded()
    finally:
        sys.settrace(before)

    assert word == "hypertension"


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "max"])
def test_entities_do_not_span_texts(entities, strategy):
    """The last entity of a text and the first of the next are two, and empty texts have their place."""
    found = entities(strategy, ["", "asthma", "", "asthma", ""], "I=.9 I=.8")
    name = "I-DRUG@1" if strategy == "none" else "DRUG"
    assert found == [[], [f"{name} asthma 0-6 0.90"], [], [f"{name} asthma 0-6 0.80"], []]


def test_entities_start_word_at_text_start(entities):
    """A text that begins with the inside of a word is read as a word, also after another text."""
    assert entities("first", ["hyper", "asthma"], "B=.9 O=.8") == [["DRUG hyper 0-5 0.90"], []]


@pytest.mark.parametrize(
    ("strategy", "ignored", "expected"),
    [
        ("none", ["B-DRUG"], ["O@1 patient 0-7 0.90", "I-DRUG@3 hyper 12-17 0.70", "I-DRUG@4 ##tension 17-24 0.60"]),
        ("first", ["DRUG"], ["O patient 0-7 0.90"]),
        ("first", [], ["O patient 0-7 0.90", "DRUG has hypertension 8-24 0.75"]),
        ("first", ["O", "B-DRUG", "I-DRUG"], ["DRUG has hypertension 8-24 0.75"]),
    ],
)
def test_entities_exclude_ignored_labels(entities, strategy, ignored, expected):
    """What is ignored is left out after entities were made, by the label of a token or the name of an entity."""
    found = entities(strategy, ["patient has hypertension"], "O=.9 B=.8 I=.7 I=.6", ignored)
    assert found == [expected]


def test_entities_distinguish_unknown_words(entities):
    """Words that the vocabulary does not have are one token for the model, and each is read from its text."""
    texts, spoken = ["xyz has", "uvw has", "xyz has"], " ".join(["B=.9 I=.9"] * 3)

    assert entities("first", texts, spoken) == [[f"DRUG {text} 0-7 0.90"] for text in texts]


def test_entities_of_no_texts_are_empty(tokenizer, make_decoder):
    nothing = Predictions(np.zeros(0, np.int64), np.zeros(0, np.float32))
    decoder = make_decoder("first")
    assert list(decoder.entities([], tokenize(tokenizer, []), nothing)) == []
    assert list(decoder.entities(["", " "], tokenize(tokenizer, ["", " "]), nothing)) == [[], []]


PIECES = st.sampled_from(
    ["asthma", "##ma", "##", ".", ",", "'", "'s", "n't", "do", "do not", " ' ", "a b", "é", "", "\0", "x\0"]
)


@pytest.mark.parametrize(
    "decoder",
    [decoders.WordPiece(cleanup=True), decoders.WordPiece(cleanup=False), decoders.Metaspace(), decoders.ByteLevel()],
    ids=["cleaned", "as it is", "metaspace", "bytes"],
)
def test_decode_pieces_equals_tokenizer(decoder):
    """Lists of pieces that are joined together, and again, are what the tokenizer's decoder makes of each."""
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.decoder = decoder
    speller = Detokenizer(tokenizer)

    @settings(max_examples=200)
    @given(st.lists(st.lists(PIECES, min_size=1, max_size=4)))
    def check(lists):
        assert speller.decode_pieces(lists) == [tokenizer.convert_tokens_to_string(pieces) for pieces in lists]

    check()
