"""Which checkpoints stay: never fewer than two good ones, and a line that was left is neither lost nor the newest."""

import os
import random

import pytest
import torch

from vsa.checkpoints.retention import prune_checkpoints, put_back, set_aside, shared_step
from vsa.checkpoints.run_checkpoint import latest_checkpoint, list_checkpoints, read_checkpoint, write_checkpoint
from vsa.checkpoints.run_folder import RunFolder


def save(folder, step, value=1.0):
    return write_checkpoint(folder, {"model": {"w": torch.full((4,), value)}}, {"step": step})


def names(folder):
    return [path.name for path in list_checkpoints(folder)]


def steps(folder):
    return [int(name.removeprefix("step-")) for name in names(folder)]


def damage(path, draw):
    file = path / draw.choice(["model.safetensors", "state.json"])
    data = bytearray(file.read_bytes())
    place = draw.randrange(len(data))
    data[place] ^= 1 << draw.randrange(8)
    file.write_bytes(data[: draw.choice([place, len(data)])])


def is_good(path):
    try:
        read_checkpoint(path)
    except ValueError:
        return False
    return True


@pytest.mark.soak("checkpoint: retention after random damage", attempts=300, short=20)
def test_two_good_ones_stay_whatever_is_damaged(tmp_path, attempt):
    """A model beside it: which were ever good, and which of them nobody damaged."""
    draw, good = random.Random(attempt), set()
    keep = draw.choice([2, 2, 3, 5])
    for step in range(1, 12):
        prune_checkpoints(tmp_path, save(tmp_path, step), keep)
        before, good = len(good), good | {step}
        remaining = steps(tmp_path)
        assert {s for s in remaining if is_good(tmp_path / f"step-{s:08d}")} == good & set(remaining)
        # no good one goes unless enough newer ones stay
        assert len(good & set(remaining)) >= min(2, before + 1)
        assert set(sorted(good)[-2:]) <= set(remaining)
        good &= set(remaining)
        while good and draw.random() < 0.4:
            # the same bit twice would mend it
            broken = draw.choice(sorted(good))
            damage(tmp_path / f"step-{broken:08d}", draw)
            good -= {broken}


def test_nothing_more_than_asked_for_stays(tmp_path):
    for step in range(1, 8):
        prune_checkpoints(tmp_path, save(tmp_path, step), 3)
    assert steps(tmp_path) == [5, 6, 7]


def test_going_back_moves_the_later_ones_aside_and_keeps_the_branch_point(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, 1.0)
    back = tmp_path / "step-00000010"
    assert shared_step(tmp_path, back) == 10
    aside = set_aside(tmp_path, 10)
    assert aside is not None
    assert aside.name == "abandoned-after-step-00000010"
    assert (steps(tmp_path), steps(aside)) == ([10], [20, 30])
    for step in (15, 20, 25, 30):
        prune_checkpoints(tmp_path, save(tmp_path, step, 2.0), 2)
        assert latest_checkpoint(tmp_path).step == step
    assert steps(tmp_path) == [10, 25, 30]
    assert read_checkpoint(aside / "step-00000030").tensors("model")["w"][0] == 1
    # back again, to the same one and onto the line that was left
    again = set_aside(tmp_path, shared_step(tmp_path, back))
    assert again is not None
    assert again.name == "abandoned-after-step-00000010-2"
    assert shared_step(tmp_path, aside / "step-00000030") == 10
    # once both lines are removed, it is one like others
    for line in (aside, again):
        for path in list_checkpoints(line):
            os.rename(path, tmp_path / f"elsewhere-{line.name}-{path.name}")
    for step in (11, 12):
        prune_checkpoints(tmp_path, save(tmp_path, step), 2)
    assert steps(tmp_path) == [11, 12]


def test_a_copy_belongs_to_the_line_it_was_copied_from(tmp_path):
    folder = tmp_path / "checkpoints"
    for step in (10, 20):
        save(folder, step)
    copy = save(tmp_path / "copies", 10)
    assert shared_step(folder, copy) == 10
    # another training
    assert shared_step(folder, save(tmp_path / "others", 10, 3.0)) == 0
    (folder / "step-00000010").rename(folder / "best")
    assert shared_step(folder, folder / "best") == 0
    assert set_aside(folder, 20) is None


def test_a_start_that_fails_puts_them_back(tmp_path):
    run = tmp_path / "run"
    RunFolder(run).open("a: 1\n", overwrite=False)
    for step in (10, 20, 30):
        save(run / "checkpoints", step)
    before = {str(p): p.read_bytes() for p in run.rglob("*") if p.is_file()}
    aside = run / "checkpoints" / "abandoned-after-step-00000010"

    def fail(*, after_a_step):
        with RunFolder(run) as run_folder:
            assert run_folder.open("a: 2\n", overwrite=False, resume=aside.with_name("step-00000010")) == aside
            assert steps(aside) == [20, 30]
            if after_a_step:
                run_folder.keep()
            raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        fail(after_a_step=False)
    assert {str(p): p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    assert not aside.exists()
    with pytest.raises(ValueError, match="failed"):
        fail(after_a_step=True)
    assert steps(run / "checkpoints") == [10]
    put_back(aside)
    assert steps(run / "checkpoints") == [10, 20, 30]
