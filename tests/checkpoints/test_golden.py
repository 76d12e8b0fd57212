"""Golden tensors: the reference engine conforms, an independent one does, and changed ones do not."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.attention.neighborhood.oracle import grid_mask
from tests.tiny_runs import vsa_command
from vsa.attention.neighborhood.method import NeighborhoodAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.checkpoints import golden
from vsa.checkpoints.golden import TOLERANCE, GoldenCase, attention_output, check_golden, write_golden
from vsa.checkpoints.sparse_config import SPARSE_CONFIG, SparseAttentionConfig, read_sparse_config
from vsa.checkpoints.wan import export_pretrained, sparse_settings
from vsa.checkpoints.weight_source import open_network
from vsa.models.video_dit import VideoDiT

ROOT = Path(__file__).parents[2]
SIZES = dict(num_attention_heads=2, attention_head_dim=16, ffn_dim=48, num_layers=3, text_dim=16, freq_dim=16)
GRID, TILE = (3, 5, 4), (2, 2, 2)
WINDOW, STRIDE = (3, 4, 3), (1, 2, 1)


def export(folder: Path, *, fine_gate: bool = False, partition: str = "cube", **config: Any) -> VideoDiT:
    method = partial(VideoSparseAttention, tile_thw=TILE, fine_gate=fine_gate, partition=partition)
    model = VideoDiT(attention=method, **SIZES)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    values: dict[str, Any] = {"grid_topk": ((4, 4, 4),), "num_tiles": (12,), "grids": (GRID,)}
    export_pretrained(model, folder, sparse=SparseAttentionConfig(**{**sparse_settings(model), **values, **config}))
    return model


def projected_by_hand(tensors: dict[str, torch.Tensor], case: GoldenCase) -> tuple[torch.Tensor, ...]:
    """q, k, v `[L, H, D]` of a layer, from the weights' file alone, in fp64."""
    heads, dim = SIZES["num_attention_heads"], SIZES["attention_head_dim"]
    t, h, w = case.grid_thw
    x = case.hidden[0].double()

    def linear(name: str, y: torch.Tensor) -> torch.Tensor:
        prefix = f"blocks.{case.layer}.{name}"
        return y @ tensors[f"{prefix}.weight"].double().T + tensors[f"{prefix}.bias"].double()

    def rms_norm(name: str, y: torch.Tensor) -> torch.Tensor:
        weight = tensors[f"blocks.{case.layer}.{name}.weight"].double()
        return y / (y.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    cells = [(a, b, c) for a in range(t) for b in range(h) for c in range(w)]
    spatial = 2 * (dim // 6)
    angles = []
    for cell in cells:
        row = []
        for position, size in zip(cell, (dim - 2 * spatial, spatial, spatial), strict=True):
            row += [position / 10000 ** (i / size) for i in range(0, size, 2)]
        angles.append(row)
    turn = torch.polar(torch.ones(len(cells), dim // 2, dtype=torch.float64), torch.tensor(angles, dtype=torch.float64))

    def rotate(y: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(y.view(len(cells), heads, dim // 2, 2).contiguous())
        return torch.view_as_real(pairs * turn[:, None]).flatten(2)

    q = rotate(rms_norm("attn1.norm_q", linear("attn1.to_q", x)))
    k = rotate(rms_norm("attn1.norm_k", linear("attn1.to_k", x)))
    return q, k, linear("attn1.to_v", x).view(len(cells), heads, dim)


def attended_by_hand(tensors: dict[str, torch.Tensor], case: GoldenCase, seen: torch.Tensor) -> torch.Tensor:
    """One layer with a mask over tokens and no gates."""
    q, k, v = projected_by_hand(tensors, case)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)
    prefix = f"blocks.{case.layer}.attn1.to_out.0"
    return (out.flatten(1) @ tensors[f"{prefix}.weight"].double().T + tensors[f"{prefix}.bias"].double())[None]


def by_hand(tensors: dict[str, torch.Tensor], case: GoldenCase) -> torch.Tensor:
    """One layer from the weights' file alone: fp64, masks built token by token, no code of ours."""
    q, k, v = projected_by_hand(tensors, case)
    (length, heads, dim), x = q.shape, case.hidden[0].double()
    t, h, w = case.grid_thw
    cells = [(a, b, c) for a in range(t) for b in range(h) for c in range(w)]

    def linear(name: str, y: torch.Tensor) -> torch.Tensor:
        prefix = f"blocks.{case.layer}.{name}"
        return y @ tensors[f"{prefix}.weight"].double().T + tensors[f"{prefix}.bias"].double()

    gate = linear("to_gate_compress", x).view(length, heads, dim)
    fine_gate = torch.ones_like(gate)
    if f"blocks.{case.layer}.to_gate_fine.weight" in tensors:
        fine_gate = linear("to_gate_fine", x).view(length, heads, dim)

    tile_of = [tuple(p // s for p, s in zip(cell, TILE, strict=True)) for cell in cells]
    tiles = sorted(set(tile_of))
    member = torch.tensor([[owner == tile for owner in tile_of] for tile in tiles], dtype=torch.float64)
    means = [member @ y.flatten(1) / member.sum(1, keepdim=True) for y in (q, k, v)]
    q_mean, k_mean, v_mean = (y.view(len(tiles), heads, dim) for y in means)
    out = torch.empty_like(v)
    for head in range(heads):
        scores = q_mean[:, head] @ k_mean[:, head].T / math.sqrt(dim)
        coarse = scores.softmax(-1) @ v_mean[:, head]
        selection = torch.zeros_like(scores).scatter_(1, scores.topk(case.topk).indices, 1.0)
        mask = (member.T @ selection @ member).bool()
        full = (q[:, head] @ k[:, head].T / math.sqrt(dim)).masked_fill(~mask, -math.inf)
        out[:, head] = fine_gate[:, head] * (full.softmax(-1) @ v[:, head]) + gate[:, head] * (member.T @ coarse)
    return linear("attn1.to_out.0", out.flatten(1))[None]


@pytest.mark.parametrize("fine_gate", [False, True], ids=["coarse_gate", "both_gates"])
def test_an_engine_written_by_hand_conforms(fine_gate, tmp_path):
    export(tmp_path / "out", fine_gate=fine_gate, dense_layers=(1,))
    model, info = open_network(tmp_path / "out")
    write_golden(model, info.folder)
    tensors = load_file(info.folder / "diffusion_pytorch_model.safetensors")
    cases: list[GoldenCase] = []

    def engine(case: GoldenCase) -> torch.Tensor:
        cases.append(case)
        return by_hand(tensors, case)

    results = check_golden(info.folder, engine)
    assert [row.layer for row in results] == [0, 1, 2]
    assert max(row.error for row in results) < 1e-5
    # twelve tiles, ragged on two axes; a quarter is kept, all in the dense layer
    assert {case.grid_thw for case in cases} == {(3, 5, 4)}
    assert [case.topk for case in cases] == [3, 12, 3]

    # an engine that keeps another number of tiles, or forgets a gate, is noticed in every layer it touches
    for broken in (
        lambda c: by_hand(tensors, GoldenCase(layer=c.layer, hidden=c.hidden, grid_thw=c.grid_thw, topk=4)),
        lambda c: by_hand({k: 0 * t if "compress" in k else t for k, t in tensors.items()}, c),
        lambda c: by_hand({k: 2 * t if "norm_q" in k else t for k, t in tensors.items()}, c),
    ):
        assert all(row.failed and row.error > 100 * TOLERANCE for row in check_golden(info.folder, broken))


@pytest.mark.parametrize("backend", ["reference", "gather"])
@pytest.mark.parametrize("partition", ["cube", "hilbert_run"])
def test_backends_of_ours_conform(partition, backend, tmp_path):
    export(tmp_path / "out", partition=partition)
    write_golden(open_network(tmp_path / "out")[0], tmp_path / "out")
    model, _ = open_network(tmp_path / "out", backend=backend)
    with torch.no_grad():
        results = check_golden(tmp_path / "out", partial(attention_output, model))
    assert len(results) == 3
    assert not any(row.failed for row in results)


def test_golden_files_are_reproducible_and_say_what_they_are(tmp_path):
    export(tmp_path / "out")
    model, _ = open_network(tmp_path / "out")
    path = write_golden(model, tmp_path / "out", layers=[2, 0], tolerance=1e-3)
    first = path.read_bytes()
    assert write_golden(model, tmp_path / "out", layers=[2, 0], tolerance=1e-3).read_bytes() == first
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["golden"])
        hidden = file.get_tensor("blocks.2.hidden")
        assert sorted(file.keys()) == ["blocks.0.hidden", "blocks.0.out", "blocks.2.hidden", "blocks.2.out"]
    cases = header["cases"]
    assert [(case["layer"], case["topk"]) for case in cases] == [(2, 3), (0, 3)]
    again = torch.randn(1, 60, 32, generator=torch.Generator().manual_seed(cases[0]["seed"]))
    assert torch.equal(hidden, again)
    sparse = read_sparse_config(tmp_path / "out")
    assert (sparse.golden, sparse.golden_tolerance) == ("golden.safetensors", 1e-3)


def test_selections_in_golden_files_are_no_near_ties(tmp_path):
    export(tmp_path / "out")
    model, _ = open_network(tmp_path / "out")
    write_golden(model, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors")
    with torch.no_grad():
        # noise above fp32's rounding changes no selected tile
        for row in check_golden(
            tmp_path / "out",
            lambda c: by_hand(
                tensors,
                GoldenCase(layer=c.layer, hidden=c.hidden * (1 + 1e-6), grid_thw=c.grid_thw, topk=c.topk),
            ),
        ):
            assert row.error < 1e-5
    # equal keys: no input can tell tiles apart
    dict(model.named_parameters())["blocks.0.attn1.norm_k.weight"].data.zero_()
    with pytest.raises(ValueError, match="layer 0: every one of 200 inputs has tiles with equal scores"):
        write_golden(model, tmp_path / "out", layers=[0])


def test_command_passes_and_fails_with_both_numbers(tmp_path, capsys, command_line):
    export(tmp_path / "out")
    write_golden(open_network(tmp_path / "out")[0], tmp_path / "out")
    vsa_command("verify-export", str(tmp_path / "out"), "--device", "cpu")
    assert "3 layers of" in capsys.readouterr().out

    # one entry of one gate
    path = tmp_path / "out" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors["blocks.1.to_gate_compress.weight"][3] += 0.5
    save_file(tensors, path)
    status, _, err = command_line("verify-export", str(tmp_path / "out"), "--device", "cpu")
    assert status == 1
    assert err.startswith("error: layer 1 has error ")
    assert "above its tolerance 1.000e-04" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("name", "moves"), [("kv_num_blocks", True), ("skipped", True), ("scores", False)])
def test_an_input_whose_tiles_or_skips_hang_on_rounding_is_passed_over(name, moves, monkeypatch):
    calls = []

    def spy(model, case, recorder):
        calls.append(case.hidden)
        recorder(0, {"kv_indices": torch.zeros(3), name: torch.tensor(len(calls))})

    monkeypatch.setattr(golden, "attention_output", spy)
    case = GoldenCase(layer=0, hidden=torch.ones(1, 4, 2), grid_thw=(1, 2, 2), topk=1)
    assert golden._is_steady(None, case, 0) is not moves
    assert torch.equal(calls[0], case.hidden)
    assert 0 < (calls[1] - case.hidden).abs().max() < 1e-3


def windows_export(folder: Path, *, grid: tuple[int, int, int] = (4, 6, 6), **config: Any) -> VideoDiT:
    method = partial(NeighborhoodAttention, window_thw=WINDOW, stride_thw=STRIDE)
    model = VideoDiT(attention=method, **SIZES)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    values: dict[str, Any] = {"grid_topk": ((8, 8, 8),), "num_tiles": (8,), "grids": (grid,)}
    export_pretrained(model, folder, sparse=SparseAttentionConfig(**{**sparse_settings(model), **values, **config}))
    return model


def masked_by_hand(tensors: dict[str, torch.Tensor], case: GoldenCase, **changes: Any) -> torch.Tensor:
    """One layer from the weights' file, with the windows as a mask over tokens."""
    mask = grid_mask(case.grid_thw, **{"window": WINDOW, "stride": STRIDE, **changes})
    return attended_by_hand(tensors, case, torch.ones_like(mask) if case.dense else mask)


def test_windows_conform_and_others_do_not(tmp_path, capsys, command_line):
    windows_export(tmp_path / "out", dense_layers=(1,))
    model, info = open_network(tmp_path / "out")
    write_golden(model, info.folder)
    tensors = load_file(info.folder / "diffusion_pytorch_model.safetensors")
    cases: list[GoldenCase] = []

    def engine(case: GoldenCase) -> torch.Tensor:
        cases.append(case)
        return masked_by_hand(tensors, case)

    results = check_golden(info.folder, engine)
    assert max(row.error for row in results) < 1e-5
    # no larger than a clip of the training, and every window leaves something out
    assert {case.grid_thw for case in cases} == {(4, 6, 6)}
    assert [case.dense for case in cases] == [False, True, False]
    for change in ({"window": (2, 4, 3)}, {"stride": (1, 1, 1)}):
        rows = check_golden(info.folder, lambda case, change=change: masked_by_hand(tensors, case, **change))
        assert [row.failed for row in rows] == [True, False, True]
    # a dense layer is no other one
    rows = check_golden(info.folder, lambda case: masked_by_hand(tensors, replace(case, dense=not case.dense)))
    assert all(row.failed and row.error > 100 * TOLERANCE for row in rows)

    vsa_command("verify-export", str(info.folder), "--device", "cpu")
    assert "3 layers of" in capsys.readouterr().out
    path = info.folder / SPARSE_CONFIG
    values = json.loads(path.read_text())
    values["settings"]["window_thw"][0] = 2
    path.write_text(json.dumps(values))
    status, _, err = command_line("verify-export", str(info.folder), "--device", "cpu")
    assert (status, err.count("\n")) == (1, 1)
    assert err.startswith("error: layer 0 has error ")


@pytest.mark.parametrize(
    ("window", "trained", "grid", "layers"),
    [
        # shares fit everywhere; along time nothing is left out whatever the size
        ((1.0, 0.5, 0.3), (30, 48, 80), (5, 9, 8), 3),
        # tokens need room, and a little more to slide
        ((3, 9, 1), (30, 48, 80), (5, 10, 8), 3),
        ((18, 24, 24), (30, 48, 80), (19, 25, 25), 1),
        # the clips of the training are smaller
        ((2, 2, 2), (3, 4, 4), (3, 4, 4), 3),
        ((3, 2, 2), (3, 4, 4), (3, 4, 4), 3),
    ],
)
def test_golden_grids_have_room_for_the_windows(window, trained, grid, layers, tmp_path, monkeypatch):
    model = VideoDiT(attention=partial(NeighborhoodAttention, window_thw=window), **SIZES)
    values: dict[str, Any] = {"grid_topk": ((8, 8, 8),), "num_tiles": (8,), "grids": (trained,)}
    export_pretrained(model, tmp_path / "out", sparse=SparseAttentionConfig(**{**sparse_settings(model), **values}))
    # what is computed is of no interest here
    monkeypatch.setattr(golden, "attention_output", lambda model, case, recorder: case.hidden.clone())
    with safe_open(write_golden(model, tmp_path / "out"), framework="pt") as file:
        header = json.loads(file.metadata()["golden"])
    assert (tuple(header["grid_thw"]), len(header["cases"])) == (grid, layers)


def rewritten(folder: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> None:
    """Changes header and tensors of the golden file of a folder."""
    with safe_open(folder / golden.GOLDEN, framework="pt") as file:
        header = json.loads(file.metadata()["golden"])
    tensors = load_file(folder / golden.GOLDEN)
    change(header, tensors)
    save_file(tensors, folder / golden.GOLDEN, {"golden": json.dumps(header)})


def set_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    return lambda header, tensors: tensors.update({name: change(tensors[name]).contiguous()})


CHECKS_NOTHING: dict[str, tuple[Callable[..., Any], str]] = {
    "no cases": (
        lambda header, _: header.update(cases=[]),
        "has 0 cases of layer 0, expected one; layers with cases, to name with --layers:$",
    ),
    "one layer": (
        lambda header, _: header["cases"].__delitem__(slice(1, None)),
        "has 0 cases of layer 1, expected one; .* to name with --layers: 0$",
    ),
    "twice": (lambda header, _: header["cases"].append(header["cases"][0]), "has 2 cases of layer 0, expected one"),
    "no header": (lambda header, _: header.clear(), "lacks grid_thw"),
    "text": (lambda header, _: header["cases"][0].update(layer="0"), r"cases\[0\].layer='0', expected an integer"),
    "nan": (set_tensor("blocks.1.out", lambda x: x * torch.nan), "layer 1 has error nan"),
    "nan input": (set_tensor("blocks.1.hidden", lambda x: x * torch.nan), "layer 1 has error nan"),
    "zeros": (set_tensor("blocks.1.out", lambda x: 0 * x), "layer 1 has error inf"),
    "empty": (set_tensor("blocks.1.out", lambda x: x[:, :0]), r"layer 1 has shapes \[1, 60, 32\] and \[1, 0, 32\]"),
    "grid": (lambda header, _: header.update(grid_thw=[3, 5]), r"has shapes .* on the grid \[3, 5\]"),
}


@pytest.mark.soak("convert, merge and verify-export of damaged files")
@pytest.mark.parametrize("name", CHECKS_NOTHING)
def test_a_file_that_checks_nothing_is_refused(name, tmp_path, command_line):
    """An empty or half list of cases conformed, whatever the weights."""
    export(tmp_path / "out")
    write_golden(open_network(tmp_path / "out")[0], tmp_path / "out")
    change, message = CHECKS_NOTHING[name]
    rewritten(tmp_path / "out", change)
    status, _, err = command_line("verify-export", str(tmp_path / "out"), "--device", "cpu")
    assert (status, err.count("\n")) == (1, 1)
    assert re.search(message, err.strip()), err


@pytest.mark.soak("convert, merge and verify-export of damaged files")
@pytest.mark.parametrize("value", [1e9, 0.021, 0.0, -1.0, math.nan, math.inf])
def test_the_checked_file_does_not_choose_the_tolerance(value, tmp_path, command_line):
    export(tmp_path / "out")
    write_golden(open_network(tmp_path / "out")[0], tmp_path / "out")
    path = tmp_path / "out" / SPARSE_CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), "golden_tolerance": value}))
    status, _, err = command_line("verify-export", str(tmp_path / "out"), "--device", "cpu")
    assert (status, err.count("\n")) == (1, 1)
    assert f"golden_tolerance={value}" in err
    assert ", expected a number" in err or ": expected a number" in err


def test_a_larger_tolerance_is_the_callers(tmp_path):
    """A folder made for engines in bf16 is held to fp32 here; a stricter folder stays strict."""
    export(tmp_path / "out")
    model = open_network(tmp_path / "out")[0]
    write_golden(model, tmp_path / "out", layers=[0, 2], tolerance=0.02)

    def off(case: GoldenCase) -> torch.Tensor:
        return attention_output(model, case) * 1.01

    with pytest.raises(ValueError, match=r"has 0 cases of layer 1, .* to name with --layers: 0,2"):
        check_golden(tmp_path / "out", off)
    with torch.no_grad():
        kept = {"layers": [0, 2]}
        assert all(row.failed for row in check_golden(tmp_path / "out", off, **kept))
        assert not any(row.failed for row in check_golden(tmp_path / "out", off, tolerance=0.05, **kept))
        for layers, message in ([], "layers must be in 0..2, got \\[\\]"), ([0, 3], "got \\[0, 3\\]"):
            with pytest.raises(ValueError, match=message):
                check_golden(tmp_path / "out", off, layers=layers)
        write_golden(model, tmp_path / "out", tolerance=1e-3)
        assert {row.tolerance for row in check_golden(tmp_path / "out", off, tolerance=0.02)} == {1e-3}


def test_a_nan_does_not_conform(tmp_path):
    export(tmp_path / "out")
    write_golden(open_network(tmp_path / "out")[0], tmp_path / "out")
    results = check_golden(tmp_path / "out", lambda case: torch.full_like(case.hidden, torch.nan))
    assert all(row.failed for row in results)


def test_bad_input(tmp_path):
    folder = tmp_path / "out"
    export(folder)
    model, _ = open_network(folder)
    with pytest.raises(ValueError, match="names no golden file"):
        vsa_command("verify-export", str(folder))
    with pytest.raises(ValueError, match=r"layers must be in 0..2, got \[3\]"):
        write_golden(model, folder, layers=[3])
    with pytest.raises(ValueError, match=r"computed in float32, .* is torch\.bfloat16"):
        write_golden(model.to(torch.bfloat16), folder)
    other = VideoDiT(attention=partial(VideoSparseAttention, tile_thw=(4, 4, 4), fine_gate=False), **SIZES)
    with pytest.raises(ValueError, match=r"tile_thw=\(2, 2, 2\), the model has \(4, 4, 4\)"):
        write_golden(other, folder)
    write_golden(open_network(folder)[0], folder)
    with pytest.raises(ValueError, match=r"output has shape \(1, 59, 32\), expected \(1, 60, 32\)"):
        check_golden(folder, lambda case: case.hidden[:, 1:])
    (folder / "golden.safetensors").unlink()
    with pytest.raises(ValueError, match=r"golden\.safetensors is missing"):
        vsa_command("verify-export", str(folder))
    (folder / SPARSE_CONFIG).unlink()
    with pytest.raises(ValueError, match=r"sparse_attention\.json is missing"):
        vsa_command("verify-export", str(folder))
