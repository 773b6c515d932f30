"""From a name to a model on a device: find the files, check them, load, convert, move. Each step has its own error."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..devices.backend import TENSOR_LOCK
from ..devices.request import kind_of
from ..errors import DeviceUnavailable, ModelUnusable, cause
from .config import OpenMedConfig
from .content import weight_files
from .folder import check_labels, check_remote_code, check_weights, is_allowed, parts_of, read_config
from .hub import fetch_model
from .importing import collector_at_rest, import_transformers, quiet_transformers, without_kernels
from .outside import check_paths, check_settings
from .quantization import INT8, check_int8, is_quantized, quantize
from .registry import ModelReference, find_model
from .tokenizer_limits import check_unknown_words, check_vocabulary, positions_of, usable_length
from .weights import check_counts, check_loaded, check_size, stored_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

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
    import torch

    smaller = {torch.float64: torch.float32, torch.complex128: torch.complex64}
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(smaller.get(tensor.dtype, tensor.dtype))


def _again(folder: Path) -> str:
    return f"Check or download the files in {folder.name!r} again."
