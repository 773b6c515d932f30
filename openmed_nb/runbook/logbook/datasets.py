"""Fingerprints of texts, of a file, or of a folder of shards; nothing of them is kept."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError, given_path, one_line
from .sections import Dataset

PIECE = 1 << 20

TEXTS_FILE_OR_FOLDER = "Pass a list of texts, or the path of a file or a folder."


def dataset_of(data: Any) -> Dataset:
    """Return the fingerprint of a dataset.

    Args:
        data: A series of texts that can be read again, or the path of a file, or of a folder with shards.

    Raises:
        ConfigurationError: For anything else, for nothing, and for what cannot be read; no word of it is in the error.

    Example:
        >>> dataset_of(["asthma", "fever"]).items, dataset_of(["asthma"]).checksum == dataset_of(["fever"]).checksum
        (2, False)
    """
    if not isinstance(data, (str, os.PathLike)):
        return _of_texts(data)
    path = _path(data)
    try:
        return _of_folder(path) if path.is_dir() else Dataset("file", sha256_of(path), 1, path.stat().st_size)
    except OSError as error:
        what = f"The dataset cannot be read: {type(error).__name__}."
        raise ConfigurationError(what, TEXTS_FILE_OR_FOLDER) from error


def sha256_of(path: Path) -> str:
    """Return SHA-256 of a file; it is read once in a process, until it changes.

    Raises:
        OSError: Where it cannot be read.
    """
    stat = path.stat()
    return _sha256_of(str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@functools.lru_cache(maxsize=4096)
def _sha256_of(path: str, _size: int, _changed: int, _touched: int) -> str:
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _path(data: Any) -> Path:
    """Return the path of a dataset; a text that is none may be a note, so the error does not show it."""
    path = given_path(data, "dataset")
    if not (path.is_dir() or path.is_file()):  # A device or a pipe may have no end.
        raise ConfigurationError("The dataset is no file or folder that is there.", TEXTS_FILE_OR_FOLDER)
    return path


def _of_texts(data: Any) -> Dataset:
    from ...annotation.corpus import stream_of
    from ...annotation.fingerprints import readable

    series = stream_of(data)
    if not isinstance(data, Sized) or isinstance(data, (set, frozenset)):
        what = f"{type(data).__name__} has no length or no order: it may have no end, or can be read once only."
        raise ConfigurationError(what, TEXTS_FILE_OR_FOLDER)
    digest, items, size = hashlib.sha256(), 0, 0
    for text in series:
        if not isinstance(text, (str, list)):
            what = f"Item {items} of the dataset is {type(text).__name__} and no text."
            raise ConfigurationError(what, TEXTS_FILE_OR_FOLDER)
        content = readable(text).encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "big") + content)
        items, size = items + 1, size + len(content)
    if not items:
        raise ConfigurationError("The dataset is empty.", TEXTS_FILE_OR_FOLDER)
    return Dataset("texts", digest.hexdigest(), items, size)


def _of_folder(folder: Path) -> Dataset:
    files = sorted(path for path in _below(folder) if path.is_file() and not path.name.startswith("."))
    if not files:
        raise ConfigurationError("The folder of the dataset has no files.", TEXTS_FILE_OR_FOLDER)
    shards = tuple(sha256_of(path) for path in files)
    named = (f"{path.relative_to(folder).as_posix()}\0{shard}\0" for path, shard in zip(files, shards, strict=True))
    checksum = hashlib.sha256("".join(named).encode("utf-8", "surrogateescape")).hexdigest()
    return Dataset("folder", checksum, len(files), sum(path.stat().st_size for path in files), shards)


def _below(folder: Path) -> Iterator[Path]:
    """Yield what is in a folder and in the folders below it, links to folders included."""
    seen = set()
    for place, _, names in os.walk(folder, onerror=_raised, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            what = "The folder of the dataset has a folder twice in it, through links."
            raise ConfigurationError(what, "Pass a folder without such links.")
        seen.add(real)
        yield from (Path(place, name) for name in names)


def _raised(error: OSError) -> None:
    raise error


def stands_in(text: str, data: Any) -> bool:
    """Tell whether a text is a part of one of the texts of a dataset in memory, or has one of them in it, in any case and lines.

    Example:
        >>> notes = ["The patient has diabetes mellitus."]
        >>> stands_in("PATIENT  has diabetes", notes), stands_in("The loader is slow.", notes)
        (True, False)
    """
    from ...annotation.corpus import stream_of
    from ...annotation.fingerprints import readable

    if isinstance(data, (str, os.PathLike)) or data is None:
        return False
    return any(_overlap(text, one) for one in map(readable, stream_of(data)))


SHORT = 12
"""Characters; a shorter text stands in another one by chance."""


def _overlap(text: str, other: str) -> bool:
    text, other = one_line(text).casefold(), one_line(other).casefold()
    return (len(text) >= SHORT and text in other) or (len(other) >= SHORT and other in text)
