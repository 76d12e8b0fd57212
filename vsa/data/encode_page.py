"""The page of a data set that `vsa encode` made: what it holds, what was left out, and what its codec keeps."""

from __future__ import annotations

import base64
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

from vsa.data.buckets import Bucket
from vsa.data.clip_plan import ClipPlan
from vsa.data.reconstruction import decibel, describe_errors
from vsa.data.resumable_writer import PartsReport
from vsa.pages.charts import Chart, Panel, Series
from vsa.pages.page import Page, Table

PAGE_NAME = "clips.html"
# different values of a histogram that have a bar each, and bars otherwise
_VALUES, _BARS = 20, 30
_LISTED = 200


def write_page(out: Path, videos: Path, report: PartsReport, plan: ClipPlan, facts: Mapping[str, str]) -> Path:
    """Write the page into the folder of the data set.

    Args:
        out: folder of the data set.
        videos: folder of the videos.
        report: report of the encoding, with its notes.
        plan: the clips as they were planned.
        facts: codec and other facts for the header, by heading.
    """
    notes: dict[str, list[Any]] = {}
    for kind, value in report.notes:
        notes.setdefault(kind, []).append(value)
    panels, same = _histograms(notes.get("clip", []), plan)
    rebuilt = notes.get("rebuilt", [])
    quality = describe_errors({note["name"]: note["error"] for note in rebuilt}) if rebuilt else ""
    facts = {**facts, "Rebuilt by the codec": quality, "The same for all": same}
    header = {"Clips": f"{report.samples:,}", "Shots": plan.shots or "", **facts}
    header = {name: text for name, text in header.items() if text}
    page = Page(out / PAGE_NAME, title=f"Clips of {videos.resolve().name}", facts=header)
    page.table(_sizes(notes.get("clip", []), rebuilt))
    with TemporaryDirectory() as folder:
        for name, note, picture in _pictures(rebuilt, Path(folder)):
            page.picture(name, note, picture)
    if panels:
        page.chart(Chart(key="clips", title="Histograms", note="", panels=panels, switches=("of",)))
    if times := [list(row) for row in dict.fromkeys(map(tuple, notes.get("times", [])))]:
        note = "Of clips with pictures that --fps repeats, that are missing, shown for long, or not at a constant rate."
        page.table(Table(["file", "pictures"], times[:_LISTED], title="Times", note=note))
    dropped = Counter([*plan.dropped, *report.skipped])
    if dropped:
        rows = [[what, why] for what, why in dropped][:_LISTED]
        note = f"The first {_LISTED} of {len(dropped):,}." if len(dropped) > _LISTED else ""
        page.table(Table(["what", "why"], rows, title="Left out", note=note, long=[1]))
    return page.write()


def _sizes(clips: Sequence[Sequence[float]], rebuilt: Sequence[Mapping[str, Any]]) -> Table:
    """Clips by size, and how well the codec rebuilds some of them."""
    seconds: dict[tuple[int, ...], list[float]] = {}
    for frames, height, width, fps, *_ in clips:
        seconds.setdefault((int(frames), int(height), int(width)), []).append(frames / fps)
    rows = []
    for size, lengths in sorted(seconds.items(), key=lambda item: -len(item[1])):
        errors = [note["error"] for note in rebuilt if tuple(note["size"]) == size]
        psnr = [f"{decibel(error):.1f}" for error in (math.fsum(errors) / len(errors), max(errors))] if errors else []
        total = f"{math.fsum(lengths):,.1f}"
        rows.append([_name(size), f"{len(lengths):,}", total, *(psnr or ["", ""]), str(len(errors))])
    headings = [
        ("height x width x frames", ""),
        ("clips", ""),
        ("seconds", "length of all clips together"),
        ("PSNR, dB", "10 log10(255^2 / mean squared error) over the measured clips; higher is better"),
        ("worst, dB", "PSNR of the measured clip that is rebuilt worst"),
        ("measured", "clips that were encoded and decoded, spread over the set"),
    ]
    note = "A model learns latents: it never draws more detail than the codec rebuilds. Empty: not measured."
    return Table(headings, rows, title="Buckets", note=note)


def _name(size: Sequence[int]) -> str:
    frames, height, width = size
    return str(Bucket(height, width, frames))


def _pictures(rebuilt: Sequence[Mapping[str, Any]], folder: Path) -> list[tuple[str, str, Path]]:
    """Title, note and picture for each size: frames of clips, each above its reconstruction."""
    by_size: dict[tuple[int, ...], list[Mapping[str, Any]]] = {}
    for note in rebuilt:
        by_size.setdefault(tuple(note["size"]), []).append(note)
    found = []
    for size, notes in by_size.items():
        pictures = [np.asarray(Image.open(io.BytesIO(base64.b64decode(note["png"])))) for note in notes[:3]]
        path, (height, width) = folder / f"{_name(size)}.png", pictures[0].shape[:2]
        Image.fromarray(np.concatenate([picture[:height, :width] for picture in pictures])).save(path)
        named = ", ".join(f"{note['name']} ({decibel(note['error']):.1f} dB)" for note in notes[:3])
        text = f"First, middle and last frame above its reconstruction: {named}."
        found.append((f"Clips of {_name(size)}", text, path))
    return found


def _histograms(clips: Sequence[Sequence[float]], plan: ClipPlan) -> tuple[dict[tuple[str, ...], Panel], str]:
    """A panel for each number that is not the same for all, and the others with their values."""
    values = {
        "shot length, s": list(plan.seconds),
        "clip length, s": [frames / fps for frames, _, _, fps, *_ in clips],
        "frames per second": [fps for _, _, _, fps, *_ in clips],
        "height of the file, pixels": [height for *_, height, _ in clips],
        "width of the file, pixels": [width for *_, width in clips],
    }
    panels = {
        (label.partition(",")[0],): Panel(label, "shots" if "shot" in label else "clips", [_bars(label, numbers)])
        for label, numbers in values.items()
        if len(set(numbers)) > 1
    }
    same = [f"{label} {numbers[0]:.4g}" for label, numbers in values.items() if len(set(numbers)) == 1]
    return panels, "; ".join(same)


def _bars(name: str, values: Sequence[float]) -> Series:
    """A histogram: a bar for each value if they are few, else for equal ranges."""
    counts = Counter(round(value, 3) for value in values)
    if len(counts) <= _VALUES:
        x, y = np.array(sorted(counts)), np.array([counts[value] for value in sorted(counts)])
    else:
        y, edges = np.histogram(values, bins=_BARS)
        x = (edges[1:] + edges[:-1]) / 2
    return Series(name, x.astype(float), y.astype(float), bars=True)
