"""What may be added to a data set: samples of the same encoders, from files that it does not have."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vsa.data.codecs import Codec
from vsa.data.image_encoder import ImageEncoder
from vsa.data.index import INDEX_NAME, CodecInfo, DatasetIndex, ImageInfo, TextInfo
from vsa.data.media_folder import version_now
from vsa.data.revisions import replaced
from vsa.data.text import TextEncoder


def set_to_grow(
    root: Path,
    codec: Codec,
    text_encoder: TextEncoder,
    *,
    image_condition: bool,
    image_encoder: ImageEncoder | None,
    fps: float | None,
) -> DatasetIndex:
    """The data set in a folder to which samples are added.

    Args:
        root: folder of the data set.
        codec: codec of the new samples.
        text_encoder: encoder of their captions.
        image_condition: whether they have an image condition.
        image_encoder: encoder of their image tokens; None without them.
        fps: frame rate to which they are resampled; None: that of each file.

    Raises:
        ValueError: there is none, it has other settings, or does not say from which files; names both values.
    """
    if not (root / INDEX_NAME).exists():
        raise ValueError(f"{root} holds no data set to add to: encode it without --add")
    index = DatasetIndex.load(root / INDEX_NAME)
    if any(sample.about.source is None for sample in index.samples.values()):
        raise ValueError(f"{root} does not say which files it was encoded from: encode it again")
    pairs: list[tuple[str, Any, Any]] = [
        ("codec", index.codec, CodecInfo.of(codec)),
        ("text encoder", index.text_encoder, TextInfo.of(text_encoder)),
        ("image encoder", index.image_encoder, image_encoder and ImageInfo.of(image_encoder)),
    ]
    for what, *both in pairs:
        if both[0] != both[1]:
            theirs, ours = (f"{what} {info.id} ({info.hash})" if info else f"no {what}" for info in both)
            raise ValueError(f"{root} has {theirs}, got {ours.removeprefix(f'{what} ')}")
    if bool(index.cond_channels) != image_condition:
        raise ValueError(f"{root} has {index.cond_channels} channels of image condition, got {image_condition=}")
    rates = index.rates()
    if fps is not None and rates and set(rates) != {fps}:
        raise ValueError(
            f"{root} has clips of {', '.join(f'{rate:g}' for rate in sorted(rates))} frames/s, got --fps {fps:g}"
        )
    return index


def new_files(files: Sequence[Path], folder: Path, grown: DatasetIndex | None) -> Sequence[Path]:
    """The files of a folder that a data set lacks, by their names in the folder; ValueError without any."""
    if grown is None:
        return files
    if changed := replaced(grown, partial(version_now, folder)):
        raise ValueError(
            f"{folder / changed[0][0]} is not the file of that name in the data set: give it another name, put the "
            "earlier one back, or encode all of them again with --overwrite"
        )
    known = {sample.about.source for sample in grown.samples.values()}
    new = [path for path in files if path.relative_to(folder).as_posix() not in known]
    if not new:
        raise ValueError(
            f"nothing to add: all {len(files)} files in {folder} are in the data set already (by their names)"
        )
    return new
