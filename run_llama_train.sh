#!/usr/bin/env bash
# Trains a Llama from one TOML file. `./run_llama_train.sh --help` says more.
set -u

usage() {
    cat <<'HELP'
usage: [NGPU=n] [LOG_RANK=r] [CONFIG_FILE=file.toml] ./run_llama_train.sh [--section.key value ...]

Trains with torchrun on this machine. Makes .venv first when it is missing or out of date; an active environment that
has titanlite is used instead. The configuration is checked before any worker starts.

  NGPU         worker processes. Default: one per GPU; without a GPU 2, which train on the CPU with one thread each
  LOG_RANK     whose output is shown. Default: 0; several as 0,1. What every rank prints is kept below
               $TMPDIR/titanlite-* (default /tmp; the newest is the last run's)
  CONFIG_FILE  Default: train_configs/debug_model.toml
  PYTHON       the interpreter that .venv is made with. Default: the first of python3, python3.13 to python3.10

Every argument goes to train.py and wins over the file:
  ./run_llama_train.sh --training.steps 100 --metrics.log_freq 1
  CONFIG_FILE=train_configs/llama3_8b.toml NGPU=8 ./run_llama_train.sh --training.seq_len 4096

`titanlite config explain` lists the keys. Exit code: the workers'; 2 for a wrong configuration, 5 for a run that was asked to stop and is saved, ...
(docs/reliability.md).
HELP
}

for argument in "$@"; do
    case "$argument" in -h | --help) usage; exit 0 ;; esac
done

fail() {
    printf 'run_llama_train.sh: %s\n' "$1" >&2
    exit 2
}

# A relative CONFIG_FILE or other path on the command line means the caller's folder, not this one.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" || exit 1
config="${CONFIG_FILE:-$root/train_configs/debug_model.toml}"
if [ ! -e "$config" ] && [ -e "$root/$config" ]; then config="$root/$config"; fi

gpus=0
if command -v nvidia-smi >/dev/null 2>&1; then
    gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')"
    # torch sees only these.
    if [ "$gpus" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        gpus="$(printf '%s' "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -c '[^[:space:]]')"
    fi
fi
if [ "$gpus" -gt 0 ]; then workers="${NGPU:-$gpus}"; else workers="${NGPU:-2}"; fi
case "$workers" in '' | *[!0-9]* | 0*) fail "NGPU must be a whole number of at least 1, not '$workers'" ;; esac
if [ "$gpus" -gt 0 ] && [ "$workers" -gt "$gpus" ]; then
    fail "NGPU=$workers, but this machine shows $gpus GPU(s) (nvidia-smi -L, CUDA_VISIBLE_DEVICES); each worker needs one of its own"
fi
log_rank="${LOG_RANK:-0}"
IFS=', ' read -r -a shown <<<"$log_rank"
for rank in ${shown[@]+"${shown[@]}"}; do
    case "$rank" in '' | *[!0-9]*) fail "LOG_RANK must name ranks, as in 0 or 0,1, not '$log_rank'" ;; esac
    [ "$rank" -lt "$workers" ] || fail "LOG_RANK=$log_rank: there is no rank $rank among $workers workers (0 to $((workers - 1)))"
done

source "$root/scripts/setup_env.sh"
setup_env run

checked="$(PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "$TITANLITE_PYTHON" -c 'import sys; from titanlite.tools.cli import main; sys.exit(main())' \
    config check "$config" "$@" --strict --world-size "$workers" 2>&1)"
code=$?
if [ "$code" -ne 0 ]; then
    printf '%s\n' "$checked" >&2
    exit "$code"
fi

[ "$gpus" -gt 0 ] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
output=(--local-ranks-filter "$(IFS=,; echo "${shown[*]}")")
if [ -t 1 ] && [ "${shown[*]}" = 0 ] && [ "$workers" -le 10 ]; then
    # Rank 0 has the terminal to itself, for its live view. What other ranks print goes to files of torchrun, which knows
    # ranks of one digit here.
    others=""
    for ((rank = 1; rank < workers; rank++)); do others="$others${others:+,}$rank:3"; done
    [ -z "$others" ] || output+=(--redirects "$others")
else
    # The workers write to files that torchrun reads, and cannot see where its own output ends.
    output+=(--role rank --tee 3)
    [ -t 1 ] && [ -z "${NO_COLOR:-}" ] && export FORCE_COLOR=1
fi
if [ "${#output[@]}" -gt 2 ]; then
    logs="$(mktemp -d "${TMPDIR:-/tmp}/titanlite-XXXXXX")" || exit 1
    output+=(--log-dir "$logs")
fi
# So that a log that is piped into a file shows each step when it is done.
export PYTHONUNBUFFERED=1

# torchrun, with its workers' exit code in the end.
launch=("$TITANLITE_PYTHON" -m titanlite.torchrun
    --nproc_per_node "$workers" --rdzv_backend c10d --rdzv_endpoint localhost:0
    "${output[@]}"
    "$root/train.py" --job.config_file "$config" "$@")
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# SIGUSR1, with which schedulers announce a time limit, would kill torchrun before it can tell how its workers ended; ignored
# here, it is ignored until a worker listens to it.
trap '' USR1
exec "${launch[@]}"
