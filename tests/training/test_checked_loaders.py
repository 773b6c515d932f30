"""A loader checks its batches where it puts them together, in its worker processes too, and is given back as it was."""

from __future__ import annotations

import pickle

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from openmed_nb.errors import BatchRefused
from openmed_nb.training.batch_checks import BatchChecks
from openmed_nb.training.checked_loaders import BatchRefusedInWorker, CheckedCollation, check_collation, innermost
from openmed_nb.training.model_limits import ModelLimits

CHECKS = BatchChecks(ModelLimits(labels=3))


class Samples(Dataset):
    """Samples with a label each."""

    def __init__(self, *labels):
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, place):
        return {"labels": self.labels[place]}


class Stream(IterableDataset):
    """The same as a stream."""

    def __iter__(self):
        return iter([{"labels": 0}, {"labels": 5}])


@pytest.mark.parametrize("workers", [0, 2])
def test_wrong_batch(workers, refusal):
    """A wrong batch stops the loop with our own error, whichever process put it together, after the right ones."""
    loader = DataLoader(Samples(0, 1, 2, 9), batch_size=2, num_workers=workers)
    check_collation(loader, CHECKS)
    seen = []
    refused = refusal(lambda: seen.extend(batch["labels"].tolist() for batch in loader))
    assert seen == [[0, 1]]
    assert type(refused) is BatchRefused
    assert refused.what == "1 of 2 labels is not between 0 and 2 (9; -100 is left out)."
    assert refused.remedy.startswith("Give the model as many labels")


@pytest.mark.parametrize("workers", [0, 2])
def test_right_batches(workers):
    """Right batches come as they would without checks."""
    plain = DataLoader(Samples(0, 1, 2, -100), batch_size=2, num_workers=workers)
    expected = [batch["labels"].tolist() for batch in plain]
    undo = check_collation(plain, CHECKS)
    assert [batch["labels"].tolist() for batch in plain] == expected
    undo()


@pytest.mark.real_computer  # Workers are processes of their own.
def test_spawned_workers(refusal):
    """The check goes to worker processes that are started afresh, as on macOS and Windows."""
    loader = DataLoader([{"labels": 9}], batch_size=1, num_workers=1, multiprocessing_context="spawn")
    check_collation(loader, CHECKS)
    assert "1 of 1 labels is not between 0 and 2" in str(refusal(lambda: list(loader)))


def test_loader_is_given_back():
    """Afterwards the loader puts batches together with its own function, unless someone set another one since."""
    loader = DataLoader(Samples(9), collate_fn=default_collate)
    check_collation(loader, CHECKS)()
    assert loader.collate_fn is default_collate
    assert len(list(loader)) == 1
    undo = check_collation(loader, CHECKS)
    loader.collate_fn = list
    undo()
    assert loader.collate_fn is list


@pytest.mark.parametrize("samples", [Samples(0, 5), Stream()], ids=["samples", "stream"])
def test_loader_of_accelerate(samples):
    """What Accelerate puts around a loader is looked through."""
    plain = DataLoader(samples, batch_size=1)
    loader = Accelerator(cpu=True).prepare(plain)
    inner = innermost(loader)
    assert type(inner) is DataLoader
    assert inner is not loader
    own = inner.collate_fn
    undo = check_collation(loader, CHECKS)
    with pytest.raises(BatchRefused):
        list(loader)
    undo()
    assert inner.collate_fn is own
    assert [batch["labels"].item() for batch in loader] == [0, 5]


def test_loader_without_batches():
    """A loader that makes no batches checks what it gives one by one."""
    loader = DataLoader([{"labels": torch.tensor(0)}, {"labels": torch.tensor(7)}], batch_size=None)
    check_collation(loader, CHECKS)
    with pytest.raises(BatchRefused):
        list(loader)


@pytest.mark.parametrize("loader", [[1, 2], iter(()), "text", None, Samples(1)])
def test_no_loader(loader):
    """What is no loader of torch is left as it is."""
    assert check_collation(loader, CHECKS) is None


def test_it_can_be_pickled():
    """The function can be pickled with what it wraps."""
    collation = CheckedCollation(default_collate, CHECKS)
    assert pickle.loads(pickle.dumps(collation)) == collation  # noqa: S301


def test_error_of_a_worker():
    """A worker's error becomes the plain error again from the text that torch keeps of it."""
    error = BatchRefusedInWorker("1 of 2: bad.", 'Say "no".')
    again = BatchRefusedInWorker(f"Caught it in worker 0.\nOriginal Traceback\n a.b.BatchRefusedInWorker: {error}\n")
    assert type(again) is BatchRefused
    assert again.to_dict() == BatchRefused("1 of 2: bad.", 'Say "no".').to_dict()
