"""Damaged, irregular and excessive files of a model are rejected with one line that names the model and a remedy."""

import base64
import json
import os
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.tiny_models import VOCABULARY, change_json
from openmed_nb.errors import InvalidModelError
from openmed_nb.models.files import panics_as_errors

INDEX = "model.safetensors.index.json"
TEMPLATE = "additional_chat_templates/other.jinja"
WEIGHTS = "model.safetensors"


def without(*names):
    """Return a damage: files are missing."""

    def damage(folder):
        for name in names:
            (folder / name).unlink()

    return damage


def content(name, text):
    """Return a damage: a file has another content."""
    return lambda folder: (folder / name).write_text(text)


def settings(name="config.json", **changes):
    """Return a damage: a JSON file has other settings."""
    return lambda folder: change_json(folder / name, **changes)


def index(*shards):
    """Return a damage: an index of other files replaces the weights."""

    def damage(folder):
        (folder / WEIGHTS).unlink()
        weight_map = {str(number): name for number, name in enumerate(shards)}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return damage


def large(name):
    """Return a damage: a file of two GiB that needs no space on the disk."""

    def damage(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        with (folder / name).open("wb") as file:
            file.truncate(2 << 30)

    return damage


def irregular(name, make):
    """Return a damage: a file is a pipe, a device or a loop of links."""

    def damage(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


def change_weights(change):
    """Return a damage: the weights have other tensors."""

    def damage(folder):
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS, {"format": "pt"})

    return damage


def truncate_weights(folder):
    os.truncate(folder / WEIGHTS, 5000)


def save_distributed(folder):
    (folder / "shard-00001-model-00001-of-00001.safetensors").write_bytes((folder / WEIGHTS).read_bytes())


def panic(table):
    """Return a damage: a table of characters for which the tokenizers library raises a BaseException."""
    charsmap = base64.b64encode(table).decode()
    return settings("tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap})


def replace_tokenizer(model):
    """Return a damage: a tokenizer without an unknown token."""

    def damage(folder):
        change_json(folder / "tokenizer.json", model=model, added_tokens=[], post_processor=None)
        names = ("unk_token", "cls_token", "sep_token", "mask_token")
        change_json(folder / "tokenizer_config.json", **dict.fromkeys(names))

    return damage


def add_token(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocabulary = {**tokenizer["model"]["vocab"], "extraordinary": len(VOCABULARY)}
    change_json(folder / "tokenizer.json", model={**tokenizer["model"], "vocab": vocabulary})


LABELS = "does not have one string for each"
QUERY = "bert.encoder.layer.0.attention.self.query.weight"
DAMAGE = {
    "no config": (without("config.json"), "config.json is missing"),
    "config no JSON": (content("config.json", "{"), "config.json of .* cannot be read"),
    "config too deep": (content("config.json", "[" * 10**6), "config.json of .* cannot be read"),
    "config a list": (content("config.json", "[1]"), "not a JSON object"),
    "config empty": (content("config.json", "{}"), "config.json of .* cannot be loaded"),
    "another task": (settings(architectures=["BertForMaskedLM"]), "a BertForMaskedLM, which is not a token-class"),
    "family unknown": (settings(model_type="nonsense"), "config.json of .* cannot be loaded: .*nonsense"),
    "family of other weights": (settings(model_type="gpt2"), "lack 16 tensors"),
    "size a word": (settings(hidden_size="wide"), "hidden_size"),
    "more layers": (settings(num_hidden_layers=3), "lack 32 tensors"),
    "fewer labels": (settings(id2label={"0": "O"}, label2id={"O": 0}), "lack 2 tensors .* such as classifier.bias"),
    "labels with a gap": (settings(id2label={"0": "O", "1": "B-DISEASE", "5": "I-DISEASE"}), f"{LABELS}|lack"),
    "labels of nothing": (settings(id2label={"0": "O", "1": None, "2": None}), f"{LABELS}|cannot be loaded"),
    "labels that are not text": (settings(id2label={"0": "O", "1": "B-\ud800", "2": "I-X"}), LABELS),
    "other number of labels": (settings(id2label={"0": "O", "1": "B-DRUG"}, num_labels=3), f"{LABELS} of its 3"),
    "no weights": (without(WEIGHTS), "does not have weights in safetensors"),
    "weights truncated": (truncate_weights, "weights file of .* cannot be loaded"),
    "weights without head": (
        change_weights(lambda weights: weights.pop("classifier.bias")),
        "lack 1 tensor .* such as classifier.bias",
    ),
    "weights of more layers": (
        change_weights(lambda weights: weights.update({QUERY.replace("0", "1"): torch.ones(1)})),
        r"have 1 tensor that the model in its config.json does not have.*layer\.1\.",
    ),
    "index a list": (lambda folder: [without(WEIGHTS)(folder), content(INDEX, "[]")(folder)], "cannot be loaded"),
    "index of nothing": (index("gone.safetensors"), "gone.safetensors"),
    "distributed checkpoint": (save_distributed, "are a distributed checkpoint"),
    "tokenizer no JSON": (content("tokenizer.json", "{"), "tokenizer of .* cannot be loaded"),
    "tokenizer gone": (without("tokenizer.json"), "tokenizer of .* cannot be loaded"),
    "no tokenizer at all": (without("tokenizer.json", "tokenizer_config.json"), "does not have a tokenizer"),
    "token without embedding": (add_token, r"has token .* but the model has embeddings for"),
    "panic when built": (panic(b""), "tokenizers library failed"),
    "panic when it encodes": (panic(struct.pack("<I", 0) + b"x\0"), "tokenizers library failed"),
    "WordLevel without unknown token": (
        replace_tokenizer({"type": "WordLevel", "vocab": {"[PAD]": 0, "the": 1}, "unk_token": "<unk>"}),
        "cannot encode characters outside its vocabulary",
    ),
    "Unigram without unknown token": (
        replace_tokenizer({"type": "Unigram", "vocab": [["[PAD]", 0.0], ["the", -1.0]], "unk_id": None}),
        "cannot encode characters outside its vocabulary",
    ),
    "absurd layers": (settings(num_hidden_layers=10**9), r"specifies num_hidden_layers = 1,000,000,000"),
    "absurd labels": (settings(num_labels=10**9, id2label=None, label2id=None), r"specifies num_labels = 1,0"),
    # Some families loop over these numbers while they read their settings.
    "absurd blocks": (settings(model_type="funnel", architectures=None, block_sizes=[10**9]), "specifies block_sizes"),
    "absurd types": (
        settings(model_type="gpt_neo", architectures=None, attention_types=[[["global"], 10**9]]),
        "specifies attention_types = 1,0",
    ),
    "absurd vocabulary": (settings(vocab_size=10**10), r"describes a model of [\d,]+ elements"),
    # The weights have no tensors for another family.
    "absurd size of another family": (
        settings(model_type="roberta", architectures=None, intermediate_size=10**10),
        r"describes a model of [\d,]+ elements",
    ),
    **{f"{name} too large": (large(name), "is larger than") for name in ("config.json", INDEX, "vocab.txt", TEMPLATE)},
    "loop of links": (irregular("config.json", lambda path: path.symlink_to(path.name)), "'config.json'"),
}
if os.name == "posix":
    DAMAGE |= {
        "pipe": (irregular("vocab.txt", os.mkfifo), "'vocab.txt'"),
        "device": (irregular("spiece.model", lambda path: path.symlink_to("/dev/zero")), "'spiece.model'"),
        "pipe of a template": (irregular(TEMPLATE, os.mkfifo), "'other.jinja'"),
    }


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_load_rejects_damaged_folder(folder, damage, message, load_folder):
    damage(folder)
    with pytest.raises(InvalidModelError, match=message) as caught:
        load_folder(folder)
    assert repr(str(folder)) in caught.value.message
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert caught.value.remedy


def test_load_rejects_tokenizer_without_offsets(folder, load_folder, monkeypatch):
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.is_fast", False)
    with pytest.raises(InvalidModelError, match="does not return offset mappings"):
        load_folder(folder)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_panics_as_errors_passes_other_errors(error):
    with pytest.raises(error), panics_as_errors():
        raise error
