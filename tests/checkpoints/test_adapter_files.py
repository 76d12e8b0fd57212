"""Files of adapters in the key forms of diffusers, ComfyUI and musubi-tuner: written, read by diffusers, and merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from diffusers.loaders import WanLoraLoaderMixin
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints.wan_models import COARSE_ONLY, config_of, diffusers_model, random_sparse
from vsa.checkpoints.adapter_files import FILE, GATES_FILE, AdapterForm, write_adapters
from vsa.checkpoints.lora import LowRank
from vsa.checkpoints.original_names import original_rows
from vsa.checkpoints.wan import gate_names
from vsa.checkpoints.weight_source import open_network, open_weights

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full:UserWarning")
FORMS = get_args(AdapterForm)
SCALE = 1.5


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    diffusers_model().save_pretrained(folder)
    return folder


def adapters_for(base: Path) -> dict[str, LowRank]:
    generator = torch.Generator().manual_seed(3)
    made = {}
    for name, shape in open_weights(base).shapes.items():
        if name.startswith("blocks.") and name.endswith(".weight") and len(shape) == 2:
            a, b = torch.randn(2, shape[1], generator=generator), torch.randn(shape[0], 2, generator=generator)
            made[name.removesuffix(".weight")] = LowRank(a, b, SCALE)
    return made


def written(base: Path, folder: Path, form: AdapterForm) -> tuple[dict[str, LowRank], dict[str, Tensor]]:
    sparse = random_sparse(COARSE_ONLY)
    gates = {name: dict(sparse.named_parameters())[name].detach() for name in gate_names(sparse)}
    adapters = adapters_for(base)
    shapes = {name: tuple(p.shape) for name, p in sparse.named_parameters()}
    rows = original_rows(shapes, "WanTransformer3DModel")
    write_adapters(adapters, gates, folder, form, rows=rows, sparse=config_of(sparse))
    return adapters, gates


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_is_merged_again(form, base, tmp_path):
    adapters, gates = written(base, tmp_path / "lora", form)
    merged, before = open_weights(f"{base}+{tmp_path / 'lora'}"), open_weights(base)
    assert set(merged) == set(before) | set(gates)
    for name in before:
        expected = before[name]
        if (low := adapters.get(name.removesuffix(".weight"))) is not None:
            expected = expected.double() + SCALE * low.b.double() @ low.a.double()
            # the control: without the scale
            assert (merged[name] - before[name] - low.b @ low.a).abs().max() > 0.1
        torch.testing.assert_close(merged[name].double(), expected.double(), rtol=1e-6, atol=1e-5)
    assert all(torch.equal(merged[name], value) for name, value in gates.items())
    # the whole is a sparse model
    model, source = open_network(f"{base}+{tmp_path / 'lora'}")
    assert source.sparse is not None
    assert set(gate_names(model)) == set(gates)
    assert source.digest != before.digest


@pytest.mark.parametrize("form", FORMS)
def test_diffusers_reads_every_form(form, base, tmp_path):
    adapters, _ = written(base, tmp_path / "lora", form)
    file = tmp_path / "lora" / FILE
    if form == "comfyui":
        # diffusers 0.42 takes differences of norms and biases, but none of gates, which it does not know
        save_file({key: value for key, value in load_file(file).items() if "to_gate" not in key}, file)
    loaded: Any = WanLoraLoaderMixin.lora_state_dict(str(file))
    assert set(loaded) == {f"transformer.{module}.lora_{half}.weight" for module in adapters for half in "AB"}
    for module, low in adapters.items():
        a, b = (loaded[f"transformer.{module}.lora_{half}.weight"] for half in "AB")
        torch.testing.assert_close(b @ a, SCALE * low.b @ low.a, rtol=1e-5, atol=1e-5)
    # its readers refuse what is no adapter
    assert (tmp_path / "lora" / GATES_FILE).exists() == (form != "comfyui")


def test_whole_parameters_and_differences_are_merged(base, tmp_path):
    before = open_weights(base)
    name, table = "blocks.0.attn2.to_k", "blocks.0.scale_shift_table"
    weight, bias = before[f"{name}.weight"], before[f"{name}.bias"]
    changes = {
        "diffusion_model.blocks.0.cross_attn.k.diff": torch.full_like(weight, 0.5),
        "diffusion_model.blocks.0.cross_attn.k.diff_b": torch.full_like(bias, 0.25),
        "diffusion_model.blocks.1.cross_attn.k.set_weight": torch.full_like(weight, 3.0),
        "diffusion_model.blocks.0.modulation.diff_param": torch.full_like(before[table], 0.5),
        "transformer.blocks.1.scale_shift_table.set_param": torch.full_like(before[table], 2.0),
        "transformer.proj_out.lora_A.weight": torch.ones(1, 48),
        "transformer.proj_out.lora_B.weight": torch.ones(32, 1),
    }
    save_file(changes, tmp_path / "x.safetensors")
    after = open_weights(f"{base}+{tmp_path / 'x.safetensors'}")
    assert torch.equal(after[f"{name}.weight"], weight + 0.5)
    assert torch.equal(after[f"{name}.bias"], bias + 0.25)
    assert after["blocks.1.attn2.to_k.weight"].eq(3).all()
    assert torch.equal(after[table], before[table] + 0.5)
    assert after["blocks.1.scale_shift_table"].eq(2).all()
    # alpha is the rank where no key says it
    assert torch.equal(after["proj_out.weight"], before["proj_out.weight"] + 1)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"transformer.blocks.0.attn1.to_k_q.lora_A.weight": (2, 48)},
            r"changes parameters that .* lacks .*to_k_q.weight; the nearest is blocks",
        ),
        (
            {"transformer.blocks.0.attn1.to_q.lora_A.weight": (2, 48)},
            "has one of two factors of blocks.0.attn1.to_q.weight",
        ),
        ({"transformer.blocks.0.attn1.to_q.dora_scale": (48,)}, "has keys of no known form .*dora_scale"),
        (
            {f"lora_unet_blocks_0_self_attn_q.lora_{half}.weight": (2, 64) for half in ("up", "down")},
            r"self_attn_q.lora_down.weight has shape \(2, 64\), the model needs \(2, 48\); .*up.* needs \(48, 2\)",
        ),
        ({}, "holds no .safetensors file of adapters"),
    ],
)
def test_adapters_of_another_model_are_refused_in_one_line(tensors, message, base, tmp_path):
    if tensors:
        save_file({key: torch.ones(shape) for key, shape in tensors.items()}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=message) as caught:
        open_weights(f"{base}+{tmp_path}")
    assert "\n" not in str(caught.value)
