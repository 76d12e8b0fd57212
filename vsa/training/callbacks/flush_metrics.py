"""The metrics of the last step of a run that ends with an error."""

from __future__ import annotations

import lightning as L

from vsa.training.display import never_fatal
from vsa.training.modules.base import DiffusionModule


class FlushMetrics(L.Callback):
    """Writes the metrics that wait for the next step, which an error has prevented."""

    def on_exception(self, trainer: L.Trainer, pl_module: DiffusionModule, exception: BaseException) -> None:
        if trainer.world_size > 1:
            for clipper in pl_module.clippers.values():
                # a dump of the step is collective, and the other ranks may have no error
                clipper.on_drop = None
        with never_fatal("the last line of metrics"):
            pl_module.log_lines.write()
