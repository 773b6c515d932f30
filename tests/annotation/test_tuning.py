"""Measuring how many tokens should run at once, and trying ``torch.compile``."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from openmed_nb.annotation.pipeline import LADDER, Calibration, compare
from openmed_nb.devices.machine import shown_device, timed_by


@pytest.fixture
def pipe(own_pipe_of, keyword_model):
    """A pipeline of its own over the keyword model."""
    return own_pipe_of(keyword_model)


@pytest.mark.parametrize(
    ("speeds", "chosen"),
    [
        (((256, 100.0),), 256),
        (((256, 100.0), (512, 200.0)), 512),
        (((256, 100.0), (512, 102.0)), 256),
        (((256, 100.0), (512, 90.0), (1024, 150.0)), 1024),
        (((256, 0.0), (512, 10.0)), 512),
        (((256, 100.0), (512, 102.0), (1024, 104.0)), 512),
        (((256, 100.0), (512, 80.0), (1024, 70.0)), 256),
    ],
)
def test_smallest_batch_that_no_larger_one_beats_by_much(speeds, chosen):
    """The choice is the smallest batch than which no larger one is three percent faster."""
    assert Calibration("cpu", speeds).batch_tokens == chosen


def test_pipeline_uses_what_was_measured(pipe, words_of):
    """Calibrating sets the pipeline's budget to the measured choice and changes no answer."""
    before = words_of(pipe)

    measured = pipe.calibrate()

    assert pipe.batch_tokens == measured.batch_tokens
    assert measured.batch_tokens in LADDER
    assert all(speed > 0 for _tokens, speed in measured.speeds)
    assert words_of(pipe) == before


def test_report_names_device_and_choice():
    """The text form names the choice, the device and every figure."""
    measured = Calibration("cpu", ((256, 900.0), (512, 1000.4)))

    assert str(measured) == (
        "512 tokens at once on cpu\nMeasured\n  tokens at once  tokens per second\n"
        "  256             900\n  512             1,000"
    )
    assert measured.to_dict() == {"device": "cpu", "batch_tokens": 512, "tokens_per_second": {256: 900.0, 512: 1000.4}}


def test_sizes_that_do_not_fit_are_left_out(pipe):
    """Where a larger batch does not fit in memory, the smaller ones are the figures."""

    def too_large(_model, _arguments, inputs):
        if inputs["input_ids"].numel() > 600:
            raise RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GiB, other allocations: 2.00 GiB)")

    pipe.model.register_forward_pre_hook(too_large, with_kwargs=True)

    assert {tokens for tokens, _speed in pipe.calibrate().speeds} <= {256, 512}


def test_other_errors_are_not_hidden(pipe):
    """An error that is no lack of memory is not taken for one."""
    pipe.model.register_forward_pre_hook(lambda *_: torch.zeros(2) @ torch.zeros(3))

    with pytest.raises(RuntimeError, match="size"):
        pipe.calibrate()


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
        with timed_by(lambda: clock.now):
            return compare(reader(*plain), reader(*compiled), device)

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
