"""Every attention method trains: finite losses, gradients of all its parameters, counted FLOPs, a run that resumes."""

from __future__ import annotations

import math

import lightning as L
import pytest

METHODS = [
    ("attention=full", "~attention.tile_thw"),
    ("attention=compressed_kv", "~attention.tile_thw"),
    ("attention=spatial_temporal", "~attention.tile_thw"),
    ("attention=spatial_full", "~attention.tile_thw"),
    ("attention=strided_window", "~attention.tile_thw"),
    ("attention=pooled_tail", "attention.order=2", "attention.score=mass"),
    ("attention=staged", "attention.stages=l"),
    ("attention=staged", "attention.stages=c_f_l", "attention.window_thw=[1,1,3]"),
    ("attention=staged", "attention.stages=c_fl", "attention.window_thw=[1,1,3]", "attention.pooling=conv"),
]


class Unmoved(L.Callback):
    """Names of parameters that no step gave a gradient."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.names = [name for name, p in module.model.named_parameters() if p.grad is None]


@pytest.mark.filterwarnings("ignore:tiles .* are .* full")
@pytest.mark.parametrize("overrides", METHODS, ids=lambda overrides: " ".join(overrides[:2]))
def test_a_method_trains_and_resumes(training, overrides):
    unmoved = Unmoved()
    training(*overrides, "trainer.max_steps=2", callbacks=(unmoved,))
    training(*overrides, "trainer.max_steps=4", "ckpt_path=last")
    assert unmoved.names == []
    rows = training.metrics()
    assert sorted(rows) == [1, 2, 3, 4]
    assert all(math.isfinite(float(row["train/loss"])) for row in rows.values())
