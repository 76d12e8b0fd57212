"""Checkpoints that several ranks write: each byte once, whatever the shapes, read by any number of ranks."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.commands import run_command
from tests.states import rewrite_state
from tests.tiny_runs import write_run
from tests.training.ranks import run_ranks
from vsa.checkpoints import run_checkpoint as ck
from vsa.checkpoints.tensor_parts import Part, save_file, share_of
from vsa.checkpoints.weight_files import TensorFiles
from vsa.checkpoints.weight_source import open_weights
from vsa.cli.convert import convert
from vsa.errors import one_line_errors
from vsa.files import DiskFullError
from vsa.models.sharding import whole

# fewer rows than ranks, rows that do not divide, no rows, no dimension, elements of other sizes
SHAPES = {"a": (7, 3), "b": (1, 4), "c": (16,), "d": (2, 2, 2), "e": (0, 3), "f": (), "g": (5, 1)}
MESHES = {"fsdp": lambda world: (1, world), "hsdp": lambda world: (2, world // 2), "ddp": lambda world: (world, 1)}


def values() -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    model = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    # NaN and infinity are bits like others
    model["a"][3, 1], model["c"][5] = torch.nan, torch.inf
    moments = {f"{name}/exp_avg": value.bfloat16() for name, value in model.items()}
    return {"model": model, "optimizer": {**moments, "a/step": torch.tensor(3.0), "count": torch.arange(6)}}


def spread(value: torch.Tensor, kind: str) -> torch.Tensor:
    """The value as a strategy holds it; what it does not shard is whole on every rank."""
    if not value.ndim or not value.numel() or value.dtype == torch.int64:
        return value
    mesh = init_device_mesh("cpu", MESHES[kind](dist.get_world_size()))
    return distribute_tensor(value, mesh, (Replicate(), Shard(0)))


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    assert set(a) == set(b)
    return all(
        a[n].dtype == b[n].dtype
        and a[n].shape == b[n].shape
        and torch.equal(a[n].reshape(-1).view(torch.uint8), b[n].reshape(-1).view(torch.uint8))
        for n in a
    )


def by_ranks(world: int, function) -> list:
    def on_rank(rank: int):
        dist.init_process_group("gloo")
        return function(rank)

    return run_ranks(world, on_rank)


def save(folder: Path, kind: str, step: int = 1) -> None:
    """A collective: write the values as a strategy holds them."""
    groups = {group: {name: spread(t, kind) for name, t in own.items()} for group, own in values().items()}
    ck.write_checkpoint(folder, groups, {"step": step}, together=True)
    dist.barrier()


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """KIND-WORLD/step-1 of every strategy in 2 and 4 ranks, and of one process."""
    folder = tmp_path_factory.mktemp("written")
    for world in (2, 4):
        by_ranks(world, lambda rank: [save(folder / f"{kind}-{dist.get_world_size()}", kind) for kind in MESHES])
    ck.write_checkpoint(folder / "one-1", values(), {"step": 1})
    return folder


@pytest.mark.parametrize("name", ["one-1", *(f"{kind}-{world}" for kind in MESHES for world in (2, 4))])
def test_any_number_of_ranks_writes_the_checkpoint_of_one(written, name):
    world = int(name[-1])
    checkpoint = ck.read_checkpoint(written / name / "step-00000001")
    assert list(checkpoint.groups) == ["model", "optimizer"]
    for group, tensors in values().items():
        assert same_bits(checkpoint.tensors(group), tensors)
        assert len(checkpoint.groups[group]) == world
    # one process writes what it always has, in a schema that older versions read
    state = json.loads((checkpoint.path / "state.json").read_text())
    assert state["schema"] == (4 if world == 1 else 5)
    if world == 1:
        return
    # every byte once, and no rank most of them
    sizes = [bytes_of_tensors(checkpoint.path / file) for file in checkpoint.groups["model"]]
    whole = sum(t.numel() * t.element_size() for t in values()["model"].values())
    assert sum(sizes) == whole
    assert max(sizes) < 0.8 * whole


def bytes_of_tensors(path: Path) -> int:
    """What is in a file beside its header."""
    content = path.read_bytes()
    return len(content) - 8 - int.from_bytes(content[:8], "little")


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_read_what_others_have_written(written, world):
    def on_rank(rank: int) -> dict[str, bool]:
        results = {}
        for path in sorted(written.glob("*/step-*")):
            files = ck.read_checkpoint(path, verify=False).open("model")
            for kind in MESHES if world > 1 else ("fsdp",):
                tensors = {}
                for name, value in values()["model"].items():
                    tensor = spread(torch.zeros_like(value), kind)
                    files.fill(tensor, name)
                    tensors[name] = whole(tensor)
                results[f"{path.parent.name} to {kind}"] = same_bits(tensors, values()["model"])
        return results

    for results in by_ranks(world, on_rank):
        assert len(results) == 7 * (3 if world > 1 else 1)
        assert all(results.values()), results


@given(count=st.integers(0, 40), holders=st.integers(1, 9), first=st.integers(0, 5))
def test_ranks_with_the_same_rows_share_them_out(count, holders, first):
    shares = [share_of(first, count, holder, holders) for holder in range(holders)]
    rows = [row for start, number in shares for row in range(start, start + number)]
    assert rows == list(range(first, first + count))
    assert max(n for _, n in shares) - min(n for _, n in shares) <= 1


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 12),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    window=st.tuples(st.integers(0, 12), st.integers(0, 12)),
)
def test_rows_are_those_of_the_whole_tensor_wherever_files_are_cut(tmp_path_factory, rows, cuts, window):
    folder = tmp_path_factory.mktemp("cut")
    whole = torch.arange(rows * 3).reshape(rows, 3)
    edges = sorted({0, rows, *(min(cut, rows) for cut in cuts)})
    spans = list(itertools.pairwise(edges))
    # the order of the files is not that of the rows
    for number, (start, stop) in enumerate(reversed(spans)):
        part = Part(whole[start:stop], start, (rows, 3), written=True)
        save_file(folder / f"{number}.safetensors", {"w": part})
    files = TensorFiles(folder, [f"{number}.safetensors" for number in range(len(spans))])
    assert torch.equal(files.read("w"), whole)
    assert files.shapes["w"] == (rows, 3)
    start, stop = sorted(min(edge, rows) for edge in window)
    if start < stop:
        assert torch.equal(files.rows("w", start, stop), whole[start:stop])
    if len(spans) > 1:
        # control: without one of them rows are missing
        with pytest.raises(ValueError, match=r"rows \d+ and on of w are missing"):
            TensorFiles(folder, [f"{number}.safetensors" for number in range(1, len(spans))])
        (folder / "again.safetensors").write_bytes((folder / "0.safetensors").read_bytes())
        with pytest.raises(ValueError, match=r"rows \d+ and on of w are in two files"):
            TensorFiles(folder, [*(f"{number}.safetensors" for number in range(len(spans))), "again.safetensors"])


def test_damage_of_any_file_is_noticed_with_its_reason(tmp_path):
    by_ranks(2, lambda rank: [save(tmp_path, "fsdp", step) for step in (1, 2)])
    newest = tmp_path / "step-00000002"
    names = sorted(path.name for path in newest.glob("*.safetensors"))
    assert names == [f"{g}-0000{n}-of-00002.safetensors" for g in ("model", "optimizer") for n in (1, 2)]
    for name in names:
        good = (newest / name).read_bytes()
        changes = {"does not match its digest": good[:-1] + bytes([good[-1] ^ 1]), "cannot be read": good[:-1]}
        for reason, content in changes.items():
            (newest / name).write_bytes(content)
            with pytest.raises(ValueError, match=rf"step-00000002 is damaged: {name} (does not match|cannot be read)"):
                ck.read_checkpoint(newest)
            if reason == "cannot be read":
                with pytest.raises(ValueError, match=f"{name} cannot be read"):
                    ck.read_checkpoint(newest, verify=False)
        (newest / name).unlink()
        messages = []
        assert ck.latest_checkpoint(tmp_path, messages.append, verify=False).step == 1
        assert f"{name} is missing" in messages[0]
        (newest / name).write_bytes(good)
    # a file that the state does not name
    files = json.loads((newest / "state.json").read_text())["files"]
    for missing in names:
        rewrite_state(newest, files={name: digest for name, digest in files.items() if name != missing})
        with pytest.raises(ValueError, match="expected SHA-256 by file name"):
            ck.read_checkpoint(newest)


def test_one_rank_without_room_leaves_nothing_and_is_named(tmp_path, monkeypatch):
    whole = ck.save_file

    def on_rank(rank: int) -> list[str]:
        lines = []
        for step, broken in ((1, 0), (2, 1), (3, None)):

            def full(path, parts, broken=broken):
                if rank == broken:
                    raise OSError(28, "No space left on device")
                return whole(path, parts)

            monkeypatch.setattr(ck, "save_file", full)
            try:
                ck.write_checkpoint(tmp_path, values(), {"step": step}, together=True)
            except DiskFullError as failure:
                lines.append(str(failure))
            dist.barrier()
            lines += os.listdir(tmp_path) if rank == 0 else []
            dist.barrier()
        return lines

    first, second = by_ranks(2, on_rank)
    assert len(first) == 3
    assert first[0].startswith(f"cannot write {tmp_path}/step-00000001: No space left on device (")
    assert first[1].startswith(f"rank 1: cannot write {tmp_path}/step-00000002: No space left on device (")
    assert first[2] == "step-00000003"
    assert [line.partition(": No space")[0] for line in second] == [f"cannot write {tmp_path}/step-00000002"]
    assert ck.read_checkpoint(tmp_path / "step-00000003").step == 3


def test_ranks_that_see_different_folders_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(ck, "SEEN_WITHIN", 0.2)

    def on_rank(rank: int) -> str:
        with pytest.raises(OSError) as error:
            ck.write_checkpoint(tmp_path / str(rank), values(), {"step": 1}, together=True)
        return str(error.value)

    first, second = by_ranks(2, on_rank)
    assert second.startswith(f"rank 1 does not see {tmp_path}/1/.writing-step-00000001, which rank 0 has made")
    assert first.startswith(f"rank 1 could not write its part of the checkpoint: {second}")
    assert os.listdir(tmp_path / "0") == []


def test_a_sharded_run_converts_to_the_files_of_one_process(tmp_path):
    one = ck.resolve_checkpoint(write_run(tmp_path / "one"))
    groups = {group: one.tensors(group) for group in one.groups}
    state = {name: value for name, value in one.state.items() if name not in ("schema", "files")}

    def on_rank(rank: int) -> None:
        ck.write_checkpoint(tmp_path / "two" / "checkpoints", groups, state, together=True)
        dist.barrier()

    by_ranks(2, on_rank)
    ours, theirs = (open_weights(tmp_path / run) for run in ("one", "two"))
    assert same_bits(dict(ours), dict(theirs))
    assert ours.digest != theirs.digest
    for run in ("one", "two"):
        run_command(convert, tmp_path / run, tmp_path / f"{run}-export", "--to", "diffusers")
    names = sorted(path.name for path in (tmp_path / "one-export").rglob("*.safetensors"))
    assert names
    for name in names:
        (a,), (b,) = ((tmp_path / f"{run}-export").rglob(name) for run in ("one", "two"))
        assert a.read_bytes() == b.read_bytes()


def test_a_disk_that_is_full_has_status_28_whichever_rank_found_out(tmp_path, monkeypatch):
    def on_rank(rank: int) -> object:
        def full(path, parts):
            raise OSError(28, "No space left on device")

        if rank == 1:
            monkeypatch.setattr(ck, "save_file", full)
        with pytest.raises(SystemExit) as stop, one_line_errors(traceback=False):
            ck.write_checkpoint(tmp_path, values(), {"step": 1}, together=True)
        return stop.value.code

    assert by_ranks(2, on_rank) == [28, 28]
