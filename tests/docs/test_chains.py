"""The pages' commands go on: each one is typed as it stands or as the one before has printed it, in order."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

from tests.data.test_ltx import make_ltx_vae
from tests.docs.pages import FENCE, ROOT, Command, commands_of
from tests.docs.test_commands import composed, settings_of
from tests.docs.typist import WAN, Typist, lay_out
from tests.tiny_runs import command_line  # noqa: F401
from vsa.config import build, model_factory
from vsa.data.codecs import LtxVAE
from vsa.data.encoders import SENTENCE_SETTINGS, EncoderChoice
from vsa.data.video_files import read_video, write_video
from vsa.models.init import without_memory

CLIPS = 8


def page(name: str) -> list[Command]:
    """The commands of `vsa` and of benchmarks on a page, but those that only look at the machine."""
    text = (ROOT / name).read_text(encoding="utf-8")
    script = "\n".join(body for language, body in FENCE.findall(text) if language == "bash")
    return [c for c in commands_of(script, name) if c.words[0] in ("vsa", "python") and "venv" not in c.words]


@pytest.fixture
def typist(tmp_path, monkeypatch, command_line, caplog):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")
    return Typist(tmp_path, command_line, caplog)


def test_the_quickstart_and_the_readme(typist):
    listing = page("docs/quickstart.md")
    readme = [c for c in page("README.md") if c.words[1] in ("train", "sample", "report")]
    # the quickstart types what the README types, and more
    assert len(readme) == 3
    assert {c.words for c in readme} <= {c.words for c in listing}
    for command in listing:
        for printed in typist(command):
            typist(printed)
    run = typist.folder / "outputs" / "quickstart" / "default"
    # what the page and both trainings say to sample; nothing replaced the clips of another call
    folders = sorted(run.glob("samples*/samples.json"))
    assert [path.parent.name for path in folders] == ["samples", "samples-2", "samples-3", "samples-4"]
    prompts = [json.loads(path.read_text())["clips"][0]["prompt"] for path in folders]
    assert prompts == [*["a red circle moving left slowly"] * 2, "a green square moving up slowly", prompts[0]]
    assert all(path.with_name("contact_sheet.png").is_file() for path in folders)
    assert list(run.rglob("report.html"))
    assert list(run.rglob("inspect.html"))
    # control: a command that cannot run is noticed
    with pytest.raises(AssertionError, match="other"):
        typist("vsa sample outputs/quickstart/other --prompt x")


@pytest.mark.slow
def test_own_videos(typist):
    lay_out(typist.folder, clips=CLIPS)
    for command in page("docs/own-videos.md"):
        line = shlex.join(command.words)
        if command.trains:
            # the page shows what encoding has printed, for captions of hashed n-grams
            printed = [{*shlex.split(typed)} - {*SENTENCE_SETTINGS} for typed in typist.typed]
            assert {*command.words} in printed, line
        elif "--model" in command.words:
            (train,) = typist(command)
            typist(train, "callbacks.samples=null")
        elif "FILMS" in command.words:
            # one film of all clips; the network that finds cuts takes seconds, see tests/data/test_films.py
            clips = [read_video(path)[0] for path in sorted((typist.folder / "VIDEOS").glob("*.mp4"))]
            write_video(typist.folder / "FILMS" / "film.mp4", torch.cat(clips))
            (typist.folder / "FILMS" / "film.txt").write_text("a film of shapes")
            typist(command, "--shots", "none")
        else:
            for train in typist(command):
                (sample,) = typist(train)
                typist(sample)
    assert (typist.folder / "EXPORT" / "config.json").is_file()
    typist("vsa convert EXPORT BACK --to run")
    # a run where weights are expected is told how it becomes such
    status, _, err = typist.command_line(
        "sample", "--pipeline", WAN, "--transformer", "outputs/own_videos/default", "--prompt", "x", "--device", "cpu"
    )
    assert status == 1
    assert "outputs/own_videos/default is a run of this project: " in err
    assert "vsa convert outputs/own_videos/default EXPORT --to diffusers" in err


GRIDS = [(4, 16, 16), (2, 8, 8), (1, 2, 2)]
OTHER_GRIDS = [(16, 64, 64), (21, 60, 104), (1, 16, 16), (1, 8, 8)]


@pytest.mark.parametrize(
    "shape", [*GRIDS, *(pytest.param(grid, marks=pytest.mark.slow) for grid in OTHER_GRIDS)], ids=str
)
def test_encode_prints_tiles_and_sparsity_of_its_grid(shape):
    for encoders in (EncoderChoice(), EncoderChoice(channels=24, text_dim=32, max_tokens=8), EncoderChoice(model="x")):
        words = encoders.training_settings("a", "b", {(16, *shape), (16, 1, 2, 2)})
        cfg = composed(*settings_of(words))
        with without_memory():
            model = model_factory(cfg)()
        tiles = model.layout_for((model.in_channels, *shape)).num_video_tiles
        if model.selects:
            assert tiles >= 4
            kept = cfg.sparsity.get("topk") or (1 - cfg.sparsity.sparsity) * tiles
            assert 1 <= kept <= tiles / 2
        else:
            assert shape == (1, 2, 2)


PLACES = ["a b", "it's", "~x", "a=b,c", "[x]{y}", "ä/字", "$x${y}", "123", "null", "back\\slash\\", "a\\'b"]


@pytest.mark.parametrize("place", PLACES)
def test_printed_paths_are_read_back(place):
    words = shlex.split(shlex.join(EncoderChoice(model=place).training_settings(place, place, {(16, 4, 16, 16)})))
    cfg = composed(*words)
    assert [cfg.data.root, cfg.data.videos, cfg.data.codec.source, cfg.init_from] == [place] * 4


def test_the_training_on_latents_of_a_vae_alone(tmp_path: Path):
    place = str(tmp_path / "a b")
    make_ltx_vae().save_pretrained(place)
    words = shlex.split(shlex.join(EncoderChoice(vae=place).training_settings("a", "b", {(8, 2, 4, 4)})))
    cfg = composed(*words)
    assert build(cfg.data.codec).hash == LtxVAE(place).hash
    assert (cfg.model.in_channels, cfg.model.out_channels, cfg.task.latent_scale) == (8, 8, "channel")
    # cells of 32 pixels, an odd number of them too
    assert list(cfg.model.patch_size) == [1, 1, 1]
