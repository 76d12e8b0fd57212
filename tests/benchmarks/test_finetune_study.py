"""`experiment=finetune_toy`: the experiment itself in small, and the script that compares its arms."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.toy import finetune, study
from vsa.checkpoints.run_checkpoint import latest_checkpoint


@pytest.mark.slow
def test_finetune_toy_ends_at_the_exact_count_and_the_loss_falls(training):
    # wide enough to learn something in 44 steps
    size = ("model.num_attention_heads=2", "model.attention_head_dim=24", "model.ffn_dim=96")
    common = ("name=pretrain", "callbacks.samples=null", *size)
    # as the header of the experiment names it
    dense = ("experiment=quickstart", "attention=full", "~attention.tile_thw", "optim.lr=0.003")
    training(*common, *dense, "run=dense", "trainer.max_steps=8")
    # 87.5% of 8 tiles, in 3 stairs of 2 and a last one of 1
    stairs = ("~sparsity.sparsity", "sparsity.dense_steps=6", "sparsity.interval=5", "trainer.max_steps=44")
    toy = (*common, "experiment=finetune_toy", *stairs, f"init_from={training.folder('dense')}")
    training(*toy, "run=toy", "optim.lr=0.005")
    config = training.last("toy").state["config"]
    assert config["sparsity"]["_target_"].endswith("StaircaseSparsity")
    assert (config["sparsity"]["sparsity"], config["sparsity"]["tiles"]) == (0.875, 2)
    assert config["attention"]["gate_init"] == "identity"
    metrics = training.metrics("toy")
    topk = [int(float(metrics[step]["sparsity/topk"])) for step in sorted(metrics)]
    assert [(k, len(list(steps))) for k, steps in groupby(topk)] == [(8, 6), (6, 5), (4, 5), (2, 5), (1, 23)]

    def fall(run: str) -> float:
        rows = training.metrics(run)
        losses = [float(rows[step]["train/loss"]) for step in sorted(rows)]
        return 1 - sum(losses[-12:]) / sum(losses[:12])

    assert fall("toy") > 0.15
    # control: annealed without learning
    training(*toy, "run=still", "optim.lr=1e-9")
    assert abs(fall("still")) < 0.1


@pytest.mark.slow
def test_the_script_compares_the_arms_and_keeps_finished_runs(
    training, tmp_path: Path, tiny_overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    # those of single arms: tiles of the sparse ones, schedules, the script's own
    left_out = ("attention.tile_thw", "sparsity.sparsity", "trainer.max_steps", "trainer.val_check_interval")
    tiny = [o for o in tiny_overrides if o.partition("=")[0] not in left_out]
    out = tmp_path / "compare"
    # 4 tiles; annealing takes its first stair in step 51
    command = [str(out), "--seeds", "3", "--pretrain-steps", "6", "--steps", "52", "--jobs", "2"]
    command += [*tiny, "sparsity.sparsity=0.75", "trainer.val_check_interval=2"]
    finetune.main(command)
    comparison = json.loads((out / "compare.json").read_text())
    arms = ["dense", "annealed", "at once", "velocity"]
    arms += [f"tail {name} {how}" for name in ("1", "2", "2 mass") for how in ("at once", "annealed")]
    assert (comparison["seeds"], comparison["steps"], list(comparison["end"])) == ([3], 52, arms)
    for arm in arms:
        (curve,) = comparison["curves"][arm]
        assert curve["step"][-1] == curve["topk_step"][-1] == 52
        assert comparison["end"][arm] == [curve["val_loss"][-1]]
        folder = out / "seed-3" / arm.replace(" ", "-")
        assert latest_checkpoint(folder / "checkpoints").state["config"]["init_from"].endswith("seed-3/pretrained")
    topks = {arm: comparison["curves"][arm][0]["topk"] for arm in arms}
    assert set(topks["at once"]) == {1}
    assert topks["annealed"] == topks["velocity"]
    assert (topks["annealed"][0], topks["annealed"][-1]) == (4, 2)
    # arms that share all but one setting still differ
    assert len({*(comparison["end"][arm][0] for arm in arms), *comparison["pretrained"]}) == len(arms) + 1
    assert Image.open(out / "compare.png").size[0] > 400

    mtimes = {path: path.stat().st_mtime_ns for path in out.rglob("state.json")}
    assert len(mtimes) > len(arms)

    def refuse(*_, **__):
        raise AssertionError("a finished run was trained again")

    with monkeypatch.context() as patch:
        patch.setattr(study, "_job", refuse)
        finetune.main(command)
        assert json.loads((out / "compare.json").read_text()) == comparison
        # control: one of other steps is no finished one
        with pytest.raises(AssertionError, match="trained again"):
            finetune.main([*command[:6], "53", *command[7:]])
    assert {path: path.stat().st_mtime_ns for path in out.rglob("state.json")} == mtimes


def test_bad_input_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for option in ("--jobs", "--steps", "--pretrain-steps"):
        with pytest.raises(ValueError, match="must be at least 1"):
            finetune.main([str(tmp_path), option, "0"])

    # one that fails does not stop the others, and the first of them is named
    monkeypatch.setattr(study, "ROOT", tmp_path)
    (tmp_path / "train.py").write_text("import sys; open(sys.argv[1], 'w'); sys.exit('error: it is broken')")
    runs = {tmp_path / name: (1, [str(tmp_path / f"{name}-began")]) for name in "ab"}
    with pytest.raises(ValueError, match=r"training \S*/a failed \(it is broken\), see \S*/a\.log"):
        study.train(runs, 1)
    assert (tmp_path / "b-began").exists()
