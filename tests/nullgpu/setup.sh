#!/usr/bin/env bash
# setup.sh DIR: the null GPU in DIR: a Python environment with torch's CUDA build (3 GB of packages, minutes) and the
# stand-ins for CUDA's libraries. Run again, it brings both up to date. Exit code 3: something that it needs is not here.
# NULLGPU_TORCH: another version of torch, in a folder of its own.
set -eu
dir=${1:?folder} torch=${NULLGPU_TORCH:-2.13.0} here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
missing() { echo "null GPU: $1" >&2; exit 3; }
command -v "${CC:-gcc}" >/dev/null || missing "no C compiler (${CC:-gcc}): install gcc, or set CC"
[ "$(uname -sm)" = "Linux x86_64" ] || [ "$(uname -sm)" = "Linux aarch64" ] || missing "torch has no CUDA build for $(uname -sm)"
mkdir -p "$dir/lib"; dir=$(cd "$dir" && pwd)
exec 9>"$dir/lock"; flock 9  # two test processes may begin together
python="$dir/venv/bin/python"
[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$dir/venv"
has() { "$python" -c 'import sys; from importlib.metadata import version; [version(name) for name in sys.argv[1:]]' "$@" 2>/dev/null; }
if ! has torch triton; then
    # === takes the build without a local version: the CUDA one.
    "$python" -m pip install -q "torch===$torch" && has triton || missing "the CUDA build of torch (torch===$torch) cannot be installed"
fi
needed=(torchao numpy msgspec jinja2 safetensors xxhash tiktoken sentencepiece tensorboard tomli pytest transformers)
has "${needed[@]}" || "$python" -m pip install -q "${needed[@]}" || missing "the packages of titanlite cannot be installed"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# torch's own headers are of its CUDA, but lack some that triton's have, which may be older.
headers=(-I"$packages/nvidia/cu13/include" -I"$packages/triton/backends/nvidia/include")
build() {  # library, sources: replaced at once, since other runs may have it open
    local to="$dir/lib/$1"; shift
    "${CC:-gcc}" -shared -fPIC -O1 -w ${CFLAGS:-} "${headers[@]}" -o "$to.$$" "$@" -ldl -lpthread && mv "$to.$$" "$to"
}
build libnullgpu.so "$here"/src/{runtime,streams,nothing,cublas,nccl}.c
build libcuda.so.1 "$here/src/driver.c"
build libnvidia-ml.so.1 "$here/src/nvml.c"
CFLAGS="-Wl,-soname,libnvrtc.so.13" build libnvrtc.so.13 "$here/src/nvrtc.c"  # torch loads it by this name
