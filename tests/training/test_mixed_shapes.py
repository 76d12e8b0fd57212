"""Images beside video in one plan, shapes and bands that differ, and the scale that latents of a run share."""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.encoding import encode_folder
from vsa.data.codecs import HaarCodec
from vsa.data.text import HashedNgramEncoder
from vsa.data.toy_videos import ToyClips, write_toy_videos
from vsa.data.video_files import write_video


class Shapes(L.Callback):
    def __init__(self) -> None:
        self.found: list[tuple[int, ...]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(tuple(batch.latents.shape[1:]))


def test_images_train_beside_video_in_one_plan(training, tmp_path):
    rng = np.random.default_rng(0)
    folder = tmp_path / "in"
    folder.mkdir()
    lines = []
    for i in range(6):
        write_video(folder / f"clip{i}.mp4", torch.from_numpy(rng.integers(0, 255, (8, 32, 32, 3), dtype=np.uint8)))
        lines.append(json.dumps({"video": f"clip{i}.mp4", "captions": ["a clip"]}))
        Image.fromarray(rng.integers(0, 255, (64, 32, 3), dtype=np.uint8)).save(folder / f"still{i}.png")
        lines.append(json.dumps({"video": f"still{i}.png", "captions": ["a still"]}))
    (folder / "captions.jsonl").write_text("\n".join(lines))
    encode_folder(folder, tmp_path / "shards", codec=HaarCodec(), text_encoder=HashedNgramEncoder())
    common = (
        *("~data", "~data.toy.size", "~data.toy.count", "data=folder", f"data.root={tmp_path / 'shards'}"),
        *("data.num_workers=0", "data.val_fraction=0", "data.batch_size=2", "trainer.max_steps=6"),
    )
    shapes, again = Shapes(), Shapes()
    training(*common, callbacks=(shapes,))
    assert set(shapes.found) == {(16, 2, 4, 4), (16, 1, 8, 4)}
    assert all(math.isfinite(float(loss)) for loss in training.losses().values())
    # the order of shapes belongs to the plan
    training(*common, "run=again", callbacks=(again,))
    assert again.found == shapes.found
    assert training.losses("again") == training.losses()


def test_shared_latent_scale_is_the_root_mean_square_of_the_channels(training):
    training("trainer.max_steps=1", "run=channel")
    training("trainer.max_steps=1", "run=shared", "task.latent_scale=shared")
    channel = np.array(training.last("channel").state["latent_std"])
    shared = training.last("shared").state["latent_std"]
    assert len(set(shared)) == 1
    assert shared[0] == pytest.approx(math.sqrt((channel**2).mean()), rel=1e-6)
    assert channel.std() > 0.1 * channel.mean()


def test_odd_clips_train_with_the_settings_that_encoding_prints(training, command_line, tmp_path):
    # 9 x 5 cells as they are
    write_toy_videos(ToyClips(count=2, size=(8, 72, 40)), tmp_path / "clips")
    arguments = (str(tmp_path / "clips"), str(tmp_path / "shards"), "--channels", "24", "--text-dim", "48")
    status, out, err = command_line("encode", *arguments, "--max-tokens", "9")
    assert status == 0, err
    assert "latents cropped to divide into the 2x2 patches of models: 2 from 9x5 to 8x4" in out
    command = shlex.split(out.splitlines()[-1].partition("to train on them: ")[2])
    assert command[:2] == ["vsa", "train"]
    assert "data.codec.channels=24" in command
    shapes = Shapes()
    rest = ("data.num_workers=0", "data.val_fraction=0", "data.batch_size=2", "trainer.max_steps=1")
    training("~data", "~data.toy.size", "~data.toy.count", *command[2:], *rest, callbacks=(shapes,))
    assert shapes.found == [(24, 2, 8, 4)]
