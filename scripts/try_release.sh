#!/usr/bin/env bash
# Publishes titanlite on an index of this machine, installs it from there into an empty environment, and trains
# in a folder without the checkout. Nothing leaves the machine; the dependencies come from pip's own index.
#
#     scripts/try_release.sh [PYTHON] [DIST]     # DIST: a folder with sdist and wheel; without one they are built
set -euo pipefail

if [ $# -gt 2 ]; then
    echo "usage: scripts/try_release.sh [PYTHON] [DIST]" >&2
    exit 2
fi
root="$(cd "$(dirname "$0")/.." && pwd)"
folder="$(mktemp -d)"
server=""
trap '[ -z "$server" ] || kill "$server"; rm -rf "$folder"' EXIT
began=$SECONDS
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
unset PYTHONPATH # it may lead to a checkout
say() { printf '== %s s: %s\n' "$((SECONDS - began))" "$1"; }

"${1:-python3}" -m venv "$folder/tools"
tools="$folder/tools/bin"
"$tools/pip" install build twine pypiserver
if [ $# -lt 2 ]; then
    say "sdist and wheel"
    git -C "$root" archive HEAD --prefix=checkout/ | tar -x -C "$folder" # what is committed, without leftovers
    "$tools/python" -m build --outdir "$folder/dist" "$folder/checkout" >"$folder/build.log" 2>&1 || { cat "$folder/build.log"; exit 1; }
else
    cp -R "$2" "$folder/dist"
fi
"$tools/twine" check --strict "$folder"/dist/*
version="$(basename "$folder"/dist/*.whl | cut -d- -f2)"

say "upload to an index of this machine"
port="$("$tools/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
mkdir "$folder/index"
"$tools/pypi-server" run -i 127.0.0.1 -p "$port" -P . -a . --disable-fallback "$folder/index" 2>"$folder/server.log" &
server=$!
for _ in $(seq 60); do
    ! "$tools/python" -c "import socket; socket.create_connection(('127.0.0.1', $port))" 2>/dev/null || break
    sleep 0.5
done
"$tools/twine" upload --non-interactive --disable-progress-bar -u nobody -p nothing \
    --repository-url "http://127.0.0.1:$port" "$folder"/dist/*

say "installation of titanlite $version"
"${1:-python3}" -m venv "$folder/env"
# From that index alone. The second command adds the dependencies, and torch as it is tested.
"$folder/env/bin/pip" install --no-deps --no-cache-dir --index-url "http://127.0.0.1:$port/simple" "titanlite==$version"
"$folder/env/bin/pip" install -c "$root/constraints.txt" "titanlite==$version"
"$folder/env/bin/pip" check

say "training in an empty folder"
mkdir "$folder/empty"
cd "$folder/empty"
titanlite="$folder/env/bin/titanlite"
"$titanlite" --version | grep "^titanlite $version,"
"$titanlite" config check llama3_8b.toml --world-size 8
flags=(--validation.steps 1 --checkpoint.enable_checkpoint --training.global_batch_size 8)
"$titanlite" train debug_model.toml --training.steps 3 "${flags[@]}"
"$titanlite" train debug_model.toml --training.steps 5 "${flags[@]}" --nproc-per-node 2 2>&1 | tee resumed.txt
grep -q 'resumed from step 3' resumed.txt
"$titanlite" launch slurm llama3_8b.toml --launch.instance_type p5.48xlarge --dry-run >job.txt
grep -q '^#SBATCH' job.txt
say "titanlite $version can be published"
