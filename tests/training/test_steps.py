"""Precision, AdamW and accumulated gradients, alone and in one training loop."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import openmed_nb as nb
from helpers import tiny_models as tiny
from openmed_nb.devices.backend import parse_release
from openmed_nb.devices.machine import MachineInfo
from openmed_nb.devices.registry import get_device
from openmed_nb.errors import ConfigurationError
from openmed_nb.training import GradientAccumulation, adamw
from openmed_nb.training.steps import count_labels, select_precision, supports_fused

M1 = MachineInfo("Darwin", "arm64", apple_silicon=True, chip="Apple M1 Max", macos_version=(15, 0))
M3 = replace(M1, chip="Apple M3 Pro")
UNKNOWN = MachineInfo("Darwin", "arm64", apple_silicon=True)
MACOS_27 = replace(M1, chip="Apple M5", macos_version=(27, 0))
LINUX = MachineInfo("Linux", "x86_64")
T27 = (2, 7, 1)
T28 = (2, 8)
T213 = (2, 13, 0)

CHOICES = [
    # (device, torch, machine, requested, capability) -> type, scaler, fragment of a note
    (("mps", T213, M3, None, None), "float32", False, ""),
    (("mps", T213, M3, "bf16", None), "bfloat16", False, ""),
    (("mps", T213, M1, "bf16", None), "bfloat16", False, "without a speedup"),
    (("mps", T213, UNKNOWN, "bf16", None), "bfloat16", False, "The chip is unknown"),
    (("mps", T28, M3, "fp16", None), "float16", True, "184286"),
    (("mps", (2, 12, 1), M1, "fp16", None), "float16", True, "186360"),
    (("mps", T213, M1, "fp16", None), "float16", True, ""),
    (("mps", T213, MACOS_27, "fp16", None), "float16", True, ""),
    (("cuda:1", T213, LINUX, "bf16", (9, 0)), "bfloat16", False, ""),
    (("cuda", T213, LINUX, "fp16", (7, 5)), "float16", True, ""),
    (("cpu", T213, LINUX, "bf16", None), "bfloat16", False, "more slowly"),
    (("cpu", T213, LINUX, "fp16", None), "float16", True, "more slowly"),
]


@pytest.mark.parametrize(("arguments", "dtype", "scaler", "note"), CHOICES)
def test_select_precision(arguments, dtype, scaler, note):
    precision = select_precision(*arguments)
    found = (precision.dtype, precision.needs_scaler, precision.enabled, precision.device)

    assert found == (dtype, scaler, dtype != "float32", arguments[0])
    assert precision.reason.startswith(dtype)
    assert note in " ".join(precision.notes)
    assert bool(note) == bool(precision.notes)
    assert precision.to_dict()["enabled"] == precision.enabled


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mps", T27, M1, "fp16", None), "pytorch#142397.*Use 'bfloat16'.*torch 2.8 or later"),
        (("mps", T213, MACOS_27, "bf16", None), "pytorch#197796.*python -m pip install torch==2.14.1"),
        (("cuda", T213, LINUX, "bf16", (7, 5)), "requires compute capability 8.0; this GPU has 7.5.*Use 'float16'"),
        (("cuda", T213, LINUX, "bf16", None), "the compute capability of the GPU is unknown.*Use 'float16'"),
        (("cpu", T213, LINUX, "int8", None), r"for precision: .*\. Use one of 'float32', 'fp32', 'no'"),
    ],
)
def test_select_precision_rejects_unsupported(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        select_precision(*arguments)


def test_precision_accepts_names_of_libraries():
    for dtype, spellings in {
        "float32": ("float32", "fp32", "no", torch.float32),
        "bfloat16": ("bfloat16", "bf16", torch.bfloat16),
        "float16": ("float16", "fp16", "half", torch.float16),
    }.items():
        for spelling in (*spellings, f" {spellings[1].upper()} "):
            assert nb.training.precision(spelling, "cpu").dtype == dtype, spelling


@pytest.mark.parametrize(
    ("tensors", "release", "fused"),
    [
        ({("mps", "bfloat16"), ("mps", "float32")}, (2, 13), True),
        ({("mps", "float32")}, (2, 12, 1), False),
        ({("cuda", "float64")}, (2, 6), True),
        ({("cpu", "float32"), ("xla", "float32")}, (2, 13), False),
        (set(), (2, 13), False),
    ],
)
def test_supports_fused_depends_on_devices_types_and_release(tensors, release, fused):
    assert supports_fused(tensors, release) == fused


FEATURES = 3
LABELS = 4


def make_model(dtype=torch.float64):
    """Return a small model with fixed weights."""
    torch.manual_seed(0)
    return torch.nn.Linear(FEATURES, LABELS, dtype=dtype)


def make_parameters():
    """Return the parameters of a small model, with gradients."""
    model = make_model()
    model(make_rows(2)).square().sum().backward()
    return list(model.parameters())


FORMS = {
    "tensors": lambda weight, bias: [weight, bias],
    "groups": lambda weight, bias: [{"params": [weight], "lr": 0.5}, {"params": bias, "weight_decay": 0.0}],
    "groups of iterators": lambda weight, bias: [{"params": iter([weight])}, {"params": iter([bias])}],
}


@pytest.mark.parametrize("make_form", FORMS.values(), ids=FORMS)
def test_adamw_accepts_all_parameter_forms(make_form):
    weight, bias = make_parameters()
    before = weight.detach().clone()
    optimizer = adamw(make_form(weight, bias), lr=0.1)
    optimizer.step()

    assert all(group["fused"] for group in optimizer.param_groups)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2
    assert not torch.equal(before, weight)


@pytest.mark.parametrize(
    ("parameters", "options"),
    [
        (None, {}),
        ([{"lr": 1}], {}),
        (make_model().parameters(), {"lr": -1}),
        (make_model().parameters(), {"momentum": 0.9}),
    ],
)
def test_adamw_reports_what_torch_rejects(parameters, options):
    with pytest.raises(ConfigurationError, match=r"^torch\.optim\.AdamW rejects its arguments: ") as caught:
        adamw(parameters, **options)
    assert caught.value.__context__ is None


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": False}, {"differentiable": True}])
def test_adamw_keeps_selected_implementation(options):
    optimizer = adamw(make_parameters(), lr=0.1, amsgrad=True, **options)

    assert (optimizer.defaults["fused"], optimizer.defaults["amsgrad"]) == (options.get("fused"), True)
    assert {name: optimizer.defaults[name] for name in options} == options


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


def train_on(accumulation, model, inputs):
    """Train on batches."""
    for batch in accumulation.batches(inputs):
        accumulation.backward(compute_loss(model, batch))


def has_no_gradients(model):
    """Return whether no parameter has a gradient."""
    return all(parameter.grad is None for parameter in model.parameters())


SHAPES = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 6), st.sampled_from([0.0, 0.3, 1.0])), min_size=1, max_size=9
)


@given(SHAPES, st.integers(1, 5), st.integers(0, 1000))
def test_accumulated_token_losses_are_exact(shapes, steps, seed):
    batches = [make_token_batch(rows, length, seed + place, kept) for place, (rows, length, kept) in enumerate(shapes)]
    groups = [batches[first : first + steps] for first in range(0, len(batches), steps)]
    model = make_model()
    accumulation, found = accumulate(model, steps, weight=count_labels)
    stepped = [
        accumulation.backward(compute_group_loss(model, [batch])) for batch in accumulation.batches(iter(batches))
    ]

    assert sum(stepped) == len(found)
    assert has_no_gradients(model)
    torch.testing.assert_close(found, compute_gradients(groups, compute_group_loss), rtol=1e-9, atol=1e-9)


def test_batches_reads_one_group_ahead():
    taken = []
    next(accumulate(make_model(), 3)[0].batches(taken.append(number) or make_rows(1) for number in range(100)))

    assert taken == [0, 1, 2]


def test_scaler_skips_infinite_gradients():
    model = make_model(torch.float32)
    before = model.weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accumulation, found = accumulate(model, rate=0.5, scaler=scaler)
    train_on(accumulation, model, [make_rows(1, 1e30, torch.float32)])

    torch.testing.assert_close(model.weight.detach(), before)
    assert (scaler.get_scale(), found) == (512.0, [])


def test_earlier_gradients_are_discarded():
    model = make_model()
    accumulation, found = accumulate(model)
    batch = make_rows(2)
    for _broken in accumulation.batches([batch] * 3):
        accumulation.backward(compute_loss(model, batch))
        break
    assert model.weight.grad is not None
    train_on(accumulation, model, [batch, batch])

    torch.testing.assert_close(found, compute_gradients([batch], compute_loss))


def run_out_of_memory(*_):
    """Raise an out-of-memory error, as a hook on a gradient or before a step."""
    raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("failing", ["backward", "step"])
def test_failed_step_discards_gradients_and_ends_loop(failing):
    model = make_model()
    accumulation, _ = accumulate(model, 1)
    batches = accumulation.batches([make_rows(2)] * 2)
    loss = compute_loss(model, next(batches))
    if failing == "step":
        accumulation.optimizer.register_step_pre_hook(run_out_of_memory)
    else:
        model.weight.register_hook(run_out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        accumulation.backward(loss)

    assert has_no_gradients(model)
    with pytest.raises(ConfigurationError, match="not called for a batch, or failed"):
        next(batches)


def test_each_batch_needs_one_loss():
    model = make_model()
    accumulation, _ = accumulate(model)
    batch = make_rows(2)
    batches = accumulation.batches([batch, batch])
    next(batches)
    with pytest.raises(ConfigurationError, match="not called for a batch"):
        next(batches)
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


def test_count_labels_rejects_unsupported_batches():
    """The error does not contain values of the batch."""
    for batch in (torch.zeros(3), {"input_ids": torch.zeros(3)}, "text", {"labels": [1, 2]}):
        message = f"A batch of type {type(batch).__name__} has no labels to compute its weight"
        with pytest.raises(ConfigurationError, match=rf"^{message}\. Pass weight="):
            count_labels(batch)


@pytest.mark.parametrize(
    ("name", "label", "values"),
    [
        ("steps", "steps", (0, 1.5, True, None)),
        ("optimizer", "the optimizer", (make_model(),)),
    ],
)
def test_invalid_arguments_are_rejected(name, label, values):
    for value in values:
        given = {"optimizer": torch.optim.SGD(make_model().parameters(), lr=0.1), "steps": 2, name: value}
        with pytest.raises(ConfigurationError, match=f"^Invalid (value|type) for {label}: "):
            GradientAccumulation(**given)


def train_bert(model, device, requested=None):
    """Train for one epoch with increasing lengths and some ignored labels; return losses, steps and the optimizer."""
    model = nb.training.to_device(model.train(), device)
    precision = select_precision(device, (2, 13), M3, requested, (9, 0))
    optimizer = adamw(model.parameters(), lr=1e-3)
    accumulation = GradientAccumulation(optimizer, steps=3, scaler=precision.scaler())
    nb.training.checkpoint_activations(model)
    generator = torch.Generator().manual_seed(0)
    batches = []
    for length in range(5, 12):
        labels = torch.randint(-1, 3, (2, length), generator=generator)
        tokens = torch.randint(5, 20, (2, length), generator=generator)
        batches.append({"input_ids": tokens, "labels": torch.where(labels < 0, -100, labels)})
    torch.manual_seed(0)
    losses = []
    steps = 0
    for batch in accumulation.batches(batches):
        with precision.autocast():
            loss = model(**nb.training.to_device(batch, device)).loss
        steps += accumulation.backward(loss)
        losses.append(loss.item())
    return losses, steps, optimizer


@pytest.mark.real_computer  # The CPU is compared with a simulation that the test begins.
@pytest.mark.parametrize("requested", [None, "bf16", "fp16"])
def test_training_on_simulated_mps_matches_cpu(requested):
    """AdamW is fused if it obeys a scaler."""
    expected, *_ = train_bert(tiny.random_bert(), "cpu")
    with nb.simulated_mps() as mps:
        found, steps, optimizer = train_bert(tiny.random_bert(), "mps", requested)
        ignores_scaler = get_device("mps").fused_step_ignores_found_inf(parse_release(torch.__version__))

    assert steps == 3
    assert found == pytest.approx(expected, rel=1e-3)
    assert bool(optimizer.defaults["fused"]) == (not ignores_scaler)
    assert not any(copy.non_blocking for copy in mps.copies if copy.target == "mps")
