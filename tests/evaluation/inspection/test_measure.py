"""An inspection against dense attention, lists and places of tokens written out one by one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.attention.neighborhood.oracle import grid_mask
from vsa.attention.context import AttnContext
from vsa.attention.dynamic_hilbert import DynamicHilbertAttention
from vsa.attention.fine_grained.method import FineGrainedAttention
from vsa.attention.full import FullAttention
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.neighborhood.method import NeighborhoodAttention
from vsa.attention.pooled_tail import PooledTail
from vsa.attention.sparge.method import SpargeAttention
from vsa.attention.staged import StagedAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.diffusion.flow_matching import add_noise, noise_like, to_timestep
from vsa.evaluation.inspection.measure import NothingSelected, Shown, choose_shown, inspect_clip
from vsa.evaluation.inspection.metrics import HEAD_METRICS
from vsa.models.video_dit import VideoDiT
from vsa.sampling.pipeline import clip_seeds

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")

# 3 x 3 x 5 tokens: ragged in every direction for tiles of 2 x 2 x 2
LATENTS, GRID = (4, 3, 6, 10), (3, 3, 5)
TILE = (2, 2, 2)
METHODS = {
    "cube": partial(VideoSparseAttention, tile_thw=TILE),
    "hilbert_run": partial(VideoSparseAttention, tile_thw=TILE, partition="hilbert_run", fine_gate=False),
    "raster": partial(VideoSparseAttention, tile_thw=TILE, block_order="raster"),
    "window": partial(StagedAttention, stages="l", tile_thw=TILE, window_thw=(1, 1, 2)),
    "staged": partial(StagedAttention, stages="c_fl", tile_thw=TILE, window_thw=(1, 1, 2)),
    "small_kv": partial(StagedAttention, stages="c_f", tile_thw=TILE, kv_tile_thw=(2, 1, 2)),
    "large_kv": partial(StagedAttention, stages="c_f", tile_thw=(2, 1, 2), kv_tile_thw=TILE),
    "cells": partial(StagedAttention, stages="c_f", tile_thw=TILE, pool_thw=(1, 1, 2)),
    "tail": partial(PooledTail, tile_thw=TILE),
}
PREDICTED = {
    "sparge": partial(SpargeAttention, q_tokens=8, kv_tokens=4, tau=0.5, theta=-1.0, threshold=-1.0),
    "fine_grained": partial(FineGrainedAttention, q_tokens=16, kv_tokens=4, top_p=0.5),
    "dynamic_hilbert": partial(DynamicHilbertAttention, tokens=8, sub_tokens=4),
}


def make_model(attention) -> VideoDiT:
    torch.manual_seed(0)
    model = VideoDiT(
        attention=attention,
        num_attention_heads=2,
        attention_head_dim=12,
        ffn_dim=24,
        num_layers=2,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=16,
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval().requires_grad_(False)


def make_inputs():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(1, *LATENTS, generator=generator), torch.randn(1, 3, 8, generator=generator)


def look(model, *, layers=(0, 1), queries=None, timesteps=(700, 200), topk=3, **options):
    latents, text = make_inputs()
    num_tiles = model.layout_for(LATENTS).num_blocks
    choice = Shown(layers=tuple(layers), heads=(0, 1), queries=tuple(queries or range(num_tiles)))
    options = {"tokens": None, **options}
    return inspect_clip(
        model, latents, text, None, timesteps=timesteps, topk=topk, shown=choice, layers=layers, **options
    )


def recorded(model, timestep, topk=3):
    """What the layers hand a recorder at one timestep."""
    latents, text = make_inputs()
    level = torch.full((1,), timestep / 1000)
    records = {}
    with torch.no_grad():
        x_t = add_noise(latents, noise_like(latents, clip_seeds(0, [""])), level)
        model(x_t, to_timestep(level), text, None, topk=topk, recorder=records.__setitem__)
    return records


@pytest.mark.parametrize("name", METHODS)
def test_tiles_hold_the_tokens_that_the_model_puts_in_them(name):
    model = make_model(METHODS[name])
    inspection = look(model)
    layout = model.layout_for(LATENTS)
    assert inspection.tiles.shape == GRID
    # where every token of raster order went, told by the permutation that the model applies to them
    places = layout.permute(torch.arange(45)[None])[0]
    method = METHODS[name].keywords
    for tiles, blocks, shape in (
        (inspection.query_tiles, layout.blocks, method["tile_thw"]),
        (inspection.tiles, layout.kv_blocks, method.get("kv_tile_thw", method["tile_thw"])),
    ):
        cuboids = set()
        for tile, tokens in enumerate(places.split(blocks.sizes.tolist())):
            for token in tokens.tolist():
                t, rest = divmod(token, 15)
                h, w = divmod(rest, 5)
                assert tiles[t, h, w] == tile
                cuboids.add((tile, t // shape[0], h // shape[1], w // shape[2]))
        if name == "hilbert_run":
            assert blocks.num == 6
        else:
            # a tile for a cuboid
            assert len(cuboids) == blocks.num == {TILE: 12, (2, 1, 2): 18}[shape]


@pytest.mark.parametrize("name", METHODS)
def test_selections_and_true_attention_are_those_of_dense_softmax(name):
    model = make_model(METHODS[name])
    inspection = look(model)
    sizes, kv_sizes = (some.sizes.tolist() for some in (inspection.layout.blocks, inspection.layout.kv_blocks))
    owner, kv_owner = ([tile for tile, size in enumerate(some) for _ in range(size)] for some in (sizes, kv_sizes))
    for place, timestep in enumerate((700, 200)):
        for layer, records in recorded(model, timestep).items():
            for head in (0, 1):
                lists = [
                    set(row[:count])
                    for row, count in zip(
                        records["kv_indices"].expand(1, 2, -1, -1)[0, head].tolist(),
                        records["kv_num_blocks"].expand(1, 2, -1)[0, head].tolist(),
                        strict=True,
                    )
                ]
                q, k = records["q"][0, :, head].double(), records["k"][0, :, head].double()
                dense = (q @ k.T / 12**0.5).softmax(-1).tolist()
                mass = [[0.0] * len(kv_sizes) for _ in sizes]
                recalls = []
                for i, j in itertools.product(range(45), repeat=2):
                    mass[owner[i]][kv_owner[j]] += dense[i][j] / sizes[owner[i]]
                for i in range(45):
                    recalls.append(sum(dense[i][j] for j in range(45) if kv_owner[j] in lists[owner[i]]))
                at = (place, layer, head)
                assert [set(row.nonzero()[:, 0].tolist()) for row in inspection.selected[at]] == lists
                torch.testing.assert_close(
                    inspection.mass[at].double(), torch.tensor(mass).double(), atol=1e-5, rtol=1e-4
                )
                assert float(inspection.table("recall")[at]) == pytest.approx(sum(recalls) / 45, abs=1e-5)
                chance = sum(len(lists[owner[i]]) for i in range(45)) / 45 / len(kv_sizes)
                assert float(inspection.table("recall_random")[at]) == pytest.approx(chance, abs=1e-6)
                counts = [sum(tile in some for some in lists) for tile in range(len(kv_sizes))]
                assert inspection.counts[at].tolist() == counts
                assert float(inspection.table("lists_largest")[at]) == max(counts)
                if name != "window":
                    coarse = records["scores"][0, head].double().softmax(-1)
                    torch.testing.assert_close(inspection.coarse[at].double(), coarse, atol=1e-6, rtol=1e-4)
    assert inspection.coarse.isnan().all() == (name == "window")
    # control: another timestep selects and attends otherwise
    assert not torch.allclose(inspection.mass[0], inspection.mass[1], atol=1e-3)


def test_recall_of_windows_counts_the_tokens_that_are_seen():
    model = make_model(partial(NeighborhoodAttention, window_thw=(2, 2, 3), tile_thw=TILE))
    inspection = look(model, timesteps=(400,))
    order = inspection.layout.order
    mask = grid_mask(GRID, (2, 2, 3), (1, 1, 1))[order][:, order]
    for layer, records in recorded(model, 400).items():
        for head in (0, 1):
            q, k = records["q"][0, :, head].double(), records["k"][0, :, head].double()
            dense = (q @ k.T / 12**0.5).softmax(-1)
            recall = (dense * mask).sum(1).mean().item()
            assert float(inspection.table("recall")[0, layer, head]) == pytest.approx(recall, abs=1e-5)
            assert float(inspection.table("recall_random")[0, layer, head]) == pytest.approx(12 / 45, abs=1e-6)
            # control: whole tiles hold more
            tiles = inspection.selected[0, layer, head].double()
            sizes = inspection.layout.blocks.sizes.long()
            whole = (dense * tiles.repeat_interleave(sizes, 0).repeat_interleave(sizes, 1)).sum(1).mean().item()
            assert whole > recall + 0.05


@pytest.mark.parametrize("name", PREDICTED)
def test_recall_of_lists_that_follow_from_the_data(name):
    model = make_model(PREDICTED[name])
    inspection = look(model, timesteps=(400,))
    rows, columns = (blocks.sizes.long() for blocks in (inspection.layout.blocks, inspection.layout.kv_blocks))
    records = recorded(model, 400)[1]
    lists, counts = records["kv_indices"], records["kv_num_blocks"]
    for head in (0, 1):
        tiles = torch.zeros(len(rows), len(columns))
        for row, count in enumerate(counts[0, head].tolist()):
            tiles[row, lists[0, head, row, :count].long()] = 1
        mask = tiles.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        q, k = records["q"][0, :, head].double(), records["k"][0, :, head].double()
        recall = ((q @ k.T / 12**0.5).softmax(-1) * mask).sum(1).mean().item()
        assert float(inspection.table("recall")[0, 1, head]) == pytest.approx(recall, abs=1e-5)
        # control
        assert 0.1 < recall < 0.999


def test_neighbours_are_the_tiles_that_stand_together_in_space():
    inspection = look(make_model(METHODS["cube"]))
    layout, groups = inspection.layout, {}
    for tile in range(12):
        t, h, w = (inspection.tiles == tile).nonzero()[0].tolist()
        # pairs in height, fours in height and width, aligned to the grid of tiles
        groups.setdefault((2, t // 2, h // 4, w // 2), []).append(tile)
        groups.setdefault((4, t // 2, h // 4, w // 4), []).append(tile)
    assert layout.num_blocks == 12
    for size, name in ((2, "pair"), (4, "four")):
        members = [some for key, some in groups.items() if key[0] == size and len(some) > 1]
        assert members
        for at in itertools.product((0, 1), repeat=3):
            savings = whole = 0
            for some in members:
                rows = inspection.selected[at][some]
                savings += int(rows.sum()) - int(rows.any(0).sum())
                whole += int(rows.sum()) - int(rows.sum(1).max())
            assert float(inspection.table(f"{name}_overlap")[at]) == pytest.approx(savings / whole)


@pytest.mark.parametrize("name", METHODS)
def test_maps_are_what_the_layers_recorded_at_each_place(name):
    model = make_model(METHODS[name])
    inspection = look(model, timesteps=(400,))
    records = recorded(model, 400)[1]
    gates = {"coarse_gate": "gate_compress", "fine_gate": "gate_fine"}
    names = {kind for kind, gate in gates.items() if gate in records}
    assert set(inspection.maps) == names | ({"coarse_share"} if name != "window" else set())
    places = model.layout_for(LATENTS).order.tolist()
    for i in (0, 7, 44):
        t, h, w = (int(x) for x in torch.unravel_index(torch.tensor(places[i]), GRID))
        for kind in names:
            expected = float(records[gates[kind]][0, i].square().mean().sqrt())
            assert float(inspection.maps[kind][0, 1, t, h, w]) == pytest.approx(expected, rel=1e-5)
    if name == "tail":
        assert inspection.table("gate_rms").isnan().all()
        assert not inspection.table("coarse_share").isnan().any()
        # as the weights of the values: those of the selected tiles and of the tail are 1 together
        by_value = tail_of_ones(records, model)
        torch.testing.assert_close(inspection.table("tail_mass")[0, 1], by_value.mean((0, 1, 3)))
        assert 0.01 < float(by_value.mean()) < 0.99
    else:
        assert inspection.table("tail_mass").isnan().all()


def tail_of_ones(records, model):
    """The tail's output `[B, L, H, D]` where every value is 1."""
    layout, seen = model.layout_for(LATENTS), {}
    ctx = AttnContext(layout=layout, topk=KeptTiles.of(3), recorder=lambda _, tensors: seen.update(tensors))
    model.attention_layers[1].attend(records["q"], records["k"], torch.ones_like(records["k"]), ctx)
    return seen["tail"]


def test_what_is_measured_does_not_depend_on_what_is_shown():
    model = make_model(METHODS["cube"])
    whole, part = look(model), look(model, layers=(1,), queries=(2, 5))
    for name in HEAD_METRICS:
        torch.testing.assert_close(whole.table(name)[:, 1:], part.table(name), equal_nan=True)
    assert torch.equal(whole.mass[:, 1:, :, [2, 5]], part.mass)
    assert (part.layers, part.silent) == ((1,), ())


def test_layers_that_select_nothing():
    with pytest.raises(NothingSelected, match="layers 0, 1"):
        look(make_model(FullAttention), queries=[0])


def test_lists_of_other_tiles_than_the_layout_are_refused():
    class Paired(VideoSparseAttention):
        """Hands one list for two query tiles to the recorder."""

        def attend(self, q, k, v, ctx):
            recorder = ctx.recorder

            def record_half(layer, tensors):
                lists = {name: tensors[name][:, :, ::2] for name in ("kv_indices", "kv_num_blocks")}
                recorder(layer, {**tensors, **lists})

            return super().attend(q, k, v, replace(ctx, recorder=record_half))

    with pytest.raises(ValueError, match=r"layer 0 has 6 lists, .* 12 tiles"):
        look(make_model(partial(Paired, tile_thw=TILE)), queries=[0])


@pytest.mark.parametrize("most", [10**9, 10**6, 10**5, 10**3])
def test_what_a_page_shows_fits_and_is_spread(most):
    sizes = {"num_heads": 12, "num_queries": 624, "num_tiles": 624, "num_timesteps": 5}
    choice = choose_shown(layers=range(30), **sizes, most_bytes=most, first=(11, 400))
    size = 5 * len(choice.layers) * len(choice.heads) * len(choice.queries) * 624 * 8 / 3
    assert size <= most or len(choice.layers) == len(choice.heads) == len(choice.queries) == 1
    for numbers in (choice.layers, choice.heads, choice.queries):
        assert list(numbers) == sorted(set(numbers))
    if most == 10**9:
        assert (len(choice.layers), len(choice.heads)) == (30, 12)
        assert {11, 400} <= set(choice.queries)
    explicit = choose_shown(layers=range(30), **sizes, most_bytes=most, heads=[3, 1], queries=[7])
    assert (explicit.heads, explicit.queries) == ((1, 3), (7,))


def test_everything_is_shown_where_it_fits():
    choice = choose_shown(
        layers=range(4), num_heads=3, num_queries=32, num_tiles=32, num_timesteps=5, most_bytes=10**7, first=(3, 9)
    )
    assert choice == Shown(layers=(0, 1, 2, 3), heads=(0, 1, 2), queries=tuple(range(32)))
