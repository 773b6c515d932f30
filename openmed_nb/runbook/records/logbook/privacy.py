"""Removal of private data from a logbook: paths, environment variables, fingerprints of datasets and models, hypotheses.

A value that does not have the expected format of its variable, or that looks like a secret, is replaced with ``***``.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ...._utils.text import collapse_whitespace, short_type_name
from ...._utils.validation import check_path
from ....annotation.references import fingerprint_key, iter_texts
from ....devices.backend import TENSOR_LOCK
from ....devices.environment import VARIABLES as MPS_VARIABLES
from ....devices.request import MASK, mask_secrets
from ....errors import ConfigurationError
from ....models.config import normalize_dtype
from ....models.files import file_digest, hash_model_files
from .sections import Dataset, Hypothesis, Model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

SECRET_PATTERN = re.compile(
    r"\b(AKIA|ASIA)[A-Z0-9]{12,}"  # AWS access keys
    r"|\beyJ[\w-]{8,}(\.[\w-]+)*"  # JSON web tokens
    r"|\bxox[a-z]-[\w-]+"  # Slack tokens
    r"|\b(?=\w*[0-9])(?=\w*[A-Za-z])\w{32,}",  # any long sequence of letters and digits
    re.ASCII,
)
# A segment of a path or a name. Spaces are not allowed, so that sentences are not stored.
SEGMENT_PATTERN = re.compile(r"[\w.+<>~-]{1,64}")
HOME_PARENTS = ("home", "Users")  # Parents of home directories, whose names are user names.
DRIVE_PATTERN = re.compile(r"[A-Za-z]:", re.ASCII)
URL_PATTERN = re.compile(r"\w{1,32}://\S*|//\S*@\S*", re.ASCII)
MAX_VALUE_CHARACTERS = 10_000
MAX_PATH_CHARACTERS = 200
MAX_PATHS = 50

NUMBER = r"-?[0-9]{1,9}(\.[0-9]{1,9})?"
SWITCH = rf"{NUMBER}|on|off|true|false|yes|no|y|n|t|f"
# Settings of the allocators of torch (``AllocatorConfig.cpp``).
ALLOCATOR_SETTING = rf"[a-z_0-9]{{1,40}}:({NUMBER}|true|false|native|cudaMallocAsync|\[[0-9:,>]{{1,80}}\])"
DEVICE_NAME = "auto|default|gpu|cpu|mps(:0)?|cuda(:[0-9]{1,4})?"
AFFINITY = "granularity=(fine|core|tile|thread|group)|compact|scatter|balanced|disabled|none|explicit|(no)?verbose|(no)?warnings|[0-9]{1,4}"


def redact_secrets(text: str) -> str:
    """Mask everything in a text that looks like a secret, and replace unpaired surrogates, which UTF-8 cannot encode."""
    encodable = text[:MAX_VALUE_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
    return SECRET_PATTERN.sub(MASK, mask_secrets("", encodable))


def home_folder() -> Path:
    """Return the home directory, or ``~`` if it is unknown."""
    return Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home raises for an unknown user


def sanitize_path(path: str | Path, home: str | None = None) -> str:
    """Replace the home directory in a path or a name with ``~``, and mask segments that may be private.

    A segment is masked if it is a directory in ``/home`` or ``/Users``, contains the name of the home directory, or is not
    a single word.

    Example:
        >>> sanitize_path("/home/jane/models/mine", home="/home/jane"), sanitize_path("/home/tom/x", home="/home/jane")
        ('~/models/mine', '/home/***/x')
        >>> sanitize_path("/scratch/jane/cache", home="/home/jane"), sanitize_path("/opt/janeway", home="/home/jane")
        ('/scratch/***/cache', '/opt/janeway')
        >>> sanitize_path("/data/notes of a user/x"), sanitize_path("a text, not a path")
        ('/data/***/x', '***')
    """
    text = str(path)
    home = home or str(home_folder())
    if len(home) > 1 and (text == home or text.startswith((home + "/", home + os.sep))):
        text = "~" + text[len(home) :]
    name = re.escape(re.split(r"[/\\]", home)[-1])
    user_pattern = re.compile(rf"(?<![^\W_]){name}(?![^\W_])" if name else r"(?!)")
    segments = re.split(r"([/\\])", redact_secrets(text))
    # Segments have even indices, separators odd ones.
    for index in range(0, len(segments), 2):
        segment = segments[index]
        is_word = not segment or SEGMENT_PATTERN.fullmatch(segment) or (index == 0 and DRIVE_PATTERN.fullmatch(segment))
        is_user_name = index > 1 and (segments[index - 2] in HOME_PARENTS or user_pattern.search(segment))
        segments[index] = segment if is_word and not is_user_name else MASK
    return "".join(segments)[:MAX_PATH_CHARACTERS]


# Allowed environment variables, by the pattern of their values. A value may be a comma-separated list.
# Variables that also apply to other machines:
PORTABLE_NAMES = {
    # Number of threads, and memory allocation.
    NUMBER: (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "RAYON_NUM_THREADS",
        "MALLOC_ARENA_MAX",
    ),
    ALLOCATOR_SETTING: ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    "default|debug|(malloc|pymalloc|mimalloc)(_debug)?": ("PYTHONMALLOC",),
    "true|false|master|primary|close|spread": ("OMP_PROC_BIND",),
    "active|passive": ("OMP_WAIT_POLICY",),
    AFFINITY: ("KMP_AFFINITY",),
    "[0-9]{1,9}(us|ms)?|infinite": ("KMP_BLOCKTIME",),
    # Reproducibility.
    f"{NUMBER}|random": ("PYTHONHASHSEED",),
    "(:[0-9]{1,9}){2,8}": ("CUBLAS_WORKSPACE_CONFIG",),
    # CPU fallback of MPS, and selection of kernels, speed and data types.
    SWITCH: (
        *MPS_VARIABLES,
        "TOKENIZERS_PARALLELISM",
        "PYTORCH_MPS_FAST_MATH",
        "PYTORCH_MPS_PREFER_METAL",
        "PYTORCH_MPS_LOG_PROFILE_INFO",
        "PYTORCH_MPS_TRACE_SIGNPOSTS",
        "MTL_CAPTURE_ENABLED",
        "MTL_DEBUG_LAYER",
        "METAL_DEVICE_WRAPPER_TYPE",
        "NVIDIA_TF32_OVERRIDE",
        "CUDA_LAUNCH_BLOCKING",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "TORCHDYNAMO_DISABLE",
        "PYTHONOPTIMIZE",
    ),
    "default|avx2|avx512|vsx|zvector|sve(128|256)?|amx": ("ATEN_CPU_CAPABILITY",),
    "default|all|sse41|avx2?(_[a-z0-9_]{1,20})?|avx(10|512)_[a-z0-9_]{1,20}": ("ONEDNN_MAX_CPU_ISA",),
    "no|fp16|bf16|fp8": ("ACCELERATE_MIXED_PRECISION",),
}
# Logging variables.
LOG_NAMES = {
    "detail|debug|info|warning|error|critical": ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"),
    SWITCH: ("HF_DEBUG",),
    r"[+-]?(all|torch|dynamo|aot|inductor|dynamic|distributed|autograd)": ("TORCH_LOGS",),
    NUMBER: ("PYTORCH_DEBUG_MPS_ALLOCATOR",),
}
# Values that enable verbose logging, such as of every call, copy or allocation.
VERBOSE_PATTERN = re.compile(r"detail|debug|on|yes|true|[1-9][0-9]*|.*\+.*", re.IGNORECASE)
# Variables that apply to one machine only: devices, and access to the hub.
LOCAL_NAMES = {
    f"{NUMBER}|(gpu|mig)-[0-9a-f-]{{1,36}}|": ("CUDA_VISIBLE_DEVICES",),
    "fastest_first|pci_bus_id": ("CUDA_DEVICE_ORDER",),
    DEVICE_NAME: ("OPENMED_TORCH_DEVICE", "OPENMED_DEVICE"),
    SWITCH: ("ACCELERATE_USE_CPU", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
}
PATH_VARIABLES = (
    "LD_PRELOAD",
    "DYLD_INSERT_LIBRARIES",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "TMPDIR",
    "HF_HOME",
    "HF_HUB_CACHE",
    "TORCH_HOME",
    "XDG_CACHE_HOME",
)
ENDPOINT = "HF_ENDPOINT"


def _patterns_by_name(names_by_pattern: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    return {name: pattern for pattern, names in names_by_pattern.items() for name in names}


SHARED_VARIABLES = _patterns_by_name(PORTABLE_NAMES)
LOG_VARIABLES = _patterns_by_name(LOG_NAMES)
VALUE_PATTERNS = SHARED_VARIABLES | LOG_VARIABLES | _patterns_by_name(LOCAL_NAMES)
VARIABLES = frozenset({*VALUE_PATTERNS, *PATH_VARIABLES, ENDPOINT})


def sanitize_value(name: str, value: str) -> str:
    """Return the value of an allowed variable, or ``***`` if the value does not have the expected format."""
    value = value.strip()
    if name in PATH_VARIABLES:  # A list of paths. Other entries, such as URLs, are masked.
        paths = URL_PATTERN.sub(MASK, value[:MAX_VALUE_CHARACTERS]).split(os.pathsep)[:MAX_PATHS]
        return os.pathsep.join(map(sanitize_path, paths))
    if name == ENDPOINT:  # User, password, path and query may be secret.
        try:
            parts = urlsplit(value)
            port = f":{parts.port}" if parts.port else ""
        except ValueError:
            return MASK
        return redact_secrets(f"{parts.scheme}://{parts.hostname}{port}") if parts.hostname else MASK
    entry = VALUE_PATTERNS[name]
    pattern = re.compile(rf"({entry})(,({entry}))*", re.IGNORECASE | re.ASCII)
    return value if len(value) <= MAX_PATH_CHARACTERS and pattern.fullmatch(value) else MASK


def sanitize_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the sanitized values of the allowed variables that are set, sorted by name.

    Example:
        >>> sanitize_environ({"OMP_NUM_THREADS": "2", "HF_TOKEN": "hf_abc", "PYTHONHASHSEED": "the patient"})
        {'OMP_NUM_THREADS': '2', 'PYTHONHASHSEED': '***'}
    """
    return {name: sanitize_value(name, environ[name]) for name in sorted(VARIABLES) if name in environ}


def portable_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that also apply to other machines, without masked values."""
    sanitized = sanitize_environ(environ)
    return {name: value for name, value in sanitized.items() if name in SHARED_VARIABLES and MASK not in value}


DATASET_REMEDY = "Pass a list of texts, or the path of a file or a folder."
SAVE_MODEL_REMEDY = "Save the model, and pass the path of its folder."

MAX_HYPOTHESIS_CHARACTERS = 200
MAX_HYPOTHESES = 50
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

    def fail(error: OSError) -> None:  # Without this function, os.walk ignores unreadable directories.
        raise error

    visited = set()
    files = []
    for directory, _, names in os.walk(folder, onerror=fail, followlinks=True):
        real = os.path.realpath(directory)
        if real in visited:
            message = "The folder of the dataset contains a folder twice, through links."
            raise ConfigurationError(message, "Pass a folder without such links.")
        visited.add(real)
        paths = (Path(directory, name) for name in names)
        files += [path for path in paths if path.is_file() and not path.name.startswith(".")]
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
    """Return the identity of a model in memory. The fingerprint covers all parameters and buffers."""
    config = getattr(module, "config", None)
    # The location of the model files is not part of the identity.
    settings = re.sub(r'"_name_or_path": .*', "", config.to_json_string(use_diff=False)) if config else repr(module)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return Model(
        type(module).__name__,
        "memory",
        hash_parameters(module),
        _fingerprint(settings),
        None if backend is None else _fingerprint(str(sorted(backend.get_vocab().items()))),
        next((normalize_dtype(parameter.dtype) for parameter in module.parameters()), None),
    )


def hash_parameters(module: torch.nn.Module) -> str:
    """Return a fingerprint of all parameters and buffers in the state of a module, on any device.

    Raises:
        ConfigurationError: If the state contains tensors without content, sparse tensors or an unsupported type.
    """
    import torch

    digest = hashlib.blake2b(digest_size=16)
    with TENSOR_LOCK, torch.no_grad():
        for content in _iter_state(module.state_dict()):
            digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()


def _iter_state(state: object) -> Iterator[bytes]:
    """Yield the contents of a module state: containers, and tensors with dtype, shape and data."""
    import torch

    if isinstance(state, torch.Tensor):
        content = _tensor_bytes(state)
        yield f"{state.dtype} {tuple(state.shape)}".encode()
        yield content
    elif isinstance(state, torch.ScriptObject):  # Packed weights of int8 layers.
        yield from _iter_state(state.__getstate__())
    elif isinstance(state, (Mapping, list, tuple)):
        yield type(state).__name__.encode()
        items = itertools.chain.from_iterable(state.items()) if isinstance(state, Mapping) else state
        for item in items:
            yield from _iter_state(item)
    elif state is None or isinstance(state, (str, bytes, int, float, torch.dtype, torch.device)):
        yield repr(state).encode("utf-8", "surrogatepass")
    else:
        raise ConfigurationError(
            f"The model contains a {short_type_name(state)}, which has no fingerprint.", SAVE_MODEL_REMEDY
        )


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    import torch

    if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.layout != torch.strided:
        message = "The model contains a tensor that is lazy, sparse or on the meta device, which has no fingerprint."
        raise ConfigurationError(message, SAVE_MODEL_REMEDY)
    content = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    content = content.dequantize() if content.is_quantized else content
    return content.reshape(-1).view(torch.uint8).numpy().tobytes() if content.numel() else b""


def _fingerprint(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def validate_hypotheses(hypotheses: object, data: object = None) -> tuple[Hypothesis, ...]:
    """Validate rejected hypotheses, and return each text as one line without secrets.

    Args:
        hypotheses: Pairs or mapping of a hypothesis and the reason for its rejection.
        data: Dataset. Its text must not occur in a hypothesis.

    Raises:
        ConfigurationError: If an item is not a pair of short texts, or contains text of the dataset. The error does not
            contain the hypotheses.

    Example:
        >>> validate_hypotheses({"slow loader": "data takes 3% of a step"})[0].hypothesis
        'slow loader'
    """
    pairs = hypotheses.items() if isinstance(hypotheses, Mapping) else hypotheses
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise ConfigurationError("A hypothesis is not a pair of texts.", HYPOTHESES_REMEDY)
    lines: list[list[str]] = []
    for pair in pairs:
        if len(lines) == MAX_HYPOTHESES:  # The iterable may be endless.
            raise ConfigurationError(f"There are more than {MAX_HYPOTHESES} hypotheses.", "Pass fewer hypotheses.")
        if not isinstance(pair, (tuple, list)) or [type(text) for text in pair] != [str, str]:
            raise ConfigurationError("A hypothesis is not a pair of texts.", HYPOTHESES_REMEDY)
        lines.append([collapse_whitespace(text) for text in pair])
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
    return tuple(Hypothesis(redact_secrets(text), redact_secrets(reason)) for text, reason in lines)
