#!/bin/sh
# The checks of docs/checks.md, the quick ones first, in an environment with the "test" extra.
#
#   sh scripts/check.sh           the first suite: what a change can break, in minutes
#   sh scripts/check.sh --slow    the slow suite too
set -eu
cd "$(dirname "$0")/.."
# Tests wait for kernels, browsers and workers: one process more than there are cores.
PYTEST_XDIST_AUTO_NUM_WORKERS=$(python -c "import os; print((os.cpu_count() or 1) + 1)")
export PYTEST_XDIST_AUTO_NUM_WORKERS
# The processes of the tests share the compiled files.
unset PYTHONDONTWRITEBYTECODE
ruff check .
ruff format --check .
mypy
python -m pytest -p tests.helpers.no_iri_checks -p no:faker -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
[ "${1-}" = --slow ] || exit 0
for part in $(sh scripts/check_slow.sh --list); do
  sh scripts/check_slow.sh "$part"
done
