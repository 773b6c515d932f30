"""Keeps the certificates of a cluster on a host until the connection that brought them ends: ``python -m ...keeper``.

One line of JSON comes in: the folder, and the text of each file by its name. Once they are there, a line goes out.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files into a folder, for nobody else to read; two hosts that are one computer share it."""
    os.umask(0o077)
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, "ascii")


def main() -> None:
    """Have the files there while there is an input; nobody may be left to write to, which Python tells by an error."""
    folder, files = json.loads(sys.stdin.readline())
    try:
        write(Path(folder), files)
        sys.stdout.write("written\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
