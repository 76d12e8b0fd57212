#!/usr/bin/env bash
# The rows of the reliability scorecard that need GPUs: long strides, memory checks, and runs on several GPUs.
# Usage, anywhere:  scripts/gpu_soak.sh [--short] [--dry-run] [OUT]
#   --short    a try a row
#   --dry-run  says what would run here and what is left out, and runs nothing
#   OUT        folder of soak.json, soak.md, memcheck-N.log, initcheck-N.log; default outputs/gpu_soak
# Strides and memory checks need torch and triton for PYTHON (default python3), runs on several GPUs all of the project.
# Exit status 1 when something failed, 3 when something was left out, 2 for a wrong call or a machine without a GPU.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH=.:kernels${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
python=${PYTHON:-python3} out=outputs/gpu_soak short=() dry=0 status=0 left_out=0
unset TRITON_INTERPRET
while [ $# -gt 0 ]; do
  case $1 in
    --short) short=(--short) ;;
    --dry-run) dry=1 ;;
    -*) echo "error: unknown option $1" >&2; exit 2 ;;
    *) out=$1 ;;
  esac
  shift
done
gpus=$("$python" -c "import torch; print(torch.cuda.device_count())") || { echo "error: $python has no torch" >&2; exit 2; }
if [ "$gpus" = 0 ] && [ "$dry" = 0 ]; then
  echo "error: this machine has no CUDA device" >&2
  exit 2
fi

run() { # the command, or only its words
  echo "+ $*"
  [ "$dry" = 1 ] || "$@"
}
without() {
  echo "left out: $1"
  left_out=1
}

topics=(gpu_kernels)
missing=$("$python" - <<'PY'
import importlib.util

names = ("hydra", "lightning", "webdataset", "safetensors", "filelock")
print(" ".join(name for name in names if importlib.util.find_spec(name) is None))
PY
)
if [ -n "$missing" ]; then
  without "signals, gradients that are no numbers, and lost ranks on several GPUs: $python lacks $missing"
elif [ "$gpus" -lt 2 ]; then
  without "signals, gradients that are no numbers, and lost ranks: they need two GPUs, here are $gpus"
else
  topics+=(gpu_runs)
fi
[ "$dry" = 1 ] || mkdir -p "$out"
run "$python" -m scripts.soak "${topics[@]}" --jobs 1 --out "$out/soak.json" ${short[@]+"${short[@]}"} || status=1

tool=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
if [ -z "$tool" ]; then
  without "memory checks: compute-sanitizer is not on this machine (it comes with the CUDA toolkit)"
else
  # a problem takes half a minute, most of it compilation: four processes share the problems
  each=$([ ${#short[@]} = 0 ] && echo 10 || echo 1)
  for check in memcheck initcheck; do
    checks=()
    for part in 0 1 2 3; do
      # without torch's caching allocator every tensor is an allocation of its own, which the tool can guard
      run env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$tool" --tool "$check" --error-exitcode 1 \
        --log-file "$out/$check-$part.log" "$python" scripts/sanitize_kernels.py \
        --first "$((part * each))" --problems "$each" &
      checks+=($!)
    done
    for check_process in "${checks[@]}"; do
      wait "$check_process"
      checked=$?
      echo "$check of $each problems: exit status $checked"
      [ "$checked" = 0 ] || status=1
    done
  done
fi
[ "$status" = 0 ] && [ "$left_out" = 1 ] && status=3
exit "$status"
