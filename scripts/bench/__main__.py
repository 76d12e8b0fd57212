"""Speed of the kernels beside dense attention and other packages, after their results have been checked.

    python -m scripts.bench fine --device cuda --out F.json
    python -m scripts.bench capture RUN --out LISTS         block lists of a run, for --lists captured or synthesised
    python -m scripts.bench table benchmarks/*.json

fine    the block-sparse kernel with a given index
peers   the same in tiles of 64 and of 128 with equal kept tokens beside cuDNN, FlashAttention-4 and FastVideo
coarse  pooling, coarse attention, scores, top-k and the transposed index, each alone and their sum
selection  selection by share beside top-k and a sort, and SpargeAttn's prediction beside dense attention
neighborhood  the block-sparse kernel on windows of several strides, with and without the permutation of the tokens
fine_grained  FG-Attn's kernel on random masks of small tiles, its planning, and the kernel on lists of uneven length
dynamic_hilbert  the block-sparse kernel over DFSAttn's schedule, with the cost of its selections
vsa     the whole operator
tail    the pooled tail in tiles of twice as many tokens beside it, and each part alone
layer   a DiT layer, dense against sparse, and its block without the cost of self-attention
step    a training step of a whole DiT
distill an iteration of distillation with its three networks
denoise from noise to latents: the few-step sparse generator against the many-step model with guidance
An elementwise operator is a case of its own name: it is timed beside torch's operations and a copy.

A case first compares its op with fp64 and prints no speed if the comparison fails. Useful TFLOP/s count real token
pairs of the listed blocks: 4 * D FLOPs per pair forward, 14 * D forward + backward. Executed TFLOP/s count all
multiplications, including padding and recomputed logits: 18 * D if the backward is split. docs/benchmarks/index.md
explains the rest.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import torch
from vsa_kernels.dispatch import BLOCK_SPARSE_BACKENDS
from vsa_kernels.operators import OPERATORS

from vsa.errors import one_line_errors
from vsa.files import atomic_file
from vsa.machine import machine, versions
from vsa.models.recompute import Level

from .captured import capture, read_rankings
from .cases import CASES, OWN_LISTS, measure_shape
from .fine_grained import share_of, tokens_of
from .neighborhood import grid_of
from .peers import PEERS
from .problems import INDEX_LISTS, LISTS, choose_shapes
from .timing import Setup, Strategy

_SIZE = ("batch", "heads", "tokens", "head_dim")
# prefixes of the names of ops without sparsity
_NO_SPARSITY = ("dense", "free", "block without", "text", "VAE", "permutation", "reorder", "scores of", "top-")


def table(report: dict[str, Any]) -> str:
    """Format a report as a Markdown table, without columns that older reports lack."""
    rows, hardware = report["rows"], report["machine"]
    where = hardware.get("gpu") or f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['threads']} threads"
    version_text = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    spread = ("p20_ms", "p80_ms") if any("p20_ms" in r for r in rows) else ("min_ms", "max_ms")
    words = "20th to 80th percentile" if spread[0] == "p20_ms" else "min to max"
    columns = {
        "shape": lambda r: r["name"],
        "B x H x L x D": lambda r: " x ".join(str(r[name]) for name in _SIZE),
        "block": lambda r: r["block"] if r.get("q_block", r["block"]) == r["block"] else f"{r['q_block']}x{r['block']}",
        "sparsity": lambda r: "-" if r["op"].startswith(_NO_SPARSITY) else _percent(r["sparsity"]),
        "lists": lambda r: r.get("lists"),
        "computed": lambda r: _percent(r.get("computed")),
        "window": lambda r: r.get("window"),
        "stride": lambda r: r.get("stride") or "-",
        "dtype": lambda r: r["dtype"],
        "op": lambda r: r["op"],
        "pass": lambda r: r["pass"],
        f"median ms ({words})": lambda r: (
            f"{_digits(r['median_ms'])} ({_digits(r[spread[0]])} to {_digits(r[spread[1]])})"
        ),
        "executed TFLOP/s": lambda r: _fixed(r.get("executed_tflops"), _tflops_digits(rows)),
        "useful TFLOP/s": lambda r: _fixed(r.get("useful_tflops"), _tflops_digits(rows)),
        "GB/s": lambda r: _fixed(r.get("gb_per_s"), 0),
        "share of a copy's speed": lambda r: _percent(r.get("share_of_copy")),
        "peak extra MiB": lambda r: _fixed(r.get("peak_extra_mib"), 0),
        "peak MiB": lambda r: _fixed(r.get("peak_mib"), 0),
        "speed against dense": lambda r: _fixed(r.get("speedup"), 2, "x"),
        "share of the FLOP bound": lambda r: _percent(r.get("share_of_bound")),
    }
    cells = {name: [show(r) for r in rows] for name, show in columns.items()}
    # columns without values are left out
    cells = {name: values for name, values in cells.items() if any(v not in (None, "-") for v in values)}
    lines = [
        f"`{report['command']}` on {report['date']}: {where}; {version_text}",
        "",
        "| " + " | ".join(cells) + " |",
        "|---" * len(cells) + "|",
        *("| " + " | ".join(str(v) for v in values) + " |" for values in zip(*cells.values(), strict=True)),
    ]
    skipped = [f"Not measured: {r['op']} at {r['name']}: {r['reason']}" for r in report.get("skipped", ())]
    notes = report.get("notes", [])
    return "\n".join(lines + [""] * bool(skipped) + skipped + [""] * bool(notes) + notes)


def _digits(ms: float) -> str:
    return f"{ms:.1f}" if ms >= 100 else f"{ms:.2f}" if ms >= 10 else f"{ms:.3f}"


def _fixed(value: float | None, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _tflops_digits(rows: list[dict[str, Any]]) -> int:
    # rates of a CPU are below 1
    return 1 if max((r.get("executed_tflops") or 0 for r in rows), default=0) > 10 else 3


def saved_table(path: Path) -> str:
    """The table of a report file."""
    try:
        report = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not a report: {error}") from error
    if not isinstance(report, dict) or not {"rows", "machine", "versions"} <= set(report):
        return f"{path.name}: not a report of scripts.bench"
    return table(report)


def run_case(args: argparse.Namespace, command: str) -> None:
    """Check a case, measure it, print the table and save the report."""
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was requested, but torch finds no CUDA device")
    if args.repeats is not None and args.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {args.repeats}")
    lists, file = getattr(args, "lists", "random"), getattr(args, "capture", None)
    if (lists in ("captured", "synthesised")) != (file is not None):
        raise ValueError(f"--lists captured and synthesised need --capture FILE, others none: got {lists} and {file}")
    plain = "reference" if args.case == "fine_grained" else "gather"
    setup = Setup(
        backends=args.backends or ["triton" if device.type == "cuda" else plain],
        peers=[] if args.against == ["none"] else args.against,
        lists=lists,
        rankings=None if file is None else read_rankings(file),
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        repeats=args.repeats,
        ahead=args.ahead,
        modes=tuple(getattr(args, "modes", None) or (("eager", "compiled") if device.type == "cuda" else ("eager",))),
        levels=tuple(getattr(args, "levels", ("full",))),
        strategies=tuple(getattr(args, "strategies", ("plain",))),
    )
    case = CASES[args.case]
    usual = case.gpu_shapes if device.type == "cuda" and not args.all else None
    if case.shapes is not None:
        shapes = case.shapes(args, device)
    else:
        shapes = choose_shapes(args.shapes or usual, args.all, device)
        if args.case not in ("fine", "selection") and args.shapes is None:
            shapes = [shape for shape in shapes if shape.group == 1]
    report: dict[str, Any] = {
        "case": args.case,
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "machine": machine(device),
        "versions": versions(device),
        "checks": [line for backend in setup.backends for line in case.check(backend, setup)],
        "skipped": [],
        "rows": [],
        "notes": [],
    }
    for shape in shapes:
        result = measure_shape(args.case, shape, setup)
        report["rows"] += result.rows
        report["notes"] += result.notes
        report["skipped"] += [{"name": shape.name, "op": op, "reason": why} for op, why in result.skipped.items()]
        # saved after every shape, so that a later failure loses nothing
        if args.out:
            with atomic_file(args.out) as temporary:
                temporary.write_text(json.dumps(report, indent=1) + "\n")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print("\n".join(report["checks"]), table(report), sep="\n\n")


def main(argv: list[str]) -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="case", required=True)
    for name, case in CASES.items():
        sub = commands.add_parser(name, help=case.run.__doc__)
        sub.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
        sub.add_argument(
            "--backends",
            nargs="+",
            # backend cudnn is a peer: it supports few of the checks
            choices=[backend for backend in BLOCK_SPARSE_BACKENDS if backend != "cudnn"],
            help="backends of vsa_kernels (default gather, for fine_grained reference; triton on cuda)",
        )
        which = sub.add_mutually_exclusive_group()
        which.add_argument(
            "--shapes", nargs="+", metavar="NAME", help="problems by name (default: all but the largest)"
        )
        which.add_argument("--all", action="store_true", help="all problems, the largest too")
        if name in ("fine", "vsa"):
            sub.add_argument(
                "--against", nargs="+", default=list(PEERS), choices=[*PEERS, "none"],
                help="peers (default: all that are installed)",
            )  # fmt: skip
        else:
            sub.set_defaults(against=["none"])
        if name in ("layer", "step", "distill", "denoise") or name in OPERATORS:
            sub.add_argument(
                "--modes", nargs="+", choices=["eager", "compiled"],
                help="modes of the networks' blocks (layer: without self-attention), or of torch's operations "
                "(default eager; both on cuda)",
            )  # fmt: skip
        if name in ("step", "distill"):
            sub.add_argument(
                "--levels", nargs="+", default=["full"], choices=get_args(Level),
                help="levels of activation checkpointing of trained networks (default full)",
            )  # fmt: skip
        if name == "step":
            sub.add_argument(
                "--strategies", nargs="+", default=["plain"], choices=get_args(Strategy),
                help="plain single-device training, or FSDP2 over one device (default plain)",
            )  # fmt: skip
        if name == "neighborhood":
            sub.add_argument("--window", type=grid_of, metavar="TxHxW", help="keys of a query (default by shape)")
            sub.add_argument("--strides", type=grid_of, nargs="+", metavar="TxHxW", help="default by shape")
            sub.add_argument(
                "--q-tile", type=grid_of, metavar="TxHxW", help="tokens of a query tile (default by shape)"
            )
            sub.add_argument(
                "--kv-tile", type=grid_of, metavar="TxHxW", help="tokens of a kv tile; one tile divides the other"
            )
        elif name == "fine_grained":
            sub.add_argument(
                "--q-tokens", type=tokens_of, nargs="+", metavar="M", help="tokens of a query tile (default by shape)"
            )
            sub.add_argument("--kv-tokens", type=tokens_of, nargs="+", metavar="N", help="tokens of a kv tile")
            sub.add_argument(
                "--sparsities", type=share_of, nargs="+", metavar="SHARE", help="shares of skipped kv tiles"
            )
        elif name not in OWN_LISTS and case.shapes is None:
            # the other cases select by q and k
            kinds = [*LISTS, *(INDEX_LISTS if name in ("fine", "peers") else ())]
            sub.add_argument("--lists", default="random", choices=kinds, help="block lists (default random)")
            if "captured" in kinds:
                sub.add_argument("--capture", type=Path, metavar="FILE", help="lists of a trained model")
        sub.add_argument("--repeats", type=int, help="timed calls of each op (default 7; on cuda a time budget)")
        sub.add_argument(
            "--ahead",
            action="store_true",
            help="cuda: queue each call completely before its time starts, which hides launches",
        )
        sub.add_argument("--out", type=Path, help="JSON file to write")
    save = commands.add_parser("capture", help="save the block lists of a trained model for `--lists captured`")
    save.add_argument("run", type=Path, help="run folder with attention=video_sparse")
    save.add_argument("--out", type=Path, required=True, help="file to write")
    save.add_argument("--timestep", type=float, default=500, help="noise level, 0 to 1000 (default 500)")
    save.add_argument("--tiles", type=grid_of, nargs="+", default=[(4, 4, 4), (4, 4, 8)], metavar="TxHxW")
    save.add_argument("--share", type=float, default=1, help="share of the tiles to save, the best ones (default 1)")
    save.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    show = commands.add_parser("table", help="print saved reports as Markdown")
    show.add_argument("reports", nargs="+", type=Path)
    args = parser.parse_args(argv)
    if args.case == "table":
        print("\n\n".join(saved_table(path) for path in args.reports))
    elif args.case == "capture":
        settings = {"timestep": args.timestep, "tiles": args.tiles, "device": args.device, "share": args.share}
        print(capture(args.run, args.out, **settings))
    else:
        run_case(args, _command(argv))


def _command(argv: list[str]) -> str:
    # the output path is not part of the measurement
    at = argv.index("--out") if "--out" in argv else len(argv)
    return " ".join(["python -m scripts.bench", *argv[:at], *argv[at + 2 :]])


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
