#!/bin/sh
# All checks, the quick ones first. Run it in an environment with the "test" extra.
set -eu
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
mypy
python -m pytest "$@"
python -m pytest tests/test_session.py tests/models tests/annotation tests/training --simulated-mps -k "not TestLabels and not TestAnyText"
