"""Who takes part in a cluster: how it is told, and what differences are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

import openmed_nb as nb
from openmed_nb.distributed.client import executing, failure_of, host_of
from openmed_nb.distributed.members import Member, Members, Ready, check_alike, most_common
from openmed_nb.errors import ClusterError, UnknownModel, WorkersDiffer

VERSIONS = {"openmed_nb": nb.__version__, "torch": "2.13.0", "transformers": "5.23.0", "tokenizers": "0.23.3"}
MAC = Member("mac1", "Darwin arm64", "mps", "No device was asked for, and mps comes first.", VERSIONS)
LINUX = Member("box", "Linux x86_64", "cuda", "'cuda' was asked for by argument.", VERSIONS)
SETTINGS = {"model": "1f", "aggregation_strategy": "first"}


def ready(member, settings=SETTINGS, **versions):
    """Return a worker that has loaded a model, with other versions than usual."""
    return Ready(replace(member, versions={**VERSIONS, **versions}), settings, 65536)


def test_text_form():
    """The text says how many workers there are and why they use their devices; hosts and versions stand in the HTML."""
    members = Members((MAC, MAC, LINUX))

    assert str(members).splitlines() == [
        "3 workers (cuda, mps) on 2 computers",
        "  cuda: 'cuda' was asked for by argument.",
        "  mps: No device was asked for, and mps comes first.",
    ]
    assert "mac1" in members._repr_html_()
    assert "2.13.0" in members._repr_html_()
    assert members.to_dict()["workers"][2]["device"] == "cuda"
    assert len(members) == 3


def test_one_worker():
    """One worker is one worker."""
    assert Members((MAC,)).label == "1 worker (mps)"


ALIKE = {
    "same": [ready(MAC), ready(MAC)],
    "other devices": [ready(MAC), ready(LINUX)],
    "other chunks": [ready(MAC), replace(ready(LINUX), characters=1)],
    "alone": [ready(MAC, torch="2.6.0")],
}
OTHER = {
    "torch": (
        [ready(MAC), ready(MAC), ready(LINUX, torch="2.12.0")],
        "on box has torch 2.12.0, and others have 2.13.0.",
    ),
    "the first": ([ready(LINUX, torch="2.12.0"), ready(MAC), ready(MAC)], "on box has torch 2.12.0, and others"),
    "transformers": ([ready(MAC), ready(LINUX, transformers="5.0.0")], "on box has transformers 5.0.0, and others"),
    "tokenizers": ([ready(MAC), ready(LINUX, tokenizers="0.22.0")], "on box has tokenizers 0.22.0, and others"),
    "openmed_nb": ([ready(MAC), ready(LINUX, openmed_nb="0.0.1")], "on box has openmed_nb 0.0.1, and this process"),
    "model": ([ready(MAC), ready(LINUX, {**SETTINGS, "model": "2e"})], "on box has another model by that name, or"),
    "settings": (
        [ready(MAC), ready(LINUX, {**SETTINGS, "aggregation_strategy": "max"})],
        "on box has another model by that name, or",
    ),
}


@pytest.mark.parametrize("workers", ALIKE.values(), ids=ALIKE)
def test_workers_that_are_alike(workers):
    """Workers with other devices, which compute the same in float32, may take part together."""
    check_alike(workers)


@pytest.mark.parametrize(("workers", "message"), OTHER.values(), ids=OTHER)
def test_workers_that_differ(workers, message):
    """A worker that would give other answers than the others is named by its computer, with what it has."""
    with pytest.raises(WorkersDiffer) as caught:
        check_alike(workers)
    assert message in str(caught.value)


def test_most_common():
    """Of as many, the first counts."""
    assert most_common([{"a": 1}, {"a": 2}]) == {"a": 1}


def test_failure_of_a_worker():
    """An error of ours is told as it is; a missing package is named, and any other error with its computer."""
    ours = UnknownModel("On mac1: There is no model.", "Name one.")
    assert failure_of("mac1", ours) is ours
    assert str(failure_of("mac1", ModuleNotFoundError("No module named 'torch'", name="torch"))) == (
        "The worker at mac1 failed: No module named 'torch'. Look at its log."
    )
    assert isinstance(failure_of("mac1", ConnectionError("gone")), ClusterError)


@pytest.mark.parametrize(
    ("metrics", "busy"),
    [({}, False), ({"metrics": {"task_counts": {}}}, False), ({"metrics": {"task_counts": {"executing": 1}}}, True)],
)
def test_a_worker_that_computes(metrics, busy):
    """A worker that computes something works, also where it is short of memory."""
    assert executing(metrics) is busy


@pytest.mark.parametrize(
    ("address", "host"),
    [("tcp://10.0.0.2:1", "10.0.0.2"), ("tls://[::1]:80", "::1"), ("tls://mac1:80", "mac1"), ("odd", "odd")],
)
def test_host_of_an_address(address, host):
    """The computer of an address is what stands between protocol and port."""
    assert host_of(address) == host
