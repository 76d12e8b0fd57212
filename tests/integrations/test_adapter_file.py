"""Adapter files of the forms that people hold, merged into MiniMax-H3 with its gates."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from tests.integrations import tiny
from vsa.integrations.diffusers import apply, merge_adapter

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
        ({"blocks.0.attn.qkv_proj.diff": torch.ones(3)}, r"changes parameters that MiniMaxH3.* lacks .*qkv_proj"),
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
    save_file(tensors(), tmp_path / "peft.safetensors", {"lora_adapter_metadata": "{}"})
    with pytest.raises(ValueError, match="has its scales in its metadata: load it by load_lora_weights"):
        merge_adapter(h3().model, tmp_path / "peft.safetensors")
    with pytest.raises(ValueError, match=r"absent\.safetensors is missing"):
        merge_adapter(h3().model, tmp_path / "absent.safetensors")
