"""A model over a denoising: ranges by sample in one batch, kept selections in compiled blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from vsa.attention.denoising import Denoising, DenoisingPlan, progress_of
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.pooled_tail import PooledTail
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.models.video_dit import VideoDiT

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")

SHAPE, TILES = (16, 3, 10, 8), 12
TOPK = KeptTiles((3, 4), ranges=((0.0, 0.25, (TILES,)), (0.5, 0.75, (2, 5))))
METHODS = {"video_sparse": VideoSparseAttention, "tail": partial(PooledTail, score="mass")}


def model_of(method) -> VideoDiT:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 48, "text_dim": 8, "freq_dim": 16}
    model = VideoDiT(**sizes, num_layers=2, attention=partial(method, tile_thw=(2, 2, 2)))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return model


def inputs(batch: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    latents, text = torch.randn(batch, *SHAPE, generator=generator), torch.randn(batch, 4, 8, generator=generator)
    # in each of the ranges, and at their borders
    return latents, torch.tensor([900.0, 750.0, 500.0, 400.0, 100.0])[:batch], text


def losses(model: VideoDiT, *arguments: Tensor, **options) -> list[Tensor]:
    model.zero_grad()
    loss = model(*arguments, **options).square().flatten(1).mean(1)
    loss.sum().backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("method", METHODS)
def test_samples_of_a_batch_have_the_topk_of_their_range(method):
    model, (latents, timestep, text) = model_of(METHODS[method]), inputs(5)
    actual = losses(model, latents, timestep, text, topk=TOPK)
    rows = [TILES, (3, 4), (2, 5), (2, 5), (3, 4)]
    assert [TOPK.at(progress_of(float(t))) for t in timestep] == [KeptTiles.of(row) for row in rows]
    alone = [
        losses(model, latents[i : i + 1], timestep[i : i + 1], text[i : i + 1], topk=k) for i, k in enumerate(rows)
    ]
    assert torch.allclose(actual[0], torch.cat([each[0] for each in alone]), atol=1e-5)
    for ours, *theirs in zip(actual[1:], *(each[1:] for each in alone), strict=True):
        assert torch.allclose(ours, sum(theirs), atol=1e-4, rtol=1e-3)
    # control: the base everywhere, which is right for two samples
    base = losses(model, latents, timestep, text, topk=(3, 4))[0]
    assert ((actual[0] - base).abs() > 1e-5).tolist() == [True, False, True, True, False]
    # a timestep for every token, some given
    per_token = timestep[:, None].repeat(1, 60)
    per_token[:, :5] = 0
    mixed = model(latents, per_token, text, topk=TOPK)
    single = model(latents[2:3], per_token[2:3], text[2:3], topk=(2, 5))
    assert torch.allclose(mixed[2:3], single, atol=1e-5)


@torch.no_grad()
def test_a_pass_of_a_denoising_says_what_holds():
    model, (latents, timestep, text) = model_of(VideoSparseAttention), inputs(2)
    arguments = (latents, timestep, text)
    denoising = Denoising(DenoisingPlan(dense_steps=1, dense_layers=[1]))
    for step, progress, expected in ((0, 0.6, TILES), (1, 0.6, (2, TILES)), (1, 0.9, (3, TILES))):
        actual = model(*arguments, topk=TOPK, denoising=denoising.at(step, progress))
        assert torch.equal(actual, model(*arguments, topk=expected))
    schedule = replace(TOPK, steps=((2, (1,)),))
    actual = model(*arguments, topk=schedule, denoising=Denoising(DenoisingPlan()).at(2, 0.6))
    assert torch.equal(actual, model(*arguments, topk=1))


@torch.no_grad()
@pytest.mark.parametrize("method", ["video_sparse", pytest.param("tail", marks=pytest.mark.slow)])
def test_compiled_blocks_keep_and_reuse_selections(method):
    plan = DenoisingPlan(dense_steps=1, refresh=3)
    model = model_of(METHODS[method])

    def outputs() -> list[Tensor]:
        denoising = Denoising(plan)
        passes = [denoising.at(step, step / 8) for step in range(8)]
        return [model(*inputs(2, seed=step), topk=(3, 4), denoising=now) for step, now in enumerate(passes)]

    eager = outputs()
    fresh = [model(*inputs(2, seed=step), topk=(3, 4)) for step in range(8)]
    # dense, then new in steps 1, 4 and 7
    assert [torch.equal(a, b) for a, b in zip(eager, fresh, strict=True)] == [step in (1, 4, 7) for step in range(8)]
    torch.compiler.reset()
    counter = CompileCounter()
    model.compile_blocks(backend=counter)
    for ours, theirs in zip(outputs(), eager, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    graphs = counter.frame_count
    # the dense step, and the reused selections of two layers; more of them need no other graph
    assert graphs <= 4
    outputs()
    assert counter.frame_count == graphs


@pytest.mark.parametrize("method", ["video_sparse", pytest.param("tail", marks=pytest.mark.slow)])
def test_compiled_blocks_take_a_topk_for_every_sample(method):
    model = model_of(METHODS[method])
    expected = losses(model, *inputs(5), topk=TOPK)
    torch.compiler.reset()
    counter = CompileCounter()
    model.compile_blocks(backend=counter)
    actual = losses(model, *inputs(5), topk=TOPK)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-3)
    graphs = counter.frame_count
    assert graphs <= 2
    # other timesteps are no other graph
    latents, timestep, text = inputs(5)
    losses(model, latents, timestep.flip(0), text, topk=TOPK)
    losses(model, latents, timestep * 0 + 600, text, topk=TOPK)
    assert counter.frame_count == graphs
