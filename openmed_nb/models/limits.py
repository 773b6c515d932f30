"""What the files of a model may cost before anything is known of the model: kinds of files, sizes, counts, and time.

A file is looked at here before it is opened, and a tokenizer before it is built. What holds more than any real model does
is refused; a tokenizer that could run for ever is tried in a process of its own.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import stat
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .._utils.text import describe_file, describe_value
from ..errors import ModelUnusable

AGAIN = "Download the model again, or use another model."

MIB = 1 << 20

# The largest that a file may be, by the first pattern that fits. The largest of real models: a config.json of 0.3 MiB,
# a tokenizer_config.json of 1.2, an index of 9, a vocabulary of 19, a tokenizer.json of 46.
LARGEST = {
    "config*.json": 8 * MIB,
    "generation_config.json": 8 * MIB,
    "adapter_config.json": 8 * MIB,
    "tokenizer_config.json": 16 * MIB,
    "special_tokens_map.json": 8 * MIB,
    "added_tokens.json": 8 * MIB,
    "*.index.json": 64 * MIB,
    "tokenizer*.json": 128 * MIB,
    "vocab.*": 32 * MIB,
    "merges.txt": 32 * MIB,
    "*.model": 32 * MIB,
    "chat_template*": 8 * MIB,
    "*.jinja": 8 * MIB,
}

# What only a file can be; a folder may have any other name.
ENDINGS = (".json", ".txt", ".model", ".safetensors", ".bin", ".jinja", ".py")

# A safetensors file begins with the length of its header, which holds about 100 bytes for each tensor.
LENGTH_BYTES = 8
LARGEST_HEADER = 16 * MIB

MOST_LABELS = 10_000
MOST_SHARDS = 1000

# transformers compares special tokens with each other. Gemma has 6,415 added tokens.
MOST_SPECIAL = 2000
MOST_ADDED = 20_000

# What a tokenizer does with a text before and after its model.
PARTS = ("normalizer", "pre_tokenizer", "post_processor")

# How many steps each of them may have, and how many special tokens may be around a text.
MOST_STEPS = 64
MOST_AROUND = 256

# The longest that all texts may be padded to.
MOST_PADDING = 2**18

# How many times as long a text may become before it is split; the patterns of T5, CLIP and XLM-R reach 16.
MOST_GROWTH = 4096

# What a BPE or WordPiece model may add to each piece of a word.
LONGEST_AFFIX = 64

# The steps of tokenizers that need a time which grows with the text, whatever is in it. A tokenizer of these alone is
# loaded here. Any other could loop, or fail in a way that ends the process, and is tried in a process of its own before.
LINEAR_STEPS = {
    *("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Strip", "StripAccents"),
    *("ByteLevel", "Precompiled", "Prepend", "Replace", "Sequence"),
    *("BertPreTokenizer", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"),
    *("Whitespace", "WhitespaceSplit"),
}

# The only regular expressions among them: those that transformers itself gives to XLM-R, DeBERTa, CLIP and GPT.
LINEAR_PATTERNS = {
    *(" {2,}", r"\s+", r"\n", r"[\n\r\t]", r"\s{2,}|[\n\r\t]", r" +▁", r"^▁+$"),
    r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}

# A WordPiece model compares every piece of a word with its vocabulary, up to this length; BERT has 100.
LONGEST_WORD = 1000

# What a trial may take: seconds of the processor (a loaded computer is no reason to refuse) and bytes, and more of both
# for each byte of the file. Twenty times what ordinary ones take.
TRIAL_SECONDS = 2.0
TRIAL_BYTES = 512 * MIB
SECONDS_PER_BYTE = 1.0 / MIB
BYTES_PER_BYTE = 32
WAITING = 20  # Seconds of the clock for one of the processor.
LOOK_EVERY = 0.02


def check_files(folder: Path, name: str) -> None:
    """Check that what a load opens are files of a size that files of models have.

    A pipe, a socket or a device would make a load wait for ever; links are followed, as the cache of huggingface_hub has
    them.
    """
    try:
        paths = sorted(folder.iterdir())
        templates = folder / "additional_chat_templates"
        if templates.is_dir():
            paths += sorted(templates.iterdir())
    except OSError as error:
        what = f"The folder of {describe_value(name)} cannot be read: {error.strerror}."
        raise ModelUnusable(what, "Check its permissions, or name another folder.") from error
    for path in paths:
        check_file(path, name)


def check_file(path: Path, name: str) -> None:
    """Check that a path is a file, and not too large; one that is not there is left to the load, which reports it."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:  # A loop of links, or a name that no file can have.
        reason = getattr(error, "strerror", None) or "no file can have that name"
        raise ModelUnusable(
            f"The file {path.name!r} of {describe_value(name)} cannot be read: {reason}.", AGAIN
        ) from error
    is_folder = stat.S_ISDIR(found.st_mode) and not path.name.endswith(ENDINGS)
    if not stat.S_ISREG(found.st_mode) and not is_folder:
        raise ModelUnusable(
            f"The file {path.name!r} of {describe_value(name)} is not a regular file.", "Put a file in its place."
        )
    largest = next((most for pattern, most in LARGEST.items() if fnmatchcase(path.name, pattern)), None)
    if largest is not None and not is_folder and found.st_size > largest:
        what = f"The file {path.name!r} of {describe_value(name)} is larger than {largest // MIB} MiB."
        raise ModelUnusable(what, AGAIN)
    if path.name.endswith(".safetensors"):
        _check_header(path, name)


def _check_header(path: Path, name: str) -> None:
    """Check how long the header of a safetensors file says that it is; a damaged file is left to the load."""
    try:
        with path.open("rb") as file:
            start = file.read(LENGTH_BYTES)
    except OSError:
        return
    if len(start) == LENGTH_BYTES and LARGEST_HEADER < struct.unpack("<Q", start)[0] < path.stat().st_size:
        what = f"The header of {path.name!r} of {describe_value(name)} is larger than {LARGEST_HEADER // MIB} MiB."
        raise ModelUnusable(what, AGAIN)


def read_json(file: Path, most: int = 128 * MIB) -> Any:
    """Return what a JSON file holds.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is not a regular file, larger than ``most``, or no JSON.
        RecursionError: If it is too deep.
    """
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is not a regular file")
    if found.st_size > most:
        raise ValueError(f"it is larger than {most // MIB} MiB")
    return json.loads(file.read_text("utf-8"))


def check_label_counts(config: dict[str, Any], name: str) -> None:
    """Refuse more labels than any model has; transformers needs a time that grows with them."""
    stated = (config.get("id2label"), config.get("label2id"))
    count = max(len(labels) for labels in ({}, *(one for one in stated if isinstance(one, (dict, list)))))
    if count > MOST_LABELS:
        what = f"The config.json of {describe_value(name)} has {count:,} labels, and the most are {MOST_LABELS:,}."
        raise ModelUnusable(what, "Correct id2label in its config.json.")


def check_shard_count(parts: set[str], name: str) -> None:
    """Refuse an index of more files than any model has."""
    if len(parts) > MOST_SHARDS:
        what = f"The index of the weights of {describe_value(name)} names {len(parts):,} files, and the most are {MOST_SHARDS:,}."
        raise ModelUnusable(what, "Save the model again, in fewer files.")


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turn a panic of the tokenizers library, which is not an Exception, into a RuntimeError."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RuntimeError("the tokenizers library failed") from error


def check_tokenizer_files(folder: Path, name: str) -> None:
    """Refuse tokenizer files that ask for too much, and try those in another process that could loop.

    A file that is no JSON, or of another shape, is left to the load, which reports it.
    """
    for path in sorted(folder.glob("*.json")):
        if path.name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
            _check_token_counts(path, name)
        elif path.name.startswith("tokenizer"):
            _check_tokenizer_file(path, name)


def check_built_tokenizer(content: str, folder: Path, name: str) -> None:
    """Check a tokenizer that transformers made of files without a ``tokenizer.json``, before it reads a text."""
    settings = json.loads(content)
    reason = _too_much(settings)
    if reason:
        raise ModelUnusable(f"The tokenizer of {describe_value(name)} {reason}.", AGAIN)
    if _can_loop(settings):
        what = f"The tokenizer of {describe_value(name)} is of an unusual kind, and the model has no tokenizer.json."
        raise ModelUnusable(what, f"Save it with save_pretrained() into {describe_file(folder)}.")


def _check_token_counts(path: Path, name: str) -> None:
    try:
        settings = read_json(path)
    except (OSError, ValueError, RecursionError):
        return
    if not isinstance(settings, dict):
        return
    lists = [value for value in settings.values() if isinstance(value, list)]
    tables = [settings, *(value for value in settings.values() if isinstance(value, dict))]
    special = max((len(one) for one in lists), default=0)
    added = max(len(one) for one in tables)
    if special > MOST_SPECIAL or added > MOST_ADDED:
        what = f"The {path.name} of {describe_value(name)} has {max(special, added):,} tokens in one list."
        raise ModelUnusable(what, AGAIN)


def _check_tokenizer_file(path: Path, name: str) -> None:
    try:
        settings = read_json(path)
    except (OSError, ValueError, RecursionError):
        return
    if not isinstance(settings, dict):
        return
    reason = _too_much(settings) or (_trial(path, settings) if _can_loop(settings) else "")
    if reason:
        raise ModelUnusable(f"The {path.name} of {describe_value(name)} {reason}.", AGAIN)


def _too_much(settings: dict[str, Any]) -> str:
    """Return what a tokenizer asks for that none needs, as the end of a sentence; empty where there is nothing."""
    added = settings.get("added_tokens")
    if isinstance(added, list) and len(added) > MOST_ADDED:
        return f"adds {len(added):,} tokens, and the most are {MOST_ADDED:,}"
    for part in PARTS:
        count = len(_steps(settings.get(part)))
        if count > MOST_STEPS:
            return f"has {count:,} steps in its {part}, and the most are {MOST_STEPS}"
    if math.prod(_growth(step) for part in PARTS for step in _steps(settings.get(part))) > MOST_GROWTH:
        return "can make a text thousands of times as long"
    return _too_much_around(settings) or _too_much_of_a_word(settings)


def _too_much_around(settings: dict[str, Any]) -> str:
    """Return what a tokenizer puts around a text that none needs."""
    around = 0
    for step in _steps(settings.get("post_processor")):
        for key, most in (("single", 1), ("pair", 2)):
            template = step.get(key)
            pieces = template if isinstance(template, list) else []
            around += len(pieces)
            if sum(isinstance(piece, dict) and "Sequence" in piece for piece in pieces) > most:
                return "repeats each text"
        tokens = step.get("special_tokens")
        for token in tokens.values() if isinstance(tokens, dict) else ():
            ids = token.get("ids") if isinstance(token, dict) else None
            around += len(ids) if isinstance(ids, list) else 0
    if around > MOST_AROUND:
        return f"puts {around:,} special tokens around a text, and the most are {MOST_AROUND}"
    padding = settings.get("padding")
    if isinstance(padding, dict) and max(_numbers(padding.values()), default=0) > MOST_PADDING:
        return "pads every text to a length that no model has"
    return ""


def _too_much_of_a_word(settings: dict[str, Any]) -> str:
    """Return what the model of a tokenizer adds to words that none needs."""
    model = settings.get("model")
    if not isinstance(model, dict):
        return ""
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = model.get(key)
        if isinstance(affix, str) and len(affix) > LONGEST_AFFIX:
            return f"adds {len(affix):,} characters to each piece of a word"
    return ""


def _numbers(values: Iterable[Any]) -> Iterator[int]:
    for value in values:
        if isinstance(value, dict):
            yield from (one for one in value.values() if isinstance(one, int))
        elif isinstance(value, int):
            yield value


def _steps(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a part of a tokenizer, those in sequences too, in their order."""
    waiting = [part]
    found = []
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict):
            continue
        found.append(one)
        for key in ("normalizers", "pretokenizers", "processors"):
            inner = one.get(key)
            waiting += reversed(inner) if isinstance(inner, list) else []
    return found


def _growth(step: dict[str, Any]) -> int:
    """Return how many times as long a text can become in a step of a tokenizer, at most."""
    # By its settings, because tokenizers also reads steps without their type.
    if "prepend" in step:
        return 1 + len(str(step["prepend"]))
    if "precompiled_charsmap" in step:
        return _longest_replacement(step["precompiled_charsmap"])
    if "content" not in step:
        return 1
    put = len(str(step["content"]))
    pattern = step.get("pattern")
    found = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(found, str) and found:
        return max(1, math.ceil(put / len(found)))
    return 1 + put  # A regular expression may match between any two characters, as an empty text does.


def _longest_replacement(table: Any) -> int:
    """Return the length of the longest text that a table of SentencePiece has for a character; 1 for a damaged one."""
    try:
        content = base64.b64decode(table or "")
        (size,) = struct.unpack_from("<I", content)
    except (TypeError, ValueError, struct.error):
        return 1
    return max(1, *(len(text) for text in content[4 + size :].split(b"\0")))


def _can_loop(settings: dict[str, Any]) -> bool:
    """Tell whether a tokenizer has anything but steps that are known to take a time that grows with the text."""
    for part in ("normalizer", "pre_tokenizer"):
        for step in _steps(settings.get(part)):
            pattern = step.get("pattern")
            regex = pattern.get("Regex") if isinstance(pattern, dict) else None
            if str(step.get("type")) not in LINEAR_STEPS or (regex is not None and str(regex) not in LINEAR_PATTERNS):
                return True
    model = settings.get("model")
    longest = model.get("max_input_chars_per_word") if isinstance(model, dict) else None
    return isinstance(longest, int) and longest > LONGEST_WORD


def _trial(path: Path, settings: dict[str, Any]) -> str:
    """Try a tokenizer in a process with limits of time and memory; return what is wrong with it, empty for nothing.

    The process is a new Python, in every system, that runs a file of this package alone: neither a fork nor the person's
    ``__main__`` is in it.
    """
    import subprocess

    import psutil
    import tokenizers

    file = Path(__file__).with_name("trial.py")
    packages = Path(tokenizers.__file__).parents[1]
    command = [sys.executable, "-I", str(file), str(path.absolute()), str(packages), _codes(settings)]
    size = path.stat().st_size
    seconds = TRIAL_SECONDS + size * SECONDS_PER_BYTE
    most_bytes = TRIAL_BYTES + size * BYTES_PER_BYTE
    started = time.monotonic()
    try:
        process = subprocess.Popen(  # noqa: S603 - this Python, with a file of this package
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),  # Windows would show one.
        )
    except (OSError, ValueError):  # No Python of its own, in a program that Python is part of.
        return "is of an unusual kind, and no process can be started to try it"
    try:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            with contextlib.suppress(psutil.Error, subprocess.TimeoutExpired):
                used = watched.cpu_times()
                if used.user + used.system > seconds or time.monotonic() - started > WAITING * seconds:
                    return f"takes more than {seconds:.0f} s for a few short texts"
                if watched.memory_info().rss > most_bytes:
                    return f"takes more than {most_bytes // MIB:,} MiB for a few short texts"
                process.wait(LOOK_EVERY)
        answer = process.stdout.read().decode("ascii", "replace").split() if process.stdout else []
    except psutil.NoSuchProcess:
        answer = []
    finally:  # After an interrupt too.
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()
    if answer[-1:] == ["ok"]:
        return ""
    if answer[-1:] == ["amplifies"]:
        return "makes hundreds of tokens of one character"
    return "cannot be used: the tokenizers library fails with it"


def _codes(settings: dict[str, Any]) -> str:
    """Return the characters that the patterns of a tokenizer name, which are what makes them repeat, as numbers."""
    steps = [*_steps(settings.get("normalizer")), *_steps(settings.get("pre_tokenizer"))]
    patterns = [step["pattern"] for step in steps if isinstance(step.get("pattern"), dict)]
    named = "".join(str(text) for pattern in patterns for text in pattern.values())
    ordinary = "ax0 \n.-"
    # Half of a pair of UTF-16 is no text that a tokenizer reads, nor printable.
    codes = dict.fromkeys(ord(one) for one in ordinary + named if one.isprintable() or one.isspace())
    return ",".join(str(code) for code in list(codes)[:64])
