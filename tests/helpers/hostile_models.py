"""Damages of a model folder that ask for endless time or memory; each takes the folder with the keyword model."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Damage = Callable[[Path], None]


def changed(name: str, **changes: Any) -> Damage:
    """Return a damage: settings of a JSON file are others."""

    def damage(folder: Path) -> None:
        file = folder / name
        content = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        file.write_text(json.dumps({**content, **changes}), "utf-8")

    return damage


def sparse(name: str, size: int) -> Damage:
    """Return a damage: a file of a size that takes no room on the disk."""

    def damage(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return damage


def labels(count: int) -> Damage:
    """Return a damage: that many labels."""

    def damage(folder: Path) -> None:
        names = {str(number): f"L{number}" for number in range(count)}
        changed("config.json", id2label=names)(folder)

    return damage


def deep(folder: Path) -> None:
    """Open a million lists."""
    (folder / "config.json").write_text("[" * 10**6)


def added(folder: Path) -> None:
    """Add 100,000 tokens to the tokenizer."""
    changed("tokenizer.json", added_tokens=[token(number) for number in range(10**5)])(folder)


def index(count: int) -> Damage:
    """Return a damage: weights in that many files."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        names = {f"t{number}": f"model-{number:06}.safetensors" for number in range(count)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    return damage


def long_header(folder: Path) -> None:
    """Write weights whose header says that it is 1 GiB long, in a file that is."""
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 1 << 30))
        file.truncate(2 << 30)


def token(number: int) -> dict[str, Any]:
    """Return an added token."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": 100 + number, "content": f"<t{number}>", "special": True, **flags}


def replacing(*steps: tuple[str, str, str]) -> Damage:
    """Return a damage: a normalizer that replaces, by kind of pattern, pattern and content."""
    normalizers = [
        {"type": "Replace", "pattern": {kind: pattern}, "content": content} for kind, pattern, content in steps
    ]
    return changed("tokenizer.json", normalizer={"type": "Sequence", "normalizers": normalizers})


def splitting(pattern: str) -> Damage:
    """Return a damage: a text is split by a regular expression."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return changed("tokenizer.json", pre_tokenizer=split)


def template(before: int = 0, texts: int = 1, ids: int = 1) -> Damage:
    """Return a damage: special tokens before a text, and the text, so many times."""
    special = {"SpecialToken": {"id": "[CLS]", "type_id": 0}}
    first, second = ({"Sequence": {"id": sequence, "type_id": 0}} for sequence in "AB")
    content = {
        "type": "TemplateProcessing",
        "single": [special] * before + [first] * texts,
        "pair": [first, second],
        "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2] * ids, "tokens": ["[CLS]"] * ids}},
    }
    return changed("tokenizer.json", post_processor=content)


def charsmap(folder: Path) -> None:
    """Give the tokenizer a table of SentencePiece with a text of 100,000 characters for one."""
    table = struct.pack("<I", 0) + b"x" * 100_000 + b"\0"
    normalizer = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    changed("tokenizer.json", normalizer=normalizer)(folder)


def long_words(folder: Path) -> None:
    """Let a WordPiece model put a long prefix before each piece of a word."""
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    content["model"]["continuing_subword_prefix"] = "#" * 10_000
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")


def untyped(folder: Path) -> None:
    """Write an amplifying step without its type, as older files have it."""
    step = {"pattern": {"String": "a"}, "content": "a" * 100_000}
    changed("tokenizer.json", normalizer={"type": "Sequence", "normalizers": [step]})(folder)


PADDING = {
    "strategy": {"Fixed": 10**9},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "[PAD]",
}

DAMAGES: dict[str, Damage] = {
    "a million labels": labels(10**6),
    "a hundred thousand labels": labels(10**5),
    "deep config.json": deep,
    "config.json of a GiB": sparse("config.json", 1 << 30),
    "an index of 100,000 files": index(10**5),
    "an index of a GiB": sparse("model.safetensors.index.json", 1 << 30),
    "header of a GiB": long_header,
    "tokenizer.json of a GiB": sparse("tokenizer.json", 1 << 30),
    "vocab.txt of 100 million lines": sparse("vocab.txt", 10**8),
    "merges.txt of a GiB": sparse("merges.txt", 1 << 30),
    "chat template of a GiB": sparse("chat_template.jinja", 1 << 30),
    "100,000 added tokens": added,
    "100,000 tokens in added_tokens.json": changed(
        "added_tokens.json", **{f"<t{token_id}>": token_id for token_id in range(10**5)}
    ),
    "20,000 special tokens": changed(
        "special_tokens_map.json", additional_special_tokens=[f"<t{token_id}>" for token_id in range(20_000)]
    ),
    "100,000 special tokens around a text": template(before=10**5),
    "a special token of 100,000": template(before=1, ids=10**5),
    "a text repeated": template(texts=100),
    "padding to a billion": changed("tokenizer.json", padding=PADDING),
    "a million characters for none": replacing(("String", "", "x" * 10**6)),
    "a million characters for one": replacing(("Regex", ".", "x" * 10**6)),
    "doubled thirty times": replacing(*[("String", "a", "aa")] * 30),
    "100,000 steps": replacing(*[("String", "a", "b")] * 10**5),
    "a step without its type": untyped,
    "a million characters before each text": changed(
        "tokenizer.json", normalizer={"type": "Prepend", "prepend": "x" * 10**6}
    ),
    "a table of long texts": charsmap,
    "a prefix of 10,000 characters": long_words,
    "nested repeats": splitting(r"(a+)+$"),
    "nested repeats of another letter": splitting(r"(q+)+z"),
    "a slow match at each place": splitting(r"(?:a|a|aa){12}(?!a)[^a\x01]"),
    "a pattern that is none": splitting("("),
}

FILES = (
    *("config.json", "config.4.0.0.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.txt", "vocab.json", "merges.txt", "spiece.model"),
    *("model.safetensors", "model.safetensors.index.json", "adapter_config.json", "chat_template.jinja"),
    *("chat_template.json", "additional_chat_templates/other.jinja"),
)


def make_loop(path: Path) -> None:
    """Make a link that leads to itself."""
    path.symlink_to(path.name)


def make_device(path: Path) -> None:
    """Make a link to a device that never ends."""
    path.symlink_to("/dev/zero")


def make_socket(path: Path) -> None:
    """Make a socket; it gets a short name first, because that of a socket is limited."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short, socket.socket(socket.AF_UNIX) as one:
        one.bind(f"{short}/s")
        shutil.move(f"{short}/s", path)


# What may be in the place of a file, on this system.
KINDS: dict[str, Callable[[Path], None]] = {"folder": Path.mkdir, "loop": make_loop}
if os.name == "posix":
    KINDS |= {"pipe": os.mkfifo, "device": make_device, "socket": make_socket}


def in_place_of(name: str, kind: str) -> Damage:
    """Return a damage: something that is no file in the place of one."""

    def damage(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        KINDS[kind](path)

    return damage
