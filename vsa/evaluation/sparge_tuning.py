"""`vsa tune-sparge`: search for the settings of every layer and head of SpargeAttn, and a page with their errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from vsa.attention.sparge.method import SpargeAttention
from vsa.attention.sparge.tune import Input, Point, Search, tune_layer
from vsa.attention.sparge.tuned import SHAPE, HeadSettings, Tuned, read_tuned
from vsa.attention.tiling import Grid
from vsa.checkpoints.run_weights import Group
from vsa.errors import refuse_unwritable, usable_device
from vsa.evaluation.comparison.captures import Capture, load_captures
from vsa.evaluation.comparison.runs import RunModel
from vsa.evaluation.inspection.clip import check_timesteps, clip_names, open_inspected
from vsa.files import file_digest, read_csv
from vsa.pages.charts import Chart, Panel, Series, draw_panel, write_csv
from vsa.pages.page import Cell, Page, Table
from vsa.progress import progress_bar

FILE, PAGE, DATA = "tuned.json", "tuning.html", "tuning"
TIMESTEPS = (900.0, 700.0, 500.0, 300.0, 100.0)
CAREFUL = (
    "Errors are of attention's output in one layer, given the model's own inputs: what they do to a clip is another "
    "question, which `vsa compare-attention --prompt` answers.",
    "Sparsity counts pairs of blocks whose product is skipped, q k and with values alike; it is no speed-up.",
)


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """Model to tune SpargeAttn for, and how.

    Args:
        run: a run, checkpoint or export whose q, k, v are captured, one layer after another.
        clips: folder of videos, a video, or the id of a sample; see `open_clip`.
        captures: file of `save_captures` with all layers, in place of a run.
        out: output folder.
        q_tokens: see `SpargeAttention`.
        kv_tokens: see `SpargeAttention`.
        order: see `SpargeAttention`.
        search: bounds and grids of the search.
        timesteps: timesteps to capture, in [0, 1000]; None: 900, 700, 500, 300, 100.
        most_clips: maximum number of videos of a folder to use.
        latents: latent frames, rows, columns of a clip for a dense export.
        weights: averaged or trained weights of a run.
        pipeline: Wan pipeline with the VAE and the text encoder of an export.
        dtype: dtype of q, k, v; None: bfloat16 on a GPU, float32 on a CPU.
        device: compute device; None: a GPU if there is one.
        seed: seed of the noise.

    Raises:
        ValueError: options that contradict each other, by their names on the command line.
    """

    run: str | None = None
    clips: str | None = None
    captures: Path | None = None
    out: Path = Path("sparge")
    q_tokens: int = 128
    kv_tokens: int = 64
    order: Literal["raster", "hilbert"] = "hilbert"
    search: Search = field(default_factory=Search)
    timesteps: Sequence[float] | None = None
    most_clips: int = 1
    latents: Grid = (21, 60, 104)
    weights: Group | None = None
    pipeline: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    device: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.run is None) == (self.captures is None):
            raise ValueError("expected one of --run and --captures, got " + ("none" if self.run is None else "both"))
        if self.run is not None and self.clips is None:
            raise ValueError(f"--run {self.run} needs --clips to capture q, k, v of")
        if self.run is None and self.clips is not None:
            raise ValueError("--clips needs a model: set --run")
        for name in ("timesteps", "weights", "pipeline"):
            if self.run is None and getattr(self, name) is not None:
                raise ValueError(f"--{name} applies to --run only")


class Source(NamedTuple):
    """Queries, keys and values of every layer.

    Args:
        name: origin, for humans.
        heads: number of heads.
        head_dim: head dim.
        counts: number of captures of each layer.
        captures: function that returns the captures of a layer.
    """

    name: str
    heads: int
    head_dim: int
    counts: Sequence[int]
    captures: Callable[[int], Sequence[Capture]]


def tune_sparge(asked: TuneSettings) -> Path:
    """Tune SpargeAttn for a model, layer by layer; layers that the file already has are kept.

    Returns:
        Path of the file for `attention.tuned`.
    """
    device, folder, search = usable_device(asked.device), asked.out, asked.search
    refuse_unwritable(folder)
    path = folder / FILE
    if (folder / PAGE).exists() and not path.exists():
        raise ValueError(f"{folder / PAGE} is not from `vsa tune-sparge`: choose another folder with --out")
    blocks = {"q_tokens": asked.q_tokens, "kv_tokens": asked.kv_tokens, "order": asked.order}
    # raises before a model is opened
    SpargeAttention(dim=1, num_heads=1, head_dim=1, threshold=-1.0, **blocks)
    source = _of_file(asked.captures) if asked.captures is not None else _of_run(asked, device)
    dtype = asked.dtype or ("float32" if torch.device(device).type == "cpu" else "bfloat16")
    made = {"source": source.name, "dtype": dtype} | {
        name: list(value) if isinstance(value, list | tuple) else value for name, value in asdict(search).items()
    }
    heads, head_dim, layers = source.heads, source.head_dim, len(source.counts)
    tuned = Tuned(layers=layers, heads=heads, head_dim=head_dim, made=made, **blocks)
    heads_by_layer: dict[int, Sequence[HeadSettings]] = dict(_finished(path, tuned))
    method = SpargeAttention(dim=heads * head_dim, num_heads=heads, head_dim=head_dim, **blocks)
    calls = [count * search.steps for count in source.counts]
    finished_calls = sum(calls[layer] for layer in heads_by_layer)
    with progress_bar("tuning", sum(calls), done=finished_calls, transient=True) as advance:
        for layer in (i for i in range(layers) if i not in heads_by_layer):
            items = source.captures(layer)

            def inputs(items: Sequence[Capture] = items) -> Iterator[Input]:
                for item in items:
                    if item.before or item.after:
                        raise ValueError(f"{item.place} has text in its rows, which are tuned for video alone")
                    q, k, v = (x.to(device, getattr(torch, dtype)) for x in (item.q, item.k, item.v))
                    yield Input(q, k, v, item.grid_thw)

            try:
                heads_by_layer[layer], points = tune_layer(method, inputs, search, advance)
            except ValueError as error:
                raise ValueError(f"layer {layer}: {error}") from None
            write_csv(_points(folder, layer), Point._fields, points)
            # written last, since a layer in the file counts as finished
            replace(tuned, found=heads_by_layer).write(path)
    _write_page(folder, read_tuned(str(path)), search)
    return path


def _of_run(asked: TuneSettings, device: str) -> Source:
    """Captures of a model on clips, one layer at a time, because all layers do not fit into memory."""
    assert asked.run is not None
    assert asked.clips is not None
    timesteps = asked.timesteps or TIMESTEPS
    check_timesteps(timesteps)
    run = open_inspected(
        asked.run, pipeline=asked.pipeline, weights=asked.weights, device=device, dense_latents=asked.latents
    )
    model, names = RunModel(run), clip_names(asked.clips, asked.most_clips)
    clips = [model.open_clip(name) for name in names]
    digests = [f" ({file_digest(Path(name))[:16]})" if Path(name).is_file() else "" for name in names]
    clip_text = "; ".join(clip.name + digest for clip, digest in zip(clips, digests, strict=True))
    at = ", ".join(f"{t:g}" for t in timesteps)
    return Source(
        name=f"{run.source}, step {run.step}, {run.weights} weights: {clip_text} at {at}, seed {asked.seed}, "
        f"latents {asked.latents}, pipeline {asked.pipeline}",
        heads=run.model.num_heads,
        head_dim=run.model.head_dim,
        counts=[len(clips) * len(timesteps)] * model.num_layers,
        captures=lambda layer: model.capture(clips, layers=[layer], timesteps=timesteps, seed=asked.seed).items,
    )


def _of_file(path: Path) -> Source:
    """Captures of all layers from a file."""
    by_layer: dict[int, list[Capture]] = {}
    for item in load_captures(path).items:
        by_layer.setdefault(item.layer, []).append(item)
    layers = sorted(by_layer)
    if missing := sorted(set(range(layers[-1])) - set(layers)):
        raise ValueError(f"--captures {path} has layers {', '.join(map(str, layers))}: layer {missing[0]} is missing")
    heads, head_dim = by_layer[0][0].q.shape[2:]
    for layer in layers:
        for item in by_layer[layer]:
            sizes = [tuple(x.shape[2:]) for x in (item.q, item.k, item.v)]
            if sizes != [(heads, head_dim)] * 3:
                raise ValueError(
                    f"--captures {path}: q, k, v of layer {layer} have heads and head dims {sizes}, "
                    f"layer 0 has {heads, head_dim}"
                )
    return Source(
        name=f"{path.name}, sha256 {file_digest(path)[:16]}",
        heads=heads,
        head_dim=head_dim,
        counts=[len(by_layer[layer]) for layer in layers],
        captures=by_layer.__getitem__,
    )


def _finished(path: Path, settings: Tuned) -> Mapping[int, Sequence[HeadSettings]]:
    """Finished layers of a file; ValueError if it was tuned for another model or with other settings."""
    if not path.exists():
        return {}
    tuned = read_tuned(str(path))
    hint = "choose another folder with --out"
    shape = {name: getattr(settings, name) for name in (*SHAPE, "keeps_sum")}
    try:
        tuned.refuse_other(str(path), **shape)
    except ValueError as error:
        raise ValueError(f"{error}: {hint}") from None
    for name, value in settings.made.items():
        if tuned.made.get(name) != value:
            raise ValueError(f"{path} was tuned with {name}={tuned.made.get(name)}, got {name}={value}: {hint}")
    return tuned.found


def _points(folder: Path, layer: int) -> Path:
    return folder / DATA / f"layer-{layer:03}.csv"


def _read_points(folder: Path, layer: int) -> list[Point]:
    path, points = _points(folder, layer), []
    try:
        for row in read_csv(path, ("head", "tau", "theta", "threshold", "sparsity", "error"))[1]:
            tau, theta, sparsity, error = (float(row[name]) for name in ("tau", "theta", "sparsity", "error"))
            threshold = float(row["threshold"]) if row["threshold"] else None
            points.append(Point(int(row["head"]), tau, theta, threshold, sparsity, error))
    except FileNotFoundError:
        # points may be deleted, because the chosen settings are in the file itself
        return []
    except ValueError:
        raise ValueError(f"{path} is damaged: delete it, and its points are left out") from None
    return points


def _write_page(folder: Path, tuned: Tuned, search: Search) -> None:
    bounds = {"l1": search.l1, "l2": search.l2}
    chart = error_chart(tuned, {layer: _read_points(folder, layer) for layer in tuned.found}, bounds)
    page = Page(
        folder / PAGE,
        title="SpargeAttn tuned",
        facts={
            "model": f"{tuned.layers} layers of {tuned.heads} heads x {tuned.head_dim}",
            "blocks": f"{tuned.q_tokens} query tokens, {tuned.kv_tokens} kv tokens, {tuned.order} order",
            "bounds": f"error below {bounds['l1']:g} after the first stage, below {bounds['l2']:g} after the second",
            "q, k, v": f"{tuned.made['source']}, {tuned.made['dtype']}",
        },
        warnings=CAREFUL,
        folder=DATA,
    )
    picture = draw_panel(chart.panels["all layers",], folder / DATA / f"{chart.key}.png", title=chart.title)
    page.chart(chart, picture=picture)
    page.table(layer_table(tuned))
    page.write(f"Everything that was tried, by layer: {DATA}/. To use: attention=sparge attention.tuned={FILE}")


def error_chart(tuned: Tuned, tried: Mapping[int, Sequence[Point]], bounds: Mapping[str, float]) -> Chart:
    """Error against sparsity: the choices of each layer, then all heads of one layer with what was tried."""
    means = {
        layer: (fmean(h.sparsity for h in heads), fmean(h.error for h in heads)) for layer, heads in tuned.found.items()
    }
    mean_series = _series("mean of the heads", means.values(), [f"layer {layer}" for layer in means], points=True)
    panels = {("all layers",): _panel([mean_series, *_bounds([mean_series], bounds)])}
    for layer, heads in sorted(tuned.found.items()):
        texts = [_described(i, head) for i, head in enumerate(heads)]
        own = _series("chosen", [(h.sparsity, h.error) for h in heads], texts, points=True)
        curves = []
        for i in range(len(heads)):
            if best := _front([point for point in tried[layer] if point.head == i]):
                pairs, texts = [(p.sparsity, p.error) for p in best], [_described(i, p) for p in best]
                curves.append(_series(f"head {i}", pairs, texts, colour=1 + i))
        panels[(f"layer {layer}",)] = _panel([own, *_bounds([own, *curves], bounds), *curves])
    columns = ("tau", "theta", "threshold", "sparsity", "error")
    return Chart(
        key="error",
        title="Error against sparsity",
        note="Chosen is the highest sparsity below the bounds; a line joins what of a head's settings no other one "
        "beats in both. Lower and further right is better.",
        panels=panels,
        drawn=(),
        switches=("layers",),
        columns=("layer", "head", *columns),
        rows=[
            (layer, i, *(getattr(h, name) for name in columns))
            for layer, heads in sorted(tuned.found.items())
            for i, h in enumerate(heads)
        ],
    )


def _panel(series: Sequence[Series]) -> Panel:
    return Panel(x_label="sparsity: skipped products of blocks", y_label="relative L1 error", series=series)


def _described(number: int, head: HeadSettings | Point) -> str:
    bar = "off" if head.threshold is None else f"{head.threshold:g}"
    return f"head {number}: tau {head.tau:g}, theta {head.theta:g}, lambda {bar}"


def _series(name: str, places: Iterable[tuple[float, float]], labels: Sequence[str], **look: Any) -> Series:
    x, y = np.array(list(places), dtype=float).reshape(-1, 2).T
    return Series(name=name, x=x, y=y, labels=labels, **look)


def _front(points: Sequence[Point]) -> list[Point]:
    """The Pareto front: points that no other one beats in both sparsity and error."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.sparsity, p.error)):
        if not best or point.error < best[-1].error:
            best.append(point)
    return best[::-1]


def _bounds(series: Sequence[Series], bounds: Mapping[str, float]) -> list[Series]:
    most = max((float(s.x.max()) for s in series if len(s.x)), default=1.0)
    ends = np.array([0.0, max(most, 1e-3)])
    return [
        Series(name=name, x=ends, y=np.full(2, value), dashed=True, colour=8 + i)
        for i, (name, value) in enumerate(bounds.items())
    ]


def layer_table(tuned: Tuned) -> Table:
    """Table of the chosen settings of each layer."""
    headings = [
        "layer",
        ("sparsity", "skipped products of blocks, mean of the heads; below: lowest and highest"),
        ("error", "sum |out - dense| / sum |dense|, mean of the heads; below: the highest"),
        ("tau", "mean of the heads"),
        ("theta", "mean of the heads"),
        ("lambda", "heads with a second stage"),
        ("dense heads", "that no setting suits"),
    ]
    rows = []
    for layer, heads in sorted(tuned.found.items()):
        sparsity, error = [h.sparsity for h in heads], [h.error for h in heads]
        row = [
            str(layer),
            Cell(f"{fmean(sparsity):.1%}", f"{min(sparsity):.1%} to {max(sparsity):.1%}"),
            Cell(f"{fmean(error):.3g}", f"{max(error):.3g}"),
            *(f"{math.fsum(getattr(h, n) for h in heads) / len(heads):.3g}" for n in ("tau", "theta")),
            f"{sum(h.threshold is not None for h in heads)} of {len(heads)}",
            str(sum(h.tau == 1 and h.threshold is None for h in heads)),
        ]
        rows.append(row)
    return Table(headings, rows, title="By layer", note="Settings of every head: " + FILE)
