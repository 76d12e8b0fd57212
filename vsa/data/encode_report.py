"""Encoding of a folder with a report on the terminal."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from vsa.data.encode import UnusableFiles, encode_folder
from vsa.data.encoders import EncoderChoice
from vsa.data.shards import LatentReader
from vsa.errors import usable_device

# most problems that are printed one by one; the others are counted
_LISTED = 20


def encode_and_tell(
    videos: Path, out: Path, encoders: EncoderChoice, *, device: str, rank: int = 0, world_size: int = 1, **options: Any
) -> None:
    """Encode a folder and print skipped files, the content of the data set and the command to train on it.

    Args:
        videos: folder of videos and images.
        out: folder of shards.
        encoders: choice of codec and text encoder.
        device: device of the encoders.
        rank: rank of this process.
        world_size: number of processes that share the work.
        options: further options of `encode_folder`.
    """
    device = usable_device(device, rank=rank)
    codec, text_encoder = encoders.build(device)
    share = {"device": device, "rank": rank, "world_size": world_size}
    try:
        report = encode_folder(videos, out, codec=codec, text_encoder=text_encoder, **share, **options)
    except UnusableFiles as error:
        # the error message itself names a single problem
        for name, reason in error.problems[:_LISTED] if len(error.problems) > 1 else ():
            print(f"{name}: {reason}", file=sys.stderr)
        if len(error.problems) > _LISTED:
            print(f"and {len(error.problems) - _LISTED} more", file=sys.stderr)
        raise
    for name, reason in report.skipped:
        print(f"left out {name}: {reason}")
    if world_size == 1:
        index = LatentReader(out).index
        print(index.summary())
    elif report.complete:
        print("every part is done: run the command once more without --rank and --world-size")
    print(f"{report.samples} samples in {out}, {len(report.skipped)} left out")
    if world_size > 1:
        return
    shapes = {sample.latent_shape for sample in index.samples.values()}
    if settings := encoders.training_settings(str(out), str(videos), shapes):
        print(f"to train on them: vsa train {shlex.join(settings)}")
