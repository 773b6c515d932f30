"""Keeping a batch that went wrong in a file of its own."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..devices.conversion_report import shown_key
from ..errors import cause
from .nested import named_tensors

if TYPE_CHECKING:
    import torch

NO_TOKENS = ("labels", "label", "mask", "type_ids", "position_ids")
"""The ends of names of whole numbers that are no token ids."""


@dataclass(frozen=True)
class SavedBatch:
    """What was kept of a batch.

    Attributes:
        file: Where; ``None`` where nothing could be kept.
        names: The names of the tensors in the file.
        left_out: The names of those that no safetensors file can hold, such as sparse ones; as they may be shown.
        token_ids: Whether token ids are among what was kept.
    """

    file: Path | None
    names: tuple[str, ...]
    left_out: tuple[str, ...]
    token_ids: bool

    def __str__(self) -> str:
        total = len(self.names) + len(self.left_out)
        lost = f" {len(self.left_out)} of its {total} tensors could not be kept: {', '.join(self.left_out)}."
        if self.file is None:
            return "The batch could not be kept:" + (lost if self.left_out else " it has no tensors.")
        content = "; its token ids are clinical content" if self.token_ids else ""
        return f"The batch is in {str(self.file)!r}{content}.{lost if self.left_out else ''}"


def save_batch(batch: Any, folder: Path, step: int) -> SavedBatch:
    """Write the tensors of a batch into a new safetensors file that only its owner reads; no file is overwritten.

    Args:
        batch: Tensors, in mappings, lists and tuples; anything else in it is left out.
        folder: Where the file goes; it is made where it is missing.
        step: The number in the file's name.

    Returns:
        What was kept. The file is ``step_7.safetensors``, or ``step_7_2.safetensors`` where that is there already.

    Raises:
        OSError: Where the file cannot be written.
    """
    from safetensors.torch import save

    kept: dict[str, torch.Tensor] = {}
    left_out: list[str] = []
    tokens = False
    for place, (name, tensor) in enumerate(named_tensors(batch)):
        if (plain := _plain(tensor)) is None:
            left_out.append(shown_key(name, place))
        else:
            kept[_free_name(name or "batch", kept)] = plain
            tokens |= _may_be_tokens(name, plain)
    file = _write_new(save(kept), folder, step) if kept else None
    return SavedBatch(file, tuple(kept), tuple(left_out), tokens)


def keep_batch(batch: Any, folder: Path, step: int) -> str:
    """Save a batch where there is one, and return a sentence about it; whatever goes wrong, there is a sentence.

    Example:
        >>> keep_batch(None, Path("kept"), 7)
        'No batch is held.'
    """
    if batch is None:
        return "No batch is held."
    try:
        return str(save_batch(batch, folder, step))
    except OSError as error:
        return f"The batch could not be saved: {cause(error)}."
    except Exception as error:  # noqa: BLE001 - what went wrong in training must be said, whatever fails after it
        return f"The batch could not be saved: {type(error).__name__}."


def _plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy in the memory of the host; ``None`` for what safetensors cannot hold."""
    from safetensors.torch import save

    try:
        plain = tensor.detach().cpu().contiguous().clone()
        save({"tensor": plain})
    except Exception:  # noqa: BLE001 - each kind of tensor that cannot be kept fails with an error of its own
        return None
    return plain


def _free_name(name: str, taken: Iterable[str]) -> str:
    """Return the name, with a number where another tensor has it.

    Example:
        >>> _free_name("pair.0", ["pair.0", "pair.0 (2)"]), _free_name("labels", [])
        ('pair.0 (3)', 'labels')
    """
    names = (name if number == 1 else f"{name} ({number})" for number in itertools.count(1))
    return next(one for one in names if one not in taken)


def _may_be_tokens(name: str, tensor: torch.Tensor) -> bool:
    import torch

    rows = tensor.ndim > 1 and tensor.dtype in {torch.int32, torch.int64}
    return name.endswith("input_ids") or (rows and not name.endswith(NO_TOKENS))


def _write_new(content: bytes, folder: Path, step: int) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number in itertools.count(1):
        file = folder / (f"step_{step}.safetensors" if number == 1 else f"step_{step}_{number}.safetensors")
        try:
            opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
        except FileExistsError:
            continue
        with os.fdopen(opened, "wb") as stream:
            stream.write(content)
        break
    return file
