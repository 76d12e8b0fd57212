"""Writer of a folder of sampled clips: mp4 and GIF files, a contact sheet, and a JSON of prompts and settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vsa.data.examples import Example
from vsa.data.video_files import write_gif, write_video
from vsa.files import write_whole
from vsa.sampling.contact_sheet import contact_sheet

DATA_CLIPS = "data-clips"
"""Folder of a run with samples of its data, decoded and as they were before encoding."""


def file_stem(index: int, prompt: str) -> str:
    """File name of a clip: its number and the beginning of its prompt."""
    words = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60].strip("-")
    return f"{index:03d}-{words}" if words else f"{index:03d}"


def write_clips(
    folder: Path, prompts: Sequence[str], videos: Tensor, record: Mapping[str, Any], *, fps: float = 8
) -> None:
    """Write clips to `folder`; `samples.json` is written last, so that a folder with it is complete.

    Args:
        folder: output folder, created if missing.
        prompts: N captions.
        videos: uint8 `[N, T, H, W, 3]`.
        record: settings of the sampling, for the JSON file.
        fps: frame rate of the files.
    """
    clips = []
    for i, (prompt, video) in enumerate(zip(prompts, videos, strict=True)):
        stem = file_stem(i, prompt)
        write_video(folder / f"{stem}.mp4", video, fps=fps)
        write_gif(folder / f"{stem}.gif", video, fps=fps)
        clips.append({"index": i, "prompt": prompt, "mp4": f"{stem}.mp4", "gif": f"{stem}.gif"})
    contact_sheet(videos[:16], prompts[:16], folder / "contact_sheet.png")
    whole = {**record, "fps": fps, "frames_height_width": list(videos.shape[1:4]), "clips": clips}
    write_whole(folder / "samples.json", json.dumps(whole, indent=1))


def write_examples(folder: Path, shown: Iterable[Example], *, fps: float = 8) -> None:
    """Write samples of the data as GIFs, decoded and as they were before encoding; `samples.json` comes last.

    Args:
        folder: folder, made when missing.
        shown: the samples.
        fps: frames per second of the files.
    """
    clips: list[dict[str, Any]] = []
    for i, example in enumerate(shown):
        stem = file_stem(i, example.caption)
        clip = {"sample": example.id, "prompt": example.caption, "codec": f"{stem}-codec.gif", "psnr": example.psnr}
        write_gif(folder / clip["codec"], example.rebuilt, fps=fps)
        if example.original is not None:
            clip["original"] = f"{stem}-original.gif"
            write_gif(folder / clip["original"], example.original, fps=fps)
        clips.append(clip)
    write_whole(folder / "samples.json", json.dumps({"fps": fps, "clips": clips}, indent=1))
