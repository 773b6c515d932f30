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
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

import openmed_nb as nb
from openmed_nb.devices.machine import MachineInfo
from openmed_nb.errors import ConfigurationError, InvalidBatchError, NonFiniteError, OpenMedWarning

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
        guards.after_backward(model, step)
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


class TestNonFinite:
    """NaN and infinity."""

    def test_error_names_layer_and_saves_batch(self, guards, tagger, make_batch, poison):
        """The error does not contain values of the batch."""
        guards.watch(tagger, "cpu")
        train(tagger, [make_batch()], guards)
        poison(tagger)
        batch = make_batch(seed=1)
        before = copy.deepcopy(tagger.state_dict())
        with pytest.raises(NonFiniteError) as stopped:
            train(tagger, [batch], guards)
        file = guards.folder / "step_1.safetensors"
        message = stopped.value.message
        assert (
            "Step 1: the loss is NaN or infinite; it first appears in the output of bert.encoder.layer.0.output.dense"
            in message
        )
        assert f"The batch is in {str(file)!r}; its token ids are clinical content." in message
        assert torch.equal(load_file(file)["input_ids"], batch["input_ids"])
        assert "tensor(" not in message
        assert str(batch["input_ids"].tolist()[0][:2])[1:-1] not in message
        torch.testing.assert_close(tagger.state_dict(), before)

    def test_error_reports_finite_model_if_loss_is_outside(self, guards):
        model = nn.Linear(4, 2)
        guards.watch(model, "cpu")
        loss = model(torch.ones(1, 4)).sum() * float("nan")
        with pytest.raises(NonFiniteError, match=r"the loss is nan; .* check the code after the model"):
            guards.check_loss(loss, 3, {"inputs": torch.ones(1, 4)})
        loss = model(torch.ones(1, 4)).sum() * float("inf")
        loss.backward()
        with pytest.raises(NonFiniteError, match="a gradient is NaN or infinite"):
            guards.after_backward(model, 3)

    def test_check_loss_works_without_watched_model(self, guards):
        for loss in (1.0, torch.tensor(0.0), torch.tensor([2.5])):
            guards.check_loss(loss, 1)
        with pytest.raises(NonFiniteError, match="no pass of a watched model was recorded"):
            guards.check_loss(float("inf"), 5, {"labels": torch.ones(2)})
        assert (guards.folder / "step_5.safetensors").is_file()
        with pytest.raises(NonFiniteError, match="No batch is available"):
            guards.check_loss(float("-inf"), 6)
        with pytest.raises(ConfigurationError, match="loss"):
            guards.check_loss(10**400, 7)

    def test_accumulated_step_saves_failing_batch(self, guards, tagger, make_batch):
        batches = [make_batch(seed=seed) for seed in range(4)]

        def spoil_the_third(_model, _args, given, output):
            if torch.equal(given["input_ids"], batches[2]["input_ids"]):
                output.loss *= float("nan")

        tagger.register_forward_hook(spoil_the_third, with_kwargs=True)
        guards.watch(tagger, "cpu")
        for batch in batches:
            tagger(**batch).loss.backward()
        with pytest.raises(NonFiniteError, match="it first appears in the loss"):
            guards.after_backward(tagger, 9)
        assert torch.equal(load_file(guards.folder / "step_9.safetensors")["input_ids"], batches[2]["input_ids"])

    @pytest.mark.parametrize("called", ["outer", "inner"])
    def test_model_inside_another_module_is_watched(self, guards, tagger, make_batch, poison, called):
        around = Around(tagger)
        guards.watch(around, "cpu")
        with pytest.raises(InvalidBatchError, match="labels is not between 0 and 2"):
            guards.check(make_batch(labels=torch.tensor([[7]])))
        poison(tagger)
        (around if called == "outer" else tagger)(**make_batch()).loss.backward()
        with pytest.raises(NonFiniteError, match=r"the output of model\.bert\.encoder\.layer\.0"):
            guards.after_backward(step=1)
        assert load_file(guards.folder / "step_1.safetensors").keys() == make_batch().keys()
        with torch.no_grad(), pytest.warns(OpenMedWarning, match="its results are random") as caught:
            tagger(**make_batch())
        assert [warning.filename for warning in caught] == [__file__]

    @pytest.mark.parametrize("checked", [True, False])
    def test_step_number_defaults_to_last_batch(self, guards, tagger, make_batch, poison, checked):
        batches = [make_batch(seed=seed) for seed in range(3)]

        def train():
            for number, batch in enumerate(guards.checked(batches) if checked else batches):
                if number == 2:
                    poison(tagger)
                tagger(**batch).loss.backward()
                guards.after_backward()

        guards.watch(tagger, "cpu")
        with pytest.raises(NonFiniteError, match=r"^Step 3: the loss is NaN or infinite"):
            train()

    def test_explicit_step_number_continues(self, guards, make_batch):
        for explicit, step in ((7, 7), (None, 8)):
            guards.check(make_batch(), explicit)
            with pytest.raises(NonFiniteError, match=f"^Step {step}: "):
                guards.check_loss(float("nan"))

    def test_scaler_may_skip_limited_steps(self, guards, tagger, make_batch, poison):
        guards.watch(tagger, "cpu", scaled=True)
        hook = tagger.classifier.weight.register_hook(lambda gradient: gradient * float("inf"))
        for step in range(20):  # The scaler skips the optimizer step.
            tagger(**make_batch()).loss.backward()
            guards.after_backward(tagger, step)
        with pytest.raises(NonFiniteError, match="a gradient is NaN"):
            train(tagger, [make_batch()], guards)
        hook.remove()
        tagger.zero_grad()
        poison(tagger)
        guards.watch(tagger, "cpu", scaled=True)
        with pytest.raises(NonFiniteError, match="the loss is NaN"):
            train(tagger, [make_batch()], guards)

    def test_disabled_guard_ignores_nan(self, tagger, make_batch, poison):
        poison(tagger)
        with nb.Guards(disable=("nonfinite",)).watch(tagger, "cpu") as guards:
            train(tagger, [make_batch()], guards)
            guards.check_loss(float("nan"), 1)
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

    def test_batch_is_released_after_step(self, guards, tagger, make_batch):
        def train_on_batch():
            """Train on a batch, and return a weak reference to its memory."""
            ids = np.arange(5, 13)
            tagger(**make_batch(rows=1, input_ids=torch.from_numpy(ids)[None])).loss.backward()
            return weakref.ref(ids)

        guards.watch(tagger, "cpu")
        batch = train_on_batch()
        assert batch() is not None
        guards.after_backward(tagger, 1)
        assert batch() is None
        batch = train_on_batch()
        guards.clear()
        assert batch() is None

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
        guards.after_backward()
        guards.unwatch()

    def test_copies_of_model_are_not_watched(self, guards, tagger, make_batch, tmp_path):
        guards.watch(tagger, "cpu")
        tagger(**make_batch())
        torch.save(tagger, tmp_path / "model.pt")
        saved = torch.load(tmp_path / "model.pt", weights_only=False)
        for model in (copy.deepcopy(tagger), saved):
            (recorder,) = (hook.__self__ for hook in model._forward_hooks.values())
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("error")
                model(**make_batch())
            assert model(**make_batch()).loss.isfinite()
            assert (len(recorder.passes), len(recorder.losses)) == (0, 0)


M2 = MachineInfo("Darwin", "arm64", apple_silicon=True, chip="Apple M2")


@pytest.fixture
def on_mps(tagger, tmp_path):
    """Tagger on the simulated device, and guards that watch it."""
    with nb.simulated_mps("8 GiB"):
        model = tagger.to("mps")
        with nb.Guards(folder=tmp_path / "kept").watch(model, "mps", M2, (2, 13, 0)) as guards:
            yield model, guards


@pytest.mark.real_computer  # It starts its own simulation.
def test_after_backward_finds_nan_on_mps(on_mps, make_batch, poison):
    model, guards = on_mps
    guards.check(make_batch(), 1)
    model(**nb.training.to_device(make_batch(), "mps")).loss.backward()
    numbers = torch.get_rng_state()
    guards.after_backward(model, 1)
    assert torch.equal(torch.get_rng_state(), numbers)
    poison(model, float("nan"))
    model(**nb.training.to_device(make_batch(), "mps")).loss.backward()
    with pytest.raises(NonFiniteError, match=r"the output of bert\.encoder\.layer\.0\.output\.dense"):
        guards.after_backward(model, 2)
    saved = load_file(guards.folder / "step_2.safetensors")
    assert torch.equal(saved["input_ids"], make_batch()["input_ids"])


@pytest.mark.real_computer  # It starts its own simulation.
@pytest.mark.parametrize("where", ["cpu", "mps"])
def test_check_rejects_invalid_batch_on_any_device(on_mps, where):
    _, guards = on_mps
    with pytest.raises(InvalidBatchError, match="32 of 32 labels are not between 0 and 2"):
        guards.check({"labels": torch.full((4, 8), 5, device=where)}, 1)
    with pytest.raises(InvalidBatchError, match="512 x 64 = 32,768 tokens"):
        guards.check({"input_ids": torch.zeros(512, 64, dtype=torch.long, device=where)}, 1)
