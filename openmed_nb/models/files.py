"""What a folder of a model must hold, its content as a digest, and how long a text the model reads."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelRefused, ModelUnusable, cause

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

HEAD = "ForTokenClassification"
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")

# A config.json may name another one for a version of transformers, such as config.4.0.0.json.
SETTINGS = ("config*.json", "*.py")

# The files that tokenizers of transformers are made of (vocab_files_names of its classes), those for a version among
# them, such as tokenizer.4.0.0.json.
TOKENIZER = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model"),
)

# What transformers adds to the weights where the package peft is installed.
ADAPTER = ("adapter_config.json", "adapter_model.*")

# Tokenizers without a limit give a number far above this one (transformers' VERY_LARGE_INTEGER).
LONGEST_REAL_LIMIT = 1_000_000

# What configurations call the longest input; MPT has no table of positions, and cannot read more either.
NAMES_OF_LIMITS = ("max_position_embeddings", "max_seq_len")

# Cyrillic, cuneiform and runic letters and an emoji that hardly any vocabulary has.
RARE_CHARACTERS = "\ua66e \U00012000 \u16a0 \U0001f9ff"

ANOTHER = "Use the name or the folder of a token-classification model in safetensors."
PIECE = 1 << 20


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """Return the model's ``config.json`` after checking that it is for token classification."""
    file = folder / "config.json"
    if not file.is_file():
        raise ModelUnusable(f"{name!r} holds no model: it has no config.json.", ANOTHER)
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        what = f"The config.json of {name!r} cannot be read: {error}."
        raise ModelUnusable(what, "Download the model again.") from error
    if not isinstance(config, dict):
        raise ModelUnusable(f"The config.json of {name!r} holds no settings.", "Download the model again.")
    stated = config.get("architectures")
    architectures = [str(one) for one in stated] if isinstance(stated, list) else []
    if architectures and not any(one.endswith(HEAD) for one in architectures):
        # transformers would fill the head with random numbers.
        what = f"The model {name!r} is a {architectures[0]}, which is not a token classifier."
        raise ModelUnusable(what, ANOTHER)
    return config


def check_labels(settings: dict[str, Any], config: PreTrainedConfig, name: str) -> None:
    """Check that every output of a model has a label; ``config`` is what transformers made of its ``config.json``."""
    labels, stated, count = config.id2label, settings.get("id2label"), settings.get("num_labels")
    if not labels:
        raise ModelUnusable(f"The model {name!r} has no labels.", "Correct id2label in its config.json.")
    if (
        isinstance(stated, dict)
        and isinstance(count, int)
        and count != len(stated)
        # transformers takes num_labels, and names the labels LABEL_0, LABEL_1 and so on.
        and not all(re.fullmatch(r"LABEL_\d+", str(label)) for label in stated.values())
    ):
        what = f"The id2label of {name!r} names {len(stated)} labels, and its num_labels is {count}."
        raise ModelUnusable(what, "Correct its config.json.")
    texts = all(isinstance(label, str) and label.isprintable() for label in labels.values())
    if set(labels) != set(range(config.num_labels)) or not texts:
        what = f"The id2label of {name!r} does not give one text for each of its {config.num_labels} labels."
        raise ModelUnusable(what, "Correct id2label in its config.json.")


def check_weights(folder: Path, name: str, allow_pickle: bool) -> bool:
    """Check that a folder has weights that may be loaded; return whether transformers finds them as safetensors."""
    if any(DISTRIBUTED.fullmatch(file.name) for file in folder.glob("shard-*.safetensors")):
        # transformers would read them in the place of all others, and never report what it did not use.
        what = f"The weights of {name!r} are a distributed checkpoint."
        raise ModelUnusable(what, "Save the model with save_pretrained() in one process.")
    disguised = any(not shard.endswith(".safetensors") for shard in shards(folder / SAFETENSORS[1]))
    safe, pickled = (any((folder / file).is_file() for file in files) for files in (SAFETENSORS, PICKLES))
    if safe and not disguised:
        return True
    if not disguised and not pickled:
        raise ModelUnusable(
            f"The model {name!r} has no weights in safetensors.",
            "Use a model with a model.safetensors, or pass allow_pickle=True if it has a pickle file that you trust.",
        )
    if not allow_pickle:
        raise ModelRefused(
            f"The weights of {name!r} are a pickle file, which can run any code when it is loaded.",
            "Convert them to safetensors, or pass allow_pickle=True if you trust whoever made them.",
        )
    return disguised


def settings_in(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; nothing where it is missing or damaged, which loading it reports."""
    try:
        settings = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def shards(index: Path) -> set[str]:
    """Return the files that an index of weights points to."""
    weight_map = settings_in(index).get("weight_map")
    return {str(shard) for shard in weight_map.values()} if isinstance(weight_map, dict) else set()


@dataclass(frozen=True)
class Content:
    """Fingerprints of the files that a model is loaded from."""

    weights: str
    settings: str  # Of its config.json, and of code of its own.
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
    """Return a short text that changes with the name or any byte of a file."""
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        try:
            content = digest_of(path)
        except OSError as error:
            what = f"The file {path.name!r} of the model cannot be read: {cause(error)}."
            raise ModelUnusable(what, "Check it, or download the model again.") from error
        digest.update(f"{path.name}\0{content}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def digest_of(path: Path, algorithm: str = "blake2b") -> str:
    """Return the digest of a file; it is read once in a process, until its size or a time changes."""
    found = path.stat()
    # A copy may keep the time of change of its original, but not the one that the system sets.
    return read_digest(str(path), algorithm, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@functools.lru_cache(maxsize=4096)
def read_digest(path: str, algorithm: str, _size: int, _changed: int, _touched: int) -> str:
    digest = hashlib.blake2b(digest_size=16) if algorithm == "blake2b" else hashlib.new(algorithm)
    with Path(path).open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, name: str) -> None:
    """Check that a tokenizer reads all characters, and that the model has an embedding for each of its tokens."""
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= rows:  # An error in the middle of a text on a CPU, silently zero rows on MPS.
        what = f"The tokenizer of {name!r} has token {largest}, and the model has embeddings for {rows} tokens."
        raise ModelUnusable(what, "Call resize_token_embeddings on the model, and save both together.")
    try:
        tokenizer(RARE_CHARACTERS)
    except Exception as error:  # The tokenizers library raises bare Exceptions.
        what = f"The tokenizer of {name!r} cannot read what is not in its vocabulary: {cause(error)}."
        raise ModelUnusable(what, "Add its unknown token to the vocabulary, or use another model.") from error


def positions_of(model: PreTrainedModel) -> int | None:
    """Return how many tokens a model has positions for, ``None`` where nothing limits them.

    A table of positions has a row for each; where it has a row for padding, as RoBERTa's, the first token's is the
    next one. A model may take fewer than its table has, which its configuration then gives.
    """
    stated = [getattr(model.config, name, None) for name in NAMES_OF_LIMITS]
    tables = [
        module.weight.shape[0] - (-1 if module.padding_idx is None else module.padding_idx) - 1
        for name, module in model.named_modules()
        if "position" in name.rpartition(".")[2] and hasattr(module, "padding_idx")
    ]
    return min((limit for limit in [*stated, *tables] if isinstance(limit, int) and limit > 0), default=None)


def usable_length(tokenizer: PreTrainedTokenizerBase, positions: int | None) -> int:
    """Return how many tokens a model with some positions really takes, special tokens included.

    Some tokenizers know no limit, and a text beyond the model's position table gives an IndexError on a CPU and
    silently wrong rows on MPS.
    """
    shortest = tokenizer.num_special_tokens_to_add() + 1
    limits = [limit for limit in (tokenizer.model_max_length, positions) if isinstance(limit, (int, float))]
    return int(min((limit for limit in limits if shortest <= limit < LONGEST_REAL_LIMIT), default=512))
