"""MiniMax-H3: packed rows of text, conditions and audio before the video, one timestep for each kind."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3Ref2VAPrepareLayoutStep,
    patchify_video_latents,
)

from tests.integrations import checks, tiny
from tests.integrations.oracle import masked_attention
from vsa.attention.layout import Segment
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.integrations.diffusers import applied_attention, apply, remove
from vsa.integrations.diffusers.families import family_of
from vsa.integrations.diffusers.network import DiffusersNetwork

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


def network_of(case: tiny.Case, **attention) -> DiffusersNetwork:
    model = DiffusersNetwork(
        attention=partial(VideoSparseAttention, tile_thw=tiny.TILE, **attention),
        class_name=type(case.model).__name__,
        config=case.model.config,
    )
    own = dict(model.named_parameters())
    for key, value in case.model.state_dict().items():
        own[key].data.copy_(value)
    return model


def velocities(case: tiny.Case, latents: torch.Tensor, timestep, text: torch.Tensor, lengths) -> torch.Tensor:
    """noise - data by diffusers' class, a row of text and video after the other."""
    t, h, w = latents.shape[2:]
    outs = []
    for x, time, words, length in zip(latents, timestep, text, lengths, strict=True):
        positions, tags, video, audio, texts, *_ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            *(torch.ones(length), t, h, w, 0), (1, 2, 2), audio_channels=2, audio_tag=2, video_tag=0
        )
        out = case.run(
            hidden_states=patchify_video_latents(x[None], (1, 2, 2))[None],
            audio_hidden_states=torch.zeros(1, 0, 3),
            encoder_hidden_states=words[None, :length],
            timestep=(1 - time / 1000)[None],
            timestep_indices=torch.zeros(len(tags), dtype=torch.long),
            **dict(token_tags=tags, position_ids=positions, video_indices=video, audio_indices=audio),
            text_indices=texts,
        )
        places = patchify_video_latents(torch.arange(x.numel()).view(1, *x.shape), (1, 2, 2))
        outs.append(-out.new_zeros(x.numel()).scatter(0, places.flatten(), out.flatten()).view(x.shape))
    return torch.stack(outs)


@pytest.mark.parametrize("topk", [3, tiny.TILES])
def test_a_network_is_its_class(topk):
    """In training, with a timestep and a text of its own for every sample, and gates where published ones are."""
    case, lengths = tiny.minimax_h3(), (6, 3, 6)
    model = network_of(case, gate_bias=False, fine_gate=False, coarse_text=True)
    latents, text = tiny.randn(3, 2, 3, 10, 14), tiny.randn(3, 6, 8, seed=1)
    times, mask = torch.tensor([700.0, 300.0, 700.0]), torch.arange(6) < torch.tensor(lengths)[:, None]
    with ExitStack() as stack:
        for length in set(lengths):
            stack.enter_context(masked_attention(tiny.GRID, tiny.TILE, topk, text=length, text_side="first"))
        expected = velocities(case, latents, times, text, lengths)
    out = model(latents, times, text, mask, topk=topk)
    assert tiny.difference(out, expected) < 1e-5
    weights = tiny.randn(*out.shape, seed=4)
    (expected * weights).sum().backward()
    (out * weights).sum().backward()
    own = dict(model.named_parameters())
    for key, parameter in case.model.named_parameters():
        assert (parameter.grad is None) == (own[key].grad is None), key
        if parameter.grad is not None:
            assert tiny.difference(own[key].grad, parameter.grad) < 1e-5, key
    gates = {name: p for name, p in own.items() if name not in case.model.state_dict()}
    assert list(gates) == [f"transformer_blocks.{i}.attn.to_gate_compress.weight" for i in range(2)]
    assert all(p.grad.abs().max() > 1e-6 for p in gates.values())
    roles = model.parameter_roles()
    assert {name for name, role in roles.items() if role == "gate"} == set(gates)
    # controls: another length of a text, another timestep, one tile less
    with torch.no_grad():
        for changes in ({"text_mask": mask.roll(1, 0)}, {"timestep": times.roll(1)}, {"topk": topk - 1}):
            other = model(
                **{"x_t": latents, "timestep": times, "text": text, "text_mask": mask, "topk": topk, **changes}
            )
            assert tiny.difference(other, expected) > 1e-4
