"""The Accelerate example of the documentation trains on every device, in one and in several processes."""

import contextlib
import re
import runpy
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

import openmed_nb as nb
from helpers.processes import run_python

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "train_with_accelerate.py"
LAUNCH = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2")
# Run the script, and fail if its process group is not destroyed at the end, which NCCL warns about.
CHECKED = f"""
import runpy
import torch.distributed
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
assert not torch.distributed.is_initialized()
"""


def assert_learned(text, device):
    """Assert that one process printed the loss of four epochs on a device, and that it fell to a fifth."""
    losses = [float(loss) for loss in re.findall(rf"^epoch \d on {device}: loss ([\d.]+)$", text, flags=re.MULTILINE)]

    assert len(losses) == 4, text
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 5
    assert re.search(r"^memory: (flat|insufficient data)$", text, flags=re.MULTILINE), text


@pytest.mark.real_computer
@pytest.mark.parametrize("launcher", [LAUNCH, TORCHRUN])
def test_example_trains_on_cpu_with_launcher(launcher, tmp_path):
    """With two processes, each trains on half of the sentences, and only the first prints."""
    checked = tmp_path / "checked.py"
    checked.write_text(CHECKED)
    done = run_python(*launcher, checked, environ={"HF_HOME": str(tmp_path), "ACCELERATE_USE_CPU": "true"})

    assert done.returncode == 0, done.stderr[-2000:]
    assert_learned(done.stdout, "cpu")


@pytest.mark.real_computer  # It starts its own simulation.
@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_example_trains_in_one_process(device, capsys):
    AcceleratorState._reset_state(reset_partial_state=True)
    with nb.simulated_mps("8 GiB") if device == "mps" else contextlib.nullcontext():
        runpy.run_path(str(SCRIPT), run_name="__main__")
    AcceleratorState._reset_state(reset_partial_state=True)

    assert_learned(capsys.readouterr().out, device)
