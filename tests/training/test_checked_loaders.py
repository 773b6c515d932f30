"""Loaders check their batches during collation, even in worker processes, and can be restored."""

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

import openmed_nb as nb
from openmed_nb.errors import InvalidBatchError


class Samples(Dataset):
    """Samples with labels."""

    def __init__(self, *labels):
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"labels": self.labels[index]}


class Stream(IterableDataset):
    """The same samples as a stream."""

    def __iter__(self):
        return iter([{"labels": 0}, {"labels": 5}])


@pytest.fixture
def guards():
    """Guards of a model with three labels."""
    return nb.Guards(num_labels=3)


@pytest.mark.parametrize("workers", [0, 2])
def test_invalid_batch_in_worker_raises_original_error(guards, workers, catch_error):
    loader = DataLoader(Samples(0, -100, 2, 9), batch_size=2, num_workers=workers)
    assert guards.watch_loader(loader)
    seen = []
    error = catch_error(lambda: seen.extend(batch["labels"].tolist() for batch in loader))
    assert seen == [[0, -100]]
    assert type(error) is InvalidBatchError
    assert error.message == "1 of 2 labels is not between 0 and 2 (9; -100 is ignored)."
    assert error.remedy.startswith("Give the model as many labels")


@pytest.mark.real_computer  # Workers are separate processes.
def test_spawned_workers_check_batches(guards, catch_error):
    loader = DataLoader([{"labels": 9}], batch_size=1, num_workers=1, multiprocessing_context="spawn")
    guards.watch_loader(loader)
    assert "1 of 1 labels is not between 0 and 2" in str(catch_error(lambda: list(loader)))


def test_unwatch_restores_collate_function(guards):
    loader = DataLoader(Samples(9), collate_fn=default_collate)
    guards.watch_loader(loader)
    assert loader.collate_fn is not default_collate
    guards.unwatch()
    assert loader.collate_fn is default_collate
    assert len(list(loader)) == 1
    guards.watch_loader(loader)
    loader.collate_fn = list
    guards.unwatch()
    assert loader.collate_fn is list


@pytest.mark.parametrize("samples", [Samples(0, 5), Stream()], ids=["samples", "stream"])
def test_watch_loader_supports_accelerate(guards, samples):
    loader = Accelerator(cpu=True).prepare(DataLoader(samples, batch_size=1))
    original = loader.base_dataloader.collate_fn
    guards.watch_loader(loader)
    with pytest.raises(InvalidBatchError):
        list(loader)
    guards.unwatch()
    assert loader.base_dataloader.collate_fn is original
    assert [batch["labels"].item() for batch in loader] == [0, 5]


def test_loader_without_batch_size_checks_items(guards):
    loader = DataLoader([{"labels": torch.tensor(0)}, {"labels": torch.tensor(7)}], batch_size=None)
    guards.watch_loader(loader)
    with pytest.raises(InvalidBatchError):
        list(loader)


@pytest.mark.parametrize("loader", [[1, 2], iter(()), "text", None, Samples(1)])
def test_watch_loader_ignores_other_values(guards, loader):
    assert guards.watch_loader(loader) is False
