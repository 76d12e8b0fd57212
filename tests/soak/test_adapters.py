"""A row about adapter files: they are merged as peft merges them, or refused in one line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integrations import tiny
from tests.integrations.test_adapter_config import FILE, changed, difference, merged_by_peft, read_here, saved_by_peft

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")

MODULES = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
PATTERNS = ("attn1.to_q", r"blocks\.1\..*to_k", "to_q", "^blocks.0.attn2.to_k", "ffn.net.2", "blocks.0")
# keys that other trainers write in place of peft's own prefix, with the same config beside them
PREFIXES = ("base_model.model.", "transformer.", "diffusion_model.", "")
REFUSED: tuple[dict[str, Any], ...] = (
    {"use_dora": True},
    {"lora_bias": True},
    {"init_lora_weights": "olora"},
    {"target_parameters": ["blocks.0.attn1.to_q.weight"]},
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny.wan().model.save_pretrained(folder)
    return folder


def drawn_fields(draw: random.Random) -> dict[str, Any]:
    """Fields of a config that peft merges without more than factors, biases and whole modules."""
    fields: dict[str, Any] = {"r": draw.choice((1, 2, 3, 4, 8)), "lora_alpha": draw.choice((1, 2.5, 4, 16, 64))}
    fields["target_modules"] = sorted(draw.sample(MODULES, draw.randint(1, 4)))
    fields |= {"use_rslora": True} if draw.random() < 0.4 else {}
    for name, values in (("rank_pattern", (1, 2, 6)), ("alpha_pattern", (0.5, 2, 32))):
        if draw.random() < 0.4:
            fields[name] = {key: draw.choice(values) for key in draw.sample(PATTERNS, draw.randint(1, 3))}
    if draw.random() < 0.2:
        fields["bias"] = draw.choice(("lora_only", "all"))
    if draw.random() < 0.2:
        fields["modules_to_save"] = ["proj_out"]
    if draw.random() < 0.2:
        fields |= {"layers_to_transform": [draw.randrange(2)], "layers_pattern": "blocks"}
    if draw.random() < 0.2:
        fields["init_lora_weights"] = draw.choice((False, "gaussian", "orthogonal"))
        # an even rank, with all of its dimensions
        fields |= {"r": 4, "rank_pattern": {}} if fields["init_lora_weights"] == "orthogonal" else {}
    return fields


def written(
    folder: Path, draw: random.Random, more: dict[str, Any]
) -> tuple[Path, dict[str, Any], dict[str, torch.Tensor]]:
    """Adapters of drawn fields that go together in peft, these fields, and the weights that peft makes of them."""
    for number in range(50):
        fields, place = drawn_fields(draw) | more, folder / f"lora-{number}"
        try:
            return saved_by_peft(place, **fields), fields, merged_by_peft(place)
        except (ValueError, TypeError, RuntimeError, KeyError):
            continue
    raise AssertionError(f"peft takes no fields with {more}")


def damage(folder: Path, draw: random.Random) -> str:
    """Harm the file or the config; returns how."""
    path, config = folder / FILE, json.loads((folder / "adapter_config.json").read_text())
    tensors, content = load_file(path), bytearray(path.read_bytes())
    key = draw.choice(sorted(tensors))
    kinds = ("nan", "one factor", "shape", "cut", "bits", "integers", "float8", "empty", "no tensors", "unknown key")
    kinds += ("field", "alpha", "rank", "text", "kind", "missing config", "not JSON")
    kind = draw.choice(kinds)
    if kind in ("nan", "shape", "integers", "float8"):
        value = tensors[key].clone()
        if kind == "nan":
            value.view(-1)[draw.randrange(value.numel())] = draw.choice((float("nan"), float("inf")))
        dtype = {"integers": torch.int8, "float8": torch.float8_e4m3fn}.get(kind, value.dtype)
        tensors[key] = value[:-1].contiguous() if kind == "shape" else value.to(dtype)
    elif kind == "one factor":
        del tensors[key]
    elif kind == "no tensors":
        tensors = {}
    elif kind == "unknown key":
        tensors[f"base_model.model.blocks.9.attn1.{draw.choice(MODULES)}.lora_A.weight"] = torch.ones(2, 32)
    if kind in ("nan", "shape", "integers", "float8", "one factor", "no tensors", "unknown key"):
        save_file(tensors, path)
    elif kind == "cut":
        path.write_bytes(content[: draw.randrange(len(content))])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "bits":
        # those of the header, which say what a tensor is
        content[draw.randrange(8, 8 + int.from_bytes(content[:8], "little"))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
    elif kind == "missing config":
        (folder / "adapter_config.json").unlink()
    elif kind == "not JSON":
        (folder / "adapter_config.json").write_text(draw.choice(("", "[", "[1]", '"x"', "null")))
    else:
        fields: dict[str, dict[str, Any]] = {
            "field": {draw.choice(("use_tomorrow", "scale", "lora_gain")): 2},
            "alpha": {"lora_alpha": draw.choice((0, -1, float("nan"), float("inf"), 1e-3, 999, True))},
            "rank": {"r": draw.choice((0, -1, config["r"] + 1, 2.5))},
            "text": {draw.choice(("r", "lora_alpha", "use_rslora", "rank_pattern")): draw.choice(("4", "true", "{}"))},
            "kind": {"peft_type": draw.choice(("LOHA", "IA3", "lora", None))},
        }
        changed(folder, **fields[kind])
    return kind


@pytest.mark.soak("adapters of drawn configs, against peft's own merge", attempts=200, short=2)
def test_adapters_are_merged_as_peft_does_or_refused(attempt, base, tmp_path):
    draw = random.Random(attempt)
    way = draw.choice(("whole", "whole", "dtype", "prefix", "damaged", "damaged", "not merged here"))
    more = draw.choice(REFUSED) if way == "not merged here" else {}
    folder, fields, theirs = written(tmp_path, draw, more)
    tensors, how = load_file(folder / FILE), way
    if way == "dtype":
        dtype = draw.choice((torch.bfloat16, torch.float16, torch.float64))
        save_file({key: value.to(dtype) for key, value in tensors.items()}, folder / FILE)
        theirs = merged_by_peft(folder)
    elif way == "prefix":
        prefix = draw.choice(PREFIXES)
        save_file({key.replace("base_model.model.", prefix, 1): x for key, x in tensors.items()}, folder / FILE)
    elif way == "damaged":
        how = damage(folder, draw)
        try:
            theirs = merged_by_peft(folder)
        except Exception:
            # peft itself reads it no longer: the strength is told by nothing else
            theirs = {}
    place, told = draw.choice((folder, folder / FILE)), f"{how}, {fields}"
    ours, refusal = dict[str, torch.Tensor](), ""
    try:
        ours = read_here(base, place)
    except ValueError as error:
        refusal = str(error)
    assert "\n" not in refusal, told
    assert not refusal or way in ("damaged", "not merged here"), f"refused: {refusal}: {told}"
    if refusal:
        return
    assert way != "not merged here", told
    if how == "missing config":
        # as trainers write them: the strength is one
        assert all(value.isfinite().all() for value in ours.values()), told
        return
    assert theirs, f"peft does not read it: {told}"
    assert difference(ours, theirs) < 1e-5, told


def test_another_strength_is_noticed(base, tmp_path):
    """The control of the attempts above."""
    folder = saved_by_peft(tmp_path / "lora", r=4, lora_alpha=16)
    theirs = merged_by_peft(folder)
    assert difference(read_here(base, changed(folder, lora_alpha=15)), theirs) > 1e-3
