"""The score of toy clips as a user asks for it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.toy import score
from vsa.data.codecs import HaarCodec


def test_score_writes_scores_beside_chance_and_codec(tiny_run_dir: Path, tmp_path: Path, capsys, monkeypatch):
    common = [
        str(tiny_run_dir),
        "--clips",
        "6",
        "--steps",
        "1",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "score.json"),
    ]
    score.main(common)
    scores = json.loads((tmp_path / "score.json").read_text())
    assert scores["chance"] == {"colour": 1 / 6, "direction": 1 / 4, "shape": 1 / 4}
    codec = scores["codec_reconstructions"]
    assert (codec["colour"], codec["direction"]) == (1, 1)
    # clips of this size have too few pixels for shapes
    assert 0 <= codec["shape"] <= 1
    assert 0 <= scores["model"]["colour"] <= 1
    assert scores["settings"]["steps"] == 1
    output = capsys.readouterr().out
    assert "16.7%" in output
    assert "25.0%" in output
    for name in scores["chance"]:
        with pytest.raises(ValueError, match=rf"{name} is right in .* below the required 101\.0%"):
            score.main([*common, f"--min-{name}", "1.01"])
    # NaN is below everything
    monkeypatch.setattr(score, "score", lambda *_: {**scores["model"], "direction": math.nan})
    with pytest.raises(ValueError, match=r"direction is right in nan%"):
        score.main(common)


def test_score_samples_each_run_in_its_way(write_tiny_run, tiny_config, tmp_path: Path, monkeypatch):
    calls = []
    generate = score.generate

    def record_call(run, prompts, settings, progress):
        calls.append((settings.steps, settings.step_list, settings.guidance, settings.flow_shift))
        return generate(run, prompts, settings, progress)

    monkeypatch.setattr(score, "generate", record_call)
    samples = {"steps": 7, "guidance": 2.5, "flow_shift": 4.0}
    config = {**tiny_config(), "callbacks": {"samples": samples}}
    for name, step_list in (("many", None), ("few", (1000.0, 500.0))):
        run = write_tiny_run(tmp_path / name, config=config, step_list=step_list, with_ema=step_list is None)
        score.main([str(run), "--clips", "1", "--device", "cpu"])
    assert calls == [(32, None, 1.0, 4.0), (2, (1000.0, 500.0), 1.0, 1.0)]
    settings = json.loads((tmp_path / "few" / "score.json").read_text())["settings"]
    # a run without averages, as a merged one is
    assert (settings["weights"], settings["step_list"]) == ("model", [1000, 500])
    score.main([str(tmp_path / "few"), "--clips", "1", "--device", "cpu", "--guidance", "3"])
    assert calls[-1] == (2, (1000.0, 500.0), 3.0, 1.0)


def test_score_refuses_a_run_of_other_videos(write_tiny_run, tiny_config, tmp_path: Path):
    config = tiny_config()
    config["data"] |= {"toy": None, "root": "shards"}
    command = [str(write_tiny_run(tmp_path / "run", config=config)), "--clips", "1", "--steps", "1", "--device", "cpu"]
    with pytest.raises(ValueError, match=r"run/checkpoints/step-0*7 was not trained on the toy clips .*--any-data"):
        score.main(command)
    assert not (tmp_path / "run" / "score.json").exists()
    score.main([*command, "--any-data"])
    assert (tmp_path / "run" / "score.json").is_file()


def test_score_tells_right_clips_from_wrong_ones():
    videos, captions = score.reconstructions(HaarCodec(), 12, 0, (16, 128, 128))
    assert score.score(videos, captions) == {"colour": 1.0, "direction": 1.0, "shape": 1.0}
    reverse = [video.flip(0) for video in videos]
    assert score.score(reverse, captions) == {"colour": 1.0, "direction": 0.0, "shape": 1.0}
    upside_down = [video.flip(1) for video in videos]
    triangles = sum("triangle" in caption for caption in captions)
    # a triangle on its tip is none of the shapes; the others look the same upside down
    assert score.score(upside_down, captions)["shape"] == 1 - triangles / len(captions)
    grey = [torch.full_like(video, 30) for video in videos]
    assert score.score(grey, captions) == {"colour": 0.0, "direction": 0.0, "shape": 0.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "8"], r"steps 8 does not apply to .*: it is distilled to the timesteps \[1000\.0, 500\.0\]"),
        (["--shift", "3"], r"flow_shift 3\.0 does not apply to .*\[1000\.0, 500\.0\]"),
    ],
)
def test_steps_of_a_distilled_run_cannot_be_changed(write_tiny_run, tmp_path: Path, arguments, message):
    run = write_tiny_run(tmp_path / "run", step_list=(1000.0, 500.0))
    with pytest.raises(ValueError, match=message):
        score.main([str(run), "--out", str(tmp_path / "out"), "--device", "cpu", *arguments])
    assert not (tmp_path / "out").exists()
