"""Rows about commands that read folders of others: whatever stands there, they work or end with one line in time."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from tests.checkpoints.test_merge import Runs
from tests.data.conftest import write_dataset
from tests.evaluation.test_sparge_tuning import BOUNDS, SMALL, written
from tests.forged_samples import forge, forgeries
from tests.reports.fake_runs import write_run, write_sweep
from tests.reports.test_report import Page
from tests.soak.hostile import payloads
from tests.test_damaged_files import contents, others, with_leaves
from tests.tiny_runs import ROOT, TINY_OVERRIDES, TinyTraining, command_line, write_tiny_run  # noqa: F401 (fixtures)
from tests.training.test_replay import Spoil, dumps_of

# a read that waits for ever is a failed attempt
pytestmark = pytest.mark.usefixtures("no_pictures")
SECRET = "what nobody may share, " * 5


def damage(folder: Path, draw: random.Random, proof: Path) -> None:
    """Change one file of a folder: other bytes or values, or something in its place that is no file of the folder."""
    path = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()))
    good = path.read_bytes()
    kinds = ("flips", "cut", "other", "content", "pickle", "link", "leaf" if path.suffix == ".json" else "gone")
    kind = draw.choice(kinds)
    if kind == "flips":
        changed = bytearray(good)
        for place in draw.choices(range(len(good)), k=draw.randint(1, 8)) if good else ():
            changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
    elif kind == "cut":
        path.write_bytes(good[: draw.randrange(len(good) + 1)])
    elif kind == "other":
        next(islice(others(path), draw.randrange(5), None))
    elif kind == "content":
        path.write_bytes(draw.choice([*contents(good)]))
    elif kind == "pickle":
        path.write_bytes(draw.choice([*payloads(proof).values()]))
    elif kind == "leaf":
        path.write_bytes(draw.choice([*with_leaves(good)]))
    else:
        path.unlink()
        if kind == "link":
            secret = proof.with_name("secret")
            secret.write_text(SECRET)
            path.symlink_to(secret)
    if path.is_file() and path.stat().st_size == len(good) and path.read_bytes() == good:
        # the other value is the same one
        damage(folder, draw, proof)


@pytest.fixture
def survives(tmp_path: Path, command_line):  # noqa: F811
    """`survives(command, *words)`: it works, or ends with status 1 and one line; returns the status."""

    def run(*words: str | Path) -> int:
        status, out, err = command_line(*map(str, words))
        assert (status, err.count("error: ")) in ((0, 0), (1, 1)), out + err
        assert "Traceback" not in err
        assert not (tmp_path / "proof").exists()
        return status

    return run


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., Path]:
    """`copy(folder, attempt)`: a copy with a damaged file."""

    def make(folder: Path, attempt: int) -> Path:
        target = shutil.copytree(folder, tmp_path / "copy", symlinks=True)
        damage(target, random.Random(attempt), tmp_path / "proof")
        return target

    return make


@pytest.fixture(scope="module")
def run_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "sweep"
    for seed in (0, 1):
        losses = {("clip", 0.5): 0.25}
        run = write_run(folder / f"run-seed{seed}", seed=seed, prompts=("a red circle",), sample_losses=losses)
        (run / "score.json").write_text('{"clips": 48, "model": {"colour": 1.0}}')
    return write_sweep(folder, *({"name": f"run-seed{seed}"} for seed in (0, 1)))


@pytest.mark.soak("report pages of damaged run folders", attempts=60, short=2)
def test_a_report_of_a_damaged_run_folder(attempt, run_folders, copy, survives):
    folder = copy(run_folders, attempt)
    if survives("report", folder) == 0:
        assert SECRET[:20] not in (folder / "report.html").read_text()


NAMES = (
    *("<b>x</b>", "</script><b>", '"><b onload=x', "'; --", "&lt;", "{{x}}", "${x}", "%s%n", "a\tb", "a\nb", "\x1b[2J"),
    *(
        "\u202etxt",
        "é" * 60,
        "~",
        "-rf",
        "--out=x",
        " ",
        "#?",
        "[]",
        "*",
        "\\",
        "con",
        "💥",
        "\udcff",
        "x" * 200,
        "...",
    ),
)


@pytest.mark.soak("report pages of hostile names", attempts=len(NAMES), short=2)
def test_a_report_of_hostile_names(attempt, tmp_path, survives):
    name = NAMES[attempt % len(NAMES)]
    for seed in (0, 1):
        write_run(tmp_path / "runs" / f"{name}-{seed}", prompts=(name, "a<b>"), seed=seed)
    write_sweep(tmp_path / "runs", {"name": f"{name}-0"}, {"name": name, "status": "refused", "reason": name})
    if survives("report", tmp_path / "runs") == 0:
        page = Page((tmp_path / "runs" / "report.html").read_text())
        assert "b" not in {tag for tag, _ in page.elements}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "set", videos=8, images=2)


FORGERIES = [*forgeries()]


@pytest.mark.soak("check-data on hostile folders", attempts=80, short=2)
def test_hostile_data_are_told(attempt, shards, copy, survives, tmp_path):
    if attempt % 2:
        root = shutil.copytree(shards, tmp_path / "copy")
        forgery = FORGERIES[attempt // 2 % len(FORGERIES)]
        forge(root, "video-003", forgery.kind, forgery.payload)
    else:
        root = copy(shards, attempt)
    assert survives("check-data", root) == 1


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, write_tiny_run) -> Path:  # noqa: F811
    """Runs `base`, `sparse` and `few`, and an export of `sparse` with golden tensors."""
    runs = Runs(tmp_path_factory.mktemp("weights") / "runs", write_tiny_run)
    code = "import sys; from vsa.cli import main; main(sys.argv[1:])"
    words = ["convert", str(runs.folder / "sparse"), str(runs.folder / "export")]
    subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, check=True, capture_output=True, env=environment())
    return runs.folder


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}


@pytest.mark.soak("convert, merge and verify-export of damaged files", attempts=80, short=2)
def test_damaged_weights_are_told(attempt, weights, copy, survives, tmp_path):
    command = ("verify-export", "convert export", "convert run", "merge")[attempt % 4]
    source = {"verify-export": "export", "convert export": "export", "merge": ("base", "few", "sparse")[attempt % 3]}
    folder, out = copy(weights / source.get(command, "sparse"), attempt), tmp_path / "out"
    if command == "verify-export":
        survives("verify-export", folder, "--device", "cpu")
    elif command == "merge":
        places = {name: weights / name for name in ("base", "sparse", "few")} | {source["merge"]: folder}
        status = survives("merge", places["base"], "--sparse", places["sparse"], "--few-step", places["few"], out)
    else:
        status = survives("convert", folder, out, *(["--to", "run"] if "export" in command else ["--no-golden"]))
    # nothing is left behind that looks finished
    assert command == "verify-export" or out.exists() == (status == 0)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of a step whose batch held a NaN."""
    with pytest.MonkeyPatch.context() as patch:
        training = TinyTraining(tmp_path_factory.mktemp("dumps") / "outputs", patch)
        training("trainer.max_steps=3", callbacks=(Spoil("latents", value=math.nan),))
        (path,) = dumps_of(training.folder())
        return path


@pytest.mark.soak("replays of foreign dumps", attempts=60, short=2)
def test_a_foreign_dump_is_replayed_or_refused(attempt, dump, copy, survives):
    survives("replay", copy(dump, attempt), "--accelerator", "cpu")


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("captures") / "q.safetensors", range(1)).parent


@pytest.mark.soak("tune-sparge on damaged files", attempts=40, short=1)
def test_damaged_captures_are_told(attempt, captures, copy, survives, tmp_path):
    folder = copy(captures, attempt)
    status = survives("tune-sparge", "--captures", folder / "q.safetensors", "--out", tmp_path / "out", *SMALL, *BOUNDS)
    assert (tmp_path / "out" / "tuned.json").exists() == (status == 0)


STREAMS = (
    "",
    ">&-",
    "2>&-",
    ">&- 2>&-",
    "<&-",
    "> /dev/full",
    "2> /dev/full",
    "| head -c 1",
    "| true",
    "2>&1 | head -1",
)
COMMANDS = ("report RUN", "check-data SET", "config", "tiles 4 8 8", f"train {' '.join(TINY_OVERRIDES)}")


@pytest.mark.soak("closed, full and unread streams of commands", attempts=len(STREAMS) * len(COMMANDS), short=0)
def test_streams_change_no_file(attempt, shards, run_folders, tmp_path):
    run = shutil.copytree(run_folders / "run-seed0", tmp_path / "run")
    streams, command = STREAMS[attempt % len(STREAMS)], COMMANDS[attempt // len(STREAMS) % len(COMMANDS)]
    words = command.replace("RUN", str(run)).replace("SET", str(shards))
    line = f'"{sys.executable}" -m vsa.cli {words.replace("[", chr(92) + "[")} {streams}; exit ${{PIPESTATUS[0]}}'
    # the first byte alone may be no character
    as_text = {"capture_output": True, "text": True, "errors": "replace"}
    result = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment(), **as_text)
    assert "Traceback" not in result.stdout + result.stderr
    # a command that prints its result says that it was lost, a training continues
    assert result.returncode in (0, 141, 28), result.stderr
    assert not command.startswith("train") or result.returncode == 0, result.stderr
    assert (run / "report.html").exists() == command.startswith("report")
    saved = tmp_path / "outputs" / "pretrain" / "default" / "run.json"
    assert saved.exists() == command.startswith("train")
    assert not saved.exists() or json.loads(saved.read_text())["starts"][-1]["how"] == "finished"
