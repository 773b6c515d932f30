"""``%%openmed_ner`` as a notebook sees it."""

import re

import pytest

SMALL = "%%openmed_ner --model bundled_small"
NOTE = "He has asthma, type 2 diabetes and hypertension."
FOUND = "He has [asthma](DISEASE), [type 2 diabetes](DISEASE) and [hypertension](DISEASE)."


def test_entities_are_marked_in_the_text(kernel):
    """The result shows the text with its entities, in text and in HTML, with label and score."""
    reply = kernel.run(f"{SMALL}\n{NOTE}")

    assert reply.text.startswith("3 mentions of diseases found\n  Model: bundled_small, device: cpu, ")
    assert f"\n{FOUND}\nLabels: DISEASE (3 entities)\n" in reply.text
    assert reply.html.count("<mark") == 3
    assert 'title="DISEASE 0.' in reply.html
    assert re.search(r"asthma<small[^>]*> DISEASE<span[^>]*> [01]\.\d+</span></small></mark>", reply.html)
    assert reply.streams == {}


def test_ner_magic_uses_the_bundled_model_by_default(kernel):
    """Without --model the bundled model runs, offline."""
    reply = kernel.run(f"%%openmed_ner\n{NOTE}")

    assert "Model: bundled, device: cpu" in reply.text
    assert "[asthma](DISEASE)" in reply.text


def test_model_in_training_mode_runs_without_dropout(kernel):
    """A model that a training has left in training mode runs without dropout, and stays in training mode."""
    kernel.run("import openmed_nb as nb; model = nb.load_model('bundled_small')['model'].train()")
    kernel.run("for part in model.modules(): part.p = 0.9")
    try:
        assert {kernel.run(f"{SMALL}\n{NOTE}").text.splitlines()[2] for _ in range(3)} == {FOUND}
        assert kernel.value("all(part.training for part in model.modules())")
    finally:
        kernel.run("nb.compat.ModelLoader().unload('bundled_small'); del model")


def test_out_keeps_the_result_and_shows_nothing(kernel):
    """--out NAME puts the annotated text into a variable; it is a sequence of entities."""
    assert kernel.run(f"{SMALL} --out found\n{NOTE}").is_empty
    assert kernel.value("[found.text[one['start']:one['end']] for one in found]") == [
        "asthma",
        "type 2 diabetes",
        "hypertension",
    ]


def test_strategy_none_gives_tokens(kernel):
    """--strategy none shows the labels of tokens."""
    assert "(B-DISEASE)" in kernel.run(f"{SMALL} --strategy none\nHe has asthma.").text


def test_device_option_applies_to_one_cell(kernel):
    """--device applies to the cell only."""
    before = kernel.value("__import__('openmed_nb').device().requested_by")

    assert "device: cpu" in kernel.run(f"{SMALL} --device cpu\n{NOTE}").text
    assert kernel.value("__import__('openmed_nb').device().requested_by") == before


LINES = {
    "words": "%openmed_ner --model bundled_small Patient's asthma; # 2",
    "a variable in braces": "%openmed_ner --model bundled_small {patient_note}",
    "a variable with a dollar": "%openmed_ner --model bundled_small $patient_note",
    "a variable by name": "%openmed_ner --model bundled_small --from patient_note  # yes",
    "a variable in a cell": "%%openmed_ner --model bundled_small --from patient_note",
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_line_and_variable_are_annotated(kernel, line):
    """The rest of a line is the text, with variables expanded; --from names a variable."""
    kernel.run('patient_note = "Patient\'s asthma; # 2"')

    assert "\nPatient's [asthma](DISEASE); # 2\nLabels" in kernel.run(line).text


@pytest.mark.parametrize("made", ["[one, one]", "(one for _ in range(2))", "__import__('pandas').Series([one, one])"])
def test_variable_with_many_texts_is_annotated(kernel, made):
    """--from accepts a list, a generator or a Series."""
    kernel.run(f"one = 'She has asthma.'; patient_notes = {made}")
    reply = kernel.run("%openmed_ner --model bundled_small --from patient_notes")

    assert reply.text.startswith("2 mentions of diseases found in 2 notes\n  Model: bundled_small, device: cpu")


def test_config_lists_the_settings_with_help(kernel):
    """%config OpenMedMagics prints each setting with what it does."""
    printed = kernel.run("%config OpenMedMagics").streams["stdout"]

    assert "Default model for %%openmed_ner" in printed
    assert "How to combine tokens (words and parts of words) into entities" in printed
    assert "Show the text of notes in the results of magics." in printed
    assert "Mark the context of entities" in printed


def test_show_text_off_hides_the_note_everywhere(kernel):
    """With show_text off neither form, nor the repr of a kept result, holds a word of the note."""
    kernel.run("%config OpenMedMagics.show_text = False")
    reply = kernel.run(f"{SMALL}\n{NOTE}")
    kept = kernel.run(f"{SMALL} --out found\n{NOTE}\n")
    shown = reply.text + reply.html + str(kept) + kernel.value("repr(found) + str([found])")

    assert "3 mentions of diseases found" in reply.text
    assert [word for word in ("asthma", "diabetes", "hypertension", "He has") if word in shown] == []


def test_context_off_applies_to_magics_and_annotate_until_unload(kernel):
    code = "__import__('openmed_nb').annotate('No asthma.', 'bundled_small', progress=False)"
    kernel.run("%config OpenMedMagics.context = False\n%reload_ext openmed_nb")

    assert "(DISEASE)" in kernel.run(f"{SMALL}\nNo asthma.").text
    assert "(DISEASE)" in kernel.run(code).text
    kernel.run("%unload_ext openmed_nb")
    assert "(DISEASE, negated)" in kernel.run(code).text


def test_settings_survive_a_reload(kernel):
    """A note that must not be shown stays hidden after %reload_ext."""
    kernel.run("%config OpenMedMagics.show_text = False\n%reload_ext openmed_nb")

    assert "asthma" not in kernel.run(f"{SMALL}\n{NOTE}").text


def test_config_sets_the_model_and_the_strategy(kernel):
    """The settings are the defaults of the cell magic."""
    kernel.run("%config OpenMedMagics.default_model = 'bundled_small'")
    kernel.run("%config OpenMedMagics.aggregation_strategy = 'none'")
    text = kernel.run("%%openmed_ner\nHe has asthma.").text

    assert "Model: bundled_small" in text
    assert "(B-DISEASE)" in text


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("{{asthma}} since 2019", "{asthma} since 2019"),  # As IPython has it.
        ('{"history": "asthma"}', '{"history": "asthma"}'),
        ("asthma} and {epilepsy", "asthma} and {epilepsy"),
        ("{next(numbers)} for $nosuch for {next(numbers)}", "0 for $nosuch for 1"),
        ("'$nosuch' costs $$nosuch", "'$nosuch' costs $nosuch"),
        ("Copay $20 or $5.50, patient's $1,200 for $word.", "Copay $20 or $5.50, patient's $1,200 for asthma."),
        ("{type 2 diabetes}", "{type 2 diabetes}"),
        ("{braced_note}", "no {epilepsy} here"),
    ],
)
def test_ner_magic_reads_other_braces_as_they_are_written(kernel, written, read):
    """Braces that hold no Python, doubled ones, and those of an expanded note stay."""
    kernel.run("braced_note, numbers, word = 'no {epilepsy} here', iter(range(9)), 'asthma'")
    kernel.run(f"%openmed_ner --model bundled_small --out found {written}")

    assert kernel.value("found.text") == read


def test_magics_expand_variables_of_the_function_that_calls_them(kernel):
    """The local variables of a function come before those of the notebook."""
    kernel.run(
        "def marked(own_note):\n"
        "    return get_ipython().run_line_magic('openmed_ner', '--model bundled_small {own_note}')\n"
    )

    assert kernel.value("marked('She has asthma.').text") == "She has asthma."
