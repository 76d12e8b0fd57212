"""Run folders without a training: what `vsa report` reads of one, with numbers that a test chooses."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from PIL import Image


def settings_of(run_dir: Path, *, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """A config with copies of seed and folder as resolved ones have; `a__b=c` sets `a.b`."""
    config: dict[str, Any] = {
        "name": "pretrain",
        "run": run_dir.name,
        "run_dir": str(run_dir),
        "seed": seed,
        "flop_budget": None,
        "task": {"seed": seed, "_target_": "vsa.training.modules.pretrain.PretrainModule"},
        "model": {"num_layers": 2},
        "attention": {"_target_": "vsa.attention.video_sparse.VideoSparseAttention", "tile_thw": [2, 2, 2]},
        "sparsity": {"sparsity": 0.75},
        "data": {"seed": seed, "batch_size": 4, "toy": {"seed": 0, "count": 48}},
        "optim": {"lr": 0.01, "schedule": {"total_steps": 40}},
        "trainer": {"max_steps": 40},
        "callbacks": {"samples": {"run_dir": str(run_dir), "seed": 0}},
        "logger": {"csv": {"root_dir": str(run_dir)}},
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        node = config
        for name in path:
            node = node.setdefault(name, {})
        node[last] = value
    return config


def write_run(
    folder: Path,
    *,
    loss: float = 0.5,
    seed: int = 0,
    steps: int = 40,
    every: int = 4,
    flops: float = 1e9,
    seconds: float = 0.1,
    tokens: float = 100.0,
    topk: float = 2.0,
    sample_losses: Mapping[tuple[str, float], float] | None = None,
    at: Mapping[str, float] | None = None,
    commits: Sequence[str | None] = ("0123abc",),
    prompts: Sequence[str] = (),
    config: bool = True,
    **changes: Any,
) -> Path:
    """Write a run whose validation loss falls to `loss` at its last step; see `settings_of` for the changes."""
    folder.mkdir(parents=True)
    if config:
        (folder / "config.yaml").write_text(yaml.safe_dump(settings_of(folder, seed=seed, **changes)))
    manifest = {"written_by": "vsa-train", "version": "0.1.0", "commits": [*commits], "created": "2026-01-02 03:04:05"}
    (folder / "run.json").write_text(json.dumps(manifest))
    rows = []
    for step in range(every, steps + 1, every):
        row = {
            "step": step,
            "train/loss": loss * (1 + 2 * (steps - step) / steps) * (1.01 if step % (2 * every) else 0.99),
            "lr": 0.01,
            "throughput/step_seconds": seconds,
            "throughput/tokens_per_second": tokens / seconds,
            "throughput/flops_total": flops * step,
            "sparsity/topk": topk,
            "sparsity/density": topk / 8,
            "diag/recall": 0.5 + step / 100,
            "diag/gate_rms": 0.1,
            "diag/recall_layer_0": 0.5,
        }
        if step % (every * 5) == 0:
            now = loss * (1 + 2 * (steps - step) / steps)
            row |= {"val/loss": now, "val/loss_decile_2": now / 2, "val/loss_decile_7": now * 1.5}
            row |= {f"val/loss_{name}": value for name, value in (at or {}).items()}
        rows.append(row)
    with open(folder / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)) or ["step"], restval="")
        writer.writeheader()
        writer.writerows(rows)
    if sample_losses is not None:
        with open(folder / "validation.csv", "w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(["step", "at", "sample", "noise_level", "loss"])
            for name in ("current", *(at or {})):
                lines.writerows((steps, name, *key, repr(value)) for key, value in sample_losses.items())
    if prompts:
        clips = folder / "samples" / f"step-{steps:08d}"
        clips.mkdir(parents=True)
        for i, _ in enumerate(prompts):
            frames = [Image.new("RGB", (16, 16), (40 * i, 80, 20 * t)) for t in range(3)]
            frames[0].save(clips / f"{i}.gif", save_all=True, append_images=frames[1:], duration=125, loop=0)
        entries = [{"index": i, "prompt": prompt, "gif": f"{i}.gif"} for i, prompt in enumerate(prompts)]
        (clips / "samples.json").write_text(json.dumps({"clips": entries, "steps": 8, "guidance": 3.0, "seed": 0}))
    return folder


def write_sweep(folder: Path, *points: Mapping[str, Any]) -> Path:
    """Write `sweep.json` with points that need no more than a name."""
    folder.mkdir(parents=True, exist_ok=True)
    blank = {"overrides": [], "status": "finished", "reason": None, "control": False, "seconds": 1.0, "device": "cpu"}
    whole = {"sweep": folder.name, "command": "vsa sweep", "points": [{**blank, **point} for point in points]}
    (folder / "sweep.json").write_text(json.dumps(whole))
    return folder
