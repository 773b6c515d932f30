"""Datasets for tests of loaders; a module of its own, so that worker processes can import it."""

from __future__ import annotations

import torch


class Items(torch.utils.data.Dataset):
    """Numbered items with a label each."""

    def __init__(self, count=24, broken=None):
        self.count, self.broken = count, broken

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.broken:
            raise ValueError("a broken item")
        return torch.full((4,), float(index)), index % 2


class Stream(torch.utils.data.IterableDataset):
    """Items in a row, without numbers."""

    def __iter__(self):
        return (torch.ones(4) for _ in range(24))
