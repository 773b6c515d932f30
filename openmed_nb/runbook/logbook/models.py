"""Which model it was: fingerprints of its files, or of what a model in memory holds."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...devices.backend import TENSOR_LOCK
from ...errors import ConfigurationError
from ...models.content import content_of
from ...models.quantization import dtype_of
from ..doctor.model_checks import model_in
from .sections import Model
from .variables import short_path

if TYPE_CHECKING:
    import torch

    from ...models.loading import LoadedModel

SAVE_IT = "Save it, and pass the path of its folder."


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
    settings = repr(without_place(config.to_dict())) if hasattr(config, "to_dict") else repr(module)
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

    Raises:
        ConfigurationError: As :func:`pieces`.

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
        for piece in pieces(module.state_dict()):
            digest.update(len(piece).to_bytes(8, "big") + piece)
    return digest.hexdigest()


def pieces(state: Any) -> Iterator[bytes]:
    """Yield all that the state of a module holds: tensors with type, shape and every byte, and what they are packed in.

    Raises:
        ConfigurationError: For what has no bytes that could be read, and for what is of an unknown kind.

    Example:
        >>> list(pieces({"scale": (1, None)}))
        [b'dict', b"'scale'", b'tuple', b'1', b'None']
    """
    import torch

    if isinstance(state, torch.Tensor):
        content = bytes_of(state)
        yield f"{state.dtype} {tuple(state.shape)}".encode()
        yield content
    elif isinstance(state, torch.ScriptObject):  # Packed weights of int8 layers.
        yield from pieces(state.__getstate__())
    elif isinstance(state, (Mapping, list, tuple)):
        yield type(state).__name__.encode()
        parts = itertools.chain.from_iterable(state.items()) if isinstance(state, Mapping) else state
        for part in parts:
            yield from pieces(part)
    elif state is None or isinstance(state, (str, bytes, int, float, torch.dtype, torch.device)):
        yield repr(state).encode("utf-8", "surrogatepass")
    else:
        raise ConfigurationError(f"The model holds a {type(state).__name__}, which has no fingerprint.", SAVE_IT)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return every byte of a tensor, wherever it is.

    Raises:
        ConfigurationError: For one without content, and for a sparse one.
    """
    import torch

    if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.layout != torch.strided:
        what = "The model holds a tensor that is lazy, sparse or on the meta device, which has no fingerprint."
        raise ConfigurationError(what, SAVE_IT)
    content = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    content = content.dequantize() if content.is_quantized else content
    return content.reshape(-1).view(torch.uint8).numpy().tobytes() if content.numel() else b""


def without_place(settings: Any) -> Any:
    """Return settings of transformers in one order, without where they came from, which changes nothing.

    Example:
        >>> without_place({"b": 1, "a": {"_name_or_path": "/data/mine"}})
        [('a', []), ('b', 1)]
    """
    if not isinstance(settings, Mapping):
        return settings
    named = {str(name): without_place(value) for name, value in settings.items() if name != "_name_or_path"}
    return [(name, named[name]) for name in sorted(named)]


def _fingerprint(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
