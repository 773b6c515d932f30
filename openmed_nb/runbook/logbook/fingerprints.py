"""What tells a dataset or a model from others, and hypotheses from words of a dataset."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...annotation.corpus import stream_of
from ...annotation.resume import readable
from ...devices.backend import TENSOR_LOCK
from ...devices.moving import module_in
from ...errors import ConfigurationError, given_path, one_line
from ...models.files import content_of, digest_of
from ...models.loading import dtype_of
from .sections import Dataset, Hypothesis, Model
from .variables import short_path, without_secrets

if TYPE_CHECKING:
    import torch

    from ...models.loading import LoadedModel

TEXTS_FILE_OR_FOLDER = "Pass a list of texts, or the path of a file or a folder."
SAVE_IT = "Save it, and pass the path of its folder."

# Of hypotheses: the most characters of one, how many there may be, and how long a text is that does not stand in others by chance.
LONGEST, MOST, SHORT = 200, 50, 12
PAIRS = "Pass pairs of what was suspected and what rules it out, such as [('slow loader', 'data takes 3 %')]."


def dataset_of(data: Any) -> Dataset:
    """Return the fingerprint of a dataset.

    Args:
        data: A series of texts that can be read again, or the path of a file, or of a folder with shards.

    Raises:
        ConfigurationError: For anything else, for nothing, and for what cannot be read; no word of it is in the error.

    Example:
        >>> dataset_of(["asthma", "fever"]).items, dataset_of(["asthma"]).checksum == dataset_of(["fever"]).checksum
        (2, False)
    """
    if not isinstance(data, (str, os.PathLike)):
        return _of_texts(data)
    path = given_path(data, "dataset")
    # A device or a pipe may have no end; and what is not a path may be a note, so the error does not show it.
    if not (path.is_dir() or path.is_file()):
        raise ConfigurationError("There is no file or folder of that name for a dataset.", TEXTS_FILE_OR_FOLDER)
    try:
        return _of_folder(path) if path.is_dir() else Dataset("file", digest_of(path, "sha256"), 1, path.stat().st_size)
    except OSError as error:
        what = f"The dataset cannot be read: {type(error).__name__}."
        raise ConfigurationError(what, TEXTS_FILE_OR_FOLDER) from error


def _of_texts(data: Any) -> Dataset:
    series = stream_of(data)
    if not isinstance(data, Sized) or isinstance(data, (set, frozenset)):
        what = f"{type(data).__name__} has no length or no order: it may have no end, or can be read once only."
        raise ConfigurationError(what, TEXTS_FILE_OR_FOLDER)
    digest, items, size = hashlib.sha256(), 0, 0
    for text in series:
        if not isinstance(text, (str, list)):
            what = f"Item {items} of the dataset is {type(text).__name__}, not a text."
            raise ConfigurationError(what, TEXTS_FILE_OR_FOLDER)
        content = readable(text).encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "big") + content)
        items, size = items + 1, size + len(content)
    if not items:
        raise ConfigurationError("The dataset is empty.", TEXTS_FILE_OR_FOLDER)
    return Dataset("texts", digest.hexdigest(), items, size)


def _of_folder(folder: Path) -> Dataset:
    files = sorted(path for path in _below(folder) if path.is_file() and not path.name.startswith("."))
    if not files:
        raise ConfigurationError("The folder of the dataset has no files.", TEXTS_FILE_OR_FOLDER)
    shards = tuple(digest_of(path, "sha256") for path in files)
    named = (f"{path.relative_to(folder).as_posix()}\0{shard}\0" for path, shard in zip(files, shards, strict=True))
    checksum = hashlib.sha256("".join(named).encode("utf-8", "surrogateescape")).hexdigest()
    return Dataset("folder", checksum, len(files), sum(path.stat().st_size for path in files), shards)


def _below(folder: Path) -> Iterator[Path]:
    """Yield what is in a folder and in the folders below it, links to folders included."""

    def fail(error: OSError) -> None:  # os.walk leaves out what it cannot read otherwise.
        raise error

    seen = set()
    for place, _, names in os.walk(folder, onerror=fail, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            what = "The folder of the dataset has a folder twice in it, through links."
            raise ConfigurationError(what, "Pass a folder without such links.")
        seen.add(real)
        yield from (Path(place, name) for name in names)


def which_model(
    model: Any, named: Callable[[str | None], tuple[LoadedModel, ...]], files: Callable[[str], Path]
) -> tuple[Model | None, Path | None]:
    """Return which model it was, and where its files are.

    Args:
        model: The name of a model, a pipeline, a torch module, or ``None`` for the one that was loaded last.
        named: Returns the loaded models of a name, or all.
        files: Returns where the files of a model are that is not loaded.
    """
    if model is not None and not isinstance(model, (str, os.PathLike)):
        return model_in_memory(module_in(model), getattr(model, "tokenizer", None)), None
    if loaded := named(None if model is None else str(model)):
        return model_of_files(loaded[-1].name, loaded[-1].folder, dtype_of(loaded[-1].model)), loaded[-1].folder
    if model is None:
        return None, None
    folder = files(str(model))
    return model_of_files(str(model), folder, None), folder


def model_of_files(name: str, folder: Path, dtype: str | None) -> Model:
    """Return which model the files of a folder are; ``dtype`` is the type of its weights in memory, if that is known."""
    content = content_of(folder)
    return Model(short_path(name), "files", content.weights, content.settings, content.tokenizer, dtype)


def model_in_memory(module: torch.nn.Module, tokenizer: Any = None) -> Model:
    """Return which model a module in memory is, by every byte of its parameters and buffers."""
    config: Any = getattr(module, "config", None)
    settings = repr(_without_place(config.to_dict())) if hasattr(config, "to_dict") else repr(module)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return Model(
        type(module).__name__,
        "memory",
        weights_in_memory(module),
        _fingerprint(settings),
        None if backend is None else _fingerprint(str(sorted(backend.get_vocab().items()))),
        next((str(one.dtype).removeprefix("torch.") for one in module.parameters()), None),
    )


def weights_in_memory(module: torch.nn.Module) -> str:
    """Return a fingerprint of all parameters and buffers that are saved with a module, wherever they are.

    Raises:
        ConfigurationError: For tensors without content, sparse ones, and a state of an unknown kind.
    """
    import torch

    digest = hashlib.blake2b(digest_size=16)
    with TENSOR_LOCK, torch.no_grad():
        for piece in _pieces(module.state_dict()):
            digest.update(len(piece).to_bytes(8, "big") + piece)
    return digest.hexdigest()


def _pieces(state: Any) -> Iterator[bytes]:
    """Yield all that the state of a module holds: tensors with type, shape and every byte, and what they are packed in."""
    import torch

    if isinstance(state, torch.Tensor):
        content = _bytes_of(state)
        yield f"{state.dtype} {tuple(state.shape)}".encode()
        yield content
    elif isinstance(state, torch.ScriptObject):  # Packed weights of int8 layers.
        yield from _pieces(state.__getstate__())
    elif isinstance(state, (Mapping, list, tuple)):
        yield type(state).__name__.encode()
        parts = itertools.chain.from_iterable(state.items()) if isinstance(state, Mapping) else state
        for part in parts:
            yield from _pieces(part)
    elif state is None or isinstance(state, (str, bytes, int, float, torch.dtype, torch.device)):
        yield repr(state).encode("utf-8", "surrogatepass")
    else:
        raise ConfigurationError(f"The model holds a {type(state).__name__}, which has no fingerprint.", SAVE_IT)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    import torch

    if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.layout != torch.strided:
        what = "The model holds a tensor that is lazy, sparse or on the meta device, which has no fingerprint."
        raise ConfigurationError(what, SAVE_IT)
    content = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    content = content.dequantize() if content.is_quantized else content
    return content.reshape(-1).view(torch.uint8).numpy().tobytes() if content.numel() else b""


def _without_place(settings: Any) -> Any:
    """Return settings of transformers in one order, without where they came from, which changes nothing."""
    if not isinstance(settings, Mapping):
        return settings
    named = {str(name): _without_place(value) for name, value in settings.items() if name != "_name_or_path"}
    return [(name, named[name]) for name in sorted(named)]


def _fingerprint(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def hypotheses_of(said: Any, data: Any = None) -> tuple[Hypothesis, ...]:
    """Return hypotheses that are ruled out.

    Args:
        said: Pairs, or a mapping, of what was suspected and what rules it out.
        data: The dataset; no words of it may stand here.

    Raises:
        ConfigurationError: For what is not a pair of short texts, and for words of the dataset; it shows none of them.

    Example:
        >>> hypotheses_of({"slow loader": "data takes 3 % of a step"})[0].hypothesis
        'slow loader'
    """
    series = said.items() if isinstance(said, Mapping) else said if isinstance(said, Iterable) else [said]
    pairs = list(itertools.islice(series, MOST + 1))  # It may have no end.
    if isinstance(said, str) or not all(map(_is_pair, pairs)):
        raise ConfigurationError("A hypothesis is not a pair of texts.", PAIRS)
    if len(pairs) > MOST:
        raise ConfigurationError(f"There are more than {MOST} hypotheses.", "Pass the last ones.")
    return tuple(Hypothesis(_checked(one, data), _checked(why, data)) for one, why in pairs)


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(one, str) for one in pair)  # noqa: PLR2004


def _checked(text: str, data: Any) -> str:
    line = one_line(text)
    if len(line) > LONGEST:
        what = f"A hypothesis has {len(line):,} characters."
        raise ConfigurationError(what, f"Say it in {LONGEST}; a note must not be part of it.")
    texts = () if data is None or isinstance(data, (str, os.PathLike)) else map(readable, stream_of(data))
    if any(_overlap(line.casefold(), one_line(one).casefold()) for one in texts):
        raise ConfigurationError("A hypothesis has words of the dataset.", "Say it without them.")
    return without_secrets(line)


def _overlap(text: str, other: str) -> bool:
    return (len(text) >= SHORT and text in other) or (len(other) >= SHORT and other in text)
