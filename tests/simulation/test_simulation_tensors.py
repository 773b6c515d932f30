"""Tensors on the simulated MPS device: device, moves, and state after the simulation."""

import contextlib
import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensor
from torch.utils.checkpoint import checkpoint

from helpers.simulated_tensors import ones
from helpers.threads import run_in_thread
from openmed_nb.devices.machine import is_mps_simulated
from openmed_nb.simulation.device import simulated_device
from openmed_nb.simulation.modes import DeviceCopy

pytestmark = pytest.mark.real_computer  # Each test starts its own simulation.
on_mps = pytest.mark.usefixtures("mps")

MPS = torch.device("mps", 0)
CPU = torch.device("cpu")


MADE = {
    "a torch.device": lambda: torch.zeros(3, device=torch.device("mps")),
    "mps:0": lambda: torch.rand(3, device="mps:0"),
    "from a list": lambda: torch.tensor([1.0, 2.0], device="mps"),
    "from numpy": lambda: torch.as_tensor(np.arange(3), device="mps"),
    "from a tensor": lambda: torch.as_tensor(torch.ones(2), device="mps"),
    "a permutation": lambda: torch.randperm(5, device="mps"),
    "like a tensor of the CPU": lambda: torch.zeros_like(torch.ones(2), device="mps"),
    "new_zeros": lambda: ones(2).new_zeros(4),
    "new_tensor": lambda: ones(2).new_tensor([1.0]),
    "moved": lambda: torch.ones(2).to("mps"),
    "moved to where another is": lambda: torch.ones(2).to(ones(1)),
    "moved with its type": lambda: torch.ones(2).to("mps", torch.float16),
    "moved by keyword": lambda: torch.ones(2).to(device="mps", dtype=torch.int64),
    "a view": lambda: ones(4, 4)[1:, ::2].T,
    "detached": lambda: ones(2, requires_grad=True).detach(),
    "data": lambda: ones(2).data,
    "converted": lambda: ones(2).half(),
    "a layer": lambda: torch.nn.Linear(2, 2, device="mps").weight,
    "a layer that moved": lambda: torch.nn.Linear(2, 2).to("mps").bias,
    "a layer's answer": lambda: torch.nn.Linear(2, 2).to("mps")(ones(2)),
    "in inference mode": lambda: torch.inference_mode()(torch.nn.Linear(2, 2).to("mps"))(ones(2)),
    "vmap": lambda: torch.vmap(lambda row: row * 2)(ones(2, 2)),
    "copied deep": lambda: copy.deepcopy(ones(2)),
    "pickled": lambda: pickle.loads(pickle.dumps(ones(2))),  # noqa: S301 - it was made here
    "one of a batch": lambda: next(iter(torch.utils.data.DataLoader([torch.ones(2)] * 4, batch_size=2))).to("mps"),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_created_tensor_is_on_device(mps, make):
    tensor = make()
    assert (tensor.device, tensor.is_mps, tensor.is_cpu, tensor.get_device()) == (MPS, True, False, 0)
    assert mps.contains(tensor)
    assert mps.allocator.allocated > 0


ELSEWHERE = {
    "made here": lambda: torch.ones(2),
    "named": lambda: torch.zeros(2, device="cpu"),
    "fetched": lambda: ones(2).cpu(),
    "moved back": lambda: ones(2).to("cpu"),
    "moved back with its type": lambda: ones(2).to("cpu", torch.float64),
    "moved to where another is": lambda: ones(2).to(torch.ones(1)),
    "like one of the device": lambda: torch.zeros_like(ones(2), device="cpu"),
    "new_zeros": lambda: ones(2).new_zeros(2, device="cpu"),
    "from one of the device": lambda: torch.as_tensor(ones(2), device="cpu"),
    "copied into": lambda: torch.zeros(2).copy_(ones(2)),
    "a layer that came back": lambda: torch.nn.Linear(2, 2).to("mps").cpu().weight,
    "meta": lambda: ones(2).to("meta"),
    "sparse": lambda: torch.eye(2).to_sparse().to("mps"),
    "jagged": lambda: torch.nested.nested_tensor([ones(2).cpu()], layout=torch.jagged).to("mps"),
}


@pytest.mark.parametrize("make", ELSEWHERE.values(), ids=ELSEWHERE)
def test_cpu_tensor_is_not_on_device(mps, make):
    tensor = make()
    assert not tensor.is_mps
    assert tensor.device.type in {"cpu", "meta"}
    assert not mps.contains(tensor)
    assert mps.allocator.allocated == 0


def test_default_device_lasts_until_end():
    with simulated_device():
        with torch.device("mps"):
            assert torch.ones(2).is_mps
            assert torch.nn.Linear(2, 2).weight.is_mps
            assert (torch.ones(2) + torch.ones(2)).is_mps
            assert torch.ones(2, device="cpu").is_cpu
        torch.set_default_device("mps")
        assert torch.ones(2).is_mps
        assert torch.ones(2, device="cpu").is_cpu
        torch.set_default_device(None)
        assert torch.ones(2).is_cpu
        torch.set_default_device("mps")
    assert torch.ones(1).is_cpu


@on_mps
def test_tensor_repr_contains_device():
    assert repr(ones(2)) == "tensor([1., 1.], device='mps:0')"
    assert ones(2).type() == "torch.mps.FloatTensor"
    assert f"{ones(1).sum():.1f}" == "1.0"


def test_moved_tensor_has_separate_memory():
    with simulated_device():
        here = torch.zeros(2)
        there = here.to("mps")
        there += 1
        back = there.cpu()
        there += 1
        assert (here.tolist(), there.tolist(), back.tolist()) == ([0, 0], [2, 2], [1, 1])
        assert there.to("mps") is there
        assert here.to("cpu") is here


def test_copies_are_recorded(mps):
    there = torch.ones(2).to("mps", non_blocking=True)
    there.to("mps")
    there.to("cpu", torch.float32, True)
    torch.zeros(2).copy_(there)
    there.copy_(torch.zeros(2), non_blocking=True)
    there.cpu()
    to = ("cpu", "mps")
    back = ("mps", "cpu")
    ways = [(*to, True), (*back, True), (*back, False), (*to, True), (*back, False)]
    assert mps.copies == [DeviceCopy(*way) for way in ways]


def test_calls_are_counted(mps):
    torch.nn.functional.linear(ones(2, 2), ones(2, 2))
    torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))
    assert mps.call_counts["linear"] == 1


class TestGradients:
    """Devices of gradients."""

    @on_mps
    def test_gradient_flows_through_move(self):
        here = torch.ones(3, requires_grad=True)
        there = ones(3, requires_grad=True)
        ((here.to("mps") * there).cpu() * 2).sum().backward()
        assert here.grad.is_cpu
        assert there.grad.is_mps
        assert here.grad.tolist() == there.grad.tolist() == [2, 2, 2]

    @on_mps
    def test_hooks_can_use_device(self):
        seen = []
        weight = ones(2, requires_grad=True)
        weight.register_hook(lambda gradient: seen.append(gradient.device) or gradient + torch.ones(2).to("mps"))
        weight.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor.grad.device))
        torch.autograd.backward([weight.sum()])
        assert seen == [MPS, MPS]
        assert torch.autograd.grad(weight.sum(), weight)[0].is_mps

    @on_mps
    @pytest.mark.parametrize("reentrant", [True, False])
    def test_activation_checkpointing_keeps_gradients(self, reentrant):
        layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)).to("mps")
        batch = ones(4, 8, requires_grad=True)
        gradients = []
        for forward in (layer, lambda batch: checkpoint(layer, batch, use_reentrant=reentrant)):
            layer.zero_grad()
            torch.manual_seed(0)
            forward(batch).sum().backward()
            gradients.append([parameter.grad.clone() for parameter in layer.parameters()])
        for plain, again in zip(*gradients, strict=True):
            assert again.is_mps
            torch.testing.assert_close(plain, again)

    @pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
    def test_training_step_matches_cpu(self, mps, options):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
        there = copy.deepcopy(model).to("mps")
        for net, device in ((model, "cpu"), (there, "mps")):
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **options)
            for _ in range(3):
                ids = torch.arange(6).reshape(2, 3).to(device)
                loss = torch.nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten() % 3)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            states = [state["exp_avg"] for state in optimizer.state.values()]
            assert {state.device.type for state in states} == {device}
        for mine, theirs in zip(model.parameters(), there.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.cpu())
        assert mps.allocator.peak > 0


class TestSaving:
    """Files that are saved under the simulation contain the device MPS, as on a Mac."""

    @on_mps
    @pytest.mark.parametrize(("where", "device"), [(None, MPS), ("mps", MPS), ("cpu", CPU)])
    def test_saved_state_is_loaded_on_device(self, where, device):
        file = io.BytesIO()
        torch.save(torch.nn.Linear(2, 2).to("mps").state_dict(), file)
        file.seek(0)
        assert {tensor.device for tensor in torch.load(file, map_location=where).values()} == {device}

    def test_file_from_mps_needs_map_location(self):
        """The same as for a file from a Mac."""
        file = io.BytesIO()
        with simulated_device():
            torch.save(ones(2), file)
        file.seek(0)
        with pytest.raises(RuntimeError, match="mps"):
            torch.load(file)
        file.seek(0)
        assert torch.load(file, map_location="cpu").tolist() == [1, 1]

    @on_mps
    def test_safetensors_saves_and_loads(self, tmp_path):
        from safetensors.torch import load_file, save_file

        save_file({"weight": ones(2)}, tmp_path / "model.safetensors")
        assert load_file(tmp_path / "model.safetensors")["weight"].tolist() == [1, 1]
        assert load_file(tmp_path / "model.safetensors", device="mps")["weight"].is_mps


class TestRandomNumbers:
    """Random numbers of the device, which are those of the CPU."""

    @on_mps
    def test_seeds_and_states_repeat_numbers(self):
        torch.mps.manual_seed(5)
        state = torch.mps.get_rng_state()
        first = torch.rand(3, device="mps")
        torch.mps.set_rng_state(state)
        assert torch.equal(first, torch.rand(3, device="mps"))
        torch.manual_seed(5)
        assert torch.equal(first, torch.rand(3, device="mps"))
        torch.mps.seed()
        assert not torch.equal(first, torch.rand(3, device="mps"))


def get_attributes():
    """Return the attributes of the modules and classes that a simulation changes, and whether torch finds MPS."""
    owners = (torch, torch._C, torch.mps, torch.cuda, torch.autograd, torch.Tensor, torch.UntypedStorage, FakeTensor)
    attributes = {(owner, name): value for owner in owners for name, value in vars(owner).items()}
    modes = torch.overrides._get_current_function_mode_stack()
    return attributes, (torch.backends.mps.is_available(), torch.accelerator.is_available(), modes)


class TestRestoration:
    """State after a simulation."""

    @pytest.mark.parametrize("error", [None, KeyboardInterrupt, RuntimeError])
    def test_torch_is_restored(self, error):
        attributes, state = get_attributes()
        with contextlib.suppress(KeyboardInterrupt, RuntimeError), simulated_device():
            assert is_mps_simulated()
            assert get_attributes()[1][:2] == (True, True)
            if error:
                raise error
        assert not is_mps_simulated()
        restored, restored_state = get_attributes()
        assert restored_state == state
        assert {key for key, value in attributes.items() if restored.get(key) is not value} == set()
        assert {
            name for owner, name in restored.keys() - attributes.keys() if "mps" in name or owner is torch.Tensor
        } == set()

    def test_tensors_are_cpu_tensors_afterwards(self):
        with simulated_device() as mps:
            layer = torch.nn.Linear(2, 2).to("mps")
            optimizer = torch.optim.AdamW(layer.parameters())
            loss = layer(ones(2)).sum()
        loss.backward()
        optimizer.step()
        assert {parameter.device for parameter in layer.parameters()} == {CPU}
        assert layer.weight.grad.numpy().shape == (2, 2)
        assert not mps.contains(layer.weight) or layer.weight.is_cpu


def test_other_threads_use_cpu():
    seen = []
    with simulated_device():
        there = ones(2)

        def look():
            seen.extend([there.device, (there * 2).device, torch.ones(2).numpy().tolist(), there.sum().item()])

        run_in_thread(look)
    assert seen == [CPU, CPU, [1.0, 1.0], 2.0]
