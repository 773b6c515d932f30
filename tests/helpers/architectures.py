"""Small models of many architectures, each with a real tokenizer of the kind that it has, trained on a few lines.

Everything is random but fixed, and all labels occur: that is what comparing two programs needs.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TokenClassificationPipeline,
)

from helpers import tiny_models as tiny
from openmed_nb.annotation.pipeline import AnnotationPipeline

CORPUS = (
    "No history of asthma; the patient has type 2 diabetes mellitus and takes 500 mg of metformin twice a day.",
    'Hypertension, hypothyroidism and non-small-cell lung cancer (stage IIIb) were seen in 2019, she said: "it\'s fine".',
    "Él tomó paracetamol — naïve façade, Übelkeit und Kopfschmerzen, élève à l'hôpital n° 3.",
    "患者は糖尿病と高血圧です。 患者有糖尿病和高血压。",
    "המטופל סובל מסוכרת . المريض يعاني من السكري",
    "Пациент принимает аспирин 🙂 👩‍⚕️ e\u0301 ﬁne ½ ™",
)
"""What the tokenizers are trained on; a text of anything else has unknown characters."""

PIECES = 400
"""How many tokens a vocabulary has at most."""

LENGTH = 128
"""How many tokens a model takes, special tokens included."""

PREFIXED = ("O", "B-DRUG", "I-DRUG", "B-GENE", "I-GENE")
PLAIN = ("O", "DRUG", "GENE", "DOSE")
ODD = ("O", "NON-HUMAN", "HUMAN", "B-", "I-", "I-A-B", "B-A-B", "A-B", "-")
"""Labels that transformers splits at a hyphen, though they are not made of a prefix and a kind."""

BERT = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ROBERTA = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
"""Special tokens, in the order of their numbers."""


def word_pieces(**settings: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer as BERT has one: words in lower case without accents, cut into pieces that say so."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    pieces = learned(tokenizer, trainers.BpeTrainer, BERT)  # That of WordPiece learns others every time.
    inner = [f"##{piece}" for piece in pieces[len(BERT) :]]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, *inner])}
    tokenizer.model = models.WordPiece(vocabulary, unk_token=BERT["unk"])
    return wrapped(tokenizer, BERT, "{cls} $A {sep}", **settings)


def byte_pairs(add_prefix_space: bool, names: dict[str, str] = ROBERTA, **settings: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer as RoBERTa, ModernBERT and GPT-2 have one: pieces of UTF-8, a space being part of its word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    pieces = learned(tokenizer, trainers.BpeTrainer, names, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    if names is ROBERTA:
        ends = [(names[name], pieces.index(names[name])) for name in ("sep", "cls")]
        tokenizer.post_processor = processors.RobertaProcessing(*ends, add_prefix_space=add_prefix_space)
    return wrapped(tokenizer, names, "{cls} $A {sep}" if names is BERT else "", **settings)


def sentence_pieces(**settings: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer as Llama 2 and Mistral have one: BPE over the whole text, spaces as ``▁``, bytes for the rest."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces = learned(trained, trainers.BpeTrainer, ROBERTA)
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    single_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, *single_bytes])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=ROBERTA["unk"], byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrapped(tokenizer, ROBERTA, "{cls} $A", **settings)


def metaspace_pairs(**settings: Any) -> PreTrainedTokenizerFast:
    """Return a BPE tokenizer with a pre-tokenizer that splits at spaces alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    learned(tokenizer, trainers.BpeTrainer, ROBERTA, unk_token=ROBERTA["unk"])
    return wrapped(tokenizer, ROBERTA, "{cls} $A {sep}", **settings)


def unigrams(frame: str = "{cls} $A {sep}", **settings: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer as XLM-R, DeBERTa-v2 and XLNet have one: likely pieces, a space being written as ``▁``."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    text = "".join(f" {line}" for line in CORPUS)
    pieces = learned(tokenizer, trainers.UnigramTrainer, ROBERTA, unk_token=ROBERTA["unk"])
    counts = [text.count(piece.replace("▁", " ")) + 1 for piece in pieces]
    chances = [(piece, math.log(count / len(text))) for piece, count in zip(pieces, counts, strict=True)]
    tokenizer.model = models.Unigram(chances, unk_id=pieces.index(ROBERTA["unk"]), byte_fallback=False)
    return wrapped(tokenizer, ROBERTA, frame, **settings)


def learned(tokenizer: Tokenizer, trainer: Any, names: dict[str, str], **settings: Any) -> list[str]:
    """Train a tokenizer, and return its pieces in an order that is the same every time; a trainer's own may not be."""
    special = list(names.values())
    tokenizer.train_from_iterator(
        CORPUS, trainer(vocab_size=PIECES, special_tokens=special, show_progress=False, **settings)
    )
    return [*special, *sorted(tokenizer.get_vocab().keys() - {*special})]


def wrapped(
    tokenizer: Tokenizer,
    names: dict[str, str],
    frame: str,
    inputs: tuple[str, ...] = ("input_ids", "token_type_ids", "attention_mask"),
    **settings: Any,
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with special tokens around a text, as transformers wraps it."""
    if frame:
        ends = [(token, tokenizer.token_to_id(token)) for token in names.values()]
        tokenizer.post_processor = processors.TemplateProcessing(single=frame.format(**names), special_tokens=ends)
    special = {f"{name}_token": token for name, token in names.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=LENGTH, model_input_names=list(inputs), **special, **settings
    )


WITHOUT_TYPES = ("input_ids", "attention_mask")

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "modernbert": {
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
    "xlm-roberta": {},
    "deberta-v2": {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
}
"""By model type, the settings of a configuration that are not those of BERT."""

RARE: dict[str, dict[str, Any]] = {
    "fnet": {},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 37, "max_position_embeddings": None},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "eos_token_id": 0, "bos_token_id": 0},
}
"""A model without an attention mask, one that pads on the left, and one whose tokenizer puts nothing around a text."""

READING_PADDING: dict[str, dict[str, Any]] = {
    "convbert": {"embedding_size": 16, "conv_kernel_size": 9, "head_ratio": 2},
    "yoso": {},
}
"""Models that take an attention mask and still read what fills a row up."""

TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bert": word_pieces,
    "roberta": partial(byte_pairs, True, inputs=WITHOUT_TYPES),
    "modernbert": partial(byte_pairs, False, BERT, inputs=WITHOUT_TYPES),
    "xlm-roberta": partial(unigrams, inputs=WITHOUT_TYPES),
    "deberta-v2": unigrams,
    "fnet": partial(word_pieces, inputs=("input_ids", "token_type_ids")),
    "xlnet": partial(unigrams, "$A:0 {sep}:0 {cls}:2", padding_side="left"),
    "gpt2": partial(byte_pairs, False, {"eos": "<|endoftext|>"}, inputs=WITHOUT_TYPES),
    **dict.fromkeys(READING_PADDING, word_pieces),
}


BOUNDARY_KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "WordPiece": word_pieces,
    "byte-level BPE": partial(byte_pairs, False),
    "byte-level BPE, add_prefix_space": partial(byte_pairs, True),
    "byte-level BPE, untrimmed": partial(byte_pairs, False, BERT),
    "Unigram": unigrams,
    "SentencePiece BPE": sentence_pieces,
    "Metaspace BPE": metaspace_pairs,
}
"""Tokenizers by how they show where a word starts."""


@cache
def boundary_pipes(kind: str, strategy: str, with_transformers: bool = False) -> AnnotationPipeline:
    """Return a pipeline over a random BERT with a kind of tokenizer.

    With ``with_transformers``, return the pipeline of transformers and an equivalent AnnotationPipeline.
    """
    tokenizer = boundary_tokenizer(kind)
    model = boundary_model(kind)
    if with_transformers:
        return pipelines(model, tokenizer, strategy)
    return AnnotationPipeline(model=model, tokenizer=tokenizer, device=-1, aggregation_strategy=strategy)


@cache
def boundary_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of a kind."""
    return BOUNDARY_KINDS[kind]()


@cache
def boundary_model(kind: str, labels: tuple[str, ...] = PREFIXED) -> PreTrainedModel:
    """Return a BERT whose predictions are arbitrary but fixed, for the tokenizer of a kind."""
    return built("bert", boundary_tokenizer(kind), labels)


def labeler(tokenizer: PreTrainedTokenizerBase, labels: dict[str, str]) -> PreTrainedModel:
    """Return a BERT that gives each token of a vocabulary one label, ``O`` where none is given.

    Args:
        tokenizer: The tokenizer.
        labels: The label of tokens, by their names in the vocabulary.
    """
    names = ("O", *sorted({*labels.values()}))
    model = built("bert", tokenizer, names, num_hidden_layers=1)
    with torch.no_grad():
        words = model.bert.embeddings.word_embeddings.weight
        words[:, : len(names)] = 0
        for token, label in labels.items():
            words[tokenizer.convert_tokens_to_ids(token), names.index(label)] = 50
        tiny.keep_word_embeddings(model)
        model.classifier.bias.zero_()
        model.classifier.bias[0] = 20
        for number in range(1, len(names)):
            model.classifier.weight[number, number] = 10
    return model


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of an architecture."""
    return TOKENIZERS[name]()


@cache
def model_of(name: str, labels: tuple[str, ...] = PREFIXED) -> PreTrainedModel:
    """Return a model whose predictions are arbitrary but fixed, and change with a token's context."""
    return built(name, tokenizer_of(name), labels, **{**ARCHITECTURES, **RARE, **READING_PADDING}[name])


def built(name: str, tokenizer: PreTrainedTokenizerBase, labels: tuple[str, ...], **settings: Any) -> PreTrainedModel:
    """Return a small model of a type of transformers, with random but fixed weights, for a tokenizer."""
    torch.manual_seed(0)
    padding = tokenizer.pad_token_id
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 37,
        "max_position_embeddings": LENGTH + (padding or 0) + 1,  # RoBERTa counts positions from there.
        "type_vocab_size": 4,
        "pad_token_id": padding,
        "initializer_range": 0.2,  # With 1, attention looks at single tokens, and magnifies rounding a hundredfold.
        **settings,
    }
    given = {setting: value for setting, value in settings.items() if value is not None}
    model = AutoModelForTokenClassification.from_config(
        AutoConfig.for_model(name, **given, **tiny.labeled(labels))
    ).eval()
    level(model, tokenizer)
    return model


@torch.no_grad()
def level(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Change a model's last layer so that all labels are as likely as the others, and no score is close to 1."""
    layer = next(layer for layer in model.modules() if getattr(layer, "out_features", None) == model.num_labels)
    texts = [tokenizer(text, truncation=True, return_tensors="pt") for text in CORPUS]
    logits = torch.cat([model(**inputs).logits[0] for inputs in texts])
    layer.weight *= 1.5 / logits.std(0)[:, None]
    layer.bias.copy_((layer.bias - logits.mean(0)) * 1.5 / logits.std(0))


@cache
def both(
    name: str, strategy: str = "simple", labels: tuple[str, ...] = PREFIXED
) -> tuple[TokenClassificationPipeline, AnnotationPipeline]:
    """Return the pipeline of transformers and an AnnotationPipeline over the same model and tokenizer."""
    return pipelines(model_of(name, labels), tokenizer_of(name), strategy)


def pipelines(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, strategy: str = "simple", **options: Any
) -> tuple[TokenClassificationPipeline, AnnotationPipeline]:
    """Return the pipeline of transformers and an AnnotationPipeline with the word boundaries of transformers."""
    shared = {"model": model, "tokenizer": tokenizer, "device": -1, "aggregation_strategy": strategy, **options}
    return TokenClassificationPipeline(**shared), AnnotationPipeline(**shared, transformers_boundaries=True)


def changed(name: str, **settings: Any) -> PreTrainedTokenizerFast:
    """Return the tokenizer of an architecture with other settings."""
    tokenizer = copy.deepcopy(tokenizer_of(name))
    for setting, value in settings.items():
        setattr(tokenizer, setting, value)
    return tokenizer


def assert_same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Check that answers have the same keys and values in the same order; scores are equal but for rounding."""

    def close(key: str, value: Any) -> Any:
        return pytest.approx(float(value), abs=1e-5) if key == "score" else value

    assert [[list(entity.items()) for entity in answer] for answer in found] == [
        [[(key, close(key, value)) for key, value in entity.items()] for entity in answer] for answer in expected
    ]
