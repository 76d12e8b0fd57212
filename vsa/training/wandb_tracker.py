"""Logger for Weights & Biases that neither ends nor delays a run, and that receives no secrets."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only

from vsa.files import typed
from vsa.secrets import without_secrets
from vsa.settings import validated
from vsa.threads import within

# together with 10 seconds in which the client checks its key, the start takes less than 20 seconds
_PROBE_SECONDS, _START_SECONDS = 4.0, 5.0
# time limit for the remaining uploads when a run ends
_END_SECONDS = 15.0


@validated
class WandbTracker(WandbLogger):
    """Logs metrics and pictures to Weights & Biases, or stores them for `wandb sync`.

    If no server answers, the run is kept offline, after 20 seconds at most. If the server fails later, only the end of
    the run is delayed, by 15 seconds. The key comes from WANDB_API_KEY or `wandb login`. The command line, the
    repository and the console output are not collected, and errors are not reported to Weights & Biases.

    Args:
        save_dir: the run folder.
        project: project of the run.
        name: name of the run.
        offline: whether everything is stored in files instead of being uploaded.
        entity: user or team that owns the project.
        group: group of related runs.
        tags: tags of the run.
        notes: notes on the run.
    """

    def __init__(
        self,
        save_dir: str,
        project: str = "vsa-train",
        name: str | None = None,
        offline: bool = True,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        notes: str | None = None,
    ):
        super().__init__(name=name, save_dir=save_dir, project=project, offline=offline)
        self._arguments: dict[str, Any] = {
            "name": name,
            "dir": save_dir,
            "project": project,
            "entity": entity,
            "group": group,
            "tags": [without_secrets(tag) for tag in tags],
            "notes": notes and without_secrets(notes),
        }
        self._ended = False

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The run of the client, started at the first access."""
        if self._experiment is None:
            self._experiment = self._start()
            self._experiment.define_metric("trainer/global_step")
            self._experiment.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        return self._experiment

    def _start(self) -> Any:
        # error reports contain tracebacks, and their threads restart in loader workers, which signals then end
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        # a run of an earlier job in the same process
        if wandb.run is not None:
            wandb.finish()
        mode = os.environ.get("WANDB_MODE", "online")
        if mode == "disabled" or (not self._offline and mode != "online"):
            return self._init(mode)
        if self._offline:
            return self._init("offline")
        url = wandb.setup().settings.base_url
        if not _answers(url):
            reason = f"{without_secrets(url)} does not answer"
        else:
            try:
                return self._init("online")
            except Exception as error:
                reason = without_secrets(str(error).partition("\n")[0]) or type(error).__name__
        rank_zero_info(f"wandb: kept offline: {reason}")
        self._offline = True
        return self._init("offline")

    def _init(self, mode: str) -> Any:
        import wandb

        settings = wandb.Settings(
            init_timeout=_START_SECONDS,
            # an unattended run must not wait for someone to enter a key
            login_timeout=_START_SECONDS,
            finish_timeout=_END_SECONDS,
            finish_timeout_raises=True,
            # no command line, no repository address
            x_disable_meta=True,
            disable_git=True,
            disable_code=True,
            console="off",
            # a moved run would have links out of its folder
            symlink=False,
        )
        return wandb.init(**self._arguments, mode=mode, settings=settings)  # type: ignore[arg-type]

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log metrics; if the client fails, tracking ends with a message and the run continues."""
        if self._ended:
            return
        try:
            super().log_metrics(metrics, step)  # type: ignore[arg-type]
        except Exception as error:
            self._ended = True
            rank_zero_info(f"wandb: tracking ended, training continues: {without_secrets(str(error))}")

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Upload the remaining data, and print how to upload what is missing."""
        if self._experiment is None:
            return
        run, self._experiment, self._ended = self._experiment, None, True
        folder, incomplete = run.settings.sync_dir, run.settings.mode == "offline"
        try:
            run.finish(exit_code=0 if status == "success" else 1)
        except Exception as error:
            rank_zero_info(f"wandb: not everything was uploaded: {without_secrets(str(error))}")
            incomplete = True
        if incomplete:
            rank_zero_info(f"wandb: to upload this run: wandb sync {typed(folder)}")


def _answers(url: str) -> bool:
    """Whether a server answers at all."""
    try:
        # a name lookup has no time limit of its own
        within(_PROBE_SECONDS, lambda: urllib.request.urlopen(url, timeout=_PROBE_SECONDS).close())
    except Exception as error:
        return isinstance(error, urllib.error.HTTPError)
    return True
