from __future__ import annotations

import pickle

import pytest
import torch

from vsa.data.batch import VideoBatch
from vsa.data.codecs import HaarCodec
from vsa.data.datamodule import WorldOnlineDataModule
from vsa.data.text import HashedNgramEncoder
from vsa.data.world.render import render
from vsa.data.world.scenes import WorldClips, draw_scene, world_attributes, world_caption
from vsa.data.world.store import SceneLatents, clip_size


def module(**options) -> WorldOnlineDataModule:
    defaults = {"world": WorldClips(count=40, grid=(2, 2, 3), seed=1), "codec": HaarCodec(), "batch_size": 4}
    encoder = HashedNgramEncoder(max_tokens=24)
    data = WorldOnlineDataModule(**{**defaults, "text_encoder": encoder, "val_fraction": 0.2, **options})
    data.prepare_data()
    data.setup()
    return data


def first(data: WorldOnlineDataModule, count: int) -> list[VideoBatch]:
    batches = iter(data.train_dataloader())
    return [next(batches) for _ in range(count)]


def test_a_batch_is_drawn_where_it_is_put() -> None:
    data, codec = module(), HaarCodec()
    for batch in first(data, 2):
        assert isinstance(batch.latents, SceneLatents)
        assert batch.latents.shape == (4, 16, 2, 4, 6)
        # what travels from a worker is small
        assert len(pickle.dumps(batch.latents.scenes)) < 4000
        on_cpu = batch.to("cpu")
        assert type(on_cpu.latents) is torch.Tensor
        for i, name in enumerate(batch.sample_ids):
            number = int(name.rpartition("-")[2])
            video = render(draw_scene(1, number, (8, 32, 48)), (8, 32, 48))[0]
            assert torch.equal(on_cpu.latents[i], codec.encode(video))
            assert torch.equal(batch.latents[i : i + 1].to("cpu")[0], on_cpu.latents[i])
            assert batch.captions[i] in ("", world_caption(world_attributes(1, number)))
        # a second time nothing is left to do
        assert torch.equal(on_cpu.to("cpu").latents, on_cpu.latents)


def test_workers_and_starting_steps_change_nothing() -> None:
    expected = first(module(), 4)
    late = module(num_workers=2)
    late.start_step = 2
    for a, b in zip(first(late, 2), expected[2:], strict=True):
        assert a.sample_ids == b.sample_ids
        assert torch.equal(a.to("cpu").latents, b.to("cpu").latents)
        assert torch.equal(a.seeds, b.seeds)
        assert torch.equal(a.text, b.text)


def test_statistics_are_those_of_the_first_clips() -> None:
    data, codec, size = module(), HaarCodec(), (8, 32, 48)
    clips = torch.stack([codec.encode(render(draw_scene(1, i, size), size)[0]) for i in range(40)])
    torch.testing.assert_close(data.latent_mean, clips.mean((0, 2, 3, 4)), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        data.latent_std, clips.transpose(0, 1).flatten(1).std(1, correction=0), atol=1e-4, rtol=1e-4
    )
    assert torch.equal(data.latent_mean, module(seed=9, batch_size=3).latent_mean)
    assert not torch.equal(data.latent_mean, module(world=WorldClips(count=40, grid=(2, 2, 3), seed=2)).latent_mean)


def test_the_held_out_clips_do_not_depend_on_seed_and_batch_size() -> None:
    def val_names(data: WorldOnlineDataModule) -> set[str]:
        return {name for batch in data.val_dataloader() for name in batch.sample_ids}

    assert val_names(module()) == val_names(module(seed=3, batch_size=2)) != set()
    assert val_names(module()).isdisjoint({name for batch in first(module(), 20) for name in batch.sample_ids})
    assert module().held_out_captions(2)[0].endswith(tuple(("up", "down", "left", "right", "still")))


def test_grids_of_other_codecs() -> None:
    assert clip_size((16, 32, 32), HaarCodec()) == (64, 512, 512)
    causal = HaarCodec()
    causal.frames_that_fit = lambda frames: frames - (frames - 1) % 4  # type: ignore[method-assign]
    assert clip_size((5, 4, 6), causal) == (17, 64, 96)


def test_captions_that_do_not_fit_the_text_encoder_are_refused() -> None:
    with pytest.raises(ValueError, match=r"text_encoder.max_tokens must be at least 22.* got 16"):
        module(text_encoder=HashedNgramEncoder())
