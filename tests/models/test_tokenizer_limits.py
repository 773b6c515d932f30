"""What a model can take of its tokenizer: how many tokens at once, and characters that no vocabulary has."""

import json
import runpy
from pathlib import Path

import pytest
import torch

import openmed_nb as nb
from openmed_nb.errors import InvalidModelError

FAMILIES = runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "model_families.py"))


@pytest.mark.parametrize(
    "family", [*FAMILIES["FAMILIES"], *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES["MORE"])]
)
def test_longest_window_of_every_family(tiny, tmp_path, family):
    """A text that is as long as a model has positions runs whole, and one more is the next window's."""
    expected, _ = FAMILIES["ALL"][family]
    model = FAMILIES["model_of"](family, len(tiny.VOCABULARY), tiny.LABELS)
    pipe = nb.load_pipeline(str(tiny.save(tmp_path, model)), device="cpu", ignore_labels=[])
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

    @pytest.mark.parametrize(
        "model",
        [
            None,
            {"type": "WordLevel", "vocab": {"[PAD]": 0, "the": 1}, "unk_token": "<unk>"},
            {"type": "Unigram", "vocab": [["[PAD]", 0.0], ["the", -1.0]], "unk_id": None},
            {"type": "BPE", "vocab": {"[PAD]": 0, "t": 1}, "merges": [], "unk_token": "<unk>"},
        ],
    )
    def test_missing_unknown_token_is_reported_by_load(self, folder, tiny, model):
        """A WordPiece tokenizer without its unknown token, and other kinds, are refused, instead of failing in the first text."""
        content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "[UNK]"]
        del content["model"]["vocab"]["[UNK]"]
        names = ["unk_token"]
        if model:
            content |= {"model": model, "added_tokens": [], "post_processor": None}
            names += ["cls_token", "sep_token", "mask_token"]
        (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
        tiny.change_json(folder / "tokenizer_config.json", **dict.fromkeys(names))
        said = "" if model else ": WordPiece error: Missing"
        with pytest.raises(InvalidModelError, match=f"cannot encode characters outside its vocabulary{said}"):
            nb.load_model(str(folder), device="cpu")
