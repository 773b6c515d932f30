"""Accumulated gradients equal those of one large batch, for any sizes of batches and numbers of labels."""

import contextlib
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError, OpenMedWarning
from openmed_nb.training import GradientAccumulation
from openmed_nb.training.steps import check_fused, count_labels

FEATURES = 3
LABELS = 4


def make_model(dtype=torch.float64):
    """Return a small model with fixed weights."""
    torch.manual_seed(0)
    return torch.nn.Linear(FEATURES, LABELS, dtype=dtype)


def make_rows(count, value=1.0, dtype=torch.float64):
    """Return equal rows for the model."""
    return torch.full((count, FEATURES), value, dtype=dtype)


def make_token_batch(rows, length, seed, kept):
    """Return a batch of tokens with some ignored labels."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, length, FEATURES, dtype=torch.float64, generator=generator)
    labels = torch.randint(LABELS, (rows, length), generator=generator)
    labels[torch.rand(rows, length, generator=generator) > kept] = -100
    return {"inputs": inputs, "labels": labels}


def compute_group_loss(model, group):
    """Return the mean over the labels of batches that are not ignored; NaN if all are ignored."""
    logits = torch.cat([model(batch["inputs"]).flatten(0, 1) for batch in group])
    return cross_entropy(logits, torch.cat([batch["labels"].flatten() for batch in group]))


def compute_loss(model, batch):
    """Return a mean over rows."""
    return model(batch).square().mean()


def copy_gradients(model):
    """Return copies of the gradients of a model."""
    return [parameter.grad.clone() for parameter in model.parameters()]


def compute_gradients(groups, loss_of_group):
    """Return the gradients of each group as one batch, for the groups that have a loss."""
    found = []
    for group in groups:
        model = make_model()
        loss = loss_of_group(model, group)
        if not loss.isnan():
            loss.backward()
            found.append(copy_gradients(model))
    return found


def accumulate(model, steps=2, rate=0.0, weight=len, **options):
    """Return an accumulation, and the list of the gradients before each step."""
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    optimizer.register_step_pre_hook(lambda *_: found.append(copy_gradients(model)))
    return GradientAccumulation(optimizer, steps, weight, **options), found


def train_on(accumulation, model, inputs, failing=None):
    """Train on batches, and continue after a failed backward pass."""
    for number, batch in enumerate(accumulation.batches(inputs)):
        loss = compute_loss(model, batch)
        hook = model.weight.register_hook(run_out_of_memory) if number == failing else None
        with contextlib.suppress(torch.OutOfMemoryError):
            accumulation.backward(loss)
        if hook:
            hook.remove()


def run_out_of_memory(*_):
    """Raise an out-of-memory error, as a hook on a gradient or before a step."""
    raise torch.OutOfMemoryError("out of memory")


def split_into_groups(batches, steps):
    """Return the batches in lists of ``steps`` batches."""
    return [batches[first : first + steps] for first in range(0, len(batches), steps)]


def assert_same(found, expected):
    """Compare gradients, which are computed in float64."""
    assert len(found) == len(expected)
    for gradient, expected_gradient in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-9)


def has_no_gradients(model):
    """Return whether no parameter has a gradient."""
    return all(parameter.grad is None for parameter in model.parameters())


SHAPES = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 6), st.sampled_from([0.0, 0.3, 1.0])), min_size=1, max_size=9
)


@given(SHAPES, st.integers(1, 5), st.integers(0, 1000))
def test_accumulated_token_losses_are_exact(shapes, steps, seed):
    batches = [make_token_batch(rows, length, seed + place, kept) for place, (rows, length, kept) in enumerate(shapes)]
    model = make_model()
    accumulation, found = accumulate(model, steps, weight=count_labels)
    stepped = [
        accumulation.backward(compute_group_loss(model, [batch])) for batch in accumulation.batches(iter(batches))
    ]

    assert sum(stepped) == len(found)
    assert has_no_gradients(model)
    assert_same(found, compute_gradients(split_into_groups(batches, steps), compute_group_loss))


def test_batches_reads_one_group_ahead():
    taken = []
    next(accumulate(make_model(), 3)[0].batches(taken.append(number) or make_rows(1) for number in range(100)))

    assert taken == [0, 1, 2]


def test_clipping_applies_to_group():
    model = make_model()
    before = model.weight.detach().clone()
    accumulation, found = accumulate(model, rate=1.0, max_norm=0.5)
    train_on(accumulation, model, [make_rows(2, 50.0)] * 2)

    assert found[0][0].norm() <= 0.5 + 1e-9
    assert (model.weight.detach() - before).norm() <= 0.5 + 1e-9


def test_scaler_does_not_change_steps():
    weights = []
    seen = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        model = make_model(torch.float32)
        accumulation, found = accumulate(model, rate=0.5, scaler=scaler)
        train_on(accumulation, model, [make_rows(count, count, torch.float32) for count in (3, 1)])
        weights.append(model.weight.detach().clone())
        seen.append(found)
    torch.testing.assert_close(*weights)
    torch.testing.assert_close(*seen)

    train_on(accumulation, model, [make_rows(1, 1e30, torch.float32)])
    torch.testing.assert_close(model.weight.detach(), weights[1])
    assert scaler.get_scale() == 512.0


def test_earlier_gradients_are_discarded():
    model = make_model()
    accumulation, found = accumulate(model)
    batch = make_rows(2)
    for _broken in accumulation.batches([batch] * 3):
        accumulation.backward(compute_loss(model, batch))
        break
    assert model.weight.grad is not None
    train_on(accumulation, model, [batch, batch])

    assert_same(found, compute_gradients([batch], compute_loss))


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_failed_backward_pass_skips_group(failing):
    inputs = [torch.randn(2, FEATURES, dtype=torch.float64) for _ in range(6)]
    model = make_model()
    accumulation, found = accumulate(model)
    with pytest.warns(OpenMedWarning, match="gradients of this group of batches are discarded") as caught:
        train_on(accumulation, model, inputs, failing)

    assert [warning.filename for warning in caught] == [__file__]
    groups = [torch.cat(group) for number, group in enumerate(split_into_groups(inputs, 2)) if number != failing // 2]
    assert_same(found, compute_gradients(groups, compute_loss))
    assert has_no_gradients(model)


def test_failed_step_leaves_no_gradients():
    model = make_model()
    accumulation, _ = accumulate(model, 1)
    accumulation.optimizer.register_step_pre_hook(run_out_of_memory)
    with pytest.warns(OpenMedWarning, match="discarded"):
        train_on(accumulation, model, [make_rows(2)])
    assert has_no_gradients(model)


def test_each_batch_needs_one_loss():
    model = make_model()
    accumulation, _ = accumulate(model)
    batch = make_rows(2)
    batches = accumulation.batches([batch, batch])
    next(batches)
    with pytest.raises(ConfigurationError, match="not passed to backward"):
        next(batches)
    with pytest.raises(ConfigurationError, match="without a batch"):
        accumulation.backward(compute_loss(model, batch))
    for _batch in accumulation.batches([batch, batch]):
        break
    with pytest.raises(ConfigurationError, match="without a batch"):
        accumulation.backward(compute_loss(model, batch))


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"labels": torch.tensor([[1, -100], [-100, -100]])}, 1),
        ({"labels": torch.zeros(2, 5)}, 10),
        ((torch.zeros(4, 3), torch.tensor([1, 1, 0, 2])), 4),
        ({"labels": torch.full((2, 3), -100)}, 0),
        ({"labels": torch.tensor([[5, 6, -100], [7, -100, 8]])}, 4),
    ],
)
def test_count_labels(batch, count):
    assert count_labels(batch) == count


def test_accumulation_counts_labels_by_default():
    batches = [{"labels": torch.tensor(labels)} for labels in ([1, -100], [1, 1], [-100, -100], [-100, -100])]
    model = make_model()
    accumulation = GradientAccumulation(torch.optim.SGD(model.parameters(), lr=1.0), 2)
    stepped = []
    weights = []
    for _batch in accumulation.batches(batches):
        before = model.bias.detach().clone()
        stepped.append(accumulation.backward(model.bias.sum()))
        weights.append(float((before - model.bias.detach())[0]))

    assert stepped == [False, True, False, False]
    assert weights == [0.0, 1.0, 0.0, 0.0]
    assert (accumulation.max_norm, accumulation.scaler) == (None, None)
    assert not any(name in repr(accumulation) for name in ("_current", "_has_weight", "_has_failed"))


def test_count_labels_rejects_unsupported_batches():
    """The error does not contain values of the batch."""
    for batch in (torch.zeros(3), {"input_ids": torch.zeros(3)}, "text", {"labels": [1, 2]}):
        message = f"A batch of type {type(batch).__name__} has no labels to compute its weight"
        with pytest.raises(ConfigurationError, match=rf"^{message}\. Pass weight="):
            count_labels(batch)


@pytest.mark.parametrize(
    ("name", "label", "values"),
    [
        ("steps", "steps", (0, -1, 1.5, True, None)),
        ("max_norm", "max_norm", (-1, 0, 0.0, float("nan"), "1", True)),
        ("weight", "the weight of a batch", (-1.0, float("nan"), float("inf"))),
        ("optimizer", "the optimizer", (make_model(),)),
    ],
)
def test_invalid_arguments_are_rejected(name, label, values):
    for value in values:
        argument = (lambda _, value=value: value) if name == "weight" else value
        given = {"optimizer": torch.optim.SGD(make_model().parameters(), lr=0.1), "steps": 2, name: argument}
        with pytest.raises(ConfigurationError, match=f"^Invalid (value|type) for {label}: "):
            next(GradientAccumulation(**given).batches([make_rows(1)]))


@pytest.mark.real_computer  # It starts its own simulation.
def test_check_fused_rejects_ignored_scaler():
    with nb.simulated_mps():
        on_mps = torch.optim.AdamW(make_model(torch.float32).to("mps").parameters(), fused=True)
        scaler = torch.amp.GradScaler("mps")
        with pytest.raises(ConfigurationError, match="ignores the GradScaler"):
            check_fused(on_mps, scaler, (2, 12, 1))
        check_fused(on_mps, scaler, (2, 13))
        check_fused(on_mps, torch.amp.GradScaler("mps", enabled=False), (2, 12))
        check_fused(on_mps, None, (2, 12))
    on_cpu = torch.optim.AdamW(make_model(torch.float32).parameters(), fused=True)
    check_fused(on_cpu, torch.amp.GradScaler("cpu"), (2, 12))
