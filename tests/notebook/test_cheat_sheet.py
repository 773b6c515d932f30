"""``%openmed``: what can be typed, on one screen, and the state of this session."""

import pytest

from openmed_nb.notebook.extension import PARSERS
from openmed_nb.notebook.magics import CHEAT_SHEET_ROWS, split_words


def test_it_says_the_state_of_this_session(kernel):
    """It names the device with the reason and the models in memory, and loads nothing."""
    kernel.run("%openmed_release")
    empty = kernel.run("%openmed").text
    kernel.run("import openmed_nb; openmed_nb.load_model('bundled_small')")
    text = kernel.run("%openmed").text

    assert "Models in memory: none yet; the first use loads one." in empty
    assert f"  {kernel.value('openmed_nb.device().headline')}." in text
    assert "  Models in memory: bundled_small." in text


def test_every_magic_is_in_it():
    """Each magic but itself stands in it, and is read by its own parser as it stands there."""
    named = {typed.split()[0].lstrip("%") for typed, _ in CHEAT_SHEET_ROWS if typed.startswith("%")}
    assert named == set(PARSERS) - {"openmed"}
    for typed, _ in CHEAT_SHEET_ROWS:
        magic, *_rest = typed.split()
        if magic.startswith("%") and not magic.endswith("ner"):
            PARSERS[magic.lstrip("%")].parse_args(split_words(typed.removeprefix(magic)))


@pytest.mark.parametrize("name", sorted(set(PARSERS) - {"openmed"}))
def test_help_has_examples(kernel, name):
    """--help of each magic ends with examples of it."""
    shown = kernel.run(f"%{name} --help").streams["stdout"]

    assert f"examples:\n  %{name}" in shown.replace("%%", "%")


def test_twins_in_python(kernel):
    """What --list and --explain show, a function returns."""
    kernel.run("import openmed_nb as nb")

    assert kernel.run("nb.list_devices()").text == kernel.run("%openmed_device --list").text
    assert kernel.run("nb.explain_device()").text == kernel.run("%openmed_device --explain").text


def test_a_simulation_that_was_not_begun_says_how(kernel):
    """What nb.simulated_mps() returns says how it is used, and changes nothing before."""
    kernel.run("import openmed_nb as nb")

    assert "with nb.simulated_mps() as mps:" in kernel.run("nb.simulated_mps()").text
    assert kernel.value("nb.device().device") == "cpu"
