"""Rows about checkpoints: damage, missing state, retention, resumes from older ones, kills and full disks."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from scripts.soak.changed_settings import SETTINGS
from scripts.soak.checkpoint_runs import after_kill, damage, fallback_failure, is_good, train, trained
from scripts.soak.rows import Attempts, Row
from scripts.soak.sharded_checkpoints import SHARDED
from tests.disks import small_files
from vsa.checkpoints import run_checkpoint
from vsa.checkpoints.retention import prune_checkpoints
from vsa.checkpoints.run_checkpoint import (
    latest_checkpoint,
    list_checkpoints,
    read_checkpoint,
    write_checkpoint,
)
from vsa.checkpoints.state_file import write_state
from vsa.errors import DISK_FULL, one_line_errors
from vsa.files import file_digest

# damage of state.json

HOSTILE: tuple[Any, ...] = (None, True, -1, 1.5, "text", [], {}, [[]], 10**400, float("nan"))


def edits(folder: Path, tries: int, seed: int) -> Attempts:
    """Replace, remove or swap values in the text of state.json."""
    draw, checkpoint = random.Random(seed), trained(folder)
    file = checkpoint / "state.json"
    good = file.read_text()
    fixed: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
        ("step 14", lambda s: s.update(step=14)),
        ("step 4", lambda s: s.update(step=4)),
        ("no files", lambda s: s.pop("files")),
        ("no step", lambda s: s.pop("step")),
        ("no digest", lambda s: s.pop("digest")),
        ("skipped_in_row", lambda s: s.update(skipped_in_row=3)),
        ("flops_total", lambda s: s.update(flops_total=s["flops_total"] * 2)),
        ("latent_std", lambda s: s.update(latent_std=[2 * x for x in s["latent_std"]])),
        ("a file fewer", lambda s: s["files"].pop("optimizer.safetensors")),
        ("lr", lambda s: s["config"]["optim"].update(lr=1)),
    ]
    for number in range(tries):
        state = json.loads(good)
        if number < len(fixed):
            what, change = fixed[number]
            change(state)
        else:
            key = draw.choice([key for key in state if key not in ("schema", "digest")])
            value = draw.choice([value for value in HOSTILE if value != state[key]])
            what = f"{key}={str(value)[:20]}"
            state[key] = value
        # in the layout of the writer, so that the reader recognises the trailing digest
        file.write_text(json.dumps(state, indent=1))
        yield what, fallback_failure(checkpoint)


def contents(folder: Path, tries: int, seed: int) -> Attempts:
    """Replace state.json by other content: other JSON, very deep nesting, bytes that are not text, a folder."""
    draw, checkpoint = random.Random(seed), trained(folder)
    file = checkpoint / "state.json"
    good = file.read_bytes()
    others = [
        b"",
        b"[]",
        b"null",
        b"1" * 5000,
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b"{}",
        b'{"schema": []}',
    ]
    for number in range(tries):
        if number < len(others):
            file.write_bytes(others[number])
        else:
            start = draw.randrange(len(good))
            file.write_bytes(good[:start] + draw.randbytes(draw.randrange(1, 200)) + good[start:])
        yield f"content {number}", fallback_failure(checkpoint)


# missing state


def deleted_keys(folder: Path, tries: int, seed: int) -> Attempts:
    """Remove one value or tensor from a checkpoint, recompute its digests, and resume the run."""
    checkpoint = trained(folder)
    whole = folder / "whole"
    shutil.copytree(checkpoint, whole)
    state = {k: v for k, v in json.loads((whole / "state.json").read_text()).items() if k not in ("schema", "digest")}
    tensors = {name.removesuffix(".safetensors"): read_checkpoint(whole).tensors(name[:-12]) for name in state["files"]}
    keys: list[tuple[str, ...]] = [(key,) for key in state]
    keys += [(name, key) for name, value in state.items() if name in ("files", "loss_window") for key in value]
    keys += [(f"{group}.safetensors", key) for group, group_tensors in tensors.items() for key in group_tensors]
    # all moments of a parameter, which have several keys
    owners = sorted({key.rpartition("/")[0] for key in tensors["optimizer"]})
    draw = random.Random(seed)
    values = [key for key in keys if not key[0].endswith(".safetensors")]
    whole_parameters = [("moments", owner) for owner in draw.sample(owners, 4)]
    others = draw.sample([key for key in keys if key not in values], 60)
    # all values come first
    cases = (draw.sample([*values, *whole_parameters], len(values) + 4) + others)[:tries]

    for key in cases:
        shutil.rmtree(checkpoint)
        shutil.copytree(whole, checkpoint)
        changed = json.loads(json.dumps(state))
        group = "optimizer" if key[0] == "moments" else key[0].removesuffix(".safetensors")
        if group in tensors and len(key) == 2:
            own = {k: v for k, v in tensors[group].items() if k != key[1] and not k.startswith(f"{key[1]}/")}
            save_file(own, checkpoint / f"{group}.safetensors")
            changed["files"][f"{group}.safetensors"] = file_digest(checkpoint / f"{group}.safetensors")
        elif len(key) == 2:
            del changed[key[0]][key[1]]
        else:
            del changed[key[0]]
        write_state(checkpoint, changed)
        refused = train(folder, "run=source", f"ckpt_path={checkpoint}", "trainer.max_steps=7")
        good = refused and "\n" not in refused
        yield ".".join(key), None if good else refused[:100] or "trained on"
    shutil.rmtree(checkpoint)
    shutil.copytree(whole, checkpoint)
    if control := train(folder, "run=source", f"ckpt_path={checkpoint}", "trainer.max_steps=7"):
        raise RuntimeError(f"the checkpoint itself is refused: {control}")


def going_back(folder: Path, tries: int, seed: int) -> Attempts:
    """Resume from an older checkpoint and stop early: `last` follows the resumed run, and no checkpoint is lost."""
    draw = random.Random(seed)
    newest = trained(folder / "whole")
    whole = newest.parent.parent
    straight = read_checkpoint(newest)
    for number in range(tries):
        place = folder / str(number)
        run = place / "pretrain" / "source"
        shutil.copytree(whole, run)
        back = draw.choice([2, 4])
        end = draw.randrange(back + 1, 6)
        source = run / "checkpoints" / f"step-{back:08d}"
        if draw.random() < 0.3:
            # a checkpoint that was copied to another folder
            source = shutil.copytree(source, place / "copy")
        later = {path.name for path in list_checkpoints(run / "checkpoints") if path.name > f"step-{back:08d}"}
        refused = train(place, "run=source", f"ckpt_path={source}", f"trainer.max_steps={end}")
        last = latest_checkpoint(run / "checkpoints").step
        aside = run / "checkpoints" / f"abandoned-after-step-{back:08d}"
        names = {path.name for path in list_checkpoints(aside)}
        there = (run / "checkpoints" / f"step-{back:08d}").exists()
        refused = refused or train(place, "run=source", "ckpt_path=last", "trainer.max_steps=6")
        final_checkpoint = latest_checkpoint(run / "checkpoints")
        same = final_checkpoint.state["files"] == straight.state["files"]
        shutil.rmtree(place)
        good = last == end and names == later and there and same and not refused
        found = f"last is {last}, aside {sorted(names)}, equal at the end {same} {refused}"
        yield f"back to {back}, end at {end}", None if good else found


# kills and full disks


def _save_for_ever(place: Path) -> None:
    weights = {"model": {f"w{i}": torch.full((250_000,), float(i)) for i in range(12)}, "ema": {"w": torch.ones(10)}}
    for step in range(1, 10_000):
        prune_checkpoints(place, write_checkpoint(place, weights, {"step": step}), 2)


def kills(folder: Path, tries: int, seed: int) -> Attempts:
    """kill -9 of a process that saves 12 MB in a loop, on a disk and in memory, at random moments of a save."""
    draw = random.Random(seed)
    memory = Path("/dev/shm")
    inside = 0
    for number in range(tries):
        in_memory = number % 2 == 1 and os.access(memory, os.W_OK)
        place = (memory / f"vsa-soak-{os.getpid()}" if in_memory else folder) / str(number)
        place.mkdir(parents=True)
        child = multiprocessing.get_context("fork").Process(target=_save_for_ever, args=(place,))
        child.start()
        assert child.pid is not None
        # some time after the start of the second or a later save
        while len(list_checkpoints(place)) < 1 or not list(place.glob(".writing-*")):
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.04))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        in_save, failure = after_kill(place)
        inside += in_save
        yield f"kill {number}", failure
    shutil.rmtree(memory / f"vsa-soak-{os.getpid()}", ignore_errors=True)
    return (f"{inside} of {tries} left the folder of a save",)


def full_disk(folder: Path, tries: int, seed: int) -> Attempts:
    """Full disk at a random byte of a save: no files are left over, the previous checkpoint remains, exit status 28."""
    draw = random.Random(seed)
    tensors = {"model": {"w": torch.zeros(20_000)}}
    write_checkpoint(folder, tensors, {"step": 1})
    before = sorted(os.listdir(folder))
    for number in range(tries):
        most, status = draw.randrange(1, 80_000), None
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere), small_files(most):
            try:
                with one_line_errors(traceback=False):
                    write_checkpoint(folder, tensors, {"step": 2 + number})
            except SystemExit as stop:
                status = stop.code
        there = sorted(os.listdir(folder))
        kept = is_good(folder / "step-00000001")
        checkpoint = write_checkpoint(folder, tensors, {"step": 2 + number})
        again = is_good(checkpoint)
        shutil.rmtree(checkpoint)
        good = status == DISK_FULL and there == before and kept and again
        yield f"byte {most}", None if good else f"{status=} {there=}"


# in the background


def background(folder: Path, tries: int, seed: int) -> Attempts:
    """Slow saves in the background during training write the same bytes as saves that training waits for."""
    draw, whole = random.Random(seed), run_checkpoint.save_file
    expected = [read_checkpoint(path).state["files"] for path in list_checkpoints(trained(folder / "sync").parent)]

    def slow(path: Path, parts: Any) -> str:
        time.sleep(draw.uniform(0, 0.2))
        return whole(path, parts)

    run_checkpoint.save_file = slow
    try:
        for number in range(tries):
            place = folder / str(number)
            refused = train(place, "run=source", "trainer.max_steps=6", "callbacks.checkpoint.asynchronous=true")
            paths = list_checkpoints(place / "pretrain" / "source" / "checkpoints")
            files = [read_checkpoint(path).state["files"] for path in paths]
            good = files == expected and not refused
            yield f"run {number}", None if good else f"{[path.name for path in paths]} {refused}"
    finally:
        run_checkpoint.save_file = whole


ROWS: tuple[Row, ...] = (
    Row(
        name="checkpoint: bit flips and cuts of tensor files",
        tries=300,
        short_tries=6,
        run=damage(("model.safetensors", "ema.safetensors", "optimizer.safetensors"), cuts=True),
    ),
    Row(name="checkpoint: bit flips of state.json", tries=300, short_tries=10, run=damage(("state.json",), cuts=False)),
    Row(name="checkpoint: edits of state.json", tries=50, short_tries=10, run=edits),
    Row(name="checkpoint: other content in state.json", tries=50, short_tries=9, run=contents),
    Row(name="checkpoint: a key is missing", tries=66, short_tries=2, run=deleted_keys),
    Row(name="checkpoint: going back", tries=20, short_tries=1, run=going_back),
    Row(name="checkpoint: kill -9 inside a save", tries=60, short_tries=2, run=kills),
    Row(name="checkpoint: disk full at a random byte", tries=50, short_tries=5, run=full_disk),
    Row(name="checkpoint: written in the background", tries=10, short_tries=1, run=background),
    *SHARDED,
    SETTINGS,
)
