"""What the files of a model hold, as short texts that change with any byte of what is loaded."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelUnusable, cause
from .folder import PICKLES, SAFETENSORS, shards

SETTINGS = ("config*.json", "*.py")
"""A ``config.json`` may name another one for a version of transformers, such as ``config.4.0.0.json``."""

TOKENIZER = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model"),
)
"""The files that tokenizers of transformers are made of (``vocab_files_names`` of its classes), those for a version among
them, such as ``tokenizer.4.0.0.json``."""

ADAPTER = ("adapter_config.json", "adapter_model.*")
"""What transformers adds to the weights where the package peft is installed."""

PIECE = 1 << 20


@dataclass(frozen=True)
class Content:
    """Fingerprints of the files that a model is loaded from.

    Attributes:
        weights: Of its weights.
        settings: Of its config.json, and of code of its own.
        tokenizer: Of its tokenizer.
    """

    weights: str
    settings: str
    tokenizer: str


def content_of(folder: Path) -> Content:
    """Return the fingerprints of a model's files; a file is read once in a process, until it changes."""
    return Content(
        fingerprint([*weight_files(folder), *matching(folder, ADAPTER)]),
        fingerprint(matching(folder, SETTINGS)),
        fingerprint(matching(folder, TOKENIZER)),
    )


def weight_files(folder: Path) -> list[Path]:
    """Return the files that weights are loaded from, in transformers' order: one file, or an index and what it names."""
    for single, index in (SAFETENSORS, PICKLES):
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            parts = (folder / shard for shard in sorted(shards(folder / index)))
            return [folder / index, *(part for part in parts if part.is_file())]
    return []


def matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files of a folder that match a pattern, in alphabetical order."""
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def fingerprint(files: Iterable[Path]) -> str:
    """Return a short text that changes with the name or any byte of a file.

    Raises:
        ModelUnusable: Where a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        try:
            stat = path.stat()
            content = digest_of(str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        except OSError as error:
            what = f"The file {path.name!r} of the model cannot be read: {cause(error)}."
            raise ModelUnusable(what, "Check it, or download the model again.") from error
        digest.update(f"{path.name}\0{content}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


@functools.cache
def digest_of(path: str, _size: int, _changed: int, _touched: int) -> str:
    """Return the digest of a file; its size and times are what tells that it must be read again.

    A copy may keep the time of change of its original, but not the one that the system sets (``st_ctime``).
    """
    digest = hashlib.blake2b(digest_size=16)
    with Path(path).open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()
