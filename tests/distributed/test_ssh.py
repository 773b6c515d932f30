"""Cluster over real SSH. A server on 127.0.0.1 with separate keys represents two hosts."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

import openmed_nb as nb
from helpers.numbered_texts import get_numbers, numbered
from openmed_nb.distributed import starting
from openmed_nb.errors import ClusterUnavailableError, ConfigurationError, OpenMedWarning

pytestmark = [
    pytest.mark.real_computer,  # Hosts are processes.
    pytest.mark.skipif(sys.platform == "win32", reason="the SSH server needs POSIX"),
]

FOLDER = Path(__file__).parent
HOSTS = ["127.0.0.1", "localhost"]
COUNT = 1200  # More texts than are pending at a time.


@pytest.fixture(scope="module")
def server(helper, tmp_path_factory):
    """SSH server with a known host key that accepts one key."""
    module = helper(FOLDER / "ssh_server.py")
    with module.ssh_server(tmp_path_factory.mktemp("ssh"), str(FOLDER.parents[1])) as server:
        yield server


@pytest.fixture(scope="module")
def home(server, tmp_path_factory):
    """Home directory of this process, with SSH settings for the server."""
    home = tmp_path_factory.mktemp("home")
    server.write_settings(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        yield home


def list_processes():
    """Return the command lines of the cluster processes of this test process, also of those whose parent has ended."""
    descendants = psutil.Process().children(recursive=True)
    commands = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_own = process in descendants or process.ppid() <= 1
            if is_own and process.status() != psutil.STATUS_ZOMBIE:
                commands.append(" ".join(process.cmdline()))
    return sorted(command for command in commands if "dask_spec" in command or "multiprocessing-fork" in command)


def wait_until(condition):
    """Wait up to two minutes until a condition is true, and return whether it is."""
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


@pytest.fixture(autouse=True)
def check_cleanup(home):  # noqa: ARG001 - only its setup is needed
    """Check that a test leaves no process on a host."""
    processes = list_processes()
    yield
    assert wait_until(lambda: list_processes() == processes)


def test_hosts_give_the_results_of_one_machine(keyword_model):
    with nb.cluster(hosts=HOSTS, device="cpu") as cluster:
        found = nb.annotate(numbered(COUNT), keyword_model, client=cluster.client, progress=False)

    assert list(found) == list(nb.annotate(numbered(COUNT), keyword_model, device="cpu", progress=False))
    assert str(cluster).startswith("Closed: 2 workers (cpu) on 1 host\nWorkers (this run)\n")


@pytest.mark.slow
def test_lost_host_loses_no_text(keyword_model, tmp_path):
    file = tmp_path / "run.jsonl"
    killed = []

    def texts(client):
        pids = [*client.run(os.getppid).values()][:1] + [*client.run(os.getpid).values()][:1]
        for text in numbered(COUNT):
            if not killed and file.read_bytes().count(b"\n") > 1:
                killed.extend(pids)
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
            yield text

    with nb.cluster(hosts=HOSTS, device="cpu") as cluster:
        found = nb.annotate(texts(cluster.client), keyword_model, client=cluster.client, resume=file, progress=False)

    assert killed
    assert get_numbers(found) == [[number] for number in range(COUNT)]
    assert found.errors == {}


@pytest.mark.slow
def test_lost_scheduler_does_not_hide_the_error_of_the_block():
    def run():
        with nb.cluster(hosts=HOSTS[:1], device="cpu") as cluster:
            os.kill(cluster.client.run_on_scheduler(os.getpid), signal.SIGKILL)
            raise LookupError("of the block")

    with (
        pytest.warns(OpenMedWarning, match="did not shut down cleanly"),
        pytest.raises(LookupError, match="of the block"),
    ):
        run()


@pytest.mark.slow
def test_interrupt_during_start_ends_the_processes(interrupt_when):
    processes = list_processes()
    with pytest.raises(KeyboardInterrupt), interrupt_when(lambda: len(list_processes()) > len(processes)):
        nb.cluster(hosts=HOSTS[:1])


@pytest.mark.slow
def test_failed_start_on_one_host_ends_the_worker_on_the_other(monkeypatch):
    monkeypatch.setattr(starting, "START_TIMEOUT", 10)
    with pytest.raises(ClusterUnavailableError, match=r"^The cluster failed to start on 127.0.0.1, nohost.invalid: "):
        nb.cluster(hosts=[HOSTS[0], "nohost.invalid"], device="cpu")


UNREACHABLE = {
    "changed host key": {"UserKnownHostsFile": "changed_hosts"},
    "unknown key": {"IdentityFile": "stranger"},
}


@pytest.mark.parametrize("changes", UNREACHABLE.values(), ids=UNREACHABLE)
def test_cluster_names_unreachable_host(server, tmp_path, monkeypatch, changes):
    server.write_settings(tmp_path, **{name: server.folder / value for name, value in changes.items()})
    monkeypatch.setenv("HOME", str(tmp_path))
    message = r"^The cluster failed to start on localhost: .+\. Check that ssh connects to each host without a prompt\."
    with pytest.raises(ClusterUnavailableError, match=message):
        nb.cluster(hosts=["localhost"])


def test_cluster_names_host_without_python(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/my python")
    message = r"^The cluster failed to start on localhost: .*\. Install openmed-nb\[cluster\] in /nowhere/my python on"
    with pytest.raises(ClusterUnavailableError, match=message):
        nb.cluster(hosts=["localhost"])


def test_cluster_reports_missing_asyncssh(monkeypatch):
    monkeypatch.setitem(sys.modules, "asyncssh", None)
    with pytest.raises(ConfigurationError, match=r"^A cluster over SSH needs asyncssh: .+ Install it: .+ asyncssh\.$"):
        nb.cluster(hosts=["localhost"])
