"""Accumulated gradients equal those of one large batch, for any sizes of batches and numbers of labels."""

import contextlib
import itertools
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError, OpenMedWarning
from openmed_nb.training import GradientAccumulation
from openmed_nb.training.steps import check_fused, count_labels, count_rows

FEATURES = 3
LABELS = 4


def make_model(dtype=torch.float64):
    """Return a small model with fixed weights."""
    torch.manual_seed(0)
    return torch.nn.Linear(FEATURES, LABELS, dtype=dtype)


def make_token_batch(rows, length, seed, kept=0.6):
    """Return a batch of tokens with some ignored labels."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, length, FEATURES, dtype=torch.float64, generator=generator)
    labels = torch.randint(LABELS, (rows, length), generator=generator)
    labels[torch.rand(rows, length, generator=generator) > kept] = -100
    return {"inputs": inputs, "labels": labels}


def compute_token_loss(model, batch):
    """Return the mean over the labels that are not ignored; NaN if all are ignored."""
    return cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["labels"].flatten())


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


def run(batches, steps, loss, **options):
    """Return the gradients before every step of a run that does not change the model."""
    model = make_model()
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before_step = lambda: found.append(copy_gradients(model))  # noqa: E731
    accumulation = GradientAccumulation(optimizer, steps, before_step=before_step, **options)
    stepped = [accumulation.backward(loss(model, batch)) for batch in accumulation.batches(batches)]
    assert sum(stepped) == len(found)
    assert all(parameter.grad is None for parameter in model.parameters())
    return found


def split_into_groups(batches, steps):
    """Return the batches in lists of ``steps`` batches."""
    return [batches[first : first + steps] for first in range(0, len(batches), steps)]


def assert_same(found, expected):
    """Compare gradients, which are computed in float64."""
    assert len(found) == len(expected)
    for gradient, expected_gradient in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-9)


def compute_group_loss(model, group):
    """Return the mean over all labels of several batches of tokens."""
    logits = torch.cat([model(batch["inputs"]).flatten(0, 1) for batch in group])
    return cross_entropy(logits, torch.cat([batch["labels"].flatten() for batch in group]))


SHAPES = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 6), st.sampled_from([0.0, 0.3, 1.0])), min_size=1, max_size=9
)


@given(SHAPES, st.integers(1, 5), st.integers(0, 1000))
def test_accumulated_token_losses_are_exact(shapes, steps, seed):
    batches = [make_token_batch(rows, length, seed + place, kept) for place, (rows, length, kept) in enumerate(shapes)]

    found = run((batch for batch in batches), steps, compute_token_loss)

    assert_same(found, compute_gradients(split_into_groups(batches, steps), compute_group_loss))


def test_batches_reads_one_group_ahead():
    taken = []
    batches = (taken.append(number) or torch.ones(1, FEATURES) for number in range(100))
    accumulation = GradientAccumulation(torch.optim.SGD(make_model().parameters(), lr=0.1), 3, weight=len)
    next(accumulation.batches(batches))

    assert taken == [0, 1, 2]


def test_clipping_applies_to_group():
    model = make_model()
    seen = []
    before = model.weight.detach().clone()
    accumulation = GradientAccumulation(torch.optim.SGD(model.parameters(), lr=1.0), 2, weight=len, max_norm=0.5)
    accumulation.before_step = lambda: seen.append(model.weight.grad.norm().item())
    train_on(accumulation, model, [torch.full((2, FEATURES), 50.0, dtype=torch.float64)] * 2)

    assert seen[0] > 100
    assert (model.weight.detach() - before).norm() <= 0.5 + 1e-9


def test_scaler_does_not_change_steps():
    weights = []
    seen = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        model = make_model(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        accumulation = GradientAccumulation(optimizer, 2, len, scaler=scaler)
        for hook in (None, lambda model=model: seen.append(copy_gradients(model))):
            accumulation.before_step = hook
            for batch in accumulation.batches([torch.ones(3, FEATURES), torch.full((1, FEATURES), 2.0)]):
                accumulation.backward(model(batch).square().mean())
        weights.append(model.weight.detach().clone())
    torch.testing.assert_close(*weights)
    torch.testing.assert_close(*seen)

    for batch in accumulation.batches([torch.full((1, FEATURES), 1e30)]):
        accumulation.backward(model(batch).square().mean())
    torch.testing.assert_close(model.weight.detach(), weights[1])
    assert scaler.get_scale() == 512.0


def test_earlier_gradients_are_discarded():
    model = make_model()
    found = []
    accumulation = GradientAccumulation(torch.optim.SGD(model.parameters(), lr=0.0), 2, len)
    batch = torch.ones(2, FEATURES, dtype=torch.float64)
    for _broken in accumulation.batches([batch, batch, batch]):
        accumulation.backward(model(batch).square().mean())
        break
    assert model.weight.grad is not None
    accumulation.before_step = lambda: found.append(copy_gradients(model))
    train_on(accumulation, model, [batch, batch])

    assert_same(found, compute_gradients([[batch]], lambda model, group: model(group[0]).square().mean()))


def run_out_of_memory(*_):
    """Raise an out-of-memory error, as a hook on a gradient or before a step."""
    raise torch.OutOfMemoryError("out of memory")


def train_on(accumulation, model, inputs, failing=None):
    """Train on batches, and continue after a failed backward pass."""
    for number, batch in enumerate(accumulation.batches(inputs)):
        loss = model(batch).square().mean()
        hook = model.weight.register_hook(run_out_of_memory) if number == failing else None
        with contextlib.suppress(torch.OutOfMemoryError):
            accumulation.backward(loss)
        if hook:
            hook.remove()


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_failed_backward_pass_skips_group(failing):
    inputs = [torch.randn(2, FEATURES, dtype=torch.float64) for _ in range(6)]
    model = make_model()
    found = []
    accumulation = GradientAccumulation(torch.optim.SGD(model.parameters(), lr=0.0), 2, len)
    accumulation.before_step = lambda: found.append(copy_gradients(model))
    with pytest.warns(OpenMedWarning, match="gradients of this group of batches are discarded") as caught:
        train_on(accumulation, model, inputs, failing)
    assert [warning.filename for warning in caught] == [__file__]
    groups = [group for number, group in enumerate(split_into_groups(inputs, 2)) if number != failing // 2]
    assert_same(found, compute_gradients(groups, lambda model, group: model(torch.cat(group)).square().mean()))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_failed_step_leaves_no_gradients():
    model = make_model()
    inputs = [torch.ones(2, FEATURES, dtype=torch.float64)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accumulation = GradientAccumulation(optimizer, 1, len, before_step=run_out_of_memory)
    with pytest.warns(OpenMedWarning, match="discarded"):
        train_on(accumulation, model, inputs)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_each_batch_needs_one_loss():
    model = make_model()
    accumulation = GradientAccumulation(torch.optim.SGD(model.parameters(), lr=0.0), 2, len)
    batch = torch.ones(2, FEATURES, dtype=torch.float64)
    loss = model(batch).square().mean()
    batches = accumulation.batches([batch, batch])
    next(batches)
    with pytest.raises(ConfigurationError, match="not passed to backward"):
        next(batches)
    with pytest.raises(ConfigurationError, match="without a batch"):
        accumulation.backward(loss)
    for _batch in accumulation.batches([batch, batch]):
        break
    with pytest.raises(ConfigurationError, match="without a batch"):
        accumulation.backward(loss)


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"labels": torch.tensor([[1, -100], [-100, -100]])}, 1),
        ({"labels": torch.zeros(2, 5)}, 10),
        ((torch.zeros(4, 3), torch.tensor([1, 1, 0, 2])), 4),
        ({"labels": torch.full((2, 3), -100)}, 0),
    ],
)
def test_count_labels(batch, count):
    assert count_labels(batch) == count


def test_count_shifted_labels():
    labels = {"labels": torch.tensor([[5, 6, -100], [7, -100, 8]])}

    assert (count_labels(labels), count_labels(labels, shifted=True)) == (4, 2)
    assert partial(count_labels, ignore_index=0)({"labels": torch.tensor([0, 1])}) == 1


UNCOUNTED = [
    *((count_labels, batch) for batch in (torch.zeros(3), {"input_ids": torch.zeros(3)}, "text", {"labels": [1, 2]})),
    *((count_rows, batch) for batch in ({}, "text", [1, 2], torch.tensor(1.0))),
]


@pytest.mark.parametrize(("count", "batch"), UNCOUNTED)
def test_count_rejects_unsupported_batches(count, batch):
    """The error does not contain values of the batch."""
    missing = "labels" if count is count_labels else "tensor with rows"
    what = f"A batch of type {type(batch).__name__} has no {missing} to compute its weight"
    with pytest.raises(ConfigurationError, match=rf"^{what}\. Pass weight="):
        count(batch)


REJECTED = [
    *(({"steps": steps}, f"Invalid value for steps: {steps}") for steps in (0, -1, 1.5, True, None)),
    *(({"max_norm": norm}, f"Invalid value for max_norm: {norm!r}") for norm in (-1, 0, 0.0, float("nan"), "1", True)),
    ({"optimizer": make_model()}, r"Invalid type for the optimizer: Linear\. Pass one of torch\.optim"),
    *(
        ({"weight": lambda _, weight=weight: weight}, f"Invalid value for the weight of a batch: {weight}")
        for weight in (-1.0, float("nan"), float("inf"))
    ),
]


@pytest.mark.parametrize(("wrong", "message"), REJECTED)
def test_invalid_arguments_are_rejected(wrong, message):
    given = {"optimizer": torch.optim.SGD(make_model().parameters(), lr=0.1), "steps": 2, **wrong}
    with pytest.raises(ConfigurationError, match=f"^{message}"):
        next(GradientAccumulation(**given).batches([torch.ones(1, FEATURES)]))


@pytest.mark.real_computer  # It starts its own simulation.
def test_check_fused_rejects_ignored_scaler():
    with nb.simulated_mps():
        on_mps = torch.optim.AdamW(make_model(torch.float32).to("mps").parameters(), fused=True)
        scaler = torch.amp.GradScaler("mps")
        with pytest.raises(ConfigurationError, match="ignores the GradScaler"):
            check_fused(on_mps, scaler, (2, 12, 1))
        assert check_fused(on_mps, scaler, (2, 13)) is None
        assert check_fused(on_mps, torch.amp.GradScaler("mps", enabled=False), (2, 12)) is None
        assert check_fused(on_mps, None, (2, 12)) is None
    on_cpu = torch.optim.AdamW(make_model(torch.float32).parameters(), fused=True)
    assert check_fused(on_cpu, torch.amp.GradScaler("cpu"), (2, 12)) is None
