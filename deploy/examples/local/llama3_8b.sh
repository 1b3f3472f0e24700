#!/usr/bin/env bash
# 8b: 2 machines with 8 ranks each. Written by `titanlite launch local`.
# Start it on each machine, within some minutes: /shared/runs/8b/launch/run.sh NUMBER ADDRESS[:PORT]
# NUMBER is 0 to 1; ADDRESS is that of machine 0. All machines see /shared/titanlite and the run's folder.
# SIGTERM and SIGUSR1 stop the run with a checkpoint; the same command continues from there.

set -u
cd /shared/titanlite || exit 1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300
if [ $# -ne 2 ]; then
    echo "usage: $0 NUMBER ADDRESS[:PORT], where NUMBER is 0 to 1" >&2
    exit 2
fi

restarts=0
declare -A failures # by the steps that were reached
run='' # process of the run; none before the first start and after each end
stopped=/shared/runs/8b/launch/stopped # is there when one of the machines is asked to stop
stop() {
    touch "$stopped"
    if [ -n "$run" ]; then kill -TERM "$run"; fi
}
rm -f "$stopped"
trap stop TERM USR1
trap 'touch "$stopped"' INT # Ctrl-C reaches the run, too
while [ ! -e "$stopped" ]; do
    /shared/titanlite/.venv/bin/python -m titanlite train /shared/runs/8b/launch/config.toml --nproc 8 --nnodes 2 --node-rank "$1" --master "$2" &
    run=$!
    if [ -e "$stopped" ]; then stop; fi # the signal came while it was started
    while kill -0 "$run" 2>/dev/null; do # a signal ends `wait`, not the run
        wait "$run"
    done
    wait "$run"
    code=$?
    run=''
    # 5: saved, since torchrun was killed on a machine. 7: another rank was lost. 128 and more: killed.
    if [ "$code" -ne 5 ] && [ "$code" -ne 7 ] && [ "$code" -lt 128 ]; then exit "$code"; fi
    if [ -e "$stopped" ] || [ "$restarts" -ge 50 ]; then break; fi
    step=$(tail -q -n 1 /shared/runs/8b/metrics.jsonl 2>/dev/null | grep -o '"step": [0-9][0-9]*' | grep -o '[0-9]*$')
    # Progress is a new step in the metrics, or a newer checkpoint at the end of a start.
    saved=$(grep -o '"saved_step": [0-9][0-9]*' /shared/runs/8b/attempts.jsonl 2>/dev/null | tail -n 1)
    reached="$step $saved"
    failures["$reached"]=$((${failures["$reached"]:-0} + 1))
    if [ "${failures["$reached"]}" -ge 3 ]; then
        echo "== ended with code $code after step ${step:-0} for the third time: no further start" >&2
        break
    fi
    restarts=$((restarts + 1))
    echo "== ended with code $code; restart $restarts of 50" >&2
    if [ "$1" -ne 0 ]; then # torchrun on machine 0 may still serve the last start; it ends after the run's lock
        for ((i = 0; i < 180; i++)); do
            [ -e /shared/runs/8b/run.lock ] || break
            sleep 1
        done
        sleep 5
    fi
done
exit "$code"
