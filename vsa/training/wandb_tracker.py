"""Weights & Biases beside a run that neither ends nor waits because of it, and that gets no secrets."""

from __future__ import annotations

import os
import shlex
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only

from vsa.secrets import without_secrets
from vsa.settings import checked

# with 10 seconds in which the client checks its key they stay below 20
_PROBE_SECONDS, _START_SECONDS = 4.0, 5.0
# for what is not uploaded yet when a run ends
_END_SECONDS = 15.0


@checked
class WandbTracker(WandbLogger):
    """Sends metrics and pictures to Weights & Biases, or keeps them for `wandb sync`.

    Without a server that answers a run is kept offline, after 20 seconds at most. Of a server that goes away later only
    the end of the run takes notice, for 15 seconds. The key comes from WANDB_API_KEY or `wandb login`. The command
    line, the repository and what is printed are not collected, errors are not reported to its makers.

    Args:
        save_dir: the run folder.
        project: of the run.
        name: of the run.
        offline: keep everything in files; false uploads.
        entity: user or team that the project belongs to.
        group: of runs that belong together.
        tags: of the run.
        notes: of the run.
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
        """The run of the client, which is started when it is first asked for."""
        if self._experiment is None:
            self._experiment = self._start()
            self._experiment.define_metric("trainer/global_step")
            self._experiment.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        return self._experiment

    def _start(self) -> Any:
        # its reports hold tracebacks, and its threads start again in the workers of loaders, which signals then end
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        # of a job before this one in the same process
        if wandb.run is not None:
            wandb.finish()
        mode = os.environ.get("WANDB_MODE", "online")
        if mode == "disabled" or (not self._offline and mode != "online"):
            return self._init(mode)
        if self._offline:
            return self._init("offline")
        url = wandb.setup().settings.base_url
        if not _within(_PROBE_SECONDS, lambda: _answers(url)):
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
            # who is asked for a key may be away
            login_timeout=_START_SECONDS,
            finish_timeout=_END_SECONDS,
            finish_timeout_raises=True,
            # the command line and the address of the repository
            x_disable_meta=True,
            disable_git=True,
            disable_code=True,
            console="off",
        )
        return wandb.init(**self._arguments, mode=mode, settings=settings)  # type: ignore[arg-type]

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log, or end tracking with a line when the client fails: the run goes on."""
        if self._ended:
            return
        try:
            super().log_metrics(metrics, step)  # type: ignore[arg-type]
        except Exception as error:
            self._ended = True
            rank_zero_info(f"wandb: tracking ended, training goes on: {without_secrets(str(error))}")

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Upload what is left, and say how to upload what could not be."""
        if self._experiment is None:
            return
        run, self._experiment, self._ended = self._experiment, None, True
        folder, left = run.settings.sync_dir, run.settings.mode == "offline"
        try:
            run.finish(exit_code=0 if status == "success" else 1)
        except Exception as error:
            rank_zero_info(f"wandb: not all is uploaded: {without_secrets(str(error))}")
            left = True
        if left:
            rank_zero_info(f"wandb: to upload this run: wandb sync {shlex.quote(str(folder))}")


def _within(seconds: float, ask: Callable[[], bool]) -> bool:
    """What `ask` says, or False when it takes longer; a look-up of a name knows no time limit of its own."""
    said: list[bool] = []
    thread = threading.Thread(target=lambda: said.append(ask()), daemon=True)
    thread.start()
    thread.join(seconds)
    return said == [True]


def _answers(url: str) -> bool:
    """Whether a server says anything at all."""
    try:
        urllib.request.urlopen(url, timeout=_PROBE_SECONDS).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True
