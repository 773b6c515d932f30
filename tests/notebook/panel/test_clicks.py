"""What a click on the panel does to the session, and what the session does to the widgets; without a browser."""

import re

import pytest

import openmed_nb as nb
from helpers import simulated_computers as computers
from openmed_nb.notebook.panel.view import EXAMPLE_TEXT, iter_widgets
from openmed_nb.session import SESSION

pytestmark = pytest.mark.usefixtures("quick_collection")  # A slow one would be no prompt answer.

EVIL = "<img src=x onerror=alert(1)>"


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


def test_failing_device_is_disabled_and_the_former_stays(open_panel, front_end):
    """The former device stays, the error is shown with its remedy, the button is disabled, and the focus moves on."""
    here = computers.mac(failing="the driver is broken", OPENMED_DEVICE="cpu")
    view = open_panel(here.session)
    mps = view.device_buttons["mps"]
    front = front_end(*view.device_buttons.values())
    front.click(mps)
    message = view.messages["Device"]

    choice = here.session.device()
    assert (choice.device, choice.requested_by) == ("cpu", "OPENMED_DEVICE")
    assert view.pressed == ["cpu"]
    assert front.state[mps] == {"disabled": True, "tooltip": mps.tooltip}
    assert "the driver is broken" in mps.tooltip
    assert 'role="alert"' in message
    assert "use &#x27;cpu&#x27;" in message
    assert front.focused == ["cpu ✓"]


def test_device_buttons_follow_the_gpus_of_torch(open_panel, broken, front_end):
    """When torch tells which GPUs there are, their buttons come; the others stay the same widgets, and none is left."""
    view = open_panel(broken.session)
    before = dict(view.device_buttons)
    gone = [*iter_widgets(before["cuda"])]
    assert list(before) == ["auto", "cuda", "cpu"]
    front = front_end(*before.values())
    front.click(before["cuda"])

    after = view.device_buttons
    assert list(after) == ["auto", "cuda:0", "cuda:1", "cpu"]
    assert view.devices.children == tuple(after.values())
    assert all(after[device] is before[device] for device in ("auto", "cpu"))
    assert all(widget.comm is None for widget in gone)
    assert view.pressed == ["cpu"]
    assert front.focused == ["cpu ✓"]


def test_focus_returns_to_a_redrawn_button(open_panel, broken, front_end):
    """A clicked button that a front end has to draw again, because others came, gets its focus back."""
    view = open_panel(broken.session)
    front = front_end(*view.device_buttons.values())
    broken.torch.read["PYTORCH_ENABLE_MPS_FALLBACK"] = None  # Somebody imported torch.
    front.click(view.device_buttons["cpu"])

    assert list(view.device_buttons) == ["auto", "cuda:0", "cuda:1", "cpu"]
    assert front.focused == ["cpu ✓"]


def test_focus_does_not_move_without_need(open_panel, front_end):
    """Where nothing that was clicked is gone, the focus is not touched; nor where another one changed the device."""
    here = computers.mac(failing="broken", OPENMED_DEVICE="cpu")
    view = open_panel(here.session)
    front = front_end(*view.device_buttons.values())
    front.click(view.device_buttons["cpu"])
    with pytest.raises(nb.OpenMedError):
        here.session.use("mps")

    assert view.device_buttons["mps"].disabled
    assert front.focused == []


@pytest.mark.usefixtures("clean")
class TestModels:
    """Models on the session of this process."""

    def test_annotate_shows_entities_and_lists_the_model(self, open_panel, home):
        """Annotate finds entities in the text, and shows the time, the device and the model, which can be unloaded."""
        SESSION.unload()
        view = open_panel(model="bundled_small")
        view.click("Annotate")

        answer = view.annotation.value
        assert re.search(r"3 mentions of diseases found, 1 of them negated<", answer)
        assert re.search(rf"Model: bundled_small, device: {SESSION.device().device}.*, [\d.]+ m?s<", answer)
        assert re.search(r'<div class="openmed-answer" role="region" aria-label="[^"]+" tabindex="0">', answer)
        assert "<mark " in answer
        assert "bundled_small" in view.region("Models").top.value
        assert [model.device.split()[0] for model in view.model.state.models] == [home]
        view.click("Unload bundled_small")
        assert SESSION.inventory().names == ()
        assert view.models.children == ()
        assert "No models are loaded" in view.region("Models").top.value
        assert list(view.messages) == ["Models"]
        assert "Unloaded: bundled_small." in view.messages["Models"]

    def test_annotate_reads_the_typed_text(self, open_panel):
        """What is annotated is what somebody typed."""
        view = open_panel(model="bundled_small")
        assert view.text.value == EXAMPLE_TEXT
        view.text.value = f"Cystic fibrosis. {EVIL}"
        view.click("Annotate")

        assert view.model.state.annotation.text == f"Cystic fibrosis. {EVIL}"
        assert "onerror" in view.annotation.value
        assert EVIL not in view.shown

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

    def test_unload_buttons_pass_the_focus_on(self, open_panel, front_end):
        """Each loaded name has its button; when one is clicked and gone, the focus goes to the next, then to Annotate."""
        view = open_panel(model="bundled_small")
        nb.load_pipeline("bundled_small")
        nb.load_pipeline("bundled")
        models, annotate = view.models, view.annotate
        first, second = models.children
        assert [button.description for button in (first, second)] == ["Unload bundled_small", "Unload bundled"]
        front = front_end(second, annotate)
        first.click()
        assert models.children == (second,)
        assert all(widget.comm is None for widget in iter_widgets(first))
        assert front.focused == ["Unload bundled"]
        second.click()
        assert models.children == ()
        assert front.focused == ["Unload bundled", "Annotate"]

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
        annotate = view.annotate
        annotate.observe(lambda change: disabled.append(change["new"]), "disabled")
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
