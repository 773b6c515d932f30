"""The answers of many families of models against those of transformers' own pipeline, which reads one text at a time."""

import copy

import pytest

from helpers import architectures, model_families

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Tokenizer does not support real words"),  # A warning of transformers.
]

STRATEGIES = ("none", "simple", "first", "average", "max")
BYTE_PAIRS = {
    "biogpt",
    "data2vec-text",
    "deberta",
    "gpt2",
    "gpt_neo",
    "ibert",
    "longformer",
    "luke",
    "markuplm",
    "modernbert",
}
BYTE_PAIRS |= {"mpt", "roberta", "roberta-prelayernorm", "xlm-roberta-xl"}
UNIGRAMS = {"albert", "big_bird", "camembert", "deberta-v2", "rembert", "xlm-roberta", "xmod"}
"""Families whose tokenizers split bytes, or choose pieces by their probability; those of the others are WordPiece."""

TEXTS = (
    "She has asthma; no history of type 2 diabetes mellitus, hypertension or hypothyroidism.",
    "fever",
    "Él tomó paracetamol — naïve façade e\u0301 ½ ™",
    "患者は糖尿病と高血圧です。",
    "no asthma , " * 4,
    "",
)
"""Texts of very different lengths, so that all but the longest are padded. Each fits into one window of every family."""


@pytest.fixture(scope="module", params=model_families.ALL)
def family(request):
    """A model of a family, and a tokenizer of its kind that was learned from a corpus."""
    kind = "roberta" if request.param in BYTE_PAIRS else "xlm-roberta" if request.param in UNIGRAMS else "bert"
    tokenizer = copy.deepcopy(architectures.tokenizer_of(kind))
    tokenizer.model_max_length = model_families.ALL[request.param][0]
    model = model_families.model_of(request.param, len(tokenizer), architectures.PREFIXED, initializer_range=0.2)
    architectures.level(model, tokenizer)
    assert max(len(tokenizer(text).input_ids) for text in TEXTS) <= tokenizer.model_max_length
    return model, tokenizer


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_results_equal_transformers(family, strategy):
    """Texts together and alone have the results of transformers for each text alone."""
    theirs, ours = architectures.pipelines(*family, strategy)
    expected = [theirs(text) for text in TEXTS]

    architectures.assert_same(ours(list(TEXTS)), expected)
    architectures.assert_same([ours(text) for text in TEXTS], expected)
