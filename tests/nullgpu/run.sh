#!/usr/bin/env bash
# run.sh DIR python-arguments…: Python on the null GPU that setup.sh has made in DIR.
# NULLGPU_COUNT devices (1) of NULLGPU_GIB memory (79.11) with the name NULLGPU_NAME; NULLGPU_LOG=FILE: a line per call.
set -eu
dir=$(cd "${1:?folder}" && pwd); shift
export TRITON_LIBCUDA_PATH="$dir/lib" TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$dir/triton}"
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$dir/inductor}" TORCHINDUCTOR_COMPILE_THREADS=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" LD_LIBRARY_PATH="$dir/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH="$root:$root/tests/nullgpu/site${PYTHONPATH:+:$PYTHONPATH}"
LD_PRELOAD="$dir/lib/libnullgpu.so:$dir/lib/libnvrtc.so.13" exec "$dir/venv/bin/python" "$@"
