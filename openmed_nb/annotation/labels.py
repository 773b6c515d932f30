"""A model's labels as tables, so that decoding looks things up instead of comparing strings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LabelTables:
    """What each label number means; ``C`` labels.

    Attributes:
        names: The labels, such as ``B-DISEASE``.
        groups: The names of the entities that they make, such as ``DISEASE``.
        begins: ``(C,)`` bool, whether a label begins an entity even after one of its own kind.
        kinds: ``(C,)`` int64, equal for labels that one entity may have.
        label_kept: ``(C,)`` bool, whether a token of the label is an answer where tokens are not joined.
        group_kept: ``(C,)`` bool, whether an entity of the label is an answer.
    """

    names: tuple[str, ...]
    groups: tuple[str, ...]
    begins: np.ndarray
    kinds: np.ndarray
    label_kept: np.ndarray
    group_kept: np.ndarray

    @classmethod
    def of(cls, id2label: Mapping[int, str], ignored: Collection[str]) -> LabelTables:
        """Return the tables of a model's labels, by the rules of transformers' pipeline.

        Args:
            id2label: The labels by number, from 0.
            ignored: Labels, and names of entities, that are no answer.

        Example:
            >>> tables = LabelTables.of({0: "O", 1: "B-DRUG", 2: "I-DRUG"}, ["O"])
            >>> tables.groups, tables.begins.tolist(), tables.group_kept.tolist()
            (('O', 'DRUG', 'DRUG'), [False, True, False], [False, True, True])
        """
        names = tuple(id2label[number] for number in range(len(id2label)))
        kinds = [name[2:] if name.startswith(("B-", "I-")) else name for name in names]
        # Transformers cuts the name of an entity at the first hyphen, whatever stands before it.
        groups = tuple(name.split("-", 1)[-1] for name in names)
        return cls(
            names,
            groups,
            begins=np.array([name.startswith("B-") for name in names]),
            kinds=np.unique(kinds, return_inverse=True)[1],
            label_kept=np.array([name not in ignored for name in names]),
            group_kept=np.array([group not in ignored for group in groups]),
        )
