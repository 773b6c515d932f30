"""The results of the pipeline equal those of transformers, for the same models and tokenizers."""

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch.utils.data import Dataset
from transformers import CanineConfig, CanineForTokenClassification, CanineTokenizer
from transformers.pipelines.pt_utils import KeyDataset

from helpers import architectures

pytestmark = pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")  # A warning of transformers.

STRATEGIES = ("none", "simple", "first", "average", "max")
NAMES = ("bert", "roberta", "modernbert", "xlm-roberta", "deberta-v2")
KINDS = ("bert", "roberta", "modernbert", "xlm-roberta")
"""One architecture for each kind of tokenizer."""

FIRST_OF_STRATEGIES = [
    strategy if strategy == "first" else pytest.param(strategy, marks=pytest.mark.slow) for strategy in STRATEGIES
]


def by_suite(names, strategies=(None,)):
    """Return architectures with strategies as parameters.

    The fast suite has BERT with all strategies, and each other architecture but XLM-RoBERTa, which is like two others, with one.
    """
    parameters = []
    for name, strategy in itertools.product(names, strategies):
        slow = name == "xlm-roberta" or (name != "bert" and strategy not in {None, "first"})
        values = [name] if strategy is None else [name, strategy]
        parameters.append(pytest.param(*values, id="-".join(values), marks=[pytest.mark.slow] * slow))
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
    "hypo" * 20,
    "no asthma , " * 12,
)
"""Ordinary, empty and blank texts, many scripts, unknown characters, special tokens, and long words."""

TEXT = some.one_of(
    some.text(max_size=60),
    some.text(some.sampled_from("aAé .,-#\t\n▁Ġ中糖ا🙂\u0301\u200d\x00"), max_size=60),
    some.lists(
        some.sampled_from(["asthma", "No", "diabetes,", "mellitus.", "II-b", "  ", "</s>", "é" * 9]), max_size=9
    ).map(" ".join),
)


def compare(pipes, texts=TEXTS, **options):
    """Check that the pipeline has the results of transformers, together and alone."""
    theirs, ours = pipes
    expected = theirs(list(texts), **options)
    architectures.assert_same(ours(list(texts), **options), expected)
    architectures.assert_same([ours(text, **options) for text in texts], expected)


class Notes(Dataset):
    """A dataset of texts."""

    def __len__(self):
        return len(TEXTS)

    def __getitem__(self, number):
        return TEXTS[number]


@pytest.mark.parametrize("name", by_suite(NAMES))
def test_every_label_occurs(name):
    """A comparison means something only if a model predicts every label."""
    for labels in (architectures.PREFIXED, architectures.PLAIN, architectures.ODD):
        pipe = architectures.both(name, "none", labels)[1]
        found = pipe(list(architectures.CORPUS), ignore_labels=[])
        assert {entity["entity"] for entities in found for entity in entities} == set(labels)


@pytest.mark.parametrize(("name", "strategy"), by_suite(NAMES, STRATEGIES))
def test_results_equal_transformers(name, strategy):
    compare(architectures.both(name, strategy))


@pytest.mark.parametrize("name", by_suite(KINDS))
def test_results_do_not_depend_on_padding_side(name):
    tokenizer = architectures.changed(name, padding_side="left")
    compare(architectures.pipelines(architectures.model_of(name), tokenizer, "none"))


@pytest.mark.parametrize("name", by_suite(KINDS))
def test_bfloat16_labels_equal_transformers(name):
    """Each token with a score above 0.6 has the same label."""
    model = copy.deepcopy(architectures.model_of(name)).to(torch.bfloat16)
    theirs, ours = architectures.pipelines(model, architectures.tokenizer_of(name), "none", ignore_labels=[])
    for result, expected in zip(ours(list(TEXTS)), theirs(list(TEXTS)), strict=True):
        sure = [index for index, entity in enumerate(expected) if entity["score"] > 0.6]
        assert len(result) == len(expected)
        assert [result[index]["entity"] for index in sure] == [expected[index]["entity"] for index in sure]


@pytest.mark.parametrize(("name", "strategy"), by_suite(KINDS, STRATEGIES))
@pytest.mark.parametrize("labels", ["PREFIXED", "PLAIN", "ODD"])
def test_labels_equal_transformers(name, labels, strategy):
    """Entities have the names of transformers, and the same labels are ignored."""
    pipes = architectures.both(name, strategy, getattr(architectures, labels))
    for ignored in (None, [], ["DRUG", "B-GENE"], ("HUMAN", "", "B-"), {"A-B", "NON-HUMAN", "-"}):
        compare(pipes, [TEXTS[0], architectures.CORPUS[0]], ignore_labels=ignored)


@given(some.sampled_from(NAMES), some.sampled_from(STRATEGIES), some.lists(TEXT, min_size=1, max_size=6))
def test_results_equal_transformers_for_any_texts(name, strategy, texts):
    compare(architectures.both(name, strategy), texts)


@pytest.mark.parametrize("text", TEXTS[:3])
def test_one_text_has_one_list(text):
    theirs, ours = architectures.both("bert")
    architectures.assert_same([ours(text)], [theirs(text)])


def test_streams_yield_results():
    """A generator and datasets of torch have the results of a list."""
    theirs, ours = architectures.both("xlm-roberta", "average")
    expected = theirs(list(TEXTS))
    rows = KeyDataset([{"text": text} for text in TEXTS], "text")
    for stream in ((text for text in TEXTS), Notes(), rows):
        architectures.assert_same(list(ours(stream)), expected)
    assert list(ours(text for text in ())) == []


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("no asthma , " * 90, {"truncation": True}),
        ("no asthma , " * 90, {"stride": 8}),
        (["He", "has", "asthma"], {"is_split_into_words": True, "delimiter": "::"}),
        ("He has asthma", {"offset_mapping": [(0, 0), (0, 2), (3, 6), (7, 13), (0, 0)]}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_transformers_processes_its_options(text, options):
    theirs, ours = architectures.both("bert")
    expected = theirs(text, **{name: value for name, value in options.items() if name != "truncation"})
    assert ours(text, **options) == expected


@pytest.mark.parametrize("strategy", FIRST_OF_STRATEGIES)
@pytest.mark.parametrize("name", ["fnet", "xlnet"])
def test_rare_models_equal_transformers(name, strategy):
    """FNet does not mask padding. The tokenizer of XLNet pads on the left and puts typed special tokens at the end."""
    compare(architectures.both(name, strategy))


@pytest.mark.parametrize("strategy", FIRST_OF_STRATEGIES)
def test_model_without_special_tokens_equals_transformers(strategy):
    """For an empty text and GPT-2, transformers crashes."""
    theirs, ours = architectures.both("gpt2", strategy)
    texts = [text for text in TEXTS if text]
    architectures.assert_same(ours(texts), theirs(texts))
    with pytest.raises(RuntimeError):
        theirs("")
    assert ours(["", "asthma", ""])[::2] == [[], []]


def test_tokenizer_without_limit_is_supported():
    """The pipeline of transformers crashes on a long text if the tokenizer has no maximum length."""
    tokenizer = architectures.changed("bert", model_max_length=10**30)
    theirs, ours = architectures.pipelines(architectures.model_of("bert"), tokenizer, ignore_labels=[])
    text = "no asthma , " * 90
    with pytest.raises((IndexError, RuntimeError)):
        theirs(text)
    assert ours(text)[-1]["end"] == len(text.rstrip())


def test_tokenizer_without_offsets_uses_transformers():
    """The tokenizer of CANINE has no offsets."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 37}
    config = CanineConfig(**size, num_hash_buckets=64, max_position_embeddings=64, initializer_range=1.0)
    model, tokenizer = CanineForTokenClassification(config).eval(), CanineTokenizer(model_max_length=64)
    theirs, ours = architectures.pipelines(model, tokenizer, "simple", ignore_labels=[])
    architectures.assert_same(ours([TEXTS[0], TEXTS[4]]), theirs([TEXTS[0], TEXTS[4]]))
