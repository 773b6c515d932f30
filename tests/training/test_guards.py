"""Guards in plain loops and on the simulated MPS: errors, warnings, and complete removal."""

import contextlib
import copy
import gc
import itertools
import warnings
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import openmed_nb as nb
from openmed_nb.devices.machine import MachineInfo
from openmed_nb.errors import ConfigurationError, InvalidBatchError, NonFiniteError, OpenMedWarning
from openmed_nb.training.guards import get_loss

NAMES = nb.Guards().on
M3 = MachineInfo("Darwin", "arm64", apple_silicon=True, chip="Apple M3")


def get_hooks(model):
    """Return the hooks of every layer of a model."""
    names = [name for name in vars(nn.Module()) if "hooks" in name]
    return {name: {hook: dict(getattr(layer, hook)) for hook in names} for name, layer in model.named_modules()}


def make_lstm(layers=2, dropout=0.2):
    """Return a model with an LSTM."""
    return nn.ModuleDict({"encoder": nn.LSTM(4, 4, num_layers=layers, dropout=dropout)})


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
        with nb.Guards().watch(watched, "cpu") as guards:
            with pytest.raises(ConfigurationError, match=f"a value of type {type(model).__name__}"):
                guards.watch(model)
            assert watched._forward_hooks

    def test_disabled_guards_are_not_listed(self):
        assert nb.Guards(disable="labels").on == NAMES[1:]
        assert nb.Guards(disable=NAMES).on == ()
        shown = str(nb.Guards(disable=("lstm_dropout", "labels")))
        assert "Off: labels, lstm_dropout." in shown
        assert "pytorch#190056" not in shown

    def test_invalid_arguments_are_rejected(self, catch_error):
        for name, value, message in (
            ("disable", "label", "'label' is not the name of a guard. Did you mean 'labels'?"),
            ("disable", ("nonfinit",), "Did you mean 'nonfinite'?"),
            ("disable", ("xyz",), "'xyz' is not the name of a guard. Valid values: labels, token_ids,"),
            ("disable", True, "'True' is not the name of a guard. Valid values: labels,"),
            ("num_label", 3, "'num_label' is not a limit of Guards. Did you mean 'num_labels'?"),
            *(("num_labels", value, f"value for the limit num_labels: {value!r}.") for value in ("3", -1, True)),
            ("pad_token_id", -1, "Invalid value for the limit pad_token_id: -1."),
            ("ignore_index", "x", "Invalid value for the limit ignore_index: 'x'."),
        ):
            assert message in str(catch_error(partial(nb.Guards, **{name: value}))), name

    def test_minimum_limits_are_accepted(self):
        ones = {"num_labels": np.int64(1), "vocab_size": 1, "max_position_embeddings": None}
        nb.Guards(**ones, position_offset=0, pad_token_id=0, ignore_index=-1)


class TestBatches:
    """Checks of batches."""

    def test_guards_do_not_change_training(self, guards, tagger, make_batch):
        unguarded = copy.deepcopy(tagger)
        batches = [make_batch(seed=seed) for seed in range(3)]
        torch.manual_seed(1)
        train(unguarded, batches, nb.Guards(disable=NAMES))
        torch.manual_seed(1)
        train(tagger, batches, guards.watch(tagger, "cpu"))
        assert all(map(torch.equal, tagger.parameters(), unguarded.parameters()))

    def test_checked_numbers_batches_across_loops(self, guards, tagger, make_batch):
        guards.watch(tagger, "cpu")
        assert len(list(guards.checked([make_batch(), make_batch()]))) == 2
        with pytest.raises(InvalidBatchError, match=r"^Step 4: "):
            list(guards.checked([make_batch(), make_batch(labels=torch.full((4, 8), 3))]))


class Overflow(nn.Module):
    """Module that overflows float32."""

    def forward(self, numbers):
        return numbers * 1e38 * 1e38


class Network(nn.Module):
    """Modules with a loss."""

    def __init__(self, *modules, loss=lambda numbers: numbers.square().mean()):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), *modules, nn.LayerNorm(4))
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
        guards.watch(model, "cpu")
        with pytest.raises(NonFiniteError) as stopped:
            model(torch.full((2, 4), numbers))
        assert message in stopped.value.message
        assert remedy in stopped.value.remedy

    def test_error_names_weight_and_anomaly_mode(self, guards, tagger, make_batch):
        guards.watch(tagger, "cpu")
        layer = tagger.bert.encoder.layer[0].output.dense
        layer.weight.register_hook(lambda gradient: gradient * NAN)
        with pytest.raises(NonFiniteError) as stopped:
            train(tagger, [make_batch(), make_batch()], guards)
        name = "bert.encoder.layer.0.output.dense"
        assert stopped.value.message == f"Step 2: the loss is nan; a weight of {name} is already NaN or infinite."
        assert "torch.autograd.detect_anomaly()" in stopped.value.remedy

    def test_error_stops_step_and_shows_no_values(self, guards, tagger, make_batch, poison):
        guards.watch(tagger, "cpu")
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
        guards.watch(model, "cpu")
        hook = model[0].register_forward_hook(lambda _layer, _args, output: output - INFINITY)
        model(torch.ones(1, 4))  # Models mask scores with infinity.
        hook.remove()
        model[0].register_forward_hook(lambda _layer, _args, output: output * NAN)
        with pytest.raises(NonFiniteError, match=r"^the output of the model is nan; .* the output of 1\."):
            model(torch.ones(1, 4))

    @pytest.mark.parametrize("called", ["outer", "inner"])
    def test_model_inside_another_module_is_watched(self, guards, tagger, make_batch, poison, called):
        around = Around(tagger)
        guards.watch(around, "cpu")
        with pytest.raises(InvalidBatchError, match="labels is not between 0 and 2"):
            guards.check(make_batch(labels=torch.tensor([[7]])))
        poison(tagger)
        with pytest.raises(NonFiniteError, match=r"the output of model\.bert\.encoder\.layer\.0"):
            (around if called == "outer" else tagger)(**make_batch())
        with torch.no_grad(), pytest.warns(OpenMedWarning, match="its results are random") as caught:
            tagger(**make_batch())
        assert [warning.filename for warning in caught] == [__file__]

    def test_error_has_number_of_last_checked_batch(self, guards, tagger, make_batch, poison):
        guards.watch(tagger, "cpu")
        for batch in guards.checked([make_batch(seed=seed) for seed in range(3)]):
            tagger(**batch).loss.backward()
        guards.check(make_batch(), 7)
        poison(tagger)
        with pytest.raises(NonFiniteError, match=r"^Step 7: the loss is nan"):
            tagger(**make_batch())

    def test_evaluation_is_not_checked(self, guards, tagger, make_batch, poison):
        poison(tagger)
        guards.watch(tagger, "cpu")
        assert not tagger.eval()(**make_batch()).loss.isfinite()
        with torch.no_grad(), pytest.warns(OpenMedWarning):
            assert not tagger.train()(**make_batch()).loss.isfinite()

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_recomputed_activations_are_watched(self, guards, tagger, make_batch, poison, use_reentrant):
        tagger.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        guards.watch(tagger, "cpu")
        train(tagger, [make_batch()], guards)
        poison(tagger)
        with pytest.raises(NonFiniteError, match=r"output of bert\.encoder\.layer\.0\.output\.dense"):
            train(tagger, [make_batch()], guards)

    def test_loss_of_model_outputs(self):
        loss = torch.tensor(2.0)
        logits = torch.zeros(2, 3)
        for output in ({"loss": loss}, (loss, logits), loss):
            assert get_loss(output) is loss
        for output in ({"logits": logits}, (logits,), (), logits, None, {"loss": None}):
            assert get_loss(output) is None

    def test_disabled_guard_ignores_nan(self, tagger, make_batch, poison):
        poison(tagger)
        with nb.Guards(disable=("nonfinite",)).watch(tagger, "cpu") as guards:
            train(tagger, [make_batch()], guards)
        assert any(weight.isnan().any() for weight in tagger.parameters())


class TestDropout:
    """Warnings about dropout."""

    def test_pass_without_gradients_warns_once(self, guards, tagger, make_batch):
        guards.watch(tagger, "cpu")
        tagger(**make_batch())
        with torch.no_grad():
            tagger.eval()(**make_batch())
            with pytest.warns(OpenMedWarning, match="its results are random"):
                tagger.train()(**make_batch())
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                tagger(**make_batch())

    @pytest.mark.parametrize(
        "settings",
        [
            *itertools.product(
                ("mps:0", "cpu"), ("sdpa", "eager"), (0.1, 0), (0.1, 0), ((), "dropout_without_gradients")
            )
        ],
    )
    def test_warning_depends_on_kind_of_dropout(self, tagger, make_batch, settings):
        """On MPS, dropout in scaled_dot_product_attention raises an error."""
        device, attention, in_layers, in_attention, disabled = settings
        for layer in tagger.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = in_layers
        tagger.config._attn_implementation = attention
        tagger.config.attention_probs_dropout_prob = in_attention
        guards = nb.Guards(disabled).watch(tagger, device, M3)
        with guards, torch.no_grad(), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", OpenMedWarning)
            tagger(**make_batch())
        messages = [str(warning.message) for warning in warned]
        assert len(messages) == (not disabled and in_layers + in_attention > 0)
        for message in messages:
            raises = device == "mps:0" and attention == "sdpa" and in_attention > 0
            assert ("scaled_dot_product_attention for MPS does not support dropout" in message) is raises
            assert ("attn_implementation='eager'" in message) is raises
            assert "results are random. " in message or raises
            assert "model.eval()" in message

    @pytest.mark.parametrize("layer", [nn.Dropout1d(0.1), nn.Dropout(0.0)])
    def test_plain_module_with_dropout_warns(self, layer):
        model = nn.Sequential(nn.Linear(2, 2), layer)
        expected = pytest.warns(OpenMedWarning, match="are random") if layer.p else contextlib.nullcontext()
        with nb.Guards().watch(model, "cpu"), torch.no_grad(), expected:
            model(torch.ones(1, 2))

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize(
        ("model", "device", "release", "layer"),
        [
            (make_lstm(), "mps", (2, 13, 0), "encoder"),
            (make_lstm()["encoder"], "mps", (2, 13, 0), "the model"),
            (make_lstm(), "mps", (2, 14, 0), None),
            (make_lstm(), "cpu", (2, 13, 0), None),
            (make_lstm(2, 0.0), "mps", (2, 13, 0), None),
            (nn.GRU(4, 4, num_layers=2, dropout=0.2), "mps", (2, 13, 0), None),
        ],
    )
    def test_lstm_with_dropout_warns_on_mps(self, model, device, release, layer):
        nb.Guards(disable=("lstm_dropout",)).watch(model, device, M3, release).unwatch()
        with pytest.warns(OpenMedWarning) if layer else contextlib.nullcontext() as warned:
            nb.Guards().watch(model, device, M3, release).unwatch()
        for warning in warned or ():
            assert f"({layer}) will be wrong" in str(warning.message)
            assert "pytorch#190056" in str(warning.message)
            assert "torch 2.14" in str(warning.message)


class TestUnwatch:
    """Removal of guards."""

    def test_unwatch_restores_hooks_and_loader(self, tagger, make_batch):
        tagger.register_forward_hook(lambda *_: None)
        before = get_hooks(tagger)
        loader = DataLoader([make_batch()], batch_size=None)
        original = loader.collate_fn
        guards = nb.Guards()
        for _ in range(2):  # The second watch replaces the first.
            guards.watch(tagger, "cpu")
            assert guards.watch_loader(loader)
            assert get_hooks(tagger) != before
            assert loader.collate_fn is not original
        tagger(**make_batch())
        with torch.no_grad(), pytest.warns(OpenMedWarning):  # The hook that warned is removed too.
            tagger(**make_batch())
        guards.unwatch()
        guards.unwatch()
        assert get_hooks(tagger) == before
        assert loader.collate_fn is original

    @pytest.mark.parametrize("failed", [True, False])
    def test_guards_do_not_keep_model_alive(self, tiny, make_batch, failed):
        guards = nb.Guards()
        model = tiny.random_bert().train()
        gone = weakref.ref(model)
        guards.watch(model, "cpu")
        model(**make_batch()).loss.backward()
        if not failed:
            guards.unwatch()
        del model
        gc.collect()
        assert gone() is None
        guards.unwatch()

    def test_copies_of_model_are_not_watched(self, guards, tagger, make_batch, tmp_path):
        tagger.classifier.weight.data.fill_(NAN)
        guards.watch(tagger, "cpu")
        torch.save(tagger, tmp_path / "model.pt")
        saved = torch.load(tmp_path / "model.pt", weights_only=False)
        for model in (copy.deepcopy(tagger), saved):
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("error")
                model(**make_batch())
            assert not model(**make_batch()).loss.isfinite()


M2 = MachineInfo("Darwin", "arm64", apple_silicon=True, chip="Apple M2")


@pytest.fixture
def on_mps(tagger):
    """Tagger on the simulated device, and guards that watch it."""
    with nb.simulated_mps("8 GiB"):
        model = tagger.to("mps")
        with nb.Guards().watch(model, "mps", M2, (2, 13, 0)) as guards:
            yield model, guards


@pytest.mark.real_computer  # It starts its own simulation.
def test_watch_finds_nan_on_mps(on_mps, make_batch, poison):
    model, _ = on_mps
    model(**nb.training.to_device(make_batch(), "mps")).loss.backward()
    poison(model, NAN)
    with pytest.raises(NonFiniteError, match=r"the output of bert\.encoder\.layer\.0\.output\.dense"):
        model(**nb.training.to_device(make_batch(), "mps"))


@pytest.mark.real_computer  # It starts its own simulation.
@pytest.mark.parametrize("where", ["cpu", "mps"])
def test_check_rejects_invalid_batch_on_any_device(on_mps, where):
    _, guards = on_mps
    with pytest.raises(InvalidBatchError, match="32 of 32 labels are not between 0 and 2"):
        guards.check({"labels": torch.full((4, 8), 5, device=where)}, 1)
    with pytest.raises(InvalidBatchError, match="512 x 64 = 32,768 tokens"):
        guards.check({"input_ids": torch.zeros(512, 64, dtype=torch.long, device=where)}, 1)
