"""Comparison of training runs on the CPU and on a device."""

import json
import math

import pytest
import torch

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError, InvalidModelError
from openmed_nb.runbook.checks.loss_parity import EARLY_STEPS, LossParity

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.real_computer]

NAN = math.nan
LEVEL = [1.0] * EARLY_STEPS  # Losses of the first steps, where rounding changes none.
ONES = [1.0] * 3


def make_report(reference, rounded, candidate, dtype="float32"):
    """Return the report of three loss curves."""
    return LossParity("m", "mps", dtype, tuple(reference), tuple(rounded), tuple(candidate))


class TestFindings:
    """Findings for given loss curves."""

    @pytest.mark.parametrize(
        ("reference", "rounded", "candidate", "divergence_step"),
        [
            (ONES, ONES, ONES, None),
            (ONES, ONES, [1.0, 1.0 + 2**-22, 1.0], None),  # Eight times a float32's own rounding.
            (ONES, ONES, [1.0, 1.0 + 2**-18, 1.0], 2),
            (ONES, [1.0, 1.0, 1.001], [1.007, 1.007, 1.0], None),  # One early step tells little.
            (ONES, [1.0, 1.001, 1.0], [1.0, 1.0, 1.009], 3),
            ([*LEVEL, 1.0, 1.0], [*LEVEL, 1.001, 1.0], [*LEVEL, 1.0, 1.007], None),  # Explained drift stays explained.
            ([*LEVEL, 1.0, 1.0], [*LEVEL, 1.0, 1.001], [*LEVEL, 1.007, 1.007], 9),  # And is not explained before.
            ([*LEVEL, 1.0, 1.0], [*LEVEL, 1.001, 1.0], [*LEVEL, 1.0, 1.009], 10),
            (ONES, ONES, [1.0, NAN], 2),
            ([0.0], [0.0], [0.0], None),
        ],
    )
    def test_divergence_step_follows_tolerance(self, reference, rounded, candidate, divergence_step):
        report = make_report(reference, rounded, candidate)

        assert report.divergence_step == divergence_step
        assert list(report.tolerance) == sorted(report.tolerance)
        assert (report.status == "ok") == (divergence_step is None)

    @pytest.mark.parametrize(
        ("dtype", "candidate", "finite", "drift"),
        [
            ("bfloat16", (1.0, 1.0), "all losses are finite", "explained by rounding of bfloat16"),
            ("bfloat16", (1.0, 2.0), "all losses are finite", "exceeds rounding of bfloat16 from step 2"),
            ("float32", (1.0, NAN), "NaN or infinity in step 2", "exceeds rounding of float32 from step 2"),
        ],
    )
    def test_findings_of_loss_curves(self, dtype, candidate, finite, drift):
        report = make_report([1.0, 1.0], [1.0, 1.0], candidate, dtype)

        assert [finding.evidence for finding in report.findings] == [finite, drift]
        assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["status"] == report.status
        assert all(finding.remedy for finding in report.findings if finding.status == "failed")

    def test_table_selects_steps(self):
        losses = [1.0] * 60
        report = make_report(losses, losses, [*losses[:6], 2.0, *losses[7:]])

        assert [int(row[0]) for row in report.to_report().metrics[0].rows] == [1, 7, 8, 60]


class InexactLayer(torch.nn.Linear):
    """A layer whose result is multiplied by a factor on MPS."""

    factor = -1.0

    def forward(self, inputs):
        """Return the outputs of the layer."""
        outputs = super().forward(inputs)
        return self.factor * outputs if outputs.device.type == "mps" else outputs


class NanLayer(InexactLayer):
    """A layer whose result is NaN on MPS."""

    factor = NAN


class Transposed(torch.nn.Linear):
    """A layer whose weight is stored transposed."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight = torch.nn.Parameter(self.weight.detach().t().contiguous().t())


class Regression(torch.nn.Sequential):
    """Network of six layers with dropout that returns its mean squared error."""

    def __init__(self, layer=torch.nn.Linear, place=2):
        torch.manual_seed(0)
        kinds = [layer if number == place else torch.nn.Linear for number in range(5)]
        parts = [part for kind in kinds for part in (kind(16, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1))]
        super().__init__(*parts, torch.nn.Linear(16, 1))
        torch.nn.init.constant_(parts[3 * place].bias, 2.0)

    def forward(self, inputs, targets):
        """Return the loss."""
        return {"loss": torch.nn.functional.mse_loss(super().forward(inputs), targets)}


def make_batches():
    """Return four batches of inputs and targets."""
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(8, 16, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(4)]


def train(model, steps=8, **options):
    """Compare the training of a network."""
    return nb.runbook.loss_parity(model, make_batches(), steps=steps, **options)


@pytest.mark.usefixtures("clean")
class TestSimulatedDevice:
    """Planted errors on the simulated device."""

    @pytest.mark.parametrize(
        ("layer", "dtype", "defects", "status"),
        [
            (torch.nn.Linear, "float32", (), "ok"),
            (torch.nn.Linear, "bfloat16", (), "ok"),
            (InexactLayer, "float32", (), "failed"),
            (Transposed, "float32", "pytorch#118115", "failed"),  # Regression: the optimizer has no effect.
        ],
    )
    def test_incorrect_layer_exceeds_tolerance(self, layer, dtype, defects, status):
        with nb.simulated_mps(defects=defects):
            report = train(Regression(layer), 12, device="mps", dtype=dtype)

        assert report.status == status

    def test_silent_error_of_layer_norm_is_found(self):
        """Regression: pytorch#170837."""
        with nb.simulated_mps(defects="pytorch#170837"):
            report = nb.runbook.loss_parity("bundled_small", device="mps", steps=2)

        assert report.divergence_step == 1
        assert nb.verdict(report).recommendation == "compute on the CPU"

    def test_nan_loss_ends_the_curve(self):
        with nb.simulated_mps():
            report = train(Regression(NanLayer), device="mps")

        assert (report.steps, report.divergence_step) == (1, 1)
        assert report.to_dict()["candidate"] == [None]


class TestCpu:
    """Comparison of the CPU with itself."""

    def test_named_model_trains_on_synthetic_batches(self, keyword_model):
        report = nb.runbook.loss_parity(str(keyword_model), device="cpu", steps=9)

        assert (report.status, report.steps, report.model) == ("ok", 9, str(keyword_model))
        assert report.reference[8] < report.reference[0]  # Of the same batch.

    @pytest.mark.slow
    @pytest.mark.timeout(900)  # Alone on two cores it takes half of the usual limit.
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_long_training_stays_within_tolerance(self, dtype):
        assert nb.runbook.loss_parity(device="cpu", dtype=dtype).divergence_step is None

    @pytest.mark.parametrize(
        ("model", "inputs"),
        [
            (torch.nn.Sequential(torch.nn.Conv1d(4, 4, 3), torch.nn.BatchNorm1d(4)), torch.ones(3, 4, 6).cumsum(-1)),
            (torch.nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True), torch.ones(3, 5, 4)),
            (torch.nn.Linear(4, 1, dtype=torch.bfloat16), torch.ones(3, 4, dtype=torch.bfloat16)),
            (torch.nn.Linear(4, 1, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64)),
        ],
    )
    def test_layer_types_stay_within_tolerance(self, model, inputs):
        assert nb.runbook.loss_parity(model, [inputs], device="cpu", steps=2).divergence_step is None

    def test_loss_parity_does_not_change_global_state(self):
        model = Regression()
        batches = make_batches()
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        state = torch.get_rng_state()
        nb.runbook.loss_parity(model, batches, device="cpu", steps=3)

        torch.testing.assert_close(dict(model.state_dict()), weights, rtol=0, atol=0)
        torch.testing.assert_close(batches, make_batches(), rtol=0, atol=0)
        assert torch.equal(state, torch.get_rng_state())
        assert model.training
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_non_finite_loss_on_cpu_raises(self):
        """The random state is restored."""
        model = torch.nn.Linear(1, 1)
        state = torch.get_rng_state()
        with pytest.raises(InvalidModelError, match="not finite on the CPU in step 1"):
            nb.runbook.loss_parity(model, [torch.full((2, 1), NAN)], device="cpu", steps=3)
        assert torch.equal(state, torch.get_rng_state())

    @pytest.mark.parametrize(
        ("changes", "what"),
        [
            ({"batches": None}, "Batches are required to train Linear"),
            *(({"batches": batches}, "cannot be iterated repeatedly") for batches in (torch.ones(1, 1), iter([]))),
            ({"batches": []}, "yields no batches"),
            ({"revision": "x"}, "Linear does not accept revision"),
            ({"dtype": "float16"}, "Invalid value for dtype: 'float16'"),
            ({"steps": 0}, "Invalid value for steps: 0"),
            ({"model": torch.nn.Flatten(), "batches": [torch.ones(1, 1)]}, "Flatten has no trainable parameters"),
            ({"model": torch.nn.Linear(1, 1).requires_grad_(False)}, "Linear has no trainable parameters"),
            ({"model": 3}, "int is not a model"),
        ],
    )
    def test_loss_parity_rejects_invalid_arguments(self, changes, what):
        arguments = {"model": torch.nn.Linear(1, 1), "batches": [torch.ones(1, 1)], "device": "cpu"}
        with pytest.raises(ConfigurationError, match=what):
            nb.runbook.loss_parity(**{**arguments, **changes})
