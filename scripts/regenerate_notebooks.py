"""Run every notebook and store its outputs: offline, on the CPU, without widget state, timings or versions.

python scripts/regenerate_notebooks.py

A second run changes nothing. CI compares the stored outputs with new ones through nbval.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
VARIABLES = {"OPENMED_TORCH_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}


def regenerate(path: Path) -> None:
    """Execute one notebook from its top and write it back."""
    notebook = nbformat.read(path, as_version=4)
    options = {"store_widget_state": False, "record_timing": False, "timeout": 120}
    NotebookClient(notebook, kernel_name="python3", **options).execute(stderr=subprocess.DEVNULL)
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL})
    nbformat.write(notebook, path)


def main() -> None:
    """Regenerate all notebooks in the order of their numbers."""
    os.environ.update(VARIABLES)
    os.environ.pop("OPENMED_DEVICE", None)
    for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")):
        regenerate(path)
        print(path.name)


if __name__ == "__main__":
    main()
