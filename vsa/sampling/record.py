"""What made a clip, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from vsa.sampling.pipeline import SamplingPipeline
from vsa.sampling.settings import SampleSettings


def settings_dict(settings: SampleSettings, run: SamplingPipeline) -> Mapping[str, Any]:
    """Settings and description of the weights as plain values, for the JSON file of the samples."""
    shape = settings.latent_shape
    layout = run.model.layout_for(shape)
    num_tiles = layout.num_video_tiles
    kept, changes = settings.kept(num_tiles, len(run.model.blocks)), settings.denoising.changes()
    # the layers of a network without a top-k are recorded as dense
    computed = [run.model.computed_tiles(layout, topk) for topk in kept] if run.model.selects else kept
    means = [topk.mean(num_tiles) for topk in computed]
    return {
        "checkpoint": run.source,
        "step": run.step,
        "weights": run.weights,
        "compute_dtype": str(run.compute_dtype).removeprefix("torch."),
        **({} if run.low is None else {"transformer_2": run.low.source, "step_2": run.low.step}),
        "seed": settings.seed,
        "steps": settings.steps,
        "step_list": None if settings.step_list is None else list(settings.step_list),
        "guidance": settings.guidance,
        "flow_shift": settings.flow_shift,
        "topk": kept[-1].number,
        "num_tiles": num_tiles,
        "sparsity": 1 - fmean(means) / num_tiles,
        **({"denoising": changes} if changes else {}),
        **({"topk_by_step": means} if len(set(kept)) > 1 else {}),
        "latent_shape": list(shape),
        "batch_size": settings.batch_size,
        "codec": {"id": run.codec.id, "hash": run.codec.hash},
        "text_encoder": {"id": run.text_encoder.id, "hash": run.text_encoder.hash},
    }
