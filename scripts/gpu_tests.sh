#!/usr/bin/env bash
# The tests on a CUDA machine, with a log that says where and when they ran; exit status is pytest's.
# Usage, anywhere:  scripts/gpu_tests.sh [LOG] [-- PYTEST ARGUMENTS]
#   LOG  default outputs/gpu_tests.log
# scripts/gpu_soak.sh checks the memory accesses of all kernels.
# Needs torch, triton, pytest, pytest-timeout and hypothesis for PYTHON (default python3); nothing is installed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
# several processes share the cores
export PYTHONPATH=.:kernels${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=${PYTHON:-python3} log=outputs/gpu_tests.log
unset TRITON_INTERPRET
while [ $# -gt 0 ]; do
  case $1 in
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
exit "$status"
