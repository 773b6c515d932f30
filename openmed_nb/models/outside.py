"""What the files of a model may not ask for: code, downloads, and files outside its folder.

transformers follows many settings of a ``config.json`` and of a tokenizer's files. Most describe the model; those in the
tables below make it import, fetch or open something else, so a model that was not allowed by name is refused for them.
Nothing here imports transformers: a model is checked before any of its files is handed on.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ModelRefused
from .registry import ModelReference

ATTENTION = (None, "eager", "sdpa", "flex_attention")
"""The implementations of attention that are part of torch and transformers. All others are packages that transformers
imports or, with the package ``kernels``, fetches from the hub as native code."""

EXPERTS = (None, "eager", "batched_mm", "grouped_mm")
"""The same for mixtures of experts."""

TOKENIZER_CLASS = re.compile(
    r"(?!Auto|Rag)\w*(Tokenizer|TokenizerFast|TokenizersBackend|PythonBackend|SentencePieceBackend)"
)
"""transformers calls ``from_pretrained`` of whatever class of its own has the name, a model or a processor too.
``AutoTokenizer`` and ``RagTokenizer`` load what further files name."""

NEVER_ALLOWED = ("transformers_weights", "configuration_files")
"""Settings in whose place others are read that nobody has checked, whoever made the model."""

CHAT_TEMPLATES = "additional_chat_templates"
"""The one folder inside a model's that transformers reads."""


class Rule(NamedTuple):
    """A setting that can send transformers elsewhere.

    Attributes:
        harmless: Tells of a value, and the model's folder, whether transformers stays inside.
        does: What a file does that has another value, as the middle of a sentence.
    """

    harmless: Callable[[Any, Path], bool]
    does: str


def absent(value: Any, _folder: Path) -> bool:
    """Tell whether a setting says nothing."""
    return not value


def one_of(names: tuple[str | None, ...]) -> Callable[[Any, Path], bool]:
    """Return a check for names, alone or by the part of the model that they are for."""

    def harmless(value: Any, folder: Path) -> bool:
        if isinstance(value, dict):
            return all(harmless(one, folder) for one in value.values())
        return value is None or (isinstance(value, str) and value in names)

    return harmless


def is_tokenizer_class(value: Any, _folder: Path) -> bool:
    """Tell whether a name is that of a tokenizer."""
    return not isinstance(value, str) or bool(TOKENIZER_CLASS.fullmatch(value))


def is_inside(value: Any, folder: Path) -> bool:
    """Tell whether a path leads to nothing outside a folder; many a tokenizer tells where its maker had its files."""
    if not isinstance(value, str) or not value or "\0" in value:
        return True
    path = folder / value
    return not path.exists() or leads_into(path, homes(folder))


def are_names(value: Any, _folder: Path) -> bool:
    """Tell whether a list of files, or one by version, has names alone."""
    files = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(not isinstance(file, str) or Path(file).name == file for file in files)


CONFIG_RULES = {
    # modeling_utils.PreTrainedModel._check_and_adjust_attn_implementation; a mapping is by part, "" being the whole
    "attn_implementation": Rule(one_of(ATTENTION), "asks for code that is not part of transformers"),
    # integrations.moe.ExpertsInterface: "deepgemm" and "sonicmoe" are fetched from the hub by the first forward pass
    "experts_implementation": Rule(one_of(EXPERTS), "asks for code that is not part of transformers"),
    # quantizers.auto.get_hf_quantizer: imports a package of each method; mxfp4, fp8 and others fetch kernels
    "quantization_config": Rule(absent, "asks for the code of a quantization method"),
    # quantizers.auto: the older name of the same setting in compressed-tensors
    "compression_config": Rule(absent, "asks for the code of a quantization method"),
    # models.timm_wrapper, models.timm_backbone: timm.create_model takes "hf_hub:..." and "local-dir:..." as architecture
    "model_type": Rule(lambda value, _: value not in ("timm_wrapper", "timm_backbone"), "asks for a model of timm"),
    # configuration_utils.PreTrainedConfig.__setattr__: gives any setting another name, so that none can be checked
    "attribute_map": Rule(absent, "renames settings"),
    # models.auto.tokenization_auto.tokenizer_class_from_name
    "tokenizer_class": Rule(is_tokenizer_class, "names a tokenizer that is none"),
    # modeling_utils._get_resolved_checkpoint_files
    "transformers_weights": Rule(absent, "names weights of its own"),
    # configuration_utils.PreTrainedConfig.get_config_dict
    "configuration_files": Rule(absent, "names other settings"),
}
"""What transformers 5.23 does with settings of a ``config.json``, at any depth of it, also with the marks of private
attributes (``_attn_implementation``, ``_attn_implementation_internal``). ``auto_map`` is :func:`.folder.check_remote_code`'s."""

PART_RULES = {
    # backbone_utils.consolidate_backbone_kwargs_to_config: reads the settings of another model on the hub
    "backbone": Rule(absent, "names another model"),
    "use_timm_backbone": Rule(absent, "asks for a model of the package timm"),
}
"""The same for the settings of a model's parts, such as ``vision_config``; no token classifier has them for the whole."""

TOKENIZER_RULES = {
    # tokenization_utils_tokenizers.TokenizersBackend.__init__: opens the path, the name of a folder before it
    "gguf_file": Rule(absent, "names another file"),
    # tokenization_utils_base.PreTrainedTokenizerBase._from_pretrained: are passed to the class in the place of its files
    "init_inputs": Rule(absent, "has arguments of its own"),
    # tokenization_utils_tokenizers.TokenizersBackend.convert_to_native_format: text is the path of a file
    "vocab": Rule(lambda value, _: not isinstance(value, str), "names another file"),
    "merges": Rule(lambda value, _: not isinstance(value, str), "names another file"),
    # tokenization_utils_base.get_fast_tokenizer_file: "../tokenizer.4.0.0.json" matches too
    "fast_tokenizer_files": Rule(are_names, "names files outside its folder"),
    "tokenizer_class": CONFIG_RULES["tokenizer_class"],
}
"""The same for ``tokenizer_config.json`` and ``special_tokens_map.json``, which both become arguments of the tokenizer."""

FILE_RULE = Rule(is_inside, "names a file outside its folder")
"""For all their settings that end in ``_file``; some releases of transformers open what is named, some their own files."""

ARGUMENTS_RULE = Rule(absent, "has arguments for another library")
"""For all that end in ``_kwargs``: SentencePiece (``model_file``), MeCab and Sudachi (dictionaries) open what they name."""

SPECIAL_TOKENS = re.compile(r".*_tokens?")
"""The settings of a ``special_tokens_map.json``. It overrides everything else, ``tokenizer_file`` and ``is_local`` too."""


def check_settings(folder: Path, config: dict[str, Any], reference: ModelReference, allowed: bool) -> None:
    """Check that a model is made of the files in its folder, and of nothing from elsewhere.

    Args:
        folder: Its folder.
        config: Its ``config.json``.
        reference: What a person calls it.
        allowed: Whether it is allowed by name to run code of its own.

    Raises:
        ModelRefused: Where a setting makes transformers import, fetch or open something else.

    Example:
        >>> from openmed_nb.models.registry import ModelReference
        >>> mine = ModelReference("mine", "/models/mine")
        >>> check_settings(Path("mine"), {"text_config": {"_attn_implementation": "sdpa"}}, mine, allowed=False)
        >>> check_settings(Path("mine"), {"text_config": {"_attn_implementation": "some/kernel"}}, mine, allowed=False)
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ModelRefused: The config.json of 'mine' asks for code that is not part of transformers in \
_attn_implementation. Remove it or, if you trust the model, allow it by name: \
OpenMedConfig(remote_code_allowed=('/models/mine',)).
    """
    for file, key, does in departures(folder, config):
        if key in NEVER_ALLOWED:
            raise ModelRefused(f"The {file} of {reference.name!r} {does} in {key}.", "Remove that line.")
        if not allowed:
            what = f"The {file} of {reference.name!r} {does} in {key}."
            raise ModelRefused(what, f"Remove it or, if you trust the model, {permission(reference)}")
    if (folder / "adapter_config.json").is_file() and not allowed:
        what = f"The folder of {reference.name!r} has an adapter_config.json, which names what the package peft adds to it."
        raise ModelRefused(what, f"Merge the adapter into the weights or, if you trust it, {permission(reference)}")


def permission(reference: ModelReference) -> str:
    """Return how a model is allowed by name to run code of its own."""
    wanted = reference.name if reference.on_hub else reference.location
    return f"allow it by name: OpenMedConfig(remote_code_allowed=({wanted!r},))."


def departures(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the file, the setting and what it does for each that sends transformers elsewhere."""
    for key, value, inner in everything_in(config):
        rules = {**CONFIG_RULES, **PART_RULES} if inner else CONFIG_RULES
        rule = rules.get(key.removeprefix("_").removesuffix("_internal"))
        if rule and not rule.harmless(value, folder):
            yield "config.json", key, rule.does
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        for key, value in settings_in(folder / file).items():
            rule = tokenizer_rule(key)
            if rule and not rule.harmless(value, folder):
                yield file, key, rule.does
            elif file == "special_tokens_map.json" and not SPECIAL_TOKENS.fullmatch(key):
                yield file, key, "has more than tokens"


def tokenizer_rule(key: str) -> Rule | None:
    """Return the rule for a setting of a tokenizer."""
    if key == "special_tokens_map_file":  # Nothing opens it, and it stands in many a tokenizer.
        return None
    if key in TOKENIZER_RULES:
        return TOKENIZER_RULES[key]
    return FILE_RULE if key.endswith("_file") else ARGUMENTS_RULE if key.endswith("_kwargs") else None


def everything_in(settings: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yield every key with its value, however deep in mappings and lists it is, and whether it is not at the top.

    Example:
        >>> list(everything_in({"a": [{"b": 1}]}))
        [('a', [{'b': 1}], False), ('b', 1, True)]
    """
    waiting: list[Any] = [settings]
    while waiting:
        one = waiting.pop()
        values = list(one.values()) if isinstance(one, dict) else one
        if isinstance(one, dict):
            yield from ((key, value, one is not settings) for key, value in one.items())
        waiting += [value for value in values if isinstance(value, (dict, list))]


def settings_in(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; nothing where it is missing or damaged, which loading it reports."""
    try:
        settings = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def check_paths(folder: Path, parts: Iterable[str], name: str) -> None:
    """Check that the files of a model are in its folder, whatever links and indexes say.

    Args:
        folder: Its folder. One in the cache of huggingface_hub has links to the blobs of the same model.
        parts: The files that the indexes of its weights name.
        name: What a person calls it.

    Raises:
        ModelRefused: Where one is elsewhere.
    """
    into = homes(folder)
    templates = folder / CHAT_TEMPLATES
    links = [*folder.glob("*"), *templates.glob("*")]
    for path in links:
        if path.is_symlink() and (path.is_file() or path.name == CHAT_TEMPLATES) and not leads_into(path, into):
            what = f"The file {path.name!r} of {name!r} is a link to a file outside its folder."
            raise ModelRefused(what, "Put the file itself in its place.")
    for part in parts:
        named = Path(part)
        if named.is_absolute() or ".." in named.parts or not leads_into(folder / named, into):
            what = f"The index of the weights of {name!r} names a file outside its folder."
            raise ModelRefused(
                what, "Put all its files into one folder, and name them in the index as they are called there."
            )


def homes(folder: Path) -> tuple[Path, ...]:
    """Return where the files of a model may really be: in its folder, or where the cache of huggingface_hub has them."""
    home = Path(os.path.realpath(folder))
    if home.parent.name != "snapshots":
        return (home,)
    return home, Path(os.path.realpath(home.parent.parent / "blobs"))


def leads_into(path: Path, into: Iterable[Path]) -> bool:
    """Tell whether a path leads into one of several folders once all links are followed."""
    try:
        real = Path(os.path.realpath(path))
    except (OSError, ValueError):  # A name that no file can have, which loading it reports.
        return True
    return any(real.is_relative_to(home) for home in into)
