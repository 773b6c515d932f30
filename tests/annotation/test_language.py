"""Notes that are not in English, which the included models do not read."""

import csv
import json

import openmed_nb as nb
from helpers import ROOT
from helpers.annotations import annotate
from openmed_nb.annotation.boundaries import is_other_language

OTHERS = [
    "Der Patient klagt über starke Kopfschmerzen. Kein Hinweis auf eine Meningitis.",
    "Z. n. Herzinfarkt 2019. Aktuell Dyspnoe bei Belastung, keine Ödeme.",
    "La patiente se plaint de maux de tête et de nausées. Pas de signe de méningite.",
    "Antécédents : infarctus du myocarde en 2019, asthme dans l'enfance.",
    "Niega dolor torácico. Antecedentes de asma en la infancia. Alergia a la penicilina.",
    "患者は2型糖尿病と高血圧の既往がある。",
    "Жалобы на кашель и одышку.",
]


def test_notes_in_english_are_not_in_another_language():
    with (ROOT / "notebooks/data/notes.csv").open(encoding="utf-8", newline="") as file:
        notes = [row["text"] for row in csv.DictReader(file)]
    lines = (ROOT / "tests/models/clinical_sentences.jsonl").read_text("utf-8").splitlines()
    notes += [json.loads(line)["text"] for line in lines]
    assert len(notes) > 1000
    notes += [
        "Met ca, LE DVT.",
        "DES x2, LE edema.",
        "\u03b2-blocker, \u03b1-blocker, \u03bcg.",
        "Dr. Müller, Dr. García, DES placed.",
    ]
    notes.append("Atrial \ufb01brillation, pleural e\ufb00usion, \ufb02uid overload")
    assert [note for note in notes if is_other_language(note)] == []


def test_result_states_how_many_notes_are_not_in_english():
    notes = [*OTHERS, "She has asthma."] + ["No complaints."] * 20
    found = annotate(notes)
    assert "7 notes are mostly not in English (of the first 20)" in str(found)
    assert [index for index in range(len(notes)) if "not in English" in str(found.at(index))] == [0, 1, 2, 3, 4, 5, 6]
    misread = annotate(["Known gout: see Dr. GarcÃ\xada.", "Donâ€™t know.", "SÃO, Café."])
    assert "2 notes seem to be read in a wrong encoding." in str(misread)
    pipe = nb.load_pipeline("bundled_small", device="cpu")
    assert "English" not in str(nb.annotate(OTHERS[0], pipe))  # The languages of a model of the user are not known.
