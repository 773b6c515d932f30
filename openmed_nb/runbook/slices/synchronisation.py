"""What makes a program wait for its device: which calls, and where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .code_places import CodePlace

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
    "nonzero": "nonzero()",
    "argwhere": "argwhere()",
    "masked_select": "masked_select()",
    "unique": "unique()",
    "unique_consecutive": "unique_consecutive()",
    "bincount": "bincount()",
}
"""Functions of torch that need numbers of the device on the host: to return them, or to know the size of what they make."""

COPY = ".copy_() to the host"
"""What copies a tensor of the device into one of the host."""

SYNCHRONIZE = "synchronize"
"""The function of ``torch.mps``, ``torch.cuda`` and ``torch.accelerator`` that does nothing but wait."""


@dataclass(frozen=True)
class Synchronisation:
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
        """Return it as a mapping, ready for JSON."""
        return {"call": self.call, "count": self.count, **self.place.to_dict()}


def waiting_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], is_here: Callable[[Any], bool]) -> str:
    """Return what a call is that waits for the device, empty for any other.

    Args:
        name: The name of torch's function.
        args: What it is called with.
        kwargs: And by name.
        is_here: Tells whether something is a tensor of the device.

    Example:
        >>> waiting_call("item", ["a tensor"], {}, lambda thing: True), waiting_call("add", ["a tensor"], {}, lambda _: True)
        ('.item()', '')
        >>> waiting_call("to", ["a tensor", "cpu"], {}, lambda thing: thing == "a tensor")
        ".to('cpu')"
    """
    given = [*args, *kwargs.values()]
    if name == "copy_" and reads_the_device(args, kwargs, is_here):
        return COPY
    if not given or not is_here(given[0]):
        return ""
    if name in WAITS:
        return WAITS[name]
    return next((said for known, meets, said in SOMETIMES if known == name and meets(args, kwargs)), "")


def goes_to_the_host(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether ``Tensor.to`` copies to the CPU and waits for that.

    Example:
        >>> goes_to_the_host(["a tensor", "cpu"], {}), goes_to_the_host(["a tensor", "cpu"], {"non_blocking": True})
        (True, False)
    """
    others = [*args[1:], *kwargs.values()]
    names = [str(getattr(one, "device", one)) for one in others]
    return "cpu" in names and not any(one is True for one in (kwargs.get("non_blocking"), *args[1:]))


def reads_the_device(args: Sequence[Any], kwargs: Mapping[str, Any], is_here: Callable[[Any], bool]) -> bool:
    """Tell whether ``Tensor.copy_`` copies a tensor of the device into one of the host and waits for that.

    Example:
        >>> reads_the_device(["there", "here"], {}, "here".__eq__), reads_the_device(["here", "there"], {}, "here".__eq__)
        (True, False)
    """
    target, source, *others = [*args, *kwargs.values()]
    return is_here(source) and not is_here(target) and not any(one is True for one in others)


def has_a_mask(args: Sequence[Any], _kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a tensor is read through a tensor of truth values, whose count torch has to know."""
    index = args[1] if len(args) > 1 else None
    parts = index if isinstance(index, (tuple, list)) else (index,)
    return any(str(getattr(part, "dtype", "")) in {"torch.bool", "torch.uint8"} for part in parts)


SOMETIMES: tuple[tuple[str, Callable[[Sequence[Any], Mapping[str, Any]], bool], str], ...] = (
    ("to", goes_to_the_host, ".to('cpu')"),
    ("__getitem__", has_a_mask, "a boolean mask"),
    ("where", lambda args, kwargs: len(args) + len(kwargs) == 1, "torch.where() with a condition alone"),
)
"""Functions that wait with some arguments only."""
