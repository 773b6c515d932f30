"""The guards of a training: what each stops or warns of, in a plain loop and on the simulated MPS, and that nothing of them stays behind."""

import contextlib
import copy
import gc
import warnings
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import openmed_nb as nb
from openmed_nb.devices.machine import MachineInfo
from openmed_nb.errors import ConfigurationError, InvalidBatchError, NonFiniteError, OpenMedWarning

NAMES = nb.Guards().on
M3 = MachineInfo("Darwin", "arm64", apple_silicon=True, chip="Apple M3")


def hooks_of(model):
    """Return what is registered on every layer of a model."""
    names = [name for name in vars(torch.nn.Module()) if "hooks" in name]
    return {name: {hook: dict(getattr(layer, hook)) for hook in names} for name, layer in model.named_modules()}


def lstm(layers=2, dropout=0.2):
    """Return a tagger with an LSTM inside."""
    return torch.nn.ModuleDict({"encoder": torch.nn.LSTM(4, 4, num_layers=layers, dropout=dropout)})


class Around(torch.nn.Module):
    """A module around a model of transformers, with a loss of its own, as in Lightning."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **batch):
        """Return what the model returns."""
        return self.model(**batch)


def train(model, batches, guards):
    """Train a model over batches in a plain loop, guarded."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches, 1):
        guards.check(batch, step)
        model(**batch).loss.backward()
        guards.after_backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def poison(model):
    """Let the first layer's output be infinite, and return what ends it."""
    layer = model.bert.encoder.layer[0].output.dense
    return layer.register_forward_hook(lambda _layer, _args, output: output * float("inf"))


class TestNames:
    """Each guard has a name."""

    @pytest.mark.parametrize("model", ["model", None, torch.nn.Linear])
    def test_watch_rejects_other_values(self, model):
        """The current model stays watched."""
        watched = torch.nn.Linear(2, 2)
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

    def test_invalid_arguments_are_rejected(self, refusal):
        for told, said in (
            ({"disable": "label"}, "'label' is not the name of a guard. Did you mean 'labels'?"),
            ({"disable": ("nonfinit",)}, "Did you mean 'nonfinite'?"),
            ({"disable": ("xyz",)}, "'xyz' is not the name of a guard. Known are labels, token_ids,"),
            ({"disable": True}, "'True' is not the name of a guard. Known are labels,"),
            ({"num_labels": "3"}, "The limit num_labels cannot be '3'. Pass a whole number from 1."),
            ({"num_labels": -1}, "The limit num_labels cannot be -1. Pass a whole number from 1."),
            ({"num_labels": True}, "The limit num_labels cannot be True."),
            ({"pad_token_id": -1}, "The limit pad_token_id cannot be -1. Pass a whole number from 0."),
            ({"ignore_index": "x"}, "The limit ignore_index cannot be 'x'. Pass an integer, such as -100."),
            ({"num_label": 3}, "'num_label' is not a limit of Guards. Did you mean 'num_labels'?"),
        ):
            assert said in str(refusal(partial(nb.Guards, **told))), told

    def test_minimum_limits_are_accepted(self):
        nb.Guards(
            num_labels=np.int64(1),
            vocab_size=1,
            max_position_embeddings=None,
            position_offset=0,
            pad_token_id=0,
            ignore_index=-1,
        )


class TestBatches:
    """Batches are checked before they are moved."""

    def test_guards_do_not_change_training(self, guards, tagger, batch_of):
        unguarded, batches = copy.deepcopy(tagger), [batch_of(seed=seed) for seed in range(3)]
        torch.manual_seed(1)
        train(unguarded, batches, nb.Guards(disable=NAMES))
        torch.manual_seed(1)
        train(tagger, batches, guards.watch(tagger, "cpu"))
        assert all(map(torch.equal, tagger.parameters(), unguarded.parameters()))

    def test_checked_numbers_batches_across_loops(self, guards, tagger, batch_of):
        guards.watch(tagger, "cpu")
        assert len(list(guards.checked([batch_of(), batch_of()]))) == 2
        with pytest.raises(InvalidBatchError, match=r"^Step 4: "):
            list(guards.checked([batch_of(), batch_of(labels=torch.full((4, 8), 3))]))


class TestNonFinite:
    """NaN and infinity stop the step."""

    def test_error_names_layer_and_saves_batch(self, guards, tagger, batch_of, tmp_path):
        """The error does not contain values of the batch."""
        guards.watch(tagger, "cpu")
        train(tagger, [batch_of()], guards)
        poison(tagger)
        batch = batch_of(seed=1)
        before = copy.deepcopy(tagger.state_dict())
        with pytest.raises(NonFiniteError) as stopped:
            train(tagger, [batch], guards)
        file = tmp_path / "kept" / "step_1.safetensors"
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
        model = torch.nn.Linear(4, 2)
        guards.watch(model, "cpu")
        loss = model(torch.ones(1, 4)).sum() * float("nan")
        with pytest.raises(NonFiniteError, match=r"the loss is nan; .* check the code after the model"):
            guards.check_loss(loss, 3, {"inputs": torch.ones(1, 4)})
        loss = model(torch.ones(1, 4)).sum() * float("inf")
        loss.backward()
        with pytest.raises(NonFiniteError, match="a gradient is NaN or infinite"):
            guards.after_backward(model, 3)

    def test_check_loss_works_without_watched_model(self, guards, tmp_path):
        for loss in (1.0, torch.tensor(0.0), torch.tensor([2.5])):
            assert guards.check_loss(loss, 1) is None
        with pytest.raises(NonFiniteError, match="no pass of a watched model was recorded"):
            guards.check_loss(float("inf"), 5, {"labels": torch.ones(2)})
        assert (tmp_path / "kept" / "step_5.safetensors").is_file()
        with pytest.raises(NonFiniteError, match="No batch is available"):
            guards.check_loss(float("-inf"), 6)

    def test_accumulated_step_saves_failing_batch(self, guards, tagger, batch_of, tmp_path):
        guards.watch(tagger, "cpu")
        batches = [batch_of(seed=seed) for seed in range(4)]

        def spoil_the_third(_model, _args, given, output):
            spoilt = torch.equal(given["input_ids"], batches[2]["input_ids"])
            return type(output)(loss=output.loss * float("nan"), logits=output.logits) if spoilt else None

        tagger.register_forward_hook(spoil_the_third, with_kwargs=True)
        guards.watch(tagger, "cpu")
        for batch in batches:
            tagger(**batch).loss.backward()
        with pytest.raises(NonFiniteError, match="it first appears in the loss"):
            guards.after_backward(tagger, 9)
        assert torch.equal(load_file(tmp_path / "kept" / "step_9.safetensors")["input_ids"], batches[2]["input_ids"])

    @pytest.mark.parametrize("called", ["whole", "inside"])
    def test_model_inside_another_module_is_watched(self, guards, tagger, batch_of, called, tmp_path):
        around = Around(tagger)
        guards.watch(around, "cpu")
        with pytest.raises(InvalidBatchError, match="labels is not between 0 and 2"):
            guards.check(batch_of(labels=torch.tensor([[7]])))
        poison(tagger)
        (around if called == "whole" else tagger)(**batch_of()).loss.backward()
        with pytest.raises(NonFiniteError, match=r"the output of model\.bert\.encoder\.layer\.0"):
            guards.after_backward(step=1)
        assert load_file(tmp_path / "kept" / "step_1.safetensors").keys() == batch_of().keys()
        with torch.no_grad(), pytest.warns(OpenMedWarning, match="its results are random") as caught:
            tagger(**batch_of())
        assert [one.filename for one in caught] == [__file__]

    @pytest.mark.parametrize("checked", [True, False])
    def test_step_number_defaults_to_last_batch(self, guards, tagger, batch_of, checked):
        batches = [batch_of(seed=seed) for seed in range(3)]

        def train():
            for number, batch in enumerate(guards.checked(batches) if checked else batches):
                if number == 2:
                    poison(tagger)
                tagger(**batch).loss.backward()
                guards.after_backward()

        guards.watch(tagger, "cpu")
        with pytest.raises(NonFiniteError, match=r"^Step 3: the loss is NaN or infinite"):
            train()

    def test_explicit_step_number_continues(self, guards, batch_of):
        guards.check(batch_of(), 7)
        with pytest.raises(NonFiniteError, match=r"^Step 7: "):
            guards.check_loss(float("nan"))
        guards.check(batch_of())
        with pytest.raises(NonFiniteError, match=r"^Step 8: "):
            guards.check_loss(float("nan"))

    def test_scaler_may_skip_limited_steps(self, guards, tagger, batch_of):
        guards.watch(tagger, "cpu", scaled=True)
        hook = tagger.classifier.weight.register_hook(lambda gradient: gradient * float("inf"))
        for step in range(20):  # The scaler skips the optimizer's step.
            tagger(**batch_of()).loss.backward()
            guards.after_backward(tagger, step)
        with pytest.raises(NonFiniteError, match="a gradient is NaN"):
            train(tagger, [batch_of()], guards)
        hook.remove()
        tagger.zero_grad()
        poison(tagger)
        guards.watch(tagger, "cpu", scaled=True)
        with pytest.raises(NonFiniteError, match="the loss is NaN"):
            train(tagger, [batch_of()], guards)

    def test_disabled_guard_ignores_nan(self, tagger, batch_of):
        poison(tagger)
        with nb.Guards(disable=("nonfinite",)).watch(tagger, "cpu") as guards:
            train(tagger, [batch_of()], guards)
            guards.check_loss(float("nan"), 1)
        assert any(weight.isnan().any() for weight in tagger.parameters())


class TestDropout:
    """What is warned of."""

    def test_pass_without_gradients_warns_once(self, guards, tagger, batch_of):
        guards.watch(tagger, "cpu")
        tagger(**batch_of())
        with torch.no_grad():
            tagger.eval()(**batch_of())
            with pytest.warns(OpenMedWarning, match="its results are random"):
                tagger.train()(**batch_of())
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                tagger(**batch_of())

    @pytest.mark.parametrize("device", ["mps:0", "cpu"])
    @pytest.mark.parametrize(("attention", "dropout"), [("sdpa", 0.1), ("sdpa", 0.0), ("eager", 0.1)])
    def test_warning_mentions_attention_error_on_mps(self, tagger, batch_of, device, attention, dropout):
        raises = device.startswith("mps") and (attention, dropout) == ("sdpa", 0.1)
        tagger.config._attn_implementation, tagger.config.attention_probs_dropout_prob = attention, dropout
        with nb.Guards().watch(tagger, device, M3), torch.no_grad(), pytest.warns(OpenMedWarning) as warned:
            tagger(**batch_of())
        (said,) = (str(one.message) for one in warned)
        assert ("scaled_dot_product_attention for MPS does not support dropout" in said) is raises
        assert ("attn_implementation='eager'" in said) is raises
        assert "results are random" in said
        assert "model.eval()" in said

    @pytest.mark.parametrize(("in_layers", "in_attention"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.1)])
    @pytest.mark.parametrize("on", [True, False])
    def test_dropout_in_layers_or_attention_warns(self, tagger, batch_of, in_layers, in_attention, on):
        for layer in tagger.modules():
            if isinstance(layer, torch.nn.Dropout):
                layer.p = in_layers
        tagger.config.attention_probs_dropout_prob = in_attention
        guards = nb.Guards(disable=() if on else ("dropout_without_gradients",))
        with guards.watch(tagger, "cpu"), torch.no_grad(), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", OpenMedWarning)
            tagger(**batch_of())
        assert bool(warned) == (on and in_layers + in_attention > 0)

    @pytest.mark.parametrize("layer", [torch.nn.Dropout1d(0.1), torch.nn.Dropout(0.0)])
    def test_plain_module_with_dropout_warns(self, layer):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), layer)
        expected = pytest.warns(OpenMedWarning, match="are random") if layer.p else contextlib.nullcontext()
        with nb.Guards().watch(model, "cpu"), torch.no_grad(), expected:
            model(torch.ones(1, 2))

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize(
        ("model", "device", "release", "found"),
        [
            (lstm(), "mps", (2, 13, 0), "encoder"),
            (lstm()["encoder"], "mps", (2, 13, 0), "the model"),
            (lstm(), "mps", (2, 14, 0), None),
            (lstm(), "cpu", (2, 13, 0), None),
            (lstm(2, 0.0), "mps", (2, 13, 0), None),
            (torch.nn.GRU(4, 4, num_layers=2, dropout=0.2), "mps", (2, 13, 0), None),
        ],
    )
    def test_lstm_with_dropout_warns_on_mps(self, model, device, release, found):
        nb.Guards(disable=("lstm_dropout",)).watch(model, device, M3, release).unwatch()
        with pytest.warns(OpenMedWarning) if found else contextlib.nullcontext() as warned:
            nb.Guards().watch(model, device, M3, release).unwatch()
        for one in warned or ():
            assert f"({found}) will be wrong" in str(one.message)
            assert "pytorch#190056" in str(one.message)
            assert "torch 2.14" in str(one.message)


class TestUnwatch:
    """Nothing stays behind."""

    def test_unwatch_restores_hooks_and_loader(self, tagger, batch_of):
        tagger.register_forward_hook(lambda *_: None)
        before = hooks_of(tagger)
        loader = DataLoader([batch_of()], batch_size=None)
        own = loader.collate_fn
        guards = nb.Guards()
        for _ in range(2):  # The second watch lets go of the first.
            guards.watch(tagger, "cpu")
            assert guards.watch_loader(loader)
            assert hooks_of(tagger) != before
            assert loader.collate_fn is not own
        tagger(**batch_of())
        with torch.no_grad(), pytest.warns(OpenMedWarning):  # The hook that warned is not missed.
            tagger(**batch_of())
        guards.unwatch()
        guards.unwatch()
        assert hooks_of(tagger) == before
        assert loader.collate_fn is own

    def test_batch_is_released_after_step(self, guards, tagger, batch_of):
        def trained():
            """Train on a batch, and return a reference to its memory that does not hold it."""
            ids = np.arange(5, 13)
            tagger(**batch_of(rows=1, input_ids=torch.from_numpy(ids)[None])).loss.backward()
            return weakref.ref(ids)

        guards.watch(tagger, "cpu")
        held = trained()
        assert held() is not None
        guards.after_backward(tagger, 1)
        assert held() is None
        held = trained()
        guards.clear()
        assert held() is None

    @pytest.mark.parametrize("failed", [True, False])
    def test_guards_do_not_keep_model_alive(self, tiny, batch_of, failed):
        guards, model = nb.Guards(), tiny.random_bert().train()
        gone = weakref.ref(model)
        guards.watch(model, "cpu")
        model(**batch_of()).loss.backward()
        if not failed:
            guards.unwatch()
        del model
        gc.collect()
        assert gone() is None
        guards.after_backward()
        guards.unwatch()

    def test_copies_of_model_are_not_watched(self, guards, tagger, batch_of, tmp_path):
        guards.watch(tagger, "cpu")
        tagger(**batch_of())
        torch.save(tagger, tmp_path / "model.pt")
        saved = torch.load(tmp_path / "model.pt", weights_only=False)
        for model in (copy.deepcopy(tagger), saved):
            (recorder,) = (hook.__self__ for hook in model._forward_hooks.values())
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("error")
                model(**batch_of())
            assert model(**batch_of()).loss.isfinite()
            assert (len(recorder.passes), len(recorder.losses)) == (0, 0)


M2 = MachineInfo("Darwin", "arm64", apple_silicon=True, chip="Apple M2")


@pytest.fixture
def on_mps(tagger, tmp_path):
    """The tagger on the simulated device, and guards that watch it."""
    with nb.simulated_mps("8 GiB"):
        model = tagger.to("mps")
        with nb.Guards(folder=tmp_path / "kept").watch(model, "mps", M2, (2, 13, 0)) as guards:
            yield model, guards


def moved(batch):
    """Return a batch on the device."""
    return {name: values.to("mps") for name, values in batch.items()}


@pytest.mark.real_computer  # It begins its own simulation.
def test_after_backward_finds_nan_on_mps(on_mps, batch_of, tmp_path):
    model, guards = on_mps
    guards.check(batch_of(), 1)
    model(**moved(batch_of())).loss.backward()
    numbers = torch.get_rng_state()
    guards.after_backward(model, 1)
    assert torch.equal(torch.get_rng_state(), numbers)
    model.bert.encoder.layer[0].output.dense.register_forward_hook(lambda _l, _a, output: output * float("nan"))
    model(**moved(batch_of())).loss.backward()
    with pytest.raises(NonFiniteError, match=r"the output of bert\.encoder\.layer\.0\.output\.dense"):
        guards.after_backward(model, 2)
    saved = load_file(tmp_path / "kept" / "step_2.safetensors")
    assert torch.equal(saved["input_ids"], batch_of()["input_ids"])


@pytest.mark.real_computer  # It begins its own simulation.
@pytest.mark.parametrize("where", ["cpu", "mps"])
def test_check_rejects_invalid_batch_on_any_device(on_mps, batch_of, where):
    _, guards = on_mps
    with pytest.raises(InvalidBatchError, match="32 of 32 labels are not between 0 and 2"):
        guards.check({"labels": batch_of(labels=torch.full((4, 8), 5))["labels"].to(where)}, 1)
    with pytest.raises(InvalidBatchError, match="512 x 64 = 32,768 tokens"):
        guards.check({"input_ids": torch.zeros(512, 64, dtype=torch.long, device=where)}, 1)
