"""Runs of a class of diffusers without its weights: from scratch, or sampled and evaluated where they are gone."""

from __future__ import annotations

import json
import math
import shutil

import pytest

from tests.integrations import tiny
from tests.integrations.test_trained_families import DATA, SIZES, Family
from tests.tiny_runs import training, vsa_command  # noqa: F401 (a fixture)
from vsa.checkpoints.weight_source import open_weights
from vsa.sampling.pipeline import generate, load_run

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
