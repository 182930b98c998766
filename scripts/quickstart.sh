#!/usr/bin/env bash
# Sets everything up and trains Fashion-MNIST under five rules, beside plain Keras: quickstart.sh [--quick] [--out DIR]
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/setup.bash"

ensure_java
ensure_dataset
ensure_installed plots
exec "$venv/bin/python" "$root/scripts/quickstart" "$@"
