"""A late import of torchmetrics, of which Lightning needs the names of two classes.

`import lightning` imports torchmetrics, and that imports SciPy, matplotlib and transformers for metrics of audio and
text, which takes three seconds. The command `vsa` calls `install` for its own process; after that, the package loads
`Metric` and `MetricCollection` from their own modules, and everything else when another of its names is read.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "torchmetrics"
# these modules need nothing of the package but `_logger`; `utilities` is first, as `metric` and it import each other
MODULES = {"Metric": "metric", "MetricCollection": "collections", "__version__": "__about__"}


def install() -> None:
    """Delay the import of torchmetrics in this process, unless it is imported already."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != NAME:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LateLoader(spec.loader)
        return spec


class _LateLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self.whole = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.whole.create_module(spec)

    def __getattr__(self, name: str) -> Any:
        # readers of the package's source ask the loader for it
        return getattr(self.__dict__["whole"], name) if "whole" in self.__dict__ else super().__getattribute__(name)

    def exec_module(self, module: ModuleType) -> None:
        module._logger = logging.getLogger(NAME)  # type: ignore[attr-defined]
        module.__class__ = _LatePackage


class _LatePackage(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name in MODULES:
            importlib.import_module(f"{NAME}.utilities")
            value = getattr(importlib.import_module(f"{NAME}.{MODULES[name]}"), name)
            setattr(self, name, value)
            return value
        if name.startswith("__") and name != "__all__":
            # the import system and inspection ask for such names, which the package does not define
            raise AttributeError(f"module {NAME!r} has no attribute {name!r}")
        self._load()
        return getattr(self, name)

    def __dir__(self) -> list[str]:
        self._load()
        return dir(self)

    def _load(self) -> None:
        assert self.__spec__ is not None
        assert isinstance(self.__spec__.loader, _LateLoader)
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__spec__.loader.whole.exec_module(self)
