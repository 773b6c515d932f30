"""Referrers of tensors: live tensors, and the variables, lists and attributes that keep them alive.

The search starts at the variables of ``__main__``, and of the functions that called this package. It follows containers, attributes and the references that the garbage collector reports. So each
result is a name that the user can find in the notebook, and the million other objects of the interpreter are skipped.
Frames are not followed, such as those of errors and of other threads. Tensors that only installed packages reference are not named but counted. Keys of mappings are
never displayed, because they may identify patients.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from itertools import chain
from types import (
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
    TracebackType,
)
from typing import TYPE_CHECKING, Any

from .._render.display import Displayable, Report, Table, format_bytes, pluralize
from .._utils.text import short_type_name
from ..devices.backend import is_torch_imported
from ..devices.machine import is_mps_simulated
from ..errors import ConfigurationError

if TYPE_CHECKING:
    import torch
    from torch.autograd.graph import Node


def live_tensors() -> list[torch.Tensor]:
    """Return every tensor that Python tracks."""
    import torch

    return [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]


def storage_sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the size in bytes of each storage of the tensors and their graphs, by address; views share a storage."""
    import torch

    with torch._C.DisableTorchFunction():  # noqa: SLF001 - so that no lazy parameter or tensor subclass is triggered
        tensors = list(tensors)
        storages = map(_get_storage, (*tensors, *_iter_saved_tensors(map(_get_grad_fn, tensors))))
        # All wrappers of a storage have the same address.
        return {storage._cdata: storage.nbytes() for storage in storages if storage is not None}  # noqa: SLF001


def _iter_saved_tensors(nodes: Iterable[Node | None]) -> Iterator[torch.Tensor]:
    """Yield the tensors that graphs store for their backward pass.

    No unpack hook is called, because it may run a computation. So values that hooks packed are yielded only if they are
    tensors.
    """
    import torch

    names: dict[type, list[str]] = {}  # A graph has thousands of nodes of a few types.
    pending = list(nodes)
    seen: set[Node] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending.extend(next_node for next_node, _ in node.next_functions)
        kind = type(node)
        if kind not in names:
            names[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        for name in names[kind]:
            with suppress(RuntimeError):  # A backward pass has freed the tensor.
                saved = getattr(node, name)
                for value in saved if isinstance(saved, (list, tuple)) else (saved,):
                    tensor = getattr(value, "data", None)  # torch 2.6 does not have this attribute.
                    if isinstance(tensor, torch.Tensor):
                        yield tensor


def _get_grad_fn(tensor: torch.Tensor) -> Node | None:
    """Return the graph node that produced a tensor, or ``None`` for a leaf and for an invalid graph."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # The base of several views was changed in place.
        return None


def _get_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor, or ``None`` for sparse, meta and fake tensors and for wrappers."""
    try:
        storage = tensor.untyped_storage()
    except RuntimeError:
        return None
    return None if storage.device.type == "meta" else storage


PACKAGE = __name__.partition(".")[0]
# Maximum number of containers and attributes between a name and a tensor.
MAX_DEPTH = 6
# Maximum number of containers and tensors that the search visits.
MAX_OBJECTS = 50_000
# Maximum number of children of a container that are not tensors. The last ones are searched, so that a large table does
# not hide values after it.
MAX_CHILDREN = 10_000
# Reference count of the copy of the variables of a frame that is not used elsewhere: the frame, this module, and the
# argument of getrefcount.
UNSHARED_REFERENCES = 3

# Functions that iterate the items of a container, and do not call those of a subclass.
ITEM_ITERATORS: dict[type, Callable[[Any], Iterable[object]]] = {
    dict: dict.values,
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
    deque: deque.__iter__,
}
# Types that hold no tensors, reference everything, or create variables for each thread. The types of values are
# compared, because a proxy computes its class.
LEAF_TYPES = (
    str,
    bytes,
    int,
    float,
    type,
    type(None),
    ModuleType,
    CodeType,
    FrameType,
    TracebackType,
    threading.local,
)


@dataclass(frozen=True)
class TensorReferrer:
    """Variable, container or attribute that references tensors.

    Attributes:
        name: Path from a variable, such as ``"losses"`` or ``"trainer.history"``.
        kind: Type, such as ``"list"``.
        tensors: Number of tensors that it references directly.
        size: Size in bytes of their storages, and of those in their autograd graphs.
        num_graphs: Number of these tensors that still have an autograd graph.
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


def make_referrer_table(referrers: Iterable[TensorReferrer], caption: str = "") -> Table:
    """Return a table with a row for each referrer."""
    rows = tuple(
        (referrer.name, referrer.kind, str(referrer.tensors), str(referrer.num_graphs), format_bytes(referrer.size))
        for referrer in referrers
    )
    return Table(caption, ("name", "kind", "tensors", "with graphs", "memory"), rows)


@dataclass(frozen=True, repr=False)
class TensorReferrers(Displayable):
    """Referrers of tensors.

    Attributes:
        referrers: Referrers, largest first.
        simulated: Whether a simulated MPS is active.
    """

    referrers: tuple[TensorReferrer, ...]
    simulated: bool = False

    def to_report(self) -> Report:
        """Return a table of the referrers."""
        count = len(self.referrers)
        return Report(
            f"{pluralize(count, 'name')} {'holds' if count == 1 else 'hold'} tensors",
            tables=(make_referrer_table(self.referrers),),
        )


def find_tensor_referrers(namespace: Mapping[str, object] | None = None) -> TensorReferrers:
    """Return the current referrers of tensors, largest first.

    Args:
        namespace: Variables to search. If ``None``, search those of ``__main__``, and of the functions that called this one.

    Returns:
        One :class:`TensorReferrer` for each variable, container or attribute that references tensors directly. A tensor
        with several referrers is counted for the first of them. Without a namespace, the last item counts the tensors that
        no name reaches.

    Raises:
        ConfigurationError: If ``namespace`` is not a mapping.

    Example:
        >>> import torch
        >>> print(find_tensor_referrers({"losses": [torch.zeros(256), torch.zeros(256)]}))
        1 name holds tensors
          name    kind  tensors  with graphs  memory
          losses  list  2        0            2.0 KiB
    """
    if not is_torch_imported():
        return TensorReferrers(())
    if not isinstance(namespace, Mapping | None):
        raise ConfigurationError(
            f"The namespace must be a mapping, got {short_type_name(namespace)}.", "Pass globals(), or omit namespace."
        )
    import torch

    tensors_by_name: dict[tuple[str, str], list[torch.Tensor]] = defaultdict(list)
    with torch._C.DisableTorchFunction():  # noqa: SLF001 - so that no tensor subclass is triggered
        for name, kind, tensor in _iter_reached_tensors(_iter_roots() if namespace is None else namespace.items()):
            tensors_by_name[name, kind].append(tensor)
        referrers = []
        for (name, kind), tensors in tensors_by_name.items():
            num_graphs = sum(_get_grad_fn(tensor) is not None for tensor in tensors)
            referrers.append(TensorReferrer(name, kind, len(tensors), sum(storage_sizes(tensors).values()), num_graphs))
    referrers.sort(key=lambda referrer: referrer.size, reverse=True)
    if namespace is None:
        named = storage_sizes(chain.from_iterable(tensors_by_name.values()))
        unnamed = {key: size for key, size in storage_sizes(live_tensors()).items() if key not in named and size}
        if unnamed:
            referrers.append(TensorReferrer("(reached by no name)", "", len(unnamed), sum(unnamed.values())))
    return TensorReferrers(tuple(referrers), is_mps_simulated())


def grown_referrers(before: TensorReferrers, after: TensorReferrers) -> list[TensorReferrer]:
    """Return the referrers of ``after`` that hold more bytes than ``before``, with the largest growth first."""
    sizes = {referrer.name: referrer.size for referrer in before.referrers}
    growth = {referrer: referrer.size - sizes.get(referrer.name, 0) for referrer in after.referrers}
    return sorted([referrer for referrer in growth if growth[referrer] > 0], key=growth.__getitem__, reverse=True)


# Name and kind of the referrer of a value if the value is a tensor, the name of the value, and the value. A search
# creates millions of them, so they are plain tuples.
Child = tuple[str, str, str, Any]


def _iter_reached_tensors(roots: Iterable[tuple[str, object]]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield name and kind of the referrer of each tensor, and the tensor; breadth first, so that names are short."""
    import torch

    pending: deque[tuple[Child, int]] = deque(((name, "variable", name, value), 0) for name, value in roots)
    seen: set[int] = set()
    while pending and len(seen) < MAX_OBJECTS:
        (referrer, kind, name, value), depth = pending.popleft()
        if id(value) in seen or issubclass(type(value), LEAF_TYPES):
            continue
        seen.add(id(value))
        if issubclass(type(value), torch.Tensor):
            if _get_storage(value) is not None:
                yield referrer, kind, value
            # RuntimeError as in _get_grad_fn. torch warns if the gradient of a tensor that is not a leaf is read.
            with suppress(RuntimeError):
                if value.is_leaf:
                    pending.append(((f"{referrer}.grad", "gradients", name, value.grad), depth))
        elif depth < MAX_DEPTH:
            children = [child for child in _iter_children(name, value) if not issubclass(type(child[-1]), LEAF_TYPES)]
            tensors = [child for child in children if issubclass(type(child[-1]), torch.Tensor)]
            containers = [child for child in children if not issubclass(type(child[-1]), torch.Tensor)]
            pending.extend((child, depth + 1) for child in (*tensors, *containers[-MAX_CHILDREN:]))


def _iter_children(name: str, value: Any) -> Iterator[Child]:
    """Yield the children of a container or an object."""
    import torch

    kind = type(value).__name__
    attributes: list[tuple[str, object]] = []
    items: Iterable[object] = ()
    iterator = next((ITEM_ITERATORS[base] for base in type(value).__mro__ if base in ITEM_ITERATORS), None)
    if iterator is not None:
        items = list(iterator(value))
    elif issubclass(type(value), torch.nn.Module):
        # The parameters and buffers of a module are its tensors. The other attributes are those of its submodules.
        yield from ((name, kind, name, tensor) for tensor in (*value.parameters(), *value.buffers()))
        for inner, submodule in value.named_modules(prefix=name):
            for attribute, child in list(vars(submodule).items()):
                if attribute not in {"_parameters", "_buffers", "_modules"}:
                    attributes.append((f"{inner}.{attribute}", child))
    elif issubclass(type(value), FunctionType):  # A function refers to all globals.
        items = (value.__closure__, value.__defaults__, value.__kwdefaults__)
    else:
        for base in type(value).__mro__:
            descriptor = vars(base).get("__dict__")
            # A proxy defines another kind of __dict__, which would be that of the object behind it.
            if isinstance(descriptor, (GetSetDescriptorType, MemberDescriptorType)):
                attributes.extend(
                    (f"{name}.{attribute}", child) for attribute, child in descriptor.__get__(value).items()
                )
        items = gc.get_referents(value)
    yield from ((path, "attribute", path, child) for path, child in attributes)
    yield from ((name, kind, f"{name}[...]", item) for item in items)


def _iter_roots() -> Iterator[tuple[str, object]]:
    """Yield the variables of ``__main__``, user-named ones first, and of calling functions."""
    main = vars(sys.modules["__main__"])
    hidden = {name for name in main if str(name).startswith("_") or name in {"In", "Out"}}
    yield from sorted(main.items(), key=lambda item: item[0] in hidden)
    # Frames that called this package, outermost first.
    calling_frames: list[FrameType] = []
    caller: FrameType | None = sys._getframe()  # noqa: SLF001 - there is no public access to the variables of the caller
    while caller is not None:
        is_main = caller.f_globals is main and caller.f_code.co_name == "<module>"
        module_name = str(caller.f_globals.get("__name__", ""))
        if not is_main and not module_name.startswith(f"{PACKAGE}."):
            calling_frames.insert(0, caller)
        caller = caller.f_back
    for frame in calling_frames:
        yield from _get_variables(frame)


def _get_variables(frame: FrameType) -> list[tuple[str, object]]:
    """Return the variables of a frame."""
    # Before Python 3.13, the frame of a function keeps this copy, and with it the values of the variables. An unused
    # copy is cleared.
    copy = frame.f_locals
    variables = list(copy.items())
    if isinstance(copy, dict) and frame.f_code.co_flags & CO_OPTIMIZED and sys.getrefcount(copy) <= UNSHARED_REFERENCES:
        copy.clear()
    return variables
