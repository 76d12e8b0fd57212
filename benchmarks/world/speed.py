"""Time of drawing and encoding clips of the world on a device, which is part of a training step for each sample.

python -m benchmarks.world.speed --device cuda --out world_speed.json
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.toy.study import write_json
from vsa.data.codecs import HaarCodec
from vsa.data.world.render import render
from vsa.data.world.scenes import draw_scene, stack_scenes
from vsa.data.world.store import SceneLatents, clip_size
from vsa.errors import one_line_errors, usable_device
from vsa.machine import machine, versions

GRIDS = ("8x8x8", "16x16x16", "16x32x32")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", nargs="+", default=GRIDS, help="token grids, time x height x width (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="clips per batch (%(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="timed batches after two warm-up batches (%(default)s)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: cuda if there is one)")
    parser.add_argument("--out", type=Path, help="JSON to write")
    return parser.parse_args(argv)


def parse_grid(text: str) -> tuple[int, int, int]:
    """Parse a grid such as 8x16x16."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"expected a grid such as 8x16x16, got {text!r}")
    t, h, w = map(int, parts)
    return t, h, w


def measure(grid: tuple[int, int, int], device: str, batch: int, repeats: int) -> dict[str, Any]:
    """Median milliseconds per clip: choosing the scene (in the loader), drawing, and drawing with encoding."""
    codec = HaarCodec()
    size = clip_size(grid, codec)

    def per_clip(work: Any) -> float:
        times = []
        for _ in range(repeats + 2):
            start = time.perf_counter()
            work()
            if device.startswith("cuda"):
                torch.cuda.synchronize(device)
            times.append(1e3 * (time.perf_counter() - start) / batch)
        return sorted(times[2:])[repeats // 2]

    scenes = stack_scenes([draw_scene(0, i, size) for i in range(batch)])
    pending = SceneLatents(scenes=scenes, size=size, codec=codec)
    peak = None
    if device.startswith("cuda"):
        pending.to(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        pending.to(device)
        peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    return {
        "grid": list(grid),
        "frames_height_width": list(size),
        "batch": batch,
        "scene_ms": per_clip(lambda: [draw_scene(0, i, size) for i in range(batch)]),
        "draw_ms": per_clip(lambda: render(scenes.to(device), size)),
        "latents_ms": per_clip(lambda: pending.to(device)),
        "peak_extra_mib": peak,
    }


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    for name in ("batch", "repeats"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    grids = [parse_grid(grid) for grid in args.grids]
    device = usable_device(args.device)
    rows = [measure(grid, device, args.batch, args.repeats) for grid in grids]
    table = Table(
        "grid", "scene", "draw", "draw + encode", title=f"milliseconds a clip on {device}, {args.batch} at a time"
    )
    for row in rows:
        times = (f"{row[name]:.3f}" for name in ("scene_ms", "draw_ms", "latents_ms"))
        table.add_row("x".join(map(str, row["grid"])), *times)
    Console().print(table)
    if args.out is not None:
        where = torch.device(device)
        write_json(args.out, {"device": device, "rows": rows, "machine": machine(where), "versions": versions(where)})


if __name__ == "__main__":
    with one_line_errors(ImportError):
        main()
