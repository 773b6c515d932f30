"""Masking: no part of a replaced entity remains."""

import json
import traceback
import warnings

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from openmed_nb._render.display import to_plain_data
from openmed_nb.annotation.masking import MASKING_DISCLAIMER, mask_text, refine_spans, validate_policy
from openmed_nb.annotation.results import AnnotatedText, Annotations, ResultStore
from openmed_nb.errors import ConfigurationError, OpenMedWarning

STAY = "names, dates, places and numbers are not masked"  # By a model that knows diseases alone.

# Text, spans, policy, and what is left.
CASES = [
    ("Ann Lee coughs.", [(0, 7, "NAME")], "[{label}]", "[NAME] coughs."),
    ("Quackenbush, 7", [(4, 11, "NAME")], "X", "X, 7"),
    ("AnnLee", [(0, 3, "FIRST"), (3, 6, "LAST")], "<{label}>", "<FIRST>"),
    ("3.4.20", [(0, 2, "DATE"), (2, 6, "DATE")], "<{label}>", "<DATE>"),
    ("(+)", [(0, 1, "A"), (1, 2, "B")], "<{label}>", "<A><B>)"),
    ("a b c", [(0, 3, "LONG"), (2, 5, "LATE")], "<{label}>", "<LONG>"),
    ("Jose\u0301 coughs", [(0, 4, "NAME")], "X", "X coughs"),
    ("李明咳嗽", [(0, 2, "NAME")], "[{label}]", "[NAME]咳嗽"),
    ("on 3 May, Jo", [(3, 8, "DATE"), (10, 12, "NAME")], {"DATE": ""}, "on , [NAME]"),
    ("on 3 May, Jo", [(3, 8, "DATE"), (10, 12, "Name")], {"date": "D", "NAME": "X"}, "on D, X"),
    ("on 3 May", [(3, 8, "Stra\u00dfe")], {"STRASSE": "<{label}>"}, "on <Stra\u00dfe>"),
    ("Ann Lee\nBob Ray", [(0, 15, "NAME")], "X", "X\nX"),
    ("Ann Lee \r\n- Bob Ray\n", [(0, 19, "NAME")], "X", "X \r\n- X\n"),
    ("Ann<br>Lee\tAnn", [(0, 14, "NAME")], "X", "X<br>X\tX"),
    ("Ann\nlee", [(0, 7, "NAME")], "X", "X"),
    ("<br>\n", [(0, 5, "NAME")], "X", "<br>\n"),
    ("Lee's and O'Brien's", [(0, 2, "NAME"), (10, 19, "NAME")], "X", "X's and X's"),
    ("James' and James\u2019 cat", [(0, 6, "NAME"), (11, 17, "NAME")], "X", "X' and X\u2019 cat"),
    ("'s", [(0, 2, "NAME")], "X", "X"),
    ("Jo", [(0, 0, "NAME")], "X", "Jo"),
    ("Jo", [(0, 99, "NAME")], "X", "X"),
    ("{label}", [(0, 7, "N")], "<{label}>", "<N>"),
]


@pytest.mark.parametrize(("text", "spans", "policy", "left"), CASES)
def test_entities_are_replaced(text, spans, policy, left):
    """Overlapping spans are one, words stay whole, and each label has its replacement."""
    assert mask_text(text, spans, validate_policy(policy)).text == left


@pytest.mark.parametrize(
    "replacement",
    [3, {"A": None}, {1: "x"}, "{name}", "{label", ["x"], {"A": "", "a": ""}, "\ud800"],
)
def test_a_replacement_that_cannot_be_used_is_refused(replacement):
    """A replacement is a text with no field but its label, or a mapping of labels to such texts."""
    with pytest.raises(ConfigurationError):
        validate_policy(replacement)


@pytest.mark.parametrize("label", ["disease", "DISEASE"])
@pytest.mark.parametrize("text", ["She has asthma.", "No complaints."])
def test_mask_ignores_the_case_of_labels(label, text):
    """Also a label that the model knows, but has not found, is no reason for a warning."""
    found = nb.annotate([text], "bundled_small", device="cpu", progress=False)

    for masked in (found.mask({label: "***"})[0], found.show(0).mask({label: "***"})):
        assert masked.text == text.replace("asthma", "***")


@pytest.mark.parametrize("label", ["diseas", "Mr Smith of Leeds"])
def test_mask_warns_of_a_label_that_no_entity_has(label):
    """The warning is that of ``filter``, and quotes no label with a space."""
    found = nb.annotate(["She has asthma."], "bundled_small", device="cpu", progress=False)
    calls = (lambda: found.mask({label: "X"}), lambda: found.show(0).mask({label: "X"}), lambda: found.filter(label))

    for call in calls:
        with pytest.warns(OpenMedWarning, match="No entity has the label") as caught:
            call()
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
    masked = AnnotatedText(text, entities, "m", "cpu").mask(policy)
    answers = ResultStore()
    answers.add(0, entities)  # With the fingerprint of another text, as of one that has changed.
    wrong = [
        lambda: Annotations(answers, (), "m", "cpu", texts=[text]).mask(policy),
        lambda: Annotations(answers, (), "m", "cpu").mask(policy),
    ]
    for call in wrong:
        with pytest.raises(ConfigurationError) as raised:
            call()
        assert not secrets & {*repr(raised.value), *str(raised.value), *raised.value._render_traceback_()[0]}
    for result in (masked, *Annotations(answers, (text,), "m", "cpu").mask(policy)):
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
        """All texts of a list are masked, not only those that are displayed."""
        texts = [f"Patient {number} has asthma." for number in range(9)]
        found = nb.annotate(texts, "bundled_small", device="cpu")

        assert [item.text for item in found.mask()] == [f"Patient {number} has [DISEASE]." for number in range(9)]

    def test_texts_that_are_gone_are_an_error(self):
        """The error names the first text of a generator that was not stored."""
        found = nb.annotate((f"{number} has asthma." for number in range(9)), "bundled_small", device="cpu")

        with pytest.raises(ConfigurationError, match="Text 5 came from a generator"):
            found.mask()

    def test_a_text_that_changed_is_an_error(self):
        """A text that is not the one that was annotated is not masked with its places."""
        texts = ["She has asthma."] * 8
        found = nb.annotate(texts, "bundled_small", device="cpu")
        texts[7] = "Somebody else."

        with pytest.raises(ConfigurationError, match="Text 7 has changed"):
            found.mask()

    def test_a_text_without_an_answer_is_not_returned(self):
        """The contents of a text that could not be processed are unknown, so they are not returned."""
        found = nb.annotate(["She has asthma.", 5], "bundled_small", device="cpu", on_error="record")
        whole, failed = found.mask()

        assert (whole.text, failed.text) == ("She has [DISEASE].", "")
        assert "Text 1" in failed.error

    def test_entities_that_are_left_out_stay(self):
        """Masking replaces what the annotations have: ``filter`` chooses among them."""
        found = nb.annotate(["She has asthma."], "bundled_small", device="cpu").filter(min_score=1.0)
        masked = found.mask()

        assert masked[0].text == "She has asthma."
        for result in (masked, found.show(0).mask()):
            assert "Filter: score of at least 1." in result.to_report().sentences
        assert found.show(0).mask() == masked[0]

    def test_the_first_texts_are_shown(self):
        """All masked texts together show how much was replaced, once what that does not promise, and the first of them."""
        found = nb.annotate(["She has asthma.", 5] * 4, "bundled_small", device="cpu", on_error="record")
        masked = found.mask()

        assert str(masked).splitlines()[:6] == [
            f"4 entities masked in 8 texts; {STAY}",
            "  Only entities with the label DISEASE are replaced.",
            f"  {MASKING_DISCLAIMER}",
            "  Displayed: the first 5 texts.",
            "0: She has [DISEASE].",
            f"1: {masked[1].error}",
        ]
        assert repr(masked) == str(masked)
        assert masked._repr_html_().count(MASKING_DISCLAIMER) == 1
        assert [item["text"] for item in to_plain_data(masked)["texts"]][:2] == ["She has [DISEASE].", ""]

    def test_hidden_texts_stay_hidden(self):
        """Where texts are not to be shown, masked ones are not shown either."""
        found = nb.annotate(["She has asthma."], "bundled_small", device="cpu", show_text=False)

        assert "She" not in str(found.mask()[0]) + str(found.mask())

    def test_an_empty_run_masks_nothing(self):
        """Without a text there is none to mask."""
        masked = Annotations(ResultStore(), (), "m", "cpu").mask()

        assert ([*masked], str(masked).splitlines()[0]) == ([], "0 entities masked in 0 texts")


# Texts with greedy spans, as privacy filters give them.
GREEDY = [
    ("Mail ann.lee@hospital.org and call.", "private_email", " ann.lee@hospital.org and"),
    ("Call (555) 123-4567 now", "private_phone", "Call (555) 123-4567"),
    ("To Ann Lee and Bob", "private_person", " Ann Lee and"),
    ("no mail here", "private_email", "no mail"),
    ("Jose\u0301 Ruiz", "private_person", "Jose"),
    ("李明 医生", "private_person", "李明 "),
    ("x", "", "x"),
    ("   ", "private_person", "   "),
]


@pytest.mark.parametrize(("text", "label", "span"), GREEDY)
def test_spans_are_refined_as_openmed_does(text, label, span):
    """White space, a last conjunction, and what is around an address or a number goes, as in OpenMed's own pipeline."""
    openmed = pytest.importorskip("openmed.torch.privacy_filter")
    start = text.index(span)
    entity = {"entity_group": label, "score": 0.5, "word": span, "start": start, "end": start + len(span)}

    assert refine_spans(text, [entity]) == [openmed.PrivacyFilterTorchPipeline._normalize_entity(entity, text)]


WORDS = st.sampled_from(
    ("ann@x.org", "and", "or", "Ann", "555-123-4567", "www.x.org", "(555)", "é", "e\u0301", ",", " ", "\n")
)


@given(st.lists(WORDS, min_size=1, max_size=8).map(" ".join), st.data())
def test_any_span_is_refined_as_openmed_does(text, data):
    """Any span of any label in such a text has OpenMed's borders."""
    openmed = pytest.importorskip("openmed.torch.privacy_filter")
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    label = data.draw(st.sampled_from(("private_email", "private_url", "private_phone", "private_person")))
    entity = {"entity_group": label, "score": 0.5, "word": text[start:end], "start": start, "end": end}
    theirs = openmed.PrivacyFilterTorchPipeline._normalize_entity(entity, text)

    assert refine_spans(text, [entity])[0]["word"] == theirs["word"]


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_the_route_of_a_privacy_filter_gives_the_spans_of_openmed(tiny, tmp_path, strategy):
    """A model of that architecture, loaded here and refined, gives what OpenMed's own pipeline gives, by every strategy."""
    openmed = pytest.importorskip("openmed.torch.privacy_filter")
    folder = tiny.save(tmp_path, tiny.random_privacy_filter())
    text = "Ann Lee, born 3 May 1970, wrote from ann.lee@hospital.org and called 555-123-4567 or www.x.org ."
    ours = nb.load_pipeline(folder, device="cpu", aggregation_strategy=strategy)
    theirs = openmed.PrivacyFilterTorchPipeline(
        str(folder), device="cpu", aggregation_strategy=strategy, local_files_only=True
    )
    found, expected = refine_spans(text, ours(text)), theirs(text)

    assert [{**entity, "score": 0} for entity in found] == [{**entity, "score": 0} for entity in expected]
    assert [entity["score"] for entity in found] == pytest.approx([entity["score"] for entity in expected], abs=1e-5)
    assert found


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (("DISEASE",), STAY),
        (("DRUG_NAME", "GENE_NAME", "DOSE"), STAY),  # Names, but of nobody.
        (("B-PER", "I-PER", "B-LOC", "B-ORG"), "dates and numbers are not masked"),
        (("FIRSTNAME", "Date", "CITY", "phone_number"), ""),
        (("private_person", "private_date", "private_address", "account_number", "secret"), ""),
    ],
)
def test_headline_of_masked_texts_says_which_kinds_stay(tiny, tmp_path, labels, says):
    """The headline names the categories that are not masked, followed by the labels of the model."""
    pipe = nb.load_pipeline(tiny.save(tmp_path, tiny.random_bert(("O", *labels))), device="cpu")
    for masked in (nb.annotate(["The patient has asthma."], pipe).mask(), nb.annotate("Has asthma.", pipe).mask()):
        headline, knows, *_ = str(masked).splitlines()

        assert headline.endswith(f"; {says}") if says else "not masked" not in headline
        assert labels[0].partition("-")[2] in knows
        assert not says or says in masked._repr_html_()


def test_headline_of_masked_texts_counts_what_the_filter_leaves_out():
    """A label that was filtered out is not masked."""
    found = Annotations(ResultStore(), (), "m", "cpu", known_labels=("NAME", "DATE", "CITY", "ID"))

    assert str(found.mask()).splitlines()[0] == "0 entities masked in 0 texts"
    assert str(found.filter("name").mask()).splitlines()[0].endswith("; dates, places and numbers are not masked")


@pytest.mark.parametrize("strategy", ["none", "simple"])
@pytest.mark.parametrize("ignored", [["O", "B-NAME", "I-NAME", "NAME"], ["O", "NAME"]])
def test_known_labels_are_those_of_entities_that_are_not_ignored(tiny, tmp_path, strategy, ignored):
    folder = tiny.save(tmp_path, tiny.random_bert(("O", "B-NAME", "I-NAME", "B-DATE")))
    pipe = nb.load_pipeline(folder, device="cpu", aggregation_strategy=strategy, ignore_labels=ignored)
    found = nb.annotate(["The patient has asthma."], pipe)

    has_name = strategy == "none" and "B-NAME" not in ignored
    assert found.known_labels == (("NAME", "DATE") if has_name else ("DATE",))
    assert nb.annotate("The patient has asthma.", pipe).known_labels == found.known_labels


def test_filter_knows_the_labels_of_tokens():
    found = Annotations(ResultStore("entity"), (), "m", "cpu", known_labels=("NAME", "DATE"))

    assert found.filter("i-name").known_labels == ("NAME",)


class TestRules:
    """Matches of regular expressions are masked in addition to the entities of the model."""

    NOTES = ("She has asthma, MRN 1234567.", None, "No number.")
    RULES = {"MRN": r"\bMRN[:# ]*\d{6,}\b"}  # noqa: RUF012 - not modified

    @pytest.fixture
    def found(self):
        return nb.annotate(list(self.NOTES), "bundled_small", device="cpu", progress=False, ids=["a", "b", "c"])

    def test_matches_have_a_label_and_a_source(self, found):
        masked = found.mask(rules=self.RULES)
        assert masked[0].text == "She has [DISEASE], [MRN]."
        assert [span.source for span in masked[0].spans] == ["model", "rule"]
        assert masked.counts == {("DISEASE", "model"): 1, ("MRN", "rule"): 1}
        assert found.show(0).mask(rules=self.RULES).text == masked[0].text

    def test_label_of_a_rule_has_its_own_replacement(self, found):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert found.mask({"mrn": "#"}, rules=self.RULES)[0].text == "She has [DISEASE], #."

    def test_longest_span_gives_label_and_source(self):
        spans = [(0, 4, "NAME"), (0, 9, "ID", False, "rule")]
        (span,) = mask_text("Anna 1234", spans, "[{label}]").spans
        assert (span.label, span.source, span.end) == ("ID", "rule", 9)

    @pytest.mark.parametrize(
        "rules",
        [
            {"MRN": "(secret"},
            {"MRN": "(" * 5000 + "secret" + ")" * 5000},
            {"MRN": "(?iLmsux)secret"},
            {"MRN": r"(?:\bsecret){100000000}"},
            {"MRN": "(?:(?:secret|s[)]){1000}){1000}"},
            {"MRN": "secret" * 20_000},
            {"secret": 5},
            {5: "x"},
            ["secret"],
            "secret",
        ],
    )
    def test_invalid_rules_are_rejected_without_being_quoted(self, found, rules):
        with pytest.raises(ConfigurationError) as caught:
            found.mask(rules=rules)
        assert "secret" not in "".join(traceback.format_exception(caught.value)).partition("ConfigurationError")[2]

    def test_text_with_a_rule_that_needs_too_much_memory_has_an_error(self, found):
        masked = found.mask(rules={"ANY": "(?R)?|"})[0]
        assert masked.error
        assert masked.text == ""

    def test_text_with_a_slow_rule_has_an_error_and_no_text(self):
        notes = ["a" * 40 + "!", "fine"]
        found = nb.annotate(notes, "bundled_small", device="cpu", progress=False)
        slow, fine = found.mask(rules={"SLOW": r"(?:a|a|aa)+$"})
        assert slow.error
        assert slow.text == ""
        assert "SLOW" not in slow.error
        assert fine.text == "fine"


class TestFrame:
    """Masked texts as a table, alone or with the original columns."""

    @pytest.fixture
    def table(self):
        return pd.DataFrame({"key": [7, 8, 9], "note": ["She has asthma.", None, "Fine."]}, index=[5, 5, 6])

    @pytest.fixture
    def masked(self, table):
        options = {"device": "cpu", "progress": False, "text_column": "note", "id_column": "key"}
        return nb.annotate(table, "bundled_small", **options).mask()

    def test_one_row_per_text_with_ids_and_index(self, masked, table):
        frame = masked.to_frame()
        assert frame.index.equals(table.index)
        assert frame["key"].tolist() == [7, 8, 9]
        assert frame["masked_text"].iloc[[0, 2]].tolist() == ["She has [DISEASE].", "Fine."]
        assert frame["masked_text"].isna().tolist() == [False, True, False]
        assert frame["replacements"].tolist() == [1, 0, 0]

    def test_column_is_added_to_a_copy_of_the_table(self, masked, table):
        before = table.copy()
        frame = masked.to_frame(table=table)
        assert list(frame.columns) == ["key", "note", "masked_text"]
        assert frame["masked_text"].iloc[0] == "She has [DISEASE]."
        pd.testing.assert_frame_equal(table, before)

    def test_ids_with_the_name_of_another_column_are_renamed(self, table):
        options = {"device": "cpu", "progress": False, "text_column": "note", "id_column": "error"}
        frame = nb.annotate(table.rename(columns={"key": "error"}), "bundled_small", **options).mask().to_frame()
        assert frame["note_id"].tolist() == [7, 8, 9]

    def test_table_that_does_not_fit_is_rejected(self, masked, table):
        for wrong_table in (pd.DataFrame({"secret": [1]}), table.assign(masked_text="secret"), pd.Series([1, 2, 3])):
            with pytest.raises(ConfigurationError) as caught:
                masked.to_frame(table=wrong_table)
            assert "secret" not in str(caught.value)
