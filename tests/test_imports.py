"""What importing and asking does not import: torch, transformers and ipywidgets come with the first model or panel."""

import os
import subprocess
import sys

import pytest

import openmed_nb

HEAVY = {
    *("torch", "transformers", "ipywidgets", "huggingface_hub", "openmed", "numpy", "pandas", "tqdm", "filelock"),
    *("accelerate", "lightning", "pytorch_lightning", "matplotlib", "psutil"),
}

ENTRY_POINTS = {
    "import": "import openmed_nb",
    "load_ext": "%load_ext openmed_nb",
    "unload_ext": "%load_ext openmed_nb\n%unload_ext openmed_nb",
    "help": "%load_ext openmed_nb\n%openmed_device --help",
    "help of the cell magic": "%load_ext openmed_nb\n%openmed_ner --help",
    "question mark": "%load_ext openmed_nb\n%openmed_device?",
    "cpu": "%load_ext openmed_nb\n%openmed_device cpu",
    "reset": "%load_ext openmed_nb\nchoice = %openmed_device cpu\n%openmed_device --reset",
    "explain": "%load_ext openmed_nb\nchoice = %openmed_device cpu\n%openmed_device --explain",
    "json": "%load_ext openmed_nb\n%openmed_device cpu --json",
    "settings": "%load_ext openmed_nb\n%config OpenMedMagics",
    "OpenMedConfig": "import openmed_nb as nb\nnb.OpenMedConfig(device='cpu')",
    "ModelLoader": "import openmed_nb as nb\nnb.ModelLoader(nb.OpenMedConfig(device='cpu'))",
    "use": "import openmed_nb as nb\nnb.use('cpu')\nnb.device()\nnb.reset()",
    "resolve_torch_device": "import openmed_nb as nb\nnb.resolve_torch_device('mps')",
    "apply_mps_tuning": "import openmed_nb as nb\nnb.apply_mps_tuning()",
    "annotate": "import openmed_nb as nb\nnb.annotate.__doc__",
    "every public name": "import openmed_nb as nb\nnames = [getattr(nb, name) for name in nb.__all__]",
    "training": "import openmed_nb.interface.training",
    "EpochHooks": "import openmed_nb as nb\nnb.EpochHooks.__doc__, nb.epochs, nb.Guards('labels')",
    "who_holds": "import openmed_nb as nb\nnb.who_holds()",
    "help of the log": "%load_ext openmed_nb\n%openmed_log --help\nimport openmed_nb as nb\nnb.Logbook, nb.logbook, nb.handoff",
    "help of the release": "%load_ext openmed_nb\n%openmed_release --help",
    "help of the sweep": "%load_ext openmed_nb\n%openmed_sweep --help",
    "help of the panel": "%load_ext openmed_nb\n%openmed_panel --help\n%openmed_panel --close",
    "listening": "from openmed_nb.session import SESSION\nSESSION.listen(print)()\nlen(SESSION.inventory())",
    "a bad device": "%load_ext openmed_nb\ntry:\n    get_ipython().run_line_magic('openmed_device', 'mpss')\nexcept ValueError:\n    pass",
}


@pytest.mark.parametrize("code", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
def test_nothing_heavy_is_imported(code, tmp_path):
    """An entry point that needs no model and no GPU leaves the heavy packages alone."""
    ending = f"\nimport sys\nprint('imported:', sorted({HEAVY!r} & set(sys.modules)))"
    process = subprocess.run(
        [sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "-c", code + ending],
        env={**os.environ, "IPYTHONDIR": str(tmp_path), "OPENMED_TORCH_DEVICE": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.splitlines()[-1] == "imported: []"


def test_loading_the_extension_leaves_training_alone(tmp_path):
    """%load_ext imports nothing of training, whose files come with the first question about it."""
    code = "%load_ext openmed_nb\nimport sys\nprint([name for name in sys.modules if 'openmed_nb.training' in name])"
    process = subprocess.run(
        [sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "-c", code],
        env={**os.environ, "IPYTHONDIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )

    assert process.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", openmed_nb.__all__)
def test_every_public_name_is_there(name):
    """Each name of __all__ can be had from the package."""
    assert getattr(openmed_nb, name) is not None
    assert name in dir(openmed_nb)


def test_an_unknown_name_is_an_attribute_error():
    """A name that the package does not have is Python's own AttributeError."""
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = openmed_nb.no_such_name
