"""Irregular, excessive and damaged files of a model are rejected with one sentence."""

import base64
import json
import os
import shutil
import socket
import struct
import tempfile
from pathlib import Path

import pytest

import openmed_nb as nb
from openmed_nb.errors import InvalidModelError
from openmed_nb.models.files import panics_as_errors

GIB = 1 << 30
INDEX = "model.safetensors.index.json"
TEMPLATE = "additional_chat_templates/other.jinja"


def make_socket(path):
    """Make a socket under a short name, because the name of a socket is limited, and move it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short, socket.socket(socket.AF_UNIX) as one:
        one.bind(f"{short}/s")
        shutil.move(f"{short}/s", path)


KINDS = {"folder": Path.mkdir, "loop": lambda path: path.symlink_to(path.name)}
if os.name == "posix":
    KINDS |= {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "socket": make_socket}

LARGE_FILES = ("config.json", INDEX, "tokenizer.json", "tokenizer_config.json", "vocab.txt", "merges.txt", TEMPLATE)


def get_error(folder):
    """Return the error of a load, which is one sentence and a remedy."""
    with pytest.raises(InvalidModelError) as caught:
        nb.load_model(str(folder), device="cpu")
    error = caught.value
    assert "\n" not in str(error)
    assert error.remedy
    assert len(str(error)) < 500
    return error


def write_large(path, start=b""):
    """Write a file of two GiB that takes no room on the disk."""
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(start)
        file.truncate(2 * GIB)


def write_index(folder, *files):
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"t{number}": file for number, file in enumerate(files)}}))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "vocab.txt", "spiece.model", INDEX, TEMPLATE])
def test_load_model_rejects_irregular_files(folder, name, kind):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    assert repr(path.name) in get_error(folder).message


@pytest.mark.timeout(30)
def test_load_model_rejects_irregular_shards(folder):
    write_index(folder, "parts/model-1.safetensors")
    (folder / "parts" / "model-1.safetensors").mkdir(parents=True)
    assert "'model-1.safetensors'" in get_error(folder).message


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", LARGE_FILES)
def test_load_model_rejects_large_files(folder, name):
    write_large(folder / name)
    assert "is larger than" in get_error(folder).message


@pytest.mark.timeout(60)
def test_load_model_rejects_excessive_contents(folder, tiny):
    config = folder / "config.json"
    before = config.read_text("utf-8")
    config.write_text("[" * 10**6)
    assert "config.json" in get_error(folder).message
    config.write_text(before, "utf-8")
    tiny.change_json(config, id2label={str(number): f"L{number}" for number in range(20_000)})
    assert "20,000 labels" in get_error(folder).message
    config.write_text(before, "utf-8")
    write_large(folder / "model.safetensors", struct.pack("<Q", GIB))
    assert "header" in get_error(folder).message
    write_index(folder, *(f"model-{number}.safetensors" for number in range(2000)))
    assert "2,000 files" in get_error(folder).message


@pytest.mark.parametrize("table", [b"", struct.pack("<I", 0) + b"x\0"], ids=["when built", "when it encodes"])
def test_load_model_rejects_tokenizer_that_panics(folder, tiny, table):
    """The tokenizers library raises a BaseException for a damaged table of characters."""
    normalizer = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    tiny.change_json(folder / "tokenizer.json", normalizer=normalizer)
    assert "tokenizers library failed" in get_error(folder).message


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_panics_as_errors_lets_others_pass(error):
    """An interrupt, an exit and a lack of memory stay what they are."""
    with pytest.raises(error), panics_as_errors():
        raise error
