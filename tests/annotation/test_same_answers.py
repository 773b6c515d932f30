"""The answers of the pipeline against those of transformers' own, over the same models and tokenizers."""

import copy
import itertools
import random
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch.utils.data import Dataset
from transformers import CanineConfig, CanineForTokenClassification, CanineTokenizer
from transformers.pipelines.pt_utils import KeyDataset

pytestmark = pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")  # A warning of transformers.

STRATEGIES = ("none", "simple", "first", "average", "max")
NAMES = ("bert", "distilbert", "electra", "roberta", "modernbert", "xlm-roberta", "deberta-v2")
KINDS = ("bert", "roberta", "modernbert", "xlm-roberta")
"""One architecture for each kind of tokenizer."""

LIKE_ANOTHER = {"distilbert", "electra", "xlm-roberta"}
"""Architectures that count positions, and take types of tokens or none, as BERT or RoBERTa does."""

FIRST_OF_STRATEGIES = [
    strategy if strategy == "first" else pytest.param(strategy, marks=pytest.mark.slow) for strategy in STRATEGIES
]


def in_lanes(names, strategies=(None,)):
    """Return architectures with strategies as parameters.

    The fast suite has BERT with all strategies, and each other kind with one strategy.
    """
    parameters = []
    for name, strategy in itertools.product(names, strategies):
        slow = name in LIKE_ANOTHER or (name != "bert" and strategy not in {None, "first"})
        given = [name] if strategy is None else [name, strategy]
        parameters.append(pytest.param(*given, id="-".join(given), marks=[pytest.mark.slow] * slow))
    return parameters


TEXTS = (
    "She has asthma; no history of type 2 diabetes mellitus, hypertension or hypothyroidism.",
    "",
    "   ",
    "\t\n a\u00a0b\u2003 c \r\n",
    "Él tomó paracetamol — naïve façade e\u0301 ﬁne ½ ™",
    "患者は糖尿病と高血圧です。患者有糖尿病和高血压。",
    "המטופל סובל מסוכרת . المريض يعاني من السكري",
    "🙂👩‍⚕️🏳️‍🌈 aspirin🙂 \x00\x07\x1b \u202e \ufeff \U000e0041",
    "ᚠᛇᚻ ᛒᛦᚦ ೞ ༀ asthma ꙮ ꙮꙮ",
    "a [SEP] b</s><s>[CLS] <unk> [UNK] <pad>[PAD] [MASK]c <mask>",
    "hypo" * 60,
    "no asthma , " * 30,
)
"""Ordinary, empty, blank, of many scripts, unknown to the tokenizer, with its special tokens, and too long."""

WORDS = (
    ["He", "has", "asthma", "."],
    ["no", "", " ", "a b", "Übelkeit", "[SEP]", "</s>"],
    ["患者", "🙂🙂", "\u202e", "e\u0301"],
    [""],
    ["hypothyroidism"] * 40,
    ["x" * 300, "y"],
)

TEXT = some.one_of(
    some.text(max_size=60),
    some.text(some.sampled_from("aAé .,-#\t\n▁Ġ中糖ا🙂\u0301\u200d\x00"), max_size=80),
    some.lists(some.sampled_from(["asthma", "No", "diabetes,", "mellitus.", "II-b", "  ", "</s>", "é" * 90])).map(
        " ".join
    ),
)


def compare(architectures, pipes, texts=TEXTS, **options):
    """Check that our pipeline answers as transformers' own, which always drops the rest of a long text without ``stride``."""
    theirs, ours = pipes
    dropped = {} if "stride" in options else {"truncation": True}
    architectures.assert_same(ours(list(texts), **options, **dropped), theirs(list(texts), **options))


class Notes(Dataset):
    """A dataset of texts."""

    def __len__(self):
        return len(TEXTS)

    def __getitem__(self, number):
        return TEXTS[number]


class TestArchitectures:
    """Every architecture, with the tokenizer that it has."""

    @pytest.mark.parametrize("name", in_lanes(NAMES))
    def test_every_label_occurs(self, architectures, name):
        """Every model predicts every label of every set of labels somewhere, so that comparing it means something."""
        for labels in (architectures.PREFIXED, architectures.PLAIN, architectures.ODD):
            pipe = architectures.both(name, "none", labels)[1]
            found = pipe(list(architectures.CORPUS), ignore_labels=[])
            assert {entity["entity"] for entities in found for entity in entities} == set(labels)

    @pytest.mark.parametrize(("name", "strategy"), in_lanes(NAMES, STRATEGIES))
    def test_texts(self, architectures, name, strategy):
        """Answers to texts of all kinds equal transformers', where the rest of a long text is dropped as it does."""
        compare(architectures, architectures.both(name, strategy))

    @pytest.mark.parametrize(("name", "strategy"), in_lanes(NAMES, STRATEGIES))
    def test_stride(self, architectures, name, strategy):
        """Answers from the overlapping windows of ``stride`` equal transformers'."""
        for stride in (0, 4, 8):
            compare(architectures, architectures.both(name, strategy), stride=stride)

    @pytest.mark.parametrize("name", in_lanes(KINDS))
    def test_longest_stride(self, architectures, name):
        """Windows may overlap by all but one of the text's own tokens."""
        compare(architectures, architectures.both(name, "first"), TEXTS[:5], stride=architectures.LENGTH - 3)

    @pytest.mark.parametrize(("name", "strategy"), in_lanes(NAMES, STRATEGIES))
    def test_words(self, architectures, name, strategy):
        """Answers to texts that are split into words equal transformers', whatever joins the words."""
        pipes = architectures.both(name, strategy)
        for delimiter in ("", " ", "::", None):
            compare(architectures, pipes, WORDS, is_split_into_words=True, delimiter=delimiter)

    @pytest.mark.parametrize("name", in_lanes(NAMES))
    def test_words_with_stride(self, architectures, name):
        """Answers to long texts that are split into words equal transformers' with ``stride``."""
        pipes = architectures.both(name, "first")
        compare(architectures, pipes, WORDS, is_split_into_words=True, delimiter="::", stride=4)

    @pytest.mark.parametrize("name", in_lanes(NAMES))
    def test_cut_off_on_the_left(self, architectures, name):
        """Results equal those of transformers with truncation on the left and with ``stride``."""
        tokenizer = architectures.changed(name, truncation_side="left")
        pipes = architectures.pipelines(architectures.model_of(name), tokenizer, "first")
        compare(architectures, pipes)
        compare(architectures, pipes, stride=4)

    @pytest.mark.parametrize("name", in_lanes(NAMES))
    def test_padding_on_the_left(self, architectures, name):
        """Answers equal transformers' for a tokenizer that pads on the left, and do not depend on the other texts."""
        tokenizer = architectures.changed(name, padding_side="left")
        theirs, ours = architectures.pipelines(architectures.model_of(name), tokenizer, "none")
        expected = theirs(list(TEXTS))
        architectures.assert_same(ours(list(TEXTS), truncation=True), expected)
        architectures.assert_same([ours(text, truncation=True) for text in TEXTS], expected)

    @pytest.mark.parametrize("name", in_lanes(KINDS))
    def test_bfloat16(self, architectures, name):
        """In bfloat16 every token that transformers is sure of has the same label."""
        model = copy.deepcopy(architectures.model_of(name)).to(torch.bfloat16)
        theirs, ours = architectures.pipelines(model, architectures.tokenizer_of(name), "none", ignore_labels=[])
        for result, expected in zip(ours(list(TEXTS), truncation=True), theirs(list(TEXTS)), strict=True):
            sure = [place for place, entity in enumerate(expected) if entity["score"] > 0.6]
            assert len(result) == len(expected)
            assert [result[place]["entity"] for place in sure] == [expected[place]["entity"] for place in sure]


class TestLabels:
    """Labels with and without prefixes, with unusual hyphens, and ignored labels."""

    @pytest.mark.parametrize(("name", "strategy"), in_lanes(KINDS, STRATEGIES))
    @pytest.mark.parametrize("labels", ["PREFIXED", "PLAIN", "ODD"])
    def test_labels(self, architectures, name, labels, strategy):
        """Entities are joined and named as transformers does, and the same are left out."""
        pipes = architectures.both(name, strategy, getattr(architectures, labels))
        for ignored in (None, [], ["O"], ["DRUG", "B-GENE"], ("HUMAN", "", "B-"), {"A-B", "NON-HUMAN", "-"}):
            compare(architectures, pipes, [TEXTS[0], *architectures.CORPUS[:2]], ignore_labels=ignored)


class TestInputs:
    """Every form in which transformers takes texts."""

    def test_one_text(self, architectures):
        """One string gives one list of entities, also an empty string and spaces."""
        theirs, ours = architectures.both("bert")
        for text in TEXTS[:3]:
            architectures.assert_same([ours(text)], [theirs(text)])

    def test_one_list_of_words(self, architectures):
        """One list of words gives a list of one list of entities, as transformers has it."""
        theirs, ours = architectures.both("roberta")
        found = ours(WORDS[0], is_split_into_words=True)
        assert len(found) == 1
        architectures.assert_same(found, theirs(WORDS[0], is_split_into_words=True))

    def test_streams(self, architectures):
        """A generator and datasets of torch give their answers one by one."""
        theirs, ours = architectures.both("xlm-roberta", "average")
        expected = theirs(list(TEXTS), stride=4)
        rows = KeyDataset([{"text": text} for text in TEXTS], "text")
        for stream in ((text for text in TEXTS), Notes(), rows):
            architectures.assert_same(list(ours(stream, stride=4)), expected)

    def test_empty_generator_has_no_results(self, architectures):
        assert list(architectures.both("bert")[1](text for text in ())) == []

    def test_options_of_the_pipeline(self, architectures):
        """Options that the pipeline is built with count as they do for transformers."""
        settings = {"stride": 8, "ignore_labels": ["GENE"]}
        model, tokenizer = architectures.model_of("deberta-v2"), architectures.tokenizer_of("deberta-v2")
        theirs, ours = architectures.pipelines(model, tokenizer, "max", **settings)
        architectures.assert_same(ours(list(TEXTS), batch_size=3), theirs(list(TEXTS)))

    def test_offsets_of_the_caller(self, architectures):
        """Offsets that the caller brings along are used as transformers does it."""
        theirs, ours = architectures.both("bert", "simple")
        pairs = [(0, 0), (0, 2), (3, 6), (7, 13), (0, 0)]
        expected = theirs("He has asthma", offset_mapping=pairs)
        architectures.assert_same([ours("He has asthma", offset_mapping=pairs)], [expected])

    def test_no_warning(self, architectures):
        """For every token, transformers would warn that it uses spaces to find words."""
        ours = architectures.both("roberta", "first")[1]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ours(TEXTS[0])


class TestRareModels:
    """Models that take or give something else."""

    @pytest.mark.parametrize("strategy", FIRST_OF_STRATEGIES)
    def test_no_attention_mask(self, architectures, strategy):
        """A model that does not mask padding (FNet) has the same results in a list as alone."""
        compare(architectures, architectures.both("fnet", strategy))

    @pytest.mark.parametrize("strategy", FIRST_OF_STRATEGIES)
    def test_special_tokens_at_the_end(self, architectures, strategy):
        """A model whose tokenizer pads on the left and puts typed special tokens at the end (XLNet) answers the same."""
        compare(architectures, architectures.both("xlnet", strategy))

    @pytest.mark.parametrize("strategy", FIRST_OF_STRATEGIES[1:])
    def test_special_tokens_at_the_end_with_stride(self, architectures, strategy):
        """XLNet has the same results with ``stride``, although transformers pads on the left."""
        compare(architectures, architectures.both("xlnet", strategy), stride=4)

    @pytest.mark.parametrize("strategy", FIRST_OF_STRATEGIES)
    def test_model_without_special_tokens(self, architectures, strategy):
        """For an empty text and GPT-2, transformers crashes."""
        theirs, ours = architectures.both("gpt2", strategy)
        texts = [text for text in TEXTS if text]
        architectures.assert_same(ours(texts, truncation=True), theirs(texts))
        with pytest.raises(RuntimeError):
            theirs("")
        assert ours(["", "asthma", ""])[::2] == [[], []]

    def test_no_limit_in_the_tokenizer(self, architectures):
        """The pipeline of transformers crashes on a long text if the tokenizer has no maximum length."""
        tokenizer = architectures.changed("bert", model_max_length=10**30)
        theirs, ours = architectures.pipelines(architectures.model_of("bert"), tokenizer, ignore_labels=[])
        with pytest.raises((IndexError, RuntimeError)):
            theirs(TEXTS[-1])
        assert ours(TEXTS[-1])[-1]["end"] == len(TEXTS[-1].rstrip())

    @pytest.mark.parametrize("strategy", [pytest.param("none", marks=pytest.mark.slow), "simple"])
    def test_no_offsets(self, architectures, strategy):
        """A tokenizer without offsets (CANINE's) is left to transformers, with the same answers."""
        torch.manual_seed(0)
        size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 37}
        config = CanineConfig(**size, num_hash_buckets=64, max_position_embeddings=64, initializer_range=1.0)
        model, tokenizer = CanineForTokenClassification(config).eval(), CanineTokenizer(model_max_length=64)
        theirs, ours = architectures.pipelines(model, tokenizer, strategy, ignore_labels=[])
        architectures.assert_same(ours([TEXTS[0], TEXTS[4]]), theirs([TEXTS[0], TEXTS[4]]))


class TestAnyText:
    """Texts that nobody thought of; the examples are the same every time, so that no score is by chance in the middle."""

    @given(some.sampled_from(NAMES), some.sampled_from(STRATEGIES), some.lists(TEXT, min_size=1, max_size=6))
    def test_texts(self, architectures, name, strategy, texts):
        """Any texts have the answers of transformers, together and whatever their order."""
        theirs, ours = architectures.both(name, strategy)
        expected = theirs(texts)
        architectures.assert_same(ours(texts, truncation=True), expected)
        architectures.assert_same(ours(texts[::-1], truncation=True), expected[::-1])

    @given(
        some.sampled_from(NAMES),
        some.sampled_from(STRATEGIES),
        some.lists(TEXT, min_size=2, max_size=2),
        some.integers(0, 40),
    )
    def test_stride(self, architectures, name, strategy, texts, stride):
        """Any long text has the answers of transformers with any overlap of windows."""
        compare(architectures, architectures.both(name, strategy), [" ".join(texts * 4), *texts], stride=stride)

    @given(
        some.sampled_from(NAMES),
        some.sampled_from(STRATEGIES),
        some.lists(some.lists(some.text(max_size=12), min_size=1, max_size=9), min_size=1, max_size=4),
        some.text(max_size=3),
    )
    def test_words(self, architectures, name, strategy, texts, delimiter):
        """Any lists of words have the answers of transformers, whatever joins them."""
        pipes = architectures.both(name, strategy)
        compare(architectures, pipes, texts, is_split_into_words=True, delimiter=delimiter)

    @pytest.mark.slow
    def test_100_000_characters(self, architectures):
        """A text of 100,000 characters has the answers of transformers with ``stride``, and is read whole without."""
        pieces = random.Random(0).choices([*architectures.CORPUS, *TEXTS], k=3000)
        text = " ".join(pieces)[:99_990] + " asthma no"
        theirs, ours = architectures.both("bert", "average")
        architectures.assert_same([ours(text, stride=4)], [theirs(text, stride=4)])
        assert ours(text, ignore_labels=[])[-1]["end"] == len(text) == 100_000
