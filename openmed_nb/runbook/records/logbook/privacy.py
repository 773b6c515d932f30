"""Removal of private data from a logbook: paths, environment variables, fingerprints of datasets and models, hypotheses.

A value that does not have the expected format of its variable, or that looks like a secret, is replaced with ``***``.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING

from ...._utils.text import collapse_whitespace, short_type_name
from ...._utils.validation import check_path
from ....annotation.references import fingerprint_key, iter_texts
from ....devices.backend import TENSOR_LOCK
from ....devices.environment import VARIABLES as MPS_VARIABLES
from ....devices.redaction import redact_secrets, sanitize_path
from ....devices.request import MASK
from ....errors import ConfigurationError
from ....models.config import normalize_dtype
from ....models.files import file_digest, hash_model_files
from .logbook import LOG_VARIABLES, Dataset, Model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

MAX_VARIABLE_CHARACTERS = 200

# Allowed environment variables. Other variables may be private.
# Variables that also apply to other machines: threads, memory allocation, reproducibility, MPS, kernels and data types.
SHARED_VARIABLES = frozenset(
    {
        *MPS_VARIABLES,
        "ACCELERATE_MIXED_PRECISION",
        "ATEN_CPU_CAPABILITY",
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_LAUNCH_BLOCKING",
        "KMP_BLOCKTIME",
        "MALLOC_ARENA_MAX",
        "MKL_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "NVIDIA_TF32_OVERRIDE",
        "OMP_NUM_THREADS",
        "OMP_PROC_BIND",
        "OMP_WAIT_POLICY",
        "OPENBLAS_NUM_THREADS",
        "PYTHONHASHSEED",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_MPS_FAST_MATH",
        "PYTORCH_MPS_PREFER_METAL",
        "RAYON_NUM_THREADS",
        "TOKENIZERS_PARALLELISM",
        "TORCHDYNAMO_DISABLE",
        "VECLIB_MAXIMUM_THREADS",
    }
)
# Variables that apply to one machine only.
LOCAL_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "OPENMED_TORCH_DEVICE",
    "OPENMED_DEVICE",
    "ACCELERATE_USE_CPU",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
)
VARIABLES = frozenset({*SHARED_VARIABLES, *LOG_VARIABLES, *LOCAL_VARIABLES})

# A value is stored if it is a comma-separated list of numbers, known words and settings of an allocator.
_NUMBER = r"[+-]?[0-9]{1,9}(\.[0-9]{1,9})?(us|ms)?"
_WORD = (
    "on|off|true|false|yes|no|default|random|infinite|active|passive|master|primary|close|spread"
    "|detail|debug|info|warning|error|critical|[+-]?(all|torch|dynamo|aot|inductor|dynamic|distributed|autograd)"
    "|auto|gpu|cpu|(mps|cuda)(:[0-9]{1,4})?|fastest_first|pci_bus_id"
    "|fp16|bf16|fp8|avx2|avx512|amx|sve(128|256)?"
)
_ALLOCATOR_SETTING = rf"[a-z_0-9]{{1,40}}:({_NUMBER}|true|false|native|cudamallocasync)|(:{_NUMBER}){{2,8}}"
_ENTRY = f"({_NUMBER}|{_WORD}|{_ALLOCATOR_SETTING})"
VALUE_PATTERN = re.compile(f"{_ENTRY}(,{_ENTRY})*|", re.IGNORECASE | re.ASCII)


def sanitize_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the allowed variables that are set, sorted by name. Unexpected values become ``***``.

    Example:
        >>> sanitize_environ({"OMP_NUM_THREADS": "2", "HF_TOKEN": "hf_abc", "PYTHONHASHSEED": "the patient"})
        {'OMP_NUM_THREADS': '2', 'PYTHONHASHSEED': '***'}
    """
    values = {name: environ[name].strip() for name in sorted(VARIABLES) if name in environ}
    return {
        name: value if len(value) <= MAX_VARIABLE_CHARACTERS and VALUE_PATTERN.fullmatch(value) else MASK
        for name, value in values.items()
    }


def portable_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that also apply to other machines, without masked values."""
    sanitized = sanitize_environ(environ)
    return {name: value for name, value in sanitized.items() if name in SHARED_VARIABLES and MASK not in value}


DATASET_REMEDY = "Pass a list of texts, or the path of a file or a folder."
MAX_HYPOTHESIS_CHARACTERS = 200
MIN_MATCH_CHARACTERS = 12  # Shorter texts can occur in a hypothesis by coincidence.
HYPOTHESES_REMEDY = "Pass pairs of a hypothesis and the reason against it, such as [('slow loader', 'data takes 3%')]."


def fingerprint_dataset(data: object) -> Dataset:
    """Return the fingerprint of a dataset.

    Args:
        data: Reusable sequence of texts, or path of a file or of a directory with shards.

    Raises:
        ConfigurationError: If ``data`` is empty, unreadable or of another type. The error does not contain any text.

    Example:
        >>> fingerprint_dataset(["asthma", "fever"]).items, fingerprint_dataset(["asthma"]).checksum == fingerprint_dataset(["fever"]).checksum
        (2, False)
    """
    if not isinstance(data, (str, os.PathLike)):
        return _fingerprint_texts(data)
    path = check_path(data, "dataset")
    # Devices and pipes may be endless. The error does not contain the argument, because it may be a note.
    if not (path.is_dir() or path.is_file()):
        raise ConfigurationError("The file or folder of the dataset was not found.", DATASET_REMEDY)
    try:
        if path.is_dir():
            return _fingerprint_folder(path)
        return Dataset("file", file_digest(path, "sha256"), 1, path.stat().st_size)
    except OSError as error:
        message = f"The dataset cannot be read: {short_type_name(error)}."
        raise ConfigurationError(message, DATASET_REMEDY) from None


def _fingerprint_texts(data: object) -> Dataset:
    texts = iter_texts(data)
    if not isinstance(data, Sized) or isinstance(data, (set, frozenset)):
        message = f"{short_type_name(data)} has no length or no order: it may be endless or readable only once."
        raise ConfigurationError(message, DATASET_REMEDY)
    digest = hashlib.sha256()
    items = 0
    size = 0
    for text in texts:
        if not isinstance(text, (str, list)):
            message = f"Item {items} of the dataset is {short_type_name(text)}, not a text."
            raise ConfigurationError(message, DATASET_REMEDY)
        content = fingerprint_key(text).encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "big") + content)
        items += 1
        size += len(content)
    if not items:
        raise ConfigurationError("The dataset is empty.", DATASET_REMEDY)
    return Dataset("texts", digest.hexdigest(), items, size)


def _fingerprint_folder(folder: Path) -> Dataset:
    """Return the fingerprint of the files in a directory and its subdirectories. Links to directories are followed."""
    files = []
    for directory, _, names in os.walk(folder, followlinks=True):
        paths = (Path(directory, name) for name in names if not name.startswith("."))
        files += [path for path in paths if path.is_file()]
    if not files:
        raise ConfigurationError("The folder of the dataset does not contain files.", DATASET_REMEDY)
    files.sort()
    shards = tuple(file_digest(path, "sha256") for path in files)
    entries = (f"{path.relative_to(folder).as_posix()}\0{shard}\0" for path, shard in zip(files, shards, strict=True))
    checksum = hashlib.sha256("".join(entries).encode("utf-8", "surrogateescape")).hexdigest()
    return Dataset("folder", checksum, len(files), sum(path.stat().st_size for path in files), shards)


def model_from_files(name: str, folder: Path, dtype: str | None) -> Model:
    """Return the identity of the model in a directory.

    Args:
        name: Name of the model.
        folder: Directory of the model files.
        dtype: Data type of the weights in memory, or ``None`` if it is unknown.
    """
    hashes = hash_model_files(folder)
    return Model(sanitize_path(name), "files", hashes.weights, hashes.config, hashes.tokenizer, dtype)


def model_from_module(module: torch.nn.Module, tokenizer: PreTrainedTokenizerBase | None = None) -> Model:
    """Return the identity of a model in memory. The fingerprint covers all parameters and buffers.

    Raises:
        ConfigurationError: If the state contains tensors without content.
    """
    config = getattr(module, "config", None)
    # The location of the model files is not part of the identity.
    settings = re.sub(r'"_name_or_path": .*', "", config.to_json_string(use_diff=False)) if config else repr(module)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest = hashlib.blake2b(digest_size=16)
    try:
        with TENSOR_LOCK:
            _hash_state(digest, module.state_dict())
    except (RuntimeError, TypeError) as error:  # torch raises one of them for a tensor without readable content.
        message = f"The model has no fingerprint: {short_type_name(error)}."
        raise ConfigurationError(message, "Save the model, and pass the path of its folder.") from None
    return Model(
        type(module).__name__,
        "memory",
        digest.hexdigest(),
        _fingerprint(settings),
        None if backend is None else _fingerprint(str(sorted(backend.get_vocab().items()))),
        next((normalize_dtype(parameter.dtype) for parameter in module.parameters()), None),
    )


def _hash_state(digest: hashlib.blake2b, state: object) -> None:
    """Add the names, dtypes, shapes and contents of a module state to a digest."""
    import torch

    if isinstance(state, torch.Tensor):
        digest.update(f"{state.dtype} {tuple(state.shape)}\0".encode())
        tensor = state.dequantize() if state.is_quantized else state.detach()
        digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(state, (Mapping, tuple)):  # Int8 layers have tuples of tensors.
        for item in state.items() if isinstance(state, Mapping) else state:
            _hash_state(digest, item)
    else:
        digest.update(f"{state}\0".encode("utf-8", "surrogatepass"))


def _fingerprint(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def validate_hypotheses(hypotheses: object, data: object = None) -> dict[str, str]:
    """Validate rejected hypotheses, and return the reason for the rejection of each, as lines without secrets.

    Args:
        hypotheses: Pairs or mapping of a hypothesis and the reason for its rejection.
        data: Dataset. Its text must not occur in a hypothesis.

    Raises:
        ConfigurationError: If an item is not a pair of short texts, or contains text of the dataset. The error does not
            contain the hypotheses.

    Example:
        >>> validate_hypotheses([("slow loader", "data takes  3% of a step")])
        {'slow loader': 'data takes 3% of a step'}
    """
    try:
        lines = [[collapse_whitespace(text) for text in pair] for pair in dict(hypotheses).items()]  # type: ignore[call-overload]
    except (TypeError, ValueError, AttributeError):
        raise ConfigurationError("A hypothesis is not a pair of texts.", HYPOTHESES_REMEDY) from None
    longest = max((len(text) for line in lines for text in line), default=0)
    if longest > MAX_HYPOTHESIS_CHARACTERS:
        remedy = f"Use at most {MAX_HYPOTHESIS_CHARACTERS} characters, and no text from notes."
        raise ConfigurationError(f"A hypothesis has {longest:,} characters.", remedy)
    folded = [text.casefold() for line in lines for text in line]
    for item in () if data is None or isinstance(data, (str, os.PathLike)) else iter_texts(data):
        note = collapse_whitespace(fingerprint_key(item)).casefold()
        for text in folded:
            if min(len(text), len(note)) >= MIN_MATCH_CHARACTERS and (text in note or note in text):
                raise ConfigurationError("A hypothesis contains text of the dataset.", "Rewrite it without that text.")
    return {redact_secrets(text): redact_secrets(reason) for text, reason in lines}
