"""Files of a model that ask for endless time or memory are refused with one sentence, and nothing waits for them."""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import openmed_nb as nb
from openmed_nb.errors import InvalidModelError, UntrustedModelError
from openmed_nb.models.limits import panics_as_errors, read_json, wait_for_trial
from openmed_nb.models.registry import BUNDLED

HOSTILE = runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "hostile_models.py"))
NOTE = "MrsSmithHasAsthma"


def refusal(folder):
    """Return the error of a load, which has to be one sentence and a remedy."""
    with pytest.raises(InvalidModelError) as caught:
        nb.load_model(str(folder), device="cpu")
    error = caught.value
    assert "\n" not in str(error)
    assert error.remedy
    assert len(str(error)) < 500
    return error


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", HOSTILE["KINDS"])
@pytest.mark.parametrize("name", HOSTILE["FILES"])
def test_load_model_rejects_irregular_files(folder, name, kind):
    """A pipe, a device, a socket, a loop of links or a folder in the place of a file is refused, whatever file it is."""
    HOSTILE["in_place_of"](name, kind)(folder)
    assert repr(Path(name).name) in refusal(folder).message


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", HOSTILE["KINDS"])
def test_load_model_rejects_irregular_shards(folder, kind):
    """What an index names in a folder inside has to be a file too."""
    part = folder / "parts" / "model-1.safetensors"
    HOSTILE["index"](0)(folder)
    index = {"weight_map": {"a": "parts/model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    HOSTILE["in_place_of"]("parts/model-1.safetensors", kind)(folder)
    if kind == "device":  # It is outside, which is found first.
        with pytest.raises(UntrustedModelError, match="outside its folder"):
            nb.load_model(str(folder), device="cpu")
    else:
        assert repr(part.name) in refusal(folder).message


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", HOSTILE["DAMAGES"])
def test_load_model_rejects_excessive_files(folder, case):
    """Each is refused before it takes the time or the memory that it asks for."""
    HOSTILE["DAMAGES"][case](folder)
    refusal(folder)


def test_load_model_errors_do_not_quote_files(folder):
    """What is in a pattern is not part of the error."""
    HOSTILE["replacing"](("String", NOTE, NOTE * 100_000))(folder)
    assert NOTE not in str(refusal(folder))
    HOSTILE["splitting"](f"({NOTE}")(folder)
    assert NOTE not in str(refusal(folder))


@pytest.mark.parametrize("pattern", [r"\w+|[^\w\s]+", r"\p{L}+|\d{1,3}|\s+"])
def test_load_model_loads_a_tokenizer_with_an_unusual_pattern(folder, pattern):
    """A pattern that nobody knows is tried in another process, which finds it harmless."""
    HOSTILE["splitting"](pattern)(folder)
    assert nb.load_model(str(folder), device="cpu")


def test_load_model_loads_a_tokenizer_of_files_without_a_tokenizer_json(folder):
    """A tokenizer that transformers makes of a vocabulary is checked after it is made."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.get)), "utf-8")
    HOSTILE["changed"]("tokenizer_config.json", tokenizer_class="BertTokenizer")(folder)
    assert nb.load_model(str(folder), device="cpu")


UNGUARDED = """
import pathlib, sys
from openmed_nb.errors import UntrustedModelError, InvalidModelError
from openmed_nb.models.limits import check_tokenizer_files
print("once")
try:
    check_tokenizer_files(pathlib.Path(sys.argv[1]), "model")
except InvalidModelError:
    print("refused")
"""


def test_trial_does_not_run_the_main_module_again(folder, tmp_path):
    """A script without a main guard runs once, because the trial is not a fork and does not import user code."""
    HOSTILE["splitting"]("(a+)+$")(folder)
    (tmp_path / "script.py").write_text(UNGUARDED)
    command = [sys.executable, tmp_path / "script.py", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["once", "refused"]


@pytest.mark.parametrize("name", BUNDLED)
def test_load_model_starts_no_process_for_ordinary_tokenizers(tmp_path, monkeypatch, name):
    """A tokenizer of known steps is not tried in a process of its own."""
    shutil.copytree(BUNDLED[name], tmp_path / "model")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    assert nb.load_model(str(tmp_path / "model"), device="cpu")


def test_load_model_rejects_untestable_tokenizer(folder, monkeypatch):
    """A tokenizer that cannot be tried is not loaded."""
    HOSTILE["splitting"](r"\w+")(folder)
    monkeypatch.setattr(sys, "executable", str(folder / "nowhere"))
    assert "no process" in refusal(folder).message


@pytest.mark.timeout(30)
def test_trial_has_wall_time_limit_if_psutil_fails():
    class Endless:
        pid = 999_999_999

        def poll(self):
            return None

        def wait(self, seconds):
            raise subprocess.TimeoutExpired("trial", seconds)

    assert wait_for_trial(Endless(), 0.01, 1 << 30)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_panics_as_errors_lets_others_pass(error):
    """An interrupt, an exit and a lack of memory stay what they are."""
    with pytest.raises(error), panics_as_errors():
        raise error


@pytest.mark.parametrize("kind", HOSTILE["KINDS"])
@pytest.mark.timeout(30)
def test_read_json_rejects_irregular_files(tmp_path, kind):
    """A record that is not a regular file raises an error without blocking."""
    HOSTILE["KINDS"][kind](tmp_path / "record.json")
    with pytest.raises((OSError, ValueError)):
        read_json(tmp_path / "record.json")
