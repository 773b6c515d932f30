"""Tests of the state of the panel: buttons, status and static form, on several kinds of computers."""

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from helpers import simulated_computers as computers
from helpers.processes import run_python
from openmed_nb.devices.backend import TorchInfo
from openmed_nb.errors import OpenMedError
from openmed_nb.notebook.panel import view
from openmed_nb.notebook.panel.state import COMMANDS, PanelState, memory_bars, read_state
from openmed_nb.session import SESSION


def make_state(computer):
    """Return the state of a panel on a fake computer, without the memory of its GPU, which does not exist."""
    session = computer.session
    return PanelState(
        session.list_devices(confirm=False), session.explain(confirm=False), memory_bars(None), session.inventory()
    )


def confirm_device(computer):
    """Select the device of a computer, which may fail, and return the computer."""
    with contextlib.suppress(OpenMedError):
        computer.session.device()
    return computer


def use_device(computer, device):
    """Override the device of a computer, and return the computer."""
    computer.session.use(device, "%openmed_device")
    return computer


STATES: dict[str, Callable[[], Any]] = {
    "auto on a Mac": computers.mac,
    "a confirmed Mac": lambda: confirm_device(computers.mac()),
    "auto where MPS fails": lambda: confirm_device(computers.mac(failing="no memory")),
    "no GPU": computers.plain,
    "uncounted GPUs": computers.box,
    "the second of uncounted GPUs": lambda: computers.box(OPENMED_DEVICE="cuda:1"),
    "cuda with several GPUs": lambda: use_device(computers.box(), "cuda"),
    "a variable": lambda: computers.mac(OPENMED_DEVICE="cpu"),
    "gpu on a Mac": lambda: use_device(computers.mac(), "gpu"),
    "nonsense": lambda: computers.mac(OPENMED_DEVICE="nonsense"),
    "no torch": lambda: computers.Computer(computers.PLAIN, TorchInfo(None), {}),
}


def test_states_are_as_recorded(as_recorded):
    """Buttons, the text form and the regions of each state are what the record has, which is read by people."""
    shown = {}
    for name, make in STATES.items():
        state = replace(make_state(make()), memory=())
        buttons = [[button.label, button.enabled, button.active, button.tooltip] for button in state.buttons]
        html = view.render_devices(state) + view.render_top("Environment", state)
        shown[name] = [buttons, str(state).splitlines(), re.sub(r' style="[^"]*"', "", html)]

    as_recorded("panel_states.json", shown)


@pytest.mark.parametrize("value", ["hf_abcdefgh", "https://me:abcdefgh@hub.example", "token=abcdefgh"])
def test_state_masks_secrets_in_every_form(value):
    state = make_state(computers.mac(OPENMED_DEVICE=value, HF_ENDPOINT=value, OPENMED_TORCH_DEVICE=""))

    assert "***" in " ".join(state.status)
    assert "abcdefgh" not in f"{state} {state._repr_html_()} {json.dumps(state.to_dict())}"


def test_static_form_has_all_tables_and_commands():
    state = make_state(computers.mac(HF_HUB_OFFLINE="1"))
    captions = [table.caption for table in state.to_report().tables if table.rows]

    assert captions == ["Devices", "Environment", "Other variables", "Memory", "Equivalent commands"]
    for command, _ in COMMANDS:
        assert command in str(state)
        assert f">{command}</code>" in state._repr_html_()
    assert repr(state) == str(state)


@pytest.mark.real_computer  # The extension is loaded afresh, which ends a simulation.
def test_commands_of_static_form_exist(shell):
    for command, _ in COMMANDS:
        kind = "cell" if command.startswith("%%") else "line"
        assert command.split()[0].lstrip("%") in shell.magics_manager.magics[kind]


def test_read_state_lists_gpus_of_imported_torch_without_probing():
    here = computers.box()
    here.torch.inspect_imported_torch()
    state = PanelState(**read_state(here.session))

    assert [button.device for button in state.buttons] == ["auto", "cuda:0", "cuda:1", "cpu"]
    assert here.torch.probed == []
    assert state.choice is not None
    assert not state.choice.confirmed


FRESH = """
import os, sys
from openmed_nb.devices.choice import DeviceChoice
from openmed_nb.notebook.panel.state import memory_bars
from openmed_nb.notebook.panel.state import PanelState, read_state
from openmed_nb.session import SESSION

for requested in ("", "nonsense", "cpu", "cuda:1"):
    os.environ["OPENMED_DEVICE"] = requested
    before = dict(os.environ)
    state = PanelState(**read_state(SESSION))
    text, html, mapping = str(state), state._repr_html_(), state.to_dict()
    bars = memory_bars(DeviceChoice(requested, "auto", "default", "", confirmed=False))
    heavy = {"torch", "transformers", "ipywidgets", "numpy", "huggingface_hub", "IPython"} & set(sys.modules)
    print(requested or "default", sorted(heavy), dict(os.environ) == before)
"""


@pytest.mark.real_computer  # It starts a process of its own.
def test_read_state_in_fresh_process_is_light_and_keeps_environment():
    process = run_python("-c", FRESH, environ={"OPENMED_TORCH_DEVICE": ""})

    assert process.stdout.splitlines() == ["default [] True", "nonsense [] True", "cpu [] True", "cuda:1 [] True"], (
        process.stderr
    )


def run_operation(computer, operation):
    """Return the result of an operation, or its error, as text."""
    try:
        return repr(computers.OPERATIONS[operation](computer))
    except OpenMedError as error:
        return repr(error.to_dict())


@given(
    kind=st.sampled_from(["mac", "box", "plain", "rosetta"]),
    environ=st.sampled_from([{}, {"OPENMED_DEVICE": "cpu"}, {"OPENMED_DEVICE": "mps"}, {"OPENMED_DEVICE": "x"}]),
    operations=st.lists(st.sampled_from(sorted(computers.OPERATIONS)), max_size=8),
)
def test_reading_state_has_no_effect_on_any_operations(kind, environ, operations):
    observed = getattr(computers, kind)(**environ)
    unobserved = getattr(computers, kind)(**environ)
    for operation in operations:
        before = observed.state
        state = make_state(observed)
        assert observed.state == before
        assert (
            sum(button.pressed for button in state.buttons)
            == sum(button.active for button in state.buttons)
            == bool(state.choice)
        )
        assert run_operation(observed, operation) == run_operation(unobserved, operation)
        assert observed.state == unobserved.state
        assert observed.torch.probed == unobserved.torch.probed


@pytest.mark.real_computer  # It begins its own simulation.
@pytest.mark.parametrize("device", ["mps", "cpu"])
def test_state_of_simulation_is_labeled(device):
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
