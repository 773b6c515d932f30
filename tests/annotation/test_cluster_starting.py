"""Starting workers on this computer: one for each device, with its threads; and ending them without a trace."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import psutil
import pytest

import openmed_nb as nb
from openmed_nb.annotation.cluster.starting import WorkerPlan, begin, plan_workers, same_environment, visible_gpus
from openmed_nb.errors import ClusterUnusable, ConfigurationError

PLANS = {
    "CPU": (("cpu", None, (), 8), [WorkerPlan("cpu")]),
    "two on a CPU": (("cpu", 2, (), 8), [WorkerPlan("cpu", threads=4)] * 2),
    "more than cores": (("cpu", 3, (), 2), [WorkerPlan("cpu", threads=1)] * 3),
    "threads of a CPU": (("cpu", 1, (), 8, 1), [WorkerPlan("cpu", threads=1)]),
    "MPS": (("mps", None, (), 8), [WorkerPlan("mps")]),
    "one on MPS": (("mps", 1, (), 8), [WorkerPlan("mps")]),
    "GPUs": (("cuda", None, ("0", "1"), 8), [WorkerPlan("cuda", "0"), WorkerPlan("cuda", "1")]),
    "some GPUs": (("cuda", 1, ("2", "3"), 8), [WorkerPlan("cuda", "2")]),
    "one GPU by its number": (("cuda:1", None, ("2", "3"), 8), [WorkerPlan("cuda", "3")]),
}
REFUSED = {
    "two on MPS": (("mps", 2, (), 8), "2 workers were asked for, and there is one MPS device, which several processes"),
    "too many GPUs": (("cuda", 3, ("0", "1"), 8), "3 workers were asked for, and there is 2 GPUs for 'cuda'."),
    "two on one GPU": (("cuda:1", 2, ("0", "1"), 8), "2 workers were asked for, and there is 1 GPU for 'cuda:1'."),
    "none": (("cpu", 0, (), 8), "n cannot be 0."),
    "no number": (("cpu", "2", (), 8), "n cannot be '2'."),
    "true": (("cpu", True, (), 8), "n cannot be True."),
    "no thread": (("cpu", 1, (), 8, 0), "threads cannot be 0."),
}


@pytest.mark.parametrize(("asked", "plans"), PLANS.values(), ids=PLANS)
def test_one_worker_for_each_device(asked, plans):
    """Each GPU of CUDA has its worker, MPS one, and the CPU as many as are asked for, which share its cores."""
    assert list(plan_workers(*asked)) == plans


@pytest.mark.parametrize(("asked", "message"), REFUSED.values(), ids=REFUSED)
def test_more_workers_than_devices(asked, message):
    """More workers than devices are refused, with the number that there is."""
    with pytest.raises(ConfigurationError) as caught:
        plan_workers(*asked)
    assert message in str(caught.value)


def test_environment_of_a_worker():
    """A worker sees its own GPU alone, and computes on the device and the threads that it was given."""
    assert WorkerPlan("cuda", "GPU-5a").environment == {
        "OPENMED_TORCH_DEVICE": "cuda",
        "CUDA_VISIBLE_DEVICES": "GPU-5a",
    }
    assert WorkerPlan(None, threads=3).environment == {"OMP_NUM_THREADS": "3"}
    assert [WorkerPlan("cpu", threads=threads).tasks for threads in (1, 2, None)] == [1, 2, 2]


@pytest.mark.parametrize(
    ("count", "variable", "names"),
    [
        (0, None, ()),
        (2, None, ("0", "1")),
        (2, "", ("0", "1")),
        (1, "3", ("3",)),
        (2, "GPU-a,GPU-b", ("GPU-a", "GPU-b")),
        (1, "0,-1,2", ("0",)),
    ],
)
def test_gpus_that_this_process_sees(count, variable, names):
    """The GPUs are called as in the variable that this process has, as many as torch sees."""
    assert visible_gpus(count, {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}) == names


def test_variables_are_given_back(monkeypatch):
    """What Dask sets in this process is gone afterwards, and what stood there before is back."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    with same_environment():
        os.environ["PYTHONHASHSEED"] = "6640"
    assert os.environ["PYTHONHASHSEED"] == "7"


def test_a_cluster_that_does_not_start():
    """What keeps a cluster from starting is told in one line."""

    def start():
        raise RuntimeError("no more processes")

    with pytest.raises(ClusterUnusable, match=r"^The cluster does not start: no more processes\. In a script"):
        begin(start, 1, pytest.fail)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 2, "hosts": ["mac1"]}, "n is for this computer alone"),
        ({"user": "me", "port": 22}, "user, port is for hosts"),
        ({"security": "tls"}, "security cannot be str"),
        ({"threads": 0, "hosts": ["mac1"]}, "threads cannot be 0"),
    ],
    ids=str,
)
def test_arguments_that_mean_nothing(arguments, message, request):
    """An argument that means nothing where the workers are is refused, and nothing is started."""
    if request.config.getoption("simulated_mps") and "security" in arguments:
        message = "A SIMULATED Mac has no cluster"
    with pytest.raises(ConfigurationError, match=message):
        nb.cluster(**arguments)


def test_a_simulated_mac_has_no_cluster(request):
    """Workers are processes of the real computer, so that a simulated one has none."""
    if request.config.getoption("simulated_mps"):
        with pytest.raises(ConfigurationError, match="A SIMULATED Mac has no cluster"):
            nb.cluster()
        return
    with nb.simulated_mps(), pytest.raises(ConfigurationError, match="A SIMULATED Mac has no cluster"):
        nb.cluster()


@pytest.mark.real_computer
class TestProcesses:
    """What is there while a cluster runs, and afterwards."""

    def test_nothing_is_left(self):
        """Workers import torch when a model is needed and not before, listen on this computer alone, and end with the block."""
        variables = dict(os.environ)
        with nb.cluster(n=1) as cluster:
            pids = [*cluster.client.run(os.getpid).values()]
            loaded = cluster.client.run(lambda: "torch" in sys.modules)
            ports = [*map(listening, [*pids, os.getpid()])]
        cluster.close()

        assert set(loaded.values()) == {False}
        assert {address for addresses in ports for address in addresses} == {"127.0.0.1"}
        assert [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"] == []
        assert dict(os.environ) == variables
        assert str(cluster).startswith("1 worker (cpu) on 1 computer")

    def test_a_killed_client_leaves_no_worker(self, tmp_path):
        """Where the process that began a cluster is killed, its workers end."""
        program = tmp_path / "program.py"
        program.write_text(
            textwrap.dedent("""
                import os, signal
                import openmed_nb as nb
                if __name__ == "__main__":
                    cluster = nb.cluster(n=1)
                    print(*cluster.client.run(os.getpid).values(), flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
            """)
        )
        done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, check=False)
        pid = int(done.stdout)
        gone, _alive = psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=20)

        assert done.returncode == -9
        assert not psutil.pid_exists(pid) or gone or psutil.Process(pid).status() == "zombie"


def listening(pid):
    """Return the addresses that a process listens on."""
    connections = psutil.Process(pid).net_connections()
    return {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}
