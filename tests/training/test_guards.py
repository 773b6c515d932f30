"""Guards in plain loops and on the simulated MPS: errors, limits of batches, and complete removal."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import openmed_nb as nb
from helpers import tiny_models as tiny
from helpers.trainings import catch_error, make_batch, poison
from openmed_nb.errors import ConfigurationError, InvalidBatchError, NonFiniteError
from openmed_nb.training.guards import GUARD_NAMES, get_loss

NAN = float("nan")
LAYER = r"bert\.encoder\.layer\.0\.output\.dense"


def get_hooks(model):
    """Return the hooks of every layer of a model."""
    names = [name for name in vars(nn.Module()) if "hooks" in name]
    return {name: {hook: dict(getattr(layer, hook)) for hook in names} for name, layer in model.named_modules()}


class Around(nn.Module):
    """Module that wraps a model of transformers, as in Lightning."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **batch):
        return self.model(**batch)


def train(model, batches, guards):
    """Train a model in a plain loop with guards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches, 1):
        guards.check(batch, step)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_invalid_names_and_models_are_rejected():
    for value in ("label", ("nonfinit",), True):
        assert "for disable" in str(catch_error(partial(nb.Guards, value))), value
    assert nb.Guards(disable="labels").on == GUARD_NAMES[1:]
    with nb.Guards().watch(nn.Linear(2, 2)) as guards, pytest.raises(ConfigurationError, match="of type NoneType"):
        guards.watch(None)


def test_guards_do_not_change_training(guards, tagger):
    unguarded = copy.deepcopy(tagger)
    batches = [make_batch(seed=seed) for seed in range(3)]
    torch.manual_seed(1)
    train(unguarded, batches, nb.Guards(disable=GUARD_NAMES))
    torch.manual_seed(1)
    train(tagger, batches, guards.watch(tagger))

    assert all(map(torch.equal, tagger.parameters(), unguarded.parameters()))


def ids(*numbers, dtype=torch.long):
    """Return one row of integers."""
    return torch.tensor([numbers], dtype=dtype)


INVALID_BATCHES = {
    "label": ({"labels": ids(0, 3)}, "1 of 2 labels is not between 0 and 2 (3; -100 is ignored)."),
    "pair": ((torch.zeros(2, 3), torch.tensor([0, 3])), "1 of 2 labels"),
    "small integers": ({"labels": ids(0, 255, dtype=torch.uint8)}, "255"),
    "token": ({"input_ids": ids(1, 24)}, "1 of 2 token ids is not between 0 and 23 (24)."),
    "token type": ({"token_type_ids": ids(0, 2)}, "1 of 2 token types"),
    "long row": ({"input_ids": ids(*[2] * 65)}, "65 tokens, and the model has 64 positions."),
}
VALID_BATCHES = {
    "everything": {"input_ids": ids(0, 23), "token_type_ids": ids(0, 1), "labels": ids(2, -100)},
    "fractions": {"labels": torch.tensor([[9.5, -3.0]])},
    "bool labels": {"labels": torch.tensor([[True, False]])},
    "empty batch": {"input_ids": torch.zeros(0, 4, dtype=torch.long), "labels": ids()},
    "lists": {"input_ids": [[1, 99]], "labels": [{"boxes": []}]},
    "nothing": None,
    "other fields": {"pixel_values": torch.full((2,), 99), "note_id": ids(7), "labels": ids(1)},
}


@pytest.fixture(scope="module")
def watch():
    """Function that returns guards with the limits of a small BERT."""

    def watch(disable=()):
        with nb.Guards(disable).watch(tiny.random_bert()) as guards:
            return guards

    return watch


def test_check_rejects_values_out_of_range(watch):
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
    for case, batch in VALID_BATCHES.items():
        assert catch_error(partial(guards[()].check, batch)) is None, case


@given(numbers=st.lists(st.integers(-200, 200), min_size=1, max_size=30))
def test_error_reports_count_and_extremes(watch, numbers):
    bad = [number for number in numbers if not 0 <= number < 3 and number != -100]
    error = catch_error(partial(watch().check, {"labels": torch.tensor(numbers)}))
    assert bool(error) == bool(bad)
    if bad:
        assert error.message.startswith(f"Step 1: {len(bad)} of {len(numbers)} labels ")
        extremes = f"from {min(bad)} to {max(bad)}" if min(bad) < max(bad) else f"{bad[0]}"
        assert f"({extremes}; -100 is ignored)." in error.message


def test_checked_numbers_batches_across_loops(guards, tagger):
    guards.watch(tagger)
    assert len(list(guards.checked([make_batch(), make_batch()]))) == 2
    with pytest.raises(InvalidBatchError, match=r"^Step 4: "):
        list(guards.checked([make_batch(), make_batch(labels=torch.full((4, 8), 3))]))


def test_inputs_of_training_are_checked(guards, tagger):
    guards.watch(tagger, iter([7, 8]).__next__)
    tagger(**make_batch())
    invalid = make_batch(labels=torch.full((4, 8), 3))
    with pytest.raises(InvalidBatchError, match=r"^Step 8: 32 of 32 labels"):
        tagger(**invalid)
    with pytest.raises(IndexError):  # In evaluation, the error of torch on the CPU.
        tagger.eval()(**invalid)


class Overflow(nn.Module):
    """Module that overflows float32."""

    def forward(self, numbers):
        return numbers * 1e38 * 1e38


class Network(nn.Module):
    """Modules with a loss."""

    def __init__(self, *modules, divisor=1):
        super().__init__()
        linear = nn.Linear(4, 4)
        # Positive outputs, because a random layer can have none that a ReLU passes on.
        linear.weight.data = torch.diag(torch.arange(1.0, 5.0))
        linear.bias.data.zero_()
        self.layers = nn.Sequential(linear, *modules, nn.LayerNorm(4))
        self.divisor = divisor

    def forward(self, numbers):
        computed = self.layers(numbers)
        return {"loss": computed.square().mean() / self.divisor, "logits": computed}


@pytest.mark.parametrize(
    ("model", "numbers", "message", "remedy"),
    [
        (Network(Overflow()), 1.0, "is nan; it first appears in the output of layers.1.", "float32"),
        (Network(nn.Sequential(nn.ReLU(), Overflow())), 1.0, "output of layers.1.1.", "learning rate"),
        (Network(divisor=0), 1.0, "is inf; the outputs of all", "empty batch"),
        (Network(), NAN, "is nan; it first appears in the output of layers.0.", "learning rate"),
    ],
    ids=["module", "inner module", "loss", "input"],
)
def test_error_names_first_module(guards, model, numbers, message, remedy):
    guards.watch(model)
    with pytest.raises(NonFiniteError) as stopped:
        model(torch.full((2, 4), numbers))
    assert message in stopped.value.message
    assert remedy in stopped.value.remedy


def test_error_names_weight_and_anomaly_mode(guards, tagger):
    guards.watch(tagger)
    tagger.bert.encoder.layer[0].output.dense.weight.register_hook(lambda gradient: gradient * NAN)
    with pytest.raises(NonFiniteError, match=f"^Step 2: the loss is nan; a weight of {LAYER} is already") as stopped:
        train(tagger, [make_batch(), make_batch()], guards)
    assert "torch.autograd.detect_anomaly()" in stopped.value.remedy


def test_error_stops_step_and_shows_no_values(guards, tagger):
    guards.watch(tagger)
    train(tagger, [make_batch()], guards)
    poison(tagger)
    before = copy.deepcopy(tagger.state_dict())
    with pytest.raises(NonFiniteError, match=f"^Step 1: the loss is nan; it first appears .* {LAYER}") as stopped:
        train(tagger, [make_batch(seed=1)], guards)
    message = stopped.value.message.replace("Step 1", "").replace("layer.0", "")
    assert not any(map(str.isdigit, message))
    torch.testing.assert_close(tagger.state_dict(), before)


def test_model_without_loss_is_checked_for_nan(guards):
    model = nn.Sequential(nn.Linear(4, 2), nn.Identity())
    guards.watch(model)
    hook = model[0].register_forward_hook(lambda _layer, _args, output: output - float("inf"))
    model(torch.ones(1, 4))  # Models mask scores with infinity.
    hook.remove()
    model[0].register_forward_hook(lambda _layer, _args, output: output * NAN)
    with pytest.raises(NonFiniteError, match=r"^the output of the model is nan; .* the output of 1\."):
        model(torch.ones(1, 4))


@pytest.mark.parametrize("called", ["outer", "inner"])
def test_model_inside_another_module_is_watched(guards, tagger, called):
    around = Around(tagger)
    guards.watch(around)
    with pytest.raises(InvalidBatchError, match="labels is not between 0 and 2"):
        guards.check(make_batch(labels=torch.tensor([[7]])), 7)
    poison(tagger)
    with pytest.raises(NonFiniteError, match=rf"^Step 7: .* the output of model\.{LAYER}"):
        (around if called == "outer" else tagger)(**make_batch())


def test_evaluation_is_not_checked(guards, tagger):
    poison(tagger)
    guards.watch(tagger)
    assert not tagger.eval()(**make_batch()).loss.isfinite()
    with torch.no_grad():
        assert not tagger.train()(**make_batch()).loss.isfinite()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_activations_are_watched(guards, tagger, use_reentrant):
    tagger.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    guards.watch(tagger)
    train(tagger, [make_batch()], guards)
    poison(tagger)
    with pytest.raises(NonFiniteError, match=f"output of {LAYER}"):
        train(tagger, [make_batch()], guards)


def test_loss_of_model_outputs():
    loss = torch.tensor(2.0)
    logits = torch.zeros(2, 3)
    assert all(get_loss(output) is loss for output in ({"loss": loss}, (loss, logits), loss))
    assert all(get_loss(output) is None for output in ({"logits": logits}, (logits,), (), logits, None, {"loss": None}))


def test_disabled_guard_ignores_nan(tagger):
    poison(tagger)
    with nb.Guards(disable=("nonfinite",)).watch(tagger) as guards:
        train(tagger, [make_batch()], guards)
    assert any(weight.isnan().any() for weight in tagger.parameters())


def test_unwatch_restores_hooks(guards, tagger):
    tagger.register_forward_hook(lambda *_: None)
    before = get_hooks(tagger)
    for get_step in (int, None):  # The second watch replaces the first.
        guards.watch(tagger, get_step)
        assert get_hooks(tagger) != before
    nb.Guards().watch(tagger).unwatch()
    assert get_hooks(tagger) == before


def test_guards_do_not_keep_model_alive():
    guards = nb.Guards()
    model = tiny.random_bert().train()
    reference = weakref.ref(model)
    guards.watch(model)
    model(**make_batch()).loss.backward()
    del model
    gc.collect()
    assert reference() is None
    guards.unwatch()


def test_copies_of_model_are_not_watched(guards, tagger, tmp_path):
    tagger.classifier.weight.data.fill_(NAN)
    guards.watch(tagger, pytest.fail)
    torch.save(tagger, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=False)
    for model in (copy.deepcopy(tagger), saved):
        assert not model(**make_batch()).loss.isfinite()


@pytest.mark.real_computer  # It starts its own simulation.
def test_guards_on_mps(tagger):
    with nb.simulated_mps("8 GiB"):
        model = tagger.to("mps")
        batch = nb.training.to_device(make_batch(), "mps")
        with nb.Guards().watch(model) as guards:
            model(**batch).loss.backward()
            for device in ("cpu", "mps"):
                with pytest.raises(InvalidBatchError, match="32 of 32 labels are not between 0 and 2"):
                    guards.check({"labels": torch.full((4, 8), 5, device=device)})
            poison(model, NAN)
            with pytest.raises(NonFiniteError, match=f"the output of {LAYER}"):
                model(**batch)
