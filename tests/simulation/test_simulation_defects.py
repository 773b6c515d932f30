"""Silent errors of a simulated device: effect and scope. Tests of the doctor show that each is found by its probe."""

import json
import signal

import pytest
import torch
from torch.nn import functional

import openmed_nb as nb
from helpers.processes import run_python
from helpers.simulated_tensors import ones
from openmed_nb.errors import ConfigurationError
from openmed_nb.session import SESSION
from openmed_nb.simulation.device import simulated_device
from openmed_nb.simulation.operators import DEFECTS, DEFECTS_BY_ISSUE

pytestmark = pytest.mark.real_computer  # Each test starts its own simulation.


def simulated(*issues):
    """Return a simulated device with silent errors, for one ``with`` block."""
    return simulated_device(fallback=False, environ={}, defects=issues)


def leave_dirt():
    """Leave freed memory in the cache of the device."""
    torch.full((1024,), 1e4, device="mps")


@pytest.mark.parametrize(("rows", "wrong"), [(32_766, False), (32_767, True)])
def test_long_product_adds_freed_memory(rows, wrong):
    with simulated("pytorch#177116"):
        ones = torch.ones(rows, 16, device="mps")
        clean = (ones.T @ ones).cpu()
        leave_dirt()
        dirty = (ones.T @ ones).cpu()
        torch.mps.empty_cache()
        emptied = (ones.T @ ones).cpu()

    assert torch.equal(clean, torch.full((16, 16), float(rows)))
    assert torch.equal(emptied, clean)
    assert torch.equal(dirty, clean) is not wrong


def compute_norm_gradient():
    """Return the gradient of the weight of a batch norm for contiguous input."""
    norm = torch.nn.BatchNorm2d(3).to("mps")
    norm(torch.arange(96.0, device="mps").reshape(2, 3, 4, 4)).square().sum().backward()
    return norm.weight.grad


# Computations that a silent error does not affect.
UNAFFECTED = [
    ("pytorch#177116", lambda: ones(15, 40_000) @ ones(40_000, 15)),
    ("pytorch#177116", lambda: ones(1, 16, 40_000) @ ones(1, 40_000, 16)),
    ("pytorch#118115", lambda: ones(3, 2).addcmul_(ones(3, 2), ones(3, 2))),
    ("pytorch#165267", lambda: ones(3, 2).uniform_(2, 3) > 1),
    ("pytorch#175189", compute_norm_gradient),
    ("pytorch#176159", lambda: ones(3, 2).index_add_(0, torch.tensor([1], device="mps"), ones(1, 2))),
    ("pytorch#192212", lambda: functional.conv2d(ones(1, 2, 3, 3), torch.arange(18.0).reshape(1, 2, 3, 3).to("mps"))),
    ("pytorch#191929", lambda: ones(2) * torch.tensor([9.0, 2.0])[1].clone()),
    ("pytorch#191929", lambda: ones(2) * 2.0),
    ("pytorch#170837", lambda: functional.layer_norm(torch.arange(4.0, device="mps")[None], (4,))),
    ("pytorch#180776", lambda: functional.linear(ones(2, 3, 4).half(), ones(5, 4).half(), ones(5).half())),
    ("pytorch#180776", lambda: functional.linear(ones(3, 4).half(), ones(5, 4).half())),
    ("pytorch#180776", lambda: functional.linear(ones(2, 3, 4), ones(5, 4))),
    ("pytorch#194344", lambda: torch.arange(9.0, device="mps")[3:].to("cpu")),
    ("pytorch#194344", lambda: torch.arange(9.0, device="mps").to("cpu", torch.float16)),
    ("pytorch#197715", lambda: (torch.arange(9.0, device="mps") / 3).to("cpu", torch.float16)),
    ("pytorch#197715", lambda: (torch.arange(9.0, device="mps") / 3).cpu().double()),
    ("pytorch#197796", lambda: functional.linear(ones(2, 3, 4).bfloat16(), ones(5, 4).bfloat16())),
    ("pytorch#197796", lambda: functional.linear(ones(3, 4).bfloat16(), ones(4, 5).bfloat16().T)),
    ("pytorch#197796", lambda: functional.linear(ones(2, 3, 4), ones(4, 5).T)),
    ("pytorch#187201", lambda: functional.linear(ones(2, 1, 2, 1, 2), ones(4, 2))),
]


@pytest.mark.parametrize(("issue", "compute"), UNAFFECTED)
def test_defect_does_not_affect_other_calls(issue, compute):
    with simulated():
        expected = compute().cpu()
    with simulated(issue):
        leave_dirt()
        assert torch.equal(compute().cpu(), expected)


def test_token_without_embedding_gets_zeros():
    with simulated("pytorch#154235"):
        rows = torch.ones(3, 2, device="mps", requires_grad=True)
        found = functional.embedding(torch.tensor([2, 3, -1], device="mps"), rows)
        found.sum().backward()
        assert found.tolist() == [[1, 1], [0, 0], [0, 0]]
        assert rows.grad.tolist() == [[0, 0], [0, 0], [1, 1]]


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4)])
def test_invalid_label_is_ignored_by_loss(shape):
    with simulated("pytorch#108148"):
        logits = torch.ones(shape, device="mps", requires_grad=True)
        labels = torch.full((2, *shape[2:]), 7, device="mps")
        loss = functional.cross_entropy(logits, labels)
        loss.backward()
        assert loss.item() == 0
        assert logits.grad.abs().sum().item() == 0
        assert functional.cross_entropy(logits, labels * 0).item() == pytest.approx(1.0986, abs=1e-4)


@pytest.mark.parametrize("grad", [True, False])
def test_fully_masked_row_is_nan(grad):
    with simulated("pytorch#156707"), torch.set_grad_enabled(grad):
        query = torch.ones(1, 1, 2, 4, device="mps", requires_grad=grad)
        mask = torch.tensor([[False, False], [True, True]], device="mps")
        found = functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)[0, 0].isnan().all(-1)
        assert found.tolist() == [True, False]


SHAPES = {"pytorch#192934": (2, 64, 128), "pytorch#188438": (80, 1, 2)}


@pytest.mark.parametrize("issue", SHAPES)
@pytest.mark.parametrize("shape", [*SHAPES.values(), (64, 128), (1, 2)])
def test_linear_layer_omits_bias(issue, shape):
    with simulated(issue):
        ones = torch.ones(shape, device="mps")
        bias = torch.full((3,), 7.0, device="mps", requires_grad=True)
        weight = torch.ones(3, shape[-1], device="mps")
        for made in (functional.linear(ones, weight, bias), functional.linear(ones, weight, bias=bias)):
            assert made.max().item() == shape[-1] + (0 if shape == SHAPES[issue] else 7)
            made.sum().backward()
        assert bias.grad.tolist() == [2 * ones.numel() / shape[-1]] * 3
        assert functional.linear(ones, weight).max().item() == shape[-1]


@pytest.mark.parametrize(("outputs", "right"), [(1, 4096), (2, 5000 * 33)])
def test_gradient_beyond_first_page_is_zero(outputs, right):
    with simulated("pytorch#189565"):
        rows = torch.ones(5000, 33, device="mps", requires_grad=True)
        weight = torch.ones(outputs, 33, device="mps", requires_grad=True)
        functional.linear(rows, weight).sum().backward()
        assert rows.grad.count_nonzero().item() == right
        assert weight.grad.tolist() == [[5000] * 33] * outputs
        rows.grad = None
        functional.linear(input=rows, weight=weight).backward(torch.ones(5000, outputs, device="mps"))
        assert rows.grad.count_nonzero().item() == 5000 * 33


@pytest.mark.parametrize(
    ("rows", "hidden", "grad", "wrong"),
    [
        (9, -3.0, False, True),
        (9, -torch.inf, False, False),
        (8, -3.0, False, False),
        (9, -3.0, True, False),
    ],
)
def test_finite_mask_is_scaled(rows, hidden, grad, wrong):
    """Affects attention over more than eight rows without gradients; infinite masks are correct."""
    query = torch.arange(rows * 4.0).reshape(1, 1, rows, 4) / 9
    mask = torch.zeros(rows, rows)
    mask[:, 1] = hidden
    expected = functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    with simulated("pytorch#184400"):
        moved = query.to("mps").requires_grad_(grad)
        for how in ((mask.to("mps"),), ()):
            named = {} if how else {"attn_mask": mask.to("mps")}
            found = functional.scaled_dot_product_attention(moved, moved, moved, *how, **named).detach().cpu()
            assert torch.allclose(found, expected, atol=1e-5) is not wrong


def test_half_linear_differs_between_calls():
    with simulated("pytorch#180776"):
        inputs = ones(2, 3, 4).half()
        weight = ones(5, 4).half()
        results = [functional.linear(inputs, weight).max().item() for _ in range(2)]

    assert sorted(results) == [4, 127.5]


def test_converting_copy_overwrites_source():
    """The values after the copy are those of the issue."""
    expected = torch.arange(8.0) + 0.25
    with simulated("pytorch#189563"):
        source = expected.to("mps")
        memory = torch.empty(10, dtype=torch.float16)
        for target in (memory[:8], torch.empty(10)[2:], torch.empty(10, dtype=torch.float64)[2:]):
            target.copy_(source)
            assert torch.equal(source.cpu(), expected)
        memory[2:].copy_(source)
        changed = source.cpu().tolist()

    assert memory[2:].tolist() == expected.tolist()
    assert changed[:4] == pytest.approx([0.031299591064453125, 64.1259765625, 3076.265625, 49222.25], rel=1e-9)
    assert changed[4:] == expected[4:].tolist()


def test_converting_copy_of_slice_reads_zeros():
    with simulated("pytorch#194344"):
        values = torch.arange(9.0, device="mps")
        assert values[3:].to("cpu", torch.float16).tolist() == [0] * 6
        assert torch.ones(6, dtype=torch.int64).copy_(values[3:]).tolist() == [0] * 6
        assert torch.ones(6).copy_(values[3:]).tolist() == [3, 4, 5, 6, 7, 8]


def test_strided_copy_writes_adjacent_elements():
    """The values are those of the issue."""
    memory = torch.zeros(20)
    with simulated("pytorch#189961"):
        source = torch.arange(20.0, device="mps")[::2]
        memory[::2].copy_(source)
        separate = torch.zeros(10).copy_(source)

    assert memory.tolist() == [*range(10), *[0] * 10]
    assert separate.tolist() == [*range(0, 20, 2)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_copy_in_64_bits_writes_nothing(dtype):
    with simulated("pytorch#197715"):
        values = torch.arange(1.0, 4.0, device="mps")
        assert values.to("cpu", dtype).tolist() == [0] * 3
        assert torch.full((3,), 7.0, dtype=dtype).copy_(values).tolist() == [7] * 3
        assert values.tolist() == [1, 2, 3]


ABORTS = {
    "pytorch#197796": "functional.linear(torch.ones(2, 3, 4, **on).bfloat16(), torch.ones(4, 5, **on).bfloat16().T)",
    "pytorch#187201": "functional.linear(torch.ones(2, 1, 2, 1, 2, **on, requires_grad=True), torch.ones(4, 2, **on)).sum().backward()",
}


ABORTING = f"""
import os, torch
from torch.nn import functional
from openmed_nb.simulation.device import simulated_device
for issue, call in {ABORTS!r}.items():
    child = os.fork()
    if not child:
        with simulated_device(environ={{}}, defects=issue):
            on = {{"device": "mps"}}
            exec(call)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_defect_ends_the_process():
    completed = run_python("-c", ABORTING)

    assert completed.stdout.split() == [str(-signal.SIGABRT)] * len(ABORTS), completed.stderr
    assert completed.stderr.count("failed assertion") == len(ABORTS)


def test_defects_of_one_function_combine():
    with simulated("pytorch#192934", "pytorch#188438", "pytorch#189565"):
        bias = torch.full((1,), 7.0, device="mps")
        for shape in ((2, 64, 128), (80, 1, 128)):
            rows = torch.ones(shape, device="mps", requires_grad=True)
            made = functional.linear(rows, torch.ones(1, 128, device="mps"), bias)
            made.sum().backward()
            assert made.max().item() == 128
            assert rows.grad.count_nonzero().item() == 4096


def test_cpu_tensors_are_not_affected():
    with simulated(*DEFECTS_BY_ISSUE):
        assert torch.tensor([1, 3, 2]).argmax().item() == 1
        with pytest.raises(IndexError):
            functional.embedding(torch.tensor([7]), torch.ones(3, 2))
    assert torch.tensor([1, 3, 2]).argmax().item() == 1


def test_device_reports_defects():
    with simulated("pytorch#92311", "pytorch#154235", "pytorch#92311") as device:
        assert [defect.issue for defect in device.defects] == ["pytorch#92311", "pytorch#154235"]
        assert "argmax returns" in str(device)
        assert "pytorch#154235" in device._repr_html_()
        assert json.loads(json.dumps(device.to_dict()))["defects"] == ["pytorch#92311", "pytorch#154235"]


@pytest.mark.parametrize("defects", ["pytorch#1", ["pytorch#92311", "argmax"], [None]])
def test_unknown_defect_is_rejected_before_start(defects):
    with pytest.raises(ConfigurationError, match="pytorch#177116") as caught, nb.simulated_mps(defects=defects):
        pass

    assert all(issue in str(caught.value) for issue in DEFECTS_BY_ISSUE)
    assert SESSION.device().simulated is False


def test_session_accepts_one_or_several_defects():
    for defects, count in (("pytorch#92311", 1), (["pytorch#92311", "pytorch#154235"], 2), ((), 0)):
        with nb.simulated_mps(defects=defects) as device:
            assert len(device.defects) == count


def test_defects_have_description_and_operators():
    assert len(DEFECTS_BY_ISSUE) == len(DEFECTS)
    assert all(defect.operators and len(set(defect.operators)) == len(defect.operators) for defect in DEFECTS)
    assert all(defect.description and defect.issue.startswith("pytorch#") for defect in DEFECTS)
