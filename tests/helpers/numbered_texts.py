"""Texts whose results show which texts they belong to."""

from __future__ import annotations

from typing import Any


def numbered(count: int, spaces: int = 2000) -> list[str]:
    """Return numbered texts. The offset of the entity in each text is its number.

    The texts have few tokens, but many spaces, so a chunk contains only a few texts.
    """
    return [f"{' ' * number}asthma{' ' * spaces}" for number in range(count)]


def get_numbers(annotations: Any) -> list[list[int]]:
    """Return the numbers of the texts that results belong to."""
    return [[entity["start"] for entity in entities] for entities in annotations]
