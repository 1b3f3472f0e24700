#!/usr/bin/env bash
# Trains a Llama from one TOML file. `./run_llama_train.sh --help` says more.
set -u

usage() {
    cat <<'HELP'
usage: [NGPU=n] [LOG_RANK=r] [CONFIG_FILE=file.toml] ./run_llama_train.sh [FILE ...] [--section.key value ...]

Trains with torchrun on this machine: makes .venv when it is missing or out of date, then does `titanlite train`. An active
environment that has titanlite is used instead. The configuration is checked before any worker starts.

  NGPU         worker processes. Default: one per GPU; without a GPU 2, which train on the CPU with one thread each
  LOG_RANK     whose output is shown. Default: 0; several as 0,1. What every rank prints is kept below
               $TMPDIR/titanlite-* (default /tmp; the newest is the last run's)
  CONFIG_FILE  Default: train_configs/debug_model.toml. Files on the command line replace it
  PYTHON       the interpreter that .venv is made with. Default: the first of python3, python3.13 to python3.10

Every flag wins over the file:
  ./run_llama_train.sh --training.steps 100 --metrics.log_freq 1
  CONFIG_FILE=train_configs/llama3_8b.toml NGPU=8 ./run_llama_train.sh --training.seq_len 4096

`titanlite config explain` lists the keys. Exit code: the workers'; 2 for a wrong configuration, 5 for a run that was asked to stop and is saved, ...
(docs/reliability.md).
HELP
}

for argument in "$@"; do
    case "$argument" in -h | --help) usage; exit 0 ;; esac
done

# A relative CONFIG_FILE or other path on the command line means the caller's folder, not this one.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" || exit 1
config="${CONFIG_FILE:-$root/train_configs/debug_model.toml}"
if [ ! -e "$config" ] && [ -e "$root/$config" ]; then config="$root/$config"; fi
case "${1:-}" in '' | -*) set -- "$config" "$@" ;; esac

source "$root/scripts/setup_env.sh"
setup_env run
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if [ -z "${NGPU:-}" ] && ! nvidia-smi -L >/dev/null 2>&1; then export NGPU=2; fi
exec "$TITANLITE_PYTHON" -m titanlite train "$@"
