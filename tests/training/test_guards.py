"""Guards in plain loops and on the simulated MPS: errors, warnings, and complete removal."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError, InvalidBatchError, NonFiniteError
from openmed_nb.training.guards import get_loss

NAMES = nb.Guards().on


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


class TestNames:
    """Names of guards and limits."""

    @pytest.mark.parametrize("model", ["model", None, nn.Linear])
    def test_watch_rejects_other_values(self, model):
        """The current model stays watched."""
        watched = nn.Linear(2, 2)
        with nb.Guards().watch(watched) as guards:
            with pytest.raises(ConfigurationError, match=f"a value of type {type(model).__name__}"):
                guards.watch(model)
            assert watched._forward_hooks

    def test_disabled_guards_are_not_listed(self):
        assert nb.Guards(disable="labels").on == NAMES[1:]
        assert nb.Guards(disable=NAMES).on == ()
        shown = str(nb.Guards(disable=("token_ids", "labels")))
        assert "Off: labels, token_ids." in shown
        assert "pytorch#154235" not in shown

    def test_invalid_arguments_are_rejected(self, catch_error):
        for value, message in (
            ("label", "'label' is not the name of a guard. Did you mean 'labels'?"),
            (("nonfinit",), "Did you mean 'nonfinite'?"),
            (("xyz",), "'xyz' is not the name of a guard. Valid values: labels, token_ids,"),
            (True, "'True' is not the name of a guard. Valid values: labels,"),
        ):
            assert message in str(catch_error(partial(nb.Guards, value))), message


class TestBatches:
    """Checks of batches."""

    def test_guards_do_not_change_training(self, guards, tagger, make_batch):
        unguarded = copy.deepcopy(tagger)
        batches = [make_batch(seed=seed) for seed in range(3)]
        torch.manual_seed(1)
        train(unguarded, batches, nb.Guards(disable=NAMES))
        torch.manual_seed(1)
        train(tagger, batches, guards.watch(tagger))
        assert all(map(torch.equal, tagger.parameters(), unguarded.parameters()))

    def test_checked_numbers_batches_across_loops(self, guards, tagger, make_batch):
        guards.watch(tagger)
        assert len(list(guards.checked([make_batch(), make_batch()]))) == 2
        with pytest.raises(InvalidBatchError, match=r"^Step 4: "):
            list(guards.checked([make_batch(), make_batch(labels=torch.full((4, 8), 3))]))


class TestWatchedInputs:
    """Checks of the inputs of forward passes."""

    def test_inputs_of_training_are_checked(self, guards, tagger, make_batch):
        guards.watch(tagger, iter([7, 8]).__next__)
        tagger(**make_batch())
        invalid = make_batch(labels=torch.full((4, 8), 3))
        with pytest.raises(InvalidBatchError, match=r"^Step 8: 32 of 32 labels"):
            tagger(**invalid)

    def test_inputs_of_evaluation_are_not_checked(self, guards, tagger, make_batch):
        guards.watch(tagger, int)
        with pytest.raises(IndexError):  # The error of torch on the CPU.
            tagger.eval()(**make_batch(labels=torch.full((4, 8), 3)))


class Overflow(nn.Module):
    """Module that overflows float32."""

    def forward(self, numbers):
        return numbers * 1e38 * 1e38


class Network(nn.Module):
    """Modules with a loss."""

    def __init__(self, *modules, loss=lambda numbers: numbers.square().mean()):
        super().__init__()
        linear = nn.Linear(4, 4)
        # Positive outputs, because a random layer can have none that a ReLU passes on.
        linear.weight.data = torch.diag(torch.arange(1.0, 5.0))
        linear.bias.data.zero_()
        self.layers = nn.Sequential(linear, *modules, nn.LayerNorm(4))
        self.loss = loss

    def forward(self, numbers):
        computed = self.layers(numbers)
        return {"loss": self.loss(computed), "logits": computed}


NAN = float("nan")
INFINITY = float("inf")


class TestNonFinite:
    """NaN and infinity."""

    @pytest.mark.parametrize(
        ("model", "numbers", "message", "remedy"),
        [
            (Network(Overflow()), 1.0, "is nan; it first appears in the output of layers.1.", "float32"),
            (Network(nn.Sequential(nn.ReLU(), Overflow())), 1.0, "output of layers.1.1.", "learning rate"),
            (
                Network(loss=lambda numbers: numbers.square().mean() / 0),
                1.0,
                "is inf; the outputs of all",
                "empty batch",
            ),
            (Network(), NAN, "is nan; it first appears in the output of layers.0.", "learning rate"),
        ],
        ids=["module", "inner module", "loss", "input"],
    )
    def test_error_names_first_module(self, guards, model, numbers, message, remedy):
        guards.watch(model)
        with pytest.raises(NonFiniteError) as stopped:
            model(torch.full((2, 4), numbers))
        assert message in stopped.value.message
        assert remedy in stopped.value.remedy

    def test_error_names_weight_and_anomaly_mode(self, guards, tagger, make_batch):
        guards.watch(tagger)
        layer = tagger.bert.encoder.layer[0].output.dense
        layer.weight.register_hook(lambda gradient: gradient * NAN)
        with pytest.raises(NonFiniteError) as stopped:
            train(tagger, [make_batch(), make_batch()], guards)
        name = "bert.encoder.layer.0.output.dense"
        assert stopped.value.message == f"Step 2: the loss is nan; a weight of {name} is already NaN or infinite."
        assert "torch.autograd.detect_anomaly()" in stopped.value.remedy

    def test_error_stops_step_and_shows_no_values(self, guards, tagger, make_batch, poison):
        guards.watch(tagger)
        train(tagger, [make_batch()], guards)
        poison(tagger)
        before = copy.deepcopy(tagger.state_dict())
        with pytest.raises(NonFiniteError) as stopped:
            train(tagger, [make_batch(seed=1)], guards)
        message = stopped.value.message
        assert message.startswith("Step 1: the loss is nan; it first appears in the output of bert.encoder.layer.0.")
        assert "tensor(" not in message
        assert not {
            character for character in message.replace("Step 1", "").replace("layer.0", "") if character.isdigit()
        }
        torch.testing.assert_close(tagger.state_dict(), before)

    def test_model_without_loss_is_checked_for_nan(self, guards):
        model = nn.Sequential(nn.Linear(4, 2), nn.Identity())
        guards.watch(model)
        hook = model[0].register_forward_hook(lambda _layer, _args, output: output - INFINITY)
        model(torch.ones(1, 4))  # Models mask scores with infinity.
        hook.remove()
        model[0].register_forward_hook(lambda _layer, _args, output: output * NAN)
        with pytest.raises(NonFiniteError, match=r"^the output of the model is nan; .* the output of 1\."):
            model(torch.ones(1, 4))

    @pytest.mark.parametrize("called", ["outer", "inner"])
    def test_model_inside_another_module_is_watched(self, guards, tagger, make_batch, poison, called):
        around = Around(tagger)
        guards.watch(around)
        with pytest.raises(InvalidBatchError, match="labels is not between 0 and 2"):
            guards.check(make_batch(labels=torch.tensor([[7]])))
        poison(tagger)
        with pytest.raises(NonFiniteError, match=r"the output of model\.bert\.encoder\.layer\.0"):
            (around if called == "outer" else tagger)(**make_batch())

    def test_error_has_number_of_last_checked_batch(self, guards, tagger, make_batch, poison):
        guards.watch(tagger)
        for batch in guards.checked([make_batch(seed=seed) for seed in range(3)]):
            tagger(**batch).loss.backward()
        guards.check(make_batch(), 7)
        poison(tagger)
        with pytest.raises(NonFiniteError, match=r"^Step 7: the loss is nan"):
            tagger(**make_batch())

    def test_evaluation_is_not_checked(self, guards, tagger, make_batch, poison):
        poison(tagger)
        guards.watch(tagger)
        assert not tagger.eval()(**make_batch()).loss.isfinite()
        with torch.no_grad():
            assert not tagger.train()(**make_batch()).loss.isfinite()

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_recomputed_activations_are_watched(self, guards, tagger, make_batch, poison, use_reentrant):
        tagger.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        guards.watch(tagger)
        train(tagger, [make_batch()], guards)
        poison(tagger)
        with pytest.raises(NonFiniteError, match=r"output of bert\.encoder\.layer\.0\.output\.dense"):
            train(tagger, [make_batch()], guards)

    def test_loss_of_model_outputs(self):
        loss = torch.tensor(2.0)
        logits = torch.zeros(2, 3)
        assert all(get_loss(output) is loss for output in ({"loss": loss}, (loss, logits), loss))
        assert all(
            get_loss(output) is None for output in ({"logits": logits}, (logits,), (), logits, None, {"loss": None})
        )

    def test_disabled_guard_ignores_nan(self, tagger, make_batch, poison):
        poison(tagger)
        with nb.Guards(disable=("nonfinite",)).watch(tagger) as guards:
            train(tagger, [make_batch()], guards)
        assert any(weight.isnan().any() for weight in tagger.parameters())


class TestUnwatch:
    """Removal of guards."""

    def test_unwatch_restores_hooks(self, guards, tagger):
        tagger.register_forward_hook(lambda *_: None)
        before = get_hooks(tagger)
        for get_step in (int, None):  # The second watch replaces the first.
            guards.watch(tagger, get_step)
            assert get_hooks(tagger) != before
        nb.Guards().watch(tagger).unwatch()
        assert get_hooks(tagger) == before
        guards.unwatch()

    @pytest.mark.parametrize("failed", [True, False])
    def test_guards_do_not_keep_model_alive(self, tiny, make_batch, failed):
        guards = nb.Guards()
        model = tiny.random_bert().train()
        gone = weakref.ref(model)
        guards.watch(model)
        model(**make_batch()).loss.backward()
        if not failed:
            guards.unwatch()
        del model
        gc.collect()
        assert gone() is None
        guards.unwatch()

    def test_copies_of_model_are_not_watched(self, guards, tagger, make_batch, tmp_path):
        tagger.classifier.weight.data.fill_(NAN)
        guards.watch(tagger, pytest.fail)
        torch.save(tagger, tmp_path / "model.pt")
        saved = torch.load(tmp_path / "model.pt", weights_only=False)
        for model in (copy.deepcopy(tagger), saved):
            assert not model(**make_batch()).loss.isfinite()


@pytest.mark.real_computer  # It starts its own simulation.
def test_guards_on_mps(tagger, make_batch, poison):
    with nb.simulated_mps("8 GiB"):
        model = tagger.to("mps")
        batch = nb.training.to_device(make_batch(), "mps")
        with nb.Guards().watch(model) as guards:
            model(**batch).loss.backward()
            for device in ("cpu", "mps"):
                with pytest.raises(InvalidBatchError, match="32 of 32 labels are not between 0 and 2"):
                    guards.check({"labels": torch.full((4, 8), 5, device=device)})
            poison(model, NAN)
            with pytest.raises(NonFiniteError, match=r"the output of bert\.encoder\.layer\.0\.output\.dense"):
                model(**batch)
