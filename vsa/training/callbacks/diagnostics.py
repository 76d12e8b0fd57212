"""Statistics of a run's attention, computed during training: recall, gates, coarse share, overlap.

B samples, L tokens, H heads, D head dim.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import lightning as L
import torch
from torch import Tensor
from vsa_kernels import BlockIndex

from vsa.attention import stats
from vsa.attention.context import recorded_index
from vsa.attention.denoising import progress_of
from vsa.attention.kept_tiles import KeptTiles
from vsa.data.batch import VideoBatch
from vsa.diffusion.flow_matching import add_noise, noise_like, to_timestep
from vsa.evaluation.figures import layer_heatmaps
from vsa.evaluation.inspection.metrics import METRICS, PANELS, layer_metrics
from vsa.files import atomic_file
from vsa.settings import AtLeastOne, Bound, Count, Seed, Share, validated
from vsa.training.display import log_picture, never_fatal


@validated
class Diagnostics(L.Callback):
    """Measures the attention every `every_n_steps`, outside the timed steps, on fixed samples and noise.

    Held-out samples of the largest latent shape pass through the trained weights at each noise level, with the top-k of
    the step. The metrics `diag/NAME` (means) and `diag/recall_layer_N` are logged; `run_dir/diagnostics` receives a
    heatmap and a JSON file of the table, layer by noise level. An adaptive sparsity schedule receives the missed mass,
    1 - recall. Models whose attention does not select tiles are not measured.

    Args:
        run_dir: the run folder.
        every_n_steps: optimizer steps between two measurements.
        layers: layers to measure, None for all.
        noise_levels: noise levels in [0, 1] to measure at, where 1 is pure noise; the overlap compares the selections
            of consecutive levels.
        samples: number of held-out samples per process.
        queries: number of query tokens per sample whose dense attention is computed for the recall, None for all.
        seed: seed of the choice of query tokens.
    """

    def __init__(
        self,
        run_dir: str,
        every_n_steps: AtLeastOne = 500,
        layers: Sequence[Count] | None = None,
        noise_levels: Annotated[Sequence[Share], Bound(">=", 1)] = (0.1, 0.3, 0.5, 0.7, 0.9),
        samples: AtLeastOne = 1,
        queries: AtLeastOne | None = 256,
        seed: Seed = 0,
    ):
        self.folder = Path(run_dir) / "diagnostics"
        self.every_n_steps, self.noise_levels = every_n_steps, tuple(noise_levels)
        self.layers = None if layers is None else tuple(layers)
        self.samples, self.queries, self.seed = samples, queries, seed
        self._batch: VideoBatch | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if pl_module.step_list is not None:
            # a few-step generator is trained for these noise levels only
            self.noise_levels = tuple(step / 1000 for step in reversed(pl_module.step_list))
        num_layers = len(pl_module.model.blocks)
        bad = [layer for layer in self.layers or () if not 0 <= layer < num_layers]
        if bad:
            raise ValueError(
                f"callbacks.diagnostics.layers has {bad}, but the model's layers are 0 to {num_layers - 1}"
            )
        self._batch = self._fixed_samples(pl_module.data)

    def _fixed_samples(self, data: Any) -> VideoBatch:
        """Samples of the largest shape: smaller ones may keep all of their tiles, with a recall of 1."""
        largest = max(data.buckets, key=lambda shape: math.prod(shape[1:]))
        batch: VideoBatch | None = None
        for each in data.val_dataloader():
            if batch is None or math.prod(each.latents.shape[1:]) > math.prod(batch.latents.shape[1:]):
                batch = each
            if tuple(each.latents.shape[1:]) == tuple(largest):
                break
        if batch is None:
            raise ValueError("callbacks.diagnostics needs held-out samples: data.val_fraction leaves none")
        if self.samples > len(batch.seeds):
            raise ValueError(
                f"callbacks.diagnostics.samples={self.samples} is above the {len(batch.seeds)} samples of a micro-batch"
            )
        # page-locked noise would stay locked; it is drawn again
        return replace(batch.rows(slice(self.samples)), noise=None)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % pl_module.accumulate or trainer.global_step % self.every_n_steps:
            return
        with pl_module.status.paused():
            self._look(trainer, pl_module)

    def _look(self, trainer: L.Trainer, pl_module: Any) -> None:
        assert self._batch is not None
        step, shape = trainer.global_step, tuple(self._batch.latents.shape[1:])
        topk = pl_module.topk_after(shape, step)
        pl_module.model.eval()
        layers, table = self._measure(pl_module, self._batch.to(pl_module.device), topk)
        pl_module.model.train()
        if not layers:
            return
        # every process measures its own samples
        reduced = trainer.strategy.reduce(table, reduce_op="mean").cpu()
        tables = dict(zip(METRICS, reduced, strict=True))
        means = {name: float(t.nanmean()) for name, t in tables.items() if not t.isnan().all()}
        by_layer = {
            f"diag/recall_layer_{n}": float(row.mean()) for n, row in zip(layers, tables["recall"], strict=True)
        }
        pl_module.log_lines.add({**{f"diag/{name}": mean for name, mean in means.items()}, **by_layer}, step)
        layout = pl_module.model.layout_for(shape)
        num_tiles = layout.num_video_tiles
        kept = self._kept(topk)
        # layers that keep every tile have a recall of 1 and would raise the mean
        num_layers = len(pl_module.model.blocks)
        smallest_topk = [min(layer) for layer in zip(*(k.by_layer(num_layers) for k in kept), strict=True)]
        sparse = [row for n, row in zip(layers, tables["recall"], strict=True) if smallest_topk[n] < num_tiles]
        recall = float(torch.stack(sparse).mean()) if sparse else 1.0
        pl_module.sparsity.observe(step, min(max(1 - recall, 0.0), 1.0))
        if trainer.is_global_zero:
            by_level = [k.by_layer(num_layers) for k in kept] if topk.changes else topk.number
            record = {"step": step, "latent_shape": list(shape), "topk": by_level, "num_tiles": num_tiles}
            computed = [pl_module.model.computed_tiles(layout, k).mean(num_tiles) for k in kept]
            record["sparsity"] = 1 - fmean(computed) / num_tiles
            with never_fatal(f"the picture of {self.folder}, step {step}"):
                self._show(trainer, record, layers, means, tables)

    def _kept(self, topk: KeptTiles) -> list[KeptTiles]:
        """The top-k at each noise level."""
        return [topk.at(progress_of(1000 * level)) for level in self.noise_levels]

    @torch.no_grad()
    def _measure(self, pl_module: Any, batch: VideoBatch, topk: KeptTiles) -> tuple[list[int], Tensor]:
        """Indices of the layers that select tiles, and metrics as fp32 `[metrics, layers, noise levels]`."""
        latents = pl_module.statistics.normalise(batch.latents)
        noise = noise_like(latents, batch.seeds, batch.noise)
        layout = pl_module.model.layout_for(latents.shape[1:], latents.device)
        tokens = stats.sample_tokens(layout.num_tokens, self.queries, seed=self.seed)
        selections: dict[tuple[int, int], BlockIndex] = {}
        columns = []
        for noise_level, kept in zip(self.noise_levels, self._kept(topk), strict=True):
            # by layer, the samples and the metrics of each call
            column: dict[int, list[tuple[int, dict[str, Tensor]]]] = defaultdict(list)

            def recorder(layer: int, tensors: dict[str, Tensor], column=column) -> None:
                if "kv_indices" in tensors and (self.layers is None or layer in self.layers):
                    call = layer, len(column[layer])
                    # computed immediately, since a layer's tensors are freed when the next layer runs
                    metrics = layer_metrics(tensors, layout, tokens, selections.get(call))
                    column[layer].append((len(tensors["q"]), metrics))
                    selections[call] = recorded_index(tensors)

            level = torch.full((len(latents),), noise_level, device=latents.device)
            x_t = add_noise(latents, noise, level)
            pl_module.model(x_t, to_timestep(level), **batch.conditions, topk=kept, recorder=recorder)
            columns.append(column)
        layers = sorted({layer for layer, _ in selections})
        values = [_mean(column[layer], name) for name in METRICS for layer in layers for column in columns]
        shape = (len(METRICS), len(layers), len(columns))
        return layers, torch.stack(values).view(shape) if values else torch.empty(shape)

    def _show(
        self,
        trainer: L.Trainer,
        record: Mapping[str, Any],
        layers: Sequence[int],
        means: Mapping[str, float],
        tables: Mapping[str, Tensor],
    ) -> None:
        path = self.folder / f"step-{record['step']:08d}.png"
        title = (
            f"step {record['step']}, sparsity {record['sparsity']:.1%} of {record['num_tiles']} tiles: "
            f"recall {means['recall']:.1%}, random tiles {means['recall_random']:.1%}"
        )
        # metrics that the method does not have are all NaN
        panels = {name: tables[key] for key, name in PANELS.items() if not tables[key].isnan().all()}
        layer_heatmaps(panels, path, layers=layers, timesteps=self.noise_levels, title=title)
        # JSON has no NaN
        rows = {
            name: [[None if math.isnan(x) else x for x in row] for row in table.tolist()]
            for name, table in tables.items()
        }
        whole = {**record, "layers": list(layers), "timesteps": self.noise_levels, "means": means, "tables": rows}
        with atomic_file(path.with_suffix(".json")) as temporary:
            temporary.write_text(json.dumps(whole, indent=1), encoding="utf-8")
        log_picture(trainer.loggers, "diagnostics", path, record["step"])


def _mean(calls: Sequence[tuple[int, Mapping[str, Tensor]]], name: str) -> Tensor:
    """Mean over the samples of all calls."""
    samples = sum(count for count, _ in calls)
    return torch.stack([metrics[name] * (count / samples) for count, metrics in calls]).sum(0)
