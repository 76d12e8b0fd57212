"""`vsa certify` of pipelines and exports of every family, against their own pipelines and their own attention."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.attention.oracle import cube_ids
from tests.evaluation.certificate.conftest import record_of, settings
from tests.evaluation.certificate.tiny_pipelines import PIPELINES, save
from tests.integrations import tiny
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.checkpoints.golden import write_golden
from vsa.checkpoints.sparse_config import SparseAttentionConfig
from vsa.checkpoints.wan import export_pretrained
from vsa.checkpoints.weight_source import open_network
from vsa.evaluation.certificate.folder import certify
from vsa.evaluation.certificate.subject import Subject
from vsa.integrations.diffusers import apply, load_sparse
from vsa.integrations.diffusers.network import DiffusersNetwork
from vsa.sampling.pipeline import clip_seeds

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")

# 24 tokens in 8 tiles of 2 or 4
GRID, TILE, TILES = (2, 3, 4), (1, 2, 2), 8
PROMPT, GUIDANCE = "a cat", 3.0
# text tokens of a row, padding included, and passes of a guided step
TEXTS = {"ltx": 0, "cogvideox": 226, "hunyuan": 6, "hunyuan15": 6 + 3 + 729, "kandinsky5": 0}
PASSES = {"hunyuan15": 2, "kandinsky5": 2}
# what its pipelines import takes seconds
SLOW = ("hunyuan15", "kandinsky5", "minimax_h3")


def some(*names: str, slow: tuple[str, ...]) -> Any:
    return pytest.mark.parametrize(
        "name", [pytest.param(n, marks=pytest.mark.slow if n in slow else ()) for n in names]
    )


def latents_of(model: Any) -> tuple[int, int, int]:
    patch = getattr(model.config, "patch_size", 1)
    t, h, w = patch if isinstance(patch, (tuple, list)) else (1, patch, patch)
    return GRID[0] * t, GRID[1] * h, GRID[2] * w


def drawn(pipe: Any, latents: tuple[int, int, int], guidance: float = GUIDANCE, **given: Any) -> Tensor:
    """Latents of the pipeline as a user runs it."""
    pipe.set_progress_bar_config(disable=True)
    space = getattr(pipe, "vae_scale_factor_spatial", None) or pipe.vae_spatial_compression_ratio
    time = getattr(pipe, "vae_scale_factor_temporal", None) or pipe.vae_temporal_compression_ratio
    size = {"height": latents[1] * space, "width": latents[2] * space, "num_frames": (latents[0] - 1) * time + 1}
    if hasattr(pipe, "guider"):
        pipe.guider = pipe.guider.new(guidance_scale=guidance)
    else:
        given = {"guidance_scale": guidance, **given}
    generator = torch.Generator().manual_seed(int(clip_seeds(0, [PROMPT])[0]))
    return pipe([PROMPT], generator=generator, output_type="latent", num_inference_steps=2, **size, **given)[0]


def cosine(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


def recall_of(q: Tensor, k: Tensor, mask: Tensor | None, first: int, topk: int) -> list[float]:
    """Recall of each head of a row `[H, L, D]`: video tiles by mean query times mean key, all real text is visible."""
    q, k = q.double(), k.double()
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        logits = logits + torch.zeros_like(mask, dtype=torch.double).masked_fill(~mask.bool(), -math.inf)
    video = slice(first, first + math.prod(GRID))
    weights = logits[:, video].softmax(-1)
    ids = torch.tensor(cube_ids(GRID, TILE))
    members = torch.stack([ids == n for n in range(TILES)]).double()
    scores = (members @ q[:, video]) @ (members @ k[:, video]).transpose(-1, -2) / members.sum(1)
    selection = torch.zeros_like(scores).scatter_(-1, scores.topk(topk).indices, 1)
    seen = torch.ones_like(weights)
    seen[..., video] = members.T @ selection @ members
    return (weights * seen).sum(-1).mean(-1).tolist()


@torch.no_grad()
@some(*PIPELINES, slow=SLOW)
def test_a_dense_pipeline_is_certified_as_it_runs(name, tmp_path, monkeypatch):
    """Recall by the queries and keys that its own class gives to torch's attention, renders by its own pipeline."""
    model = save(name, tmp_path / "pipe", monkeypatch)
    latents = latents_of(model)
    options = {"topk": 3, "tile": TILE, "latents": latents, "prompts": [PROMPT], "guidance": GUIDANCE}
    record = record_of(certify(settings(tmp_path / "pipe", **options)))
    assert (record["failed"], record["missing"]) == ([], [])
    assert record["parity"]["transformer"]["checks"][0]["error"] < 1e-5

    calls, attention, length = [], F.scaled_dot_product_attention, math.prod(GRID) + TEXTS[name]

    def seen(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **rest: Any) -> Tensor:
        if query.shape[2] == key.shape[2] == length:
            calls.append((query[-1], key[-1], attn_mask if attn_mask is None else attn_mask[-1]))
        return attention(query, key, value, attn_mask=attn_mask, **rest)

    pipe = getattr(diffusers, PIPELINES[name].pipeline).from_pretrained(tmp_path / "pipe")
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", seen)
        dense = drawn(pipe, latents)
    passes = PASSES.get(name, 1)
    assert len(calls) == 2 * passes * 2
    step = int((pipe.scheduler.timesteps - 500).abs().argmin())
    rows = [row for row in record["recall"] if row["topk"] == 3]
    assert [row["layer"] for row in rows] == [0, 1]
    first = TEXTS[name] if name == "cogvideox" else 0
    for row, (q, k, mask) in zip(rows, calls[2 * passes * step :], strict=False):
        assert row["head_recall"] == pytest.approx(recall_of(q, k, mask, first, 3), abs=1e-4)
        assert row["head_recall"] != pytest.approx(recall_of(q, k, mask, first, 4), abs=1e-3)
    apply(pipe.transformer, topk=3, tile_thw=TILE)
    _, sparse = record["renders"][PROMPT]
    assert sparse["cosine"] == pytest.approx(cosine(drawn(pipe, latents), dense), abs=1e-6)
    assert sparse["cosine"] < 1 - 1e-5


def export_of(model: Any, folder: Path, **changes: Any) -> Path:
    """An export of a transformer, with gates that do something, and golden tensors."""
    gates = {"gate_bias": False, "coarse_text": True} if "MiniMax" in type(model).__name__ else {}
    network: Any = DiffusersNetwork(
        attention=partial(VideoSparseAttention, tile_thw=TILE, fine_gate=False, **gates),
        class_name=type(model).__name__,
        config=model.config,
    )
    network.load_state_dict(model.state_dict(), strict=False)
    keys = tuple(key for key in network.state_dict() if "to_gate_" in key)
    for key in keys:
        network.state_dict()[key].normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
    config = SparseAttentionConfig(
        method="video_sparse",
        tile_thw=None if gates else TILE,
        partition=None if gates else "cube",
        block_order=None if gates else "nested",
        fine_gate=False,
        gate_keys=keys,
        grid_topk=((3, 4),),
        num_tiles=(TILES,),
        grids=(GRID,),
        settings=network.attention_layers[0].settings() if gates else None,
        **{"guidance_scale": 2.0, "guidance_form": "additive", "flow_shift": 5.0, **changes},
    )
    export_pretrained(network, folder, sparse=config)
    write_golden(open_network(folder)[0], folder)
    return folder


@torch.no_grad()
@some(*PIPELINES, slow=("hunyuan", *SLOW))
def test_an_export_is_certified_as_it_was_trained(name, tmp_path, monkeypatch):
    model = save(name, tmp_path / "pipe", monkeypatch)
    export = export_of(model, tmp_path / "export")
    record = record_of(certify(settings(export, pipeline=str(tmp_path / "pipe"), prompts=[PROMPT])))
    assert (record["failed"], record["missing"]) == ([], [])
    parity = record["parity"]["transformer"]
    assert [check["error"] < 2e-5 for check in parity["checks"]] == [True] * 3
    assert parity["sparse_difference"] > 1e-3
    trained = [row for row in record["recall"] if row["method"] == "as trained"]
    assert [(row["layer"], row["topk"]) for row in trained] == [(0, 3), (1, 4)]
    assert all(0.1 < row["recall_p5"] <= row["recall"] < 0.99 for row in trained)
    # the shift and the guidance of its training, where the pipeline has them
    pipe = getattr(diffusers, PIPELINES[name].pipeline).from_pretrained(tmp_path / "pipe")
    if "shift" in pipe.scheduler.config:
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, shift=5.0)
    # 2 beside the conditional pass; what HunyuanVideo embeds is another number
    guidance = 1.0 if name == "hunyuan" else 3.0
    dense = drawn(pipe, latents_of(model), guidance)
    load_sparse(export, transformer=pipe.transformer)
    sparse = drawn(pipe, latents_of(model), guidance)
    assert record["renders"][PROMPT][1]["cosine"] == pytest.approx(cosine(sparse, dense), abs=1e-6)
    assert record["renders"][PROMPT][1]["cosine"] < 1 - 1e-5


@torch.no_grad()
def test_what_stays_missing_is_told_by_name(tmp_path, monkeypatch):
    """MiniMax-H3 has no pipeline; a few-step generator runs in Wan's alone; and a pipeline of another family."""
    h3 = export_of(tiny.minimax_h3().model, tmp_path / "h3")

    def missing(model: Path, **options: Any) -> str:
        subject = Subject(settings(model, prompts=[PROMPT], **options))
        assert subject.missing["recall by head"] == subject.missing["paired renders"]
        return subject.missing["recall by head"]

    record = record_of(certify(settings(h3)))
    assert [check["error"] < 2e-5 for check in record["parity"]["transformer"]["checks"]] == [True] * 3
    assert len(record["step_ms"]["sparse"]) == 1
    assert missing(h3) == "diffusers has no pipeline of MiniMaxH3Transformer3DModel"
    model = save("ltx", tmp_path / "ltx", monkeypatch)
    export = export_of(model, tmp_path / "export")
    assert missing(export) == "needs a VAE and a text encoder, name a LTXPipeline with --pipeline"
    save("cogvideox", tmp_path / "other", monkeypatch)
    needs = "LTXVideoTransformer3DModel needs a LTXPipeline, .*other is a CogVideoXPipeline"
    assert re.fullmatch(needs, missing(export, pipeline=str(tmp_path / "other")))
    few = export_of(model, tmp_path / "few", step_list=(1000.0, 500.0), flow_shift=None, guidance_form="standard")
    told = "distilled to the steps [1000.0, 500.0], which LTXPipeline is not sampled in"
    assert missing(few, pipeline=str(tmp_path / "ltx")) == told
