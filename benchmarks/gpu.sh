#!/usr/bin/env bash
# What one GPU shows: gradients, speed, the tests of tests/gpu. Begin with `benchmarks/gpu.sh quick 1` and `quick 2`, five
# minutes each; `benchmarks/gpu.sh --help` says more.
#
# PYTHON names the interpreter; by default the active environment's, or that of .venv. Nothing is installed: it needs
# torch 2.11 or newer, titanlite's dependencies, pytest and transformers.
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${PYTHON:-}" ]; then
    if [ -z "${VIRTUAL_ENV:-}" ] && [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
case " $* " in *" --help "* | *" -h "* | *" --list "*) ;; *" --dry-run "*)
    null="${NULLGPU_DIR:-.nullgpu}"
    tests/nullgpu/setup.sh "$null"
    NULLGPU_ZERO=1 exec tests/nullgpu/run.sh "$null" benchmarks/gpu.py "$@" ;;
esac
exec "$PYTHON" benchmarks/gpu.py "$@"
