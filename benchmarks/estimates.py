"""Comparison of estimates of `vsa plan` with all measured training steps: `python -m benchmarks.estimates`."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vsa.attention.full import FullAttention
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.models.init import without_memory
from vsa.models.recompute import Level
from vsa.models.video_dit import VideoDiT
from vsa.training.estimate.gpus import GIB, known_gpu
from vsa.training.estimate.job import FORWARD, TRAINING, Job, PlannedNetwork
from vsa.training.estimate.predict import memory, step_seconds

MEASURED = Path(__file__).parent / "raw" / "training.tar.xz"
WAN, DIT_120M, ABLATION = (12, 128, 8960, 30, 4096), (12, 64, 3072, 12, 4096), (8, 64, 2048, 6, 64)
"""Heads, head dim, feed-forward width, layers and text width of models."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An estimate and its measurement.

    Args:
        what: description of the measured step.
        file: file of `MEASURED` with the measurement.
        calibrates: whether a rate of the GPU was derived from it.
        job: the measured job.
        milliseconds: measured time of a step.
        gib: measured memory, None if it was not measured.
    """

    what: str
    file: str
    calibrates: bool
    job: Job
    milliseconds: float
    gib: float | None

    @property
    def time_error(self) -> float:
        """Error of the estimated time relative to the measured one."""
        gpu = known_gpu("H200")
        assert gpu is not None
        return sum(step_seconds(self.job, gpu).values()) * 1e3 / self.milliseconds - 1

    @property
    def memory_error(self) -> float | None:
        """Relative error of the estimated memory of tensors, None without a measurement."""
        return None if self.gib is None else sum(memory(self.job).values()) / GIB / self.gib - 1

    def row(self) -> str:
        """Row of the table in `docs/benchmarks/how-fast.md`."""
        estimated = self.milliseconds * (1 + self.time_error)
        note = "calibrates" if self.calibrates else ""
        gib, error = ("", "") if self.gib is None else (f"{self.gib:.1f}", f"{self.memory_error:+.1%}")
        return (
            f"| {self.what} | {self.milliseconds:,.0f} | {estimated:,.0f} | {self.time_error:+.1%} | {gib} | {error} | "
            f"{note} |"
        )


def comparisons() -> list[Comparison]:
    """All comparisons."""
    return [*_wan(), *_pretraining(), *_distillation(), *_ablation(), *_one_gpu()]


def _read(file: str) -> Any:
    with tarfile.open(MEASURED) as archive:
        member = archive.extractfile(f"{MEASURED.name.partition('.')[0]}/{file}.json")
        assert member is not None
        return json.load(member)


def _network(size: tuple[int, ...], gates: int | None, tile: tuple[int, int, int] = (4, 4, 4), **use: Any) -> Any:
    """A network, dense or with one or two gates per layer."""
    heads, head_dim, ffn_dim, layers, text_dim = size
    sparse = partial(VideoSparseAttention, tile_thw=tile, fine_gate=gates == 2)
    with without_memory():
        model = VideoDiT(
            attention=FullAttention if gates is None else sparse,
            num_attention_heads=heads,
            attention_head_dim=head_dim,
            ffn_dim=ffn_dim,
            num_layers=layers,
            text_dim=text_dim,
        )
    use = {"name": "model", "passes": {TRAINING: 1.0}, "updates": 1.0} | use
    return PlannedNetwork(model=model, **use)


def _wan() -> Iterator[Comparison]:
    file = "h200-2026-11-21-step-wan-1-3b"
    for row in _read(file)["rows"]:
        if row["op"] == "free":
            continue
        sparse, compiled = row["op"] == "triton", row["pass"].startswith("compiled")
        network = _network(WAN, 1 if sparse else None)
        yield Comparison(
            what=f"Wan-1.3B, 23,296 tokens, {'K=32' if sparse else 'dense'}, {'compiled' if compiled else 'eager'}",
            file=file,
            calibrates=compiled and not sparse,
            job=Job(
                networks=[network], latent_shape=(16, 16, 56, 104), text=512, topk=KeptTiles.of(32), batch=1,
                level="full", compiled=compiled, averaged=False, keeps_gradients=False, fused=False,
            ),
            milliseconds=row["median_ms"],
            # the measurement excludes weights and moments, which were allocated before the call
            gib=row["peak_extra_mib"] / 1024 + 12 * network.parameters / GIB,
        )  # fmt: skip


def _pretraining() -> Iterator[Comparison]:
    file = "h200-2026-11-21-pretrain-120m"
    for row in _read(file)["runs"]:
        sparse, compiled = row["run"].startswith("sparse"), row["run"].endswith("compiled")
        yield Comparison(
            what=f"pretrain_120m, 8 x 16,384 tokens, {'K=32' if sparse else 'dense'}, "
            f"{'compiled' if compiled else 'eager'}",
            file=file,
            calibrates=False,
            job=Job(
                networks=[_network(DIT_120M, 2 if sparse else None)], latent_shape=(16, 16, 64, 64), text=16,
                topk=KeptTiles.of(32), batch=8, level="full", compiled=compiled, fused=False,
            ),
            milliseconds=row["step_seconds"] * 1e3,
            gib=row["memory_gib"],
        )  # fmt: skip


def _distillation() -> Iterator[Comparison]:
    measured: list[tuple[str, str, bool, Level]] = [
        ("h200-2026-11-21-distill-eager", "eager", True, "full"),
        ("h200-2026-11-21-distill-compiled", "compiled", True, "full"),
        ("h200-2026-11-25-distill", "compiled", False, "full"),
        ("h200-2026-11-25-distill-none", "compiled", False, "none"),
    ]
    for file, mode, sharded, level in measured:
        rows = _read(file)["rows"]
        for name in ("dense", "triton"):
            (mean,) = (r for r in rows if r["op"].startswith(f"{name}: mean iteration"))
            (whole,) = (r for r in rows if r["op"].startswith(f"{name}: whole iteration"))
            # the mean over the three steps of the list, with a generator update in one of five iterations
            networks = [
                _network(WAN, 1 if name == "triton" else None, passes={FORWARD: 2.2, TRAINING: 0.2}, updates=0.2),
                _network(WAN, None, passes={FORWARD: 0.2, TRAINING: 1.0}),
                _network(WAN, None, passes={FORWARD: 0.4}, updates=0.0),
            ]
            yield Comparison(
                what=f"distillation, Wan-1.3B, {'K=73' if name == 'triton' else 'dense'} generator, {mode}"
                f"{'' if sharded else ', no FSDP2'}{'' if level == 'full' else ', level none'}",
                file=file,
                calibrates=False,
                job=Job(
                    networks=networks, latent_shape=(16, 16, 56, 104), text=512, topk=KeptTiles.of(73), batch=1,
                    level=level, compiled=mode == "compiled", keeps_gradients=False, sharded=sharded,
                    fused=not sharded,
                ),
                milliseconds=mean["median_ms"],
                gib=whole["peak_mib"] / 1024,
            )  # fmt: skip


def _ablation() -> Iterator[Comparison]:
    file = "h200-2026-11-22-step-ablation"
    tiles = {"full": (4, 4, 4), "video_sparse 4,4,4": (4, 4, 4), "video_sparse 4,8,8": (4, 8, 8)}
    for row in _read(file):
        if row["name"] not in tiles:
            continue
        dense = row["name"] == "full"
        yield Comparison(
            what=f"22M, 16 x 4,096 tokens, {'dense' if dense else 'K=' + str(row['topk'])} of {row['tiles']}, eager",
            file=file,
            calibrates=False,
            job=Job(
                networks=[_network(ABLATION, None if dense else 2, tiles[row["name"]])], latent_shape=(16, 16, 32, 32),
                text=24, topk=KeptTiles.of(row["topk"]), batch=16, fused=False,
            ),
            milliseconds=row["step_s"] * 1e3,
            gib=row["mem"],
        )  # fmt: skip


def _one_gpu() -> Iterator[Comparison]:
    """Compiled steps on one GPU without FSDP2, at level `none`: two of the bench, two of training runs."""
    file = "h200-2026-11-25-step-wan-1-3b"
    alone: dict[str, Any] = {"compiled": True, "sharded": False}
    wan: dict[str, Any] = {"latent_shape": (16, 16, 56, 104), "text": 512, "topk": KeptTiles.of(32), "batch": 1} | alone
    for row in _read(file)["rows"]:
        if row["op"] == "free":
            continue
        sparse = row["op"] == "triton"
        network = _network(WAN, 1 if sparse else None)
        yield Comparison(
            what=f"Wan-1.3B, 23,296 tokens, {'K=32' if sparse else 'dense'}, level none",
            file=file,
            calibrates=False,
            job=Job(networks=[network], averaged=False, keeps_gradients=False, **wan),
            milliseconds=row["median_ms"],
            gib=row["peak_extra_mib"] / 1024 + 12 * network.parameters / GIB,
        )
    # before `residual_norm`; afterwards pretrain_120m took 330 ms, and its memory was not noted
    file = "h200-2026-11-24-profiles"
    small: dict[str, Any] = {"latent_shape": (16, 16, 64, 64), "text": 16, "topk": KeptTiles.of(32), "batch": 8} | alone
    runs = {
        "pretrain_120m, after": ("pretrain_120m, 8 x 16,384 tokens, K=32, level none, a run", DIT_120M, small),
        "Wan-1.3B, captions of 512 tokens, after": ("Wan-1.3B, two gates, K=32, level none, a run", WAN, wan),
    }
    for row in _read(file)["profiles"]:
        if row["name"] in runs:
            what, size, job = runs[row["name"]]
            yield Comparison(
                what=what,
                file=file,
                calibrates=False,
                job=Job(networks=[_network(size, 2)], **job),
                milliseconds=row["profile"]["milliseconds"],
                gib=row["memory_gib"],
            )


if __name__ == "__main__":
    for comparison in comparisons():
        print(comparison.row())
