"""Rows about numerics: values that are not finite, the replay of a skipped step, loss spikes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

import vsa.training.train as training
from scripts.soak.rows import Attempts, Row
from scripts.soak.tiny import TOY, metrics, run_folder, train_here, words
from vsa.training.callbacks.ema import EMA
from vsa.training.replay import replay_step

NAN, INF = math.nan, math.inf
STEP = 5
"""The step with the fault, which updates both networks of a distillation."""

DISTILL = (
    "task=distill",
    "start=dense",
    "optim.eps=0.01",
    "task.objective.guidance=2.5",
    "task.objective.shift.value=3",
)


@contextmanager
def with_callbacks(*callbacks: L.Callback) -> Iterator[None]:
    """Add callbacks to those of the config for trainings in the block."""
    make = training._trainer

    def made(cfg: Any, module: Any, configured: list[L.Callback], loggers: list[Any]) -> L.Trainer:
        return make(cfg, module, [*callbacks, *configured], loggers)

    training._trainer = made
    try:
        yield
    finally:
        training._trainer = make


def train(folder: Path, *overrides: str, callbacks: Sequence[L.Callback] = ()) -> None:
    """Train a tiny run in this process, with callbacks of a row."""
    torch.set_num_threads(1)
    settings = words(folder, *overrides)
    if TOY[0] in overrides:
        settings = [word for word in settings if not word.startswith("data.root=")]
    with with_callbacks(*callbacks):
        train_here(settings)


# values that are not finite


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a value that is not finite.

    Args:
        what: loss, gradient, gradients, batch, or the name of the network whose output has the value.
        value: the value, NaN or Inf.
        name: name of the tensor of the batch.
        always: insert it in all steps from `STEP` on, until the run ends itself.
    """

    what: str
    value: float
    name: str = ""
    always: bool = False

    @property
    def distilled(self) -> bool:
        return self.what in ("generator", "fake_score", "real_score")


PLACES = (
    *(Place(what="loss", value=value) for value in (NAN, INF, -INF)),
    *(Place(what="gradient", value=value) for value in (NAN, INF, -INF)),
    *(
        Place(what=network, value=value)
        for network in ("generator", "fake_score", "real_score")
        for value in (NAN, INF)
    ),
    *(Place(what="gradients", value=value) for value in (NAN, INF)),
    *(Place(what="batch", name="latents", value=value) for value in (NAN, INF)),
    Place(what="batch", name="text", value=NAN),
    *(Place(what="block", value=value) for value in (NAN, INF)),
    *(Place(what=what, value=NAN, always=True) for what in ("loss", "gradient")),
)


class Spoil(L.Callback):
    """Inserts a value at a step, and compares the state that a skipped update must not change."""

    def __init__(self, place: Place):
        self.place = place
        self.dropped = 0
        self.changed: list[str] = []
        self._before: dict[str, dict[str, Tensor]] = {}
        self._now = False

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        place = self.place
        networks: dict[str, nn.Module] = {"block": pl_module.model.blocks[0]}
        if place.distilled:
            networks = {name: getattr(pl_module.networks, name) for name in ("generator", "fake_score", "real_score")}
        if place.what in networks:
            networks[place.what].register_forward_hook(lambda _, __, out: _plus(out, place.value) if self._now else out)
        if place.what == "loss":
            step = pl_module.training_step
            pl_module.training_step = lambda *a: step(*a) * (place.value if self._now else 1)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        now = trainer.global_step
        self._now = now >= STEP if self.place.always else now == STEP
        self._before = {name: _kept(trainer, pl_module, name) for name in pl_module.clippers}
        if self._now and self.place.what == "batch":
            getattr(batch, self.place.name).view(-1)[0] = self.place.value

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        if self._now and self.place.what in ("gradient", "gradients"):
            grads = [p.grad for p in pl_module.model.parameters() if p.grad is not None]
            for grad in grads[:1] if self.place.what == "gradient" else grads:
                grad.view(-1)[0] = self.place.value

    def compare(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Compare the state after all changes of a step."""
        for name, clipper in pl_module.clippers.items():
            turn = name != "model" or not self.place.distilled or pl_module.cycle.is_generators_turn(STEP)
            if self._now and turn and clipper.skipped:
                self.dropped += 1
                after = _kept(trainer, pl_module, name)
                same = {key: torch.equal(value, after[key]) for key, value in self._before[name].items()}
                self.changed += [key for key, equal in same.items() if not equal]
                self.changed += sorted(set(after) ^ set(same))


class Compare(L.Callback):
    """Lets a `Spoil` compare after all other callbacks."""

    order = 9

    def __init__(self, spoil: Spoil):
        self._spoil = spoil

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self._spoil.compare(trainer, pl_module)


def _plus(output: Any, value: float) -> Any:
    return output + value if isinstance(output, Tensor) else type(output)(_plus(each, value) for each in output)


def _kept(trainer: L.Trainer, module: Any, network: str) -> dict[str, Tensor]:
    """Weights, optimizer moments and weight average of a network."""
    owner = module.model if network == "model" else module.fake_score.network
    optimizer = trainer.optimizers[0 if network == "model" else 1]
    tensors = {f"weight {name}": p.detach().clone() for name, p in owner.named_parameters()}
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        tensors |= {f"{key} {number}": value.clone() for key, value in optimizer.state.get(parameter, {}).items()}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, EMA) and network == "model":
            tensors |= {f"average {name}": value.clone() for name, value in callback.average.items()}
    return tensors


def not_finite(folder: Path, tries: int, seed: int) -> Attempts:
    places = PLACES[:tries]
    if any(place.distilled for place in places):
        train(folder, "attention=full", "run=dense", "trainer.max_steps=4")
    for number, place in enumerate(places):
        yield str(place), _survives(folder, place, f"p{number}", seed)


def _survives(folder: Path, place: Place, run: str, seed: int) -> str | None:
    """None, or what went wrong."""
    task = (*DISTILL, f"init_from={run_folder(folder, 'dense')}") if place.distilled else ()
    spoil = Spoil(place)
    settings = (f"run={run}", f"seed={seed}", "trainer.max_steps=16", *task)
    try:
        train(folder, *settings, callbacks=(spoil, Compare(spoil)))
        cause = ""
    except FloatingPointError as error:
        cause = str(error)
    if spoil.changed:
        return f"a dropped update changed {spoil.changed[:3]}"
    if place.always:
        return (
            None if spoil.dropped >= 9 and "10 steps in a row" in cause else f"{spoil.dropped} dropped, ended {cause!r}"
        )
    rows = metrics(run_folder(folder, run))
    num_skipped = sum(float(rows[16].get(key) or 0) for key in ("skipped_steps", "fake_score/skipped_steps"))
    loss = rows[16]["fake_score/loss" if place.distilled else "train/loss"]
    if cause or not spoil.dropped or num_skipped != spoil.dropped or not math.isfinite(float(loss)):
        return f"{spoil.dropped} dropped, {num_skipped:g} counted, loss {loss} at the end, ended {cause!r}"
    return None


# the replay of a skipped step


class SpoilAt(L.Callback):
    """Replaces a value of the batch or of a weight at a step."""

    def __init__(self, what: str, step: int, value: float):
        self.what, self.step, self.value = what, step, value

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # a weight is changed before the step, a sample in its last micro-batch
        micro_batch = batch_idx % pl_module.accumulate
        target_micro_batch = pl_module.accumulate - 1 if self.what == "latents" else 0
        if trainer.global_step != self.step or micro_batch != target_micro_batch:
            return
        with torch.no_grad():
            target = batch.latents if self.what == "latents" else pl_module.get_parameter(self.what)
            target.view(-1)[0] = self.value


SPOILT = (
    ("latents", NAN, "latents of sample"),
    ("model.blocks.1.attn1.to_q.weight", INF, "weight model.blocks.1.attn1.to_q.weight"),
    ("latents", INF, "latents of sample"),
    # a finite weight, with which the output or its gradient overflows fp32
    ("model.blocks.1.attn1.to_q.weight", 3e38, "output of model.blocks.1.attn1.to_q"),
)


def replayed(folder: Path, tries: int, seed: int) -> Attempts:
    numbers = random.Random(seed)
    for number in range(tries):
        what, value, first = SPOILT[number % len(SPOILT)]
        step, accumulate = numbers.randrange(0, 8), numbers.choice((1, 2, 4))
        settings = (f"run=r{number}", f"seed={seed + number}", f"trainer.accumulate_grad_batches={accumulate}")
        with suppress(FloatingPointError):
            train(folder, *settings, f"trainer.max_steps={step + 2}", callbacks=(SpoilAt(what, step, value),))
        paths = sorted((run_folder(folder, f"r{number}") / "nan-dumps").glob("*"))
        result = replay_step(paths[0], accelerator="cpu") if paths else None
        found = result is not None and result.reproduced and first in str(result.first) and result.step == step
        yield f"{what}={value} in step {step}, {accumulate} micro-batches", None if found else str(result)


# loss spikes


class Outlier(L.Callback):
    """Multiplies the planned batch of a step by 40 whenever it is drawn."""

    def __init__(self, step: int):
        self.step = step

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        plan = trainer.datamodule.plan.step(self.step)  # type: ignore[attr-defined]
        if batch.step == self.step and set(batch.sample_ids) <= {ref.id for ref in plan.refs}:
            batch.latents.mul_(40)


def clean_runs(folder: Path, tries: int, seed: int) -> Attempts:
    steps, highest = 150, 0.0
    for number in range(tries):
        train(folder, *watched(number, seed, steps), *TOY)
        rows = metrics(run_folder(folder, f"s{number}"))
        highest = max(highest, max(float(row["train/loss"]) for row in rows.values()))
        alarms = float(rows[steps]["loss_spikes/rollbacks"])
        yield f"seed {seed + number}", f"{alarms:g} false alarms" if alarms else None
    return (f"{tries * steps} steps of toy clips, losses up to {highest:.3g}",)


def provoked(folder: Path, tries: int, seed: int) -> Attempts:
    numbers = random.Random(seed)
    for number in range(tries):
        step = numbers.randrange(20, 38)
        settings = watched(number, seed, 40)
        train(folder, *settings, *TOY, callbacks=(Outlier(step),))
        # a second, equal run
        train(folder, *settings[1:], "run=again", "overwrite=true", *TOY, callbacks=(Outlier(step),))
        rows = metrics(run_folder(folder, f"s{number}"))
        again = metrics(run_folder(folder, "again"))
        same = {n: row["train/loss"] for n, row in rows.items()} == {n: row["train/loss"] for n, row in again.items()}
        worst = max(float(row["train/loss"]) for row in rows.values())
        good = rows[40]["loss_spikes/rollbacks"] == "1" and list(rows) == list(range(1, 41)) and worst <= 10 and same
        failure = None if good else f"largest loss {worst:.3g}, same twice {same}, {rows[40]}"
        yield f"seed {seed + number}, step {step}", failure


def watched(number: int, seed: int, steps: int) -> tuple[str, ...]:
    """Settings of run `sNUMBER`, which watches its losses for spikes."""
    return (f"run=s{number}", "callbacks=loss_spikes", f"seed={seed + number}", f"trainer.max_steps={steps}")


ROWS: tuple[Row, ...] = (
    Row(
        name="NaN and infinity in loss, gradients, data and networks", tries=len(PLACES), short_tries=2, run=not_finite
    ),
    Row(name="replay of a dropped step", tries=20, short_tries=1, run=replayed),
    Row(name="loss spikes: false alarms in clean runs", tries=10, short_tries=0, run=clean_runs),
    Row(name="loss spikes: one batch times 40", tries=10, short_tries=1, run=provoked),
)
