"""Arrays of NumPy among the values of a batch: where float64 mostly comes from."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

NUMBERS = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}
"""The kinds of numbers that torch has too, and their largest sizes in bytes; not text, objects, dates or float128."""


def is_array_of_numbers(thing: Any) -> bool:
    """Tell whether something is an array whose numbers a tensor can hold; one with a mask is not.

    Example:
        >>> import numpy
        >>> is_array_of_numbers(numpy.zeros(2)), is_array_of_numbers(numpy.array(["text"])), is_array_of_numbers([1.0])
        (True, False, False)
    """
    numpy = sys.modules.get("numpy")  # Where nobody has imported it there are no arrays.
    if numpy is None or not isinstance(thing, numpy.ndarray) or hasattr(thing, "mask"):
        return False
    return int(thing.dtype.itemsize) <= NUMBERS.get(thing.dtype.kind, 0)


def to_tensor(array: Any) -> torch.Tensor:
    """Return a tensor of the same numbers in the same type, in memory of its own.

    Turned arrays and those of another byte order can be made into one, too.

    Example:
        >>> import numpy
        >>> to_tensor(numpy.arange(3.0)[::-1])
        tensor([2., 1., 0.], dtype=torch.float64)
    """
    import torch

    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
