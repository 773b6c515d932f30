"""Text from outside in every place it can come from: shown as text, and never read as HTML."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import simulated_computers as computers
from helpers.annotations import make_annotations, make_entity, make_text
from helpers.html import PAYLOADS, read
from openmed_nb._render.display import Report, Table, to_html
from openmed_nb.devices.choice import DeviceChoice, Rejection
from openmed_nb.models.registry import BUNDLED
from openmed_nb.models.store import LoadedModelInfo, LoadedModels
from openmed_nb.notebook.panel.state import MemoryBar, MemoryPart, PanelState, read_state


def said(html):
    """Return all text that a browser shows of our HTML, hover texts included."""
    page = read(html)
    return page.text + "".join(element.attributes.get("title", "") for element in page.elements)


def note_and_entities(payload):
    """Return a note that holds the payload in an entity and outside of one."""
    text = f"{payload} asthma {payload}"
    return make_text(text, {"entity_group": "D", "score": 1.0, "word": text, "start": 3, "end": len(text)})


def with_label(payload):
    """Return a note whose entity has the payload as its label."""
    return make_text("asthma", make_entity("asthma", "asthma", payload))


def several(text="asthma", label="D", error=""):
    """Return annotations of a text that is one entity and, with an error, of a text that failed."""
    entity = make_entity(text, text, label)
    return make_annotations([[entity], error] if error else [[entity]], [text])


def summary(word):
    return several(word).summary()


def choice(text):
    return DeviceChoice("cpu", "auto", text, text, False, (Rejection(text, text, text),))


def inventory(text):
    return LoadedModels((LoadedModelInfo(text, text, text, 1, follows_session=True),))


def error_of_many(text):
    return several(error=text)


def panel_of_variable(text):
    return PanelState(**read_state(computers.mac(OPENMED_DEVICE=text).session))


def panel_of_models(text):
    shown = {**read_state(computers.plain().session), "models": inventory(text)}
    return PanelState(**{**shown, "memory": (MemoryBar(text, (MemoryPart(text, 1),), 1, text),)})


def failing_device(text):
    return computers.mac(failing=text).session.device()


def hidden_variable(text):
    return computers.plain(OPENMED_DEVICE=text, OPENMED_TORCH_DEVICE="cpu").session.explain()


VALUES = (
    note_and_entities,
    with_label,
    several,
    error_of_many,
    summary,
    choice,
    inventory,
    panel_of_variable,
    panel_of_models,
    failing_device,
    hidden_variable,
)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_payload_is_shown_as_text(payload):
    """A payload in any place reaches the page as text, and brings no element or attribute with it."""
    for make in VALUES:
        value = make(payload)
        assert " ".join(payload.split()) in " ".join(said(value._repr_html_()).split()), type(value)


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


@pytest.mark.real_computer  # The extension is loaded afresh, which ends a simulation.
def test_hostile_model_is_shown_as_text(shell, label_model):
    """Labels and the folder's name of a real model, and a real note, are shown as text by the magic."""
    note = f"He has asthma. {PAYLOADS[0]}"
    found = shell.find_cell_magic("openmed_ner")(f"--model '{label_model}'", note)
    shown = said(found._repr_html_())

    assert PAYLOADS[1] in shown
    assert note.split(". ")[1] in shown
    assert str(label_model) in shown
    assert len(found) > 0


ANY = st.text(max_size=30)
CELL = st.text(min_size=1, max_size=30)


@given(title=ANY, sentence=ANY, caption=ANY, cells=st.lists(st.tuples(CELL, CELL), min_size=1, max_size=3))
def test_any_text_in_a_report(title, sentence, caption, cells):
    """Whatever a report says, the page shows exactly that."""
    report = Report(title, (sentence,), (Table(caption, ("name", "value"), tuple(cells)),))
    expected = title + sentence + caption + "namevalue" + "".join(a + b for a, b in cells)

    assert said(to_html(report)) == expected


@given(data=st.data(), text=st.text(min_size=1, max_size=40), label=ANY)
def test_any_note_with_any_entities(data, text, label):
    """Whatever a note holds and wherever its entities lie, the marked text is the note with labels."""
    places = st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(sorted)
    entities = tuple(
        {"entity_group": label, "score": 0.5, "start": start, "end": end}
        for start, end in data.draw(st.lists(places, max_size=4))
    )
    page = read(make_text(text, *entities)._repr_html_())
    (shown,) = page.find("div", dir="auto")
    shown.content = [child for child in shown.content if isinstance(child, str) or child.tag != "small"]
    for mark in shown.find("mark"):
        mark.content = [child for child in mark.content if isinstance(child, str)]

    assert shown.text.translate(BRACKETS).rstrip() == text.translate(BRACKETS).rstrip()


# Overlapping entities are in brackets.
BRACKETS = str.maketrans("", "", "[]")
