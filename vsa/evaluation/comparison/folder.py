"""`vsa compare-attention`: comparison of methods on captured or random tensors and in denoising runs."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

import torch

from vsa.attention.denoising import DenoisingPlan
from vsa.attention.full import FullAttention
from vsa.attention.tiling import Grid
from vsa.checkpoints.run_checkpoint import resolve_checkpoint
from vsa.checkpoints.weight_source import Group, is_run
from vsa.data.video_files import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from vsa.errors import refuse_unwritable, usable_device
from vsa.evaluation.comparison.captures import Captures, capture_clips, load_captures, save_captures
from vsa.evaluation.comparison.denoise import Denoised, compare_denoising, comparison_plan, plan_text
from vsa.evaluation.comparison.figures import (
    denoising_chart,
    denoising_table,
    error_chart,
    groups,
    is_part,
    means,
    place_table,
    recall_chart,
    result_table,
)
from vsa.evaluation.comparison.measure import Row, left_out, measure
from vsa.evaluation.comparison.methods import AS_TRAINED, Method, parse_methods
from vsa.evaluation.comparison.pipelines import OpenedPipeline
from vsa.evaluation.comparison.synthetic import draw_captures
from vsa.evaluation.comparison.terminal import print_results
from vsa.evaluation.comparison.usual import SPARSITIES, usual_on
from vsa.evaluation.inspection.clip import open_clip, open_inspected
from vsa.files import refuse_others, write_whole
from vsa.pages.page import Page
from vsa.progress import progress_bar
from vsa.sampling.clip_folder import samples_folder
from vsa.sampling.pipeline import LoadedRun, SampleSettings, settings_dict
from vsa.secrets import without_secrets

PAGE, DATA, RECORD = "comparison.html", "comparison", "comparison.json"
TIMESTEPS = (900.0, 500.0, 100.0)
CAREFUL = (
    "Methods are training-free: gates are at their dense start (coarse 0, fine 1), where VSA's coarse output, which is "
    "no approximation of dense attention, does not count. What training makes of a method is another question.",
    f'"{AS_TRAINED}" is the model\'s own method with its gates and top-k: its error says how far it has moved away '
    "from dense attention, not how well it does.",
)


def compare_attention(
    methods: Sequence[str] = (),
    *,
    out: Path | None = None,
    run: str | None = None,
    clips: str | None = None,
    captures: Path | None = None,
    synthetic: Grid | None = None,
    heads: int = 4,
    head_dim: int = 64,
    tile: Grid | None = None,
    sparsities: Sequence[float] | None = None,
    layers: Sequence[int] | None = None,
    timesteps: Sequence[float] | None = None,
    most_clips: int = 2,
    prompts: Sequence[str] = (),
    steps: int | None = None,
    guidance: float | None = None,
    flow_shift: float | None = None,
    denoising: Mapping[str, Any] | None = None,
    latents: Grid = (21, 60, 104),
    queries: int = 256,
    repeats: int = 5,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    device: str | None = None,
    seed: int = 0,
    weights: Group | None = None,
    pipeline: str | None = None,
    save: Path | None = None,
) -> Path:
    """Compare attention methods; print a table and write a page, PNGs, CSVs and a JSON.

    Args:
        methods: see `parse_method`; empty: `usual_on` the grid. Dense attention always comes first.
        out: output folder; None: `comparison`, inside a run's folder.
        run: a run, checkpoint or export, for captures of q, k, v (with `clips`) and denoising (with `prompts`).
        clips: folder of videos, a video, or the id of a sample; see `open_clip`.
        captures: file of `save_captures`.
        synthetic: token grid of random fields.
        heads: number of heads of random fields.
        head_dim: head dim of random fields.
        tile: default tokens per tile of the methods; None: the model's, or (4, 4, 4).
        sparsities: sparsities of the usual methods.
        layers: layers to capture; None: the first, the middle and the last one.
        timesteps: timesteps to capture, in [0, 1000]; None: 900, 500, 100.
        most_clips: largest number of videos of a folder to use.
        prompts: captions of clips to denoise with each method.
        steps: sampler steps; None: as the run samples.
        guidance: guidance scale; None: as the run samples.
        flow_shift: flow shift; None: as the run samples. Required for a dense export.
        denoising: options of a `DenoisingPlan` for every method except dense attention; others are taken from the run,
            without its budgets.
        latents: latent frames, rows, columns of a clip for a dense export or a pipeline; 81 frames of 480 x 832 pixels
            for Wan2.1.
        queries: number of query tokens for recall and error.
        repeats: number of timed calls of each method.
        dtype: dtype of q, k, v; None: bfloat16 on a GPU, float32 on a CPU.
        device: compute device; None: a GPU if there is one.
        seed: seed of all random numbers.
        weights: averaged or trained weights of a run.
        pipeline: a dense diffusers Wan pipeline to compare instead of a run; or, with a run that is an export, the
            pipeline with its VAE and text encoder.
        save: safetensors file to write the captures to.

    Returns:
        Path of the page.
    """
    # with a run, the pipeline only provides VAE and text encoder
    alone = pipeline if run is None else None
    sources = {"--run": run, "--pipeline": alone, "--captures": captures, "--synthetic": synthetic}
    if len(source_options := [name for name, value in sources.items() if value is not None]) != 1:
        raise ValueError(f"expected one of {', '.join(sources)}, got {', '.join(source_options) or 'none'}")
    model = run or alone
    if model is not None and clips is None and not prompts:
        raise ValueError(
            f"{source_options[0]} {model} needs --clips to capture q, k, v of, or --prompt to denoise, or both"
        )
    if model is None and (clips is not None or prompts):
        raise ValueError("--clips and --prompt need a model: set --run or --pipeline")
    if alone is not None and weights is not None:
        raise ValueError(f"--weights {weights} is for runs, got --pipeline {alone}")
    if denoising and not prompts:
        option = next(iter(denoising)).replace("_", "-")
        raise ValueError(f"--{option} applies to denoising runs only: set --prompt")
    device = usable_device(device)
    if out is None:
        out = Path(DATA) if run is None or not is_run(run) else samples_folder(run, DATA)
    refuse_unwritable(out)
    refuse_others(out, (RECORD, PAGE, DATA), "vsa compare-attention", "--out")
    if save is not None and save.exists():
        raise ValueError(f"--save {save} exists already: choose another file")
    kind = dtype or ("float32" if torch.device(device).type == "cpu" else "bfloat16")
    tensors, loaded, opened = None, None, None
    if run is not None:
        loaded = open_inspected(run, pipeline=pipeline, weights=weights, device=device, dense_latents=latents)
        if prompts and flow_shift is None and not is_run(run) and _is_dense(loaded):
            raise ValueError(f"{run} is a dense export, which has no sampling settings: set --shift")
        tile = tile or loaded.model.layout_for(loaded.settings().latent_shape).tile_thw
    tile = tile or (4, 4, 4)
    parsed_methods, notes = parse_methods(methods, tile_thw=tile), []
    if alone is not None:
        opened = OpenedPipeline(alone, latents, flow_shift=flow_shift, dtype=getattr(torch, kind), device=device)
    if captures is not None:
        tensors = load_captures(captures)
    if not methods:
        parsed_methods, notes = usual_on(_grid(loaded, opened, tensors, synthetic), sparsities or SPARSITIES, tile)
    settings, plan = None, DenoisingPlan()
    if opened is not None:
        plan = opened.plan(parsed_methods, denoising or {}, steps=steps, guidance=guidance)
    if loaded is not None and prompts:
        # raises before anything is measured
        plan = comparison_plan(loaded, parsed_methods, denoising or {})
        own = denoising
        if not loaded.model.selects:
            followed = plan.for_method(selects=False, predicts=loaded.model.predicts)
            own = {name: getattr(followed, name) for name in ("dense_steps", "dense_layers", "refresh", "shared_cache")}
        settings = loaded.settings(steps=steps, guidance=guidance, flow_shift=flow_shift, denoising=own, seed=seed)
    if loaded is not None and clips is not None:
        tensors = _capture(loaded, clips, layers, timesteps or TIMESTEPS, most_clips, seed)
    elif opened is not None and clips is not None:
        layer_numbers = _layers(opened.source, opened.num_layers, layers, timesteps or TIMESTEPS)
        tensors = opened.capture(_videos(clips)[:most_clips], layer_numbers, timesteps or TIMESTEPS, seed)
    elif synthetic is not None:
        tensors = draw_captures(synthetic, heads=heads, head_dim=head_dim, seed=seed, device=device)
    rows: list[Row] = []
    if tensors is not None:
        if save is not None:
            save_captures(tensors, save)
        if tensors.attention is not None:
            own = Method(label=AS_TRAINED, family=AS_TRAINED, config=tensors.attention, trained=True)
            capture_methods = [*parsed_methods, own]
        else:
            capture_methods = parsed_methods
        with progress_bar("comparing", len(tensors.items) * len(capture_methods), transient=True) as advance:
            for item in tensors.items:
                rows += measure(
                    item,
                    capture_methods,
                    device=device,
                    dtype=getattr(torch, kind),
                    queries=queries,
                    repeats=repeats,
                    seed=seed,
                    progress=advance,
                )
    denoised: list[Denoised] = []
    sampling: Mapping[str, Any] = {}
    if settings is not None and loaded is not None:
        denoised, sampling = _denoise(loaded, prompts, parsed_methods, settings, plan), settings_dict(settings, loaded)
    elif opened is not None and prompts:
        denoised, sampling = opened.denoise(prompts, parsed_methods, plan, seed)
    facts = _facts(tensors, device, kind, queries, repeats, len(prompts), sampling, plan)
    record = {"made_by": "vsa compare-attention", "facts": facts, "tile_thw": [*tile], "seed": seed}
    record |= {
        "sampling": dict(sampling),
        "denoising_plan": plan.changes(),
        "methods": [_plain(asdict(method)) for method in parsed_methods],
    }
    record |= {"rows": [_plain(asdict(row)) for row in rows], "denoising": [_plain(asdict(row)) for row in denoised]}
    write_whole(out / RECORD, without_secrets(json.dumps(record, indent=1, allow_nan=False), named=False) + "\n")
    print_results(rows, denoised, plan)
    missing = [*notes, *left_out(parsed_methods, rows)]
    print(*missing, sep="\n", end="\n" if missing else "")
    return _write(out, rows, denoised, plan, facts, [*CAREFUL, *missing])


def _grid(
    loaded: LoadedRun | None, opened: OpenedPipeline | None, tensors: Captures | None, synthetic: Grid | None
) -> Grid:
    """Token grid of what is compared; the first one, if captures have several."""
    if loaded is not None:
        return loaded.model.layout_for(loaded.settings().latent_shape).segments[0].grid_thw
    if opened is not None:
        return opened.grid_thw
    grid = synthetic if tensors is None else tensors.items[0].grid_thw
    assert grid is not None
    return grid


def _capture(
    run: LoadedRun, clips: str, layers: Sequence[int] | None, timesteps: Sequence[float], most: int, seed: int
) -> Captures:
    """q, k and v of clips."""
    layer_numbers = _layers(run.source, len(run.model.blocks), layers, timesteps)
    opened = [open_clip(run, name) for name in _videos(clips)[:most]]
    own = None
    if is_run(run.source) and not _is_dense(run):
        own = resolve_checkpoint(run.source).config["attention"]
    with progress_bar("capturing", len(opened) * len(timesteps), transient=True) as advance:
        return capture_clips(
            run, opened, layers=layer_numbers, timesteps=timesteps, seed=seed, attention=own, progress=advance
        )


def _layers(source: str, count: int, layers: Sequence[int] | None, timesteps: Sequence[float]) -> Sequence[int]:
    """Layers to capture; also checks the timesteps."""
    layer_numbers = tuple(dict.fromkeys((0, count // 2, count - 1))) if layers is None else tuple(sorted(set(layers)))
    if bad := [n for n in layer_numbers if not 0 <= n < count]:
        raise ValueError(f"--layers: {source} has layers 0 to {count - 1}, got {', '.join(map(str, bad))}")
    if bad := [t for t in timesteps if not 0 <= t <= 1000]:
        raise ValueError(f"--timesteps lie between 0 and 1000, got {', '.join(f'{t:g}' for t in bad)}")
    return layer_numbers


def _videos(clips: str) -> list[str]:
    """The videos of a folder of --clips, or the value itself."""
    if not Path(clips).is_dir():
        return [clips]
    suffixes = (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES)
    names = [str(path) for path in sorted(Path(clips).iterdir()) if path.suffix.lower() in suffixes]
    if not names:
        raise ValueError(f"--clips {clips} holds no videos")
    return names


def _denoise(
    run: LoadedRun, prompts: Sequence[str], methods: Sequence[Method], settings: SampleSettings, plan: DenoisingPlan
) -> list[Denoised]:
    if not _is_dense(run):
        # its config is not needed: the model is at hand
        methods = [*methods, Method(label=AS_TRAINED, family=AS_TRAINED, config={}, trained=True)]
    with progress_bar("denoising", len(prompts) * settings.steps * len(methods), transient=True) as advance:
        return compare_denoising(run, prompts, methods, settings, plan, progress=advance)


def _is_dense(run: LoadedRun) -> bool:
    return isinstance(run.model.blocks[0].method, FullAttention)


def _facts(
    tensors: Captures | None,
    device: str,
    dtype: str,
    queries: int,
    repeats: int,
    prompts: int,
    sampling: Mapping[str, Any],
    plan: DenoisingPlan,
) -> dict[str, str]:
    """Facts for the header of the page."""
    cuda = torch.device(device).type == "cuda"
    cpu = f"CPU ({platform.machine()}), threads: {torch.get_num_threads()}"
    machine = torch.cuda.get_device_name(device) if cuda else cpu
    facts = {"machine": f"{machine}, torch {torch.__version__}"}
    if tensors is not None:
        first = tensors.items[0]
        batch, tokens, heads, dim = first.q.shape
        grid = "x".join(map(str, first.grid_thw))
        facts["q, k, v"] = f"{tensors.source}: {'; '.join(dict.fromkeys(item.name for item in tensors.items))}"
        facts["shape"] = f"{grid} = {tokens:,} tokens, {heads} heads x {dim}, batch {batch}, {dtype}"
        facts["measured"] = (
            f"recall and errors on {min(queries, tokens)} of {tokens:,} query tokens against exact fp32 attention; "
            f"times are medians of up to {repeats} calls in turns"
        )
    if sampling:
        facts["denoising"] = (
            f"{sampling['checkpoint']} ({sampling['weights']}), prompts: {prompts}, steps: {sampling['steps']}, "
            f"guidance {sampling['guidance']:g}, seed {sampling['seed']}{plan_text(plan)}"
        )
    return facts


def _write(
    out: Path,
    rows: Sequence[Row],
    denoised: Sequence[Denoised],
    plan: DenoisingPlan,
    facts: Mapping[str, str],
    careful: Sequence[str],
) -> Path:
    page = Page(out / PAGE, title="Attention methods compared", facts=facts, warnings=careful, folder=DATA)
    if rows:
        names = [field.name for field in fields(Row)]
        page.csv("rows", names, [[getattr(row, name) for name in names] for row in rows])
        columns = [name for name in names if name not in ("capture", "layer", "timestep")]
        summary = [(group, row) for group, some in groups(rows).items() for row in means(some)]
        lines = [[group, *(getattr(row, name) for name in columns)] for group, row in summary]
        page.csv("means", ["captures", *columns], lines)
        page.chart(error_chart(rows))
        # layers and timesteps have a separate table
        for group, some in groups(rows).items():
            if not is_part(group):
                count = len({(row.capture, row.layer, row.timestep) for row in some})
                note = f"Means of {count} captures." if count > 1 else ""
                page.table(result_table(some, f"Results: {group}", note), data="means.csv")
        page.chart(recall_chart(rows))
    if denoised:
        page.chart(denoising_chart(denoised))
        note = f"The same prompts and noise with each method in place of the model's attention{plan_text(plan)}."
        page.table(denoising_table(denoised, note), data="denoising.csv")
    if rows and (places := place_table(rows)) is not None:
        page.table(places, data="rows.csv")
    return page.write(f"Every number in {RECORD}, every figure as CSV and PNG: {DATA}/")


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values for JSON, which cannot express infinity."""
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
