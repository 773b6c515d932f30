"""Sees what a step calls: operators that are started, and functions that wait for the device, with the line that led to them.

This file imports torch, because a subclass needs its base; it is itself imported only when a step is watched.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..devices.profilers import modes_on
from .measure import workloads
from .profile_operators import CodePlace, Synchronisation

# Whose code a file is: the person's, a library's, torch's, or Python's own, such as ``logging``.
OWN, LIBRARY, TORCH, PYTHON = "own", "library", "torch", "python"

HARNESS = workloads.__file__  # The file that calls a step; what is outside of it is not the step.
PACKAGE = Path(__file__).parents[1]
INSTALLED = {"site-packages", "dist-packages"}

# torch's optimizers read counters that they keep on the CPU (``torch/optim/adam.py``), so they wait for nothing.
OPTIMIZERS = Path(torch.optim.__file__).parent

# How ``torch.nn.Module`` runs a ``forward`` (``torch/nn/modules/module.py``); no public name tells that.
CALL_OF_A_MODULE = "_call_impl"


def place_of(frame: FrameType | None) -> CodePlace | None:
    """Return where the code is that led to the innermost frame, ``None`` if that is the measurement itself.

    torch's and Python's own code is passed over: whoever asks a logger to print a tensor prints it.
    """
    library, in_model = "", False
    while frame is not None and frame.f_code.co_filename != HARNESS:
        code = frame.f_code
        file, owner = code.co_filename, owner_of(code.co_filename)
        if owner == TORCH and OPTIMIZERS in Path(file).parents:
            return None
        if owner == OWN:
            return CodePlace(shown_file(file), frame.f_lineno, code.co_name, library if in_model else "", in_model)
        if owner == LIBRARY:
            library = library or str(frame.f_globals.get("__name__", Path(file).stem))
        in_model = in_model or bool(library and owner == TORCH and code.co_name == CALL_OF_A_MODULE)
        frame = frame.f_back
    return CodePlace(library=library, in_model=True) if library and not library.startswith(PACKAGE.name) else None


@functools.cache
def owner_of(file: str) -> str:
    """Return whose code a file is.

    Example:
        >>> import logging
        >>> owner_of(logging.__file__), owner_of(torch.nn.__file__), owner_of("/home/a/study/train.py")
        ('python', 'torch', 'own')
        >>> owner_of("/usr/lib/python3/dist-packages/tqdm/std.py"), owner_of(__file__)
        ('library', 'library')
    """
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


# Functions of torch that need numbers of the device on the host: to return them, or to know the size of what they make.
WAITS: Mapping[str, str] = {
    **{name: f".{name}()" for name in ("item", "tolist", "numpy", "cpu")},
    **{f"__{name}__": f"{name}()" for name in ("bool", "float", "int", "complex")},
    **dict.fromkeys(("__repr__", "__str__"), "printing a tensor"),
    **{name: f"torch.{name}()" for name in ("equal", "allclose")},
    **{name: f"{name}()" for name in ("nonzero", "argwhere", "masked_select", "bincount")},
    **{name: f"{name}()" for name in ("unique", "unique_consecutive")},
    "__array__": "an array of numpy",
    "is_nonzero": "bool()",
    "__index__": "a Python index",
    "__format__": "formatting a tensor",
    "__contains__": "in",
}

SYNCHRONIZE = "synchronize"  # The function of ``torch.mps``, ``torch.cuda`` and ``torch.accelerator`` that only waits.


def waiting_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], kind: str) -> str:
    """Return how a call of torch that waits for a kind of device is shown, empty for any other."""

    def is_here(thing: Any) -> bool:
        return isinstance(thing, torch.Tensor) and thing.device.type == kind

    first, *others = [*args, *kwargs.values()] or [None]
    if name == "copy_":
        waits = is_here(others[0]) and not is_here(first) and not any(one is True for one in others[1:])
        return ".copy_() to the host" if waits else ""
    if not is_here(first):
        return ""
    if name == "to":
        blocks = not any(one is True for one in (kwargs.get("non_blocking"), *args[1:]))
        return ".to('cpu')" if blocks and "cpu" in [str(getattr(one, "device", one)) for one in others] else ""
    if name == "__getitem__":  # torch has to count the true values of a mask.
        parts = others[0] if isinstance(others[0], (tuple, list)) else others
        masked = any(str(getattr(part, "dtype", "")) in {"torch.bool", "torch.uint8"} for part in parts)
        return "a boolean mask" if masked else ""
    if name == "where":
        return "" if others else "torch.where() with a condition alone"
    return WAITS.get(name, "")


@dataclass
class StepRecord:
    """What was seen so far."""

    kind: str  # The kind of device: ``"cpu"``, ``"mps"`` or ``"cuda"``.
    # How often each call waited for the device, and where.
    waits: Counter[tuple[str, CodePlace]] = field(default_factory=Counter)
    started: int = 0  # How many operators were started that compute something.

    def note(self, call: str, frame: FrameType) -> None:
        """Count a call that waits, unless the measurement itself makes it."""
        place = place_of(frame)
        if place is not None:
            self.waits[call, place] += 1

    def synchronisations(self, steps: int) -> tuple[Synchronisation, ...]:
        """Return the calls that waited, the most frequent first."""
        found = sorted(self.waits.items(), key=lambda item: (-item[1], item[0]))
        return tuple(Synchronisation(call, place, count / steps) for (call, place), count in found)


class WaitingFunctions(TorchFunctionMode):
    """Sees the functions of torch that Python calls, and notes where one is called from that waits."""

    def __init__(self, record: StepRecord) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = waiting_call(getattr(function, "__name__", ""), args, kwargs, self._record.kind)
        if call:
            self._record.note(call, sys._getframe(1))  # noqa: SLF001 - Python has no other name for it
        return function(*args, **kwargs)


class StartedOperators(TorchDispatchMode):
    """Counts the operators that compute; a view starts nothing on a device."""

    supports_higher_order_operators = True

    def __init__(self, record: StepRecord) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = getattr(operator, "_schema", None)  # Operators of a higher order have none.
        aliases = [one.alias_info for one in schema.returns] if schema is not None else []
        self._record.started += not any(alias is not None and not alias.is_write for alias in aliases)
        return operator(*args, **(kwargs or {}))


@contextmanager
def watching(record: StepRecord) -> Iterator[None]:
    """Note what is called in this thread; what ``torch.compile`` made runs uncompiled, since it calls nothing that is seen."""
    with ExitStack() as stack:
        if record.kind != "cpu":
            for module in (getattr(torch, record.kind), torch.accelerator):
                stack.enter_context(synchronize_noted(module, record))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(modes_on(StartedOperators(record), WaitingFunctions(record)))
        yield


@contextmanager
def synchronize_noted(module: Any, record: StepRecord) -> Iterator[None]:
    """Note calls of ``synchronize`` of a module of torch for a block: it takes no tensor, so that no mode sees it."""
    original = getattr(module, SYNCHRONIZE)

    def synchronize(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)  # noqa: SLF001 - Python has no other name for it
        if PACKAGE not in Path(caller.f_code.co_filename).parents:  # What looks for fallbacks waits, too.
            record.note(f"{module.__name__}.{SYNCHRONIZE}()", caller)
        return original(*args, **kwargs)

    setattr(module, SYNCHRONIZE, synchronize)
    try:
        yield
    finally:
        setattr(module, SYNCHRONIZE, original)
