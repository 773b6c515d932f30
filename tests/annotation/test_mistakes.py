"""Mistakes of a first day: each message contains the name that the user typed, and the next step."""

from pathlib import Path

import pandas as pd
import pytest

import openmed_nb as nb
from helpers.annotations import annotate
from openmed_nb.annotation.gold import GoldText
from openmed_nb.errors import ConfigurationError, OpenMedError, OpenMedWarning

TABLE = pd.DataFrame({"note_id": [1, 2], "text": ["She has asthma.", "Well."], "ward": [3, 4]})
COLUMNS = {"text_column": "text", "id_column": "note_id"}


def load(**options):
    return nb.load_pipeline("bundled_small", device="cpu", **options)


@pytest.fixture(scope="module")
def found():
    return annotate(TABLE["text"].tolist())


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """A folder of notes, and a CSV file of Excel."""
    monkeypatch.chdir(tmp_path)
    Path("notes_2024").mkdir()
    Path("notes.csv").write_text("id;text\n1;Fièvre", "cp1252")


MISTAKES = {
    "column of ids": (lambda _: annotate(TABLE, text_column="text", id_column="noteid"), "'noteid'", "'note_id'? Columns: note_id, ward."),
    "column of texts": (lambda _: annotate(TABLE, text_column="report"), "'report'", "Columns: note_id, text, ward."),
    "separator": (lambda _: annotate(pd.DataFrame({"id;text": ["1;Well."]}), text_column="text"), "'text'", "sep=';'"),
    "list as a table": (lambda _: annotate(["Well."], **COLUMNS), "id_column requires a table, not list", "Pass a DataFrame"),
    "attribute of a text": (lambda _: annotate("Well.").by_patient, "'by_patient'", ".found.by_patient"),
    "name of a column": (lambda _: annotate(TABLE, text_column=["text"]), "text_column: list", "name of a column"),
    "option of annotate": (lambda _: annotate(TABLE, text_colum="text"), "'text_colum'", "Did you mean 'text_column'?"),
    "option of a pipeline": (lambda _: load(batchsize=3), "'batchsize'", "Options: batch_size, batch_tokens, "),
    "option of epochs": (lambda _: nb.epochs(3, memory_growth=0.2), "'memory_growth'", "Options: device, every_n_steps"),
    "option of a callback": (lambda _: nb.training.callback("trainer", lives=1), "'lives'", "Did you mean 'live'?"),
    "option of a model": (lambda _: nb.load_model("bundled_small", devise="cpu"), "'devise'", "Did you mean 'device'?"),
    "strategy": (lambda _: load(aggregation_strategy="frist"), "'frist'", "'first'? Valid values: first, none, "),
    "dtype": (lambda _: load(dtype="flaot16"), "'flaot16'", "Did you mean 'float16'?"),
    "label": (lambda found: found.filter("diseas"), "'diseas'", "Did you mean 'disease'?"),
    "context": (lambda found: found.filter(negatd=False), "'negatd'", "Did you mean 'negated'?"),
    "missing context": (lambda found: found.filter(negated=False), "'negated'", "found.with_context('all')"),
    "format": (lambda found: found.export("bratt", "x"), "'bratt'", "Did you mean 'brat'?"),
    "suffix of another format": (lambda found: found.export("brat", "x.xlsx"), "'.xlsx' is not a suffix of brat", "a new folder"),
    "suffix of a review": (lambda found: found.review("r.xlsx"), "'.xlsx' is not the suffix of a review", "suffix .jsonl"),
    "folder of a file": (lambda found: found.save("notes_2025/x.csv"), "no folder 'notes_2025'", "Did you mean 'notes_2024'?"),
    "file without a format": (lambda found: found.export("tasks.json"), "'tasks.json'", "'label-studio', 'tasks.json'"),
    "option of a method": (lambda found: found.show(nubmer=1), "'nubmer' is not an option of show()", "Options: number."),
    "label of a mark": (lambda found: found.review().mark(0, 8, 14, "DISAESE"), "'DISAESE'", "Valid values: DISEASE."),
    "value of a context": (lambda found: found.with_context("all").filter(experiencer="mother"), "'mother'. Valid values: patient,", "family, other."),
    "list of contexts": (lambda found: found.with_context(["negated"]), "a list of 1 item", "with_context('negated', 'experiencer')"),
    "context of a run": (lambda _: annotate(TABLE, context="all"), "'context' is not an option of annotate()", "with_context('all')"),
    "suffix": (lambda found: found.save("x.xls"), "'.xls'", "Suffixes: .jsonl, "),
    "folder": (lambda _: annotate(Path("notes_2025") / "*.txt"), "'notes_2025'", "Did you mean 'notes_2024'?"),
    "path of a table": (lambda _: annotate(Path("notes.csv")), "'notes.csv'", "sep=';', encoding='cp1252'"),
    "name of a table": (lambda _: annotate("notes.csv\n"), "The text looks like a file name ('notes.csv').", "sep=';'"),
    "pattern of files": (lambda _: annotate("notes/*.txt"), "The text looks like a file name", "Path('notes')"),
    "gold": (lambda _: nb.read_annotations("gold.json"), "'gold.json'", "path of an existing file"),
    "position": (lambda found: found[999], "999 is not", "below 2"),
    "function": (lambda _: nb.anotate, "'anotate'", "Did you mean 'annotate'?"),
    "option of a measurement": (lambda _: nb.sweep(max_batch=8), "'max_batch'", "Did you mean 'max_batch_size'?"),
    "options of a module": (lambda _: nb.compare(abs, modle=1), "'modle'", "Did you mean 'model'?"),
    "name of a namespace": (lambda _: nb.parity, "'parity'", "Did you mean 'runbook.parity'?"),
    "attribute": (lambda found: found.wth_context, "'wth_context'", "Did you mean 'with_context'? Use to_frame()"),
    "unknown id": (lambda _: annotate(TABLE, **COLUMNS).show("F9"), "No text has this id", "found.ids"),
    "id as a position": (lambda _: annotate(TABLE, **COLUMNS).at("F9"), "'F9'", "one of found.ids to found.show()"),
    "id without ids": (lambda found: found.show("F9"), "No text has this id", "id_column"),
    "one text": (lambda _: nb.runbook.parity("bundled_small", "Well."), "str is not", "Pass a list: [text]."),
    "gold as texts": (lambda _: nb.runbook.validate_precision("bundled_small", [GoldText(1, "Well.", ())]), "not GoldText", "[item.text for item in gold]"),
    "texts for training": (lambda _: nb.compare("bundled_small", ["Well."], training=True), "list", "labels for training"),
    "folder of a model": (lambda _: nb.load_model("./notes_2025"), "'./notes_2025'", "Did you mean 'notes_2024'?"),
    "file as a model": (lambda _: nb.load_model("notes.csv"), "'notes.csv' is a file", "Pass the folder"),
    "table as a model": (lambda _: nb.load_model(TABLE), "model: DataFrame", "Pass its name"),
    "file of gold": (lambda found: found.score("gold.csv"), "str is not", "nb.read_annotations()"),
    "threshold": (lambda _: nb.runbook.gates(sped_up=1), "'sped_up'", "Gates: speedup, utilization, "),
    "function elsewhere": (lambda _: nb.runbook.sweep, "'sweep'", "'openmed_nb.sweep'"),
    "lengths": (lambda _: annotate(TABLE, **COLUMNS).to_frame(TABLE[["ward"]][:1]), "1 rows", "the column of the texts"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_named_with_the_next_step(found, mistake):
    call, thing, step = MISTAKES[mistake]
    with pytest.raises((OpenMedError, OpenMedWarning, AttributeError)) as caught:
        call(found)
    message = str(caught.value)
    assert (thing in message, step in message) == (True, True), message
    assert len(message) < 300


def test_names_with_spaces_are_not_in_errors():
    """They may be a note."""
    table = TABLE.rename(columns={"ward": "Mr Zyxwv has HIV"})
    for options in ({"Mr Zyxwv has HI": 1}, {"text_column": "Mr Zyxwv has HI"}):
        with pytest.raises(ConfigurationError) as caught:
            annotate(table, **options)
        assert "Zyxwv" not in str(caught.value)


def test_names_with_an_underscore_get_no_suggestion(found):
    with pytest.raises(AttributeError, match=r"'_repr_htm_'$"):
        assert found._repr_htm_


def test_sequence_ends_with_an_index_error(found):
    with pytest.raises(IndexError):
        found[-3]
