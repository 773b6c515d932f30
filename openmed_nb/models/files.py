"""The files of a model: types and sizes, required contents, forbidden settings, hashes, and the maximum input length.

transformers acts on many settings of a ``config.json`` and of tokenizer files. Most describe the model. The settings below make
transformers import, download or open something else. A model with such a setting is rejected unless the
user trusts it by name. All checks run before transformers reads any file of the model.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._utils.text import describe_error, describe_file, describe_names, describe_value
from ..errors import InvalidModelError, UntrustedModelError
from .registry import ModelReference

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

ARCHITECTURE_SUFFIX = "ForTokenClassification"
SAFETENSORS_FILES = ("model.safetensors", "model.safetensors.index.json")
PICKLE_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")

# A config.json may refer to another file for a version of transformers, such as config.4.0.0.json.
CONFIG_PATTERNS = ("config*.json", "*.py")

# The files of tokenizers (vocab_files_names of the classes in transformers), including those for a version of
# transformers, such as tokenizer.4.0.0.json.
TOKENIZER_PATTERNS = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
)

# transformers adds these files to the weights if the package peft is installed.
ADAPTER_PATTERNS = ("adapter_config.json", "adapter_model.*")

# Tokenizers without a limit report a far larger number (VERY_LARGE_INTEGER in transformers).
MAX_PLAUSIBLE_LENGTH = 1_000_000

# Names of the maximum input length in configurations. MPT has no position embeddings, but the same limit.
MAX_LENGTH_KEYS = ("max_position_embeddings", "max_seq_len")

# Names of the position embeddings of tokens in transformers. Those of boxes and images have other names.
POSITION_EMBEDDING_NAMES = ("position_embeddings", "embed_positions", "wpe")

# Cyrillic, cuneiform and runic letters and an emoji that few vocabularies contain.
RARE_CHARACTERS = "\ua66e \U00012000 \u16a0 \U0001f9ff"

OTHER_MODEL_REMEDY = "Use a token-classification model in safetensors format."
READ_CHUNK_BYTES = 1 << 20


# Limits for the files of an untrusted model. Files are checked before they are opened, and those beyond the sizes of real models
# are rejected.

DOWNLOAD_AGAIN_REMEDY = "Download the model again, or use another model."

# Object in a JSON file of an untrusted model: values can have any type.
JsonObject = dict[str, Any]

MIB = 1 << 20
MAX_TEXT_BYTES = 128 * MIB

# Suffixes of files that are read as a whole. The largest file of a real model, a tokenizer.json, has 46 MiB.
TEXT_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".py")


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
    if stat.S_ISDIR(status.st_mode):  # A directory is not read as a file.
        return
    if not stat.S_ISREG(status.st_mode):
        raise InvalidModelError(f"{file} is not a regular file.", "Replace it by a regular file.")
    if path.suffix in TEXT_SUFFIXES and status.st_size > MAX_TEXT_BYTES:
        raise InvalidModelError(f"{file} is larger than {MAX_TEXT_BYTES // MIB} MiB.", DOWNLOAD_AGAIN_REMEDY)


def read_json(file: Path) -> Any:
    """Return the contents of a JSON file.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is not a regular file, too large, or not valid JSON.
        RecursionError: If it is nested too deeply.
    """
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if status.st_size > MAX_TEXT_BYTES:
        raise ValueError(f"it is larger than {MAX_TEXT_BYTES // MIB} MiB")
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


def read_config(folder: Path, name: str) -> JsonObject:
    """Return the model's ``config.json`` after checking that it is for token classification."""
    file = folder / "config.json"
    check_file(file, name)
    if not file.is_file():
        raise InvalidModelError(
            f"{describe_value(name)} is not a model folder: config.json is missing.", OTHER_MODEL_REMEDY
        )
    problem = "is not a JSON object"
    try:
        config = read_json(file)
    except (OSError, ValueError, RecursionError) as error:
        config = None
        problem = f"cannot be read: {describe_error(error)}"
    if not isinstance(config, dict):
        raise InvalidModelError(f"The config.json of {describe_value(name)} {problem}.", "Download the model again.")
    architectures = config.get("architectures")
    if (
        isinstance(architectures, list)
        and architectures
        and not any(str(kind).endswith(ARCHITECTURE_SUFFIX) for kind in architectures)
    ):
        # transformers would initialize the classification head randomly.
        kind = describe_names([str(architectures[0])])
        raise InvalidModelError(
            f"The model {describe_value(name)} is a {kind}, which is not a token-classification model.",
            OTHER_MODEL_REMEDY,
        )
    return config


def check_labels(settings: JsonObject, config: PreTrainedConfig, name: str) -> None:
    """Check that every output of a model has a label.

    Args:
        settings: Contents of the ``config.json``.
        config: Configuration that transformers built from the settings.
        name: Name of the model.
    """
    stored = settings.get("id2label")
    count = settings.get("num_labels")
    labels = config.id2label
    # transformers uses num_labels, and names the labels LABEL_0, LABEL_1 and so on.
    is_replaced = (
        isinstance(stored, dict)
        and isinstance(count, int)
        and count != len(stored)
        and not all(re.fullmatch(r"LABEL_\d+", str(label)) for label in stored.values())
    )
    is_complete = set(labels) == set(range(config.num_labels)) and all(
        isinstance(label, str) and label.isprintable() for label in labels.values()
    )
    if is_replaced or not is_complete or not labels:
        count = config.num_labels
        raise InvalidModelError(
            f"The id2label of {describe_value(name)} does not have one string for each of its {count} labels.",
            "Correct id2label in its config.json.",
        )


def check_weights(folder: Path, name: str, allow_pickle: bool) -> bool:
    """Check that a directory has weights that may be loaded, and return whether transformers loads them as safetensors."""
    if any(folder.glob("shard-*-model-*-of-*.safetensors")):
        # transformers would load them instead of the other weights, and would not report unused tensors.
        raise InvalidModelError(
            f"The weights of {describe_value(name)} are a distributed checkpoint.",
            "Save the model with save_pretrained() in one process.",
        )
    has_disguised_pickle = any(
        not shard.endswith(".safetensors") for shard in _shard_files(folder / SAFETENSORS_FILES[1])
    )
    has_safetensors = any((folder / file).is_file() for file in SAFETENSORS_FILES)
    has_pickle = any((folder / file).is_file() for file in PICKLE_FILES)
    if has_safetensors and not has_disguised_pickle:
        return True
    if not has_disguised_pickle and not has_pickle:
        raise InvalidModelError(
            f"The model {describe_value(name)} does not have weights in safetensors.",
            "Use a model with a model.safetensors, or pass allow_pickle=True if you trust its pickle file.",
        )
    if not allow_pickle:
        raise UntrustedModelError(
            f"The weights of {describe_value(name)} are stored in a pickle file, which can execute arbitrary code.",
            "Convert them to safetensors, or pass allow_pickle=True if you trust their source.",
        )
    return has_disguised_pickle


def _shard_files(index: Path) -> set[str]:
    """Return the names of the files in an index of weights."""
    weight_map = read_json_object(index).get("weight_map")
    return {str(shard) for shard in weight_map.values()} if isinstance(weight_map, dict) else set()


@dataclass(frozen=True)
class ModelHashes:
    """Hashes of the files of a model.

    Attributes:
        weights: Hash of the weights.
        config: Hash of the ``config.json`` and of remote code.
        tokenizer: Hash of the tokenizer files.
    """

    weights: str
    config: str
    tokenizer: str


def hash_model_files(folder: Path) -> ModelHashes:
    """Return the hashes of the files of a model. Each file is read once per process, unless it changes."""
    return ModelHashes(
        _hash_files([*weight_files(folder), *match_files(folder, ADAPTER_PATTERNS)]),
        _hash_files(match_files(folder, CONFIG_PATTERNS)),
        _hash_files(match_files(folder, TOKENIZER_PATTERNS)),
    )


def weight_files(folder: Path) -> list[Path]:
    """Return the files of the weights that transformers loads: one file, or an index and its shards."""
    for single, index in (SAFETENSORS_FILES, PICKLE_FILES):
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            parts = (folder / shard for shard in sorted(_shard_files(folder / index)))
            return [folder / index, *(part for part in parts if part.is_file())]
    return []


def match_files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files of a directory that match any of the patterns, in alphabetical order."""
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _hash_files(files: Iterable[Path]) -> str:
    """Return a hash of the names and contents of files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        try:
            content = file_digest(path)
        except OSError as error:
            raise InvalidModelError(
                f"The file {describe_file(path)} of the model cannot be read: {describe_error(error)}.",
                "Check it, or download the model again.",
            ) from error
        digest.update(f"{path.name}\0{content}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def file_digest(path: Path, algorithm: str = "blake2b") -> str:
    """Return the digest of a file, which is read once per process unless its size or a timestamp changes."""
    status = path.stat()
    # A copy may keep the modification time of the original, but not the change time, which the system sets.
    return read_digest(str(path), algorithm, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@functools.lru_cache(maxsize=4096)
def read_digest(path: str, algorithm: str, _size: int, _modified: int, _changed: int) -> str:
    """Read a file and return its digest. Size and timestamps are part of the cache key only."""
    digest = hashlib.blake2b(digest_size=16) if algorithm == "blake2b" else hashlib.new(algorithm)
    with Path(path).open("rb") as file:
        while chunk := file.read(READ_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, name: str) -> None:
    """Check that a tokenizer accepts all characters, and that the model has an embedding for each token."""
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= rows:  # Such a token raises an IndexError on the CPU and silently becomes a zero vector on MPS.
        raise InvalidModelError(
            f"The tokenizer of {describe_value(name)} has token id {largest}, but the model has embeddings for {rows} tokens only.",
            "Call resize_token_embeddings on the model, and save both together.",
        )
    try:
        with panics_as_errors():
            tokenizer(RARE_CHARACTERS)
    except Exception as error:  # The tokenizers library raises plain Exceptions.
        raise InvalidModelError(
            f"The tokenizer of {describe_value(name)} cannot encode characters outside its vocabulary: {describe_error(error)}.",
            "Add its unknown token to the vocabulary, or use another model.",
        ) from error


def max_positions(model: torch.nn.Module) -> int | None:
    """Return the maximum number of positions of a model, or ``None`` if it has no limit.

    The position embeddings have one row per position. If they have a padding row, as in RoBERTa, the first token uses the
    row after it. The configuration may specify fewer positions than the embeddings have.
    """
    max_lengths = [getattr(getattr(model, "config", None), name, None) for name in MAX_LENGTH_KEYS]
    embeddings = find_position_embeddings(model)
    if embeddings is not None:
        padding = embeddings.padding_idx
        max_lengths.append(embeddings.weight.shape[0] - (0 if padding is None else padding + 1))
    return min((limit for limit in max_lengths if isinstance(limit, int) and limit > 0), default=None)


def find_position_embeddings(model: torch.nn.Module) -> torch.nn.Embedding | None:
    """Return the position embeddings of tokens, or ``None`` if a model has none or computes them on demand."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in POSITION_EMBEDDING_NAMES and hasattr(module, "padding_idx"):
            return None if hasattr(module, "make_weight") else module
    return None


def max_input_length(tokenizer: PreTrainedTokenizerBase, positions: int | None) -> int:
    """Return the maximum input length of a model in tokens, including special tokens.

    Some tokenizers have no limit. A text beyond the position embeddings raises an IndexError on the CPU and silently
    uses wrong embeddings on MPS.
    """
    minimum = tokenizer.num_special_tokens_to_add() + 1
    max_lengths = [limit for limit in (tokenizer.model_max_length, positions) if isinstance(limit, (int, float))]
    return int(min((limit for limit in max_lengths if minimum <= limit < MAX_PLAUSIBLE_LENGTH), default=512))


# Settings must not make transformers execute code, download files, or open files outside the model directory.

# The implementations of attention and of mixtures of experts in torch and transformers. Any other value names a package that
# transformers imports or, with the package "kernels", downloads from the Hub as native code.
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")

# transformers calls from_pretrained of the class that tokenizer_class names, which can be any of its classes, including models
# and processors. AutoTokenizer and RagTokenizer load the classes that other files name.
TOKENIZER_CLASS_PATTERN = re.compile(
    r"(?!Auto|Rag)\w*(Tokenizer|TokenizerFast|TokenizersBackend|PythonBackend|SentencePieceBackend)"
)

# The only subdirectory of a model that transformers reads.
CHAT_TEMPLATES = "additional_chat_templates"


# Settings that transformers 5.23 acts on and that must be empty. check_remote_code() handles auto_map.
UNSAFE_SETTINGS = (
    # modeling_utils._get_resolved_checkpoint_files and configuration_utils.PreTrainedConfig.get_config_dict: refer to other
    # files, which are not checked
    "transformers_weights",
    "configuration_files",
    # quantizers.auto.get_hf_quantizer: imports a package of each method; mxfp4, fp8 and others download kernels
    "quantization_config",
    # configuration_utils.PreTrainedConfig.__setattr__: renames any setting, so that none can be checked
    "attribute_map",
    # backbone_utils.consolidate_backbone_kwargs_to_config: reads the settings of another model on the hub
    "backbone",
    # tokenization_utils_base.PreTrainedTokenizerBase._from_pretrained: are passed to the class instead of its files
    "init_inputs",
)

# Many tokenizers have this setting, but no library opens the file.
UNUSED_FILE_SETTING = "special_tokens_map_file"

# The valid settings of a special_tokens_map.json, which overrides all other settings, including tokenizer_file and
# is_local.
SPECIAL_TOKENS_PATTERN = re.compile(r".*_tokens?")


def _trust_remedy(reference: ModelReference) -> str:
    """Return the remedy that trusts a model by name, as a clause."""
    trusted_name = reference.name if reference.on_hub else reference.location
    return f"trust it by name: OpenMedConfig(remote_code_allowed=({trusted_name!r},))."


def check_remote_code(config: JsonObject, reference: ModelReference, trusted: bool, requested: bool) -> bool:
    """Return whether a model executes remote code, or raise an error if it would without being trusted.

    Args:
        config: Contents of the ``config.json``.
        reference: Model.
        trusted: Whether the user trusts the model by name.
        requested: Whether the user passed ``trust_remote_code=True``.
    """
    needed = "auto_map" in config
    if needed:  # A model type that is part of transformers does not need its remote code.
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        needed = str(config.get("model_type")) not in CONFIG_MAPPING_NAMES
    if (requested or needed) and not trusted:
        raise UntrustedModelError(
            f"The model {describe_value(reference.name)} requires executing remote code.",
            f"If you trust it, {_trust_remedy(reference)}",
        )
    return requested or needed


def check_references(config: JsonObject, name: str) -> None:
    """Raise an error for settings that name other files, which are neither checked nor hashed, also of a trusted model."""
    if names := [key for key in ("transformers_weights", "configuration_files") if config.get(key)]:
        raise UntrustedModelError(
            f"The setting {describe_names(names)} in the config.json of {describe_value(name)} refers to other files.",
            "Remove it.",
        )


def check_settings(folder: Path, config: JsonObject, reference: ModelReference) -> None:
    """Raise an error for settings that make transformers import, download or open anything outside the directory."""
    for part in _unsafe_parts(folder, config):
        raise UntrustedModelError(
            f"{part} of {describe_value(reference.name)} refers to code or files outside its folder.",
            f"Remove it or, if you trust the model, {_trust_remedy(reference)}",
        )


def _unsafe_parts(folder: Path, config: JsonObject) -> Iterator[str]:
    """Yield the unsafe settings and files of a model."""
    for key, value in walk_settings(config):
        # A setting also has effect under the name of its private attribute.
        if _is_unsafe_setting(key.removeprefix("_").removesuffix("_internal"), value):
            yield f"The setting {describe_names([key])} in the config.json"
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        for key, value in read_json_object(folder / file).items():
            is_misplaced = file == "special_tokens_map.json" and not SPECIAL_TOKENS_PATTERN.fullmatch(key)
            if is_misplaced or _is_unsafe_setting(key, value) or _is_unsafe_tokenizer_setting(key, value, folder):
                yield f"The setting {describe_names([key])} in the {file}"
    if (folder / "adapter_config.json").is_file():  # transformers adds the adapter if the package peft is installed.
        yield "The adapter_config.json"


def _is_unsafe_setting(key: str, value: object) -> bool:
    """Return whether a setting is unsafe in any file."""
    # modeling_utils.PreTrainedModel._check_and_adjust_attn_implementation; a mapping is by submodel, "" is the whole model.
    # integrations.moe.ExpertsInterface: "deepgemm" and "sonicmoe" are downloaded from the Hub in the first forward pass.
    if key in ("attn_implementation", "experts_implementation"):
        return not _is_builtin_implementation(value)
    if key == "tokenizer_class":  # models.auto.tokenization_auto.tokenizer_class_from_name
        return isinstance(value, str) and not TOKENIZER_CLASS_PATTERN.fullmatch(value)
    return key in UNSAFE_SETTINGS and bool(value)


def _is_builtin_implementation(value: object) -> bool:
    """Return whether an implementation, or each in a mapping by submodel, is part of torch or transformers."""
    if isinstance(value, dict):
        return all(map(_is_builtin_implementation, value.values()))
    return value is None or (isinstance(value, str) and value in IMPLEMENTATIONS)


def _is_unsafe_tokenizer_setting(key: str, value: object, folder: Path) -> bool:
    """Return whether a setting of a tokenizer refers to a file outside the directory or to another library."""
    # tokenization_utils_tokenizers.TokenizersBackend.convert_to_native_format: a string is the path of a file.
    if key in ("vocab", "merges"):
        return isinstance(value, str)
    # SentencePiece (model_file), MeCab and Sudachi (dictionaries) open the files in their arguments.
    if key.endswith("_kwargs"):
        return bool(value)
    if key == UNUSED_FILE_SETTING or not key.endswith(("_file", "_files")):
        return False
    # Some releases of transformers open the named file, others ignore it and open the default file
    # (tokenization_utils_base.get_fast_tokenizer_file also accepts "../tokenizer.4.0.0.json"). Many tokenizers contain a
    # path on the machine of their author, which does not exist here.
    names = value if isinstance(value, (list, dict)) else [value]
    paths = [folder / name for name in names if isinstance(name, str) and name and "\0" not in name]
    roots = _allowed_roots(folder)
    return not all(_is_within(path, roots) or not path.exists() for path in paths)


def check_file_locations(folder: Path, name: str) -> None:
    """Check that a load opens only regular files in the directory of the model, after resolving links and weight indexes.

    A directory in the cache of huggingface_hub has links to the blobs of the same model. A pipe, a socket or a device
    would block the load forever.
    """
    templates = folder / CHAT_TEMPLATES
    try:
        paths = sorted(folder.iterdir())
        if templates.is_dir():
            paths += sorted(templates.iterdir())
    except OSError as error:
        raise InvalidModelError(
            f"The folder of {describe_value(name)} cannot be read: {error.strerror}.",
            "Check its permissions, or use another folder.",
        ) from error
    roots = _allowed_roots(folder)
    for path in paths:
        check_file(path, name)
        if path.is_symlink() and (path.is_file() or path == templates) and not _is_within(path, roots):
            raise UntrustedModelError(
                f"The file {describe_file(path)} of {describe_value(name)} is a link to a file outside its folder.",
                "Replace the link with the file.",
            )
    for index in (SAFETENSORS_FILES[1], PICKLE_FILES[1]):
        for part in map(Path, _shard_files(folder / index)):
            if part.is_absolute() or ".." in part.parts or not _is_within(folder / part, roots):
                raise UntrustedModelError(
                    f"The index of the weights of {describe_value(name)} refers to a file outside its folder.",
                    "Move all files into one folder, and use their names in the index.",
                )
            check_file(folder / part, name)


def _allowed_roots(folder: Path) -> tuple[Path, ...]:
    """Return the directories that may contain the files of a model: its own, and the blobs of the Hub cache."""
    root = Path(os.path.realpath(folder))
    if root.parent.name != "snapshots":
        return (root,)
    return root, Path(os.path.realpath(root.parent.parent / "blobs"))


def _is_within(path: Path, roots: Iterable[Path]) -> bool:
    """Return whether a path is in one of several directories after following all links."""
    try:
        real = Path(os.path.realpath(path))
    except (OSError, ValueError):  # The load reports an invalid name.
        return True
    return any(real.is_relative_to(root) for root in roots)
