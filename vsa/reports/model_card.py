"""Model card of a published run: `README.md` with YAML front matter, and its pictures in `card/`.

It shows captions of sampled clips, but neither the data nor folders of this machine.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from html import escape
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import yaml

from vsa.checkpoints.run_weights import RunWeights
from vsa.checkpoints.sampling_settings import sampling_of
from vsa.checkpoints.weight_files import is_hub_id
from vsa.data.index import USUAL_FPS
from vsa.data.pretrained import HUB_ID
from vsa.data.revisions import open_local_index, phases_of
from vsa.data.sample_store import chosen_samples
from vsa.data.splits import count_held_out
from vsa.evaluation.figures import health_curves, loss_curve
from vsa.files import write_whole
from vsa.reports.clips import newest_clips
from vsa.reports.run_tables import class_defaults, duration
from vsa.reports.runs import METRICS, Run, is_run, read_run
from vsa.reports.tables import count, number
from vsa.reports.variants import shown
from vsa.secrets import without_secrets

CARD, PICTURES = "README.md", "card"
_MOST_CLIPS, _MOST_BYTES, _LISTED_SIZES = 8, 20_000_000, 5


def write_card(folder: Path, source: RunWeights, *, name: str, license: str, layout: str) -> None:
    """Write the card of published weights and its pictures.

    Args:
        folder: folder of the weights.
        source: the weights.
        name: name under which others find them: a hub id, or the name of a folder.
        license: licence of the weights, an identifier of the hub.
        layout: layout of the weights, as the end of a sentence.
    """
    path = source.checkpoint.path.parents[1]
    run = read_run(path) if is_run(path) else None
    pictures = folder / PICTURES
    sections = {
        "Use": _use(source, name, layout),
        "Samples": _samples(run, pictures),
        "Training": [*_curves(run, pictures), *_table(_training(source, run))],
        "Attention": _table(_attention(source, run)),
        "Data": [*_table(_data(source)), "", "The data are not part of this repository."],
    }
    title = f"# {name.rpartition('/')[2]}\n\n{_summary(source)}\n"
    body = "".join("\n".join(["", f"## {heading}", *lines, ""]) for heading, lines in sections.items() if lines)
    front = yaml.safe_dump(_front_matter(source, license), sort_keys=False, allow_unicode=True)
    write_whole(folder / CARD, without_secrets(f"---\n{front}---\n{title}{body}", named=False))


def _front_matter(source: RunWeights, license: str) -> dict[str, Any]:
    model = source.run_config.get("model") or {}
    channels = model.get("in_channels", 16)
    conditioned = model.get("image_dim") is not None or channels > (model.get("out_channels") or channels)
    task = "image-to-video" if conditioned else "text-to-video"
    base = [origin for origin in _origins(source).values() if HUB_ID.fullmatch(origin)]
    return {
        "license": license,
        "library_name": "vsa-train",
        "pipeline_tag": task,
        "tags": ["video-diffusion", "sparse-attention", _method(source)],
        **({"base_model": base} if base else {}),
    }


def _origins(source: RunWeights) -> dict[str, str]:
    """Weights that the run began from, hub ids by name; other names are those of this machine."""
    config = source.run_config
    specs = {"finetuned from": config.get("init_from"), "teacher": (config.get("task") or {}).get("teacher")}
    return {
        what: spec if is_hub_id(spec) else "weights that are not on a hub"
        for what, spec in specs.items()
        if isinstance(spec, str)
    }


def _summary(source: RunWeights) -> str:
    parameters = count(sum(map(prod, source.shapes.values())))
    return f"A video diffusion transformer of {parameters} parameters with {_method(source)}, trained with VSA-Train."


def _method(source: RunWeights) -> str:
    return shown((source.run_config.get("attention") or {}).get("_target_", "unknown attention"))


def _use(source: RunWeights, name: str, layout: str) -> list[str]:
    own = sampling_of(source.run_config)
    steps = f"the {len(source.step_list)} steps it was distilled to" if source.step_list else "the run's own steps"
    settings = ", ".join(f"{key.replace('_', ' ')} {value:g}" for key, value in own.items()) or steps
    return [
        "With VSA-Train installed:",
        "",
        "```bash",
        f'vsa sample {name} --prompt "a caption like those it was trained on"',
        f"vsa train experiment=own_videos data.root=SHARDS init_from={name}",
        "```",
        f"Sampled by default with {steps if source.step_list else settings}. The layout of the weights is {layout}.",
    ]


def _samples(run: Run | None, pictures: Path) -> list[str]:
    sets = newest_clips(run) if run else {}
    if not sets:
        return []
    label, clips = next(iter(sets.items()))
    lines, left = [f"Drawn by the run itself ({label}), not chosen.", "", "| prompt | clip |", "|---|---|"], _MOST_BYTES
    for i, (prompt, path) in enumerate(islice(clips.items(), _MOST_CLIPS)):
        left -= path.stat().st_size
        if left >= 0:
            pictures.mkdir(exist_ok=True)
            shutil.copyfile(path, pictures / f"clip-{i}.gif")
            lines.append(f"| {_cell(prompt)} | ![]({PICTURES}/clip-{i}.gif) |")
    return lines


def _curves(run: Run | None, pictures: Path) -> list[str]:
    if run is None or not (len(run.train[0]) or len(run.val[0])):
        return []
    pictures.mkdir(exist_ok=True)
    draw = health_curves if run.distilled else loss_curve
    draw(run.folder / METRICS, pictures / "loss.png", title="loss")
    return [f"![loss by step]({PICTURES}/loss.png)", ""]


def _training(source: RunWeights, run: Run | None) -> Iterator[tuple[str, str]]:
    config = source.run_config
    yield "steps", f"{source.state['step']:,}"
    yield "weights", {"ema": "averaged over the training", "model": "of the last step"}[source.group]
    yield from _origins(source).items()
    yield "samples of a step", str((config.get("data") or {}).get("batch_size") or "")
    yield "learning rate", str((config.get("optim") or {}).get("lr") or "")
    if run is None:
        return
    for what, (_, values) in (
        ("training loss", run.train),
        ("gap to the teacher" if run.distilled else "validation loss", run.val),
    ):
        if len(values):
            yield what, f"{number(float(values[0]), 4)} at first, {number(float(values[-1]), 4)} at the end"
    seconds, device = run.total("seconds"), run.environments[-1] if run.starts else {}
    yield "time", "" if seconds is None else duration(seconds)
    yield "device", str(device.get("gpu") or device.get("cpu") or "")


def _attention(source: RunWeights, run: Run | None) -> Iterator[tuple[str, str]]:
    node, sparse = source.run_config.get("attention") or {}, source.run_config.get("sparsity") or {}
    yield "method", _method(source)
    yield from ((key, str(value)) for key, value in own_settings(node) if key != "backend")
    density = run.last("sparsity/density") if run else None
    yield "tiles that are computed", "" if density is None else f"{density:.1%} at the end"
    yield "sparsity", ", ".join([shown(sparse.get("_target_", "")), *(f"{k}={v}" for k, v in own_settings(sparse))])


def own_settings(node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings that say something: the size of the tiles, and what differs from the default of the class."""
    usual = class_defaults({f"node.{key}": value for key, value in node.items()})
    for key, value in node.items():
        flat = json.dumps(value) if isinstance(value, list) else value
        if not key.startswith("_") and value is not None and (key == "tile_thw" or usual.get(f"node.{key}") != flat):
            yield key, value


def _data(source: RunWeights) -> Iterator[tuple[str, str]]:
    data = source.run_config.get("data") or {}
    for what in ("codec", "text_encoder"):
        yield what.replace("_", " "), (source.state.get(what) or {}).get("id", "")
    yield "frames per second", f"{source.state.get('fps', USUAL_FPS):g}"
    sources = {"main": data, **(data.get("sources") or {})}
    roots = {name: Path(root) for name, entry in sources.items() if (root := entry.get("root")) is not None}
    phases = {name: phases_of(data.get("revision"), name) for name in roots}
    try:
        first, last = (
            chosen_samples(
                {name: open_local_index(root, phases[name][at][1])[0] for name, root in roots.items()},
                drop=data.get("drop"),
                tell=lambda line: None,
            )
            for at in (0, -1)
        )
        indexes = list(last.values())
    except ValueError:
        indexes = []
    if not indexes:
        shapes = [" x ".join(map(str, shape)) for shape in source.state.get("latent_shapes", ())]
        yield "latents", ", ".join(shapes)
        yield "clips", f"not counted: the data set ({shown(data.get('_target_', 'unknown'))}) was not at hand"
        return
    samples = [(i, index.codec.stride, sample) for i, index in enumerate(indexes) for sample in index.samples.values()]
    films = {(i, sample.about.source) for i, _, sample in samples}
    seconds = sum(sample.latent_shape[1] * stride[0] / sample.about.fps for _, stride, sample in samples)
    yield "clips", f"{len(samples):,}"
    if len(films) < len(samples):
        yield "films", f"{len(films):,}" if all(film for _, film in films) else "not recorded"
    yield "length", f"about {duration(seconds)}"
    sizes = Counter(
        tuple(n * s for n, s in zip(sample.latent_shape[1:], stride, strict=True)) for _, stride, sample in samples
    )
    named = [f"{' x '.join(map(str, size))} ({many:,})" for size, many in sizes.most_common(_LISTED_SIZES)]
    yield "frames x height x width", ", ".join([*named, *(["..."] if len(sizes) > _LISTED_SIZES else [])])
    before = [sample for index in first.values() for sample in index.samples.values()]
    out = count_held_out(before, [sample for _, _, sample in samples], data)
    yield "held out", f"{out:,} of {len(samples):,} clips ({out / len(samples):.0%})"


def _table(rows: Iterator[tuple[str, str]] | Mapping[str, str]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {_cell(name)} | {_cell(value)} |" for name, value in rows if value)]


def _cell(text: str) -> str:
    """A text in one cell of a table, shown as it is."""
    plain = escape(" ".join(text.split()), quote=False)
    return "".join(f"\\{letter}" if letter in "\\|`*_[]" else letter for letter in plain)
