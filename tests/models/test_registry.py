"""Names of models: what each stands for, and the nearest names where it stands for nothing."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from helpers.processes import run_python
from openmed_nb.errors import UnknownModelError
from openmed_nb.models.registry import (
    ALIASES,
    BUNDLED,
    ModelReference,
    find_model,
    unknown_model_error,
)

TINY = "OpenMed/OpenMed-NER-DiseaseDetect-TinyMed-135M"


def test_aliases_equal_those_of_openmed():
    """Each alias of the short table is one of openmed's, and stands for the same model there.

    The bundled models, and the privacy filter, which openmed knows by its hub id alone, have names of their own.
    """
    from openmed.core.backends import PRIVACY_FILTER_TORCH_FALLBACK
    from openmed.core.model_registry import OPENMED_MODELS

    assert find_model("privacy_filter").location == PRIVACY_FILTER_TORCH_FALLBACK
    assert not {"privacy_filter", *BUNDLED} & {*OPENMED_MODELS}
    for alias in set(ALIASES) - {"privacy_filter"}:
        assert ALIASES[alias] == OPENMED_MODELS[alias].model_id, alias
        assert find_model(alias) == ModelReference(alias, ALIASES[alias], on_hub=True), alias


@pytest.mark.parametrize(
    ("name", "location"),
    [
        *(
            (name, TINY)
            for name in ("disease_detection_tiny", "disease_detection_tinymed_135m", TINY.partition("/")[2])
        ),
        *((name, name) for name in (TINY, "dslim/bert-base-NER", "a_b/c.d-e")),
    ],
)
def test_find_model_resolves_hub_names(name, location):
    assert find_model(name) == ModelReference(name, location, on_hub=True)


def test_find_model_uses_default_org():
    assert find_model("Own-Model", "acme").location == "acme/Own-Model"
    assert find_model("disease_detection_tiny", "acme").location == TINY


def test_find_model_resolves_folders(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    expected = str(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (expected, tmp_path / "model", "model", "./model", "~/model", Path("model")):
        assert find_model(name) == ModelReference(str(name), expected)


NAMELESS = [
    *("", " ", "bundled ", "a/b/c", "./none", "../none", "..x/y", "/none", "~nobody", "~\0", "\0", "a b", "é"),
    *("https://hub/a", "no_such_alias", "\ud800", ".hidden", "x" * 10_000),
]


@pytest.mark.parametrize("name", NAMELESS)
def test_find_model_rejects_unknown_names(name):
    with pytest.raises(UnknownModelError, match="'bundled', which works offline") as caught:
        find_model(name, default_org="")
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("disease_detection_tinny", "disease_detection_tiny"),
        ("Disease_Detection_Tinny", "disease_detection_tiny"),
        ("OpenMed/OpenMed-NER-DiseaseDetect-TinyMed-13M", TINY),
    ],
)
def test_unknown_model_error_suggests_names(name, suggestion):
    assert repr(suggestion) in unknown_model_error(name).remedy
    assert unknown_model_error("xyz").remedy == "Use 'bundled', which works offline."


NASTY = (
    some.text()
    | some.text("ab/._-~\0 \n", max_size=12)
    | some.sampled_from(["~", "..", "a/" * 300, os.sep, "\\\\x\\y"])
)


@given(NASTY, some.sampled_from(["OpenMed", "", "a/b"]))
def test_find_model_for_any_text(text, organisation):
    try:
        found = find_model(text, organisation)
    except UnknownModelError:
        return
    assert found.name == text
    assert found.location.count("/") == 1 if found.on_hub else Path(found.location).is_dir()


def test_find_model_ignores_user_file_openmed(tmp_path):
    """A user file named openmed.py does not break model names."""
    (tmp_path / "openmed.py").write_text("x = 1\n", "utf-8")
    code = "from openmed_nb.models.registry import find_model\nfind_model('heart_model')"

    assert "UnknownModelError: Model 'heart_model' not found" in run_python("-c", code, cwd=tmp_path).stderr
