"""Masking: no part of a replaced entity remains."""

import json
import traceback
from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from helpers import tiny_models as tiny
from helpers.annotations import annotate, make_annotations, make_text
from openmed_nb._render.display import to_plain_data
from openmed_nb.annotation.masking import MASKING_DISCLAIMER, mask_text, refine_spans, validate_policy
from openmed_nb.errors import ConfigurationError, OpenMedWarning

STAY = "names, dates, places and numbers are not masked"  # By a model that knows diseases alone.

# Text, spans, policy, and what is left.
CASES = [
    ("Ann Lee coughs.", [(0, 7, "NAME")], "[{label}]", "[NAME] coughs."),
    ("Quackenbush, 7", [(4, 11, "NAME")], "X", "X, 7"),
    ("AnnLee", [(0, 3, "FIRST"), (3, 6, "LAST")], "<{label}>", "<FIRST>"),
    ("(+)", [(0, 1, "A"), (1, 2, "B")], "<{label}>", "<A><B>)"),
    ("a b c", [(0, 3, "LONG"), (2, 5, "LATE")], "<{label}>", "<LONG>"),
    ("Jose\u0301 coughs", [(0, 4, "NAME")], "X", "X coughs"),
    ("李明咳嗽", [(0, 2, "NAME")], "[{label}]", "[NAME]咳嗽"),
    ("on 3 May, Jo", [(3, 8, "DATE"), (10, 12, "Name")], {"b-date": "D", "NAME": "X"}, "on D, X"),
    ("Ann Lee \r\n- Bob Ray\n", [(0, 19, "NAME")], "X", "X \r\n- X\n"),
    ("Ann<br>Lee\tAnn", [(0, 14, "NAME")], "X", "X<br>X\tX"),
    ("<br>\n", [(0, 5, "NAME")], "X", "<br>\n"),
    ("Lee's and O'Brien's", [(0, 2, "NAME"), (10, 19, "NAME")], "X", "X's and X's"),
    ("James' and James\u2019 cat", [(0, 6, "NAME"), (11, 17, "NAME")], "X", "X' and X\u2019 cat"),
    ("'s", [(0, 2, "NAME")], "X", "X"),
    ("Jo", [(0, 99, "NAME")], "X", "X"),
    ("{label}", [(0, 7, "N")], "<{label}>", "<N>"),
]


@pytest.mark.parametrize(("text", "spans", "policy", "left"), CASES)
def test_entities_are_replaced(text, spans, policy, left):
    """Overlapping spans are one, words stay whole, and each label has its replacement."""
    assert mask_text(text, spans, validate_policy(policy)).text == left


@pytest.mark.parametrize(
    "replacement",
    [3, {"A": None}, {1: "x"}, "{name}", "{label", ["x"], "\ud800"],
)
def test_a_replacement_that_cannot_be_used_is_refused(replacement):
    """A replacement is a text with no field but its label, or a mapping of labels to such texts."""
    with pytest.raises(ConfigurationError):
        validate_policy(replacement)


@pytest.fixture(scope="module")
def found():
    return annotate(["She has asthma, MRN 1234567.", None, "No number."], ids=["a", "b", "c"])


def test_mask_warns_of_a_label_that_no_entity_has(found):
    """The warning quotes no label with a space, and a label of another case is not unknown."""
    assert found.mask({"disease": "***"})[0].text == found.show(0).mask("***").text
    assert annotate(["Fine."]).mask({"disease": "***"})[0].text == "Fine."
    for label in ("diseas", "Mr Smith of Leeds"):
        for mask in (found.mask, found.show(0).mask):
            with pytest.warns(OpenMedWarning, match="No entity has the label") as caught:
                mask({label: "X"})
            assert "Smith" not in str(caught[0].message)


PLAIN = st.text(alphabet="abc .,-\n<>&\"'", max_size=12)

# Characters that occur only in entities, so that they must not remain in masked texts. Spans contain ANY completely, but may
# contain only part of a WORD, because masking extends spans to whole words.
ANY = st.text(st.characters(min_codepoint=0xA0, exclude_categories=("Cs",)), min_size=1)
WORD = st.text(alphabet="ÆØÅæøåÞþЖжאב", min_size=1)


@st.composite
def texts_with_secrets(draw):
    """Return a text, the spans of its secrets, some of them split, doubled or cut short, and the secrets."""
    text, spans, secrets = draw(PLAIN), [], set()
    for _ in range(draw(st.integers(0, 4))):
        start, whole = len(text), draw(st.booleans())
        secret = draw(ANY if whole else WORD)
        text += secret
        secrets |= {character for character in secret if not character.isspace()}  # Masking keeps white space at ends.
        cut = start + draw(st.integers(1, len(secret)))
        spans.append((start, cut, draw(st.sampled_from(("NAME", "B-NAME", "DATE", "E-ID")))))
        if whole or draw(st.booleans()):
            spans.append((cut - 1, len(text), "NAME"))
        text += draw(PLAIN)
    return text, draw(st.permutations(spans)), secrets


POLICIES = st.sampled_from(("[{label}]", "", "***", {"DATE": "when"}))


@pytest.mark.filterwarnings("ignore:No entity has the label")  # A policy may name labels that no entity has.
@given(texts_with_secrets(), POLICIES)
def test_no_character_of_an_entity_is_left_in_any_form(case, policy):
    """In text, HTML, JSON, repr and errors of what masking returns, no character of an entity is left."""
    text, spans, secrets = case
    entities = tuple({"entity": label, "score": 0.5, "word": text[a:b], "start": a, "end": b} for a, b, label in spans)
    masked = make_text(text, *entities).mask(policy)
    found = make_annotations([entities], ["Another text, as of one that has changed."])
    wrong = [
        lambda: replace(found, preview_texts=(), texts=[text]).mask(policy),
        lambda: replace(found, preview_texts=(), texts=None).mask(policy),
    ]
    for call in wrong:
        with pytest.raises(ConfigurationError) as raised:
            call()
        assert not secrets & {*repr(raised.value), *str(raised.value), *raised.value._render_traceback_()[0]}
    for result in (masked, *replace(found, preview_texts=(text,), texts=None).mask(policy)):
        forms = (
            result.text,
            str(result),
            repr(result),
            result._repr_html_(),
            json.dumps(to_plain_data(result), ensure_ascii=False),
        )
        assert not secrets & {*"".join(forms)}


@given(texts_with_secrets(), POLICIES)
def test_text_outside_of_spans_is_unchanged(case, policy):
    """The offsets of the spans say what was replaced in both texts."""
    text, spans, _ = case
    masked = mask_text(text, spans, policy)
    position = 0
    masked_position = 0
    for span in (*masked.spans, None):
        start, masked_start = (len(text), len(masked.text)) if span is None else (span.start, span.masked_start)
        assert text[position:start] == masked.text[masked_position:masked_start]
        if span is not None:
            position, masked_position = span.end, span.masked_end


class TestManyTexts:
    """All texts of a run are masked, from what they were read from."""

    def test_more_texts_than_are_kept_are_read_again(self):
        texts = [f"Patient {number} has asthma." for number in range(9)]
        found = annotate(texts)
        assert [item.text for item in found.mask()] == [f"Patient {number} has [DISEASE]." for number in range(9)]
        texts[7] = "Another text."
        with pytest.raises(ConfigurationError, match="Text 7 has changed"):
            found.mask()
        with pytest.raises(ConfigurationError, match="Text 5 came from a generator"):
            annotate(iter(texts)).mask()

    def test_failed_text_is_not_returned(self):
        whole, failed = annotate(["She has asthma.", 5], on_error="record").mask()

        assert (whole.text, failed.text) == ("She has [DISEASE].", "")
        assert "Text 1" in failed.error

    def test_entities_that_the_filter_excluded_stay(self):
        found = annotate(["She has asthma."]).filter(min_score=1.0)
        masked = found.mask()

        assert masked[0].text == "She has asthma."
        for result in (masked, found.show(0).mask()):
            assert "Filter: score of at least 1." in result.to_report().sentences
        assert found.show(0).mask() == masked[0]

    def test_display_has_the_first_texts_and_the_limits_once(self):
        masked = annotate(["She has asthma.", 5] * 4, on_error="record").mask()

        lines = str(masked).splitlines()
        assert lines[0] == f"4 entities masked in 8 texts; {STAY}"
        assert lines[4:6] == ["0: She has [DISEASE].", f"1: {masked[1].error}"]
        assert masked._repr_html_().count(MASKING_DISCLAIMER) == 1
        assert [item["text"] for item in to_plain_data(masked)["texts"]][:2] == ["She has [DISEASE].", ""]

    def test_hidden_texts_stay_hidden(self):
        masked = annotate(["She has asthma."], show_text=False).mask()

        assert "She" not in f"{masked[0]} {masked}"


WORDS = st.sampled_from(
    ("ann@x.org", "and", "or", "Ann", "555-123-4567", "www.x.org", "(555)", "é", "e\u0301", ",", " ", "\n", "李明")
)
REFINED_LABELS = st.sampled_from(("private_email", "private_url", "private_phone", "private_person", ""))


@given(st.lists(WORDS, min_size=1, max_size=8).map(" ".join), REFINED_LABELS, st.data())
def test_refine_spans_equals_openmed(text, label, data):
    openmed = pytest.importorskip("openmed.torch.privacy_filter")
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    entity = {"entity_group": label, "score": 0.5, "word": text[start:end], "start": start, "end": end}

    (refined,) = refine_spans(text, [entity])
    assert refined["word"] == openmed.PrivacyFilterTorchPipeline._normalize_entity(entity, text)["word"]
    assert text[refined["start"] : refined["end"]] == refined["word"]


def test_refine_spans_accepts_entities_without_a_label():
    (refined,) = refine_spans("Call Ann now.", [{"score": 0.5, "start": 5, "end": 8}])
    assert refined["word"] == "Ann"


def test_the_route_of_a_privacy_filter_gives_the_spans_of_openmed(tmp_path):
    """A model of that architecture, loaded here and refined, gives what OpenMed's own pipeline gives, by every strategy."""
    openmed = pytest.importorskip("openmed.torch.privacy_filter")
    folder = tiny.save(tmp_path, tiny.random_privacy_filter())
    text = "Ann Lee, born 3 May 1970, wrote from ann.lee@hospital.org and called 555-123-4567 or www.x.org ."
    ours = nb.load_pipeline(folder, device="cpu", aggregation_strategy="first")
    theirs = openmed.PrivacyFilterTorchPipeline(
        str(folder), device="cpu", aggregation_strategy="first", local_files_only=True
    )
    found, expected = refine_spans(text, ours(text)), theirs(text)

    assert [{**entity, "score": 0} for entity in found] == [{**entity, "score": 0} for entity in expected]
    assert [entity["score"] for entity in found] == pytest.approx([entity["score"] for entity in expected], abs=1e-5)
    assert found


@pytest.mark.parametrize(
    ("labels", "uncovered"),
    [
        (("DISEASE",), STAY),
        (("DRUG_NAME", "GENE_NAME", "DOSE"), STAY),  # Names, but not of people.
        (("B-PER", "I-PER", "B-LOC", "B-ORG"), "dates and numbers are not masked"),
        (("FIRSTNAME", "Date", "CITY", "phone_number"), ""),
        (("private_person", "private_date", "private_address", "account_number", "secret"), ""),
    ],
)
def test_headline_of_masked_texts_names_the_uncovered_categories(labels, uncovered):
    names = tuple(label.removeprefix("B-").removeprefix("I-") for label in labels)
    found = make_annotations([], known_labels=names)
    headline, sentence, *_ = str(found.mask()).splitlines()

    assert headline.endswith(f"; {uncovered}") if uncovered else "not masked" not in headline
    assert names[0] in sentence


def test_headline_of_masked_texts_counts_filtered_labels():
    found = make_annotations([], known_labels=("NAME", "DATE", "CITY", "ID"))

    assert "not masked" not in str(found.mask())
    assert "; dates, places and numbers are not masked" in str(found.filter("name").mask())


@pytest.mark.parametrize(
    ("strategy", "ignored", "labels"),
    [
        ("none", ["O", "B-NAME", "I-NAME", "NAME"], ("DATE",)),
        ("none", ["O", "NAME"], ("NAME", "DATE")),
        ("simple", ["O", "NAME"], ("DATE",)),
    ],
)
def test_known_labels_are_those_of_entities_that_are_not_ignored(tmp_path, strategy, ignored, labels):
    folder = tiny.save(tmp_path, tiny.random_bert(("O", "B-NAME", "I-NAME", "B-DATE")))
    pipe = nb.load_pipeline(folder, device="cpu", aggregation_strategy=strategy, ignore_labels=ignored)

    assert nb.annotate(["The patient has asthma."], pipe).known_labels == labels


class TestRules:
    """Matches of regular expressions are masked in addition to the entities of the model."""

    RULES = {"MRN": r"\bMRN[:# ]*\d{6,}\b"}  # noqa: RUF012 - not modified

    def test_matches_have_a_label_and_a_source(self, found):
        masked = found.mask(rules=self.RULES)
        assert masked[0].text == "She has [DISEASE], [MRN]."
        assert [span.source for span in masked[0].spans] == ["model", "rule"]
        assert masked.counts == {("DISEASE", "model"): 1, ("MRN", "rule"): 1}
        assert found.show(0).mask(rules=self.RULES).text == masked[0].text
        assert found.mask({"mrn": "#"}, rules=self.RULES)[0].text == "She has [DISEASE], #."

    @pytest.mark.parametrize(
        "rules",
        [
            {"MRN": "(secret"},
            {"MRN": "(" * 5000 + "secret" + ")" * 5000},
            {"MRN": "(?iLmsux)secret"},
            {"secret": 5},
            {5: "x"},
            ["secret"],
        ],
    )
    def test_invalid_rules_are_rejected_without_being_quoted(self, found, rules):
        with pytest.raises(ConfigurationError) as caught:
            found.mask(rules=rules)
        assert "secret" not in "".join(traceback.format_exception(caught.value)).partition("ConfigurationError")[2]

    def test_text_with_a_slow_rule_has_an_error_and_no_text(self):
        slow, fine = annotate(["a" * 40 + "!", "fine"]).mask(rules={"SLOW": r"(?:a|a|aa)+$"})
        assert slow.error
        assert slow.text == ""
        assert "SLOW" not in slow.error
        assert fine.text == "fine"


def test_frame_is_a_copy_of_the_table_with_a_column():
    table = pd.DataFrame({"key": [7, 8, 9], "note": ["She has asthma.", None, "Fine."]}, index=[5, 5, 6])
    masked = annotate(table, text_column="note", id_column="key").mask()
    before = table.copy()
    frame = masked.to_frame(table=table)

    assert list(frame.columns) == ["key", "note", "masked_text"]
    assert frame["masked_text"].iloc[[0, 2]].tolist() == ["She has [DISEASE].", "Fine."]
    assert frame["masked_text"].isna().tolist() == [False, True, False]
    pd.testing.assert_frame_equal(table, before)
    for wrong_table in (pd.DataFrame({"secret": [1]}), table.assign(masked_text="secret"), pd.Series([1, 2, 3])):
        with pytest.raises(ConfigurationError) as caught:
            masked.to_frame(table=wrong_table)
        assert "secret" not in str(caught.value)
