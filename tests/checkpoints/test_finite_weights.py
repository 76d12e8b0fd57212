"""Weights with NaN or infinity are refused where they are read, with the name of the tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.states import rewrite_state
from tests.tiny_runs import make_config, write_run
from vsa.checkpoints import weight_files
from vsa.checkpoints.run_checkpoint import resolve_checkpoint, write_checkpoint
from vsa.checkpoints.weight_source import open_weights
from vsa.files import file_digest

NAME = "blocks.1.ffn.net.2.weight"


def spoilt_run(folder: Path, value: float, name: str = NAME) -> Path:
    """A tiny run of which one value of the averaged weights is not finite."""
    run = write_run(folder)
    checkpoint = resolve_checkpoint(run)
    groups = {group: checkpoint.tensors(group) for group in ("model", "ema")}
    groups["ema"][name].view(-1)[3] = value
    write_checkpoint(run / "other", groups, {k: v for k, v in checkpoint.state.items() if k not in ("schema", "files")})
    (run / "checkpoints").rename(run / "old")
    (run / "other").rename(run / "checkpoints")
    return run


@pytest.mark.parametrize("value", [torch.nan, -torch.inf], ids=str)
def test_commands_that_read_weights(value, tmp_path, command_line):
    """NaN weights were converted, sampled to black clips and trained with exit status 0."""
    run = spoilt_run(tmp_path / "run", value)
    for command in (
        ("convert", str(run), str(tmp_path / "export"), "--to", "diffusers"),
        ("convert", str(run), str(tmp_path / "export"), "--to", "run"),
        ("sample", str(run), "--prompt", "a red circle", "--steps", "1", "--out", str(tmp_path / "export")),
        ("evaluate", str(run), "--prompt", "a", "--no-val-loss", "--steps", "1", "--out", str(tmp_path / "export")),
    ):
        status, _, err = command_line(*command)
        assert (status, err.count("\n")) == (1, 1), err
        assert f"1 values of {NAME} are NaN or infinite" in err
        assert str(run) in err
        assert not (tmp_path / "export").exists()
    assert command_line("convert", str(run), str(tmp_path / "export"), "--weights", "model")[0] == 0


def test_exports_are_refused_too_and_a_dtype_that_is_too_small(tmp_path, command_line):
    run = write_run(tmp_path / "run")
    assert command_line("convert", str(run), str(tmp_path / "export"))[0] == 0
    path = tmp_path / "export" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors[NAME][0, 0] = torch.nan
    save_file(tensors, path)
    for command in (
        ("convert", str(path.parent), str(tmp_path / "again"), "--to", "wan"),
        ("verify-export", str(path.parent), "--device", "cpu"),
    ):
        status, _, err = command_line(*command)
        assert (status, f"{path.parent}: 1 values of {NAME} are" in err) == (1, True), err
    tensors[NAME][0, 0] = 1e5
    save_file(tensors, path)
    assert command_line("convert", str(path.parent), str(tmp_path / "wide"), "--dtype", "bfloat16")[0] == 0
    for to in ("diffusers", "run"):
        narrow = ("convert", str(path.parent), str(tmp_path / "narrow"), "--dtype", "float16", "--to", to)
        status, _, err = command_line(*narrow)
        assert (status, f"float16: 1 values of {NAME} are NaN or infinite" in err) == (1, True), err
        assert not (tmp_path / "narrow").exists()


def test_statistics_of_the_latents_in_an_export(tmp_path, command_line):
    run = write_run(tmp_path / "run")
    assert command_line("convert", str(run), str(tmp_path / "export"))[0] == 0
    path = tmp_path / "export" / "sampling.json"
    content = json.loads(path.read_text())
    for change, message in (
        ({"latent_std": [1.0]}, "latent_mean and latent_std of other latents: 16 and 1 values for 16 channels"),
        ({"latent_std": [-1.0] * 16}, "latent_std[0]=-1.0: expected a number from 1e-09"),
        ({"latent_mean": [torch.nan] * 16}, "latent_mean"),
    ):
        path.write_text(json.dumps({**content, **change}))
        status, _, err = command_line("convert", str(path.parent), str(tmp_path / "again"), "--to", "run")
        assert (status, f"{path} has {message}" in err, err.count("\n")) == (1, True, 1), err


def test_adapters(tmp_path):
    run = write_run(tmp_path / "run")
    layer, wide = "blocks.0.attn1.to_q", torch.randn(32, 32)
    tensors = {f"{layer}.base_layer.weight": wide, "plain": torch.ones(2)}
    tensors |= {f"{layer}.lora_{part}.default.weight": torch.randn(32, 32) for part in "AB"}
    config: dict[str, Any] = make_config()
    config["task"]["lora"] = {"_target_": "vsa.checkpoints.lora.LoRA", "rank": 32, "alpha": 32}
    state = {**resolve_checkpoint(run).state, "config": config}
    state = {name: value for name, value in state.items() if name not in ("schema", "files")}
    write_checkpoint(tmp_path / "good", {"model": tensors}, state)
    assert open_weights(tmp_path / "good" / "step-00000007")[f"{layer}.weight"].isfinite().all()
    tensors[f"{layer}.lora_B.default.weight"][0, 0] = torch.nan
    write_checkpoint(tmp_path / "bad", {"model": tensors}, state)
    source = open_weights(tmp_path / "bad" / "step-00000007")
    assert source["plain"].isfinite().all()
    with pytest.raises(ValueError, match=rf"32 values of {layer}.weight are NaN or infinite"):
        source[f"{layer}.weight"]


def test_start_of_a_training(training, tmp_path):
    training("trainer.max_steps=2")
    folder = training.folder()
    checkpoint = resolve_checkpoint(folder)
    path = checkpoint.path / "ema.safetensors"
    tensors = load_file(path)
    name = "blocks.0.attn1.to_v.bias"
    tensors[name][0] = torch.nan
    save_file(tensors, path)
    rewrite_state(checkpoint.path, files={**checkpoint.state["files"], path.name: file_digest(path)})
    with pytest.raises(ValueError, match=f"1 values of {name} are NaN or infinite"):
        training("run=next", f"init_from={folder}")
    assert not (training.folder("next") / "checkpoints").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64], ids=str)
def test_every_place_and_dtype(dtype):
    """Against `isfinite`, at sizes around those of vector registers; the largest finite numbers pass."""
    for size in (0, 1, 2, 7, 8, 31, 64, 1000):
        tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
        if dtype.is_floating_point and size > 1:
            tensor[0], tensor[-1] = torch.finfo(dtype).max, torch.finfo(dtype).min
        assert weight_files.finite(tensor, "x", "file") is tensor
        if not dtype.is_floating_point:
            continue
        for place in {0, size // 2, size - 1} - {-1}:
            for value in (torch.nan, torch.inf, -torch.inf):
                broken = tensor.clone()
                if size:
                    broken[place] = value
                    with pytest.raises(ValueError, match=r"^file: 1 values of x are NaN or infinite$"):
                        weight_files.finite(broken, "x", "file")
