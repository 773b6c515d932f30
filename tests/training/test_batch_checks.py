"""Batch checks reject values that a device would silently process incorrectly; errors contain counts, but no text."""

import contextlib
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchEncoding

import openmed_nb as nb
from openmed_nb.devices.machine import MachineInfo
from openmed_nb.errors import InvalidBatchError

LIMITS = {"num_labels": 3, "vocab_size": 24, "type_vocab_size": 2, "max_position_embeddings": 16}
ROBERTA = {"max_position_embeddings": 16, "position_offset": 2, "pad_token_id": 1}


M1 = MachineInfo("Darwin", "arm64", chip="Apple M1")


def tokens(*shape):
    """Return a batch of token ids of a shape, expanded from one element to save memory."""
    return {"input_ids": torch.zeros((), dtype=torch.long).expand(shape)}


def ids(*numbers, dtype=torch.long):
    """Return one row of integers."""
    return torch.tensor([numbers], dtype=dtype)


JAGGED = torch.nested.nested_tensor([ids(0, 3)[0], ids(1)[0]], layout=torch.jagged)
INVALID_BATCHES = {
    "label": ({"labels": ids(0, 3)}, LIMITS, "1 of 2 labels is not between 0 and 2 (3; -100 is ignored)."),
    "one label a row": ({"label": torch.tensor([2, 3])}, LIMITS, "1 of 2 labels"),
    "array": ({"labels": np.array([[0, 3]])}, LIMITS, "1 of 2 labels"),
    "pair": ((torch.zeros(2, 3), torch.tensor([0, 3])), LIMITS, "1 of 2 labels"),
    "inputs by name and labels": (({"input_ids": ids(1, 2)}, ids(0, 3)), LIMITS, "1 of 2 labels"),
    "tokens by name and labels": (({"input_ids": ids(1, 24)}, ids(0, 1)), LIMITS, "1 of 2 token ids"),
    "list of rows": ([{"labels": ids(0)}, {"labels": ids(0, 3)}], LIMITS, "1 of 2 labels"),
    "uint16": ({"labels": ids(0, 3, dtype=torch.uint16)}, LIMITS, "1 of 2 labels"),
    "uint64": ({"labels": torch.tensor(np.array([2**64 - 1, 0], np.uint64))}, LIMITS, "1 of 2 labels"),
    "sparse": ({"labels": ids(0, 3).to_sparse()}, LIMITS, "1 of 2 labels"),
    "nested": ({"labels": JAGGED}, LIMITS, "1 of 4 labels"),
    "one token": ({"input_ids": torch.tensor(24)}, LIMITS, "1 of 1 token ids"),
    "small integers": ({"labels": ids(0, 255, dtype=torch.uint8)}, LIMITS, "255"),
    "other ignored label": ({"labels": ids(0, -100)}, {"num_labels": 3, "ignore_index": -1}, "-100; -1 is ignored"),
    "token": ({"input_ids": ids(1, 24)}, LIMITS, "1 of 2 token ids is not between 0 and 23 (24)."),
    "encoding": (BatchEncoding({"input_ids": ids(1, 24)}), LIMITS, "1 of 2 token ids"),
    "token type": ({"token_type_ids": ids(0, 2)}, LIMITS, "1 of 2 token types"),
    "position": ({"position_ids": ids(0, 16)}, LIMITS, "1 of 2 positions is not between 0 and 15"),
    "long row": ({"input_ids": ids(*[2] * 17)}, LIMITS, "17 tokens, and the model has 16 positions."),
    "long row, counted": ({"input_ids": ids(*[3] * 15, 1)}, ROBERTA, "15 tokens, and the model has 14 positions."),
}
VALID_BATCHES = {
    "everything": (
        {"input_ids": ids(0, 23), "token_type_ids": ids(0, 1), "position_ids": ids(0, 15), "labels": ids(2, -100)},
        LIMITS,
    ),
    "no limits": ({"input_ids": ids(-5, 10**9), "labels": ids(-5, 10**9)}, {}),
    "all ignored": ({"labels": ids(-100, -100)}, LIMITS),
    "fractions": ({"labels": torch.tensor([[9.5, -3.0]])}, LIMITS),
    "bool labels": ({"labels": torch.tensor([[True, False]])}, LIMITS),
    "empty batch": ({"input_ids": torch.zeros(0, 4, dtype=torch.long), "labels": ids()}, LIMITS),
    "padding": ({"input_ids": ids(*[3] * 14, *[1] * 9)}, ROBERTA),
    "own positions": ({"input_ids": ids(*[2] * 17), "position_ids": ids(*[0] * 17)}, LIMITS),
    "lists": ({"input_ids": [[1, 99]], "labels": [{"boxes": []}]}, LIMITS),
    "three values": ((ids(99), ids(99), ids(99)), LIMITS),
    "a tensor": (ids(99), LIMITS),
    "nothing": (None, LIMITS),
    "other fields": ({"pixel_values": torch.full((2,), 99), "note_id": ids(7), "labels": ids(1)}, LIMITS),
}


def test_check_rejects_values_out_of_range(catch_error):
    """A disabled check accepts the batch, and the other check still rejects it."""
    for case, (batch, limits, message) in INVALID_BATCHES.items():
        error = catch_error(partial(nb.Guards(**limits).check, batch, 7))
        assert isinstance(error, InvalidBatchError), case
        assert error.message.startswith("Step 7: "), case
        assert message in error.message, case
        failing_check, other_check = ("labels", "token_ids") if " labels " in error.message else ("token_ids", "labels")
        assert catch_error(partial(nb.Guards(disable=failing_check, **limits).check, batch)) is None, case
        assert isinstance(
            catch_error(partial(nb.Guards(disable=other_check, **limits).check, batch)), InvalidBatchError
        ), case


def test_check_accepts_valid_batches(catch_error):
    for case, (batch, limits) in VALID_BATCHES.items():
        assert catch_error(partial(nb.Guards(**limits).check, batch)) is None, case


NUMBERS = st.lists(st.integers(-200, 200), min_size=1, max_size=30)


@given(numbers=NUMBERS, num_labels=st.integers(1, 100), ignored=st.sampled_from([-100, -1]))
def test_error_reports_count_and_extremes(catch_error, numbers, num_labels, ignored):
    bad = [number for number in numbers if not 0 <= number < num_labels and number != ignored]
    error = catch_error(
        partial(nb.Guards(num_labels=num_labels, ignore_index=ignored).check, {"labels": torch.tensor(numbers)})
    )
    assert bool(error) == bool(bad)
    if bad:
        assert error.message.startswith(f"Step 1: {len(bad)} of {len(numbers)} labels ")
        extremes = f"from {min(bad)} to {max(bad)}" if min(bad) < max(bad) else f"{bad[0]}"
        assert f"({extremes}; {ignored} is ignored)." in error.message


@pytest.mark.parametrize("labels", [np.array(["B-DISEASE", "O"]), np.array([None, 1])], ids=["names", "objects"])
def test_check_rejects_labels_without_showing_text(labels):
    with pytest.raises(InvalidBatchError) as error:
        nb.Guards(**LIMITS).check({"labels": labels}, 7)
    assert error.value.message == f"Step 7: labels is an array of {labels.dtype}, not of numbers."
    assert "DISEASE" not in str(error.value)


@pytest.fixture(scope="module")
def check():
    """Batch check for a training on an M1."""
    with nb.Guards().watch(torch.nn.Linear(2, 2), "mps", M1, (2, 13, 0)) as guards:
        return guards.check


class TestLargeBatch:
    """Steps with 32,767 tokens or more, which are unsafe on an M1 or M2."""

    @pytest.mark.parametrize(
        ("rows", "length", "arithmetic", "remedy"),
        [
            (64, 512, "64 x 512 = 32,768 tokens", "at most 63 rows at this length (63 x 512 = 32,256)"),
            (7, 4681, "7 x 4,681 = 32,767 tokens", "at most 6 rows at this length (6 x 4,681 = 28,086)"),
            (1, 32_767, "1 x 32,767 = 32,767 tokens", "Shorten the rows to less than 32,767 tokens."),
        ],
    )
    def test_error_shows_largest_batch_size(self, check, rows, length, arithmetic, remedy):
        with pytest.raises(InvalidBatchError) as error:
            check(tokens(rows, length), 3)
        assert error.value.message.startswith(f"Step 3: {arithmetic}")
        assert "pytorch#177116, #193487" in error.value.message
        assert remedy in error.value.remedy

    def test_embeddings_count_as_tokens(self, check):
        with pytest.raises(InvalidBatchError, match="64 x 512 = 32,768 tokens"):
            check({"inputs_embeds": torch.zeros(64, 512, 2)})
        assert check({"inputs_embeds": torch.zeros(63, 512, 2)}) is None
        assert check({"inputs_embeds": torch.zeros(40_000)}) is None
        assert check({"pixel_values": torch.zeros(8, 3, 64, 64), "labels": torch.zeros(40_000)}) is None

    @given(rows=st.integers(1, 400), length=st.integers(1, 40_000))
    def test_suggested_rows_are_the_maximum(self, check, catch_error, rows, length):
        error = catch_error(partial(check, tokens(rows, length)))
        assert bool(error) == (rows * length >= 32_767)
        if length >= 32_767:
            assert "Shorten the rows" in error.remedy
        elif error:
            fitting = int(error.remedy.split("at most ")[1].split()[0].replace(",", ""))
            assert fitting * length < 32_767 <= (fitting + 1) * length

    @pytest.mark.parametrize(
        ("chip", "release", "shape", "device", "is_safe"),
        [
            ("Apple M1", (2, 13, 0), (64, 512), "mps", False),
            ("Apple M2 Ultra", (2, 6, 0), (64, 512), "mps:0", False),
            ("Apple M1", (2, 13, 0), (151, 217), "mps", False),
            ("Apple M1", (2, 14, 1), (151, 217), "mps", False),
            ("Apple M2", (2, 15, 0), (1, 32_767), "mps", False),
            ("Apple M1", (2, 13, 0), (), "mps", True),
            ("Apple M1", (2, 14, 0), (64, 512), "mps", True),
            ("Apple M1", (2, 14, 1), (2, 20_000), "mps", True),
            ("Apple M3", (2, 13, 0), (64, 512), "mps", True),
            (None, (2, 13, 0), (64, 512), "mps", True),
            ("Apple M1", (2, 13, 0), (64, 512), "cpu", True),
        ],
    )
    def test_unsafe_sizes_depend_on_chip_and_release(self, chip, release, shape, device, is_safe):
        """Since torch 2.14, only steps of exactly 32,767 tokens are wrong on an M1 or M2."""
        machine = MachineInfo("Darwin", "arm64", chip=chip)
        watched = (torch.nn.Linear(2, 2), device, machine, release)
        with nb.Guards(disable="large_batch_gradients").watch(*watched) as guards:
            guards.check(tokens(*shape))
        with nb.Guards().watch(*watched) as guards:
            issue = "pytorch#195163" if release >= (2, 14) else "pytorch#177116"
            message = rf"{shape[0]} x .*{issue}" if shape else ""
            with contextlib.nullcontext() if is_safe else pytest.raises(InvalidBatchError, match=message):
                guards.check(tokens(*shape))
