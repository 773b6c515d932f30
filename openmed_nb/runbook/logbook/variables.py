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
from ...devices.request import MASK, masked

SECRET = re.compile(
    r"\b(AKIA|ASIA)[A-Z0-9]{12,}"  # keys of AWS
    r"|\beyJ[\w-]{8,}(\.[\w-]+)*"  # JSON web tokens
    r"|\bxox[a-z]-[\w-]+"  # tokens of Slack
    r"|\b(?=\w*[0-9])(?=\w*[A-Za-z])\w{32,}",  # any long run of letters and digits
    re.ASCII,
)
# A part of a path, or of a name: one word, so that no sentence is kept.
PART = re.compile(r"[\w.+<>~-]{1,64}")
PEOPLE = ("home", "Users")  # Folders whose folders have the names of people.
DRIVE = re.compile(r"[A-Za-z]:", re.ASCII)
ADDRESS = re.compile(r"\w{1,32}://\S*|//\S*@\S*", re.ASCII)
LONGEST, LONGEST_PATH, MOST_PATHS = 10_000, 200, 50

NUMBER = r"-?[0-9]{1,9}(\.[0-9]{1,9})?"
SWITCH = rf"{NUMBER}|on|off|true|false|yes|no|y|n|t|f"
# What torch's allocators read (``AllocatorConfig.cpp``).
CONFIGURED = rf"[a-z_0-9]{{1,40}}:({NUMBER}|true|false|native|cudaMallocAsync|\[[0-9:,>]{{1,80}}\])"
DEVICES = "auto|default|gpu|cpu|mps(:0)?|cuda(:[0-9]{1,4})?"
AFFINITY = "granularity=(fine|core|tile|thread|group)|compact|scatter|balanced|disabled|none|explicit|(no)?verbose|(no)?warnings|[0-9]{1,4}"


def without_secrets(text: str) -> str:
    """Return a text with what looks like a secret replaced, and without half characters, which no file can hold."""
    whole = text[:LONGEST].encode("utf-8", "replace").decode("utf-8")
    return SECRET.sub(MASK, masked("", whole))


def home_folder() -> Path:
    """Return the person's home; ``~`` if it is not known (``Path.home`` raises then)."""
    return Path(os.path.expanduser("~"))  # noqa: PTH111 - it answers for any person


def short_path(path: str | Path, home: str | None = None) -> str:
    """Return a path or a name with the person's home as ``~``, and ``***`` for what may name a person or be a text.

    That is a folder of people in ``/home`` or ``/Users``, a part with the name of this person's home in it, and a part that
    is not a single word.

    Example:
        >>> short_path("/home/jane/models/mine", home="/home/jane"), short_path("/home/tom/x", home="/home/jane")
        ('~/models/mine', '/home/***/x')
        >>> short_path("/scratch/jane/cache", home="/home/jane"), short_path("/opt/janeway", home="/home/jane")
        ('/scratch/***/cache', '/opt/janeway')
        >>> short_path("/data/a note of someone/x"), short_path("a text that is no path")
        ('/data/***/x', '***')
    """
    text, start = str(path), home or str(home_folder())
    if len(start) > 1 and (text == start or text.startswith((start + "/", start + os.sep))):
        text = "~" + text[len(start) :]
    name = re.escape(re.split(r"[/\\]", start)[-1])
    person = re.compile(rf"(?<![^\W_]){name}(?![^\W_])" if name else r"(?!)")
    parts = re.split(r"([/\\])", without_secrets(text))
    for number in range(0, len(parts), 2):
        part = parts[number]
        plain = not part or PART.fullmatch(part) or (number == 0 and DRIVE.fullmatch(part))
        named = number > 1 and (parts[number - 2] in PEOPLE or person.search(part))
        parts[number] = part if plain and not named else MASK
    return "".join(parts)[:LONGEST_PATH]


def paths(value: str) -> str:
    """Return a list of paths, each cleaned; what is no path, such as an address, becomes ``***``."""
    parts = ADDRESS.sub(MASK, value[:LONGEST]).split(os.pathsep)[:MOST_PATHS]
    return os.pathsep.join(map(short_path, parts))


def address(value: str) -> str:
    """Return the scheme, the host and the port of an address; user, password, path and query may be secret."""
    try:
        parts = urlsplit(value)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return MASK
    return without_secrets(f"{parts.scheme}://{parts.hostname}{port}") if parts.hostname else MASK


def list_of(expression: str) -> Callable[[str], str]:
    """Return what keeps a value, or several with commas, that look as an expression says, in any case."""
    looks = re.compile(rf"({expression})(,({expression}))*", re.IGNORECASE | re.ASCII)
    return lambda value: value if len(value) <= LONGEST_PATH and looks.fullmatch(value) else MASK


number, switch = list_of(NUMBER), list_of(SWITCH)


@dataclass(frozen=True)
class AllowedVariable:
    """A variable that is kept.

    Attributes:
        name: Its name.
        why: What drifts with it.
        clean: Returns its value as it may be kept.
        golden: Whether another computer should have the same value; paths and numbers of GPUs are of one computer.
    """

    name: str
    why: str
    clean: Callable[[str], str] = switch
    golden: bool = True


THREADS = "how many threads compute"
DETERMINISM = "whether two runs give the same"
FOLDERS = "which code or which files are found first"
CACHES = "where models are read from"
DEVICE = "which device is taken"
SPEED = "which code computes, and how fast"
MEMORY = "how memory is taken and given back"
HUB = "whether and where models are fetched"


def _named(
    why: str, *names: str, clean: Callable[[str], str] = switch, golden: bool = True
) -> tuple[AllowedVariable, ...]:
    return tuple(AllowedVariable(name, why, clean, golden) for name in names)


# Every variable that a logbook may hold, with the reason.
ALLOWED = (
    *_named(THREADS, "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", clean=number),
    *_named(THREADS, "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS", clean=number),
    *_named(THREADS, "TOKENIZERS_PARALLELISM"),
    *_named(THREADS, "OMP_PROC_BIND", clean=list_of("true|false|master|primary|close|spread")),
    *_named(THREADS, "OMP_WAIT_POLICY", clean=list_of("active|passive")),
    *_named(THREADS, "KMP_AFFINITY", clean=list_of(AFFINITY)),
    *_named(THREADS, "KMP_BLOCKTIME", clean=list_of("[0-9]{1,9}(us|ms)?|infinite")),
    *_named(DETERMINISM, "PYTHONHASHSEED", clean=list_of(f"{NUMBER}|random")),
    *_named(DETERMINISM, "CUBLAS_WORKSPACE_CONFIG", clean=list_of("(:[0-9]{1,9}){2,8}")),
    *_named("what MPS does with an operator or a tensor too much", *MPS_VARIABLES),
    *_named(SPEED, "PYTORCH_MPS_FAST_MATH", "PYTORCH_MPS_PREFER_METAL", "PYTORCH_MPS_LOG_PROFILE_INFO"),
    *_named(
        SPEED, "PYTORCH_MPS_TRACE_SIGNPOSTS", "MTL_CAPTURE_ENABLED", "MTL_DEBUG_LAYER", "METAL_DEVICE_WRAPPER_TYPE"
    ),
    *_named(SPEED, "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUDA_LAUNCH_BLOCKING"),
    *_named(SPEED, "TORCHDYNAMO_DISABLE", "PYTHONOPTIMIZE"),
    *_named(SPEED, "ATEN_CPU_CAPABILITY", clean=list_of("default|avx2|avx512|vsx|zvector|sve(128|256)?|amx")),
    *_named(
        SPEED,
        "ONEDNN_MAX_CPU_ISA",
        clean=list_of("default|all|sse41|avx2?(_[a-z0-9_]{1,20})?|avx(10|512)_[a-z0-9_]{1,20}"),
    ),
    *_named(MEMORY, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", clean=list_of(CONFIGURED)),
    *_named(MEMORY, "MALLOC_ARENA_MAX", clean=number),
    *_named(MEMORY, "PYTHONMALLOC", clean=list_of("default|debug|(malloc|pymalloc|mimalloc)(_debug)?")),
    *_named(MEMORY, "LD_PRELOAD", "DYLD_INSERT_LIBRARIES", clean=paths, golden=False),
    *_named(DEVICE, "CUDA_VISIBLE_DEVICES", clean=list_of(f"{NUMBER}|(gpu|mig)-[0-9a-f-]{{1,36}}|"), golden=False),
    *_named(DEVICE, "CUDA_DEVICE_ORDER", clean=list_of("fastest_first|pci_bus_id"), golden=False),
    *_named(DEVICE, "OPENMED_TORCH_DEVICE", "OPENMED_DEVICE", clean=list_of(DEVICES), golden=False),
    *_named(DEVICE, "ACCELERATE_USE_CPU", golden=False),
    *_named("in which type training computes", "ACCELERATE_MIXED_PRECISION", clean=list_of("no|fp16|bf16|fp8")),
    *_named(FOLDERS, "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", clean=paths, golden=False),
    *_named(FOLDERS, "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", clean=paths, golden=False),
    *_named(CACHES, "HF_HOME", "HF_HUB_CACHE", "TORCH_HOME", "XDG_CACHE_HOME", clean=paths, golden=False),
    *_named("where temporary files go", "TMPDIR", clean=paths, golden=False),
    *_named(HUB, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", golden=False),
    *_named(HUB, "HF_ENDPOINT", clean=address, golden=False),
)

CLEANERS = {one.name: one.clean for one in ALLOWED}


def kept_value(name: str, value: str) -> str:
    """Return the value of an allowed variable as it may be kept."""
    return CLEANERS[name](value.strip())


def kept_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the allowed variables that are set, cleaned, in the order of their names.

    Example:
        >>> kept_variables({"OMP_NUM_THREADS": "2", "HF_TOKEN": "hf_abc", "PYTHONHASHSEED": "the patient"})
        {'OMP_NUM_THREADS': '2', 'PYTHONHASHSEED': '***'}
    """
    return {name: kept_value(name, environ[name]) for name in sorted(CLEANERS) if name in environ}


def golden_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that another computer should have too; what had to be masked is none of them."""
    names = {one.name for one in ALLOWED if one.golden}
    kept = kept_variables(environ)
    return {name: value for name, value in kept.items() if name in names and MASK not in value}
