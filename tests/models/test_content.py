"""Fingerprints of the files that a model is loaded from: any byte of them counts, and nothing else."""

import json
import os
import shutil

import torch
from safetensors.torch import load_file, save_file

from openmed_nb.models.files import hash_model_files, read_digest, weight_files

PARTS = ("weights", "config", "tokenizer")


def differing(one, other):
    """Return the names of the parts that differ."""
    return [name for name in PARTS if getattr(one, name) != getattr(other, name)]


def test_hash_changes_with_one_weight(folder):
    """One number in one weight, changed by the smallest step, changes the weights and nothing else."""
    before = hash_model_files(folder)
    weights = load_file(folder / "model.safetensors")
    bias = weights["classifier.bias"]
    bias[0] = torch.nextafter(bias[0], torch.tensor(1e9))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})

    assert differing(hash_model_files(folder), before) == ["weights"]


FILES = {
    "config": ("config.json", "config.4.0.0.json", "modeling_mine.py"),
    "tokenizer": ("tokenizer.json", "tokenizer.4.0.0.json", "tokenizer_config.json", "vocab.txt", "spiece.model"),
    "weights": ("adapter_config.json", "adapter_model.safetensors"),
    None: ("README.md", "figures.json", "training_args.bin", "optimizer.pt"),
}


def test_hash_depends_on_loaded_files_only(folder):
    """Settings, code and the files of a tokenizer count; what is not loaded does not."""
    for part, files in FILES.items():
        for file in files:
            before, path = hash_model_files(folder), folder / file
            path.write_text((path.read_text("utf-8") if path.is_file() else "") + " ", "utf-8")
            assert differing(hash_model_files(folder), before) == [*filter(None, [part])], file


def test_weight_files_of_an_index(folder):
    """The weights are an index and its shards; other files of weights are not loaded."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    # A part that is not there is left to the load.
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors", "b": "gone.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "pytorch_model.bin").write_bytes(b"pickle")

    names = [path.name for path in weight_files(folder)]
    assert names == ["model.safetensors.index.json", "model-00001-of-00001.safetensors"]
    before = hash_model_files(folder)
    with (folder / names[1]).open("ab") as file:
        file.write(b"\0")
    assert differing(hash_model_files(folder), before) == ["weights"]


def test_weight_files_prefer_safetensors(folder):
    """Where there is nothing else, a pickle file is the weights; an empty folder has none."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert [path.name for path in weight_files(folder)] == ["pytorch_model.bin"]
    shutil.rmtree(folder)
    folder.mkdir()
    assert weight_files(folder) == []


def test_hash_reads_unchanged_files_once(folder):
    """A file is read again only where its size or its time of change differs."""
    hash_model_files(folder)
    before = read_digest.cache_info().misses
    hash_model_files(folder)
    assert read_digest.cache_info().misses == before
    (folder / "config.json").touch()
    hash_model_files(folder)
    assert read_digest.cache_info().misses == before + 1


def test_hash_detects_restored_modification_time(folder):
    """A file of the same length with the former time of change, as some copies have it, is read again."""
    before, weights = hash_model_files(folder), folder / "model.safetensors"
    times = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))

    assert differing(hash_model_files(folder), before) == ["weights"]
