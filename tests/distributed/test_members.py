"""Who takes part in a cluster: how it is shown, and what differences are refused."""

from dataclasses import replace

import pytest

import openmed_nb as nb
from openmed_nb.distributed.client import is_running, parse_host, require_extra
from openmed_nb.distributed.members import ReadyWorker, WorkerInfo, WorkerList, check_workers_match
from openmed_nb.errors import ConfigurationError, WorkerMismatchError

VERSIONS = {"openmed_nb": nb.__version__, "torch": "2.13.0", "transformers": "5.23.0", "tokenizers": "0.23.3"}
MAC = WorkerInfo("mac1", "Darwin arm64", "mps", "No device was asked for, and mps comes first.", VERSIONS)
LINUX = WorkerInfo("box", "Linux x86_64", "cuda", "'cuda' was asked for by argument.", VERSIONS)
SETTINGS = {"model": "1f", "aggregation_strategy": "first"}


def ready(member, settings=SETTINGS, **versions):
    """Return a worker that has loaded a model, with other versions than usual."""
    return ReadyWorker(replace(member, versions={**VERSIONS, **versions}), settings, 65536)


def test_text_form():
    """The text says how many workers there are and why they use their devices; hosts and versions stand in the HTML."""
    members = WorkerList((MAC, MAC, LINUX))

    assert str(members).splitlines() == [
        "3 workers (cuda, mps) on 2 computers",
        "  cuda: 'cuda' was asked for by argument.",
        "  mps: No device was asked for, and mps comes first.",
    ]
    assert "mac1" in members._repr_html_()
    assert "2.13.0" in members._repr_html_()
    assert members.to_dict()["workers"][2]["device"] == "cuda"
    assert len(members) == 3
    assert WorkerList((MAC,)).label == "1 worker (mps)"


ALIKE = {
    "same": [ready(MAC), ready(MAC)],
    "other devices": [ready(MAC), ready(LINUX)],
    "other chunks": [ready(MAC), replace(ready(LINUX), characters=1)],
    "alone": [ready(MAC, torch="2.6.0")],
}
OTHER = {
    "torch": ([ready(MAC), ready(MAC), ready(LINUX, torch="2.12.0")], "torch 2.12.0, and others have 2.13.0."),
    "the first": ([ready(LINUX, torch="2.12.0"), ready(MAC), ready(MAC)], "torch 2.12.0, and others"),
    "transformers": ([ready(MAC), ready(LINUX, transformers="5.0.0")], "transformers 5.0.0, and others"),
    "tokenizers": ([ready(MAC), ready(LINUX, tokenizers="0.22.0")], "tokenizers 0.22.0, and others"),
    "openmed_nb": ([ready(MAC), ready(LINUX, openmed_nb="0.0.1")], "openmed_nb 0.0.1, and this process"),
    "model": ([ready(MAC), ready(LINUX, {**SETTINGS, "model": "2e"})], "another model by that name, or"),
    "settings": (
        [ready(MAC), ready(LINUX, {**SETTINGS, "aggregation_strategy": "max"})],
        "another model by that name, or",
    ),
}


@pytest.mark.parametrize("workers", ALIKE.values(), ids=ALIKE)
def test_workers_that_are_alike(workers):
    """Workers with other devices, which compute the same in float32, may take part together."""
    check_workers_match(workers)


@pytest.mark.parametrize(("workers", "message"), OTHER.values(), ids=OTHER)
def test_workers_that_differ(workers, message):
    """A worker that would give other answers than the others is named by its computer, with what it has."""
    with pytest.raises(WorkerMismatchError) as caught:
        check_workers_match(workers)
    assert str(caught.value).startswith(f"The worker on box has {message}")


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        ({"status": "running"}, True),
        ({"status": "paused"}, False),
        ({"status": "paused", "metrics": {"task_counts": {}}}, False),
        ({"status": "paused", "metrics": {"task_counts": {"executing": 1}}}, True),
    ],
)
def test_a_worker_that_works(worker, expected):
    """A worker that computes something works, also where it is short of memory."""
    assert is_running(worker) is expected


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("tcp://10.0.0.2:1", "10.0.0.2"),
        ("tls://[::1]:80", "::1"),
        ("inproc://10.0.0.2/1/1", "10.0.0.2"),
        ("odd", "odd"),
    ],
)
def test_host_of_an_address(address, host):
    """The computer of an address is what stands between protocol and port."""
    assert parse_host(address) == host


def test_a_package_that_is_missing():
    """A package that is not installed is named with the line that installs it."""
    message = (
        r"^A cluster needs it: No module named 'no_such_package'\. Install it: .* 'dask\[distributed\]' asyncssh\.$"
    )
    with pytest.raises(ConfigurationError, match=message):
        require_extra("no_such_package", "A cluster needs it")
