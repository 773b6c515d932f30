"""The longer answers: every device with why or why not, and the whole way to the choice."""

from __future__ import annotations

import json

import pytest

from openmed_nb.devices.choice import Candidate, DeviceChoice, DeviceList, Explanation, Rejection
from openmed_nb.devices.environment import FALLBACK, plan
from openmed_nb.devices.request import DeviceRequest, Wish, precedence

NO_MAC = Rejection("mps", "this computer runs Linux", "Use a Mac.")


def choice(device: str = "cpu", rejected: tuple[Rejection, ...] = ()) -> DeviceChoice:
    """Return a choice of a device that was asked for."""
    return DeviceChoice(device, device, "argument", f"{device!r} was asked for.", certain=True, rejected=rejected)


def test_list_of_devices():
    """Each device has its state, and the one in force is marked under either of its spellings."""
    gpus = (Candidate("cuda:0"), Candidate("cuda:1", tried=False))
    for in_force, place in {"cuda": 1, "cuda:0": 1, "cuda:1": 2, "cpu": 3, None: None}.items():
        listed = DeviceList((Candidate("mps", NO_MAC), *gpus, Candidate("cpu")), in_force and choice(in_force))
        states = ["cannot be used", "usable", "not tried", "usable"]
        if place is not None:
            states[place] = "in force"
        assert [row[1] for row in listed.report().tables[0].rows] == states
        assert listed.to_dict()["in_force"] == in_force
        assert [one["usable"] for one in listed.to_dict()["devices"]] == [False, True, None, True]


def test_list_tells_why_not():
    """A device that cannot be used shows the reason and the remedy, in text, in HTML and as JSON."""
    listed = DeviceList((Candidate("mps", NO_MAC), Candidate("cpu")))

    for shown in (str(listed), listed._repr_html_(), json.dumps(listed.to_dict())):
        assert "this computer runs Linux" in shown
        assert "Use a Mac." in shown


def test_chain_shows_who_decides():
    """Exactly one link of the chain is marked as the one that decides."""
    for environ, argument, override, winner in (
        ({}, None, None, "automatic"),
        ({"OPENMED_DEVICE": "cpu"}, None, None, "OPENMED_DEVICE"),
        ({"OPENMED_TORCH_DEVICE": "auto", "OPENMED_DEVICE": "cpu"}, None, None, "OPENMED_DEVICE"),
        ({"OPENMED_TORCH_DEVICE": "cpu", "OPENMED_DEVICE": "nonsense"}, None, None, "OPENMED_TORCH_DEVICE"),
        ({"OPENMED_TORCH_DEVICE": "cpu"}, None, DeviceRequest("auto", "use()"), "use()"),
        ({"OPENMED_TORCH_DEVICE": "cpu"}, "cpu", DeviceRequest("mps", "use()"), "argument"),
        ({"OPENMED_TORCH_DEVICE": ""}, "auto", None, "automatic"),
    ):
        chain = precedence(environ, Wish("argument", argument), override)
        explained = Explanation(chain, choice(), plan({}, "cpu"), {})
        assert [row[0] for row in explained.report().tables[0].rows if row[2] == "decides"] == [winner]


def test_explanation_holds_everything():
    """An explanation shows the chain, the choice, what was ruled out, the environment and the other variables."""
    explained = Explanation(
        precedence({"OPENMED_DEVICE": "cpu"}), choice("cpu", (NO_MAC,)), plan({}), {"HF_HUB_OFFLINE": "1"}
    )
    captions = [table.caption for table in explained.report().tables]

    assert captions == ["Who asks, the strongest first", "Ruled out", "Environment", "Other variables"]
    for said in ("'cpu' was asked for.", "OPENMED_DEVICE", NO_MAC.reason, FALLBACK, "HF_HUB_OFFLINE"):
        assert said in str(explained)
    assert list(json.loads(json.dumps(explained.to_dict()))) == ["chain", "choice", "environment", "variables"]


@pytest.mark.parametrize(
    ("spelling", "shown", "leak"),
    [
        ("hf_s3cret", "***", "s3cret"),
        ("https://me:s3cret@host", "https://***@host", "s3cret"),
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;", "<script>"),
    ],
)
def test_hidden_spelling_is_masked_and_escaped(spelling: str, shown: str, leak: str):
    """What stands in a variable that does not count is masked where it looks secret, and escaped in HTML."""
    chain = precedence({"OPENMED_TORCH_DEVICE": "cpu", "OPENMED_DEVICE": spelling})
    explained = Explanation(chain, choice(), plan({}, "cpu"), {})
    html = explained._repr_html_()

    assert shown in html
    assert leak not in html
    assert "s3cret" not in str(explained) + json.dumps(explained.to_dict())


def test_tables_of_an_explanation():
    """The tables of an explanation and of a list of devices name their columns; the last way to a choice is the automatic one."""
    explained = Explanation(precedence({"OPENMED_DEVICE": "cpu"}), choice("cpu", (NO_MAC,)), plan({}), {"A": "1"})
    asked, ruled_out, _environment, others = explained.report().tables
    listed = DeviceList((Candidate("mps", NO_MAC), Candidate("cuda:0", tried=False), Candidate("cpu")), choice())

    assert asked.columns == ("source", "says", "result")
    assert asked.rows[0] == ("argument", "(nothing)", "")
    assert asked.rows[-2:] == (("OPENMED_DEVICE", "cpu", "decides"), ("automatic", "mps, then cuda, then cpu", ""))
    assert ruled_out.columns == ("device", "why", "what to do")
    assert ruled_out.rows == (("mps", NO_MAC.reason, NO_MAC.remedy),)
    assert (others.columns, others.rows) == (("variable", "value"), (("A", "1"),))
    assert explained.to_dict()["chain"][-1] == {"source": "OPENMED_DEVICE", "says": "cpu"}
    (devices,) = listed.report().tables
    assert (devices.caption, devices.columns) == ("", ("device", "state", "why", "what to do"))
    assert devices.rows[1] == ("cuda:0", "not tried", "no computation on it was tried yet", "%openmed_device cuda:0")
    assert listed.to_dict()["devices"][0] == {**vars(NO_MAC), "usable": False}


def test_a_choice_in_words_and_as_json():
    """A choice says the device and how sure it is, why, the type, and what moved; as JSON it is all of it."""
    moved = DeviceChoice("mps", "auto", "nobody", "mps comes first.", True, (NO_MAC,), "float32", "why", ("a", "b"))
    planned = DeviceChoice("cpu", "auto", "nobody", "nothing else.", certain=False, simulated=True)

    assert moved.report().title == "Device: mps (confirmed)"
    assert moved.report().sentences == ("mps comes first.", "float32: why.", "Moved to mps: a, b.")
    assert planned.report().title == "Device: cpu (SIMULATED, planned; torch is not loaded yet)"
    assert planned.report().tables == ()
    assert [one.computer for one in (moved, planned)] == ["this computer", "a SIMULATED Mac"]
    assert moved.to_dict() == {**vars(moved), "rejected": [vars(NO_MAC)], "moved": ["a", "b"]}
    assert planned.to_dict()["dtype"] == "float32"
