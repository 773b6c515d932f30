"""Trying ``torch.compile``: kept only where it pays and changes nothing."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from openmed_nb.annotation.tuning import compare
from openmed_nb.devices.simulated import shown_device

NOTE = "the patient has diabetes mellitus and hypertension . no asthma ."
ENTITY = {"entity_group": "DISEASE", "start": 0, "end": 6, "word": "asthma", "score": 0.9}


@pytest.fixture
def clock():
    """A clock that stands still unless something is read."""
    return SimpleNamespace(now=0.0)


@pytest.fixture
def compared(clock):
    """A function that compares two ways of reading, each with its answers and the seconds of its passes, which repeat."""

    def reader(answers, *seconds):
        passes = itertools.cycle(seconds)

        def read(_texts):
            clock.now += next(passes)
            return answers

        return read

    def compared(plain, compiled, device="cpu"):
        return compare(reader(*plain), reader(*compiled), device, lambda: clock.now)

    return compared


@pytest.mark.parametrize(
    ("expected", "computed", "seconds", "kept"),
    [
        ([[ENTITY]], [[ENTITY]], 200, True),
        ([[ENTITY]], [[ENTITY]], 105, True),
        ([[ENTITY]], [[ENTITY]], 104, False),
        ([[ENTITY]], [[]], 200, False),
        ([[ENTITY], []], [[], [ENTITY]], 200, False),
        ([[]], [[]], 150, True),
    ],
)
def test_kept_only_where_it_pays_and_changes_nothing(compared, expected, computed, seconds, kept):
    """A compiled model is kept where it finds the same entities and is at least five percent faster."""
    assert compared((expected, seconds), (computed, 100)).kept is kept


def test_faster_way_with_the_same_entities(compared):
    """The gain is how many times faster the second way is, in the fastest pass of each."""
    result = compared(([[ENTITY]], 8, 4, 6), ([[ENTITY]], 3, 2), "mps:0")

    assert (result.kept, result.gain) == (True, 2)
    device = shown_device("mps:0")
    assert (result.device, str(result).splitlines()[0]) == (device, f"torch.compile is used on {device}")


def test_way_with_other_entities(compared):
    """The second way is not used where it finds an entity at another place, however fast it is."""
    result = compared(([[ENTITY]], 9), ([[{**ENTITY, "end": 7}]], 1))

    assert not result.kept
    assert "other entities" in result.reason


def test_what_does_not_compile_runs_as_before():
    """Where compiling fails, the reason is told and nothing is raised."""

    def fails(_texts):
        raise RuntimeError("no C++ compiler was found")

    result = compare(lambda _texts: [[]], fails, "cpu")

    assert (result.kept, result.gain) == (False, None)
    assert "no C++ compiler was found" in str(result)


@pytest.mark.parametrize("stance", ["force_eager", pytest.param("default", marks=pytest.mark.slow)])
def test_pipeline_that_was_asked_to_compile(own_pipe_of, keyword_model, words_of, stance):
    """A pipeline that was asked to compile gives the same entities, compiled or not, and says which; so does torch's compiler."""
    plain = own_pipe_of(keyword_model)
    with torch.compiler.set_stance(stance):
        compiled = own_pipe_of(keyword_model, compile=True)
        found = words_of(compiled, NOTE)

    assert plain.compilation is None
    assert compiled.compilation.kept in {True, False}
    assert compiled.compilation.reason
    assert found == words_of(plain, NOTE) == ["diabetes mellitus", "hypertension", "asthma"]
