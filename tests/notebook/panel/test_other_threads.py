"""Tests of clicks that arrive in another thread, as in JupyterLab: messages to the front end and the focus."""

import itertools

import pytest

from helpers import simulated_computers as computers
from helpers.panels import in_notebook, next_cell
from helpers.threads import run_in_thread
from openmed_nb.notebook.panel.model import IMMEDIATE_SECONDS


@pytest.fixture
def broken():
    """A Mac whose Metal does not compute, and whose shell asks for the CPU."""
    return computers.mac(failing="the driver is broken", OPENMED_DEVICE="cpu")


@in_notebook
async def test_clicked_button_changes_once(open_panel, here, front_end):
    """A button looks pressed only after the device has changed, and the front end gets one message."""
    view = open_panel(here.session)
    cpu, auto = view.device_buttons["cpu"], view.device_buttons["auto"]
    front = front_end(cpu, auto)
    run_in_thread(lambda: front.click(cpu))
    assert view.pressed == ["auto"]
    assert front.state == {}
    await next_cell()
    assert view.pressed == ["cpu"]
    assert front.state == {
        cpu: {"_dom_classes": cpu._dom_classes, "description": "cpu ✓"},
        auto: {"_dom_classes": (), "description": "auto"},
    }


@in_notebook
async def test_checkbox_follows_the_state(open_panel, here, front_end):
    """The checkbox follows the state without sending a request, whoever changed the state."""
    view = open_panel(here.session)
    box, shown = view.automatic, []
    front = front_end(box)
    view.model.observe(lambda change: shown.append(change["new"].auto_refresh), "state")
    for wanted in (True, False):
        view.model.set_auto_refresh(wanted)
        assert box.value is wanted
        assert front.state[box] == {"value": wanted}
    run_in_thread(lambda: front.click(box))
    await next_cell()
    assert box.value is view.model.state.auto_refresh is True
    assert front.state[box] == {"value": True}
    assert shown == [True, False, True]


@in_notebook
async def test_waiting_click_does_not_move_the_focus(open_panel, broken, front_end):
    """A click that waited for a cell never moves the focus."""
    view = open_panel(broken.session)
    front = front_end(*view.device_buttons.values())
    view.model.on_cell_start()
    run_in_thread(lambda: front.click(view.device_buttons["mps"]))
    view.model.on_cell_end()
    await next_cell()
    assert view.device_buttons["mps"].disabled
    assert front.focused == []


@pytest.mark.parametrize(("seconds", "after_a_cell"), [(0.0, True), (2 * IMMEDIATE_SECONDS, False)])
def test_click_that_may_have_waited_does_not_take_the_focus(open_panel, broken, front_end, seconds, after_a_cell):
    """Right after a cell a click may have waited for it; after seconds somebody may type elsewhere."""
    view = open_panel(broken.session, clock=itertools.count(0.0, seconds).__next__)
    front = front_end(*view.device_buttons.values())
    if after_a_cell:
        view.model.on_cell_start()
        view.model.on_cell_end()
        assert not view.model.responds_immediately
    front.click(view.device_buttons["mps"])

    assert view.device_buttons["mps"].disabled
    assert front.focused == []


@in_notebook
async def test_region_of_a_waiting_click_says_so(open_panel, here):
    """The region of a pending click says so until the click is processed, even if the cell changes other state."""
    view = open_panel(here.session)
    view.model.on_cell_start()
    run_in_thread(view.device_buttons["cpu"].click)
    here.session.unload()
    assert view.pressed == ["auto"]
    assert "Waiting for the running cell" in view.region("Device").activity.value
    assert "Waiting for the running cell" not in view.region("Memory").activity.value
    view.model.on_cell_end()
    await next_cell()
    assert view.pressed == ["cpu"]
    assert view.region("Device").activity.value == ""
