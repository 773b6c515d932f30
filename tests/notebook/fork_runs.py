"""What users run in worker processes of a notebook: each way annotates a text in one or two of them."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any

TIMEOUT_SECONDS = 120


def find_words(*_item: object) -> list[str]:
    """Return the words of the entities in a text."""
    from openmed_nb import annotate

    return [entity["word"] for entity in annotate(["She has asthma."], "bundled_small", device="cpu")[0]]


def find_failures() -> list[str]:
    """Return the names of the errors of a process in which torch cannot be imported."""
    names = []
    for use in (find_words, partial(importlib.import_module, "torch")):
        try:
            use()
        except Exception as error:  # noqa: BLE001, PERF203 - the test compares the names
            names.append(type(error).__name__)
    return names


class Notes:
    """A dataset that annotates where it is read."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> list[str]:
        return find_words(index)


def with_process(method: str, work: Callable[[], list[str]] = find_words) -> Any:
    with multiprocessing.get_context(method).Pool(1) as pool:
        return [pool.apply_async(work).get(TIMEOUT_SECONDS)]


def with_data_loader(workers: int) -> Any:
    from torch.utils.data import DataLoader

    return list(DataLoader(Notes(), batch_size=None, num_workers=workers, timeout=TIMEOUT_SECONDS))


def with_joblib(backend: str) -> Any:
    from joblib import Parallel, delayed

    return Parallel(n_jobs=2, backend=backend, timeout=TIMEOUT_SECONDS)(delayed(find_words)(item) for item in range(2))


def with_datasets(workers: int) -> Any:
    from datasets import Dataset

    notes = Dataset.from_dict({"note": [0, 1]})
    return notes.map(lambda note: {"words": find_words(note)}, num_proc=workers)["words"]
