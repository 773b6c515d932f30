"""Where words start for each kind of tokenizer, and that masking replaces every character that a model labels."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import openmed_nb as nb
from helpers import architectures
from openmed_nb.annotation.boundaries import is_ignorable, split_lines, whole_words
from openmed_nb.annotation.masking import mask_text
from openmed_nb.annotation.pipeline import AnnotationPipeline

STRATEGIES = ("simple", "first", "average", "max")
KINDS = (
    "WordPiece",
    "byte-level BPE",
    "byte-level BPE, add_prefix_space",
    "byte-level BPE, untrimmed",
    "Unigram",
    "SentencePiece BPE",
    "Metaspace BPE",
)
NAMES = ("Anna", "Smith", "Carl", "Jones")


def byte_level(trim=True, prefix=False):
    """Return a byte-level BPE tokenizer in which each name is one token, with and without a space."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens, merges = ["<unk>", "<pad>", *alphabet], []
    for name in NAMES:
        for word in (name, f"Ġ{name}"):
            for length in range(1, len(word)):
                pair = (word[:length], word[length])
                merges += [pair] if pair not in merges else []
                tokens += ["".join(pair)] if "".join(pair) not in tokens else []
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, trim_offsets=trim)
    tokenizer.decoder = decoders.ByteLevel()
    if trim:
        from tokenizers import processors

        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", model_max_length=48)


def labeling_pipe(tokenizer, labels, strategy="first", **options):
    """Return a pipeline over a model that gives tokens the labels of a mapping."""
    model = architectures.labeler(tokenizer, labels)
    return AnnotationPipeline(model=model, tokenizer=tokenizer, device=-1, aggregation_strategy=strategy, **options)


def names_pipe(tokenizer, strategy="first", **options):
    """Return a pipeline over a model that labels the names."""
    labels = {word: "B-NAME" for name in NAMES for word in (name, f"Ġ{name}")}
    return labeling_pipe(tokenizer, labels, strategy, **options)


SEPARATED = {
    "Patient:\nAnna Smith\nDoctor:\tCarl Jones\n": "Patient:\n[NAME] [NAME]\nDoctor:\t[NAME] [NAME]\n",
    "cc: (Anna Smith)": "cc: ([NAME] [NAME])",
    "cc/Anna": "cc/[NAME]",
    "-Anna-Smith.Carl": "-[NAME]-[NAME]",
    "'Anna'": "'[NAME]'",
    "患者Anna": "患者[NAME]",
}


@pytest.mark.parametrize("strategy", ["simple", "first"])
@pytest.mark.parametrize("options", [{}, {"trim": False}, {"prefix": True}])
def test_annotate_finds_names_after_any_separator(options, strategy):
    found = nb.annotate([*SEPARATED], names_pipe(byte_level(**options), strategy), progress=False)

    assert found.results.dropped == {}
    for text, entities, masked in zip(SEPARATED, found, found.mask(), strict=True):
        words = {text[entity["start"] : entity["end"]].strip() for entity in entities}
        assert words == {name for name in NAMES if name in text}
        assert masked.text == SEPARATED[text]


def test_transformers_boundaries_drop_the_name_and_masking_replaces_it():
    text = "cc: (Anna Smith)"
    pipe = names_pipe(byte_level(), transformers_boundaries=True)
    found = nb.annotate([text], pipe, progress=False)

    assert [entity["word"].strip() for entity in found[0]] == ["Smith)"]
    assert [(span.label, *span[2:]) for span in found.results.dropped[0]] == [("NAME", 5, 9)]
    assert found.mask()[0].text == "cc: ([NAME] [NAME]"
    assert found.show(0).mask().text == "cc: ([NAME] [NAME]"
    assert found.mask().counts == {("NAME", "model"): 1, ("NAME", "partial"): 1}
    for masked in (found.mask(), found.mask()[0]):
        assert all(count in str(masked) for count in ("1 entity masked", ": 1 word "))


def test_token_of_another_label_inside_an_entity_is_masked_by_its_own():
    pipe = labeling_pipe(byte_level(), {"Anna": "B-DATE", "Smith": "B-NAME"})
    found = nb.annotate(["AnnaSmith"], pipe, progress=False)

    assert [(entity["entity_group"], entity["start"], entity["end"]) for entity in found[0]] == [("DATE", 0, 9)]
    assert [(span.label, *span[2:]) for span in found.results.dropped[0]] == [("NAME", 4, 9)]
    assert found.filter("NAME").mask()[0].text == "[NAME]"
    assert found.filter("DATE").results.dropped == {}
    assert found.mask()[0].text == "[DATE]"


def test_dropped_spans_survive_a_resume_file(tmp_path):
    texts = ["cc: (Anna Smith)", "(Carl)", "cc"]
    pipe = names_pipe(byte_level(), transformers_boundaries=True)
    first = nb.annotate(texts, pipe, progress=False, resume=tmp_path / "found")
    again = nb.annotate(texts, pipe, progress=False, resume=tmp_path / "found")

    assert again.results.dropped == first.results.dropped
    assert {*first.results.dropped} == {0, 1}
    assert [text.text for text in again.mask()] == [text.text for text in first.mask()]


def word_piece():
    """Return a WordPiece tokenizer that knows "asthma" in two pieces."""
    tokens = ["[UNK]", "[PAD]", "as", "##thma", "##t", "##h", "##ma", "no", "."]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", model_max_length=48
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_word_with_characters_that_the_tokenizer_drops_is_one_entity(strategy):
    labels = {"as": "B-DISEASE", **dict.fromkeys(("##t", "##h", "##thma", "##ma"), "I-DISEASE")}
    pipe = labeling_pipe(word_piece(), labels, strategy)
    texts = [f"no a{ignored}st{ignored}hma." for ignored in "\u00ad\u200b\u200d\u2060\ufeff\x00\u0301"]
    found = nb.annotate(texts, pipe, progress=False)

    assert [[(entity["start"], entity["end"]) for entity in entities] for entities in found] == [[(3, 11)]] * len(texts)
    assert {masked.text for masked in found.mask()} == {"no [DISEASE]."}


@pytest.mark.parametrize("strategy", ["simple", "first"])
@pytest.mark.parametrize("trim", [True, False])
def test_labeled_line_ends_are_outside_of_entities_and_masks(trim, strategy):
    tokenizer = byte_level(trim)
    labels = dict.fromkeys(tokenizer.get_vocab().keys() - {"<unk>", "<pad>"}, "I-NAME")
    separators = ["\n", "\r\n", " \n\n", "<br>", "   "]
    texts = [f"Anna{separator}Smith{separator}" for separator in separators]
    found = nb.annotate(texts, labeling_pipe(tokenizer, labels, strategy), progress=False)

    for text, entities in zip(texts, found, strict=True):
        assert [text[entity["start"] : entity["end"]].strip() for entity in entities] == ["Anna", "Smith"]
    assert [masked.text for masked in found.mask()] == [
        f"[NAME]{separator}[NAME]{separator}" for separator in separators
    ]


@pytest.mark.parametrize("text", [f"a{' ' * 100_000}\n{' ' * 100_000}b", "a\n " * 50_000, "<br " * 50_000])
def test_split_lines_takes_linear_time_in_white_space(text):
    assert len(list(split_lines(text, 0, len(text)))) in {1, 50_000}


# Characters between and inside of names, and those that tokenizers treat in different ways.
WORD_PARTS = (
    "Anna Smith asthma O'Brien john_smith Schmi\u00addtberg Él e\u0301 II-b 3.5 A.B. ( ) : , . - / ' \u2019 _ “ # ## "
    "\u00ad \u200b \u200c \u200d \u2060 \ufeff \x00 \ufffd 患者 糖尿病 です 🙂 👩‍⚕️ المريض המטופל ▁ Ġ <unk> [UNK] ﬁ ½"
)
PARTS = [*WORD_PARTS.split(" "), " ", "  ", "\n", "\t", "\r\n", "\u00a0"]


def unmasked(text, masked):
    """Return the positions of a text that masking left in it."""
    replaced = {place for span in masked.spans for place in range(span.start, span.end)}
    return {place for place in range(len(text)) if place not in replaced}


def check_all_labeled_characters_are_masked(kind, strategy, texts):
    """Assert that the masked texts of a strategy do not contain the characters of any labeled token."""
    tokens = nb.annotate(texts, architectures.boundary_pipes(kind, "none"), progress=False)
    found = nb.annotate(texts, architectures.boundary_pipes(kind, strategy), progress=False)
    for text, labeled, hidden in zip(texts, tokens, found.mask(), strict=True):
        left = unmasked(text, hidden)
        for token in labeled:
            for place in range(token["start"], token["end"]):
                assert place not in left or text[place].isspace(), (kind, strategy, text, place)
        for span in hidden.spans:  # No word is cut, and no white space is taken with it.
            assert whole_words(text, span.start, span.end) == (span.start, span.end)


@given(
    st.sampled_from(KINDS),
    st.sampled_from(STRATEGIES),
    st.lists(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), min_size=1, max_size=6),
)
def test_masking_replaces_every_labeled_character(kind, strategy, texts):
    check_all_labeled_characters_are_masked(kind, strategy, texts)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        *((kind, "first") for kind in KINDS),
        *(("WordPiece", strategy) for strategy in ("none", "simple", "average", "max")),
        *(
            pytest.param(kind, strategy, marks=pytest.mark.slow)
            for kind in KINDS[1:]
            for strategy in ("none", "simple", "average", "max")
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
def test_entities_equal_transformers_by_its_boundaries(kind, strategy):
    theirs, ours = architectures.boundary_pipes(kind, strategy, True)
    choose = random.Random(kind)
    texts = ["".join(choose.choices(PARTS, k=choose.randint(1, 12))) for _ in range(60)]

    architectures.assert_same(ours(texts, truncation=True), theirs(texts))


WORDS = [
    ("by Schmi\u00addtberg", 3, 8, "Schmi\u00addtberg"),
    ("O'Brien came", 2, 7, "O'Brien"),
    ("Dr.Smith", 3, 8, "Dr.Smith"),
    ("on 3.5.2020", 3, 4, "3.5.2020"),
    ("Patient:Smith", 8, 13, "Smith"),
    ("  Anna Smith ", 0, 13, "Anna Smith"),
    ("x \u200bAnna", 3, 7, "Anna"),
    ("Anna\u200b\u2060\ufeffLee x", 0, 4, "Anna\u200b\u2060\ufeffLee"),
    ("Schmi\x00dt", 0, 5, "Schmi\x00dt"),
    ("Jose\u0301\u0302 x", 0, 4, "Jose\u0301\u0302"),
    ("ע\u05f4מ ח", 0, 1, "ע\u05f4מ"),
    ("張三先生", 0, 2, "張三"),
    ("👩\u200d⚕️x", 0, 1, "👩\u200d⚕️"),
    ("Anna\u200d\n", 0, 4, "Anna\u200d"),
]


@pytest.mark.parametrize(("text", "start", "end", "word"), WORDS)
def test_whole_words_follows_uax_29(text, start, end, word):
    start, end = whole_words(text, start, end)

    assert text[start:end] == word


@given(st.text(st.sampled_from("aB3.,:'_- \n\u00ad\u200b\u200d\u0301中é"), max_size=30), st.data())
def test_whole_words_is_idempotent_and_covers_the_span(text, data):
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    first, last = whole_words(text, start, end)

    assert whole_words(text, first, last) == (first, last)
    assert all(first <= place < last for place in range(start, end) if not text[place].isspace())


def test_whole_words_takes_linear_time_in_ignorable_characters():
    text = "Schmi" + "\u00ad" * 300_000 + "dt"

    assert whole_words(text, 0, 2) == (0, len(text))
    assert whole_words(text, len(text) - 1, len(text)) == (0, len(text))
    assert is_ignorable("\u00ad")


def test_masked_text_takes_linear_time_in_spans_of_one_word():
    text = "ACGT" * 50_000

    masked = mask_text(text, [(place, place + 2, "GENE") for place in range(0, len(text), 4)], "[{label}]")

    assert masked.text == "[GENE]"


@pytest.mark.parametrize(
    ("text", "spans", "left"),
    [
        ("Staff: Anna Smith Carl Jones", [(6, 17, "NAME"), (17, 28, "NAME")], "Staff: [NAME] [NAME]"),
        ("張三李四", [(0, 2, "NAME"), (2, 4, "NAME")], "[NAME][NAME]"),
        ("張三李四", [(0, 1, "NAME"), (1, 2, "NAME", True)], "[NAME]李四"),
        ("Anna\n", [(0, 5, "NAME")], "[NAME]\n"),
    ],
)
def test_masked_text_trims_spans_before_it_merges_them(text, spans, left):
    assert mask_text(text, spans, "[{label}]").text == left


@pytest.mark.parametrize("label", ["E-MAIL", "I-CARD"])
@pytest.mark.parametrize("strategy", ["none", "first"])
def test_mask_keeps_hyphens_of_labels(label, strategy):
    labels = {"Anna": f"B-{label}", "Ġ": f"I-{label}", "Smith": f"I-{label}"}
    pipe = labeling_pipe(byte_level(), labels, strategy)
    found = nb.annotate(["Anna Smith"], pipe, progress=False)
    expected = f"[{label}] [{label}]" if strategy == "none" else f"[{label}]"

    assert found.mask()[0].text == expected
