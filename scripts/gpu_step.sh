#!/usr/bin/env bash
# What a training step, a distillation and a generation take on a GPU; benches compare with a slower definition first.
# Usage, in the repository root, with the packages of `pip install -e .`:  scripts/gpu_step.sh [--dry-run] [PART...]
#   PART  tests norm layer step distill denoise profile logging start start_wan pair offload; default all
#         Seconds of an H200: 250 30 80 75 200 210 130 240 70 110 250; of two H100: offload 250
#   --dry-run  says what would run
#   OUT   folder of PART.json, PART.txt and profiles; default outputs/gpu_step
# `start` trains the 120M model twice, with an empty, then a warm cache; `start_wan` finetunes Wan-1.3B so from a safetensors
# folder of random weights (5.7 GB, deleted at the end). `pair` trains one variant of the ablation with the fused elementwise
# kernels and with torch's operations, on two GPUs at the same time (130 s) if they are there, and compares the losses
# (pair.json). `logging` alternates log lines of every step and of every 20th. `offload` trains 20 layers of the 14B model on a
# sample of 76,800 tokens, with the state on the host; it needs two GPUs. Several GPUs: python -m benchmarks.scaling
# Exit status 1 when a part failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
OUT=${OUT:-outputs/gpu_step} dry=0 failed=0
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}.:kernels PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
python=${PYTHON:-python3} all="tests norm layer step distill denoise profile logging start start_wan pair offload" parts=()
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
train() { # NAME SECONDS SETTINGS...: by the script $program
  local name=$1 limit=$2; shift 2
  run "$name" "$limit" "$python" "${program:-train.py}" "run_dir=$OUT/runs/$name" overwrite=true data.num_workers=4 "$@"
}
bytecode() { # of all modules, as pip leaves it; images of containers often have none, and imports take thrice as long
  unset PYTHONDONTWRITEBYTECODE
  export PYTHONPYCACHEPREFIX=$OUT/bytecode
  [ "$dry" = 1 ] || [ -d "$PYTHONPYCACHEPREFIX" ] || "$python" -c 'import compileall, sys
for folder in sys.path[1:]: compileall.compile_dir(folder, maxlevels=20, quiet=2, workers=0)' >"$OUT/bytecode.txt" 2>&1
}
first_step() { # NAME SECONDS SETTINGS...: a few steps with an empty, then with a filled cache
  local name=$1 limit=$2 cache; shift 2
  bytecode
  for cache in cold warm; do
    [ "$dry$cache" != 0cold ] || rm -rf "$OUT/cache"
    TORCHINDUCTOR_CACHE_DIR=$OUT/cache/inductor TRITON_CACHE_DIR=$OUT/cache/triton \
      train "$name-$cache" "$limit" "$@" trainer.limit_val_batches=0 callbacks.checkpoint=null
    [ "$dry" = 1 ] || grep -h "first step done" "$OUT/$name-$cache.txt" || failed=1
  done
}
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
micro=(experiment=pretrain_120m "data.root=$OUT/latents-120m" data.batch_size=8 trainer.accumulate_grad_batches=1)
for part in "${parts[@]}"; do
  case $part in
    tests) run tests 300 "$python" -m pytest -q -p no:cacheprovider -m "not slow" \
      $(grep -l tests.kernels.elementwise tests/kernels/test_*.py) tests/models/test_compiled.py ;;
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
    logging)
      latents "$OUT/latents-120m" --count 64
      for turn in 1 2 3; do
        for every in 1 20; do
          train "logging-$turn-every-$every" 90 "${micro[@]}" trainer.max_steps=60 "trainer.log_every_n_steps=$every" \
            trainer.limit_val_batches=0 callbacks.checkpoint=null
        done
      done
      run logging 30 "$python" scripts/mean_step_seconds.py "$OUT"/runs/logging-*-every-* ;;
    start)
      latents "$OUT/latents-120m" --count 64
      first_step start 120 "${micro[@]}" trainer.max_steps=15 ;;
    start_wan)
      latents "$OUT/latents-wan" --count 24 --latent 16 16 56 104 --text-tokens 512
      [ -f "$OUT/weights-wan/config.json" ] || run weights-wan 120 "$python" scripts/make_random_weights.py "$OUT/weights-wan"
      # shards of our own encoders; sparse from the first step: the dense ones of the experiment compile no sparse kernels
      first_step start-wan 180 experiment=finetune_wan_1_3b "init_from=$OUT/weights-wan" data=folder \
        "data.root=$OUT/latents-wan" data.text_padding=zeros data.text_encoder.dim=4096 data.text_encoder.max_tokens=512 \
        data.batch_size=1 trainer=default trainer.accumulate_grad_batches=1 trainer.max_steps=5 \
        sparsity=constant sparsity.topk=32 sparsity.sparsity=null
      [ "$dry" = 1 ] || rm -rf "$OUT/weights-wan" ;;
    pair)
      # variant c_f of the ablation
      pair=(300 experiment=ablation attention=video_sparse flop_budget=1e16 task.parallel.compile=true
        "task.validate_at=[current]" trainer.val_check_interval=100 "callbacks.samples.prompts=[]" callbacks.checkpoint=null)
      reference() { program=scripts/train_with_reference_ops.py train pair-reference "${pair[@]}"; }
      if [ "$gpus" -gt 1 ]; then
        (export CUDA_VISIBLE_DEVICES=1; reference; exit "$failed") &
        CUDA_VISIBLE_DEVICES=0 train pair-fused "${pair[@]}"
        wait $! || failed=1
      else
        train pair-fused "${pair[@]}"; reference
      fi
      run pair 60 "$python" scripts/compare_losses.py "$OUT/runs/pair-fused" "$OUT/runs/pair-reference" --out "$OUT/pair.json" ;;
    offload)
      [ "$gpus" -gt 1 ] || { echo "left out: offload needs two GPUs, here are $gpus"; continue; }
      latents "$OUT/latents-76k" --count 24 --latent 16 20 96 160 --text-tokens 512
      LINES_SHOWN=30 train offload 250 "${micro[@]}" model=wan_14b model.num_layers=20 "data.root=$OUT/latents-76k" \
        data.batch_size=1 data.text_encoder.max_tokens=512 sparsity=constant sparsity.topk=120 sparsity.sparsity=null \
        trainer=fsdp "trainer.devices=$gpus" "task.parallel.sequence=$gpus" task.parallel.activation_checkpointing=full \
        task.parallel.offload=true callbacks.ema=null trainer.log_every_n_steps=1 debug=profile \
        callbacks.profile.warm_up=2 callbacks.profile.steps=1 ;;
  esac
done
exit "$failed"
