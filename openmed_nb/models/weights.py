"""What the weights of a model hold, read from the headers of their files, and whether its settings fit them."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ModelUnusable, OpenMedWarning
from .outside import everything_in

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PARTS = {
    "layer",
    "layers",
    "block",
    "blocks",
    "group",
    "groups",
    "expert",
    "experts",
    "repeats",
    "networks",
    "functions",
    "types",
}
"""Words in the names of settings that say how many modules are built, one after another in Python."""

MANY = 1000
"""A count of modules that no token classifier reaches, unless its weights hold as many tensors."""

ROOM = 2**28
"""How many numbers a model may have beside its weights: masks and tables that are computed when it is built."""

REST = re.compile(
    r"(^|\.)pooler\.|(^|\.)(position_ids|token_type_ids|\w*inv_freq|masked_bias|num_batches_tracked)$"
    r"|\.(attn|attention)\.bias$"
)
"""What checkpoints hold that a token classifier does not use: the pooler of its body, and tables that are computed
today. transformers leaves out more by itself (``_keys_to_ignore_on_load_unexpected``)."""

PRETRAINING = re.compile(r"(cls|lm_head|mlm|nsp|predictions|discriminator_predictions|generator_\w+|vocab_\w+)\.")
"""The heads that a body was trained with; they do not change what it says of tokens."""


class Stored(NamedTuple):
    """A tensor in a file of weights.

    Attributes:
        shape: Its shape.
        whole: Whether it holds whole numbers.
    """

    shape: tuple[int, ...]
    whole: bool


def stored_tensors(files: Iterable[Path]) -> dict[str, Stored]:
    """Return the tensors in files of weights by their names."""
    return {name: stored for file in files for name, stored in tensors_of(file).items()}


def tensors_of(file: Path) -> dict[str, Stored]:
    """Return the tensors in a file of weights; none of a damaged one, which loading it reports."""
    try:
        return in_safetensors(file) if file.suffix == ".safetensors" else in_pickle(file)
    except Exception:  # noqa: BLE001 - each library has its own errors for damaged files
        return {}


def in_safetensors(file: Path) -> dict[str, Stored]:
    """Return the tensors of a file in safetensors."""
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - it is no mapping
        return {name: Stored(tuple(one.get_shape()), one.get_dtype()[0] in "IU") for name, one in slices.items()}


def in_pickle(file: Path) -> dict[str, Stored]:
    """Return the tensors of a pickle file, which runs no code of its own and leaves the numbers in the file."""
    import torch

    if file.suffix == ".json":
        return {}
    tensors = torch.load(file, map_location="meta", weights_only=True, mmap=True)
    fractions = torch.is_floating_point
    return {name: Stored(tuple(one.shape), not (fractions(one) or one.is_complex())) for name, one in tensors.items()}


def check_counts(settings: dict[str, Any], stored: Mapping[str, Stored], name: str) -> None:
    """Check that the settings ask for no more modules and labels than the weights can be for.

    Raises:
        ModelUnusable: Where they do; building such a model would take for ever.

    Example:
        >>> check_counts({"num_hidden_layers": 10**9}, {"embeddings": Stored((30522, 768), False)}, "mine")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ModelUnusable: The config.json of 'mine' asks for num_hidden_layers = 1,000,000,000, and its \
weights hold 1 tensor. Correct its config.json.
    """
    largest = max((size for one in stored.values() for size in one.shape), default=0)
    for key, value, _ in everything_in(settings):
        words = set(key.split("_"))
        most = max(MANY, largest) if "labels" in words else max(MANY, len(stored)) if words & PARTS else None
        asked = max(whole_numbers(value), default=0)
        if most is not None and asked > most and "size" not in words:
            held = f"{len(stored):,} {'tensor' if len(stored) == 1 else 'tensors'}"
            what = f"The config.json of {name!r} asks for {key} = {asked:,}, and its weights hold {held}."
            raise ModelUnusable(what, "Correct its config.json.")


def check_size(settings: dict[str, Any], config: PreTrainedConfig, stored: Mapping[str, Stored], name: str) -> None:
    """Check that the settings describe no model that is far larger than its weights.

    Only a number above every size in the weights can do that; the model is then built without memory, and counted.

    Raises:
        ModelUnusable: Where they do; the rest of such a model would be random numbers, in memory that is not there.
    """
    largest = max((size for one in stored.values() for size in one.shape), default=0)
    numbers = (number for _, value, _ in everything_in(settings) for number in whole_numbers(value))
    if not stored or max(numbers, default=0) <= largest:
        return
    import torch
    from transformers import AutoModelForTokenClassification, initialization

    with torch.device("meta"), initialization.no_init_weights():
        model = AutoModelForTokenClassification.from_config(copy.deepcopy(config))
    asked = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    held = sum(math.prod(one.shape) for one in stored.values())
    if asked > 4 * held + ROOM:
        what = f"The config.json of {name!r} describes a model of {asked:,} numbers, and its weights hold {held:,}."
        raise ModelUnusable(what, "Correct its config.json.")


def whole_numbers(value: Any) -> list[int]:
    """Return a whole number, or those in lists of lists.

    Example:
        >>> whole_numbers(12), whole_numbers([[["global"], 6], 4, True]), whole_numbers("12")
        ([12], [4, 6], [])
    """
    waiting, found = [value], []
    while waiting:
        one = waiting.pop(0)
        waiting += one if isinstance(one, list) else ()
        found += [one] if isinstance(one, int) and not isinstance(one, bool) else []
    return found


def check_loaded(model: PreTrainedModel, info: Mapping[str, Any], stored: Mapping[str, Stored], name: str) -> None:
    """Check that a model is made of its weights, and of all of them.

    Args:
        model: The model.
        info: What transformers says of loading it (``output_loading_info``).
        stored: The tensors in its files.
        name: What a person calls it.

    Raises:
        ModelUnusable: Where some of the model would be random numbers, weights of its body have no place in it, or
            weights are whole numbers.

    Warns:
        OpenMedWarning: Where the weights hold another head, without which the answers may be others.
    """
    missing = sorted({*info["missing_keys"], *(key for key, *_shapes in info["mismatched_keys"])})
    if missing:
        what = f"The weights of {name!r} lack {tensors(missing)} that its config.json asks for, such as {missing[0]}."
        raise ModelUnusable(what, "Check or download its files again.")
    computed = {key for key, _ in model.named_buffers()}
    unused = sorted(key for key in {*info["unexpected_keys"]} - computed if not REST.search(key))
    parts = {part for part, _ in model.named_children()}
    body = [key for key in unused if key.partition(".")[0] in parts]
    if body:
        what = f"The weights of {name!r} hold {tensors(body)} that its config.json has no place for, such as {body[0]}."
        raise ModelUnusable(what, "Correct its config.json, or check or download its files again.")
    heads = [key for key in unused if not PRETRAINING.match(key)]
    if heads:
        what = f"The weights of {name!r} hold {tensors(heads)} that its architecture does not use, such as {heads[0]}."
        warnings.warn(f"{what} Its answers may not be those of whoever trained it.", OpenMedWarning, stacklevel=2)
    whole = sorted(own_names(key for key, one in stored.items() if one.whole) & float_names(model))
    if whole:
        what = f"The weights of {name!r} are whole numbers, such as {whole[0]}, without the scales that make weights of them."
        raise ModelUnusable(what, "Save the model in float32, float16 or bfloat16.")


def float_names(model: PreTrainedModel) -> set[str]:
    """Return the names of a model's parameters, with and without the prefix of its body, that are no whole numbers."""
    prefix = f"{model.base_model_prefix}."
    names = {name for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    return names | {name.removeprefix(prefix) for name in names}


def own_names(names: Iterable[str]) -> set[str]:
    """Return the names of tensors as they are today, where old checkpoints say ``gamma`` and ``beta``."""
    renamed = {"gamma": "weight", "beta": "bias"}
    parts = (name.rpartition(".") for name in names)
    return {f"{module}{dot}{renamed.get(last, last)}" for module, dot, last in parts}


def tensors(names: list[str]) -> str:
    """Return how many tensors there are."""
    return f"{len(names)} {'tensor' if len(names) == 1 else 'tensors'}"
