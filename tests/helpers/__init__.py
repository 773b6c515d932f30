"""Models, computers, kernels, pages and panels for tests. Tests import them, because pytest adds `tests` to the path."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The folder of the repository."""
