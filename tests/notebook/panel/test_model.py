"""Tests of the operations of the panel without widgets."""

import gc
import traceback
import weakref

import pytest
import torch
from tokenizers.pre_tokenizers import PreTokenizer

import openmed_nb as nb
from helpers import simulated_computers as computers
from openmed_nb.annotation.loading import create_pipeline
from openmed_nb.devices.backend import inspect_imported_torch
from openmed_nb.errors import DeviceUnavailableError, InvalidTextError, OpenMedError
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.session import SESSION

NOTE = "Mrs Miller has leprosy."
SMALL = "bundled_small"


def splitting(text):
    """Return a pre-tokenizer that raises an error with a text."""

    class Quoting:
        def pre_tokenize(self, _pieces):
            raise LookupError(f"cannot split {text}")

    return PreTokenizer.custom(Quoting())


def held(frame):
    """Return the objects that a frame references: variables, closures of functions and items of lists."""
    values = list(frame.f_locals.values())
    taken = [cell.cell_contents for value in values for cell in getattr(value, "__closure__", None) or ()]
    deeper = [cell.cell_contents for value in taken for cell in getattr(value, "__closure__", None) or ()]
    every = [*values, *taken, *deeper]
    return [*every, *(item for value in every if isinstance(value, (list, tuple)) for item in value)]


@pytest.fixture
def own(watch):
    """A panel of the session of this process, which is reset afterwards."""
    yield watch(SESSION, SMALL)
    SESSION.unload()
    SESSION.reset()
    SESSION.stop()


@pytest.fixture
def mac(own):
    """The same on a simulated Mac."""
    with nb.simulated_mps("8 GiB"):
        own.states.clear()
        yield own


def test_model_that_cannot_move_stays_with_its_device(watch):
    """Where a model cannot move, the error and the former device are shown, and the model is where it was."""
    if inspect_imported_torch().mps_available:
        pytest.skip("this computer has MPS, so the move would work")
    here = computers.mac(OPENMED_DEVICE="cpu")
    here.session.load_model(SMALL, OpenMedConfig())
    panel = watch(here.session)
    panel.use_device("mps")

    assert "could not be moved to mps" in panel.state.error.message
    assert panel.activities == ["Changing the device: mps", f"Moving to mps: {SMALL}"]
    assert panel.state.choice.device == "cpu"
    assert [model.device for model in panel.state.models] == ["cpu"]
    assert panel.state.activity is None


@pytest.mark.real_computer  # It begins its own simulation.
def test_click_moves_models_and_reports_them(mac):
    """A click moves the models, tells how far it is, and says which have moved."""
    for name in ("bundled", SMALL):
        nb.load_pipeline(name)
    assert [model.device for model in mac.state.models] == ["mps (SIMULATED)"] * 2
    mac.states.clear()
    mac.use_device("cpu")

    assert mac.activities == [
        "Changing the device: cpu",
        "Moving to cpu: bundled (1 of 2)",
        f"Moving to cpu: {SMALL} (2 of 2)",
    ]
    assert mac.state.result.title == f"Moved to the new device: bundled, {SMALL}."
    assert [model.device for model in mac.state.models] == ["cpu"] * 2
    assert mac.agrees
    mac.use_device("mps")
    assert [model.device for model in mac.state.models] == ["mps (SIMULATED)"] * 2
    assert mac.agrees


def test_unexpected_error_holds_no_note(here, watch):
    """An unexpected error has neither cause nor context, and none of its frames references the annotated text."""
    panel = watch(here.session, SMALL)
    create_pipeline(here.session, SMALL, OpenMedConfig()).tokenizer.backend_tokenizer.pre_tokenizer = splitting(NOTE)
    with pytest.raises(OpenMedError, match="Annotating failed with Exception") as raised:
        panel.annotate("Mrs " + "Miller has leprosy.")

    frames = [frame for frame, _ in traceback.walk_tb(raised.value.__traceback__)]
    ours = [frame for frame in frames if frame.f_code.co_filename != __file__]
    assert "annotate" in [frame.f_code.co_name for frame in ours]
    assert not [frame for frame in ours if NOTE in held(frame)]
    assert raised.value.__cause__ is raised.value.__context__ is None
    assert "leprosy" not in str(panel.state)


def test_displayed_error_keeps_nothing_alive(watch):
    """The error that a panel shows keeps no frame and no cause, and so no tensor, alive."""
    here = computers.mac(OPENMED_DEVICE="cpu")
    panel = watch(here.session)
    watched = []

    def fail():
        activations = torch.zeros(8)
        watched.append(weakref.ref(activations))
        raise DeviceUnavailableError("It broke.", "Glue it.") from RuntimeError(NOTE)

    here.torch.loading = fail
    panel.use_device("mps")
    gc.collect()

    assert panel.state.error.to_dict() == DeviceUnavailableError("It broke.", "Glue it.").to_dict()
    assert watched[0]() is None
    assert panel.state.error.__cause__ is panel.state.error.__traceback__ is None


def test_failing_observer_causes_a_warning(here, panel):
    """An observer that raises causes a warning, and the operation succeeds."""

    def fail(_state):
        raise ValueError(NOTE)

    panel.watch(fail)
    with pytest.warns(nb.OpenMedWarning, match="ValueError") as warned:
        assert here.session.use("cpu").device == "cpu"
    assert NOTE not in str(warned[0].message)


def test_annotation_has_time_device_and_model(panel):
    """A text is annotated with its time and device, and the model that was loaded for it is listed."""
    panel.annotate("She has asthma.")

    assert [entity["word"] for entity in panel.state.annotation] == ["asthma"]
    assert (panel.state.annotation.model, panel.state.annotation.device) == (SMALL, "cpu")
    assert 0 < panel.state.annotation.found.seconds < 60
    assert panel.state.models.names == (SMALL,)
    annotating = f"Annotating: {SMALL} on cpu"
    said = [f"Annotating: {SMALL}", "Importing: torch", f"Loading: {SMALL}", annotating]
    assert panel.activities == said
    assert panel.agrees


def test_annotation_can_hide_the_text(here, watch):
    """Where texts are not to be shown, the answer has places and labels only."""
    panel = watch(here.session, SMALL, show_text=False)
    panel.annotate("She has asthma.")

    assert "asthma" not in str(panel.state.annotation)
    assert "asthma" not in panel.state.annotation._repr_html_()
    assert len(panel.state.annotation) == 1


def test_unreadable_text_is_an_error_without_its_words(panel):
    """What was found before stays until something else is found."""
    panel.annotate("She has asthma.")
    former = panel.state.annotation
    panel.annotate("\ud800 leprosy")

    assert isinstance(panel.state.error, InvalidTextError)
    assert "leprosy" not in str(panel.state.error)
    assert panel.state.annotation is former is not None
    assert panel.agrees


def test_result_is_cleared_by_the_next_click(here, panel):
    """The next click or another device clears the result of a click."""
    panel.release()
    here.session.device()
    assert panel.state.result is not None
    here.session.use("cpu")
    assert panel.state.result is None
    panel.release()
    panel.refresh()
    assert panel.state.result is None
