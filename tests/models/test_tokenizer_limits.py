"""What a model can take of its tokenizer: how many tokens at once, and characters that no vocabulary has."""

from __future__ import annotations

import json

import pytest
import torch

import openmed_nb as nb
from openmed_nb.errors import ModelUnusable

ROWS = 40
"""How many rows a table of positions has."""

BERT = {
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

FAMILIES = {
    "bert": (ROWS, {}),
    "roberta": (PADDED, {}),
    "ibert": (PADDED, {}),
    "lilt": (PADDED, {"hidden_size": 36, "num_attention_heads": 3, "max_2d_position_embeddings": 64}),
    "mpt": (ROWS, {"d_model": 32, "n_heads": 2, "n_layers": 1, "max_seq_len": ROWS, "max_position_embeddings": None}),
    "nystromformer": (ROWS, {"num_landmarks": ROWS, "segment_means_seq_len": ROWS}),
    "roformer": (ROWS, {}),
}
"""By family, how many tokens it takes, and its settings beside those of BERT: a family for each way to count positions."""

MORE = {
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


def save_family(tiny, folder, family):
    """Save a small model of a family, with a tokenizer that knows no limit."""
    from transformers import AutoConfig, AutoModelForTokenClassification

    torch.manual_seed(0)
    settings = {"vocab_size": len(tiny.VOCABULARY), **BERT, **{**FAMILIES, **MORE}[family][1]}
    given = {name: value for name, value in settings.items() if value is not None}
    config = AutoConfig.for_model(family, **given, **tiny.labelled(tiny.LABELS))
    return tiny.save(folder, AutoModelForTokenClassification.from_config(config))


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_longest_text_of_every_family(tiny, tmp_path, family):
    """A text that is as long as a model has positions runs whole, and one more is the next window's."""
    expected, _ = {**FAMILIES, **MORE}[family]
    pipe = nb.load_pipeline(str(save_family(tiny, tmp_path, family)), device="cpu", ignore_labels=[])
    assert pipe.tokenizer.model_max_length == expected
    own = expected - pipe.tokenizer.num_special_tokens_to_add()
    ids = torch.full((1, expected), tiny.VOCABULARY["patient"])
    with torch.no_grad():
        assert pipe.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.isfinite().all()
    for words in (own, own + 1, 3 * own):
        text = " ".join(["patient"] * words)
        found = pipe(text)
        assert (found[0]["start"], found[-1]["end"]) == (0, len(text))


class TestUnknownCharacters:
    """Tokenizers that have no token for what they do not know."""

    def without_unknown(self, folder, tiny):
        """Take the unknown token out of a tokenizer."""
        content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "[UNK]"]
        del content["model"]["vocab"]["[UNK]"]
        (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
        tiny.change_json(folder / "tokenizer_config.json", unk_token=None)
        return content

    def test_are_told_when_the_model_is_loaded(self, folder, tiny):
        """A WordPiece tokenizer without its unknown token is refused, instead of failing in the first text."""
        self.without_unknown(folder, tiny)
        with pytest.raises(ModelUnusable, match=r"cannot read what is not in its vocabulary: WordPiece error: Missing"):
            nb.load_model(str(folder), device="cpu")

    @pytest.mark.parametrize(
        "model",
        [
            {"type": "WordLevel", "vocab": {"[PAD]": 0, "the": 1}, "unk_token": "<unk>"},
            {"type": "Unigram", "vocab": [["[PAD]", 0.0], ["the", -1.0]], "unk_id": None},
            {"type": "BPE", "vocab": {"[PAD]": 0, "t": 1}, "merges": [], "unk_token": "<unk>"},
        ],
    )
    def test_of_other_kinds(self, folder, tiny, model):
        """The other kinds of tokenizers are looked at in the same way."""
        content = self.without_unknown(folder, tiny)
        content |= {"model": model, "added_tokens": [], "post_processor": None}
        (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
        names = dict.fromkeys(("cls_token", "sep_token", "mask_token"))
        tiny.change_json(folder / "tokenizer_config.json", **names)
        with pytest.raises(ModelUnusable, match="cannot read what is not in its vocabulary"):
            nb.load_model(str(folder), device="cpu")
