"""The commands of the world as a user gives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.world import score, speed
from vsa.data.codecs import HaarCodec
from vsa.sampling.sample_writer import write_clips

RECORD = {"codec": {"id": HaarCodec().id, "hash": HaarCodec().hash}, "step": 3}


def test_a_folder_of_clips_is_scored_beside_codec_and_chance(tmp_path: Path, capsys) -> None:
    clips, captions = score.unseen_clips(2, 5, (16, 128, 128)), score.unseen_captions(2, 5)
    write_clips(tmp_path / "clips", captions, torch.stack(clips), RECORD)
    score.main([str(tmp_path / "clips"), "--clips", "2"])
    record = json.loads((tmp_path / "clips" / "score.json").read_text())
    assert record["clips"] == 2
    assert record["settings"]["step"] == 3
    rows = record["scores"]
    assert set(rows) == {"clips", "codec_reconstructions", "rendered", "chance"}
    assert rows["clips"]["colour"] == rows["rendered"]["all"] == 1.0
    assert rows["chance"]["camera"] == 0.2
    assert "20.0%" in capsys.readouterr().out
    write_clips(tmp_path / "other", captions, torch.stack(clips), {"codec": {"id": "wan", "hash": "1"}})
    with pytest.raises(ValueError, match=r"another codec than haar-4x8x8-c16 \(hash 1\): score its run instead"):
        score.main([str(tmp_path / "other")])
    write_clips(tmp_path / "toy", ["a red circle moving left"], torch.stack(clips[:1]), RECORD)
    with pytest.raises(ValueError, match=r"expected a caption such as .* got 'a red circle moving left'"):
        score.main([str(tmp_path / "toy")])


def test_a_run_is_sampled_for_captions_it_has_not_seen(write_tiny_run, tiny_config, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"was not trained in the world: its settings have no data\.world"):
        score.main([str(write_tiny_run(tmp_path / "toy")), "--clips", "1", "--device", "cpu"])
    config = tiny_config()
    config["data"] = {**config["data"], "world": {"grid": [4, 4, 4]}}
    run = write_tiny_run(tmp_path / "run", config=config)
    score.main([str(run), "--clips", "1", "--steps", "1", "--device", "cpu"])
    record = json.loads((run / "score.json").read_text())
    assert (record["settings"]["steps"], record["settings"]["guidance"]) == (1, 3.0)
    assert 0 <= record["scores"]["clips"]["colour"] <= 1


def test_speed_is_measured_at_every_grid(tmp_path: Path) -> None:
    speed.main(
        [
            "--grids",
            "2x4x4",
            "1x2x3",
            "--batch",
            "2",
            "--repeats",
            "1",
            "--device",
            "cpu",
            "--out",
            f"{tmp_path}/s.json",
        ]
    )
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert [row["frames_height_width"] for row in rows] == [[8, 64, 64], [4, 32, 48]]
    assert all(row["latents_ms"] > 0 and row["scene_ms"] > 0 for row in rows)
    with pytest.raises(ValueError, match="expected a grid such as 8x16x16, got '8x8'"):
        speed.main(["--grids", "8x8"])
