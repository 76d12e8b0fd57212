"""Training on one GPU and on all of this machine: FSDP2, HSDP and shared samples, beside the estimate of `vsa plan`.

python -m benchmarks.scaling run outputs/scaling     what the folder has not; again after an interruption
python -m benchmarks.scaling table outputs/scaling   step times, communication, memory and losses

Runs of one model with equal numbers of samples see the same ones in the same steps, so their losses are one GPU's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from vsa.config import build_task
from vsa.data.parallel_dims import ParallelDims
from vsa.errors import one_line_errors
from vsa.evaluation.figures import read_metrics
from vsa.sweeps.job_queue import Job, Slot, run_jobs
from vsa.training.estimate.gpus import GIB, Gpu, known_gpu
from vsa.training.estimate.predict import memory
from vsa.training.estimate.run import estimate_of
from vsa.training.step_times import COMMUNICATION

STEPS, WARM_UP = 3, 7
"""Plain steps of a profile, as many traced ones, and the steps before them, of which the first two are not timed."""
GRACE = 30.0
COMMON = (
    "experiment=pretrain_120m",
    "debug=profile",
    "trainer.log_every_n_steps=1",
    # from the first step large enough for wrong gradients to show in the losses
    "optim.schedule.warmup_steps=0",
    f"callbacks.profile.warm_up={WARM_UP}",
    f"callbacks.profile.steps={STEPS}",
    "data.num_workers=4",
    "overwrite=true",
)
LONG = ("sparsity=constant", "sparsity.topk=120", "sparsity.sparsity=null")
LAYERS_14B = {1: 4, 2: 16, 4: 32, 8: 40}
"""Layers of the 14B model by number of GPUs of 80 GB."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model with its samples.

    Args:
        settings: settings of its runs.
        latent: channels, frames, height and width of a sample.
        text: tokens of a caption.
        micro: samples of a micro-batch.
    """

    settings: tuple[str, ...]
    latent: tuple[int, int, int, int]
    text: int
    micro: int = 1

    @property
    def latents(self) -> str:
        """Name of the folder of its random samples."""
        return f"latents-{'x'.join(map(str, self.latent))}-{self.text}"


MODELS = {
    "120m": Model(settings=("task.parallel.activation_checkpointing=none",), latent=(16, 16, 64, 64), text=16, micro=8),
    "wan_1_3b": Model(
        settings=("model=wan_1_3b", "task.parallel.activation_checkpointing=attention_mlp", *LONG),
        latent=(16, 20, 96, 160),
        text=512,
    ),
    "wan_14b": Model(
        settings=("model=wan_14b", "task.parallel.activation_checkpointing=full", "callbacks.ema=null", *LONG),
        latent=(16, 20, 96, 160),
        text=512,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run.

    Args:
        model: a key of `MODELS`.
        samples: samples of a step on all GPUs.
        gpus: number of GPUs.
        copies: copies of the model, each sharded over a part of the GPUs.
        sequence: GPUs that share a sample.
        layers: layers of the model; None: all.
    """

    model: str
    samples: int
    gpus: int
    copies: int = 1
    sequence: int = 1
    layers: int | None = None

    @property
    def name(self) -> str:
        """Name of its run folder."""
        return f"{self.model}-samples{self.samples}-gpus{self.gpus}-copies{self.copies}-sequence{self.sequence}"

    def settings(self, out: Path) -> list[str]:
        """Settings of its run; all cases compute with micro-batches of one size."""
        model = MODELS[self.model]
        readers = self.gpus // self.sequence
        shards = ["trainer=default"]
        if self.gpus > 1:
            shards = ["trainer=fsdp", f"trainer.strategy.replicate={self.copies}", f"trainer.devices={self.gpus}"]
        return [
            *COMMON,
            *shards,
            *model.settings,
            *([] if self.layers is None else [f"model.num_layers={self.layers}"]),
            f"data.root={out / model.latents}",
            f"data.text_encoder.max_tokens={model.text}",
            f"data.batch_size={self.samples}",
            f"trainer.accumulate_grad_batches={self.samples // (model.micro * readers)}",
            f"task.parallel.sequence={self.sequence}",
            f"run_dir={out / self.name}",
        ]


def cases(gpus: int) -> list[Case]:
    """The runs on a machine's largest power of two of GPUs, of equal samples the one on the fewest first."""
    counts = [2**i for i in range(gpus.bit_length())]
    gpus = counts[-1]
    copies = [2] if gpus >= 4 else []
    small, several = MODELS["120m"].micro * gpus, counts[1:]
    all_cases = [
        *(Case(model="120m", samples=small, gpus=count) for count in counts),
        *(Case(model="120m", samples=small, gpus=gpus, copies=n) for n in copies),
        *(Case(model="120m", samples=small, gpus=gpus, sequence=n) for n in several),
        *(Case(model="wan_1_3b", samples=1, gpus=count, sequence=count) for count in counts),
        *(Case(model="wan_1_3b", samples=gpus, gpus=gpus, copies=n) for n in (1, *copies)),
        *(Case(model="wan_1_3b", samples=gpus, gpus=gpus, sequence=n) for n in several),
        Case(model="wan_14b", samples=1, gpus=gpus, sequence=gpus, layers=LAYERS_14B[min(gpus, 8)]),
    ]
    return list(dict.fromkeys(all_cases))


def run(out: Path, all_cases: Sequence[Case]) -> None:
    """Run the cases that have no profile, after their random samples.

    Raises:
        SystemExit: a run failed or a signal came; the same command goes on.
    """
    root = Path(__file__).parents[1]
    jobs = {}
    for case in all_cases:
        model = MODELS[case.model]
        if not (out / case.name / "profile.json").is_file():
            if not (out / model.latents / "index.json").is_file():
                latent = map(str, model.latent)
                command = [str(root / "scripts/make_random_shards.py"), str(out / model.latents), "--latent", *latent]
                jobs[model.latents] = [*command, "--text-tokens", str(model.text), "--count", str(16 * model.micro)]
            jobs[case.name] = [str(root / "train.py"), *case.settings(out)]
    queue = [Job(name, [sys.executable, *command], out / f"{name}.log") for name, command in jobs.items()]

    def changed(job: Job) -> None:
        if job.status != "running":
            print(
                f"{job.status} {job.name} in {job.seconds:.0f} s{': ' * bool(job.reason)}{job.reason or ''}", flush=True
            )

    number = run_jobs(queue, [Slot("all GPUs")], changed=changed, tick=lambda: None, grace=GRACE)
    if number is not None:
        raise SystemExit(128 + number)
    if any(job.status != "finished" for job in queue):
        raise SystemExit(1)


@dataclass(frozen=True)
class Measured:
    """A finished run.

    Args:
        folder: its run folder.
    """

    folder: Path

    @cached_property
    def config(self) -> Any:
        """Its settings."""
        return OmegaConf.load(self.folder / "config.yaml")

    @cached_property
    def profile(self) -> dict[str, Any]:
        """Its profile, of the first rank."""
        return json.loads((self.folder / "profile.json").read_text(encoding="utf-8"))

    @cached_property
    def metrics(self) -> dict[str, np.ndarray]:
        """Logged metrics by step."""
        return {name: values for name, (_, values) in read_metrics(self.folder / "metrics.csv").items()}

    @property
    def group(self) -> tuple[str, int]:
        """Model and samples of a step."""
        return self.folder.name.partition("-")[0], self.config.data.batch_size

    @property
    def dims(self) -> ParallelDims:
        """Its GPUs and what they share."""
        cfg = self.config
        return ParallelDims.of_settings(cfg.trainer.strategy, cfg.trainer.devices, cfg.task.parallel.sequence)

    @property
    def milliseconds(self) -> float:
        """Median time of a step without the profiler."""
        return 1e3 * median(self.metrics["throughput/step_seconds"][2 : WARM_UP + STEPS])

    @property
    def exposed(self) -> float:
        """Share of the traced time in which the first rank waits for communication."""
        kind = self.profile["kinds"].get(COMMUNICATION, {"milliseconds": 0.0})
        return kind["milliseconds"] / self.profile["profiled_milliseconds"]

    @property
    def gib(self) -> float:
        """Largest memory of tensors of the first rank; nan where there is no GPU."""
        return float(np.max(self.metrics.get("throughput/memory_gib", np.nan)))

    @property
    def planned_gib(self) -> float:
        """Largest memory of tensors by `vsa plan`."""
        name = self.profile["device"]
        gpu = known_gpu(name) or Gpu(name=name, memory=0.0, sources={})
        shapes = {MODELS[self.group[0]].latent: 1}
        text = self.config.data.text_encoder.max_tokens
        estimate = estimate_of(self.config, build_task(self.config), shapes, text, gpu, dims=self.dims)
        return sum(memory(estimate.largest).values()) / GIB

    def difference(self, other: Measured) -> float:
        """Largest difference of a step's training loss, relative to the other's."""
        ours, theirs = (run.metrics["train/loss"] for run in (self, other))
        steps = min(len(ours), len(theirs))
        return float(np.max(np.abs(ours[:steps] / theirs[:steps] - 1)))


HEADS = (
    "model", "samples", "GPUs", "copies", "GPUs a sample", "ms a step", "times faster", "exposed communication", "GiB",
    "by the plan", "losses differ by",
)  # fmt: skip


def table(out: Path) -> Iterator[str]:
    """Markdown rows of the finished runs; faster and different are meant against the first of the same samples.

    Raises:
        ValueError: the folder has no finished run.
    """
    folders = {path.parent for path in out.glob("*/profile.json")}
    # without runs that later ones have set aside, NAME.1
    runs = [Measured(folder) for folder in folders if folder.with_suffix("") not in folders - {folder}]
    if not runs:
        raise ValueError(f"{out} has no run with a profile.json")
    yield from (f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|")
    first: dict[tuple[str, int], Measured] = {}
    for one in sorted(runs, key=lambda run: (run.group, run.dims.ranks, run.dims.sequence, -run.dims.shard)):
        start, dims = first.setdefault(one.group, one), one.dims
        cells = [
            *one.group, dims.ranks, dims.ranks // dims.shard, dims.sequence, f"{one.milliseconds:,.0f}",
            "" if start is one else f"{start.milliseconds / one.milliseconds:.2f}", f"{one.exposed:.1%}",
            f"{one.gib:.1f}", f"{one.planned_gib:.1f}",
            "" if start is one else f"{one.difference(start):.1e}",
        ]  # fmt: skip
        yield f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("out", type=Path, help="folder of the runs")
    args = parser.parse_args()
    with one_line_errors():
        if args.what == "table":
            print("\n".join(table(args.out)))
        elif gpus := torch.cuda.device_count():
            run(args.out, cases(gpus))
        else:
            raise ValueError("this machine has no GPU")


if __name__ == "__main__":
    main()
