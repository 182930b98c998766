#!/usr/bin/env bash
# Sets everything up, checks style and types, and runs the tests against the installed package: test.sh [PYTEST ARGS]
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/setup.bash"

ensure_java
ensure_dataset
ensure_installed tests
cd "$root"
# Otherwise each of the processes compiles all tests again, in each run.
unset PYTHONDONTWRITEBYTECODE
home=$("$venv/bin/python" -P -c '
import pathlib, sys, distkeras
home = pathlib.Path(distkeras.__file__).parent
sys.exit(print(home) if home.is_relative_to(sys.prefix) else f"error: distkeras must be the installed one. Received: {home}")
')
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
# On one core, while the tests start.
"$venv/bin/mypy" &
types=$! status=0
# Four at a time, for two cores: a test here waits as often as it computes. Files stay whole, for what their tests share;
# which process takes which is in tests/support/distribution.py, and that the longest begin first in tests/conftest.py. A
# process that dies ends the run, and the test that it died in has failed. SlipCover measures the coverage of the installed
# package at a small part of a tracer's cost; -P keeps this folder's link of the same name out of the path.
coverage=$venv/coverage.txt
rm -f "$coverage"
"$venv/bin/python" -P -m slipcover --out "$coverage" --source "$home" -m pytest --numprocesses=4 --dist=loadfile \
  --no-loadscope-reorder --max-worker-restart=0 --durations=25 "$@" || status=$?
# The table stays in its file, so that the tests that failed are the last lines of a log.
[[ -s $coverage ]] && echo "Lines, missed, percent: $(tail -n 1 "$coverage" | tr -s ' ' | cut -d ' ' -f 2-); each module: $coverage"
wait "$types" || status=$?
exit "$status"
