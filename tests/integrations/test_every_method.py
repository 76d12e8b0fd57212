"""Every method of configs/attention: a run of it is exported, verified, reloaded and put into diffusers."""

from __future__ import annotations

import filecmp
import math
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from diffusers import WanTransformer3DModel

from tests.integrations import tiny
from tests.tiny_runs import CONFIGS, write_run
from vsa.attention.dense import dense_attn_per_sample
from vsa.attention.layout import Segment
from vsa.attention.scores import Score
from vsa.checkpoints.convert import Conversion, convert
from vsa.checkpoints.golden import attention_output, check_golden, write_golden
from vsa.checkpoints.sparse_config import read_sparse_config
from vsa.checkpoints.weight_source import open_network, open_weights
from vsa.config import attention_config, build
from vsa.integrations.diffusers import applied_attention, apply, load_sparse, remove
from vsa.models.video_dit import VideoDiT

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")
TILE = (2, 2, 2)
SIZES = {"dim": 32, "num_heads": 2, "head_dim": 16}
SUBBLOCK = next(score for score in get_args(Score) if score.startswith("subblock"))
# settings that leave something out of a grid of 4 x 4 x 4 tokens, beside those of each config
SETTINGS = {
    "dynamic_hilbert": [("tokens=8", "sub_tokens=4")],
    "fine_grained": [("q_tokens=16", "kv_tokens=4", "top_p=0.3")],
    "nabla": [("tile_thw=[1,2,2]", "window_thw=[1,1,1]", "top_p=0.3")],
    "neighborhood": [("window_thw=[1.0,0.5,3]", "stride_thw=[1,1,1]", "causal_thw=[true,false,false]")],
    "pooled_tail": [(), ("score=mass", "order=2"), (f"score={SUBBLOCK}", "score_thw=[1,2,2]", "block_order=raster")],
    "radial": [("tokens=4",)],
    "sla": [("tile_thw=[1,1,16]",), ("tile_thw=[2,2,2]", "partition=cube", "linear=marginal")],
    "sparge": [("q_tokens=16", "kv_tokens=8", "tau=0.4", "theta=-1.0"), ("q_tokens=8", "kv_tokens=8", "rule=topk")],
    "spargeattention2": [("tile_thw=[1,1,16]", "kv_tile_thw=[1,1,8]")],
    "staged": [
        (),
        ("stages=f", "score=mass", "kv_tile_thw=[1,2,2]"),
        ("stages=l", "window_thw=[1,1,1]"),
        ("stages=c_f_l", "window_thw=[1,1,1]", "window_gate=fine", "fine_gate=true", "pooling=conv"),
    ],
    "strided_window": [("groups=[[2,all,all],[all,2,2]]", "first=1")],
}
NAMES = sorted(path.stem for path in (CONFIGS / "attention").glob("*.yaml"))
EVERY = [pytest.param(name, words, id=" ".join((name, *words))) for name in NAMES for words in SETTINGS.get(name, [()])]


@cache
def node_of(name: str, words: tuple[str, ...]) -> dict[str, Any]:
    return attention_config(name, words, tile_thw=TILE)


def inputs() -> tuple[torch.Tensor, ...]:
    return tiny.randn(2, 16, 4, 8, 8), torch.tensor([700.0, 300.0]), tiny.randn(2, 9, 64, seed=1)


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@torch.no_grad()
@pytest.mark.parametrize(("name", "words"), EVERY)
def test_a_run_is_exported_verified_reloaded_and_put_into_diffusers(name, words, tmp_path):
    node = node_of(name, words)
    run = write_run(tmp_path / "run", attention=node)
    source = open_weights(run)
    model = source.network()
    source.load(model, "required" if any(method.extra_modules() for method in model.attention_layers) else "absent")
    exported = tmp_path / "out"
    convert(source, exported, Conversion(golden=False))
    # back to a run and out again: the same files
    convert(open_weights(exported), tmp_path / "back", Conversion(to="run"))
    convert(open_weights(tmp_path / "back"), tmp_path / "again", Conversion(golden=False))
    assert filecmp.cmpfiles(exported, tmp_path / "again", files_of(exported), shallow=False)[1:] == ([], [])
    assert files_of(exported) == files_of(tmp_path / "again")
    topk = tiles(model) // 4 if model.selects else None
    expected = model(*inputs(), topk=topk)
    if model.is_dense:
        assert "sparse_attention.json" not in files_of(exported)
        transformer = WanTransformer3DModel.from_pretrained(exported)
        assert tiny.difference(transformer(*inputs()).sample, expected) < 1e-5
    else:
        again, _ = open_network(exported)
        write_golden(again, exported)
        rows = check_golden(exported, partial(attention_output, again))
        assert len(rows) == 2
        assert not any(row.failed for row in rows)
        # control: dense attention is another function
        for block in again.blocks:
            block.method.attend_combine = lambda q, k, v, extra, ctx: dense_attn_per_sample(q, k, v, ctx.layout)
        assert all(row.failed for row in check_golden(exported, partial(attention_output, again)))
        # a quarter of the tiles, as trained
        kept = topk or tiles(model)
        assert read_sparse_config(exported).grid_topk[0] == (kept, kept)
        transformer = load_sparse(exported)
        assert tiny.difference(transformer(*inputs()).sample, expected) < 1e-5
        remove(transformer)
        assert tiny.difference(transformer(*inputs()).sample, expected) > 1e-4
    if model.attention_layers[0].extra_modules():
        return
    settings = {key: value for key, value in node.items() if key[0] != "_"}
    apply(transformer, name, settings=settings, topk=topk)
    assert tiny.difference(transformer(*inputs()).sample, expected) < 1e-5
    assert applied_attention(transformer).describe()["topk"] == (topk or tiles(model))


def tiles(model: VideoDiT) -> int:
    return model.attention_layers[0].layout((Segment((4, 4, 4)),), "cpu").num_video_tiles


FAMILIES = {
    "wan": tiny.wan,
    "ltx": tiny.ltx,
    "cogvideox": tiny.cogvideox,
    "hunyuan": tiny.hunyuan,
    "hunyuan15": tiny.hunyuan15,
    "minimax_h3": tiny.minimax_h3,
    "ltx2": tiny.ltx2,
    "kandinsky5": tiny.kandinsky5,
}


@cache
def case_of(family: str) -> tuple[tiny.Case, torch.Tensor]:
    case = FAMILIES[family]()
    return case, case.run()


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", NAMES)
def test_a_method_takes_the_rows_of_a_family_or_says_why_not(name, family):
    case, dense = case_of(family)
    settings = {"stages": "f"} if name == "staged" else {}
    example = build({**node_of(name, ()), **settings})(**SIZES)
    put = partial(apply, case.model, name, settings=settings, sparsity=0 if (selects := example.selects) else None)
    if (modules := example.extra_modules()) and name != "video_sparse":
        with pytest.raises(ValueError, match=rf"{name} .* parameters to train \({', '.join(modules)}\): load_sparse"):
            put()
        return
    if case.text and not example.takes_text:
        with pytest.raises(ValueError, match=rf"{type(example).__name__} takes rows of one video, but .* has text"):
            put()
        assert applied_attention(case.model) is None
        return
    put()
    error = tiny.difference(case.run(), dense)
    remove(case.model)
    # with all tiles it is dense attention, unless they count twice; what chooses in another way may keep all 105 tokens
    whole = name == "full" or (selects and getattr(example, "tail", None) != "double_count")
    assert error < 1e-5 if whole else math.isfinite(error)
    assert whole or name in ("sparge", "fine_grained", "nabla", "radial") or error > 1e-3
