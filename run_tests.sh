#!/usr/bin/env bash
# Checks titanlite: lint, formatting, types, tests. `./run_tests.sh --help` says more.
set -u

usage() {
    cat <<'HELP'
usage: ./run_tests.sh [--full | --soak | --nullgpu] [pytest arguments ...]

Checks the repository: ruff (lint and formatting), mypy, pytest. Makes .venv first when it is missing or out of date;
an active environment that has titanlite and the test tools is used instead.

  (nothing)   the quick tier: every test that is not marked slow
  --full      every test that is not marked soak
  --soak      every test, but those of the null GPU
  --nullgpu   the tests on the null GPU alone (tests/nullgpu/README.md): CUDA calls, counted without a GPU
  others      go to pytest: ./run_tests.sh tests/config -k unknown

PYTHON=/path/to/python3.12 names the interpreter that .venv is made with.
All stages run even when one fails; the exit code is 1 if any did (2 to 5: pytest's own).
HELP
}

tier="quick" select="not slow and not soak"
for argument in "$@"; do
    case "$argument" in
        -h | --help) usage; exit 0 ;;
        --full) tier="full" select="not soak" ;;
        --soak) tier="soak" select="" ;;
        --nullgpu) tier="nullgpu" select="nullgpu" ;;
    esac
done
arguments=()
for argument in "$@"; do
    case "$argument" in --full | --soak | --nullgpu) ;; *) arguments+=("$argument") ;; esac
done

cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
source scripts/setup_env.sh
setup_env dev

# One thread per process: the tests start ranks of their own, and two threads each on busy cores are many times slower.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Byte code is kept, whatever the environment says: else each of many processes compiles titanlite for itself, and pytest
# rewrites the asserts of all tests in every run.
unset PYTHONDONTWRITEBYTECODE
status=0

stage() {
    local name="$1" began=$SECONDS code=0
    shift
    printf '\n== %s\n' "$name"
    "$@" || code=$?
    printf -- '-- %s: %s, %d s\n' "$name" "$([ "$code" -eq 0 ] && echo ok || echo "FAILED ($code)")" "$((SECONDS - began))"
    [ "$code" -eq 0 ] || status=1
    return "$code"
}

stage "ruff check" "$TITANLITE_PYTHON" -m ruff check --quiet .
stage "ruff format" "$TITANLITE_PYTHON" -m ruff format --check --quiet .
stage "mypy" "$TITANLITE_PYTHON" -m mypy
[ "$status" -eq 0 ] || printf '\nlint, formatting or types failed (see above); the tests run all the same\n'

# Files go to processes, each with its own ranks, the long ones first (tests/conftest.py). In the full tier a tenth of
# two cores is idle while tests wait, so a third process computes; together they need 12 GB. Soak tests have eight ranks,
# which take more. A call with arguments may want a debugger, or one test.
processes=2
[ "$tier" != full ] || processes=3
spread=(-n "$processes" --dist loadfile --no-loadscope-reorder)
[ "${#arguments[@]}" -eq 0 ] || spread=()

# Last, so that pytest's closing line ends the output.
printf '\n== pytest (%s)\n' "$tier"
"$TITANLITE_PYTHON" -m pytest -m "$select" --durations=10 ${spread[@]+"${spread[@]}"} ${arguments[@]+"${arguments[@]}"} </dev/null
code=$?
[ "$code" -eq 0 ] && exit "$status"
exit "$code"
