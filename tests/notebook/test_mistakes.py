"""Tests of invalid lines of magics: each raises one error of one line and changes nothing."""

import pytest

NER = "%%openmed_ner --model bundled_small"
NOTE = "The patient has leprosy."

INVALID_CELLS = [
    ("%openmed_device banana", "UnknownDeviceError", "'banana' (from %openmed_device)"),
    ("%openmed_device cuda:999", "DeviceUnavailableError", "'cuda:999'"),
    (f"%openmed_device {'a' * 500}", "UnknownDeviceError", "a string of 500 characters"),
    ("%openmed_device --lsit", "MagicError", "Did you mean '--list'? See %openmed_device --help."),
    ("%openmed_device cpu auto", "MagicError", "1 unexpected argument"),
    ("%openmed_device --list --explain", "MagicError", "--list and --explain"),
    ("%openmed_device 'cpu", "MagicError", "No closing quotation"),
    ("%openmed_device --simulate", "MagicError", "--simulate"),
    ("%openmed_device --simulate cuda", "MagicError", "'cuda'"),
    ("%openmed_device --memory 8GiB", "MagicError", "--memory"),
    ("%openmed_device --simulate mps cpu", "MagicError", "--simulate and a device"),
    ("%openmed_device --simulate mps --memory 8 GiB", "MagicError", '--memory "8 GiB"'),
    ("%openmed_device --simulate mps --memory lots", "ConfigurationError", "'lots'"),
    (f"%%openmed_ner --model\n{NOTE}", "MagicError", "expected one argument"),
    (f"%%openmed_ner --model bundeld\n{NOTE}", "UnknownModelError", "'bundeld'"),
    (f"%%openmed_ner --model some/model\n{NOTE}", "ModelDownloadError", "'some/model'"),
    (f"%%openmed_ner --strategy nosuch\n{NOTE}", "ConfigurationError", "none, simple, first, average, max"),
    (f"%%openmed_ner --device banana\n{NOTE}", "UnknownDeviceError", "(from argument)"),
    *((f"%%openmed_ner --out {name}\n{NOTE}", "MagicError", f"'{name}'") for name in ("a.b", "class", "1st")),
    *((cell, "MagicError", "has no text") for cell in (NER, f"{NER}\n\n", f"{NER}\n\n\t \n", "%openmed_ner ")),
    ("%openmed_ner --from patient_nte", "MagicError", "'patient_nte'. Did you mean 'patient_note'?"),
    ("%openmed_ner --from patient_note asthma", "MagicError", "either --from or a text"),
    ("%openmed_ner {sys.nosuch}", "MagicError", "AttributeError"),
    ("%openmed_ner {careless()} has $no_name", "MagicError", "NameError"),
    ("%openmed_ner --model bundled_small Patient {nosuch} has asthma.", "MagicError", "'nosuch'"),
    ("%openmed_ner {nosuch.title} and {sys}", "MagicError", "'nosuch'"),
    (f"{NER} --out {{nosuch}}\n{NOTE}", "MagicError", "'nosuch'"),
    ("%openmed_panel --model=--", "MagicError", "an option without its value"),
    ("%openmed_panel --model nope", "UnknownModelError", "'nope'"),
    ("%openmed_doctor bundled --ops bundled", "MagicError", ""),
    ("%openmed_sweep --length many", "MagicError", "--length"),
    ("%openmed_log run.txt", "ConfigurationError", ""),
]

SETUP = f"""
import os, sys
import openmed_nb as nb
from openmed_nb.notebook.panel import OPEN_PANELS

def careless():
    return never_defined

patient_note = {NOTE!r}
nb.load_pipeline("bundled_small")  # Libraries set their variables at the first load.
"""


@pytest.mark.parametrize(("cell", "name", "value"), INVALID_CELLS, ids=[cell[:60] for cell, _, _ in INVALID_CELLS])
def test_invalid_cell_raises_one_line_and_changes_nothing(kernel, cell, name, value):
    kernel.run(SETUP)
    kernel.run("%openmed_device cpu")
    before = kernel.state(), kernel.value("(os.listdir(), len(OPEN_PANELS))")
    reply = kernel.run(cell)
    ename, evalue, traceback = reply.error

    assert (reply.status, ename) == ("error", name)
    assert value in evalue
    assert traceback == [f"{name}: {evalue}"]
    assert len(evalue) < 500
    assert "leprosy" not in str(reply)
    assert (reply.shown, reply.streams) == ([], {})
    assert (kernel.state(), kernel.value("(os.listdir(), len(OPEN_PANELS))")) == before
