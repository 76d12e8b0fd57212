"""The model of a certificate: its transformers, its pipeline, and what cannot be measured without one."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from vsa.attention.denoising import DenoisingPlan
from vsa.attention.tiling import Grid
from vsa.checkpoints.sparse_config import has_sparse_config, read_sparse_config
from vsa.checkpoints.weight_files import local_folder, pretrained_folder, read_json
from vsa.checkpoints.weight_source import open_weights
from vsa.data.captions import read_captions
from vsa.data.codecs import WanVAE
from vsa.errors import usable_device
from vsa.evaluation.certificate.transformer import Transformer
from vsa.evaluation.comparison.agreement import SHOWN_FRAMES
from vsa.evaluation.comparison.class_pipelines import ClassPipelineModel
from vsa.evaluation.comparison.exported import ExportedModel
from vsa.evaluation.comparison.folder import TILE, capture_clips, measure_captures
from vsa.evaluation.comparison.methods import AS_TRAINED, Method, parse_method, parse_methods
from vsa.evaluation.comparison.pipelines import PipelineModel
from vsa.evaluation.comparison.settings import CompareSettings
from vsa.evaluation.inspection.clip import Clip, check_numbers, check_timesteps, clip_names
from vsa.files import file_digest, typed
from vsa.integrations.diffusers.families import FAMILIES
from vsa.integrations.diffusers.families.wan import FAMILY as WAN
from vsa.integrations.diffusers.pipeline import FIRST, SECOND, open_pipeline
from vsa.machine import environment
from vsa.models.init import without_memory
from vsa.progress import progress_bar
from vsa.sampling.contact_sheet import side_by_side

LATENTS = (21, 60, 104)
RECALL, RENDERS = "recall by head", "paired renders"


@dataclass(frozen=True, kw_only=True)
class CertifySettings:
    """What is certified, and how; others than these are as in `CompareSettings`.

    Args:
        model: an export, or a pipeline or a transformer with a method: folder or hub id.
        method: name of the method for a dense model, with its settings; None: video_sparse.
        topk: kv tiles per query tile, for a dense model.
        sparsity: share of tiles skipped, for a dense model.
        tile: tokens per tile of the method.
        pipeline: pipeline with the VAE and the text encoder of an export; None: the model, if it is a pipeline.
        prompts: captions of the paired renders.
        clips: videos whose q and k are measured; None: a dense clip of the first prompt.
        latents: latent frames, rows and columns of a clip; None: the first trained grid, or 81 frames of 480p.
        out: output folder; None: `NAME-certificate` beside the model.
        dtype: dtype of the networks; None: bfloat16, on a CPU float32.
    """

    model: str
    method: str | None = None
    topk: int | None = None
    sparsity: float | None = None
    tile: Grid = TILE
    pipeline: str | None = None
    prompts: Sequence[str] = ()
    clips: str | None = None
    most_clips: int = 2
    layers: Sequence[int] | None = None
    timesteps: Sequence[float] = (900.0, 500.0, 100.0)
    steps: int | None = None
    guidance: float | None = None
    flow_shift: float | None = None
    latents: Grid | None = None
    queries: int = 256
    repeats: int = 5
    dtype: str | None = None
    device: str | None = None
    seed: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        check_timesteps(self.timesteps)


class Subject:
    """The model of a certificate.

    Args:
        asked: what is certified.

    Attributes:
        transformers: its transformers by their names in a pipeline; of an export, the sparse ones.
        unusable: reason why the model cannot run in a pipeline; None if it can.
        missing: reasons why parts cannot be measured, by part.

    Raises:
        ValueError: a model that cannot be read, a method for an export, or a dense model without one.
    """

    def __init__(self, asked: CertifySettings):
        self.asked, self.device = asked, usable_device(asked.device)
        self.dtype = asked.dtype or ("float32" if torch.device(self.device).type == "cpu" else "bfloat16")
        first = pretrained_folder(asked.model)
        # a single expert of low noise (Wan2.2 A14B) by the name of its folder
        folders = {SECOND if first.name == SECOND else FIRST: first}
        if (second := local_folder(asked.model, SECOND) / SECOND).is_dir():
            folders[SECOND] = second
        exports = {name: read_sparse_config(folder) for name, folder in folders.items() if has_sparse_config(folder)}
        self.method = None if exports else self._method()
        for name in ("method", "topk", "sparsity"):
            if exports and (value := getattr(asked, name)) is not None:
                raise ValueError(f"--{name} {value} applies to dense models, {asked.model} runs as it was trained")
        self.latents = asked.latents or LATENTS
        if exports and asked.latents is None:
            self.latents = _latents(folders[next(iter(exports))], next(iter(exports.values())).grids[0])
        self.transformers = {
            name: Transformer(
                folder=folders[name],
                sparse=exports.get(name),
                method=self.method,
                latents=self.latents,
                dtype=self.dtype,
                device=self.device,
                seed=asked.seed,
            )
            for name in exports or folders
        }
        layers = next(iter(self.transformers.values())).num_layers
        check_numbers("layers", sorted(set(asked.layers or ())), layers, asked.model)
        if asked.clips is not None and not Path(asked.clips).exists():
            raise ValueError(f"no such video: {asked.clips}")
        self.prompts = list(dict.fromkeys(asked.prompts))
        self.pipeline = asked.pipeline
        if self.pipeline is None and (local_folder(asked.model) / "model_index.json").is_file():
            self.pipeline = asked.model
        # the smallest part of a download
        self.place = None if self.pipeline is None else local_folder(self.pipeline, "scheduler")
        self.unusable = self._without_pipeline()
        self.missing = self._missing()

    def identity(self) -> dict[str, Any]:
        """What every result depends on; files are told apart by their digests, those of a download by its commit."""
        files = {f"{name}/{path}": t.folder / path for name, t in self.transformers.items() for path in t.files}
        local = self.place is not None and Path(self.pipeline or "").is_dir()
        if self.place is not None and local:
            parts = {"model_index.json", *read_json(self.place / "model_index.json")} - {*self.transformers}
            own = {path.relative_to(self.place): path for path in self.place.rglob("*") if path.is_file()}
            files |= {f"pipeline/{name}": path for name, path in own.items() if name.parts[0] in parts}
        print(f"digests of {len(files)} files, {sum(path.stat().st_size for path in files.values()) / 1e9:.1f} GB")
        return {
            "files": {name: file_digest(path) for name, path in sorted(files.items())},
            "pipeline": None if local or self.place is None else self.place.name,
            "method": self._label,
            "tile": self.asked.tile,
            "latents": self.latents,
            "dtype": self.dtype,
            "seed": self.asked.seed,
            "environment": environment(torch.device(self.device)),
        }

    def clips(self) -> list[list[str]]:
        """Digests and captions of the videos whose q and k are measured."""
        videos = [] if self.asked.clips is None else [*map(Path, clip_names(self.asked.clips, self.asked.most_clips))]
        captions = read_captions(videos[0].parent, None, videos).of if videos else {}
        return [[file_digest(path), *captions.get(path, [])] for path in videos]

    def recall(self) -> list[dict[str, Any]]:
        """Rows of `measure`, dense attention first, of clips in some layers at some timesteps."""
        model, asked = self._model, self._compared
        if isinstance(model, ClassPipelineModel):
            clips: list[str | Clip] = [self.prompts[0]]
        elif asked.clips is not None:
            clips = [*clip_names(asked.clips, asked.most_clips)]
        else:
            prompt = self.prompts[0]
            with progress_bar("sampling a dense clip", model.settings.steps, transient=True) as advance:
                sampled = model.sample(self._methods[0], [prompt], None, advance)
            latents = model.statistics.denormalise(sampled.latents.float())[0]
            clips = [Clip(name=prompt, caption=prompt, video=sampled.videos[0], latents=latents)]
        captures = capture_clips(model, clips, asked)
        rows = measure_captures(captures, self._methods, asked, self.device, getattr(torch, self.dtype))
        return [{**asdict(row), "recall_p5": row.recall_p5} for row in rows]

    def render(self, prompt: str, picture: Path) -> list[dict[str, Any]]:
        """`Denoised` of a prompt, dense and sparse from the same noise, without frames, which become a picture."""
        model, methods = self._model, self._methods
        with progress_bar("denoising", len(methods) * model.settings.steps, transient=True) as advance:
            rows = model.denoise([prompt], methods, DenoisingPlan(), advance)
        frames = {prompt: torch.stack([row.frames[0] for row in rows])}
        side_by_side(frames, [row.method for row in rows], picture, frames=SHOWN_FRAMES)
        return [{name: value for name, value in asdict(row).items() if name != "frames"} for row in rows]

    def facts(self) -> dict[str, str]:
        """Facts for the header of the page."""
        info = environment(torch.device(self.device))
        first = next(iter(self.transformers.values()))
        grid = first.grid
        facts = {
            "model": self.asked.model,
            "attention": self._label,
            "clip": f"latents {_by(self.latents)}, {_by(grid)} = {math.prod(grid):,} tokens, {self.dtype}",
            "machine": info.get("gpu") or f"{info['cpu']}, threads: {info['threads']}",
            "versions": ", ".join(f"{name} {version}" for name, version in info["versions"].items()),
            "command": shlex.join(["vsa", *sys.argv[1:]]),
        }
        return facts if self.pipeline in (None, self.asked.model) else facts | {"pipeline": self.pipeline or ""}

    @property
    def _label(self) -> str:
        return AS_TRAINED if self.method is None else self.method.label

    def _method(self) -> Method:
        asked = self.asked
        budget = [f"{name}={value}" for name in ("topk", "sparsity") if (value := getattr(asked, name)) is not None]
        if not budget and asked.method is None:
            raise ValueError(f"{asked.model} is dense: give --sparsity S or --topk K, with --method for another method")
        return parse_method(" ".join([asked.method or "video_sparse", *budget]), tile_thw=asked.tile)

    def _without_pipeline(self) -> str | None:
        """Why the model cannot run in a pipeline, None if it can."""
        pipeline, first = self.pipeline, next(iter(self.transformers.values()))
        own, known = first.class_name, FAMILIES[first.class_name].pipeline
        if known is None:
            return f"diffusers has no pipeline of {own}"
        if pipeline is None or self.place is None:
            return f"needs a VAE and a text encoder, name a {known} with --pipeline"
        if self.method is not None and self.place.resolve() != local_folder(self.asked.model).resolve():
            return f"a dense model is rendered in its own pipeline: vsa certify {typed(Path(pipeline))}"
        if (name := read_json(self.place / "model_index.json").get("_class_name")) != known:
            return f"{own} needs a {known}, {pipeline} is a {name}"
        lacking = [part for part in ("vae", "text_encoder") if not (Path(pipeline) / part).is_dir()]
        if lacking and Path(pipeline).is_dir():
            return f"{pipeline} has no {' and no '.join(lacking)}"
        if own != WAN.name and first.sparse is not None and first.sparse.step_list is not None:
            return f"distilled to the steps {list(first.sparse.step_list)}, which {known} is not sampled in"
        return None

    def _missing(self) -> dict[str, str]:
        if self.unusable is not None:
            return dict.fromkeys((RECALL, RENDERS), self.unusable)
        own = next(iter(self.transformers.values())).class_name
        if own != WAN.name and not self.prompts:
            return {RECALL: "needs --prompt for this class", RENDERS: "needs prompts, --prompt or --prompts"}
        missing = {} if self.prompts else {RENDERS: "needs prompts, --prompt or --prompts"}
        return missing if self.prompts or self.asked.clips else {RECALL: "needs --clips, or --prompt", **missing}

    @cached_property
    def _compared(self) -> CompareSettings:
        names = [field.name for field in fields(CompareSettings) if hasattr(self.asked, field.name)]
        own = {name: getattr(self.asked, name) for name in names if name not in ("out", "method")}
        return CompareSettings(**own | {"pipeline": self.pipeline, "prompts": self.prompts, "latents": self.latents})

    @cached_property
    def _methods(self) -> Sequence[Method]:
        return [*parse_methods([]), *(self._model.own if self.method is None else [self.method])]

    @cached_property
    def _model(self) -> PipelineModel:
        assert self.pipeline is not None
        methods = [*parse_methods([]), *([] if self.method is None else [self.method])]
        first = next(iter(self.transformers.values()))
        if first.class_name != WAN.name:
            own = ClassPipelineModel(
                self.pipeline,
                first.folder,
                export=first.sparse,
                latents=self.latents,
                grid=first.grid,
                flow_shift=self.asked.flow_shift,
                dtype=getattr(torch, self.dtype),
                device=self.device,
            )
            own.prepare(methods, self._compared)
            return own
        sparse = {} if self.method is not None else {name: str(t.folder) for name, t in self.transformers.items()}
        pipe = open_pipeline(
            self.pipeline,
            transformer=sparse.get(FIRST),
            transformer_2=sparse.get(SECOND),
            flow_shift=self.asked.flow_shift,
            dtype=getattr(torch, self.dtype),
            device=self.device,
        )
        codec = WanVAE(self.pipeline)
        if sparse:
            model: PipelineModel = ExportedModel(pipe, codec, sparse=sparse, latents=self.latents)
        else:
            model = PipelineModel(pipe, codec, source=self.pipeline, latents=self.latents)
        model.prepare(methods, self._compared)
        return model


def _latents(folder: Path, grid: Grid) -> Grid:
    """Latent frames, rows and columns of a token grid of a transformer."""
    with without_memory():
        patch = open_weights(folder).network().patch_size
    t, h, w = (n * p for n, p in zip(grid, patch, strict=True))
    return t, h, w


def _by(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))
