"""MiniMax-H3: packed rows of text, conditions and audio before the video, one timestep for each kind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3Ref2VAPrepareLayoutStep

from tests.integrations import checks, tiny
from tests.integrations.oracle import masked_attention
from vsa.attention.layout import Segment
from vsa.integrations.diffusers import applied_attention, apply, remove
from vsa.integrations.diffusers.families import family_of

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")

CASES = {"text": dict(), "keyframes": dict(text=3, keyframes=("first", "last"))}


@pytest.mark.parametrize("kind", CASES)
def test_all_tiles_equal_the_model(kind):
    checks.check_all_tiles_equal_the_model(tiny.minimax_h3(**CASES[kind]))


@pytest.mark.parametrize("kind", CASES)
def test_sparse_equals_the_model_under_a_tile_mask(kind):
    # rows before the video see everything and are seen by all
    checks.check_sparse_equals_masked_model(tiny.minimax_h3(**CASES[kind]), "first", most=0.8)


@pytest.mark.parametrize("topk", [3, tiny.TILES])
def test_gradients_equal_those_of_the_model(topk):
    checks.check_gradients_equal_the_masked_model(tiny.minimax_h3(), topk, "first", checkpointing=topk == 3)


@torch.no_grad()
@pytest.mark.parametrize("grid", [(1, 4, 6), (5, 3, 3), (2, 2, 4)])
def test_other_grids(grid):
    case = tiny.minimax_h3(grid, text=2)
    apply(case.model, sparsity="0.5", tile_thw=tiny.TILE)
    actual, attention = case.run(), applied_attention(case.model).describe()
    tiles = attention["num_tiles"]
    # ceil((1 - s) * video tiles); the rows before the video are not counted
    assert (attention["grid_thw"], attention["topk"]) == (list(grid), -(-tiles // 2))
    remove(case.model)
    with masked_attention(grid, tiny.TILE, -(-tiles // 2), text=case.text, text_side="first"):
        expected = case.run()
    assert tiny.difference(actual, expected) < 1e-5


def test_segments_before_the_video_are_told_apart():
    """Tiles of the coarse stage never hold tokens of two of them."""
    case = tiny.minimax_h3(text=3, keyframes=("first", "last"))
    assert family_of(case.model).texts(case.inputs, tiny.GRID) == ((3, 70, 6),) * 2
    # keys and queries of both stages: 1 + 5 + 1 tiles of at most 16 tokens before the video
    apply(case.model, topk=3, tile_thw=tiny.TILE, gates="coarse")
    method, texts = applied_attention(case.model).methods[0], (3, 70, 6)
    layout = method.layout((*(Segment((1, 1, n), "text") for n in texts), Segment(tiny.GRID)))
    assert layout.num_blocks == 1 + 5 + 1 + tiny.TILES


def test_references_are_segments_before_the_video():
    """The layout of diffusers' step for references: an image, audio, a video with its sound, then audio and video."""
    latents = [torch.zeros(1, 2, 1, 4, 4), torch.zeros(1, 2, 2, 4, 6)]
    kinds = [("image", False), ("audio", True), ("video", True)]
    positions, tags, video, audio, texts, *_ = MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
        torch.ones(5),
        [SimpleNamespace(kind=kind, has_audio=has_audio) for kind, has_audio in kinds],
        condition_latents=latents,
        audio_condition_latents=[torch.zeros(6, 3), torch.zeros(4, 3)],
        num_latent_frames=3,
        latent_height=10,
        latent_width=14,
        num_audio_latents=4,
        patch_size=(1, 2, 2),
        audio_channels=2,
        audio_tag=2,
        video_tag=0,
    )
    rows = dict(position_ids=positions, video_indices=video, audio_indices=audio, text_indices=texts)
    family = family_of(tiny.minimax_h3().model)
    assert family.grid(None, rows) == tiny.GRID
    # the sound of a reference adjoins the audio before it
    assert family.texts({**rows, "hidden_states": torch.zeros(1, len(video), 8)}, tiny.GRID) == ((5, 4, 6 + 4, 12, 8),)
    assert len(tags) == 5 + 4 + 10 + 12 + 8 + 105


@torch.no_grad()
def test_audio_is_what_it_is_without_tiles():
    """With all tiles kept both outputs are the model's, and with few the audio sees all tokens of its layer."""
    case = tiny.minimax_h3()
    expected = case.model(**case.inputs).audio_sample
    apply(case.model, sparsity=0, tile_thw=tiny.TILE)
    assert tiny.difference(case.model(**case.inputs).audio_sample, expected) < 1e-5
    remove(case.model)
    with masked_attention(tiny.GRID, tiny.TILE, 2, text=case.text, text_side="first"):
        expected = case.model(**case.inputs).audio_sample
    apply(case.model, topk=2, tile_thw=tiny.TILE)
    assert tiny.difference(case.model(**case.inputs).audio_sample, expected) < 1e-5


@torch.no_grad()
def test_gates_are_those_of_published_checkpoints():
    case = tiny.minimax_h3()
    apply(case.model, topk=3, tile_thw=tiny.TILE)
    expected = case.run()
    remove(case.model)
    apply(case.model, topk=3, tile_thw=tiny.TILE, gates="coarse")
    gates = {name: p for name, p in case.model.named_parameters() if "gate" in name}
    # no bias, from the hidden width to that of all heads
    assert {name: list(p.shape) for name, p in gates.items()} == {
        f"transformer_blocks.{i}.attn.to_gate_compress.weight": [32, 24] for i in range(2)
    }
    assert tiny.difference(case.run(), expected) < 1e-6
    for gate in gates.values():
        gate.copy_(tiny.randn(*gate.shape, seed=3))
    assert tiny.difference(case.run(), expected) > 1e-3
    remove(case.model)
    assert torch.equal(tiny.minimax_h3().run(), case.run())


def test_gates_train():
    case = tiny.minimax_h3()
    apply(case.model, topk=3, tile_thw=tiny.TILE, gates="coarse")
    case.run().square().mean().backward()
    assert all(p.grad.abs().max() > 1e-8 for name, p in case.model.named_parameters() if "gate" in name)


@torch.no_grad()
def test_dense_steps_count_by_the_timestep_of_the_video():
    """Timesteps of this model rise to 1, which is clean; conditions have it from the start."""
    case = tiny.minimax_h3(keyframes=("first",))
    apply(case.model, topk=3, tile_thw=tiny.TILE, dense_steps=2)

    def is_dense(timestep: float) -> bool:
        case.run(timestep=torch.tensor([1.0, timestep, 0.9]))
        return applied_attention(case.model).describe()["topk"] == tiny.TILES

    assert [is_dense(t) for t in (0.0, 0.2, 0.5, 0.9, 0.1, 0.3, 0.6)] == [True, True, False, False, True, True, False]


def test_what_it_cannot_take_is_refused():
    case = tiny.minimax_h3()
    with pytest.raises(ValueError, match=r"gates=coarse_and_fine: .* MiniMaxH3.* no bias .* expected coarse"):
        apply(case.model, topk=3, gates="coarse_and_fine")
    message = "CompressedKV takes rows of one video, but MiniMaxH3.* has text in its rows: use full, .* video_sparse"
    with pytest.raises(ValueError, match=message):
        apply(case.model, "compressed_kv")
    apply(case.model, topk=3, tile_thw=tiny.TILE)
    # a condition behind the video
    rows = torch.arange(len(case.inputs["token_tags"])).roll(-1)
    with pytest.raises(ValueError, match=r"position_ids of the 105 rows .* the generated video has to be last"):
        case.run(position_ids=case.inputs["position_ids"][rows])
    # one right before it, at the time of its first or of a later frame
    video, none = case.inputs["position_ids"][12:], torch.arange(0)
    grid = family_of(case.model).grid
    assert grid(None, dict(position_ids=video, text_indices=none, audio_indices=none)) == tiny.GRID
    for first in (0, 70):
        positions = torch.cat([video[first : first + 35], video])
        with pytest.raises(ValueError, match=r"position_ids of the 140 rows .* the generated video has to be last"):
            grid(None, dict(position_ids=positions, text_indices=none, audio_indices=none))
