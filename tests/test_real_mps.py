"""Tests on a real MPS device, which are skipped if there is none."""

import platform

import pytest

import openmed_nb as nb
from helpers.processes import run_python
from openmed_nb.runbook.records.report import run_report
from openmed_nb.runbook.records.steps import STEPS, StepOptions

torch = pytest.importorskip("torch")

TEXTS = ["Seen for type 2 diabetes mellitus and asthma.", "No fever.", "Hypertension since 2019; " * 40]


@pytest.fixture(scope="module")
def real_mps():
    """Skip if MPS is not usable. A separate process checks this, because a failure may end the process."""
    if platform.system() != "Darwin":
        pytest.skip(f"MPS requires macOS, and this is {platform.system()}")
    probe = run_python("-m", "openmed_nb", "--device", "mps")
    if probe.returncode:
        reason = (probe.stderr.strip() or f"status {probe.returncode}").splitlines()[-1]
        pytest.skip(f"MPS is not usable: {reason}")


pytestmark = [pytest.mark.real_mps, pytest.mark.real_computer, pytest.mark.usefixtures("real_mps", "clean")]


def test_use_confirms_the_device():
    choice = nb.use("mps")

    assert (choice.device, choice.confirmed, choice.simulated) == ("mps", True, False)


def test_entities_are_the_same_as_on_the_cpu():
    cpu_spans, mps_spans = (
        [[(entity["start"], entity["end"], entity["entity_group"]) for entity in entities] for entities in pipe(TEXTS)]
        for pipe in (nb.load_pipeline(device=device) for device in ("cpu", "mps"))
    )

    assert cpu_spans == mps_spans
    assert any(cpu_spans)


def test_parity_with_gradients_does_not_fail():
    assert nb.runbook.parity("bundled", TEXTS, device="mps", gradients=True).status != "failed"


def test_release_frees_tensor_memory():
    from openmed_nb.devices.registry import get_device

    nb.use("mps")
    before = get_device("mps").memory_stats().allocated
    tensor = torch.ones(1 << 22, device="mps")
    with_tensor = get_device("mps").memory_stats().allocated
    del tensor
    nb.release(keep=["history", "traceback"])

    assert with_tensor - before >= 1 << 24
    assert get_device("mps").memory_stats().allocated <= before


def test_training_learns_with_flat_memory():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)).to("mps")
    optimizer = nb.training.adamw(model.parameters(), lr=1e-2)
    batch = torch.ones(32, 64).to("mps")
    loop = nb.epochs(6, "mps")
    losses = []
    for _epoch in loop:
        for _step in range(4):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())

    assert losses[-1] < losses[0]
    assert loop.curve.verdict in {"flat", "sawtooth"}


def test_new_shapes_do_not_add_up_between_steps(monkeypatch):
    """Without releases, the blocks could add up to 4.6 GiB; torch may allocate heaps of 1 GiB for them."""
    from openmed_nb.devices.registry import get_device
    from openmed_nb.training import epochs

    monkeypatch.setattr(epochs, "MAX_TIME_FRACTION", 1)
    get_device("mps").empty_cache()
    before = get_device("mps").memory_stats().reserved
    reserved = []
    with nb.training.EpochHooks("mps", release_when=1.1) as hooks:
        for number in range(1, 49):
            torch.empty(number << 22, dtype=torch.uint8, device="mps")
            hooks.step()
            reserved.append(get_device("mps").memory_stats().reserved)

    assert max(reserved) < before + (3 << 30)


def test_report_selects_mps_by_default(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENMED_TORCH_DEVICE", raising=False)
    report = run_report(
        tmp_path, StepOptions(quick=True), [step for step in STEPS if step.name in {"device", "doctor"}]
    )

    assert (report.device, report.missing_steps) == ("mps", ())
