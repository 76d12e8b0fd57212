"""The model of an inspection with its codec and text encoder, and clips cut to the size that it was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vsa.attention.sparsity import ConstantSparsity
from vsa.attention.tiling import Grid
from vsa.checkpoints.exported_sparsity import ExportedSparsity
from vsa.checkpoints.run_checkpoint import resolve_checkpoint
from vsa.checkpoints.run_weights import Group
from vsa.checkpoints.weight_source import is_run, open_network
from vsa.config import stored_data
from vsa.data.captions import read_captions
from vsa.data.clip_rules import ClipRules, clip_size
from vsa.data.codecs import Codec, WanVAE
from vsa.data.plan import SampleRef
from vsa.data.sample_store import SampleStore
from vsa.data.text import UMT5Encoder
from vsa.data.video_files import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from vsa.diffusion.flow_matching import FlowShift
from vsa.sampling.pipeline import SamplingPipeline, load_run


@dataclass(frozen=True, kw_only=True)
class Clip:
    """A clip as the model sees it.

    Args:
        name: name of the file, or id of the sample.
        caption: caption of the clip.
        video: uint8 `[T, H, W, 3]` on the CPU; for a stored sample, its latents decoded by the codec.
        latents: float32 `[C, t, h, w]`, not normalised.
    """

    name: str
    caption: str
    video: Tensor
    latents: Tensor


def open_inspected(
    checkpoint: str,
    *,
    pipeline: str | None = None,
    weights: Group | None = None,
    device: str = "cpu",
    dense_latents: Grid | None = None,
) -> SamplingPipeline:
    """The model of a run, or of an export with the VAE and the text encoder of a Wan pipeline.

    Args:
        checkpoint: run folder, checkpoint folder, or a sparse export: folder or hub id.
        pipeline: folder or hub id with the VAE and the text encoder for an export; None: the export's own folder.
        weights: averaged ("ema") or trained ("model") weights of a run; None: averaged if the run has them.
        device: device of the model.
        dense_latents: latent frames, rows and columns of a clip for a dense export, which does not state its grids;
            None: dense exports are refused.

    Raises:
        ValueError: a pipeline for a run, no such weights, a dense export, or a model with image conditions.
    """
    if is_run(checkpoint):
        if pipeline is not None:
            raise ValueError(f"--pipeline {pipeline} applies to exports only, got the run {checkpoint}")
        run = load_run(checkpoint, weights=weights, device=device)
    else:
        run = _open_export(checkpoint, pipeline or checkpoint, weights, device, dense_latents)
    model = run.model
    if model.image_dim is not None or model.in_channels != run.codec.channels:
        raise ValueError(
            f"{run.source} takes {model.in_channels} latent channels and its codec {run.codec.id} makes "
            f"{run.codec.channels}: models with image conditions cannot be inspected"
        )
    return run


def _open_export(
    checkpoint: str, pipeline: str, weights: Group | None, device: str, dense_latents: Grid | None
) -> SamplingPipeline:
    if weights is not None:
        raise ValueError(f"--weights {weights} applies to runs only, got the export {checkpoint}")
    model, source = open_network(checkpoint, device=device)
    sparse = source.sparse
    if sparse is None and dense_latents is None:
        raise ValueError(f"{checkpoint} is a dense model: it selects no tiles")
    try:
        codec = WanVAE(pipeline)
        text_encoder = UMT5Encoder(pipeline, device=device)
    except ValueError as error:
        raise ValueError(
            f"an export is inspected with the VAE and the text encoder of a Wan pipeline, name it with --pipeline "
            f"(an export of other latents becomes a run with `vsa convert --like`): {error}"
        ) from None
    assert codec.statistics is not None
    if sparse is None:
        assert dense_latents is not None
        shapes: tuple[tuple[int, ...], ...] = ((codec.channels, *dense_latents),)
    else:
        sizes = ((n * p for n, p in zip(grid, model.patch_size, strict=True)) for grid in sparse.grids)
        shapes = tuple((codec.channels, *size) for size in sizes)
    return SamplingPipeline(
        model=model.eval().requires_grad_(False),
        codec=codec,
        text_encoder=text_encoder,
        latent_mean=codec.statistics[0],
        latent_std=codec.statistics[1],
        sparsity=ConstantSparsity(sparsity=0.0) if sparse is None else ExportedSparsity(sparse),
        flow_shift=FlowShift(kind="constant", value=(sparse and sparse.flow_shift) or 1.0),
        latent_shapes=shapes,
        step=0,
        source=checkpoint,
        weights="model",
        text_padding="zeros",
        step_list=None if sparse is None else sparse.step_list,
    )


def open_clip(run: SamplingPipeline, clip: str, caption: str | None = None) -> Clip:
    """A video file cut as `vsa encode` cuts it to what the model was trained on, or a sample of the run's data.

    Args:
        run: model, whose data the sample is looked up in.
        clip: file, or id of a sample.
        caption: caption that replaces the one beside the file (`a.txt`, a caption file of its folder) or the sample's.

    Raises:
        ValueError: no such file or sample, no caption, or a clip that is too short or too small.
    """
    path = Path(clip)
    if path.is_file() or path.suffix.lower() in (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES):
        return read_clip(path, run.codec, run.latent_shapes, device=run.device, caption=caption)
    if "/" in clip:
        raise ValueError(f"no such video: {clip}")
    return _read_sample(run, clip, caption)


def clip_names(clips: str, most: int) -> list[str]:
    """At most `most` videos of the folder `clips`, or `clips` itself if it is no folder."""
    if not Path(clips).is_dir():
        return [clips]
    suffixes = (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES)
    names = [str(path) for path in sorted(Path(clips).iterdir()) if path.suffix.lower() in suffixes]
    if not names:
        raise ValueError(f"--clips {clips} holds no videos")
    return names[:most]


def check_numbers(name: str, numbers: Sequence[int], count: int, source: str) -> None:
    """Raise ValueError for numbers of layers, heads or query tiles that a model of `count` does not have."""
    if bad := [n for n in numbers if not 0 <= n < count]:
        raise ValueError(f"--{name}: {source} has {name} 0 to {count - 1}, got {', '.join(map(str, bad))}")


def check_timesteps(timesteps: Sequence[float]) -> None:
    """Raise ValueError for timesteps outside of [0, 1000]."""
    if bad := [t for t in timesteps if not 0 <= t <= 1000]:
        raise ValueError(f"--timesteps must be in [0, 1000], got {', '.join(f'{t:g}' for t in bad)}")


def read_clip(
    path: Path,
    codec: Codec,
    latent_shapes: Sequence[Sequence[int]],
    *,
    device: torch.device | str,
    caption: str | None = None,
) -> Clip:
    """A video file cut as `vsa encode` cuts it to clips of some latent shapes `(C, T, H, W)`.

    Raises:
        ValueError: no such file, no caption beside it, or a clip that is too short or too small.
    """
    if not path.is_file():
        raise ValueError(f"no such video: {path}")
    if caption is None:
        captions = read_captions(path.parent, None, [path])
        if path in captions.missing:
            raise ValueError(f"{captions.missing[path]}; --caption gives one")
        caption = captions.of[path][0]
    rules = ClipRules(buckets=tuple(clip_size(codec, shape) for shape in latent_shapes))
    video, _ = rules.cut(path, codec)
    return Clip(name=path.name, caption=caption, video=video, latents=codec.encode(video.to(device)))


def _read_sample(run: SamplingPipeline, sample_id: str, caption: str | None) -> Clip:
    data = resolve_checkpoint(run.source).config["data"] if is_run(run.source) else {}
    neither = f"{sample_id!r} is neither a video file nor"
    if "_target_" not in data:
        raise ValueError(f"{neither} a sample id (run {run.source} has no data to look it up in)")
    store: SampleStore = stored_data({"data": data}).open_store()
    ids = [(source, name) for source, by_size in store.buckets.items() for names in by_size.values() for name in names]
    refs = [SampleRef(source=source, id=name) for source, name in ids if name == sample_id]
    if not refs:
        raise ValueError(f"{neither} one of the {len(ids)} sample ids of the run's data, such as {ids[0][1]}")
    latents = store.latents(refs[:1]).to(run.device)[0]
    words = store.text(refs[0], 0)[0] if caption is None else caption
    with torch.no_grad():
        video = run.codec.decode(latents).cpu()
    return Clip(name=sample_id, caption=words, video=video, latents=latents)
