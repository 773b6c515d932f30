"""A cluster over real SSH: a server on 127.0.0.1 with keys of its own stands for two hosts."""

from __future__ import annotations

import getpass
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import openmed_nb as nb
from openmed_nb.annotation.cluster.hosts import Certificates, Login, checked_hosts, worker_options
from openmed_nb.annotation.cluster.starting import checked_security
from openmed_nb.errors import ClusterUnusable, ConfigurationError

pytestmark = [
    pytest.mark.real_computer,  # Hosts are processes.
    pytest.mark.skipif(sys.platform == "win32", reason="the server of SSH is one of POSIX"),
]

FOLDER = Path(__file__).parent
HOSTS = ["127.0.0.1", "localhost"]
COUNT = 200


@pytest.fixture(scope="module")
def server(helper, tmp_path_factory):
    """A server of SSH that lets one key in, and whose key is known."""
    module = helper(FOLDER / "ssh_server.py")
    with module.ssh_server(tmp_path_factory.mktemp("ssh"), str(FOLDER.parents[1])) as server:
        yield server


@pytest.fixture(scope="module")
def login(server):
    """What lets us in."""
    files = {name: server.folder / file for name, file in {"key": "user", "known_hosts": "known_hosts"}.items()}
    return {"user": getpass.getuser(), "port": server.port, **files}


@pytest.fixture(scope="module")
def ssh_pool(login):
    """A cluster of two hosts."""
    with nb.cluster(hosts=HOSTS, device="cpu", threads=1, **login) as cluster:
        yield cluster


def processes_of(client):
    """Return the processes of a cluster: workers, the nannies that watch them, and the scheduler."""
    workers = [*client.run(os.getpid).values(), *client.run(os.getppid).values()]
    return [*workers, client.run_on_scheduler(os.getpid)]


def is_running(pid):
    """Tell whether a process runs; one that waits to be reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def folders():
    """Return the folders of certificates that are there now."""
    return set(Path("/tmp").glob("openmed_nb-*"))  # noqa: S108


def test_answers(ssh_pool, keyword_model, numbered, numbers_of):
    """Hosts answer as this computer does, and say who they are."""
    found = nb.annotate(numbered(COUNT), keyword_model, client=ssh_pool.client, progress=False)
    expected = nb.annotate(numbered(COUNT), keyword_model, device="cpu", progress=False)

    assert list(found) == list(expected)
    assert numbers_of(found) == [[number] for number in range(COUNT)]
    assert str(ssh_pool) == ("2 workers (cpu) on 1 computer\n  cpu: 'cpu' was asked for by OPENMED_TORCH_DEVICE.")
    assert ssh_pool.to_dict()["workers"][0]["versions"]["openmed_nb"] == nb.__version__


def test_connections_are_encrypted(ssh_pool):
    """Only a process with a certificate of the cluster can talk to it, and nobody else on a host can read that."""
    from distributed import Client

    address = ssh_pool.client.scheduler.address
    modes = {oct(one.stat().st_mode & 0o777) for folder in folders() for one in (folder, *folder.iterdir())}

    assert address.startswith("tls://")
    assert modes == {"0o700", "0o600"}
    with pytest.raises(OSError, match=r"Timed out|reset|closed"):
        Client(address.replace("tls", "tcp"), timeout=2)


def test_host_that_goes_away(ssh_pool, keyword_model, numbered, numbers_of, tmp_path):
    """A host that goes away in the middle of a run, with all its processes, costs no text, and none is answered twice."""
    file, client = tmp_path / "run.jsonl", ssh_pool.client
    pids = [*zip(client.run(os.getppid).values(), client.run(os.getpid).values(), strict=True)]

    def kill():
        while not (file.exists() and file.read_bytes().count(b"\n") > 1):
            time.sleep(0.01)
        for pid in pids[0]:
            os.kill(pid, signal.SIGKILL)

    def slowly():
        for text in numbered(COUNT):
            time.sleep(0.01)
            yield text

    killer = threading.Thread(target=kill)
    killer.start()
    found = nb.annotate(slowly(), keyword_model, client=client, resume=file, progress=False)
    killer.join()

    assert numbers_of(found) == [[number] for number in range(COUNT)]
    assert found.errors == {}
    assert [*client.run(os.getpid).values()] == [pids[1][1]]


def test_nothing_is_left(login):
    """When the block ends, no process of the cluster is left on a host, and no certificate."""
    before = folders()
    with nb.cluster(hosts=HOSTS[:1], **login) as cluster:
        pids = processes_of(cluster.client)
        during = folders()
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)

    assert len(pids) == 3
    assert len(during - before) == 1
    assert [pid for pid in pids if is_running(pid)] == []
    assert folders() == before


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"known_hosts": "user.pub"}, r"^The key of host localhost is not among the known hosts, .* Run ssh localhost"),
        ({"key": "stranger"}, r"^localhost does not let you in: .*\. Name user and key\.$"),
        ({"port": 1}, r"^localhost cannot be used over SSH: .*\. Check its name and port\.$"),
        (
            {"remote_python": "/nowhere/python"},
            r"^'/nowhere/python' on localhost cannot be used: ",
        ),
        ({"key": "nowhere"}, r"^localhost cannot be used over SSH: .*nowhere"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_host_that_cannot_be_used(server, login, wrong, message):
    """A host that is not the one that is known, lets nobody in or has no openmed_nb is named, and nothing is started."""
    given = {name: server.folder / value if name in ("key", "known_hosts") else value for name, value in wrong.items()}
    with pytest.raises(ClusterUnusable, match=message):
        nb.cluster(hosts=["localhost"], **{**login, **given})


def test_key_of_another_host(server, login, tmp_path):
    """A host whose key has changed is refused."""
    known = (
        (server.folder / "known_hosts")
        .read_text()
        .replace(
            (server.folder / "host.pub").read_text().split()[1], (server.folder / "stranger.pub").read_text().split()[1]
        )
    )
    (tmp_path / "known").write_text(known)
    with pytest.raises(ClusterUnusable, match=r"The key of host 127\.0\.0\.1 is not"):
        nb.cluster(hosts=["127.0.0.1"], **{**login, "known_hosts": tmp_path / "known"})


@pytest.mark.parametrize("hosts", ["mac1", [], [""], [1], ["-oProxyCommand=x"]], ids=repr)
def test_what_are_no_hosts(hosts):
    """What names no host is refused."""
    with pytest.raises(ConfigurationError, match="hosts cannot be"):
        nb.cluster(hosts=hosts)


@pytest.mark.parametrize(
    ("hosts", "options"),
    [
        (["a", "b"], {"nthreads": 2, "memory_limit": 1.0, "env": {}}),
        (["a", "a"], {"nthreads": 2, "memory_limit": 0.5, "env": {}}),
    ],
)
def test_workers_of_a_host_share_its_memory(hosts, options):
    """Two workers on a host have half of its memory each."""
    assert worker_options(hosts, None, None) == options


def test_certificates_of_a_person():
    """Certificates that are files on every host are named, and nothing is written."""
    from distributed import Security

    own = Certificates.of(Security(tls_ca_file="ca.pem", tls_worker_cert="w.pem", require_encryption=True))
    made = Certificates.of(checked_security(None))

    assert (own.files, own.config["distributed.comm.tls.ca-file"]) == ({}, "ca.pem")
    assert len(made.files) == 5
    assert "PRIVATE" not in str(made.config)
    with pytest.raises(ConfigurationError, match="security cannot be str"):
        checked_security("tls")


def test_login_leaves_the_rest_to_ssh():
    """What is not said is as in the settings of SSH; the check of the host's key cannot be switched off."""
    assert Login().options == {}
    assert Login(user="me", key="k", port=22, known_hosts="f").options == {
        "username": "me",
        "client_keys": ["k"],
        "port": 22,
        "known_hosts": "f",
    }
    assert checked_hosts(iter(HOSTS)) == ("127.0.0.1", "localhost")
