"""What a click on the panel does to the session, and what the session does to the widgets; without a browser."""

import re

import pytest

import openmed_nb as nb
from helpers import simulated_computers as computers
from helpers.html import read
from helpers.panels import in_notebook, next_cell
from helpers.threads import run_in_thread
from openmed_nb.notebook.panel.view import iter_widgets
from openmed_nb.session import SESSION


@pytest.fixture
def broken():
    """A computer with two GPUs of which neither computes, and whose shell asks for the CPU."""
    failures = {"cuda": "the driver is broken", "cuda_0": "the driver is broken", "cuda_1": "the driver is broken"}
    return computers.Computer(computers.BOX, computers.BOX_TORCH, {"OPENMED_DEVICE": "cpu"}, **failures)


def test_click_overrides_the_device(open_panel):
    """A click changes the session's device, and the panel shows who asked."""
    view = open_panel((here := computers.plain()).session)
    assert view.pressed == ["auto"]
    view.device_buttons["cpu"].click()

    choice = here.session.device()
    assert (choice.device, choice.requested, choice.requested_by) == ("cpu", "cpu", "the panel")
    assert view.pressed == ["cpu"]
    assert "the panel" in view.region("Device").top.value


def test_failing_device_is_disabled_and_the_former_stays(open_panel):
    """The former device stays, the error is shown with its remedy, and the button is disabled."""
    here = computers.mac(failing="the driver is broken", OPENMED_DEVICE="cpu")
    view = open_panel(here.session)
    mps = view.device_buttons["mps"]
    mps.click()
    message = view.messages["Device"]

    choice = here.session.device()
    assert (choice.device, choice.requested_by) == ("cpu", "OPENMED_DEVICE")
    assert view.pressed == ["cpu"]
    assert mps.disabled
    assert "the driver is broken" in mps.tooltip
    assert 'role="alert"' in message
    assert "use &#x27;cpu&#x27;" in message


def test_device_buttons_follow_the_gpus_of_torch(open_panel, broken):
    """When torch tells which GPUs there are, their buttons come; the others stay the same widgets, and none is left."""
    view = open_panel(broken.session)
    before = dict(view.device_buttons)
    gone = [*iter_widgets(before["cuda"])]
    assert list(before) == ["auto", "cuda", "cpu"]
    before["cuda"].click()

    after = view.device_buttons
    assert list(after) == ["auto", "cuda:0", "cuda:1", "cpu"]
    assert view.devices.children == tuple(after.values())
    assert all(after[device] is before[device] for device in ("auto", "cpu"))
    assert all(widget.comm is None for widget in gone)
    assert view.pressed == ["cpu"]


@in_notebook
async def test_click_from_another_thread_waits_for_the_cell(open_panel, here):
    """The region of the click says that it waits, and the button looks pressed only when the device has changed."""
    view = open_panel(here.session)
    run_in_thread(view.device_buttons["cpu"].click)
    assert view.pressed == ["auto"]
    assert "Waiting for the running cell" in view.region("Device").activity.value
    assert "Waiting for the running cell" not in view.region("Memory").activity.value
    await next_cell()
    assert view.pressed == ["cpu"]
    assert view.region("Device").activity.value == ""


@pytest.mark.usefixtures("clean")
class TestModels:
    """Models on the session of this process."""

    def test_annotate_shows_entities_and_lists_the_model(self, open_panel, home):
        """Annotate finds entities in the text, and shows the time, the device and the model."""
        SESSION.unload()
        view = open_panel(model="bundled_small")
        view.click("Annotate")

        answer = view.annotation.value
        assert re.search(r"3 mentions of diseases found, 1 of them negated<", answer)
        assert re.search(rf"Model: bundled_small, device: {SESSION.device().device}.*, [\d.]+ m?s", read(answer).text)
        assert re.search(r'<div class="openmed-answer" role="region" aria-label="[^"]+" tabindex="0">', answer)
        assert "<mark " in answer
        assert "bundled_small" in view.region("Models").top.value
        assert [model.device.split()[0] for model in view.model.state.models] == [home]

    @pytest.mark.parametrize("text", ["", " \n "])
    def test_annotate_without_a_text_asks_for_one(self, open_panel, text):
        """Without a text the panel asks for one: it loads no model, and shows no answer to a former text."""
        SESSION.unload()
        view = open_panel(model="bundled_small")
        view.text.value = text
        view.click("Annotate")

        assert list(view.messages) == ["Try it"]
        assert "Enter some text, then click &quot;Annotate&quot;." in view.messages["Try it"]
        assert SESSION.inventory().names == ()
        view.text.value = "No asthma."
        view.click("Annotate")
        assert (view.messages, "asthma" in view.annotation.value) == ({}, True)
        view.text.value = text
        view.click("Annotate")
        assert view.annotation.value == ""

    def test_release_button_reports_below_itself(self, open_panel):
        """Release memory forgets the models, and says by how much memory went back, below its button."""
        view = open_panel()
        nb.load_pipeline("bundled_small")
        view.click("Release memory")

        assert SESSION.inventory().names == ()
        assert list(view.messages) == ["Memory"]
        assert "loaded models" in view.messages["Memory"]
        assert "No models are loaded" in view.region("Models").top.value

    def test_region_of_click_shows_activity(self, open_panel):
        """While a model is loaded, the region of the click says so, and the controls can be clicked all the while."""
        view = open_panel(model="bundled_small")
        shown = []
        disabled = []
        view.annotate.observe(lambda change: disabled.append(change["new"]), "disabled")
        view.region("Try it").activity.observe(lambda change: shown.append(change["new"]), "value")
        view.click("Annotate")

        assert any("Annotating: bundled_small" in event and 'role="status"' in event for event in shown)
        assert any("Loading: bundled_small" in event for event in shown)
        assert shown[-1] == view.region("Device").activity.value == ""
        assert disabled == []


def test_annotation_of_another_text_is_hidden(open_panel):
    """The result of another text is hidden, and is shown again together with its text."""
    view = open_panel(model="bundled_small")
    view.text.value = "She has asthma."
    view.click("Annotate")
    assert "asthma" in view.annotation.value

    view.text.value = "He has epilepsy."
    assert view.annotation.value == ""
    view.text.value = "She has asthma."
    assert "asthma" in view.annotation.value
    view.text.value = "He has epilepsy."
    view.click("Annotate")
    assert "epilepsy" in view.annotation.value


@pytest.mark.real_computer  # It begins its own simulation.
def test_annotation_is_cleared_when_the_device_changes(open_panel):
    view = open_panel(model="bundled_small")
    view.click("Annotate")
    assert "asthma" in view.annotation.value
    with nb.simulated_mps():
        assert view.annotation.value == ""
        assert view.model.state.annotation is None
        view.click("Annotate")
        assert "device: mps (SIMULATED)" in view.annotation.value
    assert view.annotation.value == ""
