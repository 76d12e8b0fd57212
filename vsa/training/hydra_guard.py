"""Checks of the `hydra` node of a config, which Hydra uses before the job and so before `config.check_targets`.

Hydra builds its callbacks, launcher and sweeper from this node, passes two of its nodes to `logging.config`, and
imports packages named in its search path. Any file or override can set these values, so every composed config is
checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, SearchPathException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from vsa.config_files import choices, config_folder
from vsa.files import YAML_LIMIT, check_yaml, read_text
from vsa.places import PLACE, leaves, place_of, refuse_inputs, run_folder_of
from vsa.secrets import masked
from vsa.trust import Key, refuse_other_references, refuse_untyped

TARGETS = {
    "launcher": (
        "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
        "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher",
        "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher",
        "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
        "vsa.sweeps.sweeper.QueueLauncher",
    ),
    "sweeper": (
        "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
        "vsa.sweeps.sweeper.PointSweeper",
        "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper",
    ),
    "sweeper.sampler": tuple(
        f"optuna.samplers.{name}Sampler"
        for name in ("BruteForce", "CmaEs", "GP", "Grid", "MOTPE", "NSGAII", "NSGAIII", "QMC", "Random", "TPE")
    ),
}
"""Classes that may be built, by their key below `hydra`."""

PLUGIN = re.compile(r"'(hydra/(?:sweeper|launcher))/(optuna|submitit_\w+)'")
"""Plugins of the extra `sweep`."""

SUBMITIT_KEYS = re.compile(
    "_target_|submitit_folder|name|comment|timeout_min|time|max_num_timeout|signal_delay_s|nodes|tasks_per_node|"
    "ntasks_per_node|array_parallelism|wait_for_completion|stderr_to_stdout|cpus_per_task|cpus_per_gpu|gpus_per_node|"
    "gpus_per_task|num_gpus|gres|mem|mem_gb|mem_per_cpu|mem_per_gpu|partition|qos|account|constraint|exclude|exclusive|"
    "dependency|mail_type|mail_user|setup|additional_parameters"
)
"""Allowed options of submitit's launchers; `setup` is refused separately, with its reason."""

CODE_OF_SLURM = ("export", "wrap", "prolog", "epilog", "task-prolog", "task-epilog")
"""Parts of sbatch option names that run commands or set variables."""

PACKAGES = re.compile(r"pkg://(hydra\.conf|(vsa|hydra_plugins)([./][\w./]*)?)$")
"""Packages that may contain configs; reading a config imports its package. Hydra imports installed plugins anyway."""

NO_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}
"""Hydra's `none`: a run writes its own log lines."""

SETTING = re.compile(r"(?!hydra\.)\w+(\.\w+)+=")
"""An override of one option within a group."""

PLACES = {"run.dir": ".", "sweep.dir": "${output_dir}/${name}", "sweep.subdir": ".", "output_subdir": None}
PLACES |= {"job.chdir": False}
"""Where Hydra writes and works, as in `configs/train.yaml`; a run creates its folder itself, after all checks."""


def check_hydra(node: DictConfig) -> None:
    """Refuse a `hydra` node that would run code other than Hydra's own.

    Raises:
        ValueError: names the key and the value.
    """
    for path, value in leaves(OmegaConf.to_container(node, resolve=False)):
        if value != PLACES.get(key := ".".join(path), value):
            raise ValueError(f"hydra.{key}={value} is not allowed: set output_dir, name and run instead")
    for path, value in _leaves(node):
        reason = _refusal(path, value, node)
        if reason:
            raise ValueError(f"hydra.{'.'.join(path)}={value} is not allowed: {reason}")


def _refusal(path: tuple[str, ...], value: Any, node: DictConfig) -> str | None:
    top, last = path[0], path[-1]
    text = value if isinstance(value, str) else ""
    place = ".".join(path[:-1])
    if top == "callbacks":
        return "callbacks of Hydra run before a config is checked"
    if last == "_target_" and value not in TARGETS.get(place, ()):
        class_names = ", ".join(name.rpartition(".")[2] for name in TARGETS.get(place, ()))
        return f"expected one of {class_names}" if class_names else "Hydra builds launchers, sweepers and samplers only"
    if top in ("launcher", "sweeper") and value is not None:
        if path[1:2] in (("setup",), ("custom_search_space",)):
            return "a config may not bring commands or functions along: run them before the start"
        if "\n" in text or any("\n" in name for name in path):
            return "a line break would add a command to a batch script"
        if "${" in text:
            return "it cannot be resolved when the config is checked"
        if last == "storage" or PLACE.fullmatch(last):
            folder = text.removeprefix("sqlite:///")
            if "://" not in folder and (not folder.startswith(f"{node.sweep.dir}/") or ".." in folder.split("/")):
                return f"expected a place in the folder of the sweep, {node.sweep.dir}/"
    if top == "launcher" and ".submitit_launcher." in str(node.launcher.get("_target_")):
        return _submitit_refusal(path)
    if top in ("job_logging", "hydra_logging") and (path[1] not in NO_LOGGING or value != NO_LOGGING[path[1]]):
        return f"expected hydra/{top}=none"
    if path[:2] == ("job", "env_set") and last not in node.job.env_copy:
        return "set variables where the command is started"
    return None


def _submitit_refusal(path: tuple[str, ...]) -> str | None:
    if not SUBMITIT_KEYS.fullmatch(path[1]):
        return "expected resources, limits and names of jobs only"
    if path[1] == "additional_parameters" and len(path) > 2:
        option = path[2].lower().replace("_", "-")
        if not re.fullmatch(r"[a-z0-9-]+", option):
            return "it is not the name of an option of sbatch"
        # sbatch also accepts abbreviated option names
        if any(word in option or word.startswith(option) for word in CODE_OF_SLURM):
            return "it would run commands or set variables in the jobs"
    return None


def _leaves(node: DictConfig | ListConfig, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All values below `node` with their keys, resolved as far as already possible."""
    raw: Any = OmegaConf.to_container(node, resolve=False)
    keys: Any = node if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        inner = (*path, str(key))
        try:
            value = node[key]
        except OmegaConfBaseException:
            value = raw[key]
        if isinstance(value, DictConfig | ListConfig):
            yield from _leaves(value, inner)
        else:
            yield inner, value


def _text(word: Override) -> str:
    return str(word.input_line).partition("=")[2]


class CheckedLoader(ConfigLoaderImpl):
    """Hydra's config loader with checks, for a command and for every job of a sweep in any process."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path=config_search_path)
        self.repository = _CheckedRepository(config_search_path=config_search_path)
        # values by typed key
        self._command: dict[str, set[str]] = {}

    def _load_configuration_impl(
        self, config_name: str | None, overrides: list[str], *args: Any, **kwargs: Any
    ) -> DictConfig:
        """Compose a config; a new key needs no `+`, since `check_settings` refuses unknown keys."""
        overrides = [f"++{o}" if SETTING.match(o) else o for o in overrides]
        try:
            return super()._load_configuration_impl(config_name, overrides, *args, **kwargs)
        except ValueError as error:
            groups = [o for o in overrides if (word := o.partition("="))[2] not in choices().get(word[0], word[2])]
            if "Config group override must be" not in str(error) or not groups:
                raise
            # Hydra does not say which one
            raise ValueError(f"{groups[0]}: expected the name of a file of this group, see vsa config") from None
        except ConfigCompositionException as error:
            if plugin := PLUGIN.search(str(error)):
                raise ValueError(f"{plugin[1]}={plugin[2]} needs a package: pip install 'vsa-train[sweep]'") from error
            match = re.match(r"Could not override '(.+)'", str(error))
            added = [f"++{o}" if match and o.partition("=")[0] == match[1] else o for o in overrides]
            if added == overrides or any(o.startswith("++hydra.") for o in added):
                raise
            return self._load_configuration_impl(config_name, added, *args, **kwargs)

    def load_configuration(self, *args: Any, **kwargs: Any) -> DictConfig:
        """Compose a config, in which values that were not typed may come from others (`vsa.trust`)."""
        cfg = super().load_configuration(*args, **kwargs)
        # unresolved, since a typed value may refer to another setting
        words: Any = OmegaConf.to_container(cfg.hydra.overrides, resolve=False)
        typed = OverridesParser.create(config_loader=self).parse_overrides([*words["hydra"], *words["task"]])
        # the first config is that of the command line; runs of a sweep have words of its file too
        for word in typed if not self._command else ():
            values = word.sweep_string_iterator() if word.is_sweep_override() else [_text(word)]
            self._command.setdefault(word.key_or_group, set()).update(values)
        keys = [
            ((*word.key_or_group.split("."), *inner), _text(word) in self._command.get(word.key_or_group, ()))
            for word in typed
            if isinstance(word.value(), dict) or not self.repository.group_exists(word.key_or_group)
            # a typed mapping leaves other keys of a file as they are
            for inner, _ in leaves(word.value())
        ]

        def is_typed(key: Key) -> bool:
            return {is_own for top, is_own in keys if key[: len(top)] == top} == {True}

        # Hydra unescapes words of files, so that a reference may have come of them
        for path, value in leaves(OmegaConf.to_container(cfg, resolve=False)):
            if not (path[0] == "hydra" and path[1] != "sweeper") and not is_typed(path):
                refuse_other_references(value, top=path)
        if (names := cfg.hydra.job.env_copy) and not is_typed(("hydra", "job", "env_copy", "0")):
            raise ValueError(f"hydra.job.env_copy={names} stands in a file, which may not read the environment")
        check_hydra(cfg.hydra)
        run_folder_of(cfg)
        if cfg.get("overwrite"):
            if not is_typed(("overwrite",)):
                raise ValueError("overwrite=true stands in a file, expected it on the command line: it moves a run")
            folders = [str(each.path).partition("file://")[2] for each in self.config_search_path.get_path()]
            refuse_inputs(run_folder_of(cfg), map(Path, filter(None, folders)))
        refuse_untyped([x for x in _leaves(cfg) if x[0][0] != "hydra" or x[0][1] == "sweeper"], is_typed)
        return cfg


def refuse_secrets(cfg: DictConfig) -> None:
    """Refuse a sweep whose settings contain a secret, which would stand in the record of the sweep.

    Raises:
        ValueError: names the setting, not the value.
    """
    for path, value in leaves(OmegaConf.to_container(cfg, resolve=False)):
        if masked({path[-1]: value}) != {path[-1]: value}:
            key = ".".join(path)
            raise ValueError(f"{key} holds a secret, which a sweep would write into its folder: leave it out")


class _CheckedRepository(ConfigRepository):
    def load_config(self, config_path: str) -> ConfigResult | None:
        """Read a file from an untrusted author: plain data in YAML, of limited size."""
        try:
            source = self._find_object_source(config_path=config_path, object_type=ObjectType.CONFIG)
            # Hydra loads the class of this source twice, so isinstance would be False
            if source is not None and source.scheme() == "file":
                path = Path(source.path, source._normalize_file_name(config_path))
                check_yaml(text := read_text(path, limit=YAML_LIMIT), f"config file {path}")
                # as a whole, since its list of defaults may refer to something too
                top = () if "@package _global_" in text else tuple(config_path.split("/")[:-1])
                refuse_other_references(yaml.safe_load(text), f"config file {path}: ", top)
            return super().load_config(config_path)
        except (yaml.YAMLError, UnicodeError) as error:
            raise ValueError(f"config file {config_path} cannot be read: {error}") from error

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        for element in config_search_path.get_path():
            path = element.path or ""
            if "://" in path and not path.startswith(("file://", "structured://")) and not PACKAGES.match(path):
                raise ValueError(f"{path} is not allowed in hydra.searchpath: expected folders, or packages of vsa")
        super().initialize_sources(config_search_path)


def open_hydra(config_path: str, config_dir: str | None = None) -> Hydra:
    """Hydra that checks every config which it composes.

    Args:
        config_path: folder of the main config.
        config_dir: folder of further configs.

    Raises:
        SearchPathException: `config_dir` is no folder.
    """
    search_path = create_config_search_path(config_path)
    if config_dir is not None:
        if not (place := place_of(config_dir, f"--config-dir={config_dir}")).is_dir():
            raise SearchPathException(f"--config-dir={config_dir}: no such folder")
        folder, schema = f"file://{place.absolute()}", SearchPathQuery(provider="schema")
        search_path.prepend(provider="command-line", path=folder, anchor=schema)
    return Hydra(task_name="train", config_loader=CheckedLoader(search_path))


def composed(*overrides: str, with_hydra: bool = False) -> DictConfig:
    """The checked config of a run with `overrides`, as `vsa train` composes it.

    Args:
        *overrides: settings.
        with_hydra: whether Hydra's own node stays.
    """
    cfg = open_hydra(str(config_folder())).compose_config("train", [*overrides], RunMode.RUN, from_shell=False)
    if not with_hydra:
        with open_dict(cfg):
            del cfg["hydra"]
    return cfg
