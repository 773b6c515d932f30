"""A batch is refused where a device would make wrong numbers of it; the error counts and shows no text."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchEncoding

from openmed_nb.devices.machine import Machine
from openmed_nb.errors import BatchRefused
from openmed_nb.training.batch_checks import (
    BatchChecks,
    check_size,
    gradients_can_be_wrong,
    named_fields,
    outside,
    too_many,
)
from openmed_nb.training.model_limits import ModelLimits

LIMITS = ModelLimits(labels=3, tokens=24, token_types=2, positions=16)
ROBERTA = ModelLimits(positions=16, first_position=2, padding=1)


def ids(*numbers, dtype=torch.long):
    """Return one row of whole numbers."""
    return torch.tensor([numbers], dtype=dtype)


WRONG = {
    "label": ({"labels": ids(0, 3)}, LIMITS, "1 of 2 labels is not between 0 and 2 (3; -100 is left out)."),
    "two labels": ({"labels": ids(-1, 9, -100)}, LIMITS, "2 of 3 labels are not between 0 and 2 (from -1 to 9;"),
    "one label a row": ({"label": torch.tensor([2, 3])}, LIMITS, "1 of 2 labels"),
    "array": ({"labels": np.array([[0, 3]])}, LIMITS, "1 of 2 labels"),
    "pair": ((torch.zeros(2, 3), torch.tensor([0, 3])), LIMITS, "1 of 2 labels"),
    "inputs by name and labels": (({"input_ids": ids(1, 2)}, ids(0, 3)), LIMITS, "1 of 2 labels"),
    "tokens by name and labels": (({"input_ids": ids(1, 24)}, ids(0, 1)), LIMITS, "1 of 2 token ids"),
    "list of rows": ([{"labels": ids(0)}, {"labels": ids(0, 3)}], LIMITS, "1 of 2 labels"),
    "uint16": ({"labels": ids(0, 3, dtype=torch.uint16)}, LIMITS, "1 of 2 labels"),
    "uint32": ({"labels": ids(0, 3, dtype=torch.uint32)}, LIMITS, "1 of 2 labels"),
    "uint64": ({"labels": torch.tensor(np.array([2**64 - 1, 0], np.uint64))}, LIMITS, "1 of 2 labels"),
    "sparse": ({"labels": ids(0, 3).to_sparse()}, LIMITS, "1 of 2 labels"),
    "nested": (
        {"labels": torch.nested.nested_tensor([ids(0, 3)[0], ids(1)[0]], layout=torch.jagged)},
        LIMITS,
        "1 of 4 labels",
    ),
    "one token": ({"input_ids": torch.tensor(24)}, LIMITS, "1 of 1 token ids"),
    "small integers": ({"labels": ids(0, 255, dtype=torch.uint8)}, LIMITS, "255"),
    "other ignored label": (
        {"labels": ids(0, -100)},
        ModelLimits(labels=3, ignore_index=-1),
        "-100; -1 is left",
    ),
    "token": ({"input_ids": ids(1, 24)}, LIMITS, "1 of 2 token ids is not between 0 and 23 (24)."),
    "negative token": ({"input_ids": ids(-100, 4)}, LIMITS, "-100)."),
    "encoding": (BatchEncoding({"input_ids": ids(1, 24)}), LIMITS, "1 of 2 token ids"),
    "token type": ({"token_type_ids": ids(0, 2)}, LIMITS, "1 of 2 token types"),
    "position": ({"position_ids": ids(0, 16)}, LIMITS, "1 of 2 positions is not between 0 and 15"),
    "long row": ({"input_ids": ids(*[2] * 17)}, LIMITS, "17 tokens, and the model has 16 positions."),
    "long row, counted": ({"input_ids": ids(*[3] * 15, 1)}, ROBERTA, "15 tokens, and the model has 14 positions."),
}
RIGHT = {
    "everything": (
        {"input_ids": ids(0, 23), "token_type_ids": ids(0, 1), "position_ids": ids(0, 15), "labels": ids(2, -100)},
        LIMITS,
    ),
    "nothing known": ({"input_ids": ids(-5, 10**9), "labels": ids(-5, 10**9)}, ModelLimits()),
    "all left out": ({"labels": ids(-100, -100)}, LIMITS),
    "fractions": ({"labels": torch.tensor([[9.5, -3.0]])}, LIMITS),
    "yes and no": ({"labels": torch.tensor([[True, False]])}, LIMITS),
    "nothing in it": ({"input_ids": torch.zeros(0, 4, dtype=torch.long), "labels": ids()}, LIMITS),
    "filling": ({"input_ids": ids(*[3] * 14, *[1] * 9)}, ROBERTA),
    "own positions": ({"input_ids": ids(*[2] * 17), "position_ids": ids(*[0] * 17)}, LIMITS),
    "lists": ({"input_ids": [[1, 99]], "labels": [{"boxes": []}]}, LIMITS),
    "three values": ((ids(99), ids(99), ids(99)), LIMITS),
    "a tensor": (ids(99), LIMITS),
    "nothing": (None, LIMITS),
}


@pytest.mark.parametrize(("batch", "limits", "said"), WRONG.values(), ids=WRONG.keys())
def test_wrong_batch(batch, limits, said):
    """Numbers that the model does not have are refused, with their count, the range and the extremes."""
    with pytest.raises(BatchRefused) as refused:
        BatchChecks(limits)(batch, "Step 7: ")
    assert said in refused.value.what
    assert refused.value.what.startswith("Step 7: ")


@pytest.mark.parametrize(("batch", "limits"), RIGHT.values(), ids=RIGHT.keys())
def test_right_batch(batch, limits):
    """Numbers that the model has, and what cannot be judged, pass."""
    assert BatchChecks(limits)(batch) is None


@pytest.mark.parametrize(("batch", "limits"), [wrong[:2] for wrong in WRONG.values()], ids=WRONG.keys())
def test_check_that_is_off(batch, limits):
    """A check that is switched off refuses nothing, and the other one still does."""
    with pytest.raises(BatchRefused) as refused:
        BatchChecks(limits)(batch)
    on, off = ("labels", "token_ids") if " labels " in refused.value.what else ("token_ids", "labels")
    assert BatchChecks(limits, (off,))(batch) is None
    with pytest.raises(BatchRefused):
        BatchChecks(limits, (on,))(batch)


@given(
    st.lists(st.integers(-200, 200), min_size=1, max_size=30), st.integers(1, 100), st.sampled_from([None, -100, -1])
)
def test_count_and_extremes(numbers, count, ignored):
    """Values are refused exactly where one is out of range and not left out; the count and the extremes are right."""
    bad = [number for number in numbers if not 0 <= number < count and number != ignored]
    said = outside(torch.tensor(numbers), count, "labels", ignored)
    assert bool(said) == bool(bad)
    if bad:
        assert said.startswith(f"{len(bad)} of {len(numbers)} labels ")
        extremes = f"from {min(bad)} to {max(bad)}" if min(bad) < max(bad) else f"{bad[0]}"
        assert f"({extremes}{f'; {ignored} is left out' if ignored else ''})." in said


@pytest.mark.parametrize("labels", [np.array(["B-DISEASE", "O"]), np.array([None, 1])], ids=["names", "objects"])
def test_labels_that_are_no_numbers(labels):
    """An array of something else than numbers is refused by its type, and its content is not shown."""
    with pytest.raises(BatchRefused) as refused:
        BatchChecks(LIMITS)({"labels": labels}, "Step 7: ")
    assert refused.value.what == f"Step 7: labels is an array of {labels.dtype}, not of numbers."
    assert "DISEASE" not in str(refused.value)


def test_only_what_is_checked_is_read():
    """Of a batch only the fields that are checked are looked at."""
    assert list(named_fields({"pixel_values": torch.zeros(2), "note_id": ids(7), "labels": ids(1)})) == ["labels"]


def test_checks_can_be_pickled():
    """The checks go to another process as they are."""
    checks = BatchChecks(LIMITS, ("labels",))
    assert pickle.loads(pickle.dumps(checks)) == checks  # noqa: S301


class TestLargeBatch:
    """Steps with 32,767 tokens or more, which an M1 or M2 gets wrong."""

    @pytest.mark.parametrize(
        ("rows", "length", "arithmetic", "remedy"),
        [
            (64, 512, "64 x 512 = 32,768 tokens", "at most 63 rows at this length (63 x 512 = 32,256)"),
            (7, 4681, "7 x 4,681 = 32,767 tokens", "at most 6 rows at this length (6 x 4,681 = 28,086)"),
            (2, 20_000, "2 x 20,000 = 40,000 tokens", "at most 1 row at this length (1 x 20,000 = 20,000)"),
            (1, 32_767, "1 x 32,767 = 32,767 tokens", "Cut the rows to less than 32,767 tokens."),
        ],
    )
    def test_too_many(self, rows, length, arithmetic, remedy):
        """The error shows the arithmetic, and the largest batch that fits at this length."""
        checks = BatchChecks(ModelLimits(), ("large_batch_gradients",))
        with pytest.raises(BatchRefused) as refused:
            checks({"input_ids": torch.zeros(rows, length, dtype=torch.long)}, "Step 3: ")
        assert refused.value.what.startswith(f"Step 3: {arithmetic}")
        assert "pytorch#177116, #193487" in refused.value.what
        assert remedy in refused.value.remedy

    @pytest.mark.parametrize("shape", [(63, 512), (1, 32_766), (2, 128), (40,), ()])
    def test_few_enough(self, shape):
        """With fewer tokens a step passes."""
        assert check_size({"input_ids": torch.zeros(shape, dtype=torch.long)}, ModelLimits()) is None

    def test_embeddings(self):
        """Embeddings that stand for tokens count as rows times length; pictures and labels do not count."""
        checks = BatchChecks(ModelLimits(), ("large_batch_gradients",))
        with pytest.raises(BatchRefused, match="64 x 512 = 32,768 tokens"):
            checks({"inputs_embeds": torch.zeros(64, 512, 2)})
        assert checks({"inputs_embeds": torch.zeros(63, 512, 2)}) is None
        assert checks({"inputs_embeds": torch.zeros(40_000)}) is None
        assert checks({"pixel_values": torch.zeros(8, 3, 64, 64), "labels": torch.zeros(40_000)}) is None

    @given(st.integers(1, 400), st.integers(1, 40_000))
    def test_remedy_is_the_largest_that_fits(self, rows, length):
        """The number of rows in the remedy passes, and one row more does not."""
        remedy = too_many(rows, length)[1]
        if length >= 32_767:
            assert "Cut the rows" in remedy
        else:
            fitting = int(remedy.split("at most ")[1].split()[0].replace(",", ""))
            assert fitting * length < 32_767 <= (fitting + 1) * length

    @pytest.mark.parametrize(
        ("device", "chip", "release", "suspected"),
        [
            ("mps", "Apple M1", (2, 13, 0), True),
            ("mps:0", "Apple M2 Ultra", (2, 6, 0), True),
            ("mps", "Apple M1 (Virtual)", (2, 13, 1), True),
            ("mps", "Apple M1", (2, 14, 0), False),
            ("mps", "Apple M1", (3, 0), False),
            ("mps", "Apple M3", (2, 13, 0), False),
            ("mps", "Apple M12", (2, 13, 0), False),
            ("mps", None, (2, 13, 0), False),
            ("cpu", "Apple M1", (2, 13, 0), False),
            ("cuda", None, (2, 13, 0), False),
        ],
    )
    def test_where_it_is_suspected(self, device, chip, release, suspected):
        """MPS of an M1 or M2 under torch before 2.14 is suspected, and nothing else."""
        assert gradients_can_be_wrong(device, Machine("Darwin", "arm64", chip=chip), release) is suspected
