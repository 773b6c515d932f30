"""Measuring how many tokens should run at once."""

from __future__ import annotations

import pytest
import torch

from openmed_nb.annotation.tuning import LADDER, Calibration


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
    assert measured.to_dict() == {
        "device": "cpu",
        "batch_tokens": 512,
        "tokens_per_second": {256: 900.0, 512: 1000.4},
    }


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
