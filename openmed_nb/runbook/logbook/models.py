"""Which model it was: fingerprints of its files, or of what a model in memory holds."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...devices.backend import TENSOR_LOCK
from ...models.content import content_of
from ...models.quantization import dtype_of
from ..doctor.model_checks import model_in
from .sections import Model
from .variables import short_path

if TYPE_CHECKING:
    import torch

    from ...models.loading import LoadedModel


def which_model(
    model: Any, named: Callable[[str | None], tuple[LoadedModel, ...]], files: Callable[[str], Path]
) -> tuple[Model | None, Path | None]:
    """Return which model it was, and where its files are.

    Args:
        model: The name of a model, a pipeline, a torch module, or ``None`` for the one that was loaded last.
        named: Returns the loaded models of a name, or all.
        files: Returns where the files of a model are that is not loaded.

    Raises:
        ConfigurationError: For anything else.
        ModelError: For a name that is none, and for files that cannot be read.
    """
    if model is not None and not isinstance(model, (str, os.PathLike)):
        return model_in_memory(model_in(model), getattr(model, "tokenizer", None)), None
    loaded = named(None if model is None else str(model))
    if loaded:
        return model_of_files(loaded[-1].name, loaded[-1].folder, dtype_of(loaded[-1].model)), loaded[-1].folder
    if model is None:
        return None, None
    folder = files(str(model))
    return model_of_files(str(model), folder, None), folder


def model_of_files(name: str, folder: Path, dtype: str | None) -> Model:
    """Return which model the files of a folder are.

    Args:
        name: What the person calls it.
        folder: Where its files are.
        dtype: The type of its weights in memory, ``None`` where that is not known.

    Raises:
        ModelUnusable: Where a file cannot be read.
    """
    content = content_of(folder)
    return Model(short_path(name), "files", content.weights, content.settings, content.tokenizer, dtype)


def model_in_memory(module: torch.nn.Module, tokenizer: Any = None) -> Model:
    """Return which model a module in memory is, by every byte of its parameters and buffers.

    Args:
        module: The module, as it is.
        tokenizer: Its tokenizer, where it has one.

    Example:
        >>> import torch
        >>> model_in_memory(torch.nn.Linear(2, 1)).source
        'memory'
    """
    config: Any = getattr(module, "config", None)
    settings = repr(sorted(config.to_dict().items())) if hasattr(config, "to_dict") else repr(module)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    dtype = next((str(one.dtype).removeprefix("torch.") for one in module.parameters()), None)
    return Model(
        type(module).__name__,
        "memory",
        weights_in_memory(module),
        _fingerprint(settings),
        None if backend is None else _fingerprint(str(sorted(backend.get_vocab().items()))),
        dtype,
    )


def weights_in_memory(module: torch.nn.Module) -> str:
    """Return a fingerprint of all parameters and buffers that are saved with a module, wherever they are.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 1)
        >>> before = weights_in_memory(layer)
        >>> layer.bias.data += 1
        >>> weights_in_memory(layer) == before
        False
    """
    import torch

    digest = hashlib.blake2b(digest_size=16)
    with TENSOR_LOCK, torch.no_grad():
        for name, value in module.state_dict().items():
            if not isinstance(value, torch.Tensor):  # Packed weights of int8 layers, and extra states.
                digest.update(f"{name} {value!r}".encode())
                continue
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            content = value.detach().cpu().contiguous()
            content = content.dequantize() if content.is_quantized else content
            digest.update(content.reshape(-1).view(torch.uint8).numpy().tobytes() if content.numel() else b"")
    return digest.hexdigest()


def _fingerprint(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
