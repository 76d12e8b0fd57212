"""A late import of torchmetrics, of which Lightning needs the names of two classes.

`import lightning` imports torchmetrics, and that imports SciPy, matplotlib and transformers for metrics of audio and
text, which takes three seconds. The command `vsa` calls `install` for its own process; after that, the package loads
`Metric` and `MetricCollection` from their own modules, and everything else when another of its names is read.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from typing import Any

NAME = "torchmetrics"
# these modules need nothing of the package but `_logger`; `utilities` is first, as `metric` and it import each other
MODULES = {"Metric": "metric", "MetricCollection": "collections", "__version__": "__about__"}


def install() -> None:
    """Delay the import of torchmetrics in this process, unless it is imported already."""
    spec = None if NAME in sys.modules else importlib.util.find_spec(NAME)
    if spec is None or spec.loader is None:
        return
    module, loader = importlib.util.module_from_spec(spec), spec.loader

    def load() -> None:
        del module.__getattr__, module.__dir__
        loader.exec_module(module)

    def late(name: str) -> Any:
        if name in MODULES:
            importlib.import_module(f"{NAME}.utilities")
            setattr(module, name, getattr(importlib.import_module(f"{NAME}.{MODULES[name]}"), name))
        elif name.startswith("__") and name != "__all__":
            # the import system and inspection ask for such names, which the package does not define
            raise AttributeError(f"module {NAME!r} has no attribute {name!r}")
        else:
            load()
        return getattr(module, name)

    def listed() -> list[str]:
        load()
        return dir(module)

    vars(module).update(_logger=logging.getLogger(NAME), __getattr__=late, __dir__=listed)
    sys.modules[NAME] = module
