#!/usr/bin/env bash
# What a training step, a distillation and a generation take on a GPU; benches compare with a slower definition first.
# Usage, in the repository root, with the packages of `pip install -e .`:  scripts/gpu_step.sh [--dry-run] [PART...]
#   PART  tests norm layer step distill denoise profile start ranks; default all. Seconds of an H200, by estimate:
#         75   30   80    170  200     210     130     130   500
#   --dry-run  says what would run
#   OUT   folder of PART.json, PART.txt and profiles; default outputs/gpu_step
# `start` trains the 120M model twice with an empty, then a warm cache; `ranks` alternates one GPU and all of them three times.
# Exit status 1 when a part failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
OUT=${OUT:-outputs/gpu_step} dry=0 failed=0
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}.:kernels PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
python=${PYTHON:-python3} all="tests norm layer step distill denoise profile start ranks" parts=()
for word in "$@"; do
  if [ "$word" = --dry-run ]; then dry=1; continue; fi
  # a word with a space is no part
  case " ${all// /  } " in
    *" ${word// /_} "*) parts+=("$word") ;;
    *) echo "error: unknown part $word, expected --dry-run or one of $all" >&2; exit 2 ;;
  esac
done
[ ${#parts[@]} -gt 0 ] || read -ra parts <<<"$all"
[ "$dry" = 1 ] || mkdir -p "$OUT"

run() { # NAME SECONDS COMMAND...: output to a file, its end to the screen
  local name=$1 limit=$2; shift 2
  echo "+ [$SECONDS s] $name: $*"
  [ "$dry" = 1 ] && return
  timeout "$limit" "$@" >"$OUT/$name.txt" 2>&1 || { echo "exit status $?"; failed=1; }
  tail -n "${LINES_SHOWN:-12}" "$OUT/$name.txt"
}
bench() { # CASE SECONDS OPTIONS...
  local name=$1 limit=$2; shift 2
  run "$name" "$limit" "$python" -m scripts.bench "$name" --device cuda --out "$OUT/$name.json" "$@"
}
latents() { # FOLDER OPTIONS...: random latents, drawn once
  [ -f "$1/index.json" ] || run "shards-${1##*/}" 60 "$python" scripts/make_random_shards.py "$@"
}
train() { # NAME SECONDS SETTINGS...
  local name=$1 limit=$2; shift 2
  run "$name" "$limit" "$python" train.py "run_dir=$OUT/runs/$name" overwrite=true data.num_workers=4 "$@"
}
micro=(experiment=pretrain_120m "data.root=$OUT/latents-120m" data.batch_size=8 trainer.accumulate_grad_batches=1)

for part in "${parts[@]}"; do
  case $part in
    tests) run tests 150 "$python" -m pytest -q -p no:cacheprovider -m "not slow" tests/kernels/test_residual_norm.py \
      tests/kernels/test_norm_rope.py tests/kernels/test_linear_gelu.py tests/models/test_compiled.py ;;
    norm) bench residual_norm 90 ;;
    layer) bench layer 150 --shapes wan1.3b-480p --modes compiled ;;
    step) bench step 240 --shapes wan1.3b-480p --modes compiled --levels none ;;
    distill) bench distill 300 --modes compiled --levels none ;;
    denoise) bench denoise 270 --modes compiled ;;
    profile)
      latents "$OUT/latents-120m" --count 64
      # with captions of the model's own length
      latents "$OUT/latents-wan" --count 24 --latent 16 16 56 104 --text-tokens 512
      LINES_SHOWN=30 train profile-120m 150 "${micro[@]}" debug=profile
      LINES_SHOWN=30 train profile-wan 180 "${micro[@]}" model=wan_1_3b debug=profile \
        "data.root=$OUT/latents-wan" data.batch_size=1 data.text_encoder.max_tokens=512 ;;
    start)
      latents "$OUT/latents-120m" --count 64
      for cache in cold warm; do
        [ $cache = warm ] || rm -rf "$OUT/cache"
        TORCHINDUCTOR_CACHE_DIR=$OUT/cache/inductor TRITON_CACHE_DIR=$OUT/cache/triton \
          train "start-$cache" 120 "${micro[@]}" trainer.max_steps=15 trainer.limit_val_batches=0 callbacks.checkpoint=null
        [ "$dry" = 1 ] || grep -h "first step done" "$OUT/start-$cache.txt" || failed=1
      done ;;
    ranks)
      gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
      if [ "$gpus" -lt 2 ]; then echo "left out: ranks needs two GPUs, here are $gpus"; continue; fi
      latents "$OUT/latents-120m" --count 64
      for turn in 1 2 3; do
        for devices in 1 "$gpus"; do
          LINES_SHOWN=30 train "ranks-$turn-of-$devices" 120 "${micro[@]}" trainer=fsdp "trainer.devices=$devices" \
            "data.batch_size=$((8 * devices))" debug=profile
        done
      done ;;
  esac
done
exit "$failed"
