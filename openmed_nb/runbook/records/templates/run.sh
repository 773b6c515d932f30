#!/bin/sh
# The golden command, which sets the environment variables and runs the smoke test.
set -eu
script=$0
while [ -L "$script" ]; do
  link=$(readlink -- "$script")
  case $link in /*) script=$link ;; *) script=$(dirname -- "$script")/$link ;; esac
done
CDPATH= cd -- "$(dirname -- "$script")"
# exports
exec "${PYTHON:-$(command -v python || command -v python3 || echo python)}" smoke.py
