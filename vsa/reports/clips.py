"""Tables of sampled clips, with the clips of one prompt in a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from vsa.files import is_regular, read_json
from vsa.pages.page import Clips
from vsa.reports.runs import Run
from vsa.reports.variants import Variant
from vsa.sampling.sample_writer import DATA_CLIPS


def clip_table(variants: Sequence[Variant], *, most_bytes: float) -> Clips:
    """The newest clips of each variant, from its first run with clips.

    Args:
        variants: variants in the order of the columns.
        most_bytes: largest size of all GIFs together; the last prompts are left out to satisfy it.
    """
    columns: dict[tuple[str, str], dict[str, Path]] = {}
    for variant in variants:
        for run in variant.runs:
            sets = newest_clips(run)
            for label, clips in sets.items():
                columns[variant.name, f"{label}, seed {run.seed}" if run.seed is not None else label] = clips
            if sets:
                break
    return _fitting(columns, most_bytes)


def newest_clips(run: Run) -> dict[str, dict[str, Path]]:
    """Clips of the last sampled step: GIFs by prompt, by the label `step N, SET` of their set."""
    for step in sorted((run.folder / "samples").glob("step-*"), reverse=True):
        sets: dict[str, dict[str, Path]] = {}
        for record in sorted(step.glob("**/samples.json")):
            number, name = step.name.removeprefix("step-").lstrip("0") or "0", record.parent.relative_to(step)
            if clips := _gifs(run, record, "gif"):
                sets[f"step {number}{f', {name.as_posix()}' if name.parts else ''}"] = clips
        if sets:
            return sets
    return {}


def run_clip_table(run: Run, *, most_bytes: float) -> Clips:
    """The newest clips of a run beside real clips of the same captions and their reconstructions by the codec.

    Args:
        run: the run.
        most_bytes: size limit, as in `clip_table`.
    """
    columns: dict[tuple[str, str], dict[str, Path]] = {}
    for label, clips in newest_clips(run).items():
        step, _, name = label.partition(", ")
        columns[name or "generated", step] = clips
    record, psnr = run.folder / DATA_CLIPS / "samples.json", ""
    with suppress(OSError, ValueError, KeyError, TypeError):
        clips = read_json(record, inside=run.folder)["clips"]
        values = [float(clip["psnr"]) for clip in clips if "psnr" in clip and clip["psnr"] is not None]
        psnr = f"PSNR of these {len(values)} clips {fmean(values):.1f} dB" if values else ""
    columns["real", "of the data"] = _gifs(run, record, "original")
    columns["codec's reconstruction", psnr] = _gifs(run, record, "codec")
    return _fitting({heading: clips for heading, clips in columns.items() if clips}, most_bytes)


def _gifs(run: Run, record: Path, name: str) -> dict[str, Path]:
    """The files of the run that a record calls `name`, by prompt; none if it is damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        entries = read_json(record, inside=run.folder)["clips"]
        # only the last part, so that a path in the file cannot leave the folder
        paths = {str(clip["prompt"]): record.parent / Path(clip[name]).name for clip in entries if name in clip}
        return {prompt: path for prompt, path in paths.items() if is_regular(path, inside=run.folder)}
    return {}


def _fitting(columns: Mapping[tuple[str, str], Mapping[str, Path]], most_bytes: float) -> Clips:
    prompts = list(dict.fromkeys(prompt for clips in columns.values() for prompt in clips))
    # prompts that most columns have come first, because they can be compared
    prompts.sort(key=lambda prompt: -sum(prompt in clips for clips in columns.values()))
    rows: dict[str, Sequence[Path | None]] = {}
    total = 0.0
    for prompt in prompts:
        paths = [clips.get(prompt) for clips in columns.values()]
        # base64 text takes four thirds of the bytes
        total += sum(path.stat().st_size for path in paths if path is not None) * 4 / 3
        if total > most_bytes:
            break
        rows[prompt] = paths
    return Clips(headings=list(columns), rows=rows, left_out=len(prompts) - len(rows))
