"""`vsa compare-attention`: comparison of methods on captured or random tensors and in denoising runs."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from vsa.attention.denoising import DenoisingPlan
from vsa.checkpoints.run_checkpoint import resolve_checkpoint
from vsa.checkpoints.weight_source import is_run
from vsa.data.codecs import WanVAE
from vsa.errors import refuse_unwritable, usable_device
from vsa.evaluation.comparison.agreement import SHOWN_FRAMES, Denoised
from vsa.evaluation.comparison.captures import Captures, load_captures, save_captures
from vsa.evaluation.comparison.figures import (
    denoising_chart,
    denoising_table,
    error_chart,
    groups,
    is_part,
    order_note,
    place_table,
    plan_text,
    recall_chart,
    result_table,
    values_by_group,
    values_of,
)
from vsa.evaluation.comparison.measure import Row, left_out, measure
from vsa.evaluation.comparison.methods import AS_TRAINED, Method, parse_methods
from vsa.evaluation.comparison.model import ComparedModel
from vsa.evaluation.comparison.pipelines import PipelineModel
from vsa.evaluation.comparison.runs import RunModel
from vsa.evaluation.comparison.settings import CompareSettings
from vsa.evaluation.comparison.synthetic import draw_captures
from vsa.evaluation.comparison.terminal import print_results
from vsa.evaluation.comparison.usual import PRESETS, usual_on
from vsa.evaluation.follow import held_out_prompts
from vsa.evaluation.inspection.clip import Clip, check_numbers, check_timesteps, clip_names, open_inspected
from vsa.evaluation.record import write_record
from vsa.files import refuse_others
from vsa.integrations.diffusers.pipeline import open_pipeline
from vsa.pages.page import Page
from vsa.progress import progress_bar
from vsa.sampling.clip_folder import samples_folder
from vsa.sampling.contact_sheet import side_by_side

PAGE, DATA, RECORD = "comparison.html", "comparison", "comparison.json"
TILE = (4, 4, 4)
CAREFUL = (
    "Methods are training-free: gates are at their dense start (coarse 0, fine 1), where VSA's coarse output, which is "
    "no approximation of dense attention, does not count. What training makes of a method is another question.",
    f'"{AS_TRAINED}" is the model\'s own method with its gates and top-k: its error says how far it has moved away '
    "from dense attention, not how well it does.",
)


def compare_attention(asked: CompareSettings) -> Path:
    """Compare attention methods; print a table and write a page, PNGs, CSVs and a JSON.

    Returns:
        Path of the page.
    """
    asked = _with_held_out(asked)
    device = usable_device(asked.device)
    dtype = asked.dtype or ("float32" if torch.device(device).type == "cpu" else "bfloat16")
    out = asked.out
    if out is None:
        out = Path(DATA) if asked.run is None or not is_run(asked.run) else samples_folder(asked.run, DATA)
    refuse_unwritable(out)
    refuse_others(out, (RECORD, PAGE, DATA), "vsa compare-attention")
    model = _open_model(asked, device, dtype)
    tile = asked.tile or (model and model.tile_thw) or TILE
    methods, notes = parse_methods(asked.methods, tile_thw=tile), []
    captures: Captures | None = None
    if model is None:
        captures = _given_captures(asked, device)
        grid = captures.items[0].grid_thw
        text = any(item.before or item.after for item in captures.items)
    else:
        grid, text = model.grid_thw, model.text_in_rows
    if not asked.methods:
        methods, notes = usual_on(grid, asked.sparsities, tile, text_in_rows=text)
        notes = [*notes, f"measured only where --method names them: {', '.join(PRESETS)}"]
    plan = DenoisingPlan() if model is None else model.prepare(methods, asked)
    if model is not None and asked.clips is not None:
        captures = capture_clips(model, clip_names(asked.clips, asked.most_clips), asked)
    if captures is not None and asked.save is not None:
        save_captures(captures, asked.save)
    rows: list[Row] = []
    if captures is not None:
        # the model's own method too, where its gates are known
        trained = captures.attention
        own = [] if trained is None else [Method(label=AS_TRAINED, family=AS_TRAINED, config=trained, trained=True)]
        rows = measure_captures(captures, [*methods, *own], asked, device, getattr(torch, dtype))
    denoised, sampling = [], {}
    if model is not None and asked.prompts:
        sampling, every = model.sampling(), [*methods, *model.own]
        with progress_bar("denoising", len(asked.prompts) * sampling["steps"] * len(every), transient=True) as advance:
            denoised = model.denoise(asked.prompts, every, plan, advance)
    facts = _facts(captures, device, dtype, asked, sampling, plan)
    record = {
        "made_by": "vsa compare-attention",
        "facts": facts,
        "tile_thw": tile,
        "seed": asked.seed,
        "sampling": sampling,
        "denoising_plan": plan.changes(),
        "methods": [asdict(method) for method in methods],
        "rows": [{**asdict(row), "recall_p5": row.recall_p5} for row in rows],
        "denoising": [{name: value for name, value in asdict(row).items() if name != "frames"} for row in denoised],
    }
    write_record(out / RECORD, record)
    print_results(rows, denoised, plan)
    missing = [*notes, *left_out(methods, rows), *order_note(rows, denoised)]
    print(*missing, sep="\n", end="\n" if missing else "")
    return _write(out, rows, denoised, asked.prompts, plan, facts, [*CAREFUL, *missing])


def _with_held_out(asked: CompareSettings) -> CompareSettings:
    """The settings with the captions of held-out clips among the prompts."""
    if not asked.held_out:
        return asked
    captions: tuple[str, ...] = ()
    if asked.run is not None and is_run(asked.run):
        captions = held_out_prompts(resolve_checkpoint(asked.run).config, asked.held_out)
    if len(captions) < asked.held_out:
        source = asked.run or asked.pipeline
        raise ValueError(
            f"--held-out {asked.held_out}: {source} has {len(captions)} held-out captions, use --prompts FILE"
        )
    return replace(asked, prompts=[*asked.prompts, *captions])


def _open_model(asked: CompareSettings, device: str, dtype: str) -> ComparedModel | None:
    """The model of --run or --pipeline; None without either."""
    if asked.run is not None:
        run = open_inspected(
            asked.run, pipeline=asked.pipeline, weights=asked.weights, device=device, dense_latents=asked.latents
        )
        model = RunModel(run)
        if asked.prompts and asked.flow_shift is None and not is_run(asked.run) and not model.own:
            raise ValueError(f"{asked.run} is a dense export, which has no sampling settings: set --shift")
        return model
    if asked.pipeline is not None:
        # a mistake in a method is told before the networks are read
        parse_methods(asked.methods, tile_thw=asked.tile or TILE)
        pipe = open_pipeline(asked.pipeline, flow_shift=asked.flow_shift, dtype=getattr(torch, dtype), device=device)
        return PipelineModel(pipe, WanVAE(asked.pipeline), source=asked.pipeline, latents=asked.latents)
    return None


def _given_captures(asked: CompareSettings, device: str) -> Captures:
    """The captures of a file, or random fields."""
    if asked.captures is not None:
        return load_captures(asked.captures)
    assert asked.synthetic is not None
    return draw_captures(asked.synthetic, heads=asked.heads, head_dim=asked.head_dim, seed=asked.seed, device=device)


def capture_clips(model: ComparedModel, clips: Sequence[str | Clip], asked: CompareSettings) -> Captures:
    """q, k and v of clips or their files, in the layers and at the timesteps that are asked for."""
    count = model.num_layers
    layers = (0, count // 2, count - 1) if asked.layers is None else asked.layers
    check_numbers("layers", sorted(set(layers)), count, model.source)
    check_timesteps(asked.timesteps)
    opened = [model.open_clip(clip) if isinstance(clip, str) else clip for clip in clips]
    with progress_bar("capturing", len(opened) * len(asked.timesteps), transient=True) as advance:
        return model.capture(opened, layers=layers, timesteps=asked.timesteps, seed=asked.seed, progress=advance)


def measure_captures(
    captures: Captures, methods: Sequence[Method], asked: CompareSettings, device: str, dtype: torch.dtype
) -> list[Row]:
    """Each method on each capture."""
    rows: list[Row] = []
    with progress_bar("comparing", len(captures.items) * len(methods), transient=True) as advance:
        for item in captures.items:
            rows += measure(
                item,
                methods,
                device=device,
                dtype=dtype,
                queries=asked.queries,
                repeats=asked.repeats,
                seed=asked.seed,
                progress=advance,
            )
    return rows


def _facts(
    captures: Captures | None,
    device: str,
    dtype: str,
    asked: CompareSettings,
    sampling: Mapping[str, Any],
    plan: DenoisingPlan,
) -> dict[str, str]:
    """Facts for the header of the page."""
    cuda = torch.device(device).type == "cuda"
    cpu = f"CPU ({platform.machine()}), threads: {torch.get_num_threads()}"
    machine = torch.cuda.get_device_name(device) if cuda else cpu
    facts = {"machine": f"{machine}, torch {torch.__version__}"}
    if captures is not None:
        first = captures.items[0]
        batch, tokens, heads, dim = first.q.shape
        grid = "x".join(map(str, first.grid_thw))
        facts["q, k, v"] = f"{captures.source}: {'; '.join(dict.fromkeys(item.name for item in captures.items))}"
        facts["shape"] = f"{grid} = {tokens:,} tokens, {heads} heads x {dim}, batch {batch}, {dtype}"
        facts["measured"] = (
            f"recall and errors on {min(asked.queries, tokens)} of {tokens:,} query tokens against exact fp32 "
            f"attention; times are medians of up to {asked.repeats} calls in turns"
        )
    if sampling:
        facts["denoising"] = (
            f"{sampling['checkpoint']} ({sampling['weights']}), prompts: {len(asked.prompts)}, "
            f"steps: {sampling['steps']}, guidance {sampling['guidance']:g}, seed {sampling['seed']}{plan_text(plan)}"
        )
    return facts


def _write(
    out: Path,
    rows: Sequence[Row],
    denoised: Sequence[Denoised],
    prompts: Sequence[str],
    plan: DenoisingPlan,
    facts: Mapping[str, str],
    careful: Sequence[str],
) -> Path:
    page = Page(out / PAGE, title="Attention methods compared", facts=facts, warnings=careful, folder=DATA)
    if rows:
        names = [*(field.name for field in fields(Row)), "recall_p5"]
        page.csv("rows", names, values_of(rows, names))
        columns = [name for name in names if name not in ("capture", "layer", "timestep", "head_recall")]
        page.csv("means", ["captures", *columns], values_by_group(rows, columns))
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
        note = (
            f"The same prompts and noise with each method in place of the model's attention{plan_text(plan)}. "
            "Below PSNR and cosine: 95% intervals over two prompts or more, too narrow with few."
        )
        page.table(denoising_table(denoised, note), data="denoising.csv")
        frames = torch.stack([row.frames for row in denoised], 1)
        columns = dict(zip(prompts, frames, strict=False))
        sheet = side_by_side(columns, [row.method for row in denoised], out / DATA / "clips.png", frames=SHOWN_FRAMES)
        page.picture("Clips", "The first prompts from the same noise, a row for each method.", sheet)
    if rows and (places := place_table(rows)) is not None:
        page.table(places, data="rows.csv")
    return page.write(f"Every number in {RECORD}, every figure as CSV and PNG: {DATA}/")
