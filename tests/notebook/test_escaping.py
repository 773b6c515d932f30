"""Text from outside in every place it can come from: shown as text, and never read as HTML."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb._events.activity import Activity
from openmed_nb._render.display import Report, Table, to_html
from openmed_nb.annotation.results import AnnotatedText, Annotations, Answers, Summary
from openmed_nb.devices.backend import TorchFacts
from openmed_nb.devices.choice import DeviceChoice, Rejection
from openmed_nb.devices.environment import plan
from openmed_nb.devices.machine import Machine
from openmed_nb.errors import OpenMedError
from openmed_nb.models.registry import BUNDLED
from openmed_nb.models.store import Inventory, ModelInMemory
from openmed_nb.notebook.panel.state import MemoryBar, MemoryPart, PanelState, look
from openmed_nb.session import Session

PAYLOADS = (
    "<img src=x onerror=alert(1)>",
    '"><script>alert(1)</script>',
    "' onmouseover='alert(1)",
    "</style><script>alert(1)</script>",
    "&lt;b&gt; & $x$",
)
LINUX = Machine("Linux", "x86_64", gpu_driver=True)


@pytest.fixture(scope="module")
def said(read):
    """A function that returns all text that a browser shows of our HTML, hover texts included."""

    def said(html):
        page = read(html)
        return page.text + "".join(one.attributes.get("title", "") for one in page.elements)

    return said


def session(environ=None, machine=LINUX, facts=None, failure=""):
    """Return a session on a computer that is not here, whose devices fail with a text when they compute."""
    facts = facts or TorchFacts("2.13.0", loaded=True, gpu_build="", mps_built=False, cuda_names=())
    torch = SimpleNamespace(
        torch_is_loaded=lambda: facts.loaded,
        installed_torch=lambda: facts,
        loaded_torch=lambda: facts,
        probe=lambda _device: failure,
        mps_allocator_started=lambda: False,
    )
    return Session({} if environ is None else environ, lambda: machine, torch)


def note_and_entities(payload):
    """Return a note that holds the payload in an entity and outside of one."""
    text = f"{payload} asthma {payload}"
    return AnnotatedText(
        text, ({"entity_group": "D", "score": 1.0, "word": text, "start": 3, "end": len(text)},), "m", "cpu"
    )


def with_label(payload):
    """Return a note whose entity has the payload as its label."""
    return AnnotatedText("asthma", ({"entity_group": payload, "score": 1.0, "start": 0, "end": 6},), "m", "cpu")


def several(text="asthma", label="D", error="", model="m", device="cpu"):
    """Return what was found in many texts: an entity over all of the first, and perhaps a text that failed."""
    answers = Answers()
    answers.add(0, [{"entity_group": label, "score": 1.0, "word": text, "start": 0, "end": len(text)}])
    if error:
        answers.add(1, error)
    return Annotations(answers, (text,), model, device)


def panel(shown, **changes):
    """Return what a panel shows of a session, in its static form."""
    return PanelState(**{**look(shown), **changes})


GPU = {"gpu_build": "CUDA 13.0", "mps_built": False}

PLACES = {
    "note": note_and_entities,
    "label": with_label,
    "model": lambda text: AnnotatedText("asthma", (), text, "cpu"),
    "device": lambda text: AnnotatedText("asthma", (), "m", text),
    "text of many": several,
    "label of many": lambda text: several(label=text),
    "error of many": lambda text: several(error=text),
    "model of many": lambda text: several(model=text),
    "device of many": lambda text: several(device=text),
    "words of a summary": lambda text: Summary("m", "cpu", 1, 0, (), (), ((text, 1),)),
    "label of a summary": lambda text: several(label=text).summary(),
    "error of a summary": lambda text: several(error=text).summary(),
    "model of a summary": lambda text: Summary(text, "cpu", 0, 0, (), (), ()),
    "architecture": lambda text: session(
        machine=Machine("Darwin", text, apple_silicon=True, translated=True)
    ).devices(),
    "system": lambda text: session(machine=Machine(text, "x86_64")).devices(),
    "chip": lambda text: session(
        machine=Machine("Darwin", "arm64", apple_silicon=True, chip=text, macos=(15, 0)),
        facts=TorchFacts("2.13.0", loaded=True, mps_built=True, mps_available=True),
    ).device(),
    "torch version": lambda text: session(facts=TorchFacts(f"2.13.0+{text}", loaded=True, gpu_build="")).device(),
    "gpu build": lambda text: session(
        facts=TorchFacts("2.13.0", loaded=True, gpu_build=text, cuda_names=(), mps_built=False)
    ).devices(),
    "gpu name": lambda text: session(facts=TorchFacts("2.13.0", loaded=True, cuda_names=(text,), **GPU)).device(),
    "exception": lambda text: session(
        facts=TorchFacts("2.13.0", loaded=True, cuda_names=("GPU",), **GPU), failure=text
    ).device(),
    "OPENMED_DEVICE": lambda text: session({"OPENMED_DEVICE": text, "OPENMED_TORCH_DEVICE": "cpu"}).explain(),
    "HF_ENDPOINT": lambda text: session({"HF_ENDPOINT": text}).explain(),
    "CUDA_VISIBLE_DEVICES": lambda text: session({"CUDA_VISIBLE_DEVICES": text}).explain(),
    "fallback": lambda text: plan({"PYTORCH_ENABLE_MPS_FALLBACK": text}),
    "watermark": lambda text: plan({"PYTORCH_MPS_HIGH_WATERMARK_RATIO": text}),
    "rejection": lambda text: DeviceChoice("cpu", "auto", text, text, False, (Rejection(text, text, text),)),
    "type": lambda text: DeviceChoice("cpu", text, "nobody", "", False, (), text, text),
    "moved": lambda text: DeviceChoice("cpu", "cpu", "use()", "", True, moved=(text,)),
    "name in memory": lambda text: Inventory((ModelInMemory(text, "cpu", "float32", 1, True),)),
    "device in memory": lambda text: Inventory((ModelInMemory("m", text, "float32", 1, True),)),
    "type in memory": lambda text: Inventory((ModelInMemory("m", "cpu", text, 1, True),)),
    "wish in a panel": lambda text: panel(session({"OPENMED_DEVICE": text})),
    "hidden wish in a panel": lambda text: panel(session({"OPENMED_DEVICE": text, "OPENMED_TORCH_DEVICE": "cpu"})),
    "address in a panel": lambda text: panel(session({"HF_ENDPOINT": text})),
    "system in a panel": lambda text: panel(session(machine=Machine(text, "x86_64"))),
    "torch in a panel": lambda text: panel(
        session(facts=TorchFacts(f"2.13.0+{text}", loaded=True, gpu_build="", mps_built=False, cuda_names=()))
    ),
    "watermark in a panel": lambda text: panel(
        session(
            {"PYTORCH_MPS_HIGH_WATERMARK_RATIO": text},
            Machine("Darwin", "arm64", apple_silicon=True, macos=(15, 0)),
            TorchFacts("2.13.0"),
        )
    ),
    "model in a panel": lambda text: panel(
        session(), models=Inventory((ModelInMemory(text, text, text, 1, follows=True),))
    ),
    "memory in a panel": lambda text: panel(session(), memory=(MemoryBar(text, (MemoryPart(text, 1),), 1, text),)),
    "note in a panel": lambda text: panel(session(), note=text),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_payload_is_shown_as_text(said, place):
    """A payload in any place reaches the page as text, and brings no element or attribute with it."""
    for payload in PAYLOADS:
        shown = said(PLACES[place](payload)._repr_html_())
        assert " ".join(payload.split()) in " ".join(shown.split())


@pytest.fixture
def label_model(tmp_path):
    """Give the small model in a folder named like markup, with a payload as the label it finds."""
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    shutil.copytree(BUNDLED["bundled_small"], folder)
    settings_file = folder / "config.json"
    config = json.loads(settings_file.read_text("utf-8"))
    labels = {number: name.replace("DISEASE", PAYLOADS[1]) for number, name in config["id2label"].items()}
    changed = {**config, "id2label": labels, "label2id": {name: int(number) for number, name in labels.items()}}
    settings_file.write_text(json.dumps(changed), "utf-8")
    return folder


def test_a_model_of_bad_intent(said, shell, label_model):
    """Labels and the folder's name of a real model, and a real note, are shown as text by the magic."""
    note = f"He has asthma. {PAYLOADS[0]}"
    found = shell.find_cell_magic("openmed_ner")(f"--model '{label_model}'", note)
    shown = said(found._repr_html_())

    assert PAYLOADS[1] in shown
    assert note.split(". ")[1] in shown
    assert str(label_model) in shown
    assert len(found) > 0


def test_what_a_panel_leaves_out(said):
    """What was annotated, said and failed is not in the static form of a panel at all."""
    for payload in PAYLOADS:
        state = panel(
            session(),
            answer=note_and_entities(payload),
            error=OpenMedError(payload, payload),
            said=Report(payload),
            activity=Activity(payload, payload),
        )

        assert payload not in said(state._repr_html_())
        assert payload not in f"{state} {state.to_dict()}"


def test_an_error_is_plain_text(shell):
    """An error shows its text as a traceback line and has no HTML form that a payload could enter."""
    for line in (f"--{PAYLOADS[0]}", f"'{PAYLOADS[0]}'", f"--json={PAYLOADS[0]}", f"--list --explain {PAYLOADS[3]}"):
        with pytest.raises(OpenMedError) as raised:
            shell.find_line_magic("openmed_device")(line)

        assert not hasattr(raised.value, "_repr_html_")
        assert shell.display_formatter.format(raised.value)[0].keys() == {"text/plain"}


ANY = st.text(max_size=30)
CELL = st.text(min_size=1, max_size=30)


@given(title=ANY, sentence=ANY, caption=ANY, cells=st.lists(st.tuples(CELL, CELL), min_size=1, max_size=3))
def test_any_text_in_a_report(said, title, sentence, caption, cells):
    """Whatever a report says, the page shows exactly that."""
    report = Report(title, (sentence,), (Table(caption, ("name", "value"), tuple(cells)),))
    expected = title + sentence + caption + "namevalue" + "".join(a + b for a, b in cells)

    assert said(to_html(report)) == expected


@given(data=st.data(), text=st.text(min_size=1, max_size=40), label=ANY)
def test_any_note_with_any_entities(said, data, text, label):
    """Whatever a note holds and wherever its entities lie, the marked text is the note with labels."""
    places = st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(sorted)
    entities = tuple(
        {"entity_group": label, "score": 0.5, "start": start, "end": end}
        for start, end in data.draw(st.lists(places, max_size=4))
    )
    found = AnnotatedText(text, entities, "m", "cpu")
    html = found._repr_html_()
    said(html)
    marked = re.search(r'<div dir="auto"[^>]*>(.*?)</div>', html, flags=re.DOTALL)[1]
    unmarked = re.sub(r"<small[^>]*>.*?</small>", "", marked, flags=re.DOTALL)

    assert said(f"<p>{re.sub('</?mark[^>]*>', '', unmarked)}</p>").rstrip() == text.rstrip()


@given(text=st.text(min_size=1, max_size=40), label=ANY, error=st.text(min_size=1, max_size=20))
def test_any_texts_with_any_entities(said, text, label, error):
    """Whatever many texts, their labels and errors hold, the page has no element that is not ours, and all of the text."""
    found = several(text, label, error)

    assert text in said(found._repr_html_())
    assert error in said(found.summary()._repr_html_())
