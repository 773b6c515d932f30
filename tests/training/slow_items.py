"""Datasets for tests of loaders, in a module that worker processes can import."""

from __future__ import annotations

import torch


class Items(torch.utils.data.Dataset):
    """Dataset of indexed items with labels."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((4,), float(index)), index % 2


class Stream(torch.utils.data.IterableDataset):
    """Dataset without indices."""

    def __iter__(self):
        return (torch.ones(4) for _ in range(24))
