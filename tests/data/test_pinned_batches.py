"""Batches for a GPU: in page-locked memory, with the noise that the loss would draw."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import vsa.data.batch
from tests.data.test_datamodule import assert_equal, attach, batches, module
from tests.data.world.test_store import module as world_module
from tests.pinning import PretendedGPU, pinning_threads, pretended_gpu  # noqa: F401 (a fixture)
from vsa.data.batch import NoPinnedMemory, VideoBatch
from vsa.data.world.store import SceneLatents
from vsa.diffusion.flow_matching import noise_like
from vsa.evaluation.evaluator import split_batch


def tensors(batch: VideoBatch) -> dict[str, Tensor]:
    values = {name: getattr(batch, name) for name in ("latents", "text", "text_mask", "cond_latents", "noise")}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_for_a_gpu_are_page_locked_with_the_noise_of_their_seeds(
    dataset: Path,
    pretended_gpu: PretendedGPU,  # noqa: F811
    workers: int,
) -> None:
    data = attach(module(dataset, num_workers=workers), steps=4, accumulate=2)
    data.noise_ahead = True
    all_batches = batches(data) + list(data.val_dataloader())
    for batch in all_batches:
        assert set(tensors(batch)) == {"latents", "text", "text_mask", "noise"}
        assert all(value.is_pinned() for value in tensors(batch).values())
        assert not batch.seeds.is_pinned()
        assert torch.equal(batch.noise, noise_like(batch.latents, batch.seeds))
        assert batch.noise.dtype == torch.float32
    in_thread = {"_pin_memory_loop" in name for name in pretended_gpu.threads}
    assert in_thread == {workers > 0}
    assert not pinning_threads()
    # pinned memory is not copied again, and a job that draws other noise gets none
    assert all(value is value.pin_memory() for value in tensors(all_batches[0]).values())
    data.noise_ahead = False
    assert all(batch.noise is None and batch.latents.is_pinned() for batch in batches(data))


def test_batches_for_a_cpu_stay_as_they_are(dataset: Path) -> None:
    data = attach(module(dataset, num_workers=1), steps=2)
    plain = batches(data)
    data.noise_ahead = True
    loader = data.train_dataloader()
    assert not loader.pin_memory
    ahead = list(loader)
    assert_equal(plain, ahead)
    assert all(batch.noise is None for batch in ahead)
    # the device of the trainer decides, not that of the machine
    data.trainer.strategy = SimpleNamespace(root_device=torch.device("cuda", 1))
    assert data.train_dataloader().pin_memory
    assert data.val_dataloader().pin_memory
    data.trainer = None
    assert not data.val_dataloader().pin_memory


def test_noise_follows_its_samples(dataset: Path, pretended_gpu: PretendedGPU) -> None:  # noqa: F811
    data = attach(module(dataset), steps=1)
    data.noise_ahead = True
    (whole,) = batches(data)
    parts = list(split_batch(whole, 3))
    assert [len(part.sample_ids) for part in parts] == [3, 1]
    for part in parts:
        assert torch.equal(part.noise, noise_like(part.latents, part.seeds))
    for field in fields(VideoBatch):
        value = getattr(whole, field.name)
        if isinstance(value, Tensor):
            assert torch.equal(torch.cat([getattr(part, field.name) for part in parts]), value), field.name
    on_cpu = whole.to("cpu")
    assert on_cpu.noise is whole.noise
    with pytest.raises(ValueError, match=r"expected noise of shape \[3, .*got \[4, "):
        noise_like(parts[0].latents, parts[0].seeds, whole.noise)


def test_latents_that_are_rendered_later_have_noise_already(pretended_gpu: PretendedGPU) -> None:  # noqa: F811
    data = attach(world_module(num_workers=1), steps=2)
    data.noise_ahead = True
    for batch in batches(data):
        assert isinstance(batch.latents, SceneLatents)
        assert batch.text.is_pinned()
        on_cpu = batch.to("cpu")
        assert torch.equal(on_cpu.noise, noise_like(on_cpu.latents, on_cpu.seeds))


@pytest.mark.parametrize("workers", [0, 1])
def test_page_locked_memory_that_runs_out_is_one_line(
    dataset: Path,
    pretended_gpu: PretendedGPU,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
) -> None:
    def error_of(reason: str) -> Exception:
        """The error of the first batch, from a loader of its own: its thread draws further batches ahead."""

        def fail(*args: object) -> Tensor:
            raise RuntimeError(reason)

        monkeypatch.setattr(vsa.data.batch, "draw_noise", fail)
        data = attach(module(dataset, num_workers=workers), steps=2)
        data.noise_ahead = True
        iterator = iter(data.train_dataloader())
        with pytest.raises((NoPinnedMemory, RuntimeError)) as caught:
            next(iterator)
        if workers:
            assert pinning_threads()
            # the errors keep the loader alive
            iterator._shutdown_workers()
            assert not pinning_threads()
        return caught.value

    error = error_of("CUDA error: out of memory\nCUDA kernel errors might be reported later")
    assert isinstance(error, NoPinnedMemory)
    assert str(error).startswith("no page-locked memory for a batch of 4 samples (latents [4, ")
    assert "data.num_workers" in str(error)
    assert "\n" not in str(error)
    # another error of the device stays what it is
    error = error_of("CUDA error: an illegal memory access was encountered")
    assert type(error) is RuntimeError
    assert "illegal memory access" in str(error)


def test_a_pinned_batch_is_the_batch(dataset: Path, pretended_gpu: PretendedGPU) -> None:  # noqa: F811
    data = attach(module(dataset, num_workers=1, caption_dropout=0.5), steps=3)
    data.noise_ahead = True
    pinned = batches(data)
    plain = [batch for batch in data.train_dataloader().dataset]
    assert_equal(pinned, plain)
    for a, b in zip(pinned, plain, strict=True):
        rest = [f.name for f in fields(VideoBatch) if f.name not in ("noise", "noise_ahead")]
        without_noise = replace(a, noise=None, noise_ahead=False)
        assert all(
            torch.equal(getattr(without_noise, name), getattr(b, name))
            if isinstance(getattr(b, name), Tensor)
            else getattr(without_noise, name) == getattr(b, name)
            for name in rest
        )


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 1])
def test_a_gpu_takes_the_batches_without_a_wait(dataset: Path, workers: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    data = attach(module(dataset, num_workers=workers), steps=2)
    data.trainer.strategy = SimpleNamespace(root_device=torch.device("cuda", 0))
    data.noise_ahead = True
    for batch in batches(data):
        assert all(value.is_pinned() and value is value.pin_memory() for value in tensors(batch).values())
        torch.cuda.set_sync_debug_mode("error")
        try:
            on_gpu = batch.to("cuda")
            noise = noise_like(on_gpu.latents, on_gpu.seeds, on_gpu.noise)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(on_gpu.latents.cpu(), batch.latents)
        assert torch.equal(noise.cpu(), noise_like(batch.latents, batch.seeds))
