#!/usr/bin/env bash
# The tests on a CUDA machine, with a log that says where and when they ran; exit status is pytest's.
# Usage, anywhere:  scripts/gpu_tests.sh [--sanitize] [LOG] [-- PYTEST ARGUMENTS]
#   --sanitize  afterwards runs scripts/sanitize_kernels.py under compute-sanitizer's memcheck
#   LOG         default outputs/gpu_tests.log
# Needs torch, triton, pytest, pytest-timeout and hypothesis for PYTHON (default python3); nothing is installed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH=.:kernels${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3} log=outputs/gpu_tests.log sanitize=0
unset TRITON_INTERPRET
while [ $# -gt 0 ]; do
  case $1 in
    --sanitize) sanitize=1 ;;
    --) shift; break ;;
    -*) echo "error: unknown option $1" >&2; exit 2 ;;
    *) log=$1 ;;
  esac
  shift
done
mkdir -p "$(dirname "$log")"
"$python" - >"$log" <<'PY' || { cat "$log" >&2; exit 2; }
import datetime
import importlib.metadata
import sys

import torch

if not torch.cuda.is_available():
    sys.exit("error: this machine has no CUDA device")
versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "triton")]
print(f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, {torch.cuda.get_device_name()},", ", ".join(versions))
PY
# files that import a package this machine lacks (hydra, say) are left out by name
left_out=$("$python" - <<'PY'
import ast
import importlib.util
from pathlib import Path

for folder in ("attention", "kernels", "models"):
    for file in sorted(Path("tests", folder).glob("test_*.py")):
        body = ast.parse(file.read_text()).body
        names = [a.name for x in body if isinstance(x, ast.Import) for a in x.names]
        names += [x.module for x in body if isinstance(x, ast.ImportFrom) and x.module and not x.level]
        if any(importlib.util.find_spec(name.split(".")[0]) is None for name in names):
            print(file)
PY
)
for file in $left_out; do
  echo "left out, an import is missing here: $file" | tee -a "$log"
  set -- --ignore="$file" "$@"
done
# test_aot.py needs no GPU and runs with `make test`
"$python" -m pytest -m "not slow" -rs --durations=10 --ignore=tests/kernels/test_aot.py \
  tests/kernels tests/attention tests/models "$@" 2>&1 | tee -a "$log"
status=${PIPESTATUS[0]}
echo "pytest: exit status $status" | tee -a "$log"
if [ "$sanitize" = 1 ]; then
  tool=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
  if [ -z "$tool" ]; then
    echo "memcheck: not run, compute-sanitizer is not on this machine (it comes with the CUDA toolkit)" | tee -a "$log"
    exit "$((status ? status : 3))"
  fi
  # without torch's caching allocator every tensor is an allocation of its own, which the tool can guard
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$tool" --tool memcheck --error-exitcode 1 \
    "$python" scripts/sanitize_kernels.py 2>&1 | tee -a "$log"
  checked=${PIPESTATUS[0]}
  echo "memcheck: exit status $checked" | tee -a "$log"
  exit "$((status ? status : checked))"
fi
exit "$status"
