"""Sparsity of a run as it is logged, validated, sampled and measured."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vsa.training.train as run_module
from tests.pictures import drawn, leave_out, pictures_left_out  # noqa: F401
from tests.tiny_runs import TinyTraining
from vsa.attention.full import dense_attn
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.sparsity import ConstantSparsity
from vsa.checkpoints.run_checkpoint import read_checkpoint
from vsa.checkpoints.run_folder import RunFolder
from vsa.data.batch import VideoBatch
from vsa.diffusion.flow_matching import add_noise, noise_like, to_timestep
from vsa.evaluation.evaluator import validation_loss
from vsa.evaluation.figures import layer_heatmaps
from vsa.sampling.pipeline import generate, load_run
from vsa.training.callbacks.diagnostics import METRICS, Diagnostics

LOOK = (
    "callbacks=diagnostics",
    "callbacks.diagnostics.every_n_steps=2",
    "callbacks.diagnostics.noise_levels=[0.2,0.6,0.9]",
    "model.num_attention_heads=2",
)
STAIRS = (
    "sparsity=staircase",
    "sparsity.topk=2",
    "~sparsity.sparsity",
    "sparsity.dense_steps=1",
    "sparsity.interval=1",
    "sparsity.tiles=2",
)
# 8 tiles; the first layer stays dense
LAYERS = (*STAIRS, "sparsity.dense_layers=[0]")
MEASURED = (
    "sparsity=missed_mass",
    "sparsity.topk=2",
    "~sparsity.sparsity",
    "sparsity.dense_steps=1",
    "sparsity.interval=2",
    "sparsity.tiles=3",
)


def read_table(folder: Path, step: int) -> dict:
    return json.loads((folder / "diagnostics" / f"step-{step:08d}.json").read_text())


def read_validation(folder: Path) -> list[dict[str, str]]:
    with open(folder / "validation.csv", newline="") as file:
        return list(csv.DictReader(file))


def by_layer(table: dict) -> list:
    """Rows `[layer][metric]` of a table."""
    return list(zip(*(table["tables"][name] for name in METRICS), strict=True))


def recall_by_hand(training, callback: Diagnostics, layer: int, sigma: float, topk: tuple[int, ...]) -> float:
    """Mass of the recorded selection in the whole fp64 attention of the checkpoint's weights."""
    run = load_run(training.folder(), weights="model", device="cpu")
    batch = callback._batch
    assert isinstance(batch, VideoBatch)
    latents = (batch.latents - run.latent_mean.view(1, -1, 1, 1, 1)) / run.latent_std.view(1, -1, 1, 1, 1)
    level = torch.full((len(latents),), sigma)
    recordings: dict = {}
    with torch.no_grad():
        x_t = add_noise(latents, noise_like(latents, batch.seeds), level)
        run.model(
            *(x_t, to_timestep(level), batch.text, batch.text_mask),
            topk=topk,
            recorder=lambda i, t: recordings.update({i: t}),
        )
    recording = recordings[layer]
    layout = run.model.layout_for(latents.shape[1:])
    tiles = torch.arange(layout.num_blocks).repeat_interleave(layout.blocks.sizes.long())
    # what dense attention gives to an indicator of "this tile is selected" is the mass of the selected tiles
    total = 0.0
    for head in range(recording["q"].shape[2]):
        for row in range(layout.num_tokens):
            selection = recording["kv_indices"][0, head, tiles[row], : recording["kv_num_blocks"][0, head, tiles[row]]]
            values = torch.isin(tiles, selection).double()[None, :, None, None]
            q, k = (recording[name][:1, :, head : head + 1].double() for name in ("q", "k"))
            total += dense_attn(q[:, row : row + 1], k, values.expand(-1, -1, -1, q.shape[-1])).mean().item()
    return total / (recording["q"].shape[2] * layout.num_tokens)


def test_what_is_measured_is_what_the_weights_do(training, drawn):  # noqa: F811 (the fixture)
    trainer = training(*LOOK, *LAYERS, "callbacks.ema=null")
    folder = training.folder()
    names = sorted(p.name for p in (folder / "diagnostics").iterdir())
    assert names == [f"step-0000000{step}.{kind}" for step in (2, 4) for kind in ("json", "png")]
    for step, topk in ((2, 6), (4, 2)):
        table = read_table(folder, step)
        assert (table["step"], table["topk"], table["num_tiles"]) == (step, [8, topk], 8)
        assert table["sparsity"] == 1 - (8 + topk) / 16
        assert table["timesteps"] == [0.2, 0.6, 0.9]
        assert set(table["tables"]) == set(METRICS)
        # the dense layer misses nothing and selects the same everywhere, the other one does not
        dense, sparse = (dict(zip(METRICS, rows, strict=True)) for rows in by_layer(table))
        assert dense["recall"] == pytest.approx([1] * 3, abs=1e-5)
        assert dense["overlap_heads"] == [1] * 3
        assert dense["overlap_steps"] == [None, 1, 1]
        assert sparse["recall_random"] == [topk / 8] * 3
        assert all(topk / 16 < x < 0.99 for x in sparse["recall"])
        assert all(x < 1 for x in sparse["overlap_steps"][1:])
        row = training.metrics()[step]
        for name in METRICS:
            cells = [x for cells in table["tables"][name] for x in cells if x is not None]
            assert float(row[f"diag/{name}"]) == pytest.approx(np.mean(cells), rel=1e-5)
        assert float(row["diag/recall_layer_1"]) == pytest.approx(np.mean(sparse["recall"]), rel=1e-5)
    callback = next(c for c in trainer.callbacks if isinstance(c, Diagnostics))
    by_hand = recall_by_hand(training, callback, 1, 0.6, (8, 2))
    assert sparse["recall"][1] == pytest.approx(by_hand, abs=1e-5)
    # controls: another noise level, another top-k
    assert abs(recall_by_hand(training, callback, 1, 0.2, (8, 2)) - by_hand) > 1e-4
    assert abs(recall_by_hand(training, callback, 1, 0.6, (8, 3)) - by_hand) > 1e-2
    assert np.asarray(Image.open(folder / "diagnostics" / "step-00000004.png").convert("L")).std() > 1


def test_looking_leaves_training_alone(training):
    training(*LOOK, *STAIRS)
    training("run=blind", "model.num_attention_heads=2", *STAIRS)
    assert training.losses() == training.losses("blind")
    ours, theirs = training.tensors(), training.tensors("blind")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_all_tiles_and_dense_attention(training):
    training(*LOOK, "sparsity.sparsity=0")
    means = read_table(training.folder(), 4)["means"]
    for name in ("recall", "recall_random", "overlap_steps", "overlap_heads"):
        assert means[name] == pytest.approx(1, abs=1e-5)
    training(*LOOK, "run=dense", "attention=full", "~attention.tile_thw")
    assert not (training.folder("dense") / "diagnostics").exists()
    assert not any(name.startswith("diag/") for name in training.metrics("dense")[4])


def test_methods_without_gates_leave_those_numbers_out(training):
    training(*LOOK, "attention=pooled_tail", "trainer.max_steps=2")
    table = read_table(training.folder(), 2)
    missing = {name for name, rows in table["tables"].items() if all(x is None for row in rows for x in row)}
    assert missing == {"gate_rms"}
    row = training.metrics()[2]
    assert "diag/gate_rms" not in row
    assert 0 < float(row["diag/recall_random"]) < float(row["diag/recall"]) < 1
    # what the tail adds
    assert 0 < float(row["diag/coarse_share"]) < 1


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> TinyTraining:
    """A run of 7 steps whose schedule may miss anything."""
    with pytest.MonkeyPatch.context() as patch:
        leave_out(patch)
        runs = TinyTraining(tmp_path_factory.mktemp("measured"), patch)
        runs(*LOOK, *MEASURED, "sparsity.max_missed=1.0", "trainer.max_steps=7")
    return runs


def test_a_measured_schedule_follows_what_is_measured(training, measured):
    # down after the looks at 2, 4 and 6, which hold from the next step on
    rows = measured.metrics()
    assert [float(rows[step]["sparsity/topk"]) for step in range(1, 8)] == [8, 8, 5, 5, 2, 2, 2]
    state = measured.last().state["sparsity_state"]
    assert state["drop_steps"] == [2, 4, 6]
    assert [missed_share for _, missed_share in state["measured"]] == pytest.approx(
        [1 - float(rows[step]["diag/recall"]) for step in (2, 4, 6)], abs=1e-6
    )
    # the weights are sampled at the top-k they had
    assert load_run(measured.folder(), device="cpu").settings().topk.number == 2
    # nothing may be missed: one step down, from all tiles, then none
    training("run=strict", *LOOK, *MEASURED, "sparsity.max_missed=0.001", "trainer.max_steps=5")
    rows = training.metrics("strict")
    assert [float(rows[step]["sparsity/topk"]) for step in range(1, 6)] == [8, 8, 5, 5, 5]


def test_layers_with_all_tiles_do_not_hide_what_the_others_miss(training):
    training(*LOOK, *MEASURED, "sparsity.max_missed=1.0", "sparsity.dense_layers=[0]", "trainer.max_steps=5")
    row = training.metrics()[4]
    dense, sparse = (float(row[f"diag/recall_layer_{layer}"]) for layer in (0, 1))
    assert dense == pytest.approx(1, abs=1e-5)
    assert sparse < 0.99
    missed_share = dict(training.last().state["sparsity_state"]["measured"])[4]
    assert missed_share == pytest.approx(1 - sparse, abs=1e-6)


def test_a_measured_schedule_resumes_bit_for_bit(training, measured):
    settings = (*LOOK, *MEASURED, "sparsity.max_missed=1.0")
    training(*settings, "trainer.max_steps=4")
    training(*settings, "trainer.max_steps=7", "ckpt_path=last")
    assert training.losses() == measured.losses()
    assert training.last().state["sparsity_state"] == measured.last().state["sparsity_state"]
    ours, theirs = training.tensors(), measured.tensors()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_measured_schedule_needs_measurements(training):
    with pytest.raises(ValueError, match="MissedMassSparsity follows measurements: it needs callbacks=diagnostics"):
        training(*MEASURED)
    assert not training.folder().exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["callbacks.diagnostics.layers=[0,2]"], r"layers has \[2\], but the model's layers are 0 to 1"),
        (["callbacks.diagnostics.samples=5"], "samples=5 is above the 4 samples"),
        (
            ["callbacks.diagnostics.every_n_steps=0"],
            "diagnostics.every_n_steps=0: expected an integer of at least 1",
        ),
        (["callbacks.diagnostics.noise_levels=[0.5,1.5]"], r"each a number from 0 to 1, got \[0.5, 1.5\]"),
        (["data.val_fraction=0"], "needs held-out samples"),
        (["sparsity.dense_layers=[2]"], "dense_layers has layer 2, but the model's layers are 0 to 1"),
        (["flop_budget=1e9", *MEASURED], "flop_budget needs a schedule known in advance, MissedMassSparsity"),
        (["++task.validate_at=[dense]"], r"must contain current, .* got \['dense'\]"),
        (["++callbacks.samples.sparsity=[none]"], r"callbacks.samples.sparsity=\[none\]: expected a list of values"),
    ],
)
def test_bad_input(training, overrides, message):
    with pytest.raises(ValueError, match=message):
        training(*LOOK, *overrides)
    assert not training.folder().exists()


def test_the_order_of_callbacks_in_the_settings_means_nothing(training):
    cfg = training.config(*LOOK)
    backwards = dict(reversed(cfg.callbacks.items()))
    assert list(backwards) != list(cfg.callbacks)
    for callbacks in (cfg.callbacks, backwards):
        cfg.callbacks = callbacks
        names = [type(callback).__name__ for callback in run_module._callbacks(cfg, RunFolder(Path(cfg.run_dir)), [])]
        # what changes a checkpoint, what writes it, what may fail, what uses all of them when training starts
        assert names[0] == "OpenRunFolder"
        assert names[-3:] == ["Checkpointing", "Samples", "MissedValidation"]
        assert {"Diagnostics", "EMA", "Throughput"} <= set(names[1:-3])


def test_the_sparsity_of_every_layer_is_logged(training):
    training(*LAYERS)
    for step, topk in ((1, 8), (2, 6), (4, 2)):
        row = training.metrics()[step]
        assert float(row["sparsity/topk"]) == (8 + topk) / 2
        assert float(row["sparsity/density"]) == (8 + topk) / 16
        assert float(row["sparsity/effective"]) == 1 - (8 + topk) / 16
        assert float(row["sparsity/tile_pairs"]) == 8 * (8 + topk) / 2
        if topk < 8:
            assert [float(row[f"sparsity/topk_layer_{i}"]) for i in (0, 1)] == [8, topk]
    # layers that do not differ have no column each
    training("run=same", *STAIRS)
    assert not any("topk_layer" in name for name in training.metrics("same")[4])


def test_validation_at_all_tiles_and_at_the_target(training):
    every = ("trainer.val_check_interval=2", "++task.validate_at=[current,dense,target]")
    training(*STAIRS, *every)
    rows = training.metrics()
    # the second step was trained with 6 of 8 tiles, the fourth with 2, which is the target
    names = ("val/loss", "val/loss_dense", "val/loss_target")
    at_2, at_4 = ([float(rows[step][name]) for name in names] for step in (2, 4))
    assert len(set(at_2)) == 3
    assert at_4[0] == at_4[2] != at_4[1]
    assert any(name.startswith("val/loss_dense_decile_") for name in rows[2])
    # the losses by sample of the last validation, of each point
    by_sample = read_validation(training.folder())
    assert {row["step"] for row in by_sample} == {"4"}
    for at, name, val_loss in zip(("current", "dense", "target"), names, at_4, strict=True):
        own = [(float(row["noise_level"]), float(row["loss"])) for row in by_sample if row["at"] == at]
        assert len(own) == len(set(own)) == 4
        assert sum(loss for _, loss in own) / len(own) == pytest.approx(val_loss, rel=1e-6)
        for decile in range(10):
            losses = [loss for level, loss in own if decile <= 10 * level < decile + 1]
            column = rows[4].get(f"{name}_decile_{decile}") or None
            assert bool(losses) == bool(column), decile
            if column:
                assert sum(losses) / len(losses) == pytest.approx(float(column), rel=1e-6)
    # each is the loss of a run that validates there and nowhere else
    training("run=plain", *STAIRS, "trainer.val_check_interval=2")
    assert [float(training.metrics("plain")[step]["val/loss"]) for step in (2, 4)] == [at_2[0], at_4[0]]
    assert "val/loss_dense" not in training.metrics("plain")[2]


def test_validation_at_half_and_double_the_topk(training):
    every = ("trainer.val_check_interval=2", "++task.validate_at=[current,half,double]")
    training("++sparsity.topk=2", "++sparsity.sparsity=null", "trainer.max_steps=2", *every)
    logged_losses = {name: float(value) for name, value in training.metrics()[2].items() if name.startswith("val/loss")}
    run = load_run(training.folder(), device="cpu")
    losses = {}
    for name, topk in (("val/loss", 2), ("val/loss_half", 1), ("val/loss_double", 4)):
        fixed = replace(run, sparsity=ConstantSparsity(topk=topk))
        losses[name] = validation_loss(fixed, training.last().state, batch_size=16)["val/loss"]
        assert losses[name] == pytest.approx(logged_losses[name], rel=1e-6)
    assert len({round(loss, 5) for loss in losses.values()}) == 3, losses


def test_one_topk_of_a_step_wherever_it_is_looked_at(training):
    """Validation, diagnostics, samples, logged sparsity, sampling and evaluation of the checkpoint."""
    every = (
        "callbacks.diagnostics.every_n_steps=1",
        "callbacks.checkpoint.every_n_steps=1",
        "callbacks.checkpoint.keep=3",
        "callbacks.samples.prompts=[a red circle moving left slowly]",
        "callbacks.samples.steps=1",
        "callbacks.samples.every_n_steps=1",
        "trainer.val_check_interval=1",
        "trainer.max_steps=3",
    )
    training(*LOOK, *STAIRS, *every)
    folder, rows = training.folder(), training.metrics()
    for step, topk in ((1, 8), (2, 6), (3, 4)):
        name = f"step-{step:08d}"
        assert float(rows[step]["sparsity/topk"]) == topk
        assert read_table(folder, step)["topk"] == topk
        assert json.loads((folder / "samples" / name / "samples.json").read_text())["topk"] == topk
        run = load_run(folder / "checkpoints" / name, device="cpu")
        assert run.settings().topk.number == topk
        state = read_checkpoint(folder / "checkpoints" / name).state
        loss = validation_loss(run, state, batch_size=16)["val/loss"]
        logged_loss = float(rows[step]["val/loss"])
        assert loss == pytest.approx(logged_loss, rel=1e-6)
        # control: at the top-k of the step to come
        other = validation_loss(replace(run, step=step + 1), state, batch_size=16)["val/loss"]
        assert other != pytest.approx(logged_loss, rel=1e-6)


def test_clips_at_all_tiles_beside_those_of_the_step(training):
    training(
        *LAYERS,
        "callbacks.samples.prompts=[a red circle moving left slowly]",
        "callbacks.samples.steps=2",
        "++callbacks.samples.sparsity=[dense,current]",
    )
    folder = training.folder() / "samples" / "step-00000004"
    assert {p.name for p in folder.iterdir()} == {"current", "dense"}
    records = {name: json.loads((folder / name / "samples.json").read_text()) for name in ("current", "dense")}
    assert (records["current"]["topk"], records["current"]["sparsity"]) == ([8, 2], 1 - 10 / 16)
    assert (records["dense"]["topk"], records["dense"]["sparsity"]) == (8, 0)
    run = load_run(training.folder(), device="cpu")
    assert run.settings(at="target").topk == run.settings().topk == KeptTiles((8, 2))
    clips = [generate(run, ["a red circle moving left slowly"], run.settings(steps=2, at=at)) for at in records]
    assert not torch.equal(*clips)
    assert (training.folder() / "attention.png").exists()


def test_a_flop_budget_follows_the_schedule(training):
    schedule = (
        *("sparsity=linear", "sparsity.topk=1", "~sparsity.sparsity", "sparsity.dense_steps=0"),
        "sparsity.total_steps=${trainer.max_steps}",
    )
    trainer = training("run=known", *schedule, "trainer.max_steps=12")
    budget = training.last("known").state["flops_total"]
    for share, steps in ((1.03, 12), (1.06, 13)):
        trainer = training(*schedule, f"flop_budget={budget * share}", "overwrite=true")
        assert trainer.global_step == steps
    # control: all steps at the cost of the first would be fewer
    first = float(training.metrics("known")[1]["throughput/flops_total"])
    assert round(budget / first) < 12


def test_heatmaps_show_their_tables(tmp_path: Path):
    tables = {"rising": torch.linspace(0, 1, 12).view(4, 3), "gap": torch.full((4, 3), 0.5)}
    tables["gap"][:, 0] = torch.nan
    path = layer_heatmaps(tables, tmp_path / "map.png", layers=range(4), timesteps=(0.1, 0.5, 0.9), title="title")
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    tables["gap"][:, 0] = 0.5
    other = np.asarray(Image.open(layer_heatmaps(tables, path, layers=range(4), timesteps=(0.1, 0.5, 0.9))))
    # what is not measured is grey, and only there
    grey = (pixels == 211).all(-1)
    assert grey.sum() > 1000
    assert (other[..., :3] == 211).all(-1).sum() < 100
    with pytest.raises(ValueError, match=r"rising must be \[3, 3\], got \[4, 3\]"):
        layer_heatmaps(tables, path, layers=range(3), timesteps=(0.1, 0.5, 0.9))
