"""Every config file composes and builds; what a config must not do is refused in one line."""

from __future__ import annotations

import copy
import importlib.util
from functools import cache
from itertools import takewhile
from pathlib import Path

import lightning as L
import pytest
import torch
from hydra.errors import InstantiationException
from lightning_utilities.core.imports import RequirementCache
from omegaconf import DictConfig, OmegaConf

import vsa.training.train as run_module
from tests.data.tiny_wan import make_vae, save_pipeline
from vsa.attention.base import AttentionMethod
from vsa.attention.full import FullAttention
from vsa.attention.sparsity import SparsitySchedule
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.checkpoints.sampling_settings import sampling_of
from vsa.config import build, build_task, check_targets, in_run_folder, model_factory, resolved
from vsa.data.plan_datamodule import PlanDataModule
from vsa.diffusion.distribution_matching import standard_scale
from vsa.training.hydra_guard import composed
from vsa.training.model_sizes import fill_model
from vsa.training.modules.base import DiffusionModule
from vsa.training.train import _check_precision

CONFIGS = Path(__file__).parents[2] / "configs"
CHOICES = [
    (str(path.parent.relative_to(CONFIGS)), path.stem)
    for path in sorted(CONFIGS.rglob("*.yaml"))
    if path.parent != CONFIGS
]


@cache
def composed_once(*overrides: str) -> DictConfig:
    return composed("trainer.accelerator=cpu", *overrides)


def compose_run(*overrides: str) -> DictConfig:
    return copy.deepcopy(composed_once(*overrides))


def build_everything(cfg) -> L.Trainer:
    """All objects of a run, the model on the meta device; nothing is prepared or trained."""
    check_targets(cfg)
    datamodule = build(cfg.data)
    assert isinstance(datamodule, PlanDataModule)
    module = build_task(cfg)
    assert isinstance(module, DiffusionModule)
    with torch.device("meta"):
        model = module._model_factory()
    assert isinstance(model.blocks[0].method, AttentionMethod)
    assert model.text_dim == datamodule.text_encoder.dim
    assert model.in_channels == model.out_channels == datamodule.codec.channels
    roles = model.parameter_roles()
    optimizer = module._optim.build(model, roles)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(parameters) == len({id(p) for p in parameters}) == len(list(model.parameters()))
    callbacks = run_module._built(cfg, "callbacks")
    settings = in_run_folder(OmegaConf.to_container(cfg.trainer, resolve=True), cfg.run_dir)
    return build(settings, callbacks=callbacks, logger=run_module._built(cfg, "logger"))


def _together() -> list[tuple[tuple[str, str], ...]]:
    """All config files in few compositions: the first of every group, the second, and so on.

    Experiments choose from the other groups themselves, and some groups go with one task only.
    """
    alone = ("experiment", "lora", "gan")
    groups = {group: [name for of, name in CHOICES if of == group] for group, _ in CHOICES if group not in alone}
    ranks = range(max(map(len, groups.values())))
    packs = [tuple((group, names[i]) for group, names in groups.items() if i < len(names)) for i in ranks]
    return [*packs, *(((group, name),) for group, name in CHOICES if group in alone)]


PACKAGES = {"csv": "torch", "tensorboard": "tensorboard", "wandb": "wandb"}


@pytest.mark.soak("shipped configs compose and build")
@pytest.mark.parametrize(
    "choices",
    [
        *_together(),
        *(pytest.param((choice,), marks=pytest.mark.slow) for choice in CHOICES if (choice,) not in _together()),
    ],
    ids=lambda choices: "-".join(f"{group}={name}" for group, name in choices),
)
def test_every_config_file_composes_and_builds(choices, tmp_path, monkeypatch):
    # neither an account nor a connection is needed
    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    overrides = [f"output_dir={tmp_path}"]
    for group, name in choices:
        if group == "logger" and importlib.util.find_spec(PACKAGES[name]) is None:
            if len(choices) == 1:
                pytest.skip(f"needs {name}")
            continue
        overrides.append(f"{group}={name}")
        # the encoder of data=wan has the width of its own weights
        if group == "model" and ("data", "wan") not in choices:
            overrides.append("data.text_encoder.dim=" + ("32" if name == "diffusers" else "${model.text_dim}"))
            overrides += ["data.codec.channels=48"] if name == "wan_5b" else []
        overrides += {"lora": ["task=finetune"], "gan": ["task=distill", "task.objective.gan.layers=[0,1]"]}.get(
            group, []
        )
        if group == "model" and name in ("from_checkpoint", "diffusers"):
            overrides.append(f"init_from={save_pipeline(tmp_path / 'weights')}")
    cfg = compose_run(*overrides)
    fill_model(cfg)
    if cfg.data.codec._target_.endswith("WanVAE"):
        # the encoders of a tiny pipeline, with the width of theirs
        cfg.data.codec.source = str(save_pipeline(tmp_path / "wan"))
        cfg.model.text_dim = 32
        if cfg.model.get("in_channels") == 48:
            make_vae(channels=48).save_pretrained(tmp_path / "wan" / "vae")
    trainer = build_everything(cfg)
    for logger in trainer.loggers:
        if type(logger).__name__ == "TensorBoardLogger":
            logger.log_metrics({"x": 1.0}, 1)
            assert list(tmp_path.rglob("tensorboard/events*"))


@pytest.mark.slow
def test_wandb_works_offline_without_a_key(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    cfg = compose_run(f"output_dir={tmp_path}", "logger=wandb")
    (tmp_path / "pretrain" / "default").mkdir(parents=True)
    logger = build(cfg.logger.wandb, save_dir=cfg.run_dir)
    logger.log_metrics({"train/loss": 1.5}, 1)
    logger.finalize("success")
    wandb.finish()
    assert list((tmp_path / "pretrain" / "default" / "wandb").glob("offline-run-*"))


def test_groups_are_those_of_the_design():
    groups = {group for group, _ in CHOICES}
    assert groups >= {
        "task",
        "model",
        "attention",
        "sparsity",
        "data",
        "optim",
        "trainer",
        "callbacks",
        "logger",
        "experiment",
        "debug",
    }
    assert {name for group, name in CHOICES if group == "experiment"} >= {"quickstart", "pretrain_120m"}
    assert {name for group, name in CHOICES if group == "debug"} == {"overfit", "profile", "anomaly"}
    assert not list(CONFIGS.rglob("__init__.py"))


@pytest.mark.parametrize("path", sorted((CONFIGS / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_experiments_say_what_they_are_for(path):
    head = list(takewhile(lambda line: line.startswith("#"), path.read_text().splitlines()))
    for word in ("Purpose:", "Command:", "Hardware:", "Expected:"):
        assert any(line.startswith(f"# {word}") for line in head), word
    assert f"experiment={path.stem}" in "\n".join(head)


@pytest.mark.parametrize("path", sorted((CONFIGS / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_experiments_name_their_prompts_or_sample_none(path):
    # captions of the data would be sampled unasked, which takes large models long
    assert compose_run().callbacks.samples.get("prompts") is None
    names_them = compose_run(f"experiment={path.stem}").callbacks.samples.get("prompts") is not None
    # nobody but the user knows what their clips show
    assert names_them != (path.stem in ("own_videos", "films_60m", "films_120m"))


@pytest.mark.parametrize("path", sorted((CONFIGS / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_runs_dense_by_one_word(path):
    sparse, dense = (
        build(compose_run(f"experiment={path.stem}", *overrides).attention)(dim=64, num_heads=2, head_dim=32)
        for overrides in ((), ("attention=full",))
    )
    assert isinstance(sparse, VideoSparseAttention)
    assert isinstance(dense, FullAttention)


@pytest.mark.parametrize("name", ["quickstart", "finetune_toy", "distill_toy"])
def test_the_toy_experiments_keep_the_model_of_their_recorded_losses(name):
    model = resolved(compose_run(f"experiment={name}").model)
    assert [model[k] for k in ("absolute_positions", "rope_theta", "init", "num_layers")] == [True, 1e4, "gpt_neox", 4]


def test_pretrain_120m_is_the_papers_recipe():
    cfg = compose_run("experiment=pretrain_120m")
    assert (cfg.data.batch_size, cfg.optim.lr, cfg.optim.betas) == (1024, 6e-4, [0.9, 0.95])
    schedule, sparsity = build(cfg.optim.schedule), build(cfg.sparsity)
    assert [schedule(s) for s in (0, 49, 99, 100, 10**6)] == [0.01, 0.5, 1, 1, 1]
    with torch.device("meta"):
        model = model_factory(cfg)()
    layout = model.layout_for((16, 16, 64, 64), "cpu")
    assert (layout.num_tokens, layout.num_video_tiles, sparsity.topk(0, 256)) == (16384, 256, 32)


@pytest.mark.parametrize(
    ("name", "shift"), [("finetune_wan_1_3b", 3.0), ("finetune_wan_5b", 5.0), ("finetune_wan_14b", 5.0)]
)
def test_wan_is_sampled_as_wan_though_it_trains_without_a_shift(name, shift):
    cfg = compose_run(f"experiment={name}")
    assert sampling_of(cfg) == {"steps": 50, "guidance": 5.0, "flow_shift": shift}
    assert build(cfg.task.objective.shift)(30_000) == 1
    samples = build(cfg.callbacks.samples, run_dir=cfg.run_dir)
    assert (samples.steps, samples.guidance, samples.flow_shift) == (50, 5.0, shift)


def test_wan_is_distilled_as_published():
    # from reference/training.md 1e, not from the config
    cfg = compose_run("experiment=distill_wan_1_3b")
    module = build_task(cfg)
    assert module.step_list == (1000, 757, 522)
    assert standard_scale(module.objective.guidance, module.objective.cfg_form) == 4.5
    assert module.objective.shift(23_296) == 8
    assert (module.objective.min_ratio, module.objective.max_ratio) == (0.02, 0.98)
    assert [module.cycle.is_generators_turn(n) for n in range(6)] == [True, False, False, False, False, True]
    assert module.cycle.generator_updates(cfg.trainer.max_steps) == 800
    assert module.sparsity.topk(0, 364) == 73
    for recipe in (module._optim, module.fake_score.recipe):
        assert (recipe.lr, recipe.weight_decay, [recipe.schedule(n) for n in (0, 3999)]) == (2e-6, 0.01, [1, 1])
    large = compose_run("experiment=distill_wan_14b")
    assert build(large.sparsity).topk(0, 1200) == 120
    assert build(large.task.objective.shift)(1) == 3


@pytest.mark.parametrize("where", ["fabric.loggers.tensorboard", "pytorch.loggers.wandb"])
def test_a_missing_package_is_named_with_what_installs_it(tmp_path, monkeypatch, where):
    name = where.rpartition(".")[2]
    module = importlib.import_module(f"lightning.{where}")
    for probe in [
        key for key in vars(module) if key.endswith("_AVAILABLE") and isinstance(vars(module)[key], RequirementCache)
    ]:
        monkeypatch.setattr(module, probe, RequirementCache(f"{name}>=9999"))
    cfg = compose_run(f"output_dir={tmp_path}", f"logger={name}")
    requirement = {"tensorboard": "'vsa-train[tensorboard]'", "wandb": "wandb"}[name]
    with pytest.raises(ValueError) as error:
        build(cfg.logger[name], save_dir=str(tmp_path))
    assert str(error.value) == f"logger.{name} needs the package {name}: pip install {requirement}"


class Failing:
    """What a constructor may raise."""

    def __init__(self, error: str):
        raise {
            "import": ModuleNotFoundError("No module named 'peft'", name="peft.tuners"),
            "runtime": RuntimeError("no\nC++"),
        }[error]


def test_errors_of_a_constructor_name_their_key():
    cfg = OmegaConf.create({"x": {"y": {"_target_": f"{__name__}.Failing", "error": "runtime"}}})
    with pytest.raises(ValueError, match=r"^no \(config key x\.y\)$"):
        build(cfg.x.y)
    cfg.x.y.error = "import"
    with pytest.raises(ValueError, match=r"^x\.y needs the package peft: pip install 'vsa-train\[lora\]'$"):
        build(cfg.x.y)
    cfg.x.y.error = "else"
    with pytest.raises(InstantiationException, match="KeyError"):
        build(cfg.x.y)


@pytest.mark.parametrize(
    "heads",
    # a matrix of 4 TiB; and the largest that a setting may name, beside which 4 GiB are filled first
    [256, pytest.param(4096, marks=pytest.mark.slow)],
)
def test_a_model_too_large_for_the_memory_is_told_as_such(heads):
    cfg = compose_run("model.num_layers=1", f"model.num_attention_heads={heads}", "model.attention_head_dim=4096")
    with pytest.raises(
        ValueError, match=r"^the model is too large .*: [\d,]+ parameters, .* GiB in fp32 .*key model\)$"
    ):
        model_factory(cfg)()


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "64-true", 64, "16", None])
def test_only_fp32_with_bf16_by_sharding_is_promised(precision):
    with pytest.raises(ValueError, match=rf"^trainer.precision={precision} is not supported, expected 32-true: .*bf16"):
        _check_precision(precision)
    for value in (32, "32", compose_run().trainer.precision):
        _check_precision(value)


REFUSED_TARGETS = [
    "os.system",
    "vsa.training.train.os.system",
    "vsa.training.train.Path",
    "pathlib.Path.write_text",
    "torch.load",
    "builtins.eval",
    "vsa.training.train.train",
    "lightning.pytorch.trainer.trainer.os.system",
    "subprocess.Popen",
    "vsa",
    "vsa.attention.nowhere.Nothing",
]


@pytest.mark.parametrize("target", REFUSED_TARGETS)
@pytest.mark.parametrize("key", ["callbacks.samples", "model", "optim.schedule", "logger.csv"])
def test_a_config_cannot_call_anything_else(target, key):
    cfg = compose_run()
    check_targets(cfg)
    OmegaConf.update(cfg, f"{key}._target_", target)
    with pytest.raises(ValueError, match=rf"{key}._target_={target} (is not allowed|does not exist)"):
        check_targets(cfg)


def test_a_target_hidden_behind_an_interpolation_is_refused():
    cfg = compose_run("name=os.system", "callbacks.ema._target_=${name}")
    with pytest.raises(ValueError, match=r"callbacks\.ema\._target_=os\.system is not allowed"):
        check_targets(cfg)


SCHEDULES = sorted(path.stem for path in (CONFIGS / "sparsity").glob("*.yaml"))
EXPERIMENTS = [
    "quickstart",
    "finetune_toy",
    "finetune_wan_1_3b",
    "finetune_wan_5b",
    "finetune_wan_14b",
    "distill_toy",
    "distill_wan_1_3b",
    "distill_wan_14b",
]


@pytest.mark.parametrize(
    ("experiment", "sparsity"),
    [
        # each schedule and each experiment once
        pytest.param(experiment, sparsity, marks=[] if i % len(EXPERIMENTS) == j else pytest.mark.slow)
        for i, sparsity in enumerate(SCHEDULES)
        for j, experiment in enumerate(EXPERIMENTS)
    ],
)
def test_every_schedule_goes_with_every_experiment(experiment, sparsity):
    schedule = build(compose_run(f"experiment={experiment}", f"sparsity={sparsity}").sparsity)
    assert isinstance(schedule, SparsitySchedule)
