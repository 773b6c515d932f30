"""What a folder of a model must hold, and its content as a digest."""

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
from .outside import permission
from .registry import ModelReference

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


HEAD = "ForTokenClassification"
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")

ANOTHER = "Use the name or the folder of a token-classification model in safetensors."


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """Return the model's ``config.json`` after checking that it is for token classification.

    Args:
        folder: The folder with the model's files.
        name: What the person calls the model.

    Raises:
        ModelUnusable: Where there is no such file, it is no JSON object, or the model is for another task.
    """
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
    check_head(config, name)
    return config


def check_head(config: dict[str, Any], name: str) -> None:
    """Check that a model has a token-classification head.

    Raises:
        ModelUnusable: Where its ``architectures`` name another head; it would be filled with random numbers.

    Example:
        >>> check_head({"architectures": ["BertForMaskedLM"]}, "mine")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ModelUnusable: The model 'mine' is a BertForMaskedLM, which is no token classifier. \
Use the name or the folder of a token-classification model in safetensors.
    """
    stated = config.get("architectures")
    architectures = [str(one) for one in stated] if isinstance(stated, list) else []
    if architectures and not any(one.endswith(HEAD) for one in architectures):
        what = f"The model {name!r} is a {architectures[0]}, which is no token classifier."
        raise ModelUnusable(what, ANOTHER)


def check_labels(settings: dict[str, Any], config: PreTrainedConfig, name: str) -> None:
    """Check that every output of a model has a label that can be written down.

    Args:
        settings: Its ``config.json``.
        config: What transformers made of it.
        name: What a person calls it.

    Raises:
        ModelUnusable: Where there is no label, or one is missing, no text, or cannot be encoded.
    """
    labels, stated, count = config.id2label, settings.get("id2label"), settings.get("num_labels")
    if not labels:
        raise ModelUnusable(f"The model {name!r} has no labels.", "Correct id2label in its config.json.")
    if (
        isinstance(stated, dict)
        and isinstance(count, int)
        and count != len(stated)
        and any(map(is_given, stated.values()))
    ):
        # transformers takes num_labels, and names the labels LABEL_0, LABEL_1 and so on.
        what = f"The id2label of {name!r} names {len(stated)} labels, and its num_labels is {count}."
        raise ModelUnusable(what, "Correct its config.json.")
    if set(labels) != set(range(config.num_labels)) or not all(_is_label(label) for label in labels.values()):
        what = f"The id2label of {name!r} does not give one text for each of its {config.num_labels} labels."
        raise ModelUnusable(what, "Correct id2label in its config.json.")


def is_given(label: object) -> bool:
    """Tell whether a label is more than the number that transformers gives to one without a name.

    Example:
        >>> is_given("B-DRUG"), is_given("LABEL_1")
        (True, False)
    """
    return not re.fullmatch(r"LABEL_\d+", str(label))


def _is_label(label: object) -> bool:
    return isinstance(label, str) and label.isprintable() and not any("\ud800" <= one <= "\udfff" for one in label)


def check_weights(folder: Path, name: str, allow_pickle: bool) -> bool:
    """Check that a folder has weights that may be loaded; return whether they are in safetensors.

    Raises:
        ModelRefused: Where the only weights are pickles, which can run any code, and these were not allowed.
        ModelUnusable: Where there are no weights, or those of several processes that were saved together.
    """
    if any(DISTRIBUTED.fullmatch(file.name) for file in folder.glob("shard-*.safetensors")):
        # transformers would read them in the place of all others, and never tell what it did not use.
        what = f"The weights of {name!r} are a distributed checkpoint."
        raise ModelUnusable(what, "Save the model with save_pretrained() in one process.")
    disguised = any(not shard.endswith(".safetensors") for shard in shards(folder / SAFETENSORS[1]))
    if _has(folder, SAFETENSORS) and not disguised:
        return True
    if allow_pickle and (disguised or _has(folder, PICKLES)):
        return disguised
    if disguised or _has(folder, PICKLES):
        raise ModelRefused(
            f"The weights of {name!r} are a pickle file, which can run any code when it is loaded.",
            "Convert them to safetensors, or pass allow_pickle=True if you trust whoever made them.",
        )
    raise ModelUnusable(
        f"The model {name!r} has no weights in safetensors.",
        "Use a model with a model.safetensors, or pass allow_pickle=True if it has a pickle file that you trust.",
    )


def is_allowed(reference: ModelReference, allowed: tuple[str, ...]) -> bool:
    """Tell whether a model is on a list of names: a hub model by alias or id in any case, a folder by its full path.

    Example:
        >>> is_allowed(ModelReference("privacy_filter", "openai/privacy-filter", on_hub=True), ("OpenAI/privacy-filter",))
        True
    """
    if not reference.on_hub:
        return reference.location in allowed
    return bool({one.casefold() for one in reference.names} & {one.casefold() for one in allowed})


def check_remote_code(config: dict[str, Any], reference: ModelReference, allowed: tuple[str, ...], asked: bool) -> bool:
    """Decide whether a model's own Python code is run.

    Args:
        config: The model's ``config.json``.
        reference: Where the model is.
        allowed: The names and hub ids that may run code of their own.
        asked: Whether the person passed ``trust_remote_code=True``.

    Returns:
        ``True`` only for a model that is allowed by name and brings code; a model that transformers knows needs none.

    Raises:
        ModelRefused: Where code is asked for or needed, and the model is not allowed by name.
    """
    permitted = is_allowed(reference, allowed)
    needed = "auto_map" in config and not _transformers_knows(config)
    if (asked or needed) and not permitted:
        what = f"The model {reference.name!r} would run Python code of its own."
        raise ModelRefused(what, f"If you trust it, {permission(reference)}")
    return permitted and (asked or needed)


def _transformers_knows(config: dict[str, Any]) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return str(config.get("model_type")) in CONFIG_MAPPING_NAMES


def shards(index: Path) -> set[str]:
    """Return the files that an index points to; none where it is damaged, which loading the weights reports."""
    try:
        return {str(shard) for shard in json.loads(index.read_text("utf-8"))["weight_map"].values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return set()


def parts_of(folder: Path) -> set[str]:
    """Return the files that the indexes of a folder point to."""
    return {part for index in (SAFETENSORS[1], PICKLES[1]) for part in shards(folder / index)}


def _has(folder: Path, names: tuple[str, ...]) -> bool:
    return any((folder / name).is_file() for name in names)


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


LONGEST_REAL_LIMIT = 1_000_000
"""Tokenizers that know no limit say a number far above this one (transformers' ``VERY_LARGE_INTEGER``)."""

NAMES_OF_LIMITS = ("max_position_embeddings", "max_seq_len")
"""What configurations call the longest input; MPT has no table, and cannot read more either."""

RARE_CHARACTERS = "\ua66e \U00012000 \u16a0 \U0001f9ff"
"""Letters of scripts that hardly a vocabulary has: Cyrillic, cuneiform and runic ones, and an emoji."""


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, name: str) -> None:
    """Check that the model has an embedding for every token of its tokenizer.

    Raises:
        ModelUnusable: Where it has not: an error in the middle of a text on a CPU, silently zero rows on MPS.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= rows:
        what = f"The tokenizer of {name!r} has token {largest}, and the model has embeddings for {rows} tokens."
        raise ModelUnusable(what, "Call resize_token_embeddings on the model, and save both together.")


def check_unknown_words(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Check that a tokenizer can read what is not in its vocabulary.

    Raises:
        ModelUnusable: Where it has no token for that, and would fail in the middle of a text.
    """
    try:
        tokenizer(RARE_CHARACTERS)
    except Exception as error:  # The tokenizers library raises bare Exceptions.
        what = f"The tokenizer of {name!r} cannot read what is not in its vocabulary: {cause(error)}."
        raise ModelUnusable(what, "Add its unknown token to the vocabulary, or use another model.") from error


def positions_of(model: PreTrainedModel) -> int | None:
    """Return how many tokens a model has positions for, ``None`` where nothing limits them.

    A table of positions says how many it has; where it has a row for padding, as RoBERTa's, the first token's is the
    next one. A model may take fewer than its table has, which its configuration then says.
    """
    stated = [getattr(model.config, name, None) for name in NAMES_OF_LIMITS]
    tables = [
        module.weight.shape[0] - (-1 if module.padding_idx is None else module.padding_idx) - 1
        for name, module in model.named_modules()
        if "position" in name.rpartition(".")[2] and hasattr(module, "padding_idx")
    ]
    return min((limit for limit in [*stated, *tables] if isinstance(limit, int) and limit > 0), default=None)


def usable_length(tokenizer: PreTrainedTokenizerBase, positions: int | None) -> int:
    """Return how many tokens the model really takes, special tokens included.

    Some tokenizers know no limit, and a text beyond the model's position table gives an IndexError on a CPU and
    silently wrong rows on MPS.

    Args:
        tokenizer: Its tokenizer.
        positions: How many tokens it has positions for.
    """
    shortest = tokenizer.num_special_tokens_to_add() + 1
    limits = [limit for limit in (tokenizer.model_max_length, positions) if isinstance(limit, (int, float))]
    return int(min((limit for limit in limits if shortest <= limit < LONGEST_REAL_LIMIT), default=512))
