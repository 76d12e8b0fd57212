#!/usr/bin/env bash
# Neighborhood attention on a GPU, about 8 minutes: tests of fine masks, the bench, then variants of the kernels in pairs.
# Usage, in the repository root:  scripts/gpu_neighborhood.sh
#   OUT     folder of tests.log, bench.json, bench.txt, pairs.json, pairs.txt, sanitize.log; default outputs/gpu_neighborhood
#   PHASES  which parts, default "tests bench pairs sanitize"
set -uo pipefail
OUT=${OUT:-outputs/gpu_neighborhood}; mkdir -p "$OUT"
PHASES=${PHASES:-tests bench pairs sanitize}
export PYTHONPATH=.:kernels${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
PY=${PYTHON:-python3}
$PY -c "import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name())" | tee "$OUT/machine.txt"
nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu --format=csv,noheader | tee -a "$OUT/machine.txt"
has() { case " $PHASES " in *" $1 "*) return 0 ;; *) return 1 ;; esac; }

if has tests; then
  # compiling is what takes long: eight processes share it, and Triton's cache
  files="tests/kernels/test_triton_masks.py tests/kernels/test_hopper_fwd.py tests/kernels/test_cuda_graphs.py
    tests/kernels/test_triton_index.py tests/kernels/test_triton_views.py tests/kernels/test_triton_fuzz.py"
  work=$(mktemp -d)
  $PY -m pytest --collect-only -m "not slow" $files 2>"$work/err" | grep :: >"$work/ids" || cat "$work/err"
  # masks of a test with its neighbours apart: round robin
  split -n r/8 "$work/ids" "$work/shard."
  begin=$(date +%s)
  for shard in "$work"/shard.??; do
    mapfile -t ids <"$shard"
    timeout 270 $PY -m pytest -q -p no:cacheprovider --durations=3 "${ids[@]}" >"$shard.log" 2>&1 &
  done
  wait
  cat "$work"/shard.??.log >"$OUT/tests.log"
  echo "== tests, $(wc -l <"$work/ids") of them in $(($(date +%s) - begin)) s"
  for log in "$work"/shard.??.log; do tail -1 "$log"; done
  grep -hE "^(FAILED|ERROR)" "$work"/shard.??.log
fi

if has bench; then
  echo "== bench"
  timeout 150 $PY -m scripts.bench neighborhood --device cuda --out "$OUT/bench.json" >"$OUT/bench.txt" 2>"$OUT/bench.err"
  status=$?; cat "$OUT/bench.txt"
  if [ $status != 0 ]; then
    tail -5 "$OUT/bench.err"
    # the command reads whole networks' packages, which may be missing here; the case alone does not
    timeout 150 $PY - "$OUT/bench.json" <<'PY'
import json, sys, torch
from scripts.bench import neighborhood as n
from scripts.bench.timing import Setup
at = torch.device("cuda")
setup = Setup(backends=["triton"], peers=[], lists="random", device=at, dtype=torch.bfloat16, repeats=None)
print(n.check_strides("triton", setup.dtype, at))
for shape in n.GPU_WINDOWS:
    got = n.neighborhood(shape, setup)
    rows = [{**shape.row(), **row} for row in got.rows]
    json.dump({"rows": rows, "notes": got.notes, "skipped": got.skipped}, open(sys.argv[1], "w"), indent=1)
    for r in rows:
        print(f"{r['op']:40s} {r['pass']:20s} {r['median_ms']:9.3f} ms  useful {r['useful_tflops']}  {r['speedup']}x  {r.get('share_of_bound')}")
    print(*got.notes, got.skipped, sep="\n")
PY
  fi
fi

if has pairs; then
  echo "== pairs"
  timeout 240 $PY - "$OUT" <<'PY' 2>&1 | tee "$OUT/pairs.txt"
"""Variants against today's, in turns in one process: median of each and of their ratio."""
import json, statistics, sys, time
from contextlib import contextmanager
from dataclasses import replace
import torch
from vsa_kernels import launch
from vsa_kernels.block_sparse import triton_bwd, triton_fwd, triton_tiles
from vsa_kernels.block_sparse.mask import BlockMask
from scripts.bench import neighborhood as n
from scripts.bench.timing import flush_buffer, gpu_times

at, dtype, out_dir = torch.device("cuda"), torch.bfloat16, sys.argv[1]
flush, report, started = flush_buffer(at), [], time.time()
table = launch._table()

@contextmanager
def configured(changes):
    """Other entries of configs.json for sm_90, half precision, D=128."""
    saved = {}
    for kernel, entry in changes.items():
        by_dim = table[kernel]["90"]["16"]
        saved[kernel], by_dim["128"] = by_dim["128"], {**by_dim["128"], **entry}
    launch._config.cache_clear(); triton_tiles._plan.cache_clear()
    try:
        yield
    finally:
        for kernel, entry in saved.items():
            table[kernel]["90"]["16"]["128"] = entry
        launch._config.cache_clear(); triton_tiles._plan.cache_clear()

def pair(name, base, variant, rounds=7):
    """Times of two calls in turns; each is (changes, call, flops)."""
    try:
        results = []
        for changes, call, _ in (base, variant):
            with configured(changes):
                results.append(call()); call()
        torch.cuda.synchronize()
        far = max(float((a.double() - b.double()).norm() / a.double().norm()) for a, b in zip(*results)
                  if a.is_floating_point() and a.isfinite().all())
        same = all(torch.equal(a, b) for a, b in zip(*results))
        del results
        times = [[], []]
        for _ in range(rounds):
            for taken, (changes, call, _) in zip(times, (base, variant)):
                with configured(changes):
                    taken += gpu_times(call, 1, flush, False)
    except Exception as error:
        row = {"name": name, "error": " ".join(str(error).split())[:200]}
        print(f"{name:66s} {row['error']}", flush=True)
    else:
        a, b = (statistics.median(x) for x in times)
        ratio = statistics.median(x / y for x, y in zip(*times))
        row = {"name": name, "base_ms": a, "variant_ms": b, "ratio": ratio, "same_bits": same, "relative": far, "times": times}
        rate = f"{base[2] / a / 1e9:6.0f} -> {variant[2] / b / 1e9:6.0f} TFLOP/s" if base[2] else ""
        print(f"{name:66s} {a:8.3f} -> {b:8.3f} ms  x{ratio:.3f}  {rate}  {'same bits' if same else f'off {far:.1e}'}", flush=True)
    report.append(row)
    json.dump(report, open(f"{out_dir}/pairs.json", "w"), indent=1)

def mask_of(case):
    return BlockMask(index=case.index, q_blocks=case.q_blocks, kv_blocks=case.kv_blocks, kv_valid=None)

def without_masks(case):
    return replace(case, index=replace(case.index, kv_num_full_blocks=None, mask_ids=None, mask_bits=None))

def calls(case):
    """Calls of forward, dq and dkv alone, with their FLOPs over the listed tiles."""
    mask, scale = mask_of(case), 128**-0.5
    with torch.no_grad():
        out, lse = triton_fwd.forward(case.q, case.k, case.v, mask, scale)
        delta = triton_bwd.delta(case.dout, out, lse, torch.zeros_like(lse))
    sizes = case.q_blocks.max_size * case.kv_blocks.max_size
    pairs = int(case.index.kv_num_blocks.sum()) * sizes * case.q.shape[2]
    args = (case.dout, delta, lse, case.q, case.k, case.v, mask, scale)
    plan = lambda kernel: triton_tiles.Plan.of(kernel, case.q, case.k, mask, False)
    fwd = lambda: triton_fwd.forward(case.q, case.k, case.v, mask, scale)
    plain = lambda: triton_fwd._run(case.q, case.k, case.v, mask, scale, plan("fwd"))
    dq = lambda: (triton_bwd._run_dq(*args, plan("dq"), None),)
    dkv = lambda: triton_bwd._run_dkv(*args, plan("dkv"), (None, None))
    flops = lambda products: 2 * products * 128 * pairs
    return {"fwd": (fwd, flops(2)), "triton fwd": (plain, flops(2)), "dq": (dq, flops(3)), "dkv": (dkv, flops(4))}

def make(stride, q_tile=None, kv_tile=None):
    shape = n.GPU_WINDOWS[0]
    shape = replace(shape, q_tile_thw=q_tile or shape.q_tile_thw, tile_thw=kv_tile or shape.tile_thw)
    p = n.WindowProblem.of(shape, dtype, at)
    case = p.case(stride)
    p.__dict__.pop("tiled", None)
    return p, case

torch.cuda.empty_cache()
p, even = make((16, 8, 8))
known = calls(even)
for slots in ((1, 1), (2, 1), (2, 2)):
    entry = {"K_SLOTS": slots[0], "V_SLOTS": slots[1], "num_warps": 8, "maxnreg": 128}
    pair(f"16x8x8 Hopper fwd: 4 -> 8 warps, slots {slots}", ({}, *known["fwd"]), ({"hopper_fwd_wide": entry}, *known["fwd"]))
pair("16x8x8 fwd: Hopper -> Triton", ({}, *known["fwd"]), ({}, *known["triton fwd"]))
WIDE = [{"BLOCK_M": 128, "num_warps": 8, "num_stages": s, "maxnreg": r} for s, r in ((1, None), (2, None), (1, 128))]
for entry in WIDE:
    label = f"128 rows, 8 warps, {entry['num_stages']} stages, maxnreg {entry['maxnreg']}"
    pair(f"16x8x8 Triton fwd: {label}", ({}, *known["triton fwd"]), ({"fwd": entry}, *known["triton fwd"]))
    pair(f"16x8x8 dq: {label}", ({}, *known["dq"]), ({"dq": entry}, *known["dq"]))
for entry in ({"BLOCK_M": 128, "num_warps": 8, "num_stages": 1}, {"DP_FIRST": 0}, {"num_stages": 1}):
    pair(f"16x8x8 dkv: {entry}", ({}, *known["dkv"]), ({"dkv": entry}, *known["dkv"]))

# the order of tokens: what copies of q cost
order, inverse, q = p.tiles.order, p.tiles.inverse, p.raster.q
moved = 2 * q.numel() * q.element_size()
plain = lambda: (q.index_select(1, order),)
pair("permutation of q: index_select -> 8-byte words", ({}, plain, 0), ({}, lambda: (n._rows(q, order),), 0))
def sixteen():
    return (q.flatten(2).view(torch.complex128).index_select(1, order).view(q.dtype).view(q.shape),)
pair("permutation of q: index_select -> 16-byte words", ({}, plain, 0), ({}, sixteen, 0))
leaf = q.detach().requires_grad_()
added = lambda: torch.autograd.grad(leaf.index_select(1, order), leaf, p.raster.dout)
copied = lambda: torch.autograd.grad(n._Reordered.apply(leaf, order, inverse), leaf, p.raster.dout)
pair("permutation of q, forward + backward: index_select -> copied back", ({}, added, 0), ({}, copied, 0))

# what masks cost: the same lists with every entry full (another result, of course)
for stride in ((1, 8, 8), (1, 1, 1)):
    _, case = make(stride)
    fine, bare = calls(case), calls(without_masks(case))
    name = "x".join(map(str, stride))
    for kernel in ("triton fwd", "dq", "dkv"):
        pair(f"{name} {kernel}: masked -> its masks taken away", ({}, *fine[kernel]), ({}, *bare[kernel]))
    pair(f"{name} fwd: masked (Triton) -> its masks taken away (Hopper)", ({}, *fine["fwd"]), ({}, *bare["fwd"]))
    for entry in WIDE:
        label = f"128 rows, 8 warps, {entry['num_stages']} stages, maxnreg {entry['maxnreg']}"
        pair(f"{name} masked fwd: {label}", ({}, *fine["fwd"]), ({"fwd": entry}, *fine["fwd"]))
    del case, fine, bare
    torch.cuda.empty_cache()

# tiles: forward, dq and dkv one after the other
def all_of(case):
    own = calls(case)
    return lambda: [x for kernel in ("fwd", "dq", "dkv") for x in own[kernel][0]()], sum(own[k][1] for k in ("fwd", "dq", "dkv"))
for stride in ((16, 8, 8), (1, 8, 8), (1, 1, 1)):
    base = all_of(make(stride)[1])
    for q_tile, kv_tile in (((2, 4, 8), (2, 4, 8)), ((4, 8, 8), (2, 4, 8)), ((2, 8, 8), (2, 8, 8)), ((4, 4, 8), (2, 4, 8))):
        if time.time() - started > 210:
            break
        try:
            other = all_of(make(stride, q_tile, kv_tile)[1])
        except ValueError as error:
            print(q_tile, kv_tile, error)
            continue
        pair(f"{stride} fwd, dq, dkv: tiles (2,8,8)/(2,4,8) -> {q_tile}/{kv_tile}", ({}, *base), ({}, *other), rounds=3)
        torch.cuda.empty_cache()
PY
fi

if has sanitize; then
  tool=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
  [ -n "$tool" ] && PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 100 "$tool" --tool memcheck --error-exitcode 1 \
    $PY scripts/sanitize_kernels.py --problems 6 >"$OUT/sanitize.log" 2>&1
  echo "== memcheck: $?"; tail -2 "$OUT/sanitize.log"
fi
