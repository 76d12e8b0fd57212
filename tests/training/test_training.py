"""What a training run computes: loss normaliser, averages, skipped steps, FLOP counts, pictures, debug presets."""

from __future__ import annotations

import csv
import itertools
import json
import math
from dataclasses import replace

import lightning as L
import pytest
import torch

import vsa.training.callbacks.samples as samples_module
import vsa.training.callbacks.step_profile as step_profile
from tests.states import largest_difference
from tests.training.ranks import run_ranks
from vsa.checkpoints.tensor_state import optimizer_state
from vsa.data.video_files import read_video
from vsa.diffusion.flow_matching import sample_sigmas
from vsa.objectives.flow_matching import VALIDATION_SEED, FlowMatchingLoss
from vsa.sampling.pipeline import generate, load_run
from vsa.training.callbacks.ema import EMA
from vsa.training.modules.pretrain import PretrainModule
from vsa.training.parallel import ShardedDataParallel, choose_strategy
from vsa.training.run_state import parts_of
from vsa.training.train import _processes

# weights of different sizes inside a batch: a per-micro-batch mean would show; the large eps keeps Adam from
# turning rounding of near-zero gradients into whole steps
INVARIANCE = (
    "data.batch_size=8",
    "trainer.max_steps=2",
    "task.objective.weighting=sigma_sqrt",
    "optim.eps=0.01",
    "callbacks.ema=null",
)


def weights(training, run: str) -> dict[str, torch.Tensor]:
    return training.last(run).tensors("model")


def test_micro_batches_do_not_change_the_step(training, monkeypatch):
    training(*INVARIANCE, "run=whole")
    training(*INVARIANCE, "run=in4", "trainer.accumulate_grad_batches=4")
    assert largest_difference(weights(training, "whole"), weights(training, "in4")) < 1e-6
    for step, loss in training.losses("whole").items():
        assert float(training.losses("in4")[step]) == pytest.approx(float(loss), rel=1e-5)

    # control: each micro-batch normalised by itself
    call = FlowMatchingLoss.__call__

    def own_mean(self, *args, **kwargs):
        terms = call(self, *args, **kwargs)
        return replace(terms, total_weight=float(terms.weights.sum()) * 4)

    monkeypatch.setattr(FlowMatchingLoss, "__call__", own_mean)
    training(*INVARIANCE, "run=naive", "trainer.accumulate_grad_batches=4")
    assert largest_difference(weights(training, "whole"), weights(training, "naive")) > 1e-5


def test_ranks_do_not_change_the_step(training):
    extra = (*INVARIANCE, "callbacks.samples.prompts=[a red circle moving left slowly]", "callbacks.samples.steps=1")
    ranks = ("run=ranks", "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2")

    def on_rank(rank: int) -> None:
        training(*extra, *ranks, "trainer.val_check_interval=1")

    run_ranks(2, on_rank)
    training(*INVARIANCE, "run=one", "trainer.val_check_interval=1")
    assert largest_difference(weights(training, "one"), weights(training, "ranks")) < 1e-6
    one, ranks = training.metrics("one"), training.metrics("ranks")
    assert set(one) == set(ranks) == {1, 2}
    for step in one:
        for name in ("train/loss", "val/loss", "grad_norm/total", "throughput/flops_total"):
            assert float(ranks[step][name]) == pytest.approx(float(one[step][name]), rel=1e-4), name
    assert {p.name for p in training.folder("ranks").iterdir()} >= {"attention.png", "loss.png", "samples"}
    # every sample of the validation set once, in its order
    by_sample = {}
    for run in ("one", "ranks"):
        with open(training.folder(run) / "validation.csv", newline="") as file:
            by_sample[run] = list(csv.DictReader(file))
    assert len(by_sample["one"]) == 8
    # samples that fill up a batch meet another noise
    assert len({row["sample"] for row in by_sample["one"]}) < len({row["noise_level"] for row in by_sample["one"]}) == 8
    assert all(0 < float(row["noise_level"]) < 1 for row in by_sample["one"])
    mean = sum(float(row["loss"]) for row in by_sample["one"]) / 8
    assert mean == pytest.approx(float(one[2]["val/loss"]), rel=1e-5)
    for one_row, row in zip(by_sample["one"], by_sample["ranks"], strict=True):
        assert float(row.pop("loss")) == pytest.approx(float(one_row.pop("loss")), rel=1e-4)
        assert row == one_row


def test_activation_checkpointing_does_not_change_the_run(training):
    training("run=plain")
    training("run=recomputed", "task.parallel.activation_checkpointing=attention_mlp")
    assert training.losses("plain") == training.losses("recomputed")


def test_the_loss_falls(training):
    wide = ("model.attention_head_dim=48", "model.ffn_dim=96")
    training(*wide, "trainer.max_steps=40", "trainer.log_every_n_steps=8", "data.batch_size=8")
    losses = [float(v) for v in training.losses().values()]
    assert sum(losses[-2:]) < 0.9 * sum(losses[:2])
    row = training.metrics()[40]
    deciles = [float(v) for name, v in row.items() if name.startswith("train/loss_decile_") and v]
    assert len(deciles) > 5
    assert min(deciles) < float(row["train/loss"]) < max(deciles)


def test_a_log_line_is_of_all_samples_since_the_last_one(training, monkeypatch):
    micro_batches: list[dict] = []
    loss_terms = PretrainModule.loss_terms

    def spy(self, *args):
        terms = loss_terms(self, *args)
        share = (terms.weights * terms.mse).sum() / terms.total_weight
        micro_batches.append(
            {"mse": terms.mse.detach().double(), "sigmas": terms.sigmas, "loss": float(share.detach())}
        )
        return terms

    monkeypatch.setattr(PretrainModule, "loss_terms", spy)
    settings = (*INVARIANCE, "trainer.accumulate_grad_batches=2", "trainer.log_every_n_steps=3", "trainer.max_steps=6")
    training(*settings)
    assert sorted(training.losses()) == [3, 6]
    for step, part in ((3, micro_batches[:6]), (6, micro_batches[6:])):
        row = training.metrics()[step]
        assert float(row["train/loss"]) == pytest.approx(sum(micro["loss"] for micro in part) / 3, rel=1e-6)
        sigmas = torch.cat([micro["sigmas"] for micro in part]).tolist()
        mse = torch.cat([micro["mse"] for micro in part]).tolist()
        for decile in range(10):
            own = [loss for loss, s in zip(mse, sigmas, strict=True) if decile <= 10 * s < decile + 1]
            value = row.get(f"train/loss_decile_{decile}", "")
            assert bool(own) == bool(value), decile
            if own:
                assert float(value) == pytest.approx(sum(own) / len(own), rel=1e-6), decile
    # control: one step alone is something else
    assert micro_batches[-1]["loss"] + micro_batches[-2]["loss"] != pytest.approx(float(training.losses()[6]), rel=1e-3)


@pytest.mark.parametrize("interval", [2, 3, 100])
def test_a_run_validates_at_its_last_step(training, interval):
    training("trainer.max_steps=3", f"trainer.val_check_interval={interval}", "callbacks.samples=null")
    metrics = training.metrics()
    steps = [step for step in sorted(metrics) if metrics[step].get("val/loss")]
    assert steps == ([2, 3] if interval == 2 else [3])
    assert not metrics[1].get("val/loss")


def test_validation_has_noise_levels_of_its_own():
    training, validation = (sample_sigmas(seed=seed, step=0, num_slots=8) for seed in (0, VALIDATION_SEED))
    assert not torch.equal(training, validation)


def test_a_strategy_that_would_not_reduce_gradients_is_refused(training):
    with pytest.raises(ValueError, match=r"trainer\.strategy=ddp is not supported.*trainer=fsdp or trainer=ddp"):
        training("trainer.devices=2", "trainer.strategy=ddp")
    assert not training.folder().exists()
    # one process needs none, every other number of processes has ours
    assert choose_strategy("auto", processes=1) == "auto"
    assert isinstance(choose_strategy("auto", processes=2), ShardedDataParallel)


@pytest.mark.parametrize(
    ("devices", "nodes", "processes"),
    [
        (1, 1, 1),
        ("1", 1, 1),
        ("auto", 1, 4),
        (-1, 1, 4),
        (3, 1, 3),
        ([2], 1, 1),
        ([0, 3], 1, 2),
        ("0,1", 2, 4),
        (1, 2, 2),
    ],
)
def test_gpus_are_counted_as_lightning_counts_them(monkeypatch, devices, nodes, processes):
    monkeypatch.setattr("lightning.pytorch.accelerators.cuda.num_cuda_devices", lambda: 4)
    monkeypatch.setattr("lightning.fabric.utilities.device_parser._get_all_available_gpus", lambda **_: [0, 1, 2, 3])
    assert _processes({"accelerator": "auto", "devices": devices, "num_nodes": nodes}) == processes
    # those of the CPU stay what they are
    if devices in (1, "auto"):
        assert _processes({"accelerator": "cpu", "devices": devices, "num_nodes": nodes}) == nodes


class Watch(L.Callback):
    """Weights after every step, and those validation sees."""

    def on_train_start(self, trainer, pl_module):
        self.after = [self._copy(pl_module)]
        self.validated, self.before, self.restored = [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % pl_module.accumulate == 0:
            self.after.append(self._copy(pl_module))

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 0:
            self.validated.append(self._copy(pl_module))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx % pl_module.accumulate == 0:
            self.restored.append(self._copy(pl_module))

    @staticmethod
    def _copy(pl_module):
        return {n: p.detach().clone() for n, p in pl_module.model.named_parameters()}


@pytest.mark.parametrize(
    ("decay", "warmup", "accumulate"),
    [(0.9, False, 1), (0.3, True, 2), pytest.param(0.99, True, 1, marks=pytest.mark.slow)],
)
def test_ema_is_the_average_written_by_hand(training, decay, warmup, accumulate):
    watch = Watch()
    training(
        "trainer.max_steps=5",
        f"callbacks.ema.decay={decay}",
        f"callbacks.ema.warmup={str(warmup).lower()}",
        f"trainer.accumulate_grad_batches={accumulate}",
        f"trainer.val_check_interval={accumulate}",
        callbacks=(watch,),
    )
    average = {n: p.double() for n, p in watch.after[0].items()}
    averages = []
    for n, now in enumerate(watch.after[1:], start=1):
        d = min(decay, (1 + n) / (10 + n)) if warmup else decay
        average = {name: d * average[name] + (1 - d) * now[name].double() for name in now}
        averages.append(average)
    ema = training.last().tensors("ema")
    assert all(t.dtype == torch.float32 for t in ema.values())
    assert largest_difference(ema, averages[-1]) < 1e-6
    # control: the weights themselves, and the average of one step before, are further away
    assert largest_difference(ema, watch.after[-1]) > 1e-4
    assert largest_difference(ema, averages[-2]) > 1e-4
    assert len(watch.validated) == 5
    for actual, expected in zip(watch.validated, averages, strict=True):
        assert largest_difference(actual, expected) < 1e-6
    # training continues with its own weights, bit for bit
    for start, end in zip(watch.restored[1:], watch.after[1:-1], strict=True):
        assert largest_difference(start, end) == 0


def test_ema_warmup_ends_at_the_decay():
    ema = EMA(decay=0.9, warmup=True)
    assert ema.decay_at(1) == 2 / 11
    assert ema.decay_at(10**6) == 0.9
    decays = [ema.decay_at(n) for n in range(1, 200)]
    assert decays == sorted(decays)
    assert EMA(decay=0.9, warmup=False).decay_at(1) == 0.9


class BadGradient(L.Callback):
    """Makes one gradient element of some micro-batches non-finite, and keeps what the steps left."""

    def __init__(self, batches, values=(math.nan,)):
        self.values, self.states = dict(zip(batches, itertools.cycle(values), strict=False)), []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batch = batch_idx

    def on_after_backward(self, trainer, pl_module):
        if self.batch in self.values:
            pl_module.model.blocks[1].attn1.to_q.weight.grad[3, 5] = self.values[self.batch]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        state = {f"model/{n}": p.detach().clone() for n, p in pl_module.model.named_parameters()}
        state |= {f"optimizer/{n}": v.clone() for n, v in optimizer_state(trainer.optimizers[0]).items()}
        state |= {f"ema/{n}": v.clone() for n, v in parts_of(trainer)["ema"].average.items()}
        self.states.append(state)


def test_a_step_with_a_non_finite_gradient_changes_nothing(training):
    bad = BadGradient((1, 3), (math.nan, -math.inf))
    training("trainer.max_steps=5", callbacks=(bad,))
    for step in (1, 3):
        before, after = bad.states[step - 1], bad.states[step]
        assert set(before) == set(after)
        assert all(torch.equal(before[n], after[n]) for n in before)
        assert any(not torch.equal(after[n], bad.states[step + 1][n]) for n in after if n.startswith("ema/"))
    assert all(torch.isfinite(v).all() for v in bad.states[-1].values())
    # the skipped steps count as steps of the schedule and the data, not of the moments
    assert {v.item() for n, v in training.last().tensors("optimizer").items() if n.endswith("/step")} == {3}
    assert [float(r["skipped_steps"]) for r in training.metrics().values()] == [0, 1, 1, 2, 2]
    assert training.last().state["skipped_steps"] == 2


def test_one_bad_micro_batch_drops_the_whole_step(training):
    bad = BadGradient((2,))
    training("trainer.max_steps=3", "trainer.accumulate_grad_batches=2", callbacks=(bad,))
    assert all(torch.equal(bad.states[1][n], bad.states[3][n]) for n in bad.states[1])
    assert any(not torch.equal(bad.states[3][n], bad.states[5][n]) for n in bad.states[3])


def test_training_stops_after_too_many_bad_steps_in_a_row(training):
    with pytest.raises(FloatingPointError, match="not finite for 3 steps in a row"):
        training("trainer.max_steps=9", "task.max_skipped=3", callbacks=(BadGradient((1, 3, 4, 5)),))
    # steps 1 and 3 were apart; the periodic checkpoint of step 4 stands
    assert training.last().step == 4
    # the row of bad steps is kept over a resume
    assert training.last().state["skipped_in_row"] == 1
    with pytest.raises(FloatingPointError, match="not finite for 3 steps in a row"):
        training(
            "trainer.max_steps=9",
            "task.max_skipped=3",
            "ckpt_path=last",
            callbacks=(BadGradient((0, 1)),),
        )


def test_clipping_bounds_the_step(training):
    class Norm(L.Callback):
        norms: list[float]

        def on_train_start(self, trainer, pl_module):
            self.norms = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            # gradients stay until the next step begins
            grads = [p.grad for p in pl_module.model.parameters() if p.grad is not None]
            self.norms.append(torch.nn.utils.get_total_norm(grads).item())

    norm = Norm()
    training("task.grad_clip=0.01", callbacks=(norm,))
    assert norm.norms == pytest.approx([0.01] * 4, rel=1e-3)
    # what is logged is the norm before clipping, and the roles make it up
    for row in training.metrics().values():
        roles = [float(v) for name, v in row.items() if name.startswith("grad_norm/") and name != "grad_norm/total"]
        assert float(row["grad_norm/total"]) == pytest.approx(sum(r * r for r in roles) ** 0.5, rel=1e-5)
        assert float(row["grad_norm/total"]) > 0.02


def test_throughput_counts_what_a_hand_count_gives(training):
    training("trainer.accumulate_grad_batches=2", "trainer.log_every_n_steps=2")
    tokens, text, dim, ffn, layers, tile, tiles, topk = 32, 16, 12, 24, 2, 4, 8, 4
    linear = 16 * 4 * dim * tokens  # patch embedding
    linear += 16 * dim + dim * dim + dim * 6 * dim  # time
    linear += (64 * dim + dim * dim) * text
    block = 4 * dim * dim * tokens  # q, k, v, out
    block += 2 * dim * dim * tokens  # gates
    block += 2 * dim * dim * tokens + 2 * dim * dim * text  # cross-attention: q, out; k, v
    block += 2 * dim * ffn * tokens
    linear += layers * block + dim * 16 * 4 * tokens
    pairs = tokens * topk * tile + tiles * tiles  # fine and coarse
    cross = tokens * text
    sample = 3 * 2 * linear + 3.5 * 4 * dim * layers * (pairs + cross)
    rows = training.metrics()
    assert sorted(rows) == [2, 4]
    for step, row in rows.items():
        assert float(row["throughput/flops_total"]) == pytest.approx(sample * 4 * step, rel=1e-8)
        seconds = float(row["throughput/step_seconds"])
        assert float(row["throughput/tokens_per_second"]) * seconds == pytest.approx(tokens * 4, rel=1e-6)
        assert float(row["throughput/tflops_executed"]) * seconds * 1e12 == pytest.approx(sample * 4, rel=1e-6)
        dense = float(row["throughput/tflops_dense_equivalent"]) / float(row["throughput/tflops_executed"])
        parameters = sum(v.numel() for n, v in training.last().tensors("model").items() if "to_gate_" not in n)
        dense_flops = 6 * parameters * tokens + 3.5 * 4 * dim * layers * tokens**2
        assert dense == pytest.approx(dense_flops / sample, rel=1e-6)
        assert (float(row["sparsity/topk"]), float(row["sparsity/density"])) == (topk, topk / tiles)
        assert float(row["sparsity/tile_pairs"]) == topk * tiles
    assert training.last().state["flops_total"] == sample * 16


SAMPLES = (
    "callbacks.samples.prompts=[a red circle moving left slowly,a blue square moving up quickly]",
    "callbacks.samples.steps=2",
    "callbacks.samples.guidance=2.0",
    # an average far from the weights
    "callbacks.ema.decay=0.5",
    "callbacks.ema.warmup=false",
)


def test_samples_are_clips_of_the_averaged_weights(training, monkeypatch):
    batches, write = [], samples_module.write_clips

    def keep(folder, prompts, videos, *args, **kwargs):
        batches.append(videos)
        write(folder, prompts, videos, *args, **kwargs)

    monkeypatch.setattr(samples_module, "write_clips", keep)
    training(*SAMPLES, "callbacks.samples.every_n_steps=2")
    folder = training.folder()
    assert sorted(p.name for p in (folder / "samples").iterdir()) == ["step-00000002", "step-00000004"]
    for step in (2, 4):
        clips = folder / "samples" / f"step-{step:08d}"
        record = json.loads((clips / "samples.json").read_text())
        assert (record["step"], record["weights"], record["topk"]) == (step, "ema", 4)
        files = {c[kind] for c in record["clips"] for kind in ("mp4", "gif")}
        assert {p.name for p in clips.iterdir()} == {*files, "samples.json", "contact_sheet.png"}
        by_weights = {}
        for kind in ("ema", "model"):
            run = load_run(folder / "checkpoints" / f"step-{step:08d}", weights=kind, device="cpu")
            settings = run.settings(seed=record["seed"], steps=2, guidance=2.0)
            by_weights[kind] = generate(run, [c["prompt"] for c in record["clips"]], settings)
        assert torch.equal(batches[step // 2 - 1], by_weights["ema"])
        assert not torch.equal(batches[step // 2 - 1], by_weights["model"])
        for clip, video in zip(record["clips"], by_weights["ema"], strict=True):
            assert read_video(clips / clip["mp4"])[0].shape == video.shape
    assert {"attention.png", "loss.png"} <= {p.name for p in folder.iterdir()}
    # sampling leaves training alone
    training("run=silent", "callbacks.samples=null", *SAMPLES[-2:])
    assert training.losses() == training.losses("silent")
    assert largest_difference(weights(training, "default"), weights(training, "silent")) == 0


@pytest.mark.parametrize(
    "overrides", [("sparsity.sparsity=0",), ("attention=full", "~attention.tile_thw")], ids=["all tiles", "dense"]
)
def test_a_run_that_selects_nothing_ends_without_a_picture_of_it(training, overrides):
    training(*SAMPLES, *overrides, "callbacks.samples.steps=1")
    names = {p.name for p in training.folder().iterdir()}
    assert "loss.png" in names
    assert "attention.png" not in names
    assert training.last().step == 4


def test_a_flop_budget_sets_the_end_of_the_run_and_of_its_schedules(training):
    training("run=steps")
    per_step = training.last("steps").state["flops_total"] / 4
    trainer = training(*SAMPLES, f"flop_budget={per_step * 6.2}", "optim=adamw_wsd", "trainer.log_every_n_steps=100")
    assert trainer.max_steps == trainer.global_step == 6
    # the last step is logged, sampled and drawn
    assert sorted(training.metrics()) == [6]
    assert [p.name for p in (training.folder() / "samples").iterdir()] == ["step-00000006"]
    assert (training.folder() / "attention.png").exists()
    assert training.last().state["config"]["trainer"]["max_steps"] == 6
    assert training.last().state["config"]["optim"]["schedule"]["total_steps"] == 6
    assert training.last().state["flops_total"] == pytest.approx(per_step * 6)


@pytest.mark.slow
def test_debug_overfit_drives_the_loss_down(training):
    training("debug=overfit", "data.batch_size=2", "run=overfit", "~trainer.max_steps")
    losses = training.losses("overfit")
    assert sorted(losses) == list(range(1, 101))
    assert float(losses[100]) < 0.35 * float(losses[1])
    # and can be run again
    training("debug=overfit", "run=overfit", "trainer.max_steps=2")
    assert sorted(training.losses("overfit")) == [1, 2]


@pytest.mark.slow
def test_debug_profile_says_where_the_time_goes(training, monkeypatch):
    messages = []
    monkeypatch.setattr(step_profile, "rank_zero_info", messages.append)
    trainer = training("debug=profile", "trainer.max_steps=5")
    # two steps as they are and two traced, after the first
    assert trainer.global_step == 5
    record = json.loads((training.folder("profile") / "profile.json").read_text())
    assert record["steps"] == 2
    assert sum(kind["milliseconds"] for kind in record["kinds"].values()) == pytest.approx(
        record["profiled_milliseconds"]
    )
    assert {"sparse attention operator", "linear layers", "optimizer"} <= set(record["kinds"])
    assert record["kinds"]["linear layers"]["floor"] > 0
    assert any("the step without the profiler" in line for line in messages)
    with pytest.raises(ValueError, match=r"at least 3 steps, trainer\.max_steps=2 leaves 2"):
        training("debug=profile", "trainer.max_steps=2")


@pytest.mark.parametrize(("level", "clip"), [pytest.param("none", 1.0, marks=pytest.mark.slow), ("full", 0.0)])
def test_floors_of_a_profile_are_those_of_shapes_and_of_the_optimizer(training, monkeypatch, level, clip):
    class Texts(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.tokens = batch.text.shape[1]

    # floors in ms are FLOPs and bytes
    monkeypatch.setattr(step_profile, "matrix_speed", lambda device: 1e3)
    monkeypatch.setattr(step_profile, "copy_bandwidth", lambda device: 1e3)
    texts = Texts()
    settings = (f"task.parallel.activation_checkpointing={level}", f"task.grad_clip={clip}", "trainer.max_steps=5")
    trainer = training("debug=profile", *settings, callbacks=(texts,))
    kinds = json.loads((training.folder("profile") / "profile.json").read_text())["kinds"]
    sizes = [p.numel() for p in trainer.lightning_module.model.parameters()]
    # per pair and channel, and once more if the forward is computed again
    pairs, cost = 4 * 32 * texts.tokens, 14 + 4 * (level == "full")
    assert kinds["other attention"]["floor"] == pytest.approx(cost * pairs * 12 * 2)
    # weights and both moments both ways, gradients, and a step number of each parameter both ways
    assert kinds["optimizer"]["floor"] == pytest.approx(28 * sum(sizes) + 8 * len(sizes))
    assert kinds["averaged weights"]["floor"] == pytest.approx(12 * sum(sizes))
    assert kinds["gradient norms"]["floor"] == pytest.approx((12 if clip else 4) * sum(sizes))


def test_debug_anomaly_names_the_operation(training):
    class BadWeight(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 0:
                with torch.no_grad():
                    pl_module.model.blocks[0].ffn.net[2].weight[0, 0] = float("nan")

    training("debug=anomaly", "trainer.max_steps=1")
    assert sorted(training.losses("anomaly")) == [1]
    with pytest.raises((RuntimeError, ValueError), match=r"nan"):
        training("debug=anomaly", "trainer.max_steps=1", callbacks=(BadWeight(),))
