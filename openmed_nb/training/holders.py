"""Who holds tensors: living tensors, and the variables, lists and attributes that keep them alive.

The search goes from the names that a person wrote, the variables of ``__main__``, of modules that are not installed
packages, and of the functions that are running, also in other threads, through containers, attributes, frames and what
else an object refers to, as the garbage collector knows it, to tensors. So an answer is a name that can be found in the
notebook, and the interpreter's million other objects are not looked at. What only installed packages hold is not found; it
is counted. Keys of mappings are left out: they may be patients.
"""

from __future__ import annotations

import functools
import gc
import sys
import sysconfig
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from itertools import compress
from operator import attrgetter
from pathlib import Path
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import TYPE_CHECKING, Any

from .._render.display import Displayable, JsonMixin, Report, Table, format_bytes, pluralize
from .._utils.text import short_type_name
from ..devices.backend import import_torch, is_torch_imported
from ..devices.machine import is_mps_simulated
from ..errors import ConfigurationError

if TYPE_CHECKING:
    import torch


def iter_live_tensors() -> list[torch.Tensor]:
    """Return every tensor that Python knows of; types are asked, so that no proxy is woken up."""
    tensor = import_torch().Tensor
    things = gc.get_objects()
    kinds = {kind for kind in set(map(type, things)) if issubclass(kind, tensor)}
    return list(compress(things, map(kinds.__contains__, map(type, things))))


def live_tensor_bytes() -> int:
    """Return the bytes of all tensors that Python objects or their autograd graphs reach."""
    return sum(storage_sizes(iter_live_tensors()).values())


def storage_sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each storage that the tensors and their graphs use, by its address; views share one."""
    with import_torch()._C.DisableTorchFunction():  # noqa: SLF001 - so that no lazy parameter or foreign class is woken
        tensors = list(tensors)
        reached = (*tensors, *saved_tensors(map(grad_fn_of, tensors)))
        storages = (tensor.untyped_storage() for tensor in reached if has_storage(tensor))
        return {one._cdata: one.nbytes() for one in storages}  # noqa: SLF001 - two wrappers of a storage have it in common


def saved_tensors(nodes: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that graphs keep for their backward pass; what hooks packed as it is, or not at all.

    No hook is called: it may compute again.
    """
    tensor = import_torch().Tensor
    names: dict[type, list[str]] = {}  # A graph has thousands of nodes of a few types.
    waiting, seen = list(nodes), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
        kind = type(node)
        if kind not in names:
            names[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        for name in names[kind]:
            yield from (one for one in _saved_values(node, name) if isinstance(one, tensor))


def _saved_values(node: Any, name: str) -> Iterable[Any]:
    """Return what a node keeps under a name, without calling the hooks that may have packed it."""
    readable = hasattr(import_torch()._C._autograd.SavedTensor, "data")  # noqa: SLF001 - torch 2.6 cannot say what it is
    unpacked = name.removeprefix("_raw")
    if not hasattr(type(node), unpacked):  # A Function written in Python has another name for it.
        unpacked = name.removeprefix("_raw_")
    profile = sys.getprofile()
    try:
        if readable:
            saved = getattr(node, name)
        else:
            sys.setprofile(_call_nothing)
            saved = getattr(node, unpacked)
    # A backward pass has freed it, a hook has packed it, or it was changed in place, which only unpacking minds.
    except (RuntimeError, _HookCalled):
        return ()
    finally:
        if not readable:
            sys.setprofile(profile)
    several = saved if isinstance(saved, (list, tuple)) else (saved,)
    return [getattr(one, "data", None) for one in several] if readable else several


class _HookCalled(Exception):
    """A hook was to unpack what a graph keeps."""


def _call_nothing(_frame: FrameType, event: str, _argument: Any) -> None:
    """Stop a function written in Python at its start."""
    if event == "call":
        raise _HookCalled


def grad_fn_of(tensor: torch.Tensor) -> Any:
    """Return the node of the graph that made a tensor; ``None`` for a leaf, and where a graph was made invalid."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # One of several views, whose base was changed in place.
        return None


def has_storage(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has memory of its own: sparse, meta and fake tensors and wrappers have none."""
    torch = import_torch()
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # noqa: SLF001 - torch has no other name for it
    return tensor.layout == torch.strided and not wrapped and tensor.untyped_storage().device.type != "meta"


UNNAMED = "(reached by no name)"
# Folders of installed packages: of this environment, of the user, and of another one that this one lies over.
INSTALLED_FOLDERS = {"site-packages", "dist-packages"}
PACKAGE = __name__.partition(".")[0]
# How many containers and attributes lie between a name and a tensor at most.
MAX_DEPTH = 6
# After so many containers and tensors the search ends.
MAX_OBJECTS = 50_000
# Of the parts of a container that are not tensors, only the last so many are searched: a large table hides nothing after it.
MAX_CHILDREN = 10_000
# References to the copy of a frame's variables that nothing else uses: the frame's, this module's, and the question's.
UNSHARED = 3

# The kind of what optimizers keep of their last steps, which stops growing at a bound.
HISTORY = "history with a bound"

CONTAINERS = (list, tuple, set, frozenset, deque)
# What holds no tensors, or leads everywhere; the type is asked, so that no proxy is woken up.
LEAVES = (str, bytes, int, float, type, ModuleType, CodeType, type(None))
# What waits with a frame of variables: the attributes that have it, and what it waits for.
WAITING = {
    GeneratorType: ("gi_frame", "gi_yieldfrom"),
    CoroutineType: ("cr_frame", "cr_await"),
    AsyncGeneratorType: ("ag_frame", "ag_await"),
}


@dataclass(frozen=True)
class TensorReferrer(JsonMixin):
    """A variable, container or attribute that holds tensors.

    Attributes:
        name: How it is reached, such as ``"losses"`` or ``"trainer.history"``.
        kind: Its type, such as ``"list"``.
        tensors: How many tensors it holds itself.
        size: Bytes of their storages, and of those that their autograd graphs keep.
        graphs: How many of the tensors still have their autograd graph.
    """

    name: str
    kind: str
    tensors: int
    size: int
    num_graphs: int = 0

    def __str__(self) -> str:
        graphs = " with their autograd graphs" if self.num_graphs else ""
        kind = f" ({self.kind})" if self.kind else ""
        return f"{self.name}{kind} holds {pluralize(self.tensors, 'tensor')}{graphs}, {format_bytes(self.size)}"


def table_of(holders: Iterable[TensorReferrer], caption: str = "") -> Table:
    """Return a table with a row for each holder."""
    rows = []
    for holder in holders:
        count = str(holder.tensors)
        if holder.num_graphs:
            count += f", {'all' if holder.num_graphs == holder.tensors else holder.num_graphs} with graphs"
        rows.append((holder.name, holder.kind, count, format_bytes(holder.size)))
    return Table(caption, ("name", "kind", "tensors", "memory"), tuple(rows))


@dataclass(frozen=True, repr=False)
class TensorReferrers(Displayable, Sequence[TensorReferrer]):
    """What holds tensors, the most memory first."""

    referrers: tuple[TensorReferrer, ...]
    simulated: bool = False

    def __len__(self) -> int:
        return len(self.referrers)

    def __getitem__(self, index: Any) -> Any:
        return self.referrers[index]

    def to_report(self) -> Report:
        """Return the table of what holds tensors."""
        verb = "holds" if len(self) == 1 else "hold"
        return Report(f"{pluralize(len(self), 'name')} {verb} tensors", tables=(table_of(self),))


def find_tensor_referrers(namespace: Mapping[str, Any] | None = None) -> TensorReferrers:
    """Return what holds tensors now, the most memory first.

    Args:
        namespace: Variables to look through; ``None`` takes those of ``__main__``, of modules that are not installed
            packages, and of the functions that are running, also in other threads.

    Returns:
        One :class:`Holder` for each variable, container or attribute that holds tensors itself; a tensor that several
        hold is counted for the first of them. Without a namespace the last one counts what no name reaches.

    Raises:
        ConfigurationError: For a namespace that is not a mapping.

    Example:
        >>> import torch
        >>> print(find_tensor_referrers({"losses": [torch.zeros(256), torch.zeros(256)]}))
        1 name holds tensors
          name    kind  tensors  memory
          losses  list  2        2.0 KiB
    """
    if not is_torch_imported():
        return TensorReferrers(())
    if not isinstance(namespace, Mapping | None):
        raise ConfigurationError(
            f"The namespace must be a mapping, got {short_type_name(namespace)}.", "Pass globals(), or nothing."
        )
    found, holders = _search(_roots() if namespace is None else namespace.items())
    if namespace is None:
        known = storage_sizes(tensor for tensors in found.values() for tensor in tensors)
        others = {key: size for key, size in storage_sizes(iter_live_tensors()).items() if key not in known and size}
        holders += (TensorReferrer(UNNAMED, "", len(others), sum(others.values())),) if others else ()
    return TensorReferrers(holders, is_mps_simulated())


def named_referrers() -> tuple[TensorReferrer, ...]:
    """Return what holds tensors by a name, the most memory first."""
    return _search(_roots())[1]


def grown_referrers(before: Iterable[TensorReferrer], after: Iterable[TensorReferrer]) -> dict[TensorReferrer, int]:
    """Return the holders of ``after`` that hold more bytes than they did ``before``, the largest growth first, with it."""
    known = {holder.name: holder.size for holder in before}
    grown = {holder: holder.size - known.get(holder.name, 0) for holder in after}
    order = sorted(grown, key=grown.__getitem__, reverse=True)
    return {holder: grown[holder] for holder in order if grown[holder] > 0}


def _search(roots: Iterable[tuple[str, Any]]) -> tuple[dict[tuple[str, str], list[Any]], tuple[TensorReferrer, ...]]:
    """Return the tensors that names reach, by the name and the kind of what holds them, and these holders."""
    found: dict[tuple[str, str], list[Any]] = defaultdict(list)
    with import_torch()._C.DisableTorchFunction():  # noqa: SLF001 - so that no tensor class of others is woken
        for name, kind, tensor in _reached(roots):
            found[name, kind].append(tensor)
    holders = [
        TensorReferrer(
            name, kind, len(held), sum(storage_sizes(held).values()), sum(grad_fn_of(one) is not None for one in held)
        )
        for (name, kind), held in found.items()
    ]
    return found, tuple(sorted(holders, key=attrgetter("size"), reverse=True))


def _reached(roots: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    """Yield the name and kind of what holds each tensor, and the tensor; breadth first, so that names are short."""
    torch = import_torch()
    waiting = deque((name, "variable", name, thing, 0) for name, thing in roots)
    seen: set[int] = set()
    while waiting and len(seen) < MAX_OBJECTS:
        holder, kind, name, thing, depth = waiting.popleft()
        if id(thing) in seen or issubclass(type(thing), LEAVES):
            continue
        seen.add(id(thing))
        if issubclass(type(thing), torch.Tensor):
            if has_storage(thing):
                yield holder, kind, thing
            with suppress(RuntimeError):  # As in grad_fn_of. torch warns where others than leaves are asked.
                waiting.append((f"{holder}.grad", "gradients", name, thing.grad if thing.is_leaf else None, depth))
        elif depth < MAX_DEPTH:
            parts = [step for step in _children(name, thing) if not issubclass(type(step[-1]), LEAVES)]
            held = [step for step in parts if issubclass(type(step[-1]), torch.Tensor)]
            others = [step for step in parts if not issubclass(type(step[-1]), torch.Tensor)]
            waiting.extend((*step, depth + 1) for step in (*held, *others[-MAX_CHILDREN:]))


def _children(name: str, thing: Any) -> Iterator[tuple[str, str, str, Any]]:
    """Yield (holder, kind, name, part) for each part of a container or an object."""
    torch = import_torch()
    kind = type(thing).__name__
    inside = f"{name}[...]"
    if issubclass(type(thing), torch.nn.Module):
        yield from _parts_of_module(name, thing)
        return
    if issubclass(type(thing), dict):
        yield from ((name, kind, inside, part) for part in list(dict.values(thing)))
        return
    if base := next((base for base in CONTAINERS if issubclass(type(thing), base)), None):
        yield from ((name, kind, inside, part) for part in list(base.__iter__(thing)))
        return
    if issubclass(type(thing), torch.optim.Optimizer):
        yield from _history_of_optimizer(f"{name}.state", thing)
    for variable, part in _waiting_variables(thing):
        yield f"{name}: {variable}", "variable", f"{name}: {variable}", part
    for attribute, part in list(_attributes(thing).items()):
        yield f"{name}.{attribute}", "attribute", f"{name}.{attribute}", part
    if not issubclass(type(thing), (FunctionType, FrameType, TracebackType, *WAITING)):  # These refer to all globals.
        yield from ((name, kind, inside, part) for part in (*_elements(thing), *gc.get_referents(thing)))


def _waiting_variables(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the variables of the functions that an error came through, and those of a generator that waits."""
    if issubclass(type(thing), BaseException):
        traceback = vars(BaseException)["__traceback__"].__get__(thing)  # Whatever a class makes of it.
        yield from _variables_of_traceback(traceback)
    elif issubclass(type(thing), TracebackType):
        yield from _variables_of_traceback(thing)
    elif issubclass(type(thing), FrameType) and thing.f_code.co_flags & CO_OPTIMIZED:
        yield from _variables(thing)
    elif type(thing) in WAITING:
        frame, awaited = (getattr(thing, attribute) for attribute in WAITING[type(thing)])
        if frame is not None and frame.f_back is None:  # One that runs is among the frames of its thread.
            yield from _variables(frame)
        yield "(awaited)", awaited


def _variables_of_traceback(traceback: TracebackType | None) -> Iterator[tuple[str, Any]]:
    while traceback is not None:
        if traceback.tb_frame.f_code.co_flags & CO_OPTIMIZED:  # Not the frame of the notebook or script itself.
            yield from _variables(traceback.tb_frame)
        traceback = traceback.tb_next


def _elements(thing: Any) -> Iterator[Any]:
    """Yield what arrays of numpy hold, and the value of a context variable: the garbage collector knows neither."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(type(thing), numpy.ndarray):
        yield vars(numpy.ndarray)["base"].__get__(thing)  # The tensor whose memory it is, after numpy().
        plain = numpy.ndarray.view(thing, numpy.ndarray)
        if plain.dtype.hasobject:
            yield from plain.reshape(-1).tolist()
    elif issubclass(type(thing), ContextVar):
        yield thing.get(None)


def _parts_of_module(name: str, module: Any) -> Iterator[tuple[str, str, str, Any]]:
    """Yield the parameters and buffers of a module as its own, then what else it and the modules in it keep."""
    for tensor in (*module.parameters(), *module.buffers()):
        yield name, type(module).__name__, name, tensor
    for inner, part in module.named_modules(prefix=name):
        for attribute, value in list(vars(part).items()):
            if attribute not in {"_parameters", "_buffers", "_modules"}:
                yield f"{inner}.{attribute}", "attribute", f"{inner}.{attribute}", value


def _history_of_optimizer(state: str, optimizer: Any) -> Iterator[tuple[str, str, str, Any]]:
    """Yield what an optimizer with a history, as LBFGS, keeps of its last steps, as one holder."""
    if "history_size" in getattr(optimizer, "defaults", ()):
        for kept in optimizer.state.values():
            for value in kept.values():
                several = value if isinstance(value, (list, tuple, deque)) else [value]
                yield from ((state, HISTORY, state, part) for part in several)


def _attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes of an object; of a function its defaults, and the variables that it has from around it."""
    if issubclass(type(thing), FunctionType):
        around = {}
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False):
            with suppress(ValueError):  # Its variable has no value yet.
                around[name] = cell.cell_contents
        return {**around, "__defaults__": thing.__defaults__, "__kwdefaults__": thing.__kwdefaults__}
    if issubclass(type(thing), (MethodType, BuiltinFunctionType)):
        return {"__self__": thing.__self__}
    if issubclass(type(thing), threading.local):  # Its __dict__ is made for each thread that asks.
        return {}
    slots = {}
    for base in type(thing).__mro__:
        for attribute, member in list(vars(base).items()):
            if type(member) is MemberDescriptorType and attribute != "__weakref__":
                with suppress(AttributeError):  # It has no value.
                    slots[attribute] = member.__get__(thing)
    found = next((vars(base)["__dict__"] for base in type(thing).__mro__ if "__dict__" in vars(base)), None)
    # A proxy has a __dict__ of its own making, which would be that of what it stands for.
    known = found.__get__(thing) if isinstance(found, (GetSetDescriptorType, MemberDescriptorType)) else {}
    return {**slots, **known}


def _roots() -> Iterator[tuple[str, Any]]:
    """Yield the variables of ``__main__``, those that a person named first, of other modules, and of running functions."""
    main = vars(sys.modules["__main__"])
    hidden = {name for name in main if str(name).startswith("_") or name in {"In", "Out"}}
    yield from _with_classes("__main__", sorted(main.items(), key=lambda item: item[0] in hidden))
    for name, module in list(sys.modules.items()):
        file = vars(module).get("__file__") if type(module) is ModuleType else None
        ours = name.partition(".")[0] == PACKAGE or module is sys.modules["__main__"]
        if ours or not isinstance(file, str) or not _is_own(file):
            continue
        own = [(variable, value) for variable, value in vars(module).copy().items() if not variable.startswith("__")]
        yield from ((f"{module.__name__}.{variable}", value) for variable, value in _with_classes(module.__name__, own))
    for frame in reversed(list(_frames())):
        if frame.f_globals is not main or frame.f_code.co_name != "<module>":
            yield from _variables(frame)
    last = getattr(getattr(sys, "last_value", None), "__traceback__", None)
    yield from ((f"(last error) {name}", thing) for name, thing in _variables_of_traceback(last))
    for thread, innermost in sys._current_frames().items():  # noqa: SLF001 - there is no other way to other threads
        caller = None if thread == threading.get_ident() else innermost
        while caller is not None:
            of_the_person = _is_own(caller.f_code.co_filename) and not _is_of_this_package(caller)
            if of_the_person and caller.f_code.co_flags & CO_OPTIMIZED:
                yield from ((f"(another thread) {name}", thing) for name, thing in _variables(caller))
            caller = caller.f_back


@functools.cache
def _is_own(file: str) -> bool:
    """Tell whether a file is the person's: neither Python's, nor of an installed package."""
    python = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib"))
    return not (file.startswith((*python, "<frozen ")) or INSTALLED_FOLDERS & set(Path(file).parts))


def _with_classes(module: str, variables: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield variables, and the attributes of the classes among them that the module itself defines."""
    for name, thing in variables:
        yield name, thing
        if issubclass(type(thing), type) and thing.__module__ == module:
            yield from ((f"{name}.{attribute}", part) for attribute, part in list(vars(thing).items()))


def _variables(frame: FrameType) -> list[tuple[str, Any]]:
    """Return the variables of a frame; ``self`` has the name of its type."""
    # Before Python 3.13 the frame of a function keeps this copy, and what the variables held; one of no use is emptied.
    copy = frame.f_locals
    items = list(copy.items())  # At once: another thread may change what it has.
    variables = [(type(thing).__name__ if name == "self" else name, thing) for name, thing in items]
    if isinstance(copy, dict) and frame.f_code.co_flags & CO_OPTIMIZED and sys.getrefcount(copy) <= UNSHARED:
        copy.clear()
    return variables


def _frames() -> Iterator[FrameType]:
    """Yield the frames that called this package, the innermost first."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - there is no other way to the variables of the caller
    while frame is not None:
        if not _is_of_this_package(frame):
            yield frame
        frame = frame.f_back


def _is_of_this_package(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(f"{PACKAGE}.")
