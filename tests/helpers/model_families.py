"""Small random models of many families of transformers, each with a table of positions of its own."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForTokenClassification, PreTrainedModel

from helpers.tiny_models import labeled

ROWS = 62
"""How many rows a table of positions has."""

BERT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 37,
    "max_position_embeddings": ROWS,
    "type_vocab_size": 4,
    "pad_token_id": 1,
}

PADDED = ROWS - 2
"""How many positions a table has that counts from behind the row for padding, which is the second."""

FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "bert": (ROWS, {}),
    "roberta": (PADDED, {}),
    "ibert": (PADDED, {}),
    "lilt": (PADDED, {"hidden_size": 36, "num_attention_heads": 3, "max_2d_position_embeddings": 64}),
    "mpt": (ROWS, {"d_model": 32, "n_heads": 2, "n_layers": 1, "max_seq_len": ROWS, "max_position_embeddings": None}),
    "nystromformer": (ROWS, {"num_landmarks": ROWS, "segment_means_seq_len": ROWS}),
    "roformer": (ROWS, {}),
}
"""By family, how many tokens it takes, and its settings beside those of BERT: a family for each way to count positions."""

MORE: dict[str, tuple[int, dict[str, Any]]] = {
    "albert": (ROWS, {"embedding_size": 16}),
    "big_bird": (ROWS, {"attention_type": "original_full"}),
    "biogpt": (ROWS, {}),
    "camembert": (PADDED, {}),
    "convbert": (ROWS, {"embedding_size": 32, "head_ratio": 1}),
    "data2vec-text": (PADDED, {}),
    "deberta": (ROWS, {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "deberta-v2": (ROWS, {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}),
    "distilbert": (ROWS, {"dim": 32, "hidden_dim": 37, "n_heads": 2, "n_layers": 1}),
    "electra": (ROWS, {"embedding_size": 16}),
    "ernie": (ROWS, {}),
    "esm": (PADDED, {"position_embedding_type": "absolute", "mask_token_id": 4}),
    "flaubert": (ROWS, {"emb_dim": 32, "n_layers": 1, "n_heads": 2}),
    "fnet": (ROWS, {}),
    "gpt2": (ROWS, {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": ROWS}),
    "gpt_neo": (ROWS, {"num_layers": 1, "num_heads": 2, "attention_types": [[["local"], 1]], "window_size": 8}),
    "layoutlm": (ROWS, {"max_2d_position_embeddings": 64}),
    "longformer": (PADDED, {"attention_window": [8]}),
    "luke": (PADDED, {"entity_vocab_size": 8, "entity_emb_size": 16}),
    "markuplm": (
        PADDED,
        {
            "max_depth": 5,
            "xpath_unit_hidden_size": 4,
            "tag_pad_id": 6,
            "subs_pad_id": 5,
            "max_xpath_tag_unit_embeddings": 10,
            "max_xpath_subs_unit_embeddings": 10,
        },
    ),
    "megatron-bert": (ROWS, {}),
    "mobilebert": (ROWS, {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32}),
    "modernbert": (ROWS, {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}),
    "mpnet": (PADDED, {}),
    "mra": (64, {"max_position_embeddings": 64}),
    "rembert": (ROWS, {"input_embedding_size": 16, "output_embedding_size": 16}),
    "roberta-prelayernorm": (PADDED, {}),
    "roc_bert": (ROWS, {"pronunciation_vocab_size": 64, "shape_vocab_size": 64}),
    "squeezebert": (ROWS, {"embedding_size": 32, "intermediate_size": 40}),
    "xlm": (ROWS, {"emb_dim": 32, "n_layers": 1, "n_heads": 2}),
    "xlm-roberta": (PADDED, {}),
    "xlm-roberta-xl": (PADDED, {}),
    "xmod": (PADDED, {"languages": ["en_XX"], "default_language": "en_XX"}),
    "yoso": (ROWS, {}),
}
"""The other families with a limit of their own."""

ALL = {**FAMILIES, **MORE}


def model_of(family: str, vocabulary: int, labels: tuple[str, ...], **settings: Any) -> PreTrainedModel:
    """Return a model whose predictions are arbitrary but fixed.

    Args:
        family: The family, by transformers' name of it.
        vocabulary: How many tokens there are.
        labels: The labels.
        settings: Settings beside those of the family.
    """
    torch.manual_seed(0)
    wanted = {"vocab_size": vocabulary, **BERT, **ALL[family][1], **settings}
    given = {name: value for name, value in wanted.items() if value is not None}
    return AutoModelForTokenClassification.from_config(AutoConfig.for_model(family, **given, **labeled(labels))).eval()
