"""Tiny runs: one with random weights for tests of everything that reads runs, and real ones through `train`."""

from __future__ import annotations

import copy
import csv
import functools
import gc
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import omegaconf.base
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

import vsa.cli
import vsa.data.sample_store as sample_store
import vsa.training.train as run_module
from vsa.checkpoints.run_checkpoint import Checkpoint, resolve_checkpoint, write_checkpoint
from vsa.config import build, model_factory
from vsa.evaluation.figures import health_curves, loss_curve
from vsa.reports.run_page import write_run_page
from vsa.training import ending, hydra_guard
from vsa.training.modules import base, distill

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
LATENT_SHAPE = (16, 4, 8, 8)


def make_config(*, attention: str | Mapping[str, Any] = "video_sparse") -> dict[str, Any]:
    """Config of a two-layer model: 64 tokens, 8 tiles of 2 x 2 x 2; attention is a name or a config node."""
    methods = {
        "video_sparse": {"_target_": "vsa.attention.video_sparse.VideoSparseAttention", "tile_thw": [2, 2, 2]},
        "full": {"_target_": "vsa.attention.full.FullAttention"},
        "neighborhood": {
            "_target_": "vsa.attention.neighborhood.method.NeighborhoodAttention",
            "_convert_": "all",
            "window_thw": [1.0, 0.5, 3],
            "causal_thw": [True, False, False],
        },
        "sparge": {
            "_target_": "vsa.attention.sparge.method.SpargeAttention",
            "q_tokens": 16,
            "kv_tokens": 8,
            "tau": 0.4,
            "theta": -1,
        },
        "fine_grained": {
            "_target_": "vsa.attention.fine_grained.method.FineGrainedAttention",
            "q_tokens": 16,
            "kv_tokens": 4,
            "top_p": 0.3,
        },
        "dynamic_hilbert": {
            "_target_": "vsa.attention.dynamic_hilbert.DynamicHilbertAttention",
            "tokens": 8,
            "sub_tokens": 4,
        },
    }
    return {
        "model": {
            "_target_": "vsa.models.video_dit.VideoDiT",
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "ffn_dim": 48,
            "num_layers": 2,
            "text_dim": 64,
            "freq_dim": 32,
        },
        "attention": {**(methods[attention] if isinstance(attention, str) else attention), "_partial_": True},
        "sparsity": {"_target_": "vsa.attention.sparsity.ConstantSparsity", "topk": None, "sparsity": 0.75},
        "data": {
            "codec": {"_target_": "vsa.data.codecs.HaarCodec"},
            "text_encoder": {"_target_": "vsa.data.text.HashedNgramEncoder"},
            "toy": {"_target_": "vsa.data.toy_videos.ToyClips", "size": [16, 64, 64]},
        },
        "task": {
            "objective": {
                "shift": {"_target_": "vsa.diffusion.flow_matching.FlowShift", "kind": "constant", "value": 3.0}
            }
        },
    }


def write_run(
    folder: Path,
    *,
    attention: str | Mapping[str, Any] = "video_sparse",
    with_ema: bool = True,
    config: dict[str, Any] | None = None,
    step_list: tuple[float, ...] | None = None,
    seed: int = 0,
) -> Path:
    """Write a run folder with one checkpoint (step 7) whose weights are random everywhere; returns the run folder.

    With a step list the run is one of a distilled generator.
    """
    config = make_config(attention=attention) if config is None else config
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: p.shape for name, p in model_factory(make_config(attention=attention))().named_parameters()}
    # random output heads and gates too: a zero head would make every test of the sampler pass
    groups = {
        name: {key: 0.15 * torch.randn(shape, generator=generator) for key, shape in shapes.items()}
        for name in (["model", "ema"] if with_ema else ["model"])
    }
    codec, text_encoder = build(make_config()["data"]["codec"]), build(make_config()["data"]["text_encoder"])
    state = {
        "step": 7,
        "config": config,
        "latent_mean": torch.linspace(-0.5, 0.5, 16).tolist(),
        "latent_std": torch.linspace(0.5, 2, 16).tolist(),
        "codec": {"id": codec.id, "hash": codec.hash},
        "text_encoder": {"id": text_encoder.id, "hash": text_encoder.hash},
        "latent_shapes": [[16, 1, 8, 8], list(LATENT_SHAPE)],
    }
    if step_list is not None:
        state["step_list"] = list(step_list)
    write_checkpoint(folder / "checkpoints", groups, state)
    return folder


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., dict[str, Any]]:
    """`tiny_config(attention="video_sparse" | "full")` makes the config of a tiny run."""
    return make_config


@pytest.fixture(scope="session")
def write_tiny_run() -> Callable[..., Path]:
    """`write_tiny_run(folder, attention=, with_ema=, config=, step_list=)` writes a tiny run."""
    return write_run


@pytest.fixture(scope="module")
def tiny_run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of a tiny sparse run."""
    return write_run(tmp_path_factory.mktemp("run"))


TINY_OVERRIDES = (
    "model.num_layers=2",
    "model.num_attention_heads=1",
    "model.attention_head_dim=12",
    "model.ffn_dim=24",
    "model.freq_dim=16",
    "data=toy_online",
    # latents 16 x 2 x 8 x 8: 32 tokens in 8 tiles
    "data.toy.size=[8,64,64]",
    "data.toy.count=48",
    "data.batch_size=4",
    "data.val_fraction=0.1",
    "attention.tile_thw=[1,2,2]",
    "sparsity.sparsity=0.5",
    "optim.lr=0.01",
    "optim.schedule.warmup_steps=2",
    "callbacks.progress=null",
    "callbacks.samples.prompts=[]",
    "callbacks.checkpoint.every_n_steps=2",
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
    "trainer.max_steps=4",
    "trainer.val_check_interval=1000",
    "trainer.enable_progress_bar=false",
)
"""A run of 0.1 s a step: 32 tokens, two layers of width 12."""

NO_GROUPS = (
    "output_dir",
    "run",
    "overwrite",
    "dry_run",
    "init_from",
    "ckpt_path",
    "seed",
    "flop_budget",
    "sample_token_budget",
    "second_budget",
)


@functools.cache
def composed(overrides: tuple[str, ...]) -> DictConfig:
    """A composition takes as long as some steps, so it is made once; values are set in a copy."""
    return hydra_guard.composed(*overrides)


class TinyTraining:
    """Starts tiny runs of the real `train`, with callbacks of a test's own beside the configured ones.

    Args:
        output: folder of the runs.
        patch: puts the callbacks in.
    """

    def __init__(self, output: Path, patch: pytest.MonkeyPatch):
        self.output, self._patch = output, patch

    def config(self, *overrides: str) -> Any:
        """The composed config of a tiny run; `~key` drops one of the tiny settings, for groups that lack the key."""
        dropped_keys = {o[1:] for o in overrides if o.startswith("~")}
        if any(o.startswith("debug=") for o in overrides):
            # these write no checkpoints
            dropped_keys.add("callbacks.checkpoint.every_n_steps")
        tiny = [o for o in TINY_OVERRIDES if o.partition("=")[0] not in dropped_keys]
        rest = [o for o in overrides if not o.startswith("~")]
        groups, values = [], [f"output_dir={self.output}"]
        for override in rest:
            key = override.partition("=")[0]
            is_value = key in NO_GROUPS or ("." in key and not set(key) & set("+@"))
            (values if is_value else groups).append(override)
        config = copy.deepcopy(composed((*tiny, *groups)))
        for override in OverridesParser.create().parse_overrides(values):
            # an option whose default stands in Python is in no file
            OmegaConf.update(config, override.get_key_element(), override.value(), force_add=True)
        return config

    def folder(self, run: str = "default") -> Path:
        return self.output / "pretrain" / run

    def __call__(self, *overrides: str, callbacks: tuple[L.Callback, ...] = ()) -> L.Trainer | None:
        """Train; returns the trainer, None where there was nothing to do."""
        trainers: list[L.Trainer] = []
        make = run_module._trainer

        def with_callbacks(cfg, configured, loggers):
            trainers.append(make(cfg, [*configured, *callbacks], loggers))
            return trainers[-1]

        with self._patch.context() as patch:
            # a figure costs as much as the steps of a tiny run; test_figures and runs by command draw it
            for module, curves in ((base, loss_curve), (distill, health_curves)):
                if getattr(module, curves.__name__) is curves:
                    patch.setattr(module, curves.__name__, lambda metrics, path, **_: Path(path).touch())
            if ending.write_run_page is write_run_page:
                # tests/reports/test_run_page.py looks at pages, tests/training/test_ending.py at one of a training
                patch.setattr(ending, "write_run_page", lambda run: run.folder / "report.html")
            patch.setattr(run_module, "_trainer", with_callbacks)
            run_module.train(self.config(*overrides))
        return trainers[-1] if trainers else None

    def metrics(self, run: str = "default") -> dict[int, dict[str, str]]:
        """Rows of `metrics.csv` by step."""
        with open(self.folder(run) / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert len({row["step"] for row in rows}) == len(rows)
        return {int(row["step"]): row for row in rows}

    def losses(self, run: str = "default") -> dict[int, str]:
        return {step: row["train/loss"] for step, row in self.metrics(run).items()}

    def last(self, run: str = "default") -> Checkpoint:
        return resolve_checkpoint("last", self.folder(run))

    def tensors(self, run: str = "default") -> dict[str, torch.Tensor]:
        """Weights, averages and moments of the newest checkpoint."""
        checkpoint = self.last(run)
        return {f"{g}/{k}": v for g in ("model", "ema", "optimizer") for k, v in checkpoint.tensors(g).items()}


@contextmanager
def made_once() -> Iterator[None]:
    """Clips and parsed interpolations, which all tiny runs have in common, are made once in a process."""
    with pytest.MonkeyPatch.context() as patch:
        # a pure function of its arguments; a clip has 100 kB
        patch.setattr(sample_store, "render_clip", functools.lru_cache(maxsize=256)(sample_store.render_clip))
        # the tree of an interpolation is only read: what it refers to is looked up each time
        patch.setattr(omegaconf.base, "parse", functools.lru_cache(maxsize=1024)(omegaconf.base.parse))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny matrices are slower on two threads, and sums keep their order on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    # what the imports left is never freed: searching it takes a tenth of the time of tiny runs
    gc.freeze()
    with made_once():
        yield
    torch.set_num_threads(before)


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyTraining:
    """`training(*overrides, callbacks=())` trains a tiny run; its other methods read what it left."""
    return TinyTraining(tmp_path / "outputs", monkeypatch)


@pytest.fixture
def command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`command_line("train.py" or a command of `vsa`, *arguments)`; returns (status, stdout, stderr)."""

    def run_script(script: str, *arguments: str, full_errors: bool = False) -> tuple[int, str, str]:
        capsys.readouterr()
        for stream in (sys.stdout, sys.stderr):
            # as vsa.streams makes those of a process
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        with monkeypatch.context() as patch:
            patch.setenv("HYDRA_FULL_ERROR", "1" if full_errors else "0")
            patch.setattr(sys, "argv", [script, *arguments])
            status = 0
            try:
                if script.endswith(".py"):
                    runpy.run_path(str(ROOT / script), run_name="__main__")
                else:
                    vsa.cli.main([script, *arguments])
            except SystemExit as stop:
                status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        out, err = capsys.readouterr()
        return status, out, err

    return run_script


def vsa_command(*words: str | Path) -> None:
    """Run `vsa` with words; what went wrong is raised, not printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYDRA_FULL_ERROR", "1")
        try:
            vsa.cli.main([str(word) for word in words])
        except SystemExit as stop:
            if stop.code:
                raise


@pytest.fixture(scope="session")
def tiny_overrides() -> tuple[str, ...]:
    return TINY_OVERRIDES
