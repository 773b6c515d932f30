#!/bin/sh
# All checks, the quick ones first. Run it in an environment with the "test" extra.
set -eu
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
mypy
python -m pytest "$@"
