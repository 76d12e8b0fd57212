"""Runs of a class of diffusers without its weights: from scratch, or sampled and evaluated where they are gone."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch

from tests.integrations import tiny
from tests.integrations.test_trained_families import DATA, SIZES, Family
from tests.tiny_runs import training, vsa_command  # noqa: F401 (a fixture)
from vsa.checkpoints.weight_source import open_weights
from vsa.evaluation.inspection.metrics import METRICS
from vsa.sampling.pipeline import generate, load_run
from vsa.training.callbacks import diagnostics

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run of LTX-Video whose `init_from` is gone."""
    family = Family("ltx", tmp_path_factory.mktemp("ltx"))
    folder = family.trained
    shutil.rmtree(family.folder)
    return folder


def test_it_samples_without_the_weights_it_started_from(run):
    loaded = load_run(run, device="cpu")
    assert generate(loaded, ["a red circle"], loaded.settings(steps=2)).isfinite().all()


def test_it_is_evaluated(run, tmp_path):
    quick = ("--prompt", "a red circle", "--steps", "1", "--device", "cpu")
    vsa_command("evaluate", str(run), *quick, "--out", str(tmp_path))
    results = max(tmp_path.glob("step-*.json"))
    record = json.loads(results.read_text())
    assert all(math.isfinite(record["metrics"][name]) for name in ("val/loss", "psnr"))


def test_it_trains_from_scratch(training):  # noqa: F811
    config = tiny.ltx(**DATA, caption_channels=64).model.config
    sizes = ("num_layers", "num_attention_heads", "attention_head_dim", "in_channels", "out_channels")
    own = {name: config[name] for name in (*sizes, "cross_attention_dim", "caption_channels")}
    written = ",".join(f"{name}:{value}" for name, value in own.items())
    names = ("model=diffusers", "model.class_name=LTXVideoTransformer3DModel", f"model.config={{{written}}}")
    training(*(f"~model.{name}" for name in SIZES), *names, "run=scratch", "trainer.max_steps=4")
    weights = open_weights(training.folder("scratch"), "model")
    assert {name: weights.config[name] for name in own} == own
    # the head starts at zero
    assert weights["proj_out.weight"].abs().max() > 0


@pytest.mark.usefixtures("no_pictures")
def test_the_selection_of_rows_with_text_is_shown(tmp_path):
    family = Family("cogvideox", tmp_path)
    own = ("--device", "cpu", "--out", str(tmp_path / "out"))
    quick = ("--prompt", "a red circle", "--steps", "1")
    # of the usual methods those that take text
    vsa_command("compare-attention", "--run", str(family.trained), *quick, "--sparsity", "0.75", *own)
    rows = json.loads((tmp_path / "out" / "comparison.json").read_text())["denoising"]
    density = {row["method"]: row["density"] for row in rows}
    assert "spatial_temporal" not in density
    # 16 of 48 tokens are text, which sees all; the others see it and 2 of 8 tiles of 4
    assert density["video_sparse sparsity=0.75"] == pytest.approx((16 * 48 + 32 * (16 + 8)) / 48**2)
    vsa_command("sample", str(family.trained), *quick, "--attention", *own[:3], str(tmp_path / "clips"))
    assert list((tmp_path / "clips").glob("*attention*.png"))
    vsa_command("inspect", str(family.trained), "toy-0-00000000", *own[:3], str(tmp_path / "page"))
    assert (tmp_path / "page" / "inspect.html").is_file()


def test_recall_is_the_mean_of_samples_whose_texts_differ(tmp_path, monkeypatch):
    calls = []

    def measure(tensors, layout, tokens, previous):
        calls.append((len(tensors["q"]), previous is not None))
        return dict.fromkeys(METRICS, torch.tensor(float(len(calls) % 2)))

    fixed = diagnostics.Diagnostics._fixed_samples

    def of_other_lengths(self, data):
        batch = fixed(self, data)
        mask = batch.text_mask.clone()
        mask[0, 3:] = False
        return replace(batch, text_mask=mask)

    monkeypatch.setattr(diagnostics, "layer_metrics", measure)
    monkeypatch.setattr(diagnostics.Diagnostics, "_fixed_samples", of_other_lengths)
    look = {"every_n_steps": 4, "noise_levels": "[0.5,0.9]", "layers": "[0]", "samples": 4}
    settings = (f"callbacks.diagnostics.{name}={value}" for name, value in look.items())
    family = Family("hunyuan", tmp_path)
    family.train("run=whole", "callbacks=diagnostics", "data.batch_size=4", "callbacks.samples.prompts=[]", *settings)
    # at each noise level rows with the short text, then the others
    assert calls == [(1, False), (3, False), (1, True), (3, True)]
    (path,) = (family.runs.folder("whole") / "diagnostics").glob("*.json")
    assert json.loads(path.read_text())["means"]["recall"] == 0.25
