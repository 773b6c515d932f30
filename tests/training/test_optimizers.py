"""AdamW runs fused if torch supports it, and explicit options are not changed."""

import pytest
import torch

import openmed_nb as nb
from openmed_nb.devices.backend import parse_release
from openmed_nb.devices.registry import get_device
from openmed_nb.errors import ConfigurationError
from openmed_nb.training import adamw
from openmed_nb.training.steps import supports_fused


@pytest.mark.parametrize(
    ("tensors", "release", "fused"),
    [
        ({("mps", "float32")}, (2, 13), True),
        ({("mps", "bfloat16"), ("mps", "float32")}, (2, 13), True),
        ({("mps", "float32")}, (2, 12, 1), False),
        ({("mps", "complex64")}, (2, 13), False),
        ({("cuda", "float64")}, (2, 6), True),
        ({("cpu", "float32"), ("cuda", "float32")}, (2, 6), True),
        ({("cpu", "float32"), ("xla", "float32")}, (2, 13), False),
        (set(), (2, 13), False),
    ],
)
def test_supports_fused_depends_on_devices_types_and_release(tensors, release, fused):
    assert supports_fused(tensors, release) == fused


def make_parameters():
    """Return the parameters of a small model, with gradients."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    model(torch.ones(2, 5)).square().sum().backward()
    return list(model.parameters())


def make_forms(tensors):
    """Return parameters in all forms that torch accepts."""
    weight, bias = tensors
    return [
        [weight, bias],
        [{"params": [weight], "lr": 0.5}, {"params": bias, "weight_decay": 0.0}],
        [("weight", weight), ("bias", bias)],
        [{"params": [("weight", weight), ("bias", bias)]}],
        iter([weight, bias]),
        [{"params": iter([weight])}, {"params": iter([bias])}],
    ]


@pytest.mark.parametrize("form", range(6))
def test_adamw_accepts_all_parameter_forms(form):
    tensors = make_parameters()
    before = tensors[0].detach().clone()
    parameters = make_forms(tensors)[form]
    optimizer = adamw(parameters, lr=0.1)
    optimizer.step()

    assert all(group["fused"] for group in optimizer.param_groups)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2
    assert not torch.equal(before, tensors[0])


@pytest.mark.parametrize(
    ("parameters", "options"),
    [
        *((parameters, {}) for parameters in (5, None, "weights", torch.ones(3), [3], [{"lr": 1}], [("a",)], [])),
        (make_parameters(), {"lr": -1}),
        (make_parameters(), {"momentum": 0.9}),
    ],
)
def test_adamw_reports_what_torch_rejects(parameters, options):
    with pytest.raises(ConfigurationError, match=r"^torch\.optim\.AdamW rejects its arguments: ") as caught:
        adamw(parameters, **options)
    assert caught.value.remedy.startswith("Pass model.parameters(), ")
    assert caught.value.__context__ is None


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": False}, {"differentiable": True}])
def test_adamw_keeps_selected_implementation(options):
    optimizer = adamw(make_parameters(), lr=0.1, amsgrad=True, **options)

    assert not optimizer.defaults["fused"]
    assert optimizer.defaults["amsgrad"]
    assert {name: optimizer.defaults[name] for name in options} == options


@pytest.mark.real_computer  # It starts its own simulation.
def test_adamw_is_fused_on_simulated_mps_if_it_obeys_a_scaler():
    with nb.simulated_mps():
        model = torch.nn.Linear(5, 3).to("mps")
        before = model.weight.detach().clone()
        model(torch.ones(2, 5, device="mps")).square().sum().backward()
        optimizer = adamw(model.parameters(), lr=0.1)
        optimizer.step()

        ignores_scaler = get_device("mps").fused_step_ignores_found_inf(parse_release(torch.__version__))
        assert bool(optimizer.defaults["fused"]) == (not ignores_scaler)
        assert not torch.equal(before, model.weight)
