"""What the panel shows, as a value: buttons, sentences and the static form, for every kind of computer and wish."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from openmed_nb.devices.backend import TorchInfo
from openmed_nb.errors import OpenMedError
from openmed_nb.notebook.panel.state import COMMANDS, PanelState, memory_bars, read_state
from openmed_nb.session import SESSION


def state_of(here):
    """Return what a panel shows of a computer; its GPU, which is not here, is not asked for its memory."""
    session = here.session
    return PanelState(
        session.list_devices(confirm=False), session.explain(confirm=False), memory_bars(None), session.inventory()
    )


def no_torch(computers):
    """Return a computer without torch."""
    return computers.Computer(computers.PLAIN, TorchInfo(None), {})


def tried(here):
    """Let a computer try what is asked for, which may fail."""
    with contextlib.suppress(OpenMedError):
        here.session.device()
    return here


def used(here, device):
    """Let a computer use a device."""
    here.session.use(device, "%openmed_device")
    return here


BUTTONS: dict[str, tuple[Callable[[ModuleType], Any], str, str, set[str]]] = {
    "auto on a Mac": (lambda c: c.mac(), "auto", "mps", {"cuda"}),
    "auto with GPUs that nobody counted": (lambda c: c.box(), "auto", "cuda", {"mps"}),
    "auto where MPS fails": (lambda c: tried(c.mac(failing="no memory")), "auto", "cpu", {"mps", "cuda"}),
    "a variable": (lambda c: c.mac(OPENMED_DEVICE="cpu"), "cpu", "cpu", {"cuda"}),
    "cuda with several GPUs": (lambda c: used(c.box(), "cuda"), "cuda:0", "cuda:0", {"mps"}),
    "the second of several GPUs": (lambda c: used(c.box(), "cuda:1"), "cuda:1", "cuda:1", {"mps"}),
    "the second of GPUs that nobody counted": (lambda c: c.box(OPENMED_DEVICE="cuda:1"), "cuda:1", "cuda:1", {"mps"}),
    "gpu on a Mac": (lambda c: used(c.mac(), "gpu"), "mps", "mps", {"cuda"}),
    "nonsense": (lambda c: c.mac(OPENMED_DEVICE="nonsense"), "", "", {"cuda"}),
    "no torch": (no_torch, "", "", {"mps", "cuda", "cpu"}),
}


@pytest.mark.parametrize(("make", "pressed", "in_force", "disabled"), BUTTONS.values(), ids=BUTTONS)
def test_buttons(computers, make, pressed, in_force, disabled):
    """What is asked for is pressed, what is used is in force, what cannot be used is disabled, and auto stands first.

    The table of devices in the static form says the same, and what to do about what cannot be used.
    """
    state = state_of(make(computers))
    buttons = state.buttons
    rows = next(table for table in state.to_report().tables if table.caption == "Devices").rows
    devices_in_force = [in_force] if in_force else []

    assert [one.device for one in buttons if one.pressed] == ([pressed] if pressed else [])
    assert [one.device for one in buttons if one.active] == devices_in_force
    assert {one.device for one in buttons if not one.enabled} == disabled
    assert (buttons[0].device, buttons[0].enabled) == ("auto", True)
    assert len({one.device for one in buttons}) == len(buttons)
    assert [row[0] for row in rows if row[1] == "in force"] == devices_in_force
    assert {row[0] for row in rows if row[1] == "cannot be used"} == disabled
    assert all(row[2] for row in rows if row[0] in disabled)


HOVER: dict[str, tuple[Callable[[ModuleType], Any], str, str]] = {
    "auto": (lambda c: c.plain(), "auto", "The best device of this computer."),
    "usable": (lambda c: c.plain(), "cpu", "Use cpu."),
    "a reason alone": (
        lambda c: c.plain(),
        "mps",
        "this computer runs Linux, and MPS is the GPU backend of macOS.",
    ),
    "a remedy too": (no_torch, "cpu", "torch is not installed. Install it: python -m pip install torch."),
}


@pytest.mark.parametrize(("make", "device", "said"), HOVER.values(), ids=HOVER)
def test_hover_says_why_a_device_cannot_be_used_or_what_a_button_does(computers, make, device, said):
    (button,) = (one for one in state_of(make(computers)).buttons if one.device == device)

    assert button.tooltip == said


@pytest.mark.parametrize(
    ("make", "first", "second"),
    [
        (lambda c: c.mac(), "Device: mps, chosen automatically: the chip is Apple M2.", "It is planned;"),
        (lambda c: tried(c.mac()), "Device: mps, chosen automatically: the chip is Apple M2.", ""),
        (lambda c: used(c.mac(), "cpu"), "Device: cpu, asked for by %openmed_device.", "It is planned;"),
        (lambda c: c.mac(OPENMED_DEVICE="mpss"), "No device is in force.", "'mpss' (from OPENMED_DEVICE)"),
        (no_torch, "No device is in force.", "'auto' (asked for by nobody) cannot be used"),
    ],
    ids=["planned", "confirmed", "by magic", "nonsense", "no torch"],
)
def test_status_says_what_is_in_force_and_how_sure_that_is_or_what_to_do(computers, make, first, second):
    status = state_of(make(computers)).status

    assert status[0] == first
    assert len(status) == (3 if first == "No device is in force." else 2 if second else 1)
    assert "".join(status[1:2]).startswith(second)


@pytest.mark.parametrize("value", ["hf_abcdefgh", "https://me:abcdefgh@hub.example", "token=abcdefgh"])
def test_secrets_are_masked(computers, value):
    """A secret that was pasted into a variable is shown nowhere, in no form."""
    state = state_of(computers.mac(OPENMED_DEVICE=value, HF_ENDPOINT=value, OPENMED_TORCH_DEVICE=""))

    assert "***" in " ".join(state.status)
    assert "abcdefgh" not in f"{state} {state._repr_html_()} {json.dumps(state.to_dict())}"


def test_the_static_form_is_complete(computers):
    """The static form has devices, environment, memory and the commands to type, in text and HTML."""
    state = state_of(computers.mac(HF_HUB_OFFLINE="1"))
    captions = [table.caption for table in state.to_report().tables if table.rows]

    assert captions == ["Devices", "Environment", "Other variables", "Memory", "The same by typing"]
    for command, _ in COMMANDS:
        assert command in str(state)
        assert f">{command}</code>" in state._repr_html_()
    assert repr(state) == str(state)


@pytest.mark.real_computer  # The extension is loaded afresh, which ends a simulation.
def test_commands_are_ours(shell):
    """What the static form offers to type exists."""
    for command, _ in COMMANDS:
        kind = "cell" if command.startswith("%%") else "line"
        assert command.split()[0].lstrip("%") in shell.magics_manager.magics[kind]


def test_look_looking_after_torch_was_loaded(computers):
    """Where somebody loaded torch, a look sees its GPUs, and still lets none compute."""
    here = computers.box()
    here.torch.inspect_imported_torch()
    state = PanelState(**read_state(here.session))

    assert [one.device for one in state.buttons] == ["auto", "mps", "cuda:0", "cuda:1", "cpu"]
    assert here.torch.probed == []
    assert state.choice is not None
    assert not state.choice.confirmed


def test_look_looking_is_quick_beside_mps(computers):
    """On a Mac whose session is on the CPU a look does not go through all living objects in search of MPS tensors."""
    here = used(computers.mac(), "cpu")
    here.torch.inspect_imported_torch()
    searches: list[None] = []
    here.torch.is_mps_allocator_initialized = lambda: searches.append(None)
    PanelState(**read_state(here.session))

    assert searches == []


FRESH = """
import os, sys
from openmed_nb.devices.choice import DeviceChoice
from openmed_nb.notebook.panel.state import memory_bars
from openmed_nb.notebook.panel.state import PanelState, read_state
from openmed_nb.session import SESSION

for wish in ("", "nonsense", "cpu", "cuda:1"):
    os.environ["OPENMED_DEVICE"] = wish
    before = dict(os.environ)
    state = PanelState(**read_state(SESSION))
    text, html, mapping = str(state), state._repr_html_(), state.to_dict()
    bars = memory_bars(DeviceChoice(wish, "auto", "nobody", "", confirmed=False))
    heavy = {"torch", "transformers", "ipywidgets", "numpy", "huggingface_hub", "IPython"} & set(sys.modules)
    print(wish or "nobody", sorted(heavy), dict(os.environ) == before)
"""


@pytest.mark.real_computer  # It starts a process of its own.
def test_a_look_in_a_fresh_process():
    """In a fresh process a look, and the memory of a device that was not tried, import nothing heavy; the environment stays."""
    process = subprocess.run(
        [sys.executable, "-c", FRESH],
        env={**os.environ, "OPENMED_TORCH_DEVICE": ""},
        capture_output=True,
        text=True,
        check=False,
    )

    assert process.stdout.splitlines() == ["nobody [] True", "nonsense [] True", "cpu [] True", "cuda:1 [] True"], (
        process.stderr
    )


VERBS: dict[str, Callable[[Any], object]] = {
    "start": lambda here: here.session.start(),
    "stop": lambda here: here.session.stop(),
    "device": lambda here: here.session.device(),
    "reset": lambda here: here.session.reset(),
    "tune": lambda here: here.session.apply_mps_variables(),
    "import torch": lambda here: here.torch.inspect_imported_torch(),
    "compute on mps": lambda here: (here.torch.inspect_imported_torch(), here.torch.touch()),
    **{f"use {device}": lambda here, device=device: here.session.use(device) for device in ("auto", "mps", "cpu", "x")},
    "ask mps": lambda here: here.session.device("mps"),
}


def outcome(here, verb):
    """Return what a verb answers, or its error."""
    try:
        return repr(VERBS[verb](here))
    except OpenMedError as error:
        return repr(error.to_dict())


@given(
    kind=st.sampled_from(["mac", "box", "plain", "rosetta"]),
    environ=st.sampled_from([{}, {"OPENMED_DEVICE": "cpu"}, {"OPENMED_DEVICE": "mps"}, {"OPENMED_DEVICE": "x"}]),
    verbs=st.lists(st.sampled_from(sorted(VERBS)), max_size=8),
)
def test_looking_between_any_verbs(computers, kind, environ, verbs):
    """Looks between verbs change neither what the verbs answer nor what they leave behind, and buttons fit the choice."""
    watched, alone = getattr(computers, kind)(**environ), getattr(computers, kind)(**environ)
    for verb in verbs:
        before = watched.state
        state = state_of(watched)
        assert watched.state == before
        assert (
            sum(one.pressed for one in state.buttons)
            == sum(one.active for one in state.buttons)
            == bool(state.choice)
        )
        assert outcome(watched, verb) == outcome(alone, verb)
        assert watched.state == alone.state
        assert watched.torch.probed == alone.torch.probed


@pytest.mark.real_computer  # It begins its own simulation.
@pytest.mark.parametrize("device", ["mps", "cpu"])
def test_a_simulated_computer_says_so(device):
    """Under the simulation the status, the table of devices, the memory and the static form say SIMULATED."""
    with nb.simulated_mps("8 GiB"):
        nb.load_pipeline("bundled_small", device=device)
        nb.use(device)
        state = PanelState(**read_state(SESSION))
        SESSION.unload()
    SESSION.stop()

    assert state.simulated
    assert state.to_dict()["simulated"] is True
    assert "SIMULATED" in state.status[0]
    for form in (str(state), state._repr_html_()):
        assert form.count("SIMULATED") >= (4 if device == "mps" else 2)
    assert ("SIMULATED" in str(state.memory)) is ("SIMULATED" in str(state.models)) is (device == "mps")
    assert "SIMULATED" not in str(PanelState(**read_state(SESSION)))
