"""Speed of the kernels beside dense attention, after their answers have been checked.

    python scripts/bench.py fine --device cpu --out benchmarks/cpu-fine.json
    python scripts/bench.py table benchmarks/*.json

A case first compares the op with its fp64 definition and prints no speed when that fails. Executed TFLOP/s count
the listed pairs only: 4 * D per pair forward, 10 * D backward, which recomputes the logits.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn import functional as F
from vsa_kernels import Blocks, block_sparse_attn, select_topk
from vsa_kernels.dispatch import BLOCK_SPARSE_BACKENDS
from vsa_kernels.testing import Case, assert_within_budget, define, make_case, run

from vsa.cli import one_line_errors

_COLUMNS = (
    *("shape", "B x H x L x D", "block", "sparsity", "dtype", "op", "pass"),
    *("median ms (min to max)", "executed TFLOP/s", "speed against dense"),
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One problem: uniform blocks of `block` tokens, `topk` of them listed by every query block."""

    name: str
    batch: int
    heads: int
    tokens: int
    head_dim: int
    block: int
    topk: int

    @property
    def sparsity(self) -> float:
        return 1 - self.topk * self.block / self.tokens


CPU_SHAPES = (
    Shape(name="16k", batch=1, heads=2, tokens=16384, head_dim=64, block=64, topk=32),
    Shape(name="quickstart", batch=8, heads=4, tokens=256, head_dim=32, block=8, topk=8),
)
GPU_SHAPES = (
    Shape(name="16k", batch=1, heads=12, tokens=16384, head_dim=128, block=64, topk=32),
    Shape(name="480p", batch=1, heads=12, tokens=32768, head_dim=128, block=64, topk=64),
)


def check(backend: str, dtype: torch.dtype, device: torch.device) -> str:
    """Compare a backend with the fp64 definition on ragged blocks, and the comparison with a wrong answer.

    Raises:
        ValueError: an error above its budget, or a damaged input that the budget does not notice.
    """
    sizes: dict[str, Any] = {"q_sizes": [5, 9, 3, 10], "kv_sizes": [7, 2, 11, 1, 6], "batch": 2, "heads": 4}
    case = make_case(**sizes, kv_heads=2, head_dim=32, fine=True, kv_valid=True, dtype=dtype, device=device)
    exact, plain = define(case), run(case, "reference")

    def agrees(got: dict[str, Tensor]) -> None:
        for name, x in got.items():
            assert_within_budget(x, plain[name], exact[name], name)

    try:
        agrees(run(case, backend))
    except AssertionError as error:
        raise ValueError(f"backend {backend} is wrong, no speed is printed: {error}") from error
    try:
        agrees(run(replace(case, scale=1.0), backend))
    except AssertionError:
        return f"{backend} {dtype}: out, lse, dq, dk, dv within the fp64 budget; the wrong scale is noticed"
    raise ValueError(f"the check of backend {backend} does not notice a wrong scale, no speed is printed")


def check_measured(case: Case, backend: str) -> None:
    """Compare some query blocks of the measured problem itself with their fp64 softmax.

    Raises:
        ValueError: an output further from fp64 than rounding explains.
    """
    block = case.kv_blocks.max_size
    out = block_sparse_attn(
        case.q, case.k, case.v, case.index, q_blocks=case.q_blocks, kv_blocks=case.kv_blocks, backend=backend
    )[0]
    for n in {0, case.q_blocks.num // 2, case.q_blocks.num - 1}:
        listed = case.index.kv_indices[0, 0, n, : int(case.index.kv_num_blocks[0, 0, n])].tolist()
        q = case.q[0, n * block : (n + 1) * block, 0].double()
        k, v = (torch.cat([x[0, j * block : (j + 1) * block, 0] for j in listed]).double() for x in (case.k, case.v))
        want = torch.softmax(q @ k.T * q.shape[-1] ** -0.5, -1) @ v
        error = float((out[0, n * block : (n + 1) * block, 0].double() - want).abs().max())
        if not error <= 20 * torch.finfo(out.dtype).eps:
            raise ValueError(f"backend {backend}: query block {n} is off by {error:.3g}, no speed is printed")


def problem(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    g = torch.Generator().manual_seed(0)
    size = (shape.batch, shape.tokens, shape.heads, shape.head_dim)
    q, k, v, dout = (torch.randn(size, generator=g).to(device, dtype) for _ in range(4))
    num = shape.tokens // shape.block
    blocks = Blocks.from_sizes([shape.block] * num, device)
    scores = torch.randn(shape.batch, shape.heads, num, num, generator=g).to(device)
    index = select_topk(scores, shape.topk)
    return Case(q=q, k=k, v=v, dout=dout, dlse=dout[..., 0], index=index, q_blocks=blocks, kv_blocks=blocks)


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    begin = time.perf_counter()
    step()
    return (time.perf_counter() - begin) * 1e3


def measure(shape: Shape, args: argparse.Namespace, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Rows of one shape: dense and every backend, forward and forward + backward, taken in turns."""
    device = torch.device(args.device)
    case = problem(shape, dtype, device)
    q, k, v = (x.requires_grad_() for x in (case.q, case.k, case.v))

    def dense() -> Tensor:
        qh, kh, vh = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(qh, kh, vh).transpose(1, 2)

    def sparse(backend: str) -> Tensor:
        mask: dict[str, Any] = {"q_blocks": case.q_blocks, "kv_blocks": case.kv_blocks, "backend": backend}
        return block_sparse_attn(q, k, v, case.index, **mask)[0]

    def forward(op: Callable[[], Tensor]) -> None:
        with torch.no_grad():
            op()

    def both(op: Callable[[], Tensor]) -> None:
        torch.autograd.grad(op(), (q, k, v), case.dout)

    ops: dict[str, Callable[[], Tensor]] = {"dense": dense}
    for backend in args.backends:
        with torch.no_grad():
            check_measured(case, backend)
        ops[backend] = lambda backend=backend: sparse(backend)
    times: dict[tuple[str, str], list[float]] = {}
    passes = {"forward": forward, "forward + backward": both}
    for turn in track(range(args.repeats + 2), description=shape.name, console=Console(stderr=True)):
        for name, op in ops.items():
            for kind, step in passes.items():
                took = timed(lambda op=op, step=step: step(op), device)
                # the first turns warm caches and the allocator up
                if turn >= 2:
                    times.setdefault((name, kind), []).append(took)

    rows = []
    for (name, kind), samples in times.items():
        pairs = shape.batch * shape.heads * shape.tokens**2 * (1 if name == "dense" else 1 - shape.sparsity)
        flops = pairs * shape.head_dim * (4 if kind == "forward" else 14)
        median = statistics.median(samples)
        rows.append(
            {
                **asdict(shape),
                "sparsity": shape.sparsity,
                "dtype": str(dtype).removeprefix("torch."),
                "op": name,
                "pass": kind,
                "median_ms": round(median, 3),
                "min_ms": round(min(samples), 3),
                "max_ms": round(max(samples), 3),
                "repeats": len(samples),
                "executed_tflops": round(flops / median / 1e9, 4),
                "speedup": round(statistics.median(times["dense", kind]) / median, 2),
            }
        )
    return rows


def machine(device: torch.device) -> dict[str, Any]:
    """What a reader needs to place the numbers; no host name, no paths."""
    info: dict[str, Any] = {"cpu": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        info["cpu"] = named[0] if named else info["cpu"]
    if device.type == "cuda":
        info["gpu"] = torch.cuda.get_device_name(device)
    return info


def table(report: dict[str, Any]) -> str:
    """A report as Markdown."""
    shown = report["machine"]
    threads = f"{shown['threads']} threads"
    where = shown.get("gpu") or f"{shown['cpu']}, {shown['cores']} cores, {threads}"
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [
        f"`{report['command']}` on {report['date']}: {where}; {versions}",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|---" * len(_COLUMNS) + "|",
    ]
    for r in report["rows"]:
        size = " x ".join(str(r[name]) for name in ("batch", "heads", "tokens", "head_dim"))
        spread = f"{r['median_ms']:.1f} ({r['min_ms']:.1f} to {r['max_ms']:.1f})"
        share = f"{r['sparsity']:.1%}" if r["op"] != "dense" else "-"
        cells = (r["name"], size, r["block"], share, r["dtype"], r["op"], r["pass"], spread)
        lines.append("| " + " | ".join(map(str, cells)) + f" | {r['executed_tflops']:.3f} | {r['speedup']:.2f}x |")
    return "\n".join(lines)


def fine(args: argparse.Namespace) -> None:
    """The fine stage: `block_sparse_attn` beside dense SDPA."""
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, and this torch sees no CUDA device")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    checks = [check(backend, dtype, device) for backend in args.backends]
    shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    rows = [row for shape in shapes for row in measure(shape, args, dtype)]
    report = {
        "case": "fine",
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python scripts/bench.py fine --device {args.device}",
        "machine": machine(device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "checks": checks,
        "rows": rows,
    }
    print("\n".join(checks), table(report), sep="\n\n")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        part = args.out.with_suffix(".part")
        part.write_text(json.dumps(report, indent=1) + "\n")
        part.replace(args.out)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="case", required=True)
    run_fine = commands.add_parser("fine", help=fine.__doc__)
    run_fine.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    run_fine.add_argument("--backends", nargs="+", default=["gather"], choices=BLOCK_SPARSE_BACKENDS)
    run_fine.add_argument("--repeats", type=int, default=7, help="timed calls of each op (default 7)")
    run_fine.add_argument("--out", type=Path, help="JSON file to write")
    show = commands.add_parser("table", help="print saved reports as Markdown")
    show.add_argument("reports", nargs="+", type=Path)
    args = parser.parse_args(argv)
    if args.case == "fine":
        fine(args)
    else:
        print("\n\n".join(table(json.loads(path.read_text())) for path in args.reports))


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
