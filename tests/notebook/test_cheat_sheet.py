"""Tests of ``%openmed``: the cheat sheet and the state of the session."""

import pytest

from openmed_nb.notebook.extension import PARSERS
from openmed_nb.notebook.magics import CHEAT_SHEET_ROWS, split_words


def test_cheat_sheet_shows_device_and_loaded_models(kernel):
    kernel.run("%openmed_release")
    empty = kernel.run("%openmed").text
    kernel.run("import openmed_nb; openmed_nb.load_model('bundled_small')")
    text = kernel.run("%openmed").text

    assert "Loaded models: none (a model is loaded on first use)." in empty
    assert f"  {kernel.value('openmed_nb.device().headline')}." in text
    assert "  Loaded models: bundled_small." in text


def test_cheat_sheet_has_valid_line_of_every_magic():
    magics = {line.split()[0].lstrip("%") for line, _ in CHEAT_SHEET_ROWS if line.startswith("%")}
    assert magics == set(PARSERS) - {"openmed"}
    for line, _ in CHEAT_SHEET_ROWS:
        magic, *_rest = line.split()
        if magic.startswith("%") and not magic.endswith("ner"):
            PARSERS[magic.lstrip("%")].parse_args(split_words(line.removeprefix(magic)))


@pytest.mark.parametrize("name", sorted(set(PARSERS) - {"openmed"}))
def test_help_has_examples(kernel, name):

    assert f"examples:\n  %{name}" in kernel.run(f"%{name} --help").streams["stdout"].replace("%%", "%")


def test_functions_return_results_of_list_and_explain(kernel):
    kernel.run("import openmed_nb as nb")

    assert kernel.run("nb.list_devices()").text == kernel.run("%openmed_device --list").text
    assert kernel.run("nb.explain_device()").text == kernel.run("%openmed_device --explain").text
