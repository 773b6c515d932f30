"""Metadata of the project."""

from __future__ import annotations

import sys

from helpers import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
