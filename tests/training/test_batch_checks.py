"""Batch checks reject values that a device would silently process incorrectly; errors contain counts, but no text."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from openmed_nb.errors import InvalidBatchError


def ids(*numbers, dtype=torch.long):
    """Return one row of integers."""
    return torch.tensor([numbers], dtype=dtype)


INVALID_BATCHES = {
    "label": ({"labels": ids(0, 3)}, "1 of 2 labels is not between 0 and 2 (3; -100 is ignored)."),
    "array": ({"labels": np.array([[0, 3]])}, "1 of 2 labels"),
    "pair": ((torch.zeros(2, 3), torch.tensor([0, 3])), "1 of 2 labels"),
    "inputs by name and labels": (({"input_ids": ids(1, 2)}, ids(0, 3)), "1 of 2 labels"),
    "uint64": ({"labels": torch.tensor(np.array([2**64 - 1, 0], np.uint64))}, "1 of 2 labels"),
    "small integers": ({"labels": ids(0, 255, dtype=torch.uint8)}, "255"),
    "token": ({"input_ids": ids(1, 24)}, "1 of 2 token ids is not between 0 and 23 (24)."),
    "token type": ({"token_type_ids": ids(0, 2)}, "1 of 2 token types"),
    "position": ({"position_ids": ids(0, 64)}, "1 of 2 positions is not between 0 and 63"),
    "long row": ({"input_ids": ids(*[2] * 65)}, "65 tokens, and the model has 64 positions."),
}
VALID_BATCHES = {
    "everything": {
        "input_ids": ids(0, 23),
        "token_type_ids": ids(0, 1),
        "position_ids": ids(0, 63),
        "labels": ids(2, -100),
    },
    "all ignored": {"labels": ids(-100, -100)},
    "fractions": {"labels": torch.tensor([[9.5, -3.0]])},
    "bool labels": {"labels": torch.tensor([[True, False]])},
    "sparse": {"labels": ids(0, 3).to_sparse()},
    "empty batch": {"input_ids": torch.zeros(0, 4, dtype=torch.long), "labels": ids()},
    "own positions": {"input_ids": ids(*[2] * 65), "position_ids": ids(*[0] * 65)},
    "lists": {"input_ids": [[1, 99]], "labels": [{"boxes": []}]},
    "meta": {"input_ids": torch.zeros(2, 70, dtype=torch.long, device="meta")},
    "three values": (ids(99), ids(99), ids(99)),
    "a tensor": ids(99),
    "nothing": None,
    "other fields": {"pixel_values": torch.full((2,), 99), "note_id": ids(7), "labels": ids(1)},
}


@pytest.fixture(scope="module")
def watch(tiny):
    """Function that returns guards with the limits of a small BERT."""

    def watch(disable=()):
        with nb.Guards(disable).watch(tiny.random_bert()) as guards:
            return guards

    return watch


def test_check_rejects_values_out_of_range(catch_error, watch):
    """A disabled check accepts the batch, and the other check still rejects it."""
    guards = {disable: watch(disable) for disable in ((), "labels", "token_ids")}
    for case, (batch, message) in INVALID_BATCHES.items():
        error = catch_error(partial(guards[()].check, batch, 7))
        assert isinstance(error, InvalidBatchError), case
        assert error.message.startswith("Step 7: "), case
        assert message in error.message, case
        failing_check, other_check = ("labels", "token_ids") if " labels " in error.message else ("token_ids", "labels")
        assert catch_error(partial(guards[failing_check].check, batch)) is None, case
        assert isinstance(catch_error(partial(guards[other_check].check, batch)), InvalidBatchError), case


def test_check_accepts_valid_batches(catch_error, watch):
    guards = watch()
    for case, batch in VALID_BATCHES.items():
        assert catch_error(partial(guards.check, batch)) is None, case


def test_check_without_limits_accepts_integers():
    with nb.Guards().watch(torch.nn.Linear(2, 3)) as guards:
        guards.check({"input_ids": ids(-5, 10**9), "labels": ids(-5, 10**9)})


def test_check_does_not_count_padding_as_positions(tiny):
    """RoBERTa counts positions after its padding token."""
    with nb.Guards().watch(tiny.random_roberta()) as guards:
        guards.check({"input_ids": ids(*[3] * 63, *[0] * 9)})
        with pytest.raises(InvalidBatchError, match=r"64 tokens, and the model has 63 positions\."):
            guards.check({"input_ids": ids(*[3] * 64, 0)})


@given(numbers=st.lists(st.integers(-200, 200), min_size=1, max_size=30))
def test_error_reports_count_and_extremes(catch_error, watch, numbers):
    bad = [number for number in numbers if not 0 <= number < 3 and number != -100]
    error = catch_error(partial(watch().check, {"labels": torch.tensor(numbers)}))
    assert bool(error) == bool(bad)
    if bad:
        assert error.message.startswith(f"Step 1: {len(bad)} of {len(numbers)} labels ")
        extremes = f"from {min(bad)} to {max(bad)}" if min(bad) < max(bad) else f"{bad[0]}"
        assert f"({extremes}; -100 is ignored)." in error.message


@pytest.mark.parametrize("labels", [np.array(["B-DISEASE", "O"]), np.array([None, 1])], ids=["names", "objects"])
def test_check_rejects_labels_without_showing_text(watch, labels):
    with pytest.raises(InvalidBatchError) as error:
        watch().check({"labels": labels}, 7)
    assert error.value.message == f"Step 7: labels is an array of {labels.dtype}, not of numbers."
    assert "DISEASE" not in str(error.value)
