"""Hydra's sweeper for `sweep=NAME`: a sweep from its settings to its last run. Reads top-down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from vsa.config import Sweep, build, check_settings, check_targets
from vsa.places import check_name, place_of
from vsa.sweeps.devices import slots_of
from vsa.sweeps.points import Point, variants_of
from vsa.sweeps.sweep_run import SweepRun
from vsa.training.hydra_guard import SETTING
from vsa.training.launch import INPUT_ERRORS, run
from vsa.training.model_sizes import fill_model
from vsa.training.sparsity_overrides import sets_tiles_kept, without_tiles_kept

NAMED_BY_SWEEP = ("run", "run_dir", "ckpt_path")


class PointSweeper(Sweeper):
    """Trains every point of the group `sweep`, each in a separate process on a free device."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._loader: Any = hydra_context.config_loader
        self._config: Any = config
        self._cluster: Launcher | None = None
        if ".submitit_launcher." in str(config.hydra.launcher.get("_target_")):
            self._cluster = Plugins.instance().instantiate_launcher(
                hydra_context=hydra_context, task_function=train_elsewhere, config=config
            )

    def sweep(self, arguments: list[str]) -> None:
        """Run the unfinished points.

        Args:
            arguments: overrides of the command line, without those of Hydra.

        Raises:
            ValueError: a setting that does not apply to a sweep.
            SystemExit: a run failed, or a signal ended the sweep.
        """
        config = self._config
        plain_config = _without_hydra(config)
        fill_model(plain_config)
        check_settings(plain_config)
        sweep = Sweep(**{"name": config.hydra.runtime.choices.sweep, **_plain(config.sweep)})
        check_name("sweep.name", str(sweep.name))
        settings, axes = self._split(arguments)
        folder = place_of(config.output_dir, "output_dir") / str(config.name) / str(sweep.name)
        where = self._cluster or slots_of(sweep, config.trainer)
        shared = [text for text in settings if sets_tiles_kept(text)]
        settings = [text for text in settings if text not in shared]
        sweep_run = SweepRun(self, sweep, folder, settings, seed=config.seed, overwrite=config.overwrite)
        points = variants_of(sweep, axes, shared=shared, used=lambda own: self.used(own, settings))
        with sweep_run.watched() as watch:
            sweep_run.train(points, where, watch)
        sweep_run.end()

    def _split(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
        """Settings of every run, and the lists of values by key."""
        settings, axes = [], {}
        for override in OverridesParser.create(config_loader=self._loader).parse_overrides(list(arguments)):
            key, text = override.get_key_element().lstrip("+"), str(override.input_line)
            if key in NAMED_BY_SWEEP:
                raise ValueError(f"{text}: the runs of a sweep are named after its points, and continue by themselves")
            if override.is_sweep_override():
                if not override.is_discrete_sweep():
                    raise HydraException(f"{text}: a search needs hydra/sweeper=optuna, which takes no sweep=NAME")
                axes[key] = list(override.sweep_string_iterator())
            elif key.partition(".")[0] not in ("sweep", "overwrite"):
                # the leading sign is removed, since every composition adds it
                settings.append(text[2:] if SETTING.match(text[2:]) else text)
        # runs of all seeds share one validation seed
        settings += [f"{part}.validation_seed={self._config.seed}" for part in ("task", "data")]
        return settings, axes

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The config of a run."""
        return _without_hydra(self._loader.load_sweep_config(self._config, list(overrides)))

    def used(self, own: Sequence[str], shared: Sequence[str] = ()) -> tuple[str, ...]:
        """Those overrides of a run that apply to its attention; `shared` are the overrides of all runs."""
        if any(map(sets_tiles_kept, own)):
            try:
                attention = self.compose([*shared, *own]).attention
                check_targets({"attention": attention})
                method = build(attention)(dim=24, num_heads=1, head_dim=24)
                if not method.selects:
                    return without_tiles_kept(own, predicts=method.predicts)
            except (ValueError, OSError, TypeError, *INPUT_ERRORS):
                # the error is reported when the point is checked
                pass
        return tuple(own)

    @property
    def flags(self) -> list[str]:
        """Hydra flags for the command of every run."""
        node = self._config.hydra
        folders = [source.path for source in node.runtime.config_sources if source.provider == "command-line"]
        mine = ("hydra/sweeper", "hydra/launcher", "hydra.sweep", "hydra.launcher", "hydra.mode")
        return [
            *(f"--config-dir={folder}" for folder in folders),
            f"--config-name={node.job.config_name}",
            *(text for text in node.overrides.hydra if not text.lstrip("+").startswith(mine)),
        ]


class QueueLauncher(Launcher):
    """Passes the trials of a search, or the jobs of `-m`, to the queue: one at a time on every device."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._sweeper = PointSweeper()
        self._sweeper.setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self._config: Any = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Train the unfinished jobs, in OUTPUT_DIR/EXPERIMENT/search/trial-N.

        Returns:
            the last validation loss of every job, or its failure.
        """
        config, sweep = self._config, Sweep(name="search", control=False)
        folder = place_of(config.output_dir, "output_dir") / str(config.name) / str(sweep.name)
        overrides = map(self._sweeper.used, job_overrides)
        points = [Point(f"trial-{initial_job_idx + i}", own) for i, own in enumerate(overrides)]
        search = SweepRun(self._sweeper, sweep, folder, [], seed=config.seed, overwrite=config.overwrite)
        with search.watched() as watch:
            search.train(points, slots_of(sweep, config.trainer), watch)
        return [search.returned(point) for point in points]


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True)


def _without_hydra(config: Any) -> DictConfig:
    config = config.copy()
    OmegaConf.set_readonly(config, False)
    with open_dict(config):
        config.pop("hydra", None)
    return config


def train_elsewhere(cfg: DictConfig) -> str:
    """The job of a cluster: train, and return the reason of a failure; "" for success."""
    try:
        run(cfg)
    except SystemExit as stop:
        if isinstance(stop.code, int) and stop.code > 128:
            raise
        return " ".join(str(stop.__cause__ or stop).split())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
