"""Steps of a person's own with planted waits; tests find their lines by the words behind them."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import torch
from torch import nn

LOGGER = logging.getLogger("planted_steps")
LOGGER.propagate = False
LOGGER.addHandler(logging.StreamHandler(io.StringIO()))


def line_of(words: str) -> int:
    """Return the number of the one line that ends in these words."""
    lines = Path(__file__).read_text("utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(words))
    return number


class Planted:
    """Training steps on a device that read the loss of every step."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.model = nn.Linear(8, 8).to(device)
        self.total = 0.0

    def healthy(self, batch: torch.Tensor) -> torch.Tensor:
        """Do a step that leaves everything on the device."""
        loss = self.model(batch.to(self.device)).square().mean()
        loss.backward()
        self.model.zero_grad()
        return loss

    def reading(self, batch: torch.Tensor) -> None:
        """Do a step that reads the loss."""
        self.total += self.healthy(batch).item()  # read here

    def logging(self, batch: torch.Tensor) -> None:
        """Do a step that logs the loss."""
        LOGGER.warning("loss %s", self.healthy(batch))  # logged here

    def in_words(self, batch: torch.Tensor) -> str:
        """Do a step that writes the loss."""
        return f"{self.healthy(batch):.3f}"  # written here

    def copying(self, batch: torch.Tensor) -> float:
        """Do a step that copies the loss."""
        return self.healthy(batch).detach().cpu().sum()  # copied here

    def deciding(self, batch: torch.Tensor) -> None:
        """Do a step that decides by the loss."""
        if self.healthy(batch) > 1e9:  # decided here
            raise ArithmeticError
