#!/bin/sh
# One part of the slow suite of docs/checks.md.
#
#   sh scripts/check_slow.sh --list    the names of the parts
#   sh scripts/check_slow.sh marked    the tests that are marked slow
set -eu
cd "$(dirname "$0")/.."
PARTS="simulated marked examples docs"
if [ "${1-}" = --list ]; then
  echo "$PARTS"
  exit
fi
# Tests wait for kernels, browsers and workers: one process more than there are cores.
PYTEST_XDIST_AUTO_NUM_WORKERS=$(python -c "import os; print((os.cpu_count() or 1) + 1)")
export PYTEST_XDIST_AUTO_NUM_WORKERS
pytest="python -m pytest -n auto --maxprocesses 4 --dist loadfile"
case "${1-}" in
  simulated)  # What needs a device runs once more, on the simulated MPS device.
    $pytest --simulated-mps \
      --deselect tests/annotation/test_same_answers.py::TestLabels \
      --deselect tests/annotation/test_same_answers.py::TestAnyText \
      tests/test_session.py tests/models tests/annotation tests/distributed tests/training ;;
  marked) $pytest --slow -m "slow and not hypothesis and not docs" openmed_nb tests notebooks ;;
  examples) $pytest --slow -m hypothesis tests ;;  # Every property, on many more examples.
  docs) python -m pytest --slow -m docs tests/browser tests/docs ;;  # Builds the site (extra docs); slow guides.
  *) echo "usage: sh scripts/check_slow.sh --list | PART" >&2; exit 2 ;;
esac
