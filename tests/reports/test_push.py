"""`vsa push`: what is published, that sampling and training take it back, and what is refused."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.commands import run_command
from tests.reports.fake_hub import TOKEN, FakeHub, Fault, fake_hub, sha
from tests.reports.fake_runs import write_run as write_fake_run
from tests.tiny_runs import make_config, vsa_command
from tests.tiny_runs import write_run as write_tiny_run
from vsa.checkpoints.published import RECORD, weights_to_publish
from vsa.checkpoints.run_checkpoint import resolve_checkpoint
from vsa.cli.push import push as push_command
from vsa.data.codecs import HaarCodec
from vsa.data.shard_writer import ShardWriter
from vsa.data.text import HashedNgramEncoder
from vsa.reports.model_card import own_settings
from vsa.sampling.clip_folder import samples_folder
from vsa.sampling.pipeline import clip_seeds, load_run, sample_latents

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full:UserWarning")

PROMPTS = ("a red | circle", "a *blue* <square>")


def push(*words: object) -> None:
    run_command(push_command, *words)


def latents_of(path: str | Path) -> torch.Tensor:
    run = load_run(path, device="cpu")
    settings = run.settings()
    assert (settings.steps, settings.guidance, run.fps) == (3, 2.0, 8.0)
    return sample_latents(run.model, run.text_encoder, PROMPTS, clip_seeds(4, PROMPTS), settings)


def make_run(folder: Path, *, absolute: bool = False, data: Any = (), **keys: Any) -> Path:
    """A run with curves, clips and random weights; with absolute positions its model has no export."""
    config = {**make_config(), "callbacks": {"samples": {"steps": 3, "guidance": 2.0}}, **keys}
    config["model"]["absolute_positions"] = absolute
    config["data"] |= dict(data)
    write_fake_run(folder, prompts=PROMPTS)
    return write_tiny_run(folder, config=config)


def read_card(folder: Path) -> tuple[dict[str, Any], str]:
    _, front, body = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), body


@pytest.mark.parametrize("absolute", [False, True])
def test_a_pushed_run_is_sampled_and_described(absolute, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_this_is_secret")
    run = make_run(tmp_path / "run", absolute=absolute, init_from="Wan-AI/Wan2.1", task=make_config()["task"])
    push(run, tmp_path / "repo", "--license", "apache-2.0")
    assert capsys.readouterr().out.startswith(f"{run}/checkpoints/step-00000007 (ema weights) in {tmp_path}/repo, with")
    names = {path.name for path in (tmp_path / "repo").iterdir()}
    assert names == {"README.md", "card", RECORD} | (
        {"checkpoints", "run.json"}
        if absolute
        else {
            "config.json",
            "diffusion_pytorch_model.safetensors",
            "sampling.json",
            "sparse_attention.json",
            "golden.safetensors",
        }
    )
    front, body = read_card(tmp_path / "repo")
    assert front == {
        "license": "apache-2.0",
        "library_name": "vsa-train",
        "pipeline_tag": "text-to-video",
        "tags": ["video-diffusion", "sparse-attention", "VideoSparseAttention"],
        "base_model": ["Wan-AI/Wan2.1"],
    }
    for line in (
        "| a red \\| circle | ![](card/clip-0.gif) |",
        "| a \\*blue\\* &lt;square&gt; | ![](card/clip-1.gif) |",
        "| validation loss | 1 at first, 0.5 at the end |",
        "| tiles that are computed | 25.0% at the end |",
        "| steps | 7 |",
        "![loss by step](card/loss.png)",
        'vsa sample repo --prompt "a caption',
    ):
        assert line in body
    for path in (tmp_path / "repo").rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert str(tmp_path).encode() not in content, path
        assert b"hf_this_is_secret" not in content, path
    difference = (latents_of(tmp_path / "repo") - latents_of(run)).abs().max()
    assert difference < 1e-5
    if not absolute:
        return
    # control: the trained weights are others than the averaged ones
    push(run, tmp_path / "model", "--weights", "model")
    assert capsys.readouterr().out.startswith("no --license was given: the model card says unknown\n")
    trained = next((tmp_path / "model").rglob("*model.safetensors")).read_bytes()
    assert trained != next((tmp_path / "repo").rglob("*model.safetensors")).read_bytes()


def test_the_data_are_counted_and_stay(tmp_path):
    with ShardWriter(tmp_path / "shards", codec=HaarCodec(), text_encoder=HashedNgramEncoder()) as writer:
        for i in range(5):
            info = {"source": f"film{i // 2}.mp4", "clip_size": [16, 64, 64], "fps": 4.0}
            writer.add(f"clip{i}", torch.randn(16, 4, 8, 8 + 2 * (i == 4)), ["a private caption"], info)
    run = make_run(tmp_path / "run", data={"root": str(tmp_path / "shards"), "val_fraction": 0.01, "val_least": 2})
    push(run, tmp_path / "repo")
    text = (tmp_path / "repo" / "README.md").read_text()
    for line in (
        "| clips | 5 |",
        "| films | 3 |",
        "| length | about 20 s |",
        "| frames x height x width | 16 x 64 x 64 (4), 16 x 64 x 80 (1) |",
        # by their hash none of five, so that `val_least` decides
        "| held out | 2 of 5 clips (40%) |",
        "| codec | haar-4x8x8-c16 |",
    ):
        assert line in text
    assert "private" not in text
    shutil.rmtree(tmp_path / "shards")
    push(run, tmp_path / "again")
    assert "not counted: the data set" in (tmp_path / "again" / "README.md").read_text()


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[FakeHub]:
    """A hub on this machine; the working folder is an empty one."""
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed: pip install huggingface_hub")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with fake_hub(monkeypatch, tmp_path / "cache") as hub:
        yield hub


def test_a_hub_gets_one_commit_and_gives_the_model_back(hub, tmp_path, capsys, command_line):
    run = make_run(tmp_path / "run", absolute=True)
    push(run, "me/first", "--private", "--dry-run")
    assert hub.requests == []
    assert "  card/clip-1.gif\n" in (text := capsys.readouterr().out)
    assert 'vsa sample me/first --prompt "' in text
    push(run, "me/first", "--private")
    assert hub.repositories["me/first"].private
    assert len(hub.repositories["me/first"].commits) == 2
    assert capsys.readouterr().out.endswith(f"published: {hub.endpoint}/me/first/commit/{sha(1)}\n")
    assert torch.equal(latents_of("me/first"), latents_of(run))
    vsa_command("sample", "me/first", "--prompt", "x", "--device", "cpu", "--steps", "1")
    assert (tmp_path / "here" / "samples" / "000-x.gif").is_file()
    # another model in its place: what the first push wrote is gone, other files stay
    hub.files("me/first")["LICENSE"] = b"mine"
    push(make_run(tmp_path / "other"), "me/first", "--private")
    files = hub.files("me/first")
    assert {"LICENSE", "config.json", "sparse_attention.json"} < set(files)
    assert not any(name.startswith(("checkpoints", "run.json")) for name in files)
    # an upload that fails publishes nothing, and tells no token
    hub.faults["/commit/"] = Fault(413, headers={"X-Error-Message": f"Too Large, sent by {TOKEN}"})
    status, _, err = command_line("push", str(run), "me/first", "--license", "mit", "--private")
    assert status == 1
    assert err.splitlines()[-1].startswith("error: cannot push to me/first, nothing was published: HTTP status 413: ")
    assert TOKEN not in err
    assert hub.files("me/first") == files


@pytest.mark.slow
def test_clips_of_a_pushed_model_are_not_put_into_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "run")
    push(run, "./export")
    push(make_run(tmp_path / "other", absolute=True), "./weights")
    assert samples_folder("export") == samples_folder("weights") == samples_folder("me/m") == Path("samples")
    (checkpoint,) = (tmp_path / "weights" / "checkpoints").iterdir()
    assert samples_folder(checkpoint) == Path("samples")
    assert samples_folder(run) == run / "samples"


def test_the_card_leaves_out_what_says_nothing():
    node = {"_target_": "vsa.attention.video_sparse.VideoSparseAttention", "_partial_": True, "tile_thw": [4, 4, 4]}
    idle = {"layer_idx": 0, "top_p": None, "deviations": None, "block_order": "nested", "score_thw": [2, 2, 2]}
    assert dict(own_settings({**node, **idle})) == {"tile_thw": [4, 4, 4]}
    # control: other values than those of the class
    assert dict(own_settings({**node, "top_p": 0.9, "block_order": "raster"})).keys() == {
        "tile_thw",
        "top_p",
        "block_order",
    }


def test_training_starts_from_a_pushed_run(training, tmp_path):
    same = ("trainer.max_steps=1", "model.absolute_positions=true")
    training(*same)
    push(training.folder(), tmp_path / "pushed")
    for name, spec in (("own", training.folder()), ("from_pushed", tmp_path / "pushed")):
        training(*same, "seed=3", f"run={name}", f"init_from={spec}")
    assert training.losses("own") == training.losses("from_pushed") != training.losses()


NO_TARGETS = (
    *("https://huggingface.co/me/m", "hf://me/m", "huggingface.co/me/m", "Some Owner/bad name!", "me/m/", "m\u00e9/m"),
    *("user@host:path", "git@hf.co:me/m", "C:\\models\\m", "C:/models/m", "s3://bucket/m", "~/m"),
)
LOCAL = {"_target_": "vsa.data.codecs.WanVAE", "source": "/models/wan"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("{tmp}/run", "{tmp}/full"), "{tmp}/full already exists"),
        (("{tmp}/run", "{tmp}/run/run.json"), "{tmp}/run/run.json already exists"),
        (("{tmp}/full", "{tmp}/out"), "{tmp}/full is not a run: expected a run folder with checkpoints"),
        (("{tmp}/nowhere", "{tmp}/out"), "{tmp}/nowhere is not a run: expected a run folder with checkpoints"),
        (("{tmp}/begun", "{tmp}/out"), "no valid checkpoint in {tmp}/begun/checkpoints"),
        (("{tmp}/run", "{tmp}/out", "--license", "My Own"), "--license My Own: expected an identifier of the hub"),
        # below a folder that exists, no name is a hub id
        (
            ("{tmp}/run", "run/out", "--private"),
            "--private applies to repositories of the hub (OWNER/NAME), got the folder",
        ),
        (("{tmp}/run", "{tmp}/out", "--private"), "--private applies to repositories of the hub (OWNER/NAME), got"),
        (("{tmp}/run", "{tmp}/run/checkpoints"), "{tmp}/run/checkpoints already exists"),
        (("{tmp}/run", "{tmp}/run/checkpoints/new"), "{tmp}/run/checkpoints/new is inside a run, {tmp}/run"),
        (("{tmp}/run", "run/new", "--replace"), "run/new is inside a run, {tmp}/run"),
        (("{tmp}/run", "{tmp}/local", "--replace"), "{tmp}/local already exists"),
        *((("{tmp}/run", name), f"{name} is no OWNER/NAME of the hub") for name in NO_TARGETS),
        (("{tmp}/run", "{tmp}/out", "--pretrained", "not a hub id"), "--pretrained not a hub id: expected OWNER/NAME"),
        (("{tmp}/run", "{tmp}/out", "--pretrained", "local/checkpoints"), "--pretrained local/checkpoints: expected"),
        (("{tmp}/local", "me/first"), "data.codec.source=/models/wan is a folder of this machine: name the hub id"),
        (("{tmp}/run", "me/first"), "me/first is on the hub: pip install 'vsa-train[hub]', or name a folder"),
    ],
)
def test_what_is_refused_is_one_line_and_writes_nothing(words, message, tmp_path, monkeypatch, command_line):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    make_run(tmp_path / "run")
    make_run(tmp_path / "local", data={"codec": LOCAL})
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    status, out, err = command_line("push", *(word.format(tmp=tmp_path) for word in words))
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"error: {message.format(tmp=tmp_path)}")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_of_this_machine_is_replaced_by_a_hub_id(tmp_path):
    run = make_run(tmp_path / "run", data={"codec": LOCAL, "text_encoder": {"source": "me/umt5"}})
    data = weights_to_publish(resolve_checkpoint(run), pretrained="me/wan").run_config["data"]
    assert (data["codec"]["source"], data["text_encoder"]["source"]) == ("me/wan", "me/umt5")
