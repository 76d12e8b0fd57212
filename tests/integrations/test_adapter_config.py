"""The strength of adapters that peft and diffusers wrote, against their own merge."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders import WanLoraLoaderMixin
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.disks import small_files
from tests.integrations import tiny
from vsa.checkpoints.adapter_config import configs_of, scale_of
from vsa.checkpoints.convert import Conversion, convert
from vsa.checkpoints.weight_source import open_weights
from vsa.files import DiskFullError
from vsa.integrations.diffusers import merge_adapter

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")

Q = "blocks.0.attn1.to_q"
TARGETS = ["to_q", "to_k", "to_out.0", "ffn.net.2"]
FILE = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny.wan().model.save_pretrained(folder)
    return folder


def stir(model: Any) -> None:
    """Random values for all that is trained."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.2, generator=generator)


def saved_by_peft(folder: Path, **fields: Any) -> Path:
    """Adapters with random values; `fields` are those of the config."""
    config = peft.LoraConfig(**{"target_modules": TARGETS, "r": 4, "lora_alpha": 16, **fields})
    model = peft.get_peft_model(tiny.wan().model, config)
    stir(model)
    model.save_pretrained(folder)
    return folder


def merged_by_peft(folder: Path) -> dict[str, Tensor]:
    return peft.PeftModel.from_pretrained(tiny.wan().model, folder).merge_and_unload().state_dict()


def changed(folder: Path, **fields: Any) -> Path:
    """The config in a folder with other fields; those that are ... are left out."""
    path = folder / "adapter_config.json"
    values = {key: value for key, value in {**json.loads(path.read_text()), **fields}.items() if value is not ...}
    path.write_text(json.dumps(values))
    return folder


def read_here(base: Path, place: Path) -> dict[str, Tensor]:
    """The merged weights by both ways to read adapters, which agree."""
    merged = dict(open_weights(f"{base}+{place}"))
    model = tiny.wan().model
    merge_adapter(model, place)
    assert all(torch.equal(value, merged[name]) for name, value in model.state_dict().items())
    return merged


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(tiny.difference(ours[name], value) for name, value in theirs.items())


MERGED: dict[str, dict[str, Any]] = {
    "alpha is not the rank": {},
    "rank-stabilised": {"use_rslora": True},
    "alpha by pattern": {"alpha_pattern": {"attn1.to_q": 8, r"blocks\.1\..*to_k": 2.5, "to_q": 32}},
    "rank by pattern": {"rank_pattern": {"^blocks.0.attn2.to_k": 2, "ffn.net.2": 6}},
    "both, stabilised": {"use_rslora": True, "rank_pattern": {"to_k": 2}, "alpha_pattern": {"to_k": 2, "to_q": 64}},
    "biases of the layers": {"bias": "lora_only"},
    "all biases": {"bias": "all"},
    "whole modules": {"modules_to_save": ["proj_out", "time_proj"]},
    "other order of dimensions": {"fan_in_fan_out": True},
    "some layers": {"layers_to_transform": [1], "layers_pattern": "blocks"},
    "without some": {"exclude_modules": ["blocks.0.attn1.to_q"], "target_modules": r".*\.(to_q|to_v)"},
    "without start": {"init_lora_weights": False},
    "other starts": {"init_lora_weights": "gaussian", "lora_dropout": 0.1},
    "orthogonal start": {"init_lora_weights": "orthogonal"},
    "minor components": {"init_lora_weights": "mica"},
    "a task": {"task_type": "FEATURE_EXTRACTION"},
}


# the first ones are the fields that scale
CASES = [
    pytest.param(fields, id=name, marks=[pytest.mark.slow] if place > 4 else [])
    for place, (name, fields) in enumerate(MERGED.items())
]


@pytest.mark.parametrize("fields", CASES)
def test_adapters_have_the_strength_that_peft_gives_them(fields, base, tmp_path):
    folder = saved_by_peft(tmp_path / "lora", **fields)
    theirs, before = merged_by_peft(folder), tiny.wan().model.state_dict()
    assert difference(read_here(base, folder), theirs) < 1e-6
    assert difference(read_here(base, folder / FILE), theirs) < 1e-6
    # the controls: the adapters change something, and without the config they change something else
    assert difference(before, theirs) > 0.1
    (folder / "adapter_config.json").unlink()
    assert difference(read_here(base, folder), theirs) > 0.1


@pytest.mark.slow
def test_converted_adapters_of_a_changed_base_are_merged(base, tmp_path):
    """Those that peft saves for the original base, after a start from its main components."""
    model = peft.get_peft_model(
        tiny.wan().model, peft.LoraConfig(target_modules=TARGETS, r=4, lora_alpha=6, init_lora_weights="pissa")
    )
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "start")
    model.peft_config["default"].init_lora_weights = "pissa"
    stir(model)
    expected = {name: p.clone() for name, p in model.merge_and_unload().state_dict().items()}
    model = peft.get_peft_model(
        tiny.wan().model, peft.LoraConfig(target_modules=TARGETS, r=4, lora_alpha=6, init_lora_weights="pissa")
    )
    stir(model)
    model.save_pretrained(tmp_path / "raw")
    with pytest.raises(ValueError, match=r"has init_lora_weights=pissa, whose adapters belong to a changed base: save"):
        open_weights(f"{base}+{tmp_path / 'raw'}")
    model.save_pretrained(tmp_path / "lora", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    assert difference(read_here(base, tmp_path / "lora"), expected) < 1e-5


WRITTEN: dict[str, tuple[dict[str, Any], str]] = {
    "magnitudes": ({"use_dora": True}, r"has use_dora=True, which cannot be merged here"),
    "biases of factors": ({"lora_bias": True}, r"has lora_bias=True, which cannot be merged here"),
    "main components": ({"init_lora_weights": "pissa_niter_2"}, r"init_lora_weights=pissa_niter_2, .* changed base"),
    "an orthogonal base": (
        {"init_lora_weights": "olora"},
        r"init_lora_weights=olora, whose adapters belong to a chang",
    ),
    "parameters": (
        {"target_modules": [], "target_parameters": ["to_q.weight"]},
        r"has target_parameters=\['to_q.weight'\], which cannot be merged here",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "message"), WRITTEN.values(), ids=WRITTEN)
def test_what_peft_writes_and_is_not_read_is_refused(fields, message, base, tmp_path):
    folder = saved_by_peft(tmp_path / "lora", **fields)
    refused(base, folder, message)


def refused(base: Path, place: Path, message: str) -> None:
    """Both ways to read adapters refuse them in one line, and change nothing."""
    with pytest.raises(ValueError, match=message) as caught:
        open_weights(f"{base}+{place}")
    assert "\n" not in str(caught.value)
    model = tiny.wan().model
    with pytest.raises(ValueError, match=message):
        merge_adapter(model, place)
    assert difference(model.state_dict(), tiny.wan().model.state_dict()) == 0


ALTERED: dict[str, tuple[dict[str, Any], str]] = {
    "no kind": ({"peft_type": None}, r"adapter_config.json has peft_type=None, expected LORA"),
    "another kind": ({"peft_type": "LOHA"}, r"adapter_config.json has peft_type='LOHA', expected LORA"),
    "a quantised base": (
        {"init_lora_weights": "loftq"},
        r"init_lora_weights=loftq, whose adapters belong to a changed",
    ),
    "covariances": (
        {"init_lora_weights": "corda"},
        r"init_lora_weights=corda, whose adapters belong to a changed base",
    ),
    "gradients": ({"init_lora_weights": "lora_ga"}, r"init_lora_weights=lora_ga, whose adapters belong to a changed"),
    "repeated layers": (
        {"layer_replication": [[0, 2], [0, 2]]},
        r"layer_replication=\[\[0, 2\], \[0, 2\]\], which can",
    ),
    "tokens": ({"trainable_token_indices": [1]}, r"has trainable_token_indices=\[1\], which cannot be merged here"),
    "a later field": ({"use_tomorrow": 1.5}, r"has use_tomorrow=1.5, which cannot be merged here: let peft merge it"),
    "another rank": ({"r": 8}, r"adapter_config.json has rank 8 for blocks.*, its factors have 4"),
    "another rank somewhere": ({"rank_pattern": {"attn2.to_k": 2}}, r"has rank 2 for blocks.0.attn2.to_k, its factors"),
    "peft's own rank": ({"r": ...}, r"adapter_config.json has rank 8 for blocks"),
    "no strength": ({"lora_alpha": 0}, r"has lora_alpha=0, expected a number above 0"),
    "a negative one": ({"lora_alpha": -16}, r"has lora_alpha=-16, expected a number above 0"),
    "none": ({"lora_alpha": float("nan")}, r"has lora_alpha=nan, expected a number above 0"),
    "text": ({"lora_alpha": "16"}, r"has lora_alpha='16', expected a number above 0"),
    "one of a pattern": ({"alpha_pattern": {"to_q": 0}}, r"has alpha_pattern.to_q=0, expected a number above 0"),
    "no pattern": (
        {"alpha_pattern": {"to_(q": 2}},
        r"adapter_config.json has a pattern that does not parse: missing \)",
    ),
    "a pattern without end": (
        {"alpha_pattern": {"(([a-z0-9_.]|[a-z0-9_.])+)+!": 3}},
        r"adapter_config.json has '\(\(\[a-z0-9_.\]\|\[a-z0-9_.\]\)\+\)\+!', a pattern too long or repeated to end",
    ),
}


@pytest.fixture(scope="module")
def lora(tmp_path_factory) -> Path:
    return saved_by_peft(tmp_path_factory.mktemp("lora"))


def copy_of(lora: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in lora.glob("adapter_*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize(("fields", "message"), ALTERED.values(), ids=ALTERED)
def test_configs_that_are_not_understood_are_refused(fields, message, lora, base, tmp_path):
    refused(base, changed(copy_of(lora, tmp_path / "lora"), **fields), message)


ENDLESS = [
    "(([a-z0-9_.]|[a-z0-9_.])+)+!",
    r"(?x:(\w+) +)!",
    r"(?:(\w|\w\w){1,99})!",
    ".?" * 60 + "!",
    "(|)" * 60 + "!",
    ".*" * 40 + "!",
    "a" * 201,
]
USUAL = [
    "to_q",
    "^blocks.0.attn2.to_k",
    r"^blocks\.\d+\..*to_(q|k)$",
    "(a|b)",
    r".*\.(0|1)\.attn[12]\.(to_q|to_k)",
    "x" * 200,
]


@pytest.mark.parametrize("kind", ["rank_pattern", "alpha_pattern"])
def test_patterns_that_may_take_without_end_are_refused(kind, tmp_path):
    save_file(low_rank(), tmp_path / FILE)
    for pattern in (*USUAL, *ENDLESS):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, kind: {pattern: 4}}))
        if pattern in ENDLESS:
            with pytest.raises(
                ValueError, match=r"adapter_config.json has '[^\n]*, a pattern too long or repeated to [^\n]+$"
            ):
                configs_of(tmp_path, FILE)
        else:
            ((place, fields),) = configs_of(tmp_path, FILE).items()
            assert scale_of(Q, 4, place, fields) > 0


def test_a_folder_with_the_config_of_one_file_has_no_other(lora, base, tmp_path):
    folder = copy_of(lora, tmp_path / "lora")
    save_file(low_rank(), folder / "other.safetensors")
    refused(base, folder, r"has adapter_config.json for one file, and files .*adapter_model.*other.*: name one of them")
    assert read_here(base, folder / FILE)
    # without one they are the parts of one change
    (folder / "adapter_config.json").unlink()
    (folder / FILE).unlink()
    assert read_here(base, folder)


def test_a_config_belongs_to_its_file(lora, base, tmp_path):
    folder = copy_of(lora, tmp_path / "lora")
    strong, weights = read_here(base, folder), load_file(folder / FILE)
    # under another name alone in the folder it is still that of peft
    (folder / FILE).rename(folder / "renamed.safetensors")
    assert difference(read_here(base, folder / "renamed.safetensors"), strong) == 0
    # beside the file that peft names, another one has its own strength
    save_file({key.replace("base_model.model", "diffusion_model"): x for key, x in weights.items()}, folder / FILE)
    plain = read_here(base, folder / "renamed.safetensors")
    assert tiny.difference(plain[f"{Q}.weight"], strong[f"{Q}.weight"]) > 0.1
    # and other strengths are other weights
    digest = open_weights(f"{base}+{folder / FILE}").digest
    assert open_weights(f"{base}+{changed(folder, lora_alpha=8) / FILE}").digest != digest
    (folder / "adapter_config.json").write_text("[1]")
    refused(base, folder / FILE, r"adapter_config.json holds \[1\], expected an object")


def saved_by_diffusers(folder: Path, form: str, **fields: Any) -> Path:
    config = peft.LoraConfig(**{"target_modules": TARGETS, "r": 4, "lora_alpha": 16, **fields})
    model = tiny.wan().model
    model.add_adapter(config)
    stir(model)
    if form == "model":
        model.save_lora_adapter(folder)
        return folder / "pytorch_lora_weights.safetensors"
    layers = peft.get_peft_model_state_dict(model)
    facts = {key: list(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    metadata: dict[str, Any] = {} if form == "pipeline without" else {"transformer_lora_adapter_metadata": facts}
    WanLoraLoaderMixin.save_lora_weights(str(folder), layers, **metadata)
    return folder / "pytorch_lora_weights.safetensors"


@pytest.mark.parametrize("form", ["model", "pipeline", "pipeline without"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"use_rslora": True, "rank_pattern": {"to_k": 2}, "alpha_pattern": {"to_q": 2}}],
    ids=["", "patterns"],
)
def test_adapters_have_the_strength_that_diffusers_gives_them(form, fields, base, tmp_path):
    file = saved_by_diffusers(tmp_path / "lora", form, **fields)
    model = tiny.wan().model
    # without the last argument it reads no metadata
    model.load_lora_adapter(str(file), prefix=None if form == "model" else "transformer", use_safetensors=True)
    model.fuse_lora()
    theirs = {
        name.replace(".base_layer.", "."): value for name, value in model.state_dict().items() if ".lora_" not in name
    }
    assert difference(read_here(base, file), theirs) < 1e-6
    # the control: the strength in the metadata is another one than that of the factors
    save_file(load_file(file), file)
    assert (difference(read_here(base, file), theirs) > 0.1) == (form != "pipeline without")


def low_rank(key: Callable[[str], str] = "transformer.{}".format, rank: int = 4) -> dict[str, Tensor]:
    a, b = tiny.randn(rank, 32, seed=1), tiny.randn(32, rank, seed=2)
    return {f"{key(Q)}.lora_A.weight": a, f"{key(Q)}.lora_B.weight": b}


def strength(base: Path, file: Path) -> float:
    """The factor of `B A` of `low_rank` in the merged weights."""
    product = tiny.randn(32, 4, seed=2) @ tiny.randn(4, 32, seed=1)
    change = read_here(base, file)[f"{Q}.weight"] - tiny.wan().model.state_dict()[f"{Q}.weight"]
    return (change / product).median().item()


def config_text(**fields: Any) -> str:
    return json.dumps({"r": 4, "lora_alpha": 16, "init_lora_weights": True, "target_modules": ["to_q"], **fields})


@pytest.mark.parametrize(
    ("metadata", "extra", "expected"),
    [
        ({}, {}, 1),
        # finetrainers
        ({"lora_config": config_text()}, {}, 4),
        # diffusers, beside the text encoder's none
        ({"lora_adapter_metadata": json.dumps({"transformer.r": 4, "transformer.lora_alpha": 2})}, {}, 0.5),
        # kohya's trainers: musubi-tuner's converter keeps its notes beside factors that hold the scale, and writes an
        # integer the other way round
        ({"ss_network_alpha": "16", "ss_network_dim": "4", "ss_network_module": "networks.lora_wan"}, {}, 1),
        ({"ss_network_alpha": "16", "ss_network_args": '{"rs_lora": "True"}'}, {"alpha": torch.tensor(2)}, 0.5),
        ({}, {"alpha": torch.tensor([16.0], dtype=torch.bfloat16)}, 4),
        # both, but for rounding
        ({"lora_config": config_text(use_rslora=True)}, {"alpha": torch.tensor(31.9)}, 8),
        ({"modelspec.title": "x", "format": "pt"}, {"alpha": torch.tensor(4.0)}, 1),
    ],
)
def test_the_strength_in_metadata_and_tensors(metadata, extra, expected, base, tmp_path):
    tensors = low_rank() | {f"transformer.{Q}.{key}": value for key, value in extra.items()}
    save_file(tensors, tmp_path / "x.safetensors", metadata)
    assert strength(base, tmp_path / "x.safetensors") == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("metadata", "extra", "message"),
    [
        (
            {"lora_config": config_text()},
            {"alpha": torch.tensor(4.0)},
            r"to_q.lora_A.weight is scaled by 4 by .* and 1 b",
        ),
        (
            {"lora_config": config_text(), "lora_adapter_metadata": config_text(lora_alpha=8)},
            {},
            r"is scaled by 2 by .*, lora_adapter_metadata and 4 by .*, lora_config",
        ),
        (
            {"lora_config": '{"rank": 4, "alpha": 4}'},
            {},
            r"x.safetensors, lora_config has rank=4, alpha=4, which cannot",
        ),
        ({"lora_config": "{"}, {}, r"x.safetensors, lora_config does not parse"),
        (
            {"network_alphas": '{"to_q": 8}'},
            {},
            r"x.safetensors has network_alphas='.*' in its metadata, a strength that",
        ),
        ({"alpha": "8"}, {}, r"x.safetensors has alpha='8' in its metadata, a strength that is not read: write .a"),
        ({"lora_alpha": "8"}, {}, r"x.safetensors has lora_alpha='8' in its metadata, a strength that is not read"),
        ({"lora_adapter_metadata": '{"text_encoder.r": 4}'}, {}, r"has text_encoder.r=4, which cannot be merged here"),
        ({}, {"alpha": torch.tensor(0.0)}, r"has transformer.*to_q.alpha=0.0, expected a number above 0"),
        ({}, {"alpha": torch.tensor(0)}, r"to_q.alpha=0, expected a number above 0"),
        ({}, {"alpha": torch.tensor(-4.0)}, r"to_q.alpha=-4.0, expected a number above 0"),
        ({}, {"alpha": torch.tensor(torch.nan)}, r"to_q.alpha=nan, expected a number above 0"),
        ({}, {"alpha": torch.ones(2)}, r"to_q.alpha has shape \(2,\), the model needs \(\)"),
        ({}, {"alpha": torch.tensor(True)}, r"to_q.alpha has dtype BOOL, only F64, F32, F16, BF16 can be read"),
        ({}, {"weight": torch.ones(32, 32)}, r"has both a change and the whole of blocks.0.attn1.to_q.weight"),
        ({}, {"lora_down.weight": torch.ones(4, 32)}, r"has 1 tensors the model has no place for"),
        ({}, {"lora_magnitude_vector": torch.ones(32)}, r"has keys of no known form .*lora_magnitude_vector"),
        ({}, {"lora_B.bias": torch.ones(32)}, r"changes parameters that .* lacks blocks.0.attn1.to_q.lora_B.bias"),
    ],
)
def test_strengths_that_contradict_or_are_none_are_refused(metadata, extra, message, base, tmp_path):
    tensors = low_rank() | {f"transformer.{Q}.{key}": value for key, value in extra.items()}
    save_file(tensors, tmp_path / "x.safetensors", metadata)
    refused(base, tmp_path / "x.safetensors", message)


def altered(dtype: torch.dtype) -> dict[str, Tensor]:
    return {key: value.to(dtype) if "lora_B" in key else value for key, value in low_rank().items()}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, r"x.safetensors holds no tensors"),
        (
            altered(torch.int64),
            r"x.safetensors: transformer.*lora_B.weight has dtype I64, only F64, F32, F16, BF16 can",
        ),
        (altered(torch.int8), r"lora_B.weight has dtype I8, only F64, F32, F16, BF16 can be read"),
        (altered(torch.bool), r"lora_B.weight has dtype BOOL, only F64, F32, F16, BF16 can be read"),
        (altered(torch.complex64), r"lora_B.weight has dtype C64, only F64, F32, F16, BF16 can be read"),
        (
            altered(torch.float8_e4m3fn),
            r"x.safetensors is quantized to fp8 \(transformer.*lora_B.weight has dtype F8_E4M3",
        ),
        (low_rank(rank=0), r"to_q.lora_A.weight has shape \(0, 32\), the model needs \(1, 32\)"),
        (
            {**low_rank(), f"transformer.{Q}.lora_B.weight": torch.ones(32, 1)},
            r"lora_B.* \(32, 1\), the model needs \(32, 4",
        ),
        (
            {**low_rank(), f"transformer.{Q}.lora_A.weight": torch.ones(32)},
            r"lora_A.weight has shape \(32,\), the model nee",
        ),
        ({**low_rank(), f"{Q}.lora_A.weight": torch.ones(4, 32)}, r"has 1 tensors the model has no place for"),
        (
            {**low_rank(), "text_encoder.q.lora_A.weight": torch.ones(4, 32)},
            r"changes parameters that .* lacks text_encod",
        ),
    ],
)
def test_files_of_other_kinds_are_refused(tensors, message, base, tmp_path):
    save_file(tensors, tmp_path / "x.safetensors")
    refused(base, tmp_path / "x.safetensors", message)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_named(value, base, tmp_path):
    save_file({key: torch.full_like(x, value) for key, x in low_rank().items()}, tmp_path / "x.safetensors")
    message = r"x.safetensors: 128 values of transformer.blocks.0.attn1.to_q.lora_.* are NaN or infinite"
    with pytest.raises(ValueError, match=message):
        open_weights(f"{base}+{tmp_path / 'x.safetensors'}")[f"{Q}.weight"]
    model = tiny.wan().model
    with pytest.raises(ValueError, match=message):
        merge_adapter(model, tmp_path / "x.safetensors")
    # and those that are finite until they are added to weights of 16 bits
    save_file({key: torch.full_like(x, 1e4) for key, x in low_rank().items()}, tmp_path / "x.safetensors")
    model = model.half()
    with pytest.raises(ValueError, match=r"x.safetensors, merged: 1024 values of .*to_q.weight are NaN or infinite"):
        merge_adapter(model, tmp_path / "x.safetensors")
    assert difference(model.state_dict(), tiny.wan().model.half().state_dict()) == 0


def test_places_that_hold_no_adapters_are_named(base, tmp_path):
    for spec, message in {
        f"{base}+": r"base.*\+ names no file of adapters behind its \+",
        f"{base}+{tmp_path / 'none.safetensors'}": r"no such file: .*none.safetensors",
        f"{base}+{tmp_path}": r"holds no .safetensors file of adapters",
        f"{base}+{base / 'config.json'}": r"config.json is no safetensors file",
    }.items():
        with pytest.raises(ValueError, match=message):
            open_weights(spec)
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    refused(base, tmp_path / "adapter_model.bin", r"adapter_model.bin is no safetensors file: name the .safetensors fi")


def test_a_conversion_of_adapters_names_them_and_a_full_disk(lora, base, tmp_path):
    source = open_weights(f"{base}+{lora}")
    with small_files(4000), pytest.raises(DiskFullError, match=rf"cannot write {tmp_path}/out: File too large"):
        convert(source, tmp_path / "out", Conversion())
    assert not list(tmp_path.iterdir())
    (line,) = convert(source, tmp_path / "out", Conversion())
    assert f"from {base}+{lora} in {tmp_path / 'out'}" in line
