"""Load a model from a directory, in float32 or in a reduced dtype.

In int8 the linear layers have integer weights from torch's dynamic quantization. Its kernels (FBGEMM, oneDNN, QNNPACK) run
on the CPU only, so an int8 model stays there. Embeddings and norms stay in float32. The inputs of a layer are quantized
while it runs.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import math
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .._events.activity import defer_interrupts
from .._render.display import pluralize
from .._utils.text import describe_error, describe_file, describe_names, describe_value, shorten
from .._utils.warning import warn
from ..devices.backend import TENSOR_LOCK, gc_disabled, import_torch
from ..devices.moving import mps_dtype_fallbacks
from ..devices.registry import get_device
from ..errors import ConfigurationError, DeviceUnavailableError, InvalidModelError, ModelError
from . import files
from .config import OpenMedConfig, normalize_dtype
from .registry import ModelReference, download_model, find_model

if TYPE_CHECKING:
    import torch
    from transformers import (
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        TokenClassificationPipeline,
    )

# Settings for the number of labels and of modules, which Python builds one after another.
COUNT_PATTERN = re.compile(r"(^|_)(labels|layers?|blocks?|groups?|experts?|repeats|networks|functions|types)(_|$)")

# Maximum number of modules and of labels, unless the weights have more tensors or rows. No token classifier has more modules.
MAX_COUNT = 1000

# Maximum number of elements besides the weights: masks and tables that are computed when the model is built.
MAX_EXTRA_ELEMENTS = 2**28

# Tensors in checkpoints that a token classifier does not use: the pooler of its encoder, and tables that current releases
# compute. transformers ignores further tensors itself (_keys_to_ignore_on_load_unexpected).
UNUSED_WEIGHTS_PATTERN = re.compile(
    r"(^|\.)pooler\.|(^|\.)(position_ids|token_type_ids|\w*inv_freq|masked_bias|num_batches_tracked)$"
    r"|\.(attn|attention)\.bias$"
)

# Heads for pretraining, which do not affect the predictions for tokens.
PRETRAINING_HEADS_PATTERN = re.compile(
    r"(cls|lm_head|mlm|nsp|predictions|discriminator_predictions|generator_\w+|vocab_\w+)\."
)

INT8 = "int8"

# Warnings of torch during quantization that a later release removes the feature. Its removal will be an error here.
EXPECTED_WARNINGS = (
    (DeprecationWarning, r"torch\.ao\.quantization is deprecated and will be removed in"),
    (UserWarning, r"torch\.quantize_per_tensor, torch\.quantize_per_channel and other quantized tensor creation"),
)

# Shapes of the tensors in files of weights, by name.
Shapes = Mapping[str, tuple[int, ...]]

# The dtype in which the weights are read, if it differs from the requested one. "auto" is resolved before a load.
STORAGE_DTYPES = {INT8: "float32", "auto": "float32"}


@dataclass(frozen=True)
class LoadSpec:
    """Specification of a model; loads with equal specifications share one copy.

    Attributes:
        reference: Location of the model.
        remote_code: Whether the user passed ``trust_remote_code=True``.
        settings: Settings that affect the loaded model or the permission to load it.
        files: Name, size and modification time of each file in a local directory, which can change at any time. Empty
            for a model on the Hub.
        config: All settings, including those for downloads.
        folder: Directory of the files, if it is known.
    """

    reference: ModelReference
    remote_code: bool
    settings: tuple[object, ...]
    files: tuple[tuple[str, int, int], ...]
    config: OpenMedConfig = field(compare=False)
    folder: Path | None = field(default=None, compare=False)

    @classmethod
    def from_name(cls, name: str | None, config: OpenMedConfig, remote_code: bool = False) -> LoadSpec:
        """Return the specification of a model name with the settings of a loader."""
        settings = (config.dtype, config.revision, config.cache_dir, config.allow_pickle, config.remote_code_allowed)
        reference = find_model(name, config.default_org)
        file_list = () if reference.on_hub else snapshot_files(reference.location)
        return cls(reference, remote_code, settings, file_list, config)

    @property
    def dtype(self) -> str:
        """Requested dtype of the weights."""
        return self.config.dtype

    @property
    def is_trusted(self) -> bool:
        """Whether the user trusts the model: a Hub model by alias or id in any case, a directory by its full path."""
        trusted_names = self.config.remote_code_allowed
        if not self.reference.on_hub:
            return self.reference.location in trusted_names
        return bool({name.casefold() for name in self.reference.names} & {name.casefold() for name in trusted_names})

    def in_dtype(self, dtype: str) -> LoadSpec:
        """Return the specification of the same model in another dtype."""
        return replace(self, settings=(dtype, *self.settings[1:]), config=replace(self.config, dtype=dtype))


def snapshot_files(folder: str) -> tuple[tuple[str, int, int], ...]:
    """Return the name, size in bytes and modification time in nanoseconds of each file in a directory."""
    snapshot = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # The load reports a loop of links.
                    if entry.is_file():
                        snapshot.append((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns))
    except OSError as error:
        raise InvalidModelError(
            f"The folder {describe_value(folder)} cannot be read: {error.strerror}.",
            "Check its permissions, or use another folder.",
        ) from error
    return tuple(sorted(snapshot))


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode on its device, with its tokenizer and configuration.

    Attributes:
        name: Name that the user gave the model.
        model: Model.
        tokenizer: Fast tokenizer, whose ``model_max_length`` is the maximum input length of the model.
        config: Configuration of the model.
        folder: Directory of the files.
        tuned_batch_tokens: Fastest batch size in tokens by device type, measured on this machine.
        pipelines: Pipelines of this model by their options, which are dropped together with the model.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: PreTrainedConfig
    folder: Path
    tuned_batch_tokens: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    pipelines: dict[tuple[str, str], TokenClassificationPipeline] = field(
        default_factory=dict, compare=False, repr=False
    )

    def to_dict(self) -> dict[str, object]:
        """Return model, tokenizer and configuration under the names that OpenMed's ``load_model`` uses."""
        return {"model": self.model, "tokenizer": self.tokenizer, "config": self.config}


@gc_disabled()
def import_transformers() -> None:
    """Import torch and the parts of transformers that every load needs; interrupts are deferred during the import."""
    if sys.flags.optimize > 1:  # auto_docstring of transformers reads docstrings during the import.
        raise ModelError(
            "Python runs without docstrings (-OO or PYTHONOPTIMIZE=2), which transformers requires.",
            "Run Python without that option, or with -O.",
        )
    import_torch()
    try:
        with defer_interrupts():
            import_model_code()
    except Exception as error:
        # A damaged installation or an earlier interrupted import can raise any error.
        raise ModelError(
            f"transformers cannot be imported: {describe_error(error)}.",
            "Restart the kernel; if it fails again, reinstall transformers.",
        ) from error


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Disable the progress bar and warnings of transformers during a load. Missing weights raise an error here."""
    from transformers.utils import logging

    has_progress_bar = logging.is_progress_bar_enabled()
    verbosity = logging.get_verbosity()
    try:
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        yield
    finally:
        with defer_interrupts():
            logging.set_verbosity(verbosity)
            if has_progress_bar:
                logging.enable_progress_bar()


@contextlib.contextmanager
def _without_kernels(trusted: bool) -> Iterator[None]:
    """Prevent transformers from downloading native code while it loads an untrusted model.

    If the package ``kernels`` is installed, some model types request native code without a setting: falcon and gpt_neo
    when they are imported, mra and yoso when they are built. They have a fallback without it.
    """
    from transformers.integrations import hub_kernels

    def raise_import_error(*_arguments: Any, **_options: Any) -> Any:
        raise ImportError("Native code is not downloaded for an untrusted model.")

    kernels = sys.modules.get("kernels")
    fetch = None if trusted else getattr(kernels, "get_kernel", None)
    modules = (kernels, hub_kernels) if fetch else ()
    attributes = [(module, name) for module in modules for name, value in vars(module).items() if value is fetch]
    for module, name in attributes:
        setattr(module, name, raise_import_error)
    try:
        yield
    finally:
        for module, name in attributes:
            setattr(module, name, fetch)


@contextlib.contextmanager
def _translate_load_errors(component: str, name: str, folder: Path) -> Iterator[None]:
    """Replace any error during the load of a component by an InvalidModelError that names the component and the model.

    Damaged files make transformers raise errors of any class, including plain Exceptions of the tokenizers library. A
    MemoryError is passed on, because it is not a problem of the model.
    """
    try:
        with files.panics_as_errors():
            yield
    except (MemoryError, InvalidModelError):
        raise
    except Exception as error:
        raise InvalidModelError(
            f"The {component} of {describe_value(name)} cannot be loaded: {describe_error(error)}.",
            f"Check or download the files in {describe_file(folder)} again.",
        ) from error


def load_from_spec(spec: LoadSpec, device: str) -> LoadedModel:
    """Check the files of a model, load it, and move it to a device."""
    name = spec.reference.name
    check_int8(spec.dtype, device)
    folder = model_folder(spec)
    settings = files.read_config(folder, name)
    files.check_references(settings, name)
    if not spec.is_trusted:
        files.check_settings(folder, settings, spec.reference)
    safetensors = files.check_weights(folder, name, spec.config.allow_pickle)
    remote = files.check_remote_code(settings, spec.reference, spec.is_trusted, spec.remote_code)
    import_transformers()
    import torch
    from transformers import AutoConfig, AutoModelForTokenClassification

    shapes = _stored_shapes(files.weight_files(folder))
    _check_counts(settings, shapes, name)
    source: dict[str, bool] = {"local_files_only": True, "trust_remote_code": remote}
    # transformers changes the default dtype of torch while it builds a model, which would affect other threads. The default
    # device of the user may be ``meta``, whose tensors have no data.
    with TENSOR_LOCK, gc_disabled(), _quiet_transformers(), _without_kernels(spec.is_trusted), torch.device("cpu"):
        with _translate_load_errors("config.json", name, folder):
            # Without a dtype transformers 5 uses the stored one, and 16-bit weights are three times slower on a CPU.
            config = AutoConfig.from_pretrained(folder, dtype=STORAGE_DTYPES.get(spec.dtype, spec.dtype), **source)
        tokenizer = _load_tokenizer(folder, name, config=config, **source)
        files.check_labels(settings, config, name)
        with _translate_load_errors("weights file", name, folder):
            if not remote:
                check_size(settings, config, shapes, name)
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
    _check_loaded(model, info, name)
    files.check_tokenizer(tokenizer, model, name)
    if spec.dtype == INT8:
        model = quantize(model)
    tokenizer.model_max_length = files.max_input_length(tokenizer, files.max_positions(model))
    move_model(model, device, name)
    return LoadedModel(name, model, tokenizer, model.config, folder)


def model_folder(spec: LoadSpec) -> Path:
    """Return the directory of a model, downloaded from the Hub if necessary, after checking its links."""
    folder = spec.folder
    if folder is None and spec.reference.on_hub:
        folder = download_model(spec.reference.location, spec.config, spec.is_trusted)
    folder = folder or Path(spec.reference.location)
    files.check_file_locations(folder, spec.reference.name)
    return folder


def _load_tokenizer(folder: Path, name: str, **options: object) -> PreTrainedTokenizerBase:
    """Load a tokenizer, which must return offset mappings."""
    from transformers import AutoTokenizer

    with _translate_load_errors("tokenizer", name, folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    vocab_files = tokenizer.vocab_files_names.values()
    if vocab_files and not any((folder / file).is_file() for file in vocab_files):
        # transformers would continue with an empty vocabulary, in which every word is unknown.
        raise InvalidModelError(
            f"The folder of {describe_value(name)} does not have a tokenizer: {' or '.join(sorted(vocab_files))} is missing.",
            f"Check or download the files in {describe_file(folder)} again.",
        )
    if not tokenizer.is_fast:
        raise InvalidModelError(
            f"The tokenizer of {describe_value(name)} does not return offset mappings, so entities cannot be located in the text.",
            "Use a model with a fast tokenizer (a tokenizer.json).",
        )
    if tokenizer.pad_token is None:
        # The windows of a long text are padded to one length. Padding is masked, so any token is suitable.
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def move_model(model: PreTrainedModel, device: str, name: str) -> None:
    """Move a model to a device. If the move fails, restore the previous device and raise an error.

    Raises:
        ConfigurationError: If the model is in int8 and the device is not the CPU.
        DeviceUnavailableError: If the model cannot be moved.
    """
    import torch

    if is_quantized(model):
        check_int8(INT8, device)
    wide = []
    if dtype_fallbacks := mps_dtype_fallbacks(device):
        for tensor in (*model.parameters(), *model.buffers()):
            wide.append((tensor, tensor.data))
            tensor.data = tensor.data.to(dtype_fallbacks.get(tensor.dtype, tensor.dtype))
    previous = model.device
    with TENSOR_LOCK:
        try:
            model.to(torch.device(device))
        except BaseException as error:  # Also after an interrupt, a model must not be split between devices.
            model.to(previous)
            for tensor, data in wide:
                tensor.data = data
            if not isinstance(error, (RuntimeError, AssertionError)):
                raise
            # torch raises an AssertionError if it was built without the device.
            raise DeviceUnavailableError(
                f"The model {describe_value(name)} could not be moved to {device}: {describe_error(error)}.",
                get_device(device).unload_remedy,
            ) from error


def _stored_shapes(paths: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in safetensors files by name, without damaged files, which the load reports."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in paths:
        # The library raises different errors for damaged files.
        with contextlib.suppress(Exception), safe_open(file, framework="numpy") as content:
            for name in content.keys():  # noqa: SIM118 - the object is not a mapping
                shapes[name] = tuple(content.get_slice(name).get_shape())
    return shapes


def _check_counts(settings: files.JsonObject, shapes: Shapes, name: str) -> None:
    """Raise an error for far more modules or labels than the weights have. Such a model could take forever to build."""
    limit = max(MAX_COUNT, len(shapes), _largest_size(shapes))
    for key, value in files.walk_settings(settings):
        count = max(_iter_integers(value), default=0)
        if COUNT_PATTERN.search(key) and count > limit:
            setting = f"{describe_names([key])} = {shorten(f'{count:,}')}"
            raise InvalidModelError(
                f"The config.json of {describe_value(name)} specifies {setting}, which its weights do not have.",
                "Correct its config.json.",
            )


def check_size(settings: files.JsonObject, config: PreTrainedConfig, shapes: Shapes, name: str) -> None:
    """Raise an error if the settings describe a model far larger than its weights.

    The missing weights would be initialized randomly and might exceed the memory. This requires a setting larger than
    every dimension in the weights. Only then the model is built on the meta device and its elements are counted.
    """
    numbers = (number for _, value in files.walk_settings(settings) for number in _iter_integers(value))
    if not shapes or max(numbers, default=0) <= _largest_size(shapes):
        return
    import torch
    from transformers import AutoModelForTokenClassification, initialization

    with torch.device("meta"), initialization.no_init_weights():
        model = AutoModelForTokenClassification.from_config(copy.deepcopy(config))
    described = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    saved = sum(map(math.prod, shapes.values()))
    if described > 4 * saved + MAX_EXTRA_ELEMENTS:
        raise InvalidModelError(
            f"The config.json of {describe_value(name)} describes a model of {described:,} elements, but its weights have {saved:,}.",
            "Correct its config.json.",
        )


def _largest_size(shapes: Shapes) -> int:
    """Return the largest dimension of any tensor."""
    return max((size for shape in shapes.values() for size in shape), default=0)


def _iter_integers(value: object) -> Iterator[int]:
    """Yield an integer, or the integers in nested lists: 6 and 4 for ``[[["global"], 6], 4, True]``."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack += item
        elif isinstance(item, int) and not isinstance(item, bool):
            yield item


def _check_loaded(model: PreTrainedModel, info: Mapping[str, Any], name: str) -> None:
    """Check that the weights and the model have the same tensors; warn if the weights have an unused head.

    Args:
        model: Loaded model.
        info: Report of transformers about the load (``output_loading_info``).
        name: Name of the model.
    """
    subject = f"The weights of {describe_value(name)}"
    missing = sorted({*info["missing_keys"], *(key for key, *_shapes in info["mismatched_keys"])})
    if missing:  # transformers initializes them randomly.
        raise InvalidModelError(
            f"{subject} lack {pluralize(len(missing), 'tensor')} that its config.json requires, such as {missing[0]}.",
            "Check or download its files again.",
        )
    computed = {key for key, _ in model.named_buffers()}
    unexpected = set(info["unexpected_keys"])
    unused = sorted(key for key in unexpected - computed if not UNUSED_WEIGHTS_PATTERN.search(key))
    children = {child for child, _ in model.named_children()}
    extra = [key for key in unused if key.partition(".")[0] in children]
    if extra:
        raise InvalidModelError(
            f"{subject} have {pluralize(len(extra), 'tensor')} that the model in its config.json does not have, such as {extra[0]}.",
            "Correct its config.json, or check or download its files again.",
        )
    heads = [key for key in unused if not PRETRAINING_HEADS_PATTERN.match(key)]
    if heads:
        message = (
            f"{subject} have {pluralize(len(heads), 'tensor')} that its architecture does not use, such as {heads[0]}."
        )
        warn(f"{message} Its predictions may differ from those of the trained model.")


def check_int8(dtype: str, device: str) -> None:
    """Raise an error for int8 on a device other than the CPU."""
    if dtype == INT8 and not get_device(device).has_int8:
        raise ConfigurationError(
            f"int8 is supported on the CPU only, not on {device}.", "Pass device='cpu', or dtype='float32'."
        )


def quantize(model: PreTrainedModel) -> PreTrainedModel:
    """Quantize the linear layers of a model on the CPU to int8 in place, and return the model."""
    import torch

    with TENSOR_LOCK, warnings.catch_warnings():
        for category, message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message, category)
        try:
            return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)
        except (RuntimeError, AttributeError) as error:
            raise ConfigurationError(
                f"torch {torch.__version__} cannot quantize: {describe_error(error)}.",
                "Use dtype='bfloat16', or 'float32'.",
            ) from error


def packed_layers(model: PreTrainedModel) -> list[tuple[str, torch.nn.quantized.dynamic.Linear]]:
    """Return the names and linear layers with packed weights, which are not parameters."""
    return [  # Found by the name of their package, because some builds of torch do not have such layers.
        (name, layer)
        for name, layer in model.named_modules()
        if type(layer).__module__.startswith("torch.ao.nn.quantized") and hasattr(layer, "in_features")
    ]


def is_quantized(model: PreTrainedModel) -> bool:
    """Return whether a model has int8 layers."""
    return bool(packed_layers(model))


def dtype_of(model: PreTrainedModel) -> str:
    """Return the dtype of the weights, such as ``"bfloat16"``, or ``"int8"`` if any layer is quantized."""
    return INT8 if is_quantized(model) else normalize_dtype(model.dtype)


_SOLVER_MODULE = "scipy.optimize"


def import_model_code() -> None:
    """Import the classes that load any model, and the lists of the classes of all models."""
    import transformers

    if "transformers.models" not in sys.modules:
        with _reuse_import_structure(transformers):
            importlib.import_module("transformers.models")
    if "transformers.loss.loss_utils" not in sys.modules:
        with _defer_scipy():
            importlib.import_module("transformers.loss.loss_utils")
    importlib.import_module("transformers.modeling_utils")
    from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer  # noqa: F401


@contextlib.contextmanager
def _reuse_import_structure(transformers: ModuleType) -> Iterator[None]:
    """Let ``transformers.models`` use the list of classes that ``transformers`` has cached, instead of reading all files again."""
    from transformers.utils import import_utils

    models = Path(str(transformers.__file__)).parent / "models"
    define = import_utils.define_import_structure

    def define_from_cache(path: str, prefix: str | None = None) -> object:
        if Path(path) != models / "__init__.py" or prefix is not None:
            return define(path, prefix)
        structure = define(models, prefix="models")  # The arguments with which transformers has called it.
        return {
            backends: {
                module.removeprefix("models."): names
                for module, names in modules.items()
                if module.startswith("models.")  # transformers adds its other modules.
            }
            for backends, modules in structure.items()
        }

    import_utils.define_import_structure = define_from_cache
    try:
        yield
    finally:
        import_utils.define_import_structure = define


class _DeferredSolver(ModuleType):
    """Stands in for ``scipy.optimize`` until anything but its solver of assignment problems is used."""

    @staticmethod
    def linear_sum_assignment(*arguments: object, **options: object) -> object:
        """Call the function of scipy, which is imported on the first call."""
        return importlib.import_module(_SOLVER_MODULE).linear_sum_assignment(*arguments, **options)

    def __init__(self) -> None:
        super().__init__(_SOLVER_MODULE)
        self.thread_id = threading.get_ident()

    def __getattr__(self, name: str) -> object:
        if name == "__path__" and threading.get_ident() == self.thread_id:  # The import system looks for it.
            raise AttributeError(name)
        # Another release of transformers uses more of scipy, or another thread imports scipy at the same time.
        _remove_stand_in(self)
        return getattr(importlib.import_module(_SOLVER_MODULE), name)


def _remove_stand_in(module: ModuleType) -> None:
    if sys.modules.get(_SOLVER_MODULE) is module:
        del sys.modules[_SOLVER_MODULE]


@contextlib.contextmanager
def _defer_scipy() -> Iterator[None]:
    """Defer the import of ``scipy.optimize`` to the first use of a loss of object detection."""
    if _SOLVER_MODULE in sys.modules or importlib.util.find_spec("scipy") is None:
        yield
        return
    stand_in = _DeferredSolver()
    sys.modules[_SOLVER_MODULE] = stand_in
    try:
        yield
    finally:
        _remove_stand_in(stand_in)
