"""Checking the batches of a loader where nothing else sees them before they are moved: where it puts them together."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import BatchRefused
from .batch_checks import BatchChecks


@dataclass(frozen=True)
class CheckedCollation:
    """Puts a batch together as the loader does, and then checks it; it can be pickled where the loader's own can.

    Attributes:
        collate: The loader's own function.
        checks: The checks.
    """

    collate: Callable[[Any], Any]
    checks: BatchChecks

    def __call__(self, samples: Any) -> Any:
        """Return the batch of some samples.

        Raises:
            BatchRefused: For a batch that does not pass; out of a worker process too.
        """
        from torch.utils.data import get_worker_info

        batch = self.collate(samples)
        try:
            self.checks(batch)
        except BatchRefused as error:
            if get_worker_info() is None:
                raise
            raise BatchRefusedInWorker(error.what, error.remedy) from None
        return batch


class BatchRefusedInWorker(BatchRefused):
    """A refused batch on its way out of a worker process.

    A loader raises the error of a worker again in the main process, made from the text of its traceback alone
    (``ExceptionWrapper`` in torch/_utils.py). So here the error's text is JSON, and the class, given such a text, makes
    the error that it began as.
    """

    def __new__(cls, what: str, remedy: str | None = None) -> BatchRefused:  # type: ignore[misc]
        """Return the error itself in the worker, and what it was made from in the main process."""
        if remedy is not None:
            return super().__new__(cls, what, remedy)
        value = json.loads(what.rpartition(f"{cls.__name__}: ")[2])
        return BatchRefused(value["what"], value["remedy"])

    def __str__(self) -> str:
        return json.dumps({"what": self.what, "remedy": self.remedy})


def innermost(loader: Any) -> Any:
    """Return the loader of torch inside of those that Accelerate puts around it."""
    while "base_dataloader" in vars(loader):
        loader = loader.base_dataloader
    return loader


def check_collation(loader: Any, checks: BatchChecks) -> Callable[[], None] | None:
    """Let a loader check its batches.

    Args:
        loader: A ``DataLoader`` of torch, or one that Accelerate made of it; iterators that it has made already go on
            without checks.
        checks: The checks.

    Returns:
        What puts the loader's own function back; ``None`` where this is no such loader, and nothing was changed.
    """
    from torch.utils.data import DataLoader

    inner = innermost(loader) if hasattr(loader, "__dict__") else loader
    if not isinstance(inner, DataLoader):
        return None
    own = inner.collate_fn
    checked = inner.collate_fn = CheckedCollation(own, checks)

    def put_back() -> None:
        if inner.collate_fn is checked:  # Else someone changed it since, and it is theirs.
            inner.collate_fn = own

    return put_back
