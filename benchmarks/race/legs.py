"""The legs of the race and their folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from vsa.config_files import config_folder

OUT, RAW = Path("outputs/race"), Path(__file__).parents[1] / "raw"
REFERENCE, DENSE, START = "vsa_64", "dense", "start"
"""The variant that others are compared with, the dense one, and the folder of the dense runs that are finetuned."""
COMMON = (
    "experiment=ablation",
    "name=race",
    "task.parallel.compile=true",
    "callbacks.samples.prompts=[]",
    # the same clips and noise for all seeds
    "task.validation_seed=0",
    "data.validation_seed=0",
)
POINTS = "task.validate_at=[current,half,double,quadruple,dense]"
FROM_SCRATCH = "flop_budget=2e16"
LONG = ("data.world.grid=[16,32,32]", "data.batch_size=4")
PROFILE = ("debug=profile", "trainer.max_steps=80", "callbacks.profile.warm_up=30", "callbacks.profile.steps=20")
RATES = (1e-3, 2e-3, 4e-3)
BEST, CLIPS, STEPS = 5, 256, 16
"""Variants of the second round besides VSA and the dense model; scored clips of a run, and their Euler steps."""


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A comparison at one budget.

    Args:
        sweep: its variants, a file of configs/sweep.
        settings: settings of all runs.
        seeds: seeds of the whole leg.
        minutes: GPU minutes of a run.
        rates: learning rates of every variant; none: its best one of the leg `rates`, if it has `own_rate`.
        own_rate: whether variants train at their best learning rate, instead of that of the settings.
        alone: whether one run has the GPU at a time, whose steps are timed.
        scored: whether clips of its runs are scored.
        best_of: another leg, whose best variants, VSA and the dense model run in this one.
        repeats: another leg, whose archived runs without scores run in this one once more.
    """

    sweep: str
    settings: tuple[str, ...]
    seeds: tuple[int, ...]
    minutes: float
    rates: tuple[float, ...] = ()
    own_rate: bool = True
    alone: bool = False
    scored: bool = True
    best_of: str | None = None
    repeats: str | None = None

    @property
    def variants(self) -> dict[str, list[str]]:
        """Settings of the variants of its sweep."""
        path = config_folder() / "sweep" / f"{self.sweep}.yaml"
        return yaml.safe_load(path.read_text(encoding="utf-8"))["variants"]


def _times(sweep: str, *settings: str) -> Leg:
    """Step times of the variants of a sweep, each alone."""
    return Leg(
        sweep=sweep, settings=(*PROFILE, *settings), seeds=(9,), minutes=0.9, own_rate=False, alone=True, scored=False
    )


LEGS = {
    "rates": Leg(sweep="race", settings=("flop_budget=5e15",), seeds=(9,), minutes=0.5, rates=RATES, scored=False),
    "times": _times("race"),
    "times_long": _times("race_long", *LONG),
    "scratch": Leg(sweep="race", settings=(FROM_SCRATCH, POINTS), seeds=(0, 1, 2), minutes=1.4),
    "again": Leg(sweep="race", settings=(FROM_SCRATCH, POINTS), seeds=(0, 1, 2), minutes=1.4, repeats="scratch"),
    "second": Leg(
        sweep="race", settings=("flop_budget=5e16", POINTS), seeds=(0, 1, 2, 3, 4), minutes=3.2, best_of="scratch"
    ),
    "long": Leg(
        sweep="race_long",
        settings=("flop_budget=5e16", *LONG, POINTS),
        seeds=(0, 1),
        minutes=3.3,
    ),
    "finetune": Leg(
        sweep="race_finetune",
        settings=("flop_budget=1e16", "task=finetune", "start=dense", "optim.lr=5e-4", POINTS),
        seeds=(0, 1, 2),
        minutes=1.0,
        own_rate=False,
    ),
}


def folder(name: str) -> Path:
    """Folder of the runs of a leg on this machine."""
    return OUT / name


def archive(name: str) -> Path:
    """Archive of the runs of a leg."""
    return RAW / f"race-{name}.tar.xz"
