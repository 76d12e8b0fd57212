"""`sparse_attention.json`: what it holds, what it means for other grids, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.checkpoints.wan_models import config_of, ours, random_sparse
from vsa.attention.neighborhood.method import NeighborhoodAttention
from vsa.attention.sparge.method import SpargeAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.checkpoints.exported_sparsity import ExportedSparsity
from vsa.checkpoints.sparse_config import (
    SPARSE_CONFIG,
    SparseAttentionConfig,
    read_sparse_config,
    write_sparse_config,
)
from vsa.checkpoints.wan import attention_of, refuse_other_attention
from vsa.models.video_dit import VideoDiT

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full:UserWarning")


def test_sparse_config_round_trip(tmp_path):
    config = config_of(
        random_sparse(),
        topk_ranges=((0, 0.25, ((10, 12),)),),
        dense_layers=(0,),
        dense_steps=2,
        step_list=(1000.0, 757.0, 522.0),
        guidance_form="additive",
        budget=0.5,
    )
    write_sparse_config(tmp_path, config)
    assert read_sparse_config(tmp_path) == config
    assert [path.name for path in tmp_path.iterdir()] == [SPARSE_CONFIG]


WINDOWS = partial(
    NeighborhoodAttention, window_thw=(1.0, 4, 0.5), stride_thw=(1, 2, 0.25), causal_thw=(True, False, False)
)


def windows_of(model: VideoDiT, **changes: Any) -> SparseAttentionConfig:
    return config_of(model, **{"grid_topk": ((30, 30),), **changes})


@pytest.mark.parametrize("tiles", [{}, {"tile_thw": (1, 2, 4), "kv_tile_thw": (1, 2, 2), "block_order": "raster"}])
def test_windows_are_in_the_file_and_become_the_same_method(tiles, tmp_path):
    model = ours(partial(WINDOWS, **tiles))
    config = windows_of(model, dense_layers=(1,), dense_steps=2)
    write_sparse_config(tmp_path, config)
    read = read_sparse_config(tmp_path)
    # 1 is a token, 1.0 the whole axis: equal numbers
    assert str(read) == str(config)
    read_method, method = (m.blocks[0].method for m in (ours(attention_of(read)), model))
    assert str(read_method.settings()) == str(method.settings())
    for name in ("rules", "tile_thw", "kv_tile_thw", "block_order"):
        assert getattr(read_method, name) == getattr(method, name), name
    refuse_other_attention(model, read, "it")
    for other in ({"window_thw": (1, 4, 0.5)}, {"causal_thw": (False,) * 3}, {"tile_thw": (2, 2, 2)}):
        with pytest.raises(ValueError, match="it has "):
            refuse_other_attention(ours(partial(WINDOWS, **{**tiles, **other})), read, "it")
    assert read.layer_topk(77, progress=0.0, step=0) == read.layer_topk(77) == (77, 77)


SETTINGS = ours(WINDOWS).blocks[0].method.settings()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid_topk": ((30, 29),)}, r"neighborhood selects no tiles, its grid_topk must be all of \[30\]"),
        ({"refresh": 2}, "denoising has refresh=2, but neighborhood selects no tiles"),
        ({"topk_ranges": ((0, 1, ((30, 30),)),)}, "neighborhood selects no tiles"),
        ({"grids": ((3, 3, 10),)}, "window of height must be at most its 3 tokens, got 4"),
        ({"method": "video_sparse"}, r"settings of video_sparse: missing .*, unknown \['causal_thw', .*'window_thw'\]"),
        ({"settings": None}, "settings=None do not apply to method=neighborhood"),
        ({"tile_thw": (2, 2, 2)}, r"tile_thw=\(2, 2, 2\) does not apply to method=neighborhood"),
        ({"method": "video_sparse", "settings": None}, "tile_thw=None does not apply to method=video_sparse"),
        ({"settings": {}}, "settings of neighborhood: missing .'block_order', "),
        ({"settings": {**SETTINGS, "windows": 3}}, r"settings of neighborhood: missing \[\], unknown \['windows'\]"),
        ({"settings": {**SETTINGS, "stride_thw": 3}}, "settings of neighborhood: stride_thw=3: expected a list of 3"),
    ],
)
def test_windows_that_have_no_meaning_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        windows_of(ours(WINDOWS), **change)


def test_files_of_version_1_stay_and_those_of_version_2_may_say_less(tmp_path):
    values = config_of(random_sparse()).to_values()
    assert values["schema_version"] == 1
    assert not {"settings", "refresh"} & values.keys()
    values = config_of(random_sparse(), refresh=2).to_values()
    del values["settings"]
    assert SparseAttentionConfig.from_json(json.dumps(values)) == config_of(random_sparse(), refresh=2)
    with pytest.raises(ValueError, match=r"unexpected keys \[.*'settings'"):
        SparseAttentionConfig.from_json(json.dumps({**windows_of(ours(WINDOWS)).to_values(), "schema_version": 1}))


def test_settings_that_video_sparse_got_later_are_what_they_were_before():
    config = config_of(random_sparse(partial(VideoSparseAttention, gate_activation="tanh")))
    values = config.to_values()
    for name in ("gate_bias", "coarse_text"):
        del values["settings"][name]
    assert SparseAttentionConfig.from_json(json.dumps(values)) == config
    values["settings"]["coarse_text"] = True
    assert SparseAttentionConfig.from_json(json.dumps(values)) != config
    del values["settings"]["gate_activation"]
    with pytest.raises(ValueError, match=r"settings of video_sparse: missing \['gate_activation'\]"):
        SparseAttentionConfig.from_json(json.dumps(values))


def test_settings_of_sparge_that_are_constants_now_are_read():
    config = windows_of(ours(partial(SpargeAttention, q_tokens=16, kv_tokens=8)))
    values = config.to_values()
    values["settings"] |= {"similarity": "cosine", "scaled": True, "attention_sink": False}
    assert SparseAttentionConfig.from_json(json.dumps(values)) == config
    values["settings"]["scaled"] = False
    with pytest.raises(ValueError, match=r"^scaled=False of SpargeAttn is not supported, only True$"):
        SparseAttentionConfig.from_json(json.dumps(values))


def test_topk_of_another_grid_layer_and_moment():
    model = random_sparse()
    later = (0.0, 0.5, ((15, 30),))
    config = config_of(model, grid_topk=((3, 6),), budget="fraction", topk_ranges=(later,), dense_steps=1)
    assert config.layer_topk(30) == (3, 6)
    # a share is rounded up: 3 of 30 are 1.1 of 11
    assert config.layer_topk(11) == (2, 3)
    assert config.layer_topk(60, progress=0.49, step=1) == (30, 60)
    assert config.layer_topk(60, progress=0.5, step=1) == (6, 12)
    assert config.layer_topk(60, progress=0.0, step=0) == (60, 60)
    assert replace(config, budget="count").layer_topk(4) == (3, 4)
    assert replace(config, budget=0.5).layer_topk(120) == (6, 12)
    assert replace(config, dense_layers=(1,)).layer_topk(60) == (6, 60)
    sparsity = ExportedSparsity(config_of(model, grid_topk=((3, 6),), budget="fraction", dense_layers=(1,)))
    rows = [sparsity.topk_per_layer(0, 60, 2, at).layers for at in ("current", "half", "double")]
    assert rows == [(6, 60), (3, 60), (12, 60)]


def test_trained_grids_have_the_topk_they_were_trained_with():
    # no rule makes these rows of each other
    rows, tiles = ((9, 4), (7, 2), (1, 3)), (30, 12, 4)
    grids = ((3, 6, 10), (3, 4, 6), (1, 4, 4))
    early = (0.0, 0.5, ((30, 1), (12, 5), (2, 2)))
    config = config_of(random_sparse(), grid_topk=rows, num_tiles=tiles, grids=grids, topk_ranges=(early,))
    config = SparseAttentionConfig.from_json(config.to_json())
    for row, other, count in zip(rows, early[2], tiles, strict=True):
        assert config.layer_topk(count) == row
        assert config.layer_topk(count, progress=0.2) == other
        assert replace(config, dense_layers=(1,)).layer_topk(count) == (row[0], count)
    # other grids follow the first one, and only by the budget
    assert config.layer_topk(60) == (18, 8)
    assert config.layer_topk(60, progress=0.2) == (60, 2)
    assert replace(config, budget="count").layer_topk(60) == (9, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid_topk": ((4, 31),)}, r"grid_topk must be in 1..30, the tiles of grid \(3, 6, 10\), got 4..31"),
        ({"grid_topk": ((0, 3),)}, r"got 0..3"),
        ({"grid_topk": ((),)}, r"one entry per layer, got 0 for grid \(3, 6, 10\)"),
        ({"grid_topk": ((4, 8), (2, 4))}, "one row per grid, got 2 rows and 1 grids"),
        (
            {"grid_topk": ((4, 8), (2,)), "num_tiles": (30, 12), "grids": ((3, 6, 10), (3, 4, 6))},
            r"one entry per layer, got 1 for grid \(3, 4, 6\)",
        ),
        (
            {"grid_topk": ((4, 8), (2, 13)), "num_tiles": (30, 12), "grids": ((3, 6, 10), (3, 4, 6))},
            r"in 1..12, the tiles of grid \(3, 4, 6\), got 2..13",
        ),
        (
            {"grid_topk": ((4, 8), (4, 9)), "num_tiles": (30, 30), "grids": ((3, 6, 10), (3, 10, 6))},
            r"grid_topk has \(4, 8\) and \(4, 9\) for grids of 30 tiles",
        ),
        ({"tile_thw": (4, 4)}, r"tile_thw=\[4,4\]: expected a list of 3 values"),
        ({"num_tiles": (30, 12)}, "one entry per grid, got 2 and 1"),
        ({"dense_layers": (2,)}, r"dense_layers must be in 0..1, got \[2\]"),
        ({"dense_steps": -1}, "dense_steps=-1: expected an integer of at least 0, got -1"),
        ({"flow_shift": 0.0}, "flow_shift=0.0: expected a number above 0, or null, got 0.0"),
        (
            {"budget": "half"},
            "budget=half: expected one of count, fraction or a number from 0 to 1, got 'half'",
        ),
        ({"guidance_form": "cfg"}, "got 'cfg'"),
        ({"topk_ranges": ((0.5, 0.5, ((1, 1),)),)}, "got 0.5 and 0.5"),
        (
            {"topk_ranges": ((0, 1, ((1,),)),)},
            "of topk_ranges must have one entry per layer, got 1",
        ),
        ({"golden": "golden.safetensors"}, "golden and golden_tolerance come together"),
        ({"golden": "../../x", "golden_tolerance": 1e-3}, "golden names '../../x', expected a relative path"),
        ({"golden": "/etc/passwd", "golden_tolerance": 1e-3}, "golden names '/etc/passwd', expected a relative path"),
    ],
)
def test_sparse_config_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        config_of(random_sparse(), **change)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda v: v.pop("grid_topk"), r"missing keys \['grid_topk'\]"),
        (lambda v: v.update(tiles=3), r"unexpected keys \['tiles'\]"),
        (lambda v: v.update(grid_topk=3), "grid_topk=3: expected a list"),
        (lambda v: v.update(tile_thw=[10**9] * 3), "from 1 to 65536"),
        (lambda v: v.update(tile_thw=[60_000] * 3), "at most 16,777,216 tokens"),
        (lambda v: v.update(grids=[[-1, 2, 2]]), r"grids=\[\[-1,2,2\]\]"),
        (lambda v: v.update(gate_keys=None, num_tiles="x"), "gate_keys=null: .*num_tiles=x: "),
        (lambda v: v.update(dense_steps=1.5), "dense_steps=1.5: expected an integer"),
        (lambda v: v.update(topk_ranges=[{"start": 0}]), "wrong type"),
        (lambda v: v.update(schema_version=None), "schema_version is None"),
    ],
)
def test_sparse_config_file_refuses(edit, message, tmp_path):
    path = write_sparse_config(tmp_path, config_of(random_sparse()))
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message) as caught:
        read_sparse_config(tmp_path)
    assert str(path) in str(caught.value)
