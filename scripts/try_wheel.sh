#!/usr/bin/env bash
# Installs a wheel into an empty environment, and trains with it in a folder without the checkout.
#
#     scripts/try_wheel.sh dist/titanlite-0.2.0-py3-none-any.whl [python3.12]
set -euo pipefail

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "usage: scripts/try_wheel.sh WHEEL [PYTHON]" >&2
    exit 2
fi
wheel="$(cd "$(dirname "$1")" && pwd)/${1##*/}"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

"${2:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet --disable-pip-version-check "$wheel"
cd "$folder"
"$folder/env/bin/titanlite" --version
"$folder/env/bin/titanlite" train debug_model.toml --training.steps 3 --validation.steps 1
