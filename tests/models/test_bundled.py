"""The two models inside the package: what they find, how they are stored, and what their cards say."""

import importlib
import json
from pathlib import Path

import pytest
from safetensors import safe_open

from helpers import ROOT
from helpers.session_state import make_store
from openmed_nb.annotation.pipeline import get_pipeline
from openmed_nb.models.config import DEFAULT_STRATEGY, OpenMedConfig
from openmed_nb.models.loading import LoadSpec
from openmed_nb.models.registry import BUNDLED

pytestmark = pytest.mark.parametrize("name", BUNDLED)

MAX_BYTES = {"bundled": 17_000_000, "bundled_small": 6_000_000}
"""The most bytes that the weights may have; the wheel must stay under 25 MB."""


@pytest.fixture(scope="module")
def store():
    """The models of this module, each loaded once."""
    return make_store()


@pytest.fixture
def find(store, name):
    """Find the pieces of a text that a bundled model takes for diseases."""
    pipe = get_pipeline(store.get(LoadSpec.from_name(name, OpenMedConfig()), "cpu", True), DEFAULT_STRATEGY, {})

    def find(text):
        found = pipe(text)
        assert {entity["entity_group"] for entity in found} <= {"DISEASE"}
        return [text[entity["start"] : entity["end"]] for entity in found]

    return find


def test_bundled_model_finds_diseases(find):
    """The diseases of a plain sentence are found, each whole and nothing else."""
    text = "Patient with type 2 diabetes mellitus and hypertension, admitted with acute myocardial infarction."
    assert find(text) == ["type 2 diabetes mellitus", "hypertension", "acute myocardial infarction"]


@pytest.mark.parametrize(
    ("text", "diseases"),
    [
        ("PMH: HTN, DM2, CHF, COPD", ["HTN", "dm2", "CHF", "COPD"]),
        ("SpO2 97% on RA. PE: MS 5/5. HD MWF, PT twice a week.", []),
        ("He has high blood pressure and had a heart attack.", ["high blood pressure", "heart attack"]),
        ("s/p CABG, Foley, lisinopril 10 mg PO daily, CXR clear", []),
    ],
)
def test_bundled_model_reads_the_language_of_notes(find, text, diseases):
    assert [piece.lower() for piece in find(text)] == [disease.lower() for disease in diseases]


def test_recorded_scores_on_notes_are_those_of_the_model(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    evaluation = importlib.import_module("evaluate_bundled_model")
    kept = [note for note in evaluation.read_notes(evaluation.NOTES) if note.part == "kept"]
    scores = evaluation.evaluate_notes(BUNDLED[name], kept)["all"]

    recorded = json.loads((BUNDLED[name] / "figures.json").read_text("utf-8"))["notes"]["kept"]["all"]
    card = (BUNDLED[name] / "README.md").read_text("utf-8")
    page = (ROOT / "docs" / "explanation" / "bundled_models.md").read_text("utf-8")
    for key, fraction in scores.items():
        count, total = recorded[key]
        assert fraction.count == pytest.approx(count, abs=2)  # Another build of torch rounds differently.
        assert f"| {count} of {total} |" in card
        assert f" {count / total:.2f} (" in page


def test_bundled_model_reads_long_notes(find):
    """Diseases after five hundred words are found, because long notes are not truncated."""
    assert find("The patient was seen in the clinic today. " * 62 + "Assessment: asthma.")[-1:] == ["asthma"]


def test_bundled_folder_contents(name):
    """The folder has weights, settings, a tokenizer and a card; no code and no pickle.

    The settings say float32, so that plain transformers does not run the 16-bit weights as they are; these are small
    enough for a wheel.
    """
    folder = BUNDLED[name]
    files = {file.name for file in Path(folder).iterdir()}
    assert files >= {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {Path(file).suffix for file in files} == {".md", ".json", ".safetensors"}

    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert (config["dtype"], config["architectures"]) == ("float32", ["BertForTokenClassification"])
    assert set(config["label2id"]) == {"O", "B-DISEASE", "I-DISEASE"}

    assert (folder / "model.safetensors").stat().st_size < MAX_BYTES[name]
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(key).get_dtype() for key in weights.keys()} == {"F16"}  # noqa: SIM118


def test_model_card_shows_metrics_of_training(name):
    """The table of the card holds the scores that the evaluation recorded, to the last digit."""
    folder = BUNDLED[name]
    metrics = json.loads((folder / "figures.json").read_text("utf-8"))
    card = (folder / "README.md").read_text("utf-8")

    assert all(said in card for said in ("license:", "NCBI", "BC5CDR", "clinical use"))
    for corpus, title in (("ncbi", "NCBI Disease"), ("bc5cdr", "BC5CDR (diseases)")):
        for split, short in (("test", "test"), ("devel", "dev")):
            scores = metrics[split][corpus]
            row = [f"{scores[metric]:.2f}" for metric in ("precision", "recall", "f1")]
            assert f"| {title} | {short} | {' | '.join(row)} |" in card
