"""Which calls of torch wait for the device, and the line of a person's own code that led to one."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ..display import Plain
from .measure import workloads

# Whose code a file is: the person's, a library's, torch's, or Python's own, such as ``logging``.
OWN, LIBRARY, TORCH, PYTHON = "own", "library", "torch", "python"

HARNESS = workloads.__file__  # The file that calls a step; what is outside of it is not the step.
PACKAGE = Path(__file__).parents[1]
INSTALLED = {"site-packages", "dist-packages"}

# How ``torch.nn.Module`` runs a ``forward`` (``torch/nn/modules/module.py``); no public name tells that.
CALL_OF_A_MODULE = "_call_impl"


@dataclass(frozen=True, order=True)
class CodePlace(Plain):
    """A line of a person's own code, or the library in which a model that was called from there does something.

    Attributes:
        file: The name of the file without its folder, or of the cell; empty if no code of the person was running.
        line: The number of the line, 0 if there is none.
        function: The name of the function.
        library: The module of a library in whose model it happened; empty if the person's own line asked for it, though
            through a library, such as one that shows progress.
        in_model: Whether it happened in a model of a library, which the person cannot change.
    """

    file: str = ""
    line: int = 0
    function: str = ""
    library: str = ""
    in_model: bool = False

    ALSO = ("is_own",)

    @property
    def is_own(self) -> bool:
        """Whether the person's own line asked for it."""
        return bool(self.file) and not self.in_model

    def __str__(self) -> str:
        own = f"{self.file}:{self.line}" + (f" in {self.function}" if self.function.isidentifier() else "")
        return own if self.is_own else f"inside of {self.library}"


def place_of(frame: FrameType | None) -> CodePlace | None:
    """Return where the code is that led to the innermost frame, ``None`` if that is the measurement itself.

    torch's and Python's own code is passed over: whoever asks a logger to print a tensor prints it. torch's optimizers
    read counters that they keep on the CPU (``torch/optim/adam.py``), so they wait for nothing.
    """
    import torch

    optimizers = Path(torch.optim.__file__).parent
    library, in_model = "", False
    for one in frames_of_a_step(frame):
        file = one.f_code.co_filename
        owner = owner_of(file)
        if owner == TORCH and optimizers in Path(file).parents:
            return None
        if owner == OWN:
            return CodePlace(shown_file(file), one.f_lineno, one.f_code.co_name, library if in_model else "", in_model)
        if owner == LIBRARY:
            library = library or str(one.f_globals.get("__name__", Path(file).stem))
        calls = owner == TORCH and one.f_code.co_name == CALL_OF_A_MODULE
        in_model = in_model or bool(library and calls)
    return CodePlace(library=library, in_model=True) if library and not library.startswith(PACKAGE.name) else None


def frames_of_a_step(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames from the innermost to the outermost one of a step."""
    while frame is not None and frame.f_code.co_filename != HARNESS:
        yield frame
        frame = frame.f_back


@functools.cache
def owner_of(file: str) -> str:
    """Return whose code a file is.

    Example:
        >>> import logging, torch.nn
        >>> owner_of(logging.__file__), owner_of(torch.nn.__file__), owner_of("/home/a/study/train.py")
        ('python', 'torch', 'own')
        >>> owner_of("/usr/lib/python3/dist-packages/tqdm/std.py"), owner_of(__file__)
        ('library', 'library')
    """
    import torch

    path = Path(file)
    if Path(torch.__file__).parent in path.parents:
        return TORCH
    if PACKAGE in path.parents or INSTALLED & set(path.parts):
        return LIBRARY
    homes = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    return PYTHON if file.startswith("<frozen") or homes & set(path.parents) else OWN


def shown_file(file: str) -> str:
    """Return a file by its name, and a cell of a notebook as IPython names it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    cell = shell.compile.format_code_name(file) if shell is not None else None
    return " ".join(cell) if cell else Path(file).name


@dataclass(frozen=True)
class Synchronisation(Plain):
    """A call that waits for the device.

    Attributes:
        call: What is called, such as ``".item()"``.
        place: Where.
        count: How often in a step.
    """

    call: str
    place: CodePlace
    count: float

    def __str__(self) -> str:
        return f"{self.call} at {self.place}" if self.place.is_own else f"{self.call} {self.place}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as a mapping, ready for JSON, with the fields of its place."""
        return {"call": self.call, "count": self.count, **self.place.to_dict()}


# Functions of torch that need numbers of the device on the host: to return them, or to know the size of what they make.
WAITS: Mapping[str, str] = {
    "item": ".item()",
    "tolist": ".tolist()",
    "numpy": ".numpy()",
    "__array__": "an array of numpy",
    "cpu": ".cpu()",
    "__bool__": "bool()",
    "is_nonzero": "bool()",
    "__float__": "float()",
    "__int__": "int()",
    "__complex__": "complex()",
    "__index__": "a Python index",
    "__repr__": "printing a tensor",
    "__str__": "printing a tensor",
    "__format__": "formatting a tensor",
    "__contains__": "in",
    "equal": "torch.equal()",
    "allclose": "torch.allclose()",
    **{
        name: f"{name}()"
        for name in ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount")
    },
}

SYNCHRONIZE = "synchronize"  # The function of ``torch.mps``, ``torch.cuda`` and ``torch.accelerator`` that only waits.


def waiting_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], is_here: Callable[[Any], bool]) -> str:
    """Return how a call of torch that waits for the device is shown, empty for any other.

    Example:
        >>> waiting_call("to", ["a tensor", "cpu"], {}, lambda thing: thing == "a tensor")
        ".to('cpu')"
    """
    given = [*args, *kwargs.values()]
    if name == "copy_":
        target, source, *others = given
        waits = is_here(source) and not is_here(target) and not any(one is True for one in others)
        return ".copy_() to the host" if waits else ""
    if not given or not is_here(given[0]):
        return ""
    if name in WAITS:
        return WAITS[name]
    return next((shown for known, meets, shown in SOMETIMES if known == name and meets(args, kwargs)), "")


def goes_to_the_host(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether ``Tensor.to`` copies to the CPU and waits for that."""
    names = [str(getattr(one, "device", one)) for one in (*args[1:], *kwargs.values())]
    return "cpu" in names and not any(one is True for one in (kwargs.get("non_blocking"), *args[1:]))


def has_a_mask(args: Sequence[Any], _kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a tensor is read through a tensor of truth values, whose count torch has to know."""
    index = args[1] if len(args) > 1 else None
    parts = index if isinstance(index, (tuple, list)) else (index,)
    return any(str(getattr(part, "dtype", "")) in {"torch.bool", "torch.uint8"} for part in parts)


# Functions that wait with some arguments only.
SOMETIMES: tuple[tuple[str, Callable[[Sequence[Any], Mapping[str, Any]], bool], str], ...] = (
    ("to", goes_to_the_host, ".to('cpu')"),
    ("__getitem__", has_a_mask, "a boolean mask"),
    ("where", lambda args, kwargs: len(args) + len(kwargs) == 1, "torch.where() with a condition alone"),
)
