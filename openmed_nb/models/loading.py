"""Load a model from a folder, in float32 or in a reduced type.

In int8 the linear layers have whole numbers for weights, as torch's dynamic quantization makes them. Only a CPU computes
them (the kernels are those of FBGEMM, oneDNN and QNNPACK), so such a model never leaves it. Embeddings and norms stay in
float32; the inputs of a layer are rounded while it runs.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .._events.activity import defer_interrupts
from .._render.display import pluralize
from .._utils.text import describe_error, describe_file, describe_names, describe_value, shorten
from .._utils.warning import warn
from ..devices.backend import TENSOR_LOCK, gc_disabled, import_torch
from ..devices.moving import mps_dtype_fallbacks
from ..devices.registry import parse_device_argument
from ..errors import ConfigurationError, DeviceUnavailableError, InvalidModelError, ModelError
from . import files, limits
from .config import OpenMedConfig, normalize_dtype
from .registry import ModelReference, download_model, find_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Words in the names of settings that tell how many modules are built, one after another in Python.
MODULE_COUNT_WORDS = frozenset(
    [
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
    ]
)

# A count of modules that no token classifier reaches, unless its weights hold as many tensors.
MAX_MODULES = 1000

# How many numbers a model may have besides its weights: masks and tables that are computed when it is built.
MAX_EXTRA_NUMBERS = 2**28

# What checkpoints hold that a token classifier does not use: the pooler of its body, and tables that are computed
# today. transformers leaves out more by itself (_keys_to_ignore_on_load_unexpected).
UNUSED_WEIGHTS_PATTERN = re.compile(
    r"(^|\.)pooler\.|(^|\.)(position_ids|token_type_ids|\w*inv_freq|masked_bias|num_batches_tracked)$"
    r"|\.(attn|attention)\.bias$"
)

# The heads that a body was trained with; they do not change what it says of tokens.
PRETRAINING_HEADS_PATTERN = re.compile(
    r"(cls|lm_head|mlm|nsp|predictions|discriminator_predictions|generator_\w+|vocab_\w+)\."
)

# Settings that are the probability of a dropout. torch checks some of them only when the model runs.
PROBABILITY = re.compile(r"(\w*_)?(dropout|pdrop|drop_rate|drop_path_rate|layerdrop)(_prob|_p|_rate|_ratio)?")

INT8 = "int8"
OTHER_DTYPE_REMEDY = "Use dtype='bfloat16', or 'float32'."

# What torch warns of while it quantizes: that a later release will not, which is an error here on that day.
EXPECTED_WARNINGS = (
    (DeprecationWarning, r"torch\.ao\.quantization is deprecated and will be removed in"),
    (UserWarning, r"torch\.quantize_per_tensor, torch\.quantize_per_channel and other quantized tensor creation"),
)

# In which type weights are read that become another one; what "auto" stands for is decided before a load.
STORAGE_DTYPES = {INT8: "float32", "auto": "float32"}


@dataclass(frozen=True)
class LoadSpec:
    """Everything that makes two loads the same model; how its files are fetched does not."""

    reference: ModelReference
    remote_code: bool  # Whether trust_remote_code=True was passed.
    settings: tuple[Any, ...]  # Those that change what is loaded, or whether it may be.
    files: tuple[tuple[str, int, int], ...]  # Of a folder, which can change any time; empty for the hub.
    config: OpenMedConfig = field(compare=False)
    folder: Path | None = field(default=None, compare=False)  # Where its files are, where that is known already.

    @classmethod
    def from_name(cls, name: str | None, config: OpenMedConfig, remote_code: bool = False) -> LoadSpec:
        """Return the specification for a name."""
        settings = (config.dtype, config.revision, config.cache_dir, config.allow_pickle, config.remote_code_allowed)
        reference = find_model(name, config.default_org)
        return cls(
            reference, remote_code, settings, () if reference.on_hub else snapshot_files(reference.location), config
        )

    @property
    def dtype(self) -> str:
        """The type that its weights shall have."""
        return self.config.dtype

    def in_dtype(self, dtype: str) -> LoadSpec:
        """Return the specification of the same model in another type."""
        return replace(self, settings=(dtype, *self.settings[1:]), config=replace(self.config, dtype=dtype))


def snapshot_files(folder: str) -> tuple[tuple[str, int, int], ...]:
    """Return name, size in bytes and time of change in nanoseconds of each file in a folder."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # A loop of links, which the load reports.
                    if entry.is_file():
                        found.append((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns))
    except OSError as error:
        what = f"The folder {describe_value(folder)} cannot be read: {error.strerror}."
        raise InvalidModelError(what, "Check its permissions, or name another folder.") from error
    return tuple(sorted(found))


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode on its device, with its tokenizer and settings."""

    name: str  # What the person calls it.
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase  # A fast one, whose model_max_length the model can really take.
    config: PreTrainedConfig
    folder: Path
    # How many tokens run best at once, by kind of device, as it was measured on this computer.
    tuned_batch_tokens: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    # The pipelines over it, by their options; they go when it goes.
    pipelines: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the three parts under the names that OpenMed's ``load_model`` uses."""
        return {"model": self.model, "tokenizer": self.tokenizer, "config": self.config}


@gc_disabled()
def import_transformers() -> None:
    """Import torch, and what of transformers every load needs; an interrupt waits until it is there, as for torch."""
    if sys.flags.optimize > 1:  # transformers' auto_docstring reads the docstrings of its classes while it is imported.
        what = "Python runs without docstrings (-OO or PYTHONOPTIMIZE=2), and transformers needs its own."
        raise ModelError(what, "Run Python without that option, or with -O.")
    import_torch()
    try:
        with defer_interrupts():
            import transformers.modeling_utils  # noqa: F401
            from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer  # noqa: F401
    except Exception as error:
        # A damaged installation, or an import that was interrupted before, fails in any way.
        what = f"transformers cannot be imported: {describe_error(error)}."
        raise ModelError(what, "Restart the kernel; if it fails again, reinstall transformers.") from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bar and warnings during a load; missing weights are an error here."""
    from transformers.utils import logging

    bar_was_on = logging.is_progress_bar_enabled()
    verbosity = logging.get_verbosity()
    try:
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        yield
    finally:
        with defer_interrupts():
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

    def refuse(*_arguments: Any, **_options: Any) -> Any:
        raise ImportError("No code is fetched for a model that is not allowed by name.")

    kernels = sys.modules.get("kernels")
    fetch = None if trusted else getattr(kernels, "get_kernel", None)
    modules = (kernels, hub_kernels) if fetch else ()
    places = [(module, name) for module in modules for name, value in vars(module).items() if value is fetch]
    for place in places:
        setattr(*place, refuse)
    try:
        yield
    finally:
        for place in places:
            setattr(*place, fetch)


@contextlib.contextmanager
def not_on_meta() -> Iterator[None]:
    """Let weights be read where torch's default device is ``meta``, which holds no numbers."""
    import torch

    is_meta = torch.get_default_device().type == "meta"
    with torch.device("cpu") if is_meta else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def translate_load_errors(part: str, name: str, folder: Path) -> Iterator[None]:
    """Turn any error while a part of a model is loaded into one that names the part and the model.

    Damaged files make transformers raise errors of every class, bare Exceptions of the tokenizers library among them.
    A lack of memory is not the model's fault.
    """
    try:
        with limits.panics_as_errors():
            yield
    except (MemoryError, InvalidModelError):
        raise
    except Exception as error:
        what = f"The {part} of {describe_value(name)} does not load: {describe_error(error)}."
        raise InvalidModelError(what, f"Check or download the files in {describe_file(folder)} again.") from error


def load_from_spec(spec: LoadSpec, device: str) -> LoadedModel:
    """Load a model, after every check of its files, and move it to a device."""
    name = spec.reference.name
    check_int8(spec.dtype, device)
    folder = model_folder(spec)
    settings = files.read_config(folder, name)
    trusted = files.is_trusted(spec.reference, spec.config.remote_code_allowed)
    files.check_settings(folder, settings, spec.reference, trusted)
    safetensors = files.check_weights(folder, name, spec.config.allow_pickle)
    remote = files.check_remote_code(settings, spec.reference, trusted, spec.remote_code)
    import_transformers()
    from transformers import AutoConfig, AutoModelForTokenClassification

    stored = stored_tensors(files.weight_files(folder))
    check_module_counts(settings, stored, name)
    check_probabilities(settings, name)
    source: dict[str, Any] = {"local_files_only": True, "trust_remote_code": remote}
    # transformers sets torch's default type while it makes a model: a load in another thread would take it over.
    with TENSOR_LOCK, gc_disabled(), quiet_transformers(), without_kernels(trusted), not_on_meta():
        with translate_load_errors("config.json", name, folder):
            # Without a type transformers 5 takes the stored one, and a 16-bit file is three times slower on a CPU.
            config = AutoConfig.from_pretrained(folder, dtype=STORAGE_DTYPES.get(spec.dtype, spec.dtype), **source)
        tokenizer = load_tokenizer(folder, name, config=config, **source)
        files.check_labels(settings, config, name)
        with translate_load_errors("weights file", name, folder):
            if not remote:
                check_size(settings, config, stored, name)
            model, info = AutoModelForTokenClassification.from_pretrained(
                folder,
                config=config,
                dtype=config.dtype,
                use_safetensors=safetensors,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **source,
            )
    model.eval()
    check_loaded(model, info, stored, name)
    files.check_tokenizer(tokenizer, model, name)
    if spec.dtype == INT8:
        model = quantize(model)
    tokenizer.model_max_length = files.usable_length(tokenizer, files.max_positions(model))
    move_model(model, device, name)
    return LoadedModel(name, model, tokenizer, model.config, folder)


def model_folder(spec: LoadSpec) -> Path:
    """Return the folder with the model's files, downloaded from the hub where they are there, after a look at its paths."""
    folder = spec.folder
    if folder is None and spec.reference.on_hub:
        code = files.is_trusted(spec.reference, spec.config.remote_code_allowed)
        folder = download_model(spec.reference.location, spec.config, code)
    folder = folder or Path(spec.reference.location)
    files.check_links(folder, spec.reference.name)
    return folder


def load_tokenizer(folder: Path, name: str, **options: Any) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder, which must give the place of each token in the text."""
    from transformers import AutoTokenizer

    limits.check_tokenizer_files(folder, name)
    with translate_load_errors("tokenizer", name, folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    needed = tokenizer.vocab_files_names.values()
    if needed and not any((folder / file).is_file() for file in needed):
        # transformers would go on with an empty vocabulary, in which every word is unknown.
        what = f"The folder of {describe_value(name)} holds no tokenizer: it has no {' or '.join(sorted(needed))}."
        raise InvalidModelError(what, f"Check or download the files in {describe_file(folder)} again.")
    if not tokenizer.is_fast:
        what = f"The tokenizer of {describe_value(name)} gives no offsets, so entities could not be found in the text."
        raise InvalidModelError(what, "Use a model with a fast tokenizer (a tokenizer.json).")
    if not (folder / "tokenizer.json").is_file():
        limits.check_built_tokenizer(tokenizer.backend_tokenizer.to_str(), folder, name)
    if tokenizer.pad_token is None:
        # The windows of a long text are padded to one length. Padding is masked, so any token will do.
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def move_model(model: PreTrainedModel, device: str, name: str) -> None:
    """Move a model to a device, or raise DeviceUnavailableError and leave it whole where it was; int8 stays on the CPU."""
    import torch

    if is_quantized(model):
        check_int8(INT8, device)
    if narrower := mps_dtype_fallbacks(device):
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.to(narrower.get(tensor.dtype, tensor.dtype))
    former = model.device
    with TENSOR_LOCK:
        try:
            model.to(torch.device(device))
        except BaseException as error:  # An interrupted move leaves no model in two halves.
            model.to(former)
            if not isinstance(error, (RuntimeError, AssertionError)):
                raise
            # An AssertionError where torch was built without the device.
            what = f"The model {describe_value(name)} could not be moved to {device}: {describe_error(error)}."
            raise DeviceUnavailableError(what, parse_device_argument(device).unload_remedy) from error


class StoredTensor(NamedTuple):
    """A tensor in a file of weights."""

    shape: tuple[int, ...]
    is_integer: bool  # Whether it holds whole numbers.


def stored_tensors(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """Return the tensors in files of weights by their names; none of a damaged file, which loading it reports."""
    import torch
    from safetensors import safe_open

    stored: dict[str, StoredTensor] = {}
    for file in paths:
        with contextlib.suppress(Exception):  # Each library has its own errors for damaged files.
            if file.suffix == ".safetensors":
                with safe_open(file, framework="numpy") as content:
                    for name in content.keys():  # noqa: SIM118 - not a mapping
                        tensor = content.get_slice(name)
                        stored[name] = StoredTensor(tuple(tensor.get_shape()), tensor.get_dtype()[0] in "IU")
            elif file.suffix != ".json":
                # This runs no code of the file, and leaves the numbers in it.
                tensors = torch.load(file, map_location="meta", weights_only=True, mmap=True)
                for name, tensor in tensors.items():
                    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
                    stored[name] = StoredTensor(tuple(tensor.shape), is_whole)
    return stored


def check_module_counts(settings: dict[str, Any], stored: Mapping[str, StoredTensor], name: str) -> None:
    """Refuse settings with more modules or labels than the weights can be for; building such a model would not end."""
    largest = _largest_size(stored)
    for key, value, _ in limits.walk_settings(settings):
        words = set(key.split("_"))
        if "size" in words:
            continue
        if "labels" in words:
            most = max(MAX_MODULES, largest)
        elif words & MODULE_COUNT_WORDS:
            most = max(MAX_MODULES, len(stored))
        else:
            continue
        wanted = max(_iter_integers(value), default=0)
        if wanted > most:
            held = pluralize(len(stored), "tensor")
            setting = f"{describe_names([key])} = {shorten(f'{wanted:,}')}"
            what = f"The config.json of {describe_value(name)} asks for {setting}, and its weights hold {held}."
            raise InvalidModelError(what, "Correct its config.json.")


def check_probabilities(settings: dict[str, Any], name: str) -> None:
    """Refuse settings that are NaN, and dropouts that are not probabilities."""
    for key, value, _ in limits.walk_settings(settings):
        is_probability = PROBABILITY.fullmatch(key) is not None
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                continue
            if math.isnan(number) or (is_probability and not 0 <= number <= 1):
                kind = "a probability from 0 to 1" if is_probability else "a number"
                setting = f"{describe_value(number)} for {describe_names([key])}"
                what = f"The config.json of {describe_value(name)} has {setting}, which is not {kind}."
                raise InvalidModelError(what, "Correct its config.json.")


def check_size(
    settings: dict[str, Any], config: PreTrainedConfig, stored: Mapping[str, StoredTensor], name: str
) -> None:
    """Refuse settings of a model far larger than its weights; the rest of it would be random, in memory that is not there.

    Only a number above every size in the weights can do that; the model is then built without memory, and counted.
    """
    numbers = (number for _, value, _ in limits.walk_settings(settings) for number in _iter_integers(value))
    if not stored or max(numbers, default=0) <= _largest_size(stored):
        return
    import torch
    from transformers import AutoModelForTokenClassification, initialization

    with torch.device("meta"), initialization.no_init_weights():
        model = AutoModelForTokenClassification.from_config(copy.deepcopy(config))
    asked = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    held = sum(math.prod(one.shape) for one in stored.values())
    if asked > 4 * held + MAX_EXTRA_NUMBERS:
        what = f"The config.json of {describe_value(name)} describes a model of {asked:,} numbers, and its weights hold {held:,}."
        raise InvalidModelError(what, "Correct its config.json.")


def _largest_size(stored: Mapping[str, StoredTensor]) -> int:
    return max((size for tensor in stored.values() for size in tensor.shape), default=0)


def _iter_integers(value: Any) -> Iterator[int]:
    """Yield a whole number, or those in lists of lists: of ``[[["global"], 6], 4, True]`` 6 and 4."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting += item
        elif isinstance(item, int) and not isinstance(item, bool):
            yield item


def check_loaded(
    model: PreTrainedModel, info: Mapping[str, Any], stored: Mapping[str, StoredTensor], name: str
) -> None:
    """Check that a model is made of its weights, and of all of them; another head in the weights is a warning.

    ``info`` is what transformers reports of the load (``output_loading_info``).
    """
    holder = f"The weights of {describe_value(name)}"
    missing = sorted({*info["missing_keys"], *(key for key, *_shapes in info["mismatched_keys"])})
    if missing:  # transformers fills them with random numbers.
        what = f"{holder} lack {pluralize(len(missing), 'tensor')} that its config.json asks for, such as {missing[0]}."
        raise InvalidModelError(what, "Check or download its files again.")
    computed = {key for key, _ in model.named_buffers()}
    unexpected = set(info["unexpected_keys"])
    unused = sorted(key for key in unexpected - computed if not UNUSED_WEIGHTS_PATTERN.search(key))
    parts = {part for part, _ in model.named_children()}
    body = [key for key in unused if key.partition(".")[0] in parts]
    if body:
        rest = pluralize(len(body), "tensor")
        what = f"{holder} hold {rest} that its config.json has no place for, such as {body[0]}."
        raise InvalidModelError(what, "Correct its config.json, or check or download its files again.")
    heads = [key for key in unused if not PRETRAINING_HEADS_PATTERN.match(key)]
    if heads:
        rest = pluralize(len(heads), "tensor")
        what = f"{holder} hold {rest} that its architecture does not use, such as {heads[0]}."
        warn(f"{what} Its answers may not be those of whoever trained it.")
    # transformers would read whole numbers into parameters as they are.
    used = stored.keys() - unexpected - computed
    whole = sorted(key for key in used if stored[key].is_integer and not UNUSED_WEIGHTS_PATTERN.search(key))
    if whole:
        what = f"{holder} are whole numbers, such as {whole[0]}, without the scales that make weights of them."
        raise InvalidModelError(what, "Save the model in float32, float16 or bfloat16.")


def check_int8(dtype: str, device: str) -> None:
    """Refuse int8 on any device but the CPU."""
    if dtype == INT8 and not parse_device_argument(device).has_int8:
        what = f"int8 runs on the CPU alone, and the device is {device}."
        raise ConfigurationError(what, "Pass device='cpu', or dtype='bfloat16'.")


def quantize(model: PreTrainedModel) -> PreTrainedModel:
    """Turn the linear layers of a model on the CPU into int8, in place; return the model."""
    import torch

    try:
        quantize_dynamic = torch.ao.quantization.quantize_dynamic
    except AttributeError as error:
        what = f"torch {torch.__version__} has no dynamic quantization, which int8 needs."
        raise ConfigurationError(what, OTHER_DTYPE_REMEDY) from error
    with TENSOR_LOCK, warnings.catch_warnings():
        for category, message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message, category)
        try:
            quantized: PreTrainedModel = quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)
        except RuntimeError as error:
            raise ConfigurationError(
                f"This torch cannot quantize: {describe_error(error)}.", OTHER_DTYPE_REMEDY
            ) from error
    return quantized


def packed_layers(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Return the linear layers with packed weights, which are not parameters, with their names."""
    return [  # By the name of their package: torch need not have such layers.
        (name, layer)
        for name, layer in model.named_modules()
        if type(layer).__module__.startswith("torch.ao.nn.quantized") and hasattr(layer, "in_features")
    ]


def is_quantized(model: PreTrainedModel) -> bool:
    """Tell whether a model has layers in int8."""
    return bool(packed_layers(model))


def dtype_of(model: PreTrainedModel) -> str:
    """Return the type of a model's weights, such as ``"bfloat16"``; a quantized model is int8 whatever else is in it."""
    return INT8 if is_quantized(model) else normalize_dtype(model.dtype)


def packed_bytes(model: PreTrainedModel) -> int:
    """Return the size of packed weights in bytes, without unpacking them: one for each weight, four for each bias."""
    return sum((layer.in_features + 4) * layer.out_features for _, layer in packed_layers(model))
