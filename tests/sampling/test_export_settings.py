"""Runs that were exported and converted back: the same clips, or one line that says what is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import vsa.training.train as run_module
from tests.commands import run_command
from tests.tiny_runs import vsa_command
from vsa.attention.neighborhood.method import NeighborhoodAttention
from vsa.checkpoints.run_checkpoint import resolve_checkpoint
from vsa.checkpoints.sampling_settings import SAMPLING
from vsa.checkpoints.sparse_config import read_sparse_config
from vsa.cli.convert import convert as convert_command
from vsa.sampling.pipeline import SamplingPipeline, clip_seeds, load_run, sample_latents
from vsa.sampling.record import settings_dict

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full:UserWarning")

STAIRS = {
    "_target_": "vsa.attention.sparsity_schedules.StaircaseSparsity",
    "dense_steps": 2,
    "interval": 1,
    "tiles": 1,
    "topk": 2,
    "dense_layers": [0],
}
ALL = {"_target_": "vsa.attention.sparsity.ConstantSparsity", "sparsity": 0.0}
DENSE_FIRST = {"_target_": "vsa.attention.denoising.DenoisingPlan", "dense_steps": 1, "dense_layers": [1]}
SAMPLES = {"steps": 3, "guidance": 2.0, "flow_shift": None}
RUNS: dict[str, dict[str, Any]] = {
    # step 6 of the staircase: 3 of 8 tiles, and all of them in layer 0
    "annealed": {"sparsity": STAIRS},
    "with a shift of its own": {"samples": {**SAMPLES, "flow_shift": 5.0}},
    "dense": {"attention": "full"},
    "distilled": {"step_list": (1000.0, 500.0)},
    "windows": {"attention": "neighborhood"},
    "windows, dense at first": {"attention": "neighborhood", "sparsity": {**ALL, "denoising": DENSE_FIRST}},
    "dense, distilled": {"attention": "full", "step_list": (1000.0, 500.0)},
}


def convert(words: list[str]) -> None:
    run_command(convert_command, *words)


@pytest.fixture
def make_run(write_tiny_run, tiny_config, tmp_path: Path):
    """`make_run(sparsity=, samples=, attention=, step_list=)` writes a run whose latents and captions are known."""

    def make(
        sparsity: Any = None, samples: Any = SAMPLES, attention: str = "video_sparse", step_list: Any = None
    ) -> Path:
        config = {**tiny_config(attention=attention), "callbacks": {"samples": samples}}
        config["sparsity"] = sparsity or config["sparsity"]
        config["data"]["text_padding"] = "zeros"
        return write_tiny_run(tmp_path / "run", attention=attention, config=config, step_list=step_list)

    return make


def there_and_back(run: Path, folder: Path, to: str = "diffusers", *options: str) -> Path:
    convert([str(run), str(folder / "export"), "--to", to, "--no-golden", *options])
    convert([str(folder / "export"), str(folder / "back"), "--to", "run"])
    return folder / "back"


def latents_of(run: SamplingPipeline, **options: Any) -> torch.Tensor:
    prompts = ["a red circle", "a blue square moving up"]
    return sample_latents(run.model, run.text_encoder, prompts, clip_seeds(4, prompts), run.settings(**options))


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_converted_there_and_back_gives_the_same_clips(kind, make_run, tmp_path):
    run = load_run(make_run(**RUNS[kind]), device="cpu")
    back = load_run(there_and_back(tmp_path / "run", tmp_path, "wan" if kind == "dense" else "diffusers"), device="cpu")
    export = load_run(tmp_path / "export", device="cpu")
    own = {"checkpoint", "step", "weights"}
    actual, direct, expected = (
        {key: value for key, value in settings_dict(r.settings(), r).items() if key not in own}
        for r in (back, export, run)
    )
    assert actual == direct == expected
    assert torch.equal(back.latent_mean, run.latent_mean)
    assert torch.equal(back.latent_std, run.latent_std)
    assert back.text_padding == run.text_padding == "zeros"
    clips = latents_of(run)
    assert (latents_of(back) - clips).abs().max() < 1e-5
    assert torch.equal(latents_of(export), latents_of(back))
    # controls: other noise levels, other tiles
    if run.step_list is None:
        assert (latents_of(back, flow_shift=2.0) - clips).abs().max() > 1e-2
    if "windows" in kind:
        with pytest.raises(ValueError, match="NeighborhoodAttention: it selects no tiles"):
            latents_of(back, topk=1)
        assert (latents_of(back, denoising={"dense_steps": 2, "dense_layers": ()}) - clips).abs().max() > 1e-3
        shares = replace(back, model=back.model.with_attention(partial(NeighborhoodAttention, window_thw=(1, 0.5, 3))))
        assert (latents_of(shares) - clips).abs().max() > 1e-2
    elif "dense" not in kind:
        assert (latents_of(back, topk=1) - clips).abs().max() > 1e-2
    # the other shape it was trained on
    assert back.settings(latent_shape=(16, 1, 8, 8)).topk == run.settings(latent_shape=(16, 1, 8, 8)).topk
    assert back.settings(at="dense").topk == run.settings(at="dense").topk


def test_a_converted_run_is_sampled_by_the_command(make_run, tmp_path):
    back = there_and_back(make_run(), tmp_path)
    for run in ("run", "back"):
        vsa_command("sample", tmp_path / run, "--prompt", "x", "--device", "cpu", "--out", tmp_path / f"{run}-clips")
    names = [json.loads((tmp_path / f"{run}-clips" / "samples.json").read_text())["clips"] for run in ("run", "back")]
    assert names[0] == names[1]
    for name in (names[0][0]["mp4"], "contact_sheet.png"):
        assert (tmp_path / "run-clips" / name).read_bytes() == (tmp_path / "back-clips" / name).read_bytes()
    # and goes on as a run: exported once more it is the same files
    convert([str(back), str(tmp_path / "again"), "--no-golden"])
    for path in (tmp_path / "export").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


@pytest.mark.parametrize(
    ("method", "told", "change"),
    [
        ("neighborhood", "window_thw=[1.0,0.5,3], causal_thw=[true,false,false]) from", {"window_thw": [1.0, 0.75, 3]}),
        ("sparge", "q_tokens=16, kv_tokens=8, tau=0.4, theta=-1.0) from", {"tau": 0.9}),
        ("fine_grained", "q_tokens=16, kv_tokens=4, top_p=0.3) from", {"top_p": 0.9}),
        ("dynamic_hilbert", "tokens=8, sub_tokens=4, top-k 2..2 of 8) from", {"order": "raster"}),
    ],
)
def test_methods_without_parameters_are_exported_and_verified(method, told, change, make_run, tmp_path, capsys):
    run = make_run(attention=method)
    convert([str(run), str(tmp_path / "export")])
    assert f"({method}, {told}" in capsys.readouterr().out
    vsa_command("verify-export", tmp_path / "export", "--device", "cpu")
    assert "2 layers of" in capsys.readouterr().out
    convert([str(tmp_path / "export"), str(tmp_path / "back"), "--to", "run"])
    convert([str(tmp_path / "back"), str(tmp_path / "again")])
    for path in (tmp_path / "export").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name
    # the same clips from the run and from what came back
    clips = latents_of(load_run(run, device="cpu"))
    assert (latents_of(load_run(tmp_path / "back", device="cpu")) - clips).abs().max() < 1e-5
    # control: another setting is another model
    path = tmp_path / "export" / "sparse_attention.json"
    values = json.loads(path.read_text())
    values["settings"] |= change
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"layer 0 has error .*, above its tolerance"):
        vsa_command("verify-export", tmp_path / "export", "--device", "cpu")
    with pytest.raises(ValueError, match=f"FastVideo runs method=video_sparse only, the source has method={method}"):
        convert([str(run), str(tmp_path / "fastvideo"), "--to", "fastvideo"])
    with pytest.raises(ValueError, match="has its own top-k and grid"):
        convert([str(run), str(tmp_path / "topk"), "--topk", "2", "--grid", "4", "4", "4"])
    assert not list(tmp_path.glob("[ft]*"))


def test_a_model_of_the_default_size_is_trained_exported_and_sampled_again(training, tmp_path, monkeypatch):
    messages: list[str] = []
    monkeypatch.setattr(run_module, "rank_zero_info", messages.append)
    training("trainer.max_steps=1")
    assert not [line for line in messages if "export" in line]
    run = load_run(training.folder(), device="cpu")
    back = load_run(there_and_back(training.folder(), tmp_path), device="cpu")
    assert (latents_of(back, steps=2) - latents_of(run, steps=2)).abs().max() < 1e-5


@pytest.mark.parametrize("setting", ["model.absolute_positions=false", "model.rope_theta=10000"])
def test_a_model_that_cannot_be_exported_says_so_before_it_is_trained(setting, training, monkeypatch):
    messages: list[str] = []
    monkeypatch.setattr(run_module, "rank_zero_info", messages.append)
    other = {"false": "true", "10000": "100"}
    name, _, value = setting.partition("=")
    cfg = training.config(f"{name}={other[value]}")
    run_module._tell_export(cfg)
    (line,) = messages
    assert line.startswith("note: this model cannot be exported to diffusers: ")
    assert f"{name}=" in line or f"{name} must be" in line
    assert value in line


def test_sampling_settings_given_on_the_way_hold_for_the_run(make_run, tmp_path):
    options = ("--flow-shift", "6", "--guidance", "1.5", "--guidance-form", "additive")
    back = load_run(there_and_back(make_run(), tmp_path, "diffusers", *options), device="cpu")
    settings = back.settings()
    # cond + 1.5 (cond - uncond) is uncond + 2.5 (cond - uncond)
    assert (settings.steps, settings.flow_shift, settings.guidance) == (3, 6, 2.5)


def foreign_export(run: Path, folder: Path) -> Path:
    """An export that says nothing of codec and captions, as those of other projects do."""
    convert([str(run), str(folder / "foreign"), "--no-golden"])
    (folder / "foreign" / SAMPLING).unlink()
    return folder / "foreign"


def test_weights_without_a_codec_say_what_to_give(make_run, write_tiny_run, tiny_config, tmp_path, command_line):
    run = make_run()
    foreign, back = foreign_export(run, tmp_path), tmp_path / "back"
    convert([str(foreign), str(back), "--to", "run"])
    out = tmp_path / "clips"
    status, _, err = command_line("sample", str(back), "--prompt", "x", "--out", str(out))
    assert (status, out.exists()) == (1, False)
    assert err == (
        f"error: checkpoint {back}/checkpoints/step-00000000 holds weights without a codec and a text encoder: convert "
        "it again with --like RUN, a run that was trained on such latents and captions (`vsa convert`), or "
        "sample its export through a pipeline (`vsa sample --pipeline PIPELINE --transformer EXPORT`)\n"
    )
    # which is what helps
    convert([str(back), str(tmp_path / "whole"), "--to", "run", "--like", str(run)])
    clips = latents_of(load_run(run, device="cpu"))
    assert (latents_of(load_run(tmp_path / "whole", device="cpu")) - clips).abs().max() < 1e-5

    wide = tiny_config()
    wide["model"]["text_dim"] = 32
    for like, message in (
        (write_tiny_run(tmp_path / "wide", config=wide), r"wide has model\.text_dim=32, .*back.* has 64"),
        (back, r"--like .*back has no codec, text encoder or statistics of latents to take over"),
    ):
        with pytest.raises(ValueError, match=message):
            convert([str(back), str(tmp_path / "refused"), "--to", "run", "--like", str(like)])
    with pytest.raises(ValueError, match=r"has its own codec and text encoder: leave --like .* out"):
        convert([str(run), str(tmp_path / "refused"), "--to", "run", "--like", str(run)])
    assert not (tmp_path / "refused").exists()


def test_a_run_is_sampled_with_the_dense_steps_of_its_export(make_run, tmp_path):
    back = there_and_back(make_run(), tmp_path, "diffusers", "--dense-steps", "2")
    assert read_sparse_config(tmp_path / "export").dense_steps == 2
    run, clips = load_run(tmp_path / "run", device="cpu"), latents_of(load_run(back, device="cpu"))
    assert (clips - latents_of(run, denoising={"dense_steps": 2})).abs().max() < 1e-5
    # control: without them
    assert (clips - latents_of(run)).abs().max() > 1e-3
    # nothing of it is lost
    assert resolve_checkpoint(back).state["sparse_attention"]["dense_steps"] == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"latent_mean": None}, "has latent_mean=None, expected a list"),
        ({"more": 1}, "is not what a conversion of this project writes"),
        ({"config": {}}, "lacks config.data"),
    ],
)
def test_a_sampling_file_that_is_not_whole_is_refused(damage, message, make_run, tmp_path):
    convert([str(make_run()), str(tmp_path / "export"), "--no-golden"])
    path = tmp_path / "export" / SAMPLING
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(ValueError, match=rf"sampling\.json {message}"):
        convert([str(tmp_path / "export"), str(tmp_path / "back"), "--to", "run"])
    assert not (tmp_path / "back").exists()
