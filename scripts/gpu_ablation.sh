#!/usr/bin/env bash
# Part of the ablation on the GPUs of a machine that is there for minutes: goes on from finished runs, leaves more of them.
# Usage, in the repository root, with the packages of `pip install -e .`:  scripts/gpu_ablation.sh
#   OUT     folder that gets sweep.tar.gz.*, in parts below 15 MB; default outputs/gpu_ablation
#   DONE    finished runs of earlier calls, the same parts; default benchmarks/ablation/pilot.tar.gz*
#   LIMIT   seconds for training; default 530
#   BUDGET  FLOPs of a run; default 2e16          NAME  of the sweep; default pilot
#   JOBS    runs that share a GPU; default 3: those that are cut off at the end are lost, so more at once lose less
# Checkpoints stay behind: a finished run needs none, and on the same machine the next call goes on from those of the others.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
OUT=${OUT:-outputs/gpu_ablation}; mkdir -p "$OUT"
NAME=${NAME:-pilot} BUDGET=${BUDGET:-2e16} JOBS=${JOBS:-3} LIMIT=${LIMIT:-530}
DONE=${DONE:-benchmarks/ablation/pilot.tar.gz*}
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}.:kernels PYTHONUNBUFFERED=1
folder=outputs/ablation/$NAME; mkdir -p outputs/ablation
# a machine that was kept since the last call has the folder, with checkpoints of unfinished runs
# shellcheck disable=SC2086
if [ ! -d "$folder" ] && ls $DONE >/dev/null 2>&1; then cat $DONE | tar xz -C outputs/ablation || exit 2; fi
# the sweep stops its runs, which then save, before the machine is gone
timeout --signal=TERM --kill-after=60 "$LIMIT" "${PYTHON:-python3}" -m vsa.cli sweep ablation experiment=ablation \
  "flop_budget=$BUDGET" "sweep.name=$NAME" sweep.lr=null "sweep.jobs_per_device=$JOBS" sweep.grace_seconds=20 \
  task.parallel.compile=true "$@" >"$OUT/sweep.log" 2>&1
status=$?
tail -n 3 "$OUT/sweep.log"
# unfinished runs would start anew without their checkpoints
mapfile -t kept < <("${PYTHON:-python3}" - "$folder" <<'PY'
import json, sys
from pathlib import Path

folder = Path(sys.argv[1])
points = json.loads((folder / "sweep.json").read_text())["points"] if (folder / "sweep.json").exists() else []
finished = [p["name"] for p in points if p["status"] == "finished"]
print("sweep.json", *finished, *(f"{name}.log" for name in finished), sep="\n")
PY
)
tar cz -C outputs/ablation --exclude=checkpoints --exclude=samples --exclude=data-clips --exclude='*.html' "${kept[@]/#/$NAME/}" | split -b 15M - "$OUT/sweep.tar.gz."
echo "finished runs: $(((${#kept[@]} - 1) / 2)), exit status of the sweep $status"
