"""What was suspected and is ruled out, in the person's own words: the one free text of a logbook."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import ConfigurationError, one_line
from .datasets import stands_in
from .sections import Hypothesis
from .variables import without_secrets

LONGEST, MOST = 200, 50

WARNING = "Hypotheses are kept in the words of the person: no note and no name of a patient may be in them."

PAIRS = "Pass pairs of what was suspected and what rules it out, such as [('slow loader', 'data takes 3 %')]."


def hypotheses_of(said: Any, data: Any = None) -> tuple[Hypothesis, ...]:
    """Return hypotheses that are ruled out.

    Args:
        said: Pairs, or a mapping, of what was suspected and what rules it out.
        data: The dataset; of what stands in it, nothing may be said here.

    Raises:
        ConfigurationError: For what is no pair of short texts, and for words of the dataset; it shows none of them.

    Example:
        >>> hypotheses_of({"slow loader": "data takes 3 % of a step"})[0].hypothesis
        'slow loader'
    """
    series = said.items() if isinstance(said, Mapping) else said if isinstance(said, Iterable) else [said]
    pairs = list(itertools.islice(series, MOST + 1))  # It may have no end.
    if isinstance(said, str) or not all(map(_is_pair, pairs)):
        raise ConfigurationError("A hypothesis is no pair of texts.", PAIRS)
    if len(pairs) > MOST:
        raise ConfigurationError(f"There are more than {MOST} hypotheses.", "Pass the last ones.")
    return tuple(Hypothesis(_checked(one, data), _checked(why, data)) for one, why in pairs)


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(one, str) for one in pair)  # noqa: PLR2004


def _checked(text: str, data: Any) -> str:
    line = one_line(text)
    if len(line) > LONGEST:
        what = f"A hypothesis has {len(line):,} characters."
        raise ConfigurationError(what, f"Say it in {LONGEST}; a note must not be part of it.")
    if stands_in(line, data):
        raise ConfigurationError("A hypothesis has words of the dataset.", "Say it without them.")
    return without_secrets(line)
