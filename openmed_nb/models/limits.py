"""Limits for the files of an untrusted model: file types and sizes.

Files are checked before they are opened. Files beyond the sizes of real models are rejected.
"""

from __future__ import annotations

import contextlib
import json
import math
import stat
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .._utils.text import describe_file, describe_value
from ..errors import InvalidModelError

DOWNLOAD_AGAIN_REMEDY = "Download the model again, or use another model."

# Object in a JSON file of an untrusted model: values can have any type.
JsonObject = dict[str, Any]

MIB = 1 << 20

# Maximum file size in bytes, by the first pattern that matches. The largest files of real models: a config.json of
# 0.3 MiB, a tokenizer_config.json of 1.2, an index of 9, a vocabulary of 19, a tokenizer.json of 46. A directory may have
# larger files of other names, which are not loaded.
MAX_FILE_BYTES = {
    "tokenizer*.json": 128 * MIB,
    "*.index.json": 64 * MIB,
    **dict.fromkeys(("config*.json", "*_config.json", "special_tokens_map.json", "added_tokens.json"), 16 * MIB),
    **dict.fromkeys(("vocab.*", "merges.txt", "*.model", "chat_template*", "*.jinja"), 32 * MIB),
}

# Suffixes of files. A directory may have any other name.
FILE_SUFFIXES = (".json", ".txt", ".model", ".safetensors", ".bin", ".jinja", ".py")

# A safetensors file starts with the length of its header, which has about 100 bytes per tensor.
HEADER_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 16 * MIB

MAX_LABELS = 10_000


def check_file(path: Path, name: str) -> None:
    """Check that a path is a regular file within the size limit. The load reports a missing file."""
    file = f"The file {describe_file(path)} of {describe_value(name)}"
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:  # A loop of links, or an invalid name.
        reason = getattr(error, "strerror", None) or "invalid file name"
        raise InvalidModelError(f"{file} cannot be read: {reason}.", DOWNLOAD_AGAIN_REMEDY) from error
    if stat.S_ISDIR(status.st_mode) and not path.name.endswith(FILE_SUFFIXES):
        return
    if not stat.S_ISREG(status.st_mode):
        raise InvalidModelError(f"{file} is not a regular file.", "Replace it by a regular file.")
    max_bytes = next((limit for pattern, limit in MAX_FILE_BYTES.items() if fnmatchcase(path.name, pattern)), math.inf)
    if status.st_size > max_bytes:
        raise InvalidModelError(f"{file} is larger than {max_bytes // MIB} MiB.", DOWNLOAD_AGAIN_REMEDY)
    header_bytes = 0
    if path.name.endswith(".safetensors"):
        with contextlib.suppress(OSError), path.open("rb") as weights:  # The load reports a damaged file.
            header_bytes = int.from_bytes(weights.read(HEADER_LENGTH_BYTES), "little")
    if MAX_HEADER_BYTES < header_bytes < status.st_size:
        problem = f"has a header that is larger than {MAX_HEADER_BYTES // MIB} MiB"
        raise InvalidModelError(f"{file} {problem}.", DOWNLOAD_AGAIN_REMEDY)


def read_json(file: Path, max_bytes: int = 128 * MIB) -> Any:
    """Return the contents of a JSON file.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is not a regular file, larger than ``max_bytes``, or not valid JSON.
        RecursionError: If it is nested too deeply.
    """
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if status.st_size > max_bytes:
        raise ValueError(f"it is larger than {max_bytes // MIB} MiB")
    return json.loads(file.read_text("utf-8"))


def read_json_object(file: Path) -> JsonObject:
    """Return the object in a JSON file, empty if the file is missing or damaged, which the load reports."""
    try:
        settings = read_json(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turn a panic of the tokenizers library, which is not an Exception, into a RuntimeError."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RuntimeError("the tokenizers library failed") from error


def walk_settings(settings: JsonObject) -> Iterator[tuple[str, object]]:
    """Yield every key and its value, at any depth of mappings and lists."""
    stack: list[JsonObject | list[object]] = [settings]
    while stack:
        values = stack.pop()
        if isinstance(values, dict):
            yield from values.items()
            values = list(values.values())
        stack += [value for value in values if isinstance(value, (dict, list))]
