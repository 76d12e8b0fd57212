"""One training run from its settings: check, build, fit."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_module, rank_zero_only
from omegaconf import DictConfig, OmegaConf

from vsa.checkpoints.run_checkpoint import Checkpoint, list_checkpoints
from vsa.checkpoints.run_folder import RunFolder, locked, refuse_inside_run
from vsa.checkpoints.wan_config import transformer_config
from vsa.config import build, build_task, check_settings, check_targets, in_run_folder, model_factory, resolved
from vsa.data.datamodule import LatentDataModule
from vsa.data.parallel_dims import ParallelDims
from vsa.data.sample_store import follow_codec
from vsa.errors import told_together
from vsa.models.init import without_memory
from vsa.places import place_of, refuse_inputs, run_folder_of
from vsa.training.budgets import (
    MEASURED_STEPS,
    WARM_UP_STEPS,
    StepTimer,
    budget_of,
    check_budget,
    is_counted,
    steps_of_budget,
)
from vsa.training.callbacks.bad_samples import BadSamples
from vsa.training.callbacks.checkpoint import Checkpointing
from vsa.training.callbacks.flush_metrics import FlushMetrics
from vsa.training.callbacks.missed_validation import MissedValidation
from vsa.training.callbacks.open_run_folder import OpenRunFolder
from vsa.training.callbacks.print_estimate import PrintEstimate
from vsa.training.callbacks.start_times import StartTimes
from vsa.training.config_changes import refuse_unknown_keys
from vsa.training.deadline import deadline_of
from vsa.training.ending import fit, nothing_to_do
from vsa.training.estimate.gpus import gpu_here
from vsa.training.estimate.run import estimate_of, full_lines, with_dense_attention
from vsa.training.model_sizes import fill_model, follow_rate
from vsa.training.modules.checks import JobSize
from vsa.training.out_of_memory import told_out_of_memory
from vsa.training.parallel import choose_strategy
from vsa.training.sparsity_overrides import NOTHING, SparsityOverrides
from vsa.training.start import overwrites, resumed_checkpoint, start_of

KNOWN_WARNINGS = (
    # our streams distribute their items over workers themselves
    r".*`IterableDataset` has `__len__` defined.*",
    r".*does not have many workers.*",
    # the returned velocity is a view, and it is never written to
    r".*FSDP2-wrapped module .* returned a view tensor.*",
    # the validation loss is reduced before it is logged
    r".*It is recommended to use .*sync_dist.*",
    # a resumed run that has no steps left makes up for its last validation
    r"Total length of .* across ranks is zero.*",
    # metrics are written by optimizer steps, which do not begin anew with every pass over the data
    r".*is smaller than the logging interval.*",
    # emitted by Lightning with newer versions of torch
    r".*isinstance\(treespec, LeafSpec\).*",
)


def train(cfg: DictConfig, typed: SparsityOverrides = NOTHING) -> None:
    """Train with the settings `cfg`, in the run folder `cfg.run_dir`.

    Args:
        cfg: config of the run.
        typed: overrides that the user typed, beyond the values of shared files.

    Raises:
        ValueError: an invalid setting, named with its value.
    """
    start_times, cfg, run_dir = StartTimes(), cfg.copy(), run_folder_of(cfg)
    # what the callbacks write to is what is checked and locked
    cfg.run_dir = str(run_dir)
    _check_values(cfg)
    if cfg.dry_run:
        _dry_run(cfg)
        return
    # the lock is taken before a checkpoint to resume is read, and held until the last file is written
    with locked(run_dir) if _is_first_process(cfg) else nullcontext(), RunFolder(run_dir) as folder:
        if cfg.ckpt_path is None and is_requeued() and list_checkpoints(run_dir / "checkpoints"):
            # the queue restarts a job with its original command
            cfg.ckpt_path = "last"
        _train(cfg, run_dir, folder, typed, start_times)


def _dry_run(cfg: DictConfig) -> None:
    """Check a new run as at its start, and print its estimate for the GPUs of this machine."""
    if cfg.ckpt_path is not None:
        raise ValueError(f"dry_run=true applies to a new run only, got ckpt_path={cfg.ckpt_path}")
    cfg, opened = cfg.copy(), dict[str, Any]()
    cfg.dry_run = False
    refuse_unknown_keys(cfg.resume.allow, cfg, {})
    cfg = check_run(cfg, opened)
    (datamodule,) = opened.values()
    on_gpu = cfg.trainer.accelerator != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    gpu = gpu_here(device)
    if gpu is None:
        rank_zero_info("the run can start; no estimate for a CPU: vsa plan --gpu KIND makes one")
        return
    module = build_task(cfg)
    text = datamodule.text_encoder.max_tokens
    estimate = estimate_of(
        cfg, module, datamodule.buckets, text, gpu, dims=_dims(cfg.trainer, module), counted=is_counted(cfg)
    )
    if rank_zero_only.rank == 0:
        print("\n".join(full_lines(str(cfg.name), estimate, with_dense_attention(module))))
    if (refusal := estimate.refusal()) is not None:
        raise ValueError(refusal)


def is_requeued() -> bool:
    """Whether a SLURM queue has started this job again, with its first command."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def _refuse_own_inputs(cfg: DictConfig, module: Any, datamodule: Any) -> None:
    """Raise ValueError if what a run reads lies in its folder, which is to be set aside; `places` of an object are the
    files and folders that it has opened or will open."""
    with without_memory():
        parts = [*vars(module).values(), *model_factory(cfg)().attention_layers, datamodule]
    parts += [datamodule.codec, datamodule.text_encoder]
    refuse_inputs(Path(cfg.run_dir), (place for part in parts for place in getattr(part, "places", ())))


def check_run(cfg: DictConfig, opened: dict[str, Any]) -> DictConfig:
    """Refuse a new run that `train` would refuse before its first step; missing data are not prepared.

    Returns its config with the settings that follow from the data, and the steps of its budget.

    Args:
        cfg: config of the run.
        opened: data modules of earlier calls, by their settings; that of this run is added.

    Raises:
        ValueError: an invalid setting, named with its value.
    """
    _check_values(cfg)
    if cfg.dry_run:
        raise ValueError("dry_run=true applies to single runs: a sweep checks all its runs before the first one starts")
    cfg = cfg.copy()
    follow_codec(cfg.data)
    follow_rate(cfg)
    key = OmegaConf.to_yaml(cfg.data, resolve=True)
    datamodule = opened.get(key) or build(cfg.data).before_data()
    if budget_of(cfg) is None:
        _task(cfg, datamodule)
    else:
        # its number of steps, on which the task may depend, is known after set-up
        _check_model(cfg, datamodule)
    datamodule.prepare_data()
    datamodule.setup("fit")
    opened[key] = datamodule
    cfg.trainer.max_steps = _steps_of_budget(cfg, datamodule)
    _task(cfg, datamodule, is_set_up=True)
    return cfg


def _task(
    cfg: DictConfig,
    datamodule: Any,
    resume: Checkpoint | None = None,
    typed: SparsityOverrides = NOTHING,
    is_set_up: bool = False,
) -> Any:
    """The module of a run; all mismatches of model, initial weights and data are told at once."""
    if resume is None:
        nothing_to_do(cfg.trainer.max_steps, None)
    module = build_task(cfg, start=start_of(cfg, resume))
    _check_job(cfg, module)
    # also where the data are looked at later
    _dims(cfg.trainer, module)

    def check_data() -> None:
        # files are looked at now, streams are far away
        if not is_set_up and not isinstance(datamodule, LatentDataModule):
            return
        data = datamodule.before_data()
        data.prepare_data()
        data.setup("fit")
        size = JobSize(cfg.trainer.accumulate_grad_batches, _dims(cfg.trainer, module), cfg.trainer.max_steps)
        with without_memory():
            module.check_start(model_factory(cfg)(), data, size)

    told_together(lambda: _check_model(cfg, datamodule, typed), lambda: module.check_weights(datamodule), check_data)
    if overwrites(cfg):
        _refuse_own_inputs(cfg, module, datamodule)
    return module


def _check_values(cfg: DictConfig) -> None:
    if cfg.get("sweep"):
        raise ValueError("a sweep is more than one run: vsa sweep NAME, or vsa train -m sweep=NAME")
    fill_model(cfg)
    check_targets(cfg)
    check_settings(cfg)
    # toy clips are written there if they are missing
    for key in {"root", "videos"} & set(cfg.data) if "toy" in cfg.data else ():
        name = f"data.{key}={cfg.data[key]}"
        refuse_inside_run(place_of(cfg.data[key], name), name)
    videos = cfg.data.get("videos")
    if videos is not None and "toy" not in cfg.data and cfg.ckpt_path is None and not Path(str(videos)).is_dir():
        raise ValueError(f"data.videos={videos}: no such folder, expected the one that the shards were made from")
    _check_precision(cfg.trainer.precision)
    _check_accelerator(cfg.trainer.accelerator)


def _train(
    cfg: DictConfig, run_dir: Path, folder: RunFolder, typed: SparsityOverrides, start_times: StartTimes
) -> None:
    for message in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    # Lightning's advertisement of its other packages
    rank_zero_module.log.addFilter(lambda record: "Tip:" not in record.getMessage())

    resume = resumed_checkpoint(cfg, run_dir, verify=not _may_be_several(cfg.trainer))
    refuse_unknown_keys(cfg.resume.allow, cfg, {} if resume is None else resume.state["config"])
    for line in (follow_codec(cfg.data), follow_rate(cfg)):
        if line is not None:
            rank_zero_info(line)
    datamodule = build(cfg.data)
    if resume is not None:
        datamodule.keep(resume.state)
    if budget_of(cfg) is not None:
        _check_model(cfg, datamodule, typed)
    # schedules that end with the run depend on this setting
    cfg.trainer.max_steps = _max_steps(cfg, datamodule, resume)
    if nothing_to_do(cfg.trainer.max_steps, resume, run_dir):
        return

    module = _task(cfg, datamodule, resume, typed)
    _tell_export(cfg)
    if module.parallel.frozen == "rounded" and not any(network.frozen for network in module.planned_networks()):
        rank_zero_info("note: task.parallel.frozen=rounded changes nothing, as this run trains every weight")
    loggers = _built(cfg, "logger")
    callbacks = [start_times, *_callbacks(cfg, folder, loggers)]
    module.status.deadline = deadline_of(cfg.trainer.get("max_time"), os.environ)
    trainer: Any = _trainer(cfg, callbacks, loggers)
    trainer.strategy.sequence = module.parallel.sequence

    rank_zero_info(f"run folder: {run_dir}")
    checkpoints = [callback for callback in callbacks if isinstance(callback, Checkpointing)]
    fit(trainer, module, datamodule, run_dir, requeue=any(callback.requeue for callback in checkpoints))


def _check_precision(precision: Any) -> None:
    if precision not in (32, "32", "32-true"):
        raise ValueError(
            f"trainer.precision={precision} is not supported, expected 32-true: parameters stay in fp32, and what "
            "networks compute in is task.parallel.compute_dtype (bf16 on GPUs)"
        )


def _check_accelerator(name: str) -> None:
    usable = ["auto", "cpu"]
    for kind, accelerator in (("cuda", CUDAAccelerator), ("mps", MPSAccelerator)):
        usable += [kind, "gpu"] if accelerator.is_available() else []
    if name not in usable:
        raise ValueError(f"trainer.accelerator={name}: not available here; available: {', '.join(usable)}")


def _is_first_process(cfg: DictConfig) -> bool:
    """Whether this is rank 0 of all nodes; Lightning's own launcher numbers only the ranks of a node at this point."""
    nodes = cfg.trainer.get("num_nodes", 1)
    return rank_zero_only.rank == 0 and (nodes == 1 or LightningEnvironment().node_rank() == 0)


def _check_model(cfg: DictConfig, datamodule: Any, typed: SparsityOverrides = NOTHING) -> None:
    """Refuse a model that is invalid or does not fit the encoders, before any data are prepared."""
    with without_memory():
        model = model_factory(cfg)()
    if not model.selects:
        typed.refuse_without_selection(predicts=model.predicts, rule=cfg.attention.get("rule"))
    channels, problems = datamodule.codec.channels, []
    # image conditions need further input channels, which are compared with the data at the start of training
    conditioned = model.in_channels > channels == model.out_channels
    for key in ("out_channels",) if conditioned else ("in_channels", "out_channels"):
        if getattr(model, key) != channels:
            problems.append(f"model.{key}={getattr(model, key)}, but data.codec makes latents of {channels} channels")
    width = datamodule.text_encoder.dim
    if model.text_dim != width:
        problems.append(f"model.text_dim={model.text_dim}, but data.text_encoder makes tokens of width {width}")
    if problems:
        raise ValueError("; ".join(problems))


def _tell_export(cfg: DictConfig) -> None:
    """Report at the start, not after the training, that a model cannot be exported."""
    try:
        with without_memory():
            transformer_config(model_factory(cfg)())
    except ValueError as error:
        rank_zero_info(f"note: this model cannot be exported to diffusers: {error}")


def _max_steps(cfg: DictConfig, datamodule: Any, resume: Checkpoint | None) -> int:
    before = resume.state.get("config", {}) if resume is not None else {}
    if budget_of(cfg) == "second_budget" and before.get("second_budget") == cfg.second_budget:
        # the budget was converted to steps when the run began
        return before["trainer"]["max_steps"]
    if resume is not None and "flops_measured" in resume.state and budget_of(cfg) == "flop_budget":
        flops = resume.state["flops_total"] + resume.state["flops_measured"]
        if flops >= cfg.flop_budget and resume.step % cfg.trainer.log_every_n_steps == 0:
            # the log line at which `Throughput` ended the run
            return resume.step
    return _steps_of_budget(cfg, datamodule, lambda step: _step_seconds(cfg, step))


def _steps_of_budget(cfg: DictConfig, data: Any, step_seconds: Callable[[int], float] | None = None) -> int:
    if budget_of(cfg) is None:
        return cfg.trainer.max_steps
    data = data.before_data()
    data.prepare_data()
    data.setup("fit")
    image = data.image_encoder
    tokens = 0 if image is None else image.tokens
    return steps_of_budget(cfg, data.buckets, data.text_encoder.max_tokens, tokens, step_seconds)


def _step_seconds(cfg: DictConfig, step: int) -> float:
    """Time of a training step at the sparsity of optimizer step `step`, from a trial run that writes no files."""
    if _may_be_several(cfg.trainer):
        raise ValueError(f"second_budget={cfg.second_budget} is measured on one device: expected trainer.devices=1")
    trial, timer = cfg.copy(), StepTimer()
    own = {"max_steps": WARM_UP_STEPS + MEASURED_STEPS, "enable_progress_bar": False, "limit_val_batches": 0}
    for name, value in own.items():
        OmegaConf.update(trial, f"trainer.{name}", value, force_add=True)
    module = build_task(trial, start=start_of(trial, None))
    _check_job(trial, module)
    module.sparsity = module.sparsity.held_at(step)
    datamodule = build(trial.data)
    module.check_weights(datamodule)
    # at the level of activation checkpointing that the run will have
    with told_out_of_memory(module):
        _trainer(trial, [timer, PrintEstimate(trial, counted=False)], []).fit(module, datamodule=datamodule)
    return timer.seconds


def _check_job(cfg: DictConfig, module: Any) -> None:
    """Refuse settings that this kind of job does not support."""
    check_budget(cfg, module)
    targets = [str(node.get("_target_")) for node in cfg.callbacks.values() if node is not None]
    if module.sparsity.measured and not any(target.endswith(".Diagnostics") for target in targets):
        raise ValueError(f"{type(module.sparsity).__name__} follows measurements: it needs callbacks=diagnostics")


def _built(cfg: DictConfig, group: str) -> list[Any]:
    nodes: Any = OmegaConf.to_container(cfg[group], resolve=True)
    return [build(in_run_folder(node, str(cfg.run_dir))) for node in nodes.values() if node is not None]


def _callbacks(cfg: DictConfig, folder: RunFolder, loggers: list[Any]) -> list[L.Callback]:
    """Callbacks by order: opening of the run, changes of its state (0), saving (1), display of the saved state (2)."""
    callbacks = _built(cfg, "callbacks")
    if not cfg.trainer.get("enable_progress_bar", True):
        # Lightning refuses a bar that its own switch turns off
        callbacks = [callback for callback in callbacks if not isinstance(callback, ProgressBar)]
    opening = OpenRunFolder(
        folder, OmegaConf.to_yaml(OmegaConf.create(resolved(cfg))), loggers, overwrite=overwrites(cfg)
    )
    callbacks += [BadSamples(str(cfg.run_dir)), PrintEstimate(cfg), FlushMetrics()]
    return [opening, *sorted(callbacks, key=lambda callback: getattr(callback, "order", 0)), MissedValidation()]


def _processes(trainer: Mapping[str, Any]) -> int:
    devices = trainer["devices"]
    if trainer["accelerator"] == "cpu" or not CUDAAccelerator.is_available():
        # with devices=auto this is one process
        local = int(devices) if str(devices).isdecimal() else 1
    elif devices == "auto":
        local = CUDAAccelerator.auto_device_count()
    else:
        # an invalid value, which the trainer will report
        local = len(CUDAAccelerator.parse_devices(devices) or (0,))
    return local * trainer.get("num_nodes", 1)


_LAUNCHERS: Any = (("torchrun", TorchElasticEnvironment, "WORLD_SIZE"), ("SLURM", SLURMEnvironment, "SLURM_NTASKS"))
"""Launchers whose number of ranks Lightning takes unchecked, with its variable."""


def _dims(trainer: Any, module: Any) -> ParallelDims:
    """The parallel dimensions that a run of the module will have; ValueError if a launcher started other ranks."""
    ranks = _processes(trainer)
    for launcher, environment, count in _LAUNCHERS:
        if environment.detect():
            started = int(os.environ[count])
            if trainer["devices"] != "auto" and ranks != started:
                raise ValueError(
                    f"trainer.devices={trainer['devices']} and trainer.num_nodes={trainer.get('num_nodes', 1)} are "
                    f"{ranks} ranks, {launcher} has started {started}"
                )
            ranks = started
            break
    return ParallelDims.of_settings(trainer["strategy"], ranks, module.parallel.sequence)


def _may_be_several(trainer: Mapping[str, Any]) -> bool:
    return _processes(trainer) > 1 or trainer["devices"] == "auto" or TorchElasticEnvironment.detect()


def _trainer(cfg: DictConfig, callbacks: list[L.Callback], loggers: list[Any]) -> L.Trainer:
    settings: Any = in_run_folder(OmegaConf.to_container(cfg.trainer, resolve=True), str(cfg.run_dir))
    # Lightning's timer would not leave time to save
    settings.pop("max_time", None)
    if settings["devices"] == "auto" and TorchElasticEnvironment.detect():
        # torchrun has already started its number of processes on each node
        settings["devices"] = int(os.environ["LOCAL_WORLD_SIZE"])
        settings["num_nodes"] = int(os.environ["WORLD_SIZE"]) // settings["devices"]
    settings["strategy"] = choose_strategy(settings["strategy"], processes=_processes(settings))
    # Lightning makes the other loggers create files before everything is checked; `OpenRunFolder` attaches them
    quiet = [logger for logger in loggers if hasattr(logger, "part")]
    return build(settings, callbacks=callbacks, logger=quiet)
