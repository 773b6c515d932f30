"""Limits for the files of an untrusted model: file types, sizes, counts and time.

Files are checked before they are opened, and a tokenizer before it is built. Files beyond the limits of real models are
rejected. A tokenizer that might not terminate is first tested in a separate process.
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

# transformers compares all pairs of special tokens. Gemma has 6,415 added tokens.
MAX_SPECIAL_TOKENS = 2000
MAX_ADDED_TOKENS = 20_000

# Maximum number of steps of a tokenizer before its model.
MAX_STEPS = 64

# Maximum number of settings of the components after the model, and the maximum integer in them, such as a padding length.
# A tokenizer beyond them is tested in a separate process.
MAX_POSTPROCESSING_SETTINGS = 128
MAX_SETTING_INTEGER = 2**18

# Maximum factor by which preprocessing may lengthen a text. T5, CLIP and XLM-R reach 16.
MAX_GROWTH = 4096

# Maximum length of a prefix or suffix that a BPE or WordPiece model adds to each subword.
MAX_AFFIX_LENGTH = 64

# The steps of tokenizers that take linear time for any text. A tokenizer with only these steps is loaded directly. Any
# other might not terminate or might crash the process, so it is first tested in a separate process.
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

# The regular expressions in those steps: the ones that transformers uses for XLM-R, DeBERTa, CLIP and GPT.
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

# A WordPiece model looks up every substring of a word, up to this length. BERT has 100.
MAX_WORD_LENGTH = 1000

# Limits of a trial: CPU time, so that a busy machine is not a reason to reject, and memory, each with a surcharge per byte
# of the file. They are twenty times the usage of common tokenizers.
TRIAL_SECONDS = 2.0
TRIAL_BYTES = 512 * MIB
SECONDS_PER_BYTE = 1.0 / MIB
BYTES_PER_BYTE = 32
WALL_SECONDS_PER_CPU_SECOND = 20
POLL_INTERVAL_SECONDS = 0.02

# The problem for each output of a trial.
TRIAL_PROBLEMS = {"ok": "", "amplifies": "produces hundreds of tokens per character"}


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


def check_tokenizer_files(folder: Path, name: str) -> None:
    """Raise an error for tokenizer files beyond the limits, and test unusual tokenizers in another process.

    The load reports files that are not JSON or have another structure.
    """
    for path in sorted(folder.glob("*.json")):
        if not path.name.startswith(("tokenizer", "special_tokens_map.", "added_tokens.")):
            continue
        settings = read_json_object(path)
        reason = ""
        if path.name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
            for values in (settings, *settings.values()):
                limit = MAX_ADDED_TOKENS if isinstance(values, dict) else MAX_SPECIAL_TOKENS
                if isinstance(values, (dict, list)) and len(values) > limit:
                    reason = f"has {len(values):,} tokens in one list"
        else:
            reason = _find_excess(settings) or (_run_trial(path, settings) if _is_unusual(settings) else "")
        if reason:
            raise InvalidModelError(
                f"The file {describe_file(path)} of {describe_value(name)} {reason}.", DOWNLOAD_AGAIN_REMEDY
            )


def check_built_tokenizer(content: str, folder: Path, name: str) -> None:
    """Check a tokenizer that transformers built without a ``tokenizer.json``, before it encodes a text."""
    settings = json.loads(content)
    reason = _find_excess(settings)
    if reason:
        raise InvalidModelError(f"The tokenizer of {describe_value(name)} {reason}.", DOWNLOAD_AGAIN_REMEDY)
    if _is_unusual(settings):
        message = f"The tokenizer of {describe_value(name)} is of an unusual type, and the model has no tokenizer.json."
        raise InvalidModelError(message, f"Save it with save_pretrained() into {describe_file(folder)}.")


# The following functions return a problem as a verb phrase, empty if there is none.


def _find_excess(settings: JsonObject) -> str:
    """Return the first limit that a tokenizer exceeds."""
    added = settings.get("added_tokens")
    if isinstance(added, list) and len(added) > MAX_ADDED_TOKENS:
        return f"adds {len(added):,} tokens; the maximum is {MAX_ADDED_TOKENS:,}"
    steps = _preprocessing_steps(settings)
    if len(steps) > MAX_STEPS:
        return f"has {len(steps):,} steps before its model; the maximum is {MAX_STEPS}"
    growth = math.prod(_growth(step, pattern) for step, pattern in steps)
    if growth > MAX_GROWTH:
        return "can lengthen a text by a factor of thousands"
    model = settings.get("model")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = model.get(key) if isinstance(model, dict) else None
        if isinstance(affix, str) and len(affix) > MAX_AFFIX_LENGTH:
            return f"adds {len(affix):,} characters to each subword"
    return ""


def _preprocessing_steps(settings: JsonObject) -> list[tuple[JsonObject, JsonObject]]:
    """Return the steps of a tokenizer before its model, including those in sequences, each with its pattern."""
    steps = []
    stack = [settings.get("normalizer"), settings.get("pre_tokenizer")]
    while stack:
        step = stack.pop()
        if not isinstance(step, dict):
            continue
        pattern = step.get("pattern")
        steps.append((step, pattern if isinstance(pattern, dict) else {}))
        for key in ("normalizers", "pretokenizers"):
            inner_steps = step.get(key)
            stack += inner_steps if isinstance(inner_steps, list) else []
    return steps


def _growth(step: JsonObject, pattern: JsonObject) -> int:
    """Return the maximum factor by which a step of a tokenizer lengthens a text."""
    # Determined by the settings, because tokenizers also accepts steps without a type.
    if "prepend" in step:
        return 1 + len(str(step["prepend"]))
    if "precompiled_charsmap" in step:
        try:
            content = base64.b64decode(step["precompiled_charsmap"] or "")
            (size,) = struct.unpack_from("<I", content)
        except (TypeError, ValueError, struct.error):  # The load reports a damaged map.
            return 1
        # The character map of SentencePiece has a table of this size, and then the replacements.
        return max(1, *map(len, content[4 + size :].split(b"\0")))
    if "content" not in step:
        return 1
    replacement_length = len(str(step["content"]))
    replaced = pattern.get("String")
    if isinstance(replaced, str) and replaced:
        return max(1, math.ceil(replacement_length / len(replaced)))
    return 1 + replacement_length  # A regular expression or an empty text may match between any two characters.


def _is_unusual(settings: JsonObject) -> bool:
    """Return whether a tokenizer has a step or a setting that is not known to take linear time."""
    for step, pattern in _preprocessing_steps(settings):
        regex = pattern.get("Regex")
        if str(step.get("type")) not in LINEAR_STEPS or (regex is not None and str(regex) not in LINEAR_PATTERNS):
            return True
    model = settings.get("model")
    max_word_length = model.get("max_input_chars_per_word") if isinstance(model, dict) else None
    if isinstance(max_word_length, int) and max_word_length > MAX_WORD_LENGTH:
        return True
    postprocessing = {key: settings.get(key) for key in ("post_processor", "padding")}
    sizes = []
    for _key, value, _is_nested in walk_settings(postprocessing):
        if isinstance(value, int) and value > MAX_SETTING_INTEGER:
            return True
        sizes.append(len(value) if isinstance(value, (list, dict)) else 0)
    return max(len(sizes), *sizes) > MAX_POSTPROCESSING_SETTINGS


def walk_settings(settings: JsonObject) -> Iterator[tuple[str, object, bool]]:
    """Yield every key, its value, and whether it is nested, at any depth of mappings and lists."""
    stack: list[JsonObject | list[object]] = [settings]
    while stack:
        values = stack.pop()
        if isinstance(values, dict):
            yield from ((key, value, values is not settings) for key, value in values.items())
            values = list(values.values())
        stack += [value for value in values if isinstance(value, (dict, list))]


def _run_trial(path: Path, settings: JsonObject) -> str:
    """Test a tokenizer in a process with limits on time and memory, and return the problem.

    On every operating system the process is a new Python that runs one file of this package. It is neither a fork nor
    does it run the ``__main__`` of the user.
    """
    import subprocess

    import tokenizers

    # The characters in its patterns can trigger backtracking.
    characters = "ax0 \n.-"
    for _step, pattern in _preprocessing_steps(settings):
        characters += "".join(map(str, pattern.values()))
    # Unpaired surrogates are not printable, and no tokenizer accepts them.
    valid = dict.fromkeys(character for character in characters if character.isprintable() or character.isspace())
    codes = ",".join(str(ord(character)) for character in [*valid][:64])
    file = Path(__file__).with_name("trial.py")
    packages = Path(tokenizers.__file__).parents[1]
    command = [sys.executable, "-I", str(file), str(path.absolute()), str(packages), codes]
    size = path.stat().st_size
    try:
        process = subprocess.Popen(  # noqa: S603 - the command is this Python with a file of this package
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),  # Windows would open a console window.
        )
    except (OSError, ValueError):  # A program that embeds Python has no executable for it.
        return "is of an unusual type, and no process can be started to test it"
    try:
        reason = wait_for_trial(process, TRIAL_SECONDS + size * SECONDS_PER_BYTE, TRIAL_BYTES + size * BYTES_PER_BYTE)
    finally:  # Also after an interrupt.
        process.kill()
        output, _ = process.communicate()
    if reason:
        return reason
    return TRIAL_PROBLEMS.get(output.decode("ascii", "replace").strip(), "makes the tokenizers library fail")


def wait_for_trial(process: subprocess.Popen[bytes], seconds: float, max_bytes: int) -> str:
    """Wait for a process, and return the limit of CPU time, wall time or memory that it exceeds, as a verb phrase."""
    from subprocess import TimeoutExpired

    psutil = import_psutil()
    deadline = time.monotonic() + WALL_SECONDS_PER_CPU_SECOND * seconds
    while process.poll() is None:
        used = 0.0
        with contextlib.suppress(psutil.Error):  # The wall time is still limited if psutil fails.
            observed = psutil.Process(process.pid)
            times = observed.cpu_times()
            used = times.user + times.system
            if observed.memory_info().rss > max_bytes:
                return f"takes more than {max_bytes // MIB:,} MiB for a few short texts"
        if used > seconds or time.monotonic() > deadline:
            return f"takes more than {seconds:.0f} s for a few short texts"
        with contextlib.suppress(TimeoutExpired):
            process.wait(POLL_INTERVAL_SECONDS)
    return ""
