"""One training on the CPU and on a device: what rounding explains, and what it does not."""

import json
import math

import pytest
import torch

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError, DeviceUnavailableError, InvalidModelError
from openmed_nb.runbook.checks.precision.rounding import Float64RoundingMode
from openmed_nb.runbook.checks.precision.trajectory import EARLY_STEPS, LossParity
from openmed_nb.session import SESSION

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.real_computer]

NAN = math.nan
LEVEL = [1.0] * EARLY_STEPS  # Losses of the first steps, where rounding changes none.


class TestJudgement:
    """What follows from curves alone."""

    @pytest.mark.parametrize(
        ("reference", "rounded", "candidate", "parted"),
        [
            ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], None),
            ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0 + 2**-22, 1.0], None),  # Eight times a float32's own rounding.
            ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0 + 2**-18, 1.0], 2),
            ([1.0, 1.0, 1.0], [1.0, 1.0, 1.001], [1.007, 1.007, 1.0], None),  # One early step tells little.
            ([1.0, 1.0, 1.0], [1.0, 1.001, 1.0], [1.0, 1.0, 1.009], 3),
            (
                [*LEVEL, 1.0, 1.0],
                [*LEVEL, 1.001, 1.0],
                [*LEVEL, 1.0, 1.007],
                None,
            ),  # What was explained stays explained.
            ([*LEVEL, 1.0, 1.0], [*LEVEL, 1.0, 1.001], [*LEVEL, 1.007, 1.007], 9),  # And is not before.
            ([*LEVEL, 1.0, 1.0], [*LEVEL, 1.001, 1.0], [*LEVEL, 1.0, 1.009], 10),
            ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, NAN], 2),
            ([0.0], [0.0], [0.0], None),
        ],
    )
    def test_first_step_beyond_the_tolerance(self, reference, rounded, candidate, parted):
        """A drift is explained up to eight times the largest so far of the CPU with other roundings, of eight steps at least."""
        found = LossParity("m", "mps", "float32", tuple(reference), tuple(rounded), tuple(candidate))

        assert found.divergence_step == parted
        assert list(found.tolerance) == sorted(found.tolerance)
        assert (found.status == "ok") == (parted is None)

    @pytest.mark.parametrize(
        ("dtype", "candidate", "finite", "drift"),
        [
            ("float32", (1.0, 1.0), "all losses are finite", "explained by rounding of float32"),
            ("bfloat16", (1.0, 1.0), "all losses are finite", "explained by rounding of bfloat16"),
            ("bfloat16", (1.0, 2.0), "all losses are finite", "exceeds rounding of bfloat16 from step 2"),
            ("float32", (1.0, NAN), "NaN or infinity in step 2", "exceeds rounding of float32 from step 2"),
        ],
    )
    def test_findings(self, dtype, candidate, finite, drift):
        """The findings say whether the losses are numbers, and whether rounding of that type explains the drift."""
        found = LossParity("m", "mps", dtype, (1.0, 1.0), (1.0, 1.0), candidate)
        stored = json.dumps(found.to_dict(), allow_nan=False)

        assert [one.evidence for one in found.findings] == [finite, drift]
        assert json.loads(stored)["status"] == found.status
        assert all(one.remedy for one in found.findings if one.status == "failed")

    def test_table_shows_some_steps(self):
        """Of many steps some are in the table, the more apart the later they are, the last, and the one in which two part."""
        losses = (1.0,) * 60
        found = LossParity("m", "mps", "float32", losses, losses, (*losses[:6], 2.0, *losses[7:]))

        assert [int(row[0]) for row in found.to_report().metrics[0].rows] == [1, 2, 5, 7, 10, 20, 50, 60]

    def test_text_has_no_figure_that_differs_from_run_to_run(self):
        """Losses stand in the HTML and the JSON, and not in the text."""
        found = LossParity("m", "mps", "float32", (1.25, 1.125), (1.25, 1.125), (1.25, 1.125))

        assert "1.25" not in str(found)
        assert "1.125" in found._repr_html_()


class WrongForwards(torch.nn.Linear):
    """A layer that a device computes a little wrongly."""

    def forward(self, inputs):
        """Return what the layer computes."""
        outputs = super().forward(inputs)
        return outputs * 1.01 if outputs.device.type == "mps" else outputs


class Wide(torch.nn.Linear):
    """A layer whose weight is stored transposed."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight = torch.nn.Parameter(self.weight.detach().t().contiguous().t())


def network(layer, place=2):
    """Return five layers with dropout between them, of which one is of another kind, and one for the answer."""
    torch.manual_seed(0)
    kinds = [layer if number == place else torch.nn.Linear for number in range(5)]
    parts = [one for kind in kinds for one in (kind(16, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1))]
    model = torch.nn.Sequential(*parts, torch.nn.Linear(16, 1))
    torch.nn.init.constant_(parts[3 * place].bias, 2.0)
    return model


def batches():
    """Return four batches of inputs and targets."""
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(8, 16, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(4)]


def squares(model, batch):
    """Return the mean of the squares of the errors."""
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def plain_adamw(weights):
    """Return AdamW in its loop over tensors."""
    return torch.optim.AdamW(weights, lr=1e-2, foreach=False, fused=False)


@pytest.mark.usefixtures("clean")
class TestSimulatedDevice:
    """Errors that are planted into one place of a simulated device."""

    @pytest.mark.parametrize(
        ("layer", "dtype", "status"),
        [
            (torch.nn.Linear, "float32", "ok"),
            (torch.nn.Linear, "bfloat16", "ok"),
            (WrongForwards, "float32", "failed"),
            (WrongForwards, "bfloat16", "failed"),
        ],
    )
    def test_wrong_layer_is_no_rounding(self, layer, dtype, status):
        """A right device stays within its tolerance; one that computes a layer wrongly does not, also in bfloat16."""
        with nb.simulated_mps():
            found = nb.runbook.loss_parity(
                network(layer), batches(), loss=squares, optimizer=plain_adamw, device="mps", dtype=dtype, steps=12
            )

        assert found.status == status
        assert found.simulated
        assert "SIMULATED" in str(found)

    def test_step_of_the_optimizer_that_writes_nothing(self):
        """A device whose optimizer leaves a transposed weight as it is (pytorch#118115) does not learn as the CPU does."""
        with nb.simulated_mps(defects="pytorch#118115"):
            found = nb.runbook.loss_parity(
                network(Wide), batches(), loss=squares, optimizer=plain_adamw, device="mps", steps=8
            )

        assert found.status == "failed"

    def test_silent_error_of_the_bundled_model(self):
        """A norm that gives a row other numbers than alone (pytorch#170837) is more than rounding, and speaks for the CPU."""
        with nb.simulated_mps(defects="pytorch#170837"):
            found = nb.runbook.loss_parity("bundled_small", device="mps", steps=2)

        assert found.divergence_step == 1
        assert nb.verdict(found).recommendation == "compute on the CPU"

    def test_numbers_that_are_none(self):
        """A loss on the device that is NaN ends the curve; JSON has null for it."""

        def loss(model, batch):
            found = squares(model, batch)
            return found * NAN if found.device.type == "mps" and found < 1e9 else found

        with nb.simulated_mps():
            found = nb.runbook.loss_parity(network(torch.nn.Linear), batches(), loss=loss, device="mps", steps=8)

        assert (found.steps, found.divergence_step) == (1, 1)
        assert found.to_dict()["candidate"] == [None]

    def test_device_that_fails(self):
        """An error on the device alone is one of the device."""

        def loss(model, batch):
            if batch[0].device.type == "mps":
                raise NotImplementedError("not on this device")
            return squares(model, batch)

        with nb.simulated_mps(), pytest.raises(DeviceUnavailableError, match="not on this device"):
            nb.runbook.loss_parity(network(torch.nn.Linear), batches(), loss=loss, device="mps", steps=8)


class TestOnTheCpu:
    """The CPU with itself."""

    def test_bundled_model_by_name(self):
        """Without anything else the bundled model trains on synthetic rows, and its loss falls."""
        found = nb.runbook.loss_parity("bundled_small", device="cpu", steps=10)

        assert (found.status, found.steps, found.model) == ("ok", 10, "bundled_small")
        assert found.reference[8] < found.reference[0]  # Of the same batch.

    @pytest.mark.slow
    @pytest.mark.timeout(900)  # Alone on two cores it takes half of the usual limit.
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_long_training(self, dtype):
        """Two hundred steps of the bundled model stay within the tolerance with another number of threads."""
        assert nb.runbook.loss_parity(device="cpu", dtype=dtype).divergence_step is None

    MODELS = (
        (
            lambda: torch.nn.Sequential(torch.nn.Conv1d(4, 4, 3), torch.nn.BatchNorm1d(4)),
            torch.ones(3, 4, 6).cumsum(-1),
        ),
        (lambda: torch.nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True), torch.ones(3, 5, 4)),
        (lambda: torch.nn.Embedding(9, 4, sparse=True), torch.arange(8)),
        (lambda: torch.nn.TransformerEncoderLayer(8, 2, 8), torch.rand(3, 5, 8)),
        (lambda: torch.nn.Linear(4, 1, dtype=torch.bfloat16), torch.ones(3, 4, dtype=torch.bfloat16)),
        (lambda: torch.nn.Linear(4, 1, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64)),
    )

    @pytest.mark.parametrize("place", range(len(MODELS)))
    def test_models_of_all_kinds(self, place):
        """Convolutions with their norm, recurrent layers, sparse gradients, attention and other types are compared."""
        make, inputs = self.MODELS[place]
        options = {"optimizer": lambda weights: torch.optim.SGD(weights, lr=0.1)}

        assert nb.runbook.loss_parity(make(), [inputs], device="cpu", steps=3, **options).divergence_step is None

    def test_nothing_of_the_person_changes(self):
        """The model, its gradients and its mode, batches, random numbers and the number of threads stay as they are."""
        model, data = network(torch.nn.Linear), batches()
        before = [one.clone() for one in model.state_dict().values()]
        kept, state, threads = [one[0].clone() for one in data], torch.get_rng_state(), torch.get_num_threads()

        nb.runbook.loss_parity(model, data, loss=squares, device="cpu", steps=3)

        assert all(map(torch.equal, before, model.state_dict().values()))
        assert all(map(torch.equal, kept, (one[0] for one in data)))
        assert torch.equal(state, torch.get_rng_state())
        assert (torch.get_num_threads(), model.training) == (threads, True)
        assert all(one.grad is None for one in model.parameters())

    def test_interrupt_leaves_nothing_behind(self):
        """An interrupt between two steps ends the call; threads and random numbers are as before."""

        def stop(activity):
            if activity is not None and activity.operation == "Training on both" and activity.completed == 2:
                raise KeyboardInterrupt

        state, end = torch.get_rng_state(), SESSION.subscribe(stop)
        try:
            with pytest.raises(KeyboardInterrupt):
                nb.runbook.loss_parity(network(torch.nn.Linear), batches(), loss=squares, device="cpu", steps=9)
        finally:
            end()

        assert torch.get_num_threads() == 1
        assert torch.equal(state, torch.get_rng_state())

    def test_loss_that_is_no_number_on_the_cpu(self):
        """A training that fails on the CPU cannot judge a device."""
        with pytest.raises(InvalidModelError, match="not finite on the CPU in step 1"):
            nb.runbook.loss_parity(torch.nn.Linear(1, 1), [torch.full((2, 1), NAN)], device="cpu", steps=3)

    @pytest.mark.parametrize(
        ("model", "data", "options", "what"),
        [
            (torch.nn.Linear(1, 1), None, {}, "Batches are required to train Linear"),
            (torch.nn.Linear(1, 1), torch.ones(1, 1), {}, r"one batch for Linear, not a series.*Pass \[batch\]"),
            (torch.nn.Linear(1, 1), iter([torch.ones(1, 1)]), {}, "does not give Linear batches again"),
            (torch.nn.Linear(1, 1), [], {}, "gives no batch"),
            (torch.nn.Linear(1, 1), [torch.ones(1, 1)], {"revision": "x"}, "Linear takes no revision"),
            (torch.nn.Linear(1, 1), [torch.ones(1, 1)], {"dtype": "float16"}, "dtype cannot be 'float16'"),
            (torch.nn.Linear(1, 1), [torch.ones(1, 1)], {"steps": 0}, "steps cannot be 0"),
            (torch.nn.Linear(1, 1), [torch.ones(1, 1)], {"loss": 3}, "loss cannot be 3"),
            (torch.nn.Linear(1, 1), [torch.ones(1, 1)], {"loss": lambda *_: 1.0}, "Linear returns no loss"),
            (torch.nn.Linear(1, 1), [torch.ones(1, 1)], {"optimizer": lambda _: 3}, "optimizer cannot be of type int"),
            (
                torch.nn.Linear(1, 1).requires_grad_(False),
                [torch.ones(1, 1)],
                {},
                "Linear has no trainable parameters",
            ),
            (3, [torch.ones(1, 1)], {}, "int is not a model"),
        ],
    )
    def test_what_cannot_be_compared(self, model, data, options, what):
        """What cannot be trained is refused with one thing to do."""
        with pytest.raises(ConfigurationError, match=what):
            nb.runbook.loss_parity(model, data, device="cpu", **options)


class TestOtherRoundings:
    """The mode in which the CPU rounds otherwise."""

    def test_results_differ_by_rounding_alone(self):
        """Products of many numbers are those of the CPU but for rounding, and of its type."""
        left, right = torch.rand(64, 4096), torch.rand(4096, 64)
        with Float64RoundingMode():
            found = left @ right

        assert found.dtype == torch.float32
        assert 0 < (found - left @ right).abs().max() < 1e-3
        assert torch.equal(found, (left.double() @ right.double()).float())

    def test_what_is_written_in_place_is_written(self):
        """Operators that write into a tensor, or into a part of it, or into one that is passed, do so."""
        written, out = torch.zeros(4), torch.zeros(4)
        with Float64RoundingMode():
            written[1:3].add_(torch.ones(2))
            returned = written.mul_(2)
            torch.add(written, 1, out=out)

        assert returned is written
        assert written.tolist() == [0.0, 2.0, 2.0, 0.0]
        assert out.tolist() == [1.0, 3.0, 3.0, 1.0]

    def test_random_numbers_are_the_same(self):
        """What is drawn is what is drawn without the mode."""
        torch.manual_seed(5)
        expected = torch.rand(3), torch.nn.functional.dropout(torch.ones(8), 0.5)
        torch.manual_seed(5)
        with Float64RoundingMode():
            found = torch.rand(3), torch.nn.functional.dropout(torch.ones(8), 0.5)

        assert all(map(torch.equal, expected, found))
