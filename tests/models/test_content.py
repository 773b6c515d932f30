"""Hashes of the files of a model: every byte of a loaded file counts, and no other file does."""

import json
import os

from openmed_nb.models.files import hash_model_files, read_digest, weight_files

PARTS = ("weights", "config", "tokenizer")


def differing(one, other):
    """Return the names of the parts that differ."""
    return [name for name in PARTS if getattr(one, name) != getattr(other, name)]


def flip_last_bit(file):
    """Change a file without its size and modification time, as some copies do."""
    times = file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


FILES = {
    "config": ("config.json", "config.4.0.0.json", "modeling_mine.py"),
    "tokenizer": ("tokenizer.json", "tokenizer.4.0.0.json", "tokenizer_config.json", "vocab.txt", "spiece.model"),
    "weights": ("adapter_config.json", "adapter_model.safetensors"),
    None: ("README.md", "figures.json", "training_args.bin", "optimizer.pt"),
}


def test_hash_depends_on_loaded_files_only(folder):
    for part, files in FILES.items():
        for file in files:
            before, path = hash_model_files(folder), folder / file
            path.write_text((path.read_text("utf-8") if path.is_file() else "") + " ", "utf-8")
            assert differing(hash_model_files(folder), before) == [*filter(None, [part])], file


def test_weight_files_are_those_that_transformers_loads(folder):
    weights = folder / "model.safetensors"
    before = hash_model_files(folder)
    flip_last_bit(weights)
    assert differing(hash_model_files(folder), before) == ["weights"]
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    assert weight_files(folder) == [weights]
    weights.rename(folder / "model-00001-of-00001.safetensors")
    assert [path.name for path in weight_files(folder)] == ["pytorch_model.bin"]
    # The load reports a missing shard.
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors", "b": "gone.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    names = [path.name for path in weight_files(folder)]
    assert names == ["model.safetensors.index.json", "model-00001-of-00001.safetensors"]
    before = hash_model_files(folder)
    flip_last_bit(folder / names[1])
    assert differing(hash_model_files(folder), before) == ["weights"]


def test_hash_reads_unchanged_files_once(folder):
    hash_model_files(folder)
    before = read_digest.cache_info().misses
    hash_model_files(folder)
    assert read_digest.cache_info().misses == before
    (folder / "config.json").touch()
    hash_model_files(folder)
    assert read_digest.cache_info().misses == before + 1
