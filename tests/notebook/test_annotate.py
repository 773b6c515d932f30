"""``openmed_nb.annotate``: which models and options it takes, and what a notebook shows of a run."""

import re
import threading
import time

import pytest

import openmed_nb as nb
from helpers.annotations import words
from openmed_nb.errors import ConfigurationError

TEXTS = ["the patient has asthma .", "no history .", "type 2 diabetes mellitus"]
FOUND = [["asthma"], [], ["diabetes mellitus"]]


def annotate(texts=TEXTS, model=None, **options):
    """Annotate texts on the CPU without a progress bar."""
    return nb.annotate(texts, model, **{"device": "cpu", "progress": False, **options})


def test_model_bundled():
    """Without a model the bundled one is used, and the result names it."""
    found = annotate(["Patient with type 2 diabetes mellitus."])
    assert words(found) == [["type 2 diabetes mellitus"]]
    assert (found.model, found.device) == ("bundled", "cpu")


def test_model_pipeline(keyword_model):
    """A pipeline is used as it was built; the answers equal those that it gives."""
    pipe = nb.load_pipeline(str(keyword_model), device="cpu", aggregation_strategy="none")
    found = nb.annotate(TEXTS, pipe, progress=False)
    assert list(found) == pipe(TEXTS)
    assert (found.model, found.device) == ("BertForTokenClassification", "cpu")


@pytest.mark.parametrize("model", [5, ["bundled"], object(), nb.load_model], ids=lambda one: type(one).__name__)
def test_model_no_model(model):
    """The error names the type, also if the call has other arguments."""
    with pytest.raises(ConfigurationError, match=type(model).__name__):
        annotate(model=model)


SETUP = """
import time, pathlib
import openmed_nb as nb

def slowly(texts, seconds, marker=None):
    for number, text in enumerate(texts):
        if marker and number == 12:
            pathlib.Path(marker).touch()
        time.sleep(seconds)
        yield text

long = [f"asthma{' ' * 2500}{number}" for number in range(40)]
options = {"model": MODEL, "progress": False}
"""


@pytest.fixture
def notebook(kernel, keyword_model):
    """A kernel in which texts, options and a slow stream are defined."""
    assert kernel.run(SETUP.replace("MODEL", repr(str(keyword_model)))).status == "ok"
    return kernel


def run_and_interrupt(kernel, code, marker):
    """Run a cell, press the button of the front end when the cell has made a file, and return the reply."""

    def press():
        deadline = time.monotonic() + 60
        while not marker.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        kernel.client.parent.interrupt_kernel()

    button = threading.Thread(target=press)
    button.start()
    reply = kernel.run(code)
    button.join()
    return reply


def test_notebook_result(notebook):
    """The result of a cell is shown as text and as HTML with the entities marked; nothing else is."""
    reply = notebook.run(f"nb.annotate({TEXTS!r}, **options)")
    assert reply.text.splitlines()[0] == "2 mentions of diseases found in 3 notes"
    assert "0: the patient has [asthma](DISEASE) ." in reply.text
    assert "<mark" in reply.html
    assert (len(reply.shown), reply.streams) == (1, {})


@pytest.mark.parametrize("resume", ["None", "'run.jsonl'"], ids=["memory", "file"])
def test_notebook_interrupt(notebook, tmp_path, resume):
    """The button ends a run in one line, past careless code; what the line says, typed in, gives all answers."""
    notebook.run(f"%cd -q {tmp_path}")
    marker = tmp_path / "running"
    cell = (
        f"try:\n    nb.annotate(slowly(long, 0.02, {str(marker)!r}), **options, resume={resume})\n"
        "except Exception:\n    print('swallowed')"
    )
    reply = run_and_interrupt(notebook, cell, marker)
    assert (reply.status, reply.error[0], reply.streams) == ("error", "RunInterrupted", {})
    assert len(reply.error[2]) == 1
    match = re.fullmatch(
        r"RunInterrupted: Stopped after (\d+) notes?\. (?:Run nb\.annotate\(notes, resume=True\) to continue"
        r"|Repeat the call to continue from 'run\.jsonl')\.",
        reply.error[2][0],
    )
    assert 0 < int(match[1]) < 40
    again = notebook.run("found = nb.annotate(long, resume=True)")
    assert again.status == "ok", again.error
    assert notebook.value("[[entity['word'] for entity in entities] for entities in found]") == [["asthma"]] * 40
