#!/usr/bin/env bash
# The cases of the soak that need GPUs, then the memory accesses of all kernels under compute-sanitizer.
# Usage, anywhere:  scripts/gpu_soak.sh [OUT] [ROWS]
#   OUT   folder of soak.json, soak.md and the logs of the sanitizer; default outputs/gpu_soak
#   ROWS  tests; default tests/soak and those of the kernels, for which PYTHON (default python3) needs all of the project
# Exit status 1 when something failed or was left out.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
# a look at the GPUs that leaves forks able to use them
export PYTHONPATH=.:kernels OMP_NUM_THREADS=1 PYTORCH_NVML_BASED_CUDA_CHECK=1
python=${PYTHON:-python3} out=${1:-outputs/gpu_soak} status=0
unset TRITON_INTERPRET
mkdir -p "$out"
# shellcheck disable=SC2086
"$python" -m pytest ${2:-tests/soak tests/kernels/test_triton_fuzz.py} -m "soak and gpu" --attempts full --table "$out/soak.json" || status=1
tool=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer) || exit 1
for check in memcheck initcheck; do
  # a problem takes half a minute, most of it compilation: four processes share 40 problems; without torch's caching
  # allocator every tensor is an allocation of its own, which the tool can guard
  seq 0 10 30 | PYTORCH_NO_CUDA_MEMORY_CACHING=1 xargs -P 4 -I FIRST "$tool" --tool "$check" --error-exitcode 1 \
    --log-file "$out/$check-FIRST.log" "$python" scripts/sanitize_kernels.py --first FIRST --problems 10 || status=1
done
exit "$status"
