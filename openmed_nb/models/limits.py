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
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._utils.text import describe_file, describe_value
from ..devices.machine import import_psutil
from ..errors import InvalidModelError

if TYPE_CHECKING:
    import subprocess

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

# transformers compares special tokens with each other. Gemma has 6,415 added tokens.
MOST_SPECIAL = 2000
MOST_ADDED = 20_000

# What a tokenizer does with a text before its model, and how many steps each part may have.
PARTS = ("normalizer", "pre_tokenizer")
MOST_STEPS = 64

# How much may stand in what a tokenizer does after its model, and the largest number in it, such as a length to pad to. A
# tokenizer with more is tried in a process of its own.
MOST_AFTER = 128
LARGEST_NUMBER = 2**18

# How many times as long a text may become before it is split; the patterns of T5, CLIP and XLM-R reach 16.
MOST_GROWTH = 4096

# What a BPE or WordPiece model may add to each piece of a word.
LONGEST_AFFIX = 64

# The steps of tokenizers that need a time which grows with the text, whatever is in it. A tokenizer of these alone is
# loaded here. Any other could loop, or fail in a way that ends the process, and is tried in a process of its own before.
LINEAR_STEPS = {
    "BertNormalizer",
    "Lowercase",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Nmt",
    "Strip",
    "StripAccents",
    "ByteLevel",
    "Precompiled",
    "Prepend",
    "Replace",
    "Sequence",
    "BertPreTokenizer",
    "CharDelimiterSplit",
    "Digits",
    "Metaspace",
    "Punctuation",
    "Split",
    "UnicodeScripts",
    "Whitespace",
    "WhitespaceSplit",
}

# The only regular expressions among them: those that transformers itself gives to XLM-R, DeBERTa, CLIP and GPT.
LINEAR_PATTERNS = {
    " {2,}",
    r"\s+",
    r"\n",
    r"[\n\r\t]",
    r"\s{2,}|[\n\r\t]",
    r" +▁",
    r"^▁+$",
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

# What a trial prints, as what is wrong with the tokenizer.
TRIAL_ANSWERS = {"ok": "", "amplifies": "makes hundreds of tokens of one character"}


def check_file(path: Path, name: str) -> None:
    """Check that a path is a file, and not too large; one that is not there is left to the load, which reports it."""
    file = f"The file {describe_file(path)} of {describe_value(name)}"
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:  # A loop of links, or a name that no file can have.
        reason = getattr(error, "strerror", None) or "no file can have that name"
        raise InvalidModelError(f"{file} cannot be read: {reason}.", AGAIN) from error
    if stat.S_ISDIR(found.st_mode) and not path.name.endswith(ENDINGS):
        return
    if not stat.S_ISREG(found.st_mode):
        raise InvalidModelError(f"{file} is not a regular file.", "Put a file in its place.")
    largest = next((most for pattern, most in LARGEST.items() if fnmatchcase(path.name, pattern)), math.inf)
    if found.st_size > largest:
        raise InvalidModelError(f"{file} is larger than {largest // MIB} MiB.", AGAIN)
    if path.name.endswith(".safetensors") and LARGEST_HEADER < _header_bytes(path) < found.st_size:
        raise InvalidModelError(f"{file} has a header that is larger than {LARGEST_HEADER // MIB} MiB.", AGAIN)


def _header_bytes(path: Path) -> int:
    """Return how long the header of a safetensors file says that it is; 0 for a damaged file, which is left to the load."""
    try:
        with path.open("rb") as file:
            start = file.read(LENGTH_BYTES)
    except OSError:
        return 0
    return int.from_bytes(start, "little") if len(start) == LENGTH_BYTES else 0


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


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; nothing where it is missing or damaged, which loading it reports."""
    try:
        settings = read_json(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def check_label_counts(config: dict[str, Any], name: str) -> None:
    """Refuse more labels than any model has; transformers needs a time that grows with them."""
    for key in ("id2label", "label2id"):
        labels = config.get(key)
        if isinstance(labels, (dict, list)) and len(labels) > MOST_LABELS:
            what = f"The config.json of {describe_value(name)} has {len(labels):,} labels, and the most are {MOST_LABELS:,}."
            raise InvalidModelError(what, "Correct id2label in its config.json.")


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
            reason = _too_many_tokens(read_json_object(path))
        elif path.name.startswith("tokenizer"):
            settings = read_json_object(path)
            reason = _too_much(settings) or (_trial(path, settings) if _is_unusual(settings) else "")
        else:
            continue
        if reason:
            raise InvalidModelError(f"The file {describe_file(path)} of {describe_value(name)} {reason}.", AGAIN)


def check_built_tokenizer(content: str, folder: Path, name: str) -> None:
    """Check a tokenizer that transformers made of files without a ``tokenizer.json``, before it reads a text."""
    settings = json.loads(content)
    reason = _too_much(settings)
    if reason:
        raise InvalidModelError(f"The tokenizer of {describe_value(name)} {reason}.", AGAIN)
    if _is_unusual(settings):
        what = f"The tokenizer of {describe_value(name)} is of an unusual kind, and the model has no tokenizer.json."
        raise InvalidModelError(what, f"Save it with save_pretrained() into {describe_file(folder)}.")


# The following reasons are ends of a sentence about a file, and empty where there is nothing to say.


def _too_many_tokens(settings: dict[str, Any]) -> str:
    for values in (settings, *settings.values()):
        most = MOST_ADDED if isinstance(values, dict) else MOST_SPECIAL
        if isinstance(values, (dict, list)) and len(values) > most:
            return f"has {len(values):,} tokens in one list"
    return ""


def _too_much(settings: dict[str, Any]) -> str:
    """Return what a tokenizer asks for that none needs."""
    added = settings.get("added_tokens")
    if isinstance(added, list) and len(added) > MOST_ADDED:
        return f"adds {len(added):,} tokens, and the most are {MOST_ADDED:,}"
    growth = 1
    for part in PARTS:
        steps = _steps(settings.get(part))
        if len(steps) > MOST_STEPS:
            return f"has {len(steps):,} steps in its {part}, and the most are {MOST_STEPS}"
        growth *= math.prod(map(_growth, steps))
    if growth > MOST_GROWTH:
        return "can make a text thousands of times as long"
    model = settings.get("model")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = model.get(key) if isinstance(model, dict) else None
        if isinstance(affix, str) and len(affix) > LONGEST_AFFIX:
            return f"adds {len(affix):,} characters to each piece of a word"
    return ""


def _steps(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a part of a tokenizer, those in sequences too, in their order."""
    if not isinstance(part, dict):
        return []
    steps = []
    waiting = [part]
    while waiting:
        step = waiting.pop()
        steps.append(step)
        for key in ("normalizers", "pretokenizers"):
            inner = step.get(key)
            if isinstance(inner, list):
                waiting += [below for below in reversed(inner) if isinstance(below, dict)]
    return steps


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


def _is_unusual(settings: dict[str, Any]) -> bool:
    """Return whether a tokenizer has anything but steps that are known to take a time that grows with the text."""
    for part in PARTS:
        for step in _steps(settings.get(part)):
            pattern = step.get("pattern")
            regex = pattern.get("Regex") if isinstance(pattern, dict) else None
            if str(step.get("type")) not in LINEAR_STEPS or (regex is not None and str(regex) not in LINEAR_PATTERNS):
                return True
    model = settings.get("model")
    longest = model.get("max_input_chars_per_word") if isinstance(model, dict) else None
    if isinstance(longest, int) and longest > LONGEST_WORD:
        return True
    after = list(walk_settings({key: settings.get(key) for key in ("post_processor", "padding")}))
    largest = max((value for _, value, _ in after if isinstance(value, int)), default=0)
    longest_list = max((len(value) for _, value, _ in after if isinstance(value, (list, dict))), default=0)
    return len(after) > MOST_AFTER or largest > LARGEST_NUMBER or longest_list > MOST_AFTER


def walk_settings(settings: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yield every key with its value, however deep in mappings and lists it is, and whether it is not at the top."""
    waiting: list[Any] = [settings]
    while waiting:
        values = waiting.pop()
        if isinstance(values, dict):
            yield from ((key, value, values is not settings) for key, value in values.items())
            values = list(values.values())
        waiting += [value for value in values if isinstance(value, (dict, list))]


def _trial(path: Path, settings: dict[str, Any]) -> str:
    """Try a tokenizer in a process with limits of time and memory; return what is wrong with it.

    The process is a new Python, in every system, that runs a file of this package alone: neither a fork nor the person's
    ``__main__`` is in it.
    """
    import subprocess

    import tokenizers

    file = Path(__file__).with_name("trial.py")
    packages = Path(tokenizers.__file__).parents[1]
    command = [sys.executable, "-I", str(file), str(path.absolute()), str(packages), _codes(settings)]
    size = path.stat().st_size
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
        reason = overrun_of_trial(process, TRIAL_SECONDS + size * SECONDS_PER_BYTE, TRIAL_BYTES + size * BYTES_PER_BYTE)
    finally:  # After an interrupt too.
        process.kill()
        output, _ = process.communicate()
    if reason:
        return reason
    return TRIAL_ANSWERS.get(
        output.decode("ascii", "replace").strip(), "cannot be used: the tokenizers library fails with it"
    )


def overrun_of_trial(process: subprocess.Popen[bytes], seconds: float, most_bytes: int) -> str:
    """Wait for the end of a process; return which limit it reached before, of the processor's time, the clock's or memory."""
    from subprocess import TimeoutExpired

    psutil = import_psutil()
    deadline = time.monotonic() + WAITING * seconds
    while process.poll() is None:
        used = 0.0
        with contextlib.suppress(psutil.Error):  # The clock goes on where the system does not answer.
            watched = psutil.Process(process.pid)
            times = watched.cpu_times()
            used = times.user + times.system
            if watched.memory_info().rss > most_bytes:
                return f"takes more than {most_bytes // MIB:,} MiB for a few short texts"
        if used > seconds or time.monotonic() > deadline:
            return f"takes more than {seconds:.0f} s for a few short texts"
        with contextlib.suppress(TimeoutExpired):
            process.wait(LOOK_EVERY)
    return ""


def _codes(settings: dict[str, Any]) -> str:
    """Return the characters that the patterns of a tokenizer name, which are what makes them repeat, as numbers."""
    named = "ax0 \n.-"
    for part in PARTS:
        for step in _steps(settings.get(part)):
            pattern = step.get("pattern")
            named += "".join(map(str, pattern.values())) if isinstance(pattern, dict) else ""
    # Half of a pair of UTF-16 is no text that a tokenizer reads, nor printable.
    codes = dict.fromkeys(str(ord(character)) for character in named if character.isprintable() or character.isspace())
    return ",".join(list(codes)[:64])
