"""Toy clips as mp4 files, and their shards."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock

from vsa.data.clip_rules import ClipRules
from vsa.data.codecs import Codec
from vsa.data.encode import EncodeOptions, encode_folder
from vsa.data.index import INDEX_NAME
from vsa.data.plan import Shape
from vsa.data.shards import LatentReader
from vsa.data.text import TextEncoder
from vsa.data.toy_videos import ToyClips, write_toy_videos


def prepare_toy_shards(toy: ToyClips, videos: Path, root: Path, codec: Codec, text_encoder: TextEncoder) -> None:
    """Render and encode toy clips if they are missing.

    Args:
        toy: number, size and seed of the clips.
        videos: folder of the mp4 files.
        root: folder of shards.
        codec: codec of the pixels.
        text_encoder: encoder of the captions.
    """
    frames, height, width = toy.size
    # the rules reject a clip of one frame unless one frame is requested
    rules = ClipRules(frames=1 if frames == 1 else None)
    clip = rules.plan(videos, codec, frames=frames, height=height, width=width)
    if not (root / INDEX_NAME).is_file():
        root.parent.mkdir(parents=True, exist_ok=True)
        # of several runs and ranks that start together, one creates the data and the others wait
        with FileLock(root.parent / f".{root.name}.lock"):
            if not (root / INDEX_NAME).is_file():
                write_toy_videos(toy, videos)
                encode_folder(videos, root, EncodeOptions(clips=rules), codec=codec, text_encoder=text_encoder)
    _check_toy_set(root, toy, codec.latent_shape(*clip.size))


def _check_toy_set(root: Path, toy: ToyClips, shape: Shape) -> None:
    index = LatentReader(root).index
    frames, height, width = toy.size
    alike = all(s.id.startswith(f"toy-{toy.seed}-") and s.latent_shape == shape for s in index.samples.values())
    if len(index.samples) != toy.count or not alike:
        raise ValueError(
            f"{root} holds {len(index.samples)} samples, not the {toy.count} toy clips of seed {toy.seed} and size "
            f"{frames}x{height}x{width}: remove it or choose another folder"
        )
