"""Instantiation of a composed config, only here, after its targets, types and ranges have been checked."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import partial
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vsa.config_files import choices, config_folder
from vsa.errors import is_out_of_memory, too_large
from vsa.models.network import Network
from vsa.places import OWN_FOLDER, leaves, misplaced
from vsa.secrets import masked
from vsa.settings import AtLeastOne, Bound, Count, Positive, Seed, arguments_of, fits, hints_of, plain, refusal, shown
from vsa.trust import SERVER, refuse_other_references

ALLOWED_TARGETS = ("vsa.",)
OF_LIGHTNING = tuple(f"lightning.pytorch.{x}" for x in ("Trainer", "trainer.", "callbacks.", "loggers.", "profilers."))
"""Modules whose public classes a config may name, those of Lightning for the trainer, callbacks and loggers. A class
must also be defined there, so that an alias such as `vsa.training.train.os.system` is not allowed."""

KINDS = {"trainer": "Trainer", "callbacks": "Callback", "logger": "Logger", "data": "LightningDataModule"}
KINDS |= {"task": "LightningModule", "model": "Module", "attention": "AttentionMethod", "sparsity": "SparsitySchedule"}
"""Class by group that an object must be of."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Settings of a run outside of the config groups.

    Args:
        name: name of the experiment; the run folder is OUTPUT_DIR/NAME/RUN.
        run: name of the run.
        output_dir: folder of all runs.
        run_dir: the run folder, if it does not follow from these three names.
        seed: seed of all random numbers.
        tile_thw: tokens of the patchified latent per tile of sparse attention, along time, height, width.
        ckpt_path: checkpoint to resume: `last` (of this run), a checkpoint folder or a run folder.
        init_from: initial weights, with a new optimizer: a checkpoint or run folder, or a folder or hub id of
            pretrained weights.
        overwrite: whether to start over in a run folder that already contains checkpoints; the old folder is renamed.
        dry_run: whether to check everything, print what the run takes on the GPUs that are here, and stop before the
            run folder is touched.
        flop_budget: number of executed training FLOPs (without a teacher's) after which to stop, instead of
            trainer.max_steps.
        sample_token_budget: number of video tokens after which to stop training, instead of trainer.max_steps.
        second_budget: seconds of training, not counting validation, clips and checkpoints, instead of
            trainer.max_steps. The time of a step is measured on one device before the run (with annealed sparsity, that
            of the first and of the last kind of step), and a resumed run keeps its number of steps.
    """

    name: str | int
    run: str | int
    output_dir: str
    run_dir: str
    seed: Seed
    tile_thw: tuple[AtLeastOne, AtLeastOne, AtLeastOne]
    ckpt_path: str | None
    init_from: str | None
    overwrite: bool
    dry_run: bool
    flop_budget: Positive | None
    sample_token_budget: Positive | None
    second_budget: Positive | None


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Settings `resume`: differences from the checkpoint that a resumed run allows.

    Args:
        allow: keys of settings, with all keys below them, that may differ from the checkpoint's; the changes are
            printed and recorded in the checkpoints.
    """

    allow: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Settings of a sweep (`vsa sweep NAME`), the config group `sweep`.

    Args:
        name: name of the folder of its runs, OUTPUT_DIR/EXPERIMENT/NAME; null: the name of its file.
        variants: points by name, each a list of settings.
        axes: lists of values by key; every combination with every variant is a point.
        control: whether to add, for every sparse point, the dense run with the same data, model and steps.
        seeds: training seeds of every point; validation noise always uses the seed of the run. null: that seed.
        lr: learning rates to try for each point before its seeds, which then train at the best one.
        lr_factor: ratio of neighbouring learning rates; `optim.lr` is in the middle.
        lr_seed: seed of the runs that try learning rates; null: the first one above all others.
        lr_settings: settings of the runs that try learning rates, such as a smaller budget.
        devices: number of GPUs, or their indices; null: all.
        jobs_per_device: number of runs that share a GPU.
        cores: number of cores of a run, on a machine without GPUs; OMP_NUM_THREADS of the environment sets another
            number of threads.
        grace_seconds: seconds in which a run has to save after a request to stop.
    """

    name: str | int | None = None
    variants: Mapping[str, Sequence[str]] = field(default_factory=dict)
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    control: bool = True
    seeds: Sequence[Seed] | None = None
    lr: AtLeastOne | None = None
    lr_factor: Annotated[float, Bound(">", 1)] = 2.0
    lr_seed: Seed | None = None
    lr_settings: Sequence[str] = ()
    devices: AtLeastOne | Sequence[Count] | None = None
    jobs_per_device: AtLeastOne = 1
    cores: AtLeastOne = 4
    grace_seconds: Positive = 120.0


OBJECTS = ("task", "model", "attention", "sparsity", "data", "optim", "trainer")
TABLES = ("callbacks", "logger")
"""Config groups of one object, and groups of several objects by name."""

PLAIN = {"resume": Resume, "sweep": Sweep}
"""Config groups of plain values."""

LIMITS: Mapping[str, Mapping[str, Any]] = {
    "lightning.pytorch.trainer.trainer.Trainer": {
        "max_steps": Annotated[int, Bound(">=", -1), Bound("<=", 10**12)],
        "max_epochs": Union[AtLeastOne, Literal[-1], None],  # noqa: UP007
        "min_steps": Union[Count, None],  # noqa: UP007
        "min_epochs": Union[Count, None],  # noqa: UP007
        # a validation before the run folder is opened
        "num_sanity_val_steps": Literal[0],
        "reload_dataloaders_every_n_epochs": Count,
        "num_nodes": AtLeastOne,
        "devices": Union[AtLeastOne, list[int], Literal["auto", -1]],  # noqa: UP007
        "accumulate_grad_batches": AtLeastOne,
        "log_every_n_steps": AtLeastOne,
        # a number of steps: nothing says how many a pass over the data has
        "val_check_interval": Union[AtLeastOne, None],  # noqa: UP007
        "check_val_every_n_epoch": Union[AtLeastOne, None],  # noqa: UP007
        "limit_val_batches": Union[Count, None],  # noqa: UP007
        "overfit_batches": Count,
        # only one precision is supported, which training checks with a reason
        "precision": Any,
    }
}
"""Types and ranges that the annotations of other projects do not state."""

ELSEWHERE = {
    "trainer.gradient_clip_val": "task.grad_clip",
    "trainer.gradient_clip_algorithm": "task.grad_clip",
    # a step of a pass over the data that ended early would have another step's samples
    "trainer.limit_train_batches": "trainer.max_steps",
    "trainer.callbacks": "callbacks",
    "trainer.logger": "logger",
    "trainer.default_root_dir": "run_dir",
}
"""Arguments of classes that a run sets from another key."""


def check_targets(config: Any) -> None:
    """Raise ValueError for a config with a class that it may not name, or that is none for its place.

    Args:
        config: a composed config; or plain settings, which a file holds and which may refer to other settings only.
    """
    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config, resolve=True)
    else:
        refuse_other_references(config)
    for path, target in leaves(config):
        if "_target_" not in path:
            continue
        key, (group, *inner) = ".".join(path), path
        modules = (*ALLOWED_TARGETS, *(OF_LIGHTNING if group in ("trainer", *TABLES) else ()))
        refused = ValueError(f"{key}={target} is not allowed: a config may build classes of vsa and lightning only")
        if not isinstance(target, str) or not target.startswith(modules) or "._" in target:
            raise refused
        try:
            constructor = target_class(target)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{key}={target} does not exist: {error}") from None
        if not isinstance(constructor, type) or not f"{constructor.__module__}.".startswith(modules):
            raise refused
        kind = KINDS.get(group) if len(inner) == (2 if group in TABLES else 1) else None
        if kind is not None and kind not in (base.__name__ for base in constructor.__mro__):
            raise ValueError(f"{key}={target} is not allowed: expected a {kind}")


def stored_data(config: Mapping[str, Any]) -> Any:
    """The data module of a stored run, whose config may come from others.

    Raises:
        ValueError: a class that a config may not name, or a server that VSA_TRUST does not.
    """
    check_targets(config)
    trusted = tuple(f"{server.rstrip('/')}/" for server in os.environ.get("VSA_TRUST", "").split())
    for key, value in leaves(config["data"], ("data",)):
        # one address below a typed folder; its names may have braces
        below = str(value).startswith(trusted) and "/.." not in str(value) and str(value).count("://") == 1
        if SERVER.search(str(value)) and not below:
            raise ValueError(
                f"{'.'.join(key)}={value}: a stored config may not name a server: leave its data out, or set "
                "VSA_TRUST=https://SERVER/FOLDER in front of the command if you trust it"
            )
    return build(config["data"])


def target_class(target: str) -> Any:
    """The class that a `_target_` names."""
    module_name, _, class_name = target.rpartition(".")
    return getattr(importlib.import_module(module_name), class_name)


def check_settings(cfg: DictConfig) -> None:
    """Raise ValueError for values that do not fit the annotations of their constructors, and for unknown settings."""
    check, run = _SettingsCheck(), hints_of(Run)
    check.known |= {f"{key}.{name}" for key, cls in PLAIN.items() for name in hints_of(cls)}
    raw: Any = OmegaConf.to_container(cfg, resolve=False)
    check.known |= {f"start.{name}" for name in raw.get("start", ())}
    for name, value in raw.items():
        if name == "start":
            # problems of its values are reported with the attention settings that use them
            continue
        if name in PLAIN:
            node = OmegaConf.to_container(cfg[name], resolve=True) if isinstance(value, Mapping) else value
            check.plain_node(name, node or {}, hints_of(PLAIN[name]))
            continue
        if name in run:
            check.value(name, cfg[name], value, run[name])
        elif name not in (*OBJECTS, *TABLES):
            check.unknown[name] = value
    for name in (*OBJECTS, *TABLES):
        node: Any = OmegaConf.to_container(cfg[name], resolve=True) if raw.get(name) is not None else None
        if name in OBJECTS:
            check.node(name, node, raw.get(name))
            check.refused |= misplaced(name, node, cfg.run_dir) if name == "trainer" else {}
        else:
            if not isinstance(node, Mapping):
                check.refused[name] = (
                    f"{name}={shown(node)}: expected settings by name, {name}.NAME=null leaves one out"
                )
                continue
            for key, settings in node.items():
                if settings is not None:
                    check.node(f"{name}.{key}", settings, raw[name][key])
                    check.refused |= misplaced(f"{name}.{key}", settings, cfg.run_dir)
    if problems := check.problems():
        raise ValueError("; ".join(problems))


def attention_config(name: str, settings: Sequence[str] = (), *, tile_thw: Sequence[int] = (4, 4, 4)) -> dict[str, Any]:
    """Config node of an attention method, with the gates of weights that start from a dense model (`start=dense`).

    Args:
        name: name of a file in `configs/attention`.
        settings: `key=value` settings of the method, as on a command line, with or without the prefix `attention.`.
        tile_thw: default tokens per tile.
    """
    files = {path.stem: path for path in sorted((config_folder() / "attention").glob("*.yaml"))}
    if name not in files:
        raise ValueError(f"attention={name}: unknown method, expected one of {', '.join(files)}")
    start = OmegaConf.load(config_folder() / "start" / "dense.yaml")
    whole = OmegaConf.create({"tile_thw": [*tile_thw], "start": start, "attention": OmegaConf.load(files[name])})
    for text in settings:
        try:
            override = OverridesParser.create().parse_override(text)
            key = override.get_key_element().removeprefix("attention.")
            OmegaConf.update(whole, f"attention.{key}", override.value(), force_add=True)
        except (HydraException, OmegaConfBaseException):
            raise ValueError(f"{text}: expected a setting of attention={name}, key=value") from None
    node: Any = OmegaConf.to_container(whole.attention, resolve=True)
    check_targets({"attention": node})
    check = _SettingsCheck()
    check.node("attention", node, OmegaConf.to_container(whole.attention, resolve=False))
    if problems := check.problems():
        raise ValueError("; ".join(problems))
    return node


class _SettingsCheck:
    """Collector of the problems of a config by key, and of the known keys."""

    def __init__(self) -> None:
        self.known: set[str] = set(hints_of(Run))
        self.unknown: dict[str, Any] = {}
        self.refused: dict[str, str] = {}

    def node(self, key: str, settings: Any, raw: Any) -> None:
        """Check the settings of one object, given as composed and before interpolation."""
        if not isinstance(settings, Mapping):
            self.refused[key] = f"{key}={shown(settings)}: expected the settings of an object, with _target_"
            return
        if "_target_" not in settings:
            self.unknown |= {f"{key}.{name}": value for name, value in settings.items()}
            return
        constructor = target_class(settings["_target_"])
        place = f"{constructor.__module__}.{constructor.__qualname__}"
        hints = {**hints_of(constructor), **LIMITS.get(place, {})}
        self.known |= {f"{key}.{name}" for name in hints}
        for name, value in settings.items():
            inner = f"{key}.{name}"
            if name in ("_target_", "_partial_", "_convert_", "_recursive_"):
                continue
            if inner in ELSEWHERE:
                self.refused[inner] = f"{inner}={shown(value)}: set {ELSEWHERE[inner]} instead"
            elif name in hints or "**" in hints:
                self.value(inner, value, raw[name], hints.get(name, Any))
            else:
                self.unknown[inner] = value

    def plain_node(self, key: str, settings: Any, hints: Mapping[str, Any]) -> None:
        """Check plain settings, which do not belong to an object."""
        if not isinstance(settings, Mapping):
            expected = ", ".join(f"{key}.{name}" for name in hints)
            self.refused[key] = f"{key}={shown(settings)}: expected settings of their own: {expected}"
            return
        for name, value in settings.items():
            if name in hints:
                self.value(f"{key}.{name}", value, None, hints[name])
            else:
                self.unknown[f"{key}.{name}"] = value

    def value(self, key: str, value: Any, raw: Any, hint: Any) -> None:
        """Check one value, which may itself be the settings of an object."""
        copied = re.fullmatch(r"\$\{([\w.]+)\}", raw) if isinstance(raw, str) else None
        if copied:
            # reported with the key that the user sets
            key = copied[1]
        if isinstance(value, Mapping) and "_target_" in value:
            if not _takes(hint, target_class(value["_target_"])):
                self.refused[key] = refusal(key, value["_target_"], hint)
            elif not copied:
                self.node(key, value, raw)
        # what an unset variable of a shell leaves; a caption and a part of a logger's path may be empty
        elif "" in dict(leaves(value)).values() and not key.endswith(("prompt", "prompts", "version", "prefix")):
            self.refused[key] = f"{key}={shown(value)} is empty: leave it out, or give a value"
        elif plain(hint) is None or not fits(value, plain(hint)):
            self.refused.setdefault(key, refusal(key, value, hint))

    def problems(self) -> list[str]:
        return [*self.refused.values(), *(self._unknown(key, value) for key, value in self.unknown.items())]

    def _unknown(self, key: str, value: Any) -> str:
        group = key.rpartition(".")[2]
        if isinstance(value, Mapping) and group in choices():
            return f"{group}=...: {key} is no setting of this task: leave {group} out, or choose another task"
        return f"{key}={shown(value)}: unknown setting{did_you_mean(key, self.known)}"


def did_you_mean(key: str, known: Iterable[str], most: int = 1) -> str:
    """Advice for an unknown key: the choices that have it, else up to `most` known ones like it, the nearest first."""
    if owners := [*_choices_with(key)]:
        return f"; {key} is a setting of {', '.join(owners[:3])}"

    def likeness(name: str) -> tuple[float, float]:
        last, other = key.rpartition(".")[2], name.rpartition(".")[2]
        whole, alike = (SequenceMatcher(None, *pair).ratio() for pair in ((name, key), (other, last)))
        # settings of one group resemble each other by their group alone
        related = other[:2] == last[:2] or key.startswith(f"{name}.")
        return max(alike if alike > 0.8 else 0, whole if related else 0), whole

    near = [name for name in sorted(sorted(known), key=likeness, reverse=True)[:most] if likeness(name)[0] > 0.7]
    return f", did you mean {' or '.join(near)}?" if near else ""


def _choices_with(key: str) -> Iterator[str]:
    """Choices of a key's group whose objects have a setting of this name."""
    group, _, inner = key.partition(".")
    *above, last = inner.split(".")
    for name in choices().get(group, ()):
        node = OmegaConf.load(config_folder() / group / f"{name}.yaml")
        place = OmegaConf.select(node, ".".join([*above, "_target_"]))
        with suppress(ImportError, AttributeError):
            if place and last in hints_of(target_class(place)):
                yield f"{group}={name}"


def _takes(hint: Any, cls: type) -> bool:
    """Whether an argument accepts an object of `cls`, or a factory of such objects."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _takes(args[0], cls)
    if origin in (Union, UnionType):
        return any(_takes(part, cls) for part in args)
    if hint is Any or origin is Callable:
        return True
    return isinstance(hint, type) and (getattr(hint, "_is_protocol", False) or issubclass(cls, hint))


def resolved(config: DictConfig | Mapping[str, Any]) -> Any:
    """A config as plain values for a record, with the defaults of constructors filled in and secrets masked."""
    plain_config = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else config
    return masked(_with_defaults(plain_config))


def _with_defaults(node: Any) -> Any:
    if isinstance(node, list | tuple):
        return [_with_defaults(value) for value in node]
    if not isinstance(node, Mapping):
        return node
    defaults: dict[str, Any] = {}
    if str(node.get("_target_")).startswith("vsa."):
        arguments = arguments_of(target_class(node["_target_"]))
        values = {name: parameter.default for name, parameter in arguments.items()}
        defaults = {k: v for k, v in values.items() if v is None or isinstance(v, bool | int | float | str | tuple)}
    return {name: _with_defaults(value) for name, value in {**defaults, **node}.items()}


def build(config: DictConfig | Mapping[str, Any], **arguments: Any) -> Any:
    """Instantiate a config node with checked targets; `arguments` are added to its own."""
    if not isinstance(config, Mapping):
        raise ValueError(f"{shown(config)} is no class with its settings")
    try:
        return instantiate(config, _convert_="all", **arguments)
    except InstantiationException as error:
        cause, in_lightning = error.__cause__, type(error.__cause__).__module__.startswith("lightning.")
        # hydra appends the key on a separate line
        key = str(error).rpartition("full_key: ")[2].strip() if "full_key: " in str(error) else ""
        if isinstance(cause, ImportError):
            raise ValueError(f"{key or config['_target_']} needs {_missing_package(cause)}") from error
        if is_out_of_memory(cause):
            reason = too_large(partial(instantiate, config, _convert_="all", **arguments), cause)
        elif isinstance(cause, (ValueError, TypeError, OSError, RuntimeError)) or in_lightning:
            # the lines after the first of a RuntimeError are a C++ stack trace
            reason = str(cause).partition("\n")[0] if isinstance(cause, RuntimeError) else str(cause)
        else:
            raise
        raise ValueError(reason + (f" (config key {key})" if key else "")) from error


EXTRAS = {"tensorboard": "tensorboard", "diffusers": "wan", "transformers": "wan", "peft": "lora", "skimage": "world"}
"""Extras of this project that install a package."""


def _missing_package(error: ImportError) -> str:
    # lightning quotes the package in its message, with different quotes
    quoted = re.search(r"[`']([\w.-]+)", str(error))
    package = error.name or (quoted[1] if quoted else None)
    if package is None:
        return f"a package that is not installed: {error}"
    package = package.partition(".")[0]
    requirement = f"'vsa-train[{EXTRAS[package]}]'" if package in EXTRAS else package
    return f"the package {package}: pip install {requirement}"


def in_run_folder(node: Any, run_dir: str) -> Any:
    """A config node whose objects write to the run folder, the only place that a run writes to."""
    if not isinstance(node, Mapping):
        return node
    arguments = arguments_of(target_class(node["_target_"])) if "_target_" in node else ()
    own = {name: run_dir for name in OWN_FOLDER if name in arguments}
    return {name: in_run_folder(value, run_dir) for name, value in node.items()} | own


def model_factory(config: DictConfig | Mapping[str, Any]) -> Callable[..., Network]:
    """The function that builds the network of a run config, from its `model` and `attention` nodes."""
    attention = build(config["attention"])
    return partial(build, config["model"], attention=attention)


def build_task(cfg: DictConfig, **arguments: Any) -> Any:
    """The training module of a run config, with its network, optimizer and schedule."""
    return build(cfg.task, model=model_factory(cfg), optim=cfg.optim, sparsity=cfg.sparsity, **arguments)
