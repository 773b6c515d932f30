"""From a name to a model on a device: find the files, check them, load, convert, move. Each step fails by itself."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..devices.backend import TENSOR_LOCK
from ..errors import DeviceUnavailable, ModelUnusable, one_line
from .config import OpenMedConfig
from .folder import check_remote_code, check_weights, read_config
from .hub import fetch_model
from .registry import ModelReference, find_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

LONGEST_REAL_LIMIT = 1_000_000
"""Tokenizers that know no limit say a number far above this one (transformers' ``VERY_LARGE_INTEGER``)."""

MODELS_WITH_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "mpnet", "esm")
"""Models that count positions from ``pad_token_id + 1``, so two of their positions are never used."""


@dataclass(frozen=True)
class LoadSpec:
    """Everything that makes two loads the same model.

    Attributes:
        reference: Where the model is.
        config: How it is loaded.
        remote_code: Whether ``trust_remote_code=True`` was passed for it.
    """

    reference: ModelReference
    config: OpenMedConfig
    remote_code: bool = False

    @classmethod
    def of(cls, name: str | None, config: OpenMedConfig, remote_code: bool = False) -> LoadSpec:
        """Return the specification for a name; the device is no part of it."""
        return cls(find_model(name, config.default_org), replace(config, device=None), remote_code)


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer and settings, in memory.

    Attributes:
        name: What the person calls it.
        model: The model, in evaluation mode, on its device.
        tokenizer: A fast tokenizer, whose ``model_max_length`` the model can really take.
        config: The model's settings.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: PreTrainedConfig

    def to_dict(self) -> dict[str, Any]:
        """Return the three parts under the names that OpenMed's ``load_model`` uses."""
        return {"model": self.model, "tokenizer": self.tokenizer, "config": self.config}


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """Keep the garbage collector from running while transformers is imported, which takes a fifth less time so.

    Importing makes some hundred thousand objects that stay, and the collector would look through them again and again.
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
def load(spec: LoadSpec, device: str) -> LoadedModel:
    """Load a model and move it to a device.

    Args:
        spec: Which model, and how.
        device: What ``Module.to`` takes.

    Raises:
        UnknownModel, ModelUnreachable: Where its files cannot be had.
        ModelRefused: Where it would run code that was not allowed by name.
        ModelUnusable: Where its files are damaged, for another task, or without token offsets.
        DeviceUnavailable: Where it does not fit on the device.
    """
    name = spec.reference.name
    folder = model_folder(spec)
    settings = read_config(folder, name)
    safetensors = check_weights(folder, name, spec.config.allow_pickle)
    location, allowed = spec.reference.location, spec.config.remote_code_allowed
    remote = check_remote_code(settings, name, location, allowed, spec.remote_code)
    with quiet_progress_bars():
        tokenizer = load_tokenizer(folder, name, remote)
        model = load_weights(folder, name, spec.config.dtype, safetensors, remote)
    tokenizer.model_max_length = usable_length(tokenizer, model.config)
    move(model, device, name)
    return LoadedModel(name, model, tokenizer, model.config)


def model_folder(spec: LoadSpec) -> Path:
    """Return the folder with the model's files, downloading them where they are on the hub."""
    if spec.reference.kind == "hub":
        allowed = {one.casefold() for one in spec.config.remote_code_allowed}
        names = {spec.reference.name.casefold(), spec.reference.location.casefold()}
        return fetch_model(spec.reference.location, spec.config, code=bool(allowed & names))
    return Path(spec.reference.location)


def load_tokenizer(folder: Path, name: str, remote: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder.

    Raises:
        ModelUnusable: Where it is damaged or missing, or cannot say where in the text a token stands.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=remote)
    except Exception as error:
        # The tokenizers library raises bare Exceptions for damaged files, so no narrower class would do.
        what = f"The tokenizer of {name!r} does not load: {_first_line(error)}."
        raise ModelUnusable(what, _again(folder)) from error
    if not tokenizer.is_fast:
        raise ModelUnusable(
            f"The tokenizer of {name!r} gives no offsets, so entities could not be found in the text.",
            "Use a model with a fast tokenizer (a tokenizer.json).",
        )
    return tokenizer


def load_weights(folder: Path, name: str, dtype: str, safetensors: bool, remote: bool) -> PreTrainedModel:
    """Load the weights of a model folder into memory, for evaluation.

    The type is always given, because transformers 5 otherwise takes the stored one, and a 16-bit file is three times
    slower on a CPU.

    Raises:
        ModelUnusable: Where the weights are damaged, or some of the model's are missing and would be random numbers.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForTokenClassification

    try:
        model, info = AutoModelForTokenClassification.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            use_safetensors=safetensors,
            local_files_only=True,
            trust_remote_code=remote,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        what = f"The weights of {name!r} do not load: {_first_line(error)}."
        raise ModelUnusable(what, _again(folder)) from error
    missing = sorted(info["missing_keys"])
    if missing:
        what = f"The weights of {name!r} lack {len(missing)} tensors, {missing[0]} among them."
        raise ModelUnusable(what, _again(folder))
    return model.eval()


def move(model: PreTrainedModel, device: str, name: str) -> None:
    """Move a model to a device, float64 tensors as float32 where the device is mps, which has no float64.

    Raises:
        DeviceUnavailable: Where it does not fit; the model is then whole on its former device.
    """
    import torch

    former = model.device
    if device.startswith("mps"):
        _without_float64(model)
    with TENSOR_LOCK:
        try:
            model.to(torch.device(device))
        except RuntimeError as error:
            model.to(former)
            raise DeviceUnavailable(
                f"The model {name!r} could not be moved to {device}: {_first_line(error)}.",
                "Unload other models first, or use the CPU.",
            ) from error


def usable_length(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> int:
    """Return how many tokens the model really takes, special tokens included.

    Some tokenizers know no limit, and a text beyond the model's position table gives an IndexError on a CPU and
    silently wrong rows on MPS.
    """
    positions = getattr(config, "max_position_embeddings", None)
    limits = [tokenizer.model_max_length] if tokenizer.model_max_length < LONGEST_REAL_LIMIT else []
    if isinstance(positions, int) and positions > 0:
        offset = config.model_type in MODELS_WITH_OFFSET_POSITIONS
        limits.append(positions - (config.pad_token_id or 0) - 1 if offset else positions)
    return min(limits) if limits else 512


@contextlib.contextmanager
def quiet_progress_bars() -> Iterator[None]:
    """Silence transformers' bar for reading weights from disk, and give it back as it was."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def _without_float64(model: PreTrainedModel) -> None:
    import torch

    smaller = {torch.float64: torch.float32, torch.complex128: torch.complex64}
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(smaller.get(tensor.dtype, tensor.dtype))


def _first_line(error: Exception) -> str:
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return one_line(line)[:200].rstrip(".")


def _again(folder: Path) -> str:
    return f"Check or download the files in {folder.name!r} again."
