"""Adapter files of the forms that people hold, merged into MiniMax-H3 with its gates."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import diffusers
import pytest
import torch
from diffusers import loaders
from safetensors.torch import load_file, save_file

from tests.integrations import tiny
from tests.integrations.test_original_names import original
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.checkpoints.adapter_files import FILE, AdapterForm, write_adapters
from vsa.checkpoints.convert import Conversion, convert
from vsa.checkpoints.lora import LowRank
from vsa.checkpoints.original_names import original_rows
from vsa.checkpoints.wan import gate_names
from vsa.checkpoints.weight_source import open_weights
from vsa.integrations.diffusers import apply, load_sparse, merge_adapter
from vsa.integrations.diffusers.network import DiffusersNetwork

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")

Q, GATE = "transformer_blocks.1.attn.to_q", "transformer_blocks.{}.attn.to_gate_compress"


def h3(gates: str = "coarse") -> tiny.Case:
    case = tiny.minimax_h3()
    apply(case.model, topk=3, tile_thw=tiny.TILE, gates=gates)
    return case


def tensors() -> dict[str, torch.Tensor]:
    """The file of a FastVideo student: factors, differences of weights and biases, gates that replace."""
    return {
        f"{Q}.lora_A.weight": tiny.randn(3, 24, seed=1),
        f"{Q}.lora_B.weight": tiny.randn(32, 3, seed=2),
        "transformer_blocks.0.norm1.diff": tiny.randn(24, seed=3),
        "proj_in.lora_A.weight": tiny.randn(2, 8, seed=4),
        "proj_in.lora_B.weight": tiny.randn(24, 2, seed=5),
        "proj_in.diff": tiny.randn(24, 8, seed=6),
        "proj_in.diff_b": tiny.randn(24, seed=7),
        **{f"{GATE.format(i)}.set_weight": tiny.randn(32, 24, seed=8 + i) for i in range(2)},
    }


def merged(before: dict[str, torch.Tensor], file: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """What a file of `tensors` means, by hand."""
    after = dict(before)
    for name in (Q, "proj_in"):
        delta = file[f"{name}.lora_B.weight"].double() @ file[f"{name}.lora_A.weight"].double()
        after[f"{name}.weight"] = before[f"{name}.weight"] + scale * delta
    after["proj_in.weight"] = after["proj_in.weight"] + scale * file["proj_in.diff"]
    after["proj_in.bias"] = before["proj_in.bias"] + scale * file["proj_in.diff_b"]
    norm = "transformer_blocks.0.norm1"
    after[f"{norm}.weight"] = before[f"{norm}.weight"] + scale * file[f"{norm}.diff"]
    for i in range(2):
        after[f"{GATE.format(i)}.weight"] = file[f"{GATE.format(i)}.set_weight"]
    return after


@pytest.mark.parametrize(("scale", "dtype"), [(1.0, torch.float32), (0.5, torch.float32), (1.0, torch.bfloat16)])
def test_factors_differences_and_gates_are_merged(scale, dtype, tmp_path):
    case, file = h3(), tensors()
    case.model.to(dtype)
    before = {name: p.detach().double() for name, p in case.model.named_parameters()}
    save_file(file, tmp_path / "adapter.safetensors")
    changed = merge_adapter(case.model, tmp_path / "adapter.safetensors", scale=scale)
    expected = merged(before, file, scale)
    rounding = 1e-6 if dtype is torch.float32 else 2**-8
    for name, p in case.model.named_parameters():
        assert p.dtype == dtype
        assert tiny.difference(p.detach().double(), expected[name].double()) <= rounding, name
        assert torch.equal(p.detach().double(), before[name]) == (name not in changed), name
    assert len(changed) == 1 + 1 + 2 + 2


@torch.no_grad()
@pytest.mark.parametrize("ending", ["set_weight", "weight"])
def test_the_gates_of_a_file_act(ending, tmp_path):
    case = h3()
    file = {name.replace("set_weight", ending): tensor for name, tensor in tensors().items() if "gate" in name}
    expected = case.run()
    save_file(file, tmp_path / "gates.safetensors")
    merge_adapter(case.model, tmp_path / "gates.safetensors")
    assert tiny.difference(case.run(), expected) > 1e-3
    weights = case.model.state_dict()
    assert all(torch.equal(weights[name.replace(ending, "weight")], tensor) for name, tensor in file.items())


@pytest.mark.parametrize(
    ("form", "scale"),
    [
        (lambda name: name.replace("lora_A", "lora_down").replace("lora_B", "lora_up"), 1.0),
        (lambda name: f"diffusion_model.{name}", 1.0),
        (lambda name: f"transformer.{name}".replace(".weight", ".default.weight"), 1.0),
        # alpha 6 of rank 3
        (lambda name: f"base_model.model.{name}", 2.0),
    ],
)
def test_other_spellings_of_factors(form, scale, tmp_path):
    case, weight = h3(), f"{Q}.weight"
    file = {name: tensor for name, tensor in tensors().items() if name.startswith(Q)}
    delta = file[f"{Q}.lora_B.weight"] @ file[f"{Q}.lora_A.weight"]
    expected = case.model.state_dict()[weight] + scale * delta
    file = {form(name): tensor for name, tensor in file.items()}
    if scale != 1:
        file[f"{Q}.alpha"] = torch.tensor(6.0)
    save_file(file, tmp_path / "lora.safetensors")
    assert merge_adapter(case.model, tmp_path / "lora.safetensors") == (weight,)
    assert tiny.difference(case.model.state_dict()[weight], expected) < 1e-6


NAN = torch.full((24,), torch.nan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{Q}.dora_scale": torch.ones(32)}, r"has keys of no known form .*to_q\.dora_scale, known are \.lora_A"),
        ({"blocks.0.attn.kv_proj.diff": torch.ones(3)}, r"changes parameters that MiniMaxH3.* lacks .*kv_proj"),
        ({"blocks.0.attn.qkv_proj.diff": torch.ones(3)}, r"qkv_proj.diff has shape \(3,\), the model needs \(96, 24\)"),
        ({f"{Q}.lora_B.weight": None}, r"has one of two factors of transformer_blocks\.1\.attn\.to_q\.weight"),
        (
            {f"{Q}.lora_B.weight": torch.ones(32, 4)},
            r"to_q\.lora_B\.weight has shape \(32, 4\), the model needs \(32, 3\)",
        ),
        ({"proj_in.diff_b": torch.ones(23)}, r"proj_in\.diff_b has shape \(23,\), the model needs \(24,\)"),
        ({"proj_in.diff_b": NAN}, r"24 values of proj_in\.diff_b are NaN or infinite"),
        ({"transformer.proj_in.diff_b": torch.ones(24)}, r"has no place for: "),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(change, message, tmp_path):
    case = h3()
    before = {name: p.clone() for name, p in case.model.state_dict().items()}
    file = {name: tensor for name, tensor in {**tensors(), **change}.items() if tensor is not None}
    save_file(file, tmp_path / "adapter.safetensors")
    with pytest.raises(ValueError, match=message):
        merge_adapter(case.model, tmp_path / "adapter.safetensors")
    assert all(torch.equal(p, before[name]) for name, p in case.model.state_dict().items())


def test_what_is_needed_first_is_said(tmp_path):
    save_file(tensors(), tmp_path / "adapter.safetensors")
    with pytest.raises(ValueError, match=r'has gates that .* lacks .*apply\(transformer, sparsity=.*gates="coarse"\)'):
        merge_adapter(h3("none").model, tmp_path / "adapter.safetensors")
    quantised = h3()
    quantised.model.transformer_blocks[1].attn.to_q.weight.data = torch.zeros(32, 24, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"to_q\.weight is stored as torch\.float8_e4m3fn, merge before quantising"):
        merge_adapter(quantised.model, tmp_path / "adapter.safetensors")
    with pytest.raises(ValueError, match=r"absent\.safetensors is missing"):
        merge_adapter(h3().model, tmp_path / "absent.safetensors")


FAMILIES = {
    "ltx": (tiny.ltx, loaders.lora_pipeline.LTXVideoLoraLoaderMixin),
    "hunyuan": (tiny.hunyuan, None),
    "hunyuan15": (tiny.hunyuan15, None),
    "minimax_h3": (tiny.minimax_h3, loaders.lora_pipeline.MiniMaxH3LoraLoaderMixin),
    "kandinsky5": (tiny.kandinsky5, loaders.lora_pipeline.KandinskyLoraLoaderMixin),
    "cogvideox": (tiny.cogvideox, loaders.lora_pipeline.CogVideoXLoraLoaderMixin),
}
READ: dict[AdapterForm, tuple[str, ...]] = {
    "diffusers": ("ltx", "minimax_h3", "kandinsky5", "cogvideox"),
    "comfyui": ("ltx", "minimax_h3"),
    "musubi": ("minimax_h3",),
}
"""Families whose files in a form are read by diffusers 0.42."""


def adapters_for(shapes: dict[str, tuple[int, ...]]) -> dict[str, LowRank]:
    """An adapter of rank 2 on every linear layer of a block but one, as `task.lora.targets` may leave some out."""
    made = {}
    for i, (name, shape) in enumerate(shapes.items()):
        module, _, kind = name.rpartition(".")
        if "blocks." in name and kind == "weight" and len(shape) == 2 and not module.endswith("blocks.0.attn.to_k"):
            made[module] = LowRank(tiny.randn(2, shape[1], seed=i), tiny.randn(shape[0], 2, seed=-i), 1.5)
    return made


@pytest.mark.parametrize("form", get_args(AdapterForm))
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_and_gates_of_every_family_go_out_and_in(family, form, tmp_path):
    make, mixin = FAMILIES[family]
    own = {"fine_gate": False, "gate_bias": False, "coarse_text": True} if family == "minimax_h3" else {}
    model = make().model
    model.save_pretrained(tmp_path / "base")
    with torch.device("meta"):
        sparse = DiffusersNetwork(
            attention=partial(VideoSparseAttention, tile_thw=tiny.TILE, **own),
            class_name=type(model).__name__,
            config=model.config,
        )
    shapes = {name: tuple(p.shape) for name, p in sparse.named_parameters()}
    gates = {name: tiny.randn(*shapes[name]) for name in gate_names(sparse)}
    adapters = adapters_for({name: shape for name, shape in shapes.items() if name not in gates})
    assert any(name.endswith(("to_q", "to_query")) for name in adapters)
    rows = original_rows(shapes, type(model).__name__)
    write_adapters(adapters, gates, tmp_path / "lora", form, rows=rows, sparse=None)
    before, merged = open_weights(tmp_path / "base"), open_weights(f"{tmp_path / 'base'}+{tmp_path / 'lora'}")
    assert set(merged) == set(shapes)
    assert all(torch.equal(merged[name], value) for name, value in gates.items())
    deltas = {name: 1.5 * low.b.double() @ low.a.double() for name, low in adapters.items()}
    for name in before:
        delta = deltas.get(name.removesuffix(".weight"), torch.zeros(1))
        torch.testing.assert_close(merged[name].double(), before[name].double() + delta, rtol=1e-6, atol=1e-5)
    if family not in READ[form]:
        return
    # what diffusers reads, and nothing else but zeros
    file = tmp_path / "lora" / FILE
    save_file({key: value for key, value in load_file(file).items() if "to_gate" not in key}, file)
    read: Any = mixin.lora_state_dict(str(file))
    for key in (key for key in read if ".lora_A." in key):
        name = key.removeprefix("transformer.").removesuffix(".lora_A.weight")
        found = read[key.replace("lora_A", "lora_B")].double() @ read[key].double()
        torch.testing.assert_close(found, deltas.pop(name, torch.zeros_like(found)), rtol=1e-5, atol=1e-5)
    assert not deltas


def hunyuan_shapes() -> dict[str, tuple[int, ...]]:
    """Of the width that diffusers' converters of HunyuanVideo assume."""
    sizes = dict(num_attention_heads=24, attention_head_dim=128, num_layers=1, num_single_layers=1)
    sizes |= dict(num_refiner_layers=1, mlp_ratio=0.01, text_embed_dim=8, pooled_projection_dim=8)
    with torch.device("meta"):
        model = diffusers.HunyuanVideoTransformer3DModel(**sizes)  # type: ignore[arg-type]
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_fused_adapters_are_those_that_diffusers_splits(tmp_path):
    # rows of one column, for the reader looks at rows alone
    shapes = {name: (*shape[:1], 1) if len(shape) == 2 else shape for name, shape in hunyuan_shapes().items()}
    # diffusers 0.42 cuts lora_A of the text's blocks in three too
    adapters = adapters_for({name: shape for name, shape in shapes.items() if "refiner" not in name})
    rows = original_rows(shapes, "HunyuanVideoTransformer3DModel")
    write_adapters(adapters, {}, tmp_path / "lora", "comfyui", rows=rows, sparse=None)
    read: Any = loaders.lora_pipeline.HunyuanVideoLoraLoaderMixin.lora_state_dict(str(tmp_path / "lora" / FILE))
    assert any("linear1" in key for key in load_file(tmp_path / "lora" / FILE))
    for name, low in adapters.items():
        a, b = (read[f"transformer.{name}.lora_{half}.weight"] for half in "AB")
        torch.testing.assert_close(b @ a, 1.5 * low.b @ low.a, rtol=1e-5, atol=1e-5)


def test_rows_of_another_order_are_refused(tmp_path):
    case = h3()
    fused = "blocks.0.attn.qkv_proj.lora_{}.default.weight"
    save_file({fused.format("A"): torch.ones(2, 24), fused.format("B"): torch.ones(96, 2)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"is of DiffSynth-Studio, with the rows of .* head by head: load it by load_"):
        merge_adapter(case.model, tmp_path / "x.safetensors")


@pytest.mark.parametrize("kind", ["folder", "adapters", "one file"])
def test_a_student_without_a_description_is_refused_until_it_has_one(kind, tmp_path):
    """A student of FastVideo in whole, as the adapters of one beside their base, and in one file of original names."""
    case = tiny.minimax_h3()
    case.model.save_pretrained(tmp_path / "base")
    file = tensors()
    student = merged(case.model.state_dict(), file, 1.0)
    place = tmp_path / "base"
    if kind == "folder":
        save_file({name: x.float() for name, x in student.items()}, next(place.glob("*.safetensors")))
    elif kind == "adapters":
        save_file(file, tmp_path / "student.safetensors")
    else:
        next(place.glob("*.safetensors")).unlink()
        save_file(
            original({name: x.float() for name, x in student.items()}, type(case.model).__name__),
            place / "fasth3.safetensors",
        )
    source = f"{place}+{tmp_path / 'student.safetensors'}" if kind == "adapters" else str(place)
    with pytest.raises(ValueError, match=r"sparse_attention.json") as caught:
        open_weights(source).network()
    assert "vsa convert" in str(caught.value)
    assert "\n" not in str(caught.value)
    # a quarter of 1 x 2 x 2 tiles of (4, 4, 4), beside the prefix
    convert(open_weights(source), tmp_path / "out", Conversion(sparsity=0.75, grid=(3, 5, 7)))
    exported = open_weights(tmp_path / "out")
    assert exported.sparse is not None
    assert exported.sparse.settings == {**exported.sparse.settings, "gate_bias": False, "coarse_text": True}
    assert (exported.sparse.num_tiles, exported.sparse.grid_topk) == ((4,), ((1, 1),))
    assert all(tiny.difference(exported[name], value.float()) < 1e-6 for name, value in student.items())
    # and back in the layout of FastVideo, whose config.json has no key of ours
    convert(exported, tmp_path / "fastvideo", Conversion(to="fastvideo", golden=False))
    back = open_weights(tmp_path / "fastvideo")
    assert all(torch.equal(back[name], exported[name]) for name in exported)
    assert set(back) == set(student)
    assert "sparse_attention" not in back.config
    # the class with its published gates computes the same
    apply(case.model, sparsity=0.75, gates="coarse")
    case.model.load_state_dict(student)
    expected = case.run()
    assert tiny.difference(load_sparse(tmp_path / "out")(**case.inputs).sample, expected) < 1e-5
    assert tiny.difference(load_sparse(tmp_path / "out", topk=2)(**case.inputs).sample, expected) > 1e-4
