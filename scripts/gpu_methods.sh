#!/usr/bin/env bash
# Neighborhood and dynamic attention on a GPU, about 18 minutes on an H200: kernel tests, benches, comparison.
# Usage, in the repository root:  scripts/gpu_methods.sh
#   OUT     folder of tests.log, CASE.json, CASE.txt and compare-SHAPE/; default outputs/gpu_methods
#   PHASES  which parts, default "tests bench compare"; scripts/gpu_soak.sh checks the memory accesses of all kernels
#   CASES   of `bench`, default "neighborhood selection fine_grained dynamic_hilbert"; about a minute each
#   SHAPES  of `compare`, default "mochi wan hunyuan"; 1, 4 and 5 minutes on an H200
# `compare` and dynamic_hilbert need the packages of `pip install -e .`; the others need torch, triton, pytest and hypothesis.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
OUT=${OUT:-outputs/gpu_methods}; mkdir -p "$OUT"
PHASES=${PHASES:-tests bench compare}
CASES=${CASES:-neighborhood selection fine_grained dynamic_hilbert} SHAPES=${SHAPES:-mochi wan hunyuan}
export PYTHONPATH=.:kernels${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
python=${PYTHON:-python3} failed=0
has() { case " $PHASES " in *" $1 "*) return 0 ;; *) return 1 ;; esac; }
run() { # NAME SECONDS COMMAND...: output to a file, its end to the screen
  local name=$1 limit=$2; shift 2
  echo "== $name"
  timeout "$limit" "$@" >"$OUT/$name.txt" 2>&1 || { echo "exit status $?: $*"; failed=1; }
  tail -n 30 "$OUT/$name.txt"
}
"$python" -c "import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name())" \
  | tee "$OUT/machine.txt" || exit 2

if has tests; then
  run tests 420 "$python" -m pytest -q -p no:cacheprovider -m "not slow" \
    tests/kernels/test_gathered.py tests/kernels/test_skipping.py tests/kernels/test_share.py tests/kernels/test_triton_share.py \
    tests/kernels/test_mean_scores.py tests/kernels/test_triton_pooling.py tests/kernels/test_triton_masks.py \
    tests/attention/test_selection.py tests/attention/sparge tests/attention/fine_grained
fi
if has bench; then
  for case in $CASES; do
    run "$case" 200 "$python" -m scripts.bench "$case" --device cuda --out "$OUT/$case.json"
  done
fi
if has compare; then
  # the oracle computes dense attention in fp32: at one sparsity, or the larger shapes take more than ten minutes
  methods=(neighborhood strided_window spatial_temporal compressed_kv "sparge tau=0.9" "sparge tau=0.6"
    "fine_grained top_p=0.9" "fine_grained top_p=0.6" "staged stages=f score=oracle sparsity=0.875"
    "staged stages=f score=mass sparsity=0.875" "staged stages=f score=random sparsity=0.875"
    spatial_full "staged stages=l" "staged stages=c_l" "staged stages=c_f_l sparsity=0.75" "staged stages=c_fl sparsity=0.75"
    "pooled_tail order=2 sparsity=0.75" "pooled_tail order=2 sparsity=0.875")
  for name in video_sparse pooled_tail dynamic_hilbert; do
    methods+=("$name sparsity=0.5" "$name sparsity=0.75" "$name sparsity=0.875")
  done
  # token grids of Mochi, HunyuanVideo and Wan2.1 720p, with their heads and windows of sliding tile attention
  declare -A grids=([mochi]="14 30 53 24" [hunyuan]="30 48 80 24" [wan]="21 45 80 40")
  declare -A windows=([mochi]="[12,12,12]" [hunyuan]="[20,20,20]" [wan]="[12,20,20]")
  for shape in $SHAPES; do
    read -r t h w heads <<<"${grids[$shape]}"
    window="sliding_tile window_thw=${windows[$shape]} tile_thw=[4,4,4]"
    run "compare-$shape" 560 "$python" -m vsa.cli compare-attention --synthetic "$t" "$h" "$w" --heads "$heads" --head-dim 128 \
      "${methods[@]/#/--method=}" "--method=$window" --repeats 3 --device cuda --out "$OUT/compare-$shape"
  done
fi
exit "$failed"
