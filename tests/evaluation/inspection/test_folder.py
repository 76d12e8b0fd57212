"""`vsa inspect` on files: what it reads, what it writes, what it refuses in one line."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.commands import run_command
from tests.evaluation.inspection.conftest import inspect_on_cpu
from vsa.cli import main
from vsa.cli.inspect import inspect
from vsa.data.toy_videos import render_clip
from vsa.data.video_files import write_gif, write_video
from vsa.evaluation.inspection.clip import open_clip
from vsa.evaluation.inspection.folder import left_out
from vsa.evaluation.inspection.metrics import HEAD_METRICS
from vsa.sampling.pipeline import load_run

FILES = {
    *("inspect.html", "inspection.json", "heads.csv", "layers.csv", "tiles.csv"),
    *("selected.png", "layers.png", "gates.png", "popularity.png"),
}


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clip longer, larger and wider than what the tiny run was trained on."""
    clips = tmp_path_factory.mktemp("clips")
    video, _, _ = render_clip(0, 1, size=(20, 96, 144))
    write_video(clips / "a.mp4", video)
    (clips / "a.txt").write_text("a <b>red</b> circle\n\nanother caption\n")
    return clips / "a.mp4"


@pytest.fixture(scope="module")
def inspected(tiny_run_dir: Path, clip: Path) -> Path:
    run_command(inspect, tiny_run_dir, clip, "--timesteps", "800,300", "--device", "cpu")
    return tiny_run_dir / "inspect"


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_what_is_written(inspected: Path):
    assert {path.name for path in inspected.iterdir()} == FILES
    for picture in inspected.glob("*.png"):
        assert np.asarray(Image.open(picture).convert("L")).std() > 5
    record = json.loads((inspected / "inspection.json").read_text())
    assert record["caption"] == "a <b>red</b> circle"
    assert (record["step"], record["weights"], record["topk"], record["num_tiles"]) == (7, "ema", 2, 8)
    assert (record["timesteps"], record["layers"], record["grid_thw"]) == ([800, 300], [0, 1], [4, 4, 4])
    assert set(record["tables"]) == set(record["meanings"]) == set(HEAD_METRICS)
    heads, layers, tiles = (rows(inspected / f"{name}.csv") for name in ("heads", "layers", "tiles"))
    assert [(row["timestep"], row["layer"], row["head"]) for row in heads] == [
        (t, y, h) for t in ("800", "300") for y in "01" for h in "01"
    ]
    for row in heads:
        at = (["800", "300"].index(row["timestep"]), int(row["layer"]), int(row["head"]))
        for name in HEAD_METRICS:
            value = record["tables"][name][at[0]][at[1]][at[2]]
            assert row[name] == ("" if value is None else repr(value))
        assert float(row["recall_random"]) == 0.25
    # the first timestep has none before it
    assert [row["overlap_steps"] == "" for row in heads] == [True] * 4 + [False] * 4
    for row in layers:
        same = [float(r["recall"]) for r in heads if (r["timestep"], r["layer"]) == (row["timestep"], row["layer"])]
        assert float(row["recall"]) == pytest.approx(sum(same) / 2, rel=1e-3)
    assert len(tiles) == 16
    # every query tile lists 2 of the 8 tiles
    assert math.fsum(float(row["lists_mean"]) for row in tiles) == pytest.approx(2 * 8 * 2)
    assert {(r["first_t"], r["first_h"], r["first_w"]) for r in tiles if r["layer"] == "0"} == {
        (t, h, w) for t in "02" for h in "02" for w in "02"
    }


def test_a_clip_is_cut_to_what_was_trained(tiny_run_dir: Path, clip: Path, tmp_path: Path):
    run = load_run(tiny_run_dir, device="cpu")
    sample = open_clip(run, str(clip))
    assert sample.video.shape == (16, 64, 64, 3)
    assert sample.latents.shape == (16, 4, 8, 8)
    assert torch.equal(sample.latents, run.codec.encode(sample.video))
    assert sample.caption == "a <b>red</b> circle"
    video, _, _ = render_clip(0, 2, size=(16, 64, 64))
    write_gif(tmp_path / "b.gif", video)
    sample = open_clip(run, str(tmp_path / "b.gif"), "given")
    assert (sample.caption, sample.name) == ("given", "b.gif")
    # the same size: GIF's colours are all that changed
    assert (sample.video.int() - video.int()).abs().float().mean() < 6


def test_a_sample_of_the_runs_data(write_tiny_run, tiny_config, tmp_path: Path):
    config = tiny_config()
    data = {**config["data"], "_target_": "vsa.data.datamodule.ToyOnlineDataModule", "batch_size": 2}
    data["toy"] = {**data["toy"], "count": 3}
    run = load_run(write_tiny_run(tmp_path / "run", config={**config, "data": data}), device="cpu")
    sample = open_clip(run, "toy-0-00000002")
    expected = run.codec.encode(render_clip(0, 2, size=(16, 64, 64))[0])
    assert torch.equal(sample.latents, expected)
    assert torch.equal(sample.video, run.codec.decode(expected))
    assert sample.caption
    with pytest.raises(ValueError, match=r"'toy-9' is neither a video file nor one of the 3 .* toy-0-00000000"):
        open_clip(run, "toy-9")


@pytest.mark.usefixtures("no_pictures")
def test_repeated_it_replaces_its_own_files_only(inspected: Path, tiny_run_dir: Path, clip: Path, tmp_path: Path):
    before = json.loads((inspected / "inspection.json").read_text())
    inspect_on_cpu(tiny_run_dir, clip, timesteps=[800, 300])
    assert json.loads((inspected / "inspection.json").read_text()) == before
    (tmp_path / "layers.csv").write_text("mine")
    with pytest.raises(ValueError, match=r"layers\.csv is not from `vsa inspect`"):
        inspect_on_cpu(tiny_run_dir, clip, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["layers.csv"]


@pytest.mark.usefixtures("no_pictures")
def test_a_secret_reaches_no_file(tiny_run_dir: Path, clip: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "red</b> circle")
    run_command(
        inspect, tiny_run_dir, clip, "--out", tmp_path / "out", "--timesteps", "500", "--layers", "1",
        "--heads", "0", "--queries", "1", "--device", "cpu",
    )  # fmt: skip
    assert json.loads((tmp_path / "out" / "inspection.json").read_text())["caption"] == "a <b><secret>"
    assert "circle" not in (tmp_path / "out" / "inspect.html").read_text()


def test_what_the_page_leaves_out_is_told(tiny_run_dir: Path, clip: Path, tmp_path: Path, capsys):
    run_command(
        inspect, tiny_run_dir, clip, "--out", tmp_path / "out", "--timesteps", "500", "--layers", "1",
        "--heads", "0", "--queries", "1,6", "--device", "cpu",
    )  # fmt: skip
    output = capsys.readouterr().out
    assert "The page draws 1 of 2 heads, 2 of 8 query tiles; --layers, --heads, --queries and --megabytes" in output
    assert re.search(r"recall \d+\.\d%, random tiles 25\.0%", output)
    assert [row["layer"] for row in rows(tmp_path / "out" / "layers.csv")] == ["1"]
    page = (tmp_path / "out" / "inspect.html").read_text()
    # the control of the test before
    assert "circle" in page
    assert '"shown":{"layers":[1],"heads":[0],"queries":[1,6]}' in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.mp4"], "no such video: nothing.mp4"),
        (["no/folder/sample"], "no such video: no/folder/sample"),
        (["some-id"], "'some-id' is neither a video file nor a sample id (run RUN"),
        (["CLIP", "--layers", "0,7"], "--layers: RUN has layers 0 to 1, got 7"),
        (["CLIP", "--heads", "2"], "--heads: RUN has heads 0 to 1, got 2"),
        (["CLIP", "--queries", "8,-1"], "--queries: RUN has queries 0 to 7, got 8, -1"),
        (["CLIP", "--layers", "one"], "--layers: expected int values with commas between them, got one"),
        (["CLIP", "--timesteps", "0.5,1001"], "--timesteps must be in [0, 1000], got 1001"),
        (["CLIP", "--topk", "9"], "topk 9 is above the number of tiles 8"),
        (["CLIP", "--pipeline", "WAN"], "--pipeline WAN applies to exports only, got the run RUN"),
        (["short.mp4"], "video short.mp4 (5 frames of 64x64) is too small for the buckets"),
        (["silent.mp4"], "video silent.mp4 has no caption: expected one in silent.txt; --caption gives one"),
        (["text.mp4"], "cannot decode video text.mp4"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(arguments, message, tiny_run_dir: Path, clip: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    video, _, _ = render_clip(0, 1, size=(16, 64, 64))
    if arguments == ["short.mp4"]:
        write_video(tmp_path / "short.mp4", video[:5])
        Path("short.txt").write_text("a caption")
    if arguments == ["silent.mp4"]:
        write_video(tmp_path / "silent.mp4", video)
    if arguments == ["text.mp4"]:
        Path("text.mp4").write_text("no video")
        Path("text.txt").write_text("a caption")
    words = [str(clip) if word == "CLIP" else word for word in arguments]
    with pytest.raises(SystemExit) as exit_info:
        main(["inspect", str(tiny_run_dir), *words, "--out", "out", "--device", "cpu"])
    assert exit_info.value.code == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert error[0].startswith("error: ")
    assert message.replace("RUN", str(tiny_run_dir)) in error[0]
    assert not Path("out").exists()


def test_dense_attention_and_a_missing_checkpoint(write_tiny_run, clip: Path, tmp_path: Path):
    dense = write_tiny_run(tmp_path / "dense", attention="full")
    with pytest.raises(ValueError, match=f"{dense} attends with FullAttention, which selects no tiles"):
        inspect_on_cpu(dense, clip)
    assert not (dense / "inspect").exists()
    with pytest.raises(ValueError, match="missing"):
        inspect_on_cpu(tmp_path / "missing", clip)


@pytest.mark.usefixtures("no_pictures")
def test_all_tiles_kept_miss_nothing(tiny_run_dir: Path, clip: Path, tmp_path: Path):
    _, inspection, note = inspect_on_cpu(tiny_run_dir, clip, out=tmp_path / "out", timesteps=[500], topk=8)
    assert note == left_out(inspection, num_layers=2) == ""
    for name in ("recall", "recall_random", "pair_overlap", "four_overlap"):
        torch.testing.assert_close(inspection.table(name), torch.ones(1, 2, 2))
