"""Relative paths in a run's settings lead to the same files from any working directory."""

from __future__ import annotations

import shutil

from tests.tiny_runs import training  # noqa: F401
from vsa.checkpoints.run_checkpoint import resolve_checkpoint
from vsa.checkpoints.run_weights import RunWeights
from vsa.config import build


def test_a_run_is_used_from_elsewhere(training, tmp_path, monkeypatch):  # noqa: F811
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    monkeypatch.chdir(here)
    training(
        "data=toy", "data.root=s", "data.videos=v", "data.toy.count=8", "output_dir=outputs", "trainer.max_steps=1"
    )
    checkpoint = resolve_checkpoint("outputs/pretrain/default")
    # in its own folder nothing changes but the revision of its data, and no file holds the place
    config = checkpoint.state["config"]
    assert checkpoint.config == {**config, "data": {**config["data"], "revision": 1}}
    for name in ("run.json", "config.yaml", "metrics.csv"):
        assert str(tmp_path) not in (here / "outputs/pretrain/default" / name).read_text()
    assert str(tmp_path) not in (checkpoint.path / "state.json").read_text()
    monkeypatch.chdir(there)
    # a folder of the same name is another one
    (there / "s").mkdir()
    for place in (here, tmp_path / "moved"):
        if place != here:
            shutil.move(here, place)
        weights = RunWeights(resolve_checkpoint(place / "outputs" / "pretrain" / "default"))
        data = weights.run_config["data"]
        assert [data["root"], data["videos"]] == [str(place / "s"), str(place / "v")]
        module = build(data)
        module.setup()
        assert sum(module.buckets.values()) > 0
    # a run that does not say where it was started is read as before
    (place / "outputs/pretrain/default/run.json").write_text("{}")
    assert resolve_checkpoint(place / "outputs/pretrain/default").config["data"]["root"] == "s"
