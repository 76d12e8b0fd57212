"""Weights of Wan as people hold them: single files, prefixes, variants, shards without a config; what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints.wan_models import KINDS, error, inputs, run_ours, run_theirs
from vsa.attention.full import FullAttention
from vsa.checkpoints.wan_config import CLASS_NAME, named_sizes, video_dit_arguments
from vsa.checkpoints.wan_names import diffusers_to_wan
from vsa.checkpoints.weight_source import open_network, open_weights
from vsa.models.video_dit import VideoDiT

WEIGHTS = "diffusion_pytorch_model"
# Wan's head width, which no shape determines
SIZES = dict(num_attention_heads=1, attention_head_dim=128, text_dim=24, freq_dim=32, ffn_dim=80, num_layers=2)
SAID = pytest.mark.filterwarnings("ignore:.* has no config.json. its shapes give the sizes")


@pytest.fixture(scope="module")
def models() -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def model(kind: str) -> Any:
        if kind not in made:
            torch.manual_seed(0)
            own = KINDS[kind] | ({"added_kv_proj_dim": 128} if kind == "i2v" else {})
            made[kind] = WanTransformer3DModel(**{**SIZES, **own}).eval()
            for parameter in made[kind].parameters():
                parameter.data.add_(0.1 * torch.randn_like(parameter))
        return made[kind]

    return model


def wan(state: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    return {prefix + diffusers_to_wan(name): value for name, value in state.items()}


def shards(folder: Path, state: dict[str, Tensor], index: str, part: str) -> Path:
    names = sorted(state)
    parts = [names[::2], names[1::2]]
    files = [part.format(i + 1) for i in range(2)]
    for file, own in zip(files, parts, strict=True):
        save_file({name: state[name] for name in own}, folder / file)
    weight_map = {name: file for file, own in zip(files, parts, strict=True) for name in own}
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def one_file(folder: Path, tensors: dict[str, Tensor], name: str = "wan2.1_t2v_bf16.safetensors") -> Path:
    save_file(tensors, folder / name)
    return folder / name


# what is written, and what is opened
FORMS: dict[str, Callable[[Path, dict[str, Tensor]], Path]] = {
    "Wan's names": lambda f, s: one_file(f, wan(s)),
    "a folder with a file of any name": lambda f, s: one_file(f, wan(s)).parent,
    "a merged checkpoint of ComfyUI": lambda f, s: one_file(
        f, wan(s, "model.diffusion_model.") | {"first_stage_model.decoder.conv1.weight": torch.ones(2)}
    ),
    "another prefix of ComfyUI": lambda f, s: one_file(f, wan(s, "diffusion_model.")),
    "diffusers' names in a pipeline's": lambda f, s: one_file(f, {f"transformer.{name}": x for name, x in s.items()}),
    "a variant": lambda f, s: one_file(f, s, f"{WEIGHTS}.bf16.safetensors").parent,
    "shards without a config": lambda f, s: shards(
        f, s, f"{WEIGHTS}.safetensors.index.json", WEIGHTS + "-0000{}-of-00002.safetensors"
    ),
    "shards of a variant": lambda f, s: shards(
        f, s, f"{WEIGHTS}.safetensors.index.bf16.json", WEIGHTS + ".bf16-0000{}-of-00002.safetensors"
    ),
    "an index by its name": lambda f, s: (
        shards(f, wan(s), "model.safetensors.index.json", "model-0000{}-of-00002.safetensors")
        / "model.safetensors.index.json"
    ),
}


@SAID
@pytest.mark.parametrize(
    ("form", "kind"), [(form, list(KINDS)[i % len(KINDS)]) for i, form in enumerate(FORMS)], ids=lambda x: str(x)
)
def test_every_form_holds_the_same_model(form, kind, models, tmp_path):
    theirs = models(kind)
    state = {name: x.bfloat16() for name, x in theirs.state_dict().items()}
    source = open_weights(FORMS[form](tmp_path, state))
    assert video_dit_arguments(source.config) == video_dit_arguments({**theirs.config, "_class_name": CLASS_NAME})
    assert set(source) == set(state)
    assert all(torch.equal(source[name], value) for name, value in state.items())


@SAID
def test_a_file_computes_what_diffusers_does(models, tmp_path):
    theirs, arguments = models("ti2v"), inputs("ti2v")
    path = one_file(tmp_path, wan(theirs.state_dict(), "model.diffusion_model."))
    model, source = open_network(path)
    expected = run_theirs(theirs, **arguments)
    assert error(run_ours(model, **arguments), expected) < 1e-5
    # other weights under other names have another digest
    digest = source.digest
    one_file(tmp_path, {f"x{name}": value for name, value in load_file(path).items()}, "other.safetensors")
    assert open_weights(path).digest == digest
    # the control: a config with two heads in place of one
    config = dict(source.config) | {"num_attention_heads": 2, "attention_head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, _ = open_network(path)
    assert error(run_ours(model, **arguments), expected) > 1e-4


def test_what_shapes_do_not_determine_is_said(models, tmp_path):
    path = one_file(tmp_path, wan(models("t2v").state_dict()))
    with pytest.warns(UserWarning, match=r"has no config.json: .*\(attention_head_dim=128, eps=1e-06\)") as caught:
        assert open_weights(path).config["num_attention_heads"] == 1
    assert "\n" not in str(caught[0].message)


def refused(state: dict[str, Tensor], folder: Path, change: str) -> Path:
    """A place whose weights are refused."""
    key, first = "blocks.0.self_attn.q.weight", wan(state)
    if change == "fp8":
        return one_file(folder, first | {key: first[key].to(torch.float8_e4m3fn)})
    if change == "scales":
        return one_file(folder, first | {"blocks.0.self_attn.q.scale_weight": torch.ones(1)})
    if change == "gguf":
        (folder / "wan-Q4_K_M.gguf").write_bytes(b"GGUF")
        return folder / "wan-Q4_K_M.gguf"
    if change == "a folder of gguf":
        return refused(state, folder, "gguf").parent
    if change == "a pickle":
        (folder / "wan.pth").write_bytes(b"x")
        return folder / "wan.pth"
    if change == "adapters":
        return one_file(folder, {"diffusion_model.blocks.0.self_attn.q.lora_A.weight": torch.ones(2, 2)})
    if change == "another model":
        return one_file(folder, {"model.layers.0.weight": torch.ones(2)})
    if change == "an unknown key":
        return one_file(folder, first | {"blocks.0.self_attn.query.weight": torch.ones(2)})
    if change == "two files":
        one_file(folder, first, "low.safetensors")
        return one_file(folder, first, "high.safetensors").parent
    if change == "another width":
        return one_file(folder, first | {"patch_embedding.weight": torch.ones(96, 8, 1, 2, 2)})
    assert change == "nothing"
    return folder / "nothing.safetensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("fp8", r"is quantized to fp8 \(blocks.0.self_attn.q.weight has dtype F8_E4M3\).* name the bf16 or fp16 file"),
        ("scales", r"is quantized to fp8 \(blocks.0.self_attn.q.scale_weight"),
        ("gguf", r"wan-Q4_K_M.gguf is quantized for inference \(GGUF\).* name the bf16 .safetensors file"),
        ("a folder of gguf", r"wan-Q4_K_M.gguf is quantized for inference"),
        ("a pickle", r"wan.pth is no safetensors file"),
        ("adapters", r"holds adapters \(diffusion_model.blocks.0.self_attn.q.lora_A.weight\), not a model"),
        ("another model", r"has 0 keys patch_embedding.weight, a Wan model has one; its first key is model.layers"),
        ("an unknown key", r"blocks.0.self_attn.query.weight is not .*; the nearest is blocks.0.self_attn"),
        ("two files", r"has several files of weights, high.safetensors, low.safetensors: name the file of one"),
        (
            "another width",
            r"wan2.1_t2v_bf16.safetensors, without config.json: dim must be a multiple of Wan's head width 128, got 96",
        ),
        ("nothing", r"no such file: .*nothing.safetensors"),
    ],
)
def test_what_is_no_trainable_model_is_refused_in_one_line(change, message, models, tmp_path):
    place = refused(models("t2v").state_dict(), tmp_path, change)
    with pytest.raises(ValueError, match=message) as caught:
        _ = open_weights(place).config
    assert "\n" not in str(caught.value)


def test_all_wrong_sizes_are_told_with_the_model_that_fits(models, tmp_path):
    models("t2v").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    published = {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48}
    published |= {"text_dim": 4096, "freq_dim": 256}
    (tmp_path / "config.json").write_text(json.dumps(config | published))
    with torch.device("meta"):
        model = VideoDiT(attention=FullAttention, **{**SIZES, **KINDS["t2v"]})
    with pytest.raises(ValueError, match="; model=wan_5b has the sizes of init_from") as caught:
        open_weights(tmp_path).check(model, "absent")
    assert all(f"{key}={value}, the model has" in str(caught.value) for key, value in published.items())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_layers": 3}))
    with pytest.raises(ValueError, match="num_layers=3, the model has 2; model=from_checkpoint takes the sizes"):
        open_weights(tmp_path).check(model, "absent")
    assert named_sizes(video_dit_arguments({"_class_name": CLASS_NAME})) == "wan_14b"
    # tensors that contradict their config
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / f"{WEIGHTS}.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"proj_out.bias": torch.ones(3), "patch_embedding.bias": torch.ones(5)}, path)
    with pytest.raises(ValueError, match=r"\(5,\), the model needs \(128,\); proj_out.bias has shape \(3,\)"):
        open_weights(tmp_path).check(model, "absent")
