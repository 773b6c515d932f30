"""Custom steps with planted waits. Tests find their lines by the trailing comments."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import torch
from torch import nn

LOGGER = logging.getLogger("planted_steps")
LOGGER.propagate = False
LOGGER.addHandler(logging.StreamHandler(io.StringIO()))


def find_line(comment: str) -> int:
    """Return the number of the line that ends in a comment."""
    lines = Path(__file__).read_text("utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(comment))
    return number


class PlantedSteps:
    """Training steps on a device that wait for the loss in different ways."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.model = nn.Linear(8, 8).to(device)
        self.total = 0.0

    def run_healthy(self, batch: torch.Tensor) -> torch.Tensor:
        """Run a step that keeps all values on the device."""
        loss = self.model(batch.to(self.device)).square().mean()
        loss.backward()
        self.model.zero_grad()
        return loss

    def read_loss(self, batch: torch.Tensor) -> None:
        """Run a step that reads the loss."""
        self.total += self.run_healthy(batch).item()  # read here

    def log_loss(self, batch: torch.Tensor) -> None:
        """Run a step that logs the loss."""
        LOGGER.warning("loss %s", self.run_healthy(batch))  # logged here

    def format_loss(self, batch: torch.Tensor) -> str:
        """Run a step that formats the loss."""
        return f"{self.run_healthy(batch):.3f}"  # written here

    def copy_loss(self, batch: torch.Tensor) -> float:
        """Run a step that copies the loss."""
        return self.run_healthy(batch).detach().cpu().sum()  # copied here

    def compare_loss(self, batch: torch.Tensor) -> None:
        """Run a step that branches on the loss."""
        if self.run_healthy(batch) > 1e9:  # decided here
            raise ArithmeticError
