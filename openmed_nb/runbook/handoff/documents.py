"""The files of a bundle that people read and run: its README, the golden command, and the smoke script."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from .golden import EVIDENCE, GOLDEN, LOGBOOK, MODEL, TEXTS
from .requirements import Pin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .golden import Golden

RUN, SMOKE, REQUIREMENTS, README, WHEELS = "run.sh", "smoke.py", "requirements.txt", "README.md", "wheels"
SCHEMA_NAME, RESULT = "logbook.schema.json", "smoke.json"

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""What keeps everything from asking the network."""

SMOKE_SCRIPT = f'''"""Repeat the smoke test of this bundle: python {SMOKE} [--device DEVICE] [--model FOLDER]; status 0 where it passes."""

import contextlib
import json
import os
import sys
from pathlib import Path

BUNDLE = Path(__file__).resolve().parent
with contextlib.suppress(OSError):
    (BUNDLE / "{RESULT}").unlink()  # What an earlier run found is not what this one finds.
try:
    os.environ.update(json.loads((BUNDLE / "{GOLDEN}").read_text("utf-8"))["variables"])  # torch reads them while it loads.
except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
    sys.exit(f"The {GOLDEN} of the bundle cannot be read: {{type(error).__name__}}. Take the bundle from where it came from again.")
try:
    from openmed_nb.runbook.handoff.smoke import from_command_line
except ImportError as error:
    sys.exit(f"openmed_nb cannot be imported here: {{error}}. Install it as the {README} says.")

if __name__ == "__main__":
    sys.exit(from_command_line(BUNDLE, sys.argv[1:]))
'''

WHAT = {
    README: "this text",
    RUN: "the golden command: it sets the environment variables and runs the smoke test",
    SMOKE: "the smoke test",
    GOLDEN: "the golden run: model, device, type, batch, environment variables, and the entities to be found",
    LOGBOOK: "what the golden run was measured with, and its figures",
    EVIDENCE: "the logbook of the work that is handed over",
    SCHEMA_NAME: "the form of logbooks, as a JSON Schema",
    TEXTS: "the texts of the golden run",
    f"{MODEL}/": "the model",
    REQUIREMENTS: "every package, in the version that was used",
    f"{WHEELS}/": "this version of openmed_nb",
    "SHA256SUMS": "the checksum of every file here, for sha256sum -c or shasum -a 256 -c",
}
"""What each file is for."""


def run_script(golden: Golden) -> str:
    """Return the golden command line with its environment variables, for a POSIX shell."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in golden.variables.items())
    return f"""#!/bin/sh
# {WHAT[RUN].capitalize()}.
set -eu
script=$0
while [ -L "$script" ]; do
  link=$(readlink -- "$script")
  case $link in /*) script=$link ;; *) script=$(dirname -- "$script")/$link ;; esac
done
CDPATH= cd -- "$(dirname -- "$script")"
{exports}exec "${{PYTHON:-$(command -v python || command -v python3 || echo python)}}" {SMOKE} "$@"
"""


def readme(golden: Golden, files: Sequence[str], wheel: str, python: str, simulated: bool) -> str:
    """Return what a bundle says of itself.

    Args:
        golden: Its golden run.
        files: What is in it, folders with a slash.
        wheel: The name of the wheel.
        python: The version of Python, such as ``3.11``.
        simulated: Whether the golden run was on a simulated device.
    """
    table = "\n".join(f"| `{name}` | {WHAT[name]} |" for name in WHAT if name in files)
    simulation = (
        "\nThe golden run was on a **simulated** MPS device: its times are none of a Mac.\n" if simulated else ""
    )
    return f"""# A bundle of openmed_nb

This folder runs a model for token classification on another computer, and proves there that it does what it did here: the
same entities, memory that stays level, and, on a computer like this one, the same speed.
{simulation}
## Run it

With Python {python}, in this folder:

```sh
python -m venv .venv
. .venv/bin/activate
python -m pip install -r {REQUIREMENTS}
python -m pip install --no-deps {WHEELS}/{wheel}
sh {RUN}
```

After the installation no network is needed. The smoke test prints what it found, writes `{RESULT}`, and ends with status 0
where everything passed and 1 where something failed. On Windows, run `python {SMOKE}` instead of the last line.

To annotate a note: `python -m openmed_nb --model {golden.model if golden.copied else shlex.quote(golden.model)} note.txt`.

## What it checks

1. Every file is the one that was written (`SHA256SUMS`).
2. Every package is the one in `{REQUIREMENTS}`.
3. The entities in the golden texts are exactly those in `{GOLDEN}`.
4. Memory does not grow over {golden.rounds} rounds.
5. It is as fast as `{LOGBOOK}` says; but only where the two may be compared: the same device, torch, transformers, model,
   texts, batch, power source and so on, and no busy programs in either run. Elsewhere it says why not.

## What is in it

| file | what it is |
| --- | --- |
{table}

{model_words(golden)}

{texts_words(golden)}
"""


def model_words(golden: Golden) -> str:
    """Return what there is to say of the model."""
    if golden.copied:
        return f"The model is in `{MODEL}/`."
    return (
        f"The model `{golden.model}` is **not** here; the smoke test checks that its files are the same. Fetch it first, or say "
        f"where it is: `sh {RUN} --model FOLDER`."
    )


def texts_words(golden: Golden) -> str:
    """Return what there is to say of the texts and of the dataset."""
    if golden.dataset_copied:
        return f"**`{TEXTS}` holds the texts of the dataset. Handle this folder as you must handle them.**"
    checksum = f" The dataset of the work has SHA-256 `{golden.dataset.checksum}`." if golden.dataset else ""
    return f"The texts in `{TEXTS}` are synthetic; no text of a dataset is in this folder.{checksum}"


def locked_on(python: str, system: str, pins: Sequence[Pin]) -> str:
    """Return what an environment was locked on.

    Example:
        >>> locked_on("3.11.7", "macOS 14.5", ())
        'Python 3.11.7, macOS 14.5, 0 packages'
    """
    return f"Python {python}, {system}, {len(pins)} packages"
