#!/usr/bin/env bash
# Sets everything up and shows distkeras in five acts: quickstart.sh [--rules] [--quick] [--out DIR]
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/setup.bash"

ensure_java
ensure_dataset
ensure_installed plots,jobs
exec "$venv/bin/python" "$root/scripts/quickstart" "$@"
