"""Tiny real models for tests in directories of a few kilobytes.

The weights of the keyword model are set explicitly, so that its predictions are known. The weights of the other models are
random, which is sufficient to compare two programs.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForTokenClassification,
    OpenAIPrivacyFilterConfig,
    OpenAIPrivacyFilterForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForTokenClassification,
)
from transformers.utils import logging

logging.disable_progress_bar()

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PLAIN = ("the", "patient", "has", "and", "no", "history", "of", "a", "was", "seen", ".", ",", "type", "2")
FIRST = ("asthma", "diabetes", "hyper")
"""Words and first word pieces that the keyword model labels as the start of a disease."""
INNER = ("mellitus", "##tension")
"""Words and word pieces that the keyword model labels as the inside of a disease."""

VOCABULARY = {token: index for index, token in enumerate((*SPECIAL, *PLAIN, *FIRST, *INNER))}
LABELS = ("O", "B-DISEASE", "I-DISEASE")
PII_LABELS = ("O", "B-FIRSTNAME", "I-FIRSTNAME", "B-DATE", "I-DATE")
POSITIONS = 64
SMALL: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 37,
    "max_position_embeddings": POSITIONS,
}


def save(folder: Path, model: PreTrainedModel, **tokenizer_settings: Any) -> Path:
    """Save a model and a tokenizer into a directory, and return the directory."""
    model.save_pretrained(folder)
    tokenizer(**tokenizer_settings).save_pretrained(folder)
    return folder


def tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    """Return a fast WordPiece tokenizer for the vocabulary."""
    words = Tokenizer(WordPiece(VOCABULARY, unk_token=SPECIAL[1]))
    words.pre_tokenizer = BertPreTokenizer()
    words.decoder = WordPieceDecoder()
    ends = [(token, VOCABULARY[token]) for token in ("[CLS]", "[SEP]")]
    words.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=words, **names, **settings)


def sentences(count: int, longest: int = 50, seed: int = 0) -> list[str]:
    """Return fixed texts with a maximum number of words."""
    generator = random.Random(seed)
    words = [word for word in VOCABULARY if word not in SPECIAL and not word.startswith("##")]
    lengths = (generator.randint(1, longest) for _ in range(count))
    return [" ".join(generator.choices([*words, "hypertension"], k=length)) for length in lengths]


def labeled(labels: tuple[str, ...]) -> dict[str, Any]:
    """Return ``id2label`` and ``label2id`` for a configuration."""
    return {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
    }


def random_bert(labels: tuple[str, ...] = LABELS, size: dict[str, int] | None = None) -> BertForTokenClassification:
    """Return a BERT whose predictions are arbitrary but fixed, and differ from token to token."""
    torch.manual_seed(0)
    config = BertConfig(**{**SMALL, **(size or {})}, **labeled(labels), initializer_range=1.0)
    return BertForTokenClassification(config).eval()


def random_roberta() -> RobertaForTokenClassification:
    """Return a RoBERTa, which counts positions from ``pad_token_id + 1``."""
    torch.manual_seed(0)
    config = RobertaConfig(**SMALL, **labeled(LABELS), pad_token_id=0, initializer_range=1.0)
    return RobertaForTokenClassification(config).eval()


def random_privacy_filter() -> OpenAIPrivacyFilterForTokenClassification:
    """Return a model with the architecture and labels of ``openai/privacy-filter``."""
    torch.manual_seed(0)
    config = OpenAIPrivacyFilterConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        pad_token_id=0,
        eos_token_id=3,
        initializer_range=1.0,
    )
    return OpenAIPrivacyFilterForTokenClassification(config).eval()


def keep_word_embeddings(model: Any) -> None:
    """Let only the word embeddings of a BERT with one layer reach its classifier, whose weight becomes zero."""
    model.bert.embeddings.position_embeddings.weight.zero_()
    model.bert.embeddings.token_type_embeddings.weight.zero_()
    layer = model.bert.encoder.layer[0]
    for dense in (layer.attention.output.dense, layer.output.dense):
        dense.weight.zero_()
        dense.bias.zero_()
    model.classifier.weight.zero_()


def keyword_bert() -> BertForTokenClassification:
    """Return a BERT that predicts only the words of ``FIRST`` and ``INNER``.

    Two values of each embedding encode these words. Attention and the feed-forward layer add zero.
    """
    model = random_bert()
    with torch.no_grad():
        words = model.bert.embeddings.word_embeddings.weight
        words[:, :2] = 0
        words[[VOCABULARY[token] for token in FIRST], 0] = 50
        words[[VOCABULARY[token] for token in INNER], 1] = 50
        keep_word_embeddings(model)
        model.classifier.weight[1, 0] = model.classifier.weight[2, 1] = 10
        model.classifier.bias.copy_(torch.tensor([20.0, 0.0, 0.0]))
    return model


def change_json(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file; ``None`` removes a key."""
    content = {**json.loads(file.read_text("utf-8")), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}), "utf-8")
