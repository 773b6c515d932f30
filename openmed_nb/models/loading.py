"""Load a model from a folder."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..devices.backend import TENSOR_LOCK, import_torch
from ..devices.moving import narrower_types
from ..devices.request import kind_of
from ..errors import DeviceUnavailable, ModelError, ModelUnusable, OpenMedWarning, cause
from .config import OpenMedConfig
from .files import (
    check_labels,
    check_remote_code,
    check_unknown_words,
    check_vocabulary,
    check_weights,
    is_allowed,
    parts_of,
    positions_of,
    read_config,
    usable_length,
    weight_files,
)
from .hub import fetch_model
from .outside import check_paths, check_settings, everything_in
from .quantization import INT8, check_int8, is_quantized, quantize
from .registry import ModelReference, find_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """Keep the garbage collector from running while transformers is imported, which saves a fifth of the time.

    Importing makes some hundred thousand objects that stay, and the collector would look through them again and again;
    the code of a model's family is imported with its load.
    ``benchmarks/startup.py`` measures it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@collector_at_rest()
def import_transformers() -> None:
    """Import torch, and what of transformers a load needs.

    Raises:
        TorchUnusable: Where torch cannot be imported.
        ModelError: Where transformers cannot, for instance because an earlier import was interrupted.
    """
    if sys.flags.optimize > 1:  # transformers' auto_docstring reads the docstrings of its classes while it is imported.
        what = "Python runs without docstrings (-OO or PYTHONOPTIMIZE=2), and transformers needs its own."
        raise ModelError(what, "Run Python without that option, or with -O.")
    import_torch()
    try:
        from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer  # noqa: F401
    except Exception as error:
        # A damaged installation, or one that was interrupted while it was imported, fails in any way.
        what = f"transformers cannot be imported: {cause(error)}."
        raise ModelError(what, "Restart the kernel; if it fails again, reinstall transformers.") from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bar and warnings during a load, and give them back as they were.

    What its warnings say of missing weights is an error here.
    """
    from transformers.utils import logging

    bar_was_on, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar_was_on:
            logging.enable_progress_bar()


@contextlib.contextmanager
def without_kernels(trusted: bool) -> Iterator[None]:
    """Keep transformers from fetching native code from the hub during the load of a model that was not allowed by name.

    Where the package ``kernels`` is installed, some families ask it for code that no setting names: falcon and gpt_neo
    while they are imported, mra and yoso while they are built. They do without where it cannot be had.
    """
    from transformers.integrations import hub_kernels

    kernels = sys.modules.get("kernels")
    fetch = getattr(kernels, "get_kernel", None)
    if trusted or fetch is None:
        yield
        return
    places = [
        (module, name) for module in (kernels, hub_kernels) for name, value in vars(module).items() if value is fetch
    ]
    for place in places:
        setattr(*place, refuse_kernel)
    try:
        yield
    finally:
        for place in places:
            setattr(*place, fetch)


def refuse_kernel(*_arguments: Any, **_options: Any) -> Any:
    """Refuse to fetch native code.

    Raises:
        ImportError: Always.
    """
    raise ImportError("No code is fetched for a model that is not allowed by name.")


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


READ_AS = {INT8: "float32", "auto": "float32"}
"""In which type weights are read that become another one; what ``auto`` stands for is decided above this floor."""


@dataclass(frozen=True)
class LoadSpec:
    """Everything that makes two loads the same model; how its files are fetched does not.

    Attributes:
        reference: Where the model is.
        remote_code: Whether ``trust_remote_code=True`` was passed.
        settings: The settings that change what is loaded, or whether it may be.
        files: Name, size and time of each file of a folder, which can change under our hands; empty for the hub.
        config: All settings.
        folder: Where its files are, where that is known already.
    """

    reference: ModelReference
    remote_code: bool
    settings: tuple[Any, ...]
    files: tuple[tuple[str, int, int], ...]
    config: OpenMedConfig = field(compare=False)
    folder: Path | None = field(default=None, compare=False)

    @classmethod
    def of(cls, name: str | None, config: OpenMedConfig, remote_code: bool = False) -> LoadSpec:
        """Return the specification for a name."""
        settings = (config.dtype, config.revision, config.cache_dir, config.allow_pickle, config.remote_code_allowed)
        reference = find_model(name, config.default_org)
        return cls(reference, remote_code, settings, () if reference.on_hub else files_in(reference.location), config)

    @property
    def dtype(self) -> str:
        """The type that its weights shall have."""
        return self.config.dtype

    def in_dtype(self, dtype: str) -> LoadSpec:
        """Return the specification of the same model in another type."""
        return replace(self, settings=(dtype, *self.settings[1:]), config=replace(self.config, dtype=dtype))


def files_in(folder: str) -> tuple[tuple[str, int, int], ...]:
    """Return name, size in bytes and time of change in nanoseconds of each file in a folder."""
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found))


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer and settings, in memory.

    Attributes:
        name: What the person calls it.
        model: The model, in evaluation mode, on its device.
        tokenizer: A fast tokenizer, whose ``model_max_length`` the model can really take.
        config: The model's settings.
        folder: Where its files are.
        pipelines: The pipelines over it, by their options; they go when it goes.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: PreTrainedConfig
    folder: Path
    pipelines: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the three parts under the names that OpenMed's ``load_model`` uses."""
        return {"model": self.model, "tokenizer": self.tokenizer, "config": self.config}


def load(spec: LoadSpec, device: str) -> LoadedModel:
    """Load a model and move it to a device.

    Args:
        spec: Which model, and how.
        device: What ``Module.to`` takes.

    Raises:
        UnknownModel, ModelUnreachable: Where its files cannot be had.
        ModelRefused: Where it would run code that was not allowed by name, or reads files outside its folder.
        ModelUnusable: Where its files are damaged, for another task, or without token offsets.
        DeviceUnavailable: Where it does not fit on the device.
        ConfigurationError: For int8 on another device than the CPU, and where torch cannot make it.
    """
    name = spec.reference.name
    check_int8(spec.dtype, device)
    folder, allowed = model_folder(spec), spec.config.remote_code_allowed
    settings = read_config(folder, name)
    trusted = is_allowed(spec.reference, allowed)
    check_settings(folder, settings, spec.reference, trusted)
    safetensors = check_weights(folder, name, spec.config.allow_pickle)
    remote = check_remote_code(settings, spec.reference, allowed, spec.remote_code)
    import_transformers()
    stored = stored_tensors(weight_files(folder))
    check_counts(settings, stored, name)
    # transformers sets torch's default type while it makes a model: a load in another thread would take it over.
    with TENSOR_LOCK, collector_at_rest(), quiet_transformers(), without_kernels(trusted):
        config = load_config(folder, name, READ_AS.get(spec.dtype, spec.dtype), remote)
        tokenizer = load_tokenizer(folder, name, config, remote)
        check_labels(settings, config, name)
        with unusable_on_error("weights file", name, folder):
            if not remote:
                check_size(settings, config, stored, name)
            model, info = load_weights(folder, config, safetensors, remote)
    check_loaded(model, info, stored, name)
    check_vocabulary(tokenizer, model, name)
    check_unknown_words(tokenizer, name)
    if spec.dtype == INT8:
        model = quantize(model)
    tokenizer.model_max_length = usable_length(tokenizer, positions_of(model))
    move(model, device, name)
    return LoadedModel(name, model, tokenizer, model.config, folder)


def model_folder(spec: LoadSpec) -> Path:
    """Return the folder with the model's files, downloading them where they are on the hub.

    Raises:
        UnknownModel, ModelUnreachable: Where they cannot be had.
        ModelRefused: Where some are elsewhere on this computer, behind a link or an index.
    """
    folder = spec.folder
    if folder is None and spec.reference.on_hub:
        code = is_allowed(spec.reference, spec.config.remote_code_allowed)
        folder = fetch_model(spec.reference.location, spec.config, code)
    folder = folder or Path(spec.reference.location)
    check_paths(folder, parts_of(folder), spec.reference.name)
    return folder


@contextlib.contextmanager
def unusable_on_error(part: str, name: str, folder: Path) -> Iterator[None]:
    """Turn any error while a part of a model is loaded into one that says which part, of which model.

    Damaged files make transformers raise errors of every class, bare Exceptions of the tokenizers library among them.

    Raises:
        ModelUnusable: For any error but a lack of memory, which is not the model's fault.
    """
    try:
        yield
    except (MemoryError, ModelUnusable):
        raise
    except Exception as error:
        raise ModelUnusable(f"The {part} of {name!r} does not load: {cause(error)}.", _again(folder)) from error


def load_config(folder: Path, name: str, dtype: str, remote: bool) -> PreTrainedConfig:
    """Load the settings of a model folder, with the type that its weights shall have.

    The type is always given, because transformers 5 otherwise takes the stored one, and a 16-bit file is three times
    slower on a CPU.

    Raises:
        ModelUnusable: Where they are those of no model that transformers knows, or make no sense.
    """
    from transformers import AutoConfig

    with unusable_on_error("config.json", name, folder):
        return AutoConfig.from_pretrained(folder, dtype=dtype, local_files_only=True, trust_remote_code=remote)


def load_tokenizer(folder: Path, name: str, config: PreTrainedConfig, remote: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder.

    Raises:
        ModelUnusable: Where it is damaged or missing, or cannot say where in the text a token stands.
    """
    from transformers import AutoTokenizer

    with unusable_on_error("tokenizer", name, folder):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, config=config, local_files_only=True, trust_remote_code=remote
        )
    files = tokenizer.vocab_files_names.values()
    if files and not any((folder / file).is_file() for file in files):
        # transformers would go on with an empty vocabulary, in which every word is unknown.
        what = f"The folder of {name!r} holds no tokenizer: it has no {' or '.join(sorted(files))}."
        raise ModelUnusable(what, _again(folder))
    if not tokenizer.is_fast:
        raise ModelUnusable(
            f"The tokenizer of {name!r} gives no offsets, so entities could not be found in the text.",
            "Use a model with a fast tokenizer (a tokenizer.json).",
        )
    if tokenizer.pad_token is None:
        # The windows of a long text are padded to one length. Padding is masked, so any token will do.
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def load_weights(
    folder: Path, config: PreTrainedConfig, safetensors: bool, remote: bool
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load the weights of a model folder into memory, for evaluation; return the model, and what was loaded of it."""
    from transformers import AutoModelForTokenClassification

    model, info = AutoModelForTokenClassification.from_pretrained(
        folder,
        config=config,
        dtype=config.dtype,
        use_safetensors=safetensors,
        local_files_only=True,
        trust_remote_code=remote,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    return model.eval(), info


def move(model: PreTrainedModel, device: str, name: str) -> None:
    """Move a model to a device, float64 tensors as float32 where the device is mps, which has no float64.

    Raises:
        DeviceUnavailable: Where it does not fit; the model is then whole on its former device.
        ConfigurationError: For a model in int8, which stays on the CPU.
    """
    import torch

    if is_quantized(model):
        check_int8(INT8, device)
    former = model.device
    if kind_of(device) == "mps":
        _without_float64(model)
    with TENSOR_LOCK:
        try:
            model.to(torch.device(device))
        except (RuntimeError, AssertionError) as error:  # an AssertionError where torch was built without the device
            model.to(former)
            raise DeviceUnavailable(
                f"The model {name!r} could not be moved to {device}: {cause(error)}.",
                "Unload other models first, or use the CPU.",
            ) from error
        except BaseException:  # An interrupted move leaves no model in two halves.
            model.to(former)
            raise


def _without_float64(model: PreTrainedModel) -> None:
    smaller = narrower_types()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(smaller.get(tensor.dtype, tensor.dtype))


def _again(folder: Path) -> str:
    return f"Check or download the files in {folder.name!r} again."
