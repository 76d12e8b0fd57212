"""Which runs a report finds, which of them are one variant, and how variants compare."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from tests.reports.fake_runs import write_run, write_sweep
from vsa.checkpoints.run_folder import locked
from vsa.reports.runs import Missing, code_versions, find_runs
from vsa.reports.statistics import paired_difference
from vsa.reports.tables import variant_table
from vsa.reports.variants import compared, group

FULL = {"attention___target_": "vsa.attention.full.FullAttention", "sparsity__sparsity": 0}


def variants_in(folder: Path) -> dict[str, list[str]]:
    """Names of the variants with the names of their runs."""
    return {variant.name: [run.name for run in variant.runs] for variant in group(find_runs([folder])[1])}


def test_runs_at_any_depth_with_metrics_alone(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "metrics.csv").write_text("step,train/loss,val/loss\n10,1.5,\n20,0.5,0.75\n30,0.")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.csv").write_text("")
    write_run(tmp_path / "c")
    # neither what a run keeps inside nor what was moved aside
    for inside in ("c/samples/x", ".c.overwritten-0123"):
        write_run(tmp_path / inside)
    root, runs, missing = find_runs([tmp_path])
    assert (root, missing) == (tmp_path, [])
    assert [run.name for run in runs] == ["a/b", "c", "empty"]
    assert (runs[0].steps, runs[0].val_loss, runs[0].last("train/loss")) == (20, 0.75, 0.5)
    assert (runs[2].steps, runs[2].val_loss, runs[2].status) == (0, None, "finished")
    # of several folders the one above them; a run that lies in two of them counts once
    root, runs, _ = find_runs([tmp_path / "c", tmp_path / "a", tmp_path / "a" / "b"])
    assert root == tmp_path
    assert [run.name for run in runs] == ["a/b", "c"]
    assert find_runs([tmp_path / "c"])[1][0].name == "c"


def test_folders_without_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match=rf"^no run in {tmp_path}: metrics.csv is missing"):
        find_runs([tmp_path])
    with pytest.raises(ValueError, match=r"nowhere is not a folder"):
        find_runs([tmp_path / "nowhere"])


def test_a_run_that_cannot_be_read_is_named_and_the_others_stay(tmp_path):
    write_run(tmp_path / "good")
    (write_run(tmp_path / "words") / "metrics.csv").write_text("step,train/loss\n1,low\n")
    # of another program
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.csv").write_text("epoch,step,train_loss\n0,1,2\n")
    (write_run(tmp_path / "yaml") / "config.yaml").write_text("a: [")
    (write_run(tmp_path / "rows") / "validation.csv").write_text("step,at\n1,current\n")
    _, runs, missing = find_runs([tmp_path])
    assert [run.name for run in runs] == ["good"]
    assert {one.name: one.status for one in missing} == dict.fromkeys(("other", "rows", "words", "yaml"), "unreadable")
    reasons = {one.name: one.reason for one in missing}
    assert "other is not a run of vsa-train" in reasons["other"]
    assert "words/metrics.csv, column train/loss: could not convert string to float: 'low'" in reasons["words"]


def test_what_a_sweep_says(tmp_path):
    write_run(tmp_path / "s" / "a")
    write_run(tmp_path / "s" / "b", steps=20)
    write_run(tmp_path / "s" / "d", steps=20)
    points = (
        {"name": "a", "control": True, "device": "cuda:1"},
        {"name": "b", "status": "stopped"},
        {"name": "c", "status": "refused", "reason": "topk=99 is above the number of tiles, 8"},
        {"name": "d", "status": "failed", "reason": "out of memory"},
        {"name": "e", "status": "waiting"},
        {"name": "f", "status": "running"},
    )
    write_sweep(tmp_path / "s", *points)
    # another file of that name is no sweep
    (tmp_path / "s" / "a" / "sweep.json").write_text("[1]")
    _, runs, missing = find_runs([tmp_path])
    assert [(run.name, run.status) for run in runs] == [("s/a", "finished"), ("s/b", "stopped"), ("s/d", "failed")]
    assert runs[0].point is not None
    assert (runs[0].point.control, runs[0].point.device) == (True, "cuda:1")
    assert missing == [
        Missing(name="s/c", status="refused", reason="topk=99 is above the number of tiles, 8"),
        Missing(name="s/d", status="failed", reason="out of memory"),
        Missing(name="s/e", status="waiting", reason="not started yet"),
        Missing(name="s/f", status="running", reason="no metrics yet"),
    ]
    # a point that was started over leaves its old run beside it, which is none of the sweep's
    for name in ("a.1", "b.12", "x.1", "a.old"):
        write_run(tmp_path / "s" / name)
    assert [run.name for run in find_runs([tmp_path])[1]] == ["s/a", "s/a.old", "s/b", "s/d", "s/x.1"]
    assert [run.name for run in find_runs([tmp_path / "s" / "a.1"])[1]] == ["a.1"]
    # a sweep all of whose points were refused is one, too
    write_sweep(tmp_path / "t", {"name": "x", "status": "refused", "reason": "why"})
    assert find_runs([tmp_path / "t"])[1:] == ([], [Missing(name="x", status="refused", reason="why")])


def test_a_run_that_goes_on_is_told_from_one_that_was_stopped(tmp_path):
    write_run(tmp_path / "a", steps=20)
    write_run(tmp_path / "b", steps=20)
    with locked(tmp_path / "a"):
        assert [run.status for run in find_runs([tmp_path])[1]] == ["running", "stopped"]
    # what a kill leaves behind is no process
    (tmp_path / ".b.lock").write_text(json.dumps({"pid": os.getpid()}))
    assert [run.status for run in find_runs([tmp_path])[1]] == ["stopped", "stopped"]


def test_seeds_are_one_variant(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / f"dense-seed{seed}", seed=seed, loss=0.4 + seed / 10, **FULL)
        write_run(tmp_path / f"sparse-seed{seed}", seed=seed, loss=0.6 + seed / 10)
    assert variants_in(tmp_path) == {
        "dense": ["dense-seed0", "dense-seed1"],
        "sparse": ["sparse-seed0", "sparse-seed1"],
    }
    dense, sparse = compared(group(find_runs([tmp_path])[1]))
    assert (dense.loss, dense.std) == (pytest.approx(0.45), pytest.approx(0.5**0.5 / 10))
    assert (dense.control, sparse.control) == (True, False)
    # one of the settings that say the same
    assert sparse.values == {"attention._target_": "vsa.attention.video_sparse.VideoSparseAttention"}


def test_variants_are_told_apart_whatever_their_folders_are_called(tmp_path):
    for name, seed in (("seed-0", 0), ("seed-1", 1)):
        write_run(tmp_path / "x" / name, seed=seed, sparsity__sparsity=0.5)
    write_run(tmp_path / "y" / "seed-0")
    assert variants_in(tmp_path) == {"x": ["x/seed-0", "x/seed-1"], "y": ["y/seed-0"]}
    # where names say nothing, settings do; of those that say the same the shortest
    write_run(tmp_path / "z" / "again", seed=2, sparsity__sparsity=0.5)
    assert variants_in(tmp_path) == {
        "sparsity=0.5": ["x/seed-0", "x/seed-1", "z/again"],
        "sparsity=0.75": ["y/seed-0"],
    }
    # a seed of the data that is no copy of the run's is a setting
    write_run(tmp_path / "y" / "other", data__toy={"seed": 1, "count": 48})
    assert len(variants_in(tmp_path)) == 3


def test_a_start_of_each_seed_is_no_setting(tmp_path):
    for name, start, seed in (("a", "long", 1), ("a", "long", 10), ("b", "short", 1), ("b", "short", 10)):
        write_run(tmp_path / f"{name}-seed{seed}", seed=seed, init_from=f"starts/{start}-seed{seed}")
    assert variants_in(tmp_path) == {"a": ["a-seed1", "a-seed10"], "b": ["b-seed1", "b-seed10"]}
    variants = group(find_runs([tmp_path])[1])
    assert {variant.values["init_from"] for variant in variants} == {"starts/long-seed*", "starts/short-seed*"}
    # one start of all seeds is no setting either
    for seed in (0, 1, 2):
        for name in ("a", "b"):
            start = f"starts/{name}-seed0"
            write_run(tmp_path / "one" / f"{name}-seed{seed}", seed=seed, init_from=start, teacher="t/seed0/run")
    ones = group(find_runs([tmp_path / "one"])[1])
    assert {variant.name: len(variant.runs) for variant in ones} == {"a": 3, "b": 3}
    assert {variant.values["init_from"] for variant in ones} == {"starts/a-seed0", "starts/b-seed0"}


def test_steps_that_a_budget_decides_are_no_setting(tmp_path):
    lengths = {"a-seed0": (0, 40), "a-seed1": (1, 44)}
    for name, (seed, steps) in lengths.items():
        write_run(
            tmp_path / "one" / name,
            seed=seed,
            steps=steps,
            flop_budget=1e9,
            trainer__max_steps=steps,
            optim__schedule={"total_steps": steps},
        )
        # control: without a budget it is one
        write_run(tmp_path / "two" / name, seed=seed, trainer__max_steps=steps, optim__schedule={"total_steps": steps})
    assert len(variants_in(tmp_path / "one")) == 1
    assert len(variants_in(tmp_path / "two")) == 2


def test_each_variant_is_judged_at_its_best_learning_rate(tmp_path):
    losses = {("a", 0.01): 0.5, ("a", 0.1): 0.4, ("b", 0.01): 0.3, ("b", 0.1): 0.6}
    sparsity = {"a": 0.5, "b": 0.75}
    for (name, lr), loss in losses.items():
        folder = tmp_path / f"{name}-lr{lr}-seed7"
        write_run(folder, seed=7, loss=loss, optim__lr=lr, sparsity__sparsity=sparsity[name])
    b, a = group(find_runs([tmp_path])[1])
    assert (a.name, a.loss, a.runs[0].settings["optim.lr"]) == ("a", 0.4, 0.1)
    assert (b.name, b.loss, b.runs[0].settings["optim.lr"]) == ("b", 0.3, 0.01)
    assert {lr: [run.name for run in runs] for lr, runs in a.tried.items()} == {
        0.01: ["a-lr0.01-seed7"],
        0.1: ["a-lr0.1-seed7"],
    }
    # other seeds at the best rate are what counts then
    for seed in (0, 1):
        write_run(tmp_path / f"a-seed{seed}", seed=seed, loss=0.45, optim__lr=0.1, sparsity__sparsity=0.5)
    a = next(variant for variant in group(find_runs([tmp_path])[1]) if variant.name == "a")
    assert [run.seed for run in a.runs] == [0, 1]
    assert a.loss == pytest.approx(0.45)
    assert set(a.tried) == {0.01, 0.1}
    # a sweep of nothing but the rate shows every rate
    only = [tmp_path / f"b-lr{lr}-seed7" for lr in (0.01, 0.1)]
    assert [variant.loss for variant in group(find_runs(only)[1])] == [0.3, 0.6]


def test_variants_are_compared_with_the_control_seed_by_seed(tmp_path):
    samples = [(f"s{i}", 0.1 * i) for i in range(1, 6)]
    losses: dict[str, list[dict]] = {"dense": [], "sparse": []}
    for seed in (0, 1):
        for name, extra in (("dense", FULL), ("sparse", {})):
            own = {(key, level + seed): 0.5 + level * (name == "sparse") for key, level in samples}
            losses[name].append(own)
            write_run(tmp_path / f"{name}-seed{seed}", seed=seed, loss=0.4, sample_losses=own, **extra)
    write_run(tmp_path / "short-seed0", loss=0.5, sparsity__sparsity=0.5, sample_losses={("s1", 0.1): 1.0}, seconds=0.2)
    by_name = {variant.name: variant for variant in compared(group(find_runs([tmp_path])[1]))}
    expected = paired_difference(losses["sparse"], losses["dense"])
    assert expected is not None
    assert expected.mean == pytest.approx(0.3)
    assert by_name["sparse"].difference == expected
    assert by_name["sparse"].p_holm == expected.p
    assert by_name["dense"].difference is None
    # validated on other samples
    assert by_name["short"].difference is None
    assert [by_name[name].best_trade for name in ("dense", "sparse", "short")] == [True, True, False]


def test_unfinished_runs_do_not_count_where_others_finished(tmp_path):
    write_run(tmp_path / "a-seed0", loss=0.4)
    write_run(tmp_path / "a-seed1", seed=1, loss=0.2, steps=20, trainer__max_steps=40)
    (variant,) = group(find_runs([tmp_path])[1])
    assert (variant.loss, variant.status, len(variant.runs)) == (0.4, "1 stopped", 2)
    (tmp_path / "a-seed0" / "metrics.csv").write_text("step,train/loss\n4,1.0\n")
    (variant,) = group(find_runs([tmp_path])[1])
    assert variant.losses == [0.2]


def test_a_training_loss_stands_in_for_no_validation(tmp_path):
    for name in ("a-seed0", "a-seed1"):
        (write_run(tmp_path / name, seed=int(name[-1])) / "metrics.csv").write_text("step,train/loss\n4,1.0\n40,0.1\n")
    (variant,) = group(find_runs([tmp_path])[1])
    assert variant.losses == []
    assert variant.loss is None
    write_run(tmp_path / "b-seed0", loss=0.9, sparsity__sparsity=0.5)
    variants = group(find_runs([tmp_path])[1])
    assert [variant.loss for variant in variants] == [0.9, None]
    assert [row[1].text for row in variant_table(variants).rows] == ["0.9", "missing"]


def test_copies_of_a_run_are_no_seeds(tmp_path):
    for name, seed, loss in (("a", 0, 0.4), ("a-again", 0, 0.6), ("a-copy", 0, 0.5), ("other", 1, 0.7)):
        write_run(tmp_path / name, seed=seed, loss=loss)
    (variant,) = group(find_runs([tmp_path])[1])
    assert len(variant.runs) == 4
    assert variant.losses == pytest.approx([0.5, 0.7])
    assert variant.std == pytest.approx(0.2 / 2**0.5)
    assert variant.status == "2 more of the same seed"
    (row,) = variant_table([variant]).rows
    assert (row[4].text, row[4].sub) == ("2", "2 more of the same seed")


def test_the_best_rate_is_not_chosen_by_training_losses(tmp_path):
    for name, lr, loss in (("low", 0.1, 0.2), ("high", 0.2, 0.4)):
        run = write_run(tmp_path / name, loss=loss, optim__lr=lr)
        write_run(tmp_path / f"b-{name}", loss=loss, optim__lr=lr, sparsity__sparsity=0.5)
        (run / "metrics.csv").write_text(f"step,train/loss\n4,{loss}\n")
    found = group(find_runs([tmp_path])[1])
    assert [(variant.loss, len(variant.tried)) for variant in found] == [(0.2, 2), (None, 0)]


def test_a_run_that_diverged_comes_last(tmp_path):
    write_run(tmp_path / "a", loss=0.4)
    write_run(tmp_path / "b", loss=0.3, sparsity__sparsity=0.5, seconds=0.01)
    metrics = (tmp_path / "b" / "metrics.csv").read_text()
    (tmp_path / "b" / "metrics.csv").write_text(metrics.replace("0.3,0.15", "nan,nan"))
    a, b = compared(group(find_runs([tmp_path])[1]))
    assert (a.name, a.loss, a.best_trade) == ("a", 0.4, True)
    assert (b.loss, b.finite_loss, b.std, b.best_trade) == (math.inf, None, None, False)


def test_code_versions_are_counted(tmp_path):
    write_run(tmp_path / "a", commits=("0123abc", "4567def+"))
    write_run(tmp_path / "b", commits=(None,))
    (write_run(tmp_path / "c") / "run.json").unlink()
    versions = code_versions(find_runs([tmp_path])[1])
    assert versions == {"0.1.0 (0123abc)": 1, "0.1.0 (4567def+)": 1, "0.1.0": 1, "unknown version": 1}


def test_what_was_spent_up_to_a_step(tmp_path):
    write_run(tmp_path / "a", steps=40, every=4, flops=3.0, seconds=0.5, tokens=100.0)
    (run,) = find_runs([tmp_path])[1]
    assert run.val[0].tolist() == [20, 40]
    expected = {"flops": [60.0, 120.0], "tokens": [2000.0, 4000.0], "seconds": [10.0, 20.0]}
    for what, values in expected.items():
        costs = run.spent(what, run.val[0])
        assert costs is not None
        assert costs.tolist() == pytest.approx(values), what
    (tmp_path / "a" / "metrics.csv").write_text("step,train/loss\n4,1.0\n")
    assert find_runs([tmp_path])[1][0].spent("flops", run.val[0]) is None
    assert (run.step_seconds, run.tokens_per_step) == (0.5, pytest.approx(100.0))
