"""Tensors of two devices on the simulated MPS device: what is refused and accepted, each with its source in torch.

Paths are those of pytorch's repository. "test_mps.py" is ``test/test_mps.py``, the MPS tests of torch; "TensorIterator"
is ``aten/src/ATen/TensorIterator.cpp`` (``compute_types``), and "Metal" ``mtl_setBuffer`` in
``aten/src/ATen/native/mps/OperationUtils.h``.
"""

import json
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from helpers import ROOT
from helpers.processes import run_python
from helpers.simulated_tensors import ones, packed

pytestmark = [pytest.mark.real_computer, pytest.mark.usefixtures("mps")]  # Each test starts its own simulation.

SWEEP = ROOT / "scripts" / "sweep_simulated_mps.py"

TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices, mps:0 and cpu!"
TOO_MANY = "Trying to pass too many CPU scalars to non-CPU kernel!"
METAL = "Passed CPU tensor to MPS op"
INDICES = "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
GENERATOR = "Expected a 'mps' device type for generator but found 'cpu'"
SECTIONS = "tensor_split expected tensor_indices_or_sections to be on cpu, but it's on mps:0"
LENGTHS = "'lengths' argument should be a 1D CPU int64 tensor, but got 1D mps:0 Long tensor"


def ids(device="mps"):
    """Return two indices."""
    return torch.tensor([0, 2], device=device)


def mask():
    """Return a mask of three elements on the device."""
    return torch.tensor([True, False, True], device="mps")


def run_recurrent(kind, *, given="mps", hidden="mps", parameters="mps"):
    """Run a recurrent network with tensors on given devices."""
    network = kind(1, 2).to(parameters)
    state = torch.zeros(1, 2, 2, device=hidden)
    return network(torch.ones(3, 2, 1, device=given), (state, state) if kind is torch.nn.LSTM else state)


def shuffled(generator=None):
    """Return shuffled batches, with the device as the default."""
    with torch.device("mps"):
        return list(torch.utils.data.DataLoader([1, 2, 3], shuffle=True, generator=generator))


# What works on MPS and must work here -> the device of the result, and what computes it.
ACCEPTED = {
    # torch/nn/utils/rnn.py: batch_sizes are on the CPU; test_mps.py runs LSTMs on packed sequences.
    "pad_packed_sequence": ("mps", lambda: pad_packed_sequence(packed())[0]),
    "the lengths of pad_packed_sequence": ("cpu", lambda: pad_packed_sequence(packed())[1]),
    "pad_packed_sequence of a tagger": (
        "mps",
        lambda: pad_packed_sequence(torch.nn.LSTM(1, 2).to("mps")(packed())[0])[0],
    ),
    "pack_padded_sequence, not sorted": (
        "mps",
        lambda: pad_packed_sequence(pack_padded_sequence(ones(3, 2, 1), torch.tensor([2, 3]), enforce_sorted=False))[0],
    ),
    # TensorConversions.cpp: type_as is to(other.options()).
    "cpu.type_as(mps)": ("mps", lambda: torch.ones(2).type_as(ones(1))),
    "mps.type_as(cpu)": ("cpu", lambda: ones(2).type_as(torch.ones(1))),
    # aten/src/ATen/mps/MPSGeneratorImpl.mm; test_mps.py has test_default_mps_generator.
    "numbers of a generator": ("mps", lambda: torch.randn(2, device="mps", generator=torch.Generator(device="mps"))),
    "a generator of the module": ("mps", lambda: ones(2).normal_(generator=torch.Generator("mps").manual_seed(3))),
    "DataLoader(shuffle=True) with a generator of MPS": ("mps", lambda: shuffled(torch.Generator("mps"))[0]),
    # tensor_numpy.cpp: force=True is detach().cpu().resolve_conj().resolve_neg().numpy().
    "numpy(force=True)": ("cpu", lambda: torch.from_numpy(ones(2, requires_grad=True).numpy(force=True))),
    # TensorShape.cpp: tensor_split reads its indices on the CPU.
    "tensor_split with indices of the CPU": ("mps", lambda: torch.tensor_split(ones(4), torch.tensor([1, 3]))[1]),
    # TensorAdvancedIndexing.cpp: make_info moves indices of the CPU to the indexed tensor.
    "mps[cpu indices]": ("mps", lambda: ones(3)[ids("cpu")]),
    "mps[cpu mask]": ("mps", lambda: ones(3)[mask().cpu()]),
    # TensorIndexing.h: an index of no dimensions is a number.
    "cpu[one mps index]": ("cpu", lambda: torch.ones(3)[torch.tensor(1, device="mps")]),
    # TensorIterator: one number of the CPU (allow_cpu_scalars).
    "a number of the CPU": ("mps", lambda: torch.tensor(2.0) * ones(2)),
    # TensorCompare.cpp: where moves numbers of the CPU.
    "where of two numbers of the CPU": ("mps", lambda: torch.where(ones(2) > 0, torch.tensor(1.0), torch.tensor(2.0))),
    "masked_fill with a number of the CPU": ("mps", lambda: ones(3).masked_fill(mask(), torch.tensor(0.0))),
    # Copy.mm: copies are made between devices.
    "copy_ from the CPU": ("mps", lambda: ones(2).copy_(torch.zeros(2))),
    # TensorShape.cpp: slice_scatter copies into a copy of its first argument.
    "slice_scatter of the CPU": ("cpu", lambda: torch.zeros(3).slice_scatter(ones(2), 0, 0, 2)),
    "slice_scatter from the CPU": ("mps", lambda: ones(3).slice_scatter(torch.zeros(2), 0, 0, 2)),
    # An operator that is written in Python makes tensors where its arguments are.
    "a custom operator": ("mps", lambda: torch.ops.openmed_nb_tests.shifted(ones(2))),
    # Functions that read only a shape.
    "expand_as": ("mps", lambda: ones(1).expand_as(torch.ones(3))),
    # Composite functions that make tensors by themselves: one_hot makes zeros, repeat_interleave indices.
    "one_hot": ("mps", lambda: torch.nn.functional.one_hot(ids())),
    # engine.cpp, validate_outputs: a gradient of no dimensions is moved.
    "a gradient of the CPU without dimensions": ("mps", lambda: compute_gradient(torch.tensor(1.0))),
}


@torch.library.custom_op("openmed_nb_tests::shifted", mutates_args=())
def shifted(given: torch.Tensor) -> torch.Tensor:
    """Return a tensor plus a new tensor on its device."""
    return given + torch.ones(2, device=given.device)


def compute_gradient(gradient):
    """Return the gradient of a tensor on the device, with a given gradient of its sum."""
    tensor = ones(2, requires_grad=True)
    tensor.sum().backward(gradient)
    return tensor.grad


@pytest.mark.parametrize(("device", "compute"), ACCEPTED.values(), ids=ACCEPTED)
def test_mixed_devices_are_accepted(device, compute):
    assert compute().device.type == device


# What MPS refuses -> its text, and what it refuses.
REFUSED = {
    # Functions of recurrent networks consist of other operators on the CPU.
    "LSTM with a hidden state of the CPU": (TWO_DEVICES, lambda: run_recurrent(torch.nn.LSTM, hidden="cpu")),
    "LSTM with parameters of the CPU": (TWO_DEVICES, lambda: run_recurrent(torch.nn.LSTM, parameters="cpu")),
    "LSTM with input of the CPU": (TWO_DEVICES, lambda: run_recurrent(torch.nn.LSTM, given="cpu")),
    "RNN with parameters of the CPU": (TWO_DEVICES, lambda: run_recurrent(torch.nn.RNN, parameters="cpu")),
    "GRU that was not moved, with packed input": (
        TWO_DEVICES,
        lambda: torch.nn.GRU(1, 2)(packed(), torch.zeros(1, 2, 2)),
    ),
    # TensorAdvancedIndexing.cpp: check_indices_on_cpu_or_selfdevice.
    "cpu[mps index]": (INDICES, lambda: torch.ones(3)[ids()]),
    "cpu[mps index] = number": (INDICES, lambda: torch.ones(3).__setitem__(ids(), 5.0)),
    "cpu[:, mps index]": (INDICES, lambda: torch.ones(2, 3)[:, ids()]),
    "cpu.index_put_": (INDICES, lambda: torch.ones(3).index_put_((ids(),), torch.tensor(1.0))),
    # PackedSequence.cpp; pytorch#43227.
    "pack_padded_sequence with lengths of MPS": (LENGTHS, lambda: pack_padded_sequence(ones(3, 2, 1), 3 - ids() // 2)),
    # aten/src/ATen/core/Generator.h: check_generator; pytorch#85450, #110820.
    "a generator of the CPU": (GENERATOR, lambda: torch.randn(2, device="mps", generator=torch.Generator())),
    "dropout by a generator of the CPU": (GENERATOR, lambda: ones(2).bernoulli_(0.5, generator=torch.Generator())),
    "DataLoader(shuffle=True) where MPS is the default device": (GENERATOR, shuffled),
    "a generator of MPS for the CPU": (
        "Expected a 'cpu' device type for generator but found 'mps'",
        lambda: torch.randn(2, generator=torch.Generator("mps")),
    ),
    # TensorShape.cpp.
    "tensor_split with indices of MPS": (SECTIONS, lambda: torch.tensor_split(ones(4), ids())),
    # TensorIterator: an output cannot be a CPU scalar, and only one input is.
    "a number of the CPU that changes": (TWO_DEVICES, lambda: torch.tensor(1.0).add_(ones(1)[0])),
    "two numbers of the CPU": (TOO_MANY, lambda: torch.addcmul(ones(2), torch.tensor(1.0), torch.tensor(2.0))),
    "a number of MPS for the CPU": (TWO_DEVICES, lambda: torch.ones(2) * ones(1)[0]),
    "a view of the CPU": (TWO_DEVICES, lambda: torch.nn.functional.mse_loss(ones(2), torch.ones(2))),
    "masked_fill with a mask of the CPU": (TWO_DEVICES, lambda: ones(3).masked_fill(mask().cpu(), 0.0)),
    # Indexing.mm: index_select_out_mps.
    "index_select with indices of the CPU": (METAL, lambda: ones(3).index_select(0, ids("cpu"))),
    "index_add with a source of the CPU": (TWO_DEVICES, lambda: ones(3).index_add(0, ids(), torch.ones(2))),
    "a convolution that was not moved": (TWO_DEVICES, lambda: torch.nn.Conv1d(1, 1, 1)(ones(1, 1, 3))),
    "mm": (TWO_DEVICES, lambda: ones(2, 2) @ torch.ones(2, 2)),
    # Linear.mm; test_mps.py has test_linear_errors.
    "a bias of the CPU": (
        "Tensor for argument bias is on cpu but expected on mps",
        lambda: torch.nn.functional.linear(ones(2, 2), ones(2, 2), torch.ones(2)),
    ),
    # engine.cpp: validate_outputs.
    "a gradient of the CPU": (
        "invalid gradient at index 0 - expected device mps:0 but got cpu",
        lambda: ones(2, requires_grad=True).mul(2).backward(torch.ones(2)),
    ),
    "a gradient of MPS for the CPU": (
        "invalid gradient at index 0 - expected device cpu but got mps:0",
        lambda: torch.ones(2, requires_grad=True).mul(2).backward(ones(2)),
    ),
}


@pytest.mark.parametrize(("text", "compute"), REFUSED.values(), ids=REFUSED)
def test_mixed_devices_raise_errors_of_torch(text, compute):
    with pytest.raises(RuntimeError) as caught:
        compute()
    assert str(caught.value) == text


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_network_runs_on_either_device(kind):
    assert run_recurrent(kind)[0].is_mps
    assert kind(1, 2).to("mps")(packed())[0].data.is_mps
    assert run_recurrent(kind, given="cpu", hidden="cpu", parameters="cpu")[0].is_cpu


def test_generator_has_device_and_seed():
    there = torch.Generator(device="mps")
    here = torch.Generator()
    assert (there.device, here.device) == (torch.device("mps", 0), torch.device("cpu"))
    assert isinstance(there, torch.Generator)
    assert isinstance(here, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    first = torch.rand(2, device="mps", generator=there.manual_seed(4))
    state = there.get_state()
    second = torch.rand(2, device="mps", generator=there)
    there.set_state(state)
    assert torch.equal(second, torch.rand(2, device="mps", generator=there))
    assert torch.equal(first, torch.rand(2, device="mps", generator=there.manual_seed(4)))


class TestNothingAborts:
    """Calls into the C++ library for MPS, which is missing here, must not abort the process."""

    @pytest.mark.parametrize("strict", [False, True])
    def test_export_keeps_results(self, strict):
        model = torch.nn.Linear(2, 2).to("mps")
        batch = ones(2, 2)
        exported = torch.export.export(model, (batch,), strict=strict)
        assert [node.target for node in exported.graph.nodes if node.op == "call_function"] == [
            torch.ops.aten.linear.default
        ]
        assert torch.equal(exported.module()(batch), model(batch))

    def test_backward_pass_of_fake_tensors(self):
        layer = torch.nn.Linear(2, 3).to("mps")
        batch = ones(4, 2, requires_grad=True)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = mode.from_tensor(batch)
            layer(fake).sum().backward()
        assert fake.grad.shape == (4, 2)

    def test_fake_tensors_take_no_memory(self, mps):
        with FakeTensorMode():
            fake = torch.ones(1000, device="mps", requires_grad=True)
            (fake * 2).sum().backward()
        assert mps.allocator.allocated == 0
        assert not mps.contains(fake)

    def test_compiled_model_runs_backward(self):
        layer = torch.nn.Linear(2, 2).to("mps")
        torch.compile(layer, backend="aot_eager")(ones(2, 2)).sum().backward()
        assert layer.weight.grad.shape == (2, 2)


def _sweep(*arguments, timeout):
    done = run_python(SWEEP, *arguments, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


# One of each kind of rule: an iterator, a reduction, indices, a copy, a graph, a list, a composite function.
REPRESENTATIVES = (
    "add",
    "where",
    "sum",
    "index_put",
    "slice_scatter",
    "cat",
    "nn.functional.linear",
    "nn.functional.conv2d",
    "nn.functional.embedding",
    "linalg.eigh",
    "normal",
)


def test_representative_operators_do_not_abort():
    counts = _sweep(*REPRESENTATIVES, "--samples", "1", timeout=240)["counts"]
    assert counts["operators"] == len(REPRESENTATIVES)
    assert counts["aborts"] == 0
    assert counts["operators refused on the device"] == 1  # linalg.eigh, which MPS does not have.
    assert counts["refused"] > 10
    assert counts.get("failed otherwise", 0) == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_operators_match_documented_differences():
    """docs/explanation/simulated_mps.md lists the differences with their reasons."""
    report = _sweep(timeout=3500)
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "simulated_mps.md").read_text()
    assert report["counts"]["operators"] > 600
    assert report["counts"]["aborts"] == 0
    assert report["failed otherwise"] == {}
    differing = {name for kind in DIFFERENCES for name in report[kind]}
    assert sorted(name for name in differing if f"`{name}`" not in page) == []


DIFFERENCES = (
    "accepted though the rules refuse",
    "refused though the rules accept",
    "expected to fail by torch's tests, accepted",
    "refused, not expected to fail by torch's tests",
)
