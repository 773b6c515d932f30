"""The files of a model: what they must hold, what they may not ask for, their digests, and how long a text the model reads.

transformers follows many settings of a ``config.json`` and of a tokenizer's files. Most describe the model; those in the
tables below make it import, fetch or open something else, so a model that was not allowed by name is refused for them.
All is checked before any file of the model is handed to transformers.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._utils.text import describe_error, describe_file, describe_names, describe_value
from ..errors import InvalidModelError, UntrustedModelError
from . import limits
from .registry import ModelReference

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

ARCHITECTURE_SUFFIX = "ForTokenClassification"
MOST_SHARDS = 1000
SAFETENSORS_FILES = ("model.safetensors", "model.safetensors.index.json")
PICKLE_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
DISTRIBUTED_SHARD_PATTERN = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")

# A config.json may name another one for a version of transformers, such as config.4.0.0.json.
CONFIG_PATTERNS = ("config*.json", "*.py")

# The files that tokenizers of transformers are made of (vocab_files_names of its classes), those for a version among
# them, such as tokenizer.4.0.0.json.
TOKENIZER_PATTERNS = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
)

# What transformers adds to the weights where the package peft is installed.
ADAPTER = ("adapter_config.json", "adapter_model.*")

# Tokenizers without a limit give a number far above this one (transformers' VERY_LARGE_INTEGER).
MAX_PLAUSIBLE_LENGTH = 1_000_000

# What configurations call the longest input; MPT has no table of positions, and cannot read more either.
MAX_LENGTH_KEYS = ("max_position_embeddings", "max_seq_len")

# What models call their table of positions of tokens. Those of boxes, of words in pairs and of pictures have other names, or
# stand elsewhere than the embeddings of tokens.
POSITION_TABLES = (
    "position_embeddings",
    "position_embedding",
    "position_embedding_table",
    "position_embeds_layer",
    "positions_embed",
    "positional_embedding",
    "positional_embeddings",
    "embed_positions",
    "pos_embed",
    "pos_emb",
    "wpe",
)

# Cyrillic, cuneiform and runic letters and an emoji that hardly any vocabulary has.
RARE_CHARACTERS = "\ua66e \U00012000 \u16a0 \U0001f9ff"

OTHER_MODEL_REMEDY = "Use the name or the folder of a token-classification model in safetensors."
READ_CHUNK_BYTES = 1 << 20


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """Return the model's ``config.json`` after checking that it is for token classification."""
    file = folder / "config.json"
    limits.check_file(file, name)
    if not file.is_file():
        raise InvalidModelError(f"{describe_value(name)} holds no model: it has no config.json.", OTHER_MODEL_REMEDY)
    problem = "holds no settings"
    try:
        config = limits.read_json(file)
    except (OSError, ValueError, RecursionError) as error:
        config = None
        problem = f"cannot be read: {describe_error(error)}"
    if not isinstance(config, dict):
        raise InvalidModelError(f"The config.json of {describe_value(name)} {problem}.", "Download the model again.")
    limits.check_label_counts(config, name)
    architectures = config.get("architectures")
    if (
        isinstance(architectures, list)
        and architectures
        and not any(str(kind).endswith(ARCHITECTURE_SUFFIX) for kind in architectures)
    ):
        # transformers would fill the head with random numbers.
        kind = describe_names([str(architectures[0])])
        what = f"The model {describe_value(name)} is a {kind}, which is not a token classifier."
        raise InvalidModelError(what, OTHER_MODEL_REMEDY)
    return config


def check_labels(settings: dict[str, Any], config: PreTrainedConfig, name: str) -> None:
    """Check that every output of a model has a label; ``config`` is what transformers made of its ``config.json``."""
    stated = settings.get("id2label")
    count = settings.get("num_labels")
    labels = config.id2label
    problem = ""
    if not labels:
        problem = f"The model {describe_value(name)} has no labels."
    elif (
        isinstance(stated, dict)
        and isinstance(count, int)
        and count != len(stated)
        # transformers takes num_labels, and names the labels LABEL_0, LABEL_1 and so on.
        and not all(re.fullmatch(r"LABEL_\d+", str(label)) for label in stated.values())
    ):
        problem = f"The id2label of {describe_value(name)} names {len(stated)} labels, and its num_labels is {count}."
    elif set(labels) != set(range(config.num_labels)) or not all(
        isinstance(label, str) and label.isprintable() for label in labels.values()
    ):
        count = config.num_labels
        problem = f"The id2label of {describe_value(name)} does not give one text for each of its {count} labels."
    if problem:
        raise InvalidModelError(problem, "Correct id2label in its config.json.")


def check_weights(folder: Path, name: str, allow_pickle: bool) -> bool:
    """Check that a folder has weights that may be loaded; return whether transformers finds them as safetensors."""
    if any(DISTRIBUTED_SHARD_PATTERN.fullmatch(file.name) for file in folder.glob("shard-*.safetensors")):
        # transformers would read them in the place of all others, and never report what it did not use.
        what = f"The weights of {describe_value(name)} are a distributed checkpoint."
        raise InvalidModelError(what, "Save the model with save_pretrained() in one process.")
    disguised = any(not shard.endswith(".safetensors") for shard in shard_files(folder / SAFETENSORS_FILES[1]))
    safe = any((folder / file).is_file() for file in SAFETENSORS_FILES)
    pickled = any((folder / file).is_file() for file in PICKLE_FILES)
    if safe and not disguised:
        return True
    if not disguised and not pickled:
        remedy = (
            "Use a model with a model.safetensors, or pass allow_pickle=True if it has a pickle file that you trust."
        )
        raise InvalidModelError(f"The model {describe_value(name)} has no weights in safetensors.", remedy)
    if not allow_pickle:
        what = f"The weights of {describe_value(name)} are a pickle file, which can run any code when it is loaded."
        remedy = "Convert them to safetensors, or pass allow_pickle=True if you trust whoever made them."
        raise UntrustedModelError(what, remedy)
    return disguised


def shard_files(index: Path) -> set[str]:
    """Return the files that an index of weights points to."""
    weight_map = limits.read_json_object(index).get("weight_map")
    return {str(shard) for shard in weight_map.values()} if isinstance(weight_map, dict) else set()


@dataclass(frozen=True)
class ModelHashes:
    """Fingerprints of the files that a model is loaded from."""

    weights: str
    settings: str  # Of its config.json, and of code of its own.
    tokenizer: str


def hash_model_files(folder: Path) -> ModelHashes:
    """Return the fingerprints of a model's files; a file is read once in a process, until it changes."""
    return ModelHashes(
        hash_files([*weight_files(folder), *match_files(folder, ADAPTER)]),
        hash_files(match_files(folder, CONFIG_PATTERNS)),
        hash_files(match_files(folder, TOKENIZER_PATTERNS)),
    )


def weight_files(folder: Path) -> list[Path]:
    """Return the files that weights are loaded from, in transformers' order: one file, or an index and what it names."""
    for single, index in (SAFETENSORS_FILES, PICKLE_FILES):
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            parts = (folder / shard for shard in sorted(shard_files(folder / index)))
            return [folder / index, *(part for part in parts if part.is_file())]
    return []


def match_files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files of a folder that match a pattern, in alphabetical order."""
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def hash_files(files: Iterable[Path]) -> str:
    """Return a short text that changes with the name or any byte of a file."""
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        try:
            content = file_digest(path)
        except OSError as error:
            what = f"The file {describe_file(path)} of the model cannot be read: {describe_error(error)}."
            raise InvalidModelError(what, "Check it, or download the model again.") from error
        digest.update(f"{path.name}\0{content}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def file_digest(path: Path, algorithm: str = "blake2b") -> str:
    """Return the digest of a file; it is read once in a process, until its size or a time changes."""
    found = path.stat()
    # A copy may keep the time of change of its original, but not the one that the system sets.
    return read_digest(str(path), algorithm, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@functools.lru_cache(maxsize=4096)
def read_digest(path: str, algorithm: str, _size: int, _changed: int, _touched: int) -> str:
    digest = hashlib.blake2b(digest_size=16) if algorithm == "blake2b" else hashlib.new(algorithm)
    with Path(path).open("rb") as file:
        while piece := file.read(READ_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, name: str) -> None:
    """Check that a tokenizer reads all characters, and that the model has an embedding for each of its tokens."""
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= rows:  # An error in the middle of a text on a CPU, silently zero rows on MPS.
        what = f"The tokenizer of {describe_value(name)} has token {largest}, and the model has embeddings for {rows} tokens."
        raise InvalidModelError(what, "Call resize_token_embeddings on the model, and save both together.")
    try:
        with limits.panics_as_errors():
            tokenizer(RARE_CHARACTERS)
    except Exception as error:  # The tokenizers library raises bare Exceptions.
        what = f"The tokenizer of {describe_value(name)} cannot read what is not in its vocabulary: {describe_error(error)}."
        raise InvalidModelError(what, "Add its unknown token to the vocabulary, or use another model.") from error


def max_positions(model: torch.nn.Module) -> int | None:
    """Return how many tokens a model has positions for, ``None`` where nothing limits them.

    A table of positions has a row for each; where it has a row for padding, as RoBERTa's, the first token's is the
    next one. A model may take fewer than its table has, which its configuration then gives.
    """
    limits = [getattr(getattr(model, "config", None), name, None) for name in MAX_LENGTH_KEYS]
    table = position_table(model)
    if table is not None:
        padding = table.padding_idx
        limits.append(table.weight.shape[0] - (0 if padding is None else padding + 1))
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def position_table(model: torch.nn.Module) -> Any:
    """Return the table of the positions of tokens, ``None`` where a model has none, or one that grows.

    A model may have others, for pictures or for what it writes: the one beside the embeddings of tokens counts, or else
    the one a level from there, as in RoFormer.
    """
    modules = list(model.named_modules())
    tables = {
        name: module
        for name, module in modules
        if name.rpartition(".")[2] in POSITION_TABLES and hasattr(module, "padding_idx") and hasattr(module, "weight")
    }
    try:
        tokens = getattr(model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:  # transformers raises it for a model that it cannot answer for.
        tokens = None
    weight = getattr(tokens, "weight", None)
    if weight is None:
        return tables.popitem()[1] if len(tables) == 1 else None
    homes = [_parent(name) for name, module in modules if getattr(module, "weight", None) is weight]
    beside = [name for name in tables if _parent(name) in homes]
    near = [name for name in tables if _parent(_parent(name)) in map(_parent, homes)]
    for name in (*beside, *near):
        return None if hasattr(tables[name], "make_weight") else tables[name]
    return None


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def usable_length(tokenizer: PreTrainedTokenizerBase, positions: int | None) -> int:
    """Return how many tokens a model with some positions really takes, special tokens included.

    Some tokenizers know no limit, and a text beyond the model's position table gives an IndexError on a CPU and
    silently wrong rows on MPS.
    """
    shortest = tokenizer.num_special_tokens_to_add() + 1
    limits = [limit for limit in (tokenizer.model_max_length, positions) if isinstance(limit, (int, float))]
    return int(min((limit for limit in limits if shortest <= limit < MAX_PLAUSIBLE_LENGTH), default=512))


# What the files may not ask for: code, downloads, and files outside their folder.

# The implementations of attention, and of mixtures of experts, that are part of torch and transformers. All others are
# packages that transformers imports or, with the package "kernels", fetches from the hub as native code.
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")

# transformers calls from_pretrained of any class of its own with the name in tokenizer_class, a model or a processor too.
# AutoTokenizer and RagTokenizer load what further files name.
TOKENIZER_CLASS = re.compile(
    r"(?!Auto|Rag)\w*(Tokenizer|TokenizerFast|TokenizersBackend|PythonBackend|SentencePieceBackend)"
)

# Settings that replace checked files by unchecked ones, whoever made the model.
FORBIDDEN_SETTINGS = ("transformers_weights", "configuration_files")

# The one folder inside a model's that transformers reads.
CHAT_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class SettingRule:
    """What a file may have for a setting."""

    is_harmless: Callable[
        [Any, Path], bool
    ]  # Whether transformers stays inside with a value, given the model's folder.
    effect: str  # What a file with another value does, as the middle of a sentence.


def _is_empty(value: Any, _folder: Path) -> bool:
    return not value


def _is_no_text(value: Any, _folder: Path) -> bool:
    return not isinstance(value, str)


def _is_known_code(value: Any, folder: Path) -> bool:
    """Return whether an implementation, or all in a mapping with one for each part of a model, is torch's own."""
    if isinstance(value, dict):
        return all(_is_known_code(part, folder) for part in value.values())
    return value is None or (isinstance(value, str) and value in IMPLEMENTATIONS)


def _is_not_timm(value: Any, _folder: Path) -> bool:
    return value not in ("timm_wrapper", "timm_backbone")


def _is_tokenizer_class(value: Any, _folder: Path) -> bool:
    return not isinstance(value, str) or bool(TOKENIZER_CLASS.fullmatch(value))


def _is_path_inside(value: Any, folder: Path) -> bool:
    """Return whether paths lead to nothing outside a folder; many tokenizers keep the path that their maker had."""
    paths = value if isinstance(value, (list, dict)) else [value]
    into = allowed_roots(folder)
    named = [folder / path for path in paths if isinstance(path, str) and path and "\0" not in path]
    return all(is_within(path, into) or not path.exists() for path in named)


NO_TOKENIZER = SettingRule(_is_tokenizer_class, "names a class that is not a tokenizer")
FOREIGN_CODE = SettingRule(_is_known_code, "asks for code that is not part of transformers")
QUANTIZATION = SettingRule(_is_empty, "asks for the code of a quantization method")

# What transformers 5.23 does with settings of a config.json, at any depth of it, also with the marks of private
# attributes (_attn_implementation, _attn_implementation_internal). auto_map is check_remote_code's.
CONFIG_RULES = {
    # modeling_utils.PreTrainedModel._check_and_adjust_attn_implementation; a mapping is by part, "" being the whole
    "attn_implementation": FOREIGN_CODE,
    # integrations.moe.ExpertsInterface: "deepgemm" and "sonicmoe" are fetched from the hub by the first forward pass
    "experts_implementation": FOREIGN_CODE,
    # quantizers.auto.get_hf_quantizer: imports a package of each method; mxfp4, fp8 and others fetch kernels
    "quantization_config": QUANTIZATION,
    # quantizers.auto: the older name of the same setting in compressed-tensors
    "compression_config": QUANTIZATION,
    # models.timm_wrapper, models.timm_backbone: timm.create_model takes "hf_hub:..." and "local-dir:..." as architecture
    "model_type": SettingRule(_is_not_timm, "asks for a model of timm"),
    # configuration_utils.PreTrainedConfig.__setattr__: gives any setting another name, so that none can be checked
    "attribute_map": SettingRule(_is_empty, "renames settings"),
    # models.auto.tokenization_auto.tokenizer_class_from_name
    "tokenizer_class": NO_TOKENIZER,
    # modeling_utils._get_resolved_checkpoint_files
    "transformers_weights": SettingRule(_is_empty, "names weights of its own"),
    # configuration_utils.PreTrainedConfig.get_config_dict
    "configuration_files": SettingRule(_is_empty, "names other settings"),
}

# The same for the settings of a model's parts, such as vision_config; no token classifier has them for the whole.
PART_RULES = {
    **CONFIG_RULES,
    # backbone_utils.consolidate_backbone_kwargs_to_config: reads the settings of another model on the hub
    "backbone": SettingRule(_is_empty, "names another model"),
    "use_timm_backbone": SettingRule(_is_empty, "asks for a model of the package timm"),
}

# The same for tokenizer_config.json and special_tokens_map.json, which both become arguments of the tokenizer.
TOKENIZER_RULES = {
    # tokenization_utils_tokenizers.TokenizersBackend.__init__: opens the path, the name of a folder before it
    "gguf_file": SettingRule(_is_empty, "names another file"),
    # tokenization_utils_base.PreTrainedTokenizerBase._from_pretrained: are passed to the class in the place of its files
    "init_inputs": SettingRule(_is_empty, "has arguments of its own"),
    # tokenization_utils_tokenizers.TokenizersBackend.convert_to_native_format: text is the path of a file
    "vocab": SettingRule(_is_no_text, "names another file"),
    "merges": SettingRule(_is_no_text, "names another file"),
    "tokenizer_class": NO_TOKENIZER,
}

# The same for the ends of their names: some releases of transformers open the file that is named, some their own files
# (tokenization_utils_base.get_fast_tokenizer_file takes "../tokenizer.4.0.0.json" too); SentencePiece (model_file), MeCab and
# Sudachi (dictionaries) open what arguments for them name.
ENDING_RULES = {
    ("_file", "_files"): SettingRule(_is_path_inside, "names a file outside its folder"),
    ("_kwargs",): SettingRule(_is_empty, "has arguments for another library"),
}

# Nothing opens it, and many tokenizers have it.
NOT_OPENED = "special_tokens_map_file"

# The settings of a special_tokens_map.json. It overrides everything else, tokenizer_file and is_local too.
SPECIAL_TOKENS = re.compile(r".*_tokens?")


def trust_remedy(reference: ModelReference) -> str:
    """Return how a model is allowed by name to run code of its own."""
    wanted = reference.name if reference.on_hub else reference.location
    return f"allow it by name: OpenMedConfig(remote_code_allowed=({wanted!r},))."


def is_trusted(reference: ModelReference, allowed: tuple[str, ...]) -> bool:
    """Tell whether a model is on a list of names: a hub model by alias or id in any case, a folder by its full path."""
    if not reference.on_hub:
        return reference.location in allowed
    return bool({one.casefold() for one in reference.names} & {one.casefold() for one in allowed})


def check_remote_code(config: dict[str, Any], reference: ModelReference, allowed: bool, asked: bool) -> bool:
    """Return whether a model's own Python code is run; where it would without being allowed by name, refuse the model.

    ``asked`` is whether the person passed ``trust_remote_code=True``.
    """
    needed = "auto_map" in config
    if needed:  # Not for a family that transformers knows.
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        needed = str(config.get("model_type")) not in CONFIG_MAPPING_NAMES
    if (asked or needed) and not allowed:
        what = f"The model {describe_value(reference.name)} would run Python code of its own."
        raise UntrustedModelError(what, f"If you trust it, {trust_remedy(reference)}")
    return asked or needed


def check_settings(folder: Path, config: dict[str, Any], reference: ModelReference, allowed: bool) -> None:
    """Refuse a model with settings that make transformers import, fetch or open anything but the files in its folder."""
    for file, key, effect in _unsafe_settings(folder, config):
        if key in FORBIDDEN_SETTINGS:
            remedy = "Remove that line."
        elif allowed:
            continue
        else:
            remedy = f"Remove it or, if you trust the model, {trust_remedy(reference)}"
        setting = describe_names([key])
        raise UntrustedModelError(f"The {file} of {describe_value(reference.name)} {effect} in {setting}.", remedy)
    if (folder / "adapter_config.json").is_file() and not allowed:
        what = f"The folder of {describe_value(reference.name)} has an adapter_config.json, which names what the package peft adds to it."
        raise UntrustedModelError(
            what, f"Merge the adapter into the weights or, if you trust it, {trust_remedy(reference)}"
        )


def _unsafe_settings(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the file, the setting and what it does for each that sends transformers elsewhere."""
    for key, value, is_part in limits.walk_settings(config):
        rules = PART_RULES if is_part else CONFIG_RULES
        rule = rules.get(key.removeprefix("_").removesuffix("_internal"))
        if rule and not rule.is_harmless(value, folder):
            yield "config.json", key, rule.effect
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        for key, value in limits.read_json_object(folder / file).items():
            by_ending = (rule for endings, rule in ENDING_RULES.items() if key.endswith(endings) and key != NOT_OPENED)
            rule = TOKENIZER_RULES.get(key) or next(by_ending, None)
            if rule and not rule.is_harmless(value, folder):
                yield file, key, rule.effect
            elif file == "special_tokens_map.json" and not SPECIAL_TOKENS.fullmatch(key):
                yield file, key, "has more than tokens"


def check_links(folder: Path, name: str) -> None:
    """Check that what a load opens are regular files in a model's folder, whatever links and indexes say.

    A folder in the cache of huggingface_hub has links to the blobs of the same model. A pipe, a socket or a device would
    make a load wait for ever.
    """
    templates = folder / CHAT_TEMPLATES
    try:
        paths = sorted(folder.iterdir())
        if templates.is_dir():
            paths += sorted(templates.iterdir())
    except OSError as error:
        what = f"The folder of {describe_value(name)} cannot be read: {error.strerror}."
        raise InvalidModelError(what, "Check its permissions, or name another folder.") from error
    into = allowed_roots(folder)
    for path in paths:
        limits.check_file(path, name)
        if path.is_symlink() and (path.is_file() or path == templates) and not is_within(path, into):
            what = f"The file {describe_file(path)} of {describe_value(name)} is a link to a file outside its folder."
            raise UntrustedModelError(what, "Put the file itself in its place.")
    for index in (SAFETENSORS_FILES[1], PICKLE_FILES[1]):
        parts = [Path(part) for part in shard_files(folder / index)]
        if len(parts) > MOST_SHARDS:
            what = f"The index of the weights of {describe_value(name)} names {len(parts):,} files, and the most are {MOST_SHARDS:,}."
            raise InvalidModelError(what, "Save the model again, in fewer files.")
        for part in parts:
            if part.is_absolute() or ".." in part.parts or not is_within(folder / part, into):
                what = f"The index of the weights of {describe_value(name)} names a file outside its folder."
                remedy = "Put all its files into one folder, and name them in the index as they are called there."
                raise UntrustedModelError(what, remedy)
            limits.check_file(folder / part, name)


def allowed_roots(folder: Path) -> tuple[Path, ...]:
    """Return where the files of a model may really be: in its folder, or where the cache of huggingface_hub has them."""
    home = Path(os.path.realpath(folder))
    if home.parent.name != "snapshots":
        return (home,)
    return home, Path(os.path.realpath(home.parent.parent / "blobs"))


def is_within(path: Path, into: Iterable[Path]) -> bool:
    """Tell whether a path leads into one of several folders once all links are followed."""
    try:
        real = Path(os.path.realpath(path))
    except (OSError, ValueError):  # A name that no file can have, which loading it reports.
        return True
    return any(real.is_relative_to(home) for home in into)
