"""The environment variables that a logbook keeps: an allow list, each with the reason for it, and the look of its values.

Whatever does not look as the value of its variable must, or looks like a secret, becomes ``***``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ...devices.environment import VARIABLES as MPS_VARIABLES
from ...devices.variables import MASK, masked

SECRET = re.compile(
    r"\b(AKIA|ASIA)[A-Z0-9]{12,}"  # keys of AWS
    r"|\beyJ[\w-]{8,}(\.[\w-]+)*"  # JSON web tokens
    r"|\bxox[a-z]-[\w-]+"  # tokens of Slack
    r"|\b(?=\w*[0-9])(?=\w*[A-Za-z])\w{32,}",  # any long run of letters and digits
    re.ASCII,
)
WORD = re.compile(r"[\w.,:;=+*\[\]-]{0,100}", re.ASCII)
URL = re.compile(r"\w{1,32}://\S*", re.ASCII)
LONGEST, LONGEST_PATH, MOST_PATHS = 10_000, 200, 50


def without_secrets(text: str) -> str:
    """Return a text with what looks like a secret replaced.

    Example:
        >>> without_secrets("https://me:word@host/x"), without_secrets("/opt/hf_0123456789/lib")
        ('https://***@host/x', '/opt/***/lib')
    """
    return SECRET.sub(MASK, masked("", text[:LONGEST]))


def short_path(path: str | Path, home: str | None = None) -> str:
    """Return a path with the person's home as ``~``, and without what looks like a secret.

    Example:
        >>> short_path("/home/me/models/mine", home="/home/me"), short_path("/home/mended", home="/home/me")
        ('~/models/mine', '/home/mended')
    """
    text, start = str(path), home or str(Path("~").expanduser())
    if len(start) > 1 and (text == start or text.startswith((start + "/", start + os.sep))):
        text = "~" + text[len(start) :]
    return without_secrets(text)[:LONGEST_PATH]


def one_path(path: str | Path) -> str:
    """Return a path as it may be kept; a text with spaces that is no full path may be anything, and becomes ``***``.

    Example:
        >>> one_path("models/mine"), one_path("a text that is no path")
        ('models/mine', '***')
    """
    return short_path(path) if Path(path).is_absolute() or len(str(path).split()) <= 1 else MASK


def word(value: str) -> str:
    """Return a value that is one word, such as a number or a switch; spaces would make it a text.

    Example:
        >>> word("max_split_size_mb:128"), word("two words")
        ('max_split_size_mb:128', '***')
    """
    return without_secrets(value) if WORD.fullmatch(value) else MASK


def paths(value: str) -> str:
    """Return a list of paths, each cleaned; what is no path, such as an address, becomes ``***``.

    Example:
        >>> paths("/opt/lib:a text that is no path")
        '/opt/lib:***'
    """
    parts = URL.sub(MASK, value[:LONGEST]).split(os.pathsep)[:MOST_PATHS]
    return os.pathsep.join(map(one_path, parts))


def address(value: str) -> str:
    """Return an address without user, password and query.

    Example:
        >>> address("https://me:word@hub.example:8080/models?key=a"), address("no address")
        ('https://hub.example:8080/models', '***')
    """
    try:
        parts = urlsplit(value)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return MASK
    return without_secrets(f"{parts.scheme}://{parts.hostname}{port}{parts.path}") if parts.hostname else MASK


@dataclass(frozen=True)
class Variable:
    """A variable that is kept.

    Attributes:
        name: Its name.
        why: What drifts with it.
        clean: Returns its value as it may be kept.
        golden: Whether another computer should have the same value; paths and numbers of GPUs are of one computer.
    """

    name: str
    why: str
    clean: Callable[[str], str] = word
    golden: bool = True


THREADS = "how many threads compute"
DETERMINISM = "whether two runs give the same"
FOLDERS = "which code or which files are found first"
CACHES = "where models are read from"
DEVICE = "which device is taken"
SPEED = "which code computes, and how fast"
MEMORY = "how memory is taken and given back"
HUB = "whether and where models are fetched"


def _named(why: str, *names: str, clean: Callable[[str], str] = word, golden: bool = True) -> tuple[Variable, ...]:
    return tuple(Variable(name, why, clean, golden) for name in names)


ALLOWED = (
    *_named(THREADS, "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
    *_named(THREADS, "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
    *_named(THREADS, "OMP_PROC_BIND", "OMP_WAIT_POLICY", "KMP_AFFINITY", "KMP_BLOCKTIME"),
    *_named(DETERMINISM, "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG"),
    *_named("what MPS does with an operator or a tensor too much", *MPS_VARIABLES),
    *_named(SPEED, "PYTORCH_MPS_FAST_MATH", "PYTORCH_MPS_PREFER_METAL", "PYTORCH_MPS_LOG_PROFILE_INFO"),
    *_named(
        SPEED, "PYTORCH_MPS_TRACE_SIGNPOSTS", "MTL_CAPTURE_ENABLED", "MTL_DEBUG_LAYER", "METAL_DEVICE_WRAPPER_TYPE"
    ),
    *_named(SPEED, "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUDA_LAUNCH_BLOCKING"),
    *_named(SPEED, "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "TORCHDYNAMO_DISABLE", "PYTHONOPTIMIZE"),
    *_named(MEMORY, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "MALLOC_ARENA_MAX", "PYTHONMALLOC"),
    *_named(MEMORY, "LD_PRELOAD", "DYLD_INSERT_LIBRARIES", clean=paths, golden=False),
    *_named(DEVICE, "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", golden=False),
    *_named(DEVICE, "OPENMED_TORCH_DEVICE", "OPENMED_DEVICE", "ACCELERATE_USE_CPU", golden=False),
    *_named("in which type training computes", "ACCELERATE_MIXED_PRECISION"),
    *_named(FOLDERS, "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", clean=paths, golden=False),
    *_named(FOLDERS, "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", clean=paths, golden=False),
    *_named(CACHES, "HF_HOME", "HF_HUB_CACHE", "TORCH_HOME", "XDG_CACHE_HOME", clean=paths, golden=False),
    *_named("where certificates are kept", "OPENMED_NB_DATA", clean=paths, golden=False),
    *_named("where temporary files go", "TMPDIR", clean=paths, golden=False),
    *_named(HUB, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", golden=False),
    *_named(HUB, "HF_ENDPOINT", clean=address, golden=False),
)
"""Every variable that a logbook may hold, with the reason."""


def kept_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the allowed variables that are set, cleaned, in the order of their names.

    Example:
        >>> kept_variables({"OMP_NUM_THREADS": "2", "HF_TOKEN": "hf_abc", "PYTHONHASHSEED": "the patient"})
        {'OMP_NUM_THREADS': '2', 'PYTHONHASHSEED': '***'}
    """
    found = {one.name: one.clean(environ[one.name]) for one in ALLOWED if one.name in environ}
    return dict(sorted(found.items()))


def golden_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that another computer should have too; what had to be masked is none of them.

    Example:
        >>> golden_variables({"OMP_NUM_THREADS": "2", "PYTHONPATH": "/opt"})
        {'OMP_NUM_THREADS': '2'}
    """
    names = {one.name for one in ALLOWED if one.golden}
    kept = kept_variables(environ)
    return {name: value for name, value in kept.items() if name in names and MASK not in value}
