"""What may enter a logbook of what is private: cleaned paths and variables, fingerprints of datasets and models, hypotheses.

Whatever does not look as the value of its variable must, or looks like a secret, becomes ``***``.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ...._utils.text import collapse_whitespace, short_type_name
from ...._utils.validation import check_path
from ....annotation.references import canonical_text, iter_texts
from ....devices.backend import TENSOR_LOCK
from ....devices.environment import VARIABLES as MPS_VARIABLES
from ....devices.request import MASK, mask_secrets
from ....errors import ConfigurationError
from ....models.config import normalize_dtype
from ....models.files import file_digest, hash_model_files
from .sections import Dataset, Hypothesis, Model

if TYPE_CHECKING:
    import torch

SECRET = re.compile(
    r"\b(AKIA|ASIA)[A-Z0-9]{12,}"  # keys of AWS
    r"|\beyJ[\w-]{8,}(\.[\w-]+)*"  # JSON web tokens
    r"|\bxox[a-z]-[\w-]+"  # tokens of Slack
    r"|\b(?=\w*[0-9])(?=\w*[A-Za-z])\w{32,}",  # any long run of letters and digits
    re.ASCII,
)
# A part of a path, or of a name: one word, so that no sentence is kept.
PART = re.compile(r"[\w.+<>~-]{1,64}")
HOME_PARENTS = ("home", "Users")  # Folders whose folders have the names of people.
DRIVE = re.compile(r"[A-Za-z]:", re.ASCII)
URL_PATTERN = re.compile(r"\w{1,32}://\S*|//\S*@\S*", re.ASCII)
LONGEST_VALUE = 10_000
LONGEST_PATH = 200
MOST_PATHS = 50

NUMBER = r"-?[0-9]{1,9}(\.[0-9]{1,9})?"
SWITCH = rf"{NUMBER}|on|off|true|false|yes|no|y|n|t|f"
# What torch's allocators read (``AllocatorConfig.cpp``).
CONFIGURED = rf"[a-z_0-9]{{1,40}}:({NUMBER}|true|false|native|cudaMallocAsync|\[[0-9:,>]{{1,80}}\])"
DEVICES = "auto|default|gpu|cpu|mps(:0)?|cuda(:[0-9]{1,4})?"
AFFINITY = "granularity=(fine|core|tile|thread|group)|compact|scatter|balanced|disabled|none|explicit|(no)?verbose|(no)?warnings|[0-9]{1,4}"


def redact_secrets(text: str) -> str:
    """Return a text with what looks like a secret replaced, and without half characters, which no file can hold."""
    whole = text[:LONGEST_VALUE].encode("utf-8", "replace").decode("utf-8")
    return SECRET.sub(MASK, mask_secrets("", whole))


def home_folder() -> Path:
    """Return the person's home; ``~`` if it is not known (``Path.home`` raises then)."""
    return Path(os.path.expanduser("~"))  # noqa: PTH111 - it answers for any person


def sanitize_path(path: str | Path, home: str | None = None) -> str:
    """Return a path or a name with the person's home as ``~``, and ``***`` for what may name a person or be a text.

    That is a folder of people in ``/home`` or ``/Users``, a part with the name of this person's home in it, and a part that
    is not a single word.

    Example:
        >>> sanitize_path("/home/jane/models/mine", home="/home/jane"), sanitize_path("/home/tom/x", home="/home/jane")
        ('~/models/mine', '/home/***/x')
        >>> sanitize_path("/scratch/jane/cache", home="/home/jane"), sanitize_path("/opt/janeway", home="/home/jane")
        ('/scratch/***/cache', '/opt/janeway')
        >>> sanitize_path("/data/a note of someone/x"), sanitize_path("a text that is no path")
        ('/data/***/x', '***')
    """
    text = str(path)
    start = home or str(home_folder())
    if len(start) > 1 and (text == start or text.startswith((start + "/", start + os.sep))):
        text = "~" + text[len(start) :]
    name = re.escape(re.split(r"[/\\]", start)[-1])
    person = re.compile(rf"(?<![^\W_]){name}(?![^\W_])" if name else r"(?!)")
    parts = re.split(r"([/\\])", redact_secrets(text))
    for number in range(0, len(parts), 2):
        part = parts[number]
        plain = not part or PART.fullmatch(part) or (number == 0 and DRIVE.fullmatch(part))
        named = number > 1 and (parts[number - 2] in HOME_PARENTS or person.search(part))
        parts[number] = part if plain and not named else MASK
    return "".join(parts)[:LONGEST_PATH]


# The variables that a logbook may hold, by the look of their values, of which there may be several with commas. These another
# computer should have too.
SHARED = {
    # How many threads compute, and how much memory is taken and given back.
    NUMBER: (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "RAYON_NUM_THREADS",
        "MALLOC_ARENA_MAX",
    ),
    CONFIGURED: ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    "default|debug|(malloc|pymalloc|mimalloc)(_debug)?": ("PYTHONMALLOC",),
    "true|false|master|primary|close|spread": ("OMP_PROC_BIND",),
    "active|passive": ("OMP_WAIT_POLICY",),
    AFFINITY: ("KMP_AFFINITY",),
    "[0-9]{1,9}(us|ms)?|infinite": ("KMP_BLOCKTIME",),
    # Whether two runs give the same.
    f"{NUMBER}|random": ("PYTHONHASHSEED",),
    "(:[0-9]{1,9}){2,8}": ("CUBLAS_WORKSPACE_CONFIG",),
    # What MPS does with an operator that it does not have, which code computes, how fast, and in which type.
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
# What libraries log, and their values that log all they do: each call, copy or block of memory.
LOGS = {
    "detail|debug|info|warning|error|critical": ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"),
    SWITCH: ("HF_DEBUG",),
    r"[+-]?(all|torch|dynamo|aot|inductor|dynamic|distributed|autograd)": ("TORCH_LOGS",),
    NUMBER: ("PYTORCH_DEBUG_MPS_ALLOCATOR",),
}
ALL_LOGGED = re.compile(r"detail|debug|on|yes|true|[1-9][0-9]*|.*\+.*", re.IGNORECASE)
# These are of one computer: its devices, its way to the hub, and its paths.
OWN = {
    f"{NUMBER}|(gpu|mig)-[0-9a-f-]{{1,36}}|": ("CUDA_VISIBLE_DEVICES",),
    "fastest_first|pci_bus_id": ("CUDA_DEVICE_ORDER",),
    DEVICES: ("OPENMED_TORCH_DEVICE", "OPENMED_DEVICE"),
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


def _look_by_name(names_by_look: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    return {name: look for look, names in names_by_look.items() for name in names}


SHARED_VARIABLES = _look_by_name(SHARED)
LOG_VARIABLES = _look_by_name(LOGS)
LOOKS = SHARED_VARIABLES | LOG_VARIABLES | _look_by_name(OWN)
VARIABLES = frozenset({*LOOKS, *PATH_VARIABLES, ENDPOINT})


def sanitize_value(name: str, value: str) -> str:
    """Return the value of an allowed variable as it may be kept; what does not look as it must becomes ``***``."""
    value = value.strip()
    if name in PATH_VARIABLES:  # A list of paths; what is no path, such as an address, is masked.
        parts = URL_PATTERN.sub(MASK, value[:LONGEST_VALUE]).split(os.pathsep)[:MOST_PATHS]
        return os.pathsep.join(map(sanitize_path, parts))
    if name == ENDPOINT:
        return _sanitize_url(value)
    look = re.compile(rf"({LOOKS[name]})(,({LOOKS[name]}))*", re.IGNORECASE | re.ASCII)
    return value if len(value) <= LONGEST_PATH and look.fullmatch(value) else MASK


def _sanitize_url(value: str) -> str:
    """Return the scheme, the host and the port of an address; user, password, path and query may be secret."""
    try:
        parts = urlsplit(value)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return MASK
    return redact_secrets(f"{parts.scheme}://{parts.hostname}{port}") if parts.hostname else MASK


def sanitize_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the allowed variables that are set, cleaned, in the order of their names.

    Example:
        >>> sanitize_environ({"OMP_NUM_THREADS": "2", "HF_TOKEN": "hf_abc", "PYTHONHASHSEED": "the patient"})
        {'OMP_NUM_THREADS': '2', 'PYTHONHASHSEED': '***'}
    """
    return {name: sanitize_value(name, environ[name]) for name in sorted(VARIABLES) if name in environ}


def portable_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that another computer should have too; what had to be masked is none of them."""
    kept = sanitize_environ(environ)
    return {name: value for name, value in kept.items() if name in SHARED_VARIABLES and MASK not in value}


TEXTS_FILE_OR_FOLDER = "Pass a list of texts, or the path of a file or a folder."
SAVE_IT = "Save it, and pass the path of its folder."

# Of hypotheses: the most characters of one, how many there may be, and how long a text is that does not stand in others by chance.
LONGEST = 200
MOST = 50
SHORT = 12
PAIRS = "Pass pairs of what was suspected and what rules it out, such as [('slow loader', 'data takes 3 %')]."


def fingerprint_dataset(data: Any) -> Dataset:
    """Return the fingerprint of a dataset.

    Args:
        data: A series of texts that can be read again, or the path of a file, or of a folder with shards.

    Raises:
        ConfigurationError: For anything else, for nothing, and for what cannot be read; no word of it is in the error.

    Example:
        >>> fingerprint_dataset(["asthma", "fever"]).items, fingerprint_dataset(["asthma"]).checksum == fingerprint_dataset(["fever"]).checksum
        (2, False)
    """
    if not isinstance(data, (str, os.PathLike)):
        return _of_texts(data)
    path = check_path(data, "dataset")
    # A device or a pipe may have no end; and what is not a path may be a note, so the error does not show it.
    if not (path.is_dir() or path.is_file()):
        raise ConfigurationError("There is no file or folder of that name for a dataset.", TEXTS_FILE_OR_FOLDER)
    try:
        return (
            _of_folder(path) if path.is_dir() else Dataset("file", file_digest(path, "sha256"), 1, path.stat().st_size)
        )
    except OSError as error:
        what = f"The dataset cannot be read: {short_type_name(error)}."
        raise ConfigurationError(what, TEXTS_FILE_OR_FOLDER) from None


def _of_texts(data: Any) -> Dataset:
    series = iter_texts(data)
    if not isinstance(data, Sized) or isinstance(data, (set, frozenset)):
        what = f"{short_type_name(data)} has no length or no order: it may have no end, or can be read once only."
        raise ConfigurationError(what, TEXTS_FILE_OR_FOLDER)
    digest = hashlib.sha256()
    items = 0
    size = 0
    for text in series:
        if not isinstance(text, (str, list)):
            what = f"Item {items} of the dataset is {short_type_name(text)}, not a text."
            raise ConfigurationError(what, TEXTS_FILE_OR_FOLDER)
        content = canonical_text(text).encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "big") + content)
        items += 1
        size += len(content)
    if not items:
        raise ConfigurationError("The dataset is empty.", TEXTS_FILE_OR_FOLDER)
    return Dataset("texts", digest.hexdigest(), items, size)


def _of_folder(folder: Path) -> Dataset:
    files = sorted(path for path in _below(folder) if path.is_file() and not path.name.startswith("."))
    if not files:
        raise ConfigurationError("The folder of the dataset has no files.", TEXTS_FILE_OR_FOLDER)
    shards = tuple(file_digest(path, "sha256") for path in files)
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


def model_from_files(name: str, folder: Path, dtype: str | None) -> Model:
    """Return which model the files of a folder are; ``dtype`` is the type of its weights in memory, if that is known."""
    content = hash_model_files(folder)
    return Model(sanitize_path(name), "files", content.weights, content.settings, content.tokenizer, dtype)


def model_from_module(module: torch.nn.Module, tokenizer: Any = None) -> Model:
    """Return which model a module in memory is, by every byte of its parameters and buffers."""
    config: Any = getattr(module, "config", None)
    # Where settings came from changes nothing.
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
        raise ConfigurationError(f"The model holds a {short_type_name(state)}, which has no fingerprint.", SAVE_IT)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    import torch

    if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.layout != torch.strided:
        what = "The model holds a tensor that is lazy, sparse or on the meta device, which has no fingerprint."
        raise ConfigurationError(what, SAVE_IT)
    content = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    content = content.dequantize() if content.is_quantized else content
    return content.reshape(-1).view(torch.uint8).numpy().tobytes() if content.numel() else b""


def _fingerprint(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def validate_hypotheses(said: Any, data: Any = None) -> tuple[Hypothesis, ...]:
    """Return hypotheses that are ruled out.

    Args:
        said: Pairs, or a mapping, of what was suspected and what rules it out.
        data: The dataset; no words of it may stand here.

    Raises:
        ConfigurationError: For what is not a pair of short texts, and for words of the dataset; it shows none of them.

    Example:
        >>> validate_hypotheses({"slow loader": "data takes 3 % of a step"})[0].hypothesis
        'slow loader'
    """
    if isinstance(said, str) or not isinstance(said, Iterable):
        raise ConfigurationError("A hypothesis is not a pair of texts.", PAIRS)
    checked: list[Hypothesis] = []
    for pair in said.items() if isinstance(said, Mapping) else said:
        if len(checked) == MOST:  # There may be no end.
            raise ConfigurationError(f"There are more than {MOST} hypotheses.", "Pass the last ones.")
        if not isinstance(pair, (tuple, list)) or [type(text) for text in pair] != [str, str]:
            raise ConfigurationError("A hypothesis is not a pair of texts.", PAIRS)
        checked.append(Hypothesis(*(_checked_text(text, data) for text in pair)))
    return tuple(checked)


def _checked_text(text: str, data: Any) -> str:
    """Return a text of a hypothesis in one line and without secrets; a long one, and words of the dataset, are refused."""
    line = collapse_whitespace(text)
    if len(line) > LONGEST:
        what = f"A hypothesis has {len(line):,} characters."
        raise ConfigurationError(what, f"Say it in {LONGEST}; a note must not be part of it.")
    folded = line.casefold()
    for item in () if data is None or isinstance(data, (str, os.PathLike)) else iter_texts(data):
        words = collapse_whitespace(canonical_text(item)).casefold()
        shorter = min(folded, words, key=len)
        if len(shorter) >= SHORT and (shorter in folded and shorter in words):
            raise ConfigurationError("A hypothesis has words of the dataset.", "Say it without them.")
    return redact_secrets(line)
