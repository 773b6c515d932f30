"""Run every notebook and store its outputs: offline, on the CPU, without widget state, timings or versions.

python scripts/regenerate_notebooks.py [NAME...]

Without the start of a name, such as 05, all notebooks run. An output that differs from the stored one only in what nbval leaves
out, such as sizes in memory and pictures, is kept unchanged, so that a second run changes nothing. CI compares the stored
outputs with new ones through nbval.

The metadata are those that JupyterLab writes. A notebook that is opened in the same version of Python is not marked as changed.
"""

from __future__ import annotations

import configparser
import functools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ROOT / "notebooks"
SANITIZERS = ROOT / "tests" / "nbval_sanitize.cfg"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
VARIABLES = {"OPENMED_TORCH_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "OPENMED_NB_CHECK_LOAD": "0"}
UNCOMPARED = ("image/png", "application/vnd.jupyter.widget-view+json")
"""What nbval does not compare: pictures, and the numbers of widgets."""


@functools.cache
def sanitizers() -> list[tuple[str, str]]:
    """Return the patterns of what may differ, each with what stands for it."""
    parser = configparser.RawConfigParser()
    parser.read(SANITIZERS, encoding="utf-8")
    return [(parser[name]["regex"], parser[name]["replace"]) for name in parser.sections()]


def compared(value: Any) -> Any:
    """Return the compared parts of outputs."""
    if isinstance(value, str):
        for pattern, replacement in sanitizers():
            value = re.sub(pattern, replacement, value)
        return value
    if isinstance(value, list):
        return [compared(item) for item in value]
    if isinstance(value, dict):
        return {name: compared(content) for name, content in value.items() if name not in UNCOMPARED}
    return value


def regenerate(path: Path) -> None:
    """Execute one notebook from its top and write it back."""
    stored = nbformat.read(path, as_version=4)
    notebook = nbformat.read(path, as_version=4)
    options = {"store_widget_state": False, "record_timing": False, "timeout": 120}
    resources = {"metadata": {"path": str(path.parent)}}  # As in JupyterLab, paths are relative to the notebook.
    client = NotebookClient(notebook, kernel_name="python3", resources=resources, **options)
    client.execute(stderr=subprocess.DEVNULL)
    for before, cell in zip(stored.cells, notebook.cells, strict=True):
        if cell.cell_type == "code" and compared(before.outputs) == compared(cell.outputs):
            cell.outputs = before.outputs
    language = notebook.metadata["language_info"]  # Of the kernel that ran the cells.
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": language})
    nbformat.write(notebook, path)


def main() -> None:
    """Regenerate the notebooks in the order of their numbers."""
    names = tuple(sys.argv[1:])
    os.environ.update(VARIABLES)
    os.environ.pop("OPENMED_DEVICE", None)
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")):
            if names and not path.name.startswith(names):
                continue
            # A notebook must not use stored data of the user or of another notebook.
            os.environ["OPENMED_NB_DATA"] = str(Path(folder, path.stem))
            regenerate(path)
            print(path.name)


if __name__ == "__main__":
    main()
