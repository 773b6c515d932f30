"""Packages that importing and configuring openmed_nb does not import: torch, transformers and ipywidgets."""

import json
import sys

import pytest

from helpers.processes import run_python
from openmed_nb.models.registry import BUNDLED

HEAVY = {
    *("torch", "transformers", "ipywidgets", "huggingface_hub", "openmed", "numpy", "pandas", "tqdm", "filelock"),
    *("accelerate", "lightning", "pytorch_lightning", "psutil"),
}

LIGHT = {
    "load_ext": "%load_ext openmed_nb",
    "help": "%openmed_device --help",
    "help of the cell magic": "%openmed_ner --help",
    "help of the log": "%openmed_log --help",
    "help of the release": "%openmed_release --help",
    "help of the report": "%openmed_report --help",
    "help of the sweep": "%openmed_sweep --help",
    "help of the panel": "%openmed_panel --help\n%openmed_panel --close",
    "question mark": "%openmed_device?",
    "cpu": "%openmed_device cpu",
    "reset": "choice = %openmed_device --reset",
    "explain": "choice = %openmed_device --explain",
    "json": "choice = %openmed_device cpu --json",
    "a bad device": "try:\n    %openmed_device mpss\nexcept ValueError:\n    pass",
    "completion": "found = [get_ipython().complete('', line, len(line)) for line in OPEN_LINES]",
    "settings": "%config OpenMedMagics",
    "unload_ext": "%unload_ext openmed_nb",
    "use": "import openmed_nb as nb\nnb.use('cpu')\nnb.device()\nnb.reset()",
    "OpenMedConfig": "nb.OpenMedConfig(device='cpu')",
    "ModelLoader": "nb.compat.ModelLoader(nb.OpenMedConfig(device='cpu'))",
    "resolve_torch_device": "nb.compat.resolve_torch_device('mps')",
    "apply_mps_tuning": "nb.compat.apply_mps_tuning()",
    "find_tensor_referrers": "nb.training.find_tensor_referrers()",
    "Guards": "nb.Guards('labels')",
    "listening": "from openmed_nb.session import SESSION\nSESSION.subscribe(print)()\nlen(SESSION.inventory())",
    "every public name": "rooms = (nb, nb.compat, nb.runbook, nb.training)\n"
    "names = [getattr(room, name) for room in rooms for name in room.__all__]",
}
"""Code without a model or GPU, as cells of one notebook."""

OPEN_LINES = ["%openmed_device ", "%%openmed_ner ", "%openmed_panel "]

LOOK = """
import json, sys

def imported():
    package_modules = {name for name in sys.modules if name.startswith("openmed_nb.training")}
    return sorted(package_modules | HEAVY & {name.partition(".")[0] for name in sys.modules})
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Heavy packages and training modules that IPython has imported after each cell."""
    folder = tmp_path_factory.mktemp("imports")
    cells = [f"{code}\nseen[{name!r}] = imported()" for name, code in LIGHT.items()]
    code = "\n".join(
        [
            f"HEAVY, OPEN_LINES, seen = {HEAVY!r}, {OPEN_LINES!r}, {{}}",
            LOOK,
            *cells,
            "assert all(names for _, names in found)",
            "print(json.dumps(seen))",
        ]
    )
    environ = {"IPYTHONDIR": str(folder), "OPENMED_TORCH_DEVICE": "cpu"}
    process = run_python("-m", "IPython", "--no-banner", "--colors=NoColor", "-c", code, environ=environ, cwd=folder)
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def test_light_calls_import_no_heavy_package(imported):
    assert list(imported) == list(LIGHT)
    assert {name: HEAVY & set(modules) for name, modules in imported.items() if HEAVY & set(modules)} == {}


def test_load_ext_does_not_import_training(imported):
    assert imported["load_ext"] == []
    assert "openmed_nb.training.guards" in imported["every public name"]


ANNOTATE = """
import json, sys
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

folder = sys.argv[1]
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForTokenClassification.from_pretrained(folder)
with torch.no_grad():
    model(**tokenizer("She has asthma.", return_tensors="pt"))
before = set(sys.modules)

import openmed_nb as nb

assert nb.annotate(["She has asthma."], device="cpu")[0]
print(json.dumps(sorted(set(sys.modules) - before)))
"""
"""Modules that annotate imports in addition to a first prediction of transformers."""


def test_annotate_imports_only_pipelines():
    process = run_python("-c", ANNOTATE, BUNDLED["bundled_small"], environ={"OPENMED_TORCH_DEVICE": "cpu"})
    assert process.returncode == 0, process.stdout + process.stderr
    added = json.loads(process.stdout.splitlines()[-1])
    packages = {name.partition(".")[0] for name in added} - sys.stdlib_module_names
    assert packages == {"openmed_nb", "transformers", "platformdirs"}
    assert not {"openmed_nb.training", "openmed_nb.runbook"} & set(added)
