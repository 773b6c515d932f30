"""Workers of a cluster: display, and differences that are rejected."""

from dataclasses import replace

import pytest

import openmed_nb as nb
from openmed_nb.distributed.client import is_running, parse_host, require_extra
from openmed_nb.distributed.members import ReadyWorker, WorkerInfo, WorkerList, check_workers_match
from openmed_nb.errors import ConfigurationError, WorkerMismatchError

VERSIONS = {"openmed_nb": nb.__version__, "torch": "2.13.0", "transformers": "5.23.0", "tokenizers": "0.23.3"}
MAC = WorkerInfo("mac1", "Darwin arm64", "mps", "No device was requested, and mps has the highest priority.", VERSIONS)
LINUX = WorkerInfo("box", "Linux x86_64", "cuda", "'cuda' was requested by the device argument.", VERSIONS)
SETTINGS = {"model": "1f", "aggregation_strategy": "first"}


def make_ready(info, settings=SETTINGS, **versions):
    """Return a worker that has loaded a model, with the given package versions."""
    return ReadyWorker(replace(info, versions={**VERSIONS, **versions}), settings, 65536)


def test_worker_list_displays_hosts_and_versions():
    workers = WorkerList((MAC, MAC, LINUX))

    assert str(workers).startswith("3 workers (cuda, mps) on 2 hosts\nWorkers (this run)\n")
    assert all(value in str(workers) for value in ("mac1", "'cuda' was requested", "2.13.0"))
    assert workers.to_dict()["workers"][2]["device"] == "cuda"
    assert len(workers) == 3
    assert WorkerList((MAC,)).label == "1 worker (mps)"


MATCHING = {
    "same": [make_ready(MAC), make_ready(MAC)],
    "other devices": [make_ready(MAC), make_ready(LINUX)],
    "other chunks": [make_ready(MAC), replace(make_ready(LINUX), chunk_characters=1)],
    "alone": [make_ready(MAC, torch="2.6.0")],
}
MISMATCHES = {
    "torch": (
        [make_ready(MAC), make_ready(MAC), make_ready(LINUX, torch="2.12.0")],
        "torch 2.12.0, but others have 2.13.0.",
    ),
    "the first": ([make_ready(LINUX, torch="2.12.0"), make_ready(MAC), make_ready(MAC)], "torch 2.12.0, but others"),
    "transformers": ([make_ready(MAC), make_ready(LINUX, transformers="5.0.0")], "transformers 5.0.0, but others"),
    "tokenizers": ([make_ready(MAC), make_ready(LINUX, tokenizers="0.22.0")], "tokenizers 0.22.0, but others"),
    "openmed_nb": ([make_ready(MAC), make_ready(LINUX, openmed_nb="0.0.1")], "openmed_nb 0.0.1, but this process"),
    "model": ([make_ready(MAC), make_ready(LINUX, {**SETTINGS, "model": "2e"})], "a different model or"),
    "settings": (
        [make_ready(MAC), make_ready(LINUX, {**SETTINGS, "aggregation_strategy": "max"})],
        "a different model or",
    ),
}


@pytest.mark.parametrize("workers", MATCHING.values(), ids=MATCHING)
def test_check_workers_match_accepts_different_devices(workers):
    check_workers_match(workers)


@pytest.mark.parametrize(("workers", "message"), MISMATCHES.values(), ids=MISMATCHES)
def test_check_workers_match_names_the_different_host(workers, message):
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
def test_is_running_includes_paused_workers_with_a_task(worker, expected):
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
def test_parse_host_removes_protocol_and_port(address, host):
    assert parse_host(address) == host


def test_require_extra_names_the_install_command():
    message = (
        r"^A cluster needs it: No module named 'no_such_package'\. Install it: .* 'dask\[distributed\]' asyncssh\.$"
    )
    with pytest.raises(ConfigurationError, match=message):
        require_extra("no_such_package", "A cluster needs it")
