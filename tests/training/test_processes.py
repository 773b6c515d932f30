"""Training in several processes: each process has a curve, the first displays it, and MPS is rejected."""

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import openmed_nb as nb
from openmed_nb.training.curve import ProcessInfo

PROGRAM = Path(__file__).parent / "several_processes.py"


@pytest.fixture
def second_of_two(monkeypatch):
    """Environment variables of the second of two processes."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module", params=["forked", pytest.param("launched", marks=pytest.mark.slow)])
def results(request, tmp_path_factory):
    """Results of two processes for a loop with Accelerate, by rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    folder = tmp_path_factory.mktemp("out")
    command = [sys.executable, *(launcher if request.param == "launched" else ()), PROGRAM, folder]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    with subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE) as process:
        try:
            _, errors = process.communicate(timeout=200)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors[-3000:]
    return {file.stem: json.loads(file.read_text("utf-8")) for file in folder.glob("*.json")}


@pytest.mark.real_computer
def test_each_process_records_its_curve(results):
    """Only the first process displays its curve."""
    expected = {"processes": 2, "device": "cpu", "epochs": 2}

    assert results == {rank: {**expected, "displayed": int(rank == "0")} for rank in ("0", "1")}


@pytest.mark.parametrize(
    ("variables", "process"),
    [
        ({}, ProcessInfo(0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, ProcessInfo(3, 4)),
        ({"WORLD_SIZE": "many", "RANK": "-1"}, ProcessInfo(0, 1)),
    ],
)
def test_current_process_reads_launcher_variables(variables, process, monkeypatch):
    for name, value in {"RANK": "", "WORLD_SIZE": "", **variables}.items():
        monkeypatch.setenv(name, value)

    assert nb.training.EpochHooks("cpu").curve.process == process


@pytest.mark.real_computer
@pytest.mark.usefixtures("by_itself", "second_of_two")
@pytest.mark.parametrize(("rank", "num_warnings"), [("1", 1), ("0", 0)])
def test_growing_process_without_display_warns(rank, num_warnings, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", nb.OpenMedWarning)
        losses = [torch.ones(1 << 18) for _epoch in nb.epochs(4, "cpu")]
    messages = [str(warning.message) for warning in warned if warning.category is nb.OpenMedWarning]

    assert (len(losses), len(messages)) == (4, num_warnings)
    assert all(re.match(r"Process 1 of 2 on cpu: Memory .* went from .*threshold", text) for text in messages)


def test_cpu_with_index_is_cpu():
    assert nb.training.EpochHooks(torch.device("cpu", 0)).device == "cpu"
