"""What computes on the MPS device of a Mac for real; skipped, with the reason, where there is none that computes."""

import platform
import subprocess
import sys

import pytest

import openmed_nb as nb
from openmed_nb.runbook.records.report.report import run_report
from openmed_nb.runbook.records.report.steps import STEPS

torch = pytest.importorskip("torch")

TEXTS = ["Seen for type 2 diabetes mellitus and asthma.", "No fever.", "Hypertension since 2019; " * 40]


@pytest.fixture(scope="module")
def mps_is_there():
    """Skip without an MPS device that computes; another process tries it, because what fails there may end its process."""
    if platform.system() != "Darwin":
        pytest.skip(f"MPS is on macOS alone, and this is {platform.system()}")
    tried = subprocess.run(
        [sys.executable, "-m", "openmed_nb", "--device", "mps"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        last = (tried.stderr.strip() or f"status {tried.returncode}").splitlines()[-1]
        pytest.skip(f"MPS does not compute here: {last}")


pytestmark = [pytest.mark.real_mps, pytest.mark.real_computer, pytest.mark.usefixtures("mps_is_there", "clean")]


def test_the_device_is_confirmed():
    """The device is taken, and torch has confirmed it with a computation."""
    choice = nb.use("mps")

    assert (choice.device, choice.confirmed, choice.simulated) == ("mps", True, False)


def test_entities_are_those_of_the_cpu():
    """Texts of several lengths have the same entities on MPS and on the CPU."""
    spans = [
        [[(one["start"], one["end"], one["entity_group"]) for one in entities] for entities in pipe(TEXTS)]
        for pipe in (nb.load_pipeline(device=device) for device in ("cpu", "mps"))
    ]

    assert spans[0] == spans[1]
    assert any(spans[0])


def test_logits_and_gradients_are_those_of_the_cpu():
    """Parity with gradients finds nothing that failed."""
    assert nb.runbook.parity("bundled", TEXTS, device="mps", gradients=True).status != "failed"


def test_memory_comes_back():
    """What a tensor takes of the device is counted, and handed back with it."""
    from openmed_nb.devices.registry import parse_device_argument

    nb.use("mps")
    before = parse_device_argument("mps").memory().allocated
    tensor = torch.ones(1 << 22, device="mps")
    with_it = parse_device_argument("mps").memory().allocated
    del tensor
    nb.release(history=False, traceback=False)

    assert with_it - before >= 1 << 24
    assert parse_device_argument("mps").memory().allocated <= before


def test_epochs_are_flat():
    """A small training on MPS learns, and its memory stays flat."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)).to("mps")
    optimizer, batch = nb.training.adamw(model.parameters(), lr=1e-2), torch.ones(32, 64).to("mps")
    loop, losses = nb.epochs(6, "mps"), []
    for _epoch in loop:
        for _step in range(4):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())

    assert losses[-1] < losses[0]
    assert loop.curve.verdict in {"flat", "sawtooth"}


def test_a_report_of_this_mac(tmp_path, monkeypatch):
    """Without a wish, the report takes MPS, and its doctor has an answer."""
    monkeypatch.delenv("OPENMED_TORCH_DEVICE", raising=False)
    report = run_report(tmp_path, True, False, [one for one in STEPS if one.name in {"device", "doctor"}])

    assert (report.device, report.missing_steps) == ("mps", ())
