"""Rows about checkpoints: damage, missing state, changed settings, going back, kills inside saves and full disks."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import vsa.checkpoints.run_checkpoint as run_checkpoint
from tests.disks import small_disk, small_files
from tests.states import rewrite_state, state_of
from tests.tiny_runs import TinyTraining, one_thread, training  # noqa: F401
from tests.training.ranks import Ranks, run_ranks, wait_for
from vsa.checkpoints.retention import prune_checkpoints
from vsa.checkpoints.run_checkpoint import latest_checkpoint, list_checkpoints, read_checkpoint, write_checkpoint
from vsa.errors import DISK_FULL, one_line_errors
from vsa.files import file_digest

RUN = ("~sparsity.sparsity", "sparsity=linear", "sparsity.topk=4", "sparsity.dense_steps=1", "sparsity.total_steps=20")
RUN += ("optim=adamw_cosine", "optim.schedule.total_steps=20", "callbacks.checkpoint.keep=4", "run=source")
MORE = "trainer.max_steps=7"
SCALARS = (True, -1, 1.5, "text", 10**400, float("nan"))
HOSTILE: tuple[Any, ...] = (*SCALARS, None, [], {}, [[]])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TinyTraining:
    """A run with checkpoints at the steps 2, 4 and 6, which tests copy."""
    with pytest.MonkeyPatch.context() as patch:
        runs = TinyTraining(tmp_path_factory.mktemp("source"), patch)
        runs(*RUN, "trainer.max_steps=6")
    return runs


@pytest.fixture
def newest(source: TinyTraining, training: TinyTraining) -> Path:  # noqa: F811
    """The newest checkpoint of a copy of the run, which `training(*RUN)` resumes."""
    shutil.copytree(source.folder("source"), training.folder("source"))
    return list_checkpoints(training.folder("source") / "checkpoints")[-1]


def is_good(checkpoint: Path) -> bool:
    try:
        read_checkpoint(checkpoint)
    except ValueError:
        return False
    return True


def refusal(function: Callable[..., object], *arguments: Any) -> str:
    """The one line with which a function refuses its arguments."""
    with pytest.raises(ValueError) as refused:
        function(*arguments)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# damage


def flipped(checkpoint: Path, names: tuple[str, ...], attempt: int, *, cuts: bool) -> None:
    """One flipped bit, or every third time a cut: it is told, and the checkpoint before is taken."""
    draw = random.Random(attempt)
    file = checkpoint / draw.choice(names)
    good = file.read_bytes()
    place = draw.randrange(len(good))
    bit = bytes([good[place] ^ 1 << draw.randrange(8)])
    file.write_bytes(good[:place] if cuts and attempt % 3 == 2 else good[:place] + bit + good[place + 1 :])
    refused_for_older(checkpoint)
    file.write_bytes(good)
    assert is_good(checkpoint)


def refused_for_older(checkpoint: Path) -> None:
    assert checkpoint.name in refusal(read_checkpoint, checkpoint)
    older = list_checkpoints(checkpoint.parent)[-2]
    assert latest_checkpoint(checkpoint.parent, lambda _: None).path == older


@pytest.mark.soak("checkpoint: bit flips and cuts of tensor files", attempts=300, short=6)
def test_flips_and_cuts_of_tensor_files(source: TinyTraining, attempt: int):
    names = ("model.safetensors", "ema.safetensors", "optimizer.safetensors")
    flipped(source.last("source").path, names, attempt, cuts=True)


@pytest.mark.soak("checkpoint: bit flips of state.json", attempts=300, short=6)
def test_flips_of_the_state(source: TinyTraining, attempt: int):
    flipped(source.last("source").path, ("state.json",), attempt, cuts=False)


def sharded(rows: int, count: int) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors that two ranks hold, with a number of rows that they cannot share equally."""
    mesh, generator = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(0)
    tensors = {f"w{i}": torch.randn(rows, 3, generator=generator) for i in range(count)}
    return {
        group: {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in tensors.items()}
        for group in ("model", "ema")
    }


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The newer of two checkpoints that two ranks wrote."""
    folder = tmp_path_factory.mktemp("ranks")

    def on_rank(rank: int) -> None:
        dist.init_process_group("gloo")
        for step in (1, 2):
            write_checkpoint(folder, sharded(101, 3), {"step": step}, together=True)
            dist.barrier()

    run_ranks(2, on_rank)
    return folder / "step-00000002"


@pytest.mark.soak("checkpoint of two ranks: bit flips and cuts of their files", attempts=300, short=6)
def test_flips_and_cuts_of_the_files_of_ranks(of_two_ranks: Path, attempt: int):
    names = tuple(f"{group}-0000{rank}-of-00002.safetensors" for group in ("model", "ema") for rank in (1, 2))
    flipped(of_two_ranks, names, attempt, cuts=True)


CONTENTS = (b"", b"[]", b"null", b"1" * 5000, b"[" * 200_000, b'{"a":' * 100_000, b"\xff\xfe", b"{}", b'{"schema": []}')


@pytest.mark.soak("checkpoint: other content in state.json", attempts=50, short=9)
def test_other_content_in_the_state(source: TinyTraining, attempt: int):
    checkpoint, draw = source.last("source").path, random.Random(attempt)
    file = checkpoint / "state.json"
    good = file.read_bytes()
    start = draw.randrange(len(good))
    random_bytes = good[:start] + draw.randbytes(draw.randrange(1, 200)) + good[start:]
    file.write_bytes(CONTENTS[attempt] if attempt < len(CONTENTS) else random_bytes)
    refused_for_older(checkpoint)
    file.write_bytes(good)


# values that do not fit, under a digest that does

EDITS: tuple[tuple[str, Callable[[dict[str, Any]], Any]], ...] = (
    ("step 14", lambda state: state.update(step=14)),
    ("step 4", lambda state: state.update(step=4)),
    ("a file fewer", lambda state: state["files"].pop("optimizer.safetensors")),
    ("a file of elsewhere", lambda state: state["files"].update({"../model.safetensors": "0" * 64})),
    ("more skipped in a row than in all", lambda state: state.update(skipped_in_row=3)),
    ("a number of channels", lambda state: state.update(latent_std=state["latent_std"][1:])),
    ("no deviation", lambda state: state.update(latent_std=[0.0] * len(state["latent_std"]))),
    ("another lr", lambda state: state["config"]["optim"].update(lr=1)),
    ("another plan", lambda state: state.update(plan_hash="0" * 64)),
    ("another codec", lambda state: state["codec"].update(hash="0" * 64)),
)


@pytest.mark.soak("checkpoint: edits of state.json under a new digest", attempts=80, short=2)
def test_edits_of_the_state(training: TinyTraining, newest: Path, attempt: int):  # noqa: F811
    """Past the digest, each value is checked by what uses it."""
    state, draw = state_of(newest), random.Random(attempt)
    if attempt < len(EDITS):
        EDITS[attempt][1](state)
    else:
        # a digest of files is made anew by the writer, the backend is a note, and only a run with the level `auto`
        # looks at its own
        notes = ("schema", "files", "activation_checkpointing", "attention_backend")
        key = draw.choice([key for key in state if key not in notes])
        # a list or an object may be empty or missing
        values = SCALARS if isinstance(state[key], list | dict) else HOSTILE
        numbers = (True, 1.5) if key == "flops_total" else ()
        state[key] = draw.choice([value for value in values if value != state[key] and value not in numbers])
    rewrite_state(newest, **state)
    assert refusal(training, *RUN, f"ckpt_path={newest}", MORE)


@pytest.mark.soak("checkpoint: a key is missing", attempts=66, short=2)
def test_a_missing_key(training: TinyTraining, newest: Path, attempt: int):  # noqa: F811
    """All values first, then all moments of four parameters, then any tensor."""
    state = state_of(newest)
    tensors = {group: read_checkpoint(newest).tensors(group) for group in ("model", "ema", "optimizer")}
    values: list[tuple[str, str]] = [(key, "") for key in state if key not in ("schema", "attention_backend")]
    values += [(name, key) for name in ("files", "loss_window") for key in state[name]]
    owners = sorted({key.rpartition("/")[0] for key in tensors["optimizer"]})
    values += [("optimizer", owner) for owner in random.Random(0).sample(owners, 4)]
    others = [(group, key) for group, own in tensors.items() for key in own]
    name, key = values[attempt] if attempt < len(values) else random.Random(attempt).choice(others)
    if name in tensors:
        own = {k: v for k, v in tensors[name].items() if k != key and not k.startswith(f"{key}/")}
        save_file(own, newest / f"{name}.safetensors")
        state["files"][f"{name}.safetensors"] = file_digest(newest / f"{name}.safetensors")
    elif key:
        del state[name][key]
    rewrite_state(newest, **state) if name in tensors or key else rewrite_state(newest, name)
    named = "checkpoint of None" if name == "config" else (key or name).rpartition("/")[2].removesuffix(".safetensors")
    assert named in refusal(training, *RUN, f"ckpt_path={newest}", MORE)


CHANGES = (
    ("optim.schedule.total_steps=40", "optim.schedule.total_steps", "40"),
    ("optim.schedule.warmup_steps=5", "optim.schedule.warmup_steps", "5"),
    ("sparsity.total_steps=10", "sparsity.total_steps", "10"),
    ("sparsity.dense_steps=3", "sparsity.dense_steps", "3"),
    ("sparsity.topk=3", "sparsity.topk", "3"),
    ("optim.lr=0.02", "optim.lr", "0.02"),
    ("optim.betas=[0.8,0.9]", "optim.betas", "[0.8, 0.9]"),
    ("task.grad_clip=2", "task.grad_clip", "2"),
    ("task.latent_scale=shared", "task.latent_scale", "shared"),
    ("task.objective.logit_mean=1", "task.objective.logit_mean", "1"),
    ("callbacks.ema.decay=0.5", "callbacks.ema.decay", "0.5"),
    ("callbacks.ema=null", "callbacks.ema", "null"),
    ("data.caption_dropout=0.5", "data.caption_dropout", "0.5"),
    ("data.batch_size=2", "data.batch_size", "2"),
    ("data.val_fraction=0.2", "data.val_fraction", "0.2"),
    ("model.ffn_dim=36", "model.ffn_dim", "36"),
    ("attention.tile_thw=[2,2,2]", "attention.tile_thw", "[2, 2, 2]"),
    ("seed=1", "seed", "1"),
    *(
        (free, "", "")
        for free in (
            *("trainer.max_steps=8", "trainer.log_every_n_steps=2", "trainer.val_check_interval=3", "logger.csv=null"),
            *("trainer.accumulate_grad_batches=2", "data.num_workers=1", "callbacks.checkpoint.every_n_steps=5"),
            "task.max_skipped=3",
        )
    ),
)


@pytest.mark.soak("resume: a setting is changed", attempts=len(CHANGES), short=2)
def test_a_changed_setting(training: TinyTraining, newest: Path, attempt: int):  # noqa: F811
    """An error names a setting of the run with its value and no byte changes, or it is free."""
    change, key, value = CHANGES[attempt % len(CHANGES)]
    files = {path: path.read_bytes() for path in newest.parents[1].rglob("*") if path.is_file()}
    if not key:
        training(*RUN, "ckpt_path=last", MORE, change)
        return
    message = refusal(training, *RUN, "ckpt_path=last", MORE, change)
    assert f"{key}=" in message
    assert f"the settings have {value}" in message
    assert {path: path.read_bytes() for path in files} == files


@pytest.mark.soak("checkpoint: going back", attempts=20, short=1)
def test_going_back(training: TinyTraining, newest: Path, attempt: int, tmp_path: Path):  # noqa: F811
    """From an older checkpoint and stopped early: `last` follows the resumed run, and no checkpoint is lost."""
    draw, straight, folder = random.Random(attempt), state_of(newest)["files"], newest.parent
    back = draw.choice([2, 4])
    end, start = draw.randrange(back + 1, 6), folder / f"step-{back:08d}"
    begin = shutil.copytree(start, tmp_path / "copy") if draw.random() < 0.3 else start
    later = {path.name for path in list_checkpoints(folder) if path.name > start.name}
    training(*RUN, f"ckpt_path={begin}", f"trainer.max_steps={end}")
    assert latest_checkpoint(folder).step == end
    assert {path.name for path in list_checkpoints(folder / f"abandoned-after-{start.name}")} == later
    assert start.exists()
    training(*RUN, "ckpt_path=last", "trainer.max_steps=6")
    assert latest_checkpoint(folder).state["files"] == straight


@pytest.mark.soak("checkpoint: written in the background", attempts=10, short=1)
def test_written_in_the_background(source, training, monkeypatch, attempt: int):  # noqa: F811
    """However long its files take, it has the bytes of one that training waits for."""
    draw, save = random.Random(attempt), run_checkpoint.save_file

    def slow(path: Path, parts: Any) -> str:
        time.sleep(draw.uniform(0, 0.2))
        return save(path, parts)

    monkeypatch.setattr(run_checkpoint, "save_file", slow)
    training(*RUN, "trainer.max_steps=6", "callbacks.checkpoint.asynchronous=true")
    ours, theirs = (
        [state_of(path)["files"] for path in list_checkpoints(runs.folder("source") / "checkpoints")]
        for runs in (training, source)
    )
    assert ours == theirs


# kills inside a save


def after_kill(place: Path) -> bool:
    """Whether the kill came inside a save; what is complete is good, and the next save removes what is not."""
    litter = [path.name for path in place.iterdir() if path.name.startswith(".")]
    assert len(litter) <= 1
    assert all(map(is_good, list_checkpoints(place)))
    write_checkpoint(place, {"model": {"w": torch.ones(2)}}, {"step": 100_000})
    assert not [path.name for path in place.iterdir() if path.name.startswith(".")]
    return bool(litter)


def in_a_save(place: Path) -> bool:
    """Whether a second or later save has begun."""
    return len(list_checkpoints(place)) >= 1 and any(place.glob(".writing-*"))


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """An empty folder for a number, every second one in memory."""
    memory = Path("/dev/shm") / f"vsa-soak-{os.getpid()}"
    yield lambda number: (memory if number % 2 and os.access("/dev/shm", os.W_OK) else tmp_path) / f"place-{number}"
    shutil.rmtree(memory, ignore_errors=True)


@pytest.mark.soak("checkpoint: kill -9 inside a save", attempts=60, short=2)
def test_a_kill_inside_a_save(places: Callable[[int], Path], attempt: int):
    weights = {"model": {f"w{i}": torch.full((250_000,), float(i)) for i in range(12)}, "ema": {"w": torch.ones(10)}}
    draw, inside = random.Random(attempt), False

    def save_for_ever() -> None:
        for step in range(1, 10_000):
            prune_checkpoints(place, write_checkpoint(place, weights, {"step": step}), 2)

    # a kill between two saves is made again
    while not inside:
        place = places(attempt)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        child = multiprocessing.get_context("fork").Process(target=save_for_ever)
        child.start()
        assert wait_for(partial(in_a_save, place))
        time.sleep(draw.uniform(0, 0.04))
        child.kill()
        child.join()
        inside = after_kill(place)


@pytest.mark.soak("checkpoint of two ranks: kill -9 of one inside a save", attempts=60, short=1)
def test_a_kill_of_one_rank_inside_a_save(tmp_path: Path, attempt: int):
    draw, inside, number = random.Random(attempt), False, 0

    def save_for_ever(rank: int) -> None:
        dist.init_process_group("gloo")
        for step in range(1, 10_000):
            checkpoint = write_checkpoint(place, sharded(83_333, 6), {"step": step}, together=True)
            if rank == 0:
                prune_checkpoints(place, checkpoint, 2)
            dist.barrier()

    while not inside:
        place, number = tmp_path / str(number), number + 1
        place.mkdir()
        with Ranks(2, save_for_ever, tmp_path / "output") as ranks:
            assert wait_for(partial(in_a_save, place)), ranks.output()
            time.sleep(draw.uniform(0, 0.04))
            ranks.send(signal.SIGKILL, draw.randrange(2))
            # the other goes on until a run would end it
            time.sleep(0.3)
        inside = after_kill(place)


# full disks


@pytest.mark.soak("checkpoint: disk full at a random byte", attempts=50, short=5)
def test_a_disk_that_is_full_at_a_byte(tmp_path: Path, attempt: int):
    tensors = {"model": {"w": torch.zeros(20_000)}}
    first = write_checkpoint(tmp_path, tensors, {"step": 1})
    most = random.Random(attempt).randrange(1, 80_000)
    with pytest.raises(SystemExit) as stop, small_files(most), one_line_errors(traceback=False):
        write_checkpoint(tmp_path, tensors, {"step": 2})
    assert stop.value.code == DISK_FULL
    assert os.listdir(tmp_path) == [first.name]
    assert is_good(first)
    assert is_good(write_checkpoint(tmp_path, tensors, {"step": 2}))


@pytest.mark.soak("a run on a disk that is too small, resumed on a larger one", attempts=24, short=1)
def test_a_run_on_a_disk_that_is_too_small(source: TinyTraining, tmp_path: Path, attempt: int):
    """A real file system: the run ends with status 28 and a good checkpoint, or only its logs are missing."""
    kilobytes = random.Random(attempt).randrange(40, 700)

    def on_disk(_: int) -> tuple[int, int, dict[str, Any]]:
        with pytest.MonkeyPatch.context() as patch, small_disk(tmp_path / "disk", 1024 * kilobytes) as enlarge:
            training = TinyTraining(tmp_path / "disk", patch)
            folder, status = training.folder("source") / "checkpoints", 0
            try:
                with one_line_errors(traceback=False):
                    training(*RUN, "trainer.max_steps=6")
            except SystemExit as stop:
                status = stop.code
            there = list_checkpoints(folder)
            assert all(map(is_good, there))
            assert not list(folder.glob(".writing-*"))
            enlarge(64 * 1024**2)
            goes_on = "ckpt_path=last" if there else "overwrite=true"
            training(*RUN, "trainer.max_steps=6", goes_on)
            return status, len(there), state_of(training.last("source").path)

    ((status, saved, state),) = run_ranks(1, on_disk)
    assert status == (0 if saved == 3 else DISK_FULL)
    assert state["files"] == state_of(source.last("source").path)["files"]
