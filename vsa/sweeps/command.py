"""The command line of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from vsa.sweeps.sweeper import PointSweeper, QueueLauncher
from vsa.training.launch import launch

PLUGINS = {("sweeper", "points"): PointSweeper, ("launcher", "queue"): QueueLauncher}
"""Classes of this project that Hydra builds, by group and name."""


def launch_sweep(arguments: Sequence[str]) -> None:
    """Run the points of `sweep=NAME`, or a search with `hydra/launcher=queue`; see `vsa.training.launch.launch`."""
    has_sweep = any(word.startswith("sweep=") for word in arguments)
    with _plugins():
        launch([*arguments, *(["hydra/sweeper=points"] if has_sweep else [])])


@contextmanager
def _plugins() -> Iterator[None]:
    """Allow Hydra to build classes outside the namespace `hydra_plugins`; `hydra_guard` lists them too."""
    ours = {f"{cls.__module__}.{cls.__name__}": cls for cls in PLUGINS.values()}
    for (group, name), cls in PLUGINS.items():
        Plugins.instance().register(cls)
        node = {"_target_": f"{cls.__module__}.{cls.__name__}"}
        ConfigStore.instance().store(group=f"hydra/{group}", name=name, node=node, provider="vsa-train")
    original = Plugins.is_in_toplevel_plugins_module
    Plugins.is_in_toplevel_plugins_module = staticmethod(lambda clazz: clazz in ours or original(clazz))
    try:
        yield
    finally:
        Plugins.is_in_toplevel_plugins_module = staticmethod(original)
