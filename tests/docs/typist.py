"""Types commands of the pages into this process, one after the other in one folder, with tiny models and few steps.

The words of a command stay as they are; what makes it small stands behind them, where the last one counts.
"""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.data.tiny_wan import save_pipeline
from tests.docs.pages import Command
from vsa.data.toy_videos import ToyClips, write_toy_videos

WAN = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
NEXT = re.compile(r"(?:^ *next:? +|, next: |to train on them: )(vsa .*)$", re.M)

SIZES = (
    "model.num_layers=2",
    "model.num_attention_heads=1",
    "model.attention_head_dim=12",
    "model.ffn_dim=24",
    "model.freq_dim=16",
)
FEW = (
    "data.batch_size=4",
    "data.num_workers=0",
    "data.val_fraction=0.25",
    "optim.schedule.warmup_steps=0",
    "callbacks.progress=null",
    "callbacks.samples.prompts=[a red circle moving left slowly]",
    "callbacks.samples.steps=2",
    "callbacks.samples.every_n_steps=0",
    "trainer.accelerator=cpu",
    "trainer.accumulate_grad_batches=1",
    "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=2",
    "trainer.enable_progress_bar=false",
    "task.parallel.compile=false",
)
OTHERS = {
    "encode": ("--device", "cpu"),
    "latents": ("--device", "cpu", "--size", "64", "64", "--frames", "9", "--steps", "2"),
    "evaluate": ("--device", "cpu", "--steps", "2", "--min-psnr", "0"),
    "sample": ("--steps", "2"),
    "certify": ("--device", "cpu", "--steps", "2", "--timesteps", "500", "--repeats", "1", "--latents", "3", "8", "8"),
    "inspect": ("--layers", "0", "--timesteps", "500"),
    "benchmarks.toy.score": ("--steps", "2", "--clips", "2"),
}


class Typist:
    """Types commands in a folder.

    Args:
        folder: working directory, with clips in `VIDEOS` and a Wan pipeline under its hub id.
        command_line: runs a command, see `tests.tiny_runs`.
        log: what is logged, such as the last lines of a training.
    """

    def __init__(self, folder: Path, command_line: Callable[..., tuple[int, str, str]], log: pytest.LogCaptureFixture):
        self.folder, self.command_line, self._log = folder, command_line, log
        self.typed: list[str] = []
        self._trained: set[str] = set()
        self._steps = 2

    def __call__(self, line: str | Command, *own: str) -> list[str]:
        """Type a command with words `own` behind it; returns the commands that it prints to go on with."""
        words = shlex.split(line) if isinstance(line, str) else list(line.words)
        self.typed.append(shlex.join(words))
        if words[0] == "python":
            importlib.import_module(words[2]).main([*words[3:], *OTHERS[words[2]]])
            return []
        name, *arguments = words[1:]
        self._log.clear()
        status, out, err = self.command_line(name, *arguments, *self._smaller(name, arguments), *own)
        assert status == 0, f"{shlex.join(words)}: {err}"
        return NEXT.findall("\n".join([out, err, *self._log.messages]))

    def _smaller(self, name: str, arguments: Sequence[str]) -> Sequence[str]:
        if name == "tune-sparge" and "--latents" in arguments:
            return ("--device", "cpu", "--latents", "3", "8", "8")
        if name == "compare-attention" and "21" in arguments:
            return ("--synthetic", "4", "8", "8", "--heads", "1", "--head-dim", "16")
        if name == "compare-attention" and "--prompt" in arguments:
            return ("--steps", "2")
        if name == "encode" and "--buckets" in arguments:
            return ("--device", "cpu", "--buckets", "64x64x9", "--text-dtype", "float32")
        if name == "encode" and "512" in arguments:
            return ("--size", "64", "64", "--frames", "16")
        if name == "sample" and "--pipeline" in arguments:
            smaller = ("--size", "64", "64", "--frames", "9")
            if any("window" in word for word in arguments):
                # it has to fit into the grid
                smaller = ("--size", "256", "384", "--frames", "33")
            return (*smaller, *(() if "EXPORT" in arguments else ("--steps", "2")))
        if name == "sample" and "distill" in str(arguments):
            # a generator has its own steps
            return ("--device", "cpu")
        if name != "train":
            return OTHERS.get(name, ())
        # a resume goes on from what was made before
        self._steps += 2 * ("ckpt_path=last" in arguments)
        experiment = next((word for word in arguments if word.startswith("experiment=")), "")
        own = [*FEW, f"trainer.max_steps={self._steps}", "trainer.devices=1"]
        if experiment in ("experiment=quickstart", "experiment=distill_toy"):
            own += ["data.toy.count=12"]
        if experiment == "experiment=quickstart":
            own += ["optim.schedule.total_steps=8"]
        if "_wan_" in experiment:
            has_sizes = {"model=from_checkpoint", "model=diffusers"} & {*arguments}
            own += [] if has_sizes else ["model=from_checkpoint"]
            # tiles of a grid of 3 x 4 x 4, where the command has not its own
            has_tiles = any(word.startswith("tile_thw=") for word in arguments)
            own += [] if has_tiles else ["tile_thw=[2,2,2]", "sparsity=constant", "sparsity.sparsity=0.5"]
            own += ["tile_thw=[1,2,2]"] if "tile_thw=[8,4,4]" in arguments else []
            own += ["sparsity.topk=2", "sparsity.tiles=1"] if "sparsity.topk=16" in arguments else []
        else:
            own += SIZES
        if "120m" in experiment:
            own += ["tile_thw=[1,2,2]", "sparsity.topk=null", "sparsity.sparsity=0.5"]
            # SHARDS are those of Wan on the same page
            own += ["data.root=HAAR_SHARDS"] if (self.folder / "HAAR_SHARDS").exists() else []
        own += ["attention.score_thw=[1,1,1]"] if "attention.score=" in str(arguments) else []
        # those under other names only change a setting, and others of a page are an alternative to the first
        again = experiment in self._trained and "ckpt_path=last" not in arguments
        dry = again or any(word.startswith("run=") and word != "run=dense" for word in arguments)
        self._trained |= set() if dry else {experiment}
        return [*own, *(["dry_run=true"] if dry else [])]


def lay_out(folder: Path, *, clips: int = 8) -> None:
    """What the pages speak of: a folder VIDEOS of captioned clips, and a pipeline under its id."""
    write_toy_videos(ToyClips(count=clips, size=(16, 64, 64)), folder / "VIDEOS")
    save_pipeline(folder / WAN)
