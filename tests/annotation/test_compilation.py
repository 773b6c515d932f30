"""Trying ``torch.compile``: kept only where it pays and changes nothing."""

from __future__ import annotations

import time

import pytest

from openmed_nb.annotation.building import pipeline_over
from openmed_nb.annotation.compilation import compare, judged
from openmed_nb.devices.simulation import shown_device
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.models.loading import LoadSpec, load

NOTE = "the patient has diabetes mellitus and hypertension . no asthma ."
ENTITY = {"entity_group": "DISEASE", "start": 0, "end": 6, "word": "asthma", "score": 0.9}


def reader(answers, seconds):
    """Return a way of reading that gives fixed answers and takes a known time."""

    def read(_texts):
        time.sleep(seconds)
        return answers

    return read


@pytest.mark.parametrize(
    ("expected", "computed", "gain", "kept"),
    [
        ([1, 2], [1, 2], 2.0, True),
        ([1, 2], [1, 2], 1.05, True),
        ([1, 2], [1, 2], 1.04, False),
        ([1, 2], [1], 2.0, False),
        ([1, 2], [1, 3], 2.0, False),
        ([], [], 1.5, True),
    ],
)
def test_kept_only_where_it_pays_and_changes_nothing(expected, computed, gain, kept):
    """A compiled model is kept where it finds the same entities and is at least five percent faster."""
    assert judged(expected, computed, gain, "cpu").kept is kept


def test_faster_way_with_the_same_entities():
    """The gain is how many times faster the second way is."""
    result = compare(reader([[ENTITY]], 0.04), reader([[ENTITY]], 0.01), "mps:0")

    assert result.kept
    assert 2 < result.gain < 6
    device = shown_device("mps:0")
    assert (result.device, str(result).splitlines()[0]) == (device, f"torch.compile is used on {device}")


def test_way_with_other_entities():
    """The second way is not used where it finds an entity at another place, however fast it is."""
    result = compare(reader([[ENTITY]], 0.02), reader([[{**ENTITY, "end": 7}]], 0), "cpu")

    assert not result.kept
    assert "other entities" in result.reason


def test_what_does_not_compile_runs_as_before():
    """Where compiling fails, the reason is told and nothing is raised."""

    def fails(_texts):
        raise RuntimeError("no C++ compiler was found")

    result = compare(reader([[]], 0), fails, "cpu")

    assert (result.kept, result.gain) == (False, None)
    assert "no C++ compiler was found" in str(result)


def test_real_compiler_changes_no_answer(keyword_model, words_of):
    """A pipeline that was asked to compile gives the same entities, compiled or not, and says which."""
    loaded = load(LoadSpec.of(str(keyword_model), OpenMedConfig()), "cpu")
    plain = pipeline_over(loaded, "first", {})
    compiled = pipeline_over(loaded, "first", {"compile": True})

    assert plain.compilation is None
    assert compiled.compilation.to_dict()["kept"] in {True, False}
    assert compiled.compilation.reason
    assert words_of(compiled, NOTE) == words_of(plain, NOTE) == ["diabetes mellitus", "hypertension", "asthma"]
